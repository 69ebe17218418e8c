"""Fit the coefficients of a hardware file to finished runs (`plan --calibrate`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hpc_parallel.planning.coefficient_fit import Fitted, fit
from hpc_parallel.planning.hardware import FITTED_BY, Hardware, coefficient, hardware_text
from hpc_parallel.planning.measured_runs import MeasuredRun
from hpc_parallel.planning.step_time import step_time
from hpc_parallel.problems import ConfigError, Problem, printable

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
    """The planned time of a run's step."""
    node = replace(hardware.node, devices=run.node_devices)
    return step_time(run.work, replace(hardware, node=node)).total_s


def calibrate(runs: Sequence[MeasuredRun], hardware: Hardware) -> Calibration:
    """Fit `hardware` to `runs`. Raises ConfigError if they are too few, alike, or of different devices."""
    if problems := list(_unfit(runs)):
        raise ConfigError(problems)
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
