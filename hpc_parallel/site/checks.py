"""What a login node can check without a job: Python, the shell, modules, Slurm, the fabric and the disk."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from string import Template

import psutil
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpc_parallel.config.fabric_kinds import AUTO, RDMA
from hpc_parallel.config.job_python import job_python, warnings
from hpc_parallel.config.node_devices import ask
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_limits import site_warnings
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.launch.batch_script import render
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.machine.fabric import as_text
from hpc_parallel.machine.fabric_kind import fabric_devices
from hpc_parallel.machine.host_facts import disk
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.trust import require_trusted
from hpc_parallel.slurm import client
from hpc_parallel.slurm.records import has_accounting, release
from hpc_parallel.slurm.submit import dry_submit, refusal_message

_LEAST_FREE_BYTES = 2**30
_OF_ONE_HOST = {"tmpfs", "ramfs", "overlay"}  # file systems that other hosts never see
OK, WARNING, ERROR = "ok", "warning", "error"
PACKAGE = "hpc-parallel"
_PATIENCE_S = 30.0  # a slow file system takes long to list the packages
_LIST = (
    "import json, sys; from importlib.metadata import distributions; json.dump([sys.version.split()[0], "
    "[(d.name, d.version) for d in distributions()]], sys.stdout)"
)
_INHERITED = re.compile(r"(NCCL|GLOO)_\w+|OMP_NUM_THREADS", re.ASCII)
_MODULES_PATIENCE_S = 10.0  # a first `module avail` reads many files
_NO_MODULES = "no `module` here"
_AVAILABLE = (
    f"type module > /dev/null 2>&1 || {{ echo '{_NO_MODULES}'; exit 0; }}; module -t avail 2>&1; true"
)


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


def slurm_lines(run: PreparedRun, *, submits: bool) -> Iterator[Line]:
    """Slurm's version, whether its controller answers, and whether it accepts this batch script."""
    warnings = [Line(WARNING, "limits", text.partition(" ")[2].strip()) for text in site_warnings(run.config)]
    if not client.is_installed():
        kind = run.config.launcher.kind
        state = OK if kind == "local" else ERROR
        yield Line(state, "slurm", "there is no sbatch on this machine: launcher=local runs here")
        yield from warnings
        return
    slurm_version = release()
    if not client.answers():
        state = WARNING if run.config.launcher.kind == "local" else ERROR
        text = f"{slurm_version}: the controller does not answer. Try again, or launcher=local."
        yield Line(state, "slurm", text)
        return
    accounting = "accounting is on" if has_accounting() else "accounting is off, so status asks the queue"
    yield Line(OK, "slurm", f"{slurm_version}; the controller answers; {accounting}")
    yield from warnings
    if run.config.launcher.kind in HERE or not submits:
        return
    trial = dry_submit(render(run))
    if trial.returncode == 0:
        yield Line(OK, "job", f"Slurm would take it: {_start_time(trial.stderr.strip())}")
    else:
        yield Line(ERROR, "job", refusal_message(trial.stderr.strip()), refused=True)


def _start_time(message: str) -> str:
    match = re.search(r"start at (\S+)(?:(?: a)? using (\d+) processors)?(?: on nodes (\S+))?", message)
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


@dataclass(frozen=True)
class Line:
    """The result of one check. refused: Slurm refuses the job, so it is no matter of the configuration."""

    state: str
    subject: str
    text: str
    refused: bool = False


def python_lines(config: RunConfig) -> Iterator[Line]:
    """The interpreter of the run, and packages whose versions do not fit this package."""
    launcher = config.launcher
    python = sys.executable if launcher.kind == "local" else job_python(launcher)
    yield from (Line(WARNING, "python", text) for text in warnings(config))
    if python != sys.executable and (launcher.container is not None or os.sep not in python):
        yield Line(OK, "python", f"{python}: not checked, because only the job knows it")
        return
    answer = ask(python, "-c", _LIST, patience_s=_PATIENCE_S)
    if answer is None:
        yield Line(ERROR, "python", f"{python} does not run here. Try launcher.python={sys.executable}.")
        return
    number, distributions = json.loads(answer)
    packages: dict[str, str] = {canonicalize_name(name): text for name, text in distributions if name}
    yield Line(OK, "python", f"{number}, {python}")
    yield package_line(packages)
    if "torch" in packages:
        yield torch_line(config, packages)


