"""`python -m hpc_parallel plan hardware=NAME [OVERRIDES]`: plan the time of training steps, without a job.

    python -m hpc_parallel plan strategy=fsdp model=8b nodes=8 gpus_per_node=8 hardware=b200_node8_3200gbit
    python -m hpc_parallel plan strategy=fsdp model=8b nodes=1,2 gpus_per_node=8 hardware=b200_node8_3200gbit
    python -m hpc_parallel plan --best model=1b nodes=4 gpus_per_node=8 hardware=h100_sxm_node8_3200gbit
    python -m hpc_parallel plan --hours 24 --devices 256 --tokens 1e12 hardware=h100_sxm_node8_3200gbit
    python -m hpc_parallel plan strategy=fsdp model=8b nodes=8 hardware=b200_node8_3200gbit --output my-plan
    python -m hpc_parallel plan --table iterations.csv --output planned.csv hardware=a100_80gb_node8_800gbit
    python -m hpc_parallel plan --calibrate runs/*/* hardware=cpu --output site/hardware/mycluster.yaml

The overrides are those of a run. Several numbers of nodes show how the run scales. `--best` ranks all layouts
of the devices. A table is CSV with the columns
gpus, global_batch, micro_batch, hidden, heads, layers, sequence, tensor, data and pipeline; the output has
the same rows with `planned_ms`. The output of one configuration is a folder with a page. `--calibrate` fits a
hardware file to finished runs. `--explain` prints all numbers with their formulas; `--json` prints the
figures of a run as an object. Exit codes: 0 done, 1 the output can't be written, 2 the configuration, the
table or the command is wrong, or no layout fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.planning.hardware import NOT_CALIBRATED, Hardware, named_hardware
from hpc_parallel.planning.iteration_table import PLANNED, plan_row, read_table, table_text, with_planned
from hpc_parallel.planning.step_time import StepTime
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.shell import command_parser, complain, refuse
from hpc_parallel.terminal import print_json, say

HARDWARE = "hardware="
TOKENS = 1e12
FIRST = True  # the value of `--explain` without a row; a number would be a row
# The option of each kind of plan -> the other options that this kind reads, besides `--config-dir`.
KINDS = {
    "calibrate": ("output",),
    "table": ("output", "explain"),
    "hours": ("devices", "tokens"),
    "best": ("rows",),
    "": ("explain", "tokens", "json", "output"),
}
_T = TypeVar("_T")


def main(arguments: Sequence[str]) -> int:
    """Plan a configuration or a table; returns the exit code. Nothing is written unless it returns 0."""
    options = _parser().parse_intermixed_args(list(arguments))
    try:
        names = [word.removeprefix(HARDWARE) for word in options.overrides if word.startswith(HARDWARE)]
        overrides = [word for word in options.overrides if not word.startswith(HARDWARE)]
        kind = _kind_of(options)
        problems: list[Problem | str] = list(_foreign_options(options, kind))
        if kind == "calibrate":
            return _calibrate(options, overrides, names=names, problems=problems)
        if kind == "table":
            return _plan_table(options, overrides, names=names, problems=problems)
        if kind == "hours":
            return _plan_budget(options, names=names, problems=problems)
        if kind == "best":
            return _plan_best(options, problems=problems)
        return _plan_run(options, overrides, names=names, problems=problems)
    except ConfigError as error:
        return refuse(error.problems)


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False


def _kind_of(options: argparse.Namespace) -> str:
    if options.devices is not None and options.hours is None:
        return "hours"  # it reports that --hours is missing
    return next((kind for kind in KINDS if kind and _is_given(options, kind)), "")


def _foreign_options(options: argparse.Namespace, kind: str) -> Iterator[str]:
    known = dict.fromkeys(name for other, read in KINDS.items() for name in (other, *read) if name)
    for name in known:
        if name == kind or name in KINDS[kind] or not _is_given(options, name):
            continue
        if kind:
            yield f"--{name} does not go with --{kind}. Try it without --{name}."
        else:
            kinds = [f"--{other}" for other, read in KINDS.items() if name in read]
            yield f"--{name} is for {' and '.join(kinds)}. Try it with {kinds[0]}."


def _plan_run(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    names: Sequence[str],
    problems: list[Problem | str],
) -> int:
    if options.output is not None:
        from hpc_parallel.commands.plan_page import page_problems

        problems += page_problems(options.output, json=options.json)
    if options.explain is not None and options.explain is not FIRST:
        row = options.explain
        near = f"--explain, or --table iterations.csv --explain {row}"
        problems.append(f"--explain {row}: only a table has rows. Try {near}.")
    tokens = TOKENS if options.tokens is None else options.tokens
    problems += _token_problems(options)
    from hpc_parallel.commands.plan_run import planned_run, record, report, site_hardware
    from hpc_parallel.commands.plan_scaling import of_first_size, scaled, sizes_of

    folder = options.config_dir
    name = names[-1] if names else site_hardware(of_first_size(overrides), user_folder=folder)
    hardware = _read(lambda: named_hardware(name, user_folder=folder), problems)
    if problems or hardware is None:
        raise ConfigError(problems)
    if sizes_of(overrides):
        for_one = ("explain", "tokens", "json", "output")
        if wrong := [f"--{name}" for name in for_one if _is_given(options, name)]:
            raise ConfigError([f"{' and '.join(wrong)}: only for one number of nodes. Try nodes=1."])
        say(*scaled(options.overrides, hardware=hardware, user_folder=folder))
        return DONE
    config, work, step = planned_run(options.overrides, hardware=hardware, user_folder=folder)
    if options.json:
        print_json(record(config, (work, step), hardware=hardware, tokens=tokens))
        return DONE
    if options.explain is not None:
        say(*explanation(step, hardware))
    explain = options.explain is not None
    say(*report(config, (work, step), hardware=hardware, tokens=tokens, explain=explain))
    if options.output is None:
        return DONE
    from hpc_parallel.commands.plan_page import Planned, write_page

    return write_page(
        Planned(options.overrides, config, work, step, hardware, folder, tokens), options.output
    )


def _plan_budget(options: argparse.Namespace, *, names: Sequence[str], problems: list[Problem | str]) -> int:
    from hpc_parallel.commands.plan_budget import Budget, budgeted

    hours, devices, tokens = options.hours, options.devices, options.tokens or TOKENS
    if hours is None or devices is None:
        missing = "--hours 24" if hours is None else "--devices 256"
        problems.append(f"--hours and --devices belong together. Try it with {missing}.")
    if hours is not None and not 0 < hours < float("inf"):
        problems.append(f"--hours {hours:g} is not a positive number. Try --hours 24.")
    if devices is not None and devices < 1:
        problems.append(f"--devices {devices}: there is at least one. Try --devices 8.")
    problems += _token_problems(options)
    folder = options.config_dir
    name = names[-1] if names else None
    hardware = _read(lambda: named_hardware(name, user_folder=folder), problems)
    if problems or hardware is None:
        raise ConfigError(problems)
    budget = Budget(hours, devices, tokens)
    say(*budgeted(options.overrides, budget, hardware=hardware, user_folder=folder))
    return DONE


def _token_problems(options: argparse.Namespace) -> Iterator[str]:
    tokens = TOKENS if options.tokens is None else options.tokens
    if not 0 < tokens < float("inf"):
        yield f"--tokens {tokens:g} is not a positive number. Try --tokens {TOKENS:g}."


def _plan_best(options: argparse.Namespace, *, problems: list[Problem | str]) -> int:
    from hpc_parallel.commands.plan_best import ROWS, best, report

    rows = ROWS if options.rows is None else options.rows
    if rows < 1:
        problems.append(f"--rows {rows}: the table has at least one row. Try --rows {ROWS}.")
    folder = options.config_dir
    ranking = _read(lambda: best(options.overrides, user_folder=folder, rows=max(1, rows)), problems)
    if problems or ranking is None:
        raise ConfigError(problems)
    say(*report(ranking, options.overrides))
    return DONE


def _plan_table(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    names: Sequence[str],
    problems: list[Problem | str],
) -> int:
    problems += _option_problems(options, overrides)
    name = names[-1] if names else None
    hardware = _read(lambda: named_hardware(name, user_folder=options.config_dir), problems)
    rows = _read(lambda: read_table(options.table), problems) if options.table else None
    row = 1 if options.explain is FIRST else options.explain
    if rows and row is not None and not 1 <= row <= len(rows):
        problems.append(f"--explain {row}: the table has rows 1 to {len(rows)}. Try --explain 1.")
    if problems or hardware is None or rows is None:
        raise ConfigError(problems)
    if row is not None:
        say(*explanation(plan_row(rows[row - 1], hardware), hardware))
    if options.output is not None:
        if not _written(options.output, table_text(with_planned(rows, hardware))):
            return FAILED
        say(f"{options.output}: {len(rows)} rows with {PLANNED}. {origin(hardware)}")
    return DONE


def _calibrate(
    options: argparse.Namespace,
    overrides: Sequence[str],
    *,
    names: Sequence[str],
    problems: list[Problem | str],
) -> int:
    from hpc_parallel.commands.plan_calibrate import calibrated

    if problems:
        raise ConfigError(problems)
    name = names[-1] if names else None
    profile = calibrated(overrides, name=name, output=options.output, user_folder=options.config_dir)
    if not _written(options.output, profile.content):
        return FAILED
    say(*profile.lines)
    return DONE


def _written(file: Path, content: str) -> bool:
    """Write a file that the user named; a failure is printed."""
    try:
        write_text(file, content, mode=0o666)
    except OSError as error:
        complain([f"{file} can't be written: {error.strerror or error}."])
        return False
    return True


def _option_problems(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[str]:
    for word in overrides:
        yield f"{word}: a plan of a table takes {HARDWARE}NAME only. Try it without {word}."
    if options.output is None and options.explain is None:
        yield "--output is missing. Try --output planned.csv, or --explain 1."
    if options.output is None:
        return
    if not options.output.parent.is_dir():
        folder = options.output.parent
        yield f"--output {options.output}: there is no folder {folder}. Try mkdir -p {folder}."
    elif options.output.is_dir():
        yield f"--output {options.output} is a folder. Try --output {options.output / 'planned.csv'}."


def _read(read: Callable[[], _T], problems: list[Problem | str]) -> _T | None:
    """Returns what `read` returns. If it raises ConfigError, append the problems and return None."""
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def origin(hardware: Hardware) -> str:
    """One sentence: where the coefficients come from."""
    if hardware.calibration is None:
        return f"{NOT_CALIBRATED.capitalize()}, so expect larger errors."
    return f"Calibrated: {hardware.calibration}."


def explanation(step: StepTime, hardware: Hardware) -> Iterator[str]:
    """Every number of a plan, its formula and inputs, then their sum."""
    for term in step.terms:
        yield f"{1e3 * term.seconds:12.4f} ms  {term.name} = {term.formula}"
    parts = (step.timeline.total_s, step.gradients_s, step.update_s)
    text = " + ".join(f"{1e3 * part:.4f}" for part in parts)
    yield f"{1e3 * step.total_s:12.4f} ms  step = {text} (microbatches + gradients + update)"
    yield origin(hardware)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", "Plan the time of training steps, without a job.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="hardware=NAME, and keys of a run")
    parser.add_argument(
        "--calibrate", action="store_true", help="fit the hardware to finished runs: RUN ... in place of keys"
    )
    parser.add_argument("--best", action="store_true", help="rank the layouts of the devices")
    parser.add_argument("--rows", type=int, help="rows of --best (default 5)")
    parser.add_argument("--table", type=Path, help="a CSV of iterations")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"a folder for the page; of a table, the CSV with {PLANNED}; the file of --calibrate",
    )
    parser.add_argument(
        "--explain",
        type=int,
        nargs="?",
        const=FIRST,
        metavar="ROW",
        help="print all numbers (of a row) with formulas",
    )
    parser.add_argument("--json", action="store_true", help="print the figures of one configuration as JSON")
    parser.add_argument("--tokens", type=float, help=f"tokens of the training (default {TOKENS:g})")
    parser.add_argument("--hours", type=float, help="what can be trained in this time on --devices")
    parser.add_argument("--devices", type=int, help="how many there are for --hours")
    parser.add_argument("--config-dir", type=Path, help="a folder whose hardware/ has files of your own")
    return parser
