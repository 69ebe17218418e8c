"""`python -m hpc_parallel plan hardware=NAME [OVERRIDES]`: plan the time of training steps, without a job.

    python -m hpc_parallel plan strategy=fsdp model=8b nodes=8 gpus_per_node=8 hardware=b200_node8_3200gbit
    python -m hpc_parallel plan strategy=fsdp model=8b nodes=1,2 gpus_per_node=8 hardware=b200_node8_3200gbit
    python -m hpc_parallel plan --best model=1b nodes=4 gpus_per_node=8 hardware=h100_sxm_node8_3200gbit
    python -m hpc_parallel plan strategy=fsdp model=8b nodes=8 hardware=b200_node8_3200gbit --output my-plan
    python -m hpc_parallel plan --calibrate runs/*/* hardware=cpu --output site/hardware/mycluster.yaml

The overrides are those of a run. Several numbers of nodes show how the run scales. `--best` ranks all layouts
of the devices. The output of one configuration is a folder with a page. `--calibrate` fits a hardware file to
finished runs. `--explain` prints all numbers with their formulas; `--json` prints the figures of a run as an
object. Exit codes: 0 done, 1 the output can't be written, 2 the configuration or the command is wrong, or no
layout fits.
"""

from __future__ import annotations

import argparse
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.planning.hardware import named_hardware
from hpc_parallel.planning.step_time import StepTime
from hpc_parallel.problems import ConfigError, Problem, raise_if_any, shell_word, tried
from hpc_parallel.record.find import path_of
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.shell import command_parser, complain, names_awaited, output_problems, refuse
from hpc_parallel.terminal import print_json, say

HARDWARE = "hardware="
TOKENS = 1e12
FOLDER, ENDING = "hardware", ".yaml"  # of a hardware file
# The option of each kind of plan -> the other options that this kind reads, besides `--config-dir`.
KINDS = {
    "calibrate": ("output",),
    "best": ("rows",),
    "": ("explain", "tokens", "json", "output"),
}


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    """Plan a configuration; returns the exit code. Nothing is written unless it returns 0."""
    options = _parser().parse_intermixed_args(list(arguments))
    options.is_check = awaited is not None
    if names_awaited(options.overrides, awaited):
        return DONE
    try:
        names = [word.removeprefix(HARDWARE) for word in options.overrides if word.startswith(HARDWARE)]
        overrides = [word for word in options.overrides if not word.startswith(HARDWARE)]
        kind = next((kind for kind in KINDS if kind and _is_given(options, kind)), "")
        problems: list[Problem | str] = list(_foreign_options(options, kind))
        if kind == "calibrate":
            return _calibrate(options, overrides, names=names, problems=problems)
        if kind == "best":
            return _plan_best(options, problems=problems)
        return _plan_run(options, overrides, names=names, problems=problems)
    except ConfigError as error:
        return refuse(error.problems)


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False


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
    options: argparse.Namespace, overrides: Sequence[str], *, names: Sequence[str],
    problems: list[Problem | str],
) -> int:  # fmt: skip
    if options.output is not None:
        from hpc_parallel.commands.plan_page import page_problems

        problems += page_problems(options.output, json=options.json)
    tokens = TOKENS if options.tokens is None else options.tokens
    if not 0 < tokens < float("inf"):
        problems.append(f"--tokens {tokens:g} is not a positive number. Try --tokens {TOKENS:g}.")
    from hpc_parallel.commands.plan_run import planned_run, record, report, site_hardware
    from hpc_parallel.commands.plan_scaling import of_first_size, scaled, sizes_of

    folder = options.config_dir
    name = names[-1] if names else site_hardware(of_first_size(overrides), user_folder=folder)
    hardware = tried(lambda: named_hardware(name, user_folder=folder), problems)
    if problems or hardware is None:
        raise ConfigError(problems)
    if sizes_of(overrides):
        for_one = ("explain", "tokens", "json", "output")
        if wrong := [f"--{name}" for name in for_one if _is_given(options, name)]:
            raise ConfigError([f"{' and '.join(wrong)}: only for one number of nodes. Try nodes=1."])
        say(*scaled(options.overrides, hardware=hardware, user_folder=folder))
        return DONE
    plan = planned_run(options.overrides, hardware=hardware, user_folder=folder)
    if options.json:
        print_json(record(plan, tokens=tokens))
        return DONE
    if options.explain:
        say(*explanation(plan.step))
    say(*report(plan, tokens=tokens, explain=options.explain))
    if options.output is None or options.is_check:
        return DONE
    from hpc_parallel.commands.plan_page import write_page

    return write_page(plan, options.output, tokens=tokens)


