"""Every symbol of torch that this package uses although torch keeps it private, with the reason.

The symbols were checked in torch 2.11 to 2.14. tests/unit/test_torch_internals.py checks what each
symbol does, so the test fails with a torch that changes one. pyproject.toml allows no newer torch.

Four uses can't move here, since they override or replace something; the same test checks them:
`strategies/pipeline.py` overrides methods of `PipelineStage`, `training/checkpoint.py` replaces the file
system of `FileSystemWriter`, `profiling/timeline.py` marks `Work.wait` and `torch.autograd.backward`, and
`start/signed_store.py` replaces the pickler of torch.distributed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial, wraps
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.serialization import config as serialization

__all__ = ["BatchNorm", "Convolution", "DispatchMode", "tree_leaves"]

Convolution = _ConvNd
"""The common class of convolutions."""
BatchNorm = _BatchNorm
"""The common class of BatchNorm1d, 2d and 3d."""
DispatchMode = TorchDispatchMode
"""Sees every operator that is called, by torch's own code too: counts traffic, measures maps."""

# Public: torch 2.13 gave them new names, and 2.14 warns of the old ones.
_RENAMED = hasattr(dist, "all_gather_single")
all_gather = dist.all_gather_single if _RENAMED else dist.all_gather_into_tensor
reduce_scatter = dist.reduce_scatter_single if _RENAMED else dist.reduce_scatter_tensor


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


def slice_on(mesh: DeviceMesh, dims: Mapping[Parameter, int]) -> Callable[[Parameter], Any]:
    """Lets fully_shard slice each of these weights over the last axis of `mesh`, along the given dim.

    The other weights of the module keep the mesh that fully_shard is called with, and all are gathered
    together. The classes of this choice have no public names. torch 2.11 has none of them.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    replicated = mesh.ndim == 2
    info = common.HSDPMeshInfo(mesh, 1, 0) if replicated else common.FSDPMeshInfo(mesh, 0)
    return {weight: common.ShardPlacementResult(Shard(dim), info) for weight, dim in dims.items()}.get


def profiler_is_on() -> bool:
    """Whether a profiler runs. Without one, ranges are left out: each costs microseconds per microbatch."""
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
    """`c10d::allreduce_` and the like, without the overload; None if `function` is not an operator.

    An operator that runs other operators is `higher_order::cond` and the like.
    """
    if isinstance(function, HigherOrderOperator):
        return f"higher_order::{function.name()}"
    return function._schema.name if isinstance(function, OpOverload) else None


def operator_arguments(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The arguments of an operator call, by name."""
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


def has_hooks(weight: Tensor) -> bool:
    """Whether a function is called with the gradient of `weight`."""
    return bool(weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


def parameters_of(module: Module) -> dict[str, Tensor | None]:
    """The module's own table of parameters, to put casts in it and take them out again."""
    return module._parameters  # type: ignore[return-value]


def is_view(tensor: Tensor) -> bool:
    """Whether autograd treats `tensor` as a view of another tensor. A view can't be detached in place."""
    return tensor._is_view()


def allow_recompiles(count: int) -> None:
    """Let torch.compile compile a function `count` times, because blocks of different shapes share it."""
    limits: Any = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, count)


def allow_unknown_sizes() -> None:
    """Let compiled code have operators whose output has a size that only a run knows: rows from devices."""
    settings: Any = torch._dynamo.config
    settings.capture_dynamic_output_shape_ops = True


def wrap_integers() -> None:
    """Let compiled code for CPUs wrap integers around, as torch does elsewhere.

    In C++ the overflow of a signed integer is undefined. gcc replaces `x * 3 > 0` by `x > 0`, so compiled
    dropout dropped other elements. torch has no setting for this flag, so it is added to another flag.
    """
    from torch._inductor import config  # imported by the compiler only

    flag = "enable_floating_point_contract_flag"
    if "-fwrapv" not in (value := getattr(config.cpp, flag)):
        setattr(config.cpp, flag, f"{value} -fwrapv")


