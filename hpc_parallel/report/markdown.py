"""Text of a run as text of a Markdown page: no markup, no link, no image, no HTML."""

from __future__ import annotations

import re
from typing import Any

from markupsafe import Markup

_SPECIAL = re.compile(r"[\\`*\[\]|]")
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def text(value: Any) -> Markup:
    """The value on one line; what a template calls safe stays as it is."""
    if isinstance(value, Markup):
        return value
    shown = _SPECIAL.sub(r"\\\g<0>", " ".join(str(value).split()).translate(_HTML))
    # GitHub makes links of bare addresses.
    return Markup(shown.replace("://", "&#58;//").replace("www.", "www&#46;"))


def code(value: Any) -> Markup:
    """A code span, which a backtick would end."""
    return Markup(f"`{' '.join(str(value).replace('`', chr(39)).split())}`")
