"""Read files that anyone may have written: run folders, sweep folders, checkpoints, weights.

Each function opens without blocking, reads regular files only, and limits the size and the nesting depth
before a parser sees a byte. A file that fails raises DamagedError with the reason. Nothing is executed.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import yaml

MIB = 2**20
DOCUMENT_BYTES = 8 * MIB  # of one JSON file: parsed, it takes up to 20 times its size in memory
YAML_BYTES = MIB // 4  # of one YAML file, which takes ten times longer to parse
LINES_BYTES = 32 * MIB  # of one file of JSON lines, all of which are kept in memory
MAX_LINES = 500_000
MAX_DEPTH = 64  # config.yaml nests 6 deep
MAX_TABLES = 500_000  # tables and lists in one JSON text: an empty one takes 30 times its bytes in memory
MAX_YAML_TABLES = 5_000
MAX_INTEGER = 2**63 - 1  # larger integers have no use here, and str() refuses those of over 4,300 digits

T = TypeVar("T")
TAIL_BYTES = MIB  # read from the end of a file
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # with libyaml, it is eight times as fast
# A text without an end counts to the end: otherwise each quote in it would be searched from again.
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
# YAML that may nest deeply or use aliases: many brackets or indicators, deep indents, anchors, tags.
_YAML_SUSPECT = re.compile(r"[&*!]|^ {64}|(?:[-?:][ \t]+){16}", re.MULTILINE)


class DamagedError(ValueError):
    """A file that can't be used. `path` names it; `reason` says why in a few words."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} can't be read: {reason}")
        self.path, self.reason = path, reason

    def __reduce__(self) -> tuple[type[DamagedError], tuple[Path, str]]:
        return type(self), (self.path, self.reason)


@contextmanager
def open_regular(path: Path, *, follow: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file to read bytes, without waiting for a FIFO or a device.

    follow: accept a link at `path` itself. Use it only for a path that the user typed: a link in another
    user's folder can lead anywhere.

    Raises FileNotFoundError if there is no file, and DamagedError if it is not a regular file or can't be
    opened.
    """
    try:
        before = os.stat(path, follow_symlinks=follow)  # some devices act when they are opened
        _require_regular(path, before)
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        handle = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(path, getattr(error, "strerror", None) or str(error)) from error
    with os.fdopen(handle, "rb") as file:
        _require_regular(path, os.fstat(handle))
        yield file


def read_bytes(path: Path, *, limit_bytes: int = DOCUMENT_BYTES, follow: bool = False) -> bytes:
    """The content of a regular file. Raises FileNotFoundError, and DamagedError if it is too large."""
    with open_regular(path, follow=follow) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            content = b"" if size > limit_bytes else file.read(limit_bytes + 1)
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from error
    if max(size, len(content)) > limit_bytes:
        limit = f"{limit_bytes // MIB} MiB" if limit_bytes >= MIB else f"{limit_bytes // 1024} KiB"
        raise DamagedError(path, f"it has more than {limit}")
    return content


def read_text(path: Path, *, limit_bytes: int = DOCUMENT_BYTES, follow: bool = False) -> str:
    """The content as UTF-8. Raises FileNotFoundError and DamagedError."""
    try:
        return read_bytes(path, limit_bytes=limit_bytes, follow=follow).decode()
    except UnicodeDecodeError as error:
        raise DamagedError(path, f"it is not UTF-8 (byte {error.start})") from error


def read_json(path: Path, *, follow: bool = False) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file does not exist (yet). Raises DamagedError."""
    try:
        text = read_text(path, follow=follow)
    except FileNotFoundError:
        return None
    return _object(path, lambda: parse_json(text))


def read_yaml(path: Path) -> dict[str, Any]:
    """The table in a YAML file of plain values. Raises FileNotFoundError and DamagedError."""
    text = read_text(path, limit_bytes=YAML_BYTES)
    return _object(path, lambda: parse_yaml(text))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; empty if there is no file.

    Lines that a crash has truncated are left out. Raises DamagedError.
    """
    try:
        content = read_bytes(path, limit_bytes=LINES_BYTES)
    except FileNotFoundError:
        return []
    if content.count(b"\n") > MAX_LINES:
        raise DamagedError(path, f"it has more than {MAX_LINES:,} lines")
    values = (parse_line(line) for line in content.splitlines())
    return [value for value in values if value is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The object in one JSON line; None if it is not an object, or is truncated."""
    try:
        value = parse_json(line.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def parse_json(text: str) -> Any:
    """Parse JSON to plain values: no NaN, no infinity, no integer over 64 bits, at most MAX_DEPTH deep.

    Raises ValueError.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _limit_json(text)
    return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, parse_int=_small)


def parse_yaml(text: str) -> Any:
    """Parse YAML to plain values: finite numbers, no aliases, no tags, at most MAX_DEPTH deep.

    Raises ValueError.
    """
    if text.count("[") + text.count("{") > MAX_DEPTH or _YAML_SUSPECT.search(text):
        _limit_yaml(text)
    try:
        loader = _Loader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    require_plain(value)
    return value


def read_head(path: Path, *, limit_bytes: int) -> bytes:
    """The first bytes of a regular file of any length. Raises FileNotFoundError and DamagedError."""
    with open_regular(path) as file:
        try:
            return file.read(limit_bytes)
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from error


def read_tail(path: Path, *, limit_bytes: int = TAIL_BYTES, start: int = 0) -> bytes:
    """The last bytes of a regular file of any length, from its byte `start` on.

    Raises FileNotFoundError and DamagedError.
    """
    with open_regular(path) as file:
        try:
            file.seek(max(start, file.seek(0, os.SEEK_END) - limit_bytes))
            return file.read(limit_bytes)
        except OSError as error:
            raise DamagedError(path, error.strerror or str(error)) from error


def size_of(path: Path) -> int:
    """The size of a log in bytes; 0 if there is none.

    The log is opened because an NFS client keeps an old size for a minute.
    """
    with suppress(OSError, DamagedError), open_regular(path) as file:
        return file.seek(0, os.SEEK_END)
    return 0


def is_foreign_link(path: Path) -> bool:
    """Whether `path` is a link that another user made to what does not belong to that user.

    It may lead to a private file of this user.
    """
    try:
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode) or status.st_uid in (os.geteuid(), 0):
            return False
        return path.stat().st_uid != status.st_uid
    except (OSError, ValueError):
        return False


def list_folder(path: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; empty if there is none, or if this user may not read it."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (OSError, ValueError):
        return []


def status_of(path: Path) -> os.stat_result | None:
    """The status of the file or folder at `path`; None if it does not exist, or this user has no access.

    `Path.is_file` and `Path.is_dir` of Python 3.11 raise PermissionError inside another user's closed folder.
    """
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def is_file(path: Path) -> bool:
    """Whether `path` leads to a regular file; False if this user has no access."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(path: Path) -> bool:
    """Whether `path` leads to a folder; False if this user has no access."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_real_folder(entry: os.DirEntry[str]) -> bool:
    """Whether the entry is a folder, not a link to one."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _require_regular(path: Path, status: os.stat_result) -> None:
    kinds = {stat.S_ISLNK: "a link", stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe",
             stat.S_ISCHR: "a device", stat.S_ISBLK: "a device", stat.S_ISSOCK: "a socket"}  # fmt: skip
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in kinds.items() if is_kind(status.st_mode)), "special")
        raise DamagedError(path, f"it is {kind}, not a regular file")


