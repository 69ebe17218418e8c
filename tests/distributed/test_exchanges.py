"""Who sends what to whom, as `layout/exchanges.py` derives it, against the collectives of real steps."""

from __future__ import annotations

import pytest
import yaml

from hpc_parallel.commands.roles import recorded_setup
from hpc_parallel.layout.exchanges import COPY, Exchange, Often, exchanges
from tests.marks import in_full
from tests.matrix import IMAGES, TEXTS, cases
from tests.parity import COMMON, TIED
from tests.workers import Train, Trained

LOGITS = "strategy.loss_parallel=false strategy.sequence_parallel=false"  # gathered on the last stage only
HYBRID = f"strategy=hybrid nodes=2 gpus_per_node=2 {LOGITS}"
WORDS = {
    **TEXTS,
    **IMAGES,
    "compressed": (*COMMON, "strategy=data", "nodes=2", "strategy.gradient_compression=bfloat16"),
    "whole logits of stages": (*COMMON, *HYBRID.split()),
    "whole logits of stages in a V": (*COMMON, *HYBRID.split(), "strategy.schedule=zbv"),
    "untied stages": (*COMMON, "strategy=pipeline", "nodes=2", "model.tied_head=false"),
}


def derived(run: Trained) -> list[Exchange]:
    """The exchanges of a run by its configuration, of which all is known of our models."""
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    setup = recorded_setup(config, devices=config["nodes"] * config["gpus_per_node"], device="cpu")
    assert setup is not None
    assert setup.uncovered is None
    found = exchanges(setup)
    assert all(exchange.only_if is None for exchange in found)
    return found


@pytest.mark.parametrize("layout", cases(WORDS))
def test_a_real_step_has_these_collectives_among_these_ranks(trained: Train, layout: str) -> None:
    run = trained(*WORDS[layout])
    found = derived(run)
    assert {exchange.how for exchange in found} == set(run.summary["traffic"])
    between_ranks = [exchange for exchange in found if exchange.how != COPY]
    assert set(run.collectives) == {
        (exchange.how, group) for exchange in between_ranks for group in exchange.groups
    }


REPEATED = [
    ("strategy=fsdp nodes=2", "training.microbatch_size={}"),
    ("strategy=pipeline nodes=2", "strategy.microbatches={}"),
    ("strategy=data nodes=2 gpus_per_node=2 strategy.tensor=2", "training.microbatch_size={}"),
    ("strategy=context nodes=2", "training.microbatch_size={}"),
]


@pytest.mark.parametrize(("layout", "key"), [*REPEATED[:2], *in_full(REPEATED[2:])])
def test_they_are_as_often_as_said(trained: Train, layout: str, key: str) -> None:
    """With twice the microbatches a collective is more frequent exactly if it is not once a step.

    With half the blocks, one of each block is less frequent.
    """
    words = (*COMMON, *TIED, *layout.split())
    run = trained(*words, key.format(4))
    few = run.collectives
    many = trained(*words, key.format(2 if "size" in key else 8)).collectives
    short = trained(*words, key.format(4), "model.layers=2").collectives
    for how, group in few:
        often = {e.often for e in derived(run) if e.how == how and group in e.groups}
        assert (many[how, group] > few[how, group]) == (often != {Often.STEP}), (how, group)
        assert Often.BLOCK not in often or short[how, group] < few[how, group], (how, group)
