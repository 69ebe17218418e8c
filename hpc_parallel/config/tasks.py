"""What a task will do, computed from the configuration alone. The login node and the ranks both use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import LOGS, TASK, may_mention
from hpc_parallel.config.task_schema import (
    CalibrateConfig,
    CollectivesConfig,
    GenerateConfig,
    InferConfig,
    PreflightTaskConfig,
)
from hpc_parallel.data.codec import encode, reads_bytes
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.layout.model_data_schema import ConvNetConfig, SegmenterConfig, UNetConfig
from hpc_parallel.problems import Problem, Problems, nearest
from hpc_parallel.record.values import VALIDATION

# Numbers of `summary.json` that `sweep.objective` may name; the measured steps of a training give _WATCHED.
_WATCHED = ("exposed_communication_share", "bubble_share", "traffic_bytes", "busiest_rank_traffic_bytes")
_TRAINED = ("final_loss", "validation_loss", "samples_per_s", "step_time_s", "peak_memory_bytes", *_WATCHED)
FIGURES = {
    "infer": ("latency_s", "latency_p99_s", "samples_per_s", "validation_loss", "peak_memory_bytes"),
    "collectives": (),
    "preflight": (),
    "calibrate": (),
    "script": ("final_loss",),
    "generate": ("tokens_per_s", "step_time_s", "prompt_time_s", "peak_memory_bytes"),
}

_OF_IMAGES = [schema._target_ for schema in (ConvNetConfig, SegmenterConfig, UNetConfig)]
LEAST_OTHERS = 3  # runs that must have reached a step before `sweep.prune` compares with them
# Settings that decide whether losses at the same step can be compared.
OF_LOSSES = (
    "data", "training.global_batch_size", "training.validate_every", "training.validation_samples",
    "training.log_every",
)  # fmt: skip


def objectives(value: Any) -> list[str]:
    """`sweep.objective` as a list, for one objective or several."""
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return list(map(str, value)) if several else [str(value)]


def figures_of(config: RunConfig) -> tuple[tuple[str, ...], bool]:
    """The figures that the run will have, and whether it may have `validation_<name>` of any other name."""
    task, script = config.task.name, config.script
    if task == TASK:
        may_log = not script.file or may_mention(Path(script.file), LOGS)
        groups = ["loss"] * may_log + re.findall(rf"\(\?P<(loss|{VALIDATION}\w+)>", script.metrics or "")
        return tuple("final_loss" if name == "loss" else name for name in dict.fromkeys(groups)), may_log
    figures, model = FIGURES.get(task, _TRAINED), str(config.model["_target_"])
    if "validation_loss" not in figures:
        return figures, False
    return (*figures, *["validation_accuracy"] * (model in _OF_IMAGES)), not model.startswith("hpc_parallel.")


def objective_problems(config: RunConfig) -> Problems:
    """Find objectives of the sweep that the run will not have."""
    task, training = config.task.name, config.training
    figures, has_others = figures_of(config)
    requested = objectives(config.sweep.objective)
    if task == TASK and not config.script.metrics and not has_others:
        yield "sweep.objective needs a loss: set script.metrics, or call job_context.log in the script."
        return
    others = f", and {VALIDATION}<name> for each of its own metrics" * has_others
    for name in requested or [""]:
        if name not in figures and not (has_others and name.startswith(VALIDATION)):
            near = nearest(name, figures) or figures[:1]
            rule = f"is not a figure of task={task}, which has {', '.join(figures) or 'none'}{others}"
            yield Problem("sweep.objective", name, rule, tuple(near))
    if task in FIGURES:
        return
    validated = [name for name in requested if name.startswith(VALIDATION)]
    if validated and training.validate_every is None:
        rule = f"leaves no {validated[0]} for sweep.objective"
        yield Problem("training.validate_every", None, rule, (100,))
    if training.measure_steps == 0 and (watched := [name for name in requested if name in _WATCHED]):
        yield Problem("training.measure_steps", 0, f"leaves no {watched[0]} for sweep.objective", (2,))


def prune_problems(config: RunConfig) -> Problems:
    """Find settings with which `sweep.prune` could compare nothing."""
    training, settings = config.training, config.sweep
    if settings.prune == "off":
        yield Problem("sweep.prune_after", settings.prune_after, "needs sweep.prune=median", (None,))
        return
    if config.task.name != "train":
        rule = f"compares the losses of trainings, and task={config.task.name} is none"
        yield Problem("sweep.prune", settings.prune, rule, ("off",))
        return
    steps, first = training.steps, first_compared(config)
    if first >= steps:
        rule = f"leaves nothing to end: the last step is training.steps={steps}"
        legal = (max(1, steps // 5),) if steps > 1 else ()
        yield Problem("sweep.prune_after", settings.prune_after, rule, legal)
        return
    name = "log_every" if training.validate_every is None else "validate_every"
    every = getattr(training, name)
    if -(-first // every) * every >= steps:
        rule = f"leaves no loss for sweep.prune from step {first} on, before the last step"
        yield Problem(f"training.{name}", every, rule, (max(1, (steps - first) // 2),))


def first_compared(config: RunConfig) -> int:
    """The first step at which `sweep.prune` may end a run."""
    after = config.sweep.prune_after
    return -(-config.training.steps // 5) if after is None else after


def total_steps(config: RunConfig) -> int:
    """The number of the last step in `metrics.jsonl`."""
    if isinstance(config.task, InferConfig):
        if config.task.follow:
            return config.training.steps
        return 1 + len(batch_sizes(config))  # the first is the pass over the validation data
    if isinstance(config.task, GenerateConfig):
        lengths = prompt_lengths(config) if config.task.prompts else [config.task.prompt_length]
        return max(lengths) - min(lengths) + config.task.new_tokens
    measures = isinstance(config.task, CollectivesConfig | PreflightTaskConfig | CalibrateConfig)
    return 0 if measures or config.task.name == TASK else config.training.steps


def batch_sizes(config: RunConfig) -> list[int]:
    """Batch sizes that `task=infer` measures, ascending; the first is one sample per replica."""
    assert isinstance(config.task, InferConfig)
    replicas = layout_of(config.strategy, devices=config.devices).data
    sizes = config.task.batch_sizes
    if sizes is None:
        most = config.training.global_batch_size // replicas
        sizes = [replicas << power for power in range(most.bit_length())]
    return sorted({replicas, *sizes})


def prompt_lengths(config: RunConfig) -> list[int]:
    """The number of tokens of each prompt of `task=generate`."""
    task = config.task
    assert isinstance(task, GenerateConfig)
    if task.prompts is None:
        return [task.prompt_length] * config.training.global_batch_size
    return [len(tokens) for tokens in encoded_prompts(config)]


def encoded_prompts(config: RunConfig) -> list[list[int]]:
    """The tokens of `task.prompts`. Raises ValueError if a prompt can't be encoded."""
    assert isinstance(config.task, GenerateConfig)
    as_bytes = reads_bytes(config.data)
    return [encode(text, as_bytes=as_bytes) for text in config.task.prompts or ()]