def save_meshes_behind_random_states() -> None:
    """Let compiled blocks with DTensors compute attention again in the backward pass.

    A forward graph must save tensors, then meshes, then sizes. If an operator that may draw random numbers is
    computed again (torch counts attention on a CPU as one), torch 2.13 saves the generator's state after the
    mesh of the weights, and the forward pass fails.
    """
    from torch._functorch import partitioners as module  # imported by the compiler only

    partitioners: Any = module
    is_mesh = getattr(partitioners, "is_opaque_node", None)  # torch 2.11 saves no mesh
    save_states = partitioners.functionalize_rng_ops
    if is_mesh is None or hasattr(save_states, "__wrapped__"):
        return

    @wraps(save_states)
    def save_in_order(joint: Any, forward: Any, backward: Any, sizes: int) -> tuple[Any, Any]:
        saved = reversed(forward.graph.output_node().args[0])
        behind = len(list(takewhile(is_mesh, islice(saved, sizes, None))))
        forward, backward = save_states(joint, forward, backward, sizes + behind)
        inputs = backward.graph.find_nodes(op="placeholder")
        first_gradient = next(node for node in inputs if "tangent" in node.name)
        for mesh in filter(is_mesh, inputs[: inputs.index(first_gradient)]):
            first_gradient.prepend(mesh)
        backward.recompile()
        return forward, backward

    partitioners.functionalize_rng_ops = save_in_order


def graph_break(error: BaseException) -> str | None:
    """Why torch can't compile a function in one piece, with the line of the cause; None for other errors."""
    if not isinstance(error, torch._dynamo.exc.Unsupported):
        return None
    reason = str(error).partition("\n")[0]
    stack: Any = getattr(error, "real_stack", None)
    return f"{reason} ({Path(stack[-1].filename).name}:{stack[-1].lineno})" if stack else reason


def version_of(tensor: Tensor) -> int:
    """A number that grows whenever something is written into the tensor."""
    return tensor._version


