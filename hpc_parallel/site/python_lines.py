"""The Python of the job: its version, its packages, and what its torch was built for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from hpc_parallel.config.job_python import job_python, warnings
from hpc_parallel.config.node_devices import ask
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.site.line import ERROR, OK, WARNING, Line

PACKAGE = "hpc-parallel"
_PATIENCE_S = 30.0  # a slow file system takes long to list the packages
_LIST = (
    "import json, sys; from importlib.metadata import distributions; json.dump([sys.version.split()[0], "
    "[(d.name, d.version) for d in distributions()]], sys.stdout)"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python and its packages, by name."""

    release: str
    packages: Mapping[str, str]


def python_lines(config: RunConfig) -> Iterator[Line]:
    """The interpreter of the run, and packages whose versions do not fit this package."""
    launcher = config.launcher
    python = sys.executable if launcher.kind == "local" else job_python(launcher)
    yield from (Line(WARNING, "python", text) for text in warnings(config))
    if python != sys.executable and (launcher.container is not None or os.sep not in python):
        yield Line(OK, "python", f"{python}: not checked, because only the job knows it")
        return
    if (interpreter := _ask(python)) is None:
        yield Line(ERROR, "python", f"{python} does not run here. Try launcher.python={sys.executable}.")
        return
    yield Line(OK, "python", f"{interpreter.release}, {python}")
    yield package_line(interpreter.packages)
    if "torch" in interpreter.packages:
        yield torch_line(config, interpreter.packages)


def _ask(python: str) -> Interpreter | None:
    answer = ask(python, "-c", _LIST, patience_s=_PATIENCE_S)
    if answer is None:
        return None
    release, packages = json.loads(answer)
    return Interpreter(release, {canonicalize_name(name): number for name, number in packages if name})


def package_line(packages: Mapping[str, str]) -> Line:
    """Whether the packages fit what this package requires."""
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
