"""Problems of a configuration, with suggestions for the user."""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, TypeVar

_T = TypeVar("_T")
_FEW = 64
# Hydra reads these texts as they are: all of them are a name or a path, and the others a user types too.
_BARE = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_][\w.-]*|(?!-)[\w.-]*/[\w./-]*", re.ASCII)
_NUMBER = r"[+-]?(?=0\d|\d*[._eE])[\d._]*\d(?i:e[+-]?\d+)?$"  # that may be written otherwise
_TYPED = re.compile(
    rf"(?!(?i:null|true|false|nan|inf)$|{_NUMBER})[\w/+.%*@?|:-](?:[\w/+.%*@?|: -]*[\w/+.%*@?|:-])?", re.ASCII
)
_PLAIN_WORD = re.compile(r"(?:[\w@%+=:,./\[\]-]|\{[\w:/-]*\})+")  # a shell changes nothing in it


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
            suggestions = [" ".join([as_override(self.key, value), *self.along]) for value in self.legal]
            text += f" Try {alternatives(suggestions)}."
        return text


Problems = Iterator[Problem | str]


class ConfigError(ValueError):
    """Raised for a configuration that can't run; `problems` lists all problems, each once."""

    def __init__(self, problems: Sequence[Problem | str]) -> None:
        # By its text: a problem whose value is a list has no hash.
        self.problems = list({str(problem): problem for problem in problems}.values())
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem | str]]]:
        return type(self), (self.problems,)  # pickle the problems, not the text


def raise_if_any(problems: Iterable[Problem | str]) -> None:
    """Raises ConfigError with all of these problems, if there are any."""
    if listed := list(problems):
        raise ConfigError(listed)


def print_warning(text: object) -> None:
    """Warn in the log of a rank, at once."""
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def tried(read: Callable[[], _T], problems: list[Problem | str]) -> _T | None:
    """Returns what `read` returns. If it raises ConfigError, append the problems and return None."""
    try:
        return read()
    except ConfigError as error:
        problems += error.problems
        return None


def hydra_value(value: Any, *, typed: bool = False) -> str:
    """Write the value in the grammar of Hydra's overrides.

    typed: as a user types it, `1e-5` or `a b`. Otherwise Hydra reads back the same value of the same type.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(hydra_value(item, typed=typed) for item in value)}]"
    if isinstance(value, dict):
        items = [f"{key}:{hydra_value(item, typed=typed)}" for key, item in value.items()]
        return f"{{{','.join(items)}}}"
    if isinstance(value, int | float):
        return f"{value:g}" if typed and isinstance(value, float) else repr(value)
    text = str(value)
    if (_TYPED if typed else _BARE).fullmatch(text):
        return text
    # Hydra takes a backslash literally unless a quote follows it.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: end[1] * 2 + "\\" * len(end[2]) + end[2], text) + "'"


def shell_word(text: object) -> str:
    """Quote any text as one word of a shell; a word that the shell changes nothing in stays as it is."""
    word = str(text)
    if _PLAIN_WORD.fullmatch(word):
        return word
    if not word.isprintable():
        escaped = printable(re.sub(r"[\\']", r"\\\g<0>", word))
        return f"$'{escaped}'"
    return f'"{word}"' if "'" in word and set(word).isdisjoint('"$`\\!') else shlex.quote(word)


def spell(value: Any) -> str:
    """Write the value of a key for a reader: quoted where a shell needs it, if it is one text."""
    return shell_word(value) if isinstance(value, str | PurePath) else hydra_value(value, typed=True)


def as_override(key: str, value: Any) -> str:
    """The override, or the flag `--key=value`, as one word of a shell."""
    return shell_word(f"{key}={value if key.startswith('--') else hydra_value(value, typed=True)}")


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
    return f"\\u{ord(char):04x}" if "\x80" <= char <= "\xff" else char.encode("unicode_escape").decode()


def alternatives(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)


def nearest(word: str, choices: Iterable[str], *, most: int = 1, likeness: float = 0.5) -> list[str]:
    """The choices that `word` was probably meant to be, at most `most`, best first."""
    return difflib.get_close_matches(word, sorted(choices), n=most, cutoff=likeness)
