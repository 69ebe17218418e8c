"""The lines of docs/mpi.md, typed by hand: a rank is `python -m hpc_parallel.worker RUN_FOLDER`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from hpc_parallel.machine.fabric import STORE
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.run import main
from tests import printed
from tests.workers import Workers

pytestmark = pytest.mark.processes

SMALL = ("strategy=data", "device=cpu", "training.steps=6", "training.log_every=1", "data.max_bytes=300000",
         "training.validation_samples=32", "data.sequence_length=32", "model.layers=2", "model.dim=64",
         "model.ffn_dim=160")  # fmt: skip


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def test_torchrun_starts_the_ranks_of_a_prepared_run(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (*SMALL, "gpus_per_node=2", "launcher=script", "launcher.snapshot=false", "run_dir=runs/mine")
    assert main(list(words)) == 0
    line = "-m torch.distributed.run --nproc-per-node=2 -m hpc_parallel.worker runs/mine"
    printed(*shlex.split(line), cwd=tmp_path)
    folder = RunFolder(tmp_path / "runs" / "mine")
    assert losses(folder) == pytest.approx(workers.train(*SMALL, "strategy=single").losses, rel=1e-5)
    environment = json.loads(folder.environment.read_text())
    assert len(environment["ranks"]) == 2
    reasons, variables = environment["fabric_reasons"], environment["fabric"]
    assert reasons["GLOO_SOCKET_IFNAME"] == "all ranks are on this machine"
    assert reasons["GLOO_ENABLE_STORE_V2_API"] == STORE
    assert reasons["TORCH_FR_BUFFER_SIZE"] == "the last collectives, for failure.json"
    assert reasons.keys() <= variables.keys()
    assert environment["fabric_by_host"] == []
