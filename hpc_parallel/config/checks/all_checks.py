"""Check a configuration on the login node: all contradictions at once, each with a suggestion."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_parallel.config import fabric_kinds
from hpc_parallel.config.checks import (
    cluster_checks,
    execution_checks,
    fp8_checks,
    huggingface_checks,
    image_checks,
    layout_checks,
    machine_checks,
    optimizer_checks,
    parquet_checks,
    profile_checks,
    python_checks,
    script_checks,
    site_checks,
    switch_checks,
    task_checks,
)
from hpc_parallel.config.checks.lookup import value_at
from hpc_parallel.config.checks.targets import class_tables, missing_part
from hpc_parallel.config.counts import count, is_reference_decoder
from hpc_parallel.config.key_suggestions import choice_near
from hpc_parallel.config.layout import EXECUTIONS, divisors
from hpc_parallel.config.model_data_schema import TransformerConfig
from hpc_parallel.config.schedules import SCHEDULES
from hpc_parallel.config.schema import TASKS, RunConfig
from hpc_parallel.config.script import STARTS, STOP_SIGNALS, STYLES, TASK
from hpc_parallel.problems import Problem, Problems, nearest
from hpc_parallel.record.safe_read import MAX_INTEGER, list_folder

CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "strategy.execution": EXECUTIONS,
    "strategy.gradient_compression": ("none", "bfloat16"),
    "strategy.context_attention": ("ring", "gather", "all_to_all"),
    "strategy.schedule": tuple(SCHEDULES),
    "strategy.balance": ("flops", "parameters"),
    "strategy.verify": ("auto", "always", "never"),
    "training.precision": ("float32", "bfloat16", "float16", "float64"),
    "training.fp8": ("off", "tensorwise", "rowwise"),
    "training.speed": ("safe", "max"),
    "training.on_nonfinite": ("stop", "skip", "rollback"),
    "training.activation_checkpointing": ("none", "full", "selective"),
    "sweep.on_invalid": ("skip", "stop"),
    "launcher.kind": ("auto", "local", "slurm", "script"),
    "cluster.gpu_flag": ("gpus-per-node", "gres", "none"),
    "cluster.fabric": fabric_kinds.KINDS,
    "cluster.start": ("srun", "torchrun", "mpirun"),
    "preflight.act": ("off", "report", "stop", "exclude"),
    "plan.on_overflow": ("stop", "warn", "off"),
    "profile.kind": ("none", "torch", "nsys", "ncu"),
    "task.name": tuple(TASKS),
    "script.start": STARTS,
    "script.style": STYLES,
    "script.stop_signal": STOP_SIGNALS,
}

CALLBACKS, VALIDATION = "hpc_parallel.training.callbacks", "validation_loss"
MOST = {
    "nodes": 1_000_000,
    "gpus_per_node": 1024,
    "cluster.gpus_per_node": 1024,
    "data.sequence_length": 2**31,
}
COUNTED = ("model", "strategy", "training", "optimizer", "launcher", "task")  # tables of counts
MOST_COUNT, MOST_INTEGER = 2**31, MAX_INTEGER


def find_problems(config: RunConfig, overrides: Sequence[str] = ()) -> list[Problem | str]:
    """Returns all problems of `config`, in the order of the command line's `overrides`."""
    if huge := list(_integers(config)):  # the other checks loop up to these numbers: they might never end
        return in_order(huge, overrides)
    general = (_counts, _choices, _ranges)
    of_the_site = (cluster_checks.find_problems, site_checks.find_problems, python_checks.find_problems)
    of_training = (
        optimizer_checks.find_problems, execution_checks.find_problems,
        layout_checks.find_problems, _model, _callbacks, _data, parquet_checks.find_problems,
        huggingface_checks.find_problems, image_checks.find_problems, task_checks.find_problems,
        switch_checks.find_problems, fp8_checks.find_problems, profile_checks.find_problems,
        machine_checks.find_problems,
    )  # fmt: skip
    checks = (*general, *(() if config.task.name == TASK else of_training), *of_the_site)
    problems = [problem for check in checks for problem in check(config)]
    return in_order([*problems, *script_checks.find_problems(config, overrides)], overrides)


def in_order(problems: Sequence[Problem | str], overrides: Sequence[str]) -> list[Problem | str]:
    """Sort the problems as the command line orders their keys; problems of other keys come last."""
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]

    def position(problem: Problem | str) -> int:
        text = problem.key if isinstance(problem, Problem) else problem.lstrip("+~")
        key = re.split(r"[\s=:]", text, maxsplit=1)[0]
        named = [i for i, name in enumerate(keys) if key == name or key.startswith(f"{name}.")]
        return named[-1] if named else len(keys)

    return sorted(problems, key=position)


