"""Find every problem of a command line that Hydra can't compose.

Hydra stops at the first override that it refuses, but a user needs all of them. So this module tries each
override alone, and runs the other checks on the configuration without the refused ones.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError
from yaml import YAMLError

from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.command_line import TABLES
from hpc_parallel.config.compose import COMPOSE_ERRORS, Composer, wrong_choices
from hpc_parallel.config.file_problems import (
    RefusedKey,
    files_with,
    misplaced_file,
    of_ones_own,
    refused_keys,
    unreadable_file,
    unusable_file,
)
from hpc_parallel.config.hydra_internals import composing, current_loader, group_choices
from hpc_parallel.config.key_suggestions import (
    ACCUMULATION,
    TYPING_ERROR,
    choice_near,
    same_quantity,
    suggest,
)
from hpc_parallel.config.node_devices import AUTO
from hpc_parallel.config.places import OWN_SITES
from hpc_parallel.config.resolve import REQUIRED, as_switch, flat, missing_keys, resolve, unknown_keys
from hpc_parallel.config.typed_config import choices_of, kind_of, rule_of, types_of
from hpc_parallel.layout.layout import layout_of
from hpc_parallel.problems import ConfigError, Problem, alternatives, as_override, nearest, shell_word, spell

PLUGINS = {"hydra/sweeper": "sweeper", "hydra/launcher": "launcher"}
LISTS_OF_SLURM = ("launcher.exclude", "launcher.partition", "launcher.extra.")  # a comma is part of the value
_FILE_NAME = re.compile(r"\w[\w.-]*")


def diagnose(
    overrides: Sequence[str],
    *,
    config_dir: str,
    config_name: str,
    extra_dir: str | None = None,
    sweep: bool = False,
) -> list[Problem | str]:
    """Find the problems of the overrides that Hydra refuses, and of the configuration without these.

    `extra_dir`: the user's folder of configuration files (`--config-dir`); `sweep`: whether `nodes=1,2`
    means two runs. Returns the problems in the order of the overrides.
    """
    with composing(config_dir, extra_dir=extra_dir):
        composer = Composer(config_name)
        problems, accepted = try_each(overrides, composer=composer, sweep=sweep)
        names = wrong_choices(composer.base(accepted).whole, accepted)
        problems += names.values()
        accepted = [override for override in accepted if override not in names]
        return in_order(problems + _remaining_problems(composer, accepted), overrides)


def try_each(
    overrides: Sequence[str], *, composer: Composer, sweep: bool
) -> tuple[list[Problem | str], list[str]]:
    """Try each override alone. Call it inside `composing`.

    Returns the problems of the refused overrides, and the accepted overrides (for a sweep, the first values).
    """
    refused: dict[str, list[Problem | str]] = {}
    accepted: list[str] = []
    values = {override: _expand(override) if sweep else [override] for override in overrides}
    firsts = [singles[0] for singles in values.values()]
    firsts_compose = _refusal(firsts, composer) is None  # then only the other values need a trial
    # The choice of a group decides which keys exist, so groups come before values.
    for override in sorted(overrides, key=lambda text: not _choices(text.partition("=")[0])):
        singles = values[override]
        problems: list[Problem | str] = []
        for single in singles[1:] if firsts_compose else singles:
            error = _refusal([*accepted, single], composer)
            if error is not None:
                plain = composer.compose(accepted)
                in_file = [
                    _refused_in_file(refusal, plain=plain)
                    for refusal in refused_keys(error, plain)
                    if refusal.key != re.split("[/=]", single.lstrip("+"))[0]
                ]
                problems += in_file
                if not in_file:
                    problems.append(_explain(single, error=error, composer=composer, accepted=accepted))
        if problems:
            refused[override] = problems
        else:
            accepted.append(singles[0])
    return [problem for override in overrides for problem in refused.pop(override, [])], accepted


def _refusal(overrides: list[str], composer: Composer) -> Exception | None:
    """The error with which Hydra or a schema refuses the overrides together."""
    try:
        config = composer.compose(overrides)
        if unknown_keys(config):
            return HydraException("Could not override")
        if not _is_typed(config):
            raise HydraException("another type") from ValidationError("another type")
    except COMPOSE_ERRORS as error:
        return error
    return None


def _is_typed(config: DictConfig) -> bool:
    """Whether the keys whose type also takes `auto`, so any text, have a value of their own type."""
    devices = None if OmegaConf.is_interpolation(config, "gpus_per_node") else config.gpus_per_node
    compiles = AUTO if OmegaConf.is_interpolation(config.training, "compile") else config.training.compile
    try:
        if compiles != AUTO:
            as_switch(compiles)
    except ValidationError:
        return False
    return not isinstance(devices, str) or devices == AUTO or bool(re.fullmatch(r"[+-]?\d+", devices))


def _remaining_problems(composer: Composer, accepted: list[str]) -> list[Problem | str]:
    """The problems that the other checks find. They use an example for a missing value."""
    try:
        return find_problems(resolve(composer.compose(accepted)).config)
    except ConfigError as error:
        problems = error.problems
        missing = missing_keys(composer.compose(accepted))
        if not missing or not set(missing) <= set(REQUIRED):
            return problems
    examples = [f"{key}={REQUIRED[key]}" for key in missing]
    others = find_problems(resolve(composer.compose([*accepted, *examples])).config)
    return problems + [p for p in others if not (isinstance(p, Problem) and p.key in missing)]


def _choices(key: str) -> list[str]:
    """The choices of a group; empty if `key` is not a group."""
    group = key.lstrip("+~").partition("@")[0]
    return group_choices(group) if re.fullmatch(r"\w{1,60}(/\w{1,60}){,3}", group) else []


def _expand(override: str) -> list[str]:
    """Split `nodes=1,2` of a sweep into one override per run; an interval becomes its two ends."""
    loader = current_loader()  # glob() needs it
    try:
        (parsed,) = OverridesParser.create(config_loader=loader).parse_overrides([override])
        if not parsed.is_sweep_override():
            return [override]
        value, key = parsed.value(), parsed.get_key_element()
        if isinstance(value, IntervalSweep):
            return [f"{key}={value.start}", f"{key}={value.end}"]
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()] or [override]
    except COMPOSE_ERRORS:  # the composition raises it again
        return [override]


def _explain(
    override: str, *, error: Exception, composer: Composer, accepted: Sequence[str]
) -> Problem | str:
    """Turn Hydra's error into a problem: key, value, rule and legal values near it.

    `accepted`: the overrides that Hydra accepts.
    """
    key, _, value = override.partition("=")
    if isinstance(error, OverrideParseException):
        rule = "can't be read as key=value: quote special characters of the value, and again for the shell"
        no_value = "has no =: a key is written key=value, and a script of yours comes after --"
        advice = f" Try {text}." if (text := _as_one_text(key, value)) else ""
        return f"{override} {rule if '=' in override else no_value}.{advice}"
    if override.startswith("~"):
        return f"{override}: {key[1:]} can't be deleted: it has a default or does not exist."
    key = key.lstrip("+")
    text = str(error.__cause__ or error)
    choices = _choices(key)
    known = not choices or key.partition("@")[0] in composer.defaults()  # else + chooses the user's group
    if override.startswith("+") and known and (value in choices or "An item is already at" in text):
        legal = shell_word(override.lstrip("+"))
        return f"{override}: {key} has a place already, and + adds a new key. Try {legal}."
    if value in choices and not known and not override.startswith("+"):
        return f"{override}: {key} is a group of your own, which a plus chooses. Try +{override}."
    values = value.split(",")
    if "Ambiguous value" in text or (len(values) > 1 and set(values) <= set(choices)):
        return _several_values(override, composer.compose(accepted))
    if isinstance(error, YAMLError):
        return unreadable_file(error)
    plain = composer.compose(accepted)
    if choices:
        if value in choices:
            return f"{override}: {unusable_file(error, key, value, plain=plain)}"
        key, default = key if known else f"+{key}", composer.defaults().get(key)
        return _no_such_file(key, value, choices=choices, default=default)
    if "Could not override" in str(error) or "not in" in text:
        if not _is_open(plain, key) and (files := files_with(key, composer)):
            return f"{override}: there is no key {key} here. Try {alternatives(files)}."
        return _unknown(override, key=key, value=value, plain=plain)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return _mistyped(override, key=key, value=value, plain=plain)
    return f"{override}: {text.splitlines()[0].rstrip('.')}."


def _mistyped(override: str, *, key: str, value: str, plain: DictConfig) -> Problem | str:
    if OmegaConf.is_dict(plain.get(key)) and not _is_open(plain, key):
        return f"{override}: {key} is a table. {_keys_of(key, plain)}"
    rule = f"is not {kind_of(_type_in_schema(plain, key))}"
    return Problem(key, value, rule, _near(plain, key=key, value=value))


def _no_such_file(key: str, value: str, *, choices: Sequence[str], default: str | None) -> Problem | str:
    if (misplaced := misplaced_file(key.lstrip("+"), value)) is not None:
        return f"{key} = {spell(value)} is not found: {misplaced}"
    site = _no_such_site(value, choices=choices) if key == "cluster" else None
    return site or _not_a_choice(key, value, choices=choices, default=default)


def _no_such_site(value: str, *, choices: Sequence[str]) -> Problem | str | None:
    """How to use or write a profile of the user's site; None if one of our profiles has a similar name."""
    if os.path.isfile(Path(OWN_SITES, "cluster", f"{value}.yaml")):
        return Problem(
            "cluster", value, f"is in {OWN_SITES}/", (value,), along=(f"--config-dir {OWN_SITES}",)
        )
    if nearest(value, choices, likeness=TYPING_ERROR) or any(name.startswith(value) for name in choices):
        return None
    name = re.sub(r"[^\w-]+", "_", value, flags=re.ASCII) or "mysite"
    return (
        f"cluster = {spell(value)} is not one of {', '.join(choices)}. Try python -m hpc_parallel "
        f"init-cluster {name}, which writes a profile of this site, then --config-dir {OWN_SITES} "
        f"cluster={name}."
    )


