"""`summary.json`: a run's layout, progress, speed and outcome.

After a failure, a process that must start fast writes this file, so this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from hpc_parallel.layout.layout import layout_of, processes_per_node, recorded_strategy
from hpc_parallel.record.endings import INITIAL
from hpc_parallel.record.provenance import PREDICTED
from hpc_parallel.record.time_use import useful_share
from hpc_parallel.record.values import VALIDATION, integer, table, without

MEASURED = (
    "exposed_communication_share",
    "bubble_share",
    "step_parts_s",
    "traffic_bytes",
    "busiest_rank_traffic_bytes",
    "traffic",
    "unknown_collectives",
    "ring_all_reduce",
    "comparison",
    "ended_early",
    "left_out",
    "slow_ranks",
    "shares",
    "statistics_samples",
    "in_bfloat16",
    "rank_memory_bytes",
    "rank_state_bytes",
)
# Keys of `training` that change how long a run trains or what it writes, but not the speed of a step.
SPEEDLESS = (
    "steps", "log_every", "validate_every", "validation_samples", "measure_steps", "checkpoint_every",
    "checkpoint_async", "memory_checkpoint_every", "keep_last", "keep_every", "tensorboard", "wandb",
)  # fmt: skip
# Keys of `optimizer` that change the loss, but not the speed of a step.
OPTIMIZER_SPEEDLESS = (
    "learning_rate", "weight_decay", "betas", "eps", "schedule", "warmup_steps", "final_share", "decay_share",
)  # fmt: skip
Lines = Sequence[Mapping[str, Any]]


def summarise(
    config: Mapping[str, Any],
    *,
    outcome: str,
    lines: Lines,
    history: Mapping[str, Any],
    measured: Mapping[str, Any] = MappingProxyType({}),
    environment: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The content of `summary.json`, with null for figures that were not measured.

    config: the content of `config.yaml`; lines: those of `metrics.jsonl`; history: `attempts.history`;
    measured: figures of the profiled steps (MEASURED), the weights that the job started from, and the result
    of its layout check; environment: the content of `environment.json`.

    All shares and times are means over the ranks:
    - `exposed_communication_share`: share of a step in which a device waits for others and computes
      nothing, without a pipeline's bubble.
    - `bubble_share`: share of the time from the first stage's start to the last stage's end in which a
      rank's stages have no work, including the transfers between them; 0 without a pipeline.
    - `step_parts_s`: parts of a profiled step in seconds: `compute`, `communication` (exposed), `bubble`,
      `data` (fetching the batch, before the step), `other` (the host). Profiling makes this step longer
      than `step_time_s`.
    - `traffic_bytes`: sent by all ranks in one step; `traffic`: the same by kind of collective.
    - `busiest_rank_traffic_bytes`: sent and received by the rank, or by the device of a process with
      several devices, that moves most.
    - `unknown_collectives`: collectives whose bytes are not known; traffic is then null.
    - `ended_early`: why a callback or `sweep.prune` ended the training before its last step.
    - `left_out`: what a task did not measure, because `task.seconds` were used up.
    - `slow_ranks`: ranks that were slower than their peers for a while, with the cause and the steps.
    - `shares`: the speeds by which `strategy.shares` split the batch or the pipeline.
    - `statistics_samples`: over which BatchNorm takes its statistics, those of a microbatch on all replicas.
    - `in_bfloat16`: what is kept in bfloat16 and rounded at random: weights, optimizer state, or both.
    - `rank_memory_bytes`: peak memory by rank, in the newest start.
    - `rank_state_bytes`: `parameters`, `gradients` and `optimizer` (its state) by rank: bytes of the numbers
      that each rank holds, on any device.
    - `comparison`: a line about the comparison with one device (`strategy.verify`), and of generated texts
      with whole texts.
    - `ring_all_reduce`: both figures if one ring all-reduce averaged the same gradients.
    """
    newest = of_newest_layout(lines, history)
    return {
        "outcome": outcome,
        **layout_figures(config),
        "steps": 0,
        "samples": 0,
        "skipped_steps": 0,
        "final_loss": None,
        "validation_loss": None,
        "samples_per_s": None,
        "step_time_s": None,
        "latency_s": None,
        "peak_memory_bytes": max(
            (line["peak_memory_bytes"] for line in newest if "peak_memory_bytes" in line), default=None
        ),
        **{key: measured.get(key) for key in MEASURED},
        PREDICTED: table((environment or {}).get(PREDICTED)) or None,
        "weights": measured.get("weights", config.get("weights") or INITIAL),
        **FIGURES.get(config["task"]["name"], _trained)(lines, newest),
        "time_use_s": None,
        "energy": None,
        **history,
        "useful_share": useful_share(table(history.get("time_use_s"))),
        "ended": datetime.now(UTC).isoformat(),
    }


