"""Submits through submitit. Its import takes 0.1 s, so only the launch of a job imports this module."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpc_parallel.slurm.client import submission_environment
from hpc_parallel.slurm.jobs import Job
from hpc_parallel.slurm.submit import SiteRefusedError, job_in, refusal, warn_of_overrides


class Executor(SlurmExecutor):
    """submitit's executor for a batch script that is already written."""

    def __init__(self, folder: Path, *, script: str, time_minutes: int) -> None:
        super().__init__(folder)
        self.parameters["time"] = time_minutes
        self._script = script

    @classmethod
    def affinity(cls) -> int:
        return 2  # the hosts of the job have srun; this one needs sbatch only

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        kept = submission_environment(os.environ, script=self._script)
        unset = [f"--unset={name}" for name in os.environ.keys() - kept.keys()]
        return ["env", *unset, "sbatch", str(submission_file_path)]

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        output = string if isinstance(string, str) else string.decode(errors="replace")
        self._job = job_in(output, scripts=Path(self.folder))
        return self._job.id

    def submit_call(self, function: Callable[..., object], *arguments: str) -> Job:
        """Submit a job that calls the function. Raises SiteRefusedError with Slurm's message."""
        warn_of_overrides(self._script)
        began_s = time.time()
        try:
            # submitit prints the refusal, which the exception repeats
            with redirect_stderr(io.StringIO()) as printed:
                self.submit(function, *arguments)
            for line in printed.getvalue().splitlines():
                if line.startswith("warning"):  # of `job_in`
                    print(line, file=sys.stderr)
        except (FailedJobError, FailedSubmissionError, SiteRefusedError) as error:
            raise refusal(error, scripts=Path(self.folder)) from error
        return replace(self._job, submitted_s=began_s)
