"""Expert parallelism: every device holds some of the experts, and tokens travel to them and back.

Lepikhin et al. 2020 (GShard). The axis splits the batch, as `replicate` does, so all other weights are
replicas; with `shard` all devices of both axes slice them, and those of `shard` slice the experts of one
device of the axis (`shard.py`). A device's experts see the tokens of all devices of the axis, so their
gradients are sums over these devices. They are divided by the degree of the axis, which gives the gradients
of the mean loss. The host reads the number of tokens in each layer, because a collective needs the sizes of
its messages (`row_counts.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.nn import Module, Parameter

from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.experts import WIDTH_DIMS, Experts, Reorder
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.gradients import local_gradients
from hpc_parallel.strategies.mesh import name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.strategies.replace_forward import Forward, OriginalForward, replace_forward
from hpc_parallel.strategies.row_counts import RowCounts
from hpc_parallel.torch_internals import all_to_all_rows


def find_problems(model: LayeredModel, *, layout: Layout) -> Problems:
    """Returns why the experts of the whole `model` can't be split as `layout` asks."""
    experts, degree = [module for module in model.modules() if isinstance(module, Experts)], layout.expert
    counts = {module.count for module in experts}
    rules = {layout.uneven_slices(module.gate.shape[-1]) for module in experts}
    for rule in filter(None, rules):
        yield Problem("strategy.shard", layout.shard, rule, (1,))
    if not counts:
        rule = f"splits experts, and {type(model).__name__} has none (models/experts.py)"
    elif any(count % degree for count in counts):
        rule = f"does not divide the number of experts, {max(counts)}"
    else:
        return
    yield Problem("strategy.expert", degree, rule, (1,))


def apply(model: LayeredModel, *, axis: DeviceMesh) -> LayeredModel:
    """Keep only this device's experts in every `Experts` of `model`, or of a stage of it."""
    for module in list(model.modules()):
        if isinstance(module, Experts):
            for name, weight in list(module.named_parameters(recurse=False)):
                local = weight.chunk(axis.size())[axis.get_local_rank()]
                split = DTensor.from_local(
                    local, axis, [Shard(0)], run_check=False, shape=weight.shape, stride=weight.stride()
                )
                setattr(module, name, Parameter(split.detach(), requires_grad=weight.requires_grad))
            row_counts = RowCounts(axis)
            module.on_counts = row_counts.begin
            forward = partial(_with_tokens_of_all, axis, row_counts, OriginalForward(module))
            replace_forward(module, forward, technique="Split")
    return model


def split_experts(model: Module) -> dict[Parameter, int]:
    """The weights that `apply` has split, with the dim of each that fully_shard slices.

    That is the model's width: a device may have only one expert, and `tensor` splits the inner width.
    """
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return {getattr(module, name): 3 - dim for module in experts for name, dim in WIDTH_DIMS.items()}


def _with_tokens_of_all(
    axis: DeviceMesh,
    row_counts: RowCounts,
    original: OriginalForward,
    _: Forward,
    module: Module,
    rows: Tensor,
    counts: Tensor,
) -> Tensor:
    """Send `rows` [row, dim], sorted by expert, to the devices of their experts, and the outputs back."""
    group, degree = axis.get_group(), axis.size()
    received_counts, sent, received = row_counts.finish(counts)
    by_device = received_counts.view(degree, -1)
    arrived = RowExchange.apply(rows, group, sent, received)
    experts = torch.arange(by_device.shape[1], device=rows.device).repeat(degree)
    order = experts.repeat_interleave(received_counts, output_size=sum(received)).argsort(stable=True)
    inverse = order.argsort()
    by_expert = Reorder.apply(arrived, order, inverse)
    outputs = functional_call(original, _local_weights(module, degree), (by_expert, by_device.sum(0)))
    by_sender = Reorder.apply(outputs, inverse, order)
    return RowExchange.apply(by_sender, group, received, sent)  # type: ignore[no-any-return]


def _local_weights(module: Module, degree: int) -> dict[str, Tensor]:
    weights = module.named_parameters(recurse=False)
    return {
        f"module.{name}": DivideGradient.apply(weight.to_local(), degree)
        for name, weight in weights
        if isinstance(weight, DTensor)
    }


