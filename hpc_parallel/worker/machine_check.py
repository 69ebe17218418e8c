"""`task=preflight`: measure devices, storage, and the links of all hosts, and name what is slow."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.schema import PreflightTaskConfig, RunConfig
from hpc_parallel.profiling.links import Pair, rounds, slow_hosts, slow_pairs
from hpc_parallel.record import attempts
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.strategies import exchange
from hpc_parallel.supervise.preflight_findings import SLOW, Finding
from hpc_parallel.worker.preflight import SIDES, matrix_times_s
from hpc_parallel.worker.run_plots import draw_plots
from hpc_parallel.worker.session import complete

MOST_TRIES = 3  # of all links, while one seems slow
REPEATS = 3
SLOW_READ = 4.0  # times slower than the median: file systems vary more than links
COPIED_BYTES = 2**28
BLOCK_BYTES = 2**22
NODE = ", node "  # between the name of a machine and a number; no host name has it


def check_machine(
    config: RunConfig,
    *,
    values: dict[str, Any],
    folder: RunFolder,
    device: torch.device,
    environment: Mapping[str, str],
) -> None:
    """Measure as `config.task` says, on all ranks. Rank 0 writes `machine_check.json` and `summary.json`."""
    task = config.task
    assert isinstance(task, PreflightTaskConfig)
    began = time.monotonic()
    rank = dist.get_rank()
    if rank == 0:
        attempts.begin(folder, step=0, environment=environment)
    names = host_names(config)
    hosts = list(dict.fromkeys(names))
    first_ranks = [names.index(host) for host in hosts]
    matrix_s = matrix_times_s(device)
    flops = [2 * SIDES[device.type] ** 3 / time_s for time_s in matrix_s]
    copies = exchange.all_gather(copy_rates(device))
    reads = read_rates(Path(task.storage or folder.path), names=names, size_bytes=task.read_bytes)
    inside = inside_rates(config, device=device, size_bytes=task.message_bytes)
    rates = link_rates(first_ranks, device=device, size_bytes=task.message_bytes)
    if rank == 0:
        found = [*slow_devices(names, matrix_s), *slow_storage(reads), *slow_links(hosts, rates)]
        if simulated := any(NODE in name for name in names):  # nodes that share the cores of one machine
            found = []
        write_json(folder.machine_check, {
            "device": device.type, "hosts": hosts,
            "ranks": [{"host": host, "flops": rate, **copied}
                      for host, rate, copied in zip(names, flops, copies, strict=True)],
            "reads_bytes_per_s": reads, "inside_busbw_bytes_per_s": dict(zip(hosts, inside, strict=True)),
            "links": [{"hosts": [hosts[a], hosts[b]], "bytes_per_s": rate} for (a, b), rate in rates.items()],
            "findings": [finding.as_record() for finding in found], "judged": not simulated,
        })  # fmt: skip
    complete(values, folder=folder, lines=[], writers=[])
    if rank == 0:
        print(*results(folder, read_json(folder.summary) or {}), sep="\n", flush=True)
        draw_plots(folder, lasted_s=time.monotonic() - began)


def host_names(config: RunConfig) -> list[str]:
    """The host of each rank, by rank; with a number where one machine plays several nodes."""
    names = exchange.all_gather(socket.gethostname())
    per_node = len(names) // config.nodes
    if len(set(names)) == config.nodes:
        return names
    return [f"{name}{NODE}{rank // per_node + 1}" for rank, name in enumerate(names)]


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second from the host to the device, of pinned and of pageable memory; empty on CPUs."""
    if device.type == "cpu":
        return {}
    rates = {}
    for name in ("pinned", "pageable"):
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=name == "pinned")
        target = torch.empty_like(source, device=device)
        copy = partial(target.copy_, source, non_blocking=True)
        rates[f"{name}_bytes_per_s"] = COPIED_BYTES / fastest_s(copy, device=device)
    return rates


