"""Which runs of a sweep share a packed job (`sweep.pack=auto`), and why they can't."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_parallel.config.node_devices import visible_gpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure.packed_job import GPU, Queue, QueuedRun
from hpc_parallel.launch.allocation_launcher import script_of
from hpc_parallel.launch.batch_script import gpu_flags
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.record.owner import this_process
from hpc_parallel.slurm.allocation import ALLOCATION, required
from hpc_parallel.slurm.limits import node_kinds
from hpc_parallel.slurm.node_room import FreePlaces, Need, Room, RunPlace, SharedGpus, least_nodes, makespan_s
from hpc_parallel.slurm.short_forms import gpu_count

# One job has one value of each.
_OF_THE_JOB = {
    "launcher": ("partition", "account", "qos", "constraint", "exclude", "wckey", "extra", "grace_s"),
    "cluster": ("gpus", "gpu_flag", "gpu_type", "extra"),
}
# Flags of `launcher.extra` and `cluster.extra` that would contradict those of a job of whole nodes.
_OF_ITS_SIZE = {
    "array", "cpus-per-gpu", "gpus", "gpus-per-socket", "gpus-per-task", "mem-per-cpu", "mem-per-gpu",
    "ntasks", "oversubscribe", "overcommit",
}  # fmt: skip
_FIRST_SPECIAL_STEP = 2**32 - 16  # the batch script and the shell of salloc, which keep nothing


@dataclass(frozen=True)
class Pack:
    """Runs that share a job, by their positions in the sweep and in the order of their turns."""

    positions: Sequence[int]
    nodes: int
    queue: Queue


def packs(runs: Sequence[PreparedRun]) -> list[Pack]:
    """The packed jobs of a checked sweep; empty if its runs fill whole jobs, so that arrays do as well.

    A job gets the longest runs that are left, as many as end before its time limit. A run is assumed to take
    its planned time, or else its own time limit.
    """
    node, settings = room_of(runs), runs[0].config.sweep
    assert node is not None  # checked by `find_problems`
    room = node.shared(settings.runs_per_gpu)
    work = [(need_of(run, room), seconds_of(run)) for run in runs]
    nodes = settings.pack_nodes or max(run.config.nodes for run in runs)
    if all(room.count_of(need.room) * nodes // need.nodes < 2 for need, _ in work):  # each fills a job
        return []
    limit_s = 60.0 * minutes_of(runs)
    order = sorted(range(len(runs)), key=lambda at: turn_of(runs[at]))
    jobs: list[Pack] = []
    while order:
        count = _fitting([work[at] for at in order], nodes=nodes, room=room, limit_s=limit_s)
        jobs.append(_pack(order[:count], runs=runs, work=work, nodes=nodes, node=node))
        order = order[count:]
    return jobs


def turn_of(run: PreparedRun) -> tuple[float, int]:
    """Runs take their turns in the order of this key: the longest first."""
    return -seconds_of(run), -run.config.nodes


def choice(config: RunConfig) -> str:
    """`sweep.pack`, or else what the profile says of jobs of Slurm."""
    return config.sweep.pack or (config.cluster.pack if config.launcher.kind == "slurm" else "off")


def _fitting(work: Sequence[tuple[Need, float]], *, nodes: int, room: Room, limit_s: float) -> int:
    """How many of the first runs end within the limit; at least one."""
    counts = range(1, len(work) + 1)
    fits = bisect_right(counts, limit_s, key=lambda count: makespan_s(work[:count], nodes=nodes, room=room))
    return max(1, fits)


def _pack(
    positions: Sequence[int],
    *,
    runs: Sequence[PreparedRun],
    work: Sequence[tuple[Need, float]],
    nodes: int,
    node: Room,
) -> Pack:
    needs = [work[at][0] for at in positions]
    queued = tuple(QueuedRun(work[at][0], runs[at].processes_per_node) for at in positions)
    grace_s = max(runs[at].config.launcher.grace_s for at in positions)
    shares = runs[0].config.sweep.runs_per_gpu
    return Pack(
        positions,
        least_nodes(needs, most=nodes, room=node.shared(shares)),
        Queue(node, grace_s, queued, this_process().process, shares),
    )


def minutes_of(runs: Sequence[PreparedRun]) -> int:
    """The time limit of a packed job."""
    longest = max(run.config.launcher.time_minutes for run in runs)
    return runs[0].config.sweep.pack_minutes or longest


def seconds_of(run: PreparedRun) -> float:
    """How long a run is assumed to take."""
    step_s = (run.predicted or {}).get("step_time_s")
    return 60.0 * run.config.launcher.time_minutes if step_s is None else float(step_s) * run.steps


def need_of(run: PreparedRun, room: Room) -> Need:
    """What a run needs of its nodes. Without `launcher.memory_gb`, its share of the memory of a node.

    Runs that share a GPU share its CPUs and memory too; `room` and the need then count shares of GPUs.
    """
    config, shares = run.config, run.config.sweep.runs_per_gpu
    cpus = max(1, run.processes_per_node * run.cpus_per_process // shares)
    gpus = config.gpus_per_node if gpu_flags(run) else 0
    memory_mb = room.memory_mb // max(1, room.count_of(Room(cpus, gpus)))
    if config.launcher.memory_gb is not None:
        memory_mb = math.ceil(config.launcher.memory_gb * 1024 / shares)
    return Need(config.nodes, Room(cpus, gpus, memory_mb if room.memory_mb else 0))


def room_of(runs: Sequence[PreparedRun]) -> Room | None:
    """What every node of the partition has that could take the runs; None if Slurm does not say it.

    In an allocation, what each of its nodes has.

    Nodes with fewer GPUs than the runs need get no packed job, because it asks for more.
    """
    config = runs[0].config
    if config.launcher.kind == ALLOCATION:
        allocation = required()
        return Room(
            allocation.cpus, allocation.gpus if gpu_flags(runs[0]) else 0, _memory_mb(allocation.memory_mb)
        )
    kinds = [kind for kind in node_kinds() if kind.is_in(config.launcher.partition) and kind.cpus]
    if not kinds:
        return None
    if not gpu_flags(runs[0]):
        return Room(min(kind.cpus for kind in kinds), 0, _memory_mb(min(kind.memory_mb for kind in kinds)))
    counts = {kind: gpu_count(kind.gres, gpu_type=config.cluster.gpu_type) for kind in kinds}
    needed = max(run.config.gpus_per_node for run in runs)
    enough = [kind for kind in kinds if counts[kind] >= needed] or kinds
    memory_mb = min(kind.memory_mb for kind in enough)
    return Room(
        min(kind.cpus for kind in enough), min(counts[kind] for kind in enough), _memory_mb(memory_mb)
    )


def _memory_mb(of_slurm: int) -> int:
    return of_slurm if of_slurm > 1 else 0  # 1: the site has not set it


def find_problems(runs: Sequence[PreparedRun]) -> Problems:
    config = runs[0].config
    kind, settings = config.launcher.kind, config.sweep
    here = {"local": "on this machine", ALLOCATION: "in an allocation"}.get(kind)
    if choice(config) == "off" or here:
        rule = "needs sweep.pack=auto" if choice(config) == "off" else f"has no effect {here}"
        for key in ("pack_nodes", "pack_minutes"):
            if (value := getattr(settings, key)) is not None:
                yield Problem(f"sweep.{key}", value, rule, (None,))
        if choice(config) == "auto":
            yield from _sharing_problems(runs)
            if kind == ALLOCATION:
                yield from (*_shell_problems(os.environ), *_step_problems(runs), *_room_problems(runs))
        elif settings.runs_per_gpu > 1:
            yield Problem("sweep.runs_per_gpu", settings.runs_per_gpu, rule, (1,))
        return
    if kind != "slurm":
        rule = f"packs runs into jobs of Slurm, or here, and not with launcher.kind={kind}"
        yield Problem("sweep.pack", settings.pack, rule, ("off",))
        return
    problems = [
        *_job_problems(runs),
        *_step_problems(runs),
        *_host_problems(runs),
        *_sharing_problems(runs),
        *_room_problems(runs),
    ]
    yield from problems
    if problems and settings.pack is None:
        yield f"cluster.pack=auto: {config.cluster.name} packs sweeps. Try sweep.pack=off for separate jobs."


def _job_problems(runs: Sequence[PreparedRun]) -> Problems:
    """What the runs ask of their job that it can't give to all of them."""
    config, settings = runs[0].config, runs[0].config.sweep
    for section, keys in _OF_THE_JOB.items():
        for key in keys:
            choices = (getattr(getattr(run.config, section), key) for run in runs)
            values = list({repr(value): value for value in choices}.values())
            if len(values) > 1:
                rule = "has several values, and a packed job has one"
                yield Problem(f"{section}.{key}", values, rule, (values[0],))
    for key, flags in (("launcher", config.launcher.extra), ("cluster", config.cluster.extra)):
        for flag in sorted(_OF_ITS_SIZE & flags.keys()):
            rule = "contradicts a packed job, which takes whole nodes"
            yield Problem(f"{key}.extra.{flag}", flags[flag], rule, (None,))
    if settings.parallelism is not None:
        rule = "is for arrays: a packed job starts as many runs as its nodes have places for"
        yield Problem("sweep.parallelism", settings.parallelism, rule, (None,))
    most = max(run.config.nodes for run in runs)
    if settings.pack_nodes is not None and most > settings.pack_nodes:
        rule = f"is fewer than nodes={most} of a run"
        yield Problem("sweep.pack_nodes", settings.pack_nodes, rule, (most,))
    longest = max(run.config.launcher.time_minutes for run in runs)
    if settings.pack_minutes is not None and longest > settings.pack_minutes:
        rule = f"is less than launcher.time_minutes={longest} of a run"
        yield Problem("sweep.pack_minutes", settings.pack_minutes, rule, (longest,))


