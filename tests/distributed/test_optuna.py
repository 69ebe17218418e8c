"""Optuna's sweeper plugin with real runs: it learns exactly what their summaries say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from hpc_parallel.config.tasks import LEAST_OTHERS
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.run import main
from hpc_parallel.training.pruning import behind

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


def test_optuna_learns_the_loss_of_a_pruned_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trials that train, and one with a learning rate at which nothing is learnt."""
    import optuna

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    study = optuna.create_study(study_name="mine", storage="sqlite:///study.db")
    rates = [1e-2, 2e-2, 5e-3, 1e-7]
    for rate in rates:
        study.enqueue_trial({"optimizer.learning_rate": rate})
    words = (
        "hydra/sweeper=optuna", "optimizer.learning_rate=interval(1e-8,1e-1)", "hydra.sweeper.n_trials=4",
        "hydra.sweeper.n_jobs=1", "hydra.sweeper.storage=sqlite:///study.db", "hydra.sweeper.study_name=mine",
        "sweep.prune=median", "hydra.sweep.dir=sweep", *TINY, "training.steps=8", "training.log_every=4",
        "optimizer.warmup_steps=0",
    )  # fmt: skip
    assert main(["-m", *words]) == 0
    summaries = [run.summary or {} for run in find_runs(tmp_path / "sweep")]
    assert [(summary["outcome"], summary["steps"]) for summary in summaries] == [
        *[("completed", 8)] * 3, ("pruned", 4)
    ]  # fmt: skip
    trials = optuna.load_study(study_name="mine", storage="sqlite:///study.db").trials
    assert [trial.params["optimizer.learning_rate"] for trial in trials] == rates
    assert [trial.value for trial in trials] == [summary["final_loss"] for summary in summaries]


def test_the_rule_is_that_of_optunas_median_pruner() -> None:
    """On losses with ties. Optuna compares with trials that have completed."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    draw, pruner = random.Random(0), optuna.pruners.MedianPruner(0, 0, n_min_trials=LEAST_OTHERS)
    decisions = []
    for _ in range(200):
        study = optuna.create_study(pruner=pruner)
        others = [[draw.randint(0, 9) / 8 for _ in range(3)] for _ in range(draw.randint(1, 7))]
        for losses in others:
            values = dict(enumerate(losses))
            study.add_trial(optuna.trial.create_trial(value=losses[-1], intermediate_values=values))
        trial, mine = study.ask(), [draw.randint(0, 9) / 8 for _ in range(3)]
        for step, loss in enumerate(mine):
            trial.report(loss, step)
        decisions.append(behind(min(mine), [losses[-1] for losses in others]) is not None)
        assert decisions[-1] == trial.should_prune()
    assert {True, False} == set(decisions)
