"""Another sweeper, launcher or callback of Hydra's: what it gets back, and what is refused before."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from hpc_parallel.config.tasks import FIGURES, objective_problems
from hpc_parallel.failure.summary import MEASURED, summarise
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import write
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.recorded import find_runs
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.run import main
from tests.commands.test_sweep import only_sweep
from tests.composed import prepared
from tests.marks import in_full

NOTED: list[JobReturn] = []
ASKED: list[PreparedRun] = []
CALLED = f"+hydra.callbacks.mine._target_={__name__}.Noting"
HERE = ("launcher=local", "launcher.snapshot=false")


class Noting(Callback):
    """Stands in for whoever wants to know what a run came to."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        NOTED.append(job_return)


class StandIn:
    """A launcher whose runs end at once: the loss is the learning rate, a seed of 13 fails, one of 55 is
    pruned, one of 99 is ended as on this machine, one of 77 as a job that is followed."""

    def launch(self, run: PreparedRun) -> int:
        assert run.config.launcher.wait
        ASKED.append(run)
        write(run)
        if run.config.seed == 99:
            raise KeyboardInterrupt
        if run.config.seed == 77:
            write_json(run.folder.summary, {"outcome": "cancelled"})
            return 1
        failed = run.config.seed == 13
        summary = {
            "outcome": {13: "failed", 55: "pruned"}.get(run.config.seed, "completed"),
            "ended_early": "pruned at step 4" if run.config.seed == 55 else None,
            "final_loss": run.config.optimizer.learning_rate,
            "samples_per_s": 100 * run.config.seed,
            **({"validation_top3": 0.75} if run.config.model["_target_"] == "own_digits.Digits" else {}),
        }
        write_json(run.folder.summary, summary)
        if failed:
            write_json(run.folder.failure, {"line": "rank 0 failed first: bad luck\x1b[2J"})
        return int(failed)


@pytest.fixture(autouse=True)
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr("hpc_parallel.sweep.guided.launcher_of", lambda run: (StandIn(), "launcher stand-in"))
    yield here
    NOTED.clear()
    ASKED.clear()


def test_each_run_returns_its_objective_to_the_sweeper(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "optimizer.learning_rate=0.25,0.5", "seed=1,2", CALLED, *HERE]) == 0
    assert [done.return_value for done in NOTED] == [0.25, 0.25, 0.5, 0.5]
    folder, sweep = only_sweep(here)
    assert [run.run_dir for run in sweep.runs] == [run.folder.path for run in ASKED]
    assert [run.path for run in find_runs(folder)] == [run.folder.path for run in ASKED]
    assert folder.stat().st_mode & 0o777 == 0o700
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("runs/data/")]
    assert [row[1:] for row in rows] == [
        [f"optimizer.learning_rate={rate}", f"seed={seed}", f"{rate:g}", "completed"]
        for rate in (0.25, 0.5) for seed in (1, 2)
    ]  # fmt: skip


def test_several_figures_are_handed_back_in_their_order() -> None:
    words = ["sweep.objective=[samples_per_s,final_loss]", "optimizer.learning_rate=0.25", "seed=3,4"]
    assert main(["-m", *words, CALLED, *HERE]) == 0
    assert [done.return_value for done in NOTED] == [[300, 0.25], [400, 0.25]]


