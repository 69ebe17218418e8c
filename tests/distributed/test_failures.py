"""Real trainings that are harmed in one rank: the line, `failure.json`, and what a skipped step leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.launch.run_files import write
from tests.composed import prepared
from tests.distributed.test_local_launcher import HOST, AgentServer, agent_server, content, session
from tests.marks import in_full
from tests.parity import largest_difference, weight_difference
from tests.workers import Train, Workers, train_here

SMALL = (
    "device=cpu",
    "launcher.snapshot=false",
    "launcher.check_imports=false",  # the ranks import these classes
    "training.steps=6",
    "training.log_every=1",
    "training.validate_every=null",
    "training.measure_steps=0",
    "training.global_batch_size=8",
    "training.precision=float64",
    "data.sequence_length=16",
    "data.max_bytes=200000",
    "model.dim=32",
    "model.ffn_dim=64",
    "model._target_=tests.models.Harmed",
    "strategy.verify=never",  # its pass number `at` would come in the comparison
)
TWO = ("strategy=data", "gpus_per_node=2")
PIPELINE = ("strategy=pipeline", "nodes=2", "strategy.microbatches=4")  # blocks 0, 1 | 2, 3
QUICK = ("cluster.collective_timeout_s=12", "cluster.hang_timeout_s=null")
Failing = Callable[..., dict[str, Any]]


def harm(what: str, *, at: int, victim: int) -> tuple[str, ...]:
    return (f"+model.harm={what}", f"+model.at={at}", f"+model.victim={victim}")


@pytest.fixture(scope="module")
def training_agents() -> Iterator[AgentServer]:
    with agent_server() as server:
        yield server


@pytest.fixture
def failing(training_agents: AgentServer, tmp_path: Path) -> Failing:
    """Train through the real agent until it fails; the content of `failure.json`."""

    def train(*overrides: str) -> dict[str, Any]:
        run = prepared(f"run_dir={tmp_path / 'run'}", *SMALL, *overrides)
        write(run)
        agent = training_agents.start(run.folder)
        assert training_agents.exit_code() == 1
        assert session(agent) == set()
        found = content(run.folder.failure)
        assert content(run.folder.summary)["outcome"] == "failed"
        return found

    return train


@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "place"),
    [*in_full([("memory", "block 2")]), ("backward", "block 2's backward pass")],
)
def test_out_of_memory_names_the_block(failing: Failing, what: str, place: str) -> None:
    found = failing(*PIPELINE, *harm(what, at=1, victim=1))
    assert re.fullmatch(
        rf"rank 1 on {HOST} failed first: out of memory in {place} "
        r"\(asked 4096\.0 TiB, free \d+\.\d [MGT]iB\); 1 follower",
        found["line"],
    )
    assert (found["rank"], found["node"], found["kind"]) == (1, 1, "out_of_memory")
    assert (found["details"]["where"], found["details"]["asked_bytes"]) == (place, 2**52)
    assert found["details"]["step"] == 1
    assert [other["rank"] for other in found["followers"]] == [0]


@pytest.mark.processes
def test_an_error_in_the_model_is_reported_with_its_step(failing: Failing) -> None:
    found = failing(*TWO, *harm("bug", at=3, victim=1))
    line = rf"rank 1 on {HOST} failed first: ValueError: a bad label \(\w+\.py:\d+\); 1 follower"
    assert re.fullmatch(line, found["line"])
    assert (found["kind"], found["details"]) == ("error", {"where": "block 2", "step": 3})
    assert {"in block 2", "in step 3"} < set(found["traceback"])


@pytest.mark.processes
@pytest.mark.parametrize(
    ("noticed", "kind", "place"),
    [
        (("cluster.hang_timeout_s=8",), "hang",
         r", in step 2 at \S+ in \w+ for 8 s; others wait in step 2 at \S+ in sum_gradients"),
        *in_full([(QUICK, "collective_timeout", " at step 2")]),
    ],
)  # fmt: skip
def test_a_skipped_collective_names_who_skipped_it(
    failing: Failing, noticed: tuple[str, ...], kind: str, place: str
) -> None:
    """Of the sum over the first and the last stage, a group of its own, in the second step."""
    layout = ("strategy=pipeline", "nodes=3", "strategy.microbatches=4", "strategy.cuts=[1,2]")
    found = failing(*layout, *noticed, *harm("skip", at=4 + 1, victim=2))
    assert (found["rank"], found["kind"]) == (2, kind)
    assert re.fullmatch(
        rf"rank 2 on {HOST} failed first: missing from all_?reduce \(collective \d+\), in which rank 0 "
        rf"waited; its last collective was all_?reduce \d+{place}; 2 followers",
        found["line"],
    )


@pytest.mark.processes
def test_a_rank_that_others_wait_for_in_a_receive_is_named(failing: Failing) -> None:
    """torch records no send or receive of gloo."""
    found = failing(*PIPELINE, "cluster.hang_timeout_s=8", *harm("sleep", at=4 + 1, victim=1))
    assert re.fullmatch(
        rf"rank 1 on {HOST} failed first: hangs in step 2 at tests/models.py:\d+ in _sleep for 8 s; others "
        r"wait in step 2 at strategies/pipeline.py:\d+ in _run; 1 follower",
        found["line"],
    )


LAYOUTS = {  # words; the passes of a step; a rank that has block 2
    "data": (("strategy=data", "gpus_per_node=2"), 1, 1),
    "fsdp": (("strategy=fsdp", "gpus_per_node=2"), 1, 0),
    "tensor": (("strategy=tensor", "gpus_per_node=2", "model.kv_heads=2"), 1, 1),
    "ring": (("strategy=context", "gpus_per_node=2"), 1, 1),
    "pipeline": (("strategy=pipeline", "nodes=3", "strategy.microbatches=4", "strategy.cuts=[2,3]"), 4, 1),
    "server": (("strategy=parameter_server", "gpus_per_node=3", "training.global_batch_size=12"), 1, 2),
    "hybrid": (("strategy=hybrid", "strategy.pipeline=2", "strategy.tensor=1", "strategy.replicate=2",
                "gpus_per_node=4", "strategy.microbatches=2"), 2, 3),
}  # fmt: skip
HARMS = {
    "sleep": "hangs in step 3 at tests/models.py:",
    "sleep in the backward pass": "hangs in step 3 at tests/models.py:",
    "hold the interpreter": "hangs at tests/models.py:",
    "stop": "stopped by a signal (state T) at ",
    "leave": "ended with exit code 0 while others waited for it: ",
}


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("what", HARMS)
def test_the_rank_that_others_wait_for_is_named(failing: Failing, what: str, layout: str) -> None:
    words, passes, victim = LAYOUTS[layout]
    found = failing(*words, "cluster.hang_timeout_s=8", *harm(f"'{what}'", at=2 * passes + 1, victim=victim))
    assert found["line"].startswith(f"rank {victim} on {HOST} failed first: {HARMS[what]}"), found["line"]


@pytest.mark.full
@pytest.mark.processes
def test_a_rank_that_never_reports_is_named(failing: Failing) -> None:
    found = failing(*TWO, *QUICK, *harm("sleep", at=3, victim=1))
    assert (found["rank"], found["kind"]) == (1, "collective_timeout")
    assert re.fullmatch(
        rf"rank 1 on {HOST} failed first: missing from \w+ \(collective \d+\), in which rank 0 "
        "waited at step 3; 1 follower",
        found["line"],
    )


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    ("callback", "place"),
    [("SleepsAtStart", r"1; it stood at tests/callbacks.py:\d+ in on_start"),
     ("SleepsAtEnd", r"6; it stood at tests/callbacks.py:\d+ in on_end")],
)  # fmt: skip
def test_a_rank_that_hangs_before_or_after_the_steps_is_named_with_its_place(
    failing: Failing, callback: str, place: str
) -> None:
    """No watchdog looks there: to read data or to send results may take any time."""
    found = failing(
        *TWO,
        *QUICK,
        *harm("none", at=-1, victim=0),
        f"training.callbacks=[{{_target_:tests.callbacks.{callback}}}]",
    )
    assert re.fullmatch(
        rf"rank 0 on {HOST} failed first: missing from \w+ \(collective \d+\), in which rank 1 "
        rf"waited at step {place}; 1 follower",
        found["line"],
    )
    assert "tests/callbacks.py" in "".join(found["traceback"])


@pytest.mark.processes
def test_a_loss_that_is_not_finite_stops_all_before_it_is_learnt_from(
    failing: Failing, tmp_path: Path
) -> None:
    """Five steps after, at the next logged line; the step and the rank are those of the harm.

    A callback uses processes of its own meanwhile: that they end is no news in the log.
    """
    forks = "training.callbacks=[{_target_:tests.callbacks.EndsProcess}]"
    found = failing(*TWO, forks, "training.log_every=6", *harm("poison", at=3, victim=1))
    assert found["line"] == (
        f"rank 1 on {HOST} failed first: the loss of step 3 is nan; the first gradient that is not "
        "finite is that of stem.weight; 1 follower"
    )
    assert (found["kind"], found["details"]["step"], found["details"]["parameter"]) == (
        "nonfinite", 3, "stem.weight",
    )  # fmt: skip
    assert found["followers"] == [{"rank": 0, "host": HOST, "kind": "stopped"}]
    assert "most recent call" not in (tmp_path / "run/logs/rank-0.err").read_text()


@pytest.mark.parametrize(
    ("layout", "kind", "rank"),
    [
        (("strategy=pipeline", "nodes=2", "strategy.microbatches=2", "strategy.cuts=[2]"), "output", 1),
        (("strategy=fsdp", "nodes=2", "training.activation_checkpointing=full"), "gradient", 0),
        *in_full([
            (("strategy=single",), "output", 0),
            (("strategy=pipeline", "nodes=2", "strategy.microbatches=2", "strategy.cuts=[2]"), "gradient", 1),
            (("strategy=parameter_server", "nodes=3"), "output", 1),
            (("strategy=single", "training.compile=true"), "output", 0),
        ]),
    ],
)  # fmt: skip
def test_the_layer_that_was_not_finite_first_is_named(
    workers: Workers, layout: tuple[str, ...], kind: str, rank: int
) -> None:
    model = ("~model", f"+model={{_target_: tests.nonfinite_models.Harmed, kind: {kind}}}")
    words = ("strategy.verify=never", "training.log_every=3", "training.measure_steps=0")
    small = [word for word in SMALL if not word.startswith("model.")]
    run = workers.prepare(*small, *model, *layout, *words)
    errors = workers.run(run.processes, error_of, str(run.folder.path))
    # In the backward pass the harm is seen at the output of the layer before it.
    layer = {"output": "blocks.2.norm.1", "gradient": "blocks.2.norm.0"}[kind]
    layer = "blocks.2" if "training.compile=true" in layout else layer
    subject = {"output": "the output", "gradient": "the gradient of the output"}[kind]
    name, message, found = errors[rank]
    assert (name, found) == ("NonFiniteError", layer)
    clause = rf"{subject} of {layer} was the first that is not finite \((nan|-?inf)\)"
    assert re.fullmatch(rf".* step 1.*; {clause}", message)
    assert {kind for index, (kind, _, _) in enumerate(errors) if index != rank} <= {"FollowerError"}


def error_of(run_folder: str) -> tuple[str, str, str | None]:
    try:
        train_here(run_folder, {})
    except RuntimeError as error:
        return type(error).__name__, str(error), getattr(error, "details", {}).get("layer")
    return "none", "", None


@pytest.mark.processes
def test_problems_that_only_the_job_finds(failing: Failing) -> None:
    """A model of one block, whatever its keys say, can't make two stages."""
    found = failing(*PIPELINE, "model._target_=tests.models.Bigram")
    assert found["kind"] == "configuration"
    assert "strategy.pipeline = 2 stages are more than the model's 1 blocks" in found["line"]
    assert found["details"] == {"where": "loading"}


