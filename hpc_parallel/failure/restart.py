"""Decide whether a run restarts after a time limit, a preemption, or a recoverable failure.

The end of a batch script and the agent of a local run use this module, so it does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hpc_parallel.failure import failure
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.slurm.allocation import in_allocation
from hpc_parallel.slurm.jobs import ENDED, job_fields, job_of
from hpc_parallel.slurm.limits import hosts_of
from hpc_parallel.slurm.short_forms import expand_hosts
from hpc_parallel.slurm.submit import SiteRefusedError, is_lost, requeue, resubmit

TIME_LIMIT, PREEMPTED, CANCELLED = "time_limit", "preempted", "cancelled"
REQUEUED = "requeued"  # a script asked for it by its exit code
NO_START = ("not requeued", "neither requeued")  # the beginnings of lines that say that none follows
TWICE = 2  # failures of a host after which the next start excludes it
MOST_EXCLUSIONS = 8  # starts that may end because preflight checks exclude hosts


def why_stopped(signal_name: str, *, environment: Mapping[str, str]) -> str:
    """The reason for a signal at which all ranks stopped.

    Slurm sends SIGTERM at a preemption, an scancel or a time limit. Its record of the job shows which.
    """
    job = job_of(environment)
    if signal_name == "SIGUSR2":
        return TIME_LIMIT
    if signal_name != "SIGTERM" or job is None:
        return CANCELLED
    fields = job_fields(job) or {}
    if fields.get("JobState") == "TIMEOUT":
        return TIME_LIMIT
    preempted = fields.get("PreemptTime", "None") != "None" or fields.get("JobState") == "PREEMPTED"
    return PREEMPTED if preempted or _is_requeued(fields, environment=environment) else CANCELLED


def _is_requeued(fields: Mapping[str, str], *, environment: Mapping[str, str]) -> bool:
    """Whether Slurm has requeued the job of this start, which still ends.

    It does so at the end of a preemption's grace time. Then it no longer shows a PreemptTime, and the state
    is COMPLETING or PENDING.
    """
    state, count = fields.get("JobState"), environment.get("SLURM_RESTART_COUNT", "0")
    restarts = fields.get("Restarts", count) != count and state not in ENDED
    return restarts or state in ("PENDING", "CONFIGURING", "REQUEUED")


def allowed(folder: RunFolder, *, how: str, recoverable: bool, launcher: Mapping[str, Any]) -> bool:
    """Whether the run may restart after an end of the kind `how`.

    recoverable: `failure.can_restart`; launcher: the section of `config.yaml`. A run in an allocation never
    restarts: Slurm would start the user's whole job again.
    """
    if in_allocation(launcher):
        return False
    ends = Counter(_kind(end) for end in attempts.recent_ends(folder))
    if how == PREEMPTED:
        return True
    if how in (TIME_LIMIT, REQUEUED):
        return ends[how] <= int(launcher["max_requeues"])  # the count includes this end
    if how == failure.NONFINITE:  # only once, because the same samples may cause the same failure
        first_time = sum(end.how == how for end in attempts.recent_ends(folder)) == 1
        return recoverable and first_time
    if how == failure.PREFLIGHT:  # each restart leaves out the accused hosts
        return recoverable and ends[failure.PREFLIGHT] <= MOST_EXCLUSIONS
    return recoverable and ends["failure"] <= int(launcher["max_restarts"])


def _kind(end: attempts.End) -> str:
    kinds = (TIME_LIMIT, PREEMPTED, CANCELLED, REQUEUED, failure.PREFLIGHT, "completed")
    return end.how if end.how in kinds else "failure"


def hosts_to_exclude(folder: RunFolder) -> list[str]:
    """Hosts on which the run failed first more than once, and those that its preflight checks accused."""
    ends = attempts.recent_ends(folder)
    failed = Counter(end.host for end in ends if end.host and _kind(end) == "failure")
    accused = {host for end in ends for host in end.exclude}
    return sorted(accused | {host for host, count in failed.items() if count >= TWICE})


def requeue_or_resubmit(
    folder: RunFolder, *, launcher: Mapping[str, Any], environment: Mapping[str, str]
) -> str:
    """Ask Slurm to requeue this job; return one line with the result.

    If Slurm refuses (because of the site's setting or the job's state), a new job replaces this one if
    `launcher.resubmit` is set.
    """
    job = job_of(environment)
    assert job is not None  # the caller runs in a job
    excluded = hosts_to_exclude(folder)
    if excluded and (shortage := _shortage(excluded, launcher=launcher, environment=environment)):
        return f"not requeued: {shortage}. Start it again with fewer nodes, or when these hosts are repaired"
    exclude = ",".join([*filter(None, [launcher["exclude"]]), *excluded]) if excluded else ""
    if (refusal := requeue(job, exclude=exclude)) is None:
        return f"requeued as job {job}" + (f", without {', '.join(excluded)}" if excluded else "")
    fields = job_fields(job)
    if fields is None:
        return f"nobody knows whether it is requeued: Slurm does not answer ({refusal})"
    if _is_requeued(fields, environment=environment):
        return f"requeued by Slurm itself as job {job}"
    if not launcher["resubmit"]:
        return f"not requeued ({refusal}); launcher.resubmit=true submits a new job then"
    try:
        new_job = resubmit(folder.resubmission, exclude=exclude)
    except SiteRefusedError as error:
        if is_lost(str(error)):
            return f"not known whether it is resubmitted: {error}"
        return f"neither requeued ({refusal}) nor resubmitted ({error})"
    with suppress(DamagedError):  # the submission knew the cluster, the job may not
        before = owner.Owner.read(folder) or owner.Owner()
        new_job = replace(new_job, cluster=new_job.cluster or before.clusters)
    owner.hand_to_job(folder, new_job)
    return f"resubmitted as job {new_job.id}"


def _shortage(
    excluded: Sequence[str], *, launcher: Mapping[str, Any], environment: Mapping[str, str]
) -> str | None:
    """Why the job would wait forever without the excluded hosts; None if enough are left, or it is not known.

    Slurm does not refuse a requeued job that needs more hosts than are left. It sets its priority to 0.
    """
    partition = launcher["partition"] or environment.get("SLURM_JOB_PARTITION", "")
    needed = set(expand_hosts(environment.get("SLURM_JOB_NODELIST", "")))
    hosts = hosts_of(partition) if partition else set()
    left = hosts.difference(excluded)
    with suppress(ValueError):  # sbatch may accept more than expand_hosts
        left = left.difference(expand_hosts(launcher["exclude"] or ""))
    if len(left) >= len(needed) or not needed <= hosts:  # sinfo may not show all
        return None
    few = f"{len(left)} host{'s' * (len(left) != 1)}"
    return f"without {', '.join(excluded)} partition {partition} has {few}, and the job needs {len(needed)}"
