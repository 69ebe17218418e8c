"""What the tests are told when a rank of their pool ends before it answers."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch.distributed as dist

from tests import workers as pool
from tests.workers import Workers


def wait_for_one_that_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(3600)


def wait_for_one_that_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("off by 0.1")
    time.sleep(3600)


def leave() -> None:
    os._exit(3)


def test_a_rank_that_ends_early_is_told_from_one_that_is_wrong(workers: Workers) -> None:
    with pytest.raises(ChildProcessError, match=r"^rank 1 was ended by SIGSEGV$"):
        workers.run(2, wait_for_one_that_dies)
    with pytest.raises(AssertionError, match=r"^rank 0 exited with 3 and gave no answer$"):
        workers.run(1, leave)


def test_the_error_of_a_rank_is_told_while_another_waits(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "AFTER_AN_ERROR_S", 1)
    with pytest.raises(AssertionError) as raised:
        workers.run(3, wait_for_one_that_fails)
    text = str(raised.value)
    assert text.startswith("rank 1:\n")
    assert text.endswith("ValueError: off by 0.1\n\nno answer within 1 s of rank 0, 2")


def test_a_rank_that_died_between_two_jobs_is_named(workers: Workers) -> None:
    workers.run(2, dist.get_rank)
    _, process = workers._ranks[1]
    process.kill()
    process.join()
    with pytest.raises(ChildProcessError, match=r"^rank 1 was ended by SIGKILL$"):
        workers.run(2, dist.get_rank)
