"""The command: compose the configuration, check it, write the run folder, launch.

    python -m hpc_parallel.run strategy=pipeline nodes=2

Exit codes: 0 done, 1 the run failed, 2 the configuration is wrong (nothing was written or submitted),
3 the site refused (Slurm's own words are shown).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config.compose import UnresolvedError, find_folder
from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.config.schema import register
from hpc_parallel.launch.launchers import SiteRefusedError, choose
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.launch.resume import resumed
from hpc_parallel.shell import complain, run_command

if TYPE_CHECKING:
    from hpc_parallel.sweep.earlier import Earlier

DONE, FAILED, WRONG_CONFIGURATION, REFUSED = range(4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (default: this process's own); returns the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    # Hydra wants a plus where no default names the group; a study is said both ways.
    sys.argv[1:] = [word.removeprefix("+") if word.startswith("+jobs=") else word for word in words]
    register()
    try:
        if (own := get_args().config_dir) and not Path(own).is_dir():
            raise ConfigError([f"--config-dir {own}: there is no such folder here."])
        if is_sweep():
            return sweep()
        runs = compose_resumed()
    except ConfigError as error:
        return report(error.problems)
    except KeyboardInterrupt:  # the launcher has ended what it had started
        return FAILED
    try:
        return max([launch(run) for run in runs], default=DONE)
    except KeyboardInterrupt:
        return FAILED


def is_sweep() -> bool:
    """Whether `-m` is said (or what Hydra means by it), and none of Hydra's flags that only explain."""
    said = get_args()
    mode = any(word.lower() == "hydra.mode=multirun" for word in said.overrides)
    return (said.multirun or mode) and not (
        said.help or said.hydra_help or said.run or said.cfg or said.info or said.shell_completion
    )


def sweep() -> int:
    """All combinations of the command line, checked together; returns the exit code. Raises ConfigError."""
    from hpc_parallel.sweep.earlier import KEY, Earlier, read_earlier
    from hpc_parallel.sweep.hold import held

    earlier, sys.argv[1:] = read_earlier(sys.argv[1:])
    if earlier is None:
        return _sweep(None)
    with held(earlier, key=KEY.rstrip("=")):
        return _sweep(Earlier.read(earlier))  # as it is now that nobody else goes on with it


def _sweep(earlier: Earlier | None) -> int:
    from hpc_parallel.config.cells import CellError, compose_cells
    from hpc_parallel.sweep.command import start
    from hpc_parallel.sweep.plan import plan_sweep

    said, configs = get_args(), str(find_folder("conf"))
    try:
        cells = compose_cells(said.overrides, **_places(configs))
        if cells is not None:
            plan = plan_sweep(cells, command=sys.argv[1:], config_dir=said.config_dir, earlier=earlier)
    except UnresolvedError as error:
        raise ConfigError(_diagnose(error, configs)) from error
    except ConfigError:
        raise
    except CellError as error:  # told by its own words where those of the command line are not to blame
        raise ConfigError(_diagnose(error.refusal, configs, also=error.overrides)) from error
    except Exception as error:
        raise ConfigError(_diagnose(error, configs)) from error
    if cells is None:
        from hpc_parallel.sweep.guided import guide

        folder = earlier.folder if earlier is not None else None
        return guide(said.overrides, command=sys.argv[1:], earlier=folder, **_places(configs))
    return start(plan)


def compose_resumed() -> list[PreparedRun]:
    """`compose`, after the command line of the run that `resume=` names. Raises ConfigError."""
    words = sys.argv[1:]
    try:
        sys.argv[1:] = resumed(words)
    except ConfigError as error:
        sys.argv[1:] = [word for word in words if not word.startswith("resume=")]
        try:
            compose()  # for what else is wrong
        except ConfigError as others:
            raise ConfigError([*error.problems, *others.problems]) from None
        raise
    return compose()


