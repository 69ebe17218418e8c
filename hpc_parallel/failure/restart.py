"""Decide what follows the end of a start: another one in the same job, a requeued job, or nothing.

`decide` is the one policy. The end of a batch script and the agent of a local run use this module, so it does
not import torch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

from hpc_parallel.failure import failure
from hpc_parallel.problems import as_override
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_text
from hpc_parallel.record.time_use import time_of
from hpc_parallel.slurm.allocation import in_allocation
from hpc_parallel.slurm.jobs import ENDED, job_fields, job_of, seconds_since_1970
from hpc_parallel.slurm.limits import hosts_of
from hpc_parallel.slurm.short_forms import expand_hosts
from hpc_parallel.slurm.submit import SiteRefusedError, is_lost, requeue, resubmit

TIME_LIMIT, PREEMPTED, CANCELLED = "time_limit", "preempted", "cancelled"
REQUEUED = "requeued"  # a script asked for it by its exit code
NO_START = ("not requeued", "neither requeued")  # the beginnings of lines that say that none follows
# What follows the end of a start.
IN_PLACE, SPARE, FEWER, REQUEUE, END = "in place", "spare", "fewer nodes", "requeue", "end"
IN_JOB = (IN_PLACE, SPARE, FEWER)  # the ranks start again in their job
# A restart, perhaps on other hosts, may repair these; an error in the code or a full disk would recur.
RECOVERABLE = frozenset({
    failure.KILLED, failure.LOST_PEER, failure.COLLECTIVE_TIMEOUT, failure.NODE_LOST, failure.START,
    failure.HANG,
})  # fmt: skip
# A host is left out for so long after two failures within this time, or after the start checks accused it.
LEFT_OUT = timedelta(hours=24)
MOST_EXCLUSIONS = 8  # starts within LEFT_OUT that may end because preflight checks exclude hosts


def why_stopped(signal_name: str, *, environment: Mapping[str, str]) -> str:
    """The reason for a signal at which all ranks stopped.

    Slurm sends SIGTERM at a preemption, an scancel or a time limit. Its record of the job shows which.
    """
    job = job_of(environment)
    if signal_name == "SIGUSR2":
        return TIME_LIMIT
    if signal_name != "SIGTERM" or job is None:
        return CANCELLED
    return _why_ending(job_fields(job) or {}, environment=environment)


def ending(environment: Mapping[str, str]) -> str | None:
    """How Slurm ends the job of this start: TIME_LIMIT, PREEMPTED or CANCELLED.

    Returns None if it does not, if it does not answer, and outside of a job.
    """
    job = job_of(environment)
    fields = None if job is None else job_fields(job)
    if not fields:
        return None
    why = _why_ending(fields, environment=environment)
    end_s = seconds_since_1970(fields.get("EndTime"))
    if fields.get("JobState") == "RUNNING" and end_s is not None and end_s <= time.time():
        return why if why != CANCELLED else TIME_LIMIT  # Slurm makes no steps, and ends the job within 30 s
    return why if why != CANCELLED or fields.get("JobState") in {*ENDED, "COMPLETING"} else None


def _why_ending(fields: Mapping[str, str], *, environment: Mapping[str, str]) -> str:
    state = fields.get("JobState")
    # At its limit a job is COMPLETING while its processes end, and only the reason differs from an scancel.
    if state == "TIMEOUT" or (state == "COMPLETING" and fields.get("Reason") == "TimeLimit"):
        return TIME_LIMIT
    preempted = fields.get("PreemptTime", "None") != "None" or state == "PREEMPTED"
    return PREEMPTED if preempted or _is_requeued(fields, environment=environment) else CANCELLED


def _is_requeued(fields: Mapping[str, str], *, environment: Mapping[str, str]) -> bool:
    """Whether Slurm has requeued the job of this start, which still ends.

    It does so at the end of a preemption's grace time. Then it no longer shows a PreemptTime, and the state
    is COMPLETING or PENDING.
    """
    state, count = fields.get("JobState"), environment.get("SLURM_RESTART_COUNT", "0")
    restarts = fields.get("Restarts", count) != count and state not in ENDED
    return restarts or state in ("PENDING", "CONFIGURING", "REQUEUED")


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job that chooses them for each start, in Slurm's order.

    used: those of this start. held: those that the job still has, without unfit spares. sizes: the numbers of
    hosts of which a start can take one, largest first.
    """

    used: tuple[str, ...]
    held: tuple[str, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, folder: RunFolder, *, environment: Mapping[str, str]) -> Hosts | None:
        """Ask Slurm; None for a job that does not choose its hosts, and if Slurm does not answer."""
        job, config, sizes = job_of(environment), folder.read_config(), folder.node_counts()
        if job is None or not (sizes or config["launcher"].get("spares")):
            return None
        held = expand_hosts((job_fields(job) or {}).get("NodeList", ""))
        if not held:
            return None
        used = expand_hosts(environment.get("SLURM_JOB_NODELIST", ""))
        if environment.get("SLURMD_NODENAME") not in held:
            held = ()  # Slurm takes the host of this script for lost
        with suppress(FileNotFoundError):
            unfit = set(read_text(folder.unfit_spares).split()).difference(used)
            held = tuple(host for host in held if host not in unfit)
        return cls(used, held, sizes or (config["nodes"],))

    def next(self, unfit: Set[str]) -> tuple[str, ...]:
        """The hosts of the next start, if fit those of the last one; empty if too few are left."""
        fit = [host for host in self.held if host not in unfit]
        fit.sort(key=lambda host: host not in self.used)
        most = min(len(fit), len(self.used))
        chosen = fit[: next((size for size in self.sizes if size <= most), 0)]
        return tuple(host for host in self.held if host in chosen)


