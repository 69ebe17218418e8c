"""The task `train`: trains from the newest checkpoint, or from the start, to the last step or a signal."""

from __future__ import annotations

import contextlib
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hpc_parallel.failure import notify
from hpc_parallel.failure.summary import computed_as
from hpc_parallel.layout.step_facts import rounded_parts
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError, print_warning
from hpc_parallel.record import attempts, checkpoint_index, host_memory
from hpc_parallel.record.checkpoint_index import Checkpoint, clear, set_aside_after
from hpc_parallel.record.endings import COMPLETED, PRUNED
from hpc_parallel.record.metrics_file import MetricsReader, last_line
from hpc_parallel.record.provenance import read_environment
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.record.values import flatten, integer
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.strategies.dataparallel import ring_all_reduce, traffic_figures
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.strategies.groups import make_saving_group
from hpc_parallel.strategies.mesh import axis_of, weight_axes
from hpc_parallel.training.callbacks import Callbacks
from hpc_parallel.training.checkpoint import CheckpointReader, StateDict, optimizer_sizes, save_s, state_of
from hpc_parallel.training.load_weights import start_from
from hpc_parallel.training.memory_copies import MemoryCopies, layout_of_state
from hpc_parallel.training.metrics import Energy, Metrics, Scale, peak_flops
from hpc_parallel.training.nonfinite import NonFiniteError
from hpc_parallel.training.observers import Observers, Profiler
from hpc_parallel.training.optimizer import ModelOptimizer, build_optimizer
from hpc_parallel.training.pruning import Pruning
from hpc_parallel.training.read_ahead import ReadAhead
from hpc_parallel.training.replicas import ReplicaCheck, ReplicaError
from hpc_parallel.training.restore import newest_sound, restore
from hpc_parallel.training.rounding import hold_bfloat16, rounding_of
from hpc_parallel.training.saver import Saver, SavingGroup
from hpc_parallel.training.step import Step
from hpc_parallel.training.trainer import RankBatches, Trainer
from hpc_parallel.training.writers import open_writers
from hpc_parallel.worker.run_plots import draw_plots, span_s
from hpc_parallel.worker.session import PROFILERS, Session, TaskContext, complete, note_stop, phases_of
from hpc_parallel.worker.stop import StopFlag, show_place_at_sigterm, time_limit_of

if TYPE_CHECKING:
    from hpc_parallel.profiling.profilers import Profilers

STATISTICS = "statistics_samples"  # in a checkpoint and in the summary


