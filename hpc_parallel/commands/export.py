"""`python -m hpc_parallel export RUN`: the weights of a run's checkpoint as one safetensors file.

Exports the weights and running statistics of the newest sound checkpoint, or of `--step`, by full name.
`--step best` is the checkpoint that the callback KeepBest has kept.
Exit codes: 0 done, 1 the file can't be written, 2 what was asked for is wrong or damaged.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.problems import ConfigError, Problem, as_override, raise_if_any, tried
from hpc_parallel.record.checkpoint_index import OF_BEST, Checkpoint, best_step, complete, skipped
from hpc_parallel.record.find import path_of
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.shell import command_parser, output_problems
from hpc_parallel.terminal import say, warn

SUFFIX = ".safetensors"


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    options = _parser().parse_args(list(arguments))
    problems: list[Problem | str] = []
    try:
        checkpoint, output, reads = None, options.output, awaited is None
        if Path(options.run) not in (awaited or ()):
            folder = RunFolder(path_of(options.run))
            checkpoint = tried(lambda: find(folder, step=options.step, reads=reads), problems)
        if checkpoint is not None:
            output = output or checkpoint.path.parents[1] / f"{checkpoint.path.name}{SUFFIX}"
        problems += _output_problems(output, awaited or ()) if output is not None else ()
        raise_if_any(problems)
        if awaited is not None or checkpoint is None:
            return DONE
        from hpc_parallel.training.export_weights import write  # the import of torch is slow

        size = write(checkpoint, output, library_names=options.library_names)
    except (UntrustedError, DamagedError) as error:
        raise ConfigError([str(error)]) from error
    except OSError as error:
        warn(f"{options.output or options.run} can't be written: {error.strerror or error}.")
        return FAILED
    say(f"{output}: the weights of step {checkpoint.step}, {size:,} bytes.")
    say(f"To start from these weights, add {as_override('weights', output)} to the command of the run.")
    return DONE


def find(folder: RunFolder, *, step: int | str | None, reads: bool = True) -> Checkpoint:
    """The checkpoint of `step`, or the newest that is not damaged. Warn of the damaged ones that are skipped.

    step: a number, or OF_BEST, which is never replaced by another checkpoint.

    Refuse a folder that other users can write to, because the index of a checkpoint is a pickle.

    reads: whether to read all files, which takes long, to see if they are damaged.

    Raises ConfigError, UntrustedError, DamagedError.
    """
    if refusal := unreadable(folder.path):
        raise ConfigError([refusal])
    if not is_run_folder(folder.path):
        raise ConfigError([f"{folder.path} is not a run folder (no config.yaml and rendezvous in it)."])
    require_private(folder.path)
    checkpoints = complete(folder.checkpoints)
    if names := skipped(folder.checkpoints):
        warn(f"WARNING: {', '.join(names)} in {folder.checkpoints}: only folders count as checkpoints")
    if not checkpoints:
        raise ConfigError([f"{folder.path} has no checkpoint (training.checkpoint_every)."])
    steps = ", ".join(str(checkpoint.step) for checkpoint in checkpoints)
    if isinstance(step, str) and (step := best_step(folder.checkpoints)) is None:
        rule = "records no best checkpoint (the callback KeepBest)"
        raise ConfigError([f"{folder.path} {rule}. It has: {steps}."])
    if step is not None and all(checkpoint.step != step for checkpoint in checkpoints):
        raise ConfigError([f"{folder.path} has no checkpoint of step {step}. It has: {steps}."])
    damaged: list[str] = []
    for checkpoint in checkpoints:
        if step is not None and checkpoint.step > step:
            continue
        require_private(checkpoint.path)
        if damage := checkpoint.damage() if reads else None:
            damaged.append(f"the checkpoint of step {checkpoint.step} is damaged ({damage})")
        elif step not in (None, checkpoint.step):
            raise ConfigError([f"{'; '.join(damaged)}. Try --step {checkpoint.step}."])
        else:
            warn(*(f"WARNING: {warning}" for warning in damaged))
            return checkpoint
    raise ConfigError([f"{'; '.join(damaged)}, and no sound one is before."])


def _output_problems(output: Path, awaited: Container[Path]) -> Iterator[str]:
    yield from output_problems(output, ending=SUFFIX, awaited=awaited)
    if os.path.lexists(output):
        yield f"{output} exists already, and a job may be reading it. Try another --output."


def _step(text: str) -> int | str:
    if text == OF_BEST:
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text} is no step. Try a number, or {OF_BEST}")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("export", __doc__)
    parser.add_argument("run", help="a run folder, a run id, a job id or a part of a name")
    parser.add_argument(
        "--step",
        type=_step,
        help="of which checkpoint: a number, or `best` (default: the newest that is sound)",
    )
    parser.add_argument("--output", type=Path, help="the file (default: RUN/step-<n>.safetensors)")
    parser.add_argument(
        "--library-names", action="store_true", help="use the names of the model's own code or library"
    )
    return parser
