"""Imports a user's classes, builds their model without memory and their data, before a run starts.

    python -m hpc_parallel.worker.model_check < QUESTION

reads {tables, advice, values, tries_data} as JSON. `tables` and `advice` are those of launch/import_check.py.
`values` are resolved configurations. `tries_data`: whether to build the data of the first one. The output is
{messages, note} as JSON. `messages` has a list for each configuration: why a class can't be imported. If all
classes can be imported, the list says what the data, the model's hints and code, and the optimizer refuse.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

if __name__ == "__main__":
    gc.disable()  # as in worker/main.py; this process ends soon

import numpy as np
import torch
from torch.nn import Parameter

from hpc_parallel.config.build import build
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.typed_config import typed
from hpc_parallel.data.dataset import as_data
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies.model_checks import TRAINS, find_problems
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.training.optimizer import build_optimizer
from hpc_parallel.user_code import causes, described, failure_of

_OF_ARGUMENTS = TypeError | ValueError | ImportError
LONGEST_S = 10.0  # to read a few samples; login nodes are shared
MOST_BYTES = 8 * 2**30


def messages_of(values: Mapping[str, Any], data: Seen) -> list[str]:
    """Returns why the model of a resolved configuration can't be built, or can't be split as configured."""
    config = typed(values)
    layout = layout_of(config.strategy, devices=config.devices)
    length = config.data.get("sequence_length")  # the shape of other samples is known only from the data
    sample_shape = data.sample_shape or ((length,) if length else None)
    try:
        model = build_model(config)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    problems = find_problems(model, config=config, layout=layout, sample_shape=sample_shape, dtype=data.dtype)
    return [str(problem) for problem in (*problems, *_optimizer_problems(model, config, layout))]


def _optimizer_problems(model: LayeredModel, config: RunConfig, layout: Layout) -> Sequence[Problem | str]:
    """Build the optimizers of a training for small weights with the names of `model`."""
    if config.task.name not in TRAINS:
        return []
    weights = {name: Parameter(torch.zeros([1] * weight.ndim)) for name, weight in model.named_parameters()}
    split = any(layout.degrees[axis] > 1 for axis in ("pipeline", "shard", "expert", "tensor"))
    try:
        with _limited(memory=False):
            build_optimizer(weights, config.optimizer, split=split, ranks=config.devices)
    except _TookLongError:
        return []
    except ConfigError as error:
        cause = error.__cause__  # of the class: it may need a GPU, a process group, or a file of the nodes
        in_job = isinstance(cause, Exception) and _only_in_the_job(cause, is_job=True)
        return error.problems if isinstance(cause, _OF_ARGUMENTS | None) and not in_job else []
    return []


def answer_to(question: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {messages, note}."""
    advice, runs = question["advice"], question["values"]
    tried = (failure_of(key, table, advice=advice) for key, table in question["tables"])
    if failures := [*filter(None, tried)]:
        return {"messages": [failures for _ in runs], "note": None}
    data = look_at(runs[0]["data"], advice=advice) if question.get("tries_data") else Seen()
    return {"messages": [[*data.problems, *messages_of(values, data)] for values in runs], "note": data.note}


def main() -> None:
    """Write the messages to stdout; what imported modules print goes to stderr."""
    question = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        answer.write(json.dumps(answer_to(question)))


@dataclass(frozen=True)
class Seen:
    """The result: problems, or a note if only a rank can find out, and the shape and type of a sample."""

    problems: tuple[str, ...] = ()
    note: str | None = None
    sample_shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None


class _TookLongError(BaseException):
    """Not a subclass of Exception, which the user's code may catch."""


def look_at(table: Mapping[str, Any], *, advice: str) -> Seen:
    """Build the data of `table`, a table with `_target_`, and read samples as a rank does.

    advice: a sentence for errors in a job. It is empty for a run on this machine, where files and memory are
    the same as those of the ranks.
    """
    try:
        with _limited(memory=bool(advice)):
            data = as_data(build(table, key="data"))
            sample = data.train.batch(np.zeros(1, dtype=np.int64))[0]
    except _TookLongError:
        return Seen(note=f"data        not tried here: it takes longer than {LONGEST_S:g} s")
    except MemoryError:
        return Seen(note="data        not tried here: it needs more memory than a login node may give")
    except Exception as error:  # the user's code may raise any kind
        messages = [str(problem) for problem in error.problems] if isinstance(error, ConfigError) else []
        messages = messages or [described(error)]
        if _only_in_the_job(error, is_job=bool(advice)):
            return Seen(note=f"data        not tried here: {messages[0]}")
        return Seen(problems=tuple(f"{text.rstrip('.')}. {advice}" if advice else text for text in messages))
    return Seen(sample_shape=tuple(data.sample_shape), dtype=sample.dtype)


def _only_in_the_job(error: BaseException, *, is_job: bool) -> bool:
    """Whether the error may not occur on a rank: it needs a file of the nodes, or a process group."""
    chain = (error, *causes(error))
    if any("process group has not been initialized" in str(one) for one in chain):
        return True
    return is_job and any(isinstance(one, OSError) for one in chain)


@contextmanager
def _limited(*, memory: bool) -> Iterator[None]:
    """Raise _TookLongError after LONGEST_S, and MemoryError beyond MOST_BYTES if `memory` is limited."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TookLongError

    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    if memory:
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


if __name__ == "__main__":
    main()
