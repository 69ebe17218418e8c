"""Saves by several ranks: plans that do not change are made once, and each save has its own values."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from hpc_parallel.record.checkpoint_index import Checkpoint
from tests.workers import Workers


def saves(folder: str) -> tuple[list[int], list[list[float]], list[bool]]:
    """Steps 1 to 4, of which 3 fails on one rank: plans made, values read back, whether intact."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from hpc_parallel.config.schema import TrainingConfig
    from hpc_parallel.training.checkpoint import Writer, read
    from hpc_parallel.training.saver import Saver

    mesh = init_device_mesh("cpu", (2,))
    replica = torch.zeros(3)
    shards = distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    state = {"weights/replica": replica, "weights/shards": shards}
    saver = Saver(
        Path(folder), state=lambda: dict(state), about={}, training=TrainingConfig(keep_last=9),
        device=torch.device("cpu"), group=dist.new_group(backend="gloo"),
    )  # fmt: skip
    made: list[int] = []
    create, write = DefaultSavePlanner._create_global_plan, Writer.write_data
    counted = mock.Mock(side_effect=create)

    def create_and_count(self: DefaultSavePlanner, plans: Any) -> Any:
        return counted(self, plans)

    def write_or_fail(self: Writer, *arguments: Any) -> Any:
        if self._step == 3 and dist.get_rank() == 1:
            raise OSError("the disk is full")
        return write(self, *arguments)

    with (
        mock.patch.object(
            DefaultSavePlanner, "_create_global_plan", lambda self, plans: counted(self, plans)
        ),
        mock.patch.object(Writer, "write_data", write_or_fail),
    ):
        for step in (1, 2, 3, 4):
            replica.fill_(step)
            shards.to_local().fill_(10 * step + dist.get_rank())
            saver.save(step)
            replica.fill_(-1)  # the copy was taken
            saver._finish()
            made.append(counted.call_count)
    saver.close()
    values, intact = [], []
    for step in (1, 2, 4):
        checkpoint = Checkpoint(Path(folder, f"step-{step}"), step)
        read(checkpoint, {"weights/replica": replica, "weights/shards": shards})
        values.append([*replica.tolist(), *shards.full_tensor().tolist()])
        intact.append(checkpoint.damage() is None and 0 < checkpoint.manifest["save_s"] < 60)
    return made, values, intact


def test_a_plan_is_made_once_and_anew_after_a_failed_save(workers: Workers, tmp_path: Path) -> None:
    (first, values, intact), (second, other_values, _) = workers.run(2, saves, str(tmp_path / "checkpoints"))
    assert first == [1, 1, 1, 2]  # rank 0 plans for all
    assert second == [0, 0, 0, 0]
    expected = [[step] * 3 + [10 * step] * 3 + [10 * step + 1] * 2 for step in (1, 2, 4)]
    assert values == other_values == expected
    assert intact == [True] * 3