def _plan_best(options: argparse.Namespace, *, problems: list[Problem | str]) -> int:
    from hpc_parallel.commands.plan_scaling import ROWS, best_layouts

    rows = ROWS if options.rows is None else options.rows
    if rows < 1:
        problems.append(f"--rows {rows}: the table has at least one row. Try --rows {ROWS}.")
    folder = options.config_dir
    lines = tried(lambda: [*best_layouts(options.overrides, user_folder=folder, rows=max(1, rows))], problems)
    if problems or lines is None:
        raise ConfigError(problems)
    say(*lines)
    return DONE


def _calibrate(
    options: argparse.Namespace, overrides: Sequence[str], *, names: Sequence[str],
    problems: list[Problem | str],
) -> int:  # fmt: skip
    raise_if_any(problems)
    name = names[-1] if names else None
    content, lines = calibrated(overrides, name=name, output=options.output, user_folder=options.config_dir)
    if options.is_check:
        return DONE
    try:
        write_text(options.output, content, mode=0o666)
    except OSError as error:
        complain([f"{options.output} can't be written: {error.strerror or error}."])
        return FAILED
    say(*lines)
    return DONE


def calibrated(
    run_names: Sequence[str], *, name: str | None, output: Path | None, user_folder: Path | None
) -> tuple[str, list[str]]:
    """The content of a hardware file that is fitted to finished runs, and lines for the user.

    name: the hardware that the fit starts from. Raises ConfigError with all problems.
    """
    from hpc_parallel.planning.calibration import calibrate, read_runs, report, text

    problems: list[Problem | str] = list(_output_problems(output))
    hardware = tried(lambda: named_hardware(name, user_folder=user_folder, needed_by="--calibrate"), problems)
    runs = None
    if not run_names:
        problems.append("--calibrate has no run. Try it with run folders: --calibrate runs/data/* ...")
    elif (start := hardware) is not None:
        runs = tried(lambda: read_runs([path_of(run) for run in run_names], start), problems)
    if problems or hardware is None or runs is None or output is None:
        raise ConfigError(problems)
    calibration = calibrate(runs, hardware)
    return text(calibration, base=str(name)), [*report(calibration), _usage(output)]


def _usage(file: Path) -> str:
    name = f"hardware={file.stem}"
    if file.absolute().parent.name == FOLDER:
        return (
            f"{file}: use it with `plan --config-dir {shell_word(file.parent.parent)} {name}`, or in a run."
        )
    return f"{file}: copy it to FOLDER/{FOLDER}/, then `plan --config-dir FOLDER {name}`."


def _output_problems(output: Path | None) -> Iterator[str]:
    if output is None:
        yield f"--output is missing. Try --output site/{FOLDER}/mycluster{ENDING}."
    else:
        yield from output_problems(output, ending=ENDING)


def explanation(step: StepTime) -> Iterator[str]:
    """Every number of a plan, its formula and inputs, then their sum."""
    for term in step.terms:
        yield f"{1e3 * term.seconds:12.4f} ms  {term.name} = {term.formula}"
    parts = (step.timeline.total_s, step.gradients_s, step.update_s)
    text = " + ".join(f"{1e3 * part:.4f}" for part in parts)
    yield f"{1e3 * step.total_s:12.4f} ms  step = {text} (microbatches + gradients + update)"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("plan", "Plan the time of training steps, without a job.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="hardware=NAME, and keys of a run")
    parser.add_argument(
        "--calibrate", action="store_true", help="fit the hardware to finished runs: RUN ... in place of keys"
    )
    parser.add_argument("--best", action="store_true", help="rank the layouts of the devices")
    parser.add_argument("--rows", type=int, help="rows of --best (default 5)")
    parser.add_argument("--output", type=Path, help="a folder for the page, or the file of --calibrate")
    parser.add_argument("--explain", action="store_true", help="print all numbers with formulas")
    parser.add_argument("--json", action="store_true", help="print the figures of one configuration as JSON")
    parser.add_argument("--tokens", type=float, help=f"tokens of the training (default {TOKENS:g})")
    parser.add_argument("--config-dir", type=Path, help="a folder whose hardware/ has files of your own")
    return parser
