"""Context parallelism: every sequence is split over devices, which communicate in attention only (`ring.py`).

All other layers treat each position separately. Every device has all weights, or fully_shard slices them over
this axis as over `shard`. Each device computes gradients of its own positions; all have equally many loss
terms, so gradients are averaged over devices as over replicas.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.ring import Exchange, Gather, Ring, SequenceAttention, slices_of

EXCHANGES: dict[str, Exchange] = {"ring": Ring(), "gather": Gather()}  # by strategy.context_attention


def apply(model: LayeredModel, *, axis: DeviceMesh, options: StrategyConfig) -> LayeredModel:
    """Let every attention of `model` (or a stage of it) see the whole sequence, which `axis` splits."""
    for name, module in list(model.named_modules()):
        if isinstance(module, CausalAttention):
            model.set_submodule(
                name, SplitAttention(axis=axis, exchange=EXCHANGES[options.context_attention])
            )
    return model


def require(model: LayeredModel, *, axis: DeviceMesh, sample_shape: tuple[int, ...]) -> None:
    """Raises ConfigError if the whole `model` or samples of this shape can't be split over `axis`."""
    degree = axis.size()
    kinds = {type(module) for module in model.modules() if isinstance(module, CausalAttention)}
    others = sorted(kind.__name__ for kind in kinds - {CausalAttention})
    rule = ""
    if not kinds:
        rule = f"can't be used: {type(model).__name__} has no CausalAttention, which splits the sequence"
    elif others:
        rule = f"can't be used: CausalAttention can be split, but not its subclass {', '.join(others)}"
    elif any(getattr(module, "whole_sequences", False) for module in model.modules()):
        rule = f"can't be used: {type(model).__name__} has modules that need whole sequences"
    elif not sample_shape or sample_shape[0] % (2 * degree):
        rule = f"does not split samples of shape {list(sample_shape)} into two slices a device"
    if rule:
        raise ConfigError([Problem("strategy.context", degree, rule, (1,))])


class SplitAttention(CausalAttention):
    """Attention over the whole sequence; this device has two slices of it."""

    def __init__(self, *, axis: DeviceMesh, exchange: Exchange) -> None:
        super().__init__()
        self._axis = axis
        self._exchange = exchange

    def positions(self, length: int, *, device: torch.device) -> Tensor:
        degree = self._axis.size()
        slices = slices_of(self._axis.get_local_rank(), degree=degree, length=length * degree)
        return torch.cat([torch.arange(part.start, part.stop, device=device) for part in slices])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with torch.autocast(query.device.type, enabled=False):  # sums stay in float32
            group = self._axis.get_group()
            return SequenceAttention.apply(query, key, value, group, self._exchange)  # type: ignore[no-any-return]
