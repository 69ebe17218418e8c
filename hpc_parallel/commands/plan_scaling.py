"""Plans of several layouts or sizes: `--best` ranks layouts, `nodes=1,2,4` shows how a run scales."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from hpc_parallel.commands.plan_run import command_line, planned_run
from hpc_parallel.config.compose import compose_run
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.planning import memory, ranking
from hpc_parallel.planning.auto_strategy import AUTO, ask
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.ranking import Size
from hpc_parallel.planning.search import search
from hpc_parallel.planning.work import assumptions
from hpc_parallel.problems import ConfigError, raise_if_any
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.recorded_start import key_of

NODES = "nodes="
ROWS = 5  # of the best layouts
LEFT_OUT = "Not looked at: tile, expert, strategy.schedule=naive, selective recomputation."
PAYS = 0.5  # least gain from each added device, as a share of a device's tokens/s in the first row


def sizes_of(overrides: Sequence[str]) -> list[str]:
    """The values of the last `nodes=` if it has several; otherwise empty."""
    values = [word.removeprefix(NODES) for word in overrides if word.startswith(NODES)]
    return values[-1].split(",") if values and "," in values[-1] else []


def of_first_size(overrides: Sequence[str]) -> list[str]:
    """The overrides, with only the first value of `nodes=` if it has several."""
    return with_nodes(overrides, sizes[0]) if (sizes := sizes_of(overrides)) else list(overrides)


def with_nodes(overrides: Sequence[str], nodes: str) -> list[str]:
    return [*(word for word in overrides if not word.startswith(NODES)), f"{NODES}{nodes}"]


def scaled(overrides: Sequence[str], *, hardware: Hardware, user_folder: Path | None) -> Iterator[str]:
    """Plan each size and describe them. Raises ConfigError with the problems of all sizes.

    If their default batches differ, all take the smallest common multiple, so that they can be compared.
    """
    sizes: list[Size] = []
    problems: dict[str, None] = {}
    for nodes in sizes_of(overrides):
        try:
            sizes.append(
                planned_size(with_nodes(overrides, nodes), hardware=hardware, user_folder=user_folder)
            )
        except ConfigError as error:
            problems |= dict.fromkeys(f"{NODES}{nodes}: {problem}" for problem in error.problems)
    raise_if_any(problems)
    if len(batches := {each.samples for each in sizes}) > 1:
        overrides = [*overrides, f"training.global_batch_size={math.lcm(*batches)}"]
        yield from scaled(overrides, hardware=hardware, user_folder=user_folder)
        return
    config = planned_run(of_first_size(overrides), hardware=hardware, user_folder=user_folder).config
    batch = config.training.global_batch_size
    yield f"{hardware.device.name}, {config.training.precision}, {batch} samples a step"
    yield from table(sorted(sizes, key=lambda each: each.devices), room=hardware.device.memory_bytes)
    yield from assumptions(config, hardware)


def planned_size(overrides: Sequence[str], *, hardware: Hardware, user_folder: Path | None) -> Size:
    """The plan for these overrides. Raises ConfigError with all problems."""
    plan = planned_run(overrides, hardware=hardware, user_folder=user_folder)
    config, work, step = plan.config, plan.work, plan.step
    held = memory.plan_fullest(config)
    return Size(
        nodes=config.nodes,
        devices=work.devices,
        layout=layout_of(config.strategy, devices=config.devices),
        samples=work.samples,
        step_s=step.total_s,
        tokens_per_s=work.samples * work.decoder.sequence / step.total_s,
        mfu=ranking.mfu(work, step, hardware),
        memory_bytes=None if held is None or held.unknown else held.fullest.total,
    )


def table(sizes: Sequence[Size], *, room: float) -> Iterator[str]:
    """A row for each size, then a line that says up to which size more nodes pay."""
    width = max(len(str(row.layout)) for row in sizes)
    head = f"{'step':>9}  {'tokens/s':>11}  {'MFU':>6}  {'efficiency':>10}  memory"
    yield f"{'nodes':>5}  {'layout':{width}}  {head}"
    first = sizes[0]
    for row in sizes:
        text = "not known" if row.memory_bytes is None else size(row.memory_bytes)
        if row.memory_bytes is not None and row.memory_bytes > room:
            text += ": may not fit"
        yield (
            f"{row.nodes:>5}  {row.layout!s:{width}}  {row.step_s:>8.4g}s  {row.tokens_per_s:>11,.0f}  "
            f"{100 * row.mfu:>5.1f}%  {100 * row.efficiency(first):>9.0f}%  {text}"
        )
    yield f"efficiency: tokens/s per device, relative to {first.nodes} node{'s' * (first.nodes > 1)}."
    yield verdict(sizes)


def verdict(sizes: Sequence[Size]) -> str:
    """Name the first size at which an added device gains less than PAYS, or say that all sizes pay."""
    first = sizes[0]
    per_device = first.tokens_per_s / first.devices
    of_first = f"of a device's tokens/s on {first.nodes} node{'s' * (first.nodes > 1)}"
    for before, after in pairwise(sizes):
        brings = (after.tokens_per_s - before.tokens_per_s) / (after.devices - before.devices) / per_device
        if brings < PAYS:
            step = f"From {before.nodes} to {after.nodes} nodes"
            share = f"each added device brings {100 * brings:.0f} % {of_first}"
            too_many = "more than 1 node does" if before.nodes == 1 else f"more than {before.nodes} nodes do"
            return f"{step} {share}: {too_many} not pay for one training with this batch."
    return f"Each added device brings at least {100 * PAYS:.0f} % {of_first}: all sizes pay."


def best_layouts(overrides: Sequence[str], *, user_folder: Path | None, rows: int) -> Iterator[str]:
    """The table of the fastest layouts for a run with these overrides, and the command line of the first.

    Raises ConfigError with all problems, or with the nearest layout if none fits.
    """
    strategies = [word for word in overrides if word.startswith("strategy=") and word != f"strategy={AUTO}"]
    if strategies:
        raise ConfigError([f"--best chooses the strategy. Try it without {' '.join(strategies)}."])
    line = command_line([*overrides, f"strategy={AUTO}"], user_folder=user_folder)
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        question = ask(cell.config, cell.overrides, user_folder=user_folder)
        config, hardware = question.config, question.hardware
        best = search(config, hardware, choices=question.choices, most=rows)
        if not (candidates := best.best):
            raise ConfigError(ranking.without_room(best, config, hardware, choices=question.choices))
    batch = config.training.global_batch_size
    yield (
        f"{config.nodes} nodes x {config.gpus_per_node} x {hardware.device.name}, "
        f"{config.training.precision}, {batch} samples a step"
    )
    yield from ranking.table(candidates, hardware)
    if len(candidates) > 1:
        yield f"Why the first: {ranking.advantage(candidates[:2])}"
    yield "memory: an estimate for the device that needs most. Each row is the best of its kind."
    yield LEFT_OUT
    yield from assumptions(candidates[0].config, hardware)
    chosen = candidates[0].overrides
    kept = [word for word in overrides if key_of(word) not in set(map(key_of, chosen))]
    yield shlex.join(["python", "-m", "hpc_parallel.run", *kept, *chosen])
