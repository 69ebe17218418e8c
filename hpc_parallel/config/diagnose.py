"""Everything that is wrong with a command line whose composition failed.

Hydra stops at the first override that it refuses. A user wants to know them all: each override is
tried alone, and what is left without the refused ones goes through the other checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hpc_parallel.config.checks import find_problems, in_order
from hpc_parallel.config.compose import children, resolve, unknown_keys
from hpc_parallel.config.problems import ConfigError, Problem, nearest

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException)


def diagnose(overrides: Sequence[str], *, config_dir: str, config_name: str) -> list[Problem | str]:
    """The problems of the overrides that Hydra refuses, then those of the configuration without them."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=config_dir, version_base="1.3"):
        plain = compose(config_name)
        verdicts: dict[str, Problem | str] = {}
        accepted: list[str] = []
        # a group's choice decides which keys there are, so groups are tried, and kept, before values
        for override in sorted(overrides, key=lambda text: not _names_group(text, config_dir)):
            try:
                singles = _expand(override)
                for single in singles:
                    composed = compose(config_name, overrides=[*accepted, single])
                    if unknown := unknown_keys(composed):
                        raise HydraException(f"Could not override '{unknown[0]}'")
                accepted.append(singles[0])
            except COMPOSE_ERRORS as error:
                verdicts[override] = _explain(override, error=error, plain=plain)
        problems = [verdicts[override] for override in overrides if override in verdicts]
        try:
            config, _ = resolve(compose(config_name, overrides=accepted))
            return in_order(problems + find_problems(config), overrides)
        except ConfigError as error:
            return in_order(problems + error.problems, overrides)


def _names_group(override: str, config_dir: str) -> bool:
    key = override.partition("=")[0].lstrip("+~").partition("@")[0]
    return (Path(config_dir) / key).is_dir() or key.startswith("hydra/")


def _expand(override: str) -> list[str]:
    """`nodes=1,2` of a sweep as the overrides of its runs."""
    parsed = OverridesParser.create().parse_override(override)
    if not parsed.is_sweep_override():
        return [override]
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def _explain(override: str, *, error: Exception, plain: DictConfig) -> Problem | str:
    """Hydra's refusal in our words: key, value, rule, a legal value near it."""
    key, _, value = override.partition("=")
    key = key.lstrip("+~")
    text = str(error.__cause__ or error)
    if choices := re.findall(r"^\t(\S+)$", text, re.MULTILINE):
        choices = [choice for choice in choices if not choice.endswith("_schema")]
        close = nearest(value, choices, most=2) or choices[:2]
        return Problem(key, value, f"is not one of {', '.join(choices)}", tuple(close))
    if "Could not override" in str(error) or "not in" in text:
        return _unknown(override, key=key, value=value, plain=plain)
    if "Ambiguous value" in text:
        return f"{override}: several values are a sweep. Try -m {override}, or one value."
    if "alid" in text or "could not be converted" in text or "not Optional" in text:
        return Problem(key, value, f"is not {_kind(plain, key)}", _near(plain, key=key, value=value))
    return f"{override}: {text.splitlines()[0]}. An override reads key=value; quote what is special in it."


def _unknown(override: str, *, key: str, value: str, plain: DictConfig) -> str:
    parent_key = key.rpartition(".")[0]
    parent = OmegaConf.select(plain, parent_key, default=None) if parent_key else plain
    if OmegaConf.is_dict(parent) and not is_dataclass(OmegaConf.get_type(parent)):
        return f"{override}: {parent_key} has no such key yet, and a new one needs a plus. Try +{override}."
    known = _flat(plain)
    by_last_word = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = nearest(key, known) or [by_last_word[w] for w in nearest(key.rpartition(".")[2], by_last_word)]
    return f"{override}: there is no key {key}." + (f" Try {close[0]}={value}." if close else "")


def _flat(config: DictConfig, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key, child in children(config):
        names.append(f"{prefix}{key}")
        if isinstance(child, DictConfig):
            names += _flat(child, f"{prefix}{key}.")
    return names


def _kind(plain: DictConfig, key: str) -> str:
    """What the schema wants at `key`, in words."""
    parent_key, _, name = key.rpartition(".")
    schema = OmegaConf.get_type(OmegaConf.select(plain, parent_key) if parent_key else plain)
    wanted = next((str(f.type) for f in fields(schema) if f.name == name), "") if is_dataclass(schema) else ""
    kinds = {"int": "a whole number", "float": "a number", "bool": "true or false", "list": "a list [a,b]"}
    return next((words for start, words in kinds.items() if wanted.startswith(start)), "a value of its type")


def _near(plain: DictConfig, *, key: str, value: str) -> tuple[Any, ...]:
    """A legal value for a refused one: Slurm's clock as minutes, a list around it, or the default."""
    default = OmegaConf.select(plain, key, default=None)
    if key.endswith("time_minutes") and (minutes := minutes_of(value)):
        return (minutes,)
    if OmegaConf.is_list(default):
        return ("[" + (",".join(map(str, default)) or value) + "]",)
    return () if default is None else (default,)


def minutes_of(clock: str) -> int | None:
    """Minutes, rounded up, of sbatch's time formats (`90:00`, `1:30:00`, `2-12`, `1-06:30:00`)."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", clock)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return days * 1440 + first * 60 + second + (third > 0)
    if match[4] is not None:  # hours:minutes:seconds
        return first * 60 + second + (third > 0)
    return first + (second > 0)  # minutes[:seconds]
