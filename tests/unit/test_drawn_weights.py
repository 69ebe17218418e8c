"""The numbers of a weight: the same on every device, in every slice, and no rank draws more than it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from hpc_parallel.models import drawn_weights
from hpc_parallel.models.drawn_weights import Drawing, by_rows, draw, tensor_seed
from hpc_parallel.models.layered import LayeredModel, materialise

ROWS, WIDTH, BLOCK_ROWS = 22, 6, 4
RANK = 5


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_weights, "BLOCK", BLOCK_ROWS * WIDTH + 1)


@pytest.fixture
def fifth_of_eight() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


class Recorder:
    """Draws as a model does, and notes how many rows each call had."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    @by_rows
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        self.rows.append(len(tensor))
        tensor.normal_(generator=generator)


def expected() -> Tensor:
    """Every block from its own seed, without the code under test."""
    blocks = []
    for first in range(0, ROWS, BLOCK_ROWS):
        seed = tensor_seed(7, f"head.weight:{first}" if first else "head.weight") >> 1
        rows = torch.empty(min(BLOCK_ROWS, ROWS - first), WIDTH)
        blocks.append(rows.normal_(generator=torch.Generator().manual_seed(seed)))
    return torch.cat(blocks)


def drawn(like: Tensor, recorder: Recorder, dtype: torch.dtype = torch.float32) -> Tensor:
    return draw(Drawing(recorder.initialise, "head.weight", 7), like=like, device="cpu", dtype=dtype)


@pytest.mark.usefixtures("small_blocks")
def test_a_large_weight_is_drawn_in_blocks() -> None:
    recorder = Recorder()
    values = drawn(torch.empty(ROWS, WIDTH, device="meta"), recorder, torch.float64)
    assert torch.equal(values, expected().double())
    assert sorted(recorder.rows) == [2, 4, 4, 4, 4, 4]


@pytest.mark.usefixtures("small_blocks", "fifth_of_eight")
@pytest.mark.parametrize(
    ("degrees", "placements", "own", "blocks"),
    [
        ((8,), [Shard(0)], (slice(15, 18), slice(None)), 2),
        ((8,), [Shard(1)], (slice(None), slice(5, 6)), 6),
        ((8,), [Replicate()], (slice(None), slice(None)), 6),
        ((2, 4), [Replicate(), Shard(0)], (slice(6, 12), slice(None)), 2),
        ((2, 4), [Shard(0), Shard(1)], (slice(11, 22), slice(2, 4)), 4),
        ((2, 4), [Shard(1), Shard(0)], (slice(6, 12), slice(3, 6)), 2),
        # As fully_shard on top of tensor parallelism: the inner axis has rows 6 to 11, the outer one halves.
        ((2, 4), [Shard(0), Shard(0)], (slice(9, 12), slice(None)), 1),
    ],
)
def test_a_rank_draws_the_blocks_of_its_slice(
    degrees: tuple[int, ...], placements: list[Placement], own: tuple[slice, ...], blocks: int
) -> None:
    mesh = init_device_mesh("cpu", degrees)
    local = expected()[own]
    like = DTensor.from_local(
        torch.empty_like(local), mesh, placements, run_check=False,
        shape=torch.Size((ROWS, WIDTH)), stride=(WIDTH, 1),
    )  # fmt: skip
    recorder = Recorder()
    values = drawn(like, recorder)
    assert isinstance(values, DTensor)
    assert values.shape == (ROWS, WIDTH)
    assert torch.equal(values.to_local(), local)
    assert len(recorder.rows) == blocks


@pytest.mark.usefixtures("small_blocks")
def test_an_override_without_the_mark_gets_the_whole_tensor() -> None:
    shapes = []

    class Orthogonal(Recorder):
        def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
            shapes.append(tuple(tensor.shape))
            nn.init.orthogonal_(tensor, generator=generator)

    values = drawn(torch.empty(ROWS, WIDTH, device="meta"), Orthogonal())
    assert shapes == [(ROWS, WIDTH)]
    torch.testing.assert_close(values.T @ values, torch.eye(WIDTH))


def test_weights_of_any_device_are_drawn_on_the_cpu() -> None:
    devices = set()

    class Noted(LayeredModel):
        def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
            devices.update([tensor.device.type, generator.device.type])
            super().initialise(name, tensor, generator)

    with torch.device("meta"):
        model = Noted(stem=nn.Embedding(4, 3), blocks=[nn.BatchNorm1d(3)], head=nn.Linear(3, 2))
    materialise(model, seed=0, device="meta", dtype=torch.float32)
    assert devices == {"cpu"}
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
