"""What the display of a sweep shows of its runs: their starts, their steps, and how they ended."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from hpc_parallel.record.phase import note_phase
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.sweep.sweep_plan import PlannedRun
from hpc_parallel.sweep.view import SweepView, outcome_line
from tests.composed import prepared


@pytest.fixture
def planned(tmp_path: Path) -> PlannedRun:
    run = prepared(f"run_dir={tmp_path / 'run'}", "launcher=local", "launcher.snapshot=false", "seed=2",
                   "training.steps=60")  # fmt: skip
    run.write()
    return PlannedRun(run, ("seed=2",), ("seed=2",))


@pytest.mark.parametrize("columns", [40, 100])
def test_a_start_names_its_phase_until_the_first_step(planned: PlannedRun, columns: int) -> None:
    shown = io.StringIO()
    with SweepView(1, console=Console(file=shown, force_terminal=True, width=columns)) as view:
        view.start(planned)
        note_phase(planned.run.folder, "importing torch")
        view.poll(planned)
        (task,) = (task for task in view._bars.tasks if "seed=2" in task.description)
        assert task.description == "seed=2: starting: importing torch"[: columns - 8]
        line = {"step": 20, "loss": 12345.6, "samples_per_s": 1520.0}
        planned.run.folder.metrics.write_text(json.dumps(line) + "\n")
        view.poll(planned)
        view.poll(planned)
        assert task.description.startswith("seed=2:  step 20/60")
        assert ("1520 samples/s" in task.description) == (columns == 100)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    assert max(len(part.rstrip()) for text in drawn.split("\n") for part in text.split("\r")) <= columns


def test_the_end_of_a_run_has_no_exponents(planned: PlannedRun) -> None:
    folder = planned.run.folder
    write_json(folder.summary, {"outcome": "completed", "final_loss": 12345.6, "samples_per_s": 1520.4})
    assert outcome_line(folder) == ("completed", "completed, loss 12346, 1520 samples/s")


def test_a_failure_without_a_line_says_that_it_failed(planned: PlannedRun) -> None:
    write_json(planned.run.folder.failure, {})
    assert outcome_line(planned.run.folder) == ("failed", "failed")
    write_json(planned.run.folder.failure, {"line": "rank 1\x1b[2J"})
    assert outcome_line(planned.run.folder)[1] == r"failed: rank 1\x1b[2J"


def test_ctrl_c_is_called_ctrl_c(planned: PlannedRun) -> None:
    folder = planned.run.folder
    write_json(folder.summary, {"outcome": "cancelled"})
    write_json(folder.stopped, {"signal": "SIGTERM", "line": "cancelled by Ctrl-C: saved at step 30"})
    assert outcome_line(folder) == ("cancelled", "cancelled by Ctrl-C: saved at step 30")
