"""`plan --calibrate RUN... hardware=NAME --output FILE`: fit a hardware file to finished runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.planning.calibration import calibrate, report, text
from hpc_parallel.planning.hardware import named_hardware
from hpc_parallel.planning.measured_runs import read_runs
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.find import path_of

FOLDER, ENDING = "hardware", ".yaml"


@dataclass(frozen=True)
class Profile:
    """The content of a hardware file, and what to tell the user."""

    content: str
    lines: list[str]


def calibrated(
    run_names: Sequence[str], *, name: str | None, output: Path | None, user_folder: Path | None
) -> Profile:
    """name: the hardware that the fit starts from. Raises ConfigError with all problems."""
    problems: list[Problem | str] = list(_output_problems(output))
    hardware = runs = None
    try:
        hardware = named_hardware(name, user_folder=user_folder, needed_by="--calibrate")
    except ConfigError as error:
        problems += error.problems
    if not run_names:
        problems.append("--calibrate has no run. Try it with run folders: --calibrate runs/data/* ...")
    if hardware is not None and run_names:
        try:
            runs = read_runs([path_of(run) for run in run_names], hardware)
        except ConfigError as error:
            problems += error.problems
    if problems or hardware is None or runs is None or output is None:
        raise ConfigError(problems)
    calibration = calibrate(runs, hardware)
    return Profile(text(calibration, base=str(name)), [*report(calibration), usage(output)])


def usage(file: Path) -> str:
    """How to use a hardware file."""
    name = f"hardware={file.stem}"
    if file.absolute().parent.name == FOLDER:
        return f"{file}: use it with `plan --config-dir {file.parent.parent} {name}`, or in a run."
    return f"{file}: copy it to FOLDER/{FOLDER}/, then `plan --config-dir FOLDER {name}`."


def _output_problems(output: Path | None) -> Iterator[str]:
    if output is None:
        yield f"--output is missing. Try --output site/{FOLDER}/mycluster{ENDING}."
    elif output.suffix != ENDING:
        yield f"--output {output}: a hardware file ends in {ENDING}. Try {output.with_suffix(ENDING)}."
    elif not output.parent.is_dir():
        yield f"--output {output}: there is no folder {output.parent}. Try mkdir -p {output.parent}."
