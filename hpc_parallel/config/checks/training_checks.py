"""Check `training` and `optimizer` against each other, the strategy, the model and this machine.

A combination in float8 that is not proven is refused.
"""

from __future__ import annotations

import math
import netrc
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlparse

from hpc_parallel.config.checks.suggestions import without_axis
from hpc_parallel.config.class_paths import class_tables, target_problems
from hpc_parallel.config.key_suggestions import suggest
from hpc_parallel.config.optimizer_rules import ELEMENTWISE, SCHEDULES, warmup_of
from hpc_parallel.config.schema import OptimizerConfig, RunConfig
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.counts import class_path, decoder_sizes, is_convnet, sequence_length
from hpc_parallel.layout.layout import SPMD, Layout, legal_layout
from hpc_parallel.layout.model_data_schema import MoeTransformerConfig
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.layout.step_facts import (
    ALIGNED,
    BFLOAT16,
    BY_ROWS,
    EXPERTS_BY_ROWS,
    MULTIPLES,
    OFF,
    is_cut,
    rounded_parts,
    selective_problem,
)
from hpc_parallel.problems import Problem, Problems, nearest

MOST_ADDED = 64  # gradients in bfloat16: each sum is rounded to 8 bits, and the errors grow with the root
APART_FROM_FP8 = ("tile",)
CALLBACKS, VALIDATION = "hpc_parallel.training.callbacks", "validation_loss"
KEEP_BEST = f"{CALLBACKS}.KeepBest"
CLASSES = {  # files of conf/optimizer -> the class that their options belong to
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "muon": "torch.optim.Muon",
}


def callback_problems(config: RunConfig) -> Problems:
    for index, callback in enumerate(config.training.callbacks):
        key = f"training.callbacks[{index}]"
        if not isinstance(callback, dict) or not callback.get("_target_"):
            yield Problem(key, callback, "has no _target_, the class of a callback")
            continue
        for name, table in class_tables(key, callback):
            yield from target_problems(f"{name}._target_", table["_target_"])
        name, every = str(callback["_target_"]).rpartition(".")[2], config.training.validate_every
        if _needs_validation(callback) and every is None:
            yield Problem("training.validate_every", None, f"leaves {name} without a validation", (100,))
        if _keeps_best(callback, config) and config.training.checkpoint_every is None:
            rule = f"leaves {name} without a checkpoint to keep"
            yield Problem("training.checkpoint_every", None, rule, (max(every or 100, 1),))


def callback_warnings(config: RunConfig) -> list[str]:
    """Say that KeepBest, which keeps checkpoints, passes over the validations that have none."""
    training, every, saves = config.training, config.training.validate_every, config.training.checkpoint_every
    rule = f"only compares the validations of steps with a checkpoint (training.checkpoint_every={saves})"
    return [
        f"KeepBest {rule}. Try training.checkpoint_every={every}"
        for callback in training.callbacks
        if _keeps_best(callback, config) and every and saves and every % saves and every < training.steps
    ]


def _keeps_best(callback: dict[str, Any], config: RunConfig) -> bool:
    return bool(callback["_target_"] == KEEP_BEST and config.task.name == "train")


def _needs_validation(callback: dict[str, Any]) -> bool:
    key = callback.get("key", VALIDATION)
    watched = {KEEP_BEST: VALIDATION, f"{CALLBACKS}.EarlyStopping": key}
    return str(watched.get(str(callback["_target_"]))).startswith("validation_")


