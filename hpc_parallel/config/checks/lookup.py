"""Look up a value by its dotted key."""

from __future__ import annotations

from typing import Any

from hpc_parallel.config.schema import RunConfig


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None if a free-form table doesn't have it."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node