def _step_problems(runs: Sequence[PreparedRun]) -> Problems:
    """What keeps a run from having its place as a step."""
    if start := next((run.config.cluster.start for run in runs if run.config.cluster.start != "srun"), None):
        rule = "can't give a run its place in a packed job"
        if start == "torchrun":  # 20000 and the job's number
            rule = "meets at one port of its job, which runs side by side can't share"
        yield Problem("cluster.start", start, rule, ("srun",))
    if runs[0].config.cluster.gpus and runs[0].config.cluster.gpu_flag == "none":
        rule = "leaves no way to give each run of a packed job its own GPUs"
        yield Problem("cluster.gpu_flag", "none", rule, ("gpus-per-node", "gres"))
    if port := next((run.config.cluster.port for run in runs if run.config.cluster.port), None):
        yield Problem("cluster.port", port, "is one port, which runs side by side can't share", (None,))


def _shell_problems(environment: Mapping[str, str]) -> Iterator[str]:
    """A shell that is a step of its own (`srun --pty`) keeps the CPUs and GPUs of its node."""
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP:
        yield (
            f"sweep.pack = auto: this shell is step {step} of its job and keeps the CPUs and GPUs of its "
            "node, so no run would get a place there. Try it in salloc, or sweep.pack=off."
        )


def _host_problems(runs: Sequence[PreparedRun]) -> Problems:
    """Hosts that one run alone would keep ready, or leave."""
    for key, off in (("spares", 0), ("min_nodes", None), ("standby", False)):
        if chosen := {getattr(run.config.launcher, key) for run in runs} - {off}:
            yield Problem(f"launcher.{key}", max(chosen), "is for a job that has one run", (off,))


