"""Check a mixture of experts, and that the expert axis can split it."""

from __future__ import annotations

from hpc_parallel.config.checks.suggestions import along_with_less_of, degrees_near
from hpc_parallel.config.counts import KEYS, count
from hpc_parallel.config.layout import Layout
from hpc_parallel.config.model_data_schema import MoeTransformerConfig
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems

UNSPLIT = {  # axes that can't split the reference mixture
    "context": "splits sequences, and the router balances whole sequences",
    "tensor": "splits layers, and experts have no role for it",
}


def find_problems(config: RunConfig, layout: Layout) -> Problems:
    model = config.model if isinstance(config.model, dict) else {}
    if model.get("_target_") == MoeTransformerConfig._target_:
        yield from _mixture(config, layout, model)
    if layout.expert == 1:
        return
    experts, along = count(config, "experts")[1], along_with_less_of("expert", config.strategy)
    if experts is None and model.get("_target_") in KEYS:
        rule = "splits the experts of a model, and this model has none (model=moe_tiny has)"
        yield Problem("strategy.expert", layout.expert, rule, (1,), along)
    elif experts is not None and experts % layout.expert:
        near = degrees_near("expert", config, layout, experts)
        rule = f"does not divide model.experts = {experts}: each device has the same number of experts"
        yield Problem("strategy.expert", layout.expert, rule, near, along)


def _mixture(config: RunConfig, layout: Layout, model: dict[str, object]) -> Problems:
    experts, per_token = model["experts"], model["experts_per_token"]
    if isinstance(experts, int) and isinstance(per_token, int) and not 1 <= per_token <= experts:
        rule = f"must be from 1 to model.experts = {experts}"
        yield Problem("model.experts_per_token", per_token, rule, (min(2, max(1, experts)),))
    if config.training.compile:
        rule = "can't be used: torch can't compile the products of experts"
        yield Problem("training.compile", True, rule, (False,))
    for axis, reason in UNSPLIT.items():
        if (degree := layout.degrees[axis]) > 1:
            along = along_with_less_of(axis, config.strategy)
            yield Problem(f"strategy.{axis}", degree, reason, (1,), along)
