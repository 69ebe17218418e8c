"""Every symbol of torch that this package uses although torch keeps it private, with the reason.

They were seen in torch 2.11 and 2.13. tests/unit/test_torch_internals.py checks what each of
them does, so that a torch that changes one fails there, and pyproject.toml admits no newer torch.

Four uses can't move here, since they override or replace something; the same test checks them:
`strategies/pipeline.py` overrides methods of `PipelineStage`, `training/checkpoint.py` replaces the file
system of `FileSystemWriter`, `profiling/timeline.py` marks `Work.wait` and `torch.autograd.backward`, and
`worker/signed_objects.py` replaces the pickler of torch.distributed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.serialization import config as serialization

__all__ = ["BatchNorm", "DispatchMode", "tree_leaves"]

BatchNorm = _BatchNorm
"""The common class of BatchNorm1d, 2d and 3d."""
DispatchMode = TorchDispatchMode
"""Sees every operator that is called, by torch's own code too: counts traffic, measures maps."""


class LayerStyle(ParallelStyle):
    """A style of our own for `parallelize_module`, which calls `_apply`."""

    def split(self, module: Module, mesh: DeviceMesh) -> Module:
        raise NotImplementedError

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        return self.split(module, device_mesh)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh of the axes of several. Slicing by name can't join a flattened axis to another."""
    return DeviceMesh._concatenate(list(meshes))


def flatten(mesh: DeviceMesh) -> DeviceMesh:
    """One axis made of all axes of `mesh`, with a process group of its own."""
    return mesh._flatten()


def profiler_is_on() -> bool:
    """A range for the profiler costs microseconds for each microbatch, so it is left out without one."""
    return torch.autograd._profiler_enabled()


def record_memory(on: bool) -> None:
    """Record allocations of GPU memory with their stacks (torch.cuda.memory), or stop it."""
    torch.cuda.memory._record_memory_history(enabled="all" if on else None)


def write_memory(path: Path) -> None:
    """Write the recorded allocations in the form that pytorch.org/memory_viz reads."""
    torch.cuda.memory._dump_snapshot(str(path))


def profiler_events(profiled: profile) -> Iterable[Any]:
    """The raw events. The public ones have no thread, and nest kernels under operators."""
    assert profiled.profiler is not None
    results = profiled.profiler.kineto_results
    assert results is not None
    return results.events()


def operator_name(function: Any) -> str | None:
    """`c10d::allreduce_` and the like, without the overload; None for what is no operator."""
    return function._schema.name if isinstance(function, OpOverload) else None


def operator_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments of a call of an operator by their names."""
    names = (argument.name for argument in function._schema.arguments)
    return dict(zip(names, args, strict=False)) | dict(kwargs or {})


def written_arguments(function: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments that the operator writes into."""
    schema = function._schema
    if not schema.is_mutable:
        return []
    return [value for value, argument in zip(args, schema.arguments, strict=False) if argument.is_write]


def group_of(value: Any) -> dist.ProcessGroup:
    """The process group that a collective was called with: an object, a wrapped one, or a name."""
    if isinstance(value, str):
        return _resolve_process_group(value)  # type: ignore[arg-type]
    if isinstance(value, torch.ScriptObject):
        return dist.ProcessGroup.unbox(value)
    return value  # type: ignore[no-any-return]


def buffers_of(module: Module) -> dict[str, Tensor | None]:
    """The module's own table of buffers, to put copies in it and take them out again."""
    return module._buffers


def is_view(tensor: Tensor) -> bool:
    """Whether autograd counts it as a view of another tensor, which can't be detached in place."""
    return tensor._is_view()


def allow_recompiles(count: int) -> None:
    """Blocks of different shapes are versions of one function to torch.compile, which has a limit of them."""
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, count)


def require_dims(norm: BatchNorm, x: Tensor) -> None:
    """Raises ValueError if `x` does not have the dims that this kind of BatchNorm takes."""
    norm._check_input_dim(x)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in one kernel."""
    return list(torch._foreach_norm(list(tensors), 2.0)) if tensors else []


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place, in one kernel."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def copy_into(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one kernel for each device."""
    torch._foreach_copy_(list(targets), list(sources))


def without_checksums() -> AbstractContextManager[None]:
    """torch.save writes no checksums of its own meanwhile: checkpoints have ours."""
    return serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined,no-any-return]


def stagers_last() -> bool:
    """Whether a stager can copy a second checkpoint. torch 2.11 and 2.12.0 close it after the first one."""
    return "close" not in DefaultStager._stage.__code__.co_names


def leave_out_of_replicas(model: Module, names: Sequence[str]) -> None:
    """DistributedDataParallel then ignores these parameters. It has no public option for it."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def leave_averaging_to_the_caller(replica: DistributedDataParallel) -> None:
    """As under `no_sync`, without a context that lasts: a pipeline stage says when gradients are averaged."""
    replica.require_backward_grad_sync = False


def hold_updates_by(flag: Tensor, optimizer: Optimizer) -> None:
    """While the scalar `flag` is 1, `optimizer.step()` changes neither weights nor state (as of GradScaler).

    The host never reads the flag. Raises RuntimeError if this optimizer ignores it.
    """
    if not _honours_found_inf(optimizer, device=flag.device):
        raise RuntimeError(
            f"{type(optimizer).__name__} of torch {torch.__version__} ignores found_inf, so NaN would reach "
            "the weights. Use a torch of the range that pyproject.toml names."
        )
    optimizer.found_inf = flag  # type: ignore[attr-defined]


def _honours_found_inf(optimizer: Optimizer, *, device: torch.device) -> bool:
    """Try it on one number, with an optimizer of the same kind and options."""
    weight = Parameter(torch.ones(1, device=device))
    weight.grad = torch.full_like(weight, torch.nan)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    probe = type(optimizer)([weight], **options)
    probe.found_inf = torch.ones((), device=device)  # type: ignore[attr-defined]
    try:
        probe.step()
    except (AssertionError, RuntimeError, TypeError):
        return False
    return bool((weight == 1).all())


def process_groups() -> dict[str, list[int]]:
    """The global ranks of each process group, by the name that the flight recorder uses."""
    world = dist.distributed_c10d._world
    return {str(name): sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def flight_recorder_entries() -> list[dict[str, Any]]:
    """The collectives that this process has begun; a build with CUDA keeps NCCL's and gloo's apart.

    Raises what torch raises if its recorder is off (TORCH_FR_BUFFER_SIZE=0).
    """
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return [entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])]