def compose() -> list[PreparedRun]:
    """The checked run of this process's command line; none where it asks for help.

    Raises ConfigError with all problems.
    """
    configs = str(find_folder("conf"))
    runs: list[PreparedRun] = []
    errors: list[ConfigError] = []

    @hydra.main(version_base="1.3", config_path=configs, config_name="config")
    def compose_one(config: DictConfig) -> None:
        try:
            # As it was typed: the list's own iteration would resolve ${...}, and in Hydra's configuration.
            said = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
            assert isinstance(said, list)
            if of_a_sweep := [word for word in said if word.startswith("sweep.")]:
                raise ConfigError([f"{w}: only a sweep has this. Try -m {w}." for w in of_a_sweep])
            if not get_args().multirun and (refusal := _unsaid_of_a_study(said)):
                raise ConfigError([refusal])
            runs.append(prepare(config, overrides=said, config_dir=get_args().config_dir))
        except ConfigError as error:
            errors.append(error)

    try:
        with _hydra_raises():
            compose_one()
    except Exception as error:
        raise ConfigError(_diagnose(error, configs)) from error
    for refused in errors:
        if isinstance(refused, UnresolvedError):
            raise ConfigError(_diagnose(refused, configs))
        raise refused
    return runs


def _unsaid_of_a_study(said: Sequence[str]) -> str | None:
    """Why one run of a study can't be told from the others; None where all that it sweeps is said."""
    hydra = HydraConfig.get()
    study = hydra.runtime.choices.get("jobs")
    keys = {word.partition("=")[0].lstrip("+") for word in said}
    swept = [
        f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items() if key not in keys
    ]
    if study is None or not swept:
        return None
    first = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(swept), None)[0][0]
    return f"jobs={study}: a study is many runs. Try -m jobs={study}, or one: jobs={study} {' '.join(first)}."


def launch(run: PreparedRun) -> int:
    """One run, from its folder to its end (or its submission); returns the exit code."""
    launcher, choice = choose(run.config.launcher.kind)
    if run.config.dry_run:
        print(launcher.preview(run))
        return DONE
    print("\n".join([str(run), choice, *run.notes]))
    try:
        return launcher.launch(run)
    except ConfigError as error:  # the run folder can't be made
        return report(error.problems)
    except SiteRefusedError as refusal:
        complain([refusal])
        return REFUSED
    except BrokenPipeError:  # the launcher has ended what it had started: this is no success
        return FAILED


def _places(configs: str) -> dict[str, Any]:
    """Where the command line has its configuration from: ours, unless Hydra's flags name another."""
    said = get_args()
    return {
        "config_dir": str(Path(said.config_path).absolute()) if said.config_path else configs,
        "config_name": said.config_name or "config",
        "extra_dir": said.config_dir,
    }


def _diagnose(error: Exception, configs: str, *, also: Sequence[str] = ()) -> list[Problem | str]:
    """All that is wrong with the command line that Hydra (or the schema) refused with `error`.

    `also`: the overrides of one combination, which a study may have other words of than the command line.
    """
    from hpc_parallel.config.diagnose import COMPOSE_ERRORS, diagnose

    if not isinstance(error, COMPOSE_ERRORS):
        raise error
    words = get_args()
    try:
        found = diagnose(words.overrides, **_places(configs), sweep=is_sweep())
        found = found or diagnose(also, **_places(configs))
    except COMPOSE_ERRORS:  # the primary configuration itself can't be composed
        found = []
    if not found and isinstance(error, ConfigError):
        return error.problems
    return found or [" ".join(str(error).partition("\n\n")[0].split())]


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Hydra prints its refusals and exits with 1, unless this variable makes it raise them."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def report(problems: Sequence[Problem | str]) -> int:
    """Tell all problems on stderr; returns the exit code for them."""
    count = len(problems)
    complain([f"{count} problem{'s' * (count > 1)} in the configuration; nothing was started."])
    complain(problems, indent="  ")
    return WRONG_CONFIGURATION


if __name__ == "__main__":
    sys.exit(run_command(main))
