"""What one step does, counted without a GPU: bytes between ranks, casts, kernels, waits, kept activations.

    python tests/benchmarks/step_counts.py [CASE ...] [-- OVERRIDES ...]

A rank of a world whose other ranks don't exist takes two steps of `1b` with tensors that have shapes but no
numbers, and the second one is counted. Only the experts' tensors have numbers, which decide how many rows are
sent. The case `torchtitan` needs its packages, without theirs:

    pip install --no-deps --target FOLDER torchtitan==0.3.0 tyro docstring_parser typeguard spmd_types triton
    PYTHONPATH=FOLDER python tests/benchmarks/step_counts.py torchtitan -- model.layers=4
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining import schedules as pipelining
from torch.distributed.pipelining.stage import InferenceMode, PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.profiling.traffic import KINDS, place_of
from hpc_parallel.strategies import assemble
from hpc_parallel.strategies.groups import make_groups
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.torch_internals import operator_arguments, operator_name
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.training.step import Step
from tests.benchmarks.peers.plain_transformer import PlainTransformer, cross_entropy
from tests.benchmarks.peers.world_size import new_fake_group
from tests.composed import prepared

SAMPLES = 4  # of a microbatch
SEQ = 2048
PLAIN, TITAN = "plain loop", "torchtitan"
COMMON = (
    "launcher=local", "launcher.snapshot=false", "device=cpu", "training.precision=bfloat16",
    f"training.microbatch_size={SAMPLES}",
)  # fmt: skip
ONE_B = ("model=1b", f"data.sequence_length={SEQ}")
EXPERTS = (
    "model=moe_tiny", "model.dim=256", "model.ffn_dim=512", "data.sequence_length=256",
)  # fmt: skip
# Two microbatches of a replica, eight of the pipeline.
CASES: dict[str, tuple[str, ...]] = {
    "one device": (*ONE_B, "strategy=single", "training.global_batch_size=8"),
    "data 8": (*ONE_B, "strategy=data", "gpus_per_node=8", "training.global_batch_size=64"),
    "fsdp 8": (*ONE_B, "strategy=fsdp", "gpus_per_node=8", "training.global_batch_size=64"),
    "tensor 8": (*ONE_B, "strategy=tensor", "gpus_per_node=8", "training.global_batch_size=8"),
    "pipeline 4": (
        *ONE_B, "strategy=pipeline", "gpus_per_node=4", "training.global_batch_size=32",
        "strategy.microbatches=8",
    ),
    "expert 8": (*EXPERTS, "strategy=expert", "gpus_per_node=8", "training.global_batch_size=64"),
}  # fmt: skip
# Counted for their waits (`tests/distributed/test_step_counts.py`); no rows of the table.
OTHERS: dict[str, tuple[str, ...]] = {
    "hsdp 2x2": (*ONE_B, "strategy=hsdp", "nodes=2", "gpus_per_node=2", "training.global_batch_size=32"),
    "hybrid 2x2": (
        *ONE_B, "strategy=hybrid", "nodes=2", "gpus_per_node=2", "training.global_batch_size=16",
        "strategy.microbatches=4",
    ),
    "tensor 2 whole": (
        *ONE_B, "strategy=tensor", "gpus_per_node=2", "strategy.sequence_parallel=false",
        "training.global_batch_size=8",
    ),
    "parameter_server 4": (
        *ONE_B, "strategy=parameter_server", "strategy.dedicated_server=false", "gpus_per_node=4",
        "training.global_batch_size=32",
    ),
    **{
        f"context 2 {kind}": (
            *ONE_B, "strategy=context", "gpus_per_node=2", f"strategy.context_attention={kind}",
            "training.global_batch_size=8",
        )
        for kind in ("ring", "gather", "all_to_all")
    },
    **{
        f"pipeline 2 {schedule}": (
            *ONE_B, "strategy=pipeline", "gpus_per_node=2", f"strategy.schedule={schedule}",
            "training.global_batch_size=16", "strategy.microbatches=4",
        )
        for schedule in SCHEDULES
    },
    "images 2": (
        "model=convnet", "data=digits", "strategy=data", "gpus_per_node=2", "training.global_batch_size=16",
    ),
    "tile 2x2": (
        "model=segmenter", "data=cells", "strategy=tile", "gpus_per_node=4", "training.global_batch_size=8",
    ),
}  # fmt: skip
# What makes the host wait for a GPU: operators, and methods that dispatch none for a tensor of the CPU.
# `new_tensor` and `torch.tensor(..., device=)` copy from memory that is not pinned.
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
WAITING_METHODS = ("tolist", "cpu", "numpy", "new_tensor")
# Operators without a kernel beside views: they allocate, or ask for properties.
WITHOUT_KERNEL = (
    "aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::promote_types", "aten::detach",
    "aten::lift_fresh", "prim::", "profiler::", "c10d::", "_c10d_functional::", "_dtensor::",
)  # fmt: skip


class StepCounts(TorchDispatchMode):
    """Counts what is dispatched while it is active, by torch's own code and by the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.casts = self.cast_bytes = 0
        self.waits: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()  # bytes by kind of collective and dtype

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then dispatches its local operators and collectives
        name = operator_name(function) or ""
        if name in KINDS:
            self._note_collective(name, operator_arguments(function, args, kwargs))
        if name in WAITS:
            self.waits[name] += 1
        result = function(*args, **(kwargs or {}))
        if not name.startswith(WITHOUT_KERNEL) and not function.is_view:
            self.kernels += 1
        if name == "aten::_to_copy" and result.dtype != args[0].dtype:
            self.casts += 1
            self.cast_bytes += result.nbytes
        return result

    @contextmanager
    def methods(self) -> Iterator[None]:
        """Count the calls of `WAITING_METHODS` too, and tensors made for a device from Python's values."""

        def noting(name: str) -> Callable[..., Any]:
            original = getattr(Tensor, name)

            def noted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
                self.waits[name] += 1
                return original(tensor, *arguments, **options)

            return noted

        made = torch.tensor

        def noted_tensor(*arguments: Any, **options: Any) -> Tensor:
            self.waits["torch.tensor"] += options.get("device") is not None
            return made(*arguments, **options)

        waiting = {name: noting(name) for name in WAITING_METHODS}
        with patch.multiple(Tensor, **waiting), patch.object(torch, "tensor", noted_tensor):
            yield

    def _note_collective(self, name: str, arguments: Mapping[str, Any]) -> None:
        kind, rule = KINDS[name]
        self.calls[kind] += 1
        tensors = [value for value in flat(arguments.values()) if isinstance(value, Tensor)]
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        if sent := round(rule(arguments, place_of(arguments)).sent):
            self.sent[kind, dtype] += sent


def flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value


class Kept:
    """The memory that autograd keeps for the backward pass, without the weights that modules hold."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._kept: dict[int, Tensor] = {}
        self._weights: set[int] = set()
        self._modules = [module for part in parts for module in part.modules()]

    @property
    def bytes(self) -> int:
        kept = [tensor for key, tensor in self._kept.items() if key not in self._weights]
        return sum(tensor.untyped_storage().nbytes() for tensor in kept)

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [module.register_forward_pre_hook(self._note_weights) for module in self._modules]
        with saved_tensors_hooks(self._pack, lambda tensor: tensor):
            yield
        for handle in handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        kept = local(tensor)
        self._kept.setdefault(key(kept), kept)
        return tensor

    def _note_weights(self, module: nn.Module, _: object) -> None:
        held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        # Weights that were replaced by their casts are no parameters.
        held += [value for value in module._parameters.values() if value is not None]
        self._weights |= {key(local(value)) for value in held}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def key(tensor: Tensor) -> int:
    """The same for tensors that share memory, while one of them lives."""
    return tensor.untyped_storage()._cdata


def counted(step: Callable[[], object], parts: Sequence[nn.Module], *, microbatches: int) -> dict[str, Any]:
    """The counts of the second step; what is kept is that of one microbatch."""
    step()
    kept = Kept(parts)
    with StepCounts() as counts, kept.watch(), counts.methods():
        step()
    return {
        "sent": {f"{kind} {dtype}": sent for (kind, dtype), sent in sorted(counts.sent.items())},
        "calls": dict(sorted(counts.calls.items())),
        "microbatches": microbatches,
        "kept_bytes": kept.bytes // microbatches,
        "casts": counts.casts,
        "cast_bytes": counts.cast_bytes,
        "waits": sum(counts.waits.values()),
        "waits_in": {name: calls for name, calls in counts.waits.items() if calls},
        "kernels": counts.kernels,
    }


def count_here(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The counts of a case on rank 0, in this process, which must have no process group, now or before."""
    words = (CASES | OTHERS)["one device" if name in (PLAIN, TITAN) else name]
    config = prepared(*COMMON, *words, "run_dir=/nowhere/run", *overrides).config
    if name in (PLAIN, TITAN):
        return loop_counts(config, build=plain_model if name == PLAIN else titan_model)
    fakes = nullcontext() if "expert" in name else FakeTensorMode(allow_non_fake_inputs=True)
    with patch.object(pipelining._PipelineSchedule, "_warmup_p2p", dynamic), alone(config.devices):
        return counts_of(config, fakes)


