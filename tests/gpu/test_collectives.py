"""`task=collectives` of one rank over NCCL on an NVIDIA GPU."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_parallel.config.task_schema import COLLECTIVES
from tests import printed
from tests.gpu.test_strategies import DEVICE, pytestmark  # noqa: F401

ALONE = set(COLLECTIVES) - {"send_recv"}  # which takes two


def test_one_rank_over_nccl(tmp_path: Path) -> None:
    words = ("task=collectives", "strategy=data", "nodes=1", "gpus_per_node=1", "launcher=local",
             f"device={DEVICE}", "task.max_bytes=1048576", "task.factor=64", "task.seconds=60")  # fmt: skip
    printed("-m", "hpc_parallel.run", *words, "run_dir=alone", cwd=tmp_path)
    measured = json.loads((tmp_path / "alone" / "collectives.json").read_text())
    rows = measured["rows"]
    assert measured["backend"] == ("nccl" if DEVICE == "cuda" else "gloo")
    assert {row["operation"] for row in rows} == ALONE
    rates = {row["operation"]: row["busbw_bytes_per_s"] for row in rows if row["size_bytes"] == 2**20}
    assert rates["all_reduce"] == rates["all_gather"] == 0  # nothing crosses a bus
    assert rates["broadcast"] > 0
