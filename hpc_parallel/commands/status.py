"""`python -m hpc_parallel status [RUN|SWEEP ...]`: how runs stand, now or later, from any terminal.

A RUN or SWEEP is a path, a run id, a job id or a unique part of a name. Without one: the newest runs of
`runs/`. Exit codes: 0 done, 2 what was named is unknown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from hpc_parallel.commands.find import Named, find_all, newest_first, once, sweep_of
from hpc_parallel.commands.run_rows import HEADINGS, RIGHT, Row, cells, counted, rows_of
from hpc_parallel.exit_codes import DONE
from hpc_parallel.problems import printable
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import RecordedRun, find_runs, read_run
from hpc_parallel.record.sweep_folder import Sweep
from hpc_parallel.shell import run_command
from hpc_parallel.supervise.run_state import NO_ANSWER, NOT_STARTED
from hpc_parallel.terminal import console, print_json, say

if TYPE_CHECKING:
    from rich.console import RenderableType

NEWEST = 10  # runs that are shown where none is named
PERIOD_S = 2.0  # between looks of --watch: a controller serves many users
COLOURS = {"completed": "green", "running": "cyan", "starting": "cyan", "failed": "red", "timeout": "red",
           "broken off": "red", "gone": "red", "out_of_memory": "red", "node_fail": "red"}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Show the table; returns the exit code."""
    options = parser()
    given = options.parse_args(list(arguments))
    if given.all and given.runs:
        options.error("--all shows every run: name none beside it")
    if given.watch and given.json:
        options.error("--watch is for people, --json for scripts: choose one")
    return run_command(lambda: _status(given))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hpc_parallel status", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("runs", nargs="*", metavar="RUN|SWEEP", help="which; default: the newest")
    made.add_argument("--all", action="store_true", help=f"every run of {RUNS}/")
    made.add_argument("--watch", action="store_true", help="until all have ended; Ctrl-C looks no longer")
    made.add_argument("--json", action="store_true", help="a list of objects")
    return made


def _status(given: argparse.Namespace) -> int:
    named = find_all(given.runs)
    every = newest_first(find_runs(RUNS)) if not named else once(named)
    runs = every if named or given.all else every[:NEWEST]
    rows = rows_of(runs)
    if given.json:
        print_json([asdict(row) for row in rows])
        return DONE
    if not runs:
        say(f"no runs in {RUNS.absolute()}")
        return DONE
    if given.watch:
        rows = _watch(runs)
    else:
        screen = console()
        screen.print(_table(rows, columns=screen.width))
    if any(row.reason == NO_ANSWER for row in rows):
        say(f"{NO_ANSWER}: how its jobs stand is not known now. `scontrol ping` may say why.")
    notes = [f"{row.run} can't be read: {file}: {why}" for row in rows for file, why in row.damaged.items()]
    notes += _notes(rows, named) if named else []
    if len(runs) < len(every):
        notes.append(f"{len(every) - len(runs)} older ones: --all")
    if notes:
        say(*notes)
    return DONE


def _watch(runs: Sequence[RecordedRun]) -> list[Row]:
    """Look again and again until all have ended; returns the last look."""
    from rich.live import Live

    screen = console()
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            rows = rows_of([read_run(run.path) for run in runs])
            live.update(_table(rows, columns=screen.width), refresh=True)
            if all(row.ended for row in rows):
                return rows
            time.sleep(PERIOD_S)


def _table(rows: Sequence[Row], *, columns: int) -> RenderableType:
    """The table for a screen of `columns` characters.

    On a narrow screen, columns without values are omitted and words are wrapped.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    lines = [tuple(map(printable, cells(row))) for row in rows]
    widths = [max(map(cell_len, column)) + 2 for column in zip(HEADINGS, *lines, strict=True)]
    narrow = sum(widths) > columns
    shown = [at for at in range(len(HEADINGS)) if not narrow or any(line[at] for line in lines)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0 if narrow else 1, 0, 0))
    found: list[list[Text]] = []
    for at in shown:
        heading, texts = HEADINGS[at], [line[at] for line in lines]
        table.add_column(
            heading, justify="right" if heading in RIGHT else "left", overflow="fold",
            width=_width(heading, texts) if narrow else None, no_wrap=not narrow,
        )  # fmt: skip
        if heading == "run" and narrow:
            texts = [text.replace("/", "/\n") for text in texts]
        colours = [COLOURS.get(row.state, "") if heading == "state" else "" for row in rows]
        found.append([Text(text, colour) for text, colour in zip(texts, colours, strict=True)])
    if not narrow:  # each run keeps to one line: a row of all is quicker than one a run
        found = [[Text("\n").join(column)] for column in found]
    for row in zip(*found, strict=True):
        table.add_row(*row)
    table.caption = ", ".join(f"{count} {word}" for word, count in counted(rows).items())
    table.caption_justify = "left"
    return table


def _width(heading: str, texts: Sequence[str]) -> int:
    """Of a column on a narrow screen: states go below their reason, run ids below their name."""
    apart = {"state": " ", "run": "/"}.get(heading)
    parts = [f"{part}{apart.strip()}" for text in texts for part in text.split(apart)] if apart else texts
    return max(map(len, [*parts, *heading.split()]))


def _notes(rows: Sequence[Row], named: Sequence[Named]) -> list[str]:
    """Why runs failed, and what a sweep left out."""
    lines = [f"{row.run}: {row.failure}" for row in rows if row.failure]
    for each in named:
        if each.path is not None and (sweep := sweep_of(each.path)) is not None:
            lines += _of_sweep(rows, sweep)
    return lines


def _of_sweep(rows: Sequence[Row], sweep: Sweep) -> list[str]:
    """Which of its runs have no folder to tell of them, and what can't run."""
    idle = {row.path for row in rows if row.state == NOT_STARTED and row.nodes is None}
    gone = [run for run in sweep.runs if str(run.run_dir) in idle]
    return [
        *(f"not started: {sweep.distinct_overrides(run.overrides)}" for run in gone),
        *(
            f"left out: {sweep.distinct_overrides(left.overrides)}: {' '.join(left.problems)}"
            for left in sweep.skipped
        ),
    ]
