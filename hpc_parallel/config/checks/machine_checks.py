"""Check the values of a machine profile, which a user copied or typed."""

from __future__ import annotations

from typing import Any

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import COLLECTIVES
from hpc_parallel.problems import Problem, Problems, nearest
from hpc_parallel.record.values import integer, number

FITTED = ("latency_s", "bandwidth_bytes_per_s", "fit_error")


def find_problems(config: RunConfig) -> Problems:
    for name, group in config.machine.collectives.items():
        key = f"machine.collectives.{name}"
        if not isinstance(group, dict):
            yield Problem(key, group, "must be a table with `ranks` and a table for each collective")
            continue
        ranks = integer(group.get("ranks"))
        if ranks is None or ranks < 1:
            yield Problem(f"{key}.ranks", group.get("ranks"), "must be a whole number of at least 1")
        names = group.get("also", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            yield Problem(f"{key}.also", names, "must be a list of other names of these ranks")
        for operation, fit in group.items():
            if operation not in ("ranks", "also"):
                yield from _fit(f"{key}.{operation}", operation, fit)


def _fit(key: str, operation: Any, fit: Any) -> Problems:
    if operation not in COLLECTIVES:
        close = nearest(str(operation), COLLECTIVES)
        hint = f"Did you mean {close[0]}?" if close else f"The collectives are {', '.join(COLLECTIVES)}."
        yield f"{key} is no collective. {hint}"
    elif not isinstance(fit, dict):
        yield Problem(key, fit, f"must be a table with {', '.join(FITTED)}")
    else:
        for name in fit:
            if name not in FITTED:
                yield f"{key}.{name} is not in a machine profile. The keys are {', '.join(FITTED)}."
        latency_s, error = number(fit.get("latency_s")), number(fit.get("fit_error", 0))
        if latency_s is None or latency_s < 0:
            yield Problem(f"{key}.latency_s", fit.get("latency_s"), "must be a number of at least 0")
        rate = fit.get("bandwidth_bytes_per_s")
        if rate is not None and ((value := number(rate)) is None or value < 1):
            rule = "must be a number of at least 1, or null if the time does not grow with the size"
            yield Problem(f"{key}.bandwidth_bytes_per_s", rate, rule)
        if error is None or error < 0:
            yield Problem(f"{key}.fit_error", fit.get("fit_error"), "must be a number of at least 0")
