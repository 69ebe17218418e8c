"""`profile=torch`: the trace has the ranges of a training, and a recorded training is the same training."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from contextlib import redirect_stdout
from unittest import mock

import pytest
import yaml

from hpc_parallel.profiling import measurement, rank_times
from tests.marks import in_full
from tests.workers import Workers, train_here

WORDS = (
    "strategy=hybrid", "nodes=2", "gpus_per_node=2", "model.layers=2", "model.dim=32", "model.heads=2",
    "data.sequence_length=16", "training.steps=4", "training.measure_steps=0", "training.log_every=1",
    "training.global_batch_size=16", "strategy.microbatches=2", "training.validation_samples=16",
)  # fmt: skip


def test_a_trace_of_the_chosen_ranks(workers: Workers) -> None:
    plain = workers.train(*WORDS)
    recorded = workers.train(
        *WORDS, "profile.kind=torch", "profile.ranks=[1,2]", "profile.first_step=3", "profile.steps=1"
    )
    assert recorded.losses == plain.losses
    folder = recorded.folder / "profile"
    assert sorted(path.name for path in folder.iterdir()) == [
        "rank-1.json.gz", "rank-1.txt", "rank-2.json.gz", "rank-2.txt",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    for rank, stage in ((1, 0), (2, 1)):
        trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
        names = Counter(
            event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
        )
        assert names["step 3"] == names["data"] == names["optimizer"] == 1
        assert "step 2" not in names
        assert "step 4" not in names
        forwards = {f"pipeline stage {stage} forward {microbatch}" for microbatch in (0, 1)}
        assert {names[name] for name in forwards} == {1}
        # The norm of the gradient is added up over each axis that splits weights. Over tensor,
        # so are the gradients of the whole weights of norms in one message, and on the last stage three
        # values of the loss (maximum, sum, target's logit) of each of the 2 microbatches.
        assert names["all_reduce pipeline"] == 1
        assert names["all_reduce tensor"] == 2 + 3 * 2 * stage
        text = (folder / f"rank-{rank}.txt").read_text().splitlines()
        assert text[0] == f"rank {rank}, steps 3 to 3 since the start"
        shares = [float(line.split("ms")[1].split("%")[0]) for line in text[1:6]]
        assert sum(shares) == pytest.approx(100, abs=0.3)


def test_torch_does_not_profile_beside_nsight(workers: Workers) -> None:
    """As in a job with profile=nsys, on ranks that nsys does not record."""
    small = [word for word in WORDS if not word.startswith(("strategy", "gpus_per_node"))]
    run = workers.prepare("strategy=data", *small, "training.measure_steps=1")
    values = yaml.safe_load(run.folder.config.read_text())
    values["profile"] |= {"kind": "nsys", "ranks": []}
    run.folder.config.write_text(yaml.safe_dump(values))
    printed = workers.run(run.processes, train_unprofiled, str(run.folder.path))
    why = "because CUPTI serves one profiler of a process"
    line = f"profile=nsys: no step is measured and no rank is timed, {why}"
    assert [line in text.splitlines() for text in printed] == [True, False]
    summary = json.loads(run.folder.summary.read_text())
    assert summary["steps"] == 4
    assert summary["exposed_communication_share"] is summary["traffic_bytes"] is None


def train_unprofiled(run_folder: str) -> str:
    """Train with a profiler that refuses; returns what the rank prints. Ranks would be timed at step 2."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("torch's profiler was used")

    printed = io.StringIO()
    with (
        mock.patch.object(measurement, "profile", refuse),
        mock.patch.object(rank_times, "FIRST_STEP", 2),
        redirect_stdout(printed),
    ):
        train_here(run_folder, {})
    return printed.getvalue()


NAMED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "send", "recv")
LANGUAGE = ("model.layers=2", "model.dim=16", "model.heads=2", "data.sequence_length=16",
            "training.global_batch_size=4")  # fmt: skip
IMAGES = ("model=convnet", "model.channels=[4,4]", "data=digits",
          "training.global_batch_size=4")  # fmt: skip


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("strategy=context", *LANGUAGE), {"send_recv context"}),
        (("strategy=parameter_server", *LANGUAGE), {"send parameter server", "recv parameter server"}),
        (("strategy=expert", "model=moe_tiny", *LANGUAGE), {"all_to_all expert", "all_reduce expert"}),
        (("strategy=tile", *IMAGES), {"all_to_all tile", "all_reduce tile"}),
        (("strategy=data", "strategy.gradient_compression=bfloat16", *LANGUAGE), {"all_reduce replicate"}),
        (("strategy=pipeline", *LANGUAGE), {"all_reduce pipeline", "all_reduce tied ends"}),
        *in_full([
            (("strategy=context", "strategy.context_attention=gather", *LANGUAGE),
             {"all_gather context", "reduce_scatter context"}),
            (("strategy=context", "strategy.context_attention=all_to_all", *LANGUAGE),
             {"all_to_all context"}),
            (("strategy=data", *IMAGES), {"all_reduce replicate"}),  # of BatchNorm
        ]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_collectives_are_named_by_their_axis(
    words: tuple[str, ...], expected: set[str], workers: Workers
) -> None:
    run = workers.train(
        "nodes=2", *words, "training.steps=1", "training.measure_steps=0", "training.validation_samples=4",
        "profile.kind=torch", "profile.first_step=1", "profile.steps=1", "profile.ranks=[1]",
    )  # fmt: skip
    trace = json.loads(gzip.decompress((run.folder / "profile/rank-1.json.gz").read_bytes()))
    names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"}
    assert {name for name in names if name.partition(" ")[0] in NAMED} == expected
