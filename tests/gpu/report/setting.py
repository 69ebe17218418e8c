"""What the parts share: the device, sizes for a GPU and for a dry run on the CPU, steps by hand, clocks."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import AdamWConfig, RunConfig, StrategyConfig
from hpc_parallel.launch.run_files import write
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.layout.model_weights import sample_shape_of
from hpc_parallel.models.layered import LayeredModel, Loss, materialise
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies import (
    checkpointing,
    chunked_loss,
    compiling,
    precision,
    replicate,
    shard,
    working_weights,
)
from hpc_parallel.strategies.assemble import assemble
from hpc_parallel.strategies.forward_backward import Accumulate, ForwardBackward, InContext
from hpc_parallel.strategies.gradients import GradientNorm, clip
from hpc_parallel.strategies.groups import make_groups
from hpc_parallel.strategies.loss import LossTerms
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.training.observers import Progress
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.step import Step
from hpc_parallel.worker.session import TaskContext, read_config
from hpc_parallel.worker.train import train
from tests.benchmarks.peers.world_size import new_fake_group
from tests.composed import composed, prepared

GPU = {"layers": 12, "dim": 768, "heads": 12, "kv_heads": 4, "ffn_dim": 2048, "vocab_size": 32000}
TINY = {"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, "ffn_dim": 64, "vocab_size": 256}


def on_gpu() -> bool:
    return os.environ.get("HPC_PARALLEL_TEST_DEVICE", "cuda") == "cuda"


def device() -> torch.device:
    return torch.device("cuda", 0) if on_gpu() else torch.device("cpu")


def sized(gpu: Any, tiny: Any) -> Any:
    """The value for a GPU, or that of a dry run."""
    return gpu if on_gpu() else tiny


def shape() -> dict[str, int]:
    return dict(sized(GPU, TINY))


def batch(*, samples: int | None = None, seq: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets [batch, seq] on the device."""
    size = samples or sized(8, 2), (seq or sized(1024, 16)) + 1
    tokens = torch.randint(shape()["vocab_size"], size, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(device())
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def join(*, backend: str | None = None, timeout_s: float = 77.0) -> None:
    """The default process group, of this rank over NCCL (gloo on the CPU)."""
    if on_gpu():
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend or sized("cuda:nccl,cpu:gloo", "gloo"), store=dist.HashStore(), rank=0, world_size=1,
        timeout=timedelta(seconds=timeout_s), device_id=device() if on_gpu() else None,
    )  # fmt: skip


def join_fakes(rank: int, *, ranks: int) -> None:
    """A default process group in which the other ranks don't exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if on_gpu():
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    dist.new_group = partial(new_fake_group, dist.new_group)  # that of saves asks for gloo
    replicate.DistributedDataParallel = LoneReplica  # type: ignore[attr-defined]


class LoneReplica(DistributedDataParallel):
    """Takes its own gradients for the mean: the future of a fake all-reduce has no tensor."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(None, own_gradients)


def own_gradients(state: None, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer())
    return done


@dataclass(frozen=True)
class OneOfMany:
    """A rank's part of a training, and a step of it with random tokens."""

    config: RunConfig
    materialise_s: float
    step: Callable[[], object]


def one_of_many(*words: str, rank: int = 0) -> OneOfMany:
    """Assemble the part of `rank` as the task `train` does, in a world whose other ranks don't exist."""
    config = resolve(composed("launcher=local", f"device={device().type}", *words))[0]
    if not dist.is_initialized():
        join_fakes(rank, ranks=config.devices)
    layout = layout_of(config.strategy, devices=config.devices)
    batch = batch_of(config, layout)
    shape = sample_shape_of(config.model, config.data)
    assert shape is not None
    groups = make_groups(config, layout, device_type=device().type)
    began = time.perf_counter()
    assembled = assemble(
        build_model(config), config=config, batch=batch, sample_shape=shape, groups=groups, device=device()
    )
    wait()
    materialise_s = time.perf_counter() - began
    optimizer = build_optimizer(assembled.named_parameters(), config.optimizer, split=True)
    step = Step(assembled, optimizer=optimizer, clip_norm=config.training.clip_norm)
    tokens = torch.randint(256, (batch.microbatches * batch.sizes[0], *shape), device=device())
    return OneOfMany(config, materialise_s, lambda: step.run(tokens, tokens))


