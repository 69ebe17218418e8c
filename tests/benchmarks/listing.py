"""How long `status --all` takes for a thousand runs: `python tests/benchmarks/listing.py [RUNS]`."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.recorded_runs import failed, finished


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            make = failed if number % 5 == 0 else finished
            make(
                Path(folder, "runs", "pipeline", f"20261122-000000-{number:08x}"),
                "strategy=pipeline",
                "nodes=2",
            )
        for words in (["status", "--all"], ["status", "--all", "--json"], ["status"]):
            before_s, began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.perf_counter()
            command = [sys.executable, "-m", "hpc_parallel", *words]
            subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
            wall_s = time.perf_counter() - began
            user_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
            print(f"{' '.join(words):20} {count} runs: {wall_s:.2f} s, {user_s:.2f} s of them computing")
    print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
