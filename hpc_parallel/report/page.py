"""One report in three forms: a page that needs nothing but itself, the same as Markdown, and CSV."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_parallel.problems import alternatives, printable
from hpc_parallel.report import latency, markdown
from hpc_parallel.report.claims import Runs, judged
from hpc_parallel.report.gather import PARTS, Gathered
from hpc_parallel.report.plots import Plot, draw
from hpc_parallel.report.spreadsheet import to_csv
from hpc_parallel.report.tables import (
    COLUMNS,
    UNMEASURED,
    Comparison,
    Series,
    compare,
    digits,
    predictions,
    records,
    scaling,
    unit_of,
)

# Control characters, those that change the direction of text, and halves of a pair, which no file can hold.
_NO_TEXT = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
DEFINITIONS = (
    "Throughput: samples a second, median after the warm-up. Latency: of one sample through (task=infer). "
    "Step time: of one optimizer step, median after the warm-up.",
    "Memory per device: the most that any rank held at once; on a CPU with the interpreter and libraries.",
    "Bubble: the share of a pipeline's schedule in which a rank's stages have no work. Exposed "
    "communication: the share of a step in which a device waits for others and computes nothing, the bubble "
    "left out. Both are means over the ranks in watched steps. '-': there is nobody to wait for.",
    "Traffic per step: bytes sent by all ranks; of dataparallel on a CPU those of activations alone, as "
    "its threads share the weights. Device-hours: from each start to its end, times the devices.",
    "'not measured': the run folder has no figure for it. Nothing is estimated.",
    "On CPUs all devices of a machine share its cores, and speeds compare only where each has its own.",
)


@dataclass(frozen=True)
class Report:
    """The three forms as text, and the plots that go with them. `latency_csv`: empty where no batch was
    timed."""

    html: str
    markdown: str
    csv: str
    latency_csv: str
    plots: Sequence[Plot]


def render(gathered: Gathered) -> Report:
    """All of a report, in memory."""
    rows = gathered.rows
    comparison, series, predicted = compare(rows), scaling(rows), predictions(rows)
    timed = latency.curves(rows)
    plots = draw(rows, series=series, predictions=predicted)
    parts = [row for row in rows if row.parts is not None]
    values: dict[str, Any] = {
        "title": f"Report on {alternatives_of(gathered.folders)}",
        "summary": _summary(gathered),
        "best_note": _best_note(comparison),
        "comparison": comparison,
        "columns": COLUMNS,
        "states": sorted({row.state for row in rows}),
        "troubles": [row for row in rows if not row.completed or row.notes],
        "left_out": gathered.left_out,
        "commands": gathered.commands,
        "timed": timed,
        "latency_unit": unit_of("seconds", (point.latency_s for curve in timed for point in curve.points)),
        "series": series,
        "parts": parts,
        "part_names": PARTS,
        "parts_unit": unit_of("seconds", (sum((row.parts or {}).values()) for row in parts)),
        "predictions": predicted,
        "claims": judged(Runs(rows, series)),
        "definitions": DEFINITIONS,
        "plots": plots,
        "zip": zip,
    }
    page = _fill("report.html.j2", values)
    plain = _fill("report.md.j2", values, finalize=markdown.text)
    return Report(page, plain, table(gathered, series), latency.table(timed), plots)


def _fill(name: str, values: dict[str, Any], **settings: Any) -> str:
    """The template with every value escaped, and without a character that is not text."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True,
        undefined=StrictUndefined, keep_trailing_newline=False, **settings,
    )  # fmt: skip
    templates.filters |= {
        "raw": lambda value: "" if value is None else repr(value),
        "digits": lambda value: UNMEASURED if value is None else digits(value, 3),
        "code": markdown.code,
    }
    text = templates.get_template(name).render(values).strip() + "\n"
    return _NO_TEXT.sub(lambda found: printable(found[0]), text)


def table(gathered: Gathered, series: Sequence[Series]) -> str:
    """A line a run; empty where nothing is measured."""
    found = records(gathered.rows, series)
    return to_csv(list(found[0]), (list(each.values()) for each in found))


def alternatives_of(folders: Sequence[Path]) -> str:
    names = [folder.name for folder in folders]
    return alternatives(names[:3]).replace(" or ", " and ") + f" and {len(names) - 3} more" * (len(names) > 3)


def _summary(gathered: Gathered) -> str:
    count = Counter(row.state for row in gathered.rows)
    told = ", ".join(f"{number} {state}" for state, number in count.most_common())
    now = datetime.now(UTC)
    return f"{len(gathered.rows)} run{'s' * (len(gathered.rows) > 1)}: {told}. Made {now:%Y-%m-%d %H:%M} UTC."


def _best_note(comparison: Comparison) -> str:
    text = "The best figure of each column is marked, among completed runs; none where all are alike."
    if comparison.workloads > 1:
        text += (
            f" There are {comparison.workloads} kinds of work here (model, data, task, global batch), and "
            "each has its own best; losses, restarts and device-hours compare after as many samples."
        )
    return text
