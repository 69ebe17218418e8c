"""Check which steps and ranks a profiler can record, and whether it is installed."""

from __future__ import annotations

import shutil

from hpc_parallel.config.node_devices import launcher_kind, runs_on_cpus
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.problems import Problem, Problems

UNMEASURED = 3  # steps before those of `training.measure_steps`: two for warm-up, one that counts bytes
OF_NVIDIA = ("nsys", "ncu")


def measured_steps(config: RunConfig) -> int:
    """`training.measure_steps`; 0 with Nsight, because CUPTI serves only one profiler in a process."""
    return 0 if config.profile.kind in OF_NVIDIA else config.training.measure_steps


def find_problems(config: RunConfig) -> Problems:
    profile = config.profile
    if config.task.name != "train":
        rule = f"records steps, and task={config.task.name} has none"
        yield Problem("profile.kind", profile.kind, rule, ("none",))
        return
    yield from _window(config)
    processes = config.nodes * processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    if wrong := [rank for rank in profile.ranks if not 0 <= rank < processes]:
        rule = f"has no rank {wrong[0]}: the ranks are 0 to {processes - 1}"
        legal = [rank for rank in profile.ranks if rank not in wrong] or [0]
        yield Problem("profile.ranks", profile.ranks, rule, (legal,))
    if profile.arguments and profile.kind not in OF_NVIDIA:
        yield Problem("profile.arguments", profile.arguments, "are for profile=nsys and profile=ncu", ([],))
    if profile.memory and profile.kind != "torch":
        yield Problem("profile.memory", True, "is for profile=torch", (False,))
    elif profile.memory and runs_on_cpus(config):
        yield Problem("profile.memory", True, "records the memory of GPUs, and the run has none", (False,))
    if profile.kind in OF_NVIDIA:
        yield from _nvidia(config, processes=processes)


def _window(config: RunConfig) -> Problems:
    profile, training = config.profile, config.training
    measured = measured_steps(config)
    first_free = UNMEASURED + measured + 1 if measured else 1
    last = profile.first_step + profile.steps - 1
    if measured and profile.first_step < first_free:
        rule = f"lies in the steps that training.measure_steps = {training.measure_steps} watches"
        yield Problem("profile.first_step", profile.first_step, rule, (first_free,))
    elif last > training.steps:
        rule = f"and profile.steps = {profile.steps} end after training.steps = {training.steps}"
        fitting = training.steps - profile.steps + 1
        if fitting >= first_free:
            yield Problem("profile.first_step", profile.first_step, rule, (fitting,))
        else:
            needed = first_free + profile.steps - 1
            along = (f"training.steps={needed}",)
            yield Problem("profile.first_step", profile.first_step, rule, (first_free,), along)


def _nvidia(config: RunConfig, *, processes: int) -> Problems:
    kind, launcher, cluster = config.profile.kind, config.launcher, config.cluster
    if launcher_kind(launcher.kind) == "local":
        rule = "wraps the processes of a job, and launcher=local forks its ranks"
        yield Problem("profile.kind", kind, rule, ("torch",))
        return
    if kind == "ncu" and processes > 1:
        rule = f"repeats each kernel, for which {processes} ranks would wait for ever: it is for one device"
        yield Problem("profile.kind", kind, rule, ("nsys",))
    changed = launcher.modules or launcher.setup or cluster.modules or cluster.setup or launcher.container
    if not changed and shutil.which(kind) is None:
        rule = "is not installed on this machine, and nothing that the job runs first may find it"
        yield Problem("profile.kind", kind, rule, (kind,), ("launcher.modules=[MODULE]",))
