"""The quick copies of configurations (tests/copies.py) against those that pickle makes."""

from __future__ import annotations

import copy
import pickle
from typing import Any

from omegaconf import OmegaConf

from tests.composed import composed


def test_a_quick_copy_is_whole_and_its_own() -> None:
    config = composed("strategy=pipeline", "nodes=2", "+launcher.extra.kept=[1,{a: ???}]")
    OmegaConf.set_readonly(config.model, True)
    made = copy.deepcopy(config)
    assert_same(made, pickle.loads(pickle.dumps(config)))
    before = OmegaConf.to_yaml(config)
    OmegaConf.set_readonly(made.model, False)
    made.model.dim, made.launcher.extra.kept[1].a = 7, 8
    assert (OmegaConf.to_yaml(config), OmegaConf.is_readonly(config.model)) == (before, True)


def assert_same(one: Any, other: Any) -> None:
    """The same classes and attributes, and each value below its own table."""
    assert type(one) is type(other)
    mine, its = dict(vars(one)), dict(vars(other))
    for attributes in (mine, its):
        attributes.pop("_flags_cache")  # made anew when somebody asks
        attributes.pop("_parent")
    content, its_content = mine.pop("_content", None), its.pop("_content", None)
    assert mine == its
    if not isinstance(content, dict | list):
        assert content == its_content
        return
    keys = list(content) if isinstance(content, dict) else range(len(content))
    assert list(keys) == (list(its_content) if isinstance(content, dict) else list(range(len(its_content))))
    for key in keys:
        assert vars(content[key])["_parent"] is one
        assert_same(content[key], its_content[key])
