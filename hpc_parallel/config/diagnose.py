"""Everything that is wrong with a command line whose composition failed.

Hydra stops at the first override that it refuses. A user wants to know them all: each override is
tried alone, and what is left without the refused ones goes through the other checks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException, ValidationError

from hpc_parallel.config.checks.all_checks import CHOICES, find_problems, in_order
from hpc_parallel.config.checks.site_checks import minutes_of
from hpc_parallel.config.compose import REQUIRED, composing, flat, missing_keys, resolve, unknown_keys
from hpc_parallel.config.node_devices import AUTO
from hpc_parallel.problems import ConfigError, Problem, nearest

# ValueError: Hydra's answer to `strategy=null`
COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)
PLUGINS = {"hydra/sweeper": "sweeper", "hydra/launcher": "launcher"}


def diagnose(
    overrides: Sequence[str],
    *,
    config_dir: str,
    config_name: str,
    extra_dir: str | None = None,
    sweep: bool = False,
) -> list[Problem | str]:
    """The problems of the overrides that Hydra refuses, then those of the configuration without them.

    `extra_dir`: a folder of the user's own (`--config-dir`); `sweep`: whether `nodes=1,2` is two runs.
    """
    with composing(config_dir, extra_dir=extra_dir):
        trials = Trials(config_name)
        problems, accepted = try_each(overrides, trials=trials, sweep=sweep)
        return in_order(problems + _rest(trials, accepted), overrides)


class Trials:
    """Compositions of one configuration, for use inside `composing`.

    Each takes a tenth of a second and is made once.
    """

    def __init__(self, config_name: str) -> None:
        self._config_name = config_name
        self._results: dict[tuple[str, ...], DictConfig | Exception] = {}
        self._defaults: dict[str, Any] = {}

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration without Hydra's own part. Raises what Hydra does."""
        key = tuple(overrides)
        if key not in self._results:
            try:
                self._results[key] = self._composed(list(overrides))
            except COMPOSE_ERRORS as error:
                self._results[key] = error
        result = self._results[key]
        if isinstance(result, Exception):
            raise result
        return result

    def defaults(self) -> Mapping[str, Any]:
        """The file that each group has where no override chooses another."""
        self.compose([])
        return self._defaults

    def _composed(self, overrides: list[str]) -> DictConfig:
        config = compose(self._config_name, overrides=overrides, return_hydra_config=True)
        if not overrides:
            self._defaults = dict(config.hydra.runtime.choices)
        with open_dict(config):
            del config["hydra"]
        return config


def try_each(
    overrides: Sequence[str], *, trials: Trials, sweep: bool
) -> tuple[list[Problem | str], list[str]]:
    """What Hydra refuses, each override tried alone, and those that it takes (of a sweep, the first value).

    To be asked while `composing`.
    """
    defaults = trials.defaults()
    verdicts: dict[str, list[Problem | str]] = {}
    accepted: list[str] = []
    values = {override: _expand(override) if sweep else [override] for override in overrides}
    firsts = [singles[0] for singles in values.values()]
    fine = _refusal(firsts, trials) is None  # then only what else they may be is to be tried
    # a group's choice decides which keys there are, so groups are tried, and kept, before values
    for override in sorted(overrides, key=lambda text: not _choices(text.partition("=")[0])):
        singles, refusals = values[override], []
        for single in singles[1:] if fine else singles:
            error = _refusal([*accepted, single], trials)
            if error is not None:
                # the groups chosen decide which keys there are
                plain = trials.compose(accepted)
                refusals.append(_explain(single, error=error, plain=plain, defaults=defaults))
        if refusals:
            verdicts[override] = refusals
        else:
            accepted.append(singles[0])
    return [problem for override in overrides for problem in verdicts.pop(override, [])], accepted


def _refusal(overrides: list[str], trials: Trials) -> Exception | None:
    """Why Hydra, or a schema, does not take them together."""
    try:
        config = trials.compose(overrides)
        if unknown_keys(config):
            return HydraException("Could not override")
        devices = None if OmegaConf.is_interpolation(config, "gpus_per_node") else config.gpus_per_node
        if isinstance(devices, str) and devices != AUTO and not re.fullmatch(r"[+-]?\d+", devices):
            raise HydraException("no count") from ValidationError("no count")  # the type lets texts through
    except COMPOSE_ERRORS as error:
        return error
    return None


def _rest(trials: Trials, accepted: list[str]) -> list[Problem | str]:
    """What the other checks find, also where a value is missing: an example stands for it meanwhile."""
    try:
        return find_problems(resolve(trials.compose(accepted))[0])
    except ConfigError as error:
        problems = error.problems
        missing = missing_keys(trials.compose(accepted))
        if not missing or not set(missing) <= set(REQUIRED):
            return problems
    examples = [f"{key}={REQUIRED[key]}" for key in missing]
    found = find_problems(resolve(trials.compose([*accepted, *examples]))[0])
    return problems + [p for p in found if not (isinstance(p, Problem) and p.key in missing)]


def _choices(key: str) -> list[str]:
    """The files of a group, also of the user's own folder; empty where `key` names no group."""
    group = key.lstrip("+~").partition("@")[0]
    if not re.fullmatch(r"\w+(/\w+)*", group):
        return []
    options = GlobalHydra.instance().config_loader().get_group_options(group)
    return [option for option in options if not option.endswith("_schema")]


