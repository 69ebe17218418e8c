"""What can be trained on given devices in given hours, as `plan --hours 24 --devices 256` prints it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.commands.plan_best import best
from hpc_parallel.commands.plan_figures import HOUR_S, Training, costs, notes
from hpc_parallel.commands.run_rows import duration
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.ranking import mfu, tokens_per_s
from hpc_parallel.planning.search import Candidate
from hpc_parallel.problems import ConfigError

MODELS = ("124m", "1b", "8b", "70b")  # of conf/model, the smallest first
TYPICAL = {"data.sequence_length": 4096, "training.global_batch_size": 1024}  # 4 million tokens a step


@dataclass(frozen=True)
class Budget:
    """`devices` for `hours`, and the tokens that the training shall see."""

    hours: float
    devices: int
    tokens: float


def budgeted(
    overrides: Sequence[str], budget: Budget, *, hardware: Hardware, user_folder: Path | None
) -> Iterator[str]:
    """The best layout of each model and what it reaches. Raises ConfigError with all problems."""
    nodes, per_node = nodes_of(budget.devices, hardware)
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    typical = [f"{key}={value}" for key, value in TYPICAL.items() if key not in keys]
    layout = [f"nodes={nodes}", f"gpus_per_node={per_node}"]
    if taken := sorted(keys & {"nodes", "gpus_per_node", "strategy"}):
        raise ConfigError([f"{', '.join(taken)}: --devices and the search decide this. Leave it out."])
    models = [None] if "model" in keys else list(MODELS)
    rows: dict[str, Candidate | None] = {}
    for model in models:
        named = [] if model is None else [f"model={model}"]
        name = model or [word for word in overrides if word.startswith("model=")][-1].partition("=")[2]
        try:
            ranking = best([*overrides, *named, *typical, *layout], user_folder=user_folder, rows=1)
        except ConfigError as error:
            if not any("no layout fits" in str(problem) for problem in error.problems):
                raise
            rows[name] = None
        else:
            rows[name] = ranking.candidates[0]
    yield f"{nodes} node{'s' * (nodes > 1)} x {per_node} x {hardware.device.name} for {budget.hours:g} h" + (
        f"; not given, so {' '.join(typical)}" if typical else ""
    )
    yield from table(rows, budget, hardware)
    if fitting := [candidate for candidate in rows.values() if candidate is not None]:
        yield _spent(budget, fitting[0].config, hardware)
        yield from notes(fitting[0].config, hardware)


def _spent(budget: Budget, config: RunConfig, hardware: Hardware) -> str:
    training = Training(budget.tokens, budget.hours * HOUR_S, budget.devices)
    costing = [f"{one.label} {one.text}" for one in costs(training, config=config, hardware=hardware)]
    return f"Spent: {'; '.join([f'{training.device_hours:,.0f} device-hours', *costing])}."


def nodes_of(devices: int, hardware: Hardware) -> tuple[int, int]:
    """The number of nodes, and of devices on each node. Raises ConfigError if the nodes would not be full."""
    whole = hardware.node.devices
    if devices <= whole:
        return 1, devices
    if devices % whole:
        near = f"--devices {devices // whole * whole} or --devices {-(-devices // whole) * whole}"
        raise ConfigError([f"--devices {devices} does not fill nodes of {whole}. Try {near}."])
    return devices // whole, whole


def table(rows: dict[str, Candidate | None], budget: Budget, hardware: Hardware) -> Iterator[str]:
    """A row for each model, then the largest that sees all tokens in time."""
    asked = f"to {budget.tokens:.3g} tokens"
    reached = f"tokens in {budget.hours:g} h"
    yield f"{'model':>6}  {'tokens/s':>11}  {'MFU':>6}  {reached:>15}  {asked:>18}  layout"
    in_time, most = [], (0.0, "")
    for model, candidate in rows.items():
        if candidate is None:
            yield f"{model:>6}  no layout fits in memory"
            continue
        rate = tokens_per_s(candidate.work, candidate.step)
        seen, needed_s = rate * budget.hours * HOUR_S, budget.tokens / rate
        share = mfu(candidate.work, candidate.step, hardware)
        yield (
            f"{model:>6}  {rate:>11,.0f}  {100 * share:>5.1f}%  {seen:>15.3g}  {duration(needed_s):>18}  "
            f"{' '.join(candidate.overrides)}"
        )
        in_time += [model] * (seen >= budget.tokens)
        most = max(most, (seen, model))
    yield verdict(in_time, most, budget)


def verdict(in_time: Sequence[str], most: tuple[float, str], budget: Budget) -> str:
    """in_time: models that see all tokens, the largest last. most: the most tokens, and their model."""
    what = f"{budget.tokens:.3g} tokens in {budget.hours:g} h"
    if in_time:
        return f"The largest of these that sees {what}: {in_time[-1]}."
    seen, model = most
    if not model:
        return f"None of these fits on {budget.devices} devices."
    factor = math.ceil(budget.tokens / seen)
    return f"None of these sees {what}: {model} sees {seen:.3g}. It needs about {factor} times the time."
