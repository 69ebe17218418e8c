"""What Slurm says of a job, from whichever of its commands answers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True)
class JobState:
    """One of Slurm's job states, and its reason (why it waits, or how it ended)."""

    state: str
    reason: str

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def __str__(self) -> str:
        return self.state.lower() + (f" ({self.reason})" if self.reason not in ("", "None") else "")


def job_state(job_id: str) -> JobState | None:
    """The controller's word, or after it has forgotten the job that of accounting; None where neither knows.

    A site may run without accounting, and the controller forgets a job some minutes after its end.
    """
    shown = _ask("scontrol", "--oneliner", "show", "job", job_id)
    if shown is not None:
        fields = dict(word.split("=", 1) for word in shown.split() if "=" in word)
        return JobState(fields["JobState"], fields.get("Reason", ""))
    recorded = _ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")
    if recorded:
        return JobState(recorded.split()[0], "")  # "CANCELLED by 1000"
    return None


def _ask(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
