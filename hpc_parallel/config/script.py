"""Converts the words after `--` to keys, and these keys to the arguments of the user's script.

The login node and the ranks both use this module, so it imports neither Hydra nor torch.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any

from hpc_parallel.problems import ConfigError, hydra_value, shell_word
from hpc_parallel.record.values import flatten

TASK = "script"
KINDS = ("file", "module", "command")  # keys of `script.` of which exactly one is set
STARTS = RANKS, TORCHRUN, NODE = ("ranks", "torchrun", "node")
STYLES = ("--key value", "--key=value", "-key value", "key=value")
STOP_SIGNALS = ("none", "SIGTERM", "SIGUSR1", "SIGUSR2")
PLACEHOLDERS = ("{run}", "{rank}", "{seed}", "{nodes}", "{devices}", "{processes}", "{address}", "{port}")
# The figures of a program with one of these words can reach `metrics.jsonl` without `script.metrics`.
LOGS = re.compile(rb"job_context|tensorboard|summarywriter|accelerate|lightning|transformers", re.IGNORECASE)
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(\w+)", re.MULTILINE)
_MOST_BYTES = 2**20  # searched at the beginning of a file


def with_script(words: Sequence[str]) -> list[str]:
    """Replace `-- train.py --lr 3e-4` at the end of a command line by overrides. Raises ConfigError."""
    if "--" not in words:
        for flag, word in zip(("", *words), words, strict=False):
            if re.fullmatch(r"[^-=][^=]*\.py", word) and not flag.startswith("--config-"):
                suggestion = (
                    f"In `run`, try -- {shell_word(word)} at the end of the line, before its arguments"
                )
                raise ConfigError([f"{word} is no key=value. {suggestion}."])
        return list(words)
    end = list(words).index("--")
    before, script = list(words[:end]), list(words[end + 1 :])
    if not script or script == ["-m"]:
        raise ConfigError(
            [f"{' '.join(['--', *script])} ends the line: a script comes after it. Try -- train.py."]
        )
    if others := [word for word in before if word.startswith("task=") and word != f"task={TASK}"]:
        raise ConfigError(
            [f"{others[0]} can't be with a script after --, which is task={TASK}. Leave it out."]
        )
    kind = "file" if script[0].endswith(".py") else "command"
    if script[0] == "-m":
        kind, script = "module", script[1:]
    name, *arguments = map(_literal, script)
    return [*before, f"task={TASK}", f"script.{kind}={name}", f"script.words=[{','.join(arguments)}]"]


def with_quotes(word: str) -> str:
    """The override `word`, with quotes around values of `script.` that Hydra could not read.

    Without them, Hydra reads `{run}` as a mapping, and stops at a space or a `=` in a text.
    """
    key, _, value = word.partition("=")
    if key == "then" and " " in value and value[0] not in "[{'\"":
        return f"{key}={_literal(value)}"
    if not key.lstrip("+").startswith(f"{TASK}.") or set(value) & set("'\""):
        return word
    if key in (f"{TASK}.style", f"{TASK}.resume_arguments", f"{TASK}.metrics"):
        return f"{key}={_literal(value)}"
    if key != f"{TASK}.torchrun" and not any(placeholder in value for placeholder in PLACEHOLDERS):
        return word
    start, end = ("[", "]") if value.startswith("[") and value.endswith("]") else ("", "")
    parts = value[len(start) : len(value) - len(end)].split(",")
    return f"{key}={start}{','.join(map(_literal, parts))}{end}"


def _literal(word: str) -> str:
    """Quote a word so that neither Hydra nor OmegaConf (`${...}`) changes it."""
    return hydra_value(re.sub(r"(\\*)\$\{", lambda match: f"{match[1] * 2}\\${{", word))


def is_script(config: Mapping[str, Any]) -> bool:
    """Whether a user's script runs instead of one of our tasks.

    config: the content of `config.yaml`.
    """
    return bool(config.get("task", {}).get("name") == TASK)


def kind_of(script: Mapping[str, Any]) -> str | None:
    """The key that names the script; None if there is not exactly one."""
    kinds = [kind for kind in KINDS if script.get(kind)]
    return kinds[0] if len(kinds) == 1 else None


def name_of(script: Mapping[str, Any]) -> str:
    """A short name of the script, for the run and for messages: `train` for `code/train.py`."""
    kind = kind_of(script)
    text = str(script[kind]) if kind else TASK
    name = text.rpartition(".")[2] if kind == "module" else PurePath(text).stem
    return re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100] or TASK


def arguments_of(script: Mapping[str, Any], *, values: Mapping[str, str]) -> list[str]:
    """The arguments of the script: `script.words`, then `script.arguments` in its style.

    values: the text for each of PLACEHOLDERS.
    """
    named = [
        word
        for key, value in flatten(script["arguments"]).items()
        for word in _words_of(key, value, style=script["style"])
    ]
    return [fill(word, values) for word in (*script["words"], *named)]


def absolute(text: str) -> Path:
    """The absolute path of a path that the user typed, which may be relative or start with `~`."""
    return Path(os.path.expanduser(text)).absolute()


def resume_words(
    script: Mapping[str, Any], *, values: Mapping[str, str], folder: Path
) -> tuple[list[str], Path | None]:
    """The words of `script.resume_arguments`; none if a path among them does not exist, which is returned.

    folder: the working directory, where relative paths start.
    """
    arguments = [fill(word, values) for word in shlex.split(script["resume_arguments"] or "")]
    paths = [folder / path for word in arguments if "/" in (path := word.rpartition("=")[2])]
    for needed in paths:  # an NFS client may remember that a file was missing until the folder is listed
        with suppress(OSError):
            os.listdir(needed.parent)
    missing = next((needed for needed in paths if not needed.exists()), None)
    return arguments if missing is None else [], missing


def fill(word: str, values: Mapping[str, str]) -> str:
    """Replace the placeholders. `{{rank}}` gives `{rank}`; other braces stay."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}|{names}", lambda match: match[1] or values[match[0]], word)


def _words_of(key: str, value: Any, *, style: str) -> Iterator[str]:
    """The words of one argument in a style.

    In the style with a space, true gives a flag without a value, and false and null give nothing.
    """
    if value == {}:
        return
    dashes, _, separator = style.partition("key")
    name = dashes + key
    if separator == " value":
        if value is not None and value is not False:
            yield name
            yield from () if value is True else map(str, value if isinstance(value, list) else [value])
    elif style == "key=value":  # Hydra reads true, false and null
        yield f"{name}={hydra_value(value) if not isinstance(value, float | str) else value}"
    else:  # Python's literals, as nanoGPT reads them
        yield f"{name}={value}"


def mentions(path: Path, pattern: re.Pattern[bytes]) -> bool:
    """Whether a Python file, or a module beside it that it imports, matches the pattern."""
    contents = [beginning(path)]
    for name in set(_IMPORT.findall(contents[0])):
        contents.append(beginning(path.parent / f"{name.decode()}.py"))
    return any(map(pattern.search, contents))


def beginning(path: Path) -> bytes:
    """The first bytes of a file; none if it can't be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""


def may_mention(path: Path, pattern: re.Pattern[bytes]) -> bool:
    """Whether a Python file matches the pattern, or imports a module beside it, which may match it."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
        beside = {entry.stem for entry in path.parent.iterdir()}
    except OSError:
        return True
    return bool(pattern.search(content)) or any(name.decode() in beside for name in _IMPORT.findall(content))
