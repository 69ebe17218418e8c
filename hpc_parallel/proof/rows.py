"""The rows of `python -m hpc_parallel parity`: strategies and recipes, on networks that train in a minute.

A new `conf/strategy/<name>.yaml` needs a row here; a test checks this. `RECIPES` is the table of
docs/recipes.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
TINY = (
    "model=tiny", "model.layers=5", "model.dim=64", "model.heads=8", "model.kv_heads=4", "model.ffn_dim=128",
)  # fmt: skip
MOE = ("model=moe_tiny", "model.layers=3", "model.dim=32", "model.ffn_dim=24")
TEXT = ("data=text", "data.sequence_length=32", "data.max_bytes=200000")
NETS = {
    "text": (*TINY, *TEXT),
    "moe": (*MOE, "model.balance=0.1", *TEXT),
    "qwen3": (
        *MOE, "model.balance=0.1", "model.head_dim=16", "model.qk_norm=true", "model.renormalise=true", *TEXT,
    ),
    "deepseek": (
        *MOE, "model.gate=sigmoid", "model.renormalise=true", "model.shared_experts=2", "model.balance=0",
        "model.balance_step=0.1", "model.dense_layers=1", "model.dense_ffn_dim=96", *TEXT,
    ),
    "wide_experts": (  # multiples of 16, as float8 needs them
        "model=moe_tiny", "model.layers=3", "model.dim=64", "model.ffn_dim=64", "model.balance=0.1", *TEXT,
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
    "packed": (
        *TINY, "data=dataset", "data.dataset._target_=hpc_parallel.proof.rows.RandomDocuments",
        "data.vocab_size=256", "data.sequence_length=32", "data.packing=true",
    ),
}  # fmt: skip


class RandomDocuments:
    """400 documents of 1 to 40 random tokens, with their targets."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        numbers = np.random.default_rng(index)
        tokens = numbers.integers(256, size=numbers.integers(2, 42))
        return tokens[:-1], tokens[1:]


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


@dataclass(frozen=True)
class Recipe:
    """What others train with on large clusters, and how it is proven (`parity recipes=true`).

    line: what a user types. devices: nodes and devices of the proof. net: a name of `NETS`.
    """

    name: str
    publisher: str
    line: str
    devices: tuple[str, ...]
    net: str = "text"

    @property
    def row(self) -> ParityRow:
        """The line with degrees of two at most, and with `net` for its model and data.

        fp8 is proven in float64: what bfloat16 rounds in another order may fall on the next float8.
        """
        words = [
            re.sub(r"^(strategy\.\w+)=\d+$", r"\1=2", word)
            for word in self.line.split()
            if not word.startswith(("model", "data", "nodes=", "gpus_per_node="))
        ]
        if any(word.startswith("training.fp8=") for word in words):
            words = [word.replace("precision=bfloat16", "precision=float64") for word in words]
        strategy = words.pop(next(i for i, word in enumerate(words) if word.startswith("strategy=")))
        degrees = tuple(word for word in words if re.fullmatch(r"strategy\.\w+=-?\d+", word))
        options = tuple(word for word in words if word not in degrees)
        return ParityRow(strategy.partition("=")[2], (*self.devices, *degrees), options, nets=(self.net,))


