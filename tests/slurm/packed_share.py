"""What share of the devices' time a packed sweep computes, beside the same sweep as a job array.

    PYTHONPATH=. python tests/slurm/packed_share.py [RUNS]

RUNS (200) runs of 20 s, each with one GPU, on two hosts that have four each. Times are those of Slurm's
accounting: a run computes 20 s, and its step also holds the device while Python starts and ends.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cluster import GPUS_PER_HOST, Cluster
from test_jobs import Site

HOSTS, SECONDS = 2, 20
WORDS = (
    "-m", "launcher=slurm", "launcher.snapshot=false", "launcher.cpus_per_device=2", "sweep.wait=true",
    "launcher.time_minutes=10",
)  # fmt: skip
KINDS = {"packed": ("sweep.pack=auto", f"sweep.pack_nodes={HOSTS}", "sweep.pack_minutes=120"), "array": ()}


def steps(site: Site) -> Iterator[tuple[str, int, int]]:
    """The job, begin and end of each step of a run that Slurm has accounted for."""
    fields = ("--format=JobID,Start,End", "--noheader", "--parsable2")
    for line in site.cluster.run("env", "SLURM_TIME_FORMAT=%s", "sacct", *fields).splitlines():
        name, begin, end = line.split("|")
        job, _, step = name.partition(".")
        if step.isdigit():
            yield job, int(begin), int(end)


def measure(site: Site, kind: str, runs: int) -> str:
    (site.home / "own.py").write_text(f"import time\ntime.sleep({SECONDS})\n")
    seen, began = set(steps(site)), time.monotonic()
    done = site.run(*WORDS, *KINDS[kind], f"seed=range({runs})", "--", "own.py", timeout_s=7200)
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stdout + done.stderr
    new = [step for step in steps(site) if step not in seen]
    assert len(new) == runs, new
    jobs = {job for job, _, _ in new}
    calls = {job.partition("_")[0] for job in jobs}
    devices_s = HOSTS * GPUS_PER_HOST * (max(end for *_, end in new) - min(begin for _, begin, _ in new))
    held = sum(end - begin for _, begin, end in new) / devices_s
    return (
        f"{kind}: {runs * SECONDS / devices_s:.2f} of the devices' time computes, steps hold {held:.2f}; "
        f"{took_s:.0f} s from Enter to the last end, jobs: {len(jobs)}, sbatch: {len(calls)}"
    )


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with Cluster.start(hosts=HOSTS, accounting=True) as cluster:
        for kind in KINDS:
            with tempfile.TemporaryDirectory() as home:
                print(measure(Site(cluster, Path(home)), kind, runs), flush=True)


if __name__ == "__main__":
    main()
