"""A run's state by full names, so that any layout reads what any other wrote (torch.distributed.checkpoint).

Distributed tensors are kept as slices of one tensor of that name, of what several ranks hold alike one
copy is written. Reading fills whatever slices the present layout has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, IOBase, RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer

from hpc_parallel.record.checkpoint_index import CHECKSUM, Checkpoint, Digest, publish
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.torch_internals import without_checksums

State = dict[str, Tensor]
BUFFER_BYTES = 2**18  # gathers small writes; larger ones pass by without a copy


def state_of(assembled: Assembled, optimizer: Optimizer | None = None) -> State:
    """Names and tensors of all that this rank trains: `weights/`, `buffers/`, `optimizer/`.

    The tensors are the run's own: to be copied from, or to be filled. Without an optimizer, the model's.
    """
    parameters = assembled.named_parameters()
    state: State = {f"weights/{name}": parameter.detach() for name, parameter in parameters.items()}
    state |= {f"buffers/{name}": buffer for name, buffer in statistics(assembled).items()}
    updates = assembled.server is None or assembled.server.serves
    if optimizer is not None and updates:
        prime(optimizer)
        for name, parameter in parameters.items():
            for key, value in optimizer.state[parameter].items():
                state[f"optimizer/{name}/{key}"] = value
    return state


def statistics(assembled: Assembled) -> dict[str, Tensor]:
    """What a model learns without a gradient: running means and variances, by full names.

    A rank outside of the layout, which only serves, sees no samples and has none.
    """
    found: dict[str, Tensor] = {}
    if assembled.mesh.get_coordinate() is None:
        return found
    for part in assembled.parts:
        kept = part.state_dict().keys()
        found |= {name: buffer for name, buffer in part.named_buffers() if name in kept}
    return found


def prime(optimizer: Optimizer) -> None:
    """The state that AdamW makes in its first step, where it has none yet: so it can be filled, and is
    kept also of weights that never had a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
                }


def random_state(device: torch.device) -> State:
    """Of this rank's generators, for models that draw (dropout); read again by as many ranks only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {f"random/{rank}-of-{ranks}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random/{rank}-of-{ranks}/cuda"] = torch.cuda.get_rng_state(device)
    return state


def read(checkpoint: Checkpoint, state: State, *, group: dist.ProcessGroup | None = None) -> None:
    """Fill `state` from a checkpoint, on all ranks of `group` together.

    Raises what torch.distributed.checkpoint raises where a name is missing or has another shape.
    """
    dcp.load(
        cast(dict[str, Any], state), storage_reader=dcp.FileSystemReader(checkpoint.path), process_group=group
    )


def random_names(checkpoint: Checkpoint) -> list[str]:
    """Which generators' states a checkpoint has."""
    names = dcp.FileSystemReader(checkpoint.path).read_metadata().state_dict_metadata
    return [name for name in names if name.startswith("random/")]


def set_random_state(state: State, *, device: torch.device) -> None:
    """Give this rank's generators what `random_state` of as many ranks had."""
    values = {name.rpartition("/")[2]: value for name, value in state.items()}
    torch.set_rng_state(values["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(values["cuda"], device)


class Hashed(RawIOBase):
    """A file being written, and the checksum of what went into it."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = Digest()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        done = self._file.write(piece)
        self.digest.update(piece[:done])
        # Linux begins to write what will not be needed: else all of it waits for the fsync at the end.
        os.posix_fadvise(self._file.fileno(), self.bytes, done, os.POSIX_FADV_DONTNEED)
        self.bytes += done
        return done

    def tell(self) -> int:
        return self.bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """To where it stands, which BufferedWriter asks for."""
        return self.bytes

    def fileno(self) -> int:
        return self._file.fileno()


class HashingFiles(FileSystem):
    """Files with checksums, taken as they are written: nothing is read again."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with FileIO(path, mode) as file:
            hashed = Hashed(file)
            with BufferedWriter(hashed, buffer_size=BUFFER_BYTES) as stream:
                yield stream
                if not stream.closed:  # torch synchronises the index before it has left the buffer
                    stream.flush()
                    os.fsync(stream.fileno())
        self.written[Path(path).name] = {"bytes": hashed.bytes, CHECKSUM: hashed.digest.hexdigest()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """torch's, with each rank's checksums sent along with its results; the last act makes the checkpoint."""

    def __init__(
        self, path: Path, *, folder: Path, step: int, about: dict[str, Any], prune: Callable[[], None]
    ) -> None:
        """`prune`: takes older checkpoints away once there is this one. Here, since to remove gigabytes
        takes long, and training need not wait for it."""
        super().__init__(path)
        self._prune = prune
        self.fs = self._files = HashingFiles()
        self._folder, self._step, self._about = folder, step, about

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_checksums():
            written = super().write_data(plan, planner).value()
        both: Future[Any] = Future()
        both.set_result([*written, self._files.written])
        return both

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, when all have written."""
        super().finish(metadata, [written[:-1] for written in results])
        files: dict[str, Any] = {}
        for written in results:
            files |= cast(dict[str, Any], written[-1])
        publish(self._folder, step=self._step, files=files | self._files.written, about=self._about)
        try:
            self._prune()
        except OSError as error:  # the new one is there all the same
            print(f"WARNING: an old checkpoint could not be removed: {error}", file=sys.stderr, flush=True)