def _not_a_choice(key: str, value: str, *, choices: Sequence[str], default: str | None) -> Problem | str:
    close = choice_near(key, value, choices)
    rule = f"is not one of {', '.join(choices)}"
    if advice := of_ones_own(key, value):
        return f"{key} = {spell(value)} {rule}. {advice}"
    if not close and key == "model" and _FILE_NAME.fullmatch(value):
        rule += f". A file of your own is found by --config-dir FOLDER, which holds model/{value}.yaml"
    elif not close:
        close = [default or choices[0]]
    if kind := PLUGINS.get(key):
        rule += f", the installed {kind}s (the package of another is often hydra-{value}-{kind})"
    return Problem(key, value, rule, tuple(close))


def _refused_in_file(refused: RefusedKey, *, plain: DictConfig) -> str:
    place, key = refused.place, refused.key
    if not refused.unknown:
        return f"{place}: {key} is not {kind_of(_type_in_schema(plain, key))}."
    name = (suggest(key, flat(plain)) or "").partition("=")[0]
    if name.rpartition(".")[0] == key.rpartition(".")[0] and name:
        name = name.rpartition(".")[2]
    return f"{place}: there is no key {key}." + (f" Try {name}." if name else "")


def _unknown(override: str, *, key: str, value: str, plain: DictConfig) -> str:
    parent_key = key.rpartition(".")[0]
    if table := next((table for table in (key, parent_key) if _is_open(plain, table)), None):
        advice = shell_word(f"+{override}")
        return f"{override}: {table} has no such key yet, and a new one needs a plus. Try {advice}."
    text = f"{override}: there is no key {key}."
    if tables := nearest(parent_key, TABLES, likeness=TYPING_ERROR):
        meant = f"{'+' * (tables[0] != 'script.arguments')}{tables[0]}.{key.rpartition('.')[2]}={value}"
        return f"{text} Try {shell_word(meant)}."
    if key.rpartition(".")[2] in ACCUMULATION:
        size = f"training.microbatch_size={_microbatch_size(value, plain=plain)}"
        return f"{text} Gradients are accumulated over microbatches. Try {size}."
    name, equals, replacement = (suggest(key, flat(plain)) or "").partition("=")
    if not name:
        if parent_key != "launcher":
            return text
        option = f"+launcher.extra.{key.rpartition('.')[2]}"
        several = "," in value and set(value).isdisjoint("'\"[{")
        option = as_override(option, value) if several else shell_word(f"{option}={value}")
        return f"{text} If it is an option of sbatch, try {option}."
    if choices := _choices(name):
        return f"{text} Try {name}={replacement or (nearest(value, choices) or choices)[0]}."
    if _is_open(plain, name):
        inside = "" if value.startswith("{") else ".KEY"
        return f"{text} Try {shell_word(f'+{name}{inside}={value}')}."
    if OmegaConf.is_dict(OmegaConf.select(plain, name)):
        return f"{text} {_keys_of(name, plain)}"
    if equals:
        with_unit = name.endswith(("time_minutes", "_gb"))  # `time=2h` is converted; 3 epochs are not 3 steps
        near = _near(plain, key=name, value=value) if with_unit else (OmegaConf.select(plain, name),)
        return f"{text} Try {as_override(name, replacement or near[0])}."
    return f"{text} Try {_legal_override(f'{name}={value}', plain=plain)}."


