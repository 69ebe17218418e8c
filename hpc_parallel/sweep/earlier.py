"""`sweep.resume=FOLDER`: the command line of an earlier sweep, and the current states of its runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.failure.run_state import State, states
from hpc_parallel.launch.resume import value_of
from hpc_parallel.problems import ConfigError, Problem, as_override, nearest
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.endings import COMPLETED, PRUNED
from hpc_parallel.record.names import RUNS, from_here
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_start import grants_trust, inherited
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, SweepRun, is_sweep_folder, read_sweep
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private

KEY = "sweep.resume"
_MAX_NAMES = 3  # runs in one error message
_MULTIRUN = ("-m", "--multirun")
# The placement of a run does not identify it: it may change at the second start.
_PLACEMENT = ("launcher.", "launcher=", "cluster.", "cluster=")


@dataclass(frozen=True)
class EarlierState:
    """The state of a run of an earlier start."""

    text: str
    settled: bool  # completed, pruned or in progress, so it is not started again
    has_checkpoint: bool = False


@dataclass
class Earlier:
    """The earlier sweep to continue; each of its runs is found once."""

    folder: Path
    sweep: Sweep
    _states: dict[Path, State]
    _not_found: list[SweepRun] = field(init=False)

    def __post_init__(self) -> None:
        self._not_found = list(self.sweep.runs)

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        sweep = read_sweep(folder)
        run_states = states([read_run(run.run_dir) for run in sweep.runs])
        by_folder = {run.run_dir: state for run, state in zip(sweep.runs, run_states, strict=True)}
        return cls(folder, sweep, by_folder)

    def find(self, overrides: Sequence[str]) -> SweepRun | None:
        """The run with these overrides, else one that differs only in its placement."""
        exact = [run for run in self._not_found if set(run.overrides) == set(overrides)]
        without = _without_placement(overrides)
        alike = [run for run in self._not_found if _without_placement(run.overrides) == without]
        for run in (*exact, *alike):
            self._not_found.remove(run)
            return run
        return None

    def require_all_found(self) -> None:
        """Raise ConfigError if the combinations of this command do not include all earlier runs."""
        runs = self._not_found
        if not runs:
            return
        labels = [self.sweep.distinct_overrides(run.overrides) or run.run_dir.name for run in runs]
        more = f" and {len(labels) - _MAX_NAMES} more" if len(labels) > _MAX_NAMES else ""
        raise ConfigError([
            f"sweep.resume = {self.folder}: {len(labels)} of its {len(self.sweep.runs)} runs are not in this "
            f"command ({'; '.join(labels[:_MAX_NAMES])}{more}). Every earlier run must stay in the sweep, "
            "and only where it takes place may change: add values to the swept keys, or start a new sweep."
        ])  # fmt: skip

    def state(self, run: SweepRun) -> EarlierState:
        folder = RunFolder(run.run_dir)
        if not is_run_folder(folder.path):
            return EarlierState("missing", settled=False)
        state = self._states[run.run_dir]
        if not state.ended:
            return EarlierState(f"in progress: {state}", settled=True)
        if state.name in (COMPLETED, PRUNED):
            return EarlierState(state.name, settled=True)
        return EarlierState(str(state), settled=False, has_checkpoint=bool(complete(folder.checkpoints)))


def read_earlier(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that `sweep.resume=` names, and the combined arguments of both commands.

    Raises ConfigError if that folder can't be continued.
    """
    resumes = [argument for argument in arguments if argument.startswith(f"{KEY}=")]
    value = value_of(resumes[-1]) if resumes else None
    others = [argument for argument in arguments if not argument.startswith(f"{KEY}=")]
    if value is None:
        return None, others
    folder = Path(os.path.expanduser(str(value))).absolute()
    if (reason := unreadable(folder)) is not None:
        raise ConfigError([f"sweep.resume = {folder}: {reason}"])
    if not is_sweep_folder(folder):
        sweeps = {path.name: path for parent in (RUNS / "sweeps", folder.parent) for path in parent.glob("*")
                  if is_sweep_folder(path)}  # fmt: skip
        near = nearest(folder.name, sweeps) or sorted(sweeps)[-1:]
        legal = tuple(sweeps[name] for name in near)
        raise ConfigError(
            [Problem("sweep.resume", folder, f"is not a sweep folder (no {MANIFEST})", legal or (None,))]
        )
    try:
        require_own(folder)  # because its command line will be used
        if not grants_trust(others, value_of):
            require_private(folder)
        sweep = read_sweep(folder)
    except UntrustedError as error:
        raise ConfigError([f"sweep.resume = {folder} is not to be trusted: {error}"]) from error
    except ValueError as error:
        raise ConfigError([f"sweep.resume: {error}"]) from error
    (old_flags, old), (new_flags, new) = _split_flags(sweep.command), _split_flags(others)
    old = [override for override in inherited(old) if override not in new]
    old_flags = [flag for flag in old_flags if flag not in _MULTIRUN or flag not in new_flags]
    return folder, [*old_flags, *new_flags, *old, *new]


def require_own(folder: Path) -> None:
    """Raise UntrustedError if another user created the sweep, even if the user trusts other writers."""
    for path in (folder, folder / MANIFEST):
        if (owner := owner_name(path)) is not None:
            raise UntrustedError(f"{path} belongs to {owner}. Start a sweep of your own.")


def resume_command(folder: Path) -> str:
    """The shell command that runs the missing and failed runs of a sweep."""
    return f"python -m hpc_parallel.run -m {as_override(KEY, from_here(folder))}"


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and the overrides: a flag must not come between overrides."""
    overrides = CommandLine.parse(arguments).overrides
    return [argument for argument in arguments if argument not in overrides], overrides


def _without_placement(overrides: Sequence[str]) -> frozenset[str]:
    return frozenset(override for override in overrides if not override.lstrip("+~").startswith(_PLACEMENT))
