"""The names by which jobs start. Jobs that were submitted with version 0.1.0 use the former names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from hpc_parallel import job
from tests.affected import NAMED


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, timeout=240)


@pytest.mark.processes
def test_a_rank_starts(tmp_path: Path) -> None:
    """The first thing that it does is to read the run's configuration."""
    done = python("hpc_parallel.job", "rank", str(tmp_path))
    assert done.returncode == 1
    assert f"{tmp_path}/config.yaml" in done.stderr


@pytest.mark.processes
def test_an_unknown_part_is_refused() -> None:
    done = python("hpc_parallel.job", "rnak", "runs/x")
    assert (done.returncode, done.stderr) == (
        1,
        "hpc_parallel.job has no part rnak: "
        "rank, agent, conclude, pack, spare, signal, notify, torchrun\n",
    )  # fmt: skip


@pytest.mark.processes
def test_ranks_share_the_imported_modules_which_no_search_for_garbage_touches() -> None:
    """In a process of its own: here the modules are imported already."""
    lines = (
        "import gc, sys",
        "from hpc_parallel import job",
        "main = job.worker_main()",
        "print(main.__module__, gc.isenabled(), gc.get_freeze_count() > 100_000, 'torch' in sys.modules)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.stdout.split() == ["hpc_parallel.worker.main", "True", "True", "True"], done.stderr


def test_what_a_rank_finds_by_name_exists() -> None:
    sources = (path.read_text() for path in Path(job.__file__).parent.rglob("*.py"))
    names = [match[0].strip('"') for text in sources for match in NAMED.finditer(text)]
    assert len(names) >= 10  # seven tasks, the layout check, the profilers, the script
    assert all(callable(resolve_name(name)) for name in names)
