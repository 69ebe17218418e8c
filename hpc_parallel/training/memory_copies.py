"""Copies of each rank's state in the memory of its host and of another host, for a restart in the same job.

Every `training.memory_checkpoint_every` steps each rank copies its state to a file in its host's memory. A
thread then sends the copy to a rank of the next host, over a group of its own. Two steps are kept, so that
one of them is complete at any time. A restart continues from a step only if the hosts have the parts of all
ranks of this step, all written by the same start. Z. Wang et al., "Gemini: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints", SOSP 2023, keep two copies in the same way.
"""

from __future__ import annotations

import json
import mmap
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_128 as Digest

from hpc_parallel.layout.step_facts import MEMORY_STEPS
from hpc_parallel.problems import print_warning
from hpc_parallel.record import host_memory
from hpc_parallel.record.safe_read import DamagedError, list_folder, open_regular
from hpc_parallel.record.safe_write import map_pages, write_text
from hpc_parallel.record.typed import build, read_if_possible
from hpc_parallel.strategies import exchange
from hpc_parallel.training.checkpoint import OPTIMIZER, StateDict, random_state, set_random_state
from hpc_parallel.training.replicas import digest, holding
from hpc_parallel.training.rounding import local_part
from hpc_parallel.training.stager import Pinning, cuda_pinning, warn_of_pageable

ALIGNED = 64  # bytes: where a tensor may begin
_MARK_EVERY_S = 2.0
_NO_CHECKSUM = "0" * 32  # has the length of a checksum, so that the length of the record is known before


class CopyKey(NamedTuple):
    """Whose part of which step a copy is. start: the start of the ranks that wrote it."""

    step: int
    start: str
    rank: int


class CopiedTensor(NamedTuple):
    """A tensor in a copy. local: the shape of the rank's part. begin: its first byte."""

    name: str
    dtype: str
    shape: list[int]
    local: list[int]
    begin: int


@dataclass(frozen=True)
class CopyRecord:
    """What stands beside a copy; written after it. layout: which part of the model the rank holds."""

    step: int
    start: str
    rank: int
    layout: int
    bytes: int
    xxh3_128: str
    pieces: tuple[CopiedTensor, ...]

    @property
    def key(self) -> CopyKey:
        return CopyKey(self.step, self.start, self.rank)


@dataclass(frozen=True)
class CopiedPart:
    """This rank's part of a step, whole and undamaged. content: its bytes."""

    record: CopyRecord
    content: Tensor

    @property
    def optimizer_sizes(self) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
        """As `checkpoint.optimizer_sizes`."""
        return {
            piece.name.removeprefix(OPTIMIZER): (torch.Size(piece.shape), getattr(torch, piece.dtype))
            for piece in self.record.pieces
            if piece.name.startswith(OPTIMIZER)
        }

    @torch.no_grad()
    def fill(self, state: StateDict, *, device: torch.device) -> None:
        """Fill `state` and restore the random generators. Raises RuntimeError for another state."""
        generators = random_state(device)
        tensors = state | generators
        pieces = {piece.name: piece for piece in self.record.pieces}
        shapes = {name: list(local_part(tensor).shape) for name, tensor in tensors.items()}
        if shapes != {name: piece.local for name, piece in pieces.items()}:
            raise RuntimeError(f"the copy of step {self.record.step} in memory is of another state")
        for name, tensor in tensors.items():
            local_part(tensor).copy_(view(self.content, pieces[name]))
        set_random_state(generators, device=device)


