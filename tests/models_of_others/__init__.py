"""Models as their authors write them, unaware of this package, and the adapters that let it cut them.

Written from the public descriptions: GPT-2 in the structure of nanoGPT, a residual network with the names of
torchvision, SimpleViT and a mixture of experts like Mixtral.
"""