@dataclass(frozen=True)
class RestartLimits:
    """What a run allows, and where its ranks run.

    start: the number of this start in its job, from 0; None: nothing can start the ranks again in the job.
    is_own_job: false in an allocation, which Slurm would start again with all that the user does there.
    hosts: None in a job that does not choose them for each start. time_key: what sets the job's time limit.
    """

    max_restarts: int
    max_requeues: int
    rolls_back: bool  # training.on_nonfinite=rollback
    start: int | None = None
    is_own_job: bool = True
    hosts: Hosts | None = None
    time_key: str = "launcher.time_minutes"

    @classmethod
    def of(cls, config: Mapping[str, Any], *, start: int | None = None) -> RestartLimits:
        """config: the content of `config.yaml`."""
        launcher, on_nonfinite = config["launcher"], config["training"]["on_nonfinite"]
        most = int(launcher["max_restarts"]), int(launcher["max_requeues"])
        rolls_back, own = on_nonfinite == "rollback", not in_allocation(launcher)
        return cls(*most, rolls_back=rolls_back, start=start, is_own_job=own)


@dataclass(frozen=True)
class Decision:
    """What follows the end of a start, and why; the reason is empty if the end itself says it.

    hosts: those of the next start, if the job chooses them.
    """

    action: str  # one of IN_JOB, REQUEUE or END
    why: str = ""
    hosts: tuple[str, ...] = ()

    @property
    def starts_again(self) -> bool:
        return self.action != END


def decide(
    ends: Sequence[attempts.End],
    *,
    limits: RestartLimits,
    continues: bool = True,
    by_slurm: str | None = None,
) -> Decision:
    """The one policy: the ranks start again in their job, on which hosts, or it is requeued, or the run ends.

    ends: those since a user last started the run; the last one is to be followed.
    continues: whether the run has kept something from which it can go on, or says that it goes on by itself.
    by_slurm: how Slurm ends the job now (`ending`).
    """
    decision = _decided(ends, limits=limits, continues=continues, by_slurm=by_slurm)
    if decision.action == REQUEUE and not limits.is_own_job:
        return Decision(END, "an allocation is not requeued")
    return decision


