"""Problems of a configuration, with suggestions for the user."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_FEW = 64
_ESCAPED_BYTE = re.compile(r"\\udc([89a-f][0-9a-f])")  # as repr writes a byte that is no UTF-8
_PLAIN_PATH = re.compile(r"(?!-)[\w.-]*/[\w./-]*", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One wrong value: its key, the value, the rule that it breaks, and similar legal values.

    along: overrides that must change together with the value to make it legal.
    """

    key: str
    value: Any
    rule: str
    legal: tuple[Any, ...] = ()
    along: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.key} = {spell(self.value)} {self.rule}."
        if self.legal:
            suggestions = [" ".join([f"{self.key}={spell(value)}", *self.along]) for value in self.legal]
            text += f" Try {alternatives(suggestions)}."
        return text


Problems = Iterator[Problem | str]


class ConfigError(ValueError):
    """Raised for a configuration that can't run; `problems` lists all problems."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem | str]]]:
        return type(self), (self.problems,)  # pickle the problems, not the text


def tried(read: Callable[[], _T], problems: list[Problem | str]) -> _T | None:
    """Returns what `read` returns. If it raises ConfigError, append the problems and return None."""
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def spell(value: Any) -> str:
    """Write the value as on a command line, with quotes if it needs them."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return f"[{','.join(map(spell, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{spell(item)}' for key, item in value.items())}}}"
    text = str(value)
    if text and text.isprintable() and not set(text) & set(" '\"$`\\;&|<>()"):
        return text
    if "'" in text and set(text) & set('"$`\\!'):  # a shell expands these in double quotes
        return shlex.quote(printable(text))
    return _ESCAPED_BYTE.sub(r"\\x\1", repr(text))


def printable(text: object, *, keep: str = "") -> str:
    """Escape everything in a text that a terminal would not just show.

    Control characters, line ends, characters that change the text direction, and lone surrogates become
    escapes such as \\x1b. A byte that is no UTF-8 becomes \\xc3: Python keeps it as the surrogate \\udcc3.

    keep: characters that stay as they are.
    """
    escaped = str(text)
    if escaped.isprintable():
        return escaped
    escapes = {char: escape(char) for char in set(escaped) - set(keep) if not char.isprintable()}
    if len(escapes) > _FEW:
        return escaped.translate({ord(char): sequence for char, sequence in escapes.items()})
    for char, sequence in escapes.items():  # ten times as fast for megabytes of one character
        escaped = escaped.replace(char, sequence)
    return escaped


def escape(char: str) -> str:
    """A character as an escape such as \\x1b."""
    if "\udc80" <= char <= "\udcff":  # a byte of the command line or of a file's name (PEP 383)
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def quoted(text: object) -> str:
    """Quote any text so that Hydra reads it as one plain string; a plain path needs no quotes."""
    if _PLAIN_PATH.fullmatch(str(text)):
        return str(text)
    # Hydra takes a backslash literally unless a quote follows it.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + "\\" * len(end[2]) + end[2], str(text)) + "'"


def excluding(hosts: Sequence[str]) -> str:
    """The override that leaves out these hosts, as a shell takes it."""
    names = ",".join(hosts)
    return (
        f"launcher.exclude={names}" if set(names).isdisjoint(",[") else with_comma("launcher.exclude", names)
    )


def with_comma(key: str, value: str) -> str:
    """An override of one text with commas or brackets, as a shell takes it: Hydra needs it to be quoted."""
    return f"\"{key}='{value}'\""


def alternatives(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def nearest(word: str, choices: Iterable[str], *, most: int = 1, likeness: float = 0.5) -> list[str]:
    """The choices that `word` was probably meant to be, at most `most`, best first."""
    return difflib.get_close_matches(word, sorted(choices), n=most, cutoff=likeness)
