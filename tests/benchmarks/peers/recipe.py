"""What both sides train: the shape, the first weights, the batches and the learning rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.build import build
from hpc_parallel.config.optimizer_rules import learning_rate
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.dataset import as_data
from hpc_parallel.data.sampler import Batches
from hpc_parallel.layout.batch_plan import batch_of
from hpc_parallel.layout.layout import layout_of, share_of
from hpc_parallel.models.layered import materialise
from hpc_parallel.strategies.whole_model import build_model
from tests.benchmarks.peers.plain_transformer import PlainTransformer


@dataclass(frozen=True)
class Recipe:
    """The same for ours and for a peer. A peer gets its batches as tensors that are read already."""

    shape: Mapping[str, Any]
    weights: Mapping[str, Tensor]  # by full name
    batches: Sequence[tuple[Tensor, Tensor]]  # this rank's, one for each step
    rates: Sequence[float]
    microbatches: int  # of a pipeline
    adamw: Mapping[str, Any]  # betas and eps
    decay: float  # of matrices
    clip_norm: float

    def model(self, *, first: int = 0, last: int | None = None) -> PlainTransformer:
        """The blocks `first` to `last` with their first weights."""
        seq = self.batches[0][0].shape[1]
        model = PlainTransformer(dict(self.shape), seq=seq, first=first, last=last)
        model.load_state_dict({name: self.weights[name] for name in model.state_dict()})
        return model

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """AdamW by its fused kernel, the fastest on CPUs too."""
        matrices = [weight for weight in model.parameters() if weight.ndim > 1]
        vectors = [weight for weight in model.parameters() if weight.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.decay}]
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=self.rates[0], fused=True, **self.adamw)


def recipe_of(config: RunConfig, *, steps: int) -> Recipe:
    """What `config` trains in its first `steps` steps, for this rank of the default process group."""
    layout = layout_of(config.strategy, devices=config.devices)
    plan = batch_of(config, layout)
    replica, replicas = share_of(dist.get_rank(), layout=layout, strategy=config.strategy)
    batches = Batches(
        samples=as_data(build(config.data, key="data")).train, seed=config.seed,
        microbatches=plan.microbatches,
        global_batch_size=plan.data * plan.samples_per_replica, replica=replica, replicas=replicas,
    )  # fmt: skip
    model = build_model(config)
    materialise(model, seed=config.seed, device=torch.device("cpu"), dtype=torch.float32)
    options = config.optimizer
    rates = [learning_rate(step, steps=config.training.steps, config=options) for step in range(1, steps + 1)]
    return Recipe(
        shape={key: value for key, value in config.model.items() if not key.startswith("_")},
        weights=model.state_dict(),
        batches=[batches.at(step) for step in range(steps)],
        rates=rates,
        microbatches=plan.microbatches,
        adamw={"betas": tuple(options.betas), "eps": options.eps},  # type: ignore[attr-defined]
        decay=options.weight_decay,
        clip_norm=config.training.clip_norm or float("inf"),
    )
