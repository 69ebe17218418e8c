"""What a report says besides its comparison.

The verdict has three lines: the fastest, the leanest and the quietest run. Then there are equal runs of
different seeds, the models' own metrics (`LayeredModel.metrics`), and planned figures beside measured ones.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from hpc_parallel.record.endings import other_state, other_statistics, other_versions
from hpc_parallel.record.metrics_file import own_metrics_of
from hpc_parallel.report.figures import number
from hpc_parallel.report.gather import Row
from hpc_parallel.report.tables import TableColumn, Unit, best_of, column_of, digits, spread_text, unit_of

SHOWN_RUNS = 3  # the most tied runs that a line names
POOLED = ("final_loss", "validation_loss", "samples_per_s", "step_time_s")  # figures of equal runs
MOST_METRICS = 20
PREDICTABLE = (
    "step_time_s", "samples_per_s", "latency_s", "peak_memory_bytes", "bubble_share",
    "exposed_communication_share", "traffic_bytes",
)  # fmt: skip


@dataclass(frozen=True)
class VerdictLine:
    """One line."""

    title: str
    text: str


@dataclass(frozen=True)
class VerdictQuestion:
    """The question that a line answers."""

    title: str
    key: str  # of the column that answers it
    what: str = ""  # the words after the figure and its unit
    unmeasured: str = ""
    basis: str = ""  # where the figure comes from; if empty: its timed steps and its spread


FASTEST = VerdictQuestion(
    "Fastest", "samples_per_s", unmeasured="not measured: no completed run has a throughput."
)
LEANEST = VerdictQuestion(
    "Leanest", "state_bytes", what=" of weights, gradients and optimizer state on the fullest device",
    basis="It is counted, and has no spread; activations come on top.",
)  # fmt: skip
LEANEST_BY_PEAK = VerdictQuestion(
    "Leanest", "peak_memory_bytes", what=" on the fullest device", unmeasured="not measured.",
    basis="It is the peak of the run, and has no spread.",
)  # fmt: skip
LEANEST_PROCESS = VerdictQuestion(
    "Leanest", "peak_memory_bytes",
    unmeasured="not measured: on a CPU the peak of a process contains the interpreter, and not every run has "
    "counted its state.",
)  # fmt: skip
QUIETEST = VerdictQuestion(
    "Quietest", "traffic_bytes", what=" sent by all devices in one step",
    unmeasured="no completed run with several devices has counted its bytes (training.measure_steps).",
    basis="It is counted in one step, and has no spread.",
)  # fmt: skip


def verdicts(rows: Sequence[Row]) -> list[VerdictLine]:
    """The three lines; empty if no run completed."""
    same, _ = _largest_group(rows)
    questions = (FASTEST, _leanest(same), QUIETEST)
    return [VerdictLine(question.title, _answer(same, question)) for question in questions if same]


def scope(rows: Sequence[Row]) -> str:
    """Which runs the verdict is about, if not about all that completed; and losses that can't be compared."""
    same, completed = _largest_group(rows)
    differences = [
        other_statistics((row.run.totals.statistics_samples, row.label) for row in same),
        other_state((row.run.totals.in_bfloat16, row.label) for row in rows),
        other_versions((row.run.ran_on.versions, row.label) for row in rows if row.completed),
    ]
    incomparable = " ".join(filter(None, differences))
    if len(same) == completed:
        return incomparable
    about = (
        f"The verdict is about {len(same)} of {completed} completed runs: those with the same settings "
        "(script, model, data, task, global batch, precision, optimizer, device). For a verdict on others, "
        "make a report on their folders only."
    )
    return f"{about} {incomparable}".strip()


