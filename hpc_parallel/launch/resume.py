"""What a run continues from.

`resume=RUN`: the command line that started the run, then the new overrides, in the same run folder.

Values that decide which samples are seen and what they mean can't change. The machine, the number of devices
and the layout can. `weights=RUN` or a file: only the shapes of the weights must fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from hpc_parallel.config.checks.suggestions import paths_near
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.optimizer_rules import SCHEDULES, learning_rate, warmup_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
    schema_of,
)
from hpc_parallel.problems import ConfigError, Problem, Problems, as_override, hydra_value, nearest, spell
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.find import near_runs, path_of
from hpc_parallel.record.names import command_on
from hpc_parallel.record.owner import living_owner
from hpc_parallel.record.recorded_start import grants_trust, key_of, read_start
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.safe_read import DamagedError, list_folder, parse_line
from hpc_parallel.record.safetensors_header import read_header
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private
from hpc_parallel.record.typed import read_if_possible
from hpc_parallel.record.values import flatten, integer, number, table, text
from hpc_parallel.shell import warn_on_stderr

AUTO, AUTO_STRATEGY = "auto", "strategy=auto"
RUN_DIR = "run_dir"
DEVICES = ("nodes", "gpus_per_node")
FIXED = {  # keys that can't change, with the reason
    "model": "its weights would not fit",
    "data": "the order of samples would not continue",
    "seed": "the order of samples would not continue",
    "training.global_batch_size": "samples would be left out or seen twice",
    "optimizer._target_": "its state would not fit",
    "optimizer.options": "its state would not fit",
    "optimizer.groups": "its state would not fit",
    "task.name": "only training can continue",
    "weights": "it continues from its own weights",
}
PLACE = "data.path"  # may change: the start compares the content with that of the checkpoint

BATCH, STEPS = "training.global_batch_size", "training.steps"
VALIDATED = "training.validation_samples"
RESULT = ("optimizer.", "training.precision", "training.weights", "training.fp8", "training.clip_norm")
SCHEDULE, WARMUP = "optimizer.schedule", "optimizer.warmup_steps"
JUMP = 0.01  # of the learning rate; smaller changes are not named
IMAGE_SHAPE = ("channels", "classes", "in_channels", "kernel_size")
SHAPE = {  # the keys of a model that decide the shapes of its weights
    TransformerConfig._target_: ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size", "tied_head"),
    ConvNetConfig._target_: IMAGE_SHAPE,
    SegmenterConfig._target_: IMAGE_SHAPE,
    UNetConfig._target_: IMAGE_SHAPE,
}


def resumed(words: Sequence[str], *, warn: Callable[[str], None] = warn_on_stderr) -> list[str]:
    """Put the overrides of the run that `resume=` names before `words`; without `resume=`, return `words`.

    words: the arguments of `run`.
    warn: receives one line for each run that is skipped.

    Raises ConfigError if the run does not exist or can't be trusted.
    """
    resume_words = [word for word in words if word.startswith("resume=")]
    value = value_of(resume_words[-1]) if resume_words else None
    if value is None:
        return list(words)
    path = newest(words, warn=warn) if value == AUTO else path_of(str(value))
    folder = RunFolder(path)
    require_run(folder)
    place = str(next((value_of(word) for word in reversed(words) if key_of(word) == RUN_DIR), None) or path)
    if "${" not in place and os.path.realpath(path_of(place)) != os.path.realpath(path):
        rule = "is not the folder of the run to resume, in which it goes on"
        raise ConfigError([Problem(RUN_DIR, place, rule, (str(folder.path),))])
    start = read_start(folder, key="resume", shared_folder=grants_trust(words, value_of))
    if AUTO_STRATEGY in words and _has_same_devices(words, folder):
        words = [word for word in words if word != AUTO_STRATEGY]  # the chosen layout is recorded
    typed = {key_of(word) for word in words if not word.startswith("-")}
    before = [word for word in start.overrides if not is_replaced(key_of(word), typed)]
    run_dir = hydra_value(folder.path)
    names_dir = any(word.startswith(("--config-dir", "-cd")) for word in words)
    flags = ["--config-dir", str(start.config_dir)] if start.config_dir and not names_dir else []
    others = [word for word in words if word not in resume_words]
    is_script = f"task={TASK}" in [*before, *words]
    chosen = [] if is_script else _recorded_choices(folder, words, given={*typed, *map(key_of, before)})
    return [*flags, *before, *chosen, *others, f"run_dir={run_dir}", f"resume={run_dir}"]


def _has_same_devices(words: Sequence[str], folder: RunFolder) -> bool:
    """Whether no word asks for another number of devices than the run had."""
    try:
        recorded = folder.read_config()
    except (OSError, DamagedError):  # `find_problems` reports it
        return False
    typed = [word for word in words if key_of(word) in DEVICES]
    return all(value_of(word) in (AUTO, recorded.get(key_of(word))) for word in typed)


def _recorded_choices(folder: RunFolder, words: Sequence[str], *, given: Set[str]) -> list[str]:
    """Overrides for what was chosen for the first start, and must not be chosen anew.

    The global batch size was chosen for its layout, and the warm-up for its number of steps. words: the new
    overrides. given: the keys that have new or recorded overrides.
    """
    try:
        recorded = flatten(folder.read_config())
    except (OSError, DamagedError):  # `find_problems` reports it
        return []
    new = {key_of(word): value_of(word) for word in words if key_of(word) in (STEPS, SCHEDULE)}
    size, steps = integer(recorded.get(BATCH)), integer(recorded.get(STEPS))
    new_steps = integer(new.get(STEPS))
    choices = [] if size is None or BATCH in given else [f"{BATCH}={size}"]
    schedules = {str(recorded.get(SCHEDULE)), str(new.get(SCHEDULE, recorded.get(SCHEDULE)))}
    is_chosen = recorded.get(WARMUP) is None and WARMUP not in given and schedules <= SCHEDULES.keys()
    if is_chosen and steps is not None and new_steps is not None and new_steps != steps:
        choices.append(f"{WARMUP}={min(warmup_of(steps), new_steps)}")
    return choices


def value_of(override: str) -> Any:
    """The value after the `=`, as Hydra parses it. Raises ConfigError if Hydra can't parse it."""
    try:
        return OverridesParser.create().parse_override(override).value()
    except HydraException as error:
        key, _, value = override.partition("=")
        rule = "can't be read: quote special characters of the value, and again for the shell"
        raise ConfigError([Problem(key, value, rule, (value,))]) from error


