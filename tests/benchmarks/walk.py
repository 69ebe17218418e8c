"""How many of our files one thing passes through, counted by a profiler hook.

    python tests/benchmarks/walk.py [run OVERRIDE...] [step STRATEGY]

Without arguments: a dry run of a pipeline on two nodes, then one step of rank 1 of a pipeline and of `data`.
Without a snapshot, whose calls depend on the files of the current folder.

calls: of our functions. files: those with such a call. switches: calls from one file to another, in the order
of time. returns: switches to a file that was left before. The code that an import runs does not count.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from inspect import CO_NEWLOCALS, CO_OPTIMIZED
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import hpc_parallel  # noqa: E402

PACKAGE = f"{Path(hpc_parallel.__file__).parent}{os.sep}"
DRY_RUN = ("strategy=pipeline", "nodes=2", "dry_run=true", "launcher.snapshot=false")
STEPPED = ("pipeline", "data")
RANK, RANKS = 1, 2
MEASURED_STEP = 4  # the first ones build groups, kernels and what is kept from then on
STEPS = MEASURED_STEP + 2
QUIET = (
    f"nodes={RANKS}", "gpus_per_node=1", f"training.steps={STEPS}", "training.global_batch_size=16",
    "training.log_every=100", "training.validate_every=null", "training.checkpoint_every=null",
    "training.measure_steps=0", "strategy.verify=never", "launcher=local", "launcher.snapshot=false",
    "device=cpu",
)  # fmt: skip


class Walk:
    """The calls of our functions, between `begin` and `end`, in the order of time."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def begin(self) -> None:
        sys.setprofile(self.note)

    def end(self) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and is_our_function(frame.f_code):
            self.files.append(frame.f_code.co_filename.removeprefix(PACKAGE))

    def __str__(self) -> str:
        calls = Counter(self.files)
        switches = sum(before != after for before, after in zip(self.files, self.files[1:], strict=False))
        returns = switches - max(0, len(calls) - 1)
        figures = f"{len(calls)} files, {len(self.files)} calls, {switches} switches, {returns} returns"
        return "\n".join([figures, *(f"  {count:5} {file}" for file, count in calls.most_common())])


def is_our_function(code: CodeType) -> bool:
    """Whether it is a function below `hpc_parallel/`, not the body of a module or class."""
    flags = CO_OPTIMIZED | CO_NEWLOCALS
    return code.co_filename.startswith(PACKAGE) and code.co_flags & flags == flags


def walk_of_run(*words: str) -> Walk:
    """The walk of the command `run`, started in this process; its output is dropped."""
    from hpc_parallel.commands.run_command import main

    walk = Walk()
    with (
        contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors,
    ):  # fmt: skip
        walk.begin()
        try:
            code = main(words)
        finally:
            walk.end()
    if code:
        raise RuntimeError(errors.getvalue())
    return walk


def walk_of_step(strategy: str) -> Walk:
    """The walk of rank 1 of two from one call of `Step.run` to the next one."""
    from hpc_parallel.config.schema import register
    from hpc_parallel.launch.run_files import write
    from tests.composed import prepared

    register()
    with tempfile.TemporaryDirectory() as scratch:
        run = prepared(f"run_dir={scratch}/run", f"strategy={strategy}", *QUIET)
        write(run)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preloaded"])  # torch once for both
        walks = context.Queue()
        ranks = [
            context.Process(target=_train, args=(scratch, rank, walks if rank == RANK else None))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"strategy={strategy} failed")
        walk = Walk()
        walk.files = walks.get()
        return walk


def _train(scratch: str, rank: int, walks: Any) -> None:
    import torch.distributed as dist

    from tests.workers import train_here

    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=RANKS)
    if walks is None:
        train_here(f"{scratch}/run", {})
    else:
        with _watched_step() as walk:
            train_here(f"{scratch}/run", {})
        walks.put(walk.files)
        walks.close()
        walks.join_thread()
    dist.destroy_process_group()
    os._exit(0)  # threads of torch can abort an ordinary exit (docs/own-script.md)


@contextlib.contextmanager
def _watched_step() -> Iterator[Walk]:
    """The calls from the measured call of `run` in training/step.py to the one after it."""
    from hpc_parallel.training.step import Step

    walk, steps, run = Walk(), count(1), Step.run

    def watched(*arguments: Any) -> Any:
        step = next(steps)
        if step == MEASURED_STEP:
            walk.begin()
        elif step == MEASURED_STEP + 1:
            walk.end()
        return run(*arguments)

    Step.run = watched  # type: ignore[method-assign]
    yield walk


KINDS: Mapping[str, Callable[..., Walk]] = {"run": walk_of_run, "step": walk_of_step}


def main(*arguments: str) -> None:
    kind, *words = arguments or ("",)
    if kind:
        print(KINDS[kind](*words))
        return
    print(f"{' '.join(DRY_RUN)}: {walk_of_run(*DRY_RUN)}")
    for strategy in STEPPED:
        print(f"a step of rank {RANK}, strategy={strategy}: {walk_of_step(strategy)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