def mesh_of(axis: str) -> DeviceMesh:
    """A mesh of this rank alone."""
    return init_device_mesh(device().type, (1,), mesh_dim_names=(axis,))


def build(**changes: Any) -> LayeredModel:
    """The transformer of these parts on meta."""
    with torch.device("meta"):
        return Transformer(**{**shape(), **changes})


def step_of(
    kind: str,
    *,
    keeps: str = "none",
    compiled: bool = False,
    dtype: str = "bfloat16",
    model: LayeredModel | None = None,
    microbatches: int = 2,
    chunked: bool = True,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Our own step on one rank: `kind` is plain, data (DistributedDataParallel) or fsdp (fully_shard).

    By hand, because `assemble` leaves out a technique for an axis of one rank. chunked: the default loss.
    """
    model = model or build()
    if chunked:
        chunked_loss.apply(model)
    checkpointing.apply(model, keeps=keeps, compiled=compiled)
    if compiled:
        compiling.apply(model)
    options = StrategyConfig(name=kind)
    if kind == "fsdp":
        shard.apply(model, mesh=mesh_of("shard"), options=options, precision=dtype)
    else:
        precision.apply(model, precision=dtype, device_type=device().type)
    materialise(model, seed=0, device=device(), dtype=torch.float32)
    runner = replicate.apply(model, axis=mesh_of("replicate"), options=options) if kind == "data" else model
    loss: Loss = model.loss
    if chunked:
        loss = chunked_loss.loss_of(
            model, dtype=precision.HALF.get(dtype), mesh=mesh_of("replicate"), compiled=compiled and on_gpu()
        )
    schedule: ForwardBackward = Accumulate(
        runner, model=model, loss=loss, terms=LossTerms(model), microbatches=microbatches
    )
    if dtype == "bfloat16" and kind != "fsdp":  # as `layout.step_facts.casts_once` says
        schedule = InContext(schedule, partial(working_weights.cast_weights, [model]))
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, AdamWConfig())
    norm_of = GradientNorm(parameters.values(), axes=())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = schedule.train(inputs, targets)
        norm, _ = norm_of()
        clip(parameters.values(), norm=norm, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def compile_quickly() -> None:
    """In a dry run, blocks are traced as on a GPU but run as traced: the C++ compiler takes a minute."""
    if not on_gpu():
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[misc]


def wait() -> None:
    """Until the device is done."""
    if on_gpu():
        torch.cuda.synchronize()


def seconds(work: Callable[[], object], *, repeats: int | None = None, warm_up: int = 3) -> float:
    """The median of `work` with the device."""
    for _ in range(sized(warm_up, 1)):
        work()
    wait()
    times = []
    for _ in range(repeats or sized(20, 2)):
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_bytes(work: Callable[[], object]) -> int | None:
    """The most memory of the GPU that `work` needs; None on the CPU."""
    if not on_gpu():
        work()
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    work()
    wait()
    return torch.cuda.max_memory_allocated()


@dataclass
class Marks(Progress):
    """When each step of a training began."""

    begins_s: list[float] = field(default_factory=list)

    def mark(self, phase: str, step: int) -> None:
        super().mark(phase, step)
        if phase in ("data", "done"):
            self.begins_s.append(time.perf_counter())

    @property
    def steps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.begins_s, self.begins_s[1:], strict=False)]


def trained(*words: str, marks: Progress | None = None) -> RunFolder:
    """Train a configuration inside this process with one rank; the caller has called `join`."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-report-"))
    fixed = ("launcher=local", "launcher.snapshot=false", f"device={device().type}")
    run = prepared(f"run_dir={folder / 'run'}", *fixed, *words)
    write(run)
    config, values = read_config(run.folder.config)
    train(TaskContext(config, values, run.folder, device(), environment={}, progress=marks or Progress()))
    return run.folder


def model_words() -> Sequence[str]:
    """The model of these parts as words of the command line."""
    return [f"model.{key}={value}" for key, value in shape().items()]
