"""Any layout goes on from what any other wrote, and ends where one device does that never stopped."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from hpc_parallel.record.attempts import starts
from hpc_parallel.record.checkpoint_index import MANIFEST, complete
from hpc_parallel.strategies.precision import WEIGHTS
from hpc_parallel.worker.train import STATISTICS, other_statistics
from tests.marks import in_full
from tests.parity import largest_difference, weight_difference
from tests.workers import Train, Trained, Workers, do_or_refuse

STEPS, HALF = 4, 2
COMMON = (
    f"training.steps={STEPS}",
    f"training.checkpoint_every={HALF}",
    "training.log_every=1",
    "training.validate_every=null",
    "training.measure_steps=0",
    "training.global_batch_size=16",
    "training.precision=float64",
    "optimizer.warmup_steps=3",
)
TRANSFORMER = (
    "data.sequence_length=32", "data.max_bytes=400000", "model.layers=4", "model.dim=64", "model.ffn_dim=160",
)  # fmt: skip
CONVNET = (
    "model=segmenter", "data=cells", "data.samples=64", "model.channels=[8,12,16]", "data.height=32",
    "data.width=48",
)  # fmt: skip
# Each reads what the one before it wrote.
LAYOUTS = {
    "single": ("strategy=single",),
    "pipeline 2": ("strategy=pipeline", "nodes=2"),
    "shard 2 x tensor 2": ("strategy=fsdp", "nodes=4", "strategy.shard=2", "strategy.tensor=2"),
    "dualpipev 2": ("strategy=pipeline", "nodes=2", "strategy.schedule=dualpipev"),
    "data 2": ("strategy=data", "nodes=2"),
    "dedicated server": ("strategy=parameter_server", "nodes=3"),
    "fsdp 4": ("strategy=fsdp", "nodes=4"),
    "pipeline 2 x tensor 2": ("strategy=hybrid", "nodes=2", "gpus_per_node=2", "strategy.microbatches=4"),
    "context 2": ("strategy=context", "nodes=2"),
    "dataparallel 2": ("strategy=dataparallel", "gpus_per_node=2"),
    "hsdp 2 x 2": ("strategy=hsdp", "nodes=2", "gpus_per_node=2"),
    "tensor 2": ("strategy=tensor", "nodes=2"),
    "pipeline 2 x replicate 2": ("strategy=pipeline", "nodes=4", "strategy.pipeline=2",
                                  "strategy.replicate=2"),
    "single again": ("strategy=single",),
}  # fmt: skip
EXPERTS = (
    "model=moe_tiny", "model.layers=2", "model.dim=32", "model.ffn_dim=24", "data.sequence_length=32",
    "data.max_bytes=400000", "model.gate=sigmoid", "model.balance_step=0.1",  # a bias is kept too
)  # fmt: skip
MIXTURES = {
    "expert 4": ("strategy=expert", "nodes=4"),
    "fsdp 2": ("strategy=fsdp", "nodes=2"),
    "replicate 2 x expert 2": ("strategy=expert", "nodes=4", "strategy.expert=2", "strategy.replicate=2"),
    "shard 2 x expert 2": ("strategy=fsdp", "nodes=4", "strategy.expert=2"),
}
IMAGES = {
    "tile 2 x 2": ("strategy=tile", "nodes=4"),
    "pipeline 2": ("strategy=pipeline", "nodes=2", "strategy.microbatches=1", "strategy.schedule=gpipe"),
    "server": ("strategy=parameter_server", "nodes=3"),
    "fsdp 2": ("strategy=fsdp", "nodes=2"),
    "data 2": ("strategy=data", "nodes=2"),
}


PAIRS = list(pairwise(LAYOUTS))
QUICK = [*PAIRS[:9:3], PAIRS[12]]
CASES = [*QUICK, *in_full(pair for pair in PAIRS if pair not in QUICK)]


@pytest.mark.parametrize(("before", "after"), CASES)
def test_a_transformer_goes_on_in_another_layout(
    workers: Workers, trained: Train, before: str, after: str
) -> None:
    words = (*COMMON, *TRANSFORMER)
    wrote, reference = trained(*words, *LAYOUTS[before]), trained(*words, "strategy=single")
    resumed = go_on(workers, wrote.folder, *TRANSFORMER, *LAYOUTS[after])
    assert_goes_on(resumed, reference)


@pytest.mark.parametrize(
    ("before", "after"),
    [("expert 4", "fsdp 2"), *in_full([*list(pairwise(MIXTURES))[1:], ("shard 2 x expert 2", "expert 4")])],
)
def test_experts_go_on_in_another_layout(workers: Workers, trained: Train, before: str, after: str) -> None:
    words = (*COMMON, *EXPERTS)
    wrote, reference = trained(*words, *MIXTURES[before]), trained(*words, "strategy=single")
    assert_goes_on(go_on(workers, wrote.folder, *EXPERTS, *MIXTURES[after]), reference)


@pytest.mark.parametrize(
    ("before", "after"), [*list(pairwise(IMAGES))[:2], *in_full(list(pairwise(IMAGES))[2:])]
)
def test_a_convnet_goes_on_with_its_running_statistics(
    workers: Workers, trained: Train, before: str, after: str
) -> None:
    """Its last validation uses them."""
    validated = (*CONVNET, f"training.validate_every={STEPS}", "training.validation_samples=32")
    words = (*COMMON, *validated)
    wrote, reference = trained(*words, *IMAGES[before]), trained(*words, "strategy=single")
    resumed = go_on(workers, wrote.folder, *validated, *IMAGES[after])
    assert_goes_on(resumed, reference)
    losses = [run.lines[-1]["validation_loss"] for run in (resumed, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    _, half = complete(wrote.folder / "checkpoints")
    count = wrote.summary["statistics_samples"]
    assert other_statistics(half, count=count) is None
    told = (
        f"up to step {HALF}, BatchNorm took its statistics over {count} samples, and now over {count // 2}:"
    )
    assert str(other_statistics(half, count=count // 2)).startswith(told)
    older = {key: value for key, value in half.manifest.items() if key != STATISTICS}
    (half.path / MANIFEST).write_text(json.dumps(older))
    assert "over an unknown number of samples" in str(other_statistics(half, count=count))


@pytest.mark.parametrize(
    ("optimizer", "layout", "before", "after"),
    [
        ("adamw", "single", "float64", "float32"),
        *in_full(
            [
                ("adamw", "tensor 2", "float32", "float64"),
                ("adamw", "fsdp 4", "float64", "bfloat16"),
                ("muon", "fsdp 4", "float32", "float64"),
            ]
        ),
    ],
)
def test_a_run_goes_on_in_another_precision(
    workers: Workers, trained: Train, optimizer: str, layout: str, before: str, after: str
) -> None:
    """The weights have another type, so the optimizer's state has too."""
    words = (*TRANSFORMER, f"optimizer={optimizer}")
    wrote = trained(*COMMON, *words, "strategy=single", f"training.precision={before}")
    resumed = go_on(workers, wrote.folder, *words, *LAYOUTS[layout], f"training.precision={after}")
    rounding = 2**-9 if after == "bfloat16" else 1e-5
    assert largest_difference(resumed.losses, wrote.losses[HALF:]) < rounding
    assert {weight.dtype for weight in resumed.weights.values()} == {WEIGHTS[after]}


