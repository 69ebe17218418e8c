"""One session inside a process group: assemble, train, say how it went."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from hydra.utils import instantiate

from hpc_parallel.config.layout import (
    DATAPARALLEL,
    BatchPlan,
    Layout,
    layout_of,
    plan_batch,
    servers,
    share_of,
)
from hpc_parallel.config.schedules import schedule_of, stages_per_rank
from hpc_parallel.config.schema import RunConfig, typed
from hpc_parallel.data.sampler import Batches, Data, Samples, validation_steps
from hpc_parallel.launch.run_folder import RunFolder, write_json
from hpc_parallel.strategies.assemble import Assembled, assemble
from hpc_parallel.strategies.mesh import build_mesh
from hpc_parallel.strategies.traffic import figures, ring_all_reduce
from hpc_parallel.training.measure import Measurement
from hpc_parallel.training.metrics import Metrics, Scale, peak_flops
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.progress import Progress
from hpc_parallel.training.step import build_step
from hpc_parallel.training.trainer import Trainer
from hpc_parallel.training.writers import Writer, open_writers
from hpc_parallel.worker.summary import steps_lost, summarise


def read_config(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """`config.yaml` of a run folder, typed and as plain values."""
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return typed(values), values


@dataclass(frozen=True)
class Session:
    """What every task of the worker half starts from: this rank's part of the model and of the data."""

    config: RunConfig
    layout: Layout
    batch: BatchPlan
    data: Data
    assembled: Assembled
    device: torch.device

    @classmethod
    def open(cls, config: RunConfig, *, device: torch.device, trains: bool = True) -> Session:
        """Read the data and assemble the model, on all ranks of the default process group.

        What does not train has nothing of the backward pass, and is in evaluation mode.

        Raises ConfigError where the model or the data turn out not to fit the layout, which only a
        look at them can show.
        """
        config = config if trains else forward_only(config)
        torch.manual_seed(config.seed)  # for code of the user's; ours draws from named seeds only
        strategy = config.strategy
        layout = layout_of(strategy, devices=config.devices)
        batch = plan_batch(
            config.training.global_batch_size,
            layout=layout,
            microbatch_size=config.training.microbatch_size,
            microbatches=strategy.microbatches,
            in_turn=schedule_of(strategy).in_turn,
        )
        data: Data = instantiate(config.data)
        require_equal_data(data.digest)
        ranks = Layout() if strategy.execution == DATAPARALLEL else layout
        mesh = build_mesh(ranks, device_type=device.type, first=servers(strategy))
        assembled = assemble(
            config, batch=batch, sample_shape=data.sample_shape, mesh=mesh, device=device, trains=trains
        )
        for part in assembled.parts:
            part.train(trains)
        return cls(config, layout, batch=batch, data=data, assembled=assembled, device=device)

    def batches(self, samples: Samples, *, seed: int | None, batch: BatchPlan | None = None) -> Batches:
        """This rank's part of each global batch of `samples`, or of batches after another plan.

        Without a seed samples come as they lie.
        """
        batch = batch or self.batch
        replica, replicas = share_of(dist.get_rank(), layout=self.layout, strategy=self.config.strategy)
        return Batches(
            samples=samples,
            seed=seed,
            global_batch_size=batch.data * batch.samples_per_replica,
            microbatches=batch.microbatches,
            replica=replica,
            replicas=replicas,
        )

    @property
    def validation_steps(self) -> int:
        """Global batches of the held-out samples that a validation takes."""
        return validation_steps(
            self.data.validation,
            count=self.config.training.validation_samples,
            global_batch_size=self.config.training.global_batch_size,
        )


