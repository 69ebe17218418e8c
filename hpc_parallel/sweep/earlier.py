"""`sweep.resume=FOLDER`: the words of that sweep before yours, and how each of its runs stands now."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args

from hpc_parallel.launch.resume import value_of
from hpc_parallel.problems import ConfigError, Problem, nearest, quoted
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_start import SHARED_FOLDER, grants_trust, key_of
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.sweep_folder import MANIFEST, Sweep, SweepRun, is_sweep_folder, read_sweep
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private
from hpc_parallel.supervise.run_state import State as RunState
from hpc_parallel.supervise.run_state import states

KEY = "sweep.resume="
_NAMED = 3  # runs that an error tells
_MULTIRUN = ("-m", "--multirun")
# Where and how a run is placed is no part of what it is: it may be said differently the second time.
_PLACING = ("launcher.", "launcher=", "cluster.", "cluster=")


@dataclass(frozen=True)
class State:
    """How a run of an earlier start stands. settled: completed or going on, in `words`."""

    words: str
    settled: bool
    has_checkpoint: bool = False


@dataclass
class Earlier:
    """The sweep to go on with; each of its runs is found once."""

    folder: Path
    sweep: Sweep
    _states: dict[Path, RunState]
    _left: list[SweepRun] = field(init=False)

    def __post_init__(self) -> None:
        self._left = list(self.sweep.runs)

    @classmethod
    def read(cls, folder: Path) -> Earlier:
        sweep = read_sweep(folder)
        known = states([read_run(run.run_dir) for run in sweep.runs])
        return cls(folder, sweep, {run.run_dir: state for run, state in zip(sweep.runs, known, strict=True)})

    def find(self, overrides: Sequence[str]) -> SweepRun | None:
        """The run of these overrides, else one that differs only in where it is placed."""
        exact = [run for run in self._left if set(run.overrides) == set(overrides)]
        alike = [run for run in self._left if _what(run.overrides) == _what(overrides)]
        for run in (*exact, *alike):
            self._left.remove(run)
            return run
        return None

    def require_all_found(self) -> None:
        """Raises ConfigError where runs of the sweep are none of the combinations that are said now."""
        if not self._left:
            return
        labels = [self.sweep.distinct_overrides(run.overrides) or run.run_dir.name for run in self._left]
        more = f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else ""
        raise ConfigError([
            f"sweep.resume = {self.folder}: {len(labels)} of its {len(self.sweep.runs)} runs would be none "
            f"of those said now ({'; '.join(labels[:_NAMED])}{more}). What was a run must stay one: add "
            "values to those that it sweeps, or start a sweep of its own without sweep.resume."
        ])  # fmt: skip

    def state(self, run: SweepRun) -> State:
        folder = RunFolder(run.run_dir)
        if not is_run_folder(folder.path):
            return State("missing", settled=False)
        state = self._states[run.run_dir]
        if not state.ended:
            return State(f"going on: {state}", settled=True)
        if state.word == "completed":
            return State(state.word, settled=True)
        return State(str(state), settled=False, has_checkpoint=bool(complete(folder.checkpoints)))


def read_earlier(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The folder that `sweep.resume=` names in `words`, and the words of both commands.

    Raises ConfigError where there is none to go on with.
    """
    named = [word for word in words if word.startswith(KEY)]
    value = value_of(named[-1]) if named else None
    others = [word for word in words if not word.startswith(KEY)]
    if value is None:
        return None, others
    folder = Path(os.path.expanduser(str(value))).absolute()
    if (reason := unreadable(folder)) is not None:
        raise ConfigError([f"sweep.resume = {folder}: {reason}"])
    if not is_sweep_folder(folder):
        known = {path.name: path for place in (RUNS / "sweeps", folder.parent) for path in place.glob("*")
                 if is_sweep_folder(path)}  # fmt: skip
        near = nearest(folder.name, known) or sorted(known)[-1:]
        legal = tuple(known[name] for name in near)
        raise ConfigError(
            [Problem("sweep.resume", folder, f"is not a sweep folder (no {MANIFEST})", legal or (None,))]
        )
    try:
        require_own(folder)  # its words are about to be obeyed
        if not grants_trust(others, value_of):
            require_private(folder)
        sweep = read_sweep(folder)
    except UntrustedError as error:
        raise ConfigError([f"sweep.resume = {folder} is not to be trusted: {error}"]) from error
    except ValueError as error:
        raise ConfigError([f"sweep.resume: {error}"]) from error
    (flags, before), (more_flags, more) = _parted(sweep.command), _parted(others)
    before = [word for word in before if word not in more and key_of(word) != SHARED_FOLDER]
    flags = [flag for flag in flags if flag not in _MULTIRUN or flag not in more_flags]
    return folder, [*flags, *more_flags, *before, *more]


def require_own(folder: Path) -> None:
    """Raises UntrustedError if another user made the sweep: a trusted folder may hold what others wrote."""
    for place in (folder, folder / MANIFEST):
        if (owner := owner_name(place)) is not None:
            raise UntrustedError(f"{place} belongs to {owner}. Start a sweep of your own.")


def to_go_on(folder: Path) -> str:
    """The line that runs what is missing or failed in a sweep, as a shell takes it from here."""
    here = Path.cwd()
    place = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"python -m hpc_parallel.run -m {shlex.quote(f'{KEY}{quoted(place)}')}"


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Hydra's flags with their values, and overrides: no flag may stand between those."""
    overrides = get_args(words).overrides
    return [word for word in words if word not in overrides], overrides


def _what(overrides: Sequence[str]) -> frozenset[str]:
    return frozenset(word for word in overrides if not word.lstrip("+~").startswith(_PLACING))
