"""Keeps text that looks like a number as it was typed, such as the account `2023_001` or the module `3.10`.

Hydra reads a number before it knows that a key takes text, and YAML reads `0123` as 83 and `on` as true.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf

from hpc_parallel.config.typed_config import types_of

_TABLES = ("launcher.extra", "cluster.extra", "cluster.srun", "cluster.environment", "script.arguments")
"""Mappings whose values are words of a program or a shell, where `true` means a flag without a value."""
_WORD = re.compile(r"(?P<plus>[+]*)(?P<key>[\w.]+)=(?P<value>.*)", re.DOTALL)
_TOKENS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\]{},:]|[^\[\]{},:'"]+""")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


def as_typed(word: str) -> str:
    """Returns the override `word`, with quotes around what Hydra would change."""
    match = _WORD.fullmatch(word)
    if match is None or "(" in match["value"]:
        return word
    quoted = "".join(_quoted(match["value"], match["key"]))
    if quoted == match["value"] or not _takes_text(match["key"]):
        return word
    return f"{match['plus']}{match['key']}={quoted}"


def _quoted(value: str, key: str) -> Iterator[str]:
    """The tokens of a value, a list or a mapping, with quotes around each value that Hydra would change."""
    tokens = _TOKENS.findall(value)
    if "".join(tokens) != value:  # quotes that do not close: Hydra says where
        yield value
        return
    starts, ends = (":", ",}") if value.startswith("{") else ("[,", ",]")
    for before, token, after in zip(["", *tokens], tokens, [*tokens[1:], ""], strict=False):
        text = token.strip()
        if before in starts and after in ends and _would_change(text, key):
            token = token.replace(text, f"'{text}'")
        yield token


def _would_change(text: str, key: str) -> bool:
    """Whether Hydra reads the word as a value that is written differently."""
    if text.lower() in ("true", "false"):
        return not _is_table(key)
    try:
        number = float(text.replace("_", ""))
    except ValueError:
        return False
    return text not in (str(number), f"{number:.0f}")


def _takes_text(key: str) -> bool:
    return _is_table(key) or any(map(_is_text, types_of(key)))


def _is_table(key: str) -> bool:
    return key.startswith(tuple(f"{table}." for table in _TABLES)) or key in _TABLES


def _is_text(hint: Any) -> bool:
    """Whether the type is a text or a list of texts. It may also allow null."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not type(None)]
    return all(kind is str or kind == list[str] for kind in kinds)


def problems_of_files(choices: Mapping[str, str], *, folder: str) -> Iterator[str]:
    """Problems of texts in the user's files that YAML reads as something else.

    choices: the file of each group that is used; folder: the folder of `--config-dir`.
    """
    for group, name in choices.items():
        path = Path(folder, group, f"{name}.yaml")
        if path.is_file():
            content = path.read_text()
            package = _PACKAGE.search(content)
            prefix = group.replace("/", ".") if package is None else package[1]
            for key, node in _scalars(yaml.compose(content), "" if prefix == "_global_" else f"{prefix}."):
                if _takes_text(key) and _is_misread(node, key):
                    yield (
                        f"{path}, line {node.start_mark.line + 1}: {key} is a text, and YAML reads "
                        f'{node.value} otherwise. Write "{node.value}", with the quotes.'
                    )


def _scalars(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """The unquoted values of a file, by dotted key. The values of a list have the key of the list."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, f"{prefix}{key.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value, prefix)
    elif isinstance(node, yaml.ScalarNode) and node.style is None:
        yield prefix.rstrip("."), node


def _is_misread(node: yaml.ScalarNode, key: str) -> bool:
    value = OmegaConf.create(f"value: {node.value}").value
    if value is None or isinstance(value, str):
        return False
    if isinstance(value, bool):
        return node.value.lower() not in ("true", "false") or not _is_table(key)
    return bool(str(value) != node.value)
