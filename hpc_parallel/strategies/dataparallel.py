"""torch's nn.DataParallel: one process, a thread and a replica a device, everything through the first device.

Each microbatch is scattered from the first device and its outputs are gathered there for the loss; weights
are copied out in every forward pass and gradients come back in every backward pass. Where there are no GPUs
the replicas run on threads that share one model, so the weights are tied by being the same ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.strategies.batch_norm import track
from hpc_parallel.strategies.device_traffic import DeviceTraffic, move
from hpc_parallel.strategies.replace_forward import Forward, replace_forward
from hpc_parallel.torch_internals import BatchNorm, require_dims

Runner = Callable[..., Tensor]


def apply(model: LayeredModel, *, degree: int, device: torch.device) -> Threads | Gpus:
    """Run each batch of `model` in `degree` parts at once, and give their outputs as one."""
    here = Here()
    for module in model.modules():
        if isinstance(module, BatchNorm):
            replace_forward(module, partial(normalise, here), technique="Global")
    kind = Gpus if device.type == "cuda" else Threads
    return kind(model, degree=degree, here=here)


class Here(threading.local):
    """What the replica on this thread knows of the others; nothing where it is the only one."""

    meeting: Meeting | None = None
    place: int = 0


class Meeting:
    """Where the replicas of one forward pass add up what each has found."""

    def __init__(self, *, here: Here, devices: Sequence[DeviceTraffic], replicas: int) -> None:
        self._here = here
        self._devices = devices[:replicas]
        self._found: list[Tensor] = [torch.empty(0)] * replicas
        self._all_here = threading.Barrier(replicas, action=self._add)
        self._total = torch.empty(0)
        self.failure: BaseException | None = None  # of the replica that failed first

    def attended(self, replica: Runner, place: int) -> Runner:
        """`replica`, knowing of this meeting; where it fails the others don't wait for it."""

        def run(*inputs: Any, **named: Any) -> Tensor:
            self._here.meeting, self._here.place = self, place
            try:
                return replica(*inputs, **named)
            except BaseException as failure:
                self.failure = self.failure or failure
                self._all_here.abort()
                raise
            finally:
                self._here.meeting = None

        return run

    def total(self, value: Tensor) -> Tensor:
        """The sum of all replicas' values, in the order of their places; differentiable.

        One wait is enough: the next sum is made when all replicas have come again, hence have read this.
        """
        self._found[self._here.place] = value
        try:
            self._all_here.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError(f"another replica of this process failed: {self.failure!r}") from None
        return self._total.to(value.device)

    def _add(self) -> None:
        first, *others = self._found
        for value, device in zip(others, self._devices[1:], strict=True):
            first = first + value.to(first.device)
            for source, target in ((device, self._devices[0]), (self._devices[0], device)):
                move(2 * value.nbytes, source=source, target=target)  # and as much for its gradient
        self._total = first


def normalise(here: Here, alone: Forward, norm: BatchNorm, x: Tensor) -> Tensor:
    """BatchNorm of `x` [batch, channel, ...] by the moments of all replicas' parts of the microbatch.

    Plain operations on sums that the replicas have in common: the derivative crosses between them where
    the sums did. The first replica's running statistics are the model's own (nn.DataParallel).
    """
    require_dims(norm, x)
    if here.meeting is None or (not norm.training and norm.running_mean is not None):
        return alone(norm, x)
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    places = wide.new_tensor([x.numel() // x.shape[1]], dtype=torch.float64)
    totals = here.meeting.total(torch.cat([wide.sum(dims).double(), places]))
    mean, count = (totals[:-1] / totals[-1]).to(wide.dtype), totals[-1]
    centred = wide - mean.view(shape)
    variance = here.meeting.total(centred.square().sum(dims).double()) / count
    out = centred * torch.rsqrt(variance + norm.eps).to(wide.dtype).view(shape)
    if norm.weight is not None:
        out = out * norm.weight.view(shape) + norm.bias.view(shape)
    if here.place == 0:
        track(norm, mean=mean, variance=variance, count=count)
    return out.to(x.dtype)


class Funnel:
    """Counts what passes through the first device in training: the others send to it and receive from it."""

    def __init__(self, *, degree: int) -> None:
        self.devices = [DeviceTraffic() for _ in range(degree)]

    def scattered(self, count: int, *, to: int) -> None:
        move(count, source=self.devices[0], target=self.devices[to])

    def gathered(self, count: int, *, of: int) -> None:
        move(count, source=self.devices[of], target=self.devices[0])

    def count(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, copied: Sequence[Tensor]) -> None:
        """One forward and backward pass; `copied`: what every device gets a copy of."""
        if not torch.is_grad_enabled():
            return
        for place in range(1, len(inputs)):
            self.scattered(inputs[place].nbytes + outputs[place].nbytes, to=place)  # and outputs' gradients
            self.gathered(outputs[place].nbytes, of=place)
            self.scattered(sum(tensor.nbytes for tensor in copied), to=place)
            self.gathered(sum(tensor.nbytes for tensor in copied if tensor.requires_grad), of=place)


class Threads(Module):
    """nn.DataParallel on CPUs: threads of one process are the devices, and nobody copies a weight."""

    def __init__(self, model: LayeredModel, *, degree: int, here: Here) -> None:
        super().__init__()
        self.module = model
        self.funnel = Funnel(degree=degree)
        self._degree = degree
        self._here = here
        self._cores = max(1, torch.get_num_threads() // degree)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.chunk(self._degree)
        if len(pieces) == 1:
            alone: Tensor = self.module(x)
            return alone
        meeting = Meeting(here=self._here, devices=self.funnel.devices, replicas=len(pieces))
        outputs: dict[int, Tensor] = {}
        learns = torch.is_grad_enabled()

        def run(place: int) -> None:
            torch.set_num_threads(self._cores)  # of this thread; torch's modes are a thread's own too
            with suppress(BaseException), torch.set_grad_enabled(learns):  # the meeting knows the first
                outputs[place] = meeting.attended(self.module, place)(pieces[place])

        threads = [threading.Thread(target=run, args=(place,)) for place in range(len(pieces))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if meeting.failure is not None:
            raise meeting.failure
        gathered = [outputs[place] for place in range(len(pieces))]
        self.funnel.count(pieces, gathered, copied=())
        return torch.cat(gathered)


class Gpus(torch.nn.DataParallel[LayeredModel]):
    """nn.DataParallel on a node's GPUs."""

    def __init__(self, model: LayeredModel, *, degree: int, here: Here) -> None:
        super().__init__(model, device_ids=list(range(degree)))
        self.funnel = Funnel(degree=degree)
        self._here = here

    def parallel_apply(self, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        meeting = Meeting(here=self._here, devices=self.funnel.devices, replicas=len(replicas))
        attended = [meeting.attended(replica, place) for place, replica in enumerate(replicas)]
        outputs: list[Tensor] = super().parallel_apply(attended, inputs, kwargs)  # type: ignore[arg-type]
        copied = [*chain(self.module.parameters(), self.module.buffers())]
        self.funnel.count([given[0] for given in inputs], outputs, copied=copied)
        return outputs
