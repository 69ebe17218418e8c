"""`python -m hpc_parallel report FOLDER... [--output FOLDER]`: compare runs as a page, Markdown and CSV.

With `--json`, print the comparison to stdout instead. FOLDER is a run folder, a sweep folder or a folder that
contains some. Exit codes: 0 done, 1 the report could not be written, 2 the command line is wrong (nothing was
written).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.exit_codes import DONE, FAILED, WRONG
from hpc_parallel.problems import Problem, alternatives, nearest
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.record.safe_write import write_bytes, write_text
from hpc_parallel.shell import complain
from hpc_parallel.terminal import print_json

if TYPE_CHECKING:
    from hpc_parallel.report.page import Report

PAGE, MARKDOWN, TABLE, LATENCY, PLOTS = "index.html", "report.md", "report.csv", "latency.csv", "plots"


def main(arguments: Sequence[str]) -> int:
    """Write or print the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc_parallel report", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("folders", nargs="+", metavar="FOLDER", type=Path)
    parser.add_argument("--output", type=Path, help="where to write (default: FOLDER/report of the first)")
    parser.add_argument("--json", action="store_true", help="the rows of report.csv as a list of objects")
    given = parser.parse_args(list(arguments))
    if given.json and given.output:
        parser.error("--json prints and writes nothing: leave --output out")
    folders = [Path(os.path.expanduser(folder)).absolute() for folder in given.folders]
    output = Path(os.path.expanduser(given.output or folders[0] / "report")).absolute()
    problems = list(find_problems(folders))
    if problems := problems if given.json else [*problems, *output_problems(output)]:
        count = len(problems)
        complain([f"{count} problem{'s' * (count > 1)}; nothing was written."])
        complain(problems, indent="  ")
        return WRONG
    from hpc_parallel.report.gather import gather

    gathered = gather(folders)
    if given.json:
        from hpc_parallel.report.tables import records, scaling

        print_json(records(gathered.rows, scaling(gathered.rows)))
        return DONE
    from hpc_parallel.report.page import WITHOUT_PLOTS, can_draw, render

    try:
        write(render(gathered), output)
    except OSError as error:  # for example a full disk
        complain([f"{output} can't be written: {error.strerror or error}"])
        return FAILED
    if not can_draw():
        complain([WITHOUT_PLOTS])
    print(f"{len(gathered.rows)} run{'s' * (len(gathered.rows) > 1)}: {output / PAGE}")
    return DONE


def find_problems(folders: Sequence[Path]) -> Iterator[Problem | str]:
    """Yields the problems of the folders to report on."""
    for folder in dict.fromkeys(folders):
        if not os.path.isdir(folder):
            rule = "is a file, and a report is on folders" if os.path.lexists(folder) else "is not there"
            near = f" Try {alternatives(names)}." if (names := _near(folder)) else ""
            yield f"{folder} {rule}.{near}"
        elif not find_runs(folder):
            yield f"{folder} holds no run, nor does any folder in it. Try runs, where `run` puts them."


def output_problems(output: Path) -> Iterator[Problem | str]:
    """Yields the reasons why a report can't be written to `output`."""
    if os.path.lexists(output) and not is_report(output):
        rule = "is there and is no report, which alone would be replaced"
        yield Problem("--output", output, rule, (output.with_name(f"{output.name}-1"),))
    elif not os.path.isdir(parent := _parent(output)) or not os.access(parent, os.W_OK | os.X_OK):
        yield Problem(
            "--output", output, f"can't be made: {parent} is no folder that you may write", ("report",)
        )


def is_report(path: Path) -> bool:
    """Whether a report may replace `path`: it is a report or an empty folder."""
    return (
        os.access(path, os.R_OK | os.X_OK)
        and path.is_dir()
        and (not any(path.iterdir()) or ((path / PAGE).is_file() and (path / TABLE).is_file()))
    )


def _parent(path: Path) -> Path:
    """The folder in which `path` will be made: the nearest above it that is there, or what is in the way."""
    return next(above for above in path.parents if os.path.lexists(above) or above == above.parent)


def _near(folder: Path) -> list[str]:
    try:
        names = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()]
    except OSError:
        return []
    return [str(folder.with_name(name)) for name in nearest(folder.name, names)]


def write(report: Report, output: Path) -> None:
    """Put the whole report at `output` in one move, in place of an earlier one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        (beside / PLOTS).mkdir()
        for name, text in ((PAGE, report.html), (MARKDOWN, report.markdown), (TABLE, report.csv)):
            write_text(beside / name, text, mode=0o666)
        if report.latency_csv:
            write_text(beside / LATENCY, report.latency_csv, mode=0o666)
        for plot in report.plots:
            write_bytes(beside / PLOTS / f"{plot.name}.png", plot.png, mode=0o666)
        if output.exists():
            before = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-before."))
            output.rename(before / output.name)
            beside.rename(output)
            shutil.rmtree(before)
        else:
            beside.rename(output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
