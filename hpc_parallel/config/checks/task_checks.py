"""Check a task against the rest of the configuration."""

from __future__ import annotations

import os

from hpc_parallel.config.node_devices import launcher_kind
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import (
    CollectivesConfig,
    GenerateConfig,
    InferConfig,
    PreflightTaskConfig,
)
from hpc_parallel.data.codec import encode, reads_bytes
from hpc_parallel.layout.axes import SAMPLE_AXES
from hpc_parallel.layout.counts import class_path, count, is_convnet, sequence_length
from hpc_parallel.layout.layout import SPMD, Layout, legal_layout
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig) -> Problems:
    layout = legal_layout(config.strategy, devices=config.devices)
    if layout is None:
        return
    yield from _seconds(config)
    if isinstance(config.task, InferConfig):
        yield from _infer(config.task, layout)
    elif isinstance(config.task, GenerateConfig):
        yield from _generate(config, layout)
        yield from _prompts(config, config.task)
    elif isinstance(config.task, CollectivesConfig):
        yield from _message_sizes(config.task)
    elif isinstance(config.task, PreflightTaskConfig):
        yield from _storage(config.task, launcher=config.launcher.kind)


def _seconds(config: RunConfig) -> Problems:
    """The time budget of the tasks that measure."""
    seconds, launcher = getattr(config.task, "seconds", None), config.launcher
    if seconds is None or launcher_kind(launcher.kind) == "local":
        return
    if seconds > 60 * launcher.time_minutes:
        rule = f"is more than launcher.time_minutes = {launcher.time_minutes}"
        yield Problem("task.seconds", seconds, rule, (max(30, 60 * (launcher.time_minutes - 1)),))


def _infer(task: InferConfig, layout: Layout) -> Problems:
    sizes = task.batch_sizes
    if sizes is None:
        return
    if not sizes or any(size < 1 or size % layout.data for size in sizes):
        legal = sorted({max(1, round(size / layout.data)) * layout.data for size in sizes or [1]})
        rule = f"needs multiples of {layout.data}: each replica has the same number of samples"
        rule = rule if layout.data > 1 else "needs numbers above 0"
        yield Problem("task.batch_sizes", sizes, rule, (legal, None))


def _message_sizes(task: CollectivesConfig) -> Problems:
    if task.max_bytes is not None and task.max_bytes < task.min_bytes:
        rule = f"is below task.min_bytes = {task.min_bytes}"
        yield Problem("task.max_bytes", task.max_bytes, rule, (task.min_bytes,))


def _storage(task: PreflightTaskConfig, *, launcher: str) -> Problems:
    """A job may see other folders than this machine, so only a local run is checked."""
    if task.storage is None or launcher_kind(launcher) != "local":
        return
    if not os.path.isdir(task.storage):
        yield Problem("task.storage", task.storage, "is not a folder", (None,))
    elif not os.access(task.storage, os.W_OK | os.X_OK):
        yield Problem("task.storage", task.storage, "can't be written by you", (None,))


def _generate(config: RunConfig, layout: Layout) -> Problems:
    if is_convnet(config.model):
        kind = str(class_path(config.model)).rpartition(".")[2]
        rule = f"needs the key-value cache of CausalAttention, and a {kind} has none"
        yield Problem("task", "generate", rule, ("infer",))
    if config.strategy.execution != SPMD:
        rule = "can't be used to decode: each device needs its own process that caches keys and values"
        yield Problem("strategy", config.strategy.name, rule, ("data",))
    for axis in SAMPLE_AXES:
        if (degree := getattr(layout, axis)) > 1:
            rule = "splits each sample over devices, but decoding has one token at a time"
            yield Problem(f"strategy.{axis}", degree, rule, (1,), ("strategy.replicate=-1",))
    if config.training.compile:
        rule = "would compile each block again for every token, because the cache grows"
        yield Problem("training.compile", True, rule, (False,))


def _prompts(config: RunConfig, task: GenerateConfig) -> Problems:
    if task.prompts is None:
        length = sequence_length(config)
        if length is not None and 1 <= length < task.prompt_length:
            rule = f"is longer than a sample (data.sequence_length = {length})"
            yield Problem("task.prompt_length", task.prompt_length, rule, (length,))
        return
    try:
        as_bytes = reads_bytes(config.data)
    except (ValueError, OSError, KeyError, TypeError):  # data_checks reports it
        return
    key, room = count(config, "vocabulary")
    if not all(_is_prompt(text, as_bytes=as_bytes, room=room) for text in task.prompts) or not task.prompts:
        what = "texts of a byte or more" if as_bytes else f"token ids below {room or key}, as '5 3'"
        yield Problem("task.prompts", task.prompts, f"must be {what}", (None,))


def _is_prompt(text: str, *, as_bytes: bool, room: int | None) -> bool:
    try:
        tokens = encode(text, as_bytes=as_bytes)
    except ValueError:
        return False
    return bool(tokens) and min(tokens) >= 0 and (room is None or max(tokens) < room)