def go_on(workers: Workers, wrote: Path, *words: str) -> Trained:
    """A run from the checkpoint of its first half that the run in `wrote` left, and nothing else of it."""
    newest, half = complete(wrote / "checkpoints")
    assert (newest.step, half.step) == (STEPS, HALF)
    assert half.manifest["samples"] == HALF * 16
    return workers.train(*COMMON, *words, resume_from=half.path)


def assert_goes_on(resumed: Trained, reference: Trained) -> None:
    assert [line["step"] for line in resumed.lines] == list(range(HALF + 1, STEPS + 1))
    assert [line["samples"] for line in resumed.lines] == [line["samples"] for line in reference.lines[HALF:]]
    assert largest_difference(resumed.losses, reference.losses[HALF:]) < 1e-10
    assert weight_difference(resumed, reference) < 1e-10


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(workers: Workers, trained: Train) -> None:
    """A byte flipped, a file cut short, the marker missing: each leaves the checkpoint before."""
    wrote = trained(*COMMON, *TRANSFORMER, *LAYOUTS["fsdp 4"])
    for harm, words in {
        "flip": "__1_0.distcp is not what was written",
        "truncate": "__1_0.distcp has",
        "unmark": None,
        "manifest": "manifest.json is not what was written",
    }.items():
        run = workers.prepare(*COMMON, *TRANSFORMER, *LAYOUTS["data 2"])
        shutil.copytree(wrote.folder / "checkpoints", run.folder.checkpoints)
        newest = complete(run.folder.checkpoints)[0].path
        file = newest / "__1_0.distcp"
        if harm == "flip":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        elif harm == "truncate":
            file.write_bytes(file.read_bytes()[:-100])
        elif harm == "unmark":
            (newest / "complete").unlink()
        else:
            manifest = newest / "manifest.json"
            manifest.write_text(manifest.read_text().replace(f'"step": {STEPS}', '"step": 1'))
        resumed = workers.finish(run)
        assert [line["step"] for line in resumed.lines] == list(range(HALF + 1, STEPS + 1))
        (start,) = starts(run.folder)
        if words is None:
            assert start.warnings == ()
        else:
            (said,) = start.warnings
            assert said.startswith(f"the checkpoint of step {STEPS} is damaged ({words}")
            assert said.endswith(f"continuing from that of step {HALF}: steps {HALF + 1} to {STEPS} are lost")
        found = [checkpoint.damage() for checkpoint in complete(run.folder.checkpoints)]
        assert found == [None, None]  # the damaged one was written anew


