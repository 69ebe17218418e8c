"""The metrics of a run: device tensors are kept at each step and read only when a line is logged."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.machine.device_state import EnergyCounter
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.values import finite
from hpc_parallel.start.join import tf32
from hpc_parallel.start.start_checks import gpu_uuid
from hpc_parallel.strategies.exchange import all_gather, all_gather_numbers

# Dense peaks in FLOP/s from the vendors' data sheets: (bfloat16 and float16, float32 without TF32).
# A key is a part of the device's name, and the first key that matches counts. Cards have lower clocks or
# fewer cores than SXM modules. mfu is null on any other device.
PEAK_FLOPS = {
    "A100": (312e12, 19.5e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100 80GB HBM3": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),  # and GH200
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "L40S": (362e12, 91.6e12),
    "MI300X": (1307.4e12, 163.4e12),
    "MI250X": (191.5e12, 47.9e12),  # of one die: torch counts each of the two dies as a device
}


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device. Read them late, because reading waits for the device."""

    loss: Tensor  # mean loss of this replica's batch; zero if another rank of the replica has it
    gradient_norm: Tensor  # of the entire model, before clipping; always valid on rank 0
    skipped: Tensor | None = None  # Guard.skipped, valid on rank 0


@dataclass(frozen=True)
class Scale:
    """Constants of the run that convert seconds to rates."""

    global_batch_size: int
    tokens_per_sample: int | None
    flops_per_sample: float  # forward and backward
    devices: int
    replicas: int
    peak_flops: float | None  # of one device


@dataclass(frozen=True)
class Energy:
    """The counter of this rank's GPU, and the number of GPUs of the run."""

    counter: EnergyCounter
    gpus: int

    @classmethod
    def of(cls, device: torch.device, *, devices: int) -> Energy | None:
        """A collective call. Ranks that share a GPU count it once. None on CPUs."""
        if device.type != "cuda":
            return None
        uuids = all_gather(uuid := gpu_uuid(device))
        counts = uuids.index(uuid) == dist.get_rank()
        counter = EnergyCounter(nvml_module() if counts else None, uuid)
        return cls(counter, devices - (len(uuids) - len(set(uuids))))


