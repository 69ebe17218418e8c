"""A run's state under full names, so that any layout can read what any other layout wrote.

torch.distributed.checkpoint writes a distributed tensor as slices of one tensor with that name, and writes
one copy of a tensor that several ranks hold. Reading fills the slices that the current layout has.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from io import BufferedWriter, FileIO, IOBase, RawIOBase
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hpc_parallel.problems import print_warning
from hpc_parallel.record.checkpoint_index import CHECKSUM, Checkpoint, Digest, publish
from hpc_parallel.record.values import number
from hpc_parallel.strategies.assemble import Assembled
from hpc_parallel.torch_internals import without_checksums
from hpc_parallel.training.optimizer import ModelOptimizer

StateDict = dict[str, Tensor]
OPTIMIZER = "optimizer/"  # before the names of the optimizer's state
LOSS_SCALE = "loss_scale/"  # only runs in float16 have it
SAVE_S = "save_s"  # entry of the manifest: how long the save took
BUFFER_BYTES = 2**18  # of the buffer for small writes; larger writes bypass it without a copy


def state_of(assembled: Assembled, optimizer: ModelOptimizer | None = None) -> StateDict:
    """Returns this rank's `weights/`, `buffers/` and, if `optimizer` is given, `optimizer/` by name.

    The tensors share memory with the run, so the caller can copy from them or fill them.
    """
    parameters = assembled.named_parameters()
    state: StateDict = {f"weights/{name}": parameter.detach() for name, parameter in parameters.items()}
    state |= {f"buffers/{name}": buffer for name, buffer in statistics(assembled).items()}
    updates = assembled.server is None or assembled.server.serves
    if optimizer is not None and updates:
        state |= {f"{OPTIMIZER}{name}": value for name, value in optimizer.state().items()}
    if optimizer is not None and assembled.loss_scale is not None:
        state |= {f"{LOSS_SCALE}{name}": value for name, value in assembled.loss_scale.state().items()}
    return state


def statistics(assembled: Assembled) -> dict[str, Tensor]:
    """Returns the persistent buffers by full name: running means and variances.

    A parameter server's rank is outside of the layout; it sees no samples and has no statistics.
    """
    buffers: dict[str, Tensor] = {}
    if assembled.mesh.get_coordinate() is None:
        return buffers
    for part in assembled.parts:
        persistent = part.state_dict().keys()
        buffers |= {name: buffer for name, buffer in part.named_buffers() if name in persistent}
    return buffers


def random_state(device: torch.device) -> StateDict:
    """State of this rank's generators, for a user's random operations; dropout needs none.

    Only the same number of ranks can restore it.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = {f"random/{rank}-of-{ranks}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"random/{rank}-of-{ranks}/cuda"] = torch.cuda.get_rng_state(device)
    return state


class CheckpointReader(dcp.FileSystemReader):
    """torch's reader of one checkpoint. It reads the index, which has an entry for each part, only once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*arguments, **options)
        return self._metadata

    @property
    def entries(self) -> Mapping[str, Any]:
        """The metadata of each tensor, by name."""
        return self.read_metadata().state_dict_metadata


def read(reader: CheckpointReader, state: StateDict) -> None:
    """Fill `state` from a checkpoint. All ranks must call it together. Ranks may have different names.

    Raises what torch.distributed.checkpoint raises if a name is missing or a shape differs.
    """
    dcp.load(cast(dict[str, Any], state), storage_reader=reader)


def readable(reader: CheckpointReader, state: StateDict) -> StateDict:
    """Returns `state` without the loss scale if a run in another precision wrote the checkpoint."""
    return {
        name: value
        for name, value in state.items()
        if not name.startswith(LOSS_SCALE) or name in reader.entries
    }


def optimizer_sizes(reader: CheckpointReader) -> dict[str, tuple[torch.Size, torch.dtype | None]]:
    """Size and type of each tensor of the optimizer's state in a checkpoint, by its name in that state.

    None: the type of the weight, which may be another one in this run. Counts of steps keep their type.
    """
    entries = {
        name: entry for name, entry in reader.entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    sizes: dict[str, tuple[torch.Size, torch.dtype | None]] = {}
    for full_name, entry in entries.items():
        if full_name.startswith(OPTIMIZER):
            name = full_name.removeprefix(OPTIMIZER)
            weight, _, key = name.rpartition("/")
            dtype = entry.properties.dtype
            of_weight = entries.get(f"weights/{weight}")
            follows = key != "step" and of_weight is not None and dtype == of_weight.properties.dtype
            sizes[name] = entry.size, None if follows else dtype
    return sizes


def save_s(checkpoint: Checkpoint) -> float | None:
    """How long it took to write a checkpoint; None if its manifest does not say it."""
    seconds = number(checkpoint.manifest.get(SAVE_S))
    return None if seconds is None or seconds < 0 else seconds


def set_random_state(state: StateDict, *, device: torch.device) -> None:
    """Restore this rank's generators from a `state` of `random_state`."""
    values = {name.rpartition("/")[2]: value for name, value in state.items()}
    torch.set_rng_state(values["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(values["cuda"], device)


class HashedFile(RawIOBase):
    """A file opened for writing that computes the checksum of its contents."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.digest = Digest()
        self.bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = memoryview(data).cast("B")
        written = self._file.write(content)
        self.digest.update(content[:written])
        # With this advice Linux starts to write at once. Without it everything waits for the final fsync.
        os.posix_fadvise(self._file.fileno(), self.bytes, written, os.POSIX_FADV_DONTNEED)
        self.bytes += written
        return written

    def tell(self) -> int:
        return self.bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Returns the current position. BufferedWriter calls this method, but never to move."""
        return self.bytes

    def fileno(self) -> int:
        return self._file.fileno()


class HashingFiles(FileSystem):
    """A file system that computes checksums while it writes, so that no file is read again."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[IOBase, None, None]:
        with FileIO(path, mode) as file:
            hashed = HashedFile(file)
            with BufferedWriter(hashed, buffer_size=BUFFER_BYTES) as stream:
                yield stream
                if not stream.closed:  # torch calls fsync on the index before its buffer is flushed
                    stream.flush()
                    os.fsync(stream.fileno())
        self.written[Path(path).name] = {"bytes": hashed.bytes, CHECKSUM: hashed.digest.hexdigest()}

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class CheckpointWriter(dcp.FileSystemWriter):
    """torch's writer. Each rank sends its checksums with its results; `finish` completes the checkpoint."""

    def __init__(
        self, path: Path, *, folder: Path, step: int, about: dict[str, Any], prune: Callable[[], None]
    ) -> None:
        """`prune`: removes older checkpoints after this one is complete.

        The writer calls it because removing gigabytes takes long, and training must not wait for this.
        """
        # No copies ahead: torch's loader for them runs on the thread of an asynchronous save. There it would
        # use the stream of GPU 0 on every rank, and open a context on this GPU.
        super().__init__(path, per_thread_copy_ahead=0)
        self._prune = prune
        self.fs = self._files = HashingFiles()
        self._folder, self._step, self._about = folder, step, about
        self._began_s = time.perf_counter()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_checksums():
            written = super().write_data(plan, planner).value()
        results: Future[Any] = Future()
        results.set_result([*written, self._files.written])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint. Called on one rank after all ranks have written."""
        super().finish(metadata, [written[:-1] for written in results])
        files: dict[str, Any] = {}
        for written in results:
            files |= cast(dict[str, Any], written[-1])
        about = {**self._about, SAVE_S: round(time.perf_counter() - self._began_s, 3)}
        publish(self._folder, step=self._step, files=files | self._files.written, about=about)
        try:
            self._prune()
        except OSError as error:  # the new checkpoint is complete anyway
            print_warning(f"an old checkpoint could not be removed: {error}")
