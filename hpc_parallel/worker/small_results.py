"""What a small run computes on one device and on its layout: gradients, or logits if it generates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_parallel.config.batch_plan import BatchPlan
from hpc_parallel.config.layout import share_of
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.strategies import dropout, dropout_shapes
from hpc_parallel.strategies.assemble import Assembled, assemble
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.forward_backward import Accumulate
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.mesh import local_gradients
from hpc_parallel.worker.small_model import SmallRun

CACHED = 3  # positions whose logits are compared: two of them follow cached ones
LOGITS = "logits of the next token"


@dataclass(frozen=True)
class Results:
    """The mean loss of one step, and the gradients that this rank has, by the names of the weights.

    Of a run that generates, the loss is 0 and the logits are the only tensor.
    """

    loss: float
    tensors: Mapping[str, Tensor]

    @property
    def norm(self) -> float:
        """The 2-norm of all tensors together."""
        return math.sqrt(sum(float(tensor.square().sum()) for tensor in self.tensors.values()))


def on_one_device(run: SmallRun, model: LayeredModel) -> Results:
    """Run `model`, on meta, without any technique; every rank does it by itself."""
    materialise(model, seed=run.config.seed, device=run.device, dtype=torch.float64)
    if run.config.task.name == "generate":
        with torch.no_grad():
            return Results(0.0, {LOGITS: model.eval()(run.local_samples()[0])[:, -CACHED:]})
    model.train()
    shapes = dropout_shapes.whole_shapes(model, sample_shape=tuple(run.inputs.shape[1:]))
    dropout.apply(model, shapes=shapes, part=dropout.Part(), seed=run.config.seed, device=run.device)
    model.sample_indices.begin_batch(run.all_rows(), device=run.device)
    schedule = Accumulate(model, model=model, loss=model.loss, microbatches=run.microbatches)
    loss = schedule.train(*run.all_samples())
    gradients = {
        model.tied.get(name, name): weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return Results(float(loss), gradients)


def on_layout(run: SmallRun, model: LayeredModel, *, groups: Groups) -> Results:
    """Run `model`, on meta, with all techniques of the layout. Collective over all ranks."""
    generates = run.config.task.name == "generate"
    assembled = assemble(
        model,
        config=run.config,
        batch=BatchPlan(data=run.layout.data, microbatches=run.microbatches, microbatch_size=1),
        sample_shape=tuple(run.inputs.shape[1:]),
        groups=groups,
        device=run.device,
        trains=not generates,
    )
    for part in assembled.parts:
        part.train(not generates)
    return _decode(run, assembled) if generates else _train(run, assembled)


def _train(run: SmallRun, assembled: Assembled) -> Results:
    _, replicas = share_of(dist.get_rank(), layout=run.layout, strategy=run.config.strategy)
    assembled.parts[0].sample_indices.begin_batch(run.local_rows(), device=run.device)
    loss = assembled.forward_backward.train(*run.local_samples()).detach().double().clone()
    dist.all_reduce(loss)  # it is zero on ranks that do not compute it
    return Results(float(loss) / replicas, _full_gradients(assembled))


def _decode(run: SmallRun, assembled: Assembled) -> Results:
    """The logits of the last positions, with cached keys and values; only the rank that chooses has them."""
    tokens = run.local_samples()[0]
    length = tokens.shape[1]
    decoder = Decoder(assembled, length=length, device=run.device)
    kept: list[Tensor] = []

    def keep(logits: Tensor) -> Tensor:
        kept.append(logits)
        return logits.argmax(-1)

    start = 0
    for end in range(length - CACHED + 1, length + 1):
        decoder(tokens[:, start:end], keep)
        start = end
    return Results(0.0, {LOGITS: torch.stack(kept, dim=1)} if kept else {})


def _full_gradients(assembled: Assembled) -> dict[str, Tensor]:
    """The unsplit gradients of this rank's weights; with a parameter server, only the server has them."""
    if assembled.server is not None:
        assembled.server.collect()
        if not assembled.server.serves:
            return {}
    parameters = assembled.named_parameters()
    local_gradients(parameters.values())
    return {
        name: weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        for name, weight in parameters.items()
        if weight.grad is not None
    }
