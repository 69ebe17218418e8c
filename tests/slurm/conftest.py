"""Fixtures: the real Slurm that these tests share (skipped if it can't run here), and the chaos cases."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
from chaos import Case, Row, undisturbed
from chaos_table import pytest_terminal_summary  # noqa: F401  (a hook)
from cluster import Cluster, unavailable_reason
from test_jobs import Site

from tests.workers import Trained, Workers


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with Cluster.start() as started:
        yield started


@pytest.fixture(autouse=True)
def _no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel jobs that a failed test left; they would take the processors from later tests."""
    shared = request.getfixturevalue("cluster") if "cluster" in request.fixturenames else None
    yield
    if shared is not None:
        shared.run("scancel", f"--user={getpass.getuser()}")


@pytest.fixture(scope="session")
def reference(workers: Workers) -> Trained:
    """The undisturbed training that every chaos case must equal."""
    return undisturbed(workers)


@pytest.fixture
def case(
    cluster: Cluster,
    reference: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> Iterator[Case]:
    """A training to disturb, at steps drawn from CHAOS_SEED or from a random seed, which is printed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))  # the tests' own models
    seed = int(os.environ.get("CHAOS_SEED", "") or int.from_bytes(os.urandom(3)))
    print(f"CHAOS_SEED={seed}")
    row = Row(seed)
    record_property(
        "chaos", vars(row)
    )  # the case fills it; pytest-xdist passes only plain values between processes
    site = Site(cluster, tmp_path)
    case = Case(site, reference, row=row, dice=Random(seed))
    yield case
    case.leave()
