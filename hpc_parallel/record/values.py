"""Check the types of values from untrusted files: return the expected type, or None (empty for tables)."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

VALIDATION = "validation_"  # begins the keys of a validation
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")
_STEP_ID = re.compile(r"\d+\.\d+", re.ASCII)


def integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(value: Any) -> float | None:
    """A finite number; None for any other value."""
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return value if real and abs(value) <= sys.float_info.max else None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def texts(value: Any) -> list[str]:
    """The texts of a list; empty for any other value."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def table(value: Any) -> dict[str, Any]:
    """A table with texts as keys; empty for any other value."""
    return value if isinstance(value, dict) and all(isinstance(key, str) for key in value) else {}


def job_id(value: Any) -> str | None:
    """A job id `123` or `123_4`, which Slurm can't take for a flag; None for any other value."""
    return value if isinstance(value, str) and _JOB_ID.fullmatch(value) else None


def step_id(value: Any) -> str | None:
    """The id of a step, `123.4`, which never means the whole job; None for any other value."""
    return value if isinstance(value, str) and _STEP_ID.fullmatch(value) else None


def finite(value: float) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested tables by their dotted keys; an empty table is a value."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        values |= flatten(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return values


def without(section: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}
