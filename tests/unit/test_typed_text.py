"""A text that looks like a number arrives as it was typed: from a command line, a list, a sweep, Python."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from omegaconf import DictConfig, OmegaConf

from hpc_parallel import api
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import Cell, compose_cells, compose_run
from hpc_parallel.config.diagnose import _near, diagnose
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import flat, resolve
from hpc_parallel.config.schema import RunConfig, register
from hpc_parallel.config.typed_config import MistypedError, _as_floats, _is, typed
from hpc_parallel.problems import ConfigError
from hpc_parallel.rules import Rule, rules_of
from tests.composed import composed

register()
LOCAL = ("launcher=local", "device=cpu")
TYPED = [
    ("launcher.account=2023_001", "launcher.account", "2023_001"),
    ("name=2026_01", "name", "2026_01"),
    ("launcher.qos=1e3", "launcher.qos", "1e3"),
    ("launcher.partition=0123", "launcher.partition", "0123"),
    ("name=true", "name", "true"),
    ("launcher.modules=[3.10]", "launcher.modules", ["3.10"]),
    ("launcher.modules=[cuda/12.6, 3.10 ,1.0]", "launcher.modules", ["cuda/12.6", "3.10", "1.0"]),
    ("launcher.setup=['a, 12e1, b',\"0123\"]", "launcher.setup", ["a, 12e1, b", "0123"]),
    ("+launcher.extra.comment=1e3", "launcher.extra.comment", "1e3"),
    ("+launcher.extra={comment: 0123, hold: true}", "launcher.extra", {"comment": "0123", "hold": True}),
    ("+cluster.environment={LEVEL: 007}", "cluster.environment", {"LEVEL": "007"}),
    ("launcher.account='2023_001'", "launcher.account", "2023_001"),
    ("launcher.account=null", "launcher.account", None),
    ("training.clip_norm=1e3", "training.clip_norm", 1000.0),
]


@pytest.mark.parametrize(("word", "key", "wanted"), TYPED)
def test_a_text_is_what_was_typed(word: str, key: str, wanted: object) -> None:
    _, values, _ = resolve(run(*LOCAL, word).config)
    assert OmegaConf.select(OmegaConf.create(values), key) == wanted


def run(*words: str) -> Cell:
    line = CommandLine.parse(words)
    return compose_run(line.overrides, **line.places)


def test_each_value_of_a_sweep_is_what_was_typed() -> None:
    line = CommandLine.parse(["-m", "launcher.account=2023_001,1e3,83"])
    cells = compose_cells(line.overrides, **line.places)
    assert [cell.config.launcher.account for cell in cells.cells] == ["2023_001", "1e3", "83"]


def test_python_takes_the_text(here: Path) -> None:
    assert api.compose([*LOCAL, "launcher.qos=1e3"]).launcher.qos == "1e3"


def test_a_text_of_a_file_that_yaml_changes_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster/other.yaml").write_text("partition: 0777\n")  # not used
    (tmp_path / "cluster/mine.yaml").write_text(
        'defaults: [generic]\npartition: 0123\naccount: "2023_001"\nqos: 1e3\nmodules: [3.10, cuda]\n'
        "extra: {constraint: on, hold: true, nice: 100}\ngpus_per_node: 0x10\n"
    )
    with pytest.raises(ConfigError) as refused:
        run("--config-dir", str(tmp_path), "cluster=mine", *LOCAL)
    lines = [str(problem) for problem in refused.value.problems]
    places = [f"{tmp_path}/cluster/mine.yaml, line {number}: cluster.{key} is a text, and YAML reads {text}"
              for number, key, text in ((2, "partition", "0123"), (4, "qos", "1e3"), (5, "modules", "3.10"),
                                        (6, "extra.constraint", "on"))]  # fmt: skip
    assert [line.partition(" otherwise.")[0] for line in lines] == places
    assert lines[0].endswith('Write "0123", with the quotes.')


@pytest.mark.parametrize("word", ["strategy=pipeline", "task=infer", "optimizer=sgd", "model=convnet"])
def test_values_have_the_types_that_omegaconf_gives(word: str) -> None:
    config, values, _ = resolve(run(*LOCAL, word).config)
    schema = RunConfig(task=type(config.task)(), optimizer=type(config.optimizer)())
    reference = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), values))
    older = {**values, "nodes": 1, "cluster": {**values["cluster"], "start_timeout_s": 300}}
    del older["preflight"], older["launcher"]["grace_s"]
    assert config == reference == typed(older)


@pytest.mark.parametrize(
    ("key", "value"),
    [("nodes", "2"), ("nodes", True), ("nodes", 1.5), ("nodes", None), ("launcher.modules", [1]),
     ("launcher", "slurm"), ("launcher.partiton", "gpu"), ("cluster.srun", {1: "x"}), ("task.name", [])],
)  # fmt: skip
def test_a_value_of_another_type_is_named(key: str, value: object) -> None:
    table, _, name = key.rpartition(".")
    with pytest.raises(MistypedError, match=f"^{key}( |:)"):
        typed({table: {name: value}} if table else {name: value})


def test_a_value_of_another_type_is_refused_with_its_rule_and_legal_values() -> None:
    values = {"seed": "a", "dry_run": 1, "device": 2, "training": {"compile": "maybe", "clip_norm": []},
              "launcher": {"setup": "x", "extra": []}, "profile": {"ranks": 0}, "nodes": 2}  # fmt: skip
    with pytest.raises(MistypedError) as refused:
        typed(values)
    assert list(map(str, refused.value.problems)) == [
        "seed = a is not a whole number. Try seed=0.",
        "dry_run = 1 is not true or false. Try dry_run=true or dry_run=false.",
        "device = 2 is not one text. Try device=auto.",
        "training.compile = maybe is not true or false. Try training.compile=true or training.compile=false.",
        "training.clip_norm = [] is not a number. Try training.clip_norm=1.",
        "launcher.setup = x is not a list [a,b] of texts. Try launcher.setup=[].",
        "launcher.extra = [] is not a table {key: value}. Try launcher.extra={}.",
        "profile.ranks = 0 is not a list of whole numbers [a,b]. Try profile.ranks=[0].",
    ]


@cache
def typed_keys() -> list[tuple[DictConfig, str, Any, Rule | None]]:
    """A configuration, a key in it that has a type, the type and the rule; of every file with other keys."""
    files = [path for group in ("model", "data", "task", "optimizer")
             for path in sorted((find_folder("conf") / group).glob("*.yaml"))]  # fmt: skip
    tables = [(f"{file.parent.name}.", composed(f"{file.parent.name}={file.stem}")) for file in files]
    found: list[tuple[DictConfig, str, Any, Rule | None]] = []
    for group, table in [("", composed()), *tables]:
        for key in (key for key in flat(table) if key.startswith(group)):
            parent, _, name = key.rpartition(".")
            schema = OmegaConf.get_type(OmegaConf.select(table, parent) if parent else table)
            hint = get_type_hints(schema).get(name, Any) if is_dataclass(schema) else Any
            if hint is not Any and not is_dataclass(hint):
                found.append((table, key, hint, rules_of(schema).get(name)))
    return found


@pytest.mark.parametrize("value", ["maybe", "[1]", "{a:1}", "1.5", "10k"])
def test_every_key_has_a_legal_value_to_suggest(value: str) -> None:
    """Of its type, and accepted by its rule."""
    for table, key, hint, rule in typed_keys():
        legal = [OmegaConf.create({"": item}) for item in _near(table, key=key, value=value)]
        for item in (OmegaConf.to_container(item)[""] for item in legal):
            assert _is(_as_floats(item, hint), hint), (key, item)
            assert rule is None or item is None or rule.allows(item), (key, item)
        assert legal, key
    assert len(typed_keys()) > 400


def test_a_switch_that_takes_auto_too_is_refused_beside_the_other_problems() -> None:
    line = CommandLine.parse([*LOCAL, "training.compile=maybe", "nodes=0"])
    problems = [str(problem) for problem in diagnose(line.overrides, **line.places)]
    compiling, nodes = problems
    legal = "Try training.compile=true or training.compile=false."
    assert compiling == f"training.compile = maybe is not true or false. {legal}"
    assert nodes.startswith("nodes = 0 must be at least 1.")


@pytest.mark.parametrize("key", ["strategy.name", "strategy", "model", "name", "task.name", "optimizer"])
def test_a_missing_key_without_a_default_is_named(key: str) -> None:
    values = resolve(run(*LOCAL).config).values
    table, _, name = key.rpartition(".")
    del (values[table] if table else values)[name]
    with pytest.raises(MistypedError, match=rf"^{key}\S* is missing"):
        typed(values)


def test_numbers_of_a_file_are_floats_where_the_schema_has_floats() -> None:
    values = resolve(run(*LOCAL).config).values
    values["optimizer"] |= {"betas": [0, "9.5e-1"], "eps": "1e-8"}
    optimizer: Any = typed(values).optimizer
    assert [*map(repr, optimizer.betas), repr(optimizer.eps)] == ["0.0", "0.95", "1e-08"]


@pytest.mark.parametrize("word", ["on", "1", "'true'", "${oc.env:SWITCH}"])
def test_a_switch_and_a_number_may_be_text_or_references(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWITCH", "yes")
    monkeypatch.setenv("GPUS", "4")
    config = resolve(run(*LOCAL, f"training.compile={word}", "gpus_per_node=${oc.env:GPUS}").config).config
    assert (config.training.compile, config.gpus_per_node) == (True, 4)
