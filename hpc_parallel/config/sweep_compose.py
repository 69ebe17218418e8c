"""Compose a run, or every combination of a sweep as Hydra's basic sweeper orders them.

`sweep.also` is not part of Hydra: it adds combinations outside the product.

Hydra composes every job of a sweep twice and reads all files of `conf/` again for each, which takes 0.1 s
per composition. This module composes each selection of groups (`strategy=data,pipeline`) once. It sets values
(`nodes=1,2,4`) in a copy, with Hydra's own function.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hpc_parallel.config.compose import composing
from hpc_parallel.config.trials import selects_group, without_hydra
from hpc_parallel.config.typed_text import problems_of_files
from hpc_parallel.problems import ConfigError, Problem


@dataclass(frozen=True)
class Cell:
    """One combination: its overrides, those of them that differ between cells, and the composed config."""

    overrides: list[str]
    swept: list[str]
    config: DictConfig


class CellError(Exception):
    """Hydra refuses a combination."""

    def __init__(self, overrides: list[str], refusal: Exception) -> None:
        super().__init__(f"{' '.join(overrides)}: {refusal}")
        self.overrides = overrides
        self.refusal = refusal


@dataclass(frozen=True)
class SweepCells:
    """All combinations of a command, in the order of Hydra's basic sweeper.

    folder: `hydra.sweep.dir`; settings: the keys of the sweep as a whole.

    Resolve each combination before you take the next one: they may share nodes, and `${hydra:...}` refers to
    the newest.
    """

    cells: Iterator[Cell]
    folder: Path
    settings: dict[str, Any]


def compose_run(
    words: Sequence[str], *, config_dir: str, config_name: str, extra_dir: str | None = None
) -> Cell:
    """Compose a command line without `-m`, as Hydra's own `main` does.

    `words`, `extra_dir`: as for `compose_cells`. Raises what Hydra raises, and ConfigError for overrides that
    only a sweep or only Hydra's `main` uses.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        composed = loader.load_configuration(config_name, list(words), run_mode=RunMode.RUN)
        HydraConfig.instance().set_config(composed)
        # Iterating over the list would resolve ${...} against Hydra's configuration.
        overrides = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        problems = [*_only_of_sweeps(composed, overrides), *_without_effect(composed)]
        if problems := problems + _problems_of_files(composed, extra_dir):
            raise ConfigError(problems)
        return Cell(overrides, [], without_hydra(composed))


def _problems_of_files(composed: DictConfig, extra_dir: str | None) -> list[str]:
    return list(problems_of_files(composed.hydra.runtime.choices, folder=extra_dir)) if extra_dir else []


