"""The plan of one configuration: its step time, and the figures that follow from the step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.commands.plan_figures import figures, memory_figure, notes
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig, register
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.planning import memory
from hpc_parallel.planning.auto_strategy import choose, is_auto, on_nodes_of
from hpc_parallel.planning.collective_times import with_measured_links
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.memory import text_table
from hpc_parallel.planning.run_work import unplanned, work_of_run
from hpc_parallel.planning.step_time import StepTime, step_time
from hpc_parallel.planning.work import Work
from hpc_parallel.problems import ConfigError


def command_line(overrides: Sequence[str], *, user_folder: Path | None) -> CommandLine:
    """The parsed command line of a run that is only planned. Raises ConfigError."""
    register()
    flags = ["--config-dir", str(user_folder)] if user_folder is not None else []
    line = CommandLine.parse([*flags, *overrides])
    if line.sweeps or line.explains:
        raise ConfigError(["plan takes one configuration. Remove -m and Hydra's flags."])
    return line


def site_hardware(overrides: Sequence[str], *, user_folder: Path | None) -> str | None:
    """The hardware that the site's profile or a study names; None if neither names one."""
    line = command_line(overrides, user_folder=user_folder)
    with reporting_all_problems(line):
        hardware: str | None = compose_run(line.overrides, **line.places).config.plan.hardware
    return hardware


def planned_run(
    overrides: Sequence[str], *, hardware: Hardware, user_folder: Path | None
) -> tuple[RunConfig, Work, StepTime]:
    """Compose, check and plan a configuration. Raises ConfigError with all problems."""
    is_set = any(word.startswith("device=") for word in overrides)
    device = [] if is_set else [f"device={hardware.device.kind}"]
    line = command_line([*overrides, *device], user_folder=user_folder)
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        composed, overrides = cell.config, cell.overrides
        if is_auto(composed):
            choice = choose(composed, overrides, user_folder=user_folder)
            composed, overrides = choice.composed, choice.overrides
        config, *_ = resolve(composed)
        if problems := find_problems(config, overrides):
            raise ConfigError(problems)
    layout = layout_of(config.strategy, devices=config.devices)
    if problems := list(unplanned(config, layout, hardware)):
        raise ConfigError(problems)
    work = work_of_run(config)
    return config, work, step_time(work, on_nodes_of(config, hardware))


def report(
    config: RunConfig, plan: tuple[Work, StepTime], *, hardware: Hardware, tokens: float, explain: bool
) -> Iterator[str]:
    """One figure per line, with its formula if `explain`; then what the plan assumes."""
    yield from headline(config, plan[0], hardware)
    for figure in figures(config, plan, hardware=hardware, tokens=tokens):
        yield f"  {figure.label:<24} {figure.text}" + f" = {figure.formula}" * explain
    yield from _memory(config, hardware, explain=explain)
    if config.machine.collectives:
        _, measured = with_measured_links(hardware, config.machine)
        yield f"Measured links (machine): {', '.join(measured) or 'none that a plan reads'}."
    yield from notes(config, hardware)


def headline(config: RunConfig, work: Work, hardware: Hardware) -> Iterator[str]:
    """Two lines: the devices and the batch."""
    layout = layout_of(config.strategy, devices=config.devices)
    pipeline = f", {work.schedule}" if work.pipeline > 1 else ""
    yield f"{layout} on {work.devices} x {hardware.device.name}{pipeline}, {work.precision}"
    yield f"{work.data} replicas x {work.microbatches} microbatches x {work.microbatch_size} samples"


def _memory(config: RunConfig, hardware: Hardware, *, explain: bool) -> Iterator[str]:
    """Whether the device that needs most has room, and its bytes by kind if `explain`."""
    planned = memory.plan(config)
    if planned is None:
        yield f"  {'memory':<24} not known for this model"
        return
    figure = memory_figure(planned, hardware)
    yield f"  {figure.label:<24} {figure.text}"
    if explain:
        yield from text_table(planned)


def record(
    config: RunConfig, plan: tuple[Work, StepTime], *, hardware: Hardware, tokens: float
) -> dict[str, Any]:
    """The figures as `--json` prints them."""
    planned = memory.plan(config)
    step_figures = {one.key: one.value for one in figures(config, plan, hardware=hardware, tokens=tokens)}
    return {
        **step_figures,
        "tokens": tokens,
        "devices": plan[0].devices,
        "memory_bytes": None if planned is None else planned.fullest.total,
        "memory_unknown": None if planned is None else planned.unknown,
        "memory_unproven": None if planned is None else planned.unproven,
        "device_memory_bytes": hardware.device.memory_bytes,
        "assumptions": [*notes(config, hardware)],
    }