def _keys_of(table: str, plain: DictConfig) -> str:
    return f"Keys of {table}: {', '.join(flat(OmegaConf.select(plain, table)))}."


def _is_open(plain: DictConfig, key: str) -> bool:
    """Whether the key is a table that takes any key."""
    table = OmegaConf.select(plain, key, default=None) if key else plain
    return OmegaConf.is_dict(table) and not is_dataclass(OmegaConf.get_type(table))


def _microbatch_size(count: str, *, plain: DictConfig) -> int:
    """The microbatch size that splits a replica's part of the global batch into `count` microbatches."""
    try:
        config = resolve(plain).config
        replicas = layout_of(config.strategy, devices=config.devices).data
        return max(1, config.training.global_batch_size // (replicas * int(count)))
    except (ValueError, ZeroDivisionError):
        return 1


def _legal_override(override: str, *, plain: DictConfig) -> str:
    """The override if its value is legal, otherwise with a similar value or the key's current value."""
    key, _, value = override.partition("=")
    choices = choices_of(key)
    if choices and value not in choices:
        current = OmegaConf.select(plain, key)  # null if it follows the device
        closest = choice_near(key, value, choices) or [current if current in choices else choices[0]]
        return f"{key}={closest[0]}"
    trial = plain.copy()
    try:
        parsed = OverridesParser.create().parse_override(override)
        if parsed.is_sweep_override() and (text := _as_one_text(key, value)):
            return text
        OmegaConf.update(trial, key, parsed.value())
        kept, rule = OmegaConf.select(trial, key), rule_of(key)
        if not _is_typed(trial) or (rule is not None and kept is not None and not rule.allows(kept)):
            raise ValidationError("not legal")
    except COMPOSE_ERRORS:
        near = _near(plain, key=key, value=value)
        return _as_one_text(key, value) or as_override(key, near[0] if near else "VALUE")
    return shell_word(override)


def _several_values(override: str, plain: DictConfig) -> str:
    key, _, value = override.partition("=")
    name = key.lstrip("+")
    if name.startswith("launcher.") and not key.startswith("+launcher.extra.") and not types_of(name):
        return _unknown(override, key=name, value=value, plain=plain)
    sweep, one = shell_word(override), shell_word(f"{key}={value.partition(',')[0]}")
    advice = f"Try run -m {sweep}, or one value: {one}"
    if any(get_origin(hint) is list for hint in types_of(key)):
        advice = f"Try {shell_word(f'{key}=[{value}]')}"
    if key.lstrip("+").startswith(LISTS_OF_SLURM) and (text := _as_one_text(key, value)):
        advice = f"For Slurm, they are one: {text}. To sweep them: run -m {sweep}"
    return f"{override}: several values are a sweep. {advice}."


def _as_one_text(key: str, value: str) -> str | None:
    """The override with quotes around its value; None if it has some, or the key takes no text."""
    name = key.lstrip("+")
    hints = [str] if name.startswith(tuple(f"{table}." for table in TABLES)) else types_of(name)
    takes_text = any(str in (get_args(hint) or (hint,)) and get_origin(hint) is not list for hint in hints)
    return as_override(key, value) if takes_text and set(value).isdisjoint("'\"") else None


def _type_in_schema(plain: DictConfig, key: str) -> str:
    """The type of a key as the schema's source spells it; empty if there is no schema."""
    parent_key, _, name = key.rpartition(".")
    schema = OmegaConf.get_type(OmegaConf.select(plain, parent_key) if parent_key else plain)
    return next((str(f.type) for f in fields(schema) if f.name == name), "") if is_dataclass(schema) else ""


def _near(plain: DictConfig, *, key: str, value: str) -> tuple[Any, ...]:
    """A legal value for a refused one: the same time, size or number in our notation, or a list of it.

    Otherwise the default, or for a key without one, a value of its rule or its example.
    """
    default: Any = None
    with suppress(OmegaConfBaseException):  # of a key that refers to one of another type
        default = OmegaConf.select(plain, key, default=None)
    required = _type_in_schema(plain, key)
    rule = rule_of(key)
    same = same_quantity(key, value) if required.startswith(("int", "float")) else None
    is_legal = same is not None and (rule is None or rule.allows(same))
    if same is not None and is_legal and (required.startswith("float") or same % 1 == 0):
        return (same if same % 1 else int(same),)
    if OmegaConf.is_list(default):
        is_plain = "list[str]" in required and re.fullmatch(r"[\w./-]+", value) and value != "null"
        return (list(default) or ([value] if is_plain else []),)
    if OmegaConf.is_dict(default):
        names = [name for name in missing_keys(default) if f"{key}.{name}" in REQUIRED and "." not in name]
        return ({name: REQUIRED[f"{key}.{name}"] for name in names} or dict(default),)
    if required.startswith("bool"):
        return (True, False)
    if default is not None or "None" in required:
        return (default,)
    if key in REQUIRED:
        return (REQUIRED[key],)
    return () if rule is None else rule.legal
