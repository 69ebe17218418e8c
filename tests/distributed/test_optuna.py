"""Optuna's sweeper plugin with real runs: it learns exactly what their summaries say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpc_parallel.record.recorded import find_runs
from hpc_parallel.run import main

pytestmark = pytest.mark.full
pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
TINY = (
    "model.layers=1", "model.dim=32", "model.heads=2", "model.kv_heads=2", "data.max_bytes=100000",
    "device=cpu",    "training.steps=3", "training.validate_every=null", "training.checkpoint_every=null",
    "training.measure_steps=0", "launcher=local", "launcher.snapshot=false",
)  # fmt: skip


def test_optuna_minimises_the_objective_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own record of the trials, and by the file in which it says what was best."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    study = ("hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine")
    asked = (
        "optimizer.learning_rate=interval(1e-4,1e-2)",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
    )
    assert main(["-m", "hydra/sweeper=optuna", *asked, *study, *TINY, "hydra.sweep.dir=sweep"]) == 0
    runs = find_runs(tmp_path / "sweep")
    summaries = [run.summary or {} for run in runs]
    losses = [summary["final_loss"] for summary in summaries]
    rates = [(run.config or {})["optimizer"]["learning_rate"] for run in runs]
    assert [summary["steps"] for summary in summaries] == [3, 3]
    assert len(set(losses)) == len(set(rates)) == 2

    import optuna

    trials = optuna.load_study(study_name="mine", storage="sqlite:///study.db").trials
    assert [trial.value for trial in trials] == losses
    assert [trial.params["optimizer.learning_rate"] for trial in trials] == rates
    best = losses.index(min(losses))
    assert yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text()) == {
        "name": "optuna", "best_value": losses[best], "best_params": {"optimizer.learning_rate": rates[best]}
    }  # fmt: skip
