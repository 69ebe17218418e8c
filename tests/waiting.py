"""Wait for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 240  # for what never happens: other tests run beside this one


def wait_for(what: Callable[[], Any], *, within_s: float = PATIENCE_S) -> Any:
    """Ask until the answer is true; returns it."""
    deadline = time.monotonic() + within_s
    while not (answer := what()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)
    return answer
