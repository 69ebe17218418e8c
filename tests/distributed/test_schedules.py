"""Every schedule of a pipeline, its cuts, and the naive scheme follow one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.strategies.pipeline import Stage
from tests.marks import in_full
from tests.parity import follow_one_device, opened
from tests.workers import Train, Workers

EXAMPLE = Path(__file__).parents[2] / "examples" / "schedule.csv"
TWO_BY_TWO = ("strategy=pipeline", "nodes=4", "strategy.pipeline=2", "model.layers=4")
LAYOUTS = {
    **{
        f"{schedule} on {ranks}": (
            "strategy=pipeline", f"nodes={ranks}", f"strategy.schedule={schedule}",
            f"strategy.microbatches={2 * ranks}", f"model.layers={2 * ranks}",
        )
        for schedule in ("naive", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
        for ranks in (2, 4)
    },
    "zero bubble, one stage a rank": (
        "strategy=pipeline", "nodes=2", "strategy.schedule=interleaved_zero_bubble",
        "strategy.stages_per_rank=1",
    ),
    "zbv, fewer microbatches than stages": (
        "strategy=pipeline", "nodes=2", "strategy.schedule=zbv", "strategy.microbatches=2",
    ),
    "model over 2": ("strategy=model", "nodes=2"),
    "model over 4, accumulating 4": ("strategy=model", "nodes=4", "training.microbatch_size=4"),
    "model 2 x replicate 2, accumulating 4": (
        *TWO_BY_TWO, "strategy=model", "strategy.replicate=2", "training.microbatch_size=2",
    ),
    "model 2 x shard 2, accumulating 4": (
        *TWO_BY_TWO, "strategy=model", "strategy.shard=2", "training.microbatch_size=2",
    ),
    "gpipe 2 x replicate 2": (*TWO_BY_TWO, "strategy.schedule=gpipe", "strategy.replicate=2"),
    "looped_bfs 2 x replicate 2": (*TWO_BY_TWO, "strategy.schedule=looped_bfs", "strategy.replicate=2"),
    **{
        f"{schedule} 2 x {other}": (
            *TWO_BY_TWO, f"strategy.schedule={schedule}", f"strategy.{other}=2",
            f"strategy.reshard={str(other != 'shard').lower()}",
        )
        for schedule in ("interleaved_zero_bubble", "zbv", "dualpipev")
        for other in ("replicate", "shard", "tensor")
    },
    "zbv 2 x context 2": (*TWO_BY_TWO, "strategy.schedule=zbv", "strategy.context=2"),
    "zero bubble of 4 stages a rank x shard 2": (  # more than torch keeps gathered at once
        *TWO_BY_TWO, "strategy.schedule=interleaved_zero_bubble", "strategy.stages_per_rank=4",
        "strategy.shard=2", "strategy.reshard=false", "model.layers=8",
    ),
    "7 blocks over 2": ("strategy=pipeline", "nodes=2", "model.layers=7"),
    "5 blocks over 4": ("strategy=pipeline", "nodes=4", "model.layers=5"),
    "5 blocks over 4, by parameters": (
        "strategy=pipeline", "nodes=4", "model.layers=5", "strategy.balance=parameters",
    ),
    "zero bubble, checkpointed": (  # its backward pass in two enters the repetition twice
        "strategy=pipeline", "nodes=2", "strategy.schedule=interleaved_zero_bubble",
        "training.activation_checkpointing=full", "strategy.microbatches=4", "model.layers=4",
    ),
    "a file of actions": (
        "strategy=pipeline", "nodes=2", f"strategy.schedule={EXAMPLE}", "model.layers=4",
    ),
    "a file of actions 2 x shard 2": (
        *TWO_BY_TWO, f"strategy.schedule={EXAMPLE}", "strategy.shard=2", "strategy.reshard=false",
    ),
    "a file of actions 2 x tensor 2": (*TWO_BY_TWO, f"strategy.schedule={EXAMPLE}", "strategy.tensor=2"),
    "cuts [1,2,6]": ("strategy=pipeline", "nodes=4", "strategy.cuts=[1,2,6]", "model.layers=8"),
    "cuts [1,2,6] in a V": (
        "strategy=pipeline", "nodes=2", "strategy.schedule=zbv", "strategy.cuts=[1,2,6]", "model.layers=8",
        "strategy.microbatches=4",
    ),
}  # fmt: skip
IN_FLOAT32 = ["naive on 2", "looped_bfs on 2", "interleaved_zero_bubble on 2", "zbv on 2", "dualpipev on 2"]
UNTIED = ["zbv on 2", "dualpipev on 2", "zbv 2 x shard"]
SLOW = [  # more stages, with another axis, and cuts of one stage a rank
    layout for layout in LAYOUTS
    if " on 4" in layout or " x " in layout or layout in ("model over 4, accumulating 4", "5 blocks over 4")
    or layout in ("5 blocks over 4, by parameters", "7 blocks over 2", "cuts [1,2,6]", "naive on 2")
    or layout in ("looped_bfs on 2", "zero bubble, one stage a rank")
]  # fmt: skip
CASES = [
    *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
    *in_full((layout, "float64") for layout in SLOW),
    *in_full((layout, "float32") for layout in IN_FLOAT32),
    *in_full((layout, "float64, untied head") for layout in UNTIED),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_schedule_follows_one_device(trained: Train, layout: str, exactness: str) -> None:
    follow_one_device(trained, LAYOUTS[layout], exactness=exactness)


class Summed(nn.Linear):
    """A linear layer whose weight's gradient comes out of autograd transposed in memory."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,bsj->bsi", self.weight, x)