class RowExchange(torch.autograd.Function):
    """Sends `sent[i]` rows to device i of the group and receives `received[i]` rows from it, in order."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        with marked("all_to_all expert"):
            return all_to_all_rows(rows.contiguous(), sent=sent, received=received, group=group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return RowExchange.apply(gradients[0], ctx.group, ctx.received, ctx.sent), None, None, None


class DivideGradient(torch.autograd.Function):
    """Returns the weight; its gradient is divided by `divisor`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.divisor, None


class ExpertReplicas:
    """Averages the experts' gradients over `replicas`, the ranks that hold the same experts.

    The all-reduce of a gradient (in place) starts when the last microbatch has completed the gradient, while
    the backward pass goes on. All ranks start the all-reduces in the same order, from the last weight to the
    first, because the backward pass completes the gradients in this order. Gradients that no hook reports are
    averaged after the pass: a schedule that splits the backward pass computes weight gradients separately.
    """

    def __init__(
        self,
        inner: ForwardBackward,
        *,
        parts: Sequence[LayeredModel],
        replicas: DeviceMesh,
        microbatches: int,
        finds_unused: bool,
    ) -> None:
        """`microbatches`: the number of backward passes through each weight in a step.

        `finds_unused`: whether ranks may use different experts. Those that no rank uses then get no gradient.
        """
        self._inner = inner
        weights = [weight for part in parts for weight in part.parameters()]
        experts = [weight for weight in weights if isinstance(weight, DTensor) and weight.requires_grad]
        self._order: Sequence[Parameter] = experts[::-1]
        self._group, self._axis = replicas.get_group(), name_of(replicas)
        self._microbatches, self._finds_unused = microbatches, finds_unused
        self._passes: Counter[int] = Counter()  # backward passes in this step, by the place in the order
        self._used: list[bool] = []  # for each started weight, whether this rank has a gradient
        self._started: list[tuple[dist.Work, Tensor, Tensor]] = []
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self._passes.clear()
        self._used.clear()
        self._started.clear()
        with ExitStack() as hooks:
            for place, weight in enumerate(self._order):
                handle = weight.register_post_accumulate_grad_hook(partial(self._note, place))
                hooks.callback(handle.remove)
            loss = self._inner.train(inputs, targets)
        self._start_up_to(len(self._order))
        self._finish()
        if self._finds_unused and self._order:
            self._drop_unused()
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.evaluate(inputs, targets)

    def _note(self, place: int, _: Tensor) -> None:
        """Called when a backward pass has added to the gradient of the weight at `place`."""
        if place < len(self._used):
            raise RuntimeError("an expert's gradient changed after its average over replicas had started")
        self._passes[place] += 1
        end = len(self._used)
        while end < len(self._order) and self._passes[end] == self._microbatches:
            end += 1
        self._start_up_to(end)

    @torch.no_grad()
    def _start_up_to(self, end: int) -> None:
        for weight in self._order[len(self._used) : end]:
            self._used.append(weight.grad is not None)
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            (gradient,) = local_gradients([weight])
            message = gradient.contiguous()
            with marked(f"all_reduce {self._axis}"):
                work = dist.all_reduce(message, op=dist.ReduceOp.AVG, group=self._group, async_op=True)
            assert work is not None
            self._started.append((work, message, gradient))

    @torch.no_grad()
    def _finish(self) -> None:
        for work, message, gradient in self._started:
            work.wait()
            if message is not gradient:
                gradient.copy_(message)
        self._started.clear()

    def _drop_unused(self) -> None:
        """Remove the zero gradients of the weights that no replica has used."""
        (device,) = {weight.device for weight in self._order}
        used = torch.ones(len(self._used), dtype=torch.int32, device=device)
        if not all(self._used):  # copied only if needed: the host waits for a copy to the device
            used = torch.tensor(self._used, dtype=torch.int32, device=device)
        with marked(f"all_reduce {self._axis}"):
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        if not all(self._used):
            for weight, is_used in zip(self._order, used.tolist(), strict=True):
                if not is_used:
                    weight.grad = None
