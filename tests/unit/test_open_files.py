"""Sockets at scale: a rank raises its limit of open files and warns if it is too low."""

from __future__ import annotations

import resource

from hpc_parallel.supervise.world import World
from hpc_parallel.worker.open_files import MOST, raise_limit, shortage


def world(rank: int, size: int) -> World:
    return World(rank, size, 0, 8, 0, size // 8, host="n1", launcher="slurm", attempt="1")


def test_the_limit_becomes_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        limit = raise_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, before[1])
        assert limit == (MOST if before[1] == resource.RLIM_INFINITY else before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_rank_0_needs_most() -> None:
    assert shortage(1024, world(0, 128)) is None  # 512 + 4 x 128
    message = shortage(1024, world(0, 136))
    assert message is not None
    assert message.startswith("rank 0 on n1 may have 1,024 files open, and 136 ranks may need 1,056 there")
    assert "LimitNOFILE=1056" in message
    assert shortage(1024, world(1, 512)) is None
    assert shortage(1024, world(1, 520)) is not None
