"""`python -m hpc_parallel show RUN`: show one run: settings that are not the defaults, layout, figures.

RUN is a path, a run id, a job id or a unique part of a name. Exit codes: 0 done, 2 the run is unknown.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_parallel.commands import grid
from hpc_parallel.commands.status import RunRow, rows_of
from hpc_parallel.config.script import TASK as SCRIPT
from hpc_parallel.exit_codes import DONE
from hpc_parallel.problems import printable, spell
from hpc_parallel.record.checkpoint_index import complete, skipped
from hpc_parallel.record.credentials import may_be_secret, without_secret_values
from hpc_parallel.record.find import find_run
from hpc_parallel.record.metrics_file import duration, figure, milliseconds, per_second, size
from hpc_parallel.record.rank_output import warnings_of
from hpc_parallel.record.recorded import RecordedRun
from hpc_parallel.record.results import results
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.time_use import time_of
from hpc_parallel.record.values import number
from hpc_parallel.report.run_lines import (
    accused_lines,
    device_lines,
    difference_lines,
    energy_lines,
    finding_lines,
    time_lines,
    topology_lines,
    transport_lines,
)
from hpc_parallel.shell import command_parser
from hpc_parallel.terminal import cell, print_json, stdout_console

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hpc_parallel.commands.settings import Change

Figure = tuple[str, str, Callable[[Any], str]]


def _share(value: float) -> str:
    return f"{value:.1%}"


def _plain(value: Any) -> str:
    return figure(value) if isinstance(value, float) else str(value)


FIGURES: tuple[Figure, ...] = (  # of summary.json, or of the newest line of metrics.jsonl
    ("samples", "samples", _plain),
    ("loss", "loss", _plain),
    ("validation loss", "validation_loss", _plain),
    ("throughput", "samples_per_s", lambda value: f"{per_second(value)} samples/s"),
    ("tokens", "tokens_per_s", lambda value: f"{per_second(value)}/s"),
    ("step time", "step_time_s", milliseconds),
    ("latency", "latency_s", milliseconds),
    ("latency, p99", "latency_p99_s", milliseconds),
    ("peak memory of a device", "peak_memory_bytes", size),
    ("pipeline idle (bubble)", "bubble_share", _share),
    ("exposed communication", "exposed_communication_share", _share),
    ("traffic of a step", "traffic_bytes", size),
    ("model FLOPs utilisation", "mfu", _share),
    ("skipped steps", "skipped_steps", _plain),
    ("restarts", "restarts", _plain),
    ("lost steps", "lost_steps", _plain),
    ("useful time (ETTR)", "useful_share", _share),
)
OF_ANY_LAYOUT = ("samples", "loss", "validation_loss", "skipped_steps")  # of a line of metrics


def parser() -> argparse.ArgumentParser:
    parser = command_parser("show", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    options = parser().parse_args(list(arguments))
    if awaited is not None and Path(options.run) in awaited:
        return DONE
    run = find_run(options.run)
    (row,) = rows_of([run])
    changed = differences(run)
    if options.json:
        print_json(_object(run, row, changed))
    else:
        screen = stdout_console()
        for part in _parts(run, row, changed):
            text = printable(part, keep="\n\t") if isinstance(part, str) else part
            screen.print(text, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return DONE


def differences(run: RecordedRun) -> Mapping[str, Change]:
    """The settings that are not the defaults; empty if the configuration can't be read."""
    if run.config is None:
        return {}
    from hpc_parallel.commands.settings import changed  # composes the defaults: 0.3 s

    return changed(run.config)


def figures(run: RecordedRun) -> dict[str, Any]:
    """The figures of the summary; while the run is going on, those of its newest line of metrics."""
    last, summary = run.last_metrics or {}, run.summary or {}
    if run.line_of_layout is None:
        last = {key: last[key] for key in OF_ANY_LAYOUT if key in last}
    values = {**last, **{key: value for key, value in summary.items() if value is not None}}
    if summary.get("final_loss") is not None:
        values["loss"] = summary["final_loss"]
    values |= {"restarts": run.attempts.restarts, "lost_steps": run.attempts.lost_steps}
    return {key: values[key] for _, key, _ in FIGURES if number(values.get(key)) is not None}


def predicted(run: RecordedRun) -> dict[str, float]:
    planned = {**run.ran_on.predicted, **run.totals.predicted}
    return {key: planned[key] for _, key, _ in FIGURES if planned.get(key, -1) >= 0}


def _object(run: RecordedRun, row: RunRow, changed: Mapping[str, Change]) -> dict[str, Any]:
    degrees = grid.layout(run)
    return {
        **asdict(row), "name": run.name, "run_id": run.run_id, "job_ids": run.job_ids,
        "changed": {key: asdict(change) for key, change in changed.items()},
        "layout": degrees and degrees.degrees, "hosts": [asdict(host) for host in grid.hosts(run)],
        **grid.as_values(run), "figures": figures(run), "predicted": predicted(run),
        "checkpoints": _checkpoints(run), "summary": run.summary, "failure": run.failure,
        "warnings": warnings_of(run.folder), "damaged": run.damaged,
        "skipped_checkpoints": skipped(run.folder.checkpoints),
    }  # fmt: skip


