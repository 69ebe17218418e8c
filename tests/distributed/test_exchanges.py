"""Who sends what to whom, as `config/exchanges.py` derives it, against the collectives of real steps."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from hpc_parallel.config.exchanges import COPY, Exchange, Often, exchanges
from hpc_parallel.config.setup import recorded_setup
from tests.parity import COMMON, in_full
from tests.watched_collectives import Seen, watched
from tests.workers import Workers

STEPS = ("training.global_batch_size=16", "training.steps=3", "training.measure_steps=1",
         "training.validate_every=null", "training.checkpoint_every=null")  # fmt: skip
TEXT = (*(word for word in COMMON if not word.startswith("training.")), *STEPS, "optimizer.warmup_steps=1")
DIGITS = ("model=convnet", "model.channels=[4,8]", "data=digits", "data.height=16", "data.width=16", *STEPS)
CELLS = ("data=cells", "data.height=32", "data.width=32", *STEPS)
SEGMENTER, UNET = ("model=segmenter", "model.channels=[4,8]", *CELLS), ("model=unet", *CELLS)
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
LOGITS = "strategy.loss_parallel=false strategy.sequence_parallel=false"  # gathered on the last stage only
QUICK = [
    (TEXT, "strategy=single"),
    (TEXT, f"strategy=data {TWO} strategy.gradient_compression=bfloat16"),
    (TEXT, "strategy=parameter_server nodes=3"),
    (TEXT, "strategy=dataparallel gpus_per_node=2"),
    (TEXT, f"strategy=hsdp {FOUR}"),
    (TEXT, f"strategy=tensor {TWO}"),
    (TEXT, f"strategy=model {TWO}"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2"),
    (TEXT, f"strategy=pipeline {TWO} strategy.schedule=zbv"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.tensor=2 {LOGITS}"),
    (TEXT, "strategy=context nodes=3 data.sequence_length=36"),
    (TEXT, f"strategy=context {TWO} strategy.context_attention=gather"),
    (TEXT, f"strategy=context {TWO} strategy.context_attention=all_to_all"),
    (TEXT, f"strategy=expert {FOUR} model=moe_tiny strategy.expert=2 strategy.replicate=2"),
    (DIGITS, f"strategy=tile {TWO}"),
    (SEGMENTER, f"strategy=tile {FOUR} strategy.tile=2 strategy.replicate=2"),
]
FULL = [
    (TEXT, f"strategy=data {TWO}"),
    (TEXT, f"strategy=data {FOUR} strategy.tensor=2"),
    (TEXT, f"strategy=data {FOUR} strategy.context=2"),
    (TEXT, f"strategy=parameter_server {TWO} strategy.dedicated_server=false"),
    (TEXT, f"strategy=fsdp {TWO} strategy.reshard=false"),
    (TEXT, f"strategy=fsdp {FOUR} strategy.context=2"),
    (TEXT, f"strategy=fsdp {EIGHT} strategy.tensor=2 strategy.context=2"),
    (TEXT, f"strategy=tensor {TWO} strategy.sequence_parallel=false"),
    (TEXT, f"strategy=tensor {TWO} strategy.loss_parallel=false"),
    (TEXT, f"strategy=tensor {TWO} {LOGITS}"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.tensor=2 strategy.schedule=zbv {LOGITS}"),
    (TEXT, "strategy=pipeline nodes=4"),
    (TEXT, f"strategy=pipeline {TWO} model.tied_head=false"),
    (TEXT, f"strategy=pipeline {TWO} strategy.schedule=interleaved"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.context=2"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.tensor=2 strategy.schedule=zbv"),
    (TEXT, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.replicate=2 "
           "strategy.schedule=interleaved_zero_bubble"),
    (TEXT, f"strategy=context {FOUR} strategy.tensor=2"),
    (TEXT, f"strategy=context {EIGHT} strategy.tensor=2 strategy.replicate=2"),
    (TEXT, f"strategy=pipeline {FOUR} model=moe_tiny strategy.pipeline=2 strategy.expert=2"),
    (TEXT, f"strategy=hybrid {EIGHT} strategy.tensor=2 strategy.replicate=2"),
    (TEXT, f"strategy=hybrid {EIGHT} strategy.tensor=2 strategy.shard=2 strategy.replicate=1"),
    (DIGITS, f"strategy=data {TWO}"),
    (DIGITS, f"strategy=data {FOUR} strategy.tensor=2"),
    (DIGITS, "strategy=parameter_server nodes=3"),
    (DIGITS, f"strategy=fsdp {TWO}"),
    (DIGITS, f"strategy=tensor {TWO}"),
    (DIGITS, f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.tile=2"),
    (DIGITS, "strategy=dataparallel gpus_per_node=2"),
    (SEGMENTER, f"strategy=tile {FOUR}"),
    (UNET, f"strategy=tile {TWO}"),
]  # fmt: skip


def seen_and_derived(workers: Workers, *words: str) -> tuple[Counter[Seen], list[Exchange], set[str]]:
    """The collectives of a real step, the derived exchanges, and the kinds in the run's summary."""
    run = workers.prepare(*words)
    by_rank = workers.run(run.processes, watched, str(run.folder.path))
    seen: Counter[Seen] = Counter()
    for rank in by_rank:
        for collective, count in rank.items():  # all members of a group see the same number
            seen[collective] = max(seen[collective], count)
    config = yaml.safe_load(run.folder.config.read_text())
    setup = recorded_setup(config, devices=config["nodes"] * config["gpus_per_node"], device="cpu")
    assert setup is not None
    assert setup.uncovered is None
    assert all(exchange.only_if is None for exchange in exchanges(setup))  # all is known of our models
    traffic = json.loads((run.folder.path / "summary.json").read_text())["traffic"]
    return seen, exchanges(setup), set(traffic)


@pytest.mark.parametrize(("base", "layout"), [*QUICK, *in_full(FULL)], ids=str)
def test_a_real_step_has_these_collectives_among_these_ranks(
    workers: Workers, base: tuple[str, ...], layout: str
) -> None:
    seen, derived, traffic = seen_and_derived(workers, *base, *layout.split())
    assert {exchange.how for exchange in derived} == traffic
    between_ranks = [exchange for exchange in derived if exchange.how != COPY]
    assert set(seen) == {(exchange.how, group) for exchange in between_ranks for group in exchange.groups}


REPEATED = [
    (f"strategy=fsdp {TWO}", "training.microbatch_size={}"),
    (f"strategy=pipeline {TWO}", "strategy.microbatches={}"),
    (f"strategy=data {FOUR} strategy.tensor=2", "training.microbatch_size={}"),
    (f"strategy=context {TWO}", "training.microbatch_size={}"),
]


@pytest.mark.parametrize(("layout", "key"), [*REPEATED[:2], *in_full(REPEATED[2:])])
def test_they_are_as_often_as_said(workers: Workers, layout: str, key: str) -> None:
    """With twice the microbatches a collective is more frequent exactly if it is not once a step.

    With half the blocks, one of each block is less frequent.
    """
    few, derived, _ = seen_and_derived(workers, *TEXT, *layout.split(), key.format(4))
    many, *_ = seen_and_derived(workers, *TEXT, *layout.split(), key.format(2 if "size" in key else 8))
    short, *_ = seen_and_derived(workers, *TEXT, *layout.split(), key.format(4), "model.layers=2")
    for how, group in few:
        often = {e.often for e in derived if e.how == how and group in e.groups}
        assert (many[how, group] > few[how, group]) == (often != {Often.STEP}), (how, group)
        assert Often.BLOCK not in often or short[how, group] < few[how, group], (how, group)
