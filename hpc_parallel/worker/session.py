"""What every task does inside a process group: assemble the model, read the data, write the summary."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hpc_parallel.config.build import build
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.typed_config import typed
from hpc_parallel.data.dataset import as_data
from hpc_parallel.data.sampler import Batches, Data, Samples
from hpc_parallel.failure.error_place import located
from hpc_parallel.failure.summary import computed_as, summarise
from hpc_parallel.layout.batch_plan import BatchPlan, Plan, batch_of
from hpc_parallel.layout.counts import fitting_samples
from hpc_parallel.layout.layout import layout_of, share_of
from hpc_parallel.layout.schedules import schedule_of, stages_per_rank
from hpc_parallel.layout.shares import MEASURED
from hpc_parallel.problems import print_warning, raise_if_any
from hpc_parallel.record import attempts
from hpc_parallel.record.endings import COMPLETED, Stop, Summary
from hpc_parallel.record.provenance import read_environment
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import read_yaml
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.start.start_times import measured_shares
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled, assemble
from hpc_parallel.strategies.groups import Groups, make_groups
from hpc_parallel.strategies.model_checks import find_problems, is_own, legal_samples
from hpc_parallel.strategies.precision import WEIGHTS
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.torch_internals import BatchNorm
from hpc_parallel.training.observers import Progress
from hpc_parallel.training.writers import Writer

# By name, because the worker imports no annex:
LAYOUT_CHECK = "hpc_parallel.proof.verify:verify"
PROFILERS = "hpc_parallel.profiling.profilers:open_profilers"


def read_config(path: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Returns `config.yaml` of a run folder, typed and as plain values."""
    values = read_yaml(path)
    return typed(values), values


@dataclass(frozen=True)
class TaskContext:
    """The argument of every task.

    values: `config.yaml` as plain values, which the summary and the checkpoints keep. environment: the
    variables of this process. progress: the marks that a watchdog reads.
    """

    config: RunConfig
    values: dict[str, Any]
    folder: RunFolder
    device: torch.device
    environment: Mapping[str, str]
    progress: Progress = field(default_factory=Progress)

    def begin(self) -> None:
        """Record the start of a task that continues nothing."""
        if dist.get_rank() == 0:
            layout = computed_as(self.values, read_environment(self.folder))
            attempts.begin(self.folder, step=0, environment=self.environment, layout=layout)

    def print_results(self) -> None:
        """Print on rank 0 what a completed task found."""
        if dist.get_rank() == 0:
            from hpc_parallel.record.results import results  # a training has none

            print(*results(self.folder, Summary.read(self.folder) or Summary()), sep="\n", flush=True)


@dataclass(frozen=True)
class Session:
    """This rank's part of the model and of the data, from which every task starts."""

    config: RunConfig
    plan: Plan
    data: Data
    assembled: Assembled
    groups: Groups
    device: torch.device
    comparison: str | None  # what the comparison with one device showed, if there was one
    statistics_samples: int | None = None  # over which BatchNorm takes its statistics; None without BatchNorm

    @classmethod
    @located("loading")
    def open(
        cls,
        config: RunConfig,
        *,
        device: torch.device,
        trains: bool = True,
        on_phase: Callable[[str], object] = lambda text: None,
    ) -> Session:
        """Read the data and assemble the model, on all ranks of the default process group.

        If not `trains`, nothing for the backward pass is set up, and the model is in evaluation mode.
        `on_phase` is called with the name of each part that begins.

        Raises ConfigError if the model or the data do not fit the layout, which only building them can show.
        """
        torch.manual_seed(config.seed)  # for the user's code; this package draws from named seeds only
        config, plan, groups = decide(config, device=device, trains=trains)
        replica, _ = share_of(dist.get_rank(), layout=plan.layout, strategy=config.strategy)
        on_phase("reading the data")
        data = as_data(build(config.data, key="data"))
        require_equal_data(data.digest)
        for note in getattr(data, "notes", ()) if dist.get_rank() == 0 else ():
            print(note, flush=True)
        if dist.get_rank() == 0 and (rule := held_out_problem(data, settings=config.data)):
            print_warning(rule)
        on_phase("building the model")
        model = build_model(config)
        dtype = data.train.batch(np.zeros(1, dtype=np.int64))[0].dtype
        shape = data.sample_shape
        raise_if_any(find_problems(model, config=config, layout=plan.layout, sample_shape=shape, dtype=dtype))
        if is_own(config) or config.strategy.verify == "always":
            on_phase("comparing the layout with one device")
        comparison = resolve_name(LAYOUT_CHECK)(config, plan=plan, data=data, groups=groups, device=device)
        has_statistics = any(isinstance(module, BatchNorm) for module in model.modules())
        on_phase("distributing the model")
        assembled = assemble(
            model, config=config, batch=plan.batch, sample_shape=shape, groups=groups,
            device=device, weight=plan.batch.weight(replica), trains=trains,
        )  # fmt: skip
        for part in assembled.parts:
            part.train(trains)
        return cls(
            config, plan=plan, data=data, assembled=assembled, groups=groups, device=device,
            comparison=comparison,
            statistics_samples=plan.batch.samples_per_microbatch if has_statistics else None,
        )  # fmt: skip

    def batches(self, samples: Samples, *, seed: int | None, batch: BatchPlan | None = None) -> Batches:
        """Returns this rank's part of each global batch of `samples`.

        Without `seed`, samples keep their order. `batch`: a plan that replaces the session's.
        """
        batch = batch or self.plan.batch
        replica, replicas = share_of(dist.get_rank(), layout=self.plan.layout, strategy=self.config.strategy)
        return Batches(
            samples=samples,
            seed=seed,
            global_batch_size=batch.data * batch.samples_per_replica,
            microbatches=batch.microbatches,
            replica=replica,
            replicas=replicas,
            sizes=None if batch.shares is None else batch.sizes,
            floating=WEIGHTS[self.config.training.precision],
            legal=legal_samples(self.assembled.parts[0], trains=seed is not None),
        )

    @property
    def validation_samples(self) -> int:
        return min(self.config.training.validation_samples, len(self.data.validation))


