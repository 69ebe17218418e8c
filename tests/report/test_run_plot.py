"""`plots/loss.png` of a run: drawn at its end by a process of its own, which can't make the run fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.report import run_plot
from hpc_parallel.training import loss_plot
from tests.report.measured_runs import ended


def lines(*seconds: int) -> list[dict[str, str]]:
    return [{"time": f"2026-11-22T01:00:{second:02}+00:00"} for second in seconds]


def test_it_is_the_plot_of_the_report(tmp_path: Path) -> None:
    folder = ended(tmp_path / "runs" / "one", "strategy=data")
    run_plot.main([str(folder.path)])
    assert command(["report", str(folder.path)]) == 0
    drawn = folder.loss_plot.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn == (folder.path / "report" / "plots" / "loss.png").read_bytes()
    assert folder.loss_plot.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_is_drawn_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    monkeypatch.setattr(run_plot, "find_spec", lambda name: None)
    run_plot.main([str(folder.path)])
    assert not folder.loss_plot.parent.exists()


@pytest.mark.parametrize(("seconds", "starts"), [((0, 5, 10), 1), ((0, 9), 0), ((30,), 0), ((), 0)])
def test_a_short_training_does_not_wait_for_it(
    seconds: tuple[int, ...], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    commands: list[list[str]] = []
    monkeypatch.setattr(loss_plot.subprocess, "run", lambda words, **_: commands.append(words))
    loss_plot.draw_losses(folder, lines(*seconds))
    assert [words[1:] for words in commands] == [["-m", run_plot.__name__, str(folder.path)]] * starts


@pytest.mark.parametrize("module", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_a_failure_does_not_reach_the_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(loss_plot, "MODULE", "broken")
    monkeypatch.setattr(loss_plot, "PATIENCE_S", 0.5)
    loss_plot.draw_losses(ended(tmp_path / "one", "strategy=data"), lines(0, 30))
