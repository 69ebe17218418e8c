"""The base class of adapters. An adapter cuts a model of any class into parts without changing its file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

from hpc_parallel.models.layered import LayeredModel, with_ties


class Adapter(LayeredModel):
    """A `LayeredModel` made of the modules of another model.

    `library_name` gives the original's names of weights, for `export --library-names` and `weights=`. Weights
    that the original shares between stem and head are tied here too.
    """

    def __init__(
        self, original: nn.Module, *, stem: nn.Module, blocks: Iterable[nn.Module], head: nn.Module
    ) -> None:
        """`stem`, `blocks` and `head` consist of modules of `original`.

        Raises ValueError if a weight or buffer of the state dict of `original` is in no part.
        """
        super().__init__(stem=stem, blocks=blocks, head=head)
        originals: dict[int, list[str]] = defaultdict(list)
        for name, tensor in _tensors(original).items():
            originals[id(tensor)].append(name)
        parts = _tensors(self)
        covered = {id(tensor) for tensor in parts.values()}
        kept = original.state_dict().keys()
        if lost := [n[0] for tensor, n in originals.items() if tensor not in covered and n[0] in kept]:
            raise ValueError(
                f"{type(self).__name__} has {', '.join(lost[:3])} in no part: stem, blocks or head"
            )
        with_ties(self)
        self.original_names = {
            name: originals[id(tensor)][-1 if name in self.tied else 0] if id(tensor) in originals else name
            for name, tensor in parts.items()
        }

    def library_name(self, name: str) -> str:
        """The name of the parameter or buffer `name` in the original's state dict."""
        return self.original_names[name]


def _tensors(module: nn.Module) -> dict[str, object]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
