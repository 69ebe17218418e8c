"""Builds a user's data and reads a few samples before a run starts, within limits: login nodes are shared."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch

from hpc_parallel.config.build import build
from hpc_parallel.data.dataset import as_data
from hpc_parallel.problems import ConfigError
from hpc_parallel.user_code import causes, described

LONGEST_S = 10.0
MOST_BYTES = 8 * 2**30


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