def test_a_resumed_run_whose_checkpoints_are_all_damaged_is_refused(
    workers: Workers, trained: Train, tmp_path: Path
) -> None:
    """Nobody who asks to continue expects step 1, in place of the lines and checkpoints that are there."""
    wrote = trained(*COMMON, *TRANSFORMER, "strategy=single")
    run = workers.prepare(*COMMON, *TRANSFORMER, "strategy=single")
    shutil.copytree(wrote.folder / "checkpoints", run.folder.checkpoints)
    for checkpoint in complete(run.folder.checkpoints):
        (checkpoint.path / "manifest.json").unlink()
    lines = shutil.copy(wrote.folder / "metrics.jsonl", run.folder.metrics).read_text()
    config = run.folder.config.read_text()
    run.folder.config.write_text(config.replace("\nresume: null\n", f"\nresume: {run.folder.path}\n"))
    (refusal,) = workers.run(1, do_or_refuse, str(run.folder.path), str(tmp_path))
    assert refusal.startswith(f"ConfigError: resume={run.folder.path} can't continue, because each of its")
    assert refusal.endswith(f"rerun {run.folder.path} trains from step 1, in a new run.")
    assert [checkpoint.step for checkpoint in complete(run.folder.checkpoints)] == [STEPS, HALF]
    assert run.folder.metrics.read_text() == lines
    run.folder.config.write_text(config)  # a restart in a job, which began without `resume=`, begins again
    assert workers.finish(run).losses == wrote.losses  # to the bit


def test_metrics_go_on_in_one_file(workers: Workers, trained: Train) -> None:
    """Lines beyond the checkpoint are trained again: none twice, none missing, and they are the same."""
    wrote = trained(*COMMON, *TRANSFORMER, "strategy=single")
    run = workers.prepare(*COMMON, *TRANSFORMER, "strategy=single")
    shutil.copytree(wrote.folder / "checkpoints" / f"step-{HALF}", run.folder.checkpoints / f"step-{HALF}")
    before = (wrote.folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    run.folder.metrics.write_text("".join(before[: HALF + 1]) + before[-1][:20])
    resumed = workers.finish(run)
    assert [line["step"] for line in resumed.lines] == list(range(1, STEPS + 1))
    assert resumed.losses == wrote.losses  # to the bit
    assert json.loads(run.folder.summary.read_text())["lost_steps"] == 1