@pytest.mark.parametrize(
    ("layout", "passes"),
    [
        (TWO, 1),
        (PIPELINE, 4),
        *in_full(
            [
                (("strategy=fsdp", "gpus_per_node=2"), 1),
                (("strategy=parameter_server", "gpus_per_node=3"), 1),
            ]
        ),
    ],
)
def test_a_skipped_step_is_skipped_alike(trained: Train, layout: tuple[str, ...], passes: int) -> None:
    """Step 3 is harmed on the last rank, or on the one device: the same steps are learnt from."""
    skip = (*SMALL, "training.on_nonfinite=skip")
    alone = trained("strategy=single", *skip, *harm("poison", at=3, victim=0))
    split = trained(*layout, *skip, *harm("poison", at=2 * passes + 1, victim=1))
    for run in (alone, split):
        assert [line["skipped_steps"] for line in run.lines] == [0, 0, 1, 1, 1, 1]
        assert [line["loss"] is None for line in run.lines] == [False, False, True, False, False, False]
        assert run.summary["skipped_steps"] == 1
    kept = [0, 1, 3, 4, 5]
    assert all(math.isfinite(alone.losses[step]) for step in kept)
    curves = [[run.losses[step] for step in kept] for run in (split, alone)]
    assert largest_difference(*curves) < 1e-10
    assert weight_difference(split, alone) < 1e-10


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ("training.checkpoint_every=2",),
        *in_full([(("training.memory_checkpoint_every=2", "training.checkpoint_every=100"),)]),
    ],
)
def test_a_weight_that_differs_between_replicas_stops_the_run(
    words: tuple[str, ...], failing: Failing
) -> None:
    """One weight of rank 1 changes in step 3; step 4 is neither saved nor copied to the hosts' memory."""
    found = failing(*TWO, *words, *harm("flip", at=3, victim=1))
    assert found["line"] == (
        f"rank 1 on {HOST} failed first: blocks.2.attention.query.weight is not that of rank 0, its replica, "
        "after step 4; 1 follower"
    )
    assert (found["kind"], found["details"]) == (
        "replicas", {"step": 4, "parameter": "blocks.2.attention.query.weight"},
    )  # fmt: skip
    assert found["followers"] == [{"rank": 0, "host": HOST, "kind": "stopped"}]