def held_out_problem(data: Data, *, settings: Mapping[str, Any]) -> str | None:
    """That more than twice `data.validation_share` is held out; None for a class of the user's own."""
    share = None if settings.get("validation") else settings.get("validation_share")
    is_ours = settings["_target_"].startswith("hpc_parallel.data.")
    held_out, count = len(data.validation), len(data.validation) + len(data.train)
    if share is None or not is_ours or held_out <= max(1, 2 * share * count):
        return None
    return (
        f"{held_out:,} of {count:,} samples ({held_out / count:.1%}) are held out for validation, though "
        f"data.validation_share={share:g}: only whole files or documents are. Split the longest into pieces"
    )


def phases_of(folder: RunFolder, *, rank: int) -> Callable[[str], None]:
    """Returns a function that records which part of the start begins. It does so only on rank 0."""
    return partial(note_phase, folder) if rank == 0 else lambda text: None


def complete(
    context: TaskContext,
    *,
    outcome: str = COMPLETED,
    lines: Sequence[Mapping[str, Any]] = (),
    writers: Sequence[Writer] = (),
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """End a successful task: rank 0 writes the summary, then all ranks leave together."""
    if dist.get_rank() == 0:
        summary = summarise(
            context.values,
            outcome=outcome,
            lines=lines,
            history=vars(attempts.history(context.folder, until=datetime.now(UTC))),
            measured=measured,
            environment=read_environment(context.folder),
        )
        write_json(context.folder.summary, summary)
    for writer in writers:
        writer.close()
    dist.barrier()  # srun treats a rank that ends long before the others as lost


def note_stop(
    folder: RunFolder, writers: Sequence[Writer], *, signalled: signal.Signals, about: Mapping[str, Any]
) -> None:
    """End a task that a signal stopped: rank 0 records it, then all ranks leave together.

    about: the `step` whose checkpoint is complete, or what was `kept` of a task that can't continue.
    """
    if dist.get_rank() == 0:
        now = datetime.now(UTC).isoformat()
        Stop(signal=signalled.name, time=now, **about).write(folder)
    for writer in writers:
        writer.close()
    dist.barrier()  # srun treats a rank that ends long before the others as lost


def decide(recorded: RunConfig, *, device: torch.device, trains: bool) -> tuple[RunConfig, Plan, Groups]:
    """Returns the configuration of this start, with what only the ranks know, and its plan and groups.

    A collective call. `strategy.shares=measured` becomes the measured speeds. An unset
    `cluster.device_memory_gb` becomes the least memory of all GPUs, on which the default microbatch depends;
    on CPUs it stays unknown. Rank 0 prints both.
    """
    strategy, cluster = recorded.strategy, recorded.cluster
    # Other schedules differ from GPipe only in when backward passes run. The naive schedule is kept, because
    # its microbatches wait for each other in forward passes too.
    if not trains and not schedule_of(strategy).in_turn:
        cuts = strategy.cuts if stages_per_rank(strategy) == 1 else None
        strategy = replace(strategy, schedule="gpipe", stages_per_rank=1, cuts=cuts)
    layout = layout_of(strategy, devices=recorded.devices)
    groups = make_groups(replace(recorded, strategy=strategy), layout, device_type=device.type)
    if strategy.shares == MEASURED:
        strategy = replace(strategy, shares=measured_shares(recorded, layout, device=device))
    if device.type == "cuda" and cluster.device_memory_gb is None:
        memory_gb = torch.cuda.get_device_properties(device).total_memory / 2**30
        (all_gb,) = exchange.all_gather_numbers([memory_gb], device=device)
        cluster = replace(cluster, device_memory_gb=min(all_gb))
    config = replace(recorded, strategy=strategy, cluster=cluster)
    plan, fitting = Plan(layout, batch_of(config, layout)), fitting_samples(config, layout)
    if dist.get_rank() == 0 and cluster is not recorded.cluster and fitting is not None:
        fit = f"about {fitting} samples fit in {cluster.device_memory_gb:.0f} GB at once"
        print(f"batch: {plan.batch}; {fit}", flush=True)
    return config, plan, groups


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
