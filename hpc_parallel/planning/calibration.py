"""Fit the coefficients of a hardware file to finished runs (`plan --calibrate`).

A run folder may come from anybody, so every value is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks import layout_checks
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.typed_config import typed
from hpc_parallel.layout.counts import DecoderSizes, count
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.planning.coefficient_fit import Fitted, fit
from hpc_parallel.planning.hardware import FITTED_BY, Hardware, coefficient, hardware_text
from hpc_parallel.planning.step_time import step_time
from hpc_parallel.planning.work import Work, unplanned, work_of_run
from hpc_parallel.problems import ConfigError, Problem, printable, raise_if_any
from hpc_parallel.record.endings import Summary
from hpc_parallel.record.environment_file import Environment
from hpc_parallel.record.run_folder import RunFolder, is_run_folder, unreadable
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.typed import read_record

LEAST_RUNS, LEAST_STEPS = 4, 3  # runs, and different steps among them
ERROR = 0.05  # the relative error of a measured time
IDENTIFIED = 0.6  # the runs narrow a coefficient if its spread is below this share of its tolerance
# Coefficient -> the tolerance of its logarithm: how far a measurement by task=calibrate, or a file's
# assumption, may be off.
TOLERANCES = {
    "products.peak_share": 0.3,
    "traffic.elementwise": 0.7,
    "traffic.loss_bytes": 1.5,  # the files of A100s and H100s have the value of a program with whole logits
    "traffic.optimizer_bytes": 0.5,
    "host.forward_s": 0.5,
    "host.backward_s": 0.5,
    "host.collective_s": 1.5,
    "host.microbatch_s": 0.7,
    "host.action_s": 1.5,
    "host.step_s": 0.7,
    "node.collective.latency_s": 0.5,
    "node.collective.bytes_per_s": 0.3,
    "node.send.latency_s": 0.7,
    "network.latency_s": 0.7,
    "network.share": 0.15,
}
# Limits for a recorded configuration, so that planning it takes neither all memory nor hours.
MOST_DEVICES, MOST_NUMBER, MOST_BLOCKS = 2**16, 2**24, 2**12
MOST_PASSES = 2**16  # microbatches x stages of a pipeline: a plan simulates each
LONGEST_STEP_S = 1e6
MOST_LETTERS = 80  # of a device's name
NO_PLAN = "its configuration has numbers that no plan takes."


@dataclass(frozen=True)
class MeasuredRun:
    """One training. device: the name that torch gives to its device. step_s: the median of its steps."""

    name: str
    work: Work
    node_devices: int
    device: str
    step_s: float


def read_runs(paths: Sequence[Path], hardware: Hardware) -> list[MeasuredRun]:
    """Raises ConfigError with the problems of all folders."""
    runs, problems = [], list[Problem | str]()
    for path in paths:
        try:
            runs.append(_read_run(RunFolder(path), hardware))
        except ConfigError as error:
            problems += [printable(f"{path}: {problem}") for problem in error.problems]
    raise_if_any(problems)
    return runs


def _read_run(folder: RunFolder, hardware: Hardware) -> MeasuredRun:
    if (reason := unreadable(folder.path)) is not None:
        raise ConfigError([reason])
    if not is_run_folder(folder.path):
        raise ConfigError(["is not a run folder (no config.yaml and rendezvous in it)."])
    try:
        values, summary = folder.read_config(), Summary.read(folder) or Summary()
        environment = read_record(Environment, folder.environment) or Environment()
    except (OSError, DamagedError) as error:
        raise ConfigError([f"{printable(str(error))}."]) from error
    step_s = _step_s(summary)
    config = _config(values, hardware)
    kind = _device_kind(environment)
    if kind != hardware.device.kind:
        raise ConfigError(
            [f"ran on {kind}, but hardware= describes a device of kind {hardware.device.kind}."]
        )
    try:
        work = _work(config, hardware)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(["its configuration can't be planned."]) from error
    name = (environment.device or kind)[:MOST_LETTERS]
    return MeasuredRun(folder.path.name, work, config.gpus_per_node, name, step_s)


def _step_s(summary: Summary) -> float:
    if not summary.completed:
        raise ConfigError(["has not completed, so its steps are not measured."])
    step_s = summary.step_time_s
    if step_s is None or not 0 < step_s < LONGEST_STEP_S:
        raise ConfigError(["its summary.json has no time of a step."])
    return step_s


def _config(values: dict[str, Any], hardware: Hardware) -> RunConfig:
    """The recorded configuration, if all of its numbers are small enough to plan it."""
    config: RunConfig | None = None
    with suppress(ConfigError):
        config = typed(values)
    if config is None or asdict(config) != values:  # another version has other keys
        raise ConfigError(["its configuration is of another version, or was changed. Measure it again."])
    batch = [config.training.global_batch_size, config.training.microbatch_size]
    sizes = [config.model, config.data, vars(config.strategy), batch]
    if config.devices > MOST_DEVICES or _largest(sizes) > MOST_NUMBER:
        raise ConfigError([NO_PLAN])
    if config.training.compile and hardware.traffic.compiled is None:
        raise ConfigError(["training.compile is not planned on this hardware, so it can't be fitted."])
    if config.training.compile_whole:
        raise ConfigError(["training.compile_whole is not planned, so it can't be fitted."])
    if config.training.activation_checkpointing == "selective":
        raise ConfigError(["selective checkpointing is not planned, so it can't be fitted."])
    return config


def _largest(value: Any) -> float:
    """The largest number in nested values."""
    if isinstance(value, dict):
        return _largest(list(value.values()))
    if isinstance(value, list):
        return max(map(_largest, value), default=0.0)
    return abs(value) if isinstance(value, int | float) else 0.0


def _device_kind(environment: Environment) -> str:
    kind = environment.places[0].device_kind if environment.ranks else None
    if kind not in ("cpu", "cuda"):
        raise ConfigError(["its environment.json does not say on which devices it ran."])
    return kind


def _work(config: RunConfig, hardware: Hardware) -> Work:
    if (count(config, "blocks")[1] or 1) > MOST_BLOCKS:
        raise ConfigError([NO_PLAN])
    raise_if_any(layout_checks.find_problems(config))
    layout = layout_of(config.strategy, devices=config.devices)
    raise_if_any(unplanned(config, layout, hardware))
    work = work_of_run(config)
    needed = (field.name for field in fields(DecoderSizes) if field.default is MISSING or field.default)
    sizes = [value for name in needed if not isinstance(value := getattr(work.decoder, name), bool)]
    passes = work.microbatches * len(work.blocks)
    if min(*sizes, work.microbatch_size, work.microbatches, *work.blocks) < 1 or passes > MOST_PASSES:
        raise ConfigError([NO_PLAN])
    step_time(work, hardware)  # raises if anything else is wrong
    return work


@dataclass(frozen=True)
class Calibration:
    """The fitted hardware, the coefficients, and the relative error of each run's plan."""

    hardware: Hardware
    before: Hardware
    fitted: Mapping[str, Fitted]
    runs: Sequence[MeasuredRun]
    errors: Sequence[float]

    @property
    def mean_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors)

    def identified(self, name: str) -> bool:
        """Whether the runs have narrowed the coefficient."""
        return self.fitted[name].spread < IDENTIFIED * TOLERANCES[name]


