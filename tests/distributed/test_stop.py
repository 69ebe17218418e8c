"""Signals: all ranks stop after the same step, whichever was asked; and nothing is lost by it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.torch_internals import operator_name
from hpc_parallel.worker.stop import StopFlag, TimeLimit
from tests import printed
from tests.marks import in_full
from tests.workers import Workers

pytestmark = pytest.mark.processes

SMALL = (
    "launcher=local", "launcher.snapshot=false", "device=cpu", "training.log_every=1",
    "training.validate_every=null", "training.measure_steps=0", "training.precision=float64",
    "data.sequence_length=32", "data.max_bytes=300000", "model.layers=2", "model.dim=32",
    "model.ffn_dim=64", "optimizer.warmup_steps=2", "training.checkpoint_every=null",
)  # fmt: skip

ENDLESS = 10_000  # more steps than a test has time for


def stops_after(signals: dict[int, list[int]], last: int) -> tuple[int, str | None]:
    """On each rank: steps of 20 ms, signals to some ranks after the 5th; where it stops, and by what."""
    with StopFlag(step=100) as stop:
        for step in range(101, last):
            time.sleep(0.02)
            if step == 105:
                for number in signals.get(dist.get_rank(), []):
                    os.kill(os.getpid(), number)
            if (asked := stop.after(step)) is not None:
                return step, asked.name
    return last, None


def stops_after_quick_steps() -> int:
    """Two steps whose data was there already, then steps of 0.3 s, and a signal after the 4th."""
    with StopFlag(step=100) as stop:
        for step in range(101, ENDLESS):
            time.sleep(0.0 if step <= 102 else 0.3)
            if step == 104:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.after(step) is not None:
                return step
            if step == 120:
                break
    return ENDLESS


def test_quick_first_steps_put_no_stop_off(workers: Workers) -> None:
    """The ranks look after step 101, then 2 steps and at most 4 steps ahead: 103, 107."""
    (answer,) = workers.run(1, stops_after_quick_steps)
    assert answer == 107


@pytest.mark.parametrize(
    ("signals", "heeded"),
    [
        *in_full([
            ({2: [signal.SIGUSR2]}, "SIGUSR2"),
            ({0: [signal.SIGTERM]}, "SIGTERM"),
            ({rank: [signal.SIGTERM, signal.SIGTERM] for rank in range(4)}, "SIGTERM"),
        ]),
        ({0: [signal.SIGUSR2], 3: [signal.SIGTERM]}, "SIGTERM"),
        ({1: [signal.SIGINT]}, "SIGINT"),
    ],
)  # fmt: skip
def test_all_ranks_stop_after_the_same_step(
    workers: Workers, signals: dict[int, list[int]], heeded: str
) -> None:
    """However often, and to however many, Slurm says it."""
    answers = workers.run(4, stops_after, signals, ENDLESS)
    assert len(set(answers)) == 1
    step, name = answers[0]
    assert name == heeded
    assert 105 <= step < ENDLESS


def messages_of(steps: int) -> tuple[int, int, Counter[str]]:
    """How often a rank reads and writes the store, and its collectives, in steps that each ask."""

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := operator_name(function) or "").startswith("c10d::"):
                collectives[name] += 1
            return function(*args, **(kwargs or {}))

    collectives: Counter[str] = Counter()
    amounts: list[int] = []
    with StopFlag(step=0, period_s=0.0) as stop, Counting():
        store, add = stop._store, stop._store.add
        stop._store = SimpleNamespace(add=lambda key, by: (amounts.append(by), add(key, by))[1])
        for step in range(1, steps + 1):
            if (step, dist.get_rank()) == (steps - 1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            stop.after(step)
        stop._store = store
    return amounts.count(0), amounts.count(1), collectives


def test_agreeing_takes_one_broadcast_and_no_ring(workers: Workers) -> None:
    """Rank 0 alone reads the store, a key for each signal; a rank writes to it only after a signal."""
    first, *others = workers.run(4, messages_of, 10)
    assert 0 < first[0] <= 3 * 10
    assert first[1:] == (0, Counter({"c10d::broadcast_": 10}))
    assert others == [(0, int(rank == 2), Counter({"c10d::broadcast_": 10})) for rank in (1, 2, 3)]


def stops_at_limit() -> tuple[int, str | None]:
    """Steps of 20 ms; the job of rank 0 ends 33 s from now, and a save takes 1 s: 32 s and 2 steps needed."""
    began_s = time.time()
    limit = TimeLimit(
        end_s=began_s + 33, current_end_s=lambda: None, save_s=lambda: 1.0,
        clock=lambda: time.time() if time.time() > began_s + 0.01 else began_s - 100,
    )  # fmt: skip
    limit = limit if dist.get_rank() == 0 else None
    with StopFlag(step=100, time_limit=limit) as stop:
        for step in range(101, ENDLESS):
            time.sleep(0.02)
            if (asked := stop.after(step)) is not None:
                return step, asked.name
    return ENDLESS, None


def test_all_ranks_stop_when_the_time_limit_is_near_for_a_save(workers: Workers) -> None:
    answers = workers.run(2, stops_at_limit)
    assert len(set(answers)) == 1
    step, name = answers[0]
    assert name == "SIGUSR2"
    assert 101 < step < ENDLESS  # the first look is too early, the next two seconds later not


def test_without_a_request_no_rank_stops(workers: Workers) -> None:
    assert workers.run(2, stops_after, {}, 250) == [(250, None)] * 2


@pytest.mark.full  # test_chaos.py preempts a real Slurm job
def test_a_run_that_is_stopped_twice_ends_like_an_undisturbed_one(tmp_path: Path, workers: Workers) -> None:
    """SIGTERM to the command, `resume=`, another strategy each time; the curve is that of one device."""
    steps = 240
    reference = workers.train(*SMALL, f"training.steps={steps}", "strategy=single")
    run = tmp_path / "run"
    words = (*SMALL, f"training.steps={steps}", f"run_dir={run}", "strategy=data", "nodes=2")
    stopped = interrupt(run, *words, after=20)
    assert 20 <= stopped < steps
    assert json.loads((run / "summary.json").read_text())["outcome"] == "cancelled"
    again = interrupt(run, f"resume={run}", "strategy=pipeline", after=stopped + 20)
    assert stopped + 20 <= again < steps
    printed("-m", "hpc_parallel.run", f"resume={run}", "strategy=fsdp", cwd=Path.cwd())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert [line["loss"] for line in lines] == pytest.approx(reference.losses, rel=1e-9)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["outcome"], summary["restarts"], summary["lost_steps"]) == ("completed", 2, 0)
    assert [checkpoint.step for checkpoint in complete(run / "checkpoints")] == [again, stopped]


def interrupt(run: Path, *words: str, after: int) -> int:
    """Start the command, ask it to end after a step; the step whose state it saved."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hpc_parallel.run", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 240
    while last_step(run) < after:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=240)
    stopped = json.loads((run / "stopped.json").read_text())
    assert process.returncode == 1
    assert f"cancelled by SIGTERM: saved at step {stopped['step']}; go on with resume={run}" in said
    assert last_step(run) == stopped["step"]
    return int(stopped["step"])


def last_step(run: Path) -> int:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0
