"""Copies of OmegaConf's configurations with less work. A composition makes many, and most tests compose."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

from omegaconf import DictConfig, nodes
from omegaconf.base import Metadata

LEAVES = [kind for kind in nodes.ValueNode.__subclasses__() if kind is not nodes.InterpolationResultNode]


def copied_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    """What `copy.deepcopy` makes of it: types and keys stay the same, and the two tables are copied."""
    made = object.__new__(type(metadata))
    cached = metadata.resolver_cache
    vars(made).update(
        vars(metadata), flags=metadata.flags if metadata.flags is None else dict(metadata.flags),
        resolver_cache=copy.deepcopy(cached, memo) if cached else defaultdict(dict),
    )  # fmt: skip
    return made


def copied_leaf(leaf: Any, memo: dict[int, Any]) -> Any:
    """What OmegaConf's own copy of a value is: the value itself and the parent are kept, not copied."""
    made = object.__new__(type(leaf))
    metadata = copied_metadata(leaf._metadata, memo)
    vars(made).update(vars(leaf), _metadata=metadata, _flags_cache=None)
    return made


def copied_table(table: DictConfig, memo: dict[int, Any]) -> DictConfig:
    """What OmegaConf's own copy of a table is: its parent is kept, and the copy is that of its values."""
    made: DictConfig = object.__new__(type(table))
    content = vars(table)["_content"]
    if isinstance(content, dict):
        content = {key: copy.deepcopy(value, memo) for key, value in content.items()}
        for value in content.values():
            vars(value)["_parent"] = made
    metadata = copied_metadata(table._metadata, memo)
    vars(made).update(vars(table), _metadata=metadata, _flags_cache=None, _content=content)
    return made
