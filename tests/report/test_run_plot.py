"""`plots/loss.png` of a run: drawn at its end by a process of its own, which can't make the run fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.report import run_plot
from hpc_parallel.worker import run_plots
from tests.report.measured_runs import ended


def lines(*seconds: int) -> list[dict[str, str]]:
    return [{"time": f"2026-11-22T01:00:{second:02}+00:00"} for second in seconds]


def test_it_is_the_plot_of_the_report(tmp_path: Path) -> None:
    folder = ended(tmp_path / "runs" / "one", "strategy=data")
    run_plot.main([str(folder.path)])
    assert command(["report", str(folder.path)]) == 0
    drawn = (folder.plots / "loss.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn == (folder.path / "report" / "plots" / "loss.png").read_bytes()
    assert folder.plots.stat().st_mode & 0o777 == 0o700


def test_nothing_is_drawn_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    monkeypatch.setattr(run_plot, "find_spec", lambda name: None)
    run_plot.main([str(folder.path)])
    assert not folder.plots.exists()


@pytest.mark.parametrize(("seconds", "starts"), [((0, 5, 10), 1), ((0, 9), 0), ((30,), 0), ((), 0)])
def test_a_short_training_does_not_wait_for_it(
    seconds: tuple[int, ...], starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ended(tmp_path / "one", "strategy=data")
    commands: list[list[str]] = []
    monkeypatch.setattr(run_plots.subprocess, "run", lambda words, **_: commands.append(words))
    run_plots.draw_plots(folder, lasted_s=run_plots.span_s(lines(*seconds)))
    assert [words[1:] for words in commands] == [["-m", run_plot.__name__, str(folder.path)]] * starts


@pytest.mark.parametrize("module", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_a_failure_does_not_reach_the_run(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(run_plots, "MODULE", "broken")
    monkeypatch.setattr(run_plots, "PATIENCE_S", 0.5)
    run_plots.draw_plots(ended(tmp_path / "one", "strategy=data"), lasted_s=30)
