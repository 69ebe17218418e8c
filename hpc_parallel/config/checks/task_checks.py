"""Check a task against the rest of the configuration, and what a profiler can record of it."""

from __future__ import annotations

import os
import shutil

from hpc_parallel.config.job_python import environment_key
from hpc_parallel.config.node_devices import runs_on_cpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.config.task_schema import (
    CollectivesConfig,
    GenerateConfig,
    InferConfig,
    PreflightTaskConfig,
)
from hpc_parallel.data.codec import encode, reads_bytes
from hpc_parallel.layout.axes import SAMPLE_AXES
from hpc_parallel.layout.counts import class_path, count, is_convnet, sequence_length
from hpc_parallel.layout.layout import SPMD, Layout, legal_layout, processes_per_node
from hpc_parallel.layout.step_facts import OF_NVIDIA, UNMEASURED, measured_steps
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig) -> Problems:
    layout = legal_layout(config.strategy, devices=config.devices)
    if layout is None:
        return
    yield from _seconds(config)
    if isinstance(config.task, InferConfig):
        yield from _infer(config.task, layout)
        if config.task.follow and config.weights is None:
            yield "task.follow = true needs weights=RUN, the run whose checkpoints it takes."
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
    if seconds is None or launcher.kind in HERE:
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
    if task.storage is None or launcher != "local":
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


def profile_problems(config: RunConfig) -> Problems:
    profile = config.profile
    if config.task.name != "train":
        rule = f"records steps, and task={config.task.name} has none"
        yield Problem("profile.kind", profile.kind, rule, ("none",))
        return
    yield from _profiled_steps(config)
    processes = config.nodes * processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    if wrong := [rank for rank in profile.ranks if not 0 <= rank < processes]:
        rule = f"has no rank {wrong[0]}: the ranks are 0 to {processes - 1}"
        legal = [rank for rank in profile.ranks if rank not in wrong] or [0]
        yield Problem("profile.ranks", profile.ranks, rule, (legal,))
    if profile.arguments and profile.kind not in OF_NVIDIA:
        yield Problem("profile.arguments", profile.arguments, "are for profile=nsys and profile=ncu", ([],))
    if profile.memory and profile.kind != "torch":
        yield Problem("profile.memory", True, "is for profile=torch", (False,))
    elif profile.memory and runs_on_cpus(config):
        yield Problem("profile.memory", True, "records the memory of GPUs, and the run has none", (False,))
    if profile.kind in OF_NVIDIA:
        yield from _nvidia(config, processes=processes)


def _profiled_steps(config: RunConfig) -> Problems:
    profile, training = config.profile, config.training
    measured = measured_steps(config)
    first_free = UNMEASURED + measured + 1 if measured else 1
    last = profile.first_step + profile.steps - 1
    if measured and profile.first_step < first_free:
        rule = f"lies in the steps that training.measure_steps = {training.measure_steps} watches"
        yield Problem("profile.first_step", profile.first_step, rule, (first_free,))
    elif last > training.steps:
        rule = f"and profile.steps = {profile.steps} end after training.steps = {training.steps}"
        fitting = training.steps - profile.steps + 1
        if fitting >= first_free:
            yield Problem("profile.first_step", profile.first_step, rule, (fitting,))
        else:
            needed = first_free + profile.steps - 1
            along = (f"training.steps={needed}",)
            yield Problem("profile.first_step", profile.first_step, rule, (first_free,), along)


def _nvidia(config: RunConfig, *, processes: int) -> Problems:
    kind, launcher = config.profile.kind, config.launcher
    if launcher.kind == "local":
        rule = "wraps the processes of a job, and launcher=local forks its ranks"
        yield Problem("profile.kind", kind, rule, ("torch",))
        return
    if kind == "ncu" and processes > 1:
        rule = f"repeats each kernel, for which {processes} ranks would wait for ever: it is for one device"
        yield Problem("profile.kind", kind, rule, ("nsys",))
    if launcher.standby:
        rule = f"starts ranks without a profiler, and profile={kind} is one"
        yield Problem("launcher.standby", True, rule, (False,))
    if environment_key(config) is None and shutil.which(kind) is None:
        rule = "is not installed on this machine, and nothing that the job runs first may find it"
        yield Problem("profile.kind", kind, rule, (kind,), ("launcher.modules=[MODULE]",))
