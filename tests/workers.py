"""A pool of rank processes for the tests: torch is imported once, by the server they are forked from."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from multiprocessing.connection import Connection, wait
from operator import or_
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import write
from hpc_parallel.record.provenance import source_state
from tests.composed import prepared
from tests.watched_collectives import Seen, watched

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_parallel.strategies.assemble import Assembled

MOST_RANKS = 8
PATIENCE_S = 1800  # the limit of a test comes first; a busy machine compiles for minutes
_git_state = cache(source_state)
AFTER_AN_ERROR_S = 60  # the others fail with it, or wait for the rank that failed
MOST_JOBS = 10  # of a process: each leaves threads of gloo, which wake up a hundred times a second


@dataclass(frozen=True)
class Trained:
    """What a run left: its metrics lines, its first gradient and its weights by full name, and which ranks
    exchanged what in the step that it counted."""

    lines: list[dict[str, Any]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    collectives: Counter[Seen]
    folder: Path

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found


Train = Callable[..., Trained]
"""Trains each configuration once in a test run, for all tests that ask about it (the fixture `trained`)."""


class Workers:
    """Ranks that join a new process group for every job; new processes replace them now and then."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.preloaded"])
        self._ranks: list[tuple[Connection, Any]] = []
        self._jobs = 0
        self._jobs_of_ranks = 0

    def train(
        self,
        *overrides: str,
        variables: Mapping[str, str] | None = None,
        resume_from: Path | None = None,
    ) -> Trained:
        """Train a configuration through the worker half's own session, all on this machine's CPUs.

        variables: of the environment, set on the ranks for good; resume_from: a checkpoint.
        """
        run = self.prepare(*overrides)
        if resume_from is not None:
            shutil.copytree(resume_from, run.folder.checkpoints / resume_from.name)
        return self.finish(run, variables=variables)

    def finish(self, run: PreparedRun, *, variables: Mapping[str, str] | None = None) -> Trained:
        """Train a prepared run to its end."""
        parts = self.run(run.processes, train_and_keep, str(run.folder.path), dict(variables or {}))
        gradients, weights, seen = zip(*parts, strict=True)
        return Trained(
            lines=self.lines(run), gradients=agreed(gradients), weights=agreed(weights),
            collectives=reduce(or_, seen),  # all members of a group see the same number
            folder=run.folder.path,
        )  # fmt: skip

    def lines(self, run: PreparedRun) -> list[dict[str, Any]]:
        """The metrics of a run."""
        return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]

    def do(self, *overrides: str) -> Path:
        """Run a task that trains nothing; returns the run folder that it leaves."""
        run = self.prepare(*overrides)
        self.run(run.processes, do_here, str(run.folder.path))
        return run.folder.path

    def prepare(self, *overrides: str) -> PreparedRun:
        """A run folder of this configuration, written and not started."""
        # The ranks import the classes of the tests: no process of its own for each configuration before.
        fixed = ("launcher=local", "launcher.snapshot=false", "launcher.check_imports=false", "device=cpu")
        run = prepared(f"run_dir={self._next_folder() / 'run'}", *fixed, *overrides)
        write(run, git_state=_git_state)
        return run

    def run(self, count: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`job(*arguments)` on `count` ranks inside a fresh gloo process group; their results by rank."""
        if self._jobs_of_ranks >= MOST_JOBS:
            self.close()
        self._jobs_of_ranks += 1
        while len(self._ranks) < count:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()  # else nothing tells that the process has ended
            self._ranks.append((here, process))
        try:
            return self._answers(count, job, arguments)
        except BaseException:  # a rank may wait for one that failed, or for a test that was ended
            self.close()
            raise

    def _answers(self, count: int, job: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        store = str(self._next_folder() / "store")
        waiting = {pipe: rank for rank, (pipe, _) in enumerate(self._ranks[:count])}
        for pipe, rank in waiting.items():
            with suppress(BrokenPipeError):  # its answer says what ended it
                pipe.send((job, arguments, rank, count, store))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while waiting:
            patience_s = AFTER_AN_ERROR_S if errors else PATIENCE_S
            answered = wait(waiting, patience_s)
            if not answered:
                silent = ", ".join(map(str, waiting.values()))
                errors[count] = f"no answer within {patience_s} s of rank {silent}"
                break
            for rank in sorted(waiting.pop(pipe) for pipe in answered):
                kind, value = self._answer(rank)
                (errors if kind == "error" else results)[rank] = value
        if errors:
            raise AssertionError("\n".join(text for _, text in sorted(errors.items())))
        return [results[rank] for rank in range(count)]

    def _answer(self, rank: int) -> Any:
        """Raises ChildProcessError if a signal ended the rank; faulthandler has written its stacks."""
        pipe, process = self._ranks[rank]
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):  # the latter if it had not read its job
            process.join()
            code = process.exitcode
        if code < 0:
            raise ChildProcessError(f"rank {rank} was ended by {signal.Signals(-code).name}")
        raise AssertionError(f"rank {rank} exited with {code} and gave no answer")

    def close(self) -> None:
        for pipe, process in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []
        self._jobs_of_ranks = 0

    def _next_folder(self) -> Path:
        self._jobs += 1
        folder = self.folder / str(self._jobs)
        folder.mkdir()
        return folder


def _serve(pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor._redistribute import _gen_transform_infos
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        try:
            job, arguments, rank, world_size, store = pipe.recv()
        except EOFError:
            return
        try:
            # Else a rank whose job is short closes its connections while others still make theirs.
            os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            os.environ["TORCH_DIST_INIT_BARRIER"] = "0"  # not for the groups of the job
            answer = ("done", job(*arguments))
            dist.destroy_process_group()
            # DTensor remembers meshes by their shape: the next job's would get this one's dead groups.
            _clear_sharding_prop_cache()
            _gen_transform_infos.cache_clear()
        except BaseException:
            answer = ("error", f"rank {rank}:\n{traceback.format_exc()}")
        pipe.send(answer)


def agreed(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What the ranks have together; of what several have, they must have the same bits."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            same = name not in found or found[name].allclose(tensor, rtol=0, atol=0, equal_nan=True)
            assert same, f"ranks disagree on {name}"
            found[name] = tensor.clone()  # a received tensor keeps a file open, and thousands stay
    return found


def train_here(run_folder: str, variables: Mapping[str, str]) -> dict[str, Tensor]:
    """This rank's part of the run, inside a process group; its weights by full name."""
    return train_and_keep(run_folder, variables)[1]


def train_and_keep(
    run_folder: str, variables: Mapping[str, str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Counter[Seen]]:
    """The same, after the gradient of the first step and before the collectives of the counted one."""
    import torch
    from torch.distributed.tensor import DTensor

    from hpc_parallel.record.run_folder import RunFolder
    from hpc_parallel.worker.session import TaskContext, read_config
    from hpc_parallel.worker.train import train

    os.environ.update(variables)
    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    first: list[dict[str, Tensor]] = []

    def whole(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        held = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
        full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in held.items()}
        return {name: tensor.clone() for name, tensor in full.items()}  # what is whole already is not copied

    def keep(assembled: Assembled) -> None:
        if not first:
            first.append(whole({name: p.grad for name, p in assembled.named_parameters().items()}))

    context = TaskContext(config, values, folder, torch.device("cpu"), environment={})
    with watched() as seen:
        trained = train(context, on_gradients=keep)
    return first[0] if first else {}, whole(trained.named_parameters()), seen


def do_here(run_folder: str) -> None:
    """This rank's part of a run of any task, inside a process group."""
    import torch

    from hpc_parallel.record.run_folder import RunFolder
    from hpc_parallel.worker.main import TASKS
    from hpc_parallel.worker.session import TaskContext, read_config

    folder = RunFolder(Path(run_folder))
    config, values = read_config(folder.config)
    task = resolve_name(TASKS[config.task.name])
    task(TaskContext(config, values, folder, torch.device("cpu"), environment={}))


def do_or_refuse(run_folder: str, cache: str) -> str:
    """Returns an empty text, or why the run is refused. `cache`: where its proofs are kept."""
    from hpc_parallel.problems import ConfigError
    from hpc_parallel.proof.verify import DifferenceError

    os.environ["XDG_CACHE_HOME"] = cache
    try:
        do_here(run_folder)
    except (ConfigError, DifferenceError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
