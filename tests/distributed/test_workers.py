"""What the tests are told when a rank of their pool ends before it answers."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.workers import Workers


def die_by_signal() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(3)


def test_a_rank_that_ends_early_is_told_from_one_that_is_wrong(workers: Workers) -> None:
    with pytest.raises(ChildProcessError, match=r"^rank 1 was ended by SIGSEGV$"):
        workers.run(2, die_by_signal)
    with pytest.raises(AssertionError, match=r"^rank 0 exited with 3 and gave no answer$"):
        workers.run(1, leave)
