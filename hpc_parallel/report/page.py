"""Render one report in three forms: a self-contained HTML page, the same content as Markdown, and CSV.

The text of runs must not act as markup, link or HTML in Markdown, or as a formula in CSV.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from hpc_parallel.problems import alternatives, printable
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.time_use import CAUSES
from hpc_parallel.report import collective_curves, latency
from hpc_parallel.report.claims import Approach, Claim, judged
from hpc_parallel.report.figures import NOISE, ROUNDING
from hpc_parallel.report.gather import Gathered, Row
from hpc_parallel.report.machines import machines, networks
from hpc_parallel.report.measures import Evidence, Runs
from hpc_parallel.report.plots import pictures, trained_s
from hpc_parallel.report.tables import (
    UNMEASURED,
    Comparison,
    Series,
    compare,
    digits,
    parts_of,
    records,
    scaling,
    unit_of,
)
from hpc_parallel.report.verdict import Prediction, own_metrics, pools, predictions, scope, verdicts

if TYPE_CHECKING:
    from hpc_parallel.report.drawing import Plot

WITHOUT_PLOTS = 'No plots: they need matplotlib (pip install "hpc_parallel[report]", or matplotlib itself).'
# Control characters, characters that change the text direction, and lone surrogates, which no file can hold.
_NO_TEXT = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # https://owasp.org/www-community/attacks/CSV_Injection
_SPECIAL = re.compile(r"[\\`*\[\]|]")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
DEFINITIONS = (
    "Throughput: samples per second, median after the warm-up, beside the range of the middle half. "
    "Latency: time of one sample (task=infer). Step time: time of one optimizer step, median after the "
    "warm-up.",
    "Memory per device: the maximum that any rank held; on a CPU this includes interpreter and libraries. "
    "State per device: weights, gradients and optimizer state of the rank that held most of them, without "
    "activations.",
    "Bubble: the share of a pipeline's schedule in which a rank's stages have no work. Exposed "
    "communication: the share of a step in which a device waits for others and computes nothing, without "
    "the bubble. Both are means over the ranks in profiled steps. '-': there is no other device to wait for.",
    "Traffic per step: bytes sent by all ranks; for dataparallel on a CPU only those of activations, because "
    "its threads share the weights. Device-hours: from each launch to its end, times its devices and spares.",
    "'not measured': the run folder has no such figure. Nothing is estimated.",
    "On CPUs all devices of a machine share its cores. Speeds are comparable only if each has its own cores.",
)
SECTIONS = {  # section of the plots -> title, and why it may have none
    "scaling": (
        "Scaling",
        "no two completed runs differ only in their number of devices (with the same global batch, or the "
        "same batch per device).",
    ),
    "latency": ("Latency against throughput", "no run has timed a batch (task=infer)."),
    "time_use": ("Where the time of a run went", "no training has ended."),
    "parts": ("Where the time of a step goes", "no run profiled a step (training.measure_steps)."),
    "memory": ("Memory", "no run recorded its state or a GPU's peak memory."),
    "bubble": (
        "Bubble of pipelines",
        "no two completed runs of a pipeline profiled a step (training.measure_steps).",
    ),
    "loss": ("Loss", "no run has logged two losses."),
    "timeline": ("A pipeline's step", "no pipeline profiled a step (training.measure_steps)."),
    "predicted": ("Predicted and measured", "no run has a plan with a figure that it also measured."),
}
COLLECTIVE_COLUMNS = (
    "ranks", "operation", "type", "least time, us", "largest bus bandwidth, GB/s", "at size"
)  # fmt: skip


Judged = list[tuple[Approach, list[tuple[Claim, Evidence]]]]


@dataclass(frozen=True)
class Report:
    """The three forms as text, and their plots."""

    html: str
    markdown: str
    csv: str
    latency_csv: str  # empty if no batch was timed
    plots: Sequence[Plot]


def render(gathered: Gathered) -> Report:
    rows = gathered.rows
    comparison, series, predicted = compare(rows), scaling(rows), predictions(rows)
    timed = latency.curves(rows)
    plots = _plots(rows, series=series, predictions=predicted)
    parts = [row for row in rows if row.parts is not None]
    claims = judged(Runs(rows, series))
    values: dict[str, Any] = {
        "title": f"Report on {alternatives_of(gathered.folders)}",
        "summary": _summary(gathered),
        "best_note": _best_note(comparison),
        "comparison": comparison,
        "columns": comparison.columns,
        "verdicts": verdicts(rows),
        "verdict_scope": scope(rows),
        "states": sorted({row.state for row in rows}),
        "troubles": [row for row in rows if not row.completed or row.notes],
        "left_out": gathered.left_out,
        "commands": gathered.commands,
        "timed": timed,
        "latency_unit": unit_of("seconds", (point.latency_s for curve in timed for point in curve.points)),
        "series": series,
        "parts": parts,
        "part_names": parts_of(rows),
        "unmeasured": _unmeasured({plot.picture.section for plot in plots}) if can_draw() else [],
        "parts_unit": unit_of("seconds", (sum((row.parts or {}).values()) for row in parts)),
        "uses": (uses := [row for row in rows if trained_s(row)]),
        "use_causes": [cause for cause in CAUSES if any(trained_s(row).get(cause) for row in uses)],
        "use_unit": unit_of("seconds", (sum(trained_s(row).values()) for row in uses)),
        "use_of": trained_s,
        "predictions": [prediction for prediction in predicted if prediction.measured is not None],
        "pools": pools(rows),
        "own_metrics": own_metrics(rows),
        "networks": networks(rows),
        "machines": machines(rows),
        "collectives": collective_curves.curves(rows),
        "collective_columns": COLLECTIVE_COLUMNS,
        "claims": _decided(claims),
        "open_claims": _open(claims),
        "definitions": DEFINITIONS,
        "plots": plots,
        "zip": zip,
    }
    page = fill("report.html.j2", values)
    plain = fill("report.md.j2", values, finalize=markdown)
    return Report(page, plain, table(gathered, series), _latency_csv(timed), plots)


def can_draw() -> bool:
    """Whether matplotlib, which is an extra, is installed."""
    return find_spec("matplotlib") is not None


def _plots(
    rows: Sequence[Row], *, series: Sequence[Series], predictions: Sequence[Prediction]
) -> Sequence[Plot]:
    if not can_draw():
        return []
    from hpc_parallel.report.drawing import draw

    return [draw(picture) for picture in pictures(rows, series=series, predictions=predictions)]


def fill(name: str, values: dict[str, Any], **settings: Any) -> str:
    """Render the template with every value escaped and characters that are not text replaced."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True,
        undefined=StrictUndefined, keep_trailing_newline=False, **settings,
    )  # fmt: skip
    templates.filters |= {
        "raw": lambda value: "" if value is None else repr(value),
        "digits": lambda value: UNMEASURED if value is None else digits(value, 3),
        "code": markdown_code,
        "block": markdown_block,
        "size": size,
    }
    text = templates.get_template(name).render(values).strip() + "\n"
    return _NO_TEXT.sub(lambda match: printable(match[0]), text)


