"""Layout checks that were passed: one small file for each in this user's cache, named by a key.

The key is a hash of everything that decides whether a layout equals one device.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from hpc_parallel.data.dataset import bytes_of
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.proof.small_model import SmallRun
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.trust import UntrustedError, require_private

TECHNIQUES = ("strategies", "models", "proof", "worker")  # folders of this package


def layout_check_key(run: SmallRun, *, model: LayeredModel) -> str:
    """Hash what a layout check of `run` compares.

    That is the model's source and arguments, the techniques' source and options, the samples, their
    microbatches, and torch's version.
    """
    config = run.config
    content = {
        "torch": torch.__version__,
        "device": run.device.type,
        "samples": [_digest_of(x) for x in (run.inputs, run.targets, run.sequence) if x is not None],
        "microbatches": run.microbatches,
        "seed": config.seed,
        "generates": config.task.name == "generate",
        "model": config.model,
        "source": sorted({_digest(path) for path in _sources(model)}),
        "techniques": sorted({_digest(path) for path in _techniques()}),
        "strategy": asdict(replace(config.strategy, shares=None)),  # measured shares differ at each start
        "layout": run.layout.degrees,
        "checkpointing": config.training.activation_checkpointing,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _sources(model: LayeredModel) -> Iterator[Path]:
    """The files of the model's classes, and all imported modules that no package manager has installed."""
    kinds = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = Path(__file__).parents[1]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or Path(path).is_relative_to(package):
            continue
        is_users = not any(Path(path).is_relative_to(folder) for folder in installed)
        if is_users or (name in kinds and name.partition(".")[0] != "torch"):
            yield Path(path)


def _techniques() -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for folder in TECHNIQUES:
        yield from (package / folder).rglob("*.py")


def _digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + bytes_of(tensor)).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return str(path)


def proofs_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the proofs, below XDG_CACHE_HOME or ~/.cache."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "hpc_parallel", "proofs")


def is_proven(key: str, *, folder: Path) -> bool:
    """Whether the proof `key` (hexadecimal) is recorded, in a folder that only this user can change."""
    try:
        require_private(folder)
        return (folder / f"{key}.json").is_file()
    except (OSError, UntrustedError):
        return False


def record_proof(key: str, *, folder: Path, about: Mapping[str, object]) -> None:
    """Record the proof. If the folder can't be written, the next run only takes a few seconds longer."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / f"{key}.json", {**about, "time": datetime.now(UTC).isoformat()})
    except OSError:
        pass