class MemoryCopies:
    """Writes the copies of this rank and of those that it keeps a copy for, and finds them after a restart.

    All ranks must call each method together. A copy that can't be kept is no reason to end a training: there
    is a warning, and no further copy.
    """

    def __init__(
        self, folder: Path, *, host: str, every: int, layout: int, device: torch.device,
        group: dist.ProcessGroup, start: str, state: Callable[[], StateDict],
    ) -> None:  # fmt: skip
        """`folder`: the copies of this host.

        host: where this rank runs. layout: of `layout_of_state`. group: all ranks, on the CPU, for copies
        only. start: a text that no earlier start of the run had, the same on all ranks. state: returns what
        is copied.
        """
        self._folder, self._group, self._start, self._every = folder, group, start, every
        self._rank, self._device, self._state = dist.get_rank(), device, state
        self._layouts: list[int] = exchange.all_gather(layout)
        targets = partners(exchange.all_gather(host))
        self.target = targets[self._rank]  # the rank that keeps the other copy
        self._sources = [rank for rank, target in enumerate(targets) if target == self._rank]
        self._sizes: dict[int, list[list[float]]] = {}  # [bytes, characters of the record][rank], by slot
        self._pages: dict[Path, Tensor] = {}
        self._pinning: Pinning | None = cuda_pinning(device) if device.type == "cuda" else None
        self._pinned: dict[Path, int] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memory copies")
        self._pending: Future[None] | None = None
        self._on = True

    def due(self, step: int) -> bool:
        return self._on and step % self._every == 0

    def keep(self, step: int, *, on_wait: Callable[[], object] = lambda: None) -> None:
        """Copy the state after `step` to this host's memory, and begin to send it to another host.

        Waits for the copy before. `on_wait` is called every few seconds meanwhile.
        """
        self._finish(on_wait)
        if not self._on:
            return
        tensors = self._state() | random_state(self._device)
        pieces, size = described(tensors)
        record = CopyRecord(
            step, self._start, self._rank, self._layouts[self._rank], size, _NO_CHECKSUM, tuple(pieces)
        )
        slot = step // self._every % MEMORY_STEPS
        if not self._make_room(slot, size=size, characters=len(encoded(record))):
            return
        content = self._pages[self._path("own", self._rank, slot)]
        for piece, tensor in zip(pieces, tensors.values(), strict=True):
            view(content, piece).copy_(local_part(tensor), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._pending = self._thread.submit(self._complete, slot, record, content)

    def close(self, on_wait: Callable[[], object] = lambda: None) -> None:
        """Wait for the last copy, and let go of the memory. The files stay."""
        self._finish(on_wait)
        self._thread.shutdown()
        for path in list(self._pinned):
            self._unpin(path)
        self._pages.clear()

    def remove(self) -> None:
        """Remove the copies from the memory of this host, after `close`."""
        host_memory.remove(self._folder.parent.name)

    def newest(self) -> CopiedPart | None:
        """This rank's part of the newest step that is complete; None on all ranks if none is.

        A rank without a copy of its part on its host receives it from a rank of another host.
        """
        held = self._held()
        while True:
            table = [[CopyKey(*key) for key in keys] for keys in exchange.all_gather([*held])]
            if (choice := choose(table)) is None:
                if self._rank == 0 and any(table):
                    print("copies in memory: no step has the parts of all ranks", flush=True)
                return None
            part = self._bring(*choice, held=held)
            if all(exchange.all_gather(part is not None)):
                return part

    def _held(self) -> dict[CopyKey, Path]:
        """The copies in this host's memory that are of this layout, whole or damaged."""
        paths = sorted(Path(entry.path) for entry in list_folder(self._folder))
        records = [(read_if_possible(CopyRecord, path), path) for path in paths if path.suffix == ".json"]
        return {
            record.key: path.with_suffix("")
            for record, path in records
            if record and record.rank < len(self._layouts) and record.layout == self._layouts[record.rank]
        }

    def _bring(
        self, step: int, start: str, holders: Sequence[int], *, held: dict[CopyKey, Path]
    ) -> CopiedPart | None:
        """This rank's part from its holder; None if it is damaged, and then `held` no longer has it."""
        part = None
        for rank, holder in enumerate(holders):
            if self._rank not in (rank, holder):
                continue
            key, sent = CopyKey(step, start, rank), None
            if self._rank == holder and (sent := read_part(held[key])) is None:
                del held[key]
            if rank == holder:
                part = sent
            elif self._rank == holder:
                exchange.send(None if sent is None else encoded(sent.record), target=rank, group=self._group)
                if sent is not None:
                    dist.send(sent.content, dst=rank, group=self._group)
            elif (text := exchange.receive(source=holder, group=self._group)) is not None:
                record = build(CopyRecord, json.loads(text))
                assert record is not None
                part = CopiedPart(record, torch.empty(record.bytes, dtype=torch.uint8))
                dist.recv(part.content, src=holder, group=self._group)
        return part

    def _make_room(self, slot: int, *, size: int, characters: int) -> bool:
        """Map the pages of a slot, and forget what was in it. Returns whether all ranks could do it."""
        sizes = exchange.all_gather_numbers([float(size), float(characters)], device=exchange.CPU)
        own = self._path("own", self._rank, slot)
        copies = {rank: self._path("copy", rank, slot) for rank in self._sources}
        for path in (own, *copies.values()):
            record_of(path).unlink(missing_ok=True)
        if sizes == self._sizes.get(slot):
            return True
        problem = None
        try:
            self._map(own, size, pins=True)
            for rank, path in copies.items():
                self._map(path, int(sizes[0][rank]), pins=False)
        except OSError as error:
            problem = f"{self._folder}: {error.strerror}"
        self._sizes[slot] = sizes
        return self._agree(problem)

    def _map(self, path: Path, size: int, *, pins: bool) -> None:
        self._unpin(path)
        self._pages.pop(path, None)
        pages = self._pages[path] = torch.frombuffer(map_pages(path, size), dtype=torch.uint8)
        if not pins or self._pinning is None:
            return
        if code := self._pinning.register(pages.data_ptr(), size):
            warn_of_pageable(size, code=code)
        else:
            self._pinned[path] = pages.data_ptr()

    def _unpin(self, path: Path) -> None:
        if self._pinning is not None and (address := self._pinned.pop(path, None)) is not None:
            self._pinning.unregister(address)

    def _complete(self, slot: int, record: CopyRecord, content: Tensor) -> None:
        """In a thread: complete this rank's copy, and exchange copies with other hosts."""
        text = encoded(replace(record, xxh3_128=checksum(content)))
        write_text(record_of(self._path("own", self._rank, slot)), text)
        messages, works = {}, []
        for rank in self._sources:
            length = int(self._sizes[slot][1][rank])
            messages[rank] = torch.empty(length, dtype=torch.uint8)
            pages = self._pages[self._path("copy", rank, slot)]
            works += [dist.irecv(message, src=rank, group=self._group) for message in (messages[rank], pages)]
        if self.target is not None:
            own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
            works += [dist.isend(message, dst=self.target, group=self._group) for message in (own, content)]
        for work in filter(None, works):
            work.wait()
        for rank, message in messages.items():
            write_text(record_of(self._path("copy", rank, slot)), message.numpy().tobytes().decode())
        # Behind it all parts of this step are in memory, so that the other slot may be overwritten.
        dist.barrier(group=self._group)

    def _finish(self, on_wait: Callable[[], object]) -> None:
        """Wait for the copy before this one, which ends on all ranks together unless one of them is lost."""
        if self._pending is None:
            return
        while not wait([self._pending], timeout=_MARK_EVERY_S).done:
            on_wait()
        error, self._pending = self._pending.exception(), None
        self._agree(None if error is None else f"{type(error).__name__}: {error}")

    def _agree(self, problem: str | None) -> bool:
        """Whether no rank has a problem; else this is the last copy."""
        problems = [(rank, text) for rank, text in enumerate(exchange.all_gather(problem)) if text]
        if problems:
            self._on = False
            if self._rank == 0:
                rank, text = problems[0]
                print_warning(f"rank {rank} can't keep a copy in memory ({text}); from now on there are none")
        return self._on

    def _path(self, kind: str, rank: int, slot: int) -> Path:
        return self._folder / f"{kind}-{rank}-{slot}"


def partners(hosts: Sequence[str]) -> list[int | None]:
    """For each rank, a rank of the next host, which keeps a second copy; None if there is no other host."""
    members: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    if len(members) == 1:
        return [None] * len(hosts)
    groups = list(members.values())
    targets: list[int | None] = [None] * len(hosts)
    for group, following in zip(groups, [*groups[1:], groups[0]], strict=True):
        for index, rank in enumerate(group):
            targets[rank] = following[index % len(following)]
    return targets


def choose(held: Sequence[Sequence[CopyKey]]) -> tuple[int, str, list[int]] | None:
    """The newest step of one start that has the parts of all ranks, and who holds each part; None without.

    held: the copies in the memory of each rank's host. A rank reads its own part itself if it can.
    """
    holders: dict[tuple[int, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for holder, keys in enumerate(held):
        for key in keys:
            holders[key.step, key.start][key.rank].append(holder)
    ranks = range(len(held))
    complete = [found for found, by_rank in holders.items() if by_rank.keys() >= set(ranks)]
    if not complete:
        return None
    step, start = max(complete)
    by_rank = holders[step, start]
    return step, start, [
        rank if rank in by_rank[rank] else by_rank[rank][rank % len(by_rank[rank])] for rank in ranks
    ]  # fmt: skip


def layout_of_state(state: StateDict, *, data: str) -> int:
    """A number that differs if the rank holds another part of the model, of another world, or other data."""
    holdings = [[name, shape, parts] for name, shape, _, parts in (holding(*item) for item in state.items())]
    return digest([data, dist.get_world_size(), dist.get_rank(), holdings])


def described(state: StateDict) -> tuple[list[CopiedTensor], int]:
    """Where each tensor of `state` stands in a copy, and the bytes of all."""
    pieces, end = [], 0
    for name, tensor in state.items():
        local = local_part(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        pieces.append(CopiedTensor(name, dtype, list(tensor.shape), list(local.shape), end))
        end += -(-local.nbytes // ALIGNED) * ALIGNED
    return pieces, end


def view(content: Tensor, piece: CopiedTensor) -> Tensor:
    """The tensor at its place in a copy."""
    dtype: torch.dtype = getattr(torch, piece.dtype)
    count = torch.Size(piece.local).numel()
    return content[piece.begin : piece.begin + count * dtype.itemsize].view(dtype).view(piece.local)


def read_part(path: Path) -> CopiedPart | None:
    """A copy and its record; None if one of them is not what was written."""
    record = read_if_possible(CopyRecord, record_of(path))
    try:
        with open_regular(path) as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch asks for writable memory
    except (OSError, ValueError, DamagedError):
        return None
    content = torch.frombuffer(pages, dtype=torch.uint8)
    if record is None or len(content) != record.bytes or checksum(content) != record.xxh3_128:
        return None
    return CopiedPart(record, content)


def checksum(content: Tensor) -> str:
    return Digest(content.numpy().data).hexdigest()


def encoded(record: CopyRecord) -> str:
    return json.dumps(asdict(record), separators=(",", ":"))


def record_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
