"""The mean and the standard deviation of figures over runs that differ only in their seed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from hpc_parallel.report.gather import Row, identity
from hpc_parallel.report.labels import RUN_KEYS
from hpc_parallel.report.tables import digits

KEYS = ("final_loss", "samples_per_s", "step_time_s")
_IGNORED = {*RUN_KEYS, "seed"} - {"nodes", "gpus_per_node"}


@dataclass(frozen=True)
class PooledFigure:
    """A figure of several runs."""

    key: str
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def deviation(self) -> float:
        """The sample standard deviation of the runs (divisor n - 1)."""
        return stdev(self.values)

    def __str__(self) -> str:
        return f"{digits(self.mean, 4)} ± {digits(self.deviation, 2)}"


@dataclass(frozen=True)
class Pool:
    """Completed runs that are equal except for the seed."""

    label: str
    seeds: Sequence[int]
    figures: Sequence[PooledFigure]  # the figures of KEYS that all runs have


def pools(rows: Sequence[Row]) -> list[Pool]:
    """Pool the completed runs with at least two different seeds."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.completed:
            config = {key: value for key, value in row.config.items() if key not in _IGNORED}
            groups[identity(config)].append(row)
    return [_pool(group) for group in groups.values() if len({_seed(row) for row in group}) > 1]


def _pool(rows: Sequence[Row]) -> Pool:
    figures = []
    for key in KEYS:
        values = [value for row in rows if (value := row.figures[key]) is not None]
        if len(values) == len(rows):
            figures.append(PooledFigure(key, values))
    first = rows[0]
    options = [option for option in first.differs if not option.startswith("seed=")]
    label = ", ".join([first.strategy, first.layout_text, *options])
    return Pool(label, sorted(_seed(row) for row in rows), figures)


def _seed(row: Row) -> int:
    seed = row.config.get("seed")
    return seed if isinstance(seed, int) else 0
