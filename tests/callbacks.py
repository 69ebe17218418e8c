"""Callbacks for tests."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.record import host_memory
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.training.callbacks import Callback


class Recorder(Callback):
    """Writes what it hears to `heard.jsonl` in the run folder."""

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self.path = folder / "heard.jsonl"
        self.write("start", len(lines))

    def write(self, event: str, value: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([event, value]) + "\n")

    def on_step(self, step: int) -> None:
        self.write("step", step)

    def on_line(self, line: Mapping[str, Any]) -> None:
        self.write("line", line["step"])

    def on_validation(self, step: int, loss: float | None) -> None:
        self.write("validation", [step, loss])

    def on_checkpoint(self, step: int) -> None:
        self.write("checkpoint", step)

    def on_end(self, step: int) -> None:
        self.write("end", step)


class CompiledGraphs(Callback):
    """Writes how many graphs torch has compiled in the run, and where it broke one."""

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        from torch._dynamo.utils import counters  # imported by compiled runs only

        self.path, self.counters = folder / "compiled_graphs.json", counters
        counters.clear()  # of earlier runs in this process

    def on_end(self, step: int) -> None:
        counts = self.counters["stats"]["unique_graphs"], self.counters["graph_break"]
        self.path.write_text(json.dumps(counts))


class Broken(Callback):
    """Fails at a line."""

    def on_line(self, line: Mapping[str, Any]) -> None:
        raise KeyError("missing")


class EndsProcess(Callback):
    """Forks a process and ends it by SIGTERM, as `multiprocessing.Pool` does with its workers."""

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self.on_step(0)

    def on_step(self, step: int) -> None:
        context = multiprocessing.get_context("fork")
        ready = context.Event()
        process = context.Process(target=lambda: (ready.set(), time.sleep(1000)), daemon=True)
        process.start()
        ready.wait()
        process.terminate()
        process.join(20)
        assert process.exitcode == -signal.SIGTERM


class SendsSigterm(Callback):
    """Slurm sends SIGTERM after the step `at`, if any, and once more at the end."""

    def __init__(self, at: int | None = None) -> None:
        self._at = at

    def on_step(self, step: int) -> None:
        if step == self._at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_end(self, step: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


class SleepsAtStart(Callback):
    """Hangs before the first step."""

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        time.sleep(1000)


class SleepsAtEnd(Callback):
    """Hangs after the last step."""

    def on_end(self, step: int) -> None:
        time.sleep(1000)


def destroys_after_4(step: int, steps: int) -> float:
    """A schedule of the learning rate."""
    return 1.0 if step <= 4 else 1000.0


class KillsOnce(Callback):
    """Kills rank 0 after `step`, once all copies in memory are complete, and removes the memory of `lost`."""

    def __init__(self, *, step: int, lost: str | None = None) -> None:
        self._step, self._lost = step, lost

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self._mark = folder / "killed"
        self._memory = host_memory.ROOT / host_memory.name_of(RunFolder(folder), os.environ)

    def on_step(self, step: int) -> None:
        if step != self._step or self._mark.exists():
            return
        self._mark.touch()
        while len(list(self._memory.glob("*/*.json"))) != len([*self._memory.glob("*/*-[01]")]):
            time.sleep(0.01)
        if self._lost is not None:
            shutil.rmtree(self._memory / self._lost)
        os.kill(os.getpid(), signal.SIGKILL)