def newest(words: Sequence[str], *, warn: Callable[[str], None] = warn_on_stderr) -> Path:
    """This user's newest run in the place where the command line without `resume=auto` would write its run.

    Raises ConfigError if there is no run, and what Hydra raises if it can't compose the line.
    """
    line = CommandLine.parse([word for word in words if not word.startswith("resume=")])
    config = compose_run(line.overrides, **line.places).config
    if config.run_dir is not None:
        return Path(os.path.expanduser(config.run_dir)).absolute()
    name = str(config.name)
    runs = _runs_beneath(Path("runs", name))
    foreign = {path: owner for path in runs if (owner := owner_name(path)) is not None}
    users_runs = [path for path in runs if path not in foreign]
    for path, owner in foreign.items():
        warn(f"resume=auto skips {path}, which belongs to {owner}")
    if not users_runs:
        rule = f"finds no run of yours in {Path('runs', name)}"
        near = nearest(name, [path.name for path in Path("runs").glob("*") if path.is_dir()])
        along = [as_override("name", similar) for similar in near if similar != name]
        raise ConfigError([Problem("resume", AUTO, rule, (AUTO if along else None,), tuple(along))])
    return max(users_runs, key=lambda path: path.name).absolute()


def _runs_beneath(folder: Path) -> list[Path]:
    return sorted(path for entry in list_folder(folder) if is_run_folder(path := Path(entry.path)))


