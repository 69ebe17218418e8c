"""Compose a run, every combination of a sweep, or many selections of overrides, one after another.

A composition by Hydra takes a tenth of a second, almost all of it for the groups (`strategy=pipeline`), whose
files it reads again each time. `Composer` composes each selection of groups once, and sets values (`nodes=2`)
in a copy, with Hydra's own function.

Combinations are ordered as by Hydra's basic sweeper. `sweep.also` is not part of Hydra: it adds combinations
outside the product.
"""

from __future__ import annotations

import copy
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra import version
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hpc_parallel.config.command_line import problems_of_files
from hpc_parallel.config.hydra_internals import (
    combinations,
    composing,
    current_loader,
    has_basic_sweeper,
    load,
    selects_group,
    set_values,
)
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import with_values
from hpc_parallel.problems import ConfigError, Problem, nearest, raise_if_any, shell_word

# Hydra raises ValueError for `strategy=null`, and lets the errors of YAML through.
# AssertionError: of OmegaConf, for a key below one that is null.
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, YAMLError, AssertionError)


@dataclass(frozen=True)
class Cell:
    """One combination: its overrides, the overrides that differ between cells, and the composed config."""

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

    Resolve each combination before you take the next one: combinations may share nodes, and `${hydra:...}`
    refers to the newest combination.
    """

    cells: Iterator[Cell]
    folder: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class Composed:
    """A configuration that Hydra composed."""

    whole: DictConfig  # with Hydra's own part

    @cached_property
    def plain(self) -> DictConfig:
        """A copy without Hydra's own part."""
        plain = copy.deepcopy(self.whole)
        with read_write(plain), open_dict(plain):
            del plain["hydra"]
        return plain

    @cached_property
    def refers_to_hydra(self) -> bool:
        return "${hydra:" in OmegaConf.to_yaml(self.plain)


class Composer:
    """Composes one configuration with several lists of overrides, each list once.

    Create it inside `composing`. It uses the same files also after `composing` has ended.

    sweep: the configuration of a sweep. All its runs share its overrides of `hydra.` and its `now`.
    """

    def __init__(self, config_name: str, *, sweep: DictConfig | None = None) -> None:
        self._config_name = config_name
        self._loader = current_loader()
        self._sweep = sweep
        self._of_hydra: Any = [] if sweep is None else OmegaConf.to_container(sweep.hydra.overrides.hydra)
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._values: dict[str, bool] = {}
        self._bases: dict[tuple[str, ...], Composed] = {}
        self._results: dict[tuple[str, ...], DictConfig | Exception] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration without Hydra's own part, the same object each time. Raises what Hydra raises."""
        key = tuple(overrides)
        if key not in self._results:
            try:
                plain = self.base(overrides).plain
                self._results[key] = self.with_overrides(overrides, with_values(plain, {}))
            except COMPOSE_ERRORS as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def base(self, overrides: Sequence[str]) -> Composed:
        """The composition of what Hydra itself must compose: groups, and Hydra's own settings."""
        words = tuple(text for text in overrides if not self.sets_a_value(text))
        if words not in self._bases:
            whole = load(self._loader, self._config_name, [*self._of_hydra, *words], RunMode.RUN)
            if self._sweep is not None:
                OmegaConf.copy_cache(from_config=self._sweep, to_config=whole)
            self._bases[words] = Composed(whole)
        return self._bases[words]

    def with_overrides(self, overrides: Sequence[str], config: DictConfig) -> DictConfig:
        """Set the values among the overrides in `config`, a copy of the base; returns it."""
        values = [self.parsed(text) for text in overrides if self.sets_a_value(text)]
        set_values(values, config)
        return config

    def defaults(self) -> Mapping[str, Any]:
        """The default choice of each group."""
        return dict(self.base([]).whole.hydra.runtime.choices)

    def parsed(self, text: str) -> Override:
        """The override as Hydra reads it. Raises OverrideParseException."""
        if text not in self._parsed:
            (self._parsed[text],) = self._parser.parse_overrides([text])
        return self._parsed[text]

    def sets_a_value(self, text: str) -> bool:
        """Whether the override sets one value in a copy: no group, no setting of Hydra, no sweep.

        In a sweep, a setting of Hydra counts as a value, and a copy refuses it: all runs share the settings.
        """
        if text not in self._values:
            override = self.parsed(text)
            sets_hydra = override.is_hydra_override() and self._sweep is None
            by_hydra = sets_hydra or override.is_sweep_override()
            self._values[text] = not (by_hydra or selects_group(override, loader=self._loader))
        return self._values[text]


