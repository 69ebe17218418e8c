"""Escape text for a Markdown page: no markup, link, image or HTML of a run takes effect."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

_SPECIAL = re.compile(r"[\\`*\[\]|]")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def text(value: Any) -> Markup:
    """The escaped value on one line; text that a template marks as safe is not changed."""
    if isinstance(value, Markup):
        return value
    escaped = _SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split()).translate(_HTML))
    # GitHub turns bare addresses into links.
    return Markup(escaped.replace("://", "&#58;//").replace("www.", "www&#46;"))


def code(value: Any) -> Markup:
    """A code span; backticks become apostrophes because they would end it."""
    return Markup(f"`{' '.join(str(value).replace('`', chr(39)).split())}`")


def block(value: Any) -> Markup:
    """The lines of a fenced block; backticks become apostrophes because they would end it."""
    return Markup(str(value).replace("`", chr(39)))