def train(context: TaskContext, *, on_gradients: Callable[[Assembled], None] | None = None) -> Assembled:
    """Train as the configuration says, on all ranks; returns this rank's trained parts.

    Continues from the newest undamaged checkpoint of the run folder; without one, starts from
    `config.weights`. `on_gradients` is called in each step when `.grad` is complete, before it is clipped.
    Rank 0 writes `metrics.jsonl` and `summary.json`. If a signal stops the training before the last step, it
    writes `stopped.json` instead of `summary.json`. Raises what `Session.open` raises, and SaveError if the
    last checkpoint can't be written.
    """
    folder, device = context.folder, context.device
    on_phase = phases_of(folder, rank=dist.get_rank())
    energy = Energy.of(device, devices=context.config.devices)
    session = Session.open(context.config, device=device, on_phase=on_phase)
    config, assembled = session.config, session.assembled
    split = bool(weight_axes(assembled.mesh))
    weights, rounding = assembled.named_parameters(), rounding_of(config)
    optimizer = build_optimizer(weights, config.optimizer, split=split, rounding=rounding)
    state = partial(state_of, assembled, optimizer)
    on_phase("loading the weights")
    memory = open_memory(session, context, state=state)
    steps_done, on_disk = restore_or_start(session, context, optimizer=optimizer, memory=memory)
    if rounding is not None and rounding.weights:
        hold_bfloat16(weights.values())
    check = replicas_check(session)
    check(steps_done)
    samples = samples_of(session)
    scale = scale_of(session, replicas=samples.validation.replicas)
    metrics = Metrics(
        scale, device=device, compiles=config.training.compile, energy=energy,
        skipped_steps=skipped_before(folder) if steps_done else 0,
    )  # fmt: skip
    profilers: Profilers = resolve_name(PROFILERS)(session, folder, metrics=metrics, steps_done=steps_done)
    observers = open_observers(
        session, context, metrics=metrics, profilers=profilers.on, steps_done=steps_done
    )
    saver = Saver(
        folder.checkpoints, state=state,
        about={"config": context.values, "data": session.data.digest, STATISTICS: session.statistics_samples},
        training=config.training, device=device, saving=saving_of(session),
        saved_step=0 if on_disk is None else on_disk.step,
        save_s=None if on_disk is None else save_s(on_disk),
        check=check, on_wait=lambda: observers.progress.mark("save", trainer.steps_done),
        on_saved=observers.callbacks.checkpoint, warn=partial(warn_of_storage, folder),
    )  # fmt: skip
    if dist.get_rank() == 0 and (count := session.statistics_samples) is not None:
        other = "runs with another number (training.microbatch_size) have other losses"
        print(f"BatchNorm takes its statistics over {count} samples: {other}", flush=True)
        if change := other_statistics(on_disk, count=count):
            print_warning(change)
    limit = time_limit_of(context.environment, save_s=lambda: saver.save_s) if dist.get_rank() == 0 else None
    stop = StopFlag(step=steps_done, time_limit=limit)
    step = step_of(session, optimizer=optimizer, on_gradients=on_gradients)
    trainer = Trainer(
        step=step, optimizer=optimizer, samples=samples, observers=observers, config=config, saver=saver,
        stop=stop.after, steps_done=steps_done, memory=memory,
    )  # fmt: skip
    # `stop` stays open until all files are written: a signal must not end a run that is almost done.
    on_phase("first steps (torch.compile)" if config.training.compile else "first steps")
    with contextlib.closing(samples.train), stop:
        signalled = fit(trainer, saver=saver, metrics=metrics)
        show_place_at_sigterm()  # from here on no progress is watched
        if memory is not None:  # the last checkpoint is on the disk
            memory.close(on_wait=lambda: observers.progress.mark("save", trainer.steps_done))
            memory.remove()
        if dist.get_rank() == 0:
            attempts.note(folder, "worked", spent_s=metrics.spent_s, **metrics.energy)
        profilers.recording.close()
        observers.callbacks.end(trainer.steps_done)
        if signalled is None:
            finish(
                session, context, observers=observers, profilers=profilers,
                ended_early=trainer.ended_early, pruned=trainer.pruned,
                counted={
                    "rank_state_bytes": step.state_by_rank(),
                    **traffic_of(session, steps=trainer.steps_done - steps_done),
                },
            )  # fmt: skip
        else:
            note_stop(folder, observers.writers, signalled=signalled, about={"step": trainer.steps_done})
    return assembled


def other_statistics(checkpoint: Checkpoint | None, *, count: int) -> str | None:
    """That BatchNorm saw another number of samples than `count` before `checkpoint`; None if not."""
    if checkpoint is None or (before := integer(checkpoint.manifest.get(STATISTICS))) == count:
        return None
    many = "an unknown number of" if before is None else before  # in checkpoints from before this key
    return (
        f"up to step {checkpoint.step}, BatchNorm took its statistics over {many} samples, and now over "
        f"{count}: the losses don't go on as in one run. training.microbatch_size (times replicas) decides"
    )


def skipped_before(folder: RunFolder) -> int:
    """The steps that earlier starts have left out, by the last line that counts; the same on all ranks."""
    line = None
    if dist.get_rank() == 0:
        with contextlib.suppress(FileNotFoundError):
            line = last_line(folder.metrics)
    return int(exchange.broadcast(integer((line or {}).get("skipped_steps")) or 0))


def open_observers(
    session: Session,
    context: TaskContext,
    *,
    metrics: Metrics,
    profilers: Sequence[Profiler],
    steps_done: int,
) -> Observers:
    config, folder = session.config, context.folder
    prunes = config.sweep.prune != "off" and config.sweep.folder is not None
    reads = (config.training.callbacks or prunes) and dist.get_rank() == 0
    lines = MetricsReader(folder.metrics).read() if reads else []
    earlier = [line for line in lines if line["step"] <= steps_done]  # later steps are trained again
    return Observers(
        metrics=metrics,
        profilers=profilers,
        writers=open_writers(config, folder=folder, values=context.values) if dist.get_rank() == 0 else [],
        progress=context.progress,
        callbacks=Callbacks(
            config.training.callbacks,
            folder=folder.path,
            lines=earlier,
        ),
        pruning=Pruning(config, folder=folder, lines=earlier) if prunes else None,
    )


