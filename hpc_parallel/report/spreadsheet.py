"""CSV that a spreadsheet shows without evaluating formulas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from hpc_parallel.problems import printable

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # https://owasp.org/www-community/attacks/CSV_Injection


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
