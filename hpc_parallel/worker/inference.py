"""`task=infer`: the validation loss without gradients, then latency and throughput of each batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.batch_plan import BatchPlan, plan_batch
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import InferConfig, RunConfig
from hpc_parallel.config.tasks import batch_sizes
from hpc_parallel.data.sampler import to_device
from hpc_parallel.profiling.link_rates import synchronize
from hpc_parallel.record import attempts
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.strategies.exchange import all_gather_numbers
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.supervise.progress import Progress
from hpc_parallel.training.load_weights import start_from
from hpc_parallel.training.metrics import peak_memory_bytes
from hpc_parallel.training.validation import validate as validated
from hpc_parallel.training.writers import open_writers
from hpc_parallel.worker.session import Session, complete

WARM_UP = 3  # passes: the first allocates buffers and infers shapes, the next choose kernels


def infer(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
    progress: Progress | None = None,
) -> None:
    """Measure as `config` says, on all ranks of the default process group.

    Rank 0 writes `metrics.jsonl` (a line for the validation, then one per batch size) and `summary.json`.
    `progress` is for a watchdog; a pass of a batch counts as a step.
    Raises what `Session.open` and `start_from` raise.
    """
    rank, progress = dist.get_rank(), progress or Progress()
    if rank == 0:
        attempts.begin(folder, step=0, environment=environment)
    session = Session.open(config, device=device, trains=False)
    weights = start_from(config, session.assembled)
    writers = open_writers(config, folder=folder, values=values) if rank == 0 else []
    lines: list[dict[str, Any]] = []
    for step, figures in enumerate(measurements(session, progress), start=1):
        (peaks,) = all_gather_numbers([float(peak_memory_bytes(device))], device=device)
        now = datetime.now(UTC).isoformat()
        lines.append({"step": step, **figures, "peak_memory_bytes": int(max(peaks)), "time": now})
        for writer in writers:
            writer.write(lines[-1])
    progress.mark("done", progress.latest[2])
    complete(
        values,
        folder=folder,
        lines=lines,
        writers=writers,
        measured={"weights": weights, "comparison": session.comparison},
    )
    if rank == 0:
        print(*results(folder, read_json(folder.summary) or {}), sep="\n", flush=True)


def measurements(session: Session, progress: Progress) -> Iterator[dict[str, Any]]:
    """Yields the metrics of each line."""
    yield validate(session, progress)
    for size in batch_sizes(session.config):
        yield time_batch(session, progress, batch_size=size)


def validate(session: Session, progress: Progress) -> dict[str, Any]:
    """Run the validation of a training run, including the time to read the samples."""
    batches = session.batches(session.data.validation, seed=None)
    steps = session.validation_steps
    started = time.perf_counter()
    assembled = session.assembled
    means = validated(
        watched(assembled.forward_backward, progress), batches, steps=steps, device=session.device,
        evaluation=assembled.evaluation,
    )  # fmt: skip
    (times,) = all_gather_numbers([time.perf_counter() - started], device=session.device)
    samples = steps * session.config.training.global_batch_size
    return {"samples": samples, **means, "samples_per_s": samples / max(times)}


def watched(schedule: ForwardBackward, progress: Progress) -> Callable[[Tensor, Tensor], Tensor]:
    """Evaluate with `schedule`, and mark each pass as a step."""

    def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
        progress.mark("step", progress.latest[2] + 1)
        return schedule.evaluate(inputs, targets)

    return evaluate


def time_batch(session: Session, progress: Progress, *, batch_size: int) -> dict[str, Any]:
    """Time a batch of `batch_size` samples from its start on all ranks to its end on the last rank.

    A sample is ready when its batch is, so this is also the latency of one sample. The time includes the
    loss, but not the copy of the batch to the device.
    """
    task = session.config.task
    assert isinstance(task, InferConfig)
    plan = plan_of(session, batch_size=batch_size)
    evaluate = watched(session.assembled.build_schedule(plan.microbatches), progress)
    batches = session.batches(session.data.validation, seed=None, batch=plan)
    inputs, targets = to_device(batches.at(0), session.device)
    times_s: list[float] = []
    for _ in range(WARM_UP + task.repeats):
        dist.barrier()  # otherwise a rank begins a pass while another still ends the last
        synchronize(session.device)
        started = time.perf_counter()
        evaluate(inputs, targets)
        synchronize(session.device)
        times_s.append(time.perf_counter() - started)
    by_rank = all_gather_numbers(times_s[WARM_UP:], device=session.device)
    slowest = torch.tensor([max(times) for times in by_rank], dtype=torch.float64)
    latency_s, p99_s = slowest.quantile(torch.tensor([0.5, 0.99], dtype=torch.float64)).tolist()
    figures = {
        "batch_size": batch_size,
        "latency_s": latency_s,
        "latency_p99_s": p99_s,
        "samples_per_s": batch_size / latency_s,
    }
    length = getattr(session.data, "sequence_length", None)
    return figures if length is None else figures | {"tokens_per_s": length * batch_size / latency_s}


def plan_of(session: Session, *, batch_size: int) -> BatchPlan:
    """The configured microbatches, made smaller or fewer until they divide `batch_size`."""
    samples = batch_size // session.layout.data
    size, count = session.config.training.microbatch_size, session.config.strategy.microbatches
    return plan_batch(
        batch_size,
        layout=session.layout,
        microbatch_size=size and gcd(size, samples),
        microbatches=gcd(count, samples) if count and not size else None,
        in_turn=schedule_of(session.config.strategy).in_turn,
    )
