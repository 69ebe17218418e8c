"""The plan of one configuration: its step time, and the figures that follow from the step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig, register
from hpc_parallel.launch.checked_run import reporting_all_problems
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.planning import memory
from hpc_parallel.planning.auto_strategy import choose, is_auto
from hpc_parallel.planning.collective_times import on_nodes_of, with_measured_links
from hpc_parallel.planning.failures import RESTART_S, failures_of
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.memory import MemoryPlan, text_table
from hpc_parallel.planning.ranking import mfu, model_flops
from hpc_parallel.planning.step_time import StepTime, step_time
from hpc_parallel.planning.storage_times import StorageTimes
from hpc_parallel.planning.work import Work, assumptions, unplanned, work_of_run
from hpc_parallel.problems import ConfigError, raise_if_any
from hpc_parallel.record.metrics_file import duration, size

HOUR_S = 3600
POWERS = ((1e3, "kWh"), (1e6, "MWh"), (1e9, "GWh"))  # in Wh


@dataclass(frozen=True)
class Planned:
    """A plan, with the overrides and the hardware that it was made for."""

    overrides: Sequence[str]
    user_folder: Path | None
    config: RunConfig
    work: Work
    step: StepTime
    hardware: Hardware


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


def planned_run(overrides: Sequence[str], *, hardware: Hardware, user_folder: Path | None) -> Planned:
    """Compose, check and plan a configuration. Raises ConfigError with all problems."""
    is_set = any(word.startswith("device=") for word in overrides)
    device = [] if is_set else [f"device={hardware.device.kind}"]
    line = command_line([*overrides, *device], user_folder=user_folder)
    with reporting_all_problems(line):
        cell = compose_run(line.overrides, **line.places)
        composed, words = cell.config, cell.overrides
        if is_auto(composed):
            choice = choose(composed, words, user_folder=user_folder)
            composed, words = choice.composed, choice.overrides
        config, *_ = resolve(composed)
        raise_if_any(find_problems(config, words))
    layout = layout_of(config.strategy, devices=config.devices)
    raise_if_any(unplanned(config, layout, hardware))
    work = work_of_run(config)
    step = step_time(work, on_nodes_of(config, hardware))
    return Planned(overrides, user_folder, config, work, step, hardware)


def report(plan: Planned, *, tokens: float, explain: bool) -> Iterator[str]:
    """One figure per line, with its formula if `explain`; then what the plan assumes."""
    config, hardware = plan.config, plan.hardware
    yield from headline(plan)
    for figure in figures(plan, tokens=tokens):
        yield f"  {figure.label:<24} {figure.text}" + f" = {figure.formula}" * explain
    yield from _memory(config, hardware, explain=explain)
    if config.machine.collectives:
        _, measured = with_measured_links(hardware, config.machine)
        yield f"Measured links (machine): {', '.join(measured) or 'none that a plan reads'}."
    yield from notes(config, hardware)


def headline(plan: Planned) -> Iterator[str]:
    """Two lines: the devices and the batch."""
    config, work, hardware = plan.config, plan.work, plan.hardware
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


def record(plan: Planned, *, tokens: float) -> dict[str, Any]:
    """The figures as `--json` prints them."""
    config, hardware, held = plan.config, plan.hardware, memory.plan(plan.config)
    return {
        **{figure.key: figure.value for figure in figures(plan, tokens=tokens)},
        "tokens": tokens,
        "devices": plan.work.devices,
        "memory_bytes": None if held is None else held.fullest.total,
        "memory_unknown": None if held is None else held.unknown,
        "memory_unproven": None if held is None else held.unproven,
        "device_memory_bytes": hardware.device.memory_bytes,
        "assumptions": [*notes(config, hardware)],
    }


@dataclass(frozen=True)
class Figure:
    """One figure.

    key: its name in JSON, and in `summary.json` if the summary has this figure. value: None if it is not
    known. text, formula: the figure and its computation as readers see them.
    """

    key: str
    label: str
    value: float | None
    text: str
    formula: str


def figures(plan: Planned, *, tokens: float) -> Iterator[Figure]:
    """The figures of one step, then those of a training with `tokens` tokens."""
    config, work, step, hardware = plan.config, plan.work, plan.step, plan.hardware
    per_step = work.samples * work.decoder.sequence
    yield from _of_step(work, step, hardware)
    steps, times = tokens / per_step, StorageTimes(config, work, step.total_s, hardware)
    waits = {"checkpoints": times.checkpoints(steps), "input": times.input(steps)}
    if config.training.memory_checkpoint_every is not None:
        waits["memory_copies"] = times.memory_copies(steps)
    for name, wait in waits.items():
        yield Figure(f"{name}_s", name.replace("_", " "), wait.seconds, wait.text, wait.formula)
    yield from _of_failures(config, times)
    training_s = times.training_s(steps)
    devices = config.devices_of_job
    hours = training_s * devices / HOUR_S
    added = "".join(f" + {wait.seconds:.4g} s of {name}" for name, wait in waits.items() if wait.seconds)
    spent = f"{tokens:.4g} / {per_step} x {step.total_s:.4g} s{added}"
    text = f"({spent}) x {devices} devices"
    yield Figure(
        "device_hours", f"to {tokens:.3g} tokens", hours,
        f"{duration(training_s)}, {hours:,.0f} device-hours", text,
    )  # fmt: skip
    yield from _costs(hours, share=work.devices / devices, config=config, hardware=hardware)


def _of_step(work: Work, step: StepTime, hardware: Hardware) -> Iterator[Figure]:
    total_s, busy, peak = step.total_s, step.timeline, hardware.device.peak_flops[work.precision]
    tokens, flops = work.samples * work.decoder.sequence, model_flops(work)
    ends = f"gradients {step.gradients_s:.4g} s + update {step.update_s:.4g} s"
    text = f"microbatches {busy.total_s:.4g} s + {ends}"
    yield Figure("step_time_s", "step time", total_s, f"{total_s:.4g} s", text)
    text = f"{tokens} tokens / {total_s:.4g} s"
    yield Figure("tokens_per_s", "tokens/s", tokens / total_s, f"{tokens / total_s:,.0f}", text)
    share = mfu(work, step, hardware)
    text = f"{flops:.4g} FLOP / ({total_s:.4g} s x {work.devices * peak:.4g} FLOP/s)"
    yield Figure("mfu", "model FLOP utilisation", share, f"{100 * share:.1f} %", text)
    ranks, share = len(busy.busy_s), busy.bubble_share
    text = f"1 - {sum(busy.busy_s):.4g} s of {ranks} ranks / ({ranks} x {busy.total_s:.4g} s)"
    yield Figure("bubble_share", "bubble", share, f"{100 * share:.1f} %", text)
    share = step.exposed_s / total_s
    text = f"{step.exposed_s:.4g} s of tensor sums, gathers and gradients / {total_s:.4g} s"
    yield Figure("exposed_communication_share", "exposed communication", share, f"{100 * share:.1f} %", text)


def _of_failures(config: RunConfig, times: StorageTimes) -> Iterator[Figure]:
    """The useful time that the failure rate of the nodes leaves, and how often to save."""
    every = config.training.checkpoint_every
    if config.cluster.node_mtbf_hours is None:
        return
    if (failing := failures_of(times)) is None or every is None:
        reason = times.unknown_saves() or "training.checkpoint_every is null: a failure loses all"
        yield Figure("useful_share", "useful time", None, f"not known: {reason}", "")
        return
    between = f"a failure each {duration(failing.mtbf_s)}"
    formula = (
        f"Daly 2006 with {between}, {failing.save_s:.4g} s a save, {failing.restart_s:.4g} s a failure "
        f"(of these {RESTART_S:g} s are assumed); copies in memory are left out"
    )
    share, best = failing.useful_share(every), failing.best_every
    yield Figure("useful_share", "useful time", share, f"{share:.1%} with {between}", formula)
    text = f"training.checkpoint_every={best}: {failing.useful_share(best):.1%} useful time"
    yield Figure("best_checkpoint_every", "best saves", best, text, formula)


def _costs(hours: float, *, share: float, config: RunConfig, hardware: Hardware) -> Iterator[Figure]:
    """Cost and energy of a training, where the site's price and the board power of the device are known.

    share: of the device-hours, those of devices that work; the others are those of spares.
    """
    price, power_w = config.cluster.device_hour_price, hardware.device.power_w
    if price is not None:
        text = f"{hours:,.0f} device-hours x {price:g}"
        yield Figure("cost", "cost", hours * price, f"{hours * price:,.2f} at {price:g} a device-hour", text)
    if power_w is not None:
        energy_wh = hours * share * power_w
        text = f"{hours * share:,.0f} device-hours x {power_w:g} W"
        energy_text = f"{energy(energy_wh)} at {power_w:g} W a device"
        yield Figure("energy_kwh", "energy of the devices", energy_wh / 1e3, energy_text, text)


def energy(energy_wh: float) -> str:
    """`512 kWh`, `28.9 MWh`."""
    unit, name = max((pair for pair in POWERS if pair[0] <= energy_wh), default=POWERS[0])
    return f"{energy_wh / unit:.3g} {name}"


def memory_figure(planned: MemoryPlan, hardware: Hardware) -> Figure:
    """Whether the device that needs most has room."""
    label = "memory, at least" if planned.unknown else "memory, estimate"
    needed, room = planned.fullest.total, hardware.device.memory_bytes
    verdict = "fits" if needed <= room and not planned.unknown else "may not fit"
    clauses = [*planned.unknown, *planned.unproven]
    remarks = f" ({'; '.join(clauses)})" if clauses else ""
    text = f"{size(needed)} of {size(room)}: {verdict}{remarks}"
    return Figure("memory_bytes", label, needed, text, f"device {planned.fullest.device} needs most")


def notes(config: RunConfig, hardware: Hardware) -> Iterator[str]:
    """The assumptions of the figures."""
    yield from assumptions(config, hardware)
    if hardware.device.power_w is not None:
        yield "Energy: all devices at their board power all the time. Hosts, network and cooling come on top."
