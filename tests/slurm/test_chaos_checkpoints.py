"""What a run goes on from is harmed: the newest checkpoint, a save under way, the disk it goes to."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from chaos import DATA, EVERY, STEPS, Case
from test_jobs import read

from tests.waiting import wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.chaos]


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param("truncated", marks=pytest.mark.chaos_slow),
        pytest.param("one byte flipped", marks=pytest.mark.full),
    ],
)
def test_the_newest_checkpoint_is_damaged(case: Case, harm: str) -> None:
    job = case.submit(*DATA)
    case.reach(2 * EVERY, 60)
    saved = case.cancel(job)
    newest, before = case.checkpoints
    file = case.dice.choice(sorted(newest.path.glob("*.distcp")))
    content = bytearray(file.read_bytes())
    at = case.dice.randrange(len(content))
    if harm == "truncated":
        del content[at:]
    else:
        content[at] ^= 1 << case.dice.randrange(8)
    file.write_bytes(content)
    case.row.done.append(f"{harm} at byte {at} of {file.name}")
    case.kept = before.step
    assert case.ended(case.resume()) == "COMPLETED"
    case.assert_completed(restarts=1, lost=saved - before.step)
    told = re.findall(
        rf"WARNING: the checkpoint of step {saved} is damaged \({file.name} .*\); continuing from that of "
        rf"step {before.step}: steps {before.step + 1} to {saved} are lost",
        (case.folder / "logs" / "rank-0.err").read_text(),
    )
    assert len(told) == 1


@pytest.fixture
def small_disk(case: Case) -> Iterator[tuple[Case, str]]:
    """A job of one host whose checkpoints lie on a disk that its case can fill, and the job's id.

    All are kept, since the oldest would make room for the newest.
    """
    host = "n1"
    job = case.submit(
        "strategy=data", "nodes=1", "gpus_per_node=2", f"+launcher.extra.nodelist={host}",
        "+launcher.extra.hold=true", "training.keep_last=20",
    )  # fmt: skip
    folder = case.folder / "checkpoints"
    folder.mkdir(mode=0o700)
    slurmd = next(pid for pid in case.site.cluster.pids(host) if psutil.Process(pid).name() == "slurmd")
    inside = ("nsenter", f"--mount=/proc/{slurmd}/ns/mnt")  # a mount that only this host sees
    case.site.cluster.run(*inside, "mount", "-t", "tmpfs", "-o", "size=100m,mode=0700", "tmpfs", str(folder))
    case.seen_from = Path(f"/proc/{slurmd}/root")
    case.site.cluster.run("scontrol", "release", job)
    try:
        yield case, job
    finally:
        case.site.cluster.run(*inside, "umount", "--lazy", str(folder))


def fill(case: Case) -> Path:
    """Take all that is free."""
    case.note("disk full")
    filler = case.checkpoint_folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))
    return filler


def times_told(case: Case) -> int:
    told = (case.folder / "logs" / "rank-0.err").read_text()
    return len(re.findall(r"WARNING: the checkpoint of step \d+ could not .*No space left on device", told))


@pytest.mark.chaos_slow
def test_the_disk_is_full_for_a_while(small_disk: tuple[Case, str]) -> None:
    """Training goes on, is told, and keeps its state again once it can."""
    case, job = small_disk
    case.reach(EVERY + 1, 40)
    filler = fill(case)
    wait_for(lambda: times_told(case) > 0)
    filler.unlink()
    assert case.ended(job) == "COMPLETED"
    case.assert_completed(restarts=0, lost=0)


@pytest.mark.chaos_slow
def test_the_disk_is_full_at_the_last_save(small_disk: tuple[Case, str]) -> None:
    """There it is a failure; where there is room the run goes on from the checkpoint before."""
    case, job = small_disk
    case.reach(STEPS - 3 * EVERY, STEPS - EVERY)
    filler = fill(case)
    assert case.ended(job) == "FAILED"
    failure = read(case.folder, "failure.json")
    assert failure["kind"] == "disk"
    case.assert_said(job, r"rank \d on n1 failed first: .*No space left on device.*")
    filler.unlink()
    shutil.copytree(case.checkpoint_folder, case.folder / "checkpoints", dirs_exist_ok=True)
    case.seen_from = Path("/")
    again = case.resume("+launcher.extra.nodelist=n2", "+launcher.extra.hold=false")
    assert case.ended(again) == "COMPLETED"
    case.assert_completed(restarts=1, lost=(1, 4 * EVERY))