class Transposed(Transformer):
    def __init__(self, **shape: Any) -> None:
        super().__init__(**shape)
        for name, layer in list(self.named_modules()):
            if isinstance(layer, nn.Linear):
                path, _, leaf = name.rpartition(".")
                other = Summed(layer.in_features, layer.out_features, bias=False)
                if name == "head.output":
                    other.weight = layer.weight  # tied
                setattr(self.get_submodule(path), leaf, other)


def test_gradients_of_a_split_backward_pass_lie_as_their_weights(trained: Train) -> None:
    """The optimizer's kernel takes that for granted."""
    layout = ("strategy=pipeline", "nodes=2", "strategy.schedule=interleaved_zero_bubble", "model.layers=4",
              "strategy.microbatches=4")  # fmt: skip
    target = f"model._target_={Transposed.__module__}.Transposed"
    follow_one_device(trained, (*layout, target))


def _forward_passes(*overrides: str) -> list[int]:
    """How many gradients the inputs of this rank's stages hold, in each forward pass of a block, also a
    repeated one, of the second step.
    """
    session = opened(*overrides)
    batch, train = session.batches(session.data.train, seed=0).at(0), session.assembled.forward_backward.train
    train(*batch)
    stages: list[Stage] = session.assembled.forward_backward._parts
    infos = [info for stage in stages for received in stage.args_recv_info.values() for info in received]
    held: list[int] = []

    def note(*_: Any) -> None:
        held.append(sum(info.buffer is not None and info.buffer.grad is not None for info in infos))

    for part in session.assembled.parts:
        for block in part.blocks.values():
            block.attention_norm.register_forward_pre_hook(note)
    train(*batch)
    return held


def test_each_half_of_a_split_backward_pass_recomputes_a_block_once(workers: Workers) -> None:
    """Stages 0 and 2, and 1 and 3, of one block; the first has no inputs' gradients, so one whole pass."""
    words = ("strategy=pipeline", "nodes=2", "strategy.schedule=interleaved_zero_bubble", "model.layers=4",
             "strategy.microbatches=4", "data.max_bytes=300000")  # fmt: skip
    passes = workers.run(2, _forward_passes, *words, "training.activation_checkpointing=full")
    assert list(map(len, passes)) == [4 * (2 + 3), 4 * (3 + 3)]
    assert not any(map(any, passes))


def _pieces(weights: dict[str, Any]) -> list[str]:
    return sorted({name.split(".")[1] for name in weights if name.startswith("blocks.")})


def _held(*overrides: str) -> tuple[list[str], int]:
    """Blocks of this rank's stages, and the weights that its optimizer would get."""
    weights = opened(*overrides).assembled.named_parameters()
    return _pieces(weights), sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize(
    ("schedule", "first", "second"),
    [("1f1b", ["0"], ["1", "2", "3", "4"]), ("interleaved", ["0", "2", "3"], ["1", "4"]),
     ("zbv", ["0", "4"], ["1", "2", "3"])],
)  # fmt: skip
def test_blocks_are_where_the_cuts_put_them(
    workers: Workers, schedule: str, first: list[str], second: list[str]
) -> None:
    cuts = "[1]" if schedule == "1f1b" else "[1,2,4]"
    words = ("strategy=pipeline", "nodes=2", f"strategy.schedule={schedule}", f"strategy.cuts={cuts}",
             "model.layers=5", "data.max_bytes=300000")  # fmt: skip
    held = workers.run(2, _held, *words)
    assert [blocks for blocks, _ in held] == [first, second]
    if SCHEDULES[schedule].v_shaped:  # a tied weight of the ends is the optimizer's once
        [(_, whole)] = workers.run(1, _held, "strategy=single", "model.layers=5", "data.max_bytes=300000")
        assert sum(count for _, count in held) == whole
