"""`script.start=torchrun` and `node` on this machine, over two simulated nodes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.scripts.loops import losses_alone, printed_losses
from tests.scripts.test_local_scripts import only_run, processes_of, run, started
from tests.waiting import wait_for

pytestmark = pytest.mark.processes
BY_TORCHRUN = ("nodes=2", "launcher=local", "script.start=torchrun")
SHAPE = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GROUP_RANK')))\n"


def test_torchrun_of_each_node_starts_its_ranks_and_gets_its_own_options(home: Path) -> None:
    (home / "shape.py").write_text(SHAPE + "print(os.environ['TORCHELASTIC_MAX_RESTARTS'])\n")
    words = (*BY_TORCHRUN, "gpus_per_node=2", "script.torchrun=[--max-restarts=3]")
    done = run(home, *words, "--", "shape.py")
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(only_run(home) / "logs" / f"rank-{rank}.out").read_text() for rank in range(4)]
    assert logs == [f"{rank} {rank % 2} 4 {rank // 2}\n3\n" for rank in range(4)]


@pytest.mark.full
def test_torchrun_that_can_not_start_says_why(home: Path) -> None:
    (home / "shape.py").write_text(SHAPE)
    done = run(home, *BY_TORCHRUN, "script.torchrun=[--nonsense=1]", "--", "shape.py")
    assert done.returncode == 1
    assert (
        "exit code 2: torchrun: error: unrecognized arguments: --nonsense=1" in done.stdout.splitlines()[-1]
    )


def test_one_process_of_each_node_gets_what_a_launcher_needs(home: Path) -> None:
    (home / "shape.py").write_text(SHAPE + "import sys; print(*sys.argv[1:])\n")
    words = ("{rank} {nodes} {devices} {processes} {address}", "{port}")
    done = run(
        home, "nodes=2", "gpus_per_node=3", "launcher=local", "script.start=node", "--", "shape.py", *words
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = [(only_run(home) / "logs" / f"rank-{rank}.out").read_text() for rank in range(2)]
    ports = {log.split()[-1] for log in logs}
    assert len(ports) == 1
    assert logs == [f"{rank} 0 2 {rank}\n{rank} 2 3 6 127.0.0.1 {min(ports)}\n" for rank in range(2)]


@pytest.mark.full
def test_a_process_of_each_node_starts_the_ranks_itself(home: Path) -> None:
    launcher = (
        "-m", "torch.distributed.run", "--nnodes={nodes}", "--nproc-per-node={devices}", "--node-rank={rank}",
        "--master-addr={address}", "--master-port={port}",
    )  # fmt: skip
    words = ("nodes=2", "gpus_per_node=2", "launcher=local", "script.start=node")
    done = run(home, *words, "--", *launcher, "ddp.py", "--steps", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert printed_losses(only_run(home)) == pytest.approx(losses_alone("ddp.py", "--steps", "4"), rel=1e-5)
    assert json.loads((only_run(home) / "summary.json").read_text())["world_size"] == 2
    assert not (only_run(home) / "logs" / "rank-2.out").exists()


@pytest.mark.full
def test_a_cancelled_torchrun_leaves_nothing_running(home: Path) -> None:
    (home / "sleeper.py").write_text("import time; print('ready', flush=True); time.sleep(600)\n")
    process = started(home, *BY_TORCHRUN, "--", "sleeper.py")
    wait_for(lambda: len(processes_of(f"code/{home.name}/sleeper.py")) >= 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 1
    assert processes_of(str(home)) == []
    assert json.loads((only_run(home) / "summary.json").read_text())["outcome"] == "cancelled"