EIGHT, SIXTEEN = ("nodes=2", "gpus_per_node=4"), ("nodes=2", "gpus_per_node=8")
RECIPES = (
    Recipe("FSDP + TP, compiled, recomputing all", "torchtitan (70B), KempnerForge",
        "strategy=fsdp strategy.tensor=8 training.compile=true training.activation_checkpointing=full",
        TWO_BY_TWO),
    Recipe("CP by ring, compiled", "torchtitan",
        "strategy=context training.compile=true training.activation_checkpointing=selective",
        TWO),
    Recipe("FSDP + CP by heads, compiled", "torchtitan",
        "strategy=fsdp strategy.context=2 strategy.context_attention=all_to_all training.compile=true",
        TWO_BY_TWO),
    Recipe("FSDP + EP", "torchtitan",
        "model=mixtral_8x7b strategy=fsdp strategy.expert=8",
        TWO_BY_TWO, "moe"),
    Recipe("HSDP + EP", "torchtitan",
        "model=mixtral_8x7b strategy=hsdp strategy.expert=8",
        EIGHT, "moe"),
    Recipe("FSDP + TP + EP, compiled", "torchtitan, KempnerForge",
        "model=mixtral_8x7b strategy=fsdp strategy.expert=2 strategy.tensor=4 training.compile=true "
        "training.activation_checkpointing=full",
        EIGHT, "moe"),
    Recipe("PP + FSDP + TP + EP, compiled", "torchtitan",
        "model=mixtral_8x7b strategy=pipeline strategy.pipeline=2 strategy.shard=-1 strategy.expert=2 "
        "strategy.tensor=2 training.compile=true",
        SIXTEEN, "moe"),
    Recipe("PP + FSDP + CP + EP, compiled", "torchtitan",
        "model=mixtral_8x7b strategy=pipeline strategy.pipeline=2 strategy.shard=-1 strategy.expert=2 "
        "strategy.context=2 training.compile=true",
        SIXTEEN, "moe"),
    Recipe("Qwen3 30B A3B, FSDP + EP", "torchtitan",
        "model=qwen3_30b_a3b strategy=fsdp strategy.expert=8",
        TWO_BY_TWO, "qwen3"),
    Recipe("Qwen3 30B A3B, TP + EP", "torchtitan",
        "model=qwen3_30b_a3b strategy=tensor strategy.tensor=4 strategy.expert=2",
        TWO_BY_TWO, "qwen3"),
    Recipe("DeepSeek, FSDP + EP, no auxiliary loss", "torchtitan (DeepSeek V3)",
        "model=deepseek_v2_lite strategy=fsdp strategy.expert=8",
        TWO_BY_TWO, "deepseek"),
    Recipe("Qwen3 30B A3B, FSDP + EP, compiled", "torchtitan",
        "model=qwen3_30b_a3b strategy=fsdp strategy.expert=8 training.compile=true "
        "training.activation_checkpointing=full",
        TWO_BY_TWO, "qwen3"),
    Recipe("FSDP + TP in fp8", "torchtitan (70B)",
        "strategy=fsdp strategy.tensor=8 training.precision=bfloat16 training.fp8=tensorwise",
        TWO_BY_TWO),
    Recipe("PP + TP in fp8", "torchtitan (405B)",
        "strategy=pipeline strategy.pipeline=2 strategy.tensor=2 training.precision=bfloat16 "
        "training.fp8=tensorwise",
        TWO_BY_TWO),
    Recipe("FSDP + EP in fp8, compiled", "torchtitan (experts in float8 by rows)",
        "model=qwen3_30b_a3b strategy=fsdp strategy.expert=8 training.precision=bfloat16 "
        "training.fp8=rowwise training.compile=true",
        TWO_BY_TWO, "wide_experts"),
    Recipe("FSDP + CP in fp8", "torchtitan",
        "strategy=fsdp strategy.context=2 training.precision=bfloat16 training.fp8=tensorwise",
        TWO_BY_TWO),
    Recipe("weights and state in bfloat16", "KempnerForge (8B on one H200, 80.7 GB), torchtitan (states)",
        "model=8b strategy=single training.precision=bfloat16 training.weights=bfloat16 "
        "optimizer.state=bfloat16 training.activation_checkpointing=full",
        ()),
    Recipe("packed documents", "torchtitan, TRL",
        "data=tokens data.path=tokens.npy data.packing=true data.separator=0 strategy=fsdp "
        "strategy.context=2 strategy.context_attention=ring",
        TWO_BY_TWO, "packed"),
    Recipe("a schedule of one's own", "torchtitan",
        "strategy=pipeline nodes=2 strategy.schedule=examples/schedule.csv",
        TWO),
)  # fmt: skip
