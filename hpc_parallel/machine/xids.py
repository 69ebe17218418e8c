"""Xids: the errors that NVIDIA's driver reports of a GPU, each with a number.

NVML keeps no count of Xids. The kernel log has a line for each Xid since the machine started, but many sites
hide this log from users. NVML reports only Xids that happen after a process has asked for them.

Numbers: NVIDIA, "Xid Errors" (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNEL_LOG = Path("/dev/kmsg")
RECORD_BYTES = 8192  # no record of the kernel is longer
LONGEST_READ_S = 0.5
MOST_KINDS = 64  # pairs of a device and a number
MOST_EVENTS = 100

HARMFUL, REPORTED, PROGRAM = "harmful", "reported", "program"


@dataclass(frozen=True)
class Meaning:
    """harm: HARMFUL, REPORTED (no harm yet), or PROGRAM (usually the fault of a program, not of the GPU)."""

    text: str
    harm: str


MEANINGS = {
    13: Meaning("a program did what the GPU can't do", PROGRAM),
    31: Meaning("a program used an invalid address", PROGRAM),
    43: Meaning("a program failed and its work was stopped", PROGRAM),
    45: Meaning("the work of a program was removed, because it ended or after another error", PROGRAM),
    48: Meaning("a memory error of two bits, which ECC can't correct", HARMFUL),
    62: Meaning("the internal controller of the GPU halted", HARMFUL),
    63: Meaning("a bad row of the GPU's memory will be replaced at the next reset", REPORTED),
    64: Meaning("a bad row of the GPU's memory could not be replaced", HARMFUL),
    74: Meaning("an NVLink failed", HARMFUL),
    79: Meaning("the GPU fell off the bus", HARMFUL),
    94: Meaning("a memory error that ECC can't correct; one program was stopped", HARMFUL),
    95: Meaning("a memory error that ECC can't correct and that may have reached other programs", HARMFUL),
    119: Meaning("the system processor of the GPU (GSP) did not answer", HARMFUL),
}
# A record is `priority,sequence,microseconds since the start,flags;text`. The text has the bus address and
# the number.
_LINE = re.compile(
    rb"^\d+,\d+,(?P<time_us>\d+),[^;\n]*;\s*NVRM: Xid \((?:PCI:)?(?P<bus>[0-9a-fA-F:.]+)[^)\n]*\): "
    rb"(?P<number>\d{1,6})\b",
    re.MULTILINE,
)


def describe(number: int) -> str:
    """`Xid 79 (the GPU fell off the bus)`."""
    meaning = MEANINGS.get(number)
    return f"Xid {number} ({meaning.text})" if meaning else f"Xid {number}"


def bus_address(address: str) -> str:
    """`0000:1a:00` for any of `PCI:0000:1A:00`, `00000000:1A:00.0`: domains have four or eight digits."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def logged_xids(path: Path = KERNEL_LOG) -> dict[str, Any]:
    """Facts as JSON: `kernel_log` (`read`, or why not) and `seen`, see `parse_xids`."""
    try:
        content = _read(path)
    except OSError as error:
        return {"kernel_log": f"not readable: {error.strerror or error}", "seen": []}
    return {"kernel_log": "read", "seen": parse_xids(content, now_s=time.monotonic())}


def parse_xids(content: bytes, *, now_s: float) -> list[dict[str, Any]]:
    """`bus`, `xid`, `count` and `last_s_ago` for each pair of a device and an Xid number.

    content: records of /dev/kmsg; now_s: seconds since the machine started.
    """
    seen: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _LINE.finditer(content):
        bus, number = bus_address(line["bus"].decode()), int(line["number"])
        ago_s = max(0.0, now_s - int(line["time_us"]) / 1e6)
        kind = seen.setdefault((bus, number), {"bus": bus, "xid": number, "count": 0, "last_s_ago": ago_s})
        kind["count"] += 1
        kind["last_s_ago"] = min(ago_s, kind["last_s_ago"])
    return list(seen.values())[-MOST_KINDS:]


def _read(path: Path) -> bytes:
    """The records that the kernel log has now, read without waiting for the next one. Raises OSError."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    records: list[bytes] = []
    ends_s = time.monotonic() + LONGEST_READ_S
    try:
        while time.monotonic() < ends_s:
            try:
                records.append(os.read(file, RECORD_BYTES))
            except BlockingIOError:  # no more records
                break
            except OSError as error:
                if error.errno != errno.EPIPE:  # EPIPE: a record was overwritten
                    raise
                continue
            if not records[-1]:
                break
    finally:
        os.close(file)
    return b"".join(records)


class XidEvents:
    """The Xids of one GPU from now on. `state` is `watched`, or says why not."""

    def __init__(self, nvml: Any, uuid: str | None) -> None:
        """nvml: the module pynvml, or None; uuid: None for a CPU."""
        self._nvml, self._set = nvml, None
        if nvml is None or uuid is None:
            self.state = "not watched: no NVIDIA GPU is used" if uuid is None else "not watched: no NVML"
            return
        try:
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
        except nvml.NVMLError as error:  # MIG, an old driver, or no permission
            self.state = f"not watched: {error}"
        else:
            self.state, self._set = "watched", events

    def new(self) -> list[int]:
        """The Xid numbers since the last call. This method does not wait."""
        numbers: list[int] = []
        if self._set is not None:
            with suppress(self._nvml.NVMLError):  # the time-out of 0 ms, when there are no more
                while len(numbers) < MOST_EVENTS:
                    numbers.append(int(self._nvml.nvmlEventSetWait(self._set, 0).eventData))
        return numbers


def event_records(numbers: Sequence[int], *, bus: str) -> list[dict[str, Any]]:
    """Events of this moment in the form of `parse_xids`."""
    return [
        {"bus": bus, "xid": number, "count": numbers.count(number), "last_s_ago": 0.0}
        for number in dict.fromkeys(numbers)
    ]