def package_line(packages: Mapping[str, str]) -> Line:
    try:
        needed = [Requirement(text) for text in requires(PACKAGE) or ()]
    except PackageNotFoundError:
        text = "hpc_parallel is not installed, so its requirements are unknown. Try pip install -e ."
        return Line(WARNING, "packages", text)
    wrong = [unmet for requirement in needed if (unmet := _unmet(requirement, packages)) is not None]
    if wrong:
        return Line(ERROR, "packages", f"{'; '.join(wrong)}. Try pip install -e . with this Python.")
    text = f"{PACKAGE} {version(PACKAGE)}; {len(packages)} installed; all that it requires fit"
    return Line(OK, "packages", text)


def _unmet(requirement: Requirement, packages: Mapping[str, str]) -> str | None:
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    installed = packages.get(canonicalize_name(requirement.name))
    if installed is None:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(installed, prereleases=True):
        return None
    return f"{requirement.name} {installed} is not {requirement.specifier}"


def torch_line(config: RunConfig, packages: Mapping[str, str]) -> Line:
    """torch's version and build, read from the package list because importing torch takes seconds."""
    installed = packages["torch"]
    build = installed.partition("+")[2]
    nccl = [f"NCCL {number}" for name, number in packages.items() if name.startswith("nvidia-nccl-cu")]
    if nccl or build.startswith(("cu", "rocm")):
        return Line(OK, "torch", ", ".join([installed, *nccl]))
    if config.cluster.gpus and config.device != "cpu" and config.launcher.kind != "local":
        text = f"{installed} looks like a build without CUDA or ROCm, and the job asks for GPUs"
        return Line(WARNING, "torch", f"{text}. Try a build with GPUs, or cluster=cpu.")
    return Line(OK, "torch", f"{installed} (gloo)")


def environment_line(config: RunConfig, *, environment: Mapping[str, str] = os.environ) -> Line:
    """The shell's variables of NCCL, gloo and OpenMP. A job inherits them, and no rank replaces them."""
    inherited = {name: value for name, value in sorted(environment.items()) if _INHERITED.fullmatch(name)}
    if not inherited:
        return Line(OK, "environment", "this shell sets no NCCL_*, GLOO_* or OMP_NUM_THREADS")
    texts = [f"{name}={value}" for name, value in inherited.items()]
    extra = config.cluster.extra | config.launcher.extra
    if str(extra.get("export", "ALL")).upper() in ("NONE", "NIL"):
        return Line(OK, "environment", f"{', '.join(texts)}: not passed on, because of --export=NONE")
    replaced = [
        f"{name}={value} takes precedence over {site} of cluster.environment"
        for name, value in inherited.items()
        if (site := as_text(config.cluster.environment.get(name, value))) != value
    ]
    if replaced:
        advice = f"Try unset {' '.join(text.partition('=')[0] for text in replaced)} before the submission."
        return Line(WARNING, "environment", f"{'; '.join(replaced)}. {advice}")
    return Line(OK, "environment", f"{', '.join(texts)}: a job keeps what this shell sets")


def module_lines(config: RunConfig) -> Iterator[Line]:
    """Modules that `module avail` of a login shell does not list."""
    names = [*config.cluster.modules, *config.launcher.modules]
    if not names:
        return
    listed = ask("bash", "-lc", _AVAILABLE, patience_s=_MODULES_PATIENCE_S)
    if listed is None or listed.strip() == _NO_MODULES:
        yield Line(OK, "modules", f"{', '.join(names)}: not checked, there is no `module` here")
        return
    available = [entry.strip().removesuffix("(default)") for entry in listed.splitlines()]
    unknown = [name for name in names if not _has(available, name)]
    if unknown:
        text = f"`module avail` does not list {', '.join(unknown)}"
        advice = "Try module spider NAME: it may need another module first, or another name."
        yield Line(WARNING, "modules", f"{text}. {advice}")
    else:
        yield Line(OK, "modules", f"{', '.join(names)}: all are available")


def _has(available: list[str], name: str) -> bool:
    return any(entry == name or entry.startswith(f"{name}/") for entry in available)


def scratch_lines(config: RunConfig, *, environment: Mapping[str, str] = os.environ) -> Iterator[Line]:
    """The scratch folder of each node. A login node may lack this folder."""
    if config.cluster.scratch is not None:
        path = Template(config.cluster.scratch).safe_substitute(environment)
        presence = "exists here" if os.path.isdir(path) else "is not on this host"
        yield Line(
            OK,
            "scratch",
            f"{path} {presence}; each host of a job is asked again, and stops without it",
        )