def _largest_group(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """The largest group of completed runs with the same settings, and the number of all completed runs."""
    completed = [row for row in rows if row.completed]
    largest = Counter(row.settings for row in completed).most_common(1)
    return [row for row in completed for settings, _ in largest if row.settings == settings], len(completed)


def _leanest(rows: Sequence[Row]) -> VerdictQuestion:
    """Peak memory on GPUs; on a CPU the counted state, because a process holds more than the training."""
    if not any(row.on_cpu for row in rows):
        return LEANEST_BY_PEAK
    counted = all(row.figures["state_bytes"] is not None for row in rows)
    return LEANEST if counted else LEANEST_PROCESS


def _answer(rows: Sequence[Row], question: VerdictQuestion) -> str:
    column = column_of(question.key)
    measured = [row for row in rows if row.figures[column.key] is not None and column.competes(row)]
    if not measured:
        return question.unmeasured
    unit = unit_of(column.kind, [row.figures[column.key] for row in measured])
    best = best_of(column, measured, unit)
    tie = "can't be told apart" if best and (column.timed or column.noise) else "equal"
    best = best or set(range(len(measured)))
    winners = sorted((measured[index] for index in best), key=lambda row: _place(column, row))
    others = [row for index, row in enumerate(measured) if index not in best]
    first = winners[0]
    answer = f"{_names(winners, tie)}: {_figure(first, column, unit)}{question.what}"
    basis = question.basis or _timing(first)
    return f"{answer}, {_lead(first, others, column, unit, tied=len(winners) > 1)} {basis}"


def _place(column: TableColumn, row: Row) -> float:
    value = row.figures[column.key] or 0.0
    return -value if column.best is max else value


def _names(winners: Sequence[Row], tie: str) -> str:
    """The labels of the first winners. If there are several, `tie` follows in parentheses."""
    names = [row.label for row in winners[:SHOWN_RUNS]]
    if len(winners) == 1:
        return names[0]
    more = len(winners) - len(names)
    return f"{'; '.join(names)}{f' and {more} more' if more else ''} ({tie})"


def _figure(row: Row, column: TableColumn, unit: Unit) -> str:
    return f"{unit.show(row.figures[column.key])} {unit.name}"


def _lead(winner: Row, others: Sequence[Row], column: TableColumn, unit: Unit, *, tied: bool) -> str:
    """By how much the winner is ahead of the next run."""
    if not others:
        return "like all other runs." if tied else "and no other run has this figure."
    following = min(others, key=lambda row: _place(column, row))
    values = [row.figures[column.key] or 0.0 for row in (winner, following)]
    name = f"{following.label} ({_figure(following, column, unit)})"
    if not min(values):
        return f"then {name}."
    factor = digits(max(values) / min(values), 3)
    if column.best is max:
        return f"{factor} times as much as {name}."
    return f"{digits(100 * min(values) / max(values), 3)} % of {name}."


def _timing(row: Row) -> str:
    """The timed steps of a speed and its spread."""
    steps = f"{row.spread.timed_steps} timed step{'s' * (row.spread.timed_steps != 1)}"
    spread = spread_text(row, "samples_per_s")
    if not spread:
        return f"It has {steps}, which is too few for a spread."
    return f"It is the median of the logged means of {steps}; the middle half of them is {spread} samples/s."


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
    # The figures of POOLED that all runs have; no speeds of different devices.
    figures: Sequence[PooledFigure]


def pools(rows: Sequence[Row]) -> list[Pool]:
    """Pool the completed runs with at least two different seeds."""
    groups: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.completed:
            groups[row.repeated].append(row)
    return [_pool(group) for group in groups.values() if len({_seed(row) for row in group}) > 1]


def _pool(rows: Sequence[Row]) -> Pool:
    figures = []
    is_comparable = len({row.machine for row in rows}) == 1
    for key in (key for key in POOLED if is_comparable or key.endswith("_loss")):
        values = [value for row in rows if (value := row.figures[key]) is not None]
        if len(values) == len(rows):
            figures.append(PooledFigure(key, values))
    first = rows[0]
    options = [option for option in first.names.options if not option.startswith("seed=")]
    label = ", ".join([first.strategy, first.layout_text, *options])
    return Pool(label, sorted(_seed(row) for row in rows), figures)


def _seed(row: Row) -> int:
    seed = row.config.get("seed")
    return seed if isinstance(seed, int) else 0


@dataclass(frozen=True)
class OwnMetrics:
    """A table: its columns, and a line for each run that has at least one of these metrics."""

    names: Sequence[str]
    lines: Sequence[tuple[Row, Sequence[float | None]]]


def own_metrics(rows: Sequence[Row]) -> OwnMetrics | None:
    """The table of the first MOST_METRICS metrics; None if no run has one."""
    of_runs = (own_metrics_of(row.run.summary or {}) for row in rows)
    values = [
        {name: value for name, value in metrics.items() if number(value) is not None} for metrics in of_runs
    ]
    names = list(dict.fromkeys(name for metrics in values for name in metrics))[:MOST_METRICS]
    lines = [(row, [metrics.get(name) for name in names]) for row, metrics in zip(rows, values, strict=True)]
    with_metrics = [(row, cells) for row, cells in lines if any(cell is not None for cell in cells)]
    return OwnMetrics(names, with_metrics) if with_metrics else None


@dataclass(frozen=True)
class Prediction:
    """A planned figure of a run, and the measured figure."""

    row: Row
    key: str
    predicted: float
    measured: float | None

    @property
    def unit(self) -> Unit:
        return unit_of(column_of(self.key).kind, (self.predicted, self.measured))

    @property
    def title(self) -> str:
        """`step time`."""
        return column_of(self.key).title

    @property
    def ratio(self) -> float | None:
        """Measured divided by predicted."""
        return self.measured / self.predicted if self.measured and self.predicted else None


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    result = []
    for row in rows:
        predicted = row.run.totals.predicted
        for key in PREDICTABLE:
            # On a CPU the measured peak includes the interpreter. A prediction does not include it.
            process = key == "peak_memory_bytes" and row.on_cpu
            if not process and (value := number(predicted.get(key))) is not None and value >= 0:
                result.append(Prediction(row, key, value, row.figures[key]))
    return result
