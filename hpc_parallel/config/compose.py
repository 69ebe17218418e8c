"""Compose one configuration with many selections of overrides, and read the files of `conf/` once.

A composition takes a tenth of a second, almost all of it for the groups (`strategy=pipeline`). Values
(`nodes=2`) are set in a copy, with Hydra's own function.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathElement
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

# Hydra raises ValueError for `strategy=null`, and lets the errors of YAML through.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, YAMLError)


@contextmanager
def composing(config_dir: str, *, extra_dir: str | None = None) -> Iterator[None]:
    """Let `hydra.compose` find the files of `config_dir`, and of the user's folder `extra_dir`."""
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


class Trials:
    """Compositions of one configuration, for use inside `composing`. Each is made once."""

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self._bases: dict[tuple[str, ...], DictConfig] = {}
        self._results: dict[tuple[str, ...], DictConfig | Exception] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration, without Hydra's own part. Raises what Hydra raises."""
        key = tuple(overrides)
        if key not in self._results:
            try:
                self._results[key] = self._compose(overrides)
            except COMPOSE_ERRORS as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def defaults(self) -> Mapping[str, Any]:
        """The default choice of each group."""
        return dict(self._base([]).hydra.runtime.choices)

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        values = [override for override in parsed if _sets_a_value(override)]
        texts = {override.input_line for override in values}
        config = without_hydra(self._base([text for text in overrides if text not in texts]))
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return config

    def _base(self, overrides: Sequence[str]) -> DictConfig:
        key = tuple(overrides)
        if key not in self._bases:
            self._bases[key] = compose(self._config_name, overrides=list(overrides), return_hydra_config=True)
        return self._bases[key]


def _sets_a_value(override: Override) -> bool:
    """Whether a copy can take the override: no group, nothing of Hydra's own, one value."""
    if override.is_hydra_override() or override.is_sweep_override():
        return False
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    return not selects_group(override, loader=loader)


def selects_group(override: Override, *, loader: ConfigLoaderImpl) -> bool:
    """Whether the override selects a file of a group, by Hydra's own rule."""
    value: Any = override.value()
    return not isinstance(value, dict) and bool(loader.repository.group_exists(override.key_or_group))


def without_hydra(base: DictConfig) -> DictConfig:
    """A copy of the configuration without Hydra's own part."""
    plain = copy.deepcopy(base)
    with read_write(plain), open_dict(plain):
        del plain["hydra"]
    return plain
