"""What a job inherits from the shell that submits it, and what only the hosts of a job have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from string import Template

from hpc_parallel.config.node_devices import ask
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.machine.fabric import as_text
from hpc_parallel.site.line import OK, WARNING, Line

_INHERITED = re.compile(r"(NCCL|GLOO)_\w+|OMP_NUM_THREADS", re.ASCII)
_PATIENCE_S = 10.0  # a first `module avail` reads many files
_NO_MODULES = "no `module` here"
_AVAILABLE = (
    f"type module > /dev/null 2>&1 || {{ echo '{_NO_MODULES}'; exit 0; }}; module -t avail 2>&1; true"
)


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
    listed = ask("bash", "-lc", _AVAILABLE, patience_s=_PATIENCE_S)
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
