"""The real Slurm that these tests share, or the reason why there is none here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster import Cluster, unavailable_reason


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with Cluster.start() as started:
        yield started
