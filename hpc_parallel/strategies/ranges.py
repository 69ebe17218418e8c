"""Named ranges for profilers: of torch's profiler while it is on, else of NVTX on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch.profiler import record_function

from hpc_parallel.torch_internals import profiler_is_on

_NOTHING = nullcontext()


def marked(name: str) -> AbstractContextManager[object]:
    """A range around a piece of work. Without a profiler it costs one call, and on a GPU two of NVTX.

    The range of a collective is named by it and its axis: `all_reduce replicate`.
    """
    if torch.compiler.is_compiling():  # the compiler can't trace the question whether a profiler is on
        return _NOTHING
    if profiler_is_on():
        return record_function(name)
    return torch.cuda.nvtx.range(name) if _has_nvtx() else _NOTHING


@cache
def _has_nvtx() -> bool:
    return torch.cuda.is_available()
