"""A group that is split off: its time-out, and the sockets that groups open."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from hpc_parallel import torch_internals
from hpc_parallel.layout.layout import Layout
from hpc_parallel.strategies.mesh import build_mesh
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "a split group's time-out and sockets", 20.0
TIMEOUT_S = 77.0


def run(findings: Findings) -> None:
    findings.add(sockets_before=sockets())
    torch_internals.set_default_timeout(timedelta(seconds=TIMEOUT_S))
    setting.join(timeout_s=TIMEOUT_S)
    dist.barrier()
    findings.add(sockets_after_start=sockets())
    mesh = build_mesh(Layout(), device_type=setting.device().type)
    split = dist.split_group(split_ranks=[[0]]) if setting.on_gpu() else dist.new_group(timeout=None)
    groups = {"world": dist.group.WORLD, "mesh": mesh.get_group(), "split": split}
    findings.add(
        timeouts_s={name: timeout_s(group) for name, group in groups.items()},
        expected_s=TIMEOUT_S,
        sockets_after_groups=sockets(),
    )


def timeout_s(group: dist.ProcessGroup | None) -> float | None:
    assert group is not None
    options = group._get_backend(setting.device()).options
    return float(options._timeout.total_seconds())


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:  # of the listing itself
            continue
    return count