def step_of(
    session: Session, *, optimizer: ModelOptimizer, on_gradients: Callable[[Assembled], None] | None
) -> Step:
    training = session.config.training
    return Step(
        session.assembled,
        optimizer=optimizer,
        clip_norm=training.clip_norm,
        on_nonfinite=training.on_nonfinite,
        on_gradients=None if on_gradients is None else partial(on_gradients, session.assembled),
    )


def fit(trainer: Trainer, *, saver: Saver, metrics: Metrics) -> signal.Signals | None:
    """Train and wait for the last save; returns the signal that stopped the training early, else None."""
    try:
        signalled = trainer.fit()
    except (NonFiniteError, ReplicaError, FollowerError):
        # Raised on all ranks together, so a pending save can finish.
        saver.close()
        raise
    started = time.perf_counter()
    saver.close()
    metrics.leave_out(time.perf_counter() - started, cause="saving")
    return signalled


def restore_or_start(
    session: Session, context: TaskContext, *, optimizer: ModelOptimizer, memory: MemoryCopies | None
) -> tuple[int, Checkpoint | None]:
    """Restore the newest undamaged checkpoint, of the run folder or in memory, or load `config.weights`.

    Rank 0 records the start. Returns the number of steps done, and the newest checkpoint on the disk up to
    this step; on ranks other than 0 only if it was restored.
    """
    config, folder, rank = session.config, context.folder, dist.get_rank()
    if rank == 0:
        clear(folder.checkpoints)
    part = None if memory is None else memory.newest()
    in_memory = None if part is None else part.record.step
    checkpoint, warnings = newest_sound(folder.checkpoints, in_memory=in_memory)
    steps_done, where = in_memory or 0, "the copy in memory"
    if checkpoint is not None:
        if not config.launcher.shared_folder:
            require_private(checkpoint.path)  # its index is a pickle
        reader = CheckpointReader(checkpoint)
        if session.assembled.server is None or session.assembled.server.serves:
            optimizer.create_state(optimizer_sizes(reader))
        state = state_of(session.assembled, optimizer)
        restore(checkpoint, state, reader=reader, digest=session.data.digest, device=session.device)
        before = flatten(checkpoint.manifest.get("config") or {}).get("training.loss_scale")
        if (scale := session.assembled.loss_scale) and before not in (None, config.training.loss_scale):
            scale.factor.fill_(config.training.loss_scale)
            scale.finite_steps.zero_()
        steps_done, where = checkpoint.step, "the checkpoint"
    elif part is not None:
        optimizer.create_state(part.optimizer_sizes)
        part.fill(state_of(session.assembled, optimizer), device=session.device)
    elif config.resume and warnings:  # a run that did not begin with resume= begins again
        again = (
            f"python -m hpc_parallel rerun {shlex.quote(str(folder.path))} trains from step 1, in a new run"
        )
        raise ConfigError(
            [f"resume={folder.path} can't continue, because each of its checkpoints is damaged; {again}."]
        )
    else:
        start_from(config, session.assembled)
    if rank == 0:
        set_aside_after(folder.checkpoints, step=steps_done)
        attempts.begin(
            folder, step=steps_done, environment=context.environment, warnings=warnings,
            layout=computed_as(context.values, read_environment(folder)),
        )  # fmt: skip
        if steps_done:
            print(f"continuing from {where} of step {steps_done}", flush=True)
        checkpoint = next(iter(checkpoint_index.complete(folder.checkpoints)), None)
    return steps_done, checkpoint


def open_memory(
    session: Session, context: TaskContext, *, state: Callable[[], StateDict]
) -> MemoryCopies | None:
    """Open the copies in the memory of hosts, with all ranks; None if they are off or can't be kept."""
    config, rank = session.config, dist.get_rank()
    if (every := config.training.memory_checkpoint_every) is None:
        return None
    world = World.discover(context.environment)
    host = f"node-{world.node}" if world.one_machine else world.host
    names = (host_memory.name_of(context.folder, context.environment), secrets.token_hex(8))
    name, start = exchange.broadcast(names if rank == 0 else None)
    folder, problem = None, None
    try:
        host_memory.remove_leftovers(name)
        folder = host_memory.open_folder(name, host=host)
    except (OSError, UntrustedError) as error:
        problem = str(error)
    problems = exchange.all_gather(problem)
    if folder is None or any(problems):
        if rank == 0:
            print_warning(f"no copy in memory: {next(filter(None, problems))}")
        return None
    layout = layout_of_state(state_of(session.assembled), data=session.data.digest)
    memory = MemoryCopies(
        folder, host=host, every=every, layout=layout, device=session.device, group=make_saving_group(config),
        start=start, state=state,
    )  # fmt: skip
    if rank == 0 and memory.target is None:
        print("copies in memory: this run has one host, so a lost host loses them", flush=True)
    return memory


