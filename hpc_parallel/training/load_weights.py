"""Weights from outside a run: a safetensors file or another run's checkpoint, read by any layout by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hpc_parallel.config.checks.starting_weights import read_header
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.layered import own_slice
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.record.results import INITIAL
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.trust import require_private
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.training.checkpoint import State, state_of
from hpc_parallel.training.restore import newest_sound

PARTS = ("stem.", "blocks.", "head.")  # how our names begin; a library's own file has others
SHOWN = 3  # names in one message
Shapes = Mapping[str, tuple[int, ...]]


class Source(Protocol):
    """Tensors by full name, without what only training needs."""

    @property
    def shapes(self) -> Shapes:
        """Of all that it has."""

    def fill(self, state: State) -> None:
        """Copy into tensors that this rank holds, or into its slices of distributed ones."""


class WeightsFile:
    """A safetensors file, mapped into memory: of each weight only this rank's slice is read."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError where it is no such file, or is not all there."""
        self._path = path
        self.shapes: Shapes = read_header(path)[0]

    def fill(self, state: State) -> None:
        with safe_open(self._path, framework="pt") as file:
            for name, tensor in state.items():
                whole = file.get_tensor(name)
                if isinstance(tensor, DTensor):
                    tensor.to_local().copy_(own_slice(whole, like=tensor).to_local())
                else:
                    tensor.copy_(whole)


class CheckpointWeights:
    """The weights and running statistics of a checkpoint; each process reads by itself."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        entries = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
        self._path = checkpoint.path
        self._keys = {
            key.partition("/")[2]: key for key in entries if key.startswith(("weights/", "buffers/"))
        }
        tensors = cast(Mapping[str, TensorStorageMetadata], entries)
        self.dtypes = {name: tensors[key].properties.dtype for name, key in self._keys.items()}
        self.shapes: Shapes = {name: tuple(tensors[key].size) for name, key in self._keys.items()}

    def fill(self, state: State) -> None:
        named: dict[str, Any] = {self._keys[name]: tensor for name, tensor in state.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
            dcp.load(named, storage_reader=dcp.FileSystemReader(self._path), no_dist=True)


@torch.no_grad()
def start_from(config: RunConfig, assembled: Assembled) -> str:
    """Fill the model from `config.weights`, on all ranks together; returns what it was filled from.

    Raises ConfigError on all ranks where names or shapes differ; UntrustedError for a run folder that
    others may write.
    """
    if config.weights is None:
        return INITIAL
    path = Path(config.weights)
    source: Source
    if path.is_dir():
        checkpoint, _ = newest_sound(RunFolder(path).checkpoints, group=None)
        if checkpoint is None:
            raise ConfigError([f"weights = {path} has no checkpoint that is sound."])
        if not config.launcher.shared_folder:
            require_private(checkpoint.path)  # its index is a pickle
        source, path = CheckpointWeights(checkpoint), checkpoint.path
    else:
        try:
            source = WeightsFile(path)
        except ValueError as error:
            raise ConfigError([f"weights = {path} can't be used: {error}"]) from error
    state = {key.partition("/")[2]: tensor for key, tensor in state_of(assembled).items()}
    model = assembled.parts[0]
    ours = any(name.startswith(PARTS) for name in source.shapes)
    rename: Callable[[str], str] = str if ours else getattr(model, "library_name", str)
    state = {rename(name): tensor for name, tensor in state.items()}
    require_fit(state, source.shapes, aliases=[rename(name) for name in model.tied], path=path)
    source.fill(state)
    if dist.get_rank() == 0:
        print(f"starting from the weights of {path}", flush=True)
    return str(path)


def require_fit(state: State, found: Shapes, *, aliases: Iterable[str], path: Path) -> None:
    """The source has what the ranks hold together, no more and no less but `aliases`.

    Raises ConfigError on all ranks with all that differs.
    """
    parts = exchange.all_gather({name: list(tensor.shape) for name, tensor in state.items()})
    wanted = {name: tuple(shape) for part in parts for name, shape in part.items()}
    missing = [name for name in wanted if name not in found]
    unknown = sorted(found.keys() - wanted.keys() - set(aliases))
    other = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    problems = {
        "does not have what the model has": missing,
        "has what the model does not have": unknown,
        "has another shape": other,
    }
    if any(problems.values()):
        raise ConfigError(
            [f"weights = {path} {what}: {some(names)}." for what, names in problems.items() if names]
        )


def some(names: list[str]) -> str:
    """The first few, and how many more there are."""
    left = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {left} more" if left > 0 else "")
