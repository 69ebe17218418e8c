"""From Enter to the call of sbatch: our command beside hydra-submitit-launcher, over the same conf/.

sbatch is a script that notes the time and answers at once, so the figures are the client's own time. On a
real Slurm: tests/benchmarks/submission_time.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from tests import ROOT, python_path
from tests.benchmarks.peers.ratio import ratio_of

STARTS, PATIENCE_S = 10, 60.0
WORDS = ("strategy=data", "nodes=2", "cluster=cpu")
STUB = """#!/bin/sh
case " $* " in *" --test-only "*) exit 0;; esac
date +%s.%N > "$CALLED.part" && mv "$CALLED.part" "$CALLED"
echo "Submitted batch job 4242"
"""
APP = """
import hydra
from hpc_parallel.config.schema import register

@hydra.main(version_base="1.3", config_path={conf!r}, config_name="config")
def main(config):
    print(config.nodes)

register()
main()
"""
THEIRS = ("hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", "hydra.launcher.timeout_min=10")


def measure(peers: str, *, starts: int = STARTS) -> dict[str, Any]:
    """One row; a pair is one submission of each, the first pair fills the caches of files."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = stub_slurm(folder)
        app = folder / "app.py"
        app.write_text(APP.format(conf=str(ROOT / "conf")), encoding="utf-8")
        ours = (["-m", "hpc_parallel.run", *WORDS, "launcher=slurm"], environment)
        with_peers = f"{environment['PYTHONPATH']}{os.pathsep}{peers}"
        theirs = ([str(app), "-m", *WORDS, *THEIRS], {**environment, "PYTHONPATH": with_peers})
        without = ([*ours[0], "launcher.snapshot=false"], environment)  # theirs keeps no source
        ours_s, theirs_s, without_s = [], [], []
        for _ in range(starts + 1):
            ours_s.append(seconds_to_sbatch(*ours, folder=folder))
            theirs_s.append(seconds_to_sbatch(*theirs, folder=folder))
            without_s.append(seconds_to_sbatch(*without, folder=folder))
    measured = asdict(ratio_of(ours_s[1:], theirs_s[1:]))
    measured["ratio"] = measured.pop("median")
    ours_s, theirs_s = ours_s[1:], theirs_s[1:]
    shown = f"ours {median(ours_s):.2f} s ({median(without_s[1:]):.2f} s without a copy of the source)"
    text = (
        f"{shown}, hydra-submitit-launcher {median(theirs_s):.2f} s to sbatch; ratio "
        f"{measured['ratio']:.3f} ({measured['low']:.3f} to {measured['high']:.3f}, {starts} pairs)"
    )
    return {
        **measured, "ours_s": ours_s, "theirs_s": theirs_s,
        "without_snapshot_s": without_s[1:], "text": text,
        "met": measured["ratio"] >= 1.0 and measured["low"] >= 0.98,
    }  # fmt: skip


def stub_slurm(folder: Path) -> dict[str, str]:
    """Commands of a Slurm that takes everything; returns the environment of the submissions."""
    commands = folder / "bin"
    commands.mkdir()
    for name in ("sbatch", "srun", "scontrol", "squeue", "sacct", "scancel", "sinfo"):
        (commands / name).write_text(STUB if name == "sbatch" else "#!/bin/sh\n", encoding="utf-8")
        (commands / name).chmod(0o755)
    return {
        **os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path(),
        "CALLED": str(folder / "called"),
    }  # fmt: skip


def seconds_to_sbatch(words: Sequence[str], environment: Mapping[str, str], *, folder: Path) -> float:
    """From the start of the command to its call of sbatch; then it is ended. Raises RuntimeError."""
    called = Path(environment["CALLED"])
    called.unlink(missing_ok=True)
    log = folder / "log"
    with log.open("w", encoding="utf-8") as stream:
        began = time.time()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=dict(environment), stdout=stream, stderr=stream,
            start_new_session=True,
        )  # fmt: skip
        while process.poll() is None and not called.exists() and time.time() < began + PATIENCE_S:
            time.sleep(0.01)
        if process.poll() is None and not called.exists():
            os.killpg(process.pid, signal.SIGKILL)
        if words[0] != "-m":  # the launcher waits for its job, which will not run
            time.sleep(0.5)
            with suppress(ProcessLookupError):  # it has ended before: its log says why
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not called.exists():
        raise RuntimeError(f"{' '.join(words)} never called sbatch:\n{log.read_text()}")
    return float(called.read_text()) - began
