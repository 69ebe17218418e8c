"""Escape the text of runs: it must not act as markup, link or HTML in Markdown, or as a formula in CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

from hpc_parallel.problems import printable

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # https://owasp.org/www-community/attacks/CSV_Injection
_SPECIAL = re.compile(r"[\\`*\[\]|]")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


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
