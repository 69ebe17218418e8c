"""`rerun`: the kept source runs again, bit for bit, whatever has become of the checkout."""

from __future__ import annotations

import json
from pathlib import Path

from tests import printed
from tests.unit.test_snapshot import git

MODEL = """
import torch
from torch import nn
from hpc_parallel.models.layered import LayeredModel

SCALE = 1.0

class Mine(LayeredModel):
    def __init__(self, *, width):
        super().__init__(
            stem=nn.Embedding(256, width), blocks=[nn.Linear(width, width)], head=nn.Linear(width, 256)
        )

    def loss(self, output, target):
        return SCALE * nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
"""
WORDS = (
    "model=mine", "strategy=single", "launcher=local", "device=cpu", "training.steps=3",
    "training.log_every=1", "training.global_batch_size=2", "training.validate_every=null",
    "data.max_bytes=100000", "data.sequence_length=8", "training.measure_steps=0", "run_dir='first one'",
)  # fmt: skip


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_rerun_has_the_same_bits_after_the_checkout_was_edited(tmp_path: Path) -> None:
    """The model, its configuration and its loss are other ones by then."""
    mine, elsewhere = tmp_path / "my project", tmp_path / "elsewhere"
    (mine / "conf" / "model").mkdir(parents=True)
    elsewhere.mkdir()
    (mine / "mymodel.py").write_text(MODEL)
    (mine / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 8\n")
    (mine / ".gitignore").write_text("first one\nruns\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        git(mine, *words)
    printed("-m", "hpc_parallel", "run", "--config-dir", "conf", *WORDS, cwd=mine)
    first = mine / "first one"
    before = losses(first)
    assert len(before) == 3

    (mine / "mymodel.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 3.0"))
    (mine / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 16\n")
    printed("-m", "hpc_parallel", "rerun", str(first), cwd=elsewhere)
    (second,) = (mine / "runs" / "single").iterdir()
    assert losses(second) == before

    kept, of_first = (json.loads((run / "environment.json").read_text()) for run in (second, first))
    assert kept["rerun_of"] == str(first)
    assert kept["git_commit"] == of_first["git_commit"]
    assert kept["git_diff"] == ""  # the source that runs has no change
    assert kept["overrides"] == list(WORDS[:-1])
    # of that run the source is kept again, so that it can be repeated without the first
    assert (second / "code/my project/mymodel.py").read_text() == MODEL
    assert not (second / "code" / "my project" / "runs").exists()
    assert second.stat().st_mode & 0o777 == 0o700
    assert not list(elsewhere.iterdir())
