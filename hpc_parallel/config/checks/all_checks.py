"""Check a configuration on the login node: all contradictions at once, each with a suggestion."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from hpc_parallel.config.checks import (
    cluster_checks,
    execution_checks,
    fp8_checks,
    huggingface_checks,
    image_checks,
    key_checks,
    layout_checks,
    machine_checks,
    optimizer_checks,
    parquet_checks,
    profile_checks,
    python_checks,
    script_checks,
    site_checks,
    switch_checks,
    task_checks,
)
from hpc_parallel.config.checks.targets import class_tables, missing_part
from hpc_parallel.config.counts import count, is_reference_decoder
from hpc_parallel.config.layout import divisors
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK
from hpc_parallel.problems import Problem, Problems, nearest
from hpc_parallel.record.safe_read import MAX_INTEGER, list_folder

CALLBACKS, VALIDATION = "hpc_parallel.training.callbacks", "validation_loss"
COUNTED = ("model", "strategy", "training", "optimizer", "launcher", "task")  # tables of counts
MOST_COUNT, MOST_INTEGER = 2**31, MAX_INTEGER


def find_problems(config: RunConfig, overrides: Sequence[str] = ()) -> list[Problem | str]:
    """Returns all problems of `config`, in the order of the command line's `overrides`."""
    if huge := list(_integers(config)):  # the other checks loop up to these numbers: they might never end
        return in_order(huge, overrides)
    of_the_site = (cluster_checks.find_problems, site_checks.find_problems, python_checks.find_problems)
    of_training = (
        optimizer_checks.find_problems, execution_checks.find_problems,
        layout_checks.find_problems, _model, _callbacks, _data, parquet_checks.find_problems,
        huggingface_checks.find_problems, image_checks.find_problems, task_checks.find_problems,
        switch_checks.find_problems, fp8_checks.find_problems, profile_checks.find_problems,
        machine_checks.find_problems,
    )  # fmt: skip
    checks = (key_checks.find_problems, *(() if config.task.name == TASK else of_training), *of_the_site)
    problems = [problem for check in checks for problem in check(config)]
    return in_order([*problems, *script_checks.find_problems(config, overrides)], overrides)


def in_order(problems: Sequence[Problem | str], overrides: Sequence[str]) -> list[Problem | str]:
    """Sort the problems as the command line orders their keys; problems of other keys come last."""
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]

    def position(problem: Problem | str) -> int:
        text = problem.key if isinstance(problem, Problem) else problem.lstrip("+~")
        key = re.split(r"[\s=:]", text, maxsplit=1)[0]
        named = [i for i, name in enumerate(keys) if key == name or key.startswith(f"{name}.")]
        return named[-1] if named else len(keys)

    return sorted(problems, key=position)


def _integers(config: RunConfig) -> Problems:
    """Integers beyond any real run, or beyond what a file of the run can hold."""
    limits = {key: rule.most for key, _, rule in key_checks.ruled_values(config) if rule.most}
    for key, value in _leaves(vars(config)):
        if isinstance(value, int):
            most = limits.get(key, MOST_COUNT if key.partition(".")[0] in COUNTED else MOST_INTEGER)
            bound, limit = (most, "most") if value > 0 else (-most, "least")
            if abs(value) > most:
                legal = () if key.endswith("]") or value < 0 else (bound,)
                yield Problem(key, value, f"must be at {limit} {bound}", legal)


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every plain value in nested classes, tables and lists."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{prefix}[{index}]")
    elif is_dataclass(value):
        yield from _leaves(vars(value), prefix)
    else:
        yield prefix, value


def _model(config: RunConfig) -> Problems:
    if not isinstance(config.model, dict) or not config.model.get("_target_"):
        yield "model._target_ is missing: name the class of your model. Try model=tiny."
        return
    yield from _target("model._target_", config.model["_target_"])
    if not is_reference_decoder(config):
        return
    dim, heads, kv_heads = (config.model[name] for name in ("dim", "heads", "kv_heads"))
    if min(dim, heads, kv_heads) < 1:
        return
    if dim % heads or (dim // heads) % 2:
        legal = [d for d in divisors(dim) if (dim // d) % 2 == 0]
        near = sorted(legal, key=lambda d: abs(d - heads))[:2]
        rule = f"does not split model.dim = {dim} into heads of an even width (rotary positions rotate pairs)"
        yield Problem("model.heads", heads, rule, tuple(sorted(near)))
    if heads % kv_heads:
        near = sorted(divisors(heads), key=lambda d: abs(d - kv_heads))[:2]
        rule = f"does not divide model.heads = {heads}: each key-value head serves the same number of heads"
        yield Problem("model.kv_heads", kv_heads, rule, tuple(sorted(near)))


def _target(key: str, target: Any) -> Problems:
    missing = missing_part(str(target))
    if missing is not None:
        rule, near = missing
        yield Problem(key, target, rule, near)


def _callbacks(config: RunConfig) -> Problems:
    """Each callback is a table with a class."""
    for index, callback in enumerate(config.training.callbacks):
        key = f"training.callbacks[{index}]"
        if not isinstance(callback, dict) or not callback.get("_target_"):
            yield Problem(key, callback, "has no _target_, the class of a callback")
            continue
        for name, table in class_tables(key, callback):
            yield from _target(f"{name}._target_", table["_target_"])
        if _needs_validation(callback) and config.training.validate_every is None:
            rule = f"leaves {callback['_target_'].rpartition('.')[2]} without a validation"
            yield Problem("training.validate_every", None, rule, (100,))


def _needs_validation(callback: dict[str, Any]) -> bool:
    key = callback.get("key", VALIDATION)
    watched = {f"{CALLBACKS}.KeepBest": VALIDATION, f"{CALLBACKS}.EarlyStopping": key}
    return str(watched.get(callback["_target_"])).startswith("validation_")


def _data(config: RunConfig) -> Problems:
    """The data must exist, and its tokens must fit the model's vocabulary."""
    if not isinstance(config.data, dict) or not config.data.get("_target_"):
        yield "data._target_ is missing: name the class of your data. Try data=text."
        return
    for key, table in class_tables("data", config.data):
        yield from _target(f"{key}._target_", table["_target_"])
    stated = config.data.get("vocab_size")
    vocab_size = 256 if config.data["_target_"].endswith("TextData") else stated
    if (path := config.data.get("path")) is not None:
        if not path or not os.path.exists(os.path.expanduser(path)):
            parent = Path(os.path.expanduser(path)).parent
            names = [entry.name for entry in list_folder(parent)] if path else []
            near = nearest(Path(path).name, names)
            yield Problem("data.path", path, "does not exist here", tuple(parent / name for name in near))
        else:
            try:
                vocab_size = _stored_vocab_size(config.data) or vocab_size
            except (ValueError, OSError) as error:
                yield f"data.path = {path} can't be used: {error}"
    key, room = count(config, "vocabulary")
    if isinstance(vocab_size, int) and room and room < vocab_size:
        rule = f"is too small for the data, whose tokens run from 0 to {vocab_size - 1}"
        yield Problem(key, room, rule, (vocab_size,))


def _stored_vocab_size(data: dict[str, Any]) -> int | None:
    """The vocabulary size of the tokens at `data.path`. Raises ValueError if the files are other data."""
    from hpc_parallel.data import text, tokens  # neither imports torch

    if data["_target_"] == "hpc_parallel.data.tokens.TokensData":
        return tokens.read_description(Path(os.path.expanduser(data["path"])))["vocab_size"]
    if data["_target_"] == "hpc_parallel.data.text.TextData":
        text.find_files(data["path"], pattern=data["pattern"])
    return None