def _integers(config: RunConfig) -> Problems:
    """Integers beyond any real run, or beyond what a file of the run can hold."""
    for key, value in _leaves(asdict(config)):
        if isinstance(value, int):
            most = MOST.get(key, MOST_COUNT if key.partition(".")[0] in COUNTED else MOST_INTEGER)
            bound, limit = (most, "most") if value > 0 else (-most, "least")
            if abs(value) > most:
                legal = () if key.endswith("]") or value < 0 else (bound,)
                yield Problem(key, value, f"must be at {limit} {bound}", legal)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every plain value in nested tables and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{index}]")
    else:
        yield prefix, value


def _counts(config: RunConfig) -> Problems:
    """Counts must be at least 1."""
    keys = [
        "nodes", "gpus_per_node", "training.steps", "training.global_batch_size",
        "training.microbatch_size", "training.log_every", "training.validate_every",
        "training.checkpoint_every", "training.keep_last", "training.keep_every",
        "training.validation_samples", "training.collect_every", "training.loss_scale_every",
        "strategy.microbatches",
        "strategy.stages_per_rank", "strategy.prefetch", "launcher.time_minutes",
        "launcher.cpus_per_device", "launcher.snapshot_mb", "data.sequence_length", "data.max_bytes",
        "data.vocab_size", "sweep.parallelism", "cluster.gpus_per_node",
        "cluster.cpus_per_device", "cluster.max_array_size", "profile.first_step", "profile.steps",
    ]  # fmt: skip
    if is_reference_decoder(config):
        sizes = ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size", "experts")
        keys += [f"model.{name}" for name in sizes if name in config.model]
    for key in keys:
        count = value_at(config, key)
        if isinstance(count, int) and count < 1:
            legal = {"model.vocab_size": 256, "data.vocab_size": 256, "launcher.snapshot_mb": 64}.get(key, 1)
            yield Problem(key, count, "must be at least 1", (legal,))


def _choices(config: RunConfig) -> Problems:
    for key, choices in CHOICES.items():
        value = value_at(config, key)
        if value not in choices:
            close = choice_near(key, str(value), choices, most=1) or choices[:1]
            yield Problem(key, value, f"is not one of {', '.join(choices)}", tuple(close))


