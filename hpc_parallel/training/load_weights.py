"""Loads weights by name, in any layout, from a safetensors file or from another run's checkpoint."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.codec import reads_bytes
from hpc_parallel.data.text import VOCAB_SIZE
from hpc_parallel.data.tokens import TOKENIZER_BYTES, TOKENS_DATA, digest_of_tokenizer, read_description
from hpc_parallel.models.drawn_weights import own_slice
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.problems import ConfigError, print_warning, raise_if_any
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.record.endings import INITIAL
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError, read_bytes, read_json
from hpc_parallel.record.safetensors_header import read_header
from hpc_parallel.record.trust import require_private
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.training.checkpoint import CheckpointReader, StateDict, state_of
from hpc_parallel.training.restore import newest_sound
from hpc_parallel.training.written_parts import read_once

PARTS = ("stem.", "blocks.", "head.")  # prefixes of our names; a library's file has other names
# Keys of a configuration of transformers on which no result of a training depends.
_NO_RESULT = re.compile("type$|version|architectures|cache|name|token_id|initializer|drop|position_emb|^_")
MAX_NAMES = 3  # in one message
Shapes = Mapping[str, tuple[int, ...]]


class WeightsFile:
    """A safetensors file. It is mapped into memory, so only this rank's slice of each weight is read."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError if `path` is not a safetensors file or is incomplete."""
        self._path = path
        self.shapes: Shapes = read_header(path)[0]

    def fill(self, state: StateDict) -> None:
        """Copy into the tensors of `state`. For a distributed tensor, copy into this rank's slice."""
        with safe_open(self._path, framework="pt") as file:
            for name, tensor in state.items():
                values = file.get_tensor(name)
                if isinstance(tensor, DTensor):
                    tensor.to_local().copy_(own_slice(values, like=tensor).to_local())
                else:
                    tensor.copy_(values)

    def digest(self) -> str:
        """Hash of the size and of 4 KiB at each of 64 places; fast for large files too."""
        size = self._path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with self._path.open("rb") as file:
            for place in range(64):
                file.seek(max(0, size - 4096) * place // 63)
                digest.update(file.read(4096))
        return digest.hexdigest()


class CheckpointWeights:
    """The weights and running statistics of a checkpoint. Each process reads independently."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._reader = CheckpointReader(checkpoint)
        entries = self._reader.entries
        self._keys = {
            key.partition("/")[2]: key for key in entries if key.startswith(("weights/", "buffers/"))
        }
        tensors = cast(Mapping[str, TensorStorageMetadata], entries)
        self.dtypes = {name: tensors[key].properties.dtype for name, key in self._keys.items()}
        self.shapes: Shapes = {name: tuple(tensors[key].size) for name, key in self._keys.items()}

    def fill(self, state: StateDict) -> None:
        by_key: dict[str, Any] = {self._keys[name]: tensor for name, tensor in state.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # on purpose
            dcp.load(by_key, storage_reader=self._reader, no_dist=True)


@torch.no_grad()
def start_from(config: RunConfig, assembled: Assembled) -> str:
    """Fill the model from `config.weights`; all ranks must call it together.

    Returns the path of the file or checkpoint; without `config.weights`, INITIAL. Raises ConfigError on all
    ranks if names or shapes differ, and UntrustedError for a run folder that other users may write.
    """
    if config.weights is None:
        return INITIAL
    path = Path(config.weights)
    source: WeightsFile | CheckpointWeights
    if path.is_dir():
        checkpoint, _ = newest_sound(RunFolder(path).checkpoints)
        if checkpoint is None:
            raise ConfigError([f"weights = {path} has no undamaged checkpoint."])
        if not config.launcher.shared_folder:
            require_private(checkpoint.path)  # its index is a pickle
        source, path = CheckpointWeights(checkpoint), checkpoint.path
    else:
        try:
            source = WeightsFile(path)
        except ValueError as error:
            raise ConfigError([f"weights = {path} can't be used: {error}"]) from error
        require_one_content(source, path=path)
    state = {key.partition("/")[2]: tensor for key, tensor in state_of(assembled).items()}
    state, aliases = in_names_of(source.shapes, state, model=assembled.parts[0])
    require_fit(state, source.shapes, aliases=aliases, path=path)
    require_tied(source, aliases, path=path)
    read_once(state, source.fill)
    if dist.get_rank() == 0:
        print(f"starting from the weights of {path}", flush=True)
        others = [other_settings(assembled.parts[0], path.parent / "config.json")]
        if isinstance(source, WeightsFile):
            beside = path.parent / "tokenizer.json"
            others.append(
                other_tokens(
                    config.data, vocabulary=getattr(assembled.parts[0], "label_count", None), beside=beside
                )
            )
        for other in filter(None, others):
            print_warning(other)
    return str(path)


def require_one_content(source: WeightsFile, *, path: Path) -> None:
    """Raises ConfigError on all ranks if hosts have different files: each rank reads its own slices."""
    digests = exchange.all_gather(source.digest())
    if others := [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]:
        rule = f"has another content on rank {', '.join(others)} than on rank 0. Name a file that all share"
        raise ConfigError([f"weights = {path} {rule}."])


def other_settings(model: LayeredModel, path: Path) -> str | None:
    """A line with what the configuration at `path` of a model of transformers has otherwise than `model`."""
    settings = getattr(model, "settings", None)
    try:
        if settings is None or (recorded := read_json(path)) is None:
            return None
        theirs = type(settings).from_dict(recorded).to_dict()
    except Exception as error:  # the weights fit all the same
        return f"{path} can't be compared with the model: {type(error).__name__}: {error}"
    values = settings.to_dict()
    keys = [key for key in sorted(theirs) if not _NO_RESULT.search(key) and values.get(key) != theirs[key]]
    differ = ", ".join(f"{key}={values.get(key)} ({path.name}: {theirs[key]})" for key in keys)
    return f"the weights of {path.parent} were trained otherwise: {differ}" if differ else None


def other_tokens(data: Mapping[str, Any], *, vocabulary: int | None, beside: Path) -> str | None:
    """A line if weights with this `vocabulary` were trained on other tokens than those of `data`.

    beside: the file of their tokenizer, which not all weights have.
    """
    advice = "Try python -m hpc_parallel tokenize with their tokenizer"
    if reads_bytes(data):
        if vocabulary is None or vocabulary <= 2 * VOCAB_SIZE:
            return None
        return f"the data has bytes, but the weights know {vocabulary:,} tokens. {advice}"
    if data["_target_"] != TOKENS_DATA:
        return None
    made_by = read_description(Path(os.path.expanduser(data["path"])))["tokenizer"]
    try:
        digest = digest_of_tokenizer(read_bytes(beside, limit_bytes=TOKENIZER_BYTES, follow=True))
    except (OSError, DamagedError):
        return None
    fits = made_by.endswith(digest)
    return None if fits else f"the data has tokens of {made_by}, but {beside} has another content. {advice}"


def in_names_of(shapes: Shapes, state: StateDict, *, model: LayeredModel) -> tuple[StateDict, dict[str, str]]:
    """Returns `state` under the names of a source with `shapes`, and the names of tied weights by alias.

    The source has the names of `model` or those of its library. It may have a tied weight under either name.
    """
    has_our_names = state.keys() <= shapes.keys()
    rename: Callable[[str], str] = str if has_our_names else getattr(model, "library_name", str)
    names = {name: rename(name) for name in state}
    for alias, name in model.tied.items():
        if name in names and names[name] not in shapes and rename(alias) in shapes:
            names[name] = rename(alias)
    return {names[name]: tensor for name, tensor in state.items()}, {
        rename(alias): rename(name) for alias, name in model.tied.items()
    }


def require_fit(state: StateDict, shapes: Shapes, *, aliases: Iterable[str], path: Path) -> None:
    """Require that the source at `path` has exactly the tensors of all ranks; it may also have `aliases`.

    `shapes`: those of the source. Raises ConfigError with all differences, on all ranks.
    """
    by_rank = exchange.all_gather({name: list(tensor.shape) for name, tensor in state.items()})
    model_shapes = {name: tuple(shape) for rank in by_rank for name, shape in rank.items()}
    missing = [name for name in model_shapes if name not in shapes]
    unknown = sorted(shapes.keys() - model_shapes.keys() - set(aliases))
    reshaped = [
        f"{name} {list(shapes[name])} instead of {list(shape)}"
        for name, shape in model_shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    rules = {
        "does not have what the model has": missing,
        "has what the model does not have": unknown,
        "has another shape": reshaped,
    }
    problems = [f"weights = {path} {rule}: {shortened(names)}." for rule, names in rules.items() if names]
    raise_if_any(problems)


def require_tied(source: WeightsFile | CheckpointWeights, aliases: Mapping[str, str], *, path: Path) -> None:
    """Raises ConfigError on all ranks if the source has other values under the two names of a tied weight."""
    others = []
    for alias, name in aliases.items() if dist.get_rank() == 0 else ():
        if alias != name and {alias, name} <= source.shapes.keys():
            values = {key: torch.empty(source.shapes[key]) for key in (alias, name)}
            source.fill(values)
            others += [] if torch.equal(*values.values()) else [f"{alias} than in {name}"]
    if others := exchange.broadcast(others):
        advice = (
            "Untie them: model.config.tie_word_embeddings=false, for our own models model.tied_head=false"
        )
        rule = f"{shortened(others)}, which are one weight of the model"
        raise ConfigError([f"weights = {path} has other values in {rule}. {advice}."])


def shortened(names: list[str]) -> str:
    """The first MAX_NAMES names, and how many more there are."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
