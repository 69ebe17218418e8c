"""On a real Slurm: what was submitted is what runs, under any name, and only from a folder of one's own."""

from __future__ import annotations

import os

import pytest
from test_jobs import SMALL, Site, losses, read

from tests.distributed.test_rerun import MODEL
from tests.unit.test_snapshot import git

pytestmark = pytest.mark.slurm
WORDS = (
    "strategy=data", "nodes=2", "training.steps=3", "training.log_every=1", "training.validate_every=null",
    "data.max_bytes=100000", "data.sequence_length=8", "training.measure_steps=0", "launcher=slurm",
    "training.precision=float32",  # the hosts of the tests claim GPUs, whose default is bfloat16
)  # fmt: skip


def job_of(stdout: str) -> str:
    return next(line.split()[1] for line in stdout.splitlines() if line.startswith("job "))


@pytest.mark.full
def test_edits_while_a_job_waits_change_nothing(site: Site) -> None:
    """A job that is held while its model and this very checkout's place on the import path change."""
    (site.home / "conf" / "model").mkdir(parents=True)
    (site.home / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 8\n")
    (site.home / "mymodel.py").write_text(MODEL)
    (site.home / ".gitignore").write_text("waits\nnow\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        git(site.home, *words)
    own = ("--config-dir", "conf", "model=mine", *WORDS)
    now = site.run(*own, "run_dir=now", "launcher=local")
    assert now.returncode == 0, now.stdout + now.stderr
    held = site.run(*own, "run_dir=waits", "+launcher.extra.hold=true")
    assert held.returncode == 0, held.stderr
    job_id = job_of(held.stdout)
    (site.home / "mymodel.py").write_text(MODEL.replace("SCALE = 1.0", "SCALE = 3.0"))
    (site.home / "conf" / "model" / "mine.yaml").write_text("_target_: mymodel.Mine\nwidth: 16\n")
    assert site.record(job_id)["JobState"] == "PENDING"
    site.cluster.run("scontrol", "release", job_id)
    assert site.ended(job_id)["JobState"] == "COMPLETED"
    assert losses(site.home / "waits") == losses(site.home / "now")


@pytest.mark.full
def test_any_name_is_a_name(site: Site) -> None:
    name = '-it\'s "q" $(touch pwned) `touch pwned` & ; ü #x'
    folder = "r $(touch pwned) 'x' é/-n"
    spelt = [f"{key}='{text}'" for key, text in (
        ("name", name.replace("'", "\\'")), ("run_dir", folder.replace("'", "\\'")),
        ("+launcher.extra.comment", name.replace("'", "\\'")),
    )]  # fmt: skip
    done = site.run(*WORDS, *SMALL, "training.steps=2", *spelt, "launcher.wait=true")
    assert done.returncode == 0, done.stdout + done.stderr
    assert read(site.home / folder, "summary.json")["outcome"] == "completed"
    shown = site.cluster.run("scontrol", "show", "job", job_of(done.stdout))
    assert f"JobName={name}\n" in shown
    assert f"Comment={name}" in shown
    assert not list(site.home.rglob("pwned"))


@pytest.mark.usefixtures("beside_others")
def test_a_folder_that_others_took_over_is_not_run(site: Site) -> None:
    """Held until the run folder is open to others: nothing in it is unpickled or imported."""
    held = site.run(*WORDS, *SMALL, "run_dir=open", "+launcher.extra.hold=true")
    assert held.returncode == 0, held.stderr
    job_id, folder = job_of(held.stdout), site.home / "open"
    folder.chmod(0o777)
    (payload,) = (folder / "slurm").glob("*_submitted.pkl")
    # what another could put there: b"cos\nsystem\n(S'touch PATH'\ntR." runs a command when it is unpickled
    payload.write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(site.home) + b"/pwned'\ntR.")
    site.cluster.run("scontrol", "release", job_id)
    assert site.ended(job_id)["JobState"] == "FAILED"
    assert not (site.home / "pwned").exists()
    failure = read(folder, "failure.json")
    assert f"{folder} can be written by others than this user: nothing in it is run" in failure["line"]