class Metrics:
    """Collects a step's tensors on every rank and computes the keys of `metrics.jsonl`."""

    def __init__(
        self,
        scale: Scale,
        *,
        device: torch.device,
        compiles: bool = False,
        energy: Energy | None = None,
        skipped_steps: int = 0,
    ) -> None:
        """compiles: whether the first step compiles, so that its time belongs to the start.

        skipped_steps: how many steps earlier starts have left out.
        """
        self._scale = scale
        self._compiles = compiles
        self._energy = energy
        self.energy: dict[str, dict[str, float]] = {}  # `energy` of the last line, on GPUs
        self._device = device
        self._steps = 0
        self._pause_s = 0.0
        self._began = time.perf_counter()
        self._others_s = {"validation": 0.0, "saving": 0.0}  # what was not spent on steps, since then
        self.data_s: list[float] = []  # how long each step since the last line waited for its batch
        self._step_time_s = math.nan
        self._since = time.perf_counter()
        self._result: StepResult | None = None
        self._skipped_before, self._skipped_steps = skipped_steps, skipped_steps  # and in the last line
        self.rank_memory_bytes: list[int] | None = None  # peaks up to the last line, by rank

    def note(self, result: StepResult) -> None:
        if self._result is None and self._compiles:
            self._began, self._others_s = time.perf_counter(), dict.fromkeys(self._others_s, 0.0)
        self._result = result
        self._steps += 1

    @property
    def spent_s(self) -> dict[str, float]:
        """What this start has spent on steps, validation and waiting for saves (`record/time_use.py`)."""
        since_s = time.perf_counter() - self._began
        return {"steps": since_s - sum(self._others_s.values()), **self._others_s}

    def leave_out(self, seconds: float, *, steps: int = 0, cause: str | None = None) -> None:
        """Subtract time that was not spent on steps (`cause`), or that was spent on `steps` untimed steps.

        If no timed step is left since the last line, the next line repeats its step time (`timed_steps` = 0).
        """
        self._pause_s += seconds
        self._steps -= steps
        if cause is not None:
            self._others_s[cause] += seconds

    def line(self, *, step: int, learning_rate: float) -> dict[str, Any]:
        """Returns the record of this step, the same on all ranks. The host waits for the device only here."""
        loss_share, gradient_norm, *skipped = self._scalars()
        now = time.perf_counter()
        if self._steps:
            self._step_time_s = (now - self._since - self._pause_s) / self._steps
        peak_bytes = float(peak_memory_bytes(self._device))
        data_s = sum(self.data_s) / max(len(self.data_s), 1)
        joules = math.nan if self._energy is None else self._energy.counter.joules()
        own = [loss_share, gradient_norm, peak_bytes, self._step_time_s, data_s, joules, learning_rate]
        losses, norms, peaks, times, waits, energies, rates, *skips = all_gather_numbers(
            [*own, *skipped], device=self._device
        )
        if not math.isclose(min(rates), max(rates)):  # of a schedule of the user's own
            rule = "the ranks must have one learning rate, but optimizer.schedule gives them"
            raise ConfigError([f"step {step}: {rule} {min(rates):g} to {max(rates):g}"])
        if self._energy is not None:
            counted = [joules for joules in energies if math.isfinite(joules)]
            self.energy = {
                "energy": {"joules": sum(counted), "gpus": len(counted), "of_gpus": self._energy.gpus}
            }
        self.rank_memory_bytes = [int(peak) for peak in peaks]
        scale = self._scale
        step_time_s = max(times)
        samples_per_s = scale.global_batch_size / step_time_s
        timed_steps = self._steps
        self._since, self._steps, self._pause_s = time.perf_counter(), 0, 0.0
        self.data_s.clear()
        line: dict[str, Any] = {
            "step": step,
            "samples": step * scale.global_batch_size,
            "loss": finite(sum(losses) / scale.replicas),
            "grad_norm": finite(norms[0]),  # rank 0 always has it
            "learning_rate": learning_rate,
            "step_time_s": step_time_s,
            "data_s": max(waits),
            "samples_per_s": samples_per_s,
            "timed_steps": timed_steps,
        }
        return line | {
            **self._skips([values[0] for values in skips], step=step),
            **self._rates(samples_per_s),
            "peak_memory_bytes": max(self.rank_memory_bytes),
            "spent_s": self.spent_s,
            **self.energy,
            "time": datetime.now(UTC).isoformat(),
        }

    def _scalars(self) -> list[float]:
        assert self._result is not None
        skipped = [] if self._result.skipped is None else self._result.skipped.unbind()
        scalars = [self._result.loss, self._result.gradient_norm, *skipped]
        values: list[float] = torch.stack([scalar.double() for scalar in scalars]).to(self._device).tolist()
        return values

    def _skips(self, values: Sequence[float], *, step: int) -> dict[str, Any]:
        """The number of skipped steps and, if it has grown since the last line, the last one of them."""
        if not values:
            return {"skipped_steps": self._skipped_before} if self._skipped_before else {}
        counted, since, *factors = values
        number = self._skipped_before + int(counted)
        line: dict[str, Any] = {"skipped_steps": number}
        if number > self._skipped_steps:
            line["skipped_step"] = step - int(since)
            if factors:
                line |= {"loss_scale_before": factors[0], "loss_scale": factors[1]}
        self._skipped_steps = number
        return line

    def _rates(self, samples_per_s: float) -> dict[str, Any]:
        scale = self._scale
        flops = samples_per_s * scale.flops_per_sample / scale.devices
        rates: dict[str, Any] = {}
        if scale.tokens_per_sample is not None:
            rates["tokens_per_s"] = samples_per_s * scale.tokens_per_sample
        return rates | {
            "tflops_per_device": flops / 1e12,
            "mfu": None if scale.peak_flops is None else flops / scale.peak_flops,
        }


def peak_memory_bytes(device: torch.device) -> int:
    """Returns this rank's peak memory: allocated on the GPU, or resident if it runs on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: torch.device, *, precision: str) -> float | None:
    """Returns the peak of one device in `training.precision`, in FLOP/s; None if it is not known."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), precision=precision, tf32=tf32()["matmul"])


def peak_of(name: str, *, precision: str, tf32: bool = False) -> float | None:
    """The peak of a device by its full name; None for a part of a device (MIG), and in float64.

    tf32: whether products of float32 use TF32, whose peak is half the peak of bfloat16 on NVIDIA's devices.
    """
    peaks = next((peaks for part, peaks in PEAK_FLOPS.items() if part in name), None)
    if peaks is None or " MIG " in name or precision == "float64":
        return None
    of_half, of_float32 = peaks
    if precision != "float32":
        return of_half
    return of_half / 2 if tf32 else of_float32