def test_a_pruned_run_returns_its_last_loss(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["seed=1,55", "optimizer.learning_rate=0.25", "sweep.prune=median", CALLED, *HERE]
    assert main(["-m", *words]) == 0
    assert [done.return_value for done in NOTED] == [0.25, 0.25]
    folder, sweep = only_sweep(here)
    assert {run.config.sweep.folder for run in ASKED} == {str(folder)}
    assert "sweep" not in str(sweep.runs[0].overrides)
    lines = capsys.readouterr().out.splitlines()
    assert any("seed=55" in line and line.endswith("pruned at step 4") for line in lines)


def test_losses_that_cannot_be_compared_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["training.global_batch_size=8,16", "sweep.objective=samples_per_s", "sweep.prune=median"]
    assert main(["-m", *words, "data.max_bytes=1000000,2000000", CALLED, *HERE]) == 2
    told = capsys.readouterr().err
    for key in ("data", "training.global_batch_size"):
        assert (
            f"median compares losses at the same step, and {key} has several values. Try sweep.prune=off."
            in told
        )
    assert (
        "sweep.objective = samples_per_s is not the loss alone, by which sweep.prune compares runs. "
        "Try sweep.objective=final_loss." in told
    )
    assert not ASKED


def test_a_failed_run_is_the_sweepers_to_deal_with(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=13,2", CALLED, *HERE]) == 1
    assert [done.status for done in NOTED] == [JobStatus.FAILED, JobStatus.COMPLETED]
    told = capsys.readouterr()
    reason = "rank 0 failed first: bad luck\\x1b[2J"  # escaped: any file name may be in it
    assert f"the sweeper stopped: {reason}: {ASKED[0].folder.path}\n" in told.err
    assert reason in told.out
    assert "\x1b" not in told.out
    assert "Traceback" not in told.err
    assert len(only_sweep(here)[1].runs) == 2


def test_a_run_without_the_figure_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "sweep.objective=bubble_share", CALLED, *HERE]) == 1
    assert "completed without bubble_share" in capsys.readouterr().err


def own_model(*words: str) -> list[str]:
    """Words of a training of `Digits` of docs/training.md, which has metrics of its own."""
    return ["model=convnet", "data=digits", "model._target_=own_digits.Digits", *words]


def test_a_metric_of_the_users_model_is_announced_and_returned(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own_digits.py").write_text("from hpc_parallel.models.convnet import ConvNet as Digits\n")
    words = own_model("seed=1,55", "sweep.objective=[validation_top3,final_loss]")
    assert main(["-m", *words, CALLED, *HERE]) == 0
    assert [done.return_value for done in NOTED] == [[0.75, 0.003], [0.75, 0.003]]
    announced = "sweep.objective=validation_top3 can't be checked before the first run ends"
    assert capsys.readouterr().err.count(announced) == 1
    assert main(["-m", *words, "sweep.objective=validation_top5", CALLED, *HERE, "hydra.sweep.dir=b"]) == 1
    assert "completed without validation_top5: " in capsys.readouterr().err


def test_metrics_are_refused_where_no_run_can_have_them(tmp_path: Path) -> None:
    def told(*words: str) -> list[str]:
        return list(map(str, objective_problems(prepared(*words).config)))

    images = ("model=convnet", "data=digits", "training.global_batch_size=16")
    assert told(*images, "sweep.objective=validation_accuracy") == []
    assert told("task=infer", *images, "sweep.objective=validation_accuracy") == []
    (wrong,) = told(*images, "sweep.objective=validation_acuracy")
    assert wrong.endswith("Try sweep.objective=validation_accuracy.")
    (wrong,) = told("sweep.objective=validation_accuracy")  # a language model of ours
    assert wrong.endswith("busiest_rank_traffic_bytes. Try sweep.objective=validation_loss.")
    assert told(*images, "sweep.objective=validation_accuracy", "training.validate_every=null") == [
        "training.validate_every = null leaves no validation_accuracy for sweep.objective. "
        "Try training.validate_every=100."
    ]
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["task=script", f"script.file={script}", r"script.metrics='(?P<step>\d+) (?P<validation_f1>\S+)'"]
    assert told(*words, "sweep.objective=validation_f1") == []
    assert told(*words) == [
        "sweep.objective = final_loss is not a figure of task=script, which has validation_f1. "
        "Try sweep.objective=validation_f1."
    ]
    script.write_text("import job_context\n")  # it may log anything
    assert told(*words, "sweep.objective=validation_f2") == []


def test_an_impossible_run_is_reported_and_the_others_stay(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "nodes=1,2", "strategy=pipeline", "strategy.pipeline=2", CALLED, *HERE]) == 1
    told = capsys.readouterr()
    problem = "strategy.pipeline = 2 makes the product of all degrees 2, but there are nodes=1"
    assert f"skipped 1 combination that can't run:\n  nodes=1: {problem}" in told.out
    assert f"the sweeper stopped: {problem}" in told.err
    _, sweep = only_sweep(here)
    assert [run.nodes for run in sweep.runs] == [2]
    assert problem in sweep.skipped[0].problems[0]


