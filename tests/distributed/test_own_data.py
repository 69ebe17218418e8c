"""A user's map-style dataset, with random numbers in it: any layout, and a resume, follow one device."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpc_parallel.record.checkpoint_index import complete
from tests.marks import in_full
from tests.parity import largest_difference, weight_difference
from tests.workers import Train, Trained, Workers

STEPS, HALF = 6, 3
COMMON = (
    f"training.steps={STEPS}", f"training.checkpoint_every={HALF}", "training.log_every=1",
    f"training.validate_every={HALF}", "training.validation_samples=16", "training.measure_steps=0",
    "training.global_batch_size=16", "training.precision=float64", "model.layers=2", "model.dim=32",
    "model.ffn_dim=48",
)  # fmt: skip
DATA = (  # 70 samples, so that the fourth step begins the next epoch
    "data=dataset", "data.dataset._target_=tests.datasets.Sentences", "+data.dataset.count=74",
    "+data.dataset.noise=0.3", "data.sequence_length=32", "data.vocab_size=256",
)  # fmt: skip
WORDS = (*COMMON, *DATA)
LAYOUTS = {
    "data 2, accumulating 2": ("strategy=data", "nodes=2", "training.microbatch_size=4"),
    "pipeline 2": ("strategy=pipeline", "nodes=2"),
    "fsdp 2": ("strategy=fsdp", "nodes=2"),
    "tensor 2": ("strategy=tensor", "nodes=2"),
    "context 2": ("strategy=context", "nodes=2"),
    "server with 2 workers": ("strategy=parameter_server", "nodes=3"),
    "dataparallel 2": ("strategy=dataparallel", "gpus_per_node=2"),
    "model 2": ("strategy=model", "nodes=2"),
    "hsdp 2 x 2": ("strategy=hsdp", "nodes=2", "gpus_per_node=2"),
    "pipeline 2 x tensor 2": ("strategy=hybrid", "nodes=2", "gpus_per_node=2"),
}
FIRST = "data 2, accumulating 2"


@pytest.mark.parametrize("layout", [FIRST, *in_full((name,) for name in LAYOUTS if name != FIRST)])
def test_layout_follows_one_device(trained: Train, layout: str) -> None:
    assert_equal(trained(*WORDS, *LAYOUTS[layout]), trained(*WORDS, "strategy=single"), steps=STEPS)


@pytest.mark.parametrize(
    ("before", "after"), [(FIRST, "pipeline 2"), *in_full([("pipeline 2", "fsdp 2"), ("tensor 2", FIRST)])]
)
def test_a_resume_goes_on_with_the_next_samples(
    workers: Workers, trained: Train, tmp_path: Path, before: str, after: str
) -> None:
    checkpoint = complete(trained(*WORDS, *LAYOUTS[before]).folder / "checkpoints")[-1]
    assert checkpoint.step == HALF
    copy = shutil.copytree(checkpoint.path, tmp_path / checkpoint.path.name)
    resumed = workers.train(*WORDS, *LAYOUTS[after], resume_from=copy)
    assert_equal(resumed, trained(*WORDS, "strategy=single"), steps=STEPS - HALF)


def assert_equal(found: Trained, wanted: Trained, *, steps: int) -> None:
    assert largest_difference(found.losses[-steps:], wanted.losses[-steps:]) < 1e-10
    assert weight_difference(found, wanted) < 1e-10
    assert abs(found.lines[-1]["validation_loss"] / wanted.lines[-1]["validation_loss"] - 1) < 1e-10
    assert found.lines[-1]["tokens_per_s"] is not None


@pytest.mark.full
@pytest.mark.parametrize("layout", [FIRST, "pipeline 2", "fsdp 2", "context 2", "tensor 2"])
def test_arrow_files_follow_one_device(workers: Workers, tmp_path: Path, layout: str) -> None:
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    table = pa.table(
        {"input_ids": [[(row * 7 + place) % 251 for place in range(50 + row)] for row in range(90)]}
    )
    with pa.ipc.new_stream(str(tmp_path / "tokens.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=20)
    files = (
        "data=parquet", f"data.path={tmp_path}", "data.sequence_length=32", "data.vocab_size=256",
    )  # fmt: skip
    alone = workers.train(*COMMON, *files, "strategy=single")
    split = workers.train(*COMMON, *files, *LAYOUTS[layout])
    assert_equal(split, alone, steps=STEPS)
    checkpoint = complete(split.folder / "checkpoints")[-1]
    copy = shutil.copytree(checkpoint.path, tmp_path / checkpoint.path.name)
    resumed = workers.train(*COMMON, *files, "strategy=single", resume_from=copy)
    assert_equal(resumed, alone, steps=STEPS - HALF)
