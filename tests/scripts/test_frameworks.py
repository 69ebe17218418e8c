"""Scripts of frameworks on this machine, over two simulated nodes, one of which is killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.scripts.frameworks import CLIENTS, Client, named, resumes_and_equals_one_process
from tests.scripts.test_local_scripts import run

pytestmark = [pytest.mark.full, pytest.mark.processes, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("client", CLIENTS, ids=named)
def test_a_framework_resumes_after_a_kill_and_equals_one_process(client: Client, home: Path) -> None:
    start = partial(run, home, "launcher=local")
    resumes_and_equals_one_process(client, start=start, home=home)
