"""Two forms of the same training, in turns on one core: the time of the plain form by that of the other one.

    python tests/benchmarks/alternatives.py [images] [products]

`images`: convolutions in channels_last order. `products`: query, key and value as one product, and gate and
up as one, from separate weights that are joined in each pass, and from one weight. A ratio above 1: the other
form is faster than the plain one. Median of pairs of CPU time, and the middle half of the pairs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.models.convnet import ConvNet, Segmenter
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.models.transformer import Attention, Block, FeedForward, rotate
from hpc_parallel.models.unet import UNet
from hpc_parallel.strategies import channels_last
from tests.benchmarks.step_counts import StepCounts

SECONDS = 8.0  # for each pair of forms
IMAGES: Mapping[str, tuple[Callable[[], LayeredModel], tuple[int, ...]]] = {
    "convnet, 64 of 8 x 8": (lambda: ConvNet(channels=[64, 128, 256], classes=10), (64, 1, 8, 8)),
    "convnet, 16 of 64 x 64": (lambda: ConvNet(channels=[64, 128, 256], classes=10), (16, 1, 64, 64)),
    "segmenter, 4 of 128 x 128": (lambda: Segmenter(channels=[32, 64], classes=2), (4, 1, 128, 128)),
    "unet, 4 of 64 x 64": (lambda: UNet(channels=[16, 32, 64], classes=2), (4, 1, 64, 64)),
}
BLOCKS = {  # name: dim, heads, key-value heads, ffn_dim, samples, tokens
    "128 wide": (128, 4, 2, 344, 16, 128, torch.float32),
    "512 wide": (512, 8, 8, 1376, 4, 256, torch.float32),
    "2,048 wide": (2048, 32, 8, 5632, 1, 512, torch.bfloat16),
}


def compare(plain: Callable[[], object], other: Callable[[], object]) -> str:
    for form in (plain, other):
        form()
    ratios: list[float] = []
    end = time.monotonic() + SECONDS
    while time.monotonic() < end or len(ratios) < 4:
        took = []
        for form in (plain, other, other, plain):
            start = time.process_time()
            form()
            took.append(time.process_time() - start)
        ratios.append((took[0] + took[3]) / (took[1] + took[2]))
    quarter, median, three_quarters = statistics.quantiles(ratios, n=4)
    return f"{median:.3f} ({quarter:.3f} to {three_quarters:.3f}, {len(ratios)} pairs)"


def images() -> None:
    for name, (build, shape) in IMAGES.items():
        plain = build()
        with patch.object(channels_last, "gains", lambda *_: True):
            other = channels_last.apply(deepcopy(plain), precision="float32", device_type="cpu")
        pixels = torch.randint(256, shape, dtype=torch.uint8)
        for dtype in (torch.float32, torch.bfloat16):

            def train(model: LayeredModel, dtype: torch.dtype = dtype, pixels: Tensor = pixels) -> None:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                    output = model(pixels)
                output.float().square().sum().backward()

            times = compare(lambda: train(plain), lambda: train(other))  # noqa: B023
            print(f"{name}, {str(dtype).removeprefix('torch.')}: {times}", flush=True)


class JoinedAttention(Attention):
    """One product for query, key and value, from the weights `joined`."""

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        product = F.linear(x, joined(self, layers))
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in product.split([layer.out_features for layer in layers], -1)
        )
        cos_sin = self._rotation(x)
        mixed = self.mix(rotate(query, cos_sin), rotate(key, cos_sin), value)
        return self.output(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class JoinedFeedForward(FeedForward):
    """One product for gate and up."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, joined(self, (self.gate, self.up))).chunk(2, -1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


def joined(module: nn.Module, layers: Sequence[nn.Linear]) -> Tensor:
    """The one weight of `module`, or those of its layers one after another."""
    weight = getattr(module, "one_weight", None)
    return torch.cat([layer.weight for layer in layers]) if weight is None else weight


def products() -> None:
    for name, (dim, heads, kv_heads, ffn_dim, samples, tokens, dtype) in BLOCKS.items():
        attention = Attention(dim, heads=heads, kv_heads=kv_heads, rope_theta=1e4)
        norms = nn.RMSNorm(dim), nn.RMSNorm(dim)
        plain = Block(attention=attention, feed_forward=FeedForward(dim, hidden=ffn_dim), norms=norms)
        plain.to(dtype)
        from_three = deepcopy(plain)
        from_three.attention.__class__, from_three.feed_forward.__class__ = JoinedAttention, JoinedFeedForward
        from_one = deepcopy(from_three)
        for module, names in ((from_one.attention, "query key value"), (from_one.feed_forward, "gate up")):
            layers = [module.get_submodule(layer) for layer in names.split()]
            module.one_weight = nn.Parameter(joined(module, layers).detach())  # type: ignore[arg-type]
        x = torch.randn(samples, tokens, dim, dtype=dtype, requires_grad=True)

        def train(block: Block, x: Tensor = x) -> None:
            for weight in block.parameters():
                weight.grad = None
            block(x).sum().backward()

        for form, block in (("joined in each pass", from_three), ("one weight", from_one)):
            times = compare(lambda: train(plain), lambda: train(block))  # noqa: B023
            with StepCounts() as before:
                train(plain)
            with StepCounts() as after:
                train(block)
            print(f"{name}, {form}: {times}; {before.kernels} kernels, {after.kernels}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or ("images", "products"):
        {"images": images, "products": products}[part]()
