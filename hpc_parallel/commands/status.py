"""`python -m hpc_parallel status [RUN|SWEEP ...]`: show the state of runs, from any terminal.

A RUN or SWEEP is a path, a run id, a job id or a unique part of a name. Without one, status shows the newest
runs in `runs/`. Exit codes: 0 done, 2 a RUN or SWEEP is unknown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpc_parallel.commands.run_rows import HEADINGS, RIGHT, RunRow, cells, count_states, rows_of
from hpc_parallel.exit_codes import DONE
from hpc_parallel.failure.run_state import NO_ANSWER, NOT_STARTED
from hpc_parallel.problems import printable
from hpc_parallel.record.find import Match, find_all, newest_first, sweep_of, unique_runs
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import RecordedRun, find_runs, read_run
from hpc_parallel.record.sweep_folder import Sweep
from hpc_parallel.shell import command_parser, run_command
from hpc_parallel.terminal import console, print_json, say

if TYPE_CHECKING:
    from rich.console import RenderableType

LESS_NEEDED = ("restarts", "job", "strategy", "nodes x devices", "samples/s", "left", "loss")
SHORTEST_NAME = 16  # characters of a run's name that a narrow screen shows
NEWEST = 10  # runs that are shown if none is named
MOST_LINES = 10  # runs whose newest printed line is shown
PERIOD_S = 2.0  # between two updates of --watch: Slurm's controller serves many users
COLOURS = {"completed": "green", "running": "cyan", "starting": "cyan", "failed": "red", "timeout": "red",
           "broken off": "red", "gone": "red", "out_of_memory": "red", "node_fail": "red"}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Show the table; returns the exit code."""
    line = parser()
    options = line.parse_args(list(arguments))
    if options.all and options.runs:
        line.error("--all shows every run: leave it out, or name no runs")
    if options.watch and options.json:
        line.error("--watch is for people, --json for scripts: choose one")
    return run_command(lambda: _status(options))


def parser() -> argparse.ArgumentParser:
    parser = command_parser("status", __doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN|SWEEP", help="default: the newest runs")
    parser.add_argument("--all", action="store_true", help=f"all runs in {RUNS}/")
    parser.add_argument("--watch", action="store_true", help="update until all have ended, or until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    return parser


def _status(options: argparse.Namespace) -> int:
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
        screen = console()
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

    screen = console()
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
    table.caption = ", ".join(f"{count} {word}" for word, count in count_states(rows).items())
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
            lines += _of_sweep(rows, sweep)
    return lines


def _of_sweep(rows: Sequence[RunRow], sweep: Sweep) -> list[str]:
    """The runs of a sweep that have no folder yet, and its combinations that can't run."""
    idle = {row.path for row in rows if row.state == NOT_STARTED and row.nodes is None}
    not_started = [run for run in sweep.runs if str(run.run_dir) in idle]
    return [
        *(f"not started: {sweep.distinct_overrides(run.overrides)}" for run in not_started),
        *(
            f"left out: {sweep.distinct_overrides(combination.overrides)}: {' '.join(combination.problems)}"
            for combination in sweep.skipped
        ),
    ]
