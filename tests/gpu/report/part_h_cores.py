"""The step when the host has 1 and 8 cores: a step bound by the host shows here."""

from __future__ import annotations

import os

from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "the step on 1 and 8 cores", 25.0


def run(findings: Findings) -> None:
    setting.join()
    inputs, targets = setting.batch(samples=2)
    step = setting.step_of("data")
    cores = sorted(os.sched_getaffinity(0))
    for count in (8, 1):
        use(set(cores[:count]))
        seconds = setting.seconds(lambda: step(inputs, targets))
        findings.add(**{f"step_s_{count}_cores": seconds, f"cores_{count}": len(cores[:count])})
    use(set(cores))


def use(cores: set[int]) -> None:
    """All threads of this process: autograd's and NCCL's exist already."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)
