"""Whether a run that has ended starts again: after its time limit, a preemption, or a mendable failure.

Torch-free: it runs at the end of a batch script, and in the agent of a local run.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpc_parallel.record import attempts, owner
from hpc_parallel.record.job_state import job_fields, job_of
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.supervise import failure

TIME_LIMIT, PREEMPTED, CANCELLED = "time_limit", "preempted", "cancelled"
TWICE = 2  # failures of a host, after which the next start leaves it out


def why_stopped(signal_name: str, *, environment: Mapping[str, str]) -> str:
    """What a signal that all ranks heeded meant. Slurm's SIGTERM is a preemption's, an scancel's, or that
    of a time limit; its record of the job tells."""
    job = job_of(environment)
    if signal_name == "SIGUSR2":
        return TIME_LIMIT
    if signal_name != "SIGTERM" or job is None:
        return CANCELLED
    fields = job_fields(job) or {}
    if fields.get("JobState") == "TIMEOUT":
        return TIME_LIMIT
    preempted = fields.get("PreemptTime", "None") != "None" or fields.get("JobState") == "PREEMPTED"
    return PREEMPTED if preempted else CANCELLED


def allowed(folder: RunFolder, *, how: str, mendable: bool, launcher: Mapping[str, Any]) -> bool:
    """Whether a start that ended so may be followed by another; `launcher`: of `config.yaml`."""
    ends = Counter(_kind(end) for end in attempts.recent_ends(folder))
    if how == PREEMPTED:
        return True
    if how == TIME_LIMIT:
        return ends[TIME_LIMIT] <= int(launcher["max_requeues"])  # this end is one of them
    if how == failure.NONFINITE:  # the same samples may end the same way again
        once = sum(end["how"] == how for end in attempts.recent_ends(folder)) == 1
        return mendable and once
    return mendable and ends["failure"] <= int(launcher["max_restarts"])


def _kind(end: Mapping[str, Any]) -> str:
    how = str(end["how"])
    return how if how in (TIME_LIMIT, PREEMPTED, CANCELLED, "completed") else "failure"


def hosts_to_exclude(folder: RunFolder) -> list[str]:
    """Hosts on which the run failed first more than once."""
    failed = Counter(
        end["host"] for end in attempts.recent_ends(folder) if end["host"] and _kind(end) == "failure"
    )
    return sorted(host for host, count in failed.items() if count >= TWICE)


def start_again(folder: RunFolder, *, launcher: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Have Slurm run this job once more; one line that says what came of it.

    Where Slurm will not requeue it (the site's setting, or its state), a new job takes its place with
    `launcher.resubmit`.
    """
    job = job_of(environment)
    assert job is not None  # it is called in one
    done = _run("scontrol", "requeue", job)
    if done.returncode == 0:
        excluded = hosts_to_exclude(folder)
        if excluded:
            names = ",".join([*filter(None, [launcher["exclude"]]), *excluded])
            _run("scontrol", "update", f"JobId={job}", f"ExcNodeList={names}")
        return f"requeued as job {job}" + (f", without {', '.join(excluded)}" if excluded else "")
    refusal = done.stderr.strip() or "scontrol requeue failed"
    fields = job_fields(job)
    if fields is None:
        return f"not requeued, since Slurm does not answer ({refusal})"
    if fields.get("JobState") in ("PENDING", "CONFIGURING", "REQUEUED"):
        return f"requeued by Slurm itself as job {job}"
    if not launcher["resubmit"]:
        return f"not requeued ({refusal}); launcher.resubmit=true submits a new job then"
    exclude = hosts_to_exclude(folder)
    flags = [f"--exclude={','.join([*filter(None, [launcher['exclude']]), *exclude])}"] if exclude else []
    done = _run("sbatch", "--parsable", *flags, str(folder.resubmission))
    if done.returncode == 0:
        new = done.stdout.strip().partition(";")[0]
        owner.hand_to_job(folder, new)
        return f"resubmitted as job {new}"
    return f"neither requeued ({refusal}) nor resubmitted ({done.stderr.strip()})"


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # A job's own variables must not become another's.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_") or k == "SLURM_CONF"}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, returncode=1, stdout="", stderr=str(error))