def _object(path: Path, parse: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = parse()
    except (ValueError, RecursionError, MemoryError) as error:
        raise DamagedError(path, " ".join(str(error).split())[:200] or type(error).__name__) from error
    if not isinstance(value, dict):
        raise DamagedError(path, f"it holds {_kind(value)}, not a table")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "nothing", list: "a list", str: "a text", bool: "a truth value"}
    return names.get(type(value), "a number")


def _limit_json(text: str) -> None:
    """Check the limits of depth and count; brackets inside strings (a diff, for example) do not count."""
    depth = count = 0
    for token in _JSON_TOKEN.finditer(text):
        character = token[0][0]
        depth += (character in "[{") - (character in "]}")
        count += character in "[{"
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} deep")
        if count > MAX_TABLES:
            raise ValueError(f"it has more than {MAX_TABLES:,} lists and tables")


def _limit_yaml(text: str) -> None:
    """Check the limits from parser events, which libyaml produces without recursion."""
    depth = count = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("it repeats parts of itself (YAML aliases)")
            if tag := getattr(event, "tag", None):
                raise ValueError(f"it has a YAML tag: {tag}")
            starts = isinstance(event, yaml.CollectionStartEvent)
            depth += starts - isinstance(event, yaml.CollectionEndEvent)
            count += starts
            if depth > MAX_DEPTH:
                raise ValueError(f"it nests more than {MAX_DEPTH} deep")
            if count > MAX_YAML_TABLES:
                raise ValueError(f"it has more than {MAX_YAML_TABLES:,} lists and tables")
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def require_plain(value: Any) -> None:
    """Raise ValueError unless `value` holds only finite numbers, 64-bit integers and plain keys.

    The function recurses, so the caller must limit the depth first.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | bool | None):
                raise ValueError(f"it has a key that is no plain value: {key!r}")
            require_plain(key)
            require_plain(item)
    elif isinstance(value, list):
        for item in value:
            require_plain(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("it has a number that is not finite")
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ValueError("it has an integer of more than 64 bits")
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"it has a {type(value).__name__}, which is no plain value")


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"it has {text}, which is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it has {text}, which is too large a number")
    return value


def _small(text: str) -> int:
    if len(text) > 20 or abs(value := int(text)) > MAX_INTEGER:
        raise ValueError("it has an integer of more than 64 bits")
    return value
