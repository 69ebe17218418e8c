"""Upper bounds of what a reader has to follow: lines, files, modules loaded, and walks through the files.

A change that passes a bound takes something away first, or raises the bound in a commit that says why.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import hpc_parallel

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(hpc_parallel.__file__).parent
HARDWARE = "hardware=h100_sxm_node8_3200gbit"
DRY_RUN = ("run", "strategy=pipeline", "nodes=2", "dry_run=true", "launcher.snapshot=false")


def size(paths: Iterable[Path]) -> tuple[int, int]:
    """Files and their lines. A file that is empty, as most `__init__.py`, does not count."""
    lines = [count for path in paths if (count := len(path.read_text().splitlines()))]
    return len(lines), sum(lines)


def assert_within(found: tuple[int, int], most: tuple[int, int]) -> None:
    assert [value <= bound for value, bound in zip(found, most, strict=True)] == [True, True], (found, most)


def test_core_and_annexes_keep_their_size() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    law = next(contract for contract in contracts if contract["name"] == "The core imports no annex")
    annexes = {module.partition(".")[2] for module in law["forbidden_modules"]}
    core = {module.partition(".")[2] for module in law["source_modules"]}
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert core | annexes == folders  # each folder is one or the other
    files = {path: path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert_within(size(path for path, top in files.items() if top not in annexes), (264, 46_930))
    assert_within(size(path for path, top in files.items() if top in annexes), (104, 21_890))


def test_run_loads_few_modules() -> None:
    code = "import sys, hpc_parallel.run; print(sum(name.startswith('hpc_parallel') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 82


@pytest.mark.parametrize(
    ("words", "files", "switches"),
    [(DRY_RUN, 50, 192), ((*DRY_RUN, HARDWARE), 68, 735), (("step", "pipeline"), 22, 318)],
    ids=["a dry run", "with hardware", "a step"],
)
def test_a_walk_passes_few_files(words: tuple[str, ...], files: int, switches: int) -> None:
    walk = [sys.executable, str(ROOT / "tests/benchmarks/walk.py"), *words]
    done = subprocess.run(walk, capture_output=True, text=True, check=True, cwd=ROOT)
    found = re.search(r"^(\d+) files, \d+ calls, (\d+) switches", done.stdout, re.MULTILINE)
    assert found is not None, done.stdout
    assert_within((int(found[1]), int(found[2])), (files, switches))
