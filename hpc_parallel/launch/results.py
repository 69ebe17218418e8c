"""What a task that trains nothing was run for: a table of batch sizes, texts; shown when it has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_parallel.launch.metrics_file import milliseconds, per_second
from hpc_parallel.launch.run_folder import RunFolder

INITIAL = "initial"  # weights that no file gave


def results(folder: RunFolder, summary: Mapping[str, Any]) -> list[str]:
    """Lines for people; none of a training run."""
    lines: list[str] = []
    if rows := summary.get("batch_sizes"):
        lines = table(rows)
    elif folder.generated.exists():
        show = folder.read_config()["task"]["show"]
        lines = texts(folder.generated.read_text(encoding="utf-8").splitlines(), show=show)
    if lines and (weights := summary.get("weights")):
        initial = "the weights are the initial ones: nothing was trained or restored"
        lines.append(initial if weights == INITIAL else f"the weights are those of {weights}")
    return lines


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The trade that the batch size makes: each sample waits for its batch, and the device works better."""
    cells = [["batch size", "latency", "p99", "samples/s"]]
    cells[0] += ["tokens/s"] * ("tokens_per_s" in rows[0])
    for row in rows:
        times = [milliseconds(row[key]) for key in ("latency_s", "latency_p99_s")]
        rates = [per_second(row[key]) for key in ("samples_per_s", "tokens_per_s") if key in row]
        cells.append([str(row["batch_size"]), *times, *rates])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def texts(generated: Sequence[str], *, show: int) -> list[str]:
    """The first `show` prompts with their continuations, quoted so that no byte reaches the terminal raw."""
    found = [json.loads(line) for line in generated[:show]]
    lines = [f"{text['prompt']!r} -> {text['text']!r}" for text in found]
    left = len(generated) - len(found)
    return lines + [f"and {left} more in generated.jsonl"] * (left > 0)
