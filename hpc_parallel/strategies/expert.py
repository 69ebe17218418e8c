"""Expert parallelism: every device holds some of the experts, and tokens travel to them and back.

Lepikhin et al. 2020 (GShard). The axis splits the batch, as `replicate` does, so all other weights are
replicas; with `shard` all devices of both axes slice them, and those of `shard` slice the experts of one
device of the axis (`shard.py`). A device's experts see the tokens of all devices of the axis, so their
gradients are sums over these devices. They are divided by the degree of the axis, which gives the gradients
of the mean loss.

A collective needs the sizes of its messages on the host, so the host must read numbers from the device. The
exchange of the numbers and their copy to the host begin before the rows are sorted. The host waits after it
has queued the sorting. The device then has work while the host wakes up and queues the next operations.
Megatron delays the wait too (`cuda_dtoh_stream` of its token dispatcher); torchtitan waits immediately.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call
from torch.nn import Module, Parameter

from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.experts import WIDTH_DIMS, Experts, LoadBalance, Reorder
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.strategies.forward_backward import ForwardBackward
from hpc_parallel.strategies.gradients import local_gradients, used_anywhere
from hpc_parallel.strategies.mesh import all_reduce, name_of
from hpc_parallel.strategies.ranges import marked
from hpc_parallel.strategies.replace_forward import Forward, OriginalForward, replace_forward
from hpc_parallel.torch_internals import all_to_all_rows, group_of


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
            module.on_counts = partial(begin, axis)
            forward = partial(_with_tokens_of_all, axis, OriginalForward(module))
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
    original: OriginalForward,
    _: Forward,
    module: Module,
    rows: Tensor,
    counts: Tensor | Announced,
) -> Tensor:
    """Send `rows` [row, dim], sorted by expert, to the devices of their experts, and the outputs back."""
    name, degree = axis.get_group().group_name, axis.size()
    received, copy = counts if isinstance(counts, Announced) else begin(axis, counts)
    sizes, by_device = wait_for_copy(copy), received.view(degree, -1)
    arrived = exchange_rows(rows, sizes, name, False, None)
    experts = torch.arange(by_device.shape[1], device=rows.device).repeat(degree)
    order = experts.repeat_interleave(received, output_size=len(arrived)).argsort(stable=True)
    inverse = order.argsort()
    by_expert = Reorder.apply(arrived, order, inverse)
    outputs = functional_call(original, _local_weights(module, degree), (by_expert, by_device.sum(0)))
    by_sender = Reorder.apply(outputs, inverse, order)
    return exchange_rows(by_sender, sizes, name, True, len(rows))  # type: ignore[no-any-return]


def _local_weights(module: Module, degree: int) -> dict[str, Tensor]:
    weights = module.named_parameters(recurse=False)
    return {
        f"module.{name}": DivideGradient.apply(weight.to_local(), degree)
        for name, weight in weights
        if isinstance(weight, DTensor)
    }


class Announced(NamedTuple):
    """How many rows the devices send to each other.

    received: rows for each expert of this device from each device, [device * expert]. sizes: rows to and from
    each device, [2, device], on the host; complete when `wait_for_copy` returns.
    """

    received: Tensor
    sizes: Tensor


def begin(axis: DeviceMesh, counts: Tensor) -> Announced:
    """Start to exchange `counts` [expert], int64: the rows of this device for every expert."""
    with marked("all_to_all expert"):
        return Announced(*exchange_counts(counts.contiguous(), axis.get_group().group_name))


# Operators, so that selective checkpointing keeps their results and a recomputation does not wait again.
_events: dict[int, torch.cuda.Event] = {}  # events of copies that may be under way, by address on the host


@torch.library.custom_op("hpc_parallel::exchange_counts", mutates_args=())
def exchange_counts(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    """Returns the received counts [device * expert], and the rows to and from each device [2, device].

    The second tensor is on the host. It is complete when `wait_for_copy` returns.
    """
    group = group_of(group_name)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    sizes = torch.stack([table.view(group.size(), -1).sum(1) for table in (counts, received)])
    if sizes.device.type == "cpu":
        return received, sizes
    copy = sizes.to("cpu", non_blocking=True)  # into pinned memory
    event = torch.cuda.Event()
    event.record()
    _events[copy.data_ptr()] = event
    return received, copy


@exchange_counts.register_fake
def _(counts: Tensor, group_name: str) -> tuple[Tensor, Tensor]:
    sizes = counts.new_empty((2, group_of(group_name).size()), device="cpu")
    return torch.empty_like(counts), sizes


@torch.library.custom_op("hpc_parallel::wait_for_copy", mutates_args=())
def wait_for_copy(copy: Tensor) -> Tensor:
    """Returns the numbers of `copy`, which `exchange_counts` returned, when they are complete."""
    event = _events.pop(copy.data_ptr(), None)
    if event is not None:
        event.synchronize()
    return copy.clone()


wait_for_copy.register_fake(torch.empty_like)


def send_rows(rows: Tensor, sizes: Tensor, group_name: str, back: bool, total: int | None) -> Tensor:
    """Send `rows` [row, dim] to the devices of a group; returns those that arrive, by device.

    sizes: rows to and from each device, [2, device], on the host. back: return what came. total: the number
    of rows that arrive, if it is known before the exchange; compiled code asks.
    """
    sent, received = reversed(sizes.tolist()) if back else sizes.tolist()
    with marked("all_to_all expert"):
        return all_to_all_rows(rows.contiguous(), sent=sent, received=received, group=group_of(group_name))


# An operator, so that compiled code needs no size of a message.
exchange_rows = torch.library.custom_op("hpc_parallel::exchange_rows", send_rows, mutates_args=())
OPERATORS = {torch.ops.hpc_parallel.exchange_rows.default: send_rows}


@exchange_rows.register_fake
def _(rows: Tensor, sizes: Tensor, group_name: str, back: bool, total: int | None) -> Tensor:
    arriving = torch.library.get_ctx().new_dynamic_size() if total is None else total
    return rows.new_empty(arriving, rows.shape[1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sizes, ctx.group_name, ctx.back, _ = inputs
    ctx.save_for_backward(sizes)
    ctx.total = rows.shape[0]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    (sizes,) = ctx.saved_tensors
    return exchange_rows(gradient, sizes, ctx.group_name, not ctx.back, ctx.total), None, None, None, None


exchange_rows.register_autograd(_gradients, setup_context=_keep)


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
        self._replicas = replicas
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
            used = used_anywhere(self._used, axis=self._replicas)
            for weight, is_used in zip(self._order, used, strict=True):
                if not is_used:
                    weight.grad = None
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
            with marked(f"all_reduce {name_of(self._replicas)}"):
                work = dist.all_reduce(
                    message, op=dist.ReduceOp.AVG, group=self._replicas.get_group(), async_op=True
                )
            assert work is not None
            self._started.append((work, message, gradient))

    @torch.no_grad()
    def _finish(self) -> None:
        for work, message, gradient in self._started:
            work.wait()
            if message is not gradient:
                gradient.copy_(message)
        self._started.clear()


def balances_of(parts: Sequence[LayeredModel]) -> list[LoadBalance]:
    return [module for part in parts for module in part.modules() if isinstance(module, LoadBalance)]


class BalanceExperts:
    """The `inner` schedule; then the `balances` of this device's blocks move (Wang et al. 2024).

    Each expert's bias moves against its load once in an optimizer step. The load is that of the global batch,
    so the biases are the same on every device and in every layout. They are buffers of the model: checkpoints
    hold them, and a step that is skipped restores them.

    `axis`: the devices that have other samples, or other positions, of the batch; None: there are none.
    """

    def __init__(
        self, inner: ForwardBackward, *, balances: Sequence[LoadBalance], axis: DeviceMesh | None
    ) -> None:
        self._inner, self._balances, self._axis = inner, balances, axis
        self.copies = inner.copies

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        for balance in self._balances:
            balance.expert_load.zero_()
        loss = self._inner.train(inputs, targets)
        loads = torch.cat([balance.expert_load for balance in self._balances])  # one message for all blocks
        if self._axis is not None:
            all_reduce(loads, axis=self._axis)
        sizes = [len(balance.expert_load) for balance in self._balances]
        for balance, load in zip(self._balances, loads.split(sizes), strict=True):
            balance.move(load)
        return loss

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._inner.evaluate(inputs, targets)
