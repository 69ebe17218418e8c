"""Which products each device of a ring has: together the causal mask, each once, as many on every device."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.strategies.context.ring import slices_of, visible


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("half", [1, 3])
def test_turns_make_the_causal_mask(degree: int, half: int) -> None:
    length = 2 * degree * half
    places = [
        torch.cat([torch.arange(length)[part] for part in slices_of(rank, degree=degree, length=length)])
        for rank in range(degree)
    ]
    assert sorted(torch.cat(places).tolist()) == list(range(length))
    done = torch.zeros(length, length, dtype=torch.int64)
    for rank in range(degree):
        own = places[rank]
        done[own[:, None], own] += torch.ones(2 * half, 2 * half, dtype=torch.int64).tril()
        for source in set(range(degree)) - {rank}:
            rows, seen = visible(source, rank=rank, half=half, causal=True)
            queries, keys = own[rows], places[source][seen]
            assert len(queries) * len(keys) == 2 * half * half  # of 4: half of them, on every device
            done[queries[:, None], keys] += 1
    assert torch.equal(done, torch.ones(length, length, dtype=torch.int64).tril())
