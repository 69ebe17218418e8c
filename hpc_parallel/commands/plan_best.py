"""The fastest layouts of a configuration, as `plan --best` prints them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.commands.plan_run import command_line
from hpc_parallel.config.compose import compose_run
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.planning.auto_strategy import AUTO, Question, ask
from hpc_parallel.planning.ranking import advantage, table, without_room
from hpc_parallel.planning.run_work import assumptions
from hpc_parallel.planning.search import Candidate, search
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.recorded_start import key_of

ROWS = 5
LEFT_OUT = "Not looked at: tile, expert, strategy.schedule=naive, selective recomputation."


@dataclass(frozen=True)
class Best:
    """The fastest candidates, best first, and the question that they answer."""

    asked: Question
    candidates: list[Candidate]


def best(overrides: Sequence[str], *, user_folder: Path | None, rows: int = ROWS) -> Best:
    """Search the layouts for a run with these overrides.

    Raises ConfigError with all problems, or with the nearest layout if none fits.
    """
    strategies = [word for word in overrides if word.startswith("strategy=") and word != f"strategy={AUTO}"]
    if strategies:
        raise ConfigError([f"--best chooses the strategy. Try it without {' '.join(strategies)}."])
    line = command_line([*overrides, f"strategy={AUTO}"], user_folder=user_folder)
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        asked = ask(cell.config, cell.overrides, user_folder=user_folder)
        result = search(asked.config, asked.hardware, choices=asked.choices, most=rows)
        if not result.best:
            raise ConfigError(without_room(result, asked.config, asked.hardware, choices=asked.choices))
    return Best(asked, result.best)


def report(ranking: Best, overrides: Sequence[str]) -> Iterator[str]:
    """The table, why the first row is first, what was not looked at, and the command line to run."""
    config, hardware = ranking.asked.config, ranking.asked.hardware
    batch = config.training.global_batch_size
    yield (
        f"{config.nodes} nodes x {config.gpus_per_node} x {hardware.device.name}, "
        f"{config.training.precision}, {batch} samples a step"
    )
    yield from table(ranking.candidates, hardware)
    if len(ranking.candidates) > 1:
        yield f"Why the first: {advantage(ranking.candidates[:2])}"
    yield "memory: an estimate for the device that needs most. Each row is the best of its kind."
    yield LEFT_OUT
    yield from assumptions(ranking.candidates[0].config, hardware)
    yield shlex.join(
        ["python", "-m", "hpc_parallel.run", *_overrides_of_run(overrides, ranking.candidates[0].overrides)]
    )


def _overrides_of_run(overrides: Sequence[str], chosen: Sequence[str]) -> list[str]:
    replaced = {*map(key_of, chosen)}
    return [*(word for word in overrides if key_of(word) not in replaced), *chosen]
