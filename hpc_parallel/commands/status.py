"""`python -m hpc_parallel status [RUN|SWEEP ...]`: show the state of runs, from any terminal.

A RUN or SWEEP is a path, a run id, a job id or a unique part of a name. Without one, status shows the newest
runs in `runs/`. Exit codes: 0 done, 2 a RUN or SWEEP is unknown.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

from hpc_parallel.config.script import TASK as SCRIPT
from hpc_parallel.exit_codes import DONE
from hpc_parallel.failure.run_state import (
    DAMAGED,
    NO_ANSWER,
    NOT_STARTED,
    RUNNING,
    State,
    despite_damage,
    states,
)
from hpc_parallel.problems import printable
from hpc_parallel.record.find import Match, find_all, newest_first, unique_runs
from hpc_parallel.record.metrics_file import MetricsLine, duration, figure, per_second
from hpc_parallel.record.names import RUNS, label
from hpc_parallel.record.owner import Owner, process_lives
from hpc_parallel.record.rank_output import last_output
from hpc_parallel.record.recorded import RecordedRun, find_runs, read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.sweep_folder import StageRecord, Sweep, read_stages, sweep_of
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.record.values import integer, number, table
from hpc_parallel.report.run_lines import slow_lines
from hpc_parallel.shell import command_parser
from hpc_parallel.terminal import print_json, say, stdout_console

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADINGS = (
    "run", "strategy", "nodes x devices", "state", "step", "loss", "samples/s", "left", "restarts", "useful",
    "job",
)  # fmt: skip
RIGHT = ("step", "loss", "samples/s", "left", "restarts", "useful")
LESS_NEEDED = ("useful", "restarts", "job", "strategy", "nodes x devices", "samples/s", "left", "loss")
SHORTEST_NAME = 16  # characters of a run's name that a narrow screen shows
NEWEST = 10  # runs that are shown if none is named
MOST_LINES = 10  # runs whose newest printed line is shown
PERIOD_S = 2.0  # between two updates of --watch: Slurm's controller serves many users
COLOURS = {"completed": "green", "pruned": "yellow", "running": "cyan", "starting": "cyan", "failed": "red",
           "timeout": "red", "broken off": "red", "gone": "red", "out_of_memory": "red",
           "node_fail": "red"}  # fmt: skip


@dataclass(frozen=True)
class RunRow:
    """One run. None: unknown, or the task has no such value.

    time_left_s follows the newest step time; job_left_s is the time until Slurm's limit. useful_share: of all
    time, what went to steps that count (ETTR). last_line: the newest line that rank 0 has printed, escaped;
    only while the run is going on.
    """

    run: str
    path: str
    strategy: str | None
    nodes: int | None
    gpus_per_node: int | None
    state: str
    reason: str
    ended: bool
    step: int | None
    steps: int | None
    loss: float | None
    samples_per_s: float | None
    time_left_s: float | None
    job_left_s: float | None
    restarts: int
    useful_share: float | None
    job_id: str | None
    failure: str | None  # the line that names the root cause
    last_line: str | None
    damaged: Mapping[str, str]  # the damaged ones of the files read so far, each with the reason


def parser() -> argparse.ArgumentParser:
    parser = command_parser("status", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN|SWEEP", help="default: the newest runs")
    parser.add_argument("--all", action="store_true", help=f"all runs in {RUNS}/")
    parser.add_argument("--watch", action="store_true", help="update until all have ended, or until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    return parser


def main(arguments: Sequence[str]) -> int:
    line = parser()
    options = line.parse_args(list(arguments))
    if options.all and options.runs:
        line.error("--all shows every run: leave it out, or name no runs")
    if options.watch and options.json:
        line.error("--watch is for people, --json for scripts: choose one")
    named = find_all(options.runs)
    all_runs = newest_first(find_runs(RUNS)) if not named else unique_runs(named)
    runs = all_runs if named or options.all else all_runs[:NEWEST]
    rows = rows_of(runs)
    if options.json:
        print_json([asdict(row) for row in rows])
        return DONE
    if not runs:
        say(f"no runs in {RUNS.absolute()}")
        return DONE
    if options.watch:
        rows = _watch(runs)
    else:
        screen = stdout_console()
        screen.print(_page(rows, columns=screen.width))
    if any(row.reason == NO_ANSWER for row in rows):
        say(f"{NO_ANSWER}: how its jobs stand is not known now. `scontrol ping` may say why.")
    notes = [
        f"{row.run} can't be read: {file}: {reason}" for row in rows for file, reason in row.damaged.items()
    ]
    notes += _notes(rows, named) if named else []
    if len(runs) < len(all_runs):
        notes.append(f"{len(all_runs) - len(runs)} older ones: --all")
    if notes:
        say(*notes)
    return DONE


def _watch(runs: Sequence[RecordedRun]) -> list[RunRow]:
    """Update the table until all runs have ended; returns the last rows."""
    from rich.live import Live

    screen = stdout_console()
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            rows = rows_of([read_run(run.path) for run in runs])
            live.update(_page(rows, columns=screen.width), refresh=True)
            if all(row.ended for row in rows):
                return rows
            time.sleep(PERIOD_S)


def _page(rows: Sequence[RunRow], *, columns: int) -> RenderableType:
    """The table, then the newest printed line of each run that goes on, cut to the width of the screen."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"{printable(row.run)}: {row.last_line}" for row in rows if row.last_line]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"what {len(lines) - MOST_LINES} more have printed last: --json"]
    cut = (Text(line, no_wrap=True, overflow="ellipsis") for line in lines)
    return Group(_table(rows, columns=columns), *cut)


