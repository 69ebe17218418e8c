"""A run that is behind the other runs of its sweep ends on all ranks, and can go on as if it had not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_parallel.launch.resume import find_problems
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, create, read_sweep, write_sweep
from hpc_parallel.run import main
from tests.workers import Trained, Workers

SMALL = (
    "training.steps=12", "training.log_every=4", "training.validate_every=4", "training.measure_steps=0",
    "training.validation_samples=16", "training.global_batch_size=8", "model.layers=2", "model.dim=32",
    "model.ffn_dim=64", "data.sequence_length=16", "data.max_bytes=100000", "training.precision=float64",
    "training.checkpoint_every=null", "optimizer.warmup_steps=0",
)  # fmt: skip
BEHIND = "optimizer.learning_rate=1e-6"


def assert_equal(one: Trained, other: Trained) -> None:
    for key in ("step", "loss", "validation_loss"):
        assert [line[key] for line in one.lines] == pytest.approx(
            [line[key] for line in other.lines], rel=1e-10
        )
    for name, weight in other.weights.items():
        torch.testing.assert_close(one.weights[name], weight, rtol=1e-10, atol=1e-12)


def test_a_run_that_is_behind_saves_and_goes_on_later(workers: Workers, tmp_path: Path) -> None:
    rates = ("1e-2", "2e-2", "5e-3")
    others = [workers.train("strategy=single", *SMALL, f"optimizer.learning_rate={rate}") for rate in rates]
    sweep = tmp_path / "sweep"
    create(sweep)
    settings = ("sweep.prune=median", f"sweep.folder={sweep}")
    run = workers.prepare("strategy=pipeline", "nodes=2", *SMALL, BEHIND, *settings)
    folders = [*(other.folder for other in others), run.folder.path]
    write_sweep(sweep, Sweep((), "", None, tuple(SweepRun((), path, 1, 1) for path in folders), ()))
    pruned = workers.finish(run)
    middle = sorted(other.lines[1]["validation_loss"] for other in others)[1]
    assert (pruned.summary["outcome"], pruned.summary["steps"]) == ("pruned", 4)
    assert pruned.summary["ended_early"] == (
        f"pruned at step 4: validation_loss: its best is {pruned.lines[1]['validation_loss']:.4g}, "
        f"and the median of 3 other runs is {middle:.4g}"
    )
    assert [checkpoint.step for checkpoint in complete(run.folder.checkpoints)] == [4]
    assert list(find_problems(run.folder, run.folder.read_config())) == []
    # What `resume=` writes: keys of the sweep are no part of a run's own command line.
    write_text(run.folder.config, run.folder.config.read_text().replace("prune: median", "prune: 'off'"))
    again = workers.finish(run)
    assert again.summary["outcome"] == "completed"
    assert_equal(again, workers.train("strategy=single", *SMALL, BEHIND))


@pytest.mark.full
def test_a_sweep_ends_one_run_and_starts_it_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    here = ("launcher=local", "launcher.snapshot=false", "device=cpu", "strategy=single", *SMALL)
    rates = "optimizer.learning_rate=1e-2,2e-2,5e-3,1e-6"
    assert main(["-m", rates, "sweep.prune=median", "hydra.sweep.dir=sweep", *here]) == 0
    said = capsys.readouterr().out
    assert "optimizer.learning_rate=1e-06: pruned at step 4: validation_loss: its best is " in said
    assert "3 completed, 1 pruned" in said
    assert main(["-m", "sweep.resume=sweep"]) == 0
    assert "nothing is missing in " in capsys.readouterr().out
    run = read_sweep(tmp_path / "sweep").runs[-1].run_dir
    assert main([f"resume={run}"]) == 0
    assert main([BEHIND, "run_dir=alone", *here]) == 0
    resumed, alone = (find_runs(path)[0].metrics for path in (run, tmp_path / "alone"))
    for key in ("step", "loss", "validation_loss"):
        assert [line[key] for line in resumed] == pytest.approx([line[key] for line in alone], rel=1e-10)
