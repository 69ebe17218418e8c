"""Format the results of tasks that do not train: batch sizes, collectives, or generated texts."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_parallel.problems import printable
from hpc_parallel.record.collectives_file import CollectiveRow, Collectives, rows_of, short_table
from hpc_parallel.record.endings import INITIAL, Latency, Summary
from hpc_parallel.record.metrics_file import aligned, milliseconds, per_second, read_metrics
from hpc_parallel.record.recorded_preflight import MeasuredMachine, machine_lines
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import list_folder
from hpc_parallel.record.task_files import CalibrationFile, Continued
from hpc_parallel.record.values import integer, table

OPENERS = {
    ".json.gz": "open it at ui.perfetto.dev",
    ".txt": "summary",
    ".pickle": "open it at pytorch.org/memory_viz",
    ".nsys-rep": "open it in Nsight Systems",
    ".ncu-rep": "open it in Nsight Compute",
}


def results(folder: RunFolder, summary: Summary) -> list[str]:
    """The results as lines for people. Raises DamagedError."""
    lines: list[str] = []
    if summary.batch_sizes:
        lines = show_table(summary.batch_sizes)
    elif (measured := Collectives.read(folder)) is not None:
        return collectives(measured, folder)
    elif (calibrated := CalibrationFile.read(folder)) is not None:
        return list(map(printable, calibrated.lines))
    elif (checked := MeasuredMachine.read(folder)) is not None:
        return machine_lines(checked)
    # `task=collectives` may have been killed before it wrote its tables.
    elif not (summary.steps or summary.completed) and (rows := rows_of(read_metrics(folder.metrics))):
        return [*short_table(rows), f"all sizes: {folder.metrics}"]
    elif generated := Continued.read_first(folder):
        lines = texts(generated, show=integer(table(folder.read_config().get("task")).get("show")) or 0)
    if lines and (weights := summary.weights):
        initial = "the weights are the initial ones: nothing was trained or restored"
        lines.append(initial if weights == INITIAL else f"the weights are those of {weights}")
    return [*lines, *summary.notes, *profiles(folder)]


def profiles(folder: RunFolder) -> list[str]:
    """Where the profiles of the recorded ranks are, and what opens them."""
    names = sorted(entry.name for entry in list_folder(folder.profile))
    return [
        f"profile: {folder.profile / name} ({opener})"
        for name in names
        for ending, opener in OPENERS.items()
        if name.endswith(ending) and not name.startswith(".")
    ]


def collectives(measured: Collectives, folder: RunFolder) -> list[str]:
    """The all-reduce of 2^20 numbers, a short table, and the path of the full table."""
    lines = [first_line(measured.sum)] if measured.sum is not None else []
    lines += short_table(measured.rows)
    lines += [f"WARNING: {printable(line)}" for line in measured.warnings if line]
    if measured.left_out:
        lines.append(printable(measured.left_out))
    return [*lines, f"all sizes: {folder.collectives_table}"]


def first_line(row: CollectiveRow) -> str:
    """What the all-reduce of 2^20 numbers showed."""
    time_ms = row.time_s * 1e3
    return f"2^20 float32 summed over {row.ranks} ranks in {time_ms:.3f} ms; every rank has the right sum"


def show_table(rows: Sequence[Latency]) -> list[str]:
    """Format latency and throughput per batch size: larger batches wait longer and use the device better."""
    cells = [["batch size", "latency", "p99", "samples/s"]]
    with_tokens = all(row.tokens_per_s is not None for row in rows)
    cells[0] += ["tokens/s"] * with_tokens
    for row in rows:
        rates = [row.samples_per_s, *([row.tokens_per_s] if with_tokens else [])]
        times = map(milliseconds, (row.latency_s, row.latency_p99_s))
        cells.append([str(row.batch_size), *times, *(per_second(rate) for rate in rates if rate is not None)])
    return aligned(cells)


def texts(generated: Sequence[Continued], *, show: int) -> list[str]:
    """The first `show` prompts with their continuations, quoted so that no byte reaches the terminal raw."""
    lines = [f"{line.prompt!r} -> {line.text!r}" for line in generated[: max(0, show)]]
    hidden = len(generated) - len(lines)
    return lines + [f"and {hidden} more in generated.jsonl"] * (hidden > 0)
