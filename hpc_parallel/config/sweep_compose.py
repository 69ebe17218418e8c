"""The configuration of a run, and those of a sweep as Hydra's basic sweeper would compose them: each once.

One thing is more than Hydra's: `sweep.also` adds combinations outside the product.

Hydra composes every job of a sweep twice, and reads all files of `conf/` anew for each: a tenth of a
second each time. Here what depends on the groups chosen (`strategy=data,pipeline`) is composed once for
each choice of them; values (`nodes=1,2,4`) are then set in a copy, by Hydra's own function for that.
"""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterator, Sequence
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
from hpc_parallel.problems import ConfigError, Problem


@dataclass(frozen=True)
class Cell:
    """One combination: its overrides, those of them in which cells differ, and what they compose to."""

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
class Cells:
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
    """The one combination of a command line without `-m`, as Hydra's own `main` would compose it.

    `words`, `extra_dir`: as for `compose_cells`. Raises what Hydra does, and ConfigError for words that only
    a sweep, or only Hydra's own `main`, acts on.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        composed = loader.load_configuration(config_name, list(words), run_mode=RunMode.RUN)
        HydraConfig.instance().set_config(composed)
        # As they were typed: the list's own iteration would resolve ${...}, and in Hydra's configuration.
        overrides = OmegaConf.to_container(composed.hydra.overrides.task, resolve=False)
        assert isinstance(overrides, list)
        if problems := [*_only_of_sweeps(composed, overrides), *_without_effect(composed)]:
            raise ConfigError(problems)
        return Cell(overrides, [], _without_hydra(composed))


def _only_of_sweeps(composed: DictConfig, overrides: Sequence[str]) -> Iterator[str]:
    """Words that need `-m`: `sweep.`, a study whose swept keys have no value, and Hydra's callbacks."""
    for word in overrides:
        if word.startswith("sweep."):
            yield f"{word}: only a sweep has this. Try -m {word}."
    if composed.hydra.callbacks:
        yield "hydra.callbacks: only a sweep calls them. Try the same line with -m."
    study = composed.hydra.runtime.choices.get("jobs")
    keys = {word.partition("=")[0].lstrip("+") for word in overrides}
    params = composed.hydra.sweeper.get("params") or {}
    swept = [f"{key}={value}" for key, value in params.items() if key not in keys]
    if study is not None and swept:
        parsed = OverridesParser.create().parse_overrides(swept)
        first = " ".join(BasicSweeper.split_arguments(parsed, None)[0][0])
        yield f"jobs={study}: a study is many runs. Try -m jobs={study}, or one: jobs={study} {first}."


def _without_effect(composed: DictConfig) -> Iterator[str]:
    """Settings of Hydra's own `main`, which starts no run here."""
    if composed.hydra.job.env_set:
        yield "hydra.job.env_set has no effect here. Try cluster.environment={NAME: value}."
    if composed.hydra.job.chdir:
        yield "hydra.job.chdir has no effect here: a run stays in the folder where it was started."


def compose_cells(
    words: Sequence[str], *, config_dir: str, config_name: str, extra_dir: str | None = None
) -> Cells | None:
    """None where another sweeper, launcher or a callback is to have its say: that is Hydra's own way.

    `words`: overrides; `extra_dir`: a folder of the user's own (`--config-dir`). Raises what Hydra does, and
    ConfigError for `sweep.also`; the cells raise CellError.
    """
    version.setbase("1.3")
    with composing(config_dir, extra_dir=extra_dir):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        whole = loader.load_configuration(config_name, list(words), run_mode=RunMode.MULTIRUN)
        said = OmegaConf.to_container(whole.hydra.overrides.task, resolve=False)
        settings = OmegaConf.to_container(whole.sweep, resolve=True)
        assert isinstance(said, list)
        assert isinstance(settings, dict)
        params = [f"{key}={value}" for key, value in (whole.hydra.sweeper.params or {}).items()]
        parser = OverridesParser.create(config_loader=loader)
        spoken = parser.parse_overrides(said)
        _require_one_study(spoken)
        if not _is_basic(whole):
            return None
        swept = [*parser.parse_overrides(params), *spoken]  # of a key that both have the later counts
        (batch,) = BasicSweeper.split_arguments(swept, None)
        for more in settings["also"]:
            instead = _read_also(more, parser)
            (added,) = BasicSweeper.split_arguments([*swept, *instead], None)
            batch += added
        fixed = set(batch[0]).intersection(*batch) if len(batch) > 1 else set()
        cells = (
            Cell(overrides, [word for word in overrides if word not in fixed], config)
            for overrides, config in _composed(batch, whole=whole, loader=loader)
        )
        folder = Path(os.path.expanduser(str(whole.hydra.sweep.dir))).absolute()
        return Cells(cells, folder, {str(key): value for key, value in settings.items()})


def _read_also(text: str, parser: OverridesParser) -> list[Override]:
    try:
        return parser.parse_overrides(shlex.split(text))
    except (ValueError, OverrideParseException) as error:
        rule = "is not key=value, nor several of them with blanks between"
        mend = "Try 'sweep.also=[\"strategy=single nodes=1\"]'."
        raise ConfigError([f"sweep.also: {text!r} {rule}. {mend}"]) from error


def _require_one_study(said: Sequence[Override]) -> None:
    """What a study sweeps is read before the runs' files are chosen, so several would lose theirs."""
    for each in said:
        if each.key_or_group == "jobs" and each.is_sweep_override():
            several = list(each.sweep_string_iterator())
            rule = "is more than one study, and a sweep is of one"
            raise ConfigError([Problem("jobs", ",".join(several), rule, tuple(several))])


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
    # Where every combination sets the same keys, one copy does for all, if none adds or deletes a key.
    set_by = {frozenset(parsed[w].key_or_group for w in some if w not in groups_of) for some in batch}
    again = len(set_by) == 1 and all(
        not (each.is_add() or each.is_force_add() or each.is_delete() or isinstance(each.value(), dict))
        for word, each in parsed.items() if word not in groups_of
    )  # fmt: skip
    for number, overrides in enumerate(batch):
        groups = tuple(word for word in overrides if word in groups_of)
        with _naming(overrides):
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
            values = [parsed[word] for word in overrides if word not in groups]
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
        yield overrides, config


@contextmanager
def _naming(overrides: list[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CellError(overrides, error) from error


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
