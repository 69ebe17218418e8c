"""Scripts of frameworks on a real Slurm over two hosts, and their own handlers of Slurm's signals."""

from __future__ import annotations

import json
from functools import partial

import pytest
from test_jobs import Site, read

from tests.scripts.frameworks import CLIENTS, ON_SLURM, Client, named, require, resumes_and_equals_one_process
from tests.scripts.loops import losses_alone, printed_losses
from tests.waiting import wait_for

SHOW = """
import json, os, pathlib
def of_slurm(pairs): return {name: value for name, value in pairs if name.startswith("SLURM")}
begun = pathlib.Path(f"/proc/{os.getppid()}/environ").read_text().split(chr(0))
print(json.dumps([of_slurm(os.environ.items()), of_slurm(word.split("=", 1) for word in begun if word)]))
"""
pytestmark = [pytest.mark.full, pytest.mark.slurm, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("client", [*CLIENTS, ON_SLURM], ids=named)
def test_a_framework_resumes_after_a_kill_and_equals_one_process(client: Client, site: Site) -> None:
    start = partial(site.run, "launcher=slurm", "launcher.wait=true", timeout_s=900)
    resumes_and_equals_one_process(client, start=start, home=site.home)


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_lightning_saves_and_requeues_the_job_itself(name: str, site: Site) -> None:
    """Slurm sends USR2, as before a time limit: Lightning's own handler saves and requeues the job."""
    require(ON_SLURM)
    words = ("nodes=2", "launcher=slurm", f"script.stop_signal=SIG{name}", "run_dir=run", "--")
    arguments = ("--nodes", "2", "--out", "{run}/out", "--environment", "slurm", "--wait-at", "5")
    done = site.run(*words, ON_SLURM.file, *arguments, "--requeue-signal", f"SIG{name}")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = site.home / "run"
    out = folder / "logs" / "rank-0.out"
    wait_for(lambda: out.exists() and "step 5 loss" in out.read_text(), within_s=600)
    job_id = read(folder, "owner.json")["job_id"]
    wait_for(lambda: "waiting" in (folder / "logs" / "rank-1.out").read_text(), within_s=600)
    site.cluster.run("scancel", "--signal=USR2", job_id)
    wait_for((folder / "out" / "hpc_ckpt_1.ckpt").exists)
    wait_for(lambda: "step 8 loss" in out.read_text(), within_s=600)
    wait_for((folder / "summary.json").exists)
    summary = read(folder, "summary.json")
    assert (summary["outcome"], summary["restarts"], summary["job_ids"]) == ("completed", 1, [job_id])
    assert printed_losses(folder) == pytest.approx(losses_alone(ON_SLURM.file), rel=1e-5)


def test_slurms_variables_reach_the_script_as_slurm_set_them(site: Site) -> None:
    """Those with which the task began: what submitit removes is there again."""
    (site.home / "show.py").write_text(SHOW)
    words = ("nodes=2", "launcher=slurm", "launcher.wait=true", "run_dir=run")
    done = site.run(*words, "--", "show.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (job_id,) = read(site.home / "run", "summary.json")["job_ids"]
    record = site.record(job_id)
    for rank in (0, 1):
        variables, of_task = json.loads((site.home / "run" / "logs" / f"rank-{rank}.out").read_text())
        assert variables == of_task
        expected = {
            "SLURM_JOB_ID": job_id, "SLURM_JOB_NAME": record["JobName"],
            "SLURM_JOB_NODELIST": record["NodeList"],
            "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0",
            "SLURM_NODEID": str(rank),
        }  # fmt: skip
        assert {name: variables[name] for name in expected} == expected
