"""What each device of a run holds, by kind, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_parallel.config.holdings import holdings
from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.model_weights import sample_shape_of, weights_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.setup import Setup, model_facts
from hpc_parallel.planning.state_bytes import Division, States

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


@dataclass(frozen=True)
class Held:
    """Bytes on one device, by kind. rank: of the process; device: its number in the world, from 0."""

    device: int
    role: str  # `server`, `worker` and the like; empty if all devices do the same
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class MemoryPlan:
    """What all devices hold, by device. unknown: what the figures leave out, one clause each."""

    devices: list[Held]
    unknown: list[str]

    @property
    def fullest(self) -> Held:
        """The device that needs most; of several, the first."""
        return max(self.devices, key=lambda held: held.total)


def plan(config: RunConfig) -> MemoryPlan | None:
    """The memory of a run, whose layout must be valid; None for a model or data whose shapes are unknown.

    Raises ConfigError if the pipeline has more stages than the model has blocks.
    """
    shape = sample_shape_of(config.model, config.data)
    model = None if shape is None else weights_of(config.model, sample_shape=shape)
    if model is None:
        return None
    layout = layout_of(config.strategy, devices=config.devices)
    gpus = config.device != "cpu"
    setup = Setup(config.strategy, layout, model=model_facts(config.model), gpus=gpus)
    states = States(Division(config, layout, model))
    rows = []
    for holding in holdings(setup):
        state = states.of(holding)
        kinds = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        rows.append(Held(holding.devices[0], holding.role, kinds))
    unknown = [f"the state of {target} counts as 0, because it is not known" for target in states.unknown]
    return MemoryPlan(rows, unknown)
