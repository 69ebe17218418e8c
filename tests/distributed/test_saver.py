"""Saves by several ranks: plans that do not change are made once, and each save has its own values."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hpc_parallel.config.schema import TrainingConfig
from hpc_parallel.record.checkpoint_index import Checkpoint
from hpc_parallel.training import saver as module
from hpc_parallel.training.checkpoint import CheckpointReader, CheckpointWriter, read
from hpc_parallel.training.saver import Saver, SavingGroup
from hpc_parallel.training.stager import Stager
from hpc_parallel.training.written_parts import send
from tests.marks import in_full
from tests.workers import Workers, do_here


def saving_group(timeout_s: float) -> Any:
    def make() -> dist.ProcessGroup:
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    return SavingGroup(make(), make, timeout_s=timeout_s)


def saves(folder: str) -> tuple[list[int], list[list[float]], list[bool], str]:
    """Steps 1 to 4, of which 3 fails on one rank: plans made, values read back, whether intact.

    The last save, step 5, fails too: the error that ends this rank.
    Rank 0 also checks that the part which it has written of step 3 is gone as soon as the save has failed.
    """
    mesh = init_device_mesh("cpu", (2,))
    replica = torch.zeros(3)
    shards = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    state = {"weights/replica": replica, "weights/shards": shards}
    saver = Saver(
        Path(folder), state=lambda: dict(state), about={}, training=TrainingConfig(keep_last=9),
        device=torch.device("cpu"), saving=saving_group(1800.0),
    )  # fmt: skip
    made: list[int] = []
    create, write = DefaultSavePlanner._create_global_plan, CheckpointWriter.write_data
    counted = mock.Mock(side_effect=create)

    def create_and_count(self: DefaultSavePlanner, plans: Any) -> Any:
        return counted(self, plans)

    def write_or_fail(self: CheckpointWriter, *arguments: Any) -> Any:
        if self._step in (3, 5) and dist.get_rank() == 1:
            raise OSError("the disk is full")
        return write(self, *arguments)

    with (
        mock.patch.object(
            DefaultSavePlanner, "_create_global_plan", lambda self, plans: counted(self, plans)
        ),
        mock.patch.object(CheckpointWriter, "write_data", write_or_fail),
    ):
        for step in (1, 2, 3, 4):
            replica.fill_(step)
            shards.to_local().fill_(10 * step + dist.get_rank())
            saver.save(step)
            replica.fill_(-1)  # the copy was taken
            assert saver._pending is not None
            assert (saver._pending.result() is None) == (step != 3)
            assert dist.get_rank() or not Path(folder, f".step-{step}").exists()
            saver._finish()
            made.append(counted.call_count)
        with pytest.raises(RuntimeError) as ended:
            saver.save(5, blocking=True)
    saver.close()
    values, intact = [], []
    for step in (1, 2, 4):
        checkpoint = Checkpoint(Path(folder, f"step-{step}"), step)
        read(CheckpointReader(checkpoint), {"weights/replica": replica, "weights/shards": shards})
        values.append([*replica.tolist(), *shards.full_tensor().tolist()])
        intact.append(checkpoint.damage() is None and 0 < checkpoint.manifest["save_s"] < 60)
    return made, values, intact, f"{ended.type.__name__}: {ended.value}"


def test_a_plan_is_made_once_and_anew_after_a_failed_save(workers: Workers, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    (first, values, intact, follower), (second, other_values, _, cause) = workers.run(2, saves, folder)
    assert first == [1, 1, 1, 2]  # rank 0 plans for all
    assert second == [0, 0, 0, 0]
    expected = [[step] * 3 + [10 * step] * 3 + [10 * step + 1] * 2 for step in (1, 2, 4)]
    assert values == other_values == expected
    assert intact == [True] * 3
    message = "the checkpoint of step 5 could not be written: OSError: the disk is full"
    assert cause == f"SaveError: {message}"
    assert follower == f"FollowerError: ended because {message} (rank 1)"


def test_a_disk_that_gets_full_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    saver = Saver(
        tmp_path, state=dict, about={}, training=TrainingConfig(keep_last=3, keep_every=7),
        device=torch.device("cpu"), saving=SavingGroup(None, dist.new_group, timeout_s=1.0),
        warn=lines.append,
    )  # fmt: skip
    asked = mock.Mock(side_effect=[None, "is full", "is full", None, "is full"])
    monkeypatch.setattr(module.checkpoint_index, "shortage", asked)
    for _ in range(5):
        saver._prune()
    assert lines == [f"{tmp_path} is full. Make room"] * 2
    assert asked.mock_calls == [mock.call(tmp_path, keep_last=3, keep_every=7)] * 5


def slow_save(folder: str, kind: str, timeout_s: float) -> dict[str, Any]:
    """Step 1 is written slowly by rank 1, step 2 at once: what each rank saw.

    `kind`: `late` writes after the time-out of the others, `slow` before it, `stuck` never; with `all stuck`
    each rank but rank 0 is stuck. `slow` and `all stuck` write without a copy.
    """
    rank, waits, weight = dist.get_rank(), [0], torch.zeros(3)
    saving = saving_group(timeout_s)
    saver = module.Saver(
        Path(folder), state=lambda: {"weights/a": weight}, about={}, saving=saving,
        training=TrainingConfig(checkpoint_async=kind in ("late", "stuck"), keep_last=9),
        device=torch.device("cpu"),
        on_wait=lambda: waits.__setitem__(0, waits[0] + 1),
    )  # fmt: skip
    write, errors = CheckpointWriter.write_data, io.StringIO()
    failed = Path(f"{folder}.failed")  # written by rank 0 when it has given up
    hold: Callable[[], object] = {
        "late": lambda: until(failed.exists), "slow": lambda: until(lambda: waits[0] > 2),
        "stuck": threading.Event().wait, "all stuck": threading.Event().wait,
    }[kind]  # fmt: skip

    def held(self: CheckpointWriter, *arguments: Any) -> Any:
        if self._step == 1 and (rank == 1 or (rank > 1 and kind == "all stuck")):
            hold()
        return write(self, *arguments)

    seen: dict[str, Any] = {}
    patched = (
        mock.patch.object(CheckpointWriter, "write_data", held),
        mock.patch.object(module, "_MARK_EVERY_S", 0.05),
    )
    with patched[0], patched[1], contextlib.redirect_stderr(errors):
        try:
            for step in (1, 2):
                weight.fill_(step)
                saver.save(step)
                if rank == 0 and kind == "late":
                    assert saver._pending is not None
                    saver._pending.add_done_callback(lambda done: failed.touch())
                weight.fill_(step + 0.5)  # what the next step makes of it
            saver.close()
        except RuntimeError as error:
            closing = threading.Thread(target=saver.close, daemon=True)
            closing.start()
            closing.join(30)
            return {"error": f"{type(error).__name__}: {error}", "closed": not closing.is_alive()}
    for step in (1, 2):
        checkpoint = Checkpoint(Path(folder, f"step-{step}"), step)
        if checkpoint.path.exists():
            read(CheckpointReader(checkpoint), {"weights/a": weight})
            seen[f"step {step}"] = weight.tolist()
    return seen | {
        "waited": waits[0] > 0,
        "said": errors.getvalue(),
        "renewed": saver._group is not saving.group,
    }


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.02)


def test_ranks_that_write_late_fail_the_save_and_not_the_run(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(2, slow_save, str(tmp_path / "late"), "late", 1.0)
    for seen in (first, second):
        assert "error" not in seen
        assert "step 1" not in seen
        assert seen["step 2"] == [2.0] * 3
        assert seen["renewed"]
    assert first["said"] == (
        "WARNING: the checkpoint of step 1 could not be written (not all ranks had written after "
        "cluster.checkpoint_timeout_s = 1 seconds); the newest is that of step 0\n"
    )
    assert second["said"] == ""


def test_a_save_without_a_copy_says_that_it_waits_and_keeps_the_training_back(
    workers: Workers, tmp_path: Path
) -> None:
    for seen in workers.run(2, slow_save, str(tmp_path / "slow"), "slow", 1800.0):
        assert seen["step 1"] == [1.0] * 3
        assert seen["step 2"] == [2.0] * 3
        assert (seen["waited"], seen["renewed"], seen["said"]) == (True, False, "")


def test_a_rank_that_never_ends_its_save_is_named(workers: Workers, tmp_path: Path) -> None:
    first, second = workers.run(2, slow_save, str(tmp_path / "stuck"), "stuck", 0.5)
    clause = "rank 1 has not written its part of the checkpoint of step 1 after"
    assert second["error"].startswith(f"StuckSaveError: {clause}")
    assert first["error"].startswith(f"FollowerError: ended because {clause}")
    assert (first["closed"], second["closed"]) == (True, True)
    workers.close()  # its thread still writes


def test_all_ranks_that_never_end_their_save_are_named_and_none_waits(
    workers: Workers, tmp_path: Path
) -> None:
    """A second stuck rank was told to follow the first, and waited for its own thread for ever."""
    seen = workers.run(3, slow_save, str(tmp_path / "stuck"), "all stuck", 2.0)
    clause = "ranks 1, 2 have not written their parts of the checkpoint of step 1 after"
    assert seen[0]["error"].startswith(f"FollowerError: ended because {clause}")
    for stuck in seen[1:]:
        assert stuck["error"].startswith(f"StuckSaveError: {clause}")
    assert [of_rank["closed"] for of_rank in seen] == [True] * 3
    workers.close()  # their threads still write


SMALL = (
    "nodes=2", "gpus_per_node=2", "training.steps=1", "training.checkpoint_every=1",
    "training.validate_every=null", "training.measure_steps=0", "training.global_batch_size=8",
    "data.max_bytes=100000",
    "data.sequence_length=16", "model.layers=4", "model.dim=32", "model.heads=4", "model.kv_heads=4",
    "model.ffn_dim=64",
)  # fmt: skip
LAYOUTS = (
    ("strategy=hsdp",), ("strategy=pipeline",),
    ("strategy=expert", "strategy.expert=2", "strategy.replicate=2", "model=moe_tiny"),
)  # fmt: skip
MORE = (
    ("strategy=data",), ("strategy=fsdp",), ("strategy=tensor",), ("strategy=hybrid",),
    ("strategy=data", "strategy.context=2"),
)  # fmt: skip


def staged_and_read_bytes(folders: list[str]) -> list[tuple[int, int]]:
    """Of each run: what this rank copies to the host for its checkpoint, and reads to continue from it."""
    stage, read_data, staged, read = Stager.stage, FileSystemReader.read_data, [], []

    def counted(self: Stager, state: dict[str, Any]) -> Any:
        copies = stage(self, state)
        staged.append(sum(buffer.nbytes for name, buffer in self._buffers.items() if name in state))
        return copies

    def counted_read(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        tensors = [(planner.state_dict[item.dest_index.fqn], item.lengths) for item in plan.items]
        read.append(sum(lengths.numel() * tensor.dtype.itemsize for tensor, lengths in tensors))
        return read_data(self, plan, planner)

    with (
        mock.patch.object(Stager, "stage", counted),
        mock.patch.object(FileSystemReader, "read_data", counted_read),
    ):
        for folder in folders:
            do_here(folder)
            do_here(folder)  # from its last step on
    return list(zip(staged, read, strict=True))


@pytest.mark.parametrize("layouts", [LAYOUTS, *in_full([(MORE,)])])
def test_each_part_of_the_state_is_copied_written_and_read_by_one_rank(
    workers: Workers, layouts: tuple[tuple[str, ...], ...]
) -> None:
    """The reference is the index of the checkpoint: all names with their sizes, each once."""
    folders = [workers.prepare(*SMALL, *layout).folder for layout in layouts]
    paths = [str(folder.path) for folder in folders]
    by_layout = zip(*workers.run(4, staged_and_read_bytes, paths), strict=True)
    for layout, folder, sizes in zip(layouts, folders, by_layout, strict=True):
        stored = FileSystemReader(folder.checkpoints / "step-1").read_metadata().state_dict_metadata
        total = sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in stored.values())
        for sizes_of_ranks in zip(*sizes, strict=True):
            assert sum(sizes_of_ranks) == total, layout
            assert max(sizes_of_ranks) < 0.5 * total, layout  # the largest weight alone is a sixth


def sent_types() -> list[list[float]]:
    """What this rank has of tensors of odd types after the rank 0 has read them."""
    received = []
    for dtype in (torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.bfloat16):
        for values in (torch.tensor(1), torch.tensor([[1, 0, 1], [0, 1, 1]]).T):  # a scalar; not contiguous
            tensor = (values if dist.get_rank() == 0 else torch.zeros_like(values)).to(dtype)
            send(tensor, reader=0, group=dist.group.WORLD)
            received.append([float(number.real) for number in tensor.to(torch.complex64).flatten()])
    return received


def test_tensors_of_all_types_are_sent(workers: Workers) -> None:
    """gloo refuses int16 and float8."""
    for received in workers.run(2, sent_types):
        assert received == [[1.0], [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]] * 5