def _decided(
    ends: Sequence[attempts.End], *, limits: RestartLimits, continues: bool, by_slurm: str | None
) -> Decision:
    """The decision for a run that has its job for itself."""
    end, counts = ends[-1], Counter(map(_kind, ends))
    if end.how == PREEMPTED:
        return Decision(REQUEUE)
    if end.how == CANCELLED:
        return Decision(END)
    if end.how in (TIME_LIMIT, REQUEUED):
        if counts[end.how] > limits.max_requeues:  # the count includes this end
            return Decision(END, f"launcher.max_requeues={limits.max_requeues} is used up")
        if end.how == TIME_LIMIT and not continues and limits.is_own_job:
            others = "a smaller task.seconds, or script.resume_arguments"
            return Decision(
                END, f"a new start would reach it again: try a longer {limits.time_key}, {others}"
            )
        return Decision(REQUEUE)
    if (refusal := _why_not(ends, counts=counts, limits=limits)) is not None:
        return Decision(END, refusal)
    if by_slurm == CANCELLED and end.how != failure.NODE_LOST:
        return Decision(END, "the job is cancelled, so it does not start again")
    if limits.start is None or by_slurm is not None:
        return Decision(REQUEUE)
    which = f"{counts['failure']} of {limits.max_restarts}"
    if end.how == failure.NONFINITE:
        which = "from the checkpoint before"
    elif end.how == failure.PREFLIGHT:
        which = "after its checks"
    return _in_job(ends, hosts=limits.hosts, which=which)


def _in_job(ends: Sequence[attempts.End], *, hosts: Hosts | None, which: str) -> Decision:
    """A start without the hosts that are gone or unfit: on the same, on spares, on fewer; else a requeue."""
    again = "the ranks start again in the same job"
    if hosts is None or _without_ranks(ends[-1]):  # nobody knows which host is gone
        same = f"{again}, on the same hosts, {which}"
        return Decision(REQUEUE) if _needs_other_hosts(ends) else Decision(IN_PLACE, same)
    unfit = _unfit(ends)
    following = hosts.next(unfit)
    if not following:
        return Decision(REQUEUE)
    if following == hosts.used:
        return Decision(IN_PLACE, f"{again}, on the same hosts, {which}", following)
    new, old = _without(following, hosts.used), _without(hosts.used, following)
    if len(following) < len(hosts.used):
        waiting = [host for host in _without(hosts.held, following) if host not in unfit]
        place = f"failed: {', '.join(_without(old, waiting))}"
        place += f"; waiting: {', '.join(waiting)}" if waiting else ""
        place = f"on {len(following)} of {hosts.sizes[0]} nodes ({place})"
        return Decision(FEWER, f"{again}, {place}, {which}", following)
    spares = f"the spare{'s' * (len(new) > 1)} {', '.join(new)}"
    return Decision(SPARE, f"{again}, on {spares} in place of {', '.join(old)}, {which}", following)


def _without(hosts: Sequence[str], others: Sequence[str]) -> list[str]:
    return [host for host in hosts if host not in others]


def _why_not(ends: Sequence[attempts.End], *, counts: Mapping[str, int], limits: RestartLimits) -> str | None:
    """Why no new start can repair a failure, or may try to; None if one may."""
    end = ends[-1]
    if end.how == failure.NONFINITE:  # only once, because the same samples may cause the same failure
        first_time = sum(before.how == end.how for before in ends) == 1
        return None if limits.rolls_back and first_time else ""
    if end.how == failure.PREFLIGHT:  # each restart leaves out the accused hosts
        recent = [other for other in ends if other.how == end.how and _age(other, ends) <= LEFT_OUT]
        return None if end.exclude and len(recent) <= MOST_EXCLUSIONS else ""
    if end.how not in RECOVERABLE:
        return ""
    # A job that failed before any rank started, in its set-up lines for example, fails again. But if an
    # earlier start of this job had ranks, a host is gone.
    if _without_ranks(end) and not limits.start:
        return ""
    if counts["failure"] > limits.max_restarts:
        used = f"launcher.max_restarts={limits.max_restarts} is used up"
        return used if limits.max_restarts else ""
    before = next((other for other in reversed(ends[:-1]) if _kind(other) == "failure"), None)
    knows_place = end.rank is not None or end.how in (failure.HANG, failure.COLLECTIVE_TIMEOUT)
    if before is None or end.step is None or not knows_place or _place(before) != _place(end):
        return None
    reason = f"it failed so twice after step {end.step}, so it does not start again"
    if end.host is None or before.host != end.host:
        return reason
    return f"{reason}. If {end.host} is to blame, try {as_override('launcher.exclude', end.host)}"


