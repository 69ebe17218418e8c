"""`make gpu`: what only a machine with an NVIDIA GPU shows, in one command (see __main__.py)."""
