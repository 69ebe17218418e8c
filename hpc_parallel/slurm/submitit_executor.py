"""Submits through submitit. Its import takes 0.1 s, so only the launch of a job imports this module."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_parallel.slurm.environment import as_submitter
from hpc_parallel.slurm.jobs import Job
from hpc_parallel.slurm.submit import SiteRefusedError, job_in, refusal, warn_of_overrides


class Executor(SlurmExecutor):
    """submitit's executor; it also works without Slurm for a preview, and returns the script to submit."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        self._job = job_in(string if isinstance(string, str) else string.decode(errors="replace"))
        return self._job.id

    @property
    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "")

    def submit_call(self, function: Callable[..., object], *arguments: str) -> tuple[Job, str]:
        """Submit a job that calls the function; returns the job and the script that Slurm got.

        Raises SiteRefusedError with Slurm's message.
        """
        warn_of_overrides(self.script)
        began_s = time.time()
        try:
            # Hide the refusal that submitit prints, because the exception below repeats it.
            with as_submitter(self.script), redirect_stderr(io.StringIO()):
                job = self.submit(function, *arguments)
        except (FailedJobError, FailedSubmissionError, SiteRefusedError) as error:
            raise refusal(str(error), scripts=Path(self.folder)) from error
        return replace(self._job, submitted_s=began_s), job.paths.submission_file.read_text(encoding="utf-8")