def train(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
    on_gradients: Callable[[Assembled], None] | None = None,
    progress: Progress | None = None,
) -> Assembled:
    """Train as `config` says, on all ranks of the default process group; returns this rank's trained parts.

    `on_gradients` is called in each step when `.grad` is complete, before it is clipped. `progress`:
    where the trainer marks how far it is. Rank 0 writes `metrics.jsonl` and
    `summary.json`. Raises what `Session.open` raises.
    """
    started = datetime.now(UTC).isoformat()
    rank = dist.get_rank()
    session = Session.open(config, device=device)
    optimizer = build_optimizer(session.assembled.named_parameters(), config.optimizer)
    writers = open_writers(config, folder=folder, values=values) if rank == 0 else []
    batches = session.batches(session.data.train, seed=config.seed)
    metrics = Metrics(scale_of(session, replicas=batches.replicas), device=device)
    measurement = Measurement(
        steps=config.training.measure_steps, mesh=session.assembled.mesh, device=device, metrics=metrics
    )
    trainer = Trainer(
        build_step(
            session.assembled,
            optimizer=optimizer,
            clip_norm=config.training.clip_norm,
            on_gradients=None if on_gradients is None else partial(on_gradients, session.assembled),
        ),
        optimizer=optimizer,
        batches=batches,
        validation=session.batches(session.data.validation, seed=None),
        validation_steps=session.validation_steps,
        metrics=metrics,
        measurement=measurement,
        writers=writers,
        training=config.training,
        schedule=config.optimizer,
        device=device,
        progress=progress or Progress(),
    )
    lines = trainer.fit()
    complete(
        values, folder=folder, lines=lines, writers=writers, started=started, environment=environment,
        measured=measurement.figures() | traffic_of(session),
    )  # fmt: skip
    return session.assembled


def complete(
    values: dict[str, Any],
    *,
    folder: RunFolder,
    lines: Sequence[Mapping[str, Any]],
    writers: Sequence[Writer],
    started: str,
    environment: Mapping[str, str],
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """The end of every task that went well: rank 0 writes the summary, then all leave together."""
    if dist.get_rank() == 0:
        summary = summarise(
            values,
            outcome="completed",
            lines=lines,
            lost_steps=steps_lost(folder),
            started=started,
            environment=environment,
            measured=measured,
        )
        write_json(folder.summary, summary)
    for writer in writers:
        writer.close()
    dist.barrier()  # a rank that ends long before the others looks lost to srun


def forward_only(config: RunConfig) -> RunConfig:
    """Schedules differ in when backward passes run; without them all are GPipe, with one stage a rank.

    All but the naive one, whose microbatches wait for each other in forward passes too.
    """
    strategy = config.strategy
    if schedule_of(strategy).in_turn:
        return config
    cuts = strategy.cuts if stages_per_rank(strategy) == 1 else None
    return replace(config, strategy=replace(strategy, schedule="gpipe", stages_per_rank=1, cuts=cuts))


def traffic_of(session: Session) -> dict[str, Any]:
    """What one process moves between its devices; and beside techniques that average no gradients
    by collectives, what those would move."""
    assembled = session.assembled
    found: dict[str, Any] = {}
    if assembled.traffic is not None:
        found |= figures(assembled.traffic, steps=session.config.training.steps)
    if assembled.traffic is not None or assembled.server is not None:
        weights_bytes = sum(weight.nbytes for weight in assembled.named_parameters().values())
        found["ring_all_reduce"] = ring_all_reduce(weights_bytes=weights_bytes, replicas=session.layout.data)
    return found


def scale_of(session: Session, *, replicas: int) -> Scale:
    """`replicas`: over whose losses is averaged."""
    return Scale(
        global_batch_size=session.config.training.global_batch_size,
        tokens_per_sample=getattr(session.data, "sequence_length", None),
        flops_per_sample=3 * session.assembled.forward_flops,  # a backward pass costs two forward passes
        devices=session.config.nodes * session.config.gpus_per_node,
        replicas=replicas,
        peak_flops=peak_flops(session.device),
    )


def require_equal_data(digest: str) -> None:
    """All ranks must read the same data, or their gradients would be of different things.

    Raises RuntimeError on every rank, naming those that differ from rank 0.
    """
    digests: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    if others := [str(rank) for rank, found in enumerate(digests) if found != digests[0]]:
        raise RuntimeError(
            f"rank {', '.join(others)} read other data than rank 0: the files differ between hosts "
            "(another Python version for data=text?). Point data.path at a folder that all hosts share."
        )
