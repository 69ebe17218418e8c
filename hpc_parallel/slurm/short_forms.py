"""Slurm's short forms: host lists, ranges of numbers, ranks per node, GPUs of a node, times.

They also stand in logs and files that anyone may have written, so an expanded list has at most `MOST` items.
"""

from __future__ import annotations

import math
import re
from itertools import product

MOST = 2**20  # names or numbers in a list: no cluster has more hosts, and no job more ranks
_LONGEST_NAME = 255  # of a host
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18})(?::(\d{1,18}))?)?", re.ASCII)
_COUNT = re.compile(r"(\d{1,18})(?:\(x(\d{1,18})\))?", re.ASCII)
_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,(=]+))?[:=](?P<count>\d+)(?=[,(]|$)")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Expand Slurm's node list in its order: n[1-2,07]-ib,login -> n1-ib n2-ib n07-ib login.

    With several brackets the last one varies fastest. Source: scontrol(1), "show hostnames". The package
    python-hostlist could do this too, but its licence is the GPL.

    Raises ValueError if the text is not such a list or is too long.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        literals_and_ranges = re.split(r"\[([^\]]*)\]", item)
        if sum(map(len, literals_and_ranges[::2])) > _LONGEST_NAME:
            raise ValueError(f"a host's name is longer than {_LONGEST_NAME} characters")
        choices: list[list[str]] = []
        for index, part in enumerate(literals_and_ranges):
            choices.append(expand_numbers(part) if index % 2 else [part])
            _require_few(len(hosts) + math.prod(map(len, choices)))
        hosts.extend(map("".join, product(*choices)))
    return tuple(hosts)


def expand_numbers(text: str) -> list[str]:
    """Expand ranges, with the leading zeros of their first number: 2,08-10,0-4:2 -> 2 08 09 10 0 2 4.

    Raises ValueError if the text is not such a list or is too long.
    """
    spans: list[tuple[range, int]] = []
    for item in text.split(","):
        match = _matched(_RANGE, item)
        numbers = range(int(match[1]), int(match[2] or match[1]) + 1, int(match[3] or 1))
        spans.append((numbers, len(match[1])))
    _require_few(sum(len(numbers) for numbers, _ in spans))  # before any of them is expanded
    return [f"{number:0{width}d}" for numbers, width in spans for number in numbers]


def expand_tasks(text: str) -> tuple[int, ...]:
    """Expand Slurm's short form of ranks per node: 2(x2),1 -> 2 2 1. Raises ValueError."""
    tasks: list[int] = []
    for item in text.split(","):
        match = _matched(_COUNT, item)
        count = int(match[2] or 1)
        _require_few(len(tasks) + count)
        tasks.extend([int(match[1])] * count)
    return tuple(tasks)


def _matched(pattern: re.Pattern[str], item: str) -> re.Match[str]:
    match = pattern.fullmatch(item)
    if match is None:
        raise ValueError(f"{item[:40]!r} is neither a number nor a range")
    return match


def _require_few(count: int) -> None:
    if count > MOST:
        raise ValueError(f"it has more than {MOST} items")


def gpus_of(gres: str) -> dict[str, int]:
    """GPU type -> count of a node, from `gpu:a100:4(S:0-1),gpu:1g.10gb:2`. An unnamed type is ""."""
    gpus: dict[str, int] = {}
    for match in _GPUS.finditer(re.sub(r"\([^)]*\)", "", gres)):
        name = match["type"] or ""
        gpus[name] = gpus.get(name, 0) + int(match["count"])
    return gpus


def gpu_count(gres: str, *, gpu_type: str | None) -> int:
    """The GPUs of a node of one type (None: of all types)."""
    gpus = gpus_of(gres)
    return sum(gpus.values()) if gpu_type is None else gpus.get(gpu_type, 0)


def seconds_of(time: str) -> float | None:
    """Convert Slurm's time formats (`90`, `90:00`, `1:30:00`, `2-12`, `1-06:30:00`); None for a word."""
    match = _TIME.fullmatch(time)
    if match is None:
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is not None:  # days-hours[:minutes[:seconds]]
        return 86400.0 * days + 3600 * first + 60 * second + third
    if match[4] is not None:  # hours:minutes:seconds
        return 3600.0 * first + 60 * second + third
    return 60.0 * first + second  # minutes[:seconds]


def minutes_of(time: str) -> int | None:
    """`seconds_of` in minutes, rounded up."""
    seconds = seconds_of(time)
    return None if seconds is None else math.ceil(seconds / 60)
