"""Sockets at scale: a rank raises its limit of open files and warns if it is too low."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_parallel.machine.world import World
from hpc_parallel.worker.rank_files import MOST, raise_limit, shortage


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
    assert message.startswith("rank 0 on n1 may have 1,024 files open, and 136 ranks may need 1,056 there")
    assert "LimitNOFILE=1056" in message
    assert shortage(1024, world(1, 512)) is None
    assert shortage(1024, world(1, 520)) is not None


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_sockets_of_a_rank_grow_with_the_logarithm_of_the_ranks(ranks: int) -> None:
    """Real ranks, as docs/performance.md says; rank 0 also has the store and receives the plans of saves."""
    script = Path(__file__).parents[1] / "benchmarks/sockets.py"
    environment = {**os.environ, "TORCH_GLOO_LAZY_INIT": "1"}
    done = subprocess.run(
        [sys.executable, script, "--light", str(ranks)], env=environment, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    counted, first, others = map(int, done.stdout.splitlines()[-1].split())
    most = math.ceil(2 * math.log2(ranks) - 1)
    assert counted == ranks
    assert first <= 2 * ranks + most + 3
    assert others <= 2 * most + 3