def test_where_none_can_run_nothing_is_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "training.steps=0", "nodes=0", CALLED, *HERE]) == 2
    told = capsys.readouterr().err
    assert told.endswith(
        "2 problems in the configuration; nothing was started.\n"
        "  training.steps = 0 must be at least 1. Try training.steps=1.\n"
        "  nodes = 0 must be at least 1. Try nodes=1.\n"
    )
    assert not list(here.iterdir())


@pytest.mark.parametrize("ended", [99, *in_full([(77,)])])
def test_ending_a_run_ends_the_sweep(ended: int, here: Path) -> None:
    assert main(["-m", f"seed=1,{ended},2", CALLED, *HERE]) == 1
    assert [run.config.seed for run in ASKED] == [1, ended]


WRONG_FOR_ALL = {
    "sweep.objective=[bubble_share,validation_loss,final_los]": "Try sweep.objective=final_loss",
    "training.validate_every=null": "no validation_loss for sweep.objective. Try training.validate_every=100",
    "training.measure_steps=0": "no bubble_share for sweep.objective. Try training.measure_steps=2",
    "training.steps=0": "Try training.steps=1",
    "sweep.on_invalid=stop": "Try sweep.on_invalid=skip",
    "sweep.parallelism=2": "Try sweep.parallelism=null",
    "dry_run=true": "Try dry_run=false",
    "launcher=script": "Try launcher.kind=slurm or launcher.kind=local",
    "run_dir=mine": "Try run_dir=null",
}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (list(WRONG_FOR_ALL), list(WRONG_FOR_ALL.values())),
        *in_full(
            [
                (
                    ["task=infer"],
                    ["sweep.objective = final_loss is not a figure of task=infer, which has latency_s"],
                ),
                (["sweep.objective=final_loss,step_time_s"], ["has several values, but applies to"]),
            ]
        ),
        (["nodez=1,2", "strategy=glob(*sdp)", "data=text,txt"], ["Try nodes=1", "Try data=text"]),
    ],
)
def test_impossible_values_are_reported_before_the_first_run(
    words: list[str], told: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "seed=1,2", CALLED, *HERE, *words]) == 2
    printed = capsys.readouterr().err
    assert not [line for line in told if line not in printed]
    assert "glob" not in printed
    assert not ASKED
    assert not list(here.iterdir())


def test_a_sweep_folder_is_one_sweeps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "seed=1,2", CALLED, *HERE]
    assert main([*words, "hydra.sweep.dir=mine"]) == 0
    assert main([*words, "hydra.sweep.dir=mine"]) == 2
    assert f"Try hydra.sweep.dir={here}/mine-2" in capsys.readouterr().err
    assert main(["-m", "sweep.resume=mine"]) == 2
    assert "holds runs that another sweeper chose" in capsys.readouterr().err
    assert len(ASKED) == 2


def test_hydras_own_sweeper_asks_for_no_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "sweep.objective=step_time_s", *HERE]) == 2
    assert "only another sweeper uses it. Try hydra/sweeper=optuna" in capsys.readouterr().err


def test_a_sweeper_that_is_not_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "hydra/sweeper=nevergrad"]) == 2
    assert "is often hydra-nevergrad-sweeper)" in capsys.readouterr().err


