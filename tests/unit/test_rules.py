"""The rules of single keys: what they allow, what they suggest, and that they stand at the keys."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
from omegaconf import MISSING, OmegaConf

from hpc_parallel.config.checks.key_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import AdamWConfig, OptimizerConfig, RunConfig
from hpc_parallel.config.task_schema import TASKS
from hpc_parallel.config.typed_config import choices_of
from hpc_parallel.layout.model_data_schema import CHANNELS, DATA, MODELS
from hpc_parallel.rules import (
    Rule,
    above,
    at_least,
    between,
    count,
    default_of,
    inside,
    key,
    line,
    matches,
    one_of,
    rules_of,
    some_of,
)
from tests.composed import composed


@dataclass
class Base:
    size: int = key(4, at_least(2))
    names: list[str] = key(["a"], some_of("a", "b"))
    share: float = 0.5


@dataclass
class Derived(Base):
    size: int = 8


@pytest.mark.parametrize(
    ("rule", "legal", "refused", "text"),
    [
        (count(), (1, 2**40), (0, -1), "must be at least 1"),
        (at_least(0), (0, 0.5), (-0.5, math.inf, math.nan), "must be at least 0"),
        (at_least(0, finite=False), (math.inf,), (math.nan, -math.inf), "must be at least 0"),
        (above(0), (1e-9,), (0, math.inf, math.nan), "must be above 0"),
        (between(1, 3600), (1, 3600), (0, 3601, math.nan), "must lie between 1 and 3600"),
        (inside(0, 0.5), (0.1,), (0, 0.5), "must lie between 0 and 0.5"),
        (one_of("a", "b"), ("a", "b"), ("c", ""), "is not one of a, b"),
        (some_of("a", "b"), (["a"], ["b", "a"]), ([], ["a", "c"]), "must name some of a, b"),
        (matches(r"\w+", "is no word"), ("a1",), ("a b", "a\n", ""), "is no word"),
        (CHANNELS, ([1], [8, 4]), ([], [0], [4, -1], ["a"], [None]), "needs a number above 0 for each block"),
        (line(), ("a b",), ("", " ", "a\nb"), "must be one printable line"),
    ],
)
def test_what_a_rule_allows(rule: Rule, legal: tuple[Any, ...], refused: tuple[Any, ...], text: str) -> None:
    assert [value for value in legal if not rule.allows(value)] == []
    assert [value for value in refused if rule.allows(value)] == []
    assert rule.text == text


def test_a_key_has_its_default_and_a_subclass_its_rule() -> None:
    assert (Base().size, Base().names, Base.size) == (4, ["a"], 4)
    assert Base().names is not Base().names
    assert OmegaConf.to_container(OmegaConf.structured(Derived)) == {"size": 8, "names": ["a"], "share": 0.5}
    assert {name: rule.legal for name, rule in rules_of(Base).items()} == {"size": (4,), "names": (["a"],)}
    assert (rules_of(Derived)["size"].legal, rules_of(Derived)["size"].text) == ((8,), "must be at least 2")
    assert rules_of(AdamWConfig)["weight_decay"] == rules_of(OptimizerConfig)["weight_decay"]


PARTS = [type(part) for part in vars(RunConfig(model=None, data=None)).values() if is_dataclass(part)]
SCHEMAS = [RunConfig, AdamWConfig, *PARTS, *MODELS.values(), *DATA.values(), *TASKS.values()]


@pytest.mark.parametrize("schema", dict.fromkeys(SCHEMAS), ids=lambda schema: schema.__name__)
def test_defaults_and_suggestions_follow_the_rules(schema: type) -> None:
    defaults = {item.name: default_of(item) for item in fields(schema)}
    for name, rule in rules_of(schema).items():
        values = [*rule.legal, *(() if defaults[name] == MISSING else (defaults[name],))]
        assert [value for value in values if value is not None and not rule.allows(value)] == []
        assert MISSING not in rule.legal


def problems_of(**parts: Any) -> list[str]:
    config = replace(resolve(composed("strategy=single"))[0], **parts)
    return list(map(str, find_problems(config)))


def test_a_class_of_ones_own_follows_the_rules_of_all_data_only() -> None:
    model = {"_target_": "mine.Net", "layers": 0, "channels": []}
    data = {"_target_": "mine.Data", "sequence_length": 0, "height": 0, "vocab_size": "many"}
    assert problems_of(model=model, data=data) == [
        "data.sequence_length = 0 must be at least 1. Try data.sequence_length=1."
    ]


def test_the_suggestion_is_the_nearest_choice_else_the_first() -> None:
    assert problems_of(device="gpu") == ["device = gpu is not one of auto, cpu, cuda. Try device=cuda."]
    assert problems_of(device="zzz") == ["device = zzz is not one of auto, cpu, cuda. Try device=auto."]
    cluster = replace(RunConfig(model=None, data=None).cluster, container="zzz")
    assert problems_of(cluster=cluster) == [
        "cluster.container = zzz is not one of apptainer, pyxis. "
        "Try cluster.container=apptainer or cluster.container=pyxis."
    ]


def test_choices_by_key() -> None:
    assert choices_of("sweep.on_invalid") == ("skip", "stop")
    assert [choices_of(key) for key in ("nodes", "nodes.x", "zzz.kind", "launcher.zzz", "model.dim")] == [
        ()
    ] * 5
