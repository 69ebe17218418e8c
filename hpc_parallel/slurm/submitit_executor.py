"""Submits through submitit. Its import takes 0.1 s, so only the launch of a job imports this module."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_parallel.slurm.environment import as_submitter
from hpc_parallel.slurm.submit import SiteRefusedError, job_id_in, refusal, warn_of_overrides


class Executor(SlurmExecutor):
    """submitit's executor; it also works without Slurm for a preview, and returns the script to submit."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return job_id_in(string if isinstance(string, str) else string.decode(errors="replace"))

    @property
    def script(self) -> str:
        return self._make_submission_file_text(self._submitit_command_str, "")

    def submit_call(self, function: Callable[..., object], *arguments: str) -> tuple[str, str]:
        """Submit a job that calls the function; returns the job id and the script that Slurm got.

        Raises SiteRefusedError with Slurm's message.
        """
        warn_of_overrides(self.script)
        try:
            # Hide the refusal that submitit prints, because the exception below repeats it.
            with as_submitter(self.script), redirect_stderr(io.StringIO()):
                job = self.submit(function, *arguments)
        except (FailedJobError, FailedSubmissionError, SiteRefusedError) as error:
            raise refusal(str(error), scripts=Path(self.folder)) from error
        return str(job.job_id), job.paths.submission_file.read_text(encoding="utf-8")
