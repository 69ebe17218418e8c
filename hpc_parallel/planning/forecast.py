"""Predicts whether a run on known hardware fits into memory and how fast it is, before the run starts.

An estimate never stops a run that could work: only the bytes that a device certainly holds are compared with
its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hpc_parallel.config.node_devices import AUTO
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.model_weights import sample_shape_of, weights_of
from hpc_parallel.planning import memory
from hpc_parallel.planning.collective_times import on_nodes_of
from hpc_parallel.planning.hardware import CPU, Hardware
from hpc_parallel.planning.memory import Held, MemoryPlan
from hpc_parallel.planning.step_time import StepTime, step_time, tokens_per_s
from hpc_parallel.planning.storage_times import StorageTimes
from hpc_parallel.planning.work import Work, unplanned, unsearched, work_of_run
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.metrics_file import size

STOP = "stop"
OF_THE_PROCESS = ("device context", "allocator slack")  # torch's peak memory leaves them out
MINUTE_S = 60


@dataclass(frozen=True)
class Forecast:
    """figures: the names are those of `summary.json`. warnings: lines for the user."""

    figures: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def forecast(config: RunConfig, plan: Plan, *, hardware: Hardware) -> Forecast:
    """The plan of a checked training run on `hardware`. A part that can't be planned is empty.

    Raises ConfigError if the run needs more memory than a device has, with the nearest layouts that fit.
    """
    if config.device == AUTO:
        config = replace(config, device=hardware.device.kind)
    model = weights_of(config.model, sample_shape=sample_shape_of(config.model, config.data))
    planned = memory.plan_fullest(config, model=model)
    times = None
    if not any(unplanned(config, plan.layout, hardware)):
        hardware = on_nodes_of(config, hardware)
        work = work_of_run(config, model=model)
        times = work, step_time(work, hardware)
    warnings = list(_time_limit(config, times, hardware)) if times is not None else []
    is_searched = times is not None and not any(unsearched(config))
    if planned is not None and (line := _overflow(config, planned, hardware, is_searched=is_searched)):
        warnings.append(line)
    return Forecast(_figures(planned, times, hardware), warnings)


def certain_bytes(held: Held, *, compiled: bool = False) -> int:
    """The bytes that a device certainly holds at one moment: its state, and its activations or gradients.

    compiled: leave out the activations, because compiled blocks keep other activations than planned.
    """
    state = held.state
    activations = 0 if compiled else held.kinds["activations"]
    return state.parameters + state.optimizer + max(state.gradients, activations)


def _figures(
    planned: MemoryPlan | None, times: tuple[Work, StepTime] | None, hardware: Hardware
) -> dict[str, Any]:
    """The planned figures. They leave out memory on CPUs, where a process also contains the interpreter."""
    figures: dict[str, Any] = {}
    if times is not None:
        work, step = times
        figures = {
            "step_time_s": step.total_s,
            "samples_per_s": work.samples / step.total_s,
            "tokens_per_s": tokens_per_s(work, step),
            "bubble_share": step.timeline.bubble_share,
            "exposed_communication_share": step.exposed_s / step.total_s,
        }
    if planned is not None and not planned.unknown and hardware.device.kind != CPU:
        fullest = planned.fullest
        figures["peak_memory_bytes"] = fullest.total - sum(fullest.kinds[kind] for kind in OF_THE_PROCESS)
    return figures


def _overflow(config: RunConfig, planned: MemoryPlan, hardware: Hardware, *, is_searched: bool) -> str | None:
    """A warning if the memory may not be enough. Raises ConfigError if it is not.

    Of a GPU that runs of a sweep share, each gets an equal part, and may not need more.
    """
    shares = config.sweep.runs_per_gpu
    room, device = hardware.device.memory_bytes // shares, hardware.device.name
    if shares > 1:
        device += f" for {shares} runs"
    certain = partial(certain_bytes, compiled=config.training.compile)
    least = max(planned.devices, key=certain)
    if certain(least) <= room:
        if planned.fullest.total <= room:
            return None
        needed = f"{'needs at least' if planned.unknown else 'may need'} {size(planned.fullest.total)}"
        if shares > 1 and config.plan.on_overflow == STOP:
            most = max(1, hardware.device.memory_bytes // planned.fullest.total)
            rule = f"leaves {size(room)} of the memory of a GPU to each run, which {needed}"
            raise ConfigError([Problem("sweep.runs_per_gpu", shares, rule, (most,))])
        return f"warning     a device {needed}, and one {device} has {size(room)}: the run may not fit"
    third = "activations" if least.kinds["activations"] and not config.training.compile else "gradients"
    text = (
        f"memory: parameters, optimizer state and {third} need {size(certain(least))} on device "
        f"{least.device}, and one {device} has {size(room)}."
    )
    near = ""
    if is_searched:
        from hpc_parallel.planning.ranking import layouts_that_fit  # only a run without room needs a search

        near = layouts_that_fit(config, hardware)
    # A process on a CPU may use the memory that other processes do not use.
    if config.plan.on_overflow != STOP or hardware.device.kind == CPU:
        return f"warning     {text}{near}"
    raise ConfigError([f"{text}{near} plan.on_overflow=warn starts the run anyway."])


def _time_limit(config: RunConfig, times: tuple[Work, StepTime], hardware: Hardware) -> Iterator[str]:
    """Warn if a job can't take its steps in its time limit. Skips resumed runs, which may have few left."""
    if config.launcher.kind in HERE or config.resume:
        return
    work, step = times
    minutes, steps = config.launcher.time_minutes, config.training.steps
    needed = StorageTimes(config, work, step.total_s, hardware).training_s(steps) / MINUTE_S
    if needed > minutes:
        yield (
            f"warning     launcher.time_minutes = {minutes} is less than the {needed:.0f} minutes that "
            f"{steps} steps are predicted to take. Try launcher.time_minutes={int(1.2 * needed) + 1}."
        )
