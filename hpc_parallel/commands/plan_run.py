"""The plan of one configuration: its step time, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_parallel.commands.run_rows import duration
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import resolve
from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.schema import RunConfig, register
from hpc_parallel.config.sweep_compose import compose_run
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.planning import memory
from hpc_parallel.planning.auto_strategy import choose, is_auto
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.measured_links import with_measured_links
from hpc_parallel.planning.memory import text_table
from hpc_parallel.planning.ranking import mfu, model_flops
from hpc_parallel.planning.run_work import assumptions, unplanned, work_of_run
from hpc_parallel.planning.step_time import StepTime, Work, step_time
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.metrics_file import size


def command_line(words: Sequence[str], *, user_folder: Path | None) -> CommandLine:
    """The words of a run that is only planned. Raises ConfigError."""
    register()
    flags = ["--config-dir", str(user_folder)] if user_folder is not None else []
    line = CommandLine.parse([*flags, *words])
    if line.sweeps or line.explains:
        raise ConfigError(["plan takes one configuration. Remove -m and Hydra's flags."])
    return line


def site_hardware(words: Sequence[str], *, user_folder: Path | None) -> str | None:
    """The hardware of the site's profile, or of a study; None without one."""
    line = command_line(words, user_folder=user_folder)
    with reporting_all_problems(line):
        hardware: str | None = compose_run(line.overrides, **line.places).config.plan.hardware
    return hardware


def checked_config(
    words: Sequence[str], *, hardware: Hardware, user_folder: Path | None
) -> tuple[RunConfig, dict[str, Any]]:
    """Compose and check a configuration, also as plain values. Raises ConfigError with all problems."""
    known = (
        [f"device={hardware.device.kind}"] if not any(word.startswith("device=") for word in words) else []
    )
    line = command_line([*words, *known], user_folder=user_folder)
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        composed, overrides = cell.config, cell.overrides
        if is_auto(composed):
            choice = choose(composed, overrides, user_folder=user_folder)
            composed, overrides = choice.composed, choice.overrides
        config, values = resolve(composed)
        if problems := find_problems(config, overrides):
            raise ConfigError(problems)
    return config, values


def planned_run(
    words: Sequence[str], *, hardware: Hardware, user_folder: Path | None
) -> tuple[RunConfig, Work, StepTime]:
    """Compose, check and plan a configuration. Raises ConfigError with all problems."""
    config, _ = checked_config(words, hardware=hardware, user_folder=user_folder)
    layout = layout_of(config.strategy, devices=config.devices)
    if problems := list(unplanned(config, layout, hardware)):
        raise ConfigError(problems)
    hardware, _ = with_measured_links(hardware, config.machine)
    work, node = work_of_run(config), replace(hardware.node, devices=config.gpus_per_node)
    return config, work, step_time(work, replace(hardware, node=node))


def report(
    config: RunConfig, plan: tuple[Work, StepTime], *, hardware: Hardware, tokens: float, explain: bool
) -> Iterator[str]:
    """One figure a line, with its formula if `explain`; then what the plan assumes."""
    work, step = plan
    layout = layout_of(config.strategy, devices=config.devices)
    pipeline = f", {work.schedule}" if work.pipeline > 1 else ""
    yield f"{layout} on {work.devices} x {hardware.device.name}{pipeline}, {work.precision}"
    yield f"{work.data} replicas x {work.microbatches} microbatches x {work.microbatch_size} samples"
    for label, value, formula in _figures(work, step, hardware=hardware, tokens=tokens):
        yield f"  {label:<24} {value}" + f" = {formula}" * explain
    yield from _memory(config, hardware, explain=explain)
    if config.machine.collectives:
        _, measured = with_measured_links(hardware, config.machine)
        yield f"Measured links (machine): {', '.join(measured) or 'none that a plan reads'}."
    yield from assumptions(config, hardware)


def _memory(config: RunConfig, hardware: Hardware, *, explain: bool) -> Iterator[str]:
    """Whether the device that needs most has room, and its bytes by kind if `explain`."""
    planned = memory.plan(config)
    if planned is None:
        yield f"  {'memory':<24} not known for this model"
        return
    label = "memory, at least" if planned.unknown else "memory, estimate"
    needed, there = planned.fullest.total, hardware.device.memory_bytes
    verdict = "fits" if needed <= there and not planned.unknown else "may not fit"
    without = f" ({'; '.join(planned.unknown)})" if planned.unknown else ""
    yield f"  {label:<24} {size(needed)} of {size(there)}: {verdict}{without}"
    if explain:
        yield from text_table(planned)


def _figures(
    work: Work, step: StepTime, *, hardware: Hardware, tokens: float
) -> Iterator[tuple[str, str, str]]:
    """Label, value and formula."""
    total_s, per_step, peak = step.total_s, work.samples * work.decoder.sequence, hardware.device.peak_flops
    flops = model_flops(work)
    rate = work.devices * peak[work.precision]
    training_s, busy = tokens / per_step * total_s, step.timeline
    hours = training_s * work.devices / 3600
    ends = f"gradients {step.gradients_s:.4g} s + update {step.update_s:.4g} s"
    yield "step time", f"{total_s:.4g} s", f"microbatches {busy.total_s:.4g} s + {ends}"
    yield "tokens/s", f"{per_step / total_s:,.0f}", f"{per_step} tokens / {total_s:.4g} s"
    text = f"{flops:.4g} FLOP / ({total_s:.4g} s x {rate:.4g} FLOP/s)"
    yield "model FLOP utilisation", f"{100 * mfu(work, step, hardware):.1f} %", text
    ranks = len(busy.busy_s)
    text = f"1 - {sum(busy.busy_s):.4g} s of {ranks} ranks / ({ranks} x {busy.total_s:.4g} s)"
    yield "bubble", f"{100 * busy.bubble_share:.1f} %", text
    text = f"{step.exposed_s:.4g} s of tensor sums, gathers and gradients / {total_s:.4g} s"
    yield "exposed communication", f"{100 * step.exposed_s / total_s:.1f} %", text
    text = f"{tokens:.4g} / {per_step} x {total_s:.4g} s, x {work.devices} devices"
    yield f"to {tokens:.3g} tokens", f"{duration(training_s)}, {hours:,.0f} device-hours", text
