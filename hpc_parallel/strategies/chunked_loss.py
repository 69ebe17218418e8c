"""The loss of a language model in chunks of tokens, so that not all logits exist at once.

The head returns the inputs of its projection, and the loss multiplies a chunk of them at a time with the
projection's weight. The gradients of a chunk are computed in the forward pass, while its logits exist. The
backward pass only scales them, and no logits are computed twice. Liger (Hsu et al. 2024) does the same in one
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.packing import IGNORED
from hpc_parallel.layout.counts import LOSS_CHUNK_BYTES
from hpc_parallel.layout.step_facts import chunks_loss
from hpc_parallel.models.language import LanguageHead, LanguageModel
from hpc_parallel.models.layered import LayeredModel, Loss
from hpc_parallel.strategies.loss import MetricsOf
from hpc_parallel.strategies.mesh import all_reduce, axis_of
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.strategies.tensor.tensor_roles import roles_of
from hpc_parallel.torch_internals import require_below

ErrorsOf = Callable[..., tuple[Tensor, Tensor]]
"""The type of `errors_of`."""


def applies(model: LayeredModel, *, config: RunConfig, mesh: DeviceMesh) -> bool:
    """Whether the loss of the whole `model` can be computed from the inputs of its last projection.

    It can't if the user's own loss, head or hook may change the logits.
    """
    axis = axis_of(mesh, "tensor")
    if not chunks_loss(config, tensor=1 if axis is None else axis.size()):
        return False
    head = model.head
    if type(model).loss is not LanguageModel.loss or not isinstance(head, LanguageHead):
        return False
    projection = head.get_submodule(head.projection)
    if axis is not None and roles_of(model).get(f"head.{head.projection}") != "logits":
        return False
    hooks = (*head._forward_hooks, *projection._forward_hooks)
    plain = type(head).forward is LanguageHead.forward and type(projection) is nn.Linear and not hooks
    return plain and projection.bias is None


def apply(model: LayeredModel) -> str | None:
    """Let the head of `model` (or of a stage) return its projection's inputs; returns the projection's name.

    Returns None for a stage without a head.
    """
    if model.head is None:
        return None
    assert isinstance(model.head, LanguageHead)
    replace_forward(model.head.get_submodule(model.head.projection), return_input, technique="Chunked")
    return f"head.{model.head.projection}"


def show_weight(model: LayeredModel) -> None:
    """Let the output of a `model` that `apply` changed depend on the projection's weight.

    DistributedDataParallel looks for unused weights from its output on. It would take this one for unused,
    and end the training at its gradient.
    """
    assert isinstance(model.head, LanguageHead)
    replace_forward(model.head.get_submodule(model.head.projection), depending, technique="Depending")


def depending(forward: Forward, projection: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = Depending.apply(forward(projection, x), projection.weight)
    return output


class Depending(torch.autograd.Function):
    """Its first argument, which has the second one in its graph. That one gets no gradient from here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def return_input(_: Forward, projection: nn.Module, x: Tensor) -> Tensor:
    return x


def loss_of(
    model: LayeredModel, *, dtype: torch.dtype | None, mesh: DeviceMesh, compiled: bool = False
) -> Loss:
    """Returns the loss of the outputs of `model`, whose head `apply` changed.

    dtype: of the matrix products; None means the type of the weights. compiled: the softmax of a chunk and
    its gradient are one kernel of torch.compile, except over a split vocabulary.
    """
    axis = axis_of(mesh, "tensor")
    errors = torch.compile(errors_of, dynamic=False) if compiled and axis is None else errors_of
    return partial(chunked_cross_entropy, model, dtype=dtype, axis=axis, errors=errors)


