"""`--affected BASE`: only the tests that a change since BASE can reach by imports, the nearest first.

Imports are those of the test's file and of what its fixtures in conftest.py use. A changed file that no
import shows (configuration, templates, fixtures, requirements) can reach every test.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NAMED = re.compile(r'"(hpc_parallel\.[\w.]+):\w+"')  # as in "hpc_parallel.worker.train:train"
PACKAGES = ("hpc_parallel", "tests")
TEXTS = ("docs/", "README.md", "CHANGELOG.md", "jobs/", "Makefile", ".ci/")  # read by these tests only
TESTS_OF_TEXTS = (
    "tests.unit.test_docs",
    "tests.commands.test_studies",
    "tests.distributed.test_documented_examples",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--affected", metavar="BASE", help="only tests that a change since this commit can reach"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    base = config.getoption("--affected")
    if base is None:
        return
    distances = distances_to(changed_files(base))
    kept = {item: distance for item in items if (distance := nearest(item, distances)) is not None}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=kept.__getitem__)


def changed_files(base: str) -> list[str]:
    """Files that differ between `base` and the working tree, and new ones."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    texts = (subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
             for words in commands)  # fmt: skip
    return sorted({line for text in texts for line in text.splitlines()})


def distances_to(files: Iterable[str]) -> dict[str, int]:
    """Module -> the number of imports between it and the nearest changed file; for `*`, every module."""
    import grimp  # slower than all else here, and rarely needed

    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    for importer in graph.find_descendants("hpc_parallel"):
        for found in NAMED.findall(_source(importer)):  # what a rank finds by name
            graph.add_import(importer=importer, imported=found)
    distances: dict[str, int] = {}
    for file in files:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if file.startswith(TEXTS):
            distances |= dict.fromkeys(TESTS_OF_TEXTS, 0)
        elif module in graph.modules and not module.endswith("conftest"):
            spread(module, graph.find_modules_that_directly_import, into=distances)
        elif (ROOT / file).exists():
            distances["*"] = 0
    return distances


def _source(module: str) -> str:
    """The text of a module; empty for a package, whose file has no text here."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    return path.read_text() if path.exists() else ""


def spread(module: str, importers: Callable[[str], Iterable[str]], *, into: dict[str, int]) -> None:
    """Breadth first over the modules that import `module`."""
    layer, distance = {module}, 0
    while layer := {name for name in layer if into.get(name, distance + 1) > distance}:
        into |= dict.fromkeys(layer, distance)
        layer, distance = {importer for name in layer for importer in importers(name)}, distance + 1


def nearest(item: pytest.Item, distances: dict[str, int]) -> int | None:
    """The distance of a test; None if no change can reach it."""
    return min((distances[name] for name in ("*", *modules_of(item)) if name in distances), default=None)


def modules_of(item: Any) -> Iterator[str]:
    """The module of the test, and those whose names its fixtures use."""
    yield item.module.__name__
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        function = definitions[-1].func
        globals_ = getattr(function, "__globals__", {})
        for name in getattr(getattr(function, "__code__", None), "co_names", ()):
            value = globals_.get(name)
            yield getattr(value, "__module__", None) or getattr(value, "__name__", "")
