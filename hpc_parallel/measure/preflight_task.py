"""`task=preflight`: measure devices, storage, and the links of all hosts, and name what is slow."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.task_schema import PreflightTaskConfig
from hpc_parallel.machine.host_findings import Finding
from hpc_parallel.machine.world import World
from hpc_parallel.measure.direct_storage import direct_rates, missing
from hpc_parallel.measure.preflight_findings import MachineMeasurement, machine_findings, slow_rates
from hpc_parallel.measure.read_scaling import BLOCK_BYTES, rates_by_readers, read_s
from hpc_parallel.planning.collective_times import bus_factor
from hpc_parallel.profiling.link_rates import fastest_s, link_rates
from hpc_parallel.profiling.links import rounds
from hpc_parallel.record import attempts
from hpc_parallel.record.machine_check_table import DirectReads, MeasuredMachine, machine_lines
from hpc_parallel.record.phase import note_phase
from hpc_parallel.record.recorded_preflight import listed_hosts
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.summary_file import Summary
from hpc_parallel.start.start_checks import PreflightError, act_on
from hpc_parallel.start.start_times import matrix_times_s
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.exchange import FollowerError
from hpc_parallel.strategies.mesh import build_host_mesh
from hpc_parallel.training.writers import FileWriter
from hpc_parallel.worker.run_plots import draw_plots
from hpc_parallel.worker.session import TaskContext, complete
from hpc_parallel.worker.time_budget import TimeBudget, advice

MOST_TRIES = 3  # of the all-reduce inside hosts, which is measured again while a host seems slow
COPIED_BYTES = 2**28
NODE = ", node "  # between the name of a machine and a number; no host name has it


def check_machine(context: TaskContext) -> None:
    """Measure as `task` of the configuration says, on all ranks.

    Rank 0 writes `machine_check.json` and `summary.json`; after each part, it writes what is measured so far
    and a line of `metrics.jsonl`.

    Raises PreflightError or FollowerError after that, as `preflight.act` says.
    """
    began = time.monotonic()
    config, folder, rank = context.config, context.folder, dist.get_rank()
    if rank == 0:
        attempts.begin(folder, step=0, environment=context.environment)
    names = host_names(config, context.environment)
    simulated = any(NODE in name for name in names)  # nodes that share the cores of one machine
    check = MachineProbe(config, names=names, folder=folder, device=context.device)
    report = PreflightReport(folder, check, judged=not simulated) if rank == 0 else None
    for number, count, name in check.measure():
        if report is not None:
            report.before(number, count, name)
    findings = [] if simulated else machine_findings(check.measured)
    if report is not None:
        report.end(findings)
        print(*results(folder, Summary()), sep="\n", flush=True)
        draw_plots(folder, lasted_s=time.monotonic() - began)
    dist.barrier()  # a rank that fails ends the others
    act_on(findings, act=config.preflight.act, host=names[rank], hosts=check.hosts)
    complete(context)


class PreflightReport:
    """Writes on rank 0 each part when it is measured, then all parts with the findings."""

    def __init__(self, folder: RunFolder, check: MachineProbe, *, judged: bool) -> None:
        self._folder, self._check, self._judged = folder, check, judged
        self._writer = FileWriter(folder, steps=0)
        self._said: list[str] = []
        self._part = (0, 0)

    def before(self, number: int, count: int, name: str) -> None:
        """Write the part that has ended, and note that the part `name` begins."""
        self._write_part()
        self._part = number, count
        note_phase(self._folder, f"measuring {name}")

    def end(self, findings: Sequence[Finding]) -> None:
        self._write_part()
        self._write(findings=findings, judged=self._judged)

    def _write_part(self) -> None:
        number, count = self._part
        if number == 0:
            return
        lines = machine_lines(self._write(findings=[], judged=None))
        budget = self._check.budget
        left_s = max(0.0, budget.seconds - budget.used_s) if number < count else 0.0
        for line in lines:
            if line not in self._said:
                self._writer.write({
                    "step": number, "steps": count, "measured": [line],
                    "time_left_s": left_s,
                    "time": datetime.now(UTC).isoformat(),
                })  # fmt: skip
        self._said = lines

    def _write(self, *, findings: Sequence[Finding], judged: bool | None) -> MeasuredMachine:
        left_out = None
        if names := self._check.left_out:
            reason = advice(self._check.budget, needed_s=self._check.budget.used_s)
            left_out = f"left out: {', '.join(names)}: {reason}"
        recorded = tuple(finding.recorded for finding in findings)
        measured = replace(
            self._check.measured.recorded(), findings=recorded, judged=judged, left_out=left_out
        )
        measured.write(self._folder)
        return measured


class MachineProbe:
    """Measures one part after another until the time is used up. The storage is last: it may be slow."""

    def __init__(
        self, config: RunConfig, *, names: Sequence[str], folder: RunFolder, device: torch.device
    ) -> None:
        """names: host of each rank."""
        assert isinstance(config.task, PreflightTaskConfig)
        self.config, self.task, self.names, self.device = config, config.task, names, device
        self.storage = Path(config.task.storage or folder.path)
        self.measured = MachineMeasurement(device_type=device.type, names=names)
        self.hosts = self.measured.hosts
        self.budget = TimeBudget(config.task.seconds)
        self.left_out: list[str] = []
        self._parts: dict[str, Callable[[], dict[str, Any]]] = {
            "matrix products": lambda: {"matrix_s": matrix_times_s(device)},
            "copies between host and device": lambda: {"copies": exchange.all_gather(copy_rates(device))},
            "an all-reduce inside each host": self._inside,
            "links between hosts": self._links,
            "reads from the storage": self._reads,
        }

    def measure(self) -> Iterator[tuple[int, int, str]]:
        """Yields the number of a part, their count, and the part's name before it is measured.

        `measured` and `left_out` are the same on all ranks. The first part is always measured.
        """
        for number, (name, part) in enumerate(self._parts.items(), start=1):
            if number > 1 and self._is_late():
                self.left_out.append(name)
                continue
            yield number, len(self._parts), name
            self.measured = replace(self.measured, **part())

    def _is_late(self) -> bool:
        return self.budget.left_s() < 0

    def _inside(self) -> dict[str, Any]:
        rates = inside_rates(self.config, device=self.device, size_bytes=self.task.message_bytes)
        return {"inside": dict(zip(self.hosts, rates, strict=True))}

    def _links(self) -> dict[str, Any]:
        pairs = rounds(len(self.hosts))
        rates = link_rates(
            [self.names.index(host) for host in self.hosts], rounds=pairs, device=self.device,
            size_bytes=self.task.message_bytes, is_late=self._is_late,
        )  # fmt: skip
        if missing := sum(map(len, pairs)) - len(rates):
            self.left_out.append(f"{missing} links between hosts")
        return {"links": rates}

    def _reads(self) -> dict[str, Any]:
        reads, direct = read_rates(
            self.storage, names=self.names, size_bytes=self.task.read_bytes, device=self.device,
            is_late=self._is_late,
        )  # fmt: skip
        return {"reads": reads, "direct": direct}


def host_names(config: RunConfig, environment: Mapping[str, str]) -> list[str]:
    """The host of each rank, by rank. If one machine simulates several nodes, the name has a number."""
    names = exchange.all_gather(World.discover(environment).host)  # the name that Slurm can exclude
    per_node = len(names) // config.nodes
    if len(set(names)) == config.nodes:
        return names
    return [f"{name}{NODE}{rank // per_node + 1}" for rank, name in enumerate(names)]


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes per second between the host and the device, of pinned and of pageable memory; empty on CPUs."""
    if device.type == "cpu":
        return {}
    rates = {}
    on_device = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    for name in ("pinned", "pageable"):
        on_host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=name == "pinned")
        to_device = partial(on_device.copy_, on_host, non_blocking=True)
        to_host = partial(on_host.copy_, on_device, non_blocking=True)
        rates[f"{name}_bytes_per_s"] = COPIED_BYTES / fastest_s(to_device, device=device)
        rates[f"{name}_to_host_bytes_per_s"] = COPIED_BYTES / fastest_s(to_host, device=device)
    return rates


