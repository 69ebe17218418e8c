"""Real trainings of two ranks from Python: equal to the command's, from any thread, gone with the process."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path

import pytest

import hpc_parallel
from hpc_parallel.record.owner import Owner, process_lives
from hpc_parallel.record.run_folder import RunFolder
from tests import printed

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("silent_slurm")]

DOCS = Path(__file__).parents[2] / "docs/python.md"
WORDS = (
    "strategy=pipeline", "nodes=2", "launcher=local", "training.steps=3", "training.log_every=1",
    "data.max_bytes=100000", "data.sequence_length=16", "model.layers=2", "model.dim=32", "model.ffn_dim=64",
    "training.validation_samples=32",
)  # fmt: skip
ENDLESS = ("training.steps=100000", "training.log_every=1", "training.validate_every=null")


def first_step(run: hpc_parallel.Run) -> None:
    deadline = time.monotonic() + 240
    while not run.metrics():
        assert time.monotonic() < deadline, run.state
        assert not run.state.ended, run.failure
        time.sleep(0.1)


def test_a_training_equals_the_commands(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Submitted in a thread that ends before the run does; Linux could take the run for its child."""
    started: list[hpc_parallel.Run] = []
    config = hpc_parallel.compose([*WORDS, "run_dir=python"])
    thread = threading.Thread(target=lambda: started.append(hpc_parallel.submit(config)))
    thread.start()
    thread.join()
    (run,) = started
    assert not run.state.ended
    summary = run.wait(timeout_s=float("inf"))
    assert capfd.readouterr() == ("", "")
    printed("-m", "hpc_parallel.run", *WORDS, "run_dir=command", cwd=here)
    kept = json.loads((here / "command/summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["world_size"]) == ("completed", 3, 2)
    assert summary["final_loss"] == pytest.approx(kept["final_loss"], rel=1e-6)
    expected = [json.loads(line) for line in (here / "command/metrics.jsonl").read_text().splitlines()]
    for key in ("step", "samples", "loss", "grad_norm", "learning_rate"):
        assert [line[key] for line in run.metrics()] == pytest.approx([line[key] for line in expected])
    assert [each.path.name for each in hpc_parallel.runs(here)] == ["command", "python"]
    assert run.config | {"run_dir": ""} == hpc_parallel.Run("command").config | {"run_dir": ""}
    assert run.state.name == "completed"


def test_a_cancelled_run_saves_its_state_and_can_go_on() -> None:
    """Cancelled at its start too, where it must end and leave this process alone."""
    run = hpc_parallel.submit(hpc_parallel.compose([*WORDS, *ENDLESS]))
    at_once = hpc_parallel.submit(hpc_parallel.compose([*WORDS, *ENDLESS]))
    at_once.cancel()
    assert at_once.wait(timeout_s=240)["outcome"] == "cancelled"
    first_step(run)
    run.cancel()
    assert run.wait(timeout_s=240)["outcome"] == "cancelled"
    done = run.metrics()[-1]["step"]
    more = hpc_parallel.compose([f"resume={run.path}", f"training.steps={done + 2}"])
    assert (more.nodes, more.resume, more.model["dim"]) == (2, str(run.path), 32)
    assert hpc_parallel.submit(more).wait(timeout_s=240)["outcome"] == "completed"
    assert [line["step"] for line in run.metrics()] == list(range(1, done + 3))


def test_a_run_ends_with_its_process(here: Path) -> None:
    """As with a kernel that is restarted: no rank is left, and the state is saved."""
    code = (
        "import hpc_parallel, sys, time\n"
        "run = hpc_parallel.submit(hpc_parallel.compose(sys.argv[1:]))\n"
        "while not run.metrics(): time.sleep(0.1)\n"
    )
    printed("-c", code, *WORDS, *ENDLESS, cwd=here)
    (run,) = hpc_parallel.runs()
    owner = Owner.read(RunFolder(run.path))
    assert run.wait(timeout_s=240)["outcome"] == "cancelled"
    assert owner is not None
    assert not process_lives(owner)


@pytest.mark.full
def test_the_examples_of_the_guide(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand there, one after another; what they print is what the guide shows."""
    parts = re.findall(r"```(python|text)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    printed: list[str] = []
    for kind, text in parts:
        if kind == "python":
            exec(compile(text, str(DOCS), "exec"), names)
            printed.append(capsys.readouterr().out)
        else:
            assert printed[-1] == text
    outcome, loss = printed[0].splitlines()[0].split()
    assert outcome == "completed"
    assert [line.split()[0] for line in printed[0].splitlines()[1:]] == ["1", "2", "3"]
    assert float(printed[0].split()[-1]) == pytest.approx(float(loss), rel=1e-6)
    changed = names["run"]
    assert isinstance(changed, hpc_parallel.Run)
    record = json.loads((changed.path / "environment.json").read_text())
    assert {"training.steps=5", "strategy.microbatches=2"} < set(record["overrides"])
    assert changed.wait(timeout_s=240)["steps"] == 5
    names["config"] = hpc_parallel.compose([*WORDS, "training.steps=3"])
    train = names["train"]
    assert callable(train)
    loss = asyncio.run(train())
    assert loss == max(hpc_parallel.runs("runs"), key=lambda run: run.path.name).summary["final_loss"]
