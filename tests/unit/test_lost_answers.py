"""After an error of sbatch the job may exist nevertheless."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.slurm import submit
from hpc_parallel.slurm.submit import SiteRefusedError, submit_script


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm whose sbatch loses the answer; it has the jobs of the file `jobs`, if there is one."""
    commands = {
        "sbatch": "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
        "squeue": f"cat {tmp_path}/jobs",
        "scancel": f"echo $* > {tmp_path}/cancelled",
        "scontrol": "exit 1",
        "sinfo": "exit 1",
    }
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    monkeypatch.setattr(submit, "ANSWER_S", 0.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/batch_script.sh").write_text("#!/bin/sh\n")
    return tmp_path


@pytest.mark.parametrize(
    ("jobs", "told", "cancelled"),
    [
        (
            "12|12|PENDING|None|{run}/batch_script.sh\n13|13|RUNNING|None|/other.sh\n",
            "It had taken job 12",
            "12\n",
        ),
        ("13|13|RUNNING|None|/other.sh\n", "nothing was submitted", None),
        ("Welcome to Big.\n", "It may have taken the job", None),
        (None, "It may have taken the job", None),
    ],
)
def test_a_lost_answer_leaves_no_job_behind(
    site: Path, jobs: str | None, told: str, cancelled: str | None
) -> None:
    if jobs is not None:
        (site / "jobs").write_text(jobs.format(run=site / "run"))
    with pytest.raises(SiteRefusedError, match=told):
        submit_script(site / "run/batch_script.sh")
    done = site / "cancelled"
    assert (done.read_text() if done.exists() else None) == cancelled