def switch_problems(config: RunConfig) -> Problems:
    """Check switches against the few strategies that don't allow them, and against this machine."""
    training = config.training
    yield from _selective(config)
    if training.on_nonfinite == "rollback" and training.checkpoint_every is None:
        rule = "needs a checkpoint to go back to (training.checkpoint_every)"
        yield Problem("training.on_nonfinite", "rollback", rule, ("stop", "skip"))
    if training.memory_checkpoint_every is not None and config.task.name == "train":
        yield from _memory_copies(training.memory_checkpoint_every, on_disk=training.checkpoint_every)
    compiler = os.environ.get("CXX", "g++")  # torch uses the same rule
    if training.compile and config.launcher.kind == "local" and shutil.which(compiler) is None:
        rule = f"needs a C++ compiler, but there is no {compiler} here (install g++, or set CXX)"
        yield Problem("training.compile", True, rule, (False,))
    if training.memory_budget is not None:
        yield from _memory_budget(config)
    for switch, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(training, switch) and find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed here (pip install {package})"
            yield Problem(f"training.{switch}", True, rule, (False,))
    if training.wandb and not _can_use_wandb(config.cluster.environment):
        rule = "needs a login, and neither WANDB_API_KEY nor ~/.netrc has one (wandb login)."
        yield f"training.wandb = true {rule} Try +cluster.environment.WANDB_MODE=offline."


