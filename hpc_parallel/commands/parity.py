"""`python -m hpc_parallel parity [strategy=...] [nodes=...] [any override]`: strategies against one device.

`recipes=true` takes the recipes of docs/recipes.md, with small sizes. Each row trains the same steps from the
same seed as one device does, and is compared with it. Exit codes: 0 all equal, 1 one is not or did not run,
2 the configuration is wrong (nothing was started), 3 the site refused.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Container, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_parallel.config.schema import register
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.failure.failure import CONFIGURATION
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import ConfigError
from hpc_parallel.proof.cases import Case, plan, without_refused
from hpc_parallel.proof.compare import ROUNDED, TOLERANCES, Tolerance, Verdict, compare
from hpc_parallel.proof.parity_table import Pace, Table
from hpc_parallel.record.endings import Failure
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.shell import command_parser, complain, names_awaited, refuse
from hpc_parallel.slurm.submit import SiteRefusedError


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    """Compare the strategies that the arguments name with one device; returns the exit code."""
    parser = command_parser("parity", __doc__)
    parser.add_argument("overrides", nargs="*", help="as of `run`; precision=float64 for the sharpest proof")
    parser.add_argument("--config-dir", help="a folder with configurations of your own")
    options = parser.parse_intermixed_args(list(arguments))
    if options.config_dir is not None and not os.path.isdir(options.config_dir):
        return refuse([f"--config-dir {options.config_dir}: this folder does not exist."])
    register()
    if names_awaited(options.overrides, awaited):
        return DONE
    try:
        cases, notes = plan(options.overrides, extra_dir=options.config_dir)
    except ConfigError as error:
        return refuse(error.problems)
    runs = [case.run for case in cases if case.run is not None]
    if runs[0].config.dry_run and awaited is None:
        print(*runs, sep="\n")
        return DONE
    try:
        cases = without_refused(cases, options.overrides)
        if awaited is not None:
            return DONE
        return prove(cases, notes, precision=runs[0].config.training.precision)
    except ConfigError as error:  # the model refuses every row, or a run folder can't be made
        return refuse(error.problems)
    except SiteRefusedError as refusal:
        complain([refusal])
        return REFUSED


def prove(cases: Sequence[Case], notes: Sequence[str], *, precision: str) -> int:
    """Run and compare one case after the other, and print a line for each; returns the exit code.

    After each row `parity.json` has all rows so far. Ctrl-C ends the table after the rows that are done.
    """
    tolerance = TOLERANCES[precision]
    table = Table(tolerance, precision=precision)
    pace = Pace(cases)
    table.begin(pace.plan())
    folder = next(case.run.folder.path.parent for case in cases if case.run is not None)
    alone: dict[str, str | None] = {}  # folder of one device's run -> why it failed
    lines: list[dict[str, Any]] = []
    is_interrupted = False
    try:
        for number, case in enumerate(cases, start=1):
            what = f"{number} of {len(cases)}: {case.row.strategy}, {case.net}, {case.layout}"
            with table.working([what, *pace.figures()]):
                verdict = judge(case, tolerance, alone, pace=pace)
            table.add(case, verdict)
            lines.append(
                {"strategy": case.row.strategy, "net": case.net, "layout": case.layout, **asdict(verdict)}
            )
            if folder.is_dir():  # the first run makes it
                write_json(folder / "parity.json", {"precision": precision, "rows": lines})
    except KeyboardInterrupt:  # the launcher has ended the run that it had started
        is_interrupted = True
    counts = Counter(line["word"] for line in lines)
    if is_interrupted:
        notes = [*notes, f"ended by Ctrl-C: {len(lines)} of {len(cases)} rows are done and kept"]
    table.end(counts, [*notes, pace.total()], folder=folder)
    return FAILED if is_interrupted or counts["MISS"] or counts["failed"] else DONE


def judge(case: Case, tolerance: Tolerance, alone: dict[str, str | None], *, pace: Pace) -> Verdict:
    """Run the case, and one device unless it has run already; returns the result of their comparison."""
    if case.run is None or case.alone is None:
        return Verdict("left out", [str(problem) for problem in case.problems])
    key = str(case.alone.folder.path)
    if key not in alone:
        with pace.run():
            alone[key] = run_quietly(case.alone)
    if alone[key] is not None:
        return Verdict("failed", [f"one device: {alone[key]}"])
    with pace.run():
        cause = run_quietly(case.run)
    if cause:
        failure = Failure.read(case.run.folder)
        refused = failure is not None and failure.kind == CONFIGURATION
        return Verdict("left out" if refused else "failed", [cause, f"results: {case.run.folder.path}"])
    notes, precision = [], case.run.config.training.precision
    if (case.alone.folder.proof / ROUNDED).exists():  # written on one device
        notes = ["The model computes parts in less than float64, so the bounds are those of float32"]
        tolerance = TOLERANCES["float32"]
    elif tolerance is not TOLERANCES[precision]:
        notes, tolerance = [f"The bounds are those of {precision}"], TOLERANCES[precision]
    if notes:
        bounds = ", ".join(f"{name} {bound:g}" for name, bound in tolerance.bounds.items())
        notes = [f"{notes[0]}: {bounds}."]
    try:
        differences = compare(case.run.folder, case.alone.folder, tolerance=tolerance)
    except ValueError as error:
        return Verdict("failed", [str(error)])
    missed = [
        f"{name}: {difference.where} is off by {difference} > {tolerance.bounds[name]:g}"
        for name, difference in differences.items()
        if not difference.value <= tolerance.bounds[name]
    ]
    return Verdict("MISS" if missed else "equal", [*missed, *notes], differences, tolerance.bounds)


def run_quietly(run: PreparedRun) -> str | None:
    """Run to the end and show nothing. Returns the cause if the run fails. Raises SiteRefusedError."""
    launcher, _ = launcher_of(run)
    with redirect_stdout(io.StringIO()) as printed:
        code = launcher.launch(run)
    if code == DONE:
        return None
    failure = Failure.read(run.folder) or Failure()
    return failure.line or printed.getvalue().strip().rpartition("\n")[2] or f"exit code {code}"