def read_rates(
    storage: Path,
    *,
    names: Sequence[str],
    size_bytes: int,
    device: torch.device,
    is_late: Callable[[], bool] = lambda: False,
) -> tuple[dict[str, dict[str, float]], DirectReads]:
    """The rates of `rates_by_readers`, and the rates into device memory of `direct_rates`.

    Each rank reads a file of its own, which is not in the page cache. A collective call.

    names: host of each rank; is_late: whether larger numbers of processes are left out, a collective call.
    Raises PreflightError, FollowerError and ReadingError.
    """
    read_bytes = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    with opened_file(storage, names=names, size_bytes=read_bytes, is_named=not missing(device)) as file:
        read = partial(read_or_error, file.fileno(), where=f"{names[dist.get_rank()]}: {storage}")
        reads = rates_by_readers(read, names=names, size_bytes=read_bytes, is_late=is_late)
        return reads, direct_rates(Path(str(file.name)), names=names, size_bytes=read_bytes, device=device)


@contextmanager
def opened_file(
    storage: Path, *, names: Sequence[str], size_bytes: int, is_named: bool
) -> Iterator[IO[bytes]]:
    """A new file with random content on each rank; a collective call.

    names: host of each rank; is_named: whether the file has a name, which kvikio needs to open it. A file
    without a name disappears even if this process is killed.

    Raises PreflightError on the hosts where a file can't be written, and FollowerError on the others.
    """
    with ExitStack() as stack:
        error = None
        try:
            create = tempfile.NamedTemporaryFile if is_named else tempfile.TemporaryFile
            file: IO[bytes] = stack.enter_context(create(dir=storage))
            for _ in range(size_bytes // BLOCK_BYTES):
                file.write(os.urandom(BLOCK_BYTES))
            file.flush()
            os.fsync(file.fileno())
        except OSError as problem:
            error = problem.strerror or str(problem)
        raise_storage_errors(storage, names=names, errors=exchange.all_gather(error))
        yield file


def raise_storage_errors(storage: Path, *, names: Sequence[str], errors: Sequence[str | None]) -> None:
    """Raise the error of the first rank that has an error. The message names all hosts with an error.

    names, errors: the host and the error of each rank.
    """
    failed = {name: error for name, error in zip(names, errors, strict=True) if error is not None}
    if failed:
        first = next(iter(failed.values()))
        message = f"{listed_hosts(list(failed))}: can't write to {storage}: {first}"
        if names[dist.get_rank()] not in failed:
            raise FollowerError(f"ended with {message}")
        raise PreflightError(f"{message}. Try another task.storage", exclude=())


def read_or_error(file: int, *, where: str) -> float | str:
    """The seconds of `read_s`, or the error and where it was."""
    try:
        return read_s(file)
    except OSError as error:
        return f"{where}: {error.strerror or error}"


def inside_rates(config: RunConfig, *, device: torch.device, size_bytes: int) -> list[float | None]:
    """The bus bandwidth of an all-reduce of each host's ranks; None for hosts with one rank.

    All hosts run it at the same time.
    """
    per_node = dist.get_world_size() // config.nodes
    if per_node < 2:
        return [None] * config.nodes
    group = build_host_mesh(config.nodes, device_type=device.type)["inside a node"].get_group()
    array = torch.ones(size_bytes // 4, device=device)
    best = [0.0] * config.nodes
    for _ in range(MOST_TRIES):
        time_s = fastest_s(lambda: dist.all_reduce(array.fill_(1.0), group=group), device=device)
        rates = exchange.all_gather(array.nbytes / time_s * bus_factor("all_reduce", per_node))
        slowest = [min(rates[at : at + per_node]) for at in range(0, len(rates), per_node)]
        best = [max(pair) for pair in zip(best, slowest, strict=True)]
        if not slow_rates(dict(enumerate(best))):
            break
    return [*best]
