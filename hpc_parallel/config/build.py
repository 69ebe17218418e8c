"""Build the object that a table with `_target_` describes; an error of its class is shown unchanged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from hpc_parallel.problems import ConfigError
from hpc_parallel.user_code import UserCodeError, described


def build(table: Mapping[str, Any], *, key: str) -> Any:
    """Returns the object of `table`; `key` is the table's name in the configuration, for messages.

    Raises UserCodeError if a class can't be imported or built; its text begins with the error of the class. A
    ConfigError or MemoryError of the class is raised unchanged.
    """
    try:
        return instantiate(table)
    except InstantiationException as error:
        cause = _without_hydra(error)
        if isinstance(cause, ConfigError | MemoryError):
            raise cause from cause.__cause__  # drop Hydra's error, which wraps it
        match = re.search(r"target '([^']+)'", str(error))  # perhaps that of a table inside the table
        target = match[1] if match else table["_target_"]
        raise UserCodeError([f"{described(cause)}, raised by {target} ({key})"]) from cause


def _without_hydra(error: BaseException) -> BaseException:
    """The exception that Hydra wrapped: once for a call, twice for an import."""
    while error.__cause__ is not None and _is_hydras(error):
        error = error.__cause__
    return error


def _is_hydras(error: BaseException) -> bool:
    return isinstance(error, InstantiationException) or (
        isinstance(error, ImportError) and str(error).startswith("Error loading '")
    )
