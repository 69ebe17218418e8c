"""What a login node can check without a job: versions, Slurm, the fabric and the disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from hpc_parallel.config.fabric_kinds import AUTO, RDMA
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_limits import site_warnings
from hpc_parallel.launch.batch_script import render
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.machine.fabric_kind import fabric_devices
from hpc_parallel.machine.host_facts import disk
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.site.line import ERROR, OK, WARNING, Line
from hpc_parallel.site.python_lines import python_lines
from hpc_parallel.site.shell_checks import environment_line, module_lines, scratch_lines
from hpc_parallel.slurm import client
from hpc_parallel.slurm.records import has_accounting, release
from hpc_parallel.slurm.submit import dry_submit, refusal_message

_LEAST_FREE_BYTES = 2**30
_OF_ONE_HOST = {"tmpfs", "ramfs", "overlay"}  # file systems that other hosts never see


def site_lines(run: PreparedRun) -> Iterator[Line]:
    """All checks of a legal configuration, causes before effects."""
    yield Line(OK, "configuration", str(run))
    if run.import_note is not None:
        yield Line(WARNING, "classes", run.import_note)
    yield from other_lines(run, submits=True)


def other_lines(run: PreparedRun, *, submits: bool) -> Iterator[Line]:
    """The checks of the site. submits: whether Slurm is asked about the script of this run."""
    yield from python_lines(run.config)
    yield from (Line(WARNING, "container", text) for text in run.container_warnings)
    yield environment_line(run.config)
    yield from module_lines(run.config)
    yield from slurm_lines(run, submits=submits)
    yield fabric_line(run.config)
    yield from scratch_lines(run.config)
    yield from folder_lines(run)


def slurm_lines(run: PreparedRun, *, submits: bool = True) -> Iterator[Line]:
    """Slurm's version, whether its controller answers, and whether it accepts this batch script."""
    warnings = [Line(WARNING, "limits", text.partition(" ")[2].strip()) for text in site_warnings(run.config)]
    if not client.is_installed():
        kind = run.config.launcher.kind
        state = OK if kind == "local" else ERROR
        yield Line(state, "slurm", "there is no sbatch on this machine: launcher=local runs here")
        yield from warnings
        return
    version = release()
    if not client.answers():
        state = WARNING if run.config.launcher.kind == "local" else ERROR
        text = f"{version}: the controller does not answer. Try again, or launcher=local."
        yield Line(state, "slurm", text)
        return
    accounting = "accounting is on" if has_accounting() else "accounting is off, so status asks the queue"
    yield Line(OK, "slurm", f"{version}; the controller answers; {accounting}")
    yield from warnings
    if run.config.launcher.kind == "local" or not submits:
        return
    trial = dry_submit(render(run))
    if trial.returncode == 0:
        yield Line(OK, "job", f"Slurm would take it: {_start_time(trial.stderr.strip())}")
    else:
        yield Line(ERROR, "job", refusal_message(trial.stderr.strip()), refused=True)


def _start_time(message: str) -> str:
    match = re.search(r"start at (\S+)(?: using (\d+) processors)?(?: on nodes (\S+))?", message)
    if match is None:
        return message.removeprefix("sbatch: ")
    return f"it would start at {match[1]}" + (f" on {match[3]}" if match[3] else "")


def fabric_line(config: RunConfig) -> Line:
    """The fabric devices of this login node, compared with the fabric that the profile expects."""
    devices, expected = fabric_devices(), config.cluster.fabric
    host_devices = f"this host has {devices.kind} ({devices.describe(devices.kind)})"
    if expected in (AUTO, devices.kind):
        return Line(OK, "fabric", f"{host_devices}; each host of a job is asked again")
    if expected in RDMA and devices.kind not in RDMA:
        text = f"cluster.fabric={expected}, and {host_devices}"
        return Line(WARNING, "fabric", f"{text}. Compute nodes may differ: task=preflight shows theirs.")
    return Line(WARNING, "fabric", f"cluster.fabric={expected}, and {host_devices}. Try cluster.fabric=auto.")


def folder_lines(run: PreparedRun) -> Iterator[Line]:
    """Whether the run folder's parent is trusted, is writable, has space, and is visible to other hosts."""
    config = run.config
    parent = next(path for path in run.folder.path.parents if path.is_dir())
    try:
        require_trusted(parent, key="run_dir", shared_folder=config.launcher.shared_folder)
    except ConfigError as error:
        yield Line(ERROR, "run folder", "; ".join(map(str, error.problems)))
    facts = disk(parent)
    if "error" in facts:
        yield Line(ERROR, "run folder", f"{parent}: {facts['error']}. Try run_dir=FOLDER.")
        return
    rate = f"{facts['write_bytes_per_s'] / 1e6:.0f} MB/s"
    text = f"{parent}: {facts['free_bytes'] / 1e9:.1f} GB free, writes {rate}"
    if facts["free_bytes"] < _LEAST_FREE_BYTES:
        yield Line(WARNING, "run folder", f"{text}. Try run_dir=FOLDER on another disk.")
        return
    kind = file_system(parent)
    if kind in _OF_ONE_HOST and config.launcher.kind != "local":
        where = f"{kind} exists on this host only: a job needs a shared disk"
        yield Line(WARNING, "run folder", f"{text}. {where}. Try run_dir=FOLDER on one.")
        return
    yield Line(OK, "run folder", f"{text} ({kind})")


def file_system(folder: Path) -> str:
    """The type of the file system that holds a folder, such as lustre or nfs4."""
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    nearest = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return nearest.fstype if nearest else "unknown file system"