def _memory_copies(every: int, *, on_disk: int | None) -> Problems:
    """Copies in memory are for the steps since the last checkpoint on the disk, which outlives the job."""
    if on_disk is None:
        rule = f"leaves nothing after the job (training.memory_checkpoint_every={every})"
        yield Problem("training.checkpoint_every", None, rule, (50 * every,))
    elif every >= on_disk:
        rule = f"copies nothing that the disk does not have (training.checkpoint_every={on_disk})"
        yield Problem("training.memory_checkpoint_every", every, rule, (on_disk // 2 or None,))


def _selective(config: RunConfig) -> Problems:
    """torch returns a kept result once, so the second half of a split backward pass would get none."""
    strategy, keeps = config.strategy, config.training.activation_checkpointing
    if keeps != "selective":
        return
    if problem := selective_problem():
        yield problem
    layout = legal_layout(strategy, devices=config.devices) or Layout()
    if layout.pipeline > 1 and schedule_of(strategy).splits_backward:
        rule = (
            f"can't be combined with strategy.schedule = {strategy.schedule}, which splits the backward pass"
        )
        yield Problem("training.activation_checkpointing", keeps, rule, ("full", "none"))


def _memory_budget(config: RunConfig) -> Problems:
    """The budget needs the compiler, and no other switch that decides what is computed again."""
    training = config.training
    if not training.compile:
        rule = "needs training.compile=true: the compiler chooses what is computed again"
        yield Problem("training.memory_budget", training.memory_budget, rule, (None,))
    elif training.activation_checkpointing != "none":
        rule = "can't be combined with training.memory_budget, which decides the same"
        yield Problem("training.activation_checkpointing", training.activation_checkpointing, rule, ("none",))


def compile_whole_problems(config: RunConfig) -> Problems:
    """A single graph of the model has no place for code that a strategy or a switch puts around blocks."""
    training, strategy = config.training, config.strategy
    layout = legal_layout(strategy, devices=config.devices) or Layout()
    divided = [
        f"strategy.{axis}={degree}"
        for axis, degree in layout.degrees.items()
        if axis != "replicate" and degree > 1
    ]
    keeps, recipe = training.activation_checkpointing, training.fp8
    is_ours = (class_path(config.model) or "").startswith("hpc_parallel.models.")
    if not training.compile:
        yield Problem("training.compile", training.compile, "compiles nothing, whole or not", (True,))
    rules = {
        f"can't be used: the model or its samples are divided by {' and '.join(divided)}": bool(divided),
        f"can't be used: strategy={strategy.name} does more around the model": strategy.execution != SPMD,
        f"can't be used with training.activation_checkpointing={keeps}": keeps != "none",
        f"can't be used with training.fp8={recipe}: it was compared in blocks only": recipe != OFF,
        "is for the models of this package: yours are compiled block by block": not is_ours,
    }
    for rule, is_broken in rules.items():
        if is_broken:
            yield Problem("training.compile_whole", True, rule, (False,))


def _can_use_wandb(site_variables: Mapping[str, object]) -> bool:
    """Whether wandb needs no login, or finds one here in the places where its client looks."""
    variables = {**{name: str(value) for name, value in site_variables.items()}, **os.environ}
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = urlparse(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(variables.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def fp8_problems(config: RunConfig) -> Problems:
    recipe, strategy = config.training.fp8, config.strategy
    if config.training.precision not in (BFLOAT16, "float64"):  # float64 is for proofs
        rule = f"can't be combined with training.fp8 = {recipe}, whose other products are in bfloat16"
        yield Problem("training.precision", config.training.precision, rule, ("bfloat16",))
    layout = legal_layout(strategy, devices=config.devices) or Layout()
    rules = [*_rules_of_fp8(config), *_cut_by(config, layout)]
    yield from (Problem("training.fp8", recipe, rule, (OFF,)) for rule in rules)
    if class_path(config.model) == MoeTransformerConfig._target_ and recipe != BY_ROWS:
        yield Problem("training.fp8", recipe, EXPERTS_BY_ROWS, (BY_ROWS, OFF))
    for axis in APART_FROM_FP8:
        if layout.degrees[axis] > 1:
            rule = f"can't be combined with training.fp8 = {recipe}: that is not proven"
            yield without_axis(axis, rule, config=config, layout=layout)


def rounding_warnings(config: RunConfig) -> list[str]:
    """Say that a run trains otherwise than with the default types of its weights and its optimizer state."""
    parts = rounded_parts(config) if config.task.name == "train" else None
    return [f"{parts} in bfloat16, rounded at random: other losses than with float32"] if parts else []


def rounding_problems(config: RunConfig) -> Problems:
    """The settings that weights or optimizer state in bfloat16 can't be combined with."""
    training, optimizer = config.training, config.optimizer
    tables = [rule for rule in optimizer.groups.values() if isinstance(rule, dict)]
    targets = {optimizer._target_, *(rule.get("_target_") for rule in tables)}
    others = sorted(target for target in map(str, targets - {None}) if target not in ELEMENTWISE)
    kept = {"training.weights": training.weights, "optimizer.state": optimizer.state}
    for key in (key for key, dtype in kept.items() if dtype == BFLOAT16 and others):
        rule = (
            f"is for classes that update each number alone ({', '.join(ELEMENTWISE)}), not for "
            f"{' and '.join(others)}"
        )
        yield Problem(key, BFLOAT16, rule, ("float32",))
    if training.weights != BFLOAT16:
        return
    if training.precision not in (BFLOAT16, "float64"):
        rule = (
            f"can't be combined with training.weights = {BFLOAT16}: gradients in bfloat16 need its products"
        )
        yield Problem("training.precision", training.precision, rule, (BFLOAT16,))
    added = _added_microbatches(config)
    reasons = {
        f"adds up {added} microbatches in bfloat16, and more than {MOST_ADDED} may lose over 1 % of a "
        "gradient: larger microbatches are fewer": added > MOST_ADDED,
        f"can't be combined with strategy.execution = {config.strategy.execution}, which adds the gradients "
        "of all devices in the type of the weights": config.strategy.execution != SPMD,
    }
    yield from (
        Problem("training.weights", BFLOAT16, rule, ("float32",)) for rule, holds in reasons.items() if holds
    )


def _added_microbatches(config: RunConfig) -> int:
    """The gradients that a device adds up in a step; 0 if other checks refuse the layout or the batch."""
    layout = legal_layout(config.strategy, devices=config.devices)
    try:
        return 0 if layout is None else batch_of(config, layout).microbatches
    except (ValueError, ZeroDivisionError):  # a server without a worker has no replica
        return 0


def _rules_of_fp8(config: RunConfig) -> list[str]:
    rules = []
    if is_convnet(config.model):
        rules.append("multiplies in linear layers inside blocks, and this model has convolutions")
    if config.strategy.execution != SPMD:
        rules.append(f"can't be combined with strategy.execution = {config.strategy.execution}")
    if config.task.name == "generate":
        rules.append("can't be used with task=generate, which decodes one token at a time")
    return rules


def _cut_by(config: RunConfig, layout: Layout) -> list[str]:
    """The sizes of a reference decoder, and of its samples, that the axes split into parts that are cut."""
    decoder, length = decoder_sizes(config), sequence_length(config)
    sizes = {} if length is None else {"data.sequence_length": (length, "context")}
    if decoder is not None and decoder.dim % ALIGNED == 0:
        sizes |= {
            "model.dim": (decoder.dim, "tensor"),
            "keys and values": (decoder.kv_dim, "tensor"),
            "model.ffn_dim": (decoder.ffn_dim, "tensor"),
        }
    return [
        f"needs parts that are {MULTIPLES}: of {size} ({name}) strategy.{axis} = {layout.degrees[axis]} "
        f"leaves {size / layout.degrees[axis]:g}"
        for name, (size, axis) in sizes.items()
        if is_cut(size, layout.degrees[axis])
    ]


def optimizer_problems(config: RunConfig) -> Problems:
    """Check the class, the rules for some weights, and the schedule of the learning rate."""
    optimizer = config.optimizer
    expected = CLASSES.get(optimizer.name, optimizer._target_)
    if optimizer._target_ != expected:
        rule = f"can't be combined with optimizer={optimizer.name}, which sets the arguments of {expected}"
        hint = f"Try optimizer=custom optimizer._target_={optimizer._target_}."
        yield f"optimizer._target_ = {optimizer._target_} {rule}. {hint}"
    elif optimizer.name not in CLASSES:
        yield from target_problems("optimizer._target_", optimizer._target_)
    for name, rule_of_group in optimizer.groups.items():
        yield from _group(f"optimizer.groups.{name}", rule_of_group)
    yield from _schedule(optimizer)
    steps, warmup_steps = max(1, config.training.steps), optimizer.warmup_steps
    if warmup_steps is not None and not 0 <= warmup_steps <= steps:
        rule = f"must lie between 0 and {steps:g}"
        yield Problem("optimizer.warmup_steps", warmup_steps, rule, (warmup_of(steps),))


def _schedule(optimizer: OptimizerConfig) -> Problems:
    schedule = optimizer.schedule
    if schedule in SCHEDULES:
        return
    if "." not in schedule:
        close = nearest(schedule, SCHEDULES) or [*SCHEDULES][:1]
        rule = f"is not one of {', '.join(SCHEDULES)}, nor the path of a function"
        yield Problem("optimizer.schedule", schedule, rule, tuple(close))
        return
    yield from target_problems("optimizer.schedule", schedule, kind="function")
    if optimizer.warmup_steps is not None:
        rule = f"has no effect: {schedule} decides every step"
        yield Problem("optimizer.warmup_steps", optimizer.warmup_steps, rule, (None,))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_list(of: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is of for item in value)


GROUP_KEYS: dict[str, tuple[Callable[[Any], bool], str, Any]] = {
    # key of a rule: (whether a value is legal, what it must be, a legal value)
    "match": (lambda value: _is_list(str, value), "must be a list of patterns", ["blocks.*.bias"]),
    "dims": (lambda value: _is_list(int, value), "must be a list of whole numbers", [1]),
    "learning_rate_scale": (_is_number, "must be a number of at least 0", 0.5),
    "weight_decay": (_is_number, "must be a number of at least 0", 0.0),
    "_target_": (lambda value: isinstance(value, str), "must be the path of a class", "torch.optim.AdamW"),
    "options": (lambda value: isinstance(value, dict), "must be a table", {"eps": 1e-8}),
}


def _group(key: str, rule_of_group: Any) -> Problems:
    if not isinstance(rule_of_group, dict):
        yield Problem(key, rule_of_group, "must be a table", ({"match": ["*"], "weight_decay": 0},))
        return
    for name, value in rule_of_group.items():
        if name not in GROUP_KEYS:
            near = suggest(f"{key}.{name}", [f"{key}.{other}" for other in GROUP_KEYS])
            hint = near.partition("=")[0] if near else f"one of {', '.join(GROUP_KEYS)}"
            yield f"{key}.{name}: a rule has no such key. Try {hint}."
            continue
        is_legal, rule, legal = GROUP_KEYS[name]
        if not is_legal(value):
            yield Problem(f"{key}.{name}", value, rule, (legal,))
        elif name == "_target_":
            yield from target_problems(f"{key}._target_", value)