def test_problems_travel_between_processes() -> None:
    """As launchers of processes send them: joblib's, submitit's."""
    problems = [Problem("nodes", 0, "must be at least 1", (1,)), "and more"]
    assert pickle.loads(pickle.dumps(ConfigError(problems))).problems == problems


def test_collectives_have_no_figure_for_a_sweeper() -> None:
    (refusal,) = objective_problems(prepared("task=collectives", "sweep.objective=latency_s").config)
    assert refusal == Problem(
        "sweep.objective", "latency_s", "is not a figure of task=collectives, which has none", ()
    )


OURS = [task for task, figures in FIGURES.items() if figures and task != "script"]


def test_a_script_has_the_loss_that_it_prints_or_logs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    words = ["task=script", f"script.file={script}", "sweep.objective=final_loss"]
    (refusal,) = objective_problems(prepared(*words).config)
    assert "set script.metrics, or call job_context.log" in str(refusal)
    pattern = r"script.metrics='step (?P<step>\d+) loss (?P<loss>\S+)'"
    assert not list(objective_problems(prepared(*words, pattern).config))
    script.write_text("from hpc_parallel import job_context\n")
    run = prepared(*words)
    assert not list(objective_problems(run.config))
    summary = summarise(
        run.values, outcome="completed", lines=[{"step": 3, "loss": 1.5}], history={}, measured={}
    )
    assert summary["final_loss"] == 1.5


@pytest.mark.parametrize("task", ["train", *OURS])
def test_the_figures_are_those_of_the_summary(task: str) -> None:
    names = ("loss", "validation_loss", "samples_per_s", "step_time_s", "peak_memory_bytes", "batch_size",
             "latency_s", "latency_p99_s", "tokens_per_s")  # fmt: skip
    line = dict.fromkeys(names, 1.5)
    measured = dict.fromkeys(MEASURED, 2.5)
    run = prepared(f"task={task}")
    summary = summarise(run.values, outcome="completed", lines=[line], history={}, measured=measured)
    (refusal,) = objective_problems(prepared(f"task={task}", "sweep.objective=nothing").config)
    assert isinstance(refusal, Problem)
    offered = refusal.rule.partition("which has ")[2].split(", ")
    assert len(offered) >= 4
    assert {summary[name] for name in offered} <= {1.5, 2.5}
    wanted = f"sweep.objective=[{','.join(offered)}]"
    assert not list(objective_problems(prepared(f"task={task}", wanted).config))


def optuna_sweep(*words: str) -> list[str]:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="hydra-optuna-sweeper is not installed")
    return ["-m", "hydra/sweeper=optuna", *words, *HERE]


def test_optuna_stops_at_a_failed_run_unless_failures_are_allowed(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for two runs at once, and judges them together."""
    words = optuna_sweep("seed=13", "optimizer.learning_rate=interval(1e-4,1e-2)", "hydra.sweeper.n_trials=3")
    assert main(words) == 1
    assert len(ASKED) == 2
    assert "the sweeper stopped: rank 0 failed first" in capsys.readouterr().err
    assert main([*words, "hydra.sweeper.max_failure_rate=1.0", "hydra.sweep.dir=second"]) == 1
    assert len(ASKED) == 5
    assert "the sweeper stopped: ValueError: No trials are completed yet." in capsys.readouterr().err


def test_an_error_of_optuna_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = optuna_sweep("optimizer.learning_rate=interval(1e-4,1e-2)", "hydra/sweeper/sampler=grid")
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "ValueError: GridSampler only supports discrete distributions." in told
    assert "Traceback" not in told
    assert not list(here.iterdir())


def test_ends_of_an_interval_are_tried_before_the_first_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(optuna_sweep("nodes=interval(1,4)")) == 2
    assert "nodes = 4.0 is not a whole number" in capsys.readouterr().err
    assert main(optuna_sweep("seed=int(interval(1,4))", "hydra.sweeper.n_trials=1")) == 0
    assert ASKED[0].config.seed in range(1, 5)
