"""`python -m hpc_parallel.run`: compose the configuration, check it, write the run folder, launch.

    python -m hpc_parallel.run strategy=pipeline nodes=2

Exit codes: exit_codes.py.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hydra import version

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import CellError, compose_cells, compose_run
from hpc_parallel.config.hydra_internals import print_by_flag
from hpc_parallel.config.schema import register
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED
from hpc_parallel.launch.checked_run import all_problems, prepared, reporting_all_problems, with_resumed
from hpc_parallel.launch.launcher import launcher_of
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.shell import complain, refuse

if TYPE_CHECKING:
    from hpc_parallel.sweep.earlier import Earlier


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: those of this process); returns the exit code."""
    register()
    try:
        line = CommandLine.parse(sys.argv[1:] if arguments is None else arguments)
        if line.sweeps:
            return sweep(line)
        line = with_resumed(line)
        if line.explains:
            return explain(line)
        with reporting_all_problems(line):
            cell = compose_run(line.overrides, **line.places)
        if cell.config.then is None:
            return launch(prepared(line, cell))
        from hpc_parallel.sweep.study import start

        return start(line, cell.config, check=check_words)
    except ConfigError as error:
        return refuse(error.problems)
    except KeyboardInterrupt:  # the launcher has stopped the run
        return FAILED


def check_words(words: Sequence[str], awaited: Container[Path]) -> Sequence[Problem | str]:
    """What the command `words[0]` refuses before its work. awaited: places that need not exist yet."""
    module = import_module(f"{__package__}.{words[0].replace('-', '_')}")
    with redirect_stderr(io.StringIO()) as stderr, redirect_stdout(io.StringIO()):
        try:
            code = module.main(words[1:], awaited=awaited)
        except ConfigError as error:
            return error.problems
        except SystemExit as end:  # of argparse
            usage, _, rule = stderr.getvalue().rpartition(": error: ")
            usage = " ".join(usage.rpartition("\n")[0].removeprefix("usage: ").split())
            return [f"{rule.strip()}. Try {usage}."] if end.code else []
    lines = [line.strip() for line in stderr.getvalue().splitlines() if "; nothing was " not in line]
    return [] if code == DONE else lines


def sweep(line: CommandLine) -> int:
    """Check and start all combinations of the command line; returns the exit code. Raises ConfigError."""
    from hpc_parallel.sweep.earlier import KEY, Earlier, read_earlier
    from hpc_parallel.sweep.start import held

    earlier, rest = read_earlier(line.words)
    line = line.with_words(rest)
    if earlier is None:
        return _sweep(line, None)
    with held(earlier, key=KEY.rstrip("=")):
        return _sweep(line, Earlier.read(earlier))  # read again: now no other command can change it


def _sweep(line: CommandLine, earlier: Earlier | None) -> int:
    from hpc_parallel.sweep.start import start
    from hpc_parallel.sweep.sweep_plan import plan_sweep

    try:
        cells = compose_cells(line.overrides, **line.places)
        if cells is not None:
            plan = plan_sweep(cells, command=line.words, config_dir=line.extra_dir, earlier=earlier)
    except CellError as error:  # the combination's overrides may be to blame, not those of the command line
        raise ConfigError(all_problems(error.refusal, line, also=error.overrides)) from error
    except Exception as error:
        raise ConfigError(all_problems(error, line)) from error
    if cells is None:
        from hpc_parallel.sweep.guided import guide

        folder = earlier.folder if earlier is not None else None
        return guide(line.overrides, command=line.words, earlier=folder, **line.places)
    return start(plan)


def explain(line: CommandLine) -> int:
    """Print the help, or let Hydra print what its flag requests: the configuration, a completion."""
    version.setbase("1.3")
    config_dir, config_name = line.places["config_dir"], line.places["config_name"]
    try:
        if line.flags.help:
            from hpc_parallel.config.run_help import run_help

            print(run_help(line.places))
            return DONE
        with _hydra_raises():
            print_by_flag(line.flags, main, config_dir=config_dir, config_name=config_name)
    except Exception as error:
        raise ConfigError(all_problems(error, line)) from error
    return DONE


def launch(run: PreparedRun) -> int:
    """Start one run; returns the exit code, at its end or after its submission."""
    launcher, choice = launcher_of(run)
    if run.config.dry_run:
        print(launcher.preview(run), flush=True)
        from hpc_parallel.sweep.rank_variables import describe

        complain([*describe(run), *run.notes])  # to stderr, because stdout has the batch script
        return DONE
    from hpc_parallel.slurm.submit import SiteRefusedError

    try:
        print("\n".join([str(run), choice, *run.notes]), flush=True)
        return launcher.launch(run)
    except ConfigError as error:  # the run folder can't be made
        return refuse(error.problems)
    except SiteRefusedError as refusal:
        complain([refusal])
        return REFUSED
    except BrokenPipeError:  # nothing was started, or the launcher has stopped the run: no success
        return FAILED


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let Hydra raise its errors. By default it prints them and exits with 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