def _ranges(config: RunConfig) -> Problems:
    """Numbers must lie in their interval: (key, minimum, maximum, whether closed, a legal value)."""
    steps = max(1, config.training.steps)  # _counts reports a smaller number
    table: list[tuple[str, float, float, bool, Any]] = [
        ("seed", 0, 2**63 - 1, True, 0),
        ("optimizer.learning_rate", 0, math.inf, False, 0.001),
        ("optimizer.weight_decay", 0, math.inf, True, 0.1),
        ("optimizer.final_share", 0, 1, True, 0.1),
        ("optimizer.decay_share", 0, 1, True, 0.2),
        ("optimizer.warmup_steps", 0, steps, True, steps // 20),
        ("training.measure_steps", 0, math.inf, True, 2),
        ("training.loss_scale", 1, 2.0**64, True, 65536),
        ("training.memory_budget", 0, 1, True, 0.5),
        ("training.clip_norm", 0, math.inf, False, 1.0),
        ("strategy.bucket_mb", 0, math.inf, False, 25),
        ("launcher.grace_s", 1, 3600, True, 90),
        ("launcher.max_requeues", 0, math.inf, True, 20),
        ("launcher.max_restarts", 0, math.inf, True, 0),
        ("launcher.memory_gb", 0, math.inf, False, 16),
        ("cluster.device_memory_gb", 0, math.inf, False, 80),
        ("cluster.memory_gb_per_device", 0, math.inf, False, 16),
        ("cluster.port", 1024, 65535, True, 29500),
        ("cluster.start_timeout_s", 0, math.inf, False, 300),
        ("cluster.collective_timeout_s", 0, math.inf, False, 600),
        ("cluster.checkpoint_timeout_s", 0, math.inf, False, 1800),
        ("cluster.hang_timeout_s", 0, math.inf, False, 300),
        ("data.validation_share", 0, 0.5, False, 0.05),
    ]
    for key, least, most, closed, legal in table:
        value = value_at(config, key)
        if value is None:
            continue
        inside = least <= value <= most if closed else least < value < most
        if not inside or not math.isfinite(value):
            bounds = f"{least:g}" if most == math.inf else f"{least:g} and {most:g}"
            rule = "must be above" if most == math.inf and not closed else "must be at least"
            rule = rule if most == math.inf else "must lie between"
            yield Problem(key, value, f"{rule} {bounds}", (legal,))


def _model(config: RunConfig) -> Problems:
    if not isinstance(config.model, dict) or not config.model.get("_target_"):
        yield "model._target_ is missing: name the class of your model. Try model=tiny."
        return
    yield from _target("model._target_", config.model["_target_"])
    if not is_reference_decoder(config):
        return
    dim, heads, kv_heads = (config.model[name] for name in ("dim", "heads", "kv_heads"))
    if min(dim, heads, kv_heads) < 1:
        return
    if dim % heads or (dim // heads) % 2:
        legal = [d for d in divisors(dim) if (dim // d) % 2 == 0]
        near = sorted(legal, key=lambda d: abs(d - heads))[:2]
        rule = f"does not split model.dim = {dim} into heads of an even width (rotary positions rotate pairs)"
        yield Problem("model.heads", heads, rule, tuple(sorted(near)))
    if heads % kv_heads:
        near = sorted(divisors(heads), key=lambda d: abs(d - kv_heads))[:2]
        rule = f"does not divide model.heads = {heads}: each key-value head serves the same number of heads"
        yield Problem("model.kv_heads", kv_heads, rule, tuple(sorted(near)))
    for key in ("model.rope_theta", "model.norm_eps"):
        if not 0 < value_at(config, key) < math.inf:
            legal = getattr(TransformerConfig, key.removeprefix("model."))
            yield Problem(key, value_at(config, key), "must be above 0", (legal,))


def _target(key: str, target: Any) -> Problems:
    missing = missing_part(str(target))
    if missing is not None:
        rule, near = missing
        yield Problem(key, target, rule, near)


def _callbacks(config: RunConfig) -> Problems:
    """Each callback is a table with a class."""
    for index, callback in enumerate(config.training.callbacks):
        key = f"training.callbacks[{index}]"
        if not isinstance(callback, dict) or not callback.get("_target_"):
            yield Problem(key, callback, "has no _target_, the class of a callback")
            continue
        for name, table in class_tables(key, callback):
            yield from _target(f"{name}._target_", table["_target_"])
        if _needs_validation(callback) and config.training.validate_every is None:
            rule = f"leaves {callback['_target_'].rpartition('.')[2]} without a validation"
            yield Problem("training.validate_every", None, rule, (100,))


def _needs_validation(callback: dict[str, Any]) -> bool:
    key = callback.get("key", VALIDATION)
    watched = {f"{CALLBACKS}.KeepBest": VALIDATION, f"{CALLBACKS}.EarlyStopping": key}
    return str(watched.get(callback["_target_"])).startswith("validation_")


def _data(config: RunConfig) -> Problems:
    """The data must exist, and its tokens must fit the model's vocabulary."""
    if not isinstance(config.data, dict) or not config.data.get("_target_"):
        yield "data._target_ is missing: name the class of your data. Try data=text."
        return
    for key, table in class_tables("data", config.data):
        yield from _target(f"{key}._target_", table["_target_"])
    stated = config.data.get("vocab_size")
    vocab_size = 256 if config.data["_target_"].endswith("TextData") else stated
    if (path := config.data.get("path")) is not None:
        if not path or not os.path.exists(os.path.expanduser(path)):
            parent = Path(os.path.expanduser(path)).parent
            names = [entry.name for entry in list_folder(parent)] if path else []
            near = nearest(Path(path).name, names)
            yield Problem("data.path", path, "does not exist here", tuple(parent / name for name in near))
        else:
            try:
                vocab_size = _stored_vocab_size(config.data) or vocab_size
            except (ValueError, OSError) as error:
                yield f"data.path = {path} can't be used: {error}"
    key, room = count(config, "vocabulary")
    if isinstance(vocab_size, int) and room and room < vocab_size:
        rule = f"is too small for the data, whose tokens run from 0 to {vocab_size - 1}"
        yield Problem(key, room, rule, (vocab_size,))


def _stored_vocab_size(data: dict[str, Any]) -> int | None:
    """The vocabulary size of the tokens at `data.path`. Raises ValueError if the files are other data."""
    from hpc_parallel.data import text, tokens  # neither imports torch

    if data["_target_"] == "hpc_parallel.data.tokens.TokensData":
        return tokens.read_description(Path(os.path.expanduser(data["path"])))["vocab_size"]
    if data["_target_"] == "hpc_parallel.data.text.TextData":
        text.find_files(data["path"], pattern=data["pattern"])
    return None
