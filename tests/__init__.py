"""Tests: one thread for each process, before torch is imported, and where this tree is.

Many ranks share few cores here, and threads of OpenMP wait for each other by spinning: with two threads
for each rank, a step of a job took seconds instead of milliseconds. A fork of a process with such threads can
hang.
"""

import os
import subprocess
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """The PYTHONPATH of a process that imports this tree first, and then what this process was given."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def printed(*words: str, cwd: Path, **variables: str) -> str:
    """What `python WORDS` prints in the folder `cwd`; it must end well."""
    done = subprocess.run(
        [sys.executable, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": python_path(), **variables},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