def _table(rows: Sequence[RunRow], *, columns: int) -> RenderableType:
    """The table for a screen of `columns` characters.

    On a narrow screen, words are wrapped, and columns are omitted: first the columns without values, then the
    columns of LESS_NEEDED until the rest fits.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    lines = [tuple(map(printable, cells(row))) for row in rows]
    widths = [max(map(cell_len, column)) + 2 for column in zip(HEADINGS, *lines, strict=True)]
    narrow = sum(widths) > columns
    narrow_widths = _narrow_widths(lines, columns=columns)
    columns_shown = list(narrow_widths) if narrow else list(range(len(HEADINGS)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1, 0, 0))
    cells_by_column: list[list[Text]] = []
    for index in columns_shown:
        heading, texts = HEADINGS[index], [line[index] for line in lines]
        table.add_column(
            heading, justify="right" if heading in RIGHT else "left", overflow="fold",
            width=narrow_widths.get(index) if narrow else None, no_wrap=not narrow,
        )  # fmt: skip
        if heading == "run" and narrow:
            texts = [text.replace("/", "/\n") for text in texts]
        colours = [COLOURS.get(row.state, "") if heading == "state" else "" for row in rows]
        cells_by_column.append([Text(text, colour) for text, colour in zip(texts, colours, strict=True)])
    if not narrow:  # each run has one line: one row with all lines is faster to draw than a row for each
        cells_by_column = [[Text("\n").join(column)] for column in cells_by_column]
    for row in zip(*cells_by_column, strict=True):
        table.add_row(*row)
    counts = Counter(row.state for row in rows).most_common()
    table.caption = ", ".join(f"{count} {word}" for word, count in counts)
    table.caption_justify = "left"
    return table


def _narrow_widths(lines: Sequence[Sequence[str]], *, columns: int) -> dict[int, int]:
    """Column -> width, of the columns that a narrow screen has room for. The names of runs are folded first.

    lines: the cells of each run.
    """
    widths = {
        i: _width(heading, [line[i] for line in lines])
        for i, heading in enumerate(HEADINGS)
        if any(line[i] for line in lines)
    }
    run = HEADINGS.index("run")
    for heading in LESS_NEEDED:
        if _total(widths) - widths.get(run, 0) + SHORTEST_NAME <= columns:
            break
        widths.pop(HEADINGS.index(heading), None)
    if run in widths:
        widths[run] = min(widths[run], max(SHORTEST_NAME, columns - _total(widths) + widths[run]))
    return widths


def _total(widths: Mapping[int, int]) -> int:
    """The width of the table, with a space before, between and after the columns."""
    return sum(widths.values()) + len(widths) + 1


def _width(heading: str, texts: Sequence[str]) -> int:
    """The width of a column on a narrow screen, where reasons and run ids have their own lines."""
    separator = {"state": " ", "run": "/"}.get(heading)
    parts = (
        [f"{part}{separator.strip()}" for text in texts for part in text.split(separator)]
        if separator
        else texts
    )
    return max(map(len, [*parts, *heading.split()]))


def _notes(rows: Sequence[RunRow], named: Sequence[Match]) -> list[str]:
    """Reasons of failed runs, and combinations that a sweep left out."""
    lines = [f"{row.run}: {row.failure}" for row in rows if row.failure]
    for target in named:
        if target.path is not None and (sweep := sweep_of(target.path)) is not None:
            lines += _of_sweep(rows, sweep, holder=read_if_possible(Owner, RunFolder(target.path).owner))
            lines += _of_stages(rows, read_stages(target.path))
    return lines


def _of_stages(rows: Sequence[RunRow], stages: Sequence[StageRecord]) -> list[str]:
    """The chain of a study, and for each stage that can't start, the stage that prevents it."""
    by_path = {row.path: row for row in rows}
    by_name = {stage.name: by_path[stage.run_dir] for stage in stages if stage.run_dir in by_path}
    if not by_name:
        return []
    lines, broken = [], {name for name, row in by_name.items() if row.ended and row.state != "completed"}
    lines.append("stages: " + " -> ".join(f"{name} ({row.state})" for name, row in by_name.items()))
    for stage in stages:
        first = next((name for name in stage.after if name in broken), None)
        if first is not None and stage.name in broken and by_name[stage.name].step is None:
            cause = by_name[first].failure
            why = f"failed: {cause}" if cause else "has not completed"
            lines.append(f"{stage.name} was not started, because {first} {why}")
    return lines