def require_run(folder: RunFolder) -> None:
    """Raises ConfigError if the folder is not a run. The error suggests a nearby or similar run."""
    if is_run_folder(folder.path):
        return
    if (reason := unreadable(folder.path)) is not None:
        raise ConfigError([f"resume = {folder.path}: {reason}"])
    children = _runs_beneath(folder.path)
    siblings = [path.name for path in _runs_beneath(folder.path.parent)]
    similar = [folder.path.parent / name for name in nearest(folder.path.name, siblings)]
    # The newest child, because run ids sort by time.
    suggestions = tuple(children[-1:] or similar or near_runs(folder.path.name))
    raise ConfigError([Problem("resume", folder.path, "is not a run folder", suggestions or (None,))])


def find_problems(folder: RunFolder, values: Mapping[str, Any]) -> Problems:
    """Why the run in `folder` can't continue with `values`, the new resolved configuration."""
    if not is_run_folder(folder.path):  # a sweep: `resumed` has not put the run's overrides before these
        yield (f"resume = {values['resume']} continues one run, but -m starts several. Try it without -m, "
               "or sweep.resume=FOLDER for a sweep.")  # fmt: skip
        return
    try:
        if not values["launcher"]["shared_folder"]:
            require_private(folder.path)  # its checkpoints will be unpickled
        before = _with_newer_keys(flatten(folder.read_config()))
    except (UntrustedError, DamagedError) as error:
        yield f"resume = {folder.path} can't continue: {error}"
        return
    settings = flatten(values)
    is_script = settings["task.name"] == TASK
    task = settings["task.name"]
    if before.get("task.name") == "train" and task not in ("train", TASK):
        rule = f"only trains on, but task={task} takes the weights of a run. Leave it out"
        yield f"resume = {values['resume']} {rule}, and try {as_override('weights', str(folder.path))}."
        return
    yield from _fixed_problems(before, settings, is_script=is_script)
    if is_script:  # a script has its own checkpoints
        return
    callbacks = values["training"].get("callbacks") or []
    if callbacks == before.get("training.callbacks") and (ended := _ended_early(folder)):
        others = [callback for callback in callbacks if "EarlyStopping" not in str(callback)]
        advice = as_override("training.callbacks", others if others != callbacks else [])
        yield f"resume = {folder.path} ended early: {ended}. To train on, try {advice}."
    steps = [checkpoint.step for checkpoint in complete(folder.checkpoints)]  # newest first
    if not steps and (active := _living_owner(folder)) is not None:
        yield f"resume = {folder.path} is going on already, as {active}."
    elif not steps:
        anew = command_on(folder.path, "rerun")
        yield f"resume = {folder.path} has no checkpoint, so it can't continue. Try {anew} for a new run."
    elif steps[0] >= settings["training.steps"]:
        rule = f"are already done: the newest checkpoint is of step {steps[0]}"
        yield Problem("training.steps", settings["training.steps"], rule, (2 * steps[0],))


def _fixed_problems(before: Mapping[str, Any], settings: Mapping[str, Any], *, is_script: bool) -> Problems:
    """The recorded and the new values that differ, but may not."""
    fixed_keys = {"task.name": "it is no script"} if is_script else FIXED
    targets = {f"{group}._target_" for group in ("model", "data", "optimizer")}
    others = {key.partition(".")[0] for key in targets & before.keys() if before[key] != settings.get(key)}
    for fixed, reason in fixed_keys.items():
        for key in sorted(before.keys() | settings.keys()):
            added = key == fixed and key not in before  # a newer version has added the key
            fits = added or before.get(key) == settings.get(key)
            if not (key == fixed or key.startswith(f"{fixed}.")) or fits or key == PLACE:
                continue
            rule, group = "differs from the run to resume", key.partition(".")[0]
            if group not in others:
                yield Problem(key, settings.get(key), f"{rule}: {reason}", (before.get(key),))
            elif key in targets:  # its other keys have no meaning for the run
                rule += f", which has {before.get(key)}: {reason}. Leave out what changes {group}"
                yield Problem(key, settings.get(key), rule)


