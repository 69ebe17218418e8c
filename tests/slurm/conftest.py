"""Fixtures: the real Slurm that these tests share (skipped if it can't run here), and the chaos cases."""

from __future__ import annotations

import getpass
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import pytest
from chaos import Case, Row, undisturbed
from chaos_table import pytest_terminal_summary  # noqa: F401  (a hook)
from cluster import Cluster, unavailable_reason
from test_jobs import Site

from tests.scripts.loops import CLIENTS
from tests.workers import Train, Trained, Workers

BESIDE = "beside_others"  # the fixture of the tests that run beside each other
THREADS = 4  # of them


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """The tests that run beside each other come first: no other test may harm their jobs."""
    items.sort(key=lambda item: BESIDE not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Wait for a test that runs in a thread already."""
    if BESIDE not in pyfuncitem.fixturenames:
        return None
    pyfuncitem.funcargs[BESIDE][pyfuncitem].result()
    return True


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    if reason := unavailable_reason():
        pytest.skip(reason)
    with Cluster.start() as started:
        yield started


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Site:
    return new_site(cluster, tmp_path)


def new_site(cluster: Cluster, home: Path) -> Site:
    """A folder with the clients of tests/scripts, and nothing else."""
    for client in CLIENTS.glob("*.py"):
        shutil.copy(client, home)
    return Site(cluster, home)


@pytest.fixture(scope="session")
def beside_others(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[pytest.Item, Future[None]]]:
    """The tests that harm nobody and only wait for their jobs: they run in threads, their jobs in one Slurm.

    Each has a `site` of its own; their other fixtures are of the session.
    """

    def arguments(item: Any) -> dict[str, Any]:
        names = item._fixtureinfo.argnames
        own = {"site": new_site(cluster, tmp_path_factory.mktemp("beside"))}
        own |= item.callspec.params if hasattr(item, "callspec") else {}
        return {name: own[name] if name in own else request.getfixturevalue(name) for name in names}

    with ThreadPoolExecutor(THREADS) as threads:
        tests = [item for item in request.session.items if BESIDE in getattr(item, "fixturenames", ())]
        yield {
            test: threads.submit(test.function, **arguments(test)) for test in tests if not is_skipped(test)
        }
        threads.shutdown(cancel_futures=True)


def is_skipped(item: pytest.Item) -> bool:
    """Whether pytest won't call this test. Its job would take the processors from the others."""
    conditions = [condition for mark in item.iter_markers("skipif") for condition in mark.args]
    return item.get_closest_marker("skip") is not None or any(conditions)


@pytest.fixture(scope="session")
def alone(trained: Train) -> Callable[..., list[float]]:
    """The losses of a training on one device; any thread may ask."""
    lock = Lock()

    def losses(*words: str) -> list[float]:
        with lock:
            return trained("strategy=single", *words).losses

    return losses


@pytest.fixture(autouse=True)
def _no_job_is_left(request: pytest.FixtureRequest) -> None:
    """Cancel jobs that tests before left; they would take the processors from this one."""
    if "cluster" in request.fixturenames and BESIDE not in request.fixturenames:
        request.getfixturevalue("cluster").run("scancel", f"--user={getpass.getuser()}")


@pytest.fixture(scope="session")
def reference(workers: Workers) -> Trained:
    """The undisturbed training that every chaos case must equal."""
    return undisturbed(workers)


@pytest.fixture
def case(
    site: Site,
    reference: Trained,
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
    case = Case(site, reference, row=row, dice=Random(seed))
    yield case
    case.leave()
