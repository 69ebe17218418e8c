"""The checks by themselves: order, spelling, and that what passes can run."""

from __future__ import annotations

import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.class_paths import missing_part
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure.hang_report import grace_s
from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    DigitsDataConfig,
    MoeTransformerConfig,
    ParquetDataConfig,
    TransformerConfig,
)
from hpc_parallel.layout.schedules import SCHEDULES, schedule_of, stages_per_rank, unfit
from hpc_parallel.problems import Problem, nearest, spell
from tests.composed import composed


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return resolve(composed("strategy=single"))[0]


def test_problems_come_in_the_order_of_the_command_line() -> None:
    problems = [
        Problem("name", "", "r"),
        Problem("strategy.pipeline", 3, "r"),
        "+nodez: r",
        Problem("seed", -1, "r"),
    ]
    ordered = in_order(problems, ["seed=-1", "+nodez=2", "strategy=pipeline", "nodes=1"])
    assert ordered == [problems[3], problems[2], problems[1], problems[0]]


@pytest.mark.parametrize(
    ("value", "spelt"),
    [(None, "null"), (True, "true"), (3, "3"), (1e-8, "1e-08"), (0.5, "0.5"), ("", "''"), ("a b", "'a b'"),
     ("a\nb", r"'a\nb'"), ("Grüße", "Grüße"), ([0.9, 1.0], "[0.9,1]"), ([], "[]"), ({}, "{}"),
     ({"a": None}, "{a:null}")],
)  # fmt: skip
def test_values_are_spelt_as_on_the_command_line(value: object, spelt: str) -> None:
    assert spell(value) == spelt


def test_a_problem_offers_all_that_must_change() -> None:
    problem = Problem("strategy.pipeline", 8, "is too deep", (4, 2), ("strategy.replicate=-1",))
    assert str(problem) == (
        "strategy.pipeline = 8 is too deep. Try strategy.pipeline=4 strategy.replicate=-1"
        " or strategy.pipeline=2 strategy.replicate=-1."
    )


def test_nearest_words() -> None:
    assert nearest("pipelin", ["data", "pipeline"]) == ["pipeline"]
    assert nearest("zzz", ["data", "pipeline"]) == []


@pytest.mark.parametrize(
    ("group", "choice", "schema"),
    [
        ("model", "tiny", ConvNetConfig),
        ("model", "tiny", MoeTransformerConfig),
        ("model", "convnet", TransformerConfig),
        ("data", "text", ParquetDataConfig),
        ("data", "text", DigitsDataConfig),
    ],
)
def test_a_class_in_the_table_of_another_is_refused_beside_other_errors(
    group: str, choice: str, schema: type
) -> None:
    """A user changed `_target_` alone."""
    config = resolve(composed(f"{group}={choice}", "strategy=single", "nodes=0"))[0]
    getattr(config, group)["_target_"] = schema._target_  # type: ignore[attr-defined]
    of_class, of_nodes = map(str, find_problems(config))
    assert of_class.startswith(f"{group}._target_ = {schema._target_} does not fit")  # type: ignore[attr-defined]
    assert of_nodes.startswith("nodes = 0 must be at least 1")
    _, advice = of_class.rstrip(".").split(f"Try {group}=")
    assert composed(f"{group}={advice}")[group]._target_ == schema._target_  # type: ignore[attr-defined]


def test_a_class_below_a_folder_without_init_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "outer" / "plain" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "__init__.py").touch()
    (inner / "classes.py").write_text("class Known: ...\n")
    monkeypatch.chdir(tmp_path)
    assert missing_part("outer.plain.inner.classes.Known") is None
    assert missing_part("outer.plain.inner.classes.Other") is not None


@pytest.mark.parametrize(
    ("target", "right"),
    [("hpc_parallel.models.transformer.Transformer", True), ("argparse.ArgumentParser", True),
     ("math.Model", True), ("hpc_parallel.models.transformer.Nope", False), ("hpc_parallel.nope.Nope", False),
     ("nope.Nope", False), ("Nope", False), ("a..b", False), ("a b.c", False), ("", False)],
)  # fmt: skip
def test_class_paths_are_checked_without_import(target: str, right: bool) -> None:
    assert (missing_part(target) is None) == right


@pytest.mark.parametrize(
    ("word", "check"),
    [("strategy=dataparallel", "execution_problems"), ("model=huggingface", "huggingface_problems"),
     ("task=infer", "_infer"), ("profile=torch", "_profiled_steps"),
     ("launcher.venv=.", "venv_problems")],
)  # fmt: skip
def test_a_run_enters_the_checks_that_it_meets(config: RunConfig, word: str, check: str) -> None:
    assert check in entered_checks(resolve(composed(word))[0])
    assert check not in entered_checks(config)


def entered_checks(config: RunConfig) -> set[str]:
    """The functions of `config/checks/` that were called."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        find_problems(config)
    finally:
        sys.setprofile(None)
    return {code.co_name for code in codes if Path(code.co_filename).parent.name == "checks"}


DEGREE = st.sampled_from([-1, 1, 2, 3, 4])
SCHEDULE = st.sampled_from(sorted(SCHEDULES))
SMALL = st.none() | st.integers(1, 12)


@settings(max_examples=300)
@given(st.integers(1, 4), st.integers(1, 4), DEGREE, DEGREE, SCHEDULE,
       st.integers(1, 48), SMALL, SMALL)  # fmt: skip
def test_every_accepted_configuration_has_a_layout(
    config: RunConfig,
    nodes: int,
    devices: int,
    pipeline: int,
    replicate: int,
    schedule: str,
    batch: int,
    size: int | None,
    count: int | None,
) -> None:
    config.nodes, config.gpus_per_node = nodes, devices
    strategy = config.strategy
    strategy.pipeline, strategy.replicate, strategy.schedule = pipeline, replicate, schedule
    strategy.microbatches = count
    config.training.global_batch_size, config.training.microbatch_size = batch, size
    problems = find_problems(config)  # never raises
    if problems:
        assert all(str(problem).count(". Try ") <= 1 for problem in problems)
        return
    layout = Layout.resolve(strategy, devices=nodes * devices)
    in_turn = schedule_of(strategy).in_turn
    plan = plan_batch(batch, layout=layout, microbatch_size=size, microbatches=count, in_turn=in_turn)
    assert plan.data * plan.microbatches * plan.microbatch_size == batch
    if layout.pipeline > 1:
        assert layout.pipeline * stages_per_rank(strategy) <= config.model["layers"]
        assert unfit(strategy, microbatches=plan.microbatches, ranks=layout.pipeline) is None


@pytest.mark.parametrize(
    ("limit_s", "collective_s", "mend"),
    [(300, 600, None), (453, 600, None), (454, 600, "453"), (300, 60, "38"), (300, 11, "null"),
     (None, 11, None), (0, 600, "300"), (300, float("inf"), None)],
)  # fmt: skip
def test_a_hang_is_reported_before_the_collectives_time_out(
    limit_s: float | None, collective_s: float, mend: str | None
) -> None:
    values = (f"hang_timeout_s={spell(limit_s)}", f"collective_timeout_s={collective_s}")
    config = resolve(composed("strategy=single", *(f"cluster.{value}" for value in values)))[0]
    found = [str(problem) for problem in find_problems(config) if "cluster.hang" in str(problem)]
    assert [text.rpartition("=")[2] for text in found] == ([f"{mend}."] if mend else [])
    if limit_s and mend is None and collective_s < 1e9:  # a look late, and the wait for all
        assert limit_s * 1.1 + grace_s(limit_s) < collective_s
