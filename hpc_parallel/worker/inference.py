"""`task=infer`: the validation loss without gradients, then latency and throughput of each batch size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import gcd
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.task_schema import InferConfig
from hpc_parallel.config.tasks import batch_sizes
from hpc_parallel.data.sampler import to_device
from hpc_parallel.layout.batch_plan import BatchPlan, plan_batch
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.record.checkpoint_index import complete as complete_in
from hpc_parallel.record.endings import has_final_summary
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import append_line
from hpc_parallel.record.values import VALIDATION
from hpc_parallel.start.start_times import synchronize
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import all_gather_numbers
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.training.load_weights import start_from
from hpc_parallel.training.metrics import peak_memory_bytes
from hpc_parallel.training.observers import Progress
from hpc_parallel.training.validation import validate as validated
from hpc_parallel.training.writers import open_writers
from hpc_parallel.worker.session import Session, TaskContext, complete, phases_of
from hpc_parallel.worker.time_budget import TimeBudget, advice

LEAST_PASSES = 5  # timed passes of a batch size
LOOK_S = 1.0  # between two looks for a new checkpoint
WARM_UP = 3  # passes; the first pass allocates buffers and infers shapes, the next passes choose kernels


def infer(context: TaskContext) -> None:
    """Measure as the configuration says, on all ranks of the default process group.

    Rank 0 writes `metrics.jsonl` (a line for the validation, then one per batch size) and `summary.json`.
    For the watchdog, a pass of a batch counts as a step.
    Raises what `Session.open` and `start_from` raise.
    """
    config, folder, progress, rank = context.config, context.folder, context.progress, dist.get_rank()
    context.begin()
    on_phase = phases_of(folder, rank=rank)
    session = Session.open(config, device=context.device, trains=False, on_phase=on_phase)
    if isinstance(config.task, InferConfig) and config.task.follow:
        follow_checkpoints(context, session)
        return
    on_phase("loading the weights")
    weights = start_from(config, session.assembled)
    writers = open_writers(config, folder=folder, values=context.values) if rank == 0 else []
    lines: list[dict[str, Any]] = []
    on_phase("validation")
    sizes = BatchSizeTimes(session, progress)
    for step, figures in enumerate(sizes.measure(), start=1):
        (peaks,) = all_gather_numbers([float(peak_memory_bytes(session.device))], device=session.device)
        now = datetime.now(UTC).isoformat()
        lines.append({"step": step, **figures, "peak_memory_bytes": int(max(peaks)), "time": now})
        for writer in writers:
            writer.write(lines[-1])
    progress.mark("done", progress.latest[2])
    measured = {"weights": weights, "comparison": session.comparison, "left_out": sizes.left_out}
    complete(context, lines=lines, writers=writers, measured=measured)
    context.print_results()


def follow_checkpoints(context: TaskContext, session: Session) -> None:
    """Take the validation loss of each newest checkpoint of `weights` until its training has ended.

    Each result is a line of this run, and of `evaluations.jsonl` in the folder of the training.
    """
    config, rank = context.config, dist.get_rank()
    training = RunFolder(Path(str(config.weights)))
    writers = open_writers(config, folder=context.folder, values=context.values) if rank == 0 else []
    lines: list[dict[str, Any]] = []
    evaluated, is_over = 0, False
    while not is_over:
        is_over, newest = exchange.broadcast(_progress_of(training) if rank == 0 else None)
        context.progress.mark("step", context.progress.latest[2])
        path = Path(start_from(config, session.assembled)) if newest > evaluated else None
        step = 0 if path is None else int(path.name.partition("-")[2])
        if path is None or step <= evaluated:  # nothing new, or the newest one is damaged
            time.sleep(0 if is_over else LOOK_S)
            continue
        evaluated, consumed = step, Checkpoint(path, step).manifest["samples"]
        figures = validate(session, context.progress)
        losses = {key: value for key, value in figures.items() if key.startswith(VALIDATION)}
        line = {"step": evaluated, "samples": consumed, **losses, "time": datetime.now(UTC).isoformat()}
        lines.append(line)
        for writer in writers:
            writer.write(line)
        if rank == 0:
            append_line(training.evaluations, line)
        is_over = False  # a newer checkpoint may have come meanwhile
    context.progress.mark("done", context.progress.latest[2])
    complete(context, lines=lines, writers=writers, measured={"weights": str(training.path)})


def _progress_of(training: RunFolder) -> tuple[bool, int]:
    """Whether the training has ended, and then the step of its newest checkpoint; 0 without one."""
    is_over = has_final_summary(training)
    return is_over, max((checkpoint.step for checkpoint in complete_in(training.checkpoints)), default=0)


class BatchSizeTimes:
    """Measures the validation loss, then one batch size after another until the time is used."""

    def __init__(self, session: Session, progress: Progress) -> None:
        self.session, self.progress = session, progress
        self.sizes = batch_sizes(session.config)
        self.left_out: str | None = None  # with the reason

    def measure(self) -> Iterator[dict[str, Any]]:
        """Yields the metrics of each line. The smallest batch size is always measured."""
        yield validate(self.session, self.progress)
        task = self.session.config.task
        assert isinstance(task, InferConfig)
        budget = TimeBudget(task.seconds)
        least_s = 0.0  # the time of one batch size, if time is proportional to samples
        for number, size in enumerate(self.sizes):
            rest = self.sizes[number:]
            if number > 0:
                least_s *= size / self.sizes[number - 1]
            if number > 0 and budget.left_s(after_s=least_s) < 0:
                needed_s = sum(least_s * larger / size for larger in rest)
                names = ", ".join(map(str, rest))
                self.left_out = f"left out: batch sizes {names}: {advice(budget, needed_s=needed_s)}"
                return
            seconds = max(0.0, budget.left_s()) / len(rest)
            figures = time_batch(self.session, self.progress, batch_size=size, seconds=seconds)
            least_s = (WARM_UP + LEAST_PASSES) * figures["latency_s"]
            yield figures


def validate(session: Session, progress: Progress) -> dict[str, Any]:
    """Run the validation of a training run. Its rate includes the time to read the samples."""
    batches = session.batches(session.data.validation, seed=None)
    samples = session.validation_samples
    started = time.perf_counter()
    assembled = session.assembled
    means = validated(
        watched(assembled.forward_backward, progress), batches, count=samples, device=session.device,
        evaluation=assembled.evaluation,
    )  # fmt: skip
    (times,) = all_gather_numbers([time.perf_counter() - started], device=session.device)
    return {"samples": samples, **means, "samples_per_s": samples / max(times)}


def watched(schedule: ForwardBackward, progress: Progress) -> Callable[[Tensor, Tensor], Tensor]:
    """Evaluate with `schedule`, and mark each pass as a step."""

    def evaluate(inputs: Tensor, targets: Tensor) -> Tensor:
        progress.mark("step", progress.latest[2] + 1)
        return schedule.evaluate(inputs, targets)

    return evaluate


def time_batch(session: Session, progress: Progress, *, batch_size: int, seconds: float) -> dict[str, Any]:
    """Time a batch of `batch_size` samples from its start on all ranks to its end on the last rank.

    `task.repeats` passes are timed. If they take longer than `seconds`, fewer passes are timed, but at least
    min(task.repeats, LEAST_PASSES).

    A sample is ready when its batch is, so this is also the latency of one sample. The time includes the
    loss, but not the copy of the batch to the device.
    """
    task = session.config.task
    assert isinstance(task, InferConfig)
    plan = plan_of(session, batch_size=batch_size)
    evaluate = watched(session.assembled.build_schedule(plan.microbatches), progress)
    batches = session.batches(session.data.validation, seed=None, batch=plan)
    inputs, targets = to_device(batches.at(0), session.device)

    def timed(passes: int) -> list[float]:
        """Seconds of each pass on the slowest rank."""
        times_s: list[float] = []
        for _ in range(passes):
            dist.barrier()  # otherwise a rank begins a pass while another rank still ends the last one
            synchronize(session.device)
            started = time.perf_counter()
            evaluate(inputs, targets)
            synchronize(session.device)
            times_s.append(time.perf_counter() - started)
        return [max(times) for times in all_gather_numbers(times_s, device=session.device)]

    pass_s = min(timed(WARM_UP))
    left_s = seconds - WARM_UP * pass_s
    slowest = timed(min(task.repeats, max(LEAST_PASSES, int(left_s / pass_s))))
    latency_s, p99_s = (
        torch.tensor(slowest, dtype=torch.float64)
        .quantile(torch.tensor([0.5, 0.99], dtype=torch.float64))
        .tolist()
    )
    figures = {
        "batch_size": batch_size,
        "latency_s": latency_s,
        "latency_p99_s": p99_s,
        "samples_per_s": batch_size / latency_s,
        "passes": len(slowest),
    }
    length = getattr(session.data, "sequence_length", None)
    return figures if length is None else figures | {"tokens_per_s": length * batch_size / latency_s}


def plan_of(session: Session, *, batch_size: int) -> BatchPlan:
    """The configured microbatches, made smaller or fewer until they divide `batch_size`."""
    samples = batch_size // session.plan.layout.data
    size, count = session.config.training.microbatch_size, session.config.strategy.microbatches
    return plan_batch(
        batch_size,
        layout=session.plan.layout,
        microbatch_size=size and gcd(size, samples),
        microbatches=gcd(count, samples) if count and not size else None,
        in_turn=schedule_of(session.config.strategy).in_turn,
    )