@contextmanager
def alone(ranks: int) -> Iterator[None]:
    """Rank 0 of a world whose other ranks don't exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with (
        patch.object(dist, "new_group", partial(new_fake_group, dist.new_group)),
        patch("hpc_parallel.strategies.replicate.DistributedDataParallel", LoneReplica),
        patch.multiple(PipelineStage, **own_metas()),
    ):
        yield


def dynamic(schedule: object, stages: Sequence[Any], *_: object) -> None:
    """In place of the vote by which the stages of a pipeline find out how they learn their shapes."""
    for stage in stages:
        stage._inference_mode = InferenceMode.DYNAMIC


def own_metas() -> dict[str, Any]:
    """What the stages of this rank hear of others: all stages hand on the same shapes and types."""
    from torch.distributed.pipelining._utils import _StageBackwardMeta, _StageForwardMeta
    from torch.distributed.pipelining.stage import _derive_grad_metas

    handed_on: list[Any] = []

    def send(stage: Any, meta: Any, target: int) -> None:
        handed_on.extend([meta] if isinstance(meta, _StageForwardMeta) else [])

    def receive(stage: Any, source: int) -> Any:
        if source < stage.stage_index:
            return handed_on[0]
        return _StageBackwardMeta(_derive_grad_metas(stage._stage_meta.outputs))

    return {"_send_meta": send, "_recv_meta": receive}


class LoneReplica(DistributedDataParallel):
    """The future of a fake all-reduce has no tensor, so a bucket is its own mean."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register_comm_hook(options["process_group"], averaged)
        self.reducer = FirstBuckets(self.reducer)


