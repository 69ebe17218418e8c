"""Callbacks in a training: what they hear, an early end on all ranks, the best checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_parallel.launch.resume import find_problems
from hpc_parallel.record.endings import Stop
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.worker import stop
from tests.workers import Workers, train_here

SMALL = (
    "training.steps=12", "training.log_every=4", "training.validate_every=4", "training.measure_steps=0",
    "training.validation_samples=16", "training.global_batch_size=8", "model.layers=2", "model.dim=32",
    "model.ffn_dim=64", "data.sequence_length=16", "data.max_bytes=100000",
)  # fmt: skip
PATIENT = "{_target_:hpc_parallel.training.callbacks.EarlyStopping,patience:2,least_change:100}"


def test_they_hear_of_everything_and_end_all_ranks(workers: Workers) -> None:
    typed = f"training.callbacks=[{{_target_:tests.callbacks.Recorder}},{PATIENT}]"
    trained = workers.train("strategy=pipeline", "nodes=2", *SMALL, typed, "training.checkpoint_every=4")
    heard = [json.loads(line) for line in (trained.folder / "heard.jsonl").read_text().splitlines()]
    validation = {line["step"]: line["validation_loss"] for line in trained.lines}
    assert [value for event, value in heard if event == "step"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [value for event, value in heard if event == "line"] == [1, 4, 8]
    assert [value for event, value in heard if event == "validation"] == [
        [s, validation[s]] for s in (1, 4, 8)
    ]
    assert [value for event, value in heard if event == "checkpoint"] == [4, 8]
    assert (heard[0], heard[-1]) == (["start", 0], ["end", 8])
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"]) == ("completed", 8)
    assert summary["ended_early"].startswith("validation_loss did not improve in 2 lines; best: ")
    folder = RunFolder(trained.folder)
    workers.run(
        2, train_here, str(folder.path), {}
    )  # as after a death before the summary: nothing is trained
    assert workers.lines(SimpleNamespace(folder=folder)) == trained.lines
    assert json.loads(folder.summary.read_text())["ended_early"] == summary["ended_early"]
    problems = [str(problem) for problem in find_problems(folder, folder.read_config())]
    advice = "To train on, try 'training.callbacks=[{_target_:tests.callbacks.Recorder}]'."
    (problem,) = (problem for problem in problems if "ended early: validation_loss did not" in problem)
    assert problem.endswith(advice)
    for callbacks in ([{"_target_": "tests.callbacks.Recorder"}], []):  # KeepBest and others may go on
        values = folder.read_config()
        values["training"] |= {"callbacks": callbacks, "steps": 20}
        assert list(find_problems(folder, values)) == []


def test_an_early_end_between_two_validations_is_validated(workers: Workers) -> None:
    """The last validation would be that of step 1. A run with as many steps has the same one at its end."""
    stops = "{_target_:hpc_parallel.training.callbacks.EarlyStopping,patience:1,least_change:100,key:loss}"
    words = ("optimizer.schedule=constant", "optimizer.warmup_steps=0", "training.validate_every=10")
    typed = f"training.callbacks=[{stops},{{_target_:hpc_parallel.training.callbacks.KeepBest}}]"
    ended = workers.train("strategy=data", "nodes=2", *SMALL, *words, typed)
    whole = workers.train("strategy=data", "nodes=2", *SMALL, *words, "training.steps=4")
    validation = [
        (line["step"], line["validation_loss"]) for line in ended.lines if "validation_loss" in line
    ]
    assert [step for step, _ in validation] == [1, 4]
    assert validation[-1][1] == pytest.approx(whole.lines[-1]["validation_loss"], rel=1e-6)
    summary = json.loads((ended.folder / "summary.json").read_text())
    assert (summary["steps"], summary["validation_loss"]) == validation[-1]
    best = json.loads((ended.folder / "checkpoints/best.json").read_text())
    assert (best["step"], best["validation_loss"]) == validation[-1]


def test_the_best_checkpoint_stays(workers: Workers) -> None:
    """The learning rate destroys the model after step 4, whose checkpoint is the best one."""
    words = (
        "training.callbacks=[{_target_:hpc_parallel.training.callbacks.KeepBest}]",
        "training.checkpoint_every=4", "training.keep_last=1", "optimizer.learning_rate=1e-3",
        "optimizer.schedule=tests.callbacks.destroys_after_4",
    )  # fmt: skip
    trained = workers.train("strategy=single", *SMALL, *words)
    losses = {line["step"]: line["validation_loss"] for line in trained.lines}
    assert losses[4] < min(losses[8], losses[12])
    names = sorted(path.name for path in Path(trained.folder, "checkpoints").glob("step-*"))
    assert names == ["step-12", "step-4"]


def test_an_error_names_the_callback(workers: Workers) -> None:
    with pytest.raises(AssertionError, match=r"KeyError: 'missing' .*raised by the callback Broken\.on_line"):
        workers.train("strategy=single", *SMALL, "training.callbacks=[{_target_:tests.callbacks.Broken}]")


def as_a_rank(run_folder: str) -> None:
    stop.show_place_at_sigterm()
    train_here(run_folder, {})


@pytest.mark.parametrize("at", ["null", "2"])
def test_a_signal_after_the_last_step_ends_no_rank(workers: Workers, at: str) -> None:
    """All steps are done, or the run has stopped at Slurm's first SIGTERM and its state is saved."""
    steps = 12 if at == "null" else 100_000
    typed = f"training.callbacks=[{{_target_:tests.callbacks.SendsSigterm,at:{at}}}]"
    words = ("training.validate_every=null", "training.checkpoint_every=100000", f"training.steps={steps}")
    run = workers.prepare("strategy=single", *SMALL, *words, typed)
    workers.run(1, as_a_rank, str(run.folder.path))
    stopped = Stop.read(run.folder)
    assert (stopped is None) == (at == "null")
    last = steps if stopped is None else stopped.step
    assert [path.name for path in run.folder.checkpoints.glob("step-*")] == [f"step-{last}"]
