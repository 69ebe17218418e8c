"""Seconds from Enter to the job's id on the test cluster, beside the floor: Hydra and submitit alone.

python tests/benchmarks/submission_time.py
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "slurm")]

from cluster import Cluster, unavailable_reason  # noqa: E402

from tests import python_path  # noqa: E402

STARTS = 15
TARGET_S = 0.7
OURS = ("-m", "hpc_parallel.run", "strategy=data", "nodes=2", "launcher=slurm", "cluster=cpu")
FLOOR = """
import hydra, submitit

@hydra.main(version_base="1.3", config_path={conf!r}, config_name="config")
def main(config):
    executor = submitit.SlurmExecutor(folder="jobs")
    executor.update_parameters(nodes=config.nodes, time=10)
    print("job        ", executor.submit(print, "done").job_id)

from hpc_parallel.config.schema import register
register()
main()
"""


def seconds_to_job_id(command: Sequence[str], *, folder: Path, environment: dict[str, str]) -> float:
    """From the start of `command` to its line with the job's id; the job is cancelled."""
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"job\s+(\d+)$", line):
                taken_s = time.perf_counter() - started
                process.stdout.read()
                subprocess.run(["scancel", found[1]], env=environment, check=True)
                return taken_s
    raise RuntimeError(f"{' '.join(command)} told no job id")


def main() -> int:
    if reason := unavailable_reason():
        print(f"left out: {reason}")
        return 0
    with Cluster.start(hosts=2) as cluster, tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        environment = {**os.environ, **cluster.environment, "PYTHONPATH": python_path()}
        floor = ("-c", FLOOR.format(conf=str(ROOT / "conf")), "nodes=2")
        times_s: dict[tuple[str, ...], list[float]] = {OURS: [], floor: []}
        for start in range(STARTS + 1):
            for command, taken_s in times_s.items():  # in turns, so that a slow moment meets both
                one_s = seconds_to_job_id(command, folder=folder, environment=environment)
                if start:  # the first fills the caches of files
                    taken_s.append(one_s)
        ours_s, floor_s = (statistics.median(taken_s) for taken_s in times_s.values())
    print(f"python {' '.join(OURS)}")
    print(f"from Enter to job id, median of {STARTS}: {ours_s:.2f} s (target: at most {TARGET_S} s)")
    print(f"Hydra and submitit alone: {floor_s:.2f} s; ratio {ours_s / floor_s:.2f}")
    return int(ours_s > TARGET_S)


if __name__ == "__main__":
    sys.exit(main())
