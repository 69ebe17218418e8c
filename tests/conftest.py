"""Fixtures that several folders of tests use."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, base
from omegaconf.base import Metadata

from hpc_parallel.config.places import find_folder
from hpc_parallel.config.schema import register
from hpc_parallel.record import snapshot
from hpc_parallel.record.git_source import PACKAGE, FolderSource
from hpc_parallel.record.run_folder import is_run_folder
from tests.copies import LEAVES, copied_leaf, copied_metadata, copied_table
from tests.workers import Train, Workers

pytest_plugins = ["tests.outcomes", "tests.affected"]
pytest.register_assert_rewrite("chaos")  # tests/slurm/chaos.py contains assertions
# A forked child has none of the threads that torch's dead objects wait for: collecting them would end it.
os.register_at_fork(after_in_child=gc.disable)


# Groups of tests that share a process. `pytest -n` starts the longest first.
SLURM, RANKS = "slurm", "ranks"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """The modules of the tests stay to the end: never search them for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of the Slurm cluster share a process; so do tests with a pool of ranks, and tests of one file."""
    item.add_marker(pytest.mark.xdist_group(_group(item)))  # before pytest-xdist reads the marks


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in items):
        raise pytest.UsageError("pytest-xdist does not group with this pytest: pip install 'pytest<9.2'")
    items.sort(key=lambda item: {SLURM: 0, RANKS: 1}.get(_group(item), 2))


def _group(item: pytest.Item) -> str:
    if item.get_closest_marker("slurm"):
        return SLURM
    return RANKS if "workers" in getattr(item, "fixturenames", ()) else item.path.name


@pytest.fixture(scope="session", autouse=True)
def _schemas() -> None:
    register()


@pytest.fixture(scope="session", autouse=True)
def _proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Comparisons with one device are recorded outside of this user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(os, "fsync", lambda file: None)  # as in tests/preloaded.py
        # torch asks for the name of each peer, and a name server that drops the question costs 5 s.
        patch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _compositions() -> Iterator[None]:
    """Hydra finds, reads and merges the same files once in a process; a copy gets the values."""
    known: dict[tuple[object, ...], Any] = {}
    places = {"hydra.conf", str(find_folder("conf")), ""}  # Hydra's files, ours, and the schemas
    read, merge = ConfigRepository.load_config, ConfigLoaderImpl._compose_config_from_defaults_list

    def once(words: str, work: Callable[[], Any], *, sources: Iterable[ConfigSource]) -> Any:
        paths = [source.path for source in sources]
        folders = [path for path in paths if path not in places]  # a test may change the files in these
        if not places.issubset(paths) or not all(map(os.path.isdir, folders)):
            return work()
        files = [(path, folder) for folder in folders for path in sorted(Path(folder).rglob("*.y*ml"))]
        held = ((path.relative_to(folder), path.is_file() and path.read_bytes()) for path, folder in files)
        key = words, len(folders), *held
        if key not in known:
            known[key] = work()
        return copy.deepcopy(known[key])

    def read_once(self: ConfigRepository, config_path: str) -> Any:
        words = f"{config_path} {[source.path for source in self.sources]}"  # what is read knows its folder
        return once(words, lambda: read(self, config_path), sources=self.sources)

    def merge_once(self: ConfigLoaderImpl, defaults: list[Any], repo: IConfigRepository) -> Any:
        return once(str(defaults), lambda: merge(self, defaults, repo), sources=repo.get_sources())

    def choose_once(
        repo: IConfigRepository, config_name: str | None, overrides_list: list[Override], **options: bool
    ) -> DefaultsList:
        values = Overrides(repo, overrides_list).config_overrides
        groups = [override for override in overrides_list if override not in values]
        words = f"{config_name} {options} {[override.input_line for override in groups]}"
        work = functools.partial(create_defaults_list, repo, config_name, groups, **options)
        chosen: DefaultsList = once(words, work, sources=repo.get_sources())
        chosen.config_overrides = values
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "parse", functools.cache(base.parse))  # trees of `${...}`, which are only read
        patch.setattr(config_loader_impl, "create_defaults_list", choose_once)
        patch.setattr(ConfigRepository, "load_config", read_once)
        patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
        patch.setattr(Metadata, "__deepcopy__", copied_metadata, raising=False)
        for kind in LEAVES:
            patch.setattr(kind, "__deepcopy__", copied_leaf)
        patch.setattr(DictConfig, "__deepcopy__", copied_table)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_source() -> Iterator[None]:
    """git is asked once in a process what this project holds: that takes longer than a preparation."""
    own, find_files, find_root = Path(PACKAGE), snapshot.git_source, snapshot.checkout_of
    own_root = functools.cache(lambda: find_root(own))
    own_files = functools.cache(lambda: find_files(own, leave_out=is_run_folder))

    def root_of(path: Path) -> Path | None:
        return own_root() if path == own else find_root(path)

    def files_of(root: Path, *, leave_out: Callable[[Path], bool]) -> FolderSource:
        return own_files() if root == own else find_files(root, leave_out=leave_out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "checkout_of", root_of)
        patch.setattr(snapshot, "git_source", files_of)
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run"])
    return tmp_path


@pytest.fixture
def silent_slurm(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Slurm is installed, its configuration is empty, so it does not answer."""
    (here / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(here / "slurm.conf"))


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Processes that import torch once and run the trainings that tests request."""
    with closing(Workers(tmp_path_factory.mktemp("workers"))) as pool:
        yield pool


@pytest.fixture(scope="session")
def trained(workers: Workers) -> Train:
    """The matrix: each layout is trained once, with everything recorded, and asked by all tests."""
    return functools.cache(workers.train)