def _expand(override: str) -> list[str]:
    """`nodes=1,2` of a sweep as the overrides of its runs; the ends stand for an interval."""
    loader = GlobalHydra.instance().config_loader()  # who knows what glob() means
    try:
        (parsed,) = OverridesParser.create(config_loader=loader).parse_overrides([override])
        if not parsed.is_sweep_override():
            return [override]
        value, key = parsed.value(), parsed.get_key_element()
        if isinstance(value, IntervalSweep):
            return [f"{key}={value.start}", f"{key}={value.end}"]
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()] or [override]
    except COMPOSE_ERRORS:  # raised again where it is composed
        return [override]


def _explain(
    override: str, *, error: Exception, plain: DictConfig, defaults: Mapping[str, Any]
) -> Problem | str:
    """Hydra's refusal in our words: key, value, rule, a legal value near it.

    defaults: the default of each group.
    """
    key, _, value = override.partition("=")
    if isinstance(error, OverrideParseException):
        return (
            f"{override} can't be read as key=value: quote what is special in the value, and for the shell."
        )
    if override.startswith("~"):
        return f"{override}: {key[1:]} can't be deleted, as it has a default or is not there."
    key = key.lstrip("+")
    text = str(error.__cause__ or error)
    choices = _choices(key)
    if value in choices and override.startswith("+"):
        return f"{override}: {key} has a place already, and + makes a new one. Try {key}={value}."
    if value in choices and key == "jobs":
        first = "# @package _global_"
        return f"{override}: the first line of {value}.yaml must be {first!r}, and its keys the run's own."
    said = value.split(",")
    if "Ambiguous value" in text or (len(said) > 1 and set(said) <= set(choices)):
        return f"{override}: several values are a sweep. Try -m {override}, or one value: {key}={said[0]}."
    if choices:
        close = nearest(value, choices, most=2) or [defaults.get(key) or choices[0]]
        rule = f"is not one of {', '.join(choices)}"
        if kind := PLUGINS.get(key):
            rule += f", the {kind}s installed here (another's package is often hydra-{value}-{kind})"
        return Problem(key, value, rule, tuple(close))
    if "Could not override" in str(error) or "not in" in text:
        return _unknown(override, key=key, value=value, plain=plain)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return Problem(key, value, f"is not {_kind(plain, key)}", _near(plain, key=key, value=value))
    return f"{override}: {text.splitlines()[0].rstrip('.')}."


def _unknown(override: str, *, key: str, value: str, plain: DictConfig) -> str:
    parent_key = key.rpartition(".")[0]
    parent = OmegaConf.select(plain, parent_key, default=None) if parent_key else plain
    if OmegaConf.is_dict(parent) and not is_dataclass(OmegaConf.get_type(parent)):
        return f"{override}: {parent_key} has no such key yet, and a new one needs a plus. Try +{override}."
    known = [name for name in flat(plain) if "." not in key or not _is_table(plain, name)]
    by_last_word = {name.rpartition(".")[2]: name for name in reversed(known)}
    last = key.rpartition(".")[2]
    close = [by_last_word[last]] if last in by_last_word else nearest(key, known)
    close = close or [by_last_word[word] for word in nearest(last, by_last_word)]
    text = f"{override}: there is no key {key}."
    if not close:
        return text
    if choices := _choices(close[0]):
        mend = f"{close[0]}={(nearest(value, choices) or choices)[0]}"
    elif _is_table(plain, close[0]):
        return f"{text} Keys of {close[0]}: {', '.join(flat(plain[close[0]])) or 'any'}."
    else:
        mend = _legal_mend(f"{close[0]}={value}", plain=plain)
    return f"{text} Try {mend}."


def _is_table(plain: DictConfig, key: str) -> bool:
    return OmegaConf.is_dict(OmegaConf.select(plain, key))


def _legal_mend(override: str, *, plain: DictConfig) -> str:
    """The override; with a near value, or the one that the key has now, where it does not take the given."""
    key, _, value = override.partition("=")
    if value not in (choices := CHOICES.get(key, (value,))):
        return f"{key}={(nearest(value, choices) or [OmegaConf.select(plain, key)])[0]}"
    trial = plain.copy()
    try:
        parsed = OverridesParser.create().parse_override(override)
        OmegaConf.update(trial, key, parsed.value())
    except COMPOSE_ERRORS:
        value = OmegaConf.select(plain, key, default="VALUE")
        return f"{key}={'null' if value is None else value}"
    return override


def _wanted(plain: DictConfig, key: str) -> str:
    """The type that the schema gives a key, as its source says it; empty where there is none."""
    parent_key, _, name = key.rpartition(".")
    schema = OmegaConf.get_type(OmegaConf.select(plain, parent_key) if parent_key else plain)
    return next((str(f.type) for f in fields(schema) if f.name == name), "") if is_dataclass(schema) else ""


_KINDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "one text",
    "list[int]": "a list of whole numbers [a,b]", "list[float]": "a list of numbers [a,b]",
    "list": "a list [a,b] of texts", "dict": "a table {key: value}",
}  # fmt: skip


def _kind(plain: DictConfig, key: str) -> str:
    """What the schema wants at `key`, in words."""
    wanted = _wanted(plain, key)
    return next((words for start, words in _KINDS.items() if wanted.startswith(start)), "a value of its type")


def _near(plain: DictConfig, *, key: str, value: str) -> tuple[Any, ...]:
    """A legal value for a refused one: Slurm's clock as minutes, a list around it, or the default."""
    default = OmegaConf.select(plain, key, default=None)
    if key.endswith("time_minutes") and (minutes := minutes_of(value)):
        return (minutes,)
    if OmegaConf.is_list(default):
        plain_word = re.fullmatch(r"[\w./-]+", value) and value != "null"
        return (list(default) or ([value] if plain_word else []),)
    if OmegaConf.is_dict(default):
        return (dict(default),)
    return (default,) if default is not None or "None" in _wanted(plain, key) else ()
