"""The profilers of a training: what each is given, and what they have found at its end."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from hpc_parallel.failure.left_out import left_out
from hpc_parallel.layout.layout import servers
from hpc_parallel.layout.step_facts import measured_steps
from hpc_parallel.machine.device_state import device_state
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.profiling.measurement import Measurement
from hpc_parallel.profiling.rank_times import RankTimes
from hpc_parallel.profiling.recording import Recording
from hpc_parallel.profiling.slow_ranks import Accusations
from hpc_parallel.record.recorded_slow_ranks import accusations, keep_accusations
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.start.start_checks import gpu_uuid
from hpc_parallel.strategies.mesh import axis_of
from hpc_parallel.training.metrics import Metrics
from hpc_parallel.training.observers import Profiler
from hpc_parallel.worker.session import Session


@dataclass(frozen=True)
class Profilers:
    """What looks closely at some steps of a training."""

    recording: Recording
    measurement: Measurement
    rank_times: RankTimes

    @property
    def on(self) -> Sequence[Profiler]:
        """Those that look at any step on any rank, in the order in which they enter a step."""
        return [profiler for profiler in (self.recording, self.measurement, self.rank_times) if profiler.on]

    def figures(self, folder: RunFolder) -> dict[str, Any]:
        """The keys of `summary.json` that were measured; rank 0 writes the timeline. A collective call."""
        measured = self.measurement.figures()
        chart = self.measurement.schedule_chart()
        if dist.get_rank() == 0 and chart is not None:
            with left_out("the chart of the schedule is"):
                chart.write(folder)
        return measured | {"slow_ranks": accusations(folder) if dist.get_rank() == 0 else None}


def open_profilers(session: Session, folder: RunFolder, *, metrics: Metrics, steps_done: int) -> Profilers:
    """What the configuration asks for; `metrics` leaves the steps out that they slow down."""
    config, mesh, device = session.config, session.assembled.mesh, session.device
    rank, profile = dist.get_rank(), config.profile
    leave_out = partial(metrics.leave_out, steps=1)
    if (measured := measured_steps(config)) < config.training.measure_steps and rank == 0:
        why = "because CUPTI serves one profiler of a process"
        print(f"profile={profile.kind}: no step is measured and no rank is timed, {why}", flush=True)
    measurement = Measurement(steps=measured, mesh=mesh, device=device, leave_out=leave_out)
    stages = axis_of(mesh, "pipeline")
    is_server = bool(servers(config.strategy)) and rank == 0
    window = range(profile.first_step, profile.first_step + profile.steps)
    earlier: list[dict[str, Any]] = []
    if rank == 0:
        with left_out("the ranks that were slow before are"):
            earlier = keep_accusations(folder)
    nvml = nvml_module() if device.type == "cuda" else None
    rank_times = RankTimes(
        on=measured > 0,
        host=socket.gethostname(),
        role=-1 if is_server else stages.get_local_rank() if stages is not None else 0,
        device=device,
        expected_s=lambda: measurement.last_step_s,
        profiled=[measurement.steps, window if profile.kind != "none" else range(0)],
        leave_out=leave_out,
        device_state=partial(device_state, nvml, gpu_uuid(device)),
        accusations=Accusations(earlier, steps_done=steps_done),
        write=partial(write_json, folder.rank_times),
    )
    recording = Recording(profile, folder=folder.profile, rank=rank, device=device, leave_out=leave_out)
    return Profilers(recording, measurement, rank_times)