def table(gathered: Gathered, series: Sequence[Series]) -> str:
    """CSV with one line per run; cells without a measurement are empty."""
    runs = records(gathered.rows, series)
    return to_csv(list(runs[0]), (list(run.values()) for run in runs))


def _latency_csv(curves: Sequence[latency.LatencyCurve]) -> str:
    """CSV with one line per batch size, in the units and names of `metrics.jsonl`; empty without curves."""
    if not curves:
        return ""
    keys = [field.name for field in fields(latency.BatchTiming)]
    return to_csv(
        ["run", "folder", "state", *keys],
        (
            [curve.row.label, curve.row.folder, curve.row.state, *(getattr(point, key) for key in keys)]
            for curve in curves
            for point in curve.points
        ),
    )


def alternatives_of(folders: Sequence[Path]) -> str:
    """The names of the folders for the title: `a, b and c and 2 more`."""
    names = [folder.name for folder in folders]
    return alternatives(names[:3]).replace(" or ", " and ") + f" and {len(names) - 3} more" * (len(names) > 3)


def _unmeasured(drawn: Set[str]) -> list[tuple[str, str]]:
    """The titles of the sections without a plot, and why they have none."""
    return [text for section, text in SECTIONS.items() if section not in drawn]


def _decided(claims: Judged) -> Judged:
    """The claims for which these runs have a figure."""
    decided = [
        (approach, [(claim, evidence) for claim, evidence in judged_claims if evidence.figure])
        for approach, judged_claims in claims
    ]
    return [(approach, judged_claims) for approach, judged_claims in decided if judged_claims]


def _open(claims: Judged) -> list[tuple[str, Claim]]:
    """The claims for which these runs have no figure, with the name of their approach."""
    return [
        (approach.name, claim)
        for approach, judged_claims in claims
        for claim, evidence in judged_claims
        if not evidence.figure
    ]


def _summary(gathered: Gathered) -> str:
    counts = Counter(row.state for row in gathered.rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    now = datetime.now(UTC)
    total = len(gathered.rows)
    text = f"{total} run{'s' * (total > 1)}: {states}. Made {now:%Y-%m-%d %H:%M} UTC."
    return text if can_draw() else f"{text} {WITHOUT_PLOTS}"


def _best_note(comparison: Comparison) -> str:
    text = (
        "The best figure of the completed runs is marked in each column, unless all are equal. "
        "Nothing is marked where the difference is within the spread of the speeds, within the range of runs "
        "that differ only in their seed, or below "
        f"{NOISE:.0%} for other measured figures, {ROUNDING:.1%} for losses (what bfloat16 rounds). "
        "A column without a figure is left out."
    )
    if comparison.settings > 1:
        text += (
            f" The runs have {comparison.settings} different settings (script, model, data, task, global "
            "batch, precision, optimizer, device), and each has its own best figure. Losses, restarts and "
            "device-hours are compared after equal samples."
        )
    return text


def markdown(value: Any) -> Markup:
    """The escaped value on one line; text that a template marks as safe is not changed."""
    if isinstance(value, Markup):
        return value
    escaped = _SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split()).translate(_HTML))
    # GitHub turns bare addresses into links.
    return Markup(escaped.replace("://", "&#58;//").replace("www.", "www&#46;"))


def markdown_code(value: Any) -> Markup:
    """A code span. Backticks would end the span, so they become apostrophes."""
    return Markup(f"`{' '.join(str(value).replace('`', chr(39)).split())}`")


def markdown_block(value: Any) -> Markup:
    """The lines of a fenced block. Backticks would end the block, so they become apostrophes."""
    return Markup(str(value).replace("`", chr(39)))


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """One line per row; None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would treat as a formula; keep numbers."""
    if not isinstance(value, str):
        return value
    return f"'{printable(value)}" if value.startswith(FORMULA) else printable(value)