def _living_owner(folder: RunFolder) -> str | None:
    try:
        return living_owner(folder)
    except DamagedError:  # the start reports it
        return None


def without_fixed_keys(problem: Problem | str) -> Problem | str:
    """The problem of a run that continues, without the suggestion to change what can't change."""
    key = "" if isinstance(problem, str) else problem.key
    reason = next((FIXED[fixed] for fixed in FIXED if f"{key}.".startswith(f"{fixed}.")), None)
    if isinstance(problem, str) or reason is None or key == PLACE:
        return problem
    rule = f"{problem.rule}. A run that continues can't change it: {reason}"
    return replace(problem, rule=rule, legal=(), along=())


def _with_newer_keys(before: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded values; a key of our models that is newer than the run has its default."""
    schema = schema_of("model", before.get("model._target_"))
    defaults = {} if schema is None else flatten({"model": asdict(schema())})
    return {**defaults, **before}


def rate_jump(folder: RunFolder, config: RunConfig) -> str | None:
    """A line about the learning rate of the next step, if it does not go on as the run had planned it."""
    before = flatten(folder.read_config())
    steps, schedule = integer(before.get(STEPS)), before.get(SCHEDULE)
    newest = next(iter(complete(folder.checkpoints)), None)
    comparable = schedule in SCHEDULES and config.optimizer.schedule in SCHEDULES
    if newest is None or steps is None or not comparable:
        return None
    keys = ("learning_rate", "final_share", "decay_share")
    recorded: dict[str, Any] = {"schedule": schedule, "warmup_steps": integer(before.get(WARMUP))}
    recorded |= {key: value for key in keys if (value := number(before.get(f"optimizer.{key}"))) is not None}
    old = partial(learning_rate, steps=steps, config=replace(config.optimizer, **recorded))
    step = newest.step
    rate = learning_rate(step + 1, steps=config.training.steps, config=config.optimizer)
    if abs(rate - old(min(step + 1, steps))) <= JUMP * config.optimizer.learning_rate:
        return None
    why = f"{STEPS} was {steps} and is {config.training.steps}"
    if steps == config.training.steps:
        why = "keys of optimizer have changed"
    rates = f"from {old(step):.3g} at step {step} to {rate:.3g} at step {step + 1}"
    return (
        f"the learning rate goes {rates}: {why}. "
        "optimizer.schedule=constant, and wsd before its decay, can be extended without a jump"
    )


def other_validation(folder: RunFolder, config: RunConfig) -> str | None:
    """A line if the run continues with validations of another number of samples."""
    before, now = integer(flatten(folder.read_config()).get(VALIDATED)), config.training.validation_samples
    if before in (None, now) or config.training.validate_every is None:
        return None
    return (
        f"{VALIDATED} was {before} and is {now}: the validation losses before and after the start can't be "
        "compared. KeepBest and EarlyStopping compare them"
    )


def unasked_changes(folder: RunFolder, values: Mapping[str, Any], overrides: Sequence[str]) -> str | None:
    """A line with what decides the losses and differs from the start before, although no override sets it.

    The choice of a group (`optimizer=adamw`) drops the recorded overrides below it. A file of the user or a
    default may have changed. `rate_jump` names a changed warm-up, if it matters.
    """
    given = {WARMUP}
    for word in overrides:  # the value may be a table
        given |= {key_of(word), *flatten({key_of(word): value_of(word)})}
    before = flatten(folder.read_config())
    changes = [
        f"{as_override(key, value)} (was {spell(before[key])})" for key, value in flatten(values).items()
        if key.startswith(RESULT) and key not in given and before.get(key, value) != value
    ]  # fmt: skip
    return f"no override of the run or of this line sets {', '.join(changes)}" if changes else None


def _ended_early(folder: RunFolder) -> str | None:
    summary = read_if_possible(Summary, folder.summary)
    return summary.ended_early if summary is not None and summary.completed else None


def is_replaced(key: str, typed: set[str]) -> bool:
    """Whether a recorded override is dropped: its key or group is typed again, or it is never reused.

    The site's settings below `launcher` stay if only the kind of launcher changes.
    """
    group = key.partition(".")[0]
    inside = "." in key and group in typed and group != "launcher"
    return key in typed or inside or key in ("run_dir", "resume", "dry_run")


def weights_problems(config: RunConfig, weights: str) -> Problems:
    """Check `weights=FILE.safetensors|RUN` without torch."""
    path = Path(os.path.expanduser(weights))
    try:
        if not os.path.exists(path):
            path = path_of(weights)
        if not os.path.exists(path):
            yield Problem("weights", weights, "does not exist here", paths_near(path))
            return
        model = table(trained_with(path, trusted=config.launcher.shared_folder).get("model"))
    except DamagedError as error:
        yield f"weights = {path} can't be used: {error.reason}"
        return
    except (OSError, ValueError, UntrustedError) as error:  # also if several runs match the name
        yield f"weights = {path} can't be used: {getattr(error, 'strerror', None) or error}"
        return
    yield from _weight_shapes(config.model, model)


def trained_with(path: Path, *, trusted: bool) -> Mapping[str, Any]:
    """The configuration of a run that has a checkpoint, or of an exported file; of other files, the model.

    Raises OSError, ValueError, DamagedError, UntrustedError.
    """
    if not path.is_dir():
        about = read_header(path)[1]
        config, model = (parse_line(about.get(key, "").encode()) or {} for key in ("config", "model"))
        return {**config, "model": model}
    if not is_run_folder(path):
        files = [*path.glob("*.safetensors")]
        near = "Name a run folder or one .safetensors file (docs/models-and-data.md joins several)"
        near = f"Try {as_override('weights', files[0])}." if len(files) == 1 else near
        raise ValueError(f"the folder is not a run folder. {near}")
    checkpoints = complete(RunFolder(path).checkpoints)
    if not checkpoints:
        raise ValueError("the run has no checkpoint")
    if not trusted:
        require_private(checkpoints[0].path)  # its index is a pickle
    return table(checkpoints[0].manifest.get("config"))


def other_than_trained(config: RunConfig, path: Path) -> str | None:
    """A line with the values that fit the weights at `path`, but with which they mean something else.

    An inference also names other data: its validation loss can't be compared with that of the training.
    """
    groups = ["model", "data"] if config.task.name == "infer" else ["model"]
    trained = trained_with(path, trusted=config.launcher.shared_folder)
    before = flatten({group: table(trained.get(group)) for group in groups})
    values = flatten({group: table(getattr(config, group)) for group in groups})
    differ = [
        f"{as_override(key, values[key])} (trained with {spell(value)})"
        for key, value in before.items() if key in values and values[key] != value
    ]  # fmt: skip
    return f"the weights of {path} were trained otherwise: {', '.join(differ)}" if differ else None


def _weight_shapes(model: Any, trained: Mapping[str, Any]) -> Problems:
    """For our models: the keys that give the weights other shapes than those of the trained model."""
    target = text(trained.get("_target_"))
    if not isinstance(model, dict) or not target:
        return
    if model.get("_target_") != target:
        return  # another class may have the same weights: the job compares names
    for key in SHAPE.get(target, ()):
        if key in trained and model[key] != trained[key]:
            rule = "differs from the model that the weights were trained with"
            yield Problem(f"model.{key}", model[key], rule, (trained[key],))
