"""Fixtures that more than one folder of tests uses."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from hpc_parallel.config.schema import register
from tests.parity import COMMON, Alone
from tests.workers import Workers

pytest.register_assert_rewrite("chaos")  # tests/slurm/chaos.py asserts for its cases


@pytest.fixture(scope="session", autouse=True)
def _schemas() -> None:
    register()


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Processes that have imported torch once and train whatever a test asks for."""
    pool = Workers(tmp_path_factory.mktemp("workers"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def alone(workers: Workers) -> Alone:
    """The reference of `tests/parity.py`: one device, trained once for each set of options."""
    return functools.cache(lambda *options: workers.train("strategy=single", *COMMON, *options))
