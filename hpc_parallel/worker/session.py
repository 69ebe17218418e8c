"""One session inside a process group: assemble, train, say how it went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from hydra.utils import instantiate

from hpc_parallel.config.layout import BatchPlan, Layout, plan_batch
from hpc_parallel.config.schema import RunConfig, typed
from hpc_parallel.data.sampler import Batches, Data, Samples, validation_steps
from hpc_parallel.launch.run_folder import RunFolder, write_json
from hpc_parallel.strategies.assemble import Assembled, assemble
from hpc_parallel.strategies.mesh import build_mesh
from hpc_parallel.training.metrics import Metrics, Scale, peak_flops
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.step import GradientStep
from hpc_parallel.training.trainer import Trainer
from hpc_parallel.training.writers import open_writers
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
    def open(cls, config: RunConfig, *, device: torch.device) -> Session:
        """Read the data and assemble the model, on all ranks of the default process group.

        Raises ConfigError where the model or the data turn out not to fit the layout, which only a
        look at them can show.
        """
        torch.manual_seed(config.seed)  # for code of the user's; ours draws from named seeds only
        layout = Layout.resolve(config.strategy, devices=dist.get_world_size())
        batch = plan_batch(
            config.training.global_batch_size,
            layout=layout,
            microbatch_size=config.training.microbatch_size,
            microbatches=config.strategy.microbatches,
        )
        data: Data = instantiate(config.data)
        require_equal_data(data.digest)
        mesh = build_mesh(layout, device_type=device.type)
        assembled = assemble(config, batch=batch, sample_shape=data.sample_shape, mesh=mesh, device=device)
        return cls(config, layout, batch=batch, data=data, assembled=assembled, device=device)

    def batches(self, samples: Samples, *, seed: int | None) -> Batches:
        """This rank's part of each global batch of `samples`; without a seed as they lie."""
        return Batches(
            samples=samples,
            seed=seed,
            global_batch_size=self.config.training.global_batch_size,
            microbatches=self.batch.microbatches,
            replica=self.layout.replica(dist.get_rank()),
            replicas=self.layout.data,
        )


def train(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
    on_gradients: Callable[[Assembled], None] | None = None,
) -> Assembled:
    """Train as `config` says, on all ranks of the default process group; returns this rank's trained parts.

    `on_gradients` is called in each step when `.grad` is complete, before it is clipped. Rank 0 writes
    `metrics.jsonl` and `summary.json`. Raises what `Session.open` raises.
    """
    started = datetime.now(UTC).isoformat()
    rank = dist.get_rank()
    session = Session.open(config, device=device)
    optimizer = build_optimizer(session.assembled.named_parameters(), config.optimizer)
    writers = open_writers(config, folder=folder, values=values) if rank == 0 else []
    trainer = Trainer(
        GradientStep(
            session.assembled,
            optimizer=optimizer,
            clip_norm=config.training.clip_norm,
            on_gradients=None if on_gradients is None else partial(on_gradients, session.assembled),
        ),
        optimizer=optimizer,
        batches=session.batches(session.data.train, seed=config.seed),
        validation=session.batches(session.data.validation, seed=None),
        validation_steps=validation_steps(
            session.data.validation,
            count=config.training.validation_samples,
            global_batch_size=config.training.global_batch_size,
        ),
        metrics=Metrics(scale_of(session), device=device),
        writers=writers,
        training=config.training,
        schedule=config.optimizer,
        device=device,
    )
    lines = trainer.fit()
    if rank == 0:
        summary = summarise(
            values,
            outcome="completed",
            lines=lines,
            lost_steps=steps_lost(folder),
            started=started,
            environment=environment,
        )
        write_json(folder.summary, summary)
    for writer in writers:
        writer.close()
    dist.barrier()  # a rank that ends long before the others looks lost to srun
    return session.assembled


def scale_of(session: Session) -> Scale:
    return Scale(
        global_batch_size=session.config.training.global_batch_size,
        tokens_per_sample=getattr(session.data, "sequence_length", None),
        flops_per_sample=3 * session.assembled.forward_flops,  # a backward pass costs two forward passes
        world_size=session.layout.devices,
        replicas=session.batch.data,
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
