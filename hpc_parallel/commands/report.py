"""`python -m hpc_parallel report FOLDER... [--output FOLDER]`: compare runs as a page, Markdown and CSV.

With `--json`, print the comparison to stdout instead. FOLDER is a run folder, a sweep folder or a folder that
contains some. Exit codes: 0 done, 1 the report could not be written, 2 the command line is wrong (nothing was
written).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_parallel.config.checks.suggestions import paths_near
from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.problems import Problem, alternatives, shell_word
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.record.safe_write import write_bytes, write_text
from hpc_parallel.shell import command_parser, complain, refuse
from hpc_parallel.terminal import print_json

if TYPE_CHECKING:
    from hpc_parallel.report.page import Report

PAGE, PLOTS = "index.html", "plots"
MARKDOWN, TABLE, LATENCY = "report.md", "report.csv", "latency.csv"


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    parser = command_parser("report", __doc__)
    parser.add_argument("folders", nargs="+", metavar="FOLDER", type=Path)
    parser.add_argument("--output", type=Path, help="where to write (default: FOLDER/report of the first)")
    parser.add_argument("--json", action="store_true", help="the rows of report.csv as a list of objects")
    options = parser.parse_args(list(arguments))
    if options.json and options.output:
        parser.error("--json prints and writes nothing: leave --output out")
    folders = [Path(os.path.expanduser(folder)).absolute() for folder in options.folders]
    output = Path(os.path.expanduser(options.output or folders[0] / "report")).absolute()
    problems = list(find_problems([folder for folder in folders if folder not in (awaited or ())]))
    problems += [] if options.json else output_problems(output, beside=TABLE, near="report")
    if problems:
        return refuse(problems, text="; nothing was written")
    if awaited is not None:
        return DONE
    from hpc_parallel.report.gather import gather

    gathered = gather(folders)
    if options.json:
        from hpc_parallel.report.tables import records, scaling

        print_json(records(gathered.rows, scaling(gathered.rows)))
        return DONE
    from hpc_parallel.report.page import WITHOUT_PLOTS, can_draw, render

    try:
        write_folder(files_of(render(gathered)), output)
    except OSError as error:  # for example a full disk
        complain([f"{output} can't be written: {error.strerror or error}"])
        return FAILED
    if not can_draw():
        complain([WITHOUT_PLOTS])
    print(f"{len(gathered.rows)} run{'s' * (len(gathered.rows) > 1)}: {output / PAGE}")
    return DONE


def find_problems(folders: Sequence[Path]) -> Iterator[Problem | str]:
    for folder in dict.fromkeys(folders):
        if not os.path.isdir(folder):
            rule = "is a file, and a report is on folders" if os.path.lexists(folder) else "is not there"
            near = f" Try {alternatives(names)}." if (names := _near(folder)) else ""
            yield f"{folder} {rule}.{near}"
        elif not find_runs(folder):
            yield f"{folder} holds no run, nor does any folder in it. Try runs, where `run` puts them."


def _near(folder: Path) -> list[str]:
    named = os.path.normpath(RUNS / os.path.relpath(folder))  # by its label, as `status` takes it
    near = [named] if os.path.isdir(named) else paths_near(folder, folders=True)
    return [shell_word(path) for path in near]


def files_of(report: Report) -> dict[str, str | bytes]:
    """The files of the folder, by their paths in it."""
    files: dict[str, str | bytes] = {PAGE: report.html, MARKDOWN: report.markdown, TABLE: report.csv}
    if report.latency_csv:
        files[LATENCY] = report.latency_csv
    return files | {f"{PLOTS}/{plot.picture.name}.png": plot.png for plot in report.plots}


def output_problems(output: Path, *, beside: str, near: str) -> Iterator[Problem | str]:
    """Yields the reasons why a page can't be written to `output`, an absolute path.

    beside: a file that an earlier folder of this kind has next to PAGE. near: a legal value.
    """
    if os.path.lexists(output) and not is_replaceable(output, beside=beside):
        rule = f"is there and is no {near}, which alone would be replaced"
        yield Problem("--output", output, rule, (output.with_name(f"{output.name}-1"),))
    elif not os.path.isdir(parent := _parent(output)) or not os.access(parent, os.W_OK | os.X_OK):
        yield Problem("--output", output, f"can't be made: {parent} is no folder that you may write", (near,))


def is_replaceable(path: Path, *, beside: str) -> bool:
    """Whether `path` is an earlier folder of this kind, or an empty folder."""
    return (
        os.access(path, os.R_OK | os.X_OK)
        and path.is_dir()
        and (not any(path.iterdir()) or ((path / PAGE).is_file() and (path / beside).is_file()))
    )


def _parent(path: Path) -> Path:
    """The nearest path above `path` that exists: the folder to make it in, or a file that is in the way."""
    return next(above for above in path.parents if os.path.lexists(above) or above == above.parent)


def write_folder(files: Mapping[str, str | bytes], output: Path) -> None:
    """Write all files to a new folder, then move it to `output`, in place of an earlier folder of its kind.

    files: path in the folder -> content. A path is a name, or a name in PLOTS.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        (beside / PLOTS).mkdir()
        for name, content in files.items():
            if isinstance(content, str):
                write_text(beside / name, content, mode=0o666)
            else:
                write_bytes(beside / name, content, mode=0o666)
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
