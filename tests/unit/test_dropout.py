"""The random numbers of dropout: uniform, independent, a function of their counters; what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.data.sampler import _mix
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.proof.small_model import SmallRun
from hpc_parallel.proof.small_results import on_one_device
from hpc_parallel.strategies.dropout.counted_dropout import SamplePart, keeps, mix64
from hpc_parallel.strategies.dropout.dropout_shapes import WholeShape, find_problems, whole_shapes
from hpc_parallel.strategies.halo import Grid
from tests.composed import prepared
from tests.dropout_models import Images, Tokens

SAMPLES, ROWS, COLUMNS = 64, 128, 96
COUNT = SAMPLES * ROWS * COLUMNS
DEVIATIONS = 5  # of a standard normal: seen once in two million draws
RATE = 0.3


def kept(key: int, *, samples: Tensor | None = None) -> Tensor:
    """Centred to mean 0: [sample, row, column]."""
    samples = torch.arange(SAMPLES) if samples is None else samples
    coordinates = [torch.arange(ROWS), torch.arange(COLUMNS)]
    return keeps(torch.tensor(key), samples, coordinates, rate=RATE).double() - (1 - RATE)


def deviations(products: Tensor, *, factors: int) -> float:
    """How far the mean of `products` of that many independent values is from 0, in standard deviations."""
    deviation = math.sqrt((RATE * (1 - RATE)) ** factors / products.numel())
    return abs(float(products.mean())) / deviation


@pytest.mark.parametrize("key", [0, 1, 2**62])
def test_elements_are_independent(key: int) -> None:
    """Of their neighbours along every dim, of four in a square, of another layer's and another step's."""
    x = kept(key)
    assert deviations(x, factors=1) < DEVIATIONS
    for dim in range(3):
        first, second = (x.narrow(dim, start, x.shape[dim] - 1) for start in (0, 1))
        assert deviations(first * second, factors=2) < DEVIATIONS
    square = x[:, 1:, 1:] * x[:, 1:, :-1] * x[:, :-1, 1:] * x[:, :-1, :-1]
    assert deviations(square, factors=4) < DEVIATIONS
    assert deviations(x * kept(key + 1), factors=2) < DEVIATIONS
    assert deviations(x * kept(key, samples=torch.arange(SAMPLES) + SAMPLES), factors=2) < DEVIATIONS
    per_column = x.mean((0, 1)) / math.sqrt(RATE * (1 - RATE) / (SAMPLES * ROWS))
    assert per_column.square().mean() == pytest.approx(1, abs=DEVIATIONS * math.sqrt(2 / COLUMNS))


def test_a_part_has_the_numbers_of_the_whole() -> None:
    whole = keeps(torch.tensor(7), torch.arange(9), [torch.arange(8), torch.arange(6)], rate=0.5)
    part = keeps(torch.tensor(7), torch.arange(2, 5), [torch.arange(3, 8), torch.arange(1, 4)], rate=0.5)
    assert torch.equal(part, whole[2:5, 3:8, 1:4])


@pytest.mark.parametrize(("rate", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_extreme_rates(rate: float, share: float) -> None:
    all_kept = keeps(torch.tensor(3), torch.arange(50), [torch.arange(200)], rate=rate)
    assert all_kept.double().mean() == share


def test_the_hash_is_that_of_the_sample_order() -> None:
    values = torch.tensor([0, 1, 2**63 - 1, -5])
    assert mix64(values).tolist() == _mix(values.numpy()).astype("int64").tolist()


def test_parts_of_a_tensor_axis() -> None:
    part = SamplePart(tensor=(1, 2))
    shape = WholeShape("Model.drop", (8, 12), sequence_dims=(1,))
    assert part.indices(torch.empty(2, 4, 12), 1, shape).tolist() == [4, 5, 6, 7]
    assert part.indices(torch.empty(2, 8, 6), 2, shape).tolist() == [6, 7, 8, 9, 10, 11]
    assert part.indices(torch.empty(2, 3, 12), 1, shape) is None


def test_shapes_of_the_whole_model() -> None:
    with torch.device("meta"):
        tokens, images = Tokens(layers=1, width=8, rate=0.1), Images(width=4, rate=0.1)
    shapes = whole_shapes(tokens, sample_shape=(20,))
    assert {name: (shape.sizes, shape.sequence_dims) for name, shape in shapes.items()} == {
        "stem.1": ((20, 8), (1,)), "blocks.0.feed.hidden": ((20, 32), (1,)),
        "blocks.0.feed.out": ((20, 8), (1,)),
    }  # fmt: skip
    shapes = whole_shapes(images, sample_shape=(1, 8, 24))
    assert {name: (shape.sizes, shape.sequence_dims) for name, shape in shapes.items()} == {
        "blocks.0.2": ((4, 8, 24), ()), "blocks.1.2": ((4, 8, 24), ()), "head.drop": ((4,), ()),
    }  # fmt: skip


class Odd(nn.Module):
    """A block that drops in its own way."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.drop, self.alpha, self._forward = nn.Dropout(0.5), nn.AlphaDropout(0.0), forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (lambda m, x: F.dropout(x, 0.1, m.training), "Tokens.blocks.0 draws random numbers (aten::"),
        (
            lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
            "Tokens.blocks.0 draws random numbers (aten::",
        ),
        (lambda m, x: m.drop(m.drop(x)), "Tokens.blocks.0.drop is Dropout(p=0.5, inplace=False), and which"),
        (lambda m, x: m.drop(x.transpose(0, 1)).transpose(0, 1), "Tokens.blocks.0.drop is Dropout(p=0.5"),
        (lambda m, x: F.scaled_dot_product_attention(x, x, x), None),
        (lambda m, x: x + 1, None),
    ],
    ids=["functional", "attention", "twice", "samples are not first", "attention without", "never called"],
)
def test_what_is_refused(forward: Callable[[nn.Module, Tensor], Tensor], problem: str | None) -> None:
    with torch.device("meta"):
        model = Tokens(layers=1, width=8, rate=0.0)
        model.blocks["0"] = Odd(forward)
    found = [str(text) for text in find_problems(model, sample_shape=(20,))]
    assert [text[: len(problem or "")] for text in found] == ([problem] if problem else [])
    assert all(text.endswith("or strategy.verify=never.") for text in found)