def compose_run(
    words: Sequence[str], *, config_dir: str, config_name: str, extra_dir: str | None = None
) -> Cell:
    """Compose a command line without `-m`, as Hydra's own `main` does; nothing is swept in the cell.

    `words`, `extra_dir`: as for `compose_cells`. Raises what Hydra raises, and ConfigError for overrides that
    only a sweep or only Hydra's `main` uses.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        whole = load(current_loader(), config_name, words, RunMode.RUN)
        HydraConfig.instance().set_config(whole)
        overrides = _overrides(whole.hydra.overrides.task)
        problems = [*_only_of_sweeps(whole, overrides), *_without_effect(whole, folder_key="run_dir")]
        problems += wrong_choices(whole, overrides).values()
        if extra_dir:
            problems += problems_of_files(whole.hydra.runtime.choices, folder=extra_dir)
        if problems:
            raise ConfigError(problems)
        return Cell(overrides, [], Composed(whole).plain)


def _overrides(listed: Any) -> list[str]:
    """A list of Hydra's, such as `hydra.overrides.task`: iterating over it would resolve ${...}."""
    overrides = OmegaConf.to_container(listed, resolve=False)
    assert isinstance(overrides, list)
    return overrides


def _only_of_sweeps(whole: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Problems of overrides that need `-m`: `sweep.`, a study with unset swept keys, Hydra's callbacks."""
    for override in [*overrides, *_overrides(whole.hydra.overrides.hydra)]:
        if override.startswith(("sweep.", "hydra.sweep.dir=")):
            yield f"{override}: only a sweep has this. Try run -m {override}."
    if whole.hydra.callbacks:
        yield "hydra.callbacks: only a sweep calls them. Try the same line with -m."
    study = whole.hydra.runtime.choices.get("jobs")
    keys = {override.partition("=")[0].lstrip("+") for override in overrides}
    swept = [text for text in params(whole) if text.partition("=")[0] not in keys]
    if study is not None and swept:
        first = " ".join(combinations(OverridesParser.create().parse_overrides(swept))[0])
        yield f"jobs={study}: a study has many runs. Try run -m jobs={study}, or one: jobs={study} {first}."


def params(whole: DictConfig) -> list[str]:
    """The swept keys of a study, as overrides."""
    return [f"{key}={value}" for key, value in (whole.hydra.sweeper.get("params") or {}).items()]


def _without_effect(whole: DictConfig, *, folder_key: str) -> Iterator[str]:
    """Problems of settings that only Hydra's `main` uses, which starts no run here.

    folder_key: names the folder of the run or of the sweep.
    """
    if whole.hydra.job.env_set:
        yield "hydra.job.env_set has no effect here. Try cluster.environment={NAME: value}."
    if whole.hydra.job.chdir:
        yield "hydra.job.chdir has no effect here: a run stays in the folder where it was started."
    for override in _overrides(whole.hydra.overrides.hydra):
        key, _, value = override.partition("=")
        if key == "hydra.run.dir":
            yield f"{override} has no effect here. Try {shell_word(f'{folder_key}={value}')}."
        if key == "hydra.sweep.subdir":
            yield f"{override} has no effect here: a sweep numbers the folders of its runs."


def wrong_choices(whole: DictConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Overrides that choose no file, or two that Hydra would merge, with what is wrong with each."""
    named = filter(re.compile(r"(strategy|optimizer)\.name=").match, overrides)
    wrong = {override: text for override in named if (text := _only_a_name(override, whole, overrides))}
    for override in (text for text in overrides if "=[" in text):
        group, _, names = override.replace("]", "").partition("=[")
        files = [find_folder("conf") / group / f"{name}.yaml" for name in names.split(",")]
        if len(files) > 1 and all(map(os.path.isfile, files)):  # a file of the user's may add to ours
            legal = f"{group}={files[0].stem}" + f", or a sweep: run -m {group}={names}" * (group in whole)
            wrong[override] = f"{override}: a run has one file of {group}/. Try {legal}."
    return wrong


def _only_a_name(override: str, whole: DictConfig, overrides: Sequence[str]) -> str:
    """What is wrong, or nothing: beside other keys of its group a name may say what these make of it."""
    group, _, name = override.partition(".name=")
    chosen, choices = whole.hydra.runtime.choices[group], current_loader().get_group_options(group)
    beside = sum(other.startswith(f"{group}.") for other in overrides) > 1
    free = group == "strategy" or chosen == "custom"  # to have a name that is no choice
    if name == chosen or (free and (beside or name not in choices)):
        return ""
    near = (nearest(name, choices) or [chosen])[0]
    return f"{override}: this is only a name, and {group} = {chosen}. Try {group}={near}."


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
        sweep = load(current_loader(), config_name, words, RunMode.MULTIRUN)
        settings = OmegaConf.to_container(sweep.sweep, resolve=True)
        assert isinstance(settings, dict)
        raise_if_any(wrong_choices(sweep, _overrides(sweep.hydra.overrides.task)).values())
        batch = _combinations(sweep, also=settings["also"])
        if batch is None:
            return None
        raise_if_any(_without_effect(sweep, folder_key="hydra.sweep.dir"))
        fixed = set(batch[0]).intersection(*batch) if len(batch) > 1 else set()
        cells = (
            Cell(overrides, [override for override in overrides if override not in fixed], config)
            for overrides, config in _compose_each(batch, Composer(config_name, sweep=sweep))
        )
        folder = Path(os.path.expanduser(str(sweep.hydra.sweep.dir))).absolute()
        return SweepCells(cells, folder, {str(key): value for key, value in settings.items()})


def _combinations(sweep: DictConfig, *, also: Sequence[str]) -> list[list[str]] | None:
    """The overrides of each cell, or None if the sweep needs Hydra's `main`."""
    parser = OverridesParser.create(config_loader=current_loader())
    overrides = parser.parse_overrides(_overrides(sweep.hydra.overrides.task))
    _require_one_study(overrides)
    if not has_basic_sweeper(sweep):
        return None
    swept = [*parser.parse_overrides(params(sweep)), *overrides]  # a later override of a key replaces it
    batch = combinations(swept)
    for text in also:
        batch += combinations([*swept, *_read_also(text, parser)])
    return batch


def _read_also(text: str, parser: OverridesParser) -> list[Override]:
    try:
        return parser.parse_overrides(shlex.split(text))
    except (ValueError, OverrideParseException) as error:
        rule = "is not key=value, or several of them with spaces between"
        suggestion = "Try 'sweep.also=[\"strategy=single nodes=1\"]'."
        raise ConfigError([f"sweep.also: {text!r} {rule}. {suggestion}"]) from error


def _require_one_study(overrides: Sequence[Override]) -> None:
    """Hydra reads a study's swept keys before it chooses the runs' files: several studies would lose them."""
    for override in overrides:
        if override.key_or_group == "jobs" and override.is_sweep_override():
            studies = list(override.sweep_string_iterator())
            rule = "is more than one study, and a sweep has one"
            raise ConfigError([Problem("jobs", ",".join(studies), rule, tuple(studies))])


def _compose_each(batch: Sequence[list[str]], composer: Composer) -> Iterator[tuple[list[str], DictConfig]]:
    parsed = [composer.parsed(text) for text in {text for overrides in batch for text in overrides}]
    refers_to_hydra = any("${hydra:" in str(override.value()) for override in parsed)
    reuse = _can_reuse_copy(batch, composer)
    current: Composed | None = None
    for number, overrides in enumerate(batch):
        try:
            base = composer.base(overrides)
            refers_to_hydra = refers_to_hydra or base.refers_to_hydra
            if base is not current:
                HydraConfig.instance().set_config(base.whole)
                current = base
            if refers_to_hydra:
                _set_hydra_job(number, overrides)
            config = composer.with_overrides(overrides, base.plain if reuse else with_values(base.plain, {}))
        except Exception as error:
            raise CellError(overrides, error) from error
        yield overrides, config


def _can_reuse_copy(batch: Sequence[list[str]], composer: Composer) -> bool:
    """Whether every combination sets the same keys and none adds or deletes one: then one copy is enough."""
    values = [[composer.parsed(text) for text in texts if composer.sets_a_value(text)] for texts in batch]
    key_sets = {frozenset(override.key_or_group for override in overrides) for overrides in values}
    return len(key_sets) == 1 and not any(
        override.is_add() or override.is_force_add() or override.is_delete()
        or isinstance(override.value(), dict) for overrides in values for override in overrides
    )  # fmt: skip


def _set_hydra_job(number: int, overrides: list[str]) -> None:
    """Let `${hydra:job.num}` and similar references in the user's values refer to this combination."""
    hydra: Any = HydraConfig.get()
    with read_write(hydra), open_dict(hydra):
        hydra.job.num = number
        hydra.job.id = str(number)
        hydra.overrides.task = overrides