def planned_s(run: MeasuredRun, hardware: Hardware) -> float:
    node = replace(hardware.node, devices=run.node_devices)
    return step_time(run.work, replace(hardware, node=node)).total_s


def calibrate(runs: Sequence[MeasuredRun], hardware: Hardware) -> Calibration:
    """Fit `hardware` to `runs`. Raises ConfigError if they are too few, alike, or of different devices."""
    raise_if_any(_unfit(runs))
    after, fitted = fit(
        hardware,
        tolerances=TOLERANCES,
        measured_s=[run.step_s for run in runs],
        planned_s=lambda machine: [planned_s(run, machine) for run in runs],
        error=ERROR,
    )
    errors = [planned_s(run, after) / run.step_s - 1 for run in runs]
    mean = 100 * sum(map(abs, errors)) / len(errors)
    after = replace(after, calibration=f"{FITTED_BY}, {len(runs)} runs, mean error {mean:.1f} %")
    return Calibration(after, hardware, fitted, runs, errors)


def _unfit(runs: Sequence[MeasuredRun]) -> Iterator[Problem | str]:
    if len(runs) < LEAST_RUNS:
        count = f"{len(runs)} run{'s' * (len(runs) != 1)}"
        yield f"--calibrate has {count}, and needs at least {LEAST_RUNS}, with other strategies and models."
    elif len(different := {run.work for run in runs}) < LEAST_STEPS:
        yield (
            f"--calibrate has {len(runs)} runs with {len(different)} different steps, and needs at least "
            f"{LEAST_STEPS}: other strategies, models or batches."
        )
    names = sorted({printable(run.device) for run in runs})
    if len(names) > 1:
        yield f"--calibrate has runs on different devices: {', '.join(names)}. Try those of one kind."


def report(calibration: Calibration) -> Iterator[str]:
    """Each run, then each coefficient before and after, then the coefficients that the runs don't narrow."""
    yield f"{'planned':>12} {'measured':>12} {'error':>8}  run"
    for run, error in zip(calibration.runs, calibration.errors, strict=True):
        times = f"{1e3 * run.step_s * (1 + error):9.1f} ms {1e3 * run.step_s:9.1f} ms"
        yield f"{times} {100 * error:+6.1f} %  {printable(run.name)}"
    largest = max(map(abs, calibration.errors))
    yield f"error of the fit: mean {100 * calibration.mean_error:.1f} %, largest {100 * largest:.1f} %"
    for name, one in calibration.fitted.items():
        if calibration.identified(name):
            before = coefficient(calibration.before, name)
            yield f"  {name:<28} {before:.4g} -> {one.value:.4g} (+-{100 * one.spread:.0f} %)"
    if unknown := [name for name in calibration.fitted if not calibration.identified(name)]:
        yield f"These runs say little about: {', '.join(unknown)}. They stay near their values before."


def text(calibration: Calibration, *, base: str) -> str:
    """The hardware file."""
    head = [
        f"Made by `python -m hpc_parallel plan --calibrate` from {len(calibration.runs)} runs, on the values",
        f"of hardware={base}. Error of the fit: mean {100 * calibration.mean_error:.1f} %.",
    ]
    sources = {
        name: "fitted to runs" if calibration.identified(name) else f"the runs say little: as {base}, nearly"
        for name in calibration.fitted
    }
    return hardware_text(calibration.hardware, head=head, sources=sources)
