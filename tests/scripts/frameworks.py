"""Scripts that train with a framework: the line that starts each with hpc_parallel, and what must be equal.

Each is killed once and resumes. Its losses over two nodes are those of one process that nothing disturbs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.scripts.loops import losses_alone, printed_losses

STEPS = 8
SAVED = 3  # every so many steps


@dataclass(frozen=True)
class Client:
    file: str
    package: str
    resume: str | None  # script.resume_arguments
    words: tuple[str, ...]  # of the script: its folder, and the step at which a rank dies
    alone: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


def _lightning(environment: str) -> Client:
    words = ("--nodes", "2", "--environment", environment, "--out", "{run}/out", "--die-at", "5")
    return Client("with_lightning.py", "lightning", "--resume {run}/out/last.ckpt", words)


ON_SLURM = _lightning("slurm")
CLIENTS = [
    Client(
        "hf_trainer.py",
        "accelerate",
        None,
        ("--output_dir", "{run}/out", "--die_at", "5"),
        ("--output_dir", "out"),
    ),
    Client(
        "with_accelerate.py", "accelerate", "--resume {run}/state", ("--out", "{run}/state", "--die-at", "5")
    ),
    _lightning("lightning"),
    Client(
        "hydra_app.py",
        "hydra",
        "resume={run}/out/last.pt",
        ("die_at=5",),
        keys=("script.style=key=value", "script.arguments.out={run}/out"),
    ),
    Client("with_deepspeed.py", "deepspeed", "--resume {run}/out", ("--out", "{run}/out", "--die-at", "5")),
]


def named(client: Client) -> str:
    return Path(client.file).stem + "_on_slurm" * (client is ON_SLURM)


def require(client: Client) -> None:
    if find_spec(client.package) is None:
        pytest.skip(f"{client.package} is not installed (make test-full does it)")


def resumes_and_equals_one_process(
    client: Client, *, start: Callable[..., CompletedProcess[str]], home: Path
) -> None:
    """Start the client over two nodes, of which one dies, and compare its losses."""
    require(client)
    resume = [f"script.resume_arguments={client.resume}"] if client.resume else []
    words = ("nodes=2", "launcher.max_restarts=1", "run_dir=run", *resume, *client.keys)
    done = start(*words, "--", client.file, *client.words)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = losses_alone(client.file, *client.alone)
    assert len(whole) == STEPS
    printed = printed_losses(home / "run")
    assert printed[:SAVED] == pytest.approx(whole[:SAVED], rel=1e-5)
    assert printed[SAVED - STEPS :] == pytest.approx(whole[SAVED:], rel=1e-5)
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert (summary["outcome"], summary["restarts"]) == ("completed", 1)