def _only_of_sweeps(composed: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Problems of overrides that need `-m`: `sweep.`, a study with unset swept keys, Hydra's callbacks."""
    for override in overrides:
        if override.startswith("sweep."):
            yield f"{override}: only a sweep has this. Try -m {override}."
    if composed.hydra.callbacks:
        yield "hydra.callbacks: only a sweep calls them. Try the same line with -m."
    study = composed.hydra.runtime.choices.get("jobs")
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    params = composed.hydra.sweeper.get("params") or {}
    swept = [f"{key}={value}" for key, value in params.items() if key not in keys]
    if study is not None and swept:
        parsed = OverridesParser.create().parse_overrides(swept)
        first = " ".join(BasicSweeper.split_arguments(parsed, None)[0][0])
        yield f"jobs={study}: a study has many runs. Try -m jobs={study}, or one run: jobs={study} {first}."


def _without_effect(composed: DictConfig) -> Iterator[str]:
    """Problems of settings that only Hydra's `main` uses, which starts no run here."""
    if composed.hydra.job.env_set:
        yield "hydra.job.env_set has no effect here. Try cluster.environment={NAME: value}."
    if composed.hydra.job.chdir:
        yield "hydra.job.chdir has no effect here: a run stays in the folder where it was started."


def compose_cells(
    words: Sequence[str], *, config_dir: str, config_name: str, extra_dir: str | None = None
) -> SweepCells | None:
    """Compose the combinations of a sweep.

    `words`: overrides; `extra_dir`: the user's folder of configuration files (`--config-dir`).

    Returns None if the command line chooses another sweeper or launcher, or callbacks: these need Hydra's
    `main`. Raises what Hydra raises, and ConfigError for `sweep.also`; the cells raise CellError.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        sweep_config = loader.load_configuration(config_name, list(words), run_mode=RunMode.MULTIRUN)
        settings = OmegaConf.to_container(sweep_config.sweep, resolve=True)
        assert isinstance(settings, dict)
        batch = _combinations(sweep_config, also=settings["also"], loader=loader)
        if batch is None:
            return None
        fixed = set(batch[0]).intersection(*batch) if len(batch) > 1 else set()
        cells = (
            Cell(overrides, [override for override in overrides if override not in fixed], config)
            for overrides, config in _compose_each(batch, sweep_config=sweep_config, loader=loader)
        )
        folder = Path(os.path.expanduser(str(sweep_config.hydra.sweep.dir))).absolute()
        return SweepCells(cells, folder, {str(key): value for key, value in settings.items()})


def _combinations(
    sweep_config: DictConfig, *, also: Sequence[str], loader: ConfigLoaderImpl
) -> list[list[str]] | None:
    """The overrides of each cell, or None if the sweep needs Hydra's `main`."""
    task = OmegaConf.to_container(sweep_config.hydra.overrides.task, resolve=False)
    assert isinstance(task, list)
    params = [f"{key}={value}" for key, value in (sweep_config.hydra.sweeper.params or {}).items()]
    parser = OverridesParser.create(config_loader=loader)
    overrides = parser.parse_overrides(task)
    _require_one_study(overrides)
    if not _is_basic(sweep_config):
        return None
    swept = [*parser.parse_overrides(params), *overrides]  # the later one of the same key takes precedence
    (batch,) = BasicSweeper.split_arguments(swept, None)
    for text in also:
        (added,) = BasicSweeper.split_arguments([*swept, *_read_also(text, parser)], None)
        batch += added
    return batch


def _read_also(text: str, parser: OverridesParser) -> list[Override]:
    try:
        return parser.parse_overrides(shlex.split(text))
    except (ValueError, OverrideParseException) as error:
        rule = "is not key=value, or several of them with spaces between"
        suggestion = "Try 'sweep.also=[\"strategy=single nodes=1\"]'."
        raise ConfigError([f"sweep.also: {text!r} {rule}. {suggestion}"]) from error


def _require_one_study(overrides: Sequence[Override]) -> None:
    """Hydra reads the swept keys of a study before it chooses the runs' files: several would lose theirs."""
    for override in overrides:
        if override.key_or_group == "jobs" and override.is_sweep_override():
            studies = list(override.sweep_string_iterator())
            rule = "is more than one study, and a sweep has one"
            raise ConfigError([Problem("jobs", ",".join(studies), rule, tuple(studies))])


def _is_basic(sweep_config: DictConfig) -> bool:
    hydra = sweep_config.hydra
    plugins = (hydra.sweeper._target_, hydra.launcher._target_)
    basic = tuple(f"{plugin.__module__}.{plugin.__qualname__}" for plugin in (BasicSweeper, BasicLauncher))
    return plugins == basic and not hydra.callbacks


def _compose_each(
    batch: Sequence[list[str]], *, sweep_config: DictConfig, loader: ConfigLoaderImpl
) -> Iterator[tuple[list[str], DictConfig]]:
    parser = OverridesParser.create()
    texts = {text for overrides in batch for text in overrides}
    parsed: dict[str, Override] = {text: parser.parse_override(text) for text in texts}
    values = {text: parsed[text] for text in texts if not selects_group(parsed[text], loader=loader)}
    reuse = _can_reuse_copy(batch, values)
    refers_to_hydra = any("${hydra:" in str(override.value()) for override in parsed.values())
    bases: dict[tuple[str, ...], tuple[DictConfig, DictConfig]] = {}
    current: tuple[str, ...] | None = None
    for number, overrides in enumerate(batch):
        groups = tuple(text for text in overrides if text not in values)
        with _naming(overrides):
            if groups not in bases:
                bases[groups] = _compose_base(groups, sweep_config=sweep_config, loader=loader)
                refers_to_hydra = refers_to_hydra or "${hydra:" in OmegaConf.to_yaml(bases[groups][1])
            base, plain = bases[groups]
            if groups != current:
                HydraConfig.instance().set_config(base)
                current = groups
            if refers_to_hydra:
                _set_hydra_job(number, overrides)
            config = plain if reuse else copy.deepcopy(plain)
            ConfigLoaderImpl._apply_overrides_to_config(
                [values[text] for text in overrides if text in values], config
            )
        yield overrides, config


def _can_reuse_copy(batch: Sequence[list[str]], values: Mapping[str, Override]) -> bool:
    """Whether every combination sets the same keys and none adds or deletes one: then one copy is enough."""
    key_sets = {frozenset(values[text].key_or_group for text in texts if text in values) for texts in batch}
    return len(key_sets) == 1 and not any(
        override.is_add() or override.is_force_add() or override.is_delete()
        or isinstance(override.value(), dict) for override in values.values()
    )  # fmt: skip


def _compose_base(
    groups: Sequence[str], *, sweep_config: DictConfig, loader: ConfigLoaderImpl
) -> tuple[DictConfig, DictConfig]:
    """The configuration of a selection of groups, with Hydra's own part and without it."""
    hydra_overrides = OmegaConf.to_container(sweep_config.hydra.overrides.hydra)
    assert isinstance(hydra_overrides, list)
    config_name = sweep_config.hydra.job.config_name
    base = loader.load_configuration(config_name, [*hydra_overrides, *groups], RunMode.RUN)
    OmegaConf.copy_cache(from_config=sweep_config, to_config=base)  # one `now` for the whole sweep
    return base, without_hydra(base)


@contextmanager
def _naming(overrides: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CellError(overrides, error) from error


def _set_hydra_job(number: int, overrides: list[str]) -> None:
    """Let `${hydra:job.num}` and similar references in the user's values refer to this combination."""
    hydra: Any = HydraConfig.get()
    with read_write(hydra), open_dict(hydra):
        hydra.job.num = number
        hydra.job.id = str(number)
        hydra.overrides.task = overrides
