"""The clients of these tests, and their loss curves in one process without hpc_parallel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

CLIENTS = Path(__file__).parent / "clients"
ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}  # fmt: skip
_LOSS = re.compile(r"loss (\d+\.\d+)")


@cache
def losses_alone(client: str, *arguments: str) -> list[float]:
    """The losses that a client prints when it runs as one process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | ALONE
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(CLIENTS / client), *arguments],
            cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=900,
        )  # fmt: skip
    return losses_of(done.stdout)


def printed_losses(folder: Path) -> list[float]:
    """The losses that rank 0 of a run printed."""
    return losses_of((folder / "logs" / "rank-0.out").read_text())


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in _LOSS.findall(text)]