def metrics_of(model: LayeredModel, metrics: MetricsOf, *, dtype: torch.dtype | None) -> MetricsOf:
    """Returns `metrics`, which take logits, for the outputs of `model`, whose head `apply` changed."""

    if type(model).metrics is LayeredModel.metrics:
        return metrics  # there are none

    def of_inputs(hidden: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        weight = projection_weight(model)
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        products = dtype or weight.dtype
        return metrics(F.linear(hidden.to(products), local.to(products)), target)

    return of_inputs


def projection_weight(model: LayeredModel) -> Tensor:
    """The projection's weight. It is read for each loss, because fully_shard replaces parameters."""
    assert isinstance(model.head, LanguageHead)
    weight: Tensor = model.head.get_submodule(model.head.projection).weight  # type: ignore[assignment]
    return weight


def chunked_cross_entropy(
    model: LayeredModel,
    hidden: Tensor,
    target: Tensor,
    *,
    dtype: torch.dtype | None = None,
    axis: DeviceMesh | None = None,
    errors: ErrorsOf | None = None,
) -> Tensor:
    """The summed cross-entropy of `hidden` [batch, seq, dim] times the projection, and `target` [batch, seq].

    It equals `LanguageModel.loss` of the logits. axis: the ranks over which the projection's rows are split.
    errors: a function like `errors_of`.
    """
    weight = projection_weight(model)
    rows = None if axis is None else ProjectionRows.of(weight, axis=axis)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    target = target.flatten().long()
    if rows is not None:
        require_below(weight.shape[0], target.masked_fill(target == IGNORED, 0), what="a target")
    arguments = hidden.flatten(0, -2), local, target, dtype or weight.dtype, rows, errors
    if torch.is_grad_enabled():
        return ChunkedCrossEntropy.apply(*arguments)  # type: ignore[no-any-return]
    return cross_entropy(*arguments, needs=(False, False))[0]


@dataclass(frozen=True)
class ProjectionRows:
    """The rows of the projection that this rank of `axis` has: `count` rows from `first` on."""

    axis: DeviceMesh
    first: int
    count: int

    @classmethod
    def of(cls, weight: Tensor, *, axis: DeviceMesh) -> ProjectionRows:
        """The rows of a `weight` that is split by Shard(0)."""
        length, rank = -(-weight.shape[0] // axis.size()), axis.get_local_rank()
        first = min(rank * length, weight.shape[0])
        return cls(axis, first, min(length, weight.shape[0] - first))

    def indices(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Whether this rank has the row of each target, and the row's index on this rank (0 without it)."""
        local = (target >= self.first) & (target < self.first + self.count)
        return local, (target - self.first).masked_fill(~local, 0)

    def reduce(self, value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce `value` over the ranks, in place."""
        return all_reduce(value, axis=self.axis, op=operation)


class ChunkedCrossEntropy(torch.autograd.Function):
    """`cross_entropy`, whose forward pass also computes the gradients of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        dtype: torch.dtype,
        rows: ProjectionRows | None,
        errors: ErrorsOf | None = None,
    ) -> Tensor:
        needs = ctx.needs_input_grad[:2]
        loss, *gradients = cross_entropy(hidden, weight, target, dtype, rows, errors, needs=needs)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """A pipeline that splits its backward pass calls this twice, once for each of the two gradients."""
        wanted = (
            None if of_sum is None or not needed else of_sum * gradients[0].to(of_sum.dtype)
            for of_sum, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        )
        return (*wanted, None, None, None, None)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    dtype: torch.dtype,
    rows: ProjectionRows | None,
    errors: ErrorsOf | None = None,
    *,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss of `hidden` [token, dim], and the gradients by `hidden` and `weight` that it `needs`.

    Products are in `dtype`; the loss and the sum of the weight's gradient are in float32 or better. With
    `rows`, the gradient by `hidden` is this rank's part of a sum.
    """
    precise = torch.promote_types(dtype, torch.float32)
    product_weight = weight.to(dtype)
    loss = torch.zeros((), dtype=precise, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs[0] else None
    grad_weight: Tensor | None = None
    compute = (errors or errors_of) if any(needs) else without_errors
    for part in chunks(len(hidden), vocabulary=len(weight), device_type=hidden.device.type):
        x, counted = hidden[part].to(dtype), (target[part] != IGNORED)[:, None]
        of_chunk, error = compute(x @ product_weight.T, target[part, None], rows, dtype=precise)
        loss -= torch.where(counted, of_chunk, 0).sum()
        if grad_hidden is not None:
            grad_hidden[part] = (error @ product_weight) * counted
        if needs[1]:
            grad_weight = add_product(grad_weight, error.T, x * counted, dtype=precise)
        del error  # free its memory before the logits of the next chunk
    loss = loss if rows is None else rows.reduce(loss)
    return loss, grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def errors_of(
    logits: Tensor, target: Tensor, rows: ProjectionRows | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of the targets [token, 1] in `dtype`, and the gradient by `logits`.

    logits: [token, vocabulary]; target: [token, 1]; an ignored target is treated like any other.
    """
    logarithms = log_probabilities(logits, rows, dtype=dtype)
    local, index = _indices(target, rows)
    of_targets = logarithms.gather(1, index)
    errors = exponentials(logarithms, dtype=logits.dtype)
    errors.scatter_(1, index, (of_targets.exp() - local.to(dtype)).to(logits.dtype))
    return torch.where(local, of_targets, 0), errors


def without_errors(
    logits: Tensor, target: Tensor, rows: ProjectionRows | None, *, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The first result of `errors_of`, and an empty tensor: a validation needs no gradient."""
    local, index = _indices(target, rows)
    of_targets = log_probabilities(logits, rows, dtype=dtype).gather(1, index)
    return torch.where(local, of_targets, 0), logits.new_empty(0)


def exponentials(logarithms: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`logarithms.exp()` in `dtype`. It overwrites `logarithms` if they have this type."""
    if torch.compiler.is_compiling():
        return logarithms.exp().to(dtype)
    if dtype == logarithms.dtype:
        return logarithms.exp_()
    return torch.exp(logarithms, out=torch.empty_like(logarithms, dtype=dtype))


def add_product(total: Tensor | None, a: Tensor, b: Tensor, *, dtype: torch.dtype) -> Tensor:
    """`total` [m, n] of `dtype` plus `a` [m, k] times `b` [k, n], in place; None counts as 0.

    On a GPU, a product of bfloat16 is added to float32 while it is computed, so it needs no memory.
    """
    if a.device.type == "cuda" and a.dtype != dtype:
        if total is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.addmm(total, a, b, out_dtype=dtype, out=total)
    product = (a @ b).to(dtype)
    return product if total is None else total.add_(product)


def chunks(tokens: int, *, vocabulary: int, device_type: str) -> Iterator[slice]:
    """Parts of the tokens of nearly equal length, whose logits need about LOSS_CHUNK_BYTES in float32.

    At this size the products stay large, and the logits stay small compared with the activations. Each part
    reads and writes the gradient of the whole projection once more: on an H200, 8,192 tokens of 128,256 words
    took 20 ms longer in parts of 512 MB than with all logits.
    """
    most = LOSS_CHUNK_BYTES.get(device_type, LOSS_CHUNK_BYTES["cpu"])
    count = max(1, -(-tokens * vocabulary * 4 // most))
    length = max(1, -(-tokens // count))
    return (slice(start, start + length) for start in range(0, tokens, length))


def _indices(target: Tensor, rows: ProjectionRows | None) -> tuple[Tensor, Tensor]:
    """Whether this rank has the column of each target, and the index of the column on this rank."""
    target = target.masked_fill(target == IGNORED, 0)
    return (torch.ones_like(target, dtype=torch.bool), target) if rows is None else rows.indices(target)


def log_probabilities(logits: Tensor, rows: ProjectionRows | None, *, dtype: torch.dtype) -> Tensor:
    """The log-softmax in `dtype` of `logits` [token, vocabulary]; this rank may have some columns only."""
    if rows is None:
        return logits.log_softmax(-1, dtype=dtype)
    logits = logits.to(dtype)
    logits = logits - rows.reduce(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    return logits.sub_(rows.reduce(logits.exp().sum(-1, keepdim=True)).log_())
