"""Every private part of Hydra that this package uses, and the state that Hydra keeps for the whole process.

No other file imports `hydra._internal`, so check this file with each new version of Hydra. Hydra's public
functions are not enough: they read all files of `conf/` again for each run of a sweep, and print errors
instead of raising them.
"""

from __future__ import annotations

import copy
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import _run_hydra, create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathElement
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import InterpolationResolutionError

from hpc_parallel.config.schema import register

_ALONE = threading.RLock()  # Hydra has one state for the whole process


@contextmanager
def composing(config_dir: str, *, extra_dir: str | None = None) -> Iterator[None]:
    """Let Hydra find the files of `config_dir`, and of the user's folder `extra_dir`."""
    GlobalHydra.instance().clear()
    search_path = create_config_search_path(config_dir)
    if extra_dir:
        element = SearchPathElement("command-line", f"file://{Path(extra_dir).absolute()}")
        search_path.get_path().insert(-1, element)  # before the schemas
    Hydra.create_main_hydra2(task_name="run", config_search_path=search_path)
    try:
        yield
    finally:
        GlobalHydra.instance().clear()


def current_loader() -> ConfigLoaderImpl:
    """Hydra's loader inside `composing`. After the block, it still composes from the same files."""
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return loader


def group_choices(group: str) -> list[str]:
    """The files that a group offers, with those of the user's folder; empty if there is no such group."""
    names = current_loader().get_group_options(group)
    return [name for name in names if not name.endswith("_schema")]


def load(loader: ConfigLoaderImpl, config_name: str, overrides: Sequence[str], mode: RunMode) -> DictConfig:
    """Let Hydra compose. Raises what Hydra raises, and HydraException for `model=[1]` and other schemas."""
    try:
        composed = loader.load_configuration(config_name, list(overrides), mode)
    except TypeError as error:  # Hydra expects a group's list to have texts
        raise HydraException(str(error)) from error
    if OmegaConf.get_type(composed) is dict:
        raise HydraException(f"--config-name {config_name}: its defaults need ours: [config, _self_].")
    return composed


def selects_group(override: Override, *, loader: ConfigLoaderImpl) -> bool:
    """Whether the override selects a file of a group, by Hydra's own rule."""
    value: Any = override.value()
    return not isinstance(value, dict) and bool(loader.repository.group_exists(override.key_or_group))


def set_values(overrides: Sequence[Override], config: DictConfig) -> None:
    """Set the values of overrides that select no group. Raises what Hydra raises."""
    ConfigLoaderImpl._apply_overrides_to_config(list(overrides), config)


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of each run of a sweep, in the order of Hydra's basic sweeper."""
    (batch,) = BasicSweeper.split_arguments(list(overrides), None)
    return batch


def has_basic_sweeper(composed: DictConfig) -> bool:
    """Whether Hydra's basic sweeper and launcher are chosen, and no callback."""
    hydra = composed.hydra
    plugins = (hydra.sweeper._target_, hydra.launcher._target_)
    basic = tuple(f"{plugin.__module__}.{plugin.__qualname__}" for plugin in (BasicSweeper, BasicLauncher))
    return plugins == basic and not hydra.callbacks


def flags_parser() -> ArgumentParser:
    """The parser of a command line: Hydra's flags, and the overrides.

    Python 3.14 looks for `%` in a help text when it is added, and one text of Hydra 1.3 is another object.
    """
    ArgumentParser._check_help = lambda parser, action: None  # type: ignore[attr-defined]  # hides that of 3.14
    try:
        made: ArgumentParser = get_args_parser()
    finally:
        del ArgumentParser._check_help  # type: ignore[attr-defined]
    return made


def print_by_flag(flags: Namespace, main: Callable[..., Any], *, config_dir: str, config_name: str) -> None:
    """Let Hydra print what `flags` ask for, such as the configuration. Raises what Hydra raises."""
    try:
        _run_hydra(flags, flags_parser(), main, config_dir, config_name)
    except InterpolationResolutionError as error:
        if not flags.resolve or error.full_key is None:
            raise
        raise HydraException(
            f"--resolve: only a start knows {error.full_key}. Leave --resolve out."
        ) from error


@contextmanager
def borrowed_hydra() -> Iterator[None]:
    """Register our schemas and let Hydra compose in the block, then restore Hydra's earlier state.

    Callers other than our own commands need this, because a notebook may use Hydra itself. Other threads wait
    until the block ends.
    """
    with _ALONE:
        singletons = (GlobalHydra, HydraConfig, VersionBase, ConfigStore)
        kept = [(singleton.instance(), dict(vars(singleton.instance()))) for singleton in singletons]
        job = copy.deepcopy(JobRuntime.instance().conf)
        store = _copied(ConfigStore.instance().repo)
        resolvers = dict(BaseContainer._resolvers)  # no public function lists them; Hydra does the same
        try:
            register()
            yield
        finally:
            for singleton, attributes in kept:  # Hydra replaces attributes, but changes the store's tables
                vars(singleton).clear()
                vars(singleton).update(attributes)
            JobRuntime.instance().conf = job
            ConfigStore.instance().repo = store
            BaseContainer._resolvers.clear()
            BaseContainer._resolvers.update(resolvers)


def _copied(groups: dict[str, Any]) -> dict[str, Any]:
    """A copy of the tables with the same nodes."""
    return {name: _copied(node) if isinstance(node, dict) else node for name, node in groups.items()}