def warn_of_storage(folder: RunFolder, text: str) -> None:
    print_warning(text)
    notify.tell(folder, f"storage: {text}", about=notify.STORAGE, waits=False)


def saving_of(session: Session) -> SavingGroup:
    make = partial(make_saving_group, session.config)
    timeout_s = session.config.cluster.checkpoint_timeout_s
    return SavingGroup(session.groups.saving, make, timeout_s=timeout_s)


def replicas_check(session: Session) -> Callable[[int], None]:
    """Returns the function that compares replicas.

    With a parameter server it compares nothing, because the ranks have no replicas between two pulls.
    """
    assembled = session.assembled
    if not session.config.training.compare_replicas or assembled.server is not None:
        return lambda step: None
    axis = axis_of(assembled.mesh, "tensor")
    return ReplicaCheck(
        assembled.named_parameters(),
        tensor_rank=0 if axis is None else axis.get_local_rank(),
        device=session.device,
    ).check


def samples_of(session: Session) -> RankBatches:
    train = session.batches(session.data.train, seed=session.config.seed)
    return RankBatches(
        train=ReadAhead(train, steps=session.config.training.steps, device=session.device),
        validation=session.batches(session.data.validation, seed=None),
        validation_samples=session.validation_samples,
        device=session.device,
        evaluation=session.assembled.evaluation,
    )


def finish(
    session: Session,
    context: TaskContext,
    *,
    observers: Observers,
    profilers: Profilers,
    ended_early: str | None,
    pruned: str | None,
    counted: dict[str, Any],
) -> None:
    """Write the summary after the last step, and draw the losses.

    `counted`: further figures of this start.
    """
    folder = context.folder
    measured = {**profilers.figures(folder), **counted}
    measured |= {"comparison": session.comparison, "ended_early": ended_early or pruned}
    measured |= {"shares": session.config.strategy.shares, STATISTICS: session.statistics_samples}
    measured |= {"in_bfloat16": rounded_parts(session.config)}
    measured |= {"rank_memory_bytes": observers.metrics.rank_memory_bytes}
    rank = dist.get_rank()
    lines = MetricsReader(folder.metrics).read() if rank == 0 else []
    outcome = COMPLETED if pruned is None else PRUNED
    complete(context, outcome=outcome, lines=lines, writers=observers.writers, measured=measured)
    if rank == 0:
        draw_plots(folder, lasted_s=span_s(lines))


def traffic_of(session: Session, *, steps: int) -> dict[str, Any]:
    """Returns the bytes that one process has moved between its devices in each of the `steps` of this start.

    For techniques that average gradients without collectives, adds the bytes of a ring all-reduce.
    """
    assembled = session.assembled
    traffic: dict[str, Any] = {}
    if assembled.traffic is not None and steps:
        traffic |= traffic_figures(assembled.traffic, steps=steps)
    if assembled.traffic is not None or assembled.server is not None:
        weights_bytes = sum(weight.nbytes for weight in assembled.named_parameters().values())
        traffic["ring_all_reduce"] = ring_all_reduce(
            weights_bytes=weights_bytes, replicas=session.plan.layout.data
        )
    return traffic


def scale_of(session: Session, *, replicas: int) -> Scale:
    """`replicas`: the number of replicas, whose losses are averaged."""
    return Scale(
        global_batch_size=session.config.training.global_batch_size,
        tokens_per_sample=getattr(session.data, "sequence_length", None),
        flops_per_sample=3 * session.assembled.forward_flops,  # a backward pass costs two forward passes
        devices=session.config.nodes * session.config.gpus_per_node,
        replicas=replicas,
        peak_flops=peak_flops(session.device, precision=session.config.training.precision),
    )