def read_rates(storage: Path, *, names: Sequence[str], size_bytes: int) -> dict[str, dict[str, float]]:
    """Host -> number of processes that read at the same time -> bytes per second of all of them.

    Each rank reads a file of its own, which is not in the page cache. A collective call.

    names: host of each rank. Raises OSError.
    """
    rank = dist.get_rank()
    place = sum(host == names[rank] for host in names[:rank])  # among the ranks of this host
    most = max(names.count(host) for host in names)
    table: dict[str, dict[str, float]] = {host: {} for host in dict.fromkeys(names)}
    with tempfile.TemporaryFile(dir=storage) as file:
        for _ in range(size_bytes // BLOCK_BYTES):
            file.write(os.urandom(BLOCK_BYTES))
        file.flush()
        os.fsync(file.fileno())
        for readers in powers(most):
            dist.barrier()
            took_s = read_s(file.fileno()) if place < readers else 0.0
            times = exchange.all_gather(took_s)
            for host in table:
                slowest_s = max(time_s for time_s, name in zip(times, names, strict=True) if name == host)
                count = min(readers, names.count(host))
                table[host][str(count)] = count * size_bytes // BLOCK_BYTES * BLOCK_BYTES / slowest_s
    return table


def powers(most: int) -> Iterator[int]:
    """Yields 1, 2, 4, ... and `most`."""
    count = 1
    while count < most:
        yield count
        count *= 2
    yield most


def read_s(file: int) -> float:
    """The seconds to read a file from the storage."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # drops it from the page cache
    os.lseek(file, 0, os.SEEK_SET)
    started = time.perf_counter()
    while os.read(file, BLOCK_BYTES):
        pass
    return time.perf_counter() - started


def inside_rates(config: RunConfig, *, device: torch.device, size_bytes: int) -> list[float | None]:
    """Host -> bus bandwidth of an all-reduce of its ranks, all hosts at the same time; None for one rank."""
    per_node = dist.get_world_size() // config.nodes
    if per_node < 2:
        return [None] * config.nodes
    ranks = torch.arange(dist.get_world_size()).reshape(config.nodes, per_node)
    mesh = dist.DeviceMesh(device.type, ranks, mesh_dim_names=("across nodes", "inside a node"))
    group = mesh["inside a node"].get_group()
    array = torch.ones(size_bytes // 4, device=device)
    time_s = fastest_s(lambda: dist.all_reduce(array.fill_(1.0), group=group), device=device)
    rates = exchange.all_gather(array.nbytes / time_s * 2 * (per_node - 1) / per_node)
    return [min(rates[at : at + per_node]) for at in range(0, len(rates), per_node)]


def link_rates(first_ranks: Sequence[int], *, device: torch.device, size_bytes: int) -> dict[Pair, float]:
    """Pair of hosts -> bytes per second in each direction, both at the same time; a collective call.

    All pairs of a round exchange at the same time. While a link seems slow, all are measured again, and the
    fastest time of each counts, because noise seldom comes three times to the same one.

    first_ranks: the first rank of each host.
    """
    rank = dist.get_rank()
    send, receive = (torch.ones(size_bytes // 4, device=device) for _ in range(2))
    best: dict[Pair, float] = {}
    for _ in range(MOST_TRIES):
        for pairs in rounds(len(first_ranks)):
            peers = {first_ranks[a]: first_ranks[b] for a, b in pairs}
            peers |= {other: one for one, other in peers.items()}
            dist.barrier()
            own_s = 0.0
            if (peer := peers.get(rank)) is not None:
                own_s = fastest_s(partial(swap, send, receive, peer), device=device)
            times = exchange.all_gather(own_s)
            for pair in pairs:
                slowest_s = max(times[first_ranks[host]] for host in pair)
                best[pair] = max(best.get(pair, 0.0), send.nbytes / slowest_s)
        if not slow_hosts(best) and not slow_pairs(best):
            break
    return best


def swap(send: Tensor, receive: Tensor, peer: int) -> None:
    """Send to the peer and receive from it at the same time."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, send, peer), dist.P2POp(dist.irecv, receive, peer)]
    )
    for work in works:
        work.wait()


def fastest_s(run: Callable[[], object], *, device: torch.device) -> float:
    """The shortest of REPEATS times in seconds, after one that connects the ranks."""
    times = []
    for _ in range(REPEATS + 1):
        synchronize(device)
        started = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slow_devices(names: Sequence[str], matrix_s: Sequence[float]) -> Iterator[Finding]:
    """names: host of each rank; matrix_s: the time of a product on each."""
    usual_s = median_low(matrix_s)
    for rank, (host, time_s) in enumerate(zip(names, matrix_s, strict=True)):
        if time_s > SLOW * usual_s:
            times = f"{time_s * 1e3:.1f} ms, and {usual_s * 1e3:.1f} elsewhere"
            yield Finding(host, f"rank {rank}: a matrix product takes {times}")


def slow_storage(reads: Mapping[str, Mapping[str, float]]) -> Iterator[Finding]:
    """reads: of `read_rates`; the rate with most processes counts."""
    most = {host: list(rates.values())[-1] for host, rates in reads.items()}
    usual = median(most.values())
    for host, rate in most.items():
        if rate * SLOW_READ < usual and len(most) > 2:
            yield Finding(host, f"reads {rate / 1e6:.0f} MB/s, and {usual / 1e6:.0f} elsewhere")


def slow_links(hosts: Sequence[str], rates: Mapping[Pair, float]) -> Iterator[Finding]:
    """rates: of `link_rates`. A single slow link accuses no host, so its finding is not harmful."""
    usual = median(rates.values()) / 1e9 if rates else 0.0
    for host, rate in slow_hosts(rates).items():
        yield Finding(hosts[host], f"its links carry {rate / 1e9:.3f} GB/s, and others {usual:.3f}")
    for (a, b), rate in slow_pairs(rates).items():
        what = f"the link to {hosts[b]} carries {rate / 1e9:.3f} GB/s, and others {usual:.3f}"
        yield Finding(hosts[a], what, harmful=False)
