"""`summary.json`: what a run was, how far it came, how fast, and how it ended.

Torch-free: after a failure it is written by a process that must start fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from types import MappingProxyType, SimpleNamespace
from typing import Any

from hpc_parallel.config.layout import Layout, processes_per_node, servers
from hpc_parallel.launch.metrics_file import MetricsReader
from hpc_parallel.launch.run_folder import RunFolder

MEASURED = ("traffic_bytes", "busiest_rank_traffic_bytes", "ring_all_reduce")


def summarise(
    config: Mapping[str, Any],
    *,
    outcome: str,
    lines: Sequence[Mapping[str, Any]],
    lost_steps: int,
    started: str | None,
    environment: Mapping[str, str],
    measured: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """All keys of the contract, null where a figure is not measured.

    config: the content of `config.yaml`; lines: of `metrics.jsonl`; lost_steps: trained and not kept, by
    earlier attempts; environment: Slurm's variables; measured: by the ranks themselves.

    `traffic_bytes`: sent in one step by all ranks; `busiest_rank_traffic_bytes`: sent and received by the
    one that moves most (of a process that drives several devices, by the busiest device);
    `ring_all_reduce`: both, if the same gradients were averaged by one.
    """
    nodes, gpus_per_node = config["nodes"], config["gpus_per_node"]
    strategy = SimpleNamespace(**config["strategy"])
    layout = Layout.resolve(strategy, devices=nodes * gpus_per_node - servers(strategy))
    last = lines[-1] if lines else {}
    steady = lines[1:] or lines  # the first line holds the warm-up
    validation = [line["validation_loss"] for line in lines if "validation_loss" in line]
    job = environment.get("SLURM_JOB_ID")

    def typical(key: str) -> float | None:
        return median(line[key] for line in steady) if steady else None

    return {
        "outcome": outcome,
        "strategy": strategy.name,
        "layout": layout.degrees,
        "nodes": nodes,
        "gpus_per_node": gpus_per_node,
        "world_size": nodes * processes_per_node(strategy, gpus_per_node=gpus_per_node),
        "steps": last.get("step", 0),
        "samples": last.get("samples", 0),
        "final_loss": last.get("loss"),
        "validation_loss": validation[-1] if validation else None,
        "samples_per_s": typical("samples_per_s"),
        "step_time_s": typical("step_time_s"),
        "latency_s": None,
        "peak_memory_bytes": max((line["peak_memory_bytes"] for line in lines), default=None),
        "exposed_communication_share": None,
        "bubble_share": None,
        **{key: measured.get(key) for key in MEASURED},
        "predicted": None,
        "restarts": int(environment.get("SLURM_RESTART_COUNT", 0)),
        "lost_steps": lost_steps,
        "started": started,
        "ended": datetime.now(UTC).isoformat(),
        "job_ids": [job] if job else [],
    }


def steps_lost(folder: RunFolder) -> int:
    """Logged steps of earlier attempts, which began anew: nothing is resumed yet."""
    attempts = [MetricsReader(file).read() for file in folder.earlier_metrics()]
    return sum(lines[-1]["step"] for lines in attempts if lines)
