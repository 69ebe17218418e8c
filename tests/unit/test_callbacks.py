"""Early stopping and best checkpoints, by the lines that they are given."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.problems import ConfigError
from hpc_parallel.record.checkpoint_index import best_step, prune
from hpc_parallel.training import callbacks
from hpc_parallel.training.callbacks import Callback, Callbacks, EarlyStopping, KeepBest
from hpc_parallel.training.trainer import Trainer
from hpc_parallel.user_code import UserCodeError
from tests.composed import prepared


class Answers(Callback):
    def __init__(self, answer: Any) -> None:
        self.stop_reason = lambda: answer  # type: ignore[method-assign]


@pytest.mark.parametrize("answer", [True, 3, "enough", "", None])
def test_a_reason_to_stop_is_a_text(answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """True ended the run as completed, and nobody was told why."""
    monkeypatch.setattr(callbacks.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(callbacks.exchange, "broadcast", lambda value: value)
    followers = Callbacks([{"_target_": f"{__name__}.Answers", "answer": answer}], folder=tmp_path, lines=[])
    if isinstance(answer, str | None):
        assert followers.reason() == (answer or None)
    else:
        with pytest.raises(UserCodeError, match=f"returned {answer}: return a text, or None"):
            followers.reason()


def lines(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * n, "validation_loss": loss} for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "stops_at"),
    [
        ([3.0, 2.0, 2.5, 2.1], 40),
        ([3.0, 2.0, 2.5, 1.8, 2.0], None),
        ([3.0, 2.99, 2.98, 1.0], 30),  # changes of 0.01 are none
        ([None, None], 20),
    ],
)
def test_early_stopping_waits_for_two_lines(losses: list[float | None], stops_at: int | None) -> None:
    callback = EarlyStopping(patience=2, least_change=0.1)
    stopped = None
    for line in lines(*losses):
        callback.on_line(line)
        callback.on_line({**line, "timed_steps": 0})  # the validation of an early end repeats its step
        callback.on_line({"step": line["step"] + 1, "loss": 9.0})  # a line without the key
        stopped = stopped or (line["step"] if callback.stop_reason() else None)
    assert stopped == stops_at


def test_an_early_end_is_saved_after_a_restart_from_memory() -> None:
    """The step may be on no disk: the start before died after the callback's line, before the save."""
    saved: list[int] = []
    observers = SimpleNamespace(callbacks=SimpleNamespace(reason=lambda: "as before"))
    trainer = SimpleNamespace(steps_done=6, observers=observers, _save_last=saved.append)
    assert Trainer.fit(trainer) is None  # type: ignore[arg-type]
    assert saved == [6]


def test_an_accuracy_improves_if_it_grows() -> None:
    callback = EarlyStopping(patience=2, key="validation_accuracy", largest=True)
    for step, accuracy in enumerate([0.5, 0.7, 0.6, 0.65], start=1):
        assert callback.stop_reason() is None
        callback.on_line({"step": step, "validation_loss": 1.0, "validation_accuracy": accuracy})
        callback.on_line({"step": step, "loss": 1.0})
    assert callback.stop_reason() == "validation_accuracy did not improve in 2 lines; best: 0.7 at step 2"


def test_a_stop_that_could_never_come_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="patience = 0 must be at least 1"):
        EarlyStopping(patience=0)
    with pytest.raises(ValueError, match="has no valdation_loss; it has step, validation_loss"):
        EarlyStopping(patience=1, key="valdation_loss").on_line(lines(2.0)[0])
    patient = "{_target_:hpc_parallel.training.callbacks.EarlyStopping,patience:2}"
    with pytest.raises(ConfigError, match="validate_every = null leaves EarlyStopping without a validation"):
        prepared("launcher=local", f"training.callbacks=[{patient}]", "training.validate_every=null")


def test_a_best_that_could_not_be_kept_is_named() -> None:
    """Only checkpoints are kept: a validation between two of them is compared with nothing."""
    words = ("launcher=local", "training.callbacks=[{_target_:hpc_parallel.training.callbacks.KeepBest}]")
    with pytest.raises(ConfigError, match=r"null leaves KeepBest without a checkpoint to keep"):
        prepared(*words, "training.checkpoint_every=null", "training.validate_every=100")
    prepared(*words, "training.checkpoint_every=null", "task=collectives", "nodes=2")
    for saves, steps, compared in ((50, 200, True), (100, 200, True), (200, 200, False), (200, 100, True)):
        every = (f"training.checkpoint_every={saves}", f"training.steps={steps}")
        notes = prepared(*words, *every, "training.validate_every=100").notes
        assert any("Try training.checkpoint_every=100" in note for note in notes) != compared


def test_a_damaged_record_of_the_best_keeps_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "complete").write_text("")
    (tmp_path / "best.json").write_text("{")
    prune(tmp_path, keep_last=1, keep_every=None)
    assert len(list(tmp_path.glob("step-*"))) == 3
    assert "WARNING: no checkpoint is removed" in capsys.readouterr().err


def test_its_patience_survives_a_new_start(tmp_path: Path) -> None:
    callback = EarlyStopping(patience=3)
    callback.on_start(tmp_path, lines(2.0, 3.0, 3.0))
    assert callback.stop_reason() is None
    callback.on_line(lines(2.0, 3.0, 3.0, 2.5)[-1])
    assert callback.stop_reason() == "validation_loss did not improve in 3 lines; best: 2 at step 10"


def test_the_best_checkpoint_is_recorded_and_found_again(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    callback = KeepBest()
    callback.on_start(tmp_path, [])
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0)):
        callback.on_validation(step, loss)
        if step != 20:  # no checkpoint there
            callback.on_checkpoint(step)
    assert best_step(checkpoints) == 30
    assert json.loads((checkpoints / "best.json").read_text()) == {"step": 30, "validation_loss": 2.0}
    (checkpoints / "step-30").mkdir()
    (checkpoints / "step-30" / "complete").write_text("")
    again = KeepBest()
    again.on_start(tmp_path, lines(3.0, 1.0, 2.0))
    again.on_validation(40, 2.5)
    again.on_checkpoint(40)
    assert best_step(checkpoints) == 30


def test_a_callback_without_a_class_is_refused() -> None:
    words = ("launcher=local", "training.callbacks=[{patience:3},{_target_:tests.callbacks.Recordre}]")
    with pytest.raises(ConfigError) as caught:
        prepared(*words)
    text = str(caught.value)
    assert "training.callbacks[0] = {patience:3} has no _target_" in text
    assert "there is no Recordre in tests.callbacks. Try" in text