class Rows(LayeredModel):
    """Rows [columns] or windows [position, feature] by linear layers; `mixes` sees all positions at once."""

    def __init__(self, columns: int, *, mixes: bool = False) -> None:
        width = 6
        block = nn.Sequential(nn.Linear(width, width), Scores() if mixes else nn.Dropout(0.5))
        super().__init__(stem=nn.Linear(columns, width), blocks=[block], head=nn.Linear(width, 2))


class Scores(nn.Module):
    """Attention by hand, with dropout of the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop((x @ x.transpose(1, 2)).softmax(-1)) @ x


@pytest.mark.parametrize(
    ("model", "sample_shape", "sizes", "sequence_dims"),
    [
        (lambda: Rows(7), (7,), (6,), ()),  # a row of a table has no half
        (lambda: Rows(2), (10, 2), (10, 6), (1,)),
        (lambda: Rows(2, mixes=True), (10, 2), (10, 10), (1, 2)),
        (lambda: Fixed(), (10,), (10, 6), ()),
    ],
    ids=["a row", "features of a sequence", "scores", "a fixed window"],
)
def test_samples_of_any_shape(
    model: Callable[[], LayeredModel],
    sample_shape: tuple[int, ...],
    sizes: tuple[int, ...],
    sequence_dims: tuple[int, ...],
) -> None:
    with torch.device("meta"):
        built = model()
    assert list(find_problems(built, sample_shape=sample_shape)) == []
    (shape,) = whole_shapes(built, sample_shape=sample_shape).values()
    assert (shape.sizes, shape.sequence_dims) == (sizes, sequence_dims)


class Fixed(LayeredModel):
    """Takes windows of 10 tokens and of no other length."""

    def __init__(self) -> None:
        super().__init__(stem=Window(), blocks=[nn.Dropout(0.5)], head=nn.Linear(6, 2))


class Window(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table = nn.Embedding(256, 6), nn.Parameter(torch.empty(10, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.tokens(x) + self.table


def test_a_part_of_a_fixed_window_is_known_or_refused() -> None:
    """Of a tensor axis it is a slice; a context axis has two slices, and the window is no sequence."""
    shape = WholeShape("Model.drop", (8, 12))
    assert SamplePart(tensor=(1, 2)).indices(torch.empty(2, 4, 12), 1, shape).tolist() == [4, 5, 6, 7]  # type: ignore[union-attr]
    assert SamplePart(context=2).indices(torch.empty(2, 4, 12), 1, shape) is None


def test_a_tile_of_a_grey_image_is_known() -> None:
    """Its rows look like the positions of a sequence of vectors."""
    with torch.device("meta"):
        model = Rows(6)
    (shape,) = whole_shapes(model, sample_shape=(8, 6)).values()
    assert (shape.sizes, shape.sequence_dims) == ((8, 6), (1,))
    group: Any = None
    part = SamplePart(tiles=Grid(rows=2, columns=2, rank=3, group=group))
    parts = [part.indices(torch.empty(2, 4, 3), dim, shape) for dim in (1, 2)]
    assert [indices.tolist() for indices in parts if indices is not None] == [[4, 5, 6, 7], [3, 4, 5]]


def test_the_users_own_error_comes_first() -> None:
    with torch.device("meta"):
        model = Rows(5)
        model.stem = Called(model.stem)
    (found,) = find_problems(model, sample_shape=(7,), dtype=torch.float32)
    assert re.match(
        r"RuntimeError: a and b must have same reduction dim, but got \[3, 7\] X \[5, 6\] "
        r"\(test_dropout.py:\d+\), raised by Rows for samples of shape \[7\] ", str(found)
    )  # fmt: skip


@pytest.mark.parametrize("stem", [nn.Embedding(9, 6), nn.Linear(7, 6)])
def test_of_all_types_of_samples_the_pass_that_came_farthest_tells_the_error(stem: nn.Module) -> None:
    """Tokens and numbers are both tried; one of them already ends in the stem."""
    model = Rows(6).to("meta")
    model.stem, model.head = stem.to("meta"), Called(nn.Linear(5, 2, device="meta"))
    (found,) = find_problems(model, sample_shape=(7,))
    assert "X [5, 2] (test_dropout.py:" in str(found)


class Called(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Photos:
    def __len__(self) -> int:
        return 64

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        return torch.rand(len(indices), 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor(
            indices % 10
        )


def test_one_device_counts_the_dropout_of_a_convolution_on_float_images() -> None:
    """A convolution with a bias takes no float32 once it is float64: shapes are measured before."""
    config = prepared(
        "launcher=local", "device=cpu", "strategy=data", "nodes=2", "data=digits", "model=convnet"
    ).config
    data: Any = SimpleNamespace(train=Photos())
    losses = []
    for seed in (1, 2):
        with torch.device("meta"):
            model = FloatImages(width=4, rate=0.3)
        run = SmallRun.of(config, plan=Plan.of(config), model=model, data=data, device=torch.device("cpu"))
        torch.manual_seed(seed)
        losses.append(on_one_device(run, model).losses)
    assert losses[0] == losses[1]


class FloatImages(Images):
    def __init__(self, *, width: int, rate: float) -> None:
        super().__init__(width=width, rate=rate)
        self.stem = nn.Conv2d(1, width, 3, padding=1)
