"""`cancel` ends what is the caller's and that run's, on the word of no other record."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.failure.end_runs import is_script_of
from hpc_parallel.record import owner
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, write_sweep
from hpc_parallel.slurm.jobs import Job
from tests.recorded_runs import GONE, living, own, started
from tests.security.users import ATTACKER, VICTIM, call_as, give, needs_root

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with living() as made:
        yield made


pytestmark = pytest.mark.usefixtures("silent_slurm")


def cancelled(capsys: Capture, *words: str) -> tuple[int, str]:
    code = main(["cancel", *words, "--yes"])
    return code, capsys.readouterr().err


def site(folder: Path, *, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm in which job 17 runs `script`; returns where scancel notes what it was asked."""
    told, state = folder / "scancel.log", folder / "state"
    state.write_text("RUNNING")
    answers = {
        "sacct": "",
        "squeue": f"case $* in *%o*) echo '17|17|{script}' ;; *) echo 17\\|17\\|$(cat {state}) ;; esac",
        "scontrol": "echo 'Slurmctld(primary) is UP'",
        "scancel": f'echo "$@" >> {told}; echo COMPLETING > {state}',
    }  # fmt: skip
    for name, answer in answers.items():
        (folder / name).write_text(f"#!/bin/sh\n{answer}\n")
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return told


@needs_root
class TestAsVictim:
    """The processes are real, and the record has their true start time, which anyone can read in /proc."""

    def cancel(self, shared: Path, folder: RunFolder, process: int) -> int:
        def work() -> int:
            os.chdir(shared)
            return main(["cancel", str(folder.path), "--yes"])

        begun = owner._began(process)
        record = {"host": GONE["host"], "pid": process, "began": begun, "folder": folder.path.stat().st_ino}
        write_json(folder.owner, record)
        folder.owner.chmod(0o644)
        give(folder.path.parent, ATTACKER)
        for place in (folder.path.parent, folder.path, folder.config, folder.metrics, folder.attempts):
            place.chmod(0o755)
        return int(call_as(VICTIM, work))

    def test_a_foreign_record_ends_nothing(self, shared: Path) -> None:
        program = [sys.executable, "-c", "import time; time.sleep(1000)"]
        program = ["/bin/sleep", "1000"] if os.path.exists("/bin/sleep") else program
        with subprocess.Popen(program, user=VICTIM, group=VICTIM, extra_groups=[], cwd="/") as process:
            try:
                assert self.cancel(shared, started(shared / "theirs" / "1"), process.pid) == 1
                assert process.poll() is None
            finally:
                process.kill()

    def test_a_foreign_record_in_an_own_folder(self, shared: Path, capsys: Capture) -> None:
        """As a hard link or a write into a folder that was open for a while leaves it."""
        folder = started(shared / "mine" / "1")
        with living() as process:
            own(folder, process.pid)
            os.chown(folder.owner, ATTACKER, ATTACKER)
            code, error = cancelled(capsys, str(folder.path))
            assert (code, process.poll()) == (1, None)
            assert f"{folder.owner} belongs to user {ATTACKER}" in error

    def test_a_foreign_sweep_names_own_runs(self, shared: Path, capsys: Capture) -> None:
        folder = started(shared / "mine" / "1")
        sweep = shared / "theirs"
        sweep.mkdir()
        runs = (SweepRun((), folder.path, nodes=1, gpus_per_node=1),)
        write_sweep(sweep, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, runs, ()))
        os.chown(sweep / "sweep.json", ATTACKER, ATTACKER)
        with living() as process:
            own(folder, process.pid)
            code, error = cancelled(capsys, str(sweep))
            assert (code, process.poll()) == (2, None)
            assert "is another user's sweep" in error


def test_a_hard_link(tmp_path: Path, capsys: Capture, process: subprocess.Popen[bytes]) -> None:
    folder, other = started(tmp_path / "runs/a/1"), started(tmp_path / "runs/a/2")
    own(other, process.pid)
    folder.owner.unlink()
    os.link(other.owner, folder.owner)
    code, error = cancelled(capsys, "a/1")
    assert (code, process.poll()) == (1, None)
    assert "is a hard link" in error


