"""The same run on fewer nodes, for a job that has lost some of its hosts (`launcher.min_nodes`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.counts import is_reference_decoder
from hpc_parallel.problems import ConfigError, Problem


def smaller_runs(
    composed: DictConfig,
    config: RunConfig,
    *,
    preset: Mapping[str, Any],
    check: Callable[[RunConfig], Plan],
) -> dict[int, dict[str, Any]]:
    """The values of `config.yaml` for each smaller number of nodes on which the same training can go on.

    Degrees of -1 are resolved again, and the global batch stays, so that the losses stay those of one device.

    composed: what `config` was resolved from, with `preset`. check: raises ConfigError for a wrong run.

    Raises ConfigError if the layout does not allow `launcher.min_nodes`.
    """
    least = config.launcher.min_nodes
    assert least is not None
    fixed = {
        "gpus_per_node": config.gpus_per_node,
        "training.global_batch_size": config.training.global_batch_size,
        "launcher.kind": config.launcher.kind,
    }
    runs, refusals = {}, {}
    for nodes in range(least, config.nodes):
        try:
            small, values, _ = resolve(composed, preset={**preset, **fixed, "nodes": nodes})
            _require_same_statistics(config, check(small), nodes=nodes)
            runs[nodes] = values
        except ConfigError as error:
            refusals[nodes] = str(error.problems[0])
    if least in refusals:
        rule = f"is not possible with this layout. On {least} node{'s' * (least > 1)}: {refusals[least]}"
        legal = min(runs, default=None)
        raise ConfigError([Problem("launcher.min_nodes", least, rule.rstrip("."), (legal,))])
    return runs


def _require_same_statistics(config: RunConfig, plan: Plan, *, nodes: int) -> None:
    """BatchNorm takes its statistics over a microbatch; only our decoders are known to have none."""
    samples, others = Plan.of(config).batch.samples_per_microbatch, plan.batch.samples_per_microbatch
    if samples != others and not is_reference_decoder(config):
        rule = (
            f"makes microbatches of {others} samples and not of {samples}, over which BatchNorm would differ"
        )
        raise ConfigError([Problem("nodes", nodes, rule)])