def _place(end: attempts.End) -> tuple[object, ...]:
    return end.how, end.rank, end.step


def _without_ranks(end: attempts.End) -> bool:
    return end.rank is None and end.how in (failure.START, failure.KILLED)


def _needs_other_hosts(ends: Sequence[attempts.End]) -> bool:
    """Whether a host is gone, or the next start leaves it out."""
    end = ends[-1]
    is_gone = end.how == failure.NODE_LOST or _without_ranks(end)
    return is_gone or not _unfit(ends).isdisjoint({end.host, *end.exclude})


def _kind(end: attempts.End) -> str:
    kinds = (TIME_LIMIT, PREEMPTED, CANCELLED, REQUEUED, failure.PREFLIGHT, "completed")
    return end.how if end.how in kinds else "failure"


def hosts_to_exclude(folder: RunFolder) -> list[str]:
    """The hosts that the next start leaves out, see LEFT_OUT."""
    return sorted(_unfit(attempts.recent_ends(folder)))


def _unfit(ends: Sequence[attempts.End]) -> set[str]:
    failed: dict[str, list[timedelta]] = {}  # by host, how long ago
    for end in ends:
        if end.host and _kind(end) == "failure":
            failed.setdefault(end.host, []).append(_age(end, ends))
    accused = {host for end in ends if _age(end, ends) <= LEFT_OUT for host in end.exclude}
    return accused | {
        host
        for host, ages in failed.items()
        if any(age <= LEFT_OUT and before - age <= LEFT_OUT for before, age in pairwise(ages))
    }


def _age(end: attempts.End, ends: Sequence[attempts.End]) -> timedelta:
    """How long before the last of the ends; 0 if its time is not known."""
    last = time_of(ends[-1].ended) or datetime.now(UTC)
    return last - (time_of(end.ended) or last)


def requeue_or_resubmit(
    folder: RunFolder, *, launcher: Mapping[str, Any], environment: Mapping[str, str], after: str = ""
) -> str:
    """Ask Slurm to requeue this job; return one line with the result. after: as `resubmit` has it.

    If Slurm refuses (because of the site's setting or the job's state), a new job replaces this one if
    `launcher.resubmit` is set.
    """
    job = job_of(environment)
    assert job is not None  # the caller runs in a job
    excluded, ends = hosts_to_exclude(folder), attempts.recent_ends(folder)
    place: dict[str, Any] = {"launcher": launcher, "environment": environment, "sizes": folder.node_counts()}
    if excluded and (shortage := _shortage(excluded, **place)):
        return f"not requeued: {shortage}. Start it again with fewer nodes, or when these hosts are repaired"
    was_left_out = any(_unfit(ends[: count + 1]) for count in range(len(ends)))
    exclude = ",".join([*filter(None, [launcher["exclude"]]), *excluded]) if was_left_out else None
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
        new_job = resubmit(folder.resubmission, exclude=exclude or "", after=after)
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
    excluded: Sequence[str],
    *,
    launcher: Mapping[str, Any],
    environment: Mapping[str, str],
    sizes: Sequence[int] = (),
) -> str | None:
    """Why the job would wait forever without the excluded hosts; None if enough are left, or it is not known.

    Slurm does not refuse a requeued job that needs more hosts than are left. It sets its priority to 0.
    """
    partition = launcher["partition"] or environment.get("SLURM_JOB_PARTITION", "")
    used = set(expand_hosts(environment.get("SLURM_JOB_NODELIST", "")))
    needed = max([len(used), *sizes]) + launcher.get("spares", 0)
    hosts = hosts_of(partition) if partition else set()
    left = hosts.difference(excluded)
    with suppress(ValueError):  # sbatch may accept more than expand_hosts
        left = left.difference(expand_hosts(launcher["exclude"] or ""))
    if len(left) >= needed or not used <= hosts:  # sinfo may not show all
        return None
    few = f"{len(left)} host{'s' * (len(left) != 1)}"
    return f"without {', '.join(excluded)} partition {partition} has {few}, and the job needs {needed}"