def _parts(run: RecordedRun, row: RunRow, changed: Mapping[str, Change]) -> Iterable[RenderableType]:
    yield _table(_head(run, row))
    if changed:
        yield "\nnot the defaults"
        yield _table([  # the form for faults asks for what this command prints
            (f"{key} = {'...' if may_be_secret(key, change.value) else spell(change.value)}",
             f"default {spell(change.default)}" if change.has_default else "")
            for key, change in changed.items()
        ])  # fmt: skip
    if hosts := grid.hosts(run):
        yield f"\n{_devices(run)}" + ("" if run.task == SCRIPT else f" = {grid.layout(run)}")
        yield grid.draw(hosts)
        yield from _roles(run)
    if network := transport_lines(run.ran_on.transport):
        yield "\nnetwork"
        yield _table(network)
    if accused := finding_lines(run.folder):
        yield "\nhosts that the checks at the start accused"
        yield _table(accused)
    for title, texts in (
        ("versions that differ between the hosts", difference_lines(run.folder)),
        ("warnings", warnings_of(run.folder)),
        ("slow ranks", accused_lines(run.folder)),
    ):
        yield from [f"\n{title}", *texts] if texts else []
    if devices := device_lines(run.folder):
        yield "\ndevices"
        yield _table(devices)
    if connections := topology_lines(run.ran_on.topology):
        yield from ["\nconnections", *connections]
    values = figures(run)
    # Figures that are zero (a bubble without a pipeline, restarts) are left out.
    planned = predicted(run)
    lines = [
        (title, to_text(values[key]), f"predicted {to_text(planned[key])}" if key in planned else "")
        for title, key, to_text in FIGURES if values.get(key)
    ]  # fmt: skip
    jobs = () if run.totals.outcome is None or run.shares_jobs else run.attempts.job_ids
    lines += [(title, text, "") for title, text in energy_lines(run.totals.energy, jobs)]
    if lines:
        yield "\nfigures"
        yield _table(lines)
    if use := time_lines(run.totals.time_use_s):
        yield "\nwhere the time went"
        yield _table(use)
    with suppress(FileNotFoundError, DamagedError):  # the task's own results, if its files are readable
        task_lines = results(run.folder, run.totals)
        yield from ["", *map(printable, task_lines)] if task_lines else []
    if line := row.failure or (run.stopped.line if run.stopped is not None and row.ended else None):
        yield f"\n{printable(line)}"


def _roles(run: RecordedRun) -> Iterable[RenderableType]:
    setup, reason = grid.setup_of(run)
    if reason is not None:
        yield f"\nwho sends what to whom: not known, because {reason}"
    if setup is None:
        return
    yield "\nwho holds what: parts of weights, gradients and optimizer state, and of the samples of a step"
    yield _table(grid.holding_rows(setup))
    if exchanges := grid.exchange_rows(setup):
        yield "\nwho sends what to whom in a step"
        yield _table(exchanges)


def _head(run: RecordedRun, row: RunRow) -> list[tuple[str, str]]:
    state = row.state + (f" ({row.reason})" if row.reason else "")
    is_script = run.task == SCRIPT
    step = f"{row.step or 0} of {'?' if row.steps is None else row.steps}"
    time_left = "" if row.time_left_s is None else f", about {duration(row.time_left_s)} left"
    lines = [("run", row.run), ("state", state), *([] if is_script else [("step", step + time_left)])]
    lines.append(("folder", row.path))
    lines += [("jobs", ", ".join(run.job_ids))] * bool(run.job_ids)
    lines += _times(run)
    if (overrides := run.ran_on.overrides) is not None:
        flags = ["--config-dir", config_dir] if (config_dir := run.ran_on.config_dir) else []
        lines.append(("command", shlex.join(["run", *flags, *without_secret_values(map(str, overrides))])))
    shares = run.totals.shares
    if shares is not None and None not in shares:
        lines.append(("shares", spell(list(shares))))
    if steps := _checkpoints(run):
        lines.append(("checkpoints", ", ".join(map(str, steps))))
    if not is_script and (names := skipped(run.folder.checkpoints)):
        lines.append(("not checkpoints", f"{', '.join(names)} (links and files are skipped)"))
    lines += [("can't be read", f"{name} ({why})") for name, why in run.damaged.items()]
    return lines


def _times(run: RecordedRun) -> list[tuple[str, str]]:
    began, ended = time_of(run.attempts.started), time_of(run.totals.ended)
    if began is None:
        return []
    took = ""
    if ended is not None and ended >= began:  # else a clock was set back
        took = f", took {duration((ended - began).total_seconds())}"
    return [("started", f"{began:%Y-%m-%d %H:%M:%S} UTC{took}")]


def _checkpoints(run: RecordedRun) -> list[int]:
    return sorted(checkpoint.step for checkpoint in complete(run.folder.checkpoints))


def _devices(run: RecordedRun) -> str:
    nodes, devices = run.nodes or 0, run.gpus_per_node or 0
    return f"{nodes} node{'s' * (nodes > 1)} x {devices} device{'s' * (devices > 1)}"


def _table(lines: Iterable[tuple[str, ...]]) -> RenderableType:
    """A table of the columns that are not empty; the last column folds."""
    from rich.table import Table

    columns = [column for column in zip(*lines, strict=True) if any(column)]
    table = Table.grid(padding=(0, 2))
    for _ in columns[:-1]:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for values in zip(*columns, strict=True):
        table.add_row(*(cell(printable(value)) for value in values))
    return table
