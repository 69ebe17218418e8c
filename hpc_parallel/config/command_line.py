"""The arguments of `python -m hpc_parallel.run`, parsed once, with each text as it was typed.

Hydra reads a number before it knows that a key takes text, such as the account `2023_001` or the module
`3.10`, and YAML reads `0123` in a user's file as 83 and `on` as true.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import yaml
from omegaconf import OmegaConf

from hpc_parallel.config.hydra_internals import flags_parser
from hpc_parallel.config.key_suggestions import SYNONYMS
from hpc_parallel.config.places import Places, find_folder
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import with_quotes, with_script
from hpc_parallel.config.typed_config import types_of
from hpc_parallel.exit_codes import DONE
from hpc_parallel.problems import ConfigError

# Flags of Hydra that print something and start no run (--resolve: only with --cfg or --help).
EXPLAINING = ("help", "hydra_help", "cfg", "info", "shell_completion", "resolve")

TABLES = ("launcher.extra", "cluster.extra", "cluster.srun", "cluster.environment", "script.arguments")
"""Mappings whose values are words of a program or a shell, where `true` means a flag without a value."""
_WORD = re.compile(r"(?P<plus>[+]*)(?P<key>[\w.]+)=(?P<value>.*)", re.DOTALL)
_TOKENS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[\[\]{},:]|[^\[\]{},:'"]+""")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class CommandLine:
    """One command line of `run`: its words, and the flags that Hydra's parser reads from them."""

    words: tuple[str, ...]
    flags: Namespace

    @classmethod
    def parse(cls, words: Sequence[str]) -> CommandLine:
        """Parse the words; flags may stand anywhere. `--version` ends the process.

        The words after `--` become overrides. Raises ConfigError for an unknown flag, a `--config-dir` that
        does not exist and `--experimental-rerun`.
        """
        words = [with_quotes(word) for word in with_script(words)]
        plain = tuple([as_typed(word) for word in [_as_hydra_names_it(word) for word in words]])
        if "--version" in plain:
            print(f"hpc_parallel {sys.modules['hpc_parallel'].__version__}")  # no import from a higher layer
            sys.exit(DONE)
        flags, unknown = flags_parser().parse_known_intermixed_args(plain)
        if unknown:
            raise ConfigError([_unknown_flag(flag, plain) for flag in unknown])
        line = cls(plain, flags)
        if line.extra_dir and not os.path.isdir(line.extra_dir):
            raise ConfigError([f"--config-dir {line.extra_dir}: this folder does not exist."])
        if line.flags.experimental_rerun:
            rule = "would run a pickled configuration. Try python -m hpc_parallel rerun RUN."
            raise ConfigError([f"--experimental-rerun {rule}"])
        return line

    def with_words(self, words: Sequence[str]) -> CommandLine:
        """This line with other words, for example the words of a run to resume and then the user's."""
        return self if tuple(words) == self.words else self.parse(words)

    @property
    def overrides(self) -> list[str]:
        return list(self.flags.overrides)

    @property
    def explains(self) -> bool:
        """Whether a flag asks for help, the composed configuration or a completion instead of a run."""
        return any(getattr(self.flags, flag) for flag in EXPLAINING)

    @property
    def sweeps(self) -> bool:
        """Whether the line starts a sweep: `-m`, or `hydra.mode=MULTIRUN`, which means the same."""
        mode = any(word.lower() == "hydra.mode=multirun" for word in self.overrides)
        return (self.flags.multirun or mode) and not self.flags.run and not self.explains

    @property
    def extra_dir(self) -> str | None:
        """The user's folder of configuration files (`--config-dir`)."""
        folder: str | None = self.flags.config_dir
        return folder

    @property
    def places(self) -> Places:
        """The package's `conf/` and `config.yaml`, unless Hydra's flags name others."""
        path, name = self.flags.config_path, self.flags.config_name
        return {
            "config_dir": str(Path(path).absolute()) if path else str(find_folder("conf")),
            "config_name": name or "config",
            "extra_dir": self.extra_dir,
        }


def _as_hydra_names_it(word: str) -> str:
    """`hardware=NAME` by its key, as `hardware` is the name of a group too; `+jobs=` without its plus."""
    return f"plan.{word}" if word.startswith("hardware=") else re.sub(r"^\+(?=jobs=)", "", word)


def _unknown_flag(flag: str, words: Sequence[str]) -> str:
    """The problem of a flag that Hydra does not have, with the override that it probably means."""
    name, equals, value = flag.lstrip("-").partition("=")
    key = name.replace("-", "_")
    if key.partition(".")[0] not in {field.name for field in fields(RunConfig)}:
        key = SYNONYMS.get(key, "").partition("=")[0]
    if not key:
        return f"{flag}: there is no such flag. `run --help` lists the flags and keys."
    after = words[words.index(flag) + 1 :][:1]
    if not equals and after and "=" not in after[0] and not after[0].startswith("-"):
        value = after[0]
    return f"{flag}: a key has no dashes before it. Try {key}={value or 'VALUE'}."


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
    return key.startswith(tuple(f"{table}." for table in TABLES)) or key in TABLES


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
