"""The default rows of `python -m hpc_parallel parity`: every strategy, on networks that train in a minute.

A new `conf/strategy/<name>.yaml` needs a row here; a test checks this.
"""

from __future__ import annotations

from dataclasses import dataclass

# In these steps clipping, the warm-up and (in rows that set them) four microbatches all take effect.
COMMON = (
    "task=proof",
    "name=parity",
    "device=cpu",  # it can run any layout, and draws the same random numbers on one device and on several
    "launcher=local",
    "launcher.snapshot=false",  # no edit can come between: the runs start at once
    "training.precision=float32",  # also on a GPU
    "training.steps=6",
    "training.log_every=1",
    "training.checkpoint_every=null",
    "training.validate_every=null",
    "training.global_batch_size=16",
    "training.clip_norm=0.5",
    "optimizer.warmup_steps=2",
)
# Sizes that don't divide evenly: five blocks over two or four stages, maps of 3 positions over two tiles.
# Images are small because BatchNorm makes a kernel's gradient a sum whose terms cancel. With a hundred times
# more terms, the gradient in float32 loses one more decimal place. (With 16 images of 40 x 56 pixels, float32
# and float64 on one device differ by 4e-5.)
NETS = {
    "text": (
        "model=tiny", "model.layers=5", "model.dim=64", "model.heads=8", "model.kv_heads=4",
        "model.ffn_dim=128",
        "data=text", "data.sequence_length=32", "data.max_bytes=200000",
    ),
    "moe": (
        "model=moe_tiny", "model.layers=3", "model.dim=32", "model.ffn_dim=24", "model.balance=0.1",
        "data=text", "data.sequence_length=32", "data.max_bytes=200000",
    ),
    "digits": (
        "model=convnet", "model.channels=[4,8,8]", "data=digits", "data.height=16", "data.width=24",
    ),
    "cells": (
        "model=segmenter", "model.channels=[8,12,16]", "data=cells", "data.samples=64", "data.height=32",
        "data.width=48",
    ),
    "unet": (
        "model=unet", "model.channels=[4,6,8]", "data=cells", "data.samples=64", "data.height=16",
        "data.width=24",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ParityRow:
    """One strategy on one layout.

    layout: nodes, devices and degrees; empty: one device. A layout on the command line replaces it.
    options: further overrides.
    nets: names of `NETS` on which the strategy is proven.
    """

    strategy: str
    layout: tuple[str, ...]
    options: tuple[str, ...] = ()
    nets: tuple[str, ...] = ("text",)


TWO, FOUR, TWO_BY_TWO = ("nodes=2",), ("nodes=4",), ("nodes=2", "gpus_per_node=2")
LAYERS = ("text", "digits")  # for strategies that accept any kind of layer
IMAGES = ("digits", "cells", "unet")

ROWS = (
    ParityRow("single", (), ("training.microbatch_size=4",)),
    ParityRow("data", TWO, nets=LAYERS),
    ParityRow("data", FOUR, ("training.microbatch_size=1",), nets=LAYERS),
    ParityRow("dataparallel", ("gpus_per_node=2",), nets=LAYERS),
    ParityRow("parameter_server", ("nodes=3",), nets=LAYERS),  # two workers
    ParityRow("parameter_server", TWO, ("strategy.dedicated_server=false",)),
    ParityRow("fsdp", TWO, nets=(*LAYERS, "unet")),
    ParityRow("fsdp", FOUR, ("training.microbatch_size=1",)),
    ParityRow("fsdp", TWO, ("strategy.reshard=false",)),
    ParityRow("hsdp", TWO_BY_TWO, ("training.microbatch_size=1",)),
    ParityRow("tensor", TWO, nets=LAYERS),
    ParityRow("tensor", TWO, ("strategy.sequence_parallel=false", "strategy.loss_parallel=false")),
    ParityRow("tensor", (*TWO_BY_TWO, "strategy.tensor=2", "strategy.replicate=2")),
    ParityRow("model", TWO, nets=(*LAYERS, "unet")),
    *(
        ParityRow("pipeline", TWO, (f"strategy.schedule={schedule}",))
        for schedule in (
            "gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev",
        )
    ),
    ParityRow("pipeline", FOUR),
    ParityRow("pipeline", TWO, ("strategy.microbatches=4",), nets=("digits", "unet")),
    ParityRow("pipeline", (*TWO_BY_TWO, "strategy.pipeline=2", "strategy.replicate=2")),
    ParityRow("context", TWO, ("strategy.context_attention=ring",)),
    ParityRow("context", TWO, ("strategy.context_attention=gather",)),
    ParityRow("context", TWO, ("strategy.context_attention=all_to_all",)),
    ParityRow("context", (*TWO_BY_TWO, "strategy.context=2", "strategy.shard=2")),
    ParityRow("tile", TWO, nets=IMAGES),
    ParityRow("tile", TWO_BY_TWO, nets=IMAGES),
    ParityRow("tile", (*TWO_BY_TWO, "strategy.tile=2", "strategy.replicate=2"),
        ("training.microbatch_size=2",),
        nets=("cells",)),
    ParityRow("expert", TWO, ("training.microbatch_size=4",), nets=("moe",)),
    ParityRow("expert", (*TWO_BY_TWO, "strategy.expert=2", "strategy.replicate=2"), nets=("moe",)),
    ParityRow("expert", (*TWO_BY_TWO, "strategy.expert=2", "strategy.pipeline=2"), nets=("moe",)),
    ParityRow("fsdp", (*TWO_BY_TWO, "strategy.expert=2"), nets=("moe",)),
    ParityRow("tensor", (*TWO_BY_TWO, "strategy.tensor=2", "strategy.expert=2"), nets=("moe",)),
    ParityRow("context", (*TWO_BY_TWO, "strategy.context=2", "strategy.expert=2"), nets=("moe",)),
    ParityRow("hybrid", TWO_BY_TWO),
    ParityRow("hybrid", ("nodes=2", "gpus_per_node=4", "strategy.tensor=2", "strategy.replicate=1",
                   "strategy.shard=2")),
)  # fmt: skip
