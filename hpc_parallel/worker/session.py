"""What every task does inside a process group: assemble the model, read the data, write the summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from hpc_parallel.config.build import build
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
from hpc_parallel.data.dataset import as_data
from hpc_parallel.data.sampler import Batches, Data, Samples, validation_steps
from hpc_parallel.record import attempts
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_yaml
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled, assemble, build_model
from hpc_parallel.strategies.mesh import build_mesh
from hpc_parallel.strategies.model_checks import require
from hpc_parallel.strategies.precision import WEIGHTS
from hpc_parallel.supervise.error_place import located
from hpc_parallel.supervise.summary import summarise
from hpc_parallel.training.writers import Writer
from hpc_parallel.worker.verify import verify


def read_config(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Returns `config.yaml` of a run folder, typed and as plain values."""
    values = read_yaml(path)
    return typed(values), values


@dataclass(frozen=True)
class Session:
    """This rank's part of the model and of the data, from which every task starts."""

    config: RunConfig
    layout: Layout
    batch: BatchPlan
    data: Data
    assembled: Assembled
    device: torch.device
    comparison: str | None  # what the comparison with one device showed, if there was one

    @classmethod
    @located("loading")
    def open(cls, config: RunConfig, *, device: torch.device, trains: bool = True) -> Session:
        """Read the data and assemble the model, on all ranks of the default process group.

        If not `trains`, nothing for the backward pass is set up, and the model is in evaluation mode.

        Raises ConfigError if the model or the data do not fit the layout and only building them can show it.
        """
        config = config if trains else forward_only(config)
        torch.manual_seed(config.seed)  # for the user's code; ours draws from named seeds only
        strategy = config.strategy
        layout = layout_of(strategy, devices=config.devices)
        batch = plan_batch(
            config.training.global_batch_size,
            layout=layout,
            microbatch_size=config.training.microbatch_size,
            microbatches=strategy.microbatches,
            in_turn=schedule_of(strategy).in_turn,
        )
        data = as_data(build(config.data, key="data"))
        require_equal_data(data.digest)
        ranks = Layout() if strategy.execution == DATAPARALLEL else layout
        mesh = build_mesh(ranks, device_type=device.type, first=servers(strategy))
        model = build_model(config)
        require(model, config=config, layout=layout, sample_shape=data.sample_shape)
        comparison = verify(config, data=data, mesh=mesh, device=device)
        assembled = assemble(
            model, config=config, batch=batch, sample_shape=data.sample_shape, mesh=mesh,
            device=device, trains=trains,
        )  # fmt: skip
        for part in assembled.parts:
            part.train(trains)
        return cls(
            config, layout, batch=batch, data=data, assembled=assembled, device=device, comparison=comparison
        )

    def batches(self, samples: Samples, *, seed: int | None, batch: BatchPlan | None = None) -> Batches:
        """Returns this rank's part of each global batch of `samples`.

        Without `seed`, samples keep their order. `batch`: another plan than the session's.
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
            floating=WEIGHTS[self.config.training.precision],
        )

    @property
    def validation_steps(self) -> int:
        """The number of global batches in one validation."""
        return validation_steps(
            self.data.validation,
            count=self.config.training.validation_samples,
            global_batch_size=self.config.training.global_batch_size,
        )


def complete(
    values: dict[str, Any],
    *,
    folder: RunFolder,
    lines: Sequence[Mapping[str, Any]],
    writers: Sequence[Writer],
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """End a successful task: rank 0 writes the summary, then all ranks leave together."""
    if dist.get_rank() == 0:
        summary = summarise(
            values,
            outcome="completed",
            lines=lines,
            history=attempts.history(folder),
            measured=measured,
        )
        write_json(folder.summary, summary)
    for writer in writers:
        writer.close()
    dist.barrier()  # srun treats a rank that ends long before the others as lost


def forward_only(config: RunConfig) -> RunConfig:
    """Returns `config` for forward passes only: the GPipe schedule with one stage per rank.

    Other schedules differ from GPipe only in when backward passes run. The naive schedule is kept, because
    its microbatches wait for each other in forward passes too.
    """
    strategy = config.strategy
    if schedule_of(strategy).in_turn:
        return config
    cuts = strategy.cuts if stages_per_rank(strategy) == 1 else None
    return replace(config, strategy=replace(strategy, schedule="gpipe", stages_per_rank=1, cuts=cuts))


def require_equal_data(digest: str) -> None:
    """Require that all ranks have read the same data, because they average their gradients.

    Raises RuntimeError on every rank; the message names the ranks that differ from rank 0.
    """
    digests = exchange.all_gather(digest)
    if others := [str(rank) for rank, other in enumerate(digests) if other != digests[0]]:
        raise RuntimeError(
            f"rank {', '.join(others)} read other data than rank 0: the files differ between hosts "
            "(another Python version for data=text?). Point data.path at a folder that all hosts share."
        )
