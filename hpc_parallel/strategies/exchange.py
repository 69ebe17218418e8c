"""Collectives for plain values, sent as JSON; torch's object collectives use pickle.

Loading a pickle executes code, and the sockets of gloo and NCCL do not authenticate the sender.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.record.safe_read import parse_json

MAX_BYTES = 2**28  # of one rank's value
CPU = torch.device("cpu")


class ExchangeError(RuntimeError):
    """A received message is not a value that a rank sends."""


class FollowerError(RuntimeError):
    """Raised on the ranks that end because of an error on another rank."""


def all_gather(
    value: Any, *, group: dist.ProcessGroup | None = None, device: torch.device = CPU
) -> list[Any]:
    """Returns the values of all ranks, in the order of `group`. Works without a process group too.

    `value` must be valid JSON: no NaN, no infinity; tuples come back as lists. `device` is one that the
    group's backend supports.

    Raises ExchangeError if a message is malformed.
    """
    if not dist.is_initialized():
        return [value]
    content = _encode(value, device)
    size = torch.tensor([len(content)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [_checked_length(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    rows = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(rows, padded, group=group)
    return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]


def all_gather_numbers(values: list[float], *, device: torch.device) -> list[list[float]]:
    """Returns [value][rank] in one collective. Works without a process group too."""
    local = torch.tensor(values, dtype=torch.float64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [[value] for value in local.tolist()]
    all_ranks = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, local)
    table: Tensor = torch.stack(all_ranks, dim=1)
    return table.tolist()


def broadcast(value: Any, *, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> Any:
    """Returns the value of the first rank of `group` on all its ranks; the other ranks' `value` is ignored.

    Raises ExchangeError if the message is malformed.
    """
    first = dist.get_rank(group) == 0
    content = _encode(value, device) if first else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    if not first:
        content = torch.empty(_checked_length(size), dtype=torch.uint8, device=device)
    dist.broadcast(content, group=group, group_src=0)
    return _decode(content)


def send(
    value: Any, *, target: int, group: dist.ProcessGroup | None = None, device: torch.device = CPU
) -> None:
    """Send `value` to the rank `target` of `group`, which must call `receive`."""
    content = _encode(value, device)
    dist.send(torch.tensor([len(content)], device=device), group=group, group_dst=target)
    dist.send(content, group=group, group_dst=target)


def receive(*, source: int, group: dist.ProcessGroup | None = None, device: torch.device = CPU) -> Any:
    """Returns the value that the rank `source` of `group` sends.

    Raises ExchangeError if the message is malformed.
    """
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, group=group, group_src=source)
    content = torch.empty(_checked_length(size), dtype=torch.uint8, device=device)
    dist.recv(content, group=group, group_src=source)
    return _decode(content)


def _encode(value: Any, device: torch.device) -> Tensor:
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _checked_length(size: Tensor) -> int:
    length = int(size.item())
    if not 0 < length <= MAX_BYTES:
        raise ExchangeError(f"a rank announced a value of {length} bytes, not 1 to {MAX_BYTES}.")
    return length


def _decode(content: Tensor) -> Any:
    try:
        return parse_json(content.cpu().numpy().tobytes().decode())
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"a rank sent invalid JSON: {' '.join(str(error).split())[:200]}") from error