def _of_sweep(rows: Sequence[RunRow], sweep: Sweep, *, holder: Owner | None) -> list[str]:
    """The runs of a sweep that have no folder, and its combinations that can't run. holder: who starts it."""
    idle = {row.path for row in rows if row.state == NOT_STARTED and row.nodes is None}
    starts = holder is not None and process_lives(holder) is not False
    why = "not started yet" if starts else "not started, or its folder is gone"
    return [
        *(
            f"{'its folder is gone' if run.job_id else why}: {sweep.distinct_overrides(run.overrides)}"
            for run in sweep.runs
            if str(run.run_dir) in idle
        ),
        *(
            f"left out: {sweep.distinct_overrides(combination.overrides)}: {' '.join(combination.problems)}"
            for combination in sweep.skipped
        ),
    ]


def rows_of(runs: Sequence[RecordedRun]) -> list[RunRow]:
    return [
        despite_damage(partial(row_of, run, state), partial(_damaged_row, run, state))
        for run, state in zip(runs, states(runs), strict=True)
    ]


def _damaged_row(run: RecordedRun, state: State, reason: str) -> RunRow:
    unknown = dict.fromkeys(field.name for field in fields(RunRow))
    return RunRow(**{
        **unknown, "run": label(run.path), "path": str(run.path), "state": DAMAGED, "reason": reason,
        "ended": state.ended, "restarts": 0, "job_id": state.job, "damaged": run.noticed,
    })  # type: ignore[arg-type]  # fmt: skip


def row_of(run: RecordedRun, state: State) -> RunRow:
    last, steps = run.newest_line, total_steps(run, state)
    saved = integer(run.totals.steps) if state.ended else None  # by a signal, between two lines
    rate = run.totals.samples_per_s if state.ended else None
    if rate is None and run.line_of_layout is not None:
        rate = run.line_of_layout.samples_per_s
    # Of a run that ended without a summary, nobody noted when.
    known = state.name == RUNNING or (state.ended and run.summary is not None)
    return RunRow(
        run=label(run.path), path=str(run.path), strategy=run.strategy, nodes=run.nodes,
        gpus_per_node=run.gpus_per_node, state=state.name, reason=state.reason or _slow(run, state),
        ended=state.ended, step=None if last is None else max(last.step, saved or 0), steps=steps,
        loss=None if last is None else last.loss, samples_per_s=rate,
        time_left_s=_left_s(run.line_of_layout, steps) if state.name == RUNNING else None,
        job_left_s=state.left_s,
        restarts=run.attempts.restarts,
        useful_share=run.useful_share if known else None, job_id=state.job,
        failure=failure_line(run) if state.name == "failed" else None,
        last_line=None if state.ended else last_output(run.folder), damaged=run.noticed,
    )  # fmt: skip


def _left_s(last: MetricsLine | None, steps: int | None) -> float | None:
    if last is None or last.step_time_s is None or steps is None:
        return None
    return number(max(0, steps - last.step) * last.step_time_s)


def _slow(run: RecordedRun, state: State) -> str:
    """The slowest rank of a run that is going on, and the cause; empty if none is slow."""
    lines = slow_lines(run.folder) if state.name == RUNNING else []
    return lines[0].partition(" takes ")[0] if lines else ""


def total_steps(run: RecordedRun, state: State) -> int | None:
    """The last step that the run will have; for an ended run that trained nothing, its last step."""
    if run.task in ("train", "proof"):
        return integer(table(run.head.get("training")).get("steps"))
    if run.task == SCRIPT or state.ended or run.config is None:
        last = run.newest_line if state.name == "completed" else None
        return None if last is None else last.step
    from hpc_parallel.config import tasks, typed_config  # this import takes 0.2 s

    try:
        return tasks.total_steps(typed_config.typed(run.config))
    except Exception:  # the configuration is of another version, or was changed
        return None


def failure_line(run: RecordedRun) -> str | None:
    return None if run.root_cause is None else run.root_cause.line


def cells(row: RunRow) -> tuple[str, ...]:
    """The texts of a row, in the order of HEADINGS."""
    state = row.state + (f" ({row.reason})" if row.reason else "")
    shape = f"{_or_question_mark(row.nodes)} x {_or_question_mark(row.gpus_per_node)}"
    step = "" if row.step is None and row.steps is None else f"{row.step or 0}/{_or_question_mark(row.steps)}"
    return (
        row.run,
        row.strategy or "?",
        shape,
        state,
        step,
        "" if row.loss is None else figure(row.loss),
        "" if row.samples_per_s is None else per_second(row.samples_per_s),
        _left(row),
        str(row.restarts or ""),
        "" if row.useful_share is None else f"{row.useful_share:.0%}",
        row.job_id or "",
    )


def _left(row: RunRow) -> str:
    """The time that the remaining steps take. If it is not known, the time until the limit of the job."""
    if row.time_left_s is not None:
        return duration(row.time_left_s)
    return "" if row.job_left_s is None else f"< {duration(row.job_left_s)}"


def _or_question_mark(value: int | None) -> str:
    return "?" if value is None else str(value)
