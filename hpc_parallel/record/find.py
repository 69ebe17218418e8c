"""Find the runs that an argument of the command line names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.problems import ConfigError, alternatives, nearest, raise_if_any, spell
from hpc_parallel.record.names import RUNS, is_job_id, label
from hpc_parallel.record.recorded import RecordedRun, find_runs, is_run, read_run
from hpc_parallel.record.run_folder import unreadable
from hpc_parallel.record.safe_read import DamagedError, list_folder
from hpc_parallel.record.sweep_folder import is_sweep_folder, read_sweep, sweep_of

_NAMED = 5  # similar names that an error lists


class NoRunError(ConfigError):
    """Raised for a word that names no run."""


@dataclass(frozen=True)
class Match:
    """What an argument names: a run, or a sweep or a job array with its runs."""

    label: str
    path: Path | None  # None for a job array
    runs: tuple[RecordedRun, ...]


def newest_first(runs: Iterable[RecordedRun]) -> list[RecordedRun]:
    """Sort by the time of the last start."""
    return sorted(runs, key=lambda run: (_started(run.path), run.path.name), reverse=True)


def find_all(words: Sequence[str]) -> list[Match]:
    """Find what each word names. A word is a path, a run id, a job id or a unique part of a name.

    Raises ConfigError with every word that is unknown or ambiguous, and similar names.
    """
    matches, problems = [], []
    for word in words:
        try:
            matches.append(_find(word))
        except ConfigError as error:
            problems += error.problems
    raise_if_any(problems)
    return matches


def find_run(word: str) -> RecordedRun:
    """The run that `word` names. Raises NoRunError if there is none, ConfigError if there are several."""
    match = _find(word)
    if len(match.runs) != 1:
        raise ConfigError([_several(word, [label(run.path) for run in newest_first(match.runs)])])
    return match.runs[0]


def path_of(word: str) -> Path:
    """The path `word` if it exists, or else the run folder that `word` names.

    If `word` names no run, returns the path, which does not exist. Raises ConfigError if `word` names several
    runs.
    """
    path = _path(word)
    if os.path.lexists(path):
        return path
    try:
        return find_run(word).path
    except NoRunError:
        return path


def unique_runs(matches: Iterable[Match]) -> list[RecordedRun]:
    return list({run.path: run for match in matches for run in match.runs}.values())


def _find(word: str) -> Match:
    path = _path(word)
    if word and (runs := _runs_in(path)):
        return Match(label(path), path, tuple(runs))
    if word and (refusal := unreadable(path)):
        raise ConfigError([refusal])
    if word and is_sweep_folder(path) and (damage := _damage(path)):
        raise ConfigError([f"{damage}."])
    recorded_runs = newest_first(find_runs(RUNS))
    if is_job_id(word) and (
        runs := [run for run in recorded_runs if any(f"{job}_".startswith(f"{word}_") for job in run.job_ids)]
    ):
        return _run(runs[0]) if len(runs) == 1 else Match(f"job {word}", None, tuple(runs))
    labels = {label(run.path): run for run in recorded_runs}
    sweeps = {label(sweep): sweep for sweep in _sweeps(word)}
    names = [*labels, *sweeps]
    for fits in _fitting(word):
        if matching := [name for name in names if fits(name)]:
            break
    else:
        raise NoRunError([_unknown(word, labels)])
    if len(matching) > 1:
        raise ConfigError([_several(word, matching)])
    (name,) = matching
    if name in labels:
        return _run(labels[name])
    return Match(name, sweeps[name], tuple(_runs_in(sweeps[name])))


def _path(word: str) -> Path:
    return Path(os.path.expanduser(word)).absolute()


def _runs_in(path: Path) -> list[RecordedRun]:
    """As `find_runs`, and also the runs of a sweep that have no folder.

    Such runs were refused, or removed before they started.
    """
    sweep = sweep_of(path)
    return find_runs(path) if sweep is None else [read_run(run.run_dir) for run in sweep.runs]


def _damage(path: Path) -> str | None:
    try:
        read_sweep(path)
    except (FileNotFoundError, DamagedError) as error:
        return str(error)
    return None


def _run(run: RecordedRun) -> Match:
    return Match(label(run.path), run.path, (run,))


def _fitting(word: str) -> list[Callable[[str], bool]]:
    """Rules that match a name, the strictest first: the whole name, the whole run id, a part.

    A word of digits may be a mistyped job id. It matches only the beginning of a run id, which is a date. It
    does not match the random end.
    """

    def holds(name: str) -> bool:
        if "/" in word:  # its first folder is a whole name: `a/` is no part of `data/1`
            return f"/{word}" in f"/{name}"
        return name.rpartition("/")[2].startswith(word) if is_job_id(word) else word in name

    return [
        lambda name: name == word,
        lambda name: name.rpartition("/")[2] == word,
        lambda name: word != "" and holds(name),
    ]


def _sweeps(word: str) -> list[Path]:
    """The sweep folders in `runs/sweeps`, and `runs/<word>` if hydra.sweep.dir has put a sweep there."""
    usual = sorted((Path(entry.path) for entry in list_folder(RUNS / "sweeps")), reverse=True)
    places = dict.fromkeys([*usual, RUNS / word])
    return [path.absolute() for path in places if is_sweep_folder(path)]


def _several(word: str, names: Sequence[str]) -> str:
    more = f" ({len(names) - _NAMED} more)" if len(names) > _NAMED else ""
    near = alternatives([*map(spell, names[:_NAMED])])
    return f"{spell(word)} means {len(names)} runs, and one is wanted{more}. Try {near}."


def _unknown(word: str, runs: Mapping[str, RecordedRun]) -> str:
    if is_job_id(word):
        rule = "is the job id of no run"
    elif os.path.exists(path := _path(word)):
        rule = "holds no run" if os.path.isdir(path) else "is no run folder"
    else:
        rule = "is no path, run id, job id or part of a name of a run"
    if not runs:
        return f"{spell(word)} {rule}, and {RUNS.absolute()} holds none."
    return f"{spell(word)} {rule} in {RUNS.absolute()}. Try {alternatives([*map(spell, _near(word, runs))])}."


def near_runs(word: str) -> list[str]:
    """The names of up to three runs that are similar to `word`, or else of the three newest runs."""
    return _near(word, {label(run.path): run for run in newest_first(find_runs(RUNS))})


def _near(word: str, runs: Mapping[str, RecordedRun]) -> list[str]:
    names = [
        *runs,
        *(run.run_id for run in runs.values()),
        *(job for run in runs.values() for job in run.job_ids),
    ]
    return nearest(word, names, most=3) or list(runs)[:3]


def _started(path: Path) -> float:
    for place in (path / "config.yaml", path):
        try:
            return os.stat(place, follow_symlinks=False).st_mtime
        except (OSError, ValueError):
            continue
    return 0.0


def is_one(named: Match) -> bool:
    """Whether `named` is one run, sweep or job array, and not a folder that contains several runs."""
    return named.path is None or is_run(named.path) or is_sweep_folder(named.path)
