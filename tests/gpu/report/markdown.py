"""The results as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.gpu.report.parts import Outcome

MOST_CHARACTERS = 400


def page(about: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    """A table of all parts, then what each found."""
    lines = ["# What the GPU shows", ""]
    lines += [f"- {key}: {value}" for key, value in about.items()]
    lines += ["", "| part | what | outcome | seconds |", "|---|---|---|---|"]
    lines += [f"| {o.letter} | {o.title} | {o.outcome} | {o.seconds:.1f} |" for o in outcomes]
    for outcome in outcomes:
        lines += ["", f"## ({outcome.letter}) {outcome.title}", ""]
        lines += table(outcome.found)
        if outcome.error:
            lines += ["", "```text", outcome.error, "```"]
    return "\n".join(lines) + "\n"


def table(found: Mapping[str, Any]) -> list[str]:
    if not found:
        return ["Nothing was found."]
    rows = [f"| {key} | {cell(value)} |" for key, value in flat(found)]
    return ["| figure | value |", "|---|---|", *rows]


def flat(found: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Nested values as one list of names and values."""
    rows: list[tuple[str, Any]] = []
    for key, value in found.items():
        name = f"{before}{key}"
        rows += flat(value, f"{name}: ") if isinstance(value, Mapping) and value else [(name, value)]
    return rows


def cell(value: Any) -> str:
    text = f"{value:.5g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")[:MOST_CHARACTERS]
