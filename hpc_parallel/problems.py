"""What is wrong with a configuration, said so that the reader can mend it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_FEW = 64
_PLAIN_PATH = re.compile(r"/[\w./-]*", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """One wrong value: which key, what it is, which rule it breaks, legal values near it.

    `along`: overrides that must change with the value for it to be legal.
    """

    key: str
    value: Any
    rule: str
    legal: tuple[Any, ...] = ()
    along: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.key} = {spell(self.value)} {self.rule}."
        if self.legal:
            mends = [" ".join([f"{self.key}={spell(value)}", *self.along]) for value in self.legal]
            text += f" Try {alternatives(mends)}."
        return text


Found = Iterator[Problem | str]


class ConfigError(ValueError):
    """A configuration that can't run, with all its problems."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem | str]]]:
        return type(self), (self.problems,)  # pickled by what it was made from, not by its text


def spell(value: Any) -> str:
    """The value as a command line says it; what would need quoting there is shown quoted."""
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
    return text if text and text.isprintable() and not set(text) & set(" '\"$`\\") else repr(text)


def printable(text: object, *, keep: str = "") -> str:
    """Any text as one that a terminal only shows: control characters, line ends, characters that change the
    direction of text, and lone surrogates become escapes such as \\x1b. `keep`: characters left alone."""
    shown = str(text)
    if shown.isprintable():
        return shown
    escapes = {char: _escape(char) for char in set(shown) - set(keep) if not char.isprintable()}
    if len(escapes) > _FEW:
        return shown.translate({ord(char): escape for char, escape in escapes.items()})
    for char, escape in escapes.items():  # ten times as fast for megabytes of one character
        shown = shown.replace(char, escape)
    return shown


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()


def quoted(text: object) -> str:
    """Any text as one value of an override, whatever Hydra would read into it; a plain path as it is."""
    if _PLAIN_PATH.fullmatch(str(text)):
        return str(text)
    # Hydra reads a backslash as it is, unless a quote follows it.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + "\\" * len(end[2]) + end[2], str(text)) + "'"


def alternatives(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def nearest(word: str, known: Iterable[str], *, most: int = 1) -> list[str]:
    """The known words that `word` was probably meant to be, best first."""
    return difflib.get_close_matches(word, sorted(known), n=most, cutoff=0.5)