class FirstBuckets:
    """A reducer that keeps its first buckets: the order of gradients would be sent as numbers."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def averaged(group, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
    dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    done = torch.futures.Future()  # type: ignore[var-annotated]
    done.set_result(bucket.buffer())
    return done


def counts_of(config: Any, fakes: AbstractContextManager[object]) -> dict[str, Any]:
    layout = layout_of(config.strategy, devices=config.devices)
    batch = batch_of(config, layout)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout")
        groups = make_groups(config, layout, device_type="cpu")
    tokens = config.data.get("sequence_length")
    shape = (1, config.data.get("height", 8), config.data.get("width", 8)) if tokens is None else (tokens,)
    model = build_model(config)
    with patch.object(assemble, "materialise", partial(allocate, fakes)):
        assembled = assemble.assemble(
            model, config=config, batch=batch, sample_shape=shape, groups=groups, device=torch.device("cpu")
        )
    for part in assembled.parts:
        part.train()
    optimizer = build_optimizer(assembled.named_parameters(), config.optimizer, split=True)
    step = Step(assembled, optimizer=optimizer, clip_norm=config.training.clip_norm, on_nonfinite="stop")
    with fakes:
        inputs = torch.randint(256, (batch.samples_per_replica, *shape))
        targets = (
            inputs if tokens else torch.zeros_like(inputs[:, 0] if model.pixelwise else inputs[:, 0, 0, 0])
        )
        return counted(lambda: step.run(inputs, targets), assembled.parts, microbatches=batch.microbatches)


def allocate(
    fakes: AbstractContextManager[object], model: nn.Module, *, dtype: torch.dtype, **_: object
) -> nn.Module:
    """Give every weight and buffer of `model` memory, in place of drawing its values."""

    def memory(tensor: Tensor) -> Tensor:
        values = local(tensor)
        with fakes:
            made = torch.randn(values.shape, dtype=dtype) * 0.02
        if not isinstance(tensor, DTensor):
            return made
        return DTensor.from_local(
            made, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape,
            stride=tensor.stride(),
        )  # fmt: skip

    created: dict[int, nn.Parameter] = {}
    for name, weight in list(model.named_parameters(remove_duplicate=False)):
        if id(weight) not in created:
            created[id(weight)] = nn.Parameter(memory(weight))
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, created[id(weight)])
    for name, buffer in list(model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        with fakes:
            setattr(model.get_submodule(path), leaf, torch.ones(buffer.shape, dtype=buffer.dtype))
    return model


def loop_counts(config: Any, *, build: Callable[[Any], nn.Module]) -> dict[str, Any]:
    """A plain loop in one file: autocast, fused AdamW, clipping, two microbatches."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.randint(256, (config.training.microbatch_size, config.data["sequence_length"]))

        def step() -> None:
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = cross_entropy(model(tokens), tokens) / 2
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return counted(step, [model], microbatches=2)


def plain_model(config: Any) -> nn.Module:
    shape = {"tied_head": True, "norm_eps": 1e-5, **config.model}
    return PlainTransformer(shape, seq=config.data["sequence_length"])


def titan_model(config: Any) -> nn.Module:
    """The 1B of torchtitan 0.3.0, which has the shape of `1b`, with as many blocks as `config`.

    Its own attention for language models needs masks of documents; its plain one takes its place.
    """
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    with patch.object(llama3, "get_attention_config", lambda _: ScaledDotProductAttention.Config()):
        titan = llama3.llama3_configs["1B"]("")
    model: nn.Module = replace(titan, layers=titan.layers[: config.model["layers"]]).build()
    return model


def row(name: str, counts: Mapping[str, Any]) -> str:
    """A row of Markdown."""
    sent = ", ".join(f"{kind} {size / 1e6:,.1f}" for kind, size in counts["sent"].items()) or "none"
    batches = counts["microbatches"]
    calls = ", ".join(
        f"{counts['calls'].get(kind, 0) / batches:.3g}" for kind in ("all_gather", "reduce_scatter")
    )
    cells = (
        name, sent, calls, f"{counts['kept_bytes'] / 1e9:.2f}",
        f"{counts['casts']} ({counts['cast_bytes'] / 1e9:.2f})", counts["waits"], counts["kernels"],
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| case | MB sent by kind and type | gathers, reduce-scatters a microbatch | GB kept of a microbatch "
    "| casts (GB written) | host waits | kernels |\n|---|---|---|---|---|---|---|"
)


def main(words: Sequence[str]) -> None:
    at = words.index("--") if "--" in words else len(words)
    names, overrides = words[:at], words[at + 1 :]
    if names[:1] == ["--one"]:
        print(json.dumps(count_here(names[1], overrides)))
        return
    print(HEAD, flush=True)
    for name in names or (*CASES, PLAIN):
        command = [sys.executable, __file__, "--one", name, "--", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        print(row(name, json.loads(done.stdout.splitlines()[-1])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