def computed_as(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The layout and all that decides how it computes a step: only equal starts have the same speed.

    environment: the content of `environment.json`, which names the device once the ranks have met.
    """
    device = environment.get("device")
    return {
        **without(layout_figures(config), ("spares",)),
        "options": config["strategy"],
        "training": without(table(config.get("training")), SPEEDLESS),
        "optimizer": without(table(config.get("optimizer")), OPTIMIZER_SPEEDLESS),
        "cpus_per_device": table(config.get("launcher")).get("cpus_per_device"),
        **({"device": device} if device else {}),
    }


def layout_figures(config: Mapping[str, Any]) -> dict[str, Any]:
    nodes, gpus_per_node = config["nodes"], config["gpus_per_node"]
    strategy = recorded_strategy(config)
    layout = layout_of(strategy, devices=nodes * gpus_per_node)
    return {
        "strategy": strategy.name,
        "layout": layout.degrees,
        "nodes": nodes,
        "spares": config.get("launcher", {}).get("spares", 0),
        "gpus_per_node": gpus_per_node,
        "world_size": nodes * processes_per_node(strategy, gpus_per_node=gpus_per_node),
    }


def of_newest_layout(lines: Lines, history: Mapping[str, Any]) -> Lines:
    """The lines that tell of the layout in the summary: a resumed run may have had another one before.

    history: `attempts.history`, or a summary, which anybody may have written.
    """
    after = integer(history.get("layout_after_step")) or 0
    return [line for line in lines if line["step"] > after] if after else lines


def _trained(lines: Lines, newest: Lines) -> dict[str, Any]:
    last = lines[-1] if lines else {}
    return {
        "steps": last.get("step", 0),
        "samples": last.get("samples", 0),
        "final_loss": last.get("loss"),
        "skipped_steps": last.get("skipped_steps", 0),
        **_validated(lines),
        "samples_per_s": _typical(newest, "samples_per_s"),
        "step_time_s": _typical(newest, "step_time_s"),
        **({"tokens_per_s": _typical(newest, "tokens_per_s")} if "tokens_per_s" in last else {}),
    }


def _inferred(lines: Lines, newest: Lines) -> dict[str, Any]:
    """The latency of one sample per replica, and the throughput of the best batch size."""
    columns = ("batch_size", "latency_s", "latency_p99_s", "samples_per_s", "tokens_per_s", "passes")
    rows = [{key: line[key] for key in columns if key in line} for line in lines if "batch_size" in line]
    return {
        "samples": _last(lines, "samples") or 0,
        **_validated(lines),
        "samples_per_s": max((row["samples_per_s"] for row in rows), default=None),
        "latency_s": rows[0]["latency_s"] if rows else None,
        "latency_p99_s": rows[0]["latency_p99_s"] if rows else None,
        "batch_sizes": rows,
    }


def _generated(lines: Lines, newest: Lines) -> dict[str, Any]:
    """A step generates one token for every prompt; the first step also reads the prompts."""
    return {
        "samples": _last(lines, "samples") or 0,
        "step_time_s": _typical(lines, "step_time_s"),
        "tokens_per_s": _typical(lines, "tokens_per_s"),
        "prompt_time_s": lines[0]["step_time_s"] if lines else None,
    }


def _measured(lines: Lines, newest: Lines) -> dict[str, Any]:
    """The figures of the machine are in files of their own."""
    return {}


def _of_script(lines: Lines, newest: Lines) -> dict[str, Any]:
    """What `script.metrics` has read. hpc_parallel does not know the layout of a script."""
    steps, loss = _last(lines, "step") or 0, _last(lines, "loss")
    return {"layout": {}, "steps": steps, "final_loss": loss, **_validated(lines)}


# Figures of the tasks that do not train.
FIGURES: dict[str, Callable[[Lines, Lines], dict[str, Any]]] = {
    "infer": _inferred, "generate": _generated, "collectives": _measured, "preflight": _measured,
    "calibrate": _measured, "script": _of_script,
}  # fmt: skip


def _validated(lines: Lines) -> dict[str, Any]:
    """The last value of each figure of a validation: of the loss, and of the model's own metrics."""
    validation_keys = dict.fromkeys(key for line in lines for key in line if key.startswith(VALIDATION))
    return {key: _last(lines, key) for key in ("validation_loss", *validation_keys)}


def _typical(lines: Lines, key: str) -> float | None:
    """The value in the line with the median step time, of all after the first, which contains the warm-up.

    It is the slower one of two in the middle: a time and a rate of one line belong together, their means do
    not. A line with only profiled steps repeats the figures of the line before it, and is skipped.
    """
    steady = [line for line in lines[1:] if line.get("timed_steps", 1)] or lines[:1]
    by_time = sorted(steady, key=lambda line: line["step_time_s"])
    return by_time[len(by_time) // 2][key] if by_time else None


def _last(lines: Lines, key: str) -> Any:
    return next((line[key] for line in reversed(lines) if key in line), None)
