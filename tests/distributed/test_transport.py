"""What NCCL's log can know: the traffic of trainings has gone over its connections before the log is read."""

from __future__ import annotations

import torch

from hpc_parallel.profiling.traffic import Traffic
from hpc_parallel.start.transport import use_connections
from tests.workers import Workers

MIB = 2**20


def traffic() -> tuple[dict[str, int], dict[str, int]]:
    with Traffic() as counted:
        use_connections(torch.device("cpu"))
    assert not counted.unknown
    return dict(counted.sent), dict(counted.received)


def test_sums_of_both_sizes_a_gather_and_a_ring_are_sent(workers: Workers) -> None:
    """Of rings: a sum moves 2 (n-1)/n of its array through each rank, a gather (n-1)/n, a message all."""
    for sent, received in workers.run(4, traffic):
        collectives = {"all_reduce": (16 * MIB + 4) * 3 // 2, "all_gather": 12 * MIB}
        assert sent == received == collectives | {"send": 4 * MIB}


def test_one_rank_sends_nothing(workers: Workers) -> None:
    ((sent, received),) = workers.run(1, traffic)
    assert set(sent.values()) | set(received.values()) <= {0}
