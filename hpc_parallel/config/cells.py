"""The combinations of a sweep, composed as Hydra's basic sweeper would, but each once and quickly.

Hydra composes every job of a sweep twice, and reads all files of `conf/` anew for each: a tenth of a
second each time. Here what depends on the groups chosen (`strategy=data,pipeline`) is composed once for
each choice of them; values (`nodes=1,2,4`) are then set in a copy, by Hydra's own function for that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hpc_parallel.config.compose import composing


@dataclass(frozen=True)
class Cell:
    """One combination: its overrides, those of them in which cells differ, and what they compose to."""

    overrides: list[str]
    swept: list[str]
    config: DictConfig


@dataclass(frozen=True)
class Cells:
    """All combinations of a command, in the order of Hydra's basic sweeper, `hydra.sweep.dir`, and what is
    said to the sweep as a whole.

    Each is to be resolved before the next one is taken: they may share their nodes, and `${hydra:...}`
    means the newest.
    """

    cells: Iterator[Cell]
    folder: Path
    settings: dict[str, Any]


def compose_cells(
    words: Sequence[str], *, config_dir: str, config_name: str, extra_dir: str | None = None
) -> Cells | None:
    """None where another sweeper, launcher or a callback is to have its say: that is Hydra's own way.

    `words`: overrides; `extra_dir`: a folder of the user's own (`--config-dir`). Raises what Hydra does.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        whole = loader.load_configuration(config_name, list(words), run_mode=RunMode.MULTIRUN)
        if not _is_basic(whole):
            return None
        params = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
        said = OmegaConf.to_container(whole.hydra.overrides.task, resolve=False)
        assert isinstance(said, list)
        parsed = OverridesParser.create(config_loader=loader).parse_overrides([*params, *said])
        (batch,) = BasicSweeper.split_arguments(parsed, None)
        fixed = set(batch[0]).intersection(*batch) if len(batch) > 1 else set()
        settings = OmegaConf.to_container(whole.sweep, resolve=True)
        assert isinstance(settings, dict)
        cells = (
            Cell(overrides, [word for word in overrides if word not in fixed], config)
            for overrides, config in _composed(batch, whole=whole, loader=loader)
        )
        folder = Path(str(whole.hydra.sweep.dir)).expanduser().absolute()
        return Cells(cells, folder, {str(key): value for key, value in settings.items()})


def _is_basic(whole: DictConfig) -> bool:
    named = (whole.hydra.sweeper._target_, whole.hydra.launcher._target_)
    basic = tuple(f"{plugin.__module__}.{plugin.__qualname__}" for plugin in (BasicSweeper, BasicLauncher))
    return named == basic and not whole.hydra.callbacks


def _composed(
    batch: Sequence[list[str]], *, whole: DictConfig, loader: ConfigLoaderImpl
) -> Iterator[tuple[list[str], DictConfig]]:
    hydras = OmegaConf.to_container(whole.hydra.overrides.hydra)
    assert isinstance(hydras, list)
    bases: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
    words = {word for overrides in batch for word in overrides}
    parser = OverridesParser.create()
    parsed: dict[str, Override] = {word: parser.parse_override(word) for word in words}
    groups_of = {word for word in words if _chooses(parsed[word], loader=loader)}
    told = any("${hydra:" in str(each.value()) for each in parsed.values())
    shown: tuple[str, ...] | None = None
    # Every combination sets the same values, so one copy does for all where none adds or deletes a key.
    again = all(
        not (each.is_add() or each.is_force_add() or each.is_delete() or isinstance(each.value(), dict))
        for word, each in parsed.items() if word not in groups_of
    )  # fmt: skip
    for number, overrides in enumerate(batch):
        groups = tuple(word for word in overrides if word in groups_of)
        if groups not in bases:
            base = loader.load_configuration(whole.hydra.job.config_name, [*hydras, *groups], RunMode.RUN)
            OmegaConf.copy_cache(from_config=whole, to_config=base)  # one `now` for the whole sweep
            bases[groups] = (base, _without_hydra(base))
            told = told or "${hydra:" in OmegaConf.to_yaml(bases[groups][1])
        base, plain = bases[groups]
        if groups != shown:
            HydraConfig.instance().set_config(base)
            shown = groups
        if told:
            _tell(number, overrides)
        config = plain if again else copy.deepcopy(plain)
        ConfigLoaderImpl._apply_overrides_to_config([parsed[w] for w in overrides if w not in groups], config)
        yield overrides, config


def _without_hydra(base: DictConfig) -> DictConfig:
    plain = copy.deepcopy(base)
    with read_write(plain), open_dict(plain):
        del plain["hydra"]
    return plain


def _tell(number: int, overrides: list[str]) -> None:
    """Let `${hydra:job.num}` and its like, in the user's own values, speak of this combination."""
    hydra: Any = HydraConfig.get()
    with read_write(hydra), open_dict(hydra):
        hydra.job.num = number
        hydra.job.id = str(number)
        hydra.overrides.task = overrides


def _chooses(override: Override, *, loader: ConfigLoaderImpl) -> bool:
    """Whether it chooses a file of a group, as Hydra decides that."""
    value: Any = override.value()
    return not isinstance(value, dict) and bool(loader.repository.group_exists(override.key_or_group))