def _sharing_problems(runs: Sequence[PreparedRun]) -> Problems:
    """Why the runs can't share GPUs. `planning/forecast.py` refuses a run that needs more than its share."""
    config = runs[0].config
    shares = config.sweep.runs_per_gpu
    if shares == 1:
        return
    of_cpus = not (visible_gpus(os.environ) if config.launcher.kind == "local" else gpu_flags(runs[0]))
    if of_cpus or any(run.config.device == "cpu" for run in runs):
        yield Problem("sweep.runs_per_gpu", shares, "is for runs on GPUs, and these are on CPUs", (1,))
    elif most := max((run.config.devices for run in runs if run.config.devices > 1), default=0):
        rule = f"is for runs of one GPU, and a run has {most}"
        yield Problem("sweep.runs_per_gpu", shares, rule, (1,))
    elif any(
        run.config.plan.on_overflow != "off" and "peak_memory_bytes" not in (run.predicted or {})
        for run in runs
    ):
        rule = "needs a plan of the memory (hardware=NAME), or plan.on_overflow=off, which checks none"
        yield Problem("sweep.runs_per_gpu", shares, rule, (1,))


def _room_problems(runs: Sequence[PreparedRun]) -> Iterator[Problem]:
    """Runs that need more than a node has."""
    node, partition = room_of(runs), runs[0].config.launcher.partition
    where = f"partition {partition}" if partition else "the default partition"
    where = str(required()) if runs[0].config.launcher.kind == ALLOCATION else where
    if node is None:
        rule = f"needs to know what the nodes of {where} have, and Slurm does not say it"
        yield Problem("sweep.pack", "auto", rule, ("off",))
        return
    room = node.shared(runs[0].config.sweep.runs_per_gpu)
    for run in {need_of(run, room).room: run for run in runs}.values():
        need, launcher, devices = need_of(run, room).room, run.config.launcher, run.config.gpus_per_node
        if need.cpus > room.cpus:
            rule = f"needs {need.cpus} CPUs of a node, and nodes of {where} have {room.cpus}"
            legal = (room.cpus // devices,) if room.cpus >= devices else ()
            yield Problem("launcher.cpus_per_device", launcher.cpus_per_device, rule, legal)
        if need.gpus > room.gpus:
            rule = f"is more than the {node.gpus} GPUs of nodes of {where}"
            yield Problem("gpus_per_node", devices, rule, (node.gpus,) if node.gpus else ())
        if need.memory_mb > room.memory_mb:
            rule = f"is more than the {room.memory_mb / 1024:g} GB of nodes of {where}"
            yield Problem("launcher.memory_gb", launcher.memory_gb, rule, (room.memory_mb // 1024,))


class LocalPlaces:
    """The GPUs and cores of this machine, which runs that are going on here share."""

    def __init__(self, environment: Mapping[str, str], *, runs_per_gpu: int = 1) -> None:
        count, listed = visible_gpus(environment), environment.get("CUDA_VISIBLE_DEVICES")
        self._names = [*map(str, range(count))] if listed is None else listed.split(",")[:count]
        self._gpus = SharedGpus(1, count)
        self._room = Room(len(os.sched_getaffinity(0)), count).shared(runs_per_gpu)
        self._places = FreePlaces(1, self._room)
        self._environment = environment
        self._taken: dict[int, list[int]] = {}

    def take(self, run: PreparedRun) -> RunPlace | None:
        """The place of the run; None if there is none for it now.

        A run that is larger than the machine has it for itself.
        """
        need = self._need(run)
        if self._places.take(need) is None:
            return None
        gpus = self._taken[id(run)] = self._gpus.take(need.room.gpus)
        visible = ",".join(self._names[gpu] for gpu in gpus)
        variables = {"CUDA_VISIBLE_DEVICES": visible} if self._room.gpus else {}
        if "OMP_NUM_THREADS" not in self._environment:
            variables["OMP_NUM_THREADS"] = str(max(1, need.room.cpus // run.processes))
        return RunPlace(variables)

    def give_back(self, run: PreparedRun) -> None:
        self._places.give_back((0,), self._need(run))
        self._gpus.give_back(self._taken.pop(id(run)))

    def _need(self, run: PreparedRun) -> Need:
        config = run.config
        gpus = 0 if config.device == "cpu" else min(config.devices, len(self._names))
        cpus = run.processes * run.cpus_per_process // config.sweep.runs_per_gpu
        cpus = min(max(1, cpus), self._room.cpus)
        return Need(1, Room(cpus, gpus))


class AllocationPlaces:
    """The nodes of the allocation that the shell is in, which runs that are going on share."""

    def __init__(self, runs: Sequence[PreparedRun]) -> None:
        node, self._hosts, shares = room_of(runs), required().hosts, runs[0].config.sweep.runs_per_gpu
        assert node is not None
        self._node, self._room = node if shares > 1 else None, node.shared(shares)
        self._places = FreePlaces(len(self._hosts), self._room)
        self._gpus = SharedGpus(len(self._hosts), node.gpus)
        self._taken: dict[int, tuple[tuple[int, ...], list[int]]] = {}

    def take(self, run: PreparedRun) -> RunPlace | None:
        """The place of the run; None if there is none for it now."""
        need = need_of(run, self._room)
        if (nodes := self._places.take(need)) is None:
            return None
        gpus = self._gpus.take(need.room.gpus, node=nodes[0]) if self._node else []
        self._taken[id(run)] = nodes, gpus
        variables = {GPU: str(gpus[0] + 1), "OMP_NUM_THREADS": str(need.room.cpus)} if gpus else {}
        return RunPlace(variables, tuple(self._hosts[node] for node in nodes), need, self._node)

    def preview(self, run: PreparedRun) -> str:
        """The script of the run, if no other has a place."""
        place = self.take(run)
        assert place is not None  # checked by `find_problems`
        self.give_back(run)
        return script_of(run, place=place)

    def give_back(self, run: PreparedRun) -> None:
        nodes, gpus = self._taken.pop(id(run))
        self._places.give_back(nodes, need_of(run, self._room))
        self._gpus.give_back(gpus, node=nodes[0])
