"""Runs a language model on meta tensors and shows each operator to a judge; nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from hpc_parallel.models.attention import Attention, Positions
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.replace_forward import replace_modules
from hpc_parallel.torch_internals import DispatchMode, operator_name, tree_leaves

LENGTH = 23  # of the test sequence; a dim of this size most likely holds its positions
FACTORIES = ("aten::arange", "aten::linspace", "aten::range")
CUTS = ("aten::slice", "aten::narrow", "aten::select")
ATTENTION = "scaled_dot_product"

Judge = Callable[[str, str, Sequence[Any], Any], str | None]
"""(name of the running module, operator, its arguments, its output) -> a clause about the module, or None."""


def first_clause(model: LayeredModel, judge: Judge) -> str | None:
    """Returns a module's name and the judge's first clause about a forward pass of `model` (on meta).

    The model takes tokens [batch, seq]. The operators of `Attention` and `Positions` are not judged. Returns
    None if there is no clause before the model ends or fails (its code may need real numbers).
    """
    tried = deepcopy(model).to("meta")  # a table that a constructor has computed is not on meta yet
    tried.sample_positions = _Counted()
    replace_modules(tried, Attention, lambda _: _Attention(_Counted()))
    watch = _Watch(judge, running_modules(tried))
    try:
        with torch.no_grad(), watch:
            tried(torch.zeros(1, LENGTH, dtype=torch.int64, device="meta"))
    except Exception:  # of any kind: it is the user's code
        return watch.clause
    return watch.clause


def find_local_positions(model: LayeredModel) -> str | None:
    """Returns a clause about the first module of `model` (on meta) that counts or mixes positions, or None.

    Returns None as well if the model can't run on meta tensors.

    Such a module gives wrong results if a device has only a part of a sequence: under `context`, or if the
    model continues a text with cached keys and values. Not every such module is recognised; `proof/verify.py`
    compares results.
    """
    return first_clause(model, _judge_positions)


def _judge_positions(place: str, operator: str, args: Sequence[Any], output: Any) -> str | None:
    shapes = [leaf.shape for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if operator.startswith(FACTORIES) and any(shape == (LENGTH,) for shape in shapes):
        return "counts positions from the length of its input"
    if operator.startswith(CUTS) and isinstance(args[0], Parameter) and any(LENGTH in s for s in shapes):
        return "cuts a table of positions by the length of its input"
    if ATTENTION in operator or any(shape[-2:] == (LENGTH, LENGTH) for shape in shapes):
        return "mixes positions outside CausalAttention (models/attention.py)"
    return None


class _Counted(Positions):
    """Positions whose creation is not judged."""

    def __init__(self) -> None:
        self._indices = torch.empty(LENGTH, dtype=torch.int64, device="meta")

    def __call__(self, length: int, *, device: torch.device) -> Tensor:
        return self._indices


class _Attention(Attention):
    """Attention that is not judged."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **masks: Any) -> Tensor:
        return value.new_empty(*query.shape[:3], value.shape[3])


def running_modules(model: nn.Module) -> list[str]:
    """Returns a list that always holds the names of the running modules, the innermost last."""
    running: list[str] = []

    def enter(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: running.append(name)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(enter(name))
            module.register_forward_hook(leave)
    return running


class _Watch(DispatchMode):
    def __init__(self, judge: Judge, running: Sequence[str]) -> None:
        super().__init__()
        self._judge = judge
        self._running = running
        self.clause: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.clause is None:
            place = self._running[-1] if self._running else "forward"
            clause = self._judge(place, operator_name(func) or "", args, output)
            self.clause = f"{place} {clause}" if clause else None
        return output