def test_a_copied_record(tmp_path: Path, capsys: Capture, process: subprocess.Popen[bytes]) -> None:
    """The user copied a run folder while the run went on: the copy does not run."""
    folder, other = started(tmp_path / "runs/a/1"), started(tmp_path / "runs/a/2")
    own(other, process.pid)
    folder.owner.write_bytes(other.owner.read_bytes())
    code, error = cancelled(capsys, "a/1")
    assert (code, process.poll()) == (3, None)
    assert f"was copied from another folder. If process {process.pid} is this run's: kill" in error
    assert cancelled(capsys, "a/2")[0] == 0
    assert process.wait(10) == -signal.SIGTERM


def test_a_moved_folder(tmp_path: Path, capsys: Capture, process: subprocess.Popen[bytes]) -> None:
    folder = started(tmp_path / "runs/a/1")
    own(folder, process.pid)
    folder.path.rename(tmp_path / "runs/a/2")
    assert cancelled(capsys, "a/2")[0] == 0
    assert process.wait(10) == -signal.SIGTERM


def test_a_claim_names_its_folder(tmp_path: Path) -> None:
    folder = started(tmp_path / "runs/a/1")
    for write in (owner.claim, owner.queue, owner.take):
        folder.owner.unlink()
        write(folder)
        record = owner.Owner.read(folder)
        assert record.folder == folder.path.stat().st_ino


@pytest.mark.parametrize(
    "record",
    ['{"pid": "../tmp/x"}', '{"pid": 1', "[]", '{"pid": -1, "host": "x", "began": "x"}',
     '{"pid": "\\u0000", "host": "x", "began": "x"}', '{"job_id": "--user=root"}'],
)  # fmt: skip
def test_a_torn_record(record: str, tmp_path: Path, capsys: Capture) -> None:
    folder = started(tmp_path / "runs/a/1")
    folder.owner.write_text(record)
    code, error = cancelled(capsys, "a/1")
    assert code == 2
    assert f"{folder.owner} can't be read" in error
    assert "Try squeue --me, or ps" in error


@pytest.mark.parametrize(
    ("script", "asked"),
    [("{run}/batch_script.sh", True), ("{run}/slurm/resubmit.sh", True), ("/home/me/other job.sh", False),
     ("{run}-2/batch_script.sh", False), ("", False)],
)  # fmt: skip
def test_a_job_is_identified_by_its_script(
    script: str, asked: bool, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = started(tmp_path / "runs/a/1")
    owner.hand_to_job(folder, Job("17"))
    told = site(tmp_path, script=script.format(run=folder.path), monkeypatch=monkeypatch)
    code, error = cancelled(capsys, "a/1")
    assert (code, told.exists()) == (0 if asked else 3, asked)
    assert asked or "which is not this run's. If you mean that job: scancel 17" in error


def test_a_job_that_is_not_in_the_users_queue(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = started(tmp_path / "runs/a/1")
    owner.hand_to_job(folder, Job("17"))
    told = site(tmp_path, script="x", monkeypatch=monkeypatch)
    (tmp_path / "squeue").write_text("#!/bin/sh\ncase $* in *--me*) ;; *) echo '17|17|RUNNING' ;; esac\n")
    code, error = cancelled(capsys, "a/1")
    assert (code, told.exists()) == (3, False)
    assert "Slurm has no job 17 of yours in its queue" in error


def test_a_task_of_an_array(tmp_path: Path) -> None:
    """Its script lies beside links to its runs, by number."""
    runs = [RunFolder(tmp_path / name) for name in ("a", "b")]
    tasks = tmp_path / "sweep/arrays/0"
    tasks.mkdir(parents=True)
    for index, run in enumerate(runs):
        run.create()
        (tasks / str(index)).symlink_to(run.path)
    script = str(tasks / "batch_script.sh")
    assert is_script_of(runs[1], script, job="17_1")
    assert not is_script_of(runs[1], script, job="17_0")
    assert not is_script_of(runs[1], script, job="17")