class SlicedGradients:
    """Records which weights of a model wrapped by fully_shard got a gradient, and gives zeros to the others.

    Without zeros, ranks that use different weights would reduce different gradients with each other. torch
    2.13 can send zeros (`set_reduce_scatter_unused_params`), but does not say which weights no rank has used.
    """

    def __init__(self, model: Module) -> None:
        self._weights: list[Any] = []
        self._used: set[int] = set()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                single = [getattr(state, "_fsdp_param_group", None)]  # torch 2.11
                for group in filter(None, getattr(state, "_fsdp_param_groups", single)):
                    self._weights += group.fsdp_params
                    group.post_backward = partial(self._complete, group, group.post_backward)

    def _complete(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        for weight in group.fsdp_params:
            if (whole := getattr(weight, "_unsharded_param", None)) is None or not whole.requires_grad:
                continue
            if whole.grad is not None:
                self._used.add(id(weight))
            elif group.reduce_grads and weight.unsharded_accumulated_grad is None:
                whole.grad = torch.zeros_like(whole)
        post_backward(*unused)

    def used(self) -> list[bool]:
        """Whether each weight got a gradient on this rank since the last call."""
        used = [id(weight) in self._used for weight in self._weights]
        self._used.clear()
        return used

    def drop(self, used: Sequence[bool]) -> None:
        """Remove the zeros from the weights that are not `used`."""
        for weight, is_used in zip(self._weights, used, strict=True):
            if not is_used:
                weight.sharded_param.grad = None


def set_memory_budget(share: float) -> None:
    """Set the share of activations that compiled code keeps. The partitioner's setting has no public name."""
    from torch._functorch import config  # imported by the compiler only

    config.activation_memory_budget = share


class LocalBatchNorm(BatchNorm):
    """BatchNorm of inputs with any number of dims, as SyncBatchNorm takes them, without other ranks."""

    _check_input_dim = SyncBatchNorm._check_input_dim


def require_dims(norm: BatchNorm, x: Tensor) -> None:
    """Raises ValueError if `x` does not have the dims that this kind of BatchNorm takes."""
    norm._check_input_dim(x)


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in one kernel; of bfloat16 in float32."""
    half = any(tensor.dtype == torch.bfloat16 for tensor in tensors)
    return list(torch._foreach_norm(list(tensors), 2.0, torch.float32 if half else None)) if tensors else []


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor in place, in one kernel."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def copy_into(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy each source into its target, in one kernel for each device."""
    torch._foreach_copy_(list(targets), list(sources))


def hasten(tensor: Tensor) -> None:
    """Let autograd pass on the gradient of `tensor` as soon as it is complete, before all other work."""
    assert tensor.grad_fn is not None
    tensor.grad_fn._set_sequence_nr(2**63 - 1)  # type: ignore[attr-defined]


def without_checksums() -> AbstractContextManager[None]:
    """A context in which torch.save writes no checksums of its own, because checkpoints have ours."""
    return serialization.patch("save.compute_crc32", False)  # type: ignore[attr-defined,no-any-return]


def planner_with_memory(key: str) -> DefaultSavePlanner:
    """A planner that caches the plans of `key`. A plan that equals the cached one is not sent or made again.

    By default torch caches plans for the whole process under the name of the class, which would mix two runs.
    """
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = key
    return planner


def forget_plans(key: str) -> None:
    """Remove the cached plans of `key`, so that its next save is planned anew."""
    for plans in (
        SavePlanner._cached_save_plan,
        SavePlanner._cached_final_save_plan,
        SavePlanner._cached_all_plans,
        SavePlanner._cached_global_plan,
        SavePlanner._cached_metadata,
    ):
        plans.pop(key, None)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """`tensor` with other local values, which may be on another device than its mesh.

    `DTensor.from_local` would copy them to the device of the mesh.
    """
    return DTensor(local, tensor._spec, requires_grad=False)


def leave_out_of_replicas(model: Module, names: Sequence[str]) -> None:
    """Let DistributedDataParallel ignore these parameters. It has no public option for this."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def leave_averaging_to_the_caller(replica: DistributedDataParallel) -> None:
    """Do not average gradients, as under `no_sync`. A pipeline stage decides when they are averaged."""
    replica.require_backward_grad_sync = False


def hold_updates_by(flag: Tensor, optimizer: Optimizer) -> None:
    """While the scalar `flag` is 1, `optimizer.step()` changes neither weights nor state, as with GradScaler.

    The host never reads the flag. Raises RuntimeError if this optimizer ignores it.
    """
    if not _honours_found_inf(optimizer, device=flag.device):
        raise RuntimeError(
            f"{type(optimizer).__name__} of torch {torch.__version__} ignores found_inf, so NaN would reach "
            "the weights. Use a torch of the range that pyproject.toml names."
        )
    optimizer.found_inf = flag  # type: ignore[attr-defined]


def _honours_found_inf(optimizer: Optimizer, *, device: torch.device) -> bool:
    """Whether `found_inf` stops the update of one number by an optimizer of the same kind and options."""
    weight = Parameter(torch.ones(1, dtype=torch.float32, device=device))  # whatever torch's default is
    weight.grad = torch.full_like(weight, torch.nan)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    probe = type(optimizer)([weight], **options)
    probe.found_inf = torch.ones((), dtype=torch.float32, device=device)  # type: ignore[attr-defined]
    try:
        probe.step()
    except (AssertionError, RuntimeError, TypeError):
        return False
    return bool((weight == 1).all())


def flash_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention on a GPU with its `lse`, which no public function returns."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)
    return output, lse


def flash_backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """The backward pass of `flash_forward`: the gradients of query, key and value.

    tensors: the gradient of the output, then query, key, value, output and `lse`, as all backward passes here
    take them. Without dropout no random state is read.
    """
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    unused = torch.empty(2, dtype=torch.uint64, device=tensors[0].device)
    gradients = backward(*tensors, None, None, *_lengths(tensors), 0.0, causal, unused, unused)
    return tuple(gradients)


def cudnn_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, which is faster than torch's flash attention on Hopper. `lse` is [..., seq, 1]."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    output, lse, *_ = attend(query, key, value, None, True, 0.0, causal)
    return output, lse.squeeze(-1)


def cudnn_backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, ...]:
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    unused, lse = _no_state(tensors), tensors[-1].unsqueeze(-1)
    rest = (lse, unused, unused, None, None, None, *_lengths(tensors), 0.0, causal)
    return tuple(backward(*tensors[:-1], *rest))


def efficient_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The memory-efficient kernel of a GPU, which also computes in float32. Rows of its `lse` are padded."""
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    output, lse, *_ = attend(query, key, value, None, True, 0.0, causal)
    return output, lse


def efficient_backward(*tensors: Tensor, causal: bool) -> tuple[Tensor, ...]:
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    unused = _no_state(tensors)
    needed = [True, True, True, False]  # there is no bias, so it needs no gradient
    return tuple(backward(*tensors[:4], None, *tensors[4:], unused, unused, 0.0, needed, causal)[:3])


def cpu_flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Flash attention on a CPU, also in float64, with its `lse`."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return attend(query, key, value, 0.0, causal, attn_mask=bias)  # type: ignore[no-any-return]


def cpu_flash_backward(*tensors: Tensor, causal: bool, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return tuple(backward(*tensors, 0.0, causal, attn_mask=bias))


def _lengths(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """The numbers of queries and of keys in the tensors of a backward pass."""
    return tensors[1].shape[-2], tensors[2].shape[-2]


def _no_state(tensors: Sequence[Tensor]) -> Tensor:
    """In place of the random state of a dropout."""
    return torch.zeros((), dtype=torch.int64, device=tensors[0].device)


def scaled_product(
    first: Tensor,
    second: Tensor,
    *,
    scales: tuple[Tensor, Tensor],
    fast: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`first` [m, k] times `second` [k, n], both float8, times both scales, in `dtype`: bfloat16 or float64.

    scales: powers of two in float32, without dims or [m, 1] and [1, n]. m, k and n are multiples of 16.
    fast: sums on a GPU may have fewer than 24 bits. Hopper's tensor cores alone have this lower precision.
    """
    exact = dtype == torch.float64  # for proofs; no device multiplies float8 so
    if first.device.type == "cuda" and not exact:
        return cuda_scaled_product(first, second, scales=scales, fast=fast)
    return emulated_product(first, second, *scales, exact)  # type: ignore[no-any-return]


@torch.library.custom_op("hpc_parallel::scaled_product", mutates_args=())
def emulated_product(first: Tensor, second: Tensor, scale_a: Tensor, scale_b: Tensor, exact: bool) -> Tensor:
    """One operator, as a GPU has it: selective checkpointing keeps its result."""
    sums = torch.float64 if exact else torch.float32
    with torch.autocast(first.device.type, enabled=False):
        product = first.to(sums) @ second.to(sums) * scale_a * scale_b
        return product if exact else product.to(torch.bfloat16)


@emulated_product.register_fake
def _(first: Tensor, second: Tensor, scale_a: Tensor, scale_b: Tensor, exact: bool) -> Tensor:
    dtype = torch.float64 if exact else torch.bfloat16
    return first.new_empty(first.shape[0], second.shape[1], dtype=dtype)


def cuda_scaled_product(
    first: Tensor, second: Tensor, *, scales: tuple[Tensor, Tensor], fast: bool
) -> Tensor:
    """The operator needs contiguous rows of `first` and columns of `second`. torch 2.11 has no public one.

    Its kernel for scales per row is slow unless `fast`. Therefore such scales are applied to the result (as
    in torchao), which is exact for powers of two.
    """
    late = scales[0].dim() > 0 and not fast
    one = scales[0].new_ones(())
    scale_a, scale_b = (one, one) if late else scales
    product = torch._scaled_mm(
        first.contiguous(), second.t().contiguous().t(), scale_a=scale_a, scale_b=scale_b,
        out_dtype=torch.bfloat16, use_fast_accum=fast,
    )  # fmt: skip
    return (product * scales[0] * scales[1]).to(product.dtype) if late else product


@torch.library.custom_op("hpc_parallel::scaled_product_of_groups", mutates_args=())
def scaled_product_of_groups(
    first: Tensor, second: Tensor, ends: Tensor, scale_a: Tensor, scale_b: Tensor, exact: bool
) -> Tensor:
    """Each group of rows of `first` [m, k] times its matrix of `second` [group, k, n], times both scales.

    Both are e4m3. ends: the index after the last row of each group, [group], int32. scale_a, scale_b: powers
    of two in float32, [m, 1] and [group, 1, n]. k and n are multiples of 16. exact: the result is float64,
    and otherwise bfloat16. One operator, so that compiled code needs no sizes of groups.
    """
    if first.device.type == "cuda" and not exact:
        return cuda_product_of_groups(first, second, ends, scale_a, scale_b)
    sums = torch.float64 if exact else torch.float32
    sizes: list[int] = ends.diff(prepend=ends.new_zeros(1)).tolist()
    groups = zip((first.to(sums) * scale_a).split(sizes), second.to(sums) * scale_b, strict=True)
    return torch.cat([rows @ matrix for rows, matrix in groups]).to(sums if exact else torch.bfloat16)


def cuda_product_of_groups(
    first: Tensor, second: Tensor, ends: Tensor, scale_a: Tensor, scale_b: Tensor
) -> Tensor:
    """The operator needs contiguous rows of `first` and columns of `second`. torch has no public one."""
    return torch._scaled_grouped_mm(
        first.contiguous(), second.mT.contiguous().mT, scale_a.flatten(), scale_b.squeeze(1).contiguous(),
        offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


@scaled_product_of_groups.register_fake
def _(first: Tensor, second: Tensor, ends: Tensor, scale_a: Tensor, scale_b: Tensor, exact: bool) -> Tensor:
    dtype = torch.float64 if exact else torch.bfloat16
    return first.new_empty(first.shape[0], second.shape[2], dtype=dtype)


def all_to_all_rows(
    rows: Tensor, *, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `sent[i]` rows to rank i of the group; returns the `received[i]` rows of each rank i, in order.

    The operator returns a new tensor, so selective checkpointing can keep it. `dist.all_to_all_single`
    writes into a given tensor.
    """
    functional = torch.ops._c10d_functional
    arrived = functional.all_to_all_single(rows, received, sent, group.group_name)
    return functional.wait_tensor(arrived)  # type: ignore[no-any-return]


def largest_of_group(numbers: Tensor, *, group: str) -> Tensor:
    """The largest value of each of `numbers` over the ranks of a group, by the group's name.

    Compiled code has the operator in its graph, as `all_to_all_rows` above.
    """
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_reduce(numbers, "max", group))  # type: ignore[no-any-return]


def require_below(count: int, indices: Tensor, *, what: str) -> None:
    """Raises RuntimeError if one of `indices` is outside [0, count); on a GPU it ends the process later.

    It does not wait for a GPU. torch counts such an index of a table or of logits that are split as 0.
    """
    numbers = (indices.to_local() if isinstance(indices, DTensor) else indices).long()
    legal = ((numbers >= 0) & (numbers < count)).all()
    torch._assert_async(legal, f"the data has {what} that is outside 0 to {count - 1}")


def set_default_timeout(timeout: timedelta) -> None:
    """Set the time-out of every group that is made later without a time-out.

    `DeviceMesh` makes its groups without a time-out. The time-out of `init_process_group` does not apply to
    them, so they would wait for half an hour (10 minutes with NCCL).
    """
    settings: Any = dist.distributed_c10d
    settings.default_pg_timeout = settings.default_pg_nccl_timeout = timeout


def set_timeout(timeout: timedelta, *, except_group: dist.ProcessGroup | None = None) -> None:
    """Set the time-out of every group that this rank has, but not of `except_group`.

    `split_group` passes the options of NCCL to gloo too. The gloo part of the group then has a time-out of
    half an hour.
    """
    set_one = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # public from torch 2.14 on
    for group in dist.distributed_c10d._world.pg_map:
        if group is not except_group:
            set_one(timeout, group)


def sends_apart(schedule: Any) -> bool:
    """Whether this class of pipeline schedules never has activations and gradients in one batch of messages.

    1F1B has both in one batch. torch runs a batch on the group of its first message (`batch_isend_irecv`).
    """
    return isinstance(schedule, type) and issubclass(schedule, schedule_of_actions())


def schedule_of_actions() -> Any:
    """The class of pipeline schedules that run a table of actions (`set_actions`)."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime  # imported by pipelines only

    return _PipelineScheduleRuntime


def set_actions(schedule: Any, ranks: Sequence[Sequence[tuple[int, str, int]]]) -> None:
    """Let a schedule of `schedule_of_actions` run these actions of each rank: (stage, kind, microbatch)."""
    from torch.distributed.pipelining.schedules import _Action, _ComputationType

    schedule.pipeline_order = {
        rank: [_Action(stage, _ComputationType.from_str(kind), number) for stage, kind, number in actions]
        for rank, actions in enumerate(ranks)
    }
    schedule._prepare_schedule_with_comms(schedule.pipeline_order)


def default_store() -> dist.Store:
    """The store through which the ranks of the default process group have met."""
    return dist.distributed_c10d._get_default_store()


def process_groups() -> dict[str, list[int]]:
    """The global ranks of each process group, by the name that the flight recorder uses."""
    world = dist.distributed_c10d._world
    return {str(name): sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


def groups_by_ranks() -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's process groups by their global ranks; of several with the same ranks, the first one."""
    world = dist.distributed_c10d._world
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for group in world.pg_names:
        groups.setdefault(tuple(sorted(world.pg_group_ranks[group])), group)
    return groups


def flight_recorder_entries() -> list[dict[str, Any]]:
    """The collectives that this process has begun; a build with CUDA keeps NCCL's and gloo's apart.

    Raises what torch raises if its recorder is off (TORCH_FR_BUFFER_SIZE=0).
    """
    from torch._C import _distributed_c10d as c10d

    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    return [entry for dump in dumps if dump for entry in json.loads(dump()).get("entries", [])]
