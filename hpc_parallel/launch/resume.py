"""`resume=RUN`: the command line that the run was started with, then yours, in the same run folder.

What decides which samples are seen and what they mean must stay; where the run runs, and on how many
devices in which layout, may change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hpc_parallel.problems import ConfigError, Found, Problem, nearest, quoted
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.recorded_start import grants_trust, key_of, read_start
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private
from hpc_parallel.record.values import flatten
from hpc_parallel.shell import complain

AUTO = "auto"
KEPT = {
    "model": "its weights would not fit",
    "data": "the order of samples would not go on",
    "seed": "the order of samples would not go on",
    "training.global_batch_size": "samples would be left out or seen twice",
    "task.name": "only training goes on",
    "weights": "it goes on from its own",
}


def warn_on_stderr(message: str) -> None:
    complain([message])


def resumed(words: Sequence[str], *, warn: Callable[[str], None] = warn_on_stderr) -> list[str]:
    """The arguments of `run` with those of the run that `resume=` names before them; without it, `words`.

    warn: receives one line for each run that is passed over.

    Raises ConfigError if there is no such run, or if it is not to be trusted.
    """
    named = [word for word in words if word.startswith("resume=")]
    value = value_of(named[-1]) if named else None
    if value is None:
        return list(words)
    path = newest(words, warn=warn) if value == AUTO else Path(os.path.expanduser(str(value))).absolute()
    folder = RunFolder(path)
    require_run(folder)
    start = read_start(folder, key="resume", shared_folder=grants_trust(words, value_of))
    typed = {key_of(word) for word in words if not word.startswith("-")}
    before = [word for word in start.overrides if not _replaced(key_of(word), typed)]
    place = quoted(folder.path)
    own_dir = any(word.startswith(("--config-dir", "-cd")) for word in words)
    flags = ["--config-dir", str(start.config_dir)] if start.config_dir and not own_dir else []
    others = [word for word in words if word not in named]
    return [*flags, *before, *others, f"run_dir={place}", f"resume={place}"]


def value_of(override: str) -> Any:
    """What follows the `=`, as Hydra reads it. Raises ConfigError where it can't."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        key, _, value = override.partition("=")
        rule = "can't be read: quote what is special in it, once more for the shell"
        raise ConfigError([Problem(key, value, rule, (quoted(value),))]) from error


def newest(words: Sequence[str], *, warn: Callable[[str], None] = warn_on_stderr) -> Path:
    """This user's newest run of the name that `words` give (or else their strategy). Raises ConfigError."""
    typed = dict(word.split("=", 1) for word in words if "=" in word)
    name = typed.get("name", typed.get("strategy", "single"))
    runs = [path for path in Path("runs", name).glob("*") if is_run_folder(path)]
    foreign = {path: owner for path in runs if (owner := owner_name(path)) is not None}
    own = [path for path in runs if path not in foreign]
    for path, owner in foreign.items():
        warn(f"resume=auto skips {path}, which belongs to {owner}")
    if not own:
        rule = f"finds no run of yours in {Path('runs', name)}"
        near = nearest(name, [path.name for path in Path("runs").glob("*") if path.is_dir()])
        hint = tuple(f"auto name={similar}" for similar in near if similar != name)
        raise ConfigError([Problem("resume", AUTO, rule, hint or (None,))])
    return max(own, key=lambda path: path.name).absolute()


def require_run(folder: RunFolder) -> None:
    """Raises ConfigError if there is no run, with a run that is near."""
    if is_run_folder(folder.path):
        return
    if (reason := unreadable(folder.path)) is not None:
        raise ConfigError([f"resume = {folder.path}: {reason}"])
    inside = sorted(path for path in folder.path.glob("*") if is_run_folder(path))
    beside = [path.name for path in folder.path.parent.glob("*") if is_run_folder(path)]
    near = [folder.path.parent / name for name in nearest(folder.path.name, beside)]
    legal = tuple(inside[-1:] or near)  # the newest, as ids sort by time
    raise ConfigError([Problem("resume", folder.path, "is not a run folder", legal or (None,))])


def find_problems(folder: RunFolder, values: Mapping[str, Any]) -> Found:
    """Why a run can't go on as `values`, the resolved configuration, want it to."""
    if not is_run_folder(folder.path):  # nobody has put the run's own words before these (`resumed`)
        yield (f"resume = {values['resume']} goes on with one run, and -m starts several. Try it without -m, "
               "or sweep.resume=FOLDER for a sweep.")  # fmt: skip
        return
    try:
        if not values["launcher"]["shared_folder"]:
            require_private(folder.path)  # its checkpoints will be unpickled
        before = flatten(folder.read_config())
    except (UntrustedError, DamagedError) as error:
        yield f"resume = {folder.path} can't go on: {error}"
        return
    now = flatten(values)
    for kept, why in KEPT.items():
        for key in sorted(before.keys() | now.keys()):
            if (key == kept or key.startswith(f"{kept}.")) and before.get(key) != now.get(key):
                rule = f"is another than the run to go on with has: {why}"
                yield Problem(key, now.get(key), rule, (before.get(key),))
    done = [checkpoint.step for checkpoint in complete(folder.checkpoints)]
    if not done:
        yield f"resume = {folder.path} has no checkpoint, so nothing can go on. Try the same line without it."
    elif done[0] >= now["training.steps"]:
        rule = f"are done already: the newest checkpoint is of step {done[0]}"
        yield Problem("training.steps", now["training.steps"], rule, (2 * done[0],))


def _replaced(key: str, typed: set[str]) -> bool:
    """Said again, or a key inside a group that is chosen anew, or of the first start alone.

    What the launcher was told about the site stays when only the kind of launcher changes.
    """
    group = key.partition(".")[0]
    inside = "." in key and group in typed and group != "launcher"
    return key in typed or inside or key in ("run_dir", "resume", "dry_run")
