"""The checks by themselves: order, spelling, and that what passes can run."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

import hydra
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.checks.suggestions import paths_near
from hpc_parallel.config.class_paths import missing_part
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_limits import local_problems, local_warnings
from hpc_parallel.failure.hang_report import grace_s
from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.counts import least_bytes, parameters
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.model_data_schema import (
    ConvNetConfig,
    DigitsDataConfig,
    MoeTransformerConfig,
    ParquetDataConfig,
    TransformerConfig,
)
from hpc_parallel.layout.schedules import SCHEDULES, schedule_of, stages_per_rank, unfit
from hpc_parallel.problems import ConfigError, Problem, nearest, spell
from tests.composed import composed, prepared


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
     ("a\nb", r"$'a\nb'"), ("Grüße", "Grüße"), ([0.9, 1.0], "[0.9,1]"), ([], "[]"), ({}, "{}"),
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


def test_a_class_below_a_folder_without_init_is_known(here: Path) -> None:
    inner = here / "outer" / "plain" / "inner"
    inner.mkdir(parents=True)
    (here / "outer" / "__init__.py").touch()
    (inner / "classes.py").write_text("class Known: ...\n")
    assert missing_part("outer.plain.inner.classes.Known") is None
    assert missing_part("outer.plain.inner.classes.Other") is not None
    (inner / "classes.py").write_text("Other: type = object\n(Pair, _), Named = ((int, 1), str)\n")
    os.utime(inner / "classes.py", ns=(1, 1))
    assert missing_part("outer.plain.inner.classes.Other") is None, "a notebook checks the file as it is now"
    assert [missing_part(f"outer.plain.inner.classes.{name}") for name in ("Pair", "Named")] == [None, None]


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


CUSTOM = ("optimizer=custom",)
WRONG = {
    ("optimizer=sgd", "optimizer._target_=torch.optim.Adam"): "sets the arguments of torch.optim.SGD. "
    "Try optimizer=custom optimizer._target_=torch.optim.Adam.",
    (*CUSTOM, "optimizer._target_=tests.optimizers.Lyon"): "Try optimizer._target_=tests.optimizers.Lion.",
    (*CUSTOM, "optimizer._target_=Lion"): "optimizer._target_ = Lion is not the path of a class",
    (*CUSTOM,): "optimizer._target_ has no value and no default.",
    ("optimizer.schedule=cosin",): "Try optimizer.schedule=cosine.",
    ("optimizer.schedule=tests.optimizers.triangl",): "Try optimizer.schedule=tests.optimizers.triangle.",
    ("optimizer.schedule=tests.optimizers.triangle", "optimizer.warmup_steps=5"): "has no effect: "
    "tests.optimizers.triangle decides every step. Try optimizer.warmup_steps=null.",
    ("optimizer.decay_share=1.5",): "optimizer.decay_share = 1.5 must lie between 0 and 1.",
    ("+optimizer.groups.a={match:stem.*}",): "a.match = 'stem.*' must be a list of patterns.",
    ("+optimizer.groups.a={weight_decy:0.1}",): "Try optimizer.groups.a.weight_decay.",
    ("+optimizer.groups.a={lr:0.1}",): "optimizer.groups.a.lr: a rule has no such key.",
    ("+optimizer.groups.a={weight_decay:-1}",): "optimizer.groups.a.weight_decay = -1 must be a number",
    ("+optimizer.groups.a={dims:1}",): "must be a list of whole numbers. Try optimizer.groups.a.dims=[1].",
    ("+optimizer.groups.a={_target_:torch.optim.}",): "is not the path of a class",
    ("+optimizer.groups.a=5",): "optimizer.groups.a = 5 must be a table.",
    ("optimizer.eps=0",): "optimizer.eps = 0 must be above 0. Try optimizer.eps=1e-08.",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_optimizer_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("launcher=script", *words)
    (problem,) = map(str, raised.value.problems)
    assert WRONG[words] in problem


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_the_files_are_legal(name: str) -> None:
    assert prepared("launcher=script", f"optimizer={name}").config.optimizer.name == name


B1 = 1_235_814_400  # parameters of Llama 3.2 1B, as its authors publish them


@pytest.mark.parametrize("model", ["tiny", "124m", "moe_tiny"])
def test_the_count_is_that_of_the_model(model: str) -> None:
    config, values, _ = resolve(composed(f"model={model}"))
    with torch.device("meta"):
        built = hydra.utils.instantiate(values["model"])
    weights = {id(weight): weight.numel() for weight in built.parameters()}
    assert parameters(config) == sum(weights.values())


@pytest.mark.parametrize(
    ("words", "layout", "bytes_"),
    [
        ([], Layout(replicate=8), 16 * B1),  # weights, gradients and two states of AdamW, 4 bytes each
        ([], Layout(shard=4, replicate=2), 16 * B1 // 4),
        ([], Layout(pipeline=2, tensor=2, context=2), 16 * B1 // 4),
        (["training.precision=bfloat16"], Layout(), 16 * B1),
        (["training.precision=float64"], Layout(), 32 * B1),
        (["task=infer"], Layout(), 4 * B1),
        (["strategy=parameter_server"], Layout(), 8 * B1),
    ],
)
def test_bytes_of_a_device(words: list[str], layout: Layout, bytes_: int) -> None:
    config, *_ = resolve(composed("model=1b", *words))
    assert least_bytes(config, layout) == bytes_


def test_other_models_are_not_counted() -> None:
    assert least_bytes(resolve(composed("model=convnet", "data=digits"))[0], Layout()) is None


def test_what_can_not_fit_is_refused() -> None:
    words = ("model=1b", "nodes=2", "training.global_batch_size=16", "launcher=script")
    prepared(*words, "strategy=data")  # nobody knows the memory
    with pytest.raises(ConfigError, match=r"device_memory_gb = 16 is less than the 18\.4 GB of weights"):
        prepared(*words, "strategy=data", "cluster.device_memory_gb=16")
    prepared(*words, "strategy=data", "cluster.device_memory_gb=19")
    prepared(*words, "strategy=fsdp", "cluster.device_memory_gb=16")


def test_copies_for_which_a_node_has_no_memory_are_refused() -> None:
    """Two copies of two steps, of 12 bytes a weight on each of 8 ranks; without a partner one copy."""
    words = (
        "model=1b",
        "strategy=data",
        "gpus_per_node=8",
        "training.global_batch_size=16",
        "launcher=script",
    )
    copied = "training.memory_checkpoint_every=10"
    needed_gb = 4 * 8 * 12 * B1 / 2**30
    problem = (
        rf"training\.memory_checkpoint_every = 10 needs at least {needed_gb:.1f} GB on each node "
        r"\(4 copies of the 13\.8 GB of 8 ranks\), and the job has launcher\.memory_gb=400\. "
        r"Try training\.memory_checkpoint_every=null"
    )
    with pytest.raises(ConfigError, match=problem):
        prepared(*words, copied, "nodes=2", "launcher.memory_gb=400")
    prepared(*words, copied, "nodes=2", f"launcher.memory_gb={needed_gb + 0.1}")
    prepared(*words, copied, "nodes=2")
    prepared(*words, copied, "nodes=1", "launcher.memory_gb=400")
    prepared(*words, "nodes=2", "launcher.memory_gb=400")


@pytest.mark.parametrize(
    ("on_disk", "problem", "suggestion"),
    [
        ("null", "checkpoint_every = null leaves nothing after the job", "checkpoint_every=500"),
        ("10", "memory_checkpoint_every = 10 copies nothing that the disk", "memory_checkpoint_every=5"),
        ("1", "memory_checkpoint_every = 10 copies nothing that the disk", "memory_checkpoint_every=null"),
    ],
)
def test_copies_in_memory_stand_between_two_checkpoints(on_disk: str, problem: str, suggestion: str) -> None:
    words = ("training.memory_checkpoint_every=10", f"training.checkpoint_every={on_disk}")
    with pytest.raises(ConfigError) as refused:
        prepared(*words)
    assert f"training.{problem}" in str(refused.value)
    assert f"Try training.{suggestion}." in str(refused.value)
    prepared(*words, f"training.{suggestion}")
    prepared(*words, "task=generate")


@pytest.mark.parametrize(
    ("words", "environment", "needed_gb"),
    [
        ("strategy=data nodes=2", {}, 2 * 16 * B1 / 2**30),
        ("strategy=fsdp nodes=2", {}, 16 * B1 / 2**30),
        ("strategy=data nodes=2 device=cuda", {}, None),
    ],
)
def test_a_run_that_this_machine_can_not_hold_is_announced(
    words: str, environment: dict[str, str], needed_gb: float | None
) -> None:
    config, *_ = resolve(composed("model=1b", *words.split()))
    warnings = local_warnings(config, memory_bytes=16 * 2**30, environment=environment)
    assert [float(re.search(r"at least ([0-9.]+) GB", line)[1]) for line in warnings] == (
        [] if needed_gb is None else [pytest.approx(needed_gb, abs=0.05)]
    )
    assert local_warnings(config, memory_bytes=2**40, environment=environment) == []


@pytest.mark.parametrize(
    ("words", "key", "legal"),  # 64 MiB for each of our ranks and 16 for a script's: 2 GiB hold 32 and 128
    [
        ("nodes=32", None, None),
        ("nodes=48", "nodes", 24),  # a divisor, so that the batch still divides
        ("nodes=8 gpus_per_node=6", "nodes", 4),
        ("nodes=2 gpus_per_node=40", "gpus_per_node", 10),
        ("nodes=2 gpus_per_node=40 strategy=dataparallel", None, None),  # one process drives all
        ("nodes=128 task=script script.command=hostname", None, None),
        ("nodes=256 task=script script.command=hostname", "nodes", 128),
    ],
)
def test_processes_that_this_machine_can_not_hold_are_refused(
    words: str, key: str | None, legal: int | None
) -> None:
    config, *_ = resolve(composed("launcher=local", *words.split()))
    problems = list(local_problems(config, memory_bytes=2 * 2**30))
    assert [(problem.key, problem.legal) for problem in problems] == (
        [] if key is None else [(key, (legal,))]
    )
    fitting = {} if key is None else {key: legal}
    assert not list(local_problems(replace(config, **fitting), memory_bytes=2 * 2**30))
    on_slurm = replace(config, launcher=replace(config.launcher, kind="slurm"))
    assert not list(local_problems(on_slurm, memory_bytes=1))


def test_a_path_that_is_near_ends_like_the_missing_one(tmp_path: Path) -> None:
    for name in ("corpus.txt", "corpuss.bin", "train.py"):
        (tmp_path / name).touch()
    assert paths_near(tmp_path / "corpuss.txt") == (tmp_path / "corpus.txt",)
    assert paths_near(tmp_path / "corpus.csv") == ()
    assert paths_near(tmp_path / "train") == (tmp_path / "train.py",)
