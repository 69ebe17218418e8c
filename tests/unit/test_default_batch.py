"""The global batch of a line that does not set one: what the layout can split, the same in a sweep."""

from __future__ import annotations

import pytest

from tests.composed import prepared


@pytest.mark.parametrize(
    ("words", "size"),
    [
        ("strategy=single", 16),
        ("strategy=data nodes=4", 16),
        ("strategy=data nodes=3", 18),
        ("model=1b nodes=4 gpus_per_node=8 strategy=fsdp", 32),
        ("strategy=parameter_server nodes=4", 18),  # three workers
        ("strategy=data nodes=4 training.microbatch_size=8", 32),
        ("strategy=pipeline nodes=3 model.layers=6", 18),
        ("strategy=pipeline nodes=3 model.layers=6 strategy.schedule=gpipe", 16),
        ("strategy=pipeline nodes=2 strategy.microbatches=5", 20),
        ("model=convnet data=digits strategy=data nodes=3", 66),
        ("model=unet data=cells strategy=tile nodes=2", 8),
        ("strategy=data nodes=4 training.global_batch_size=8", 8),
    ],
)
def test_it_is_the_next_number_that_the_layout_can_split(words: str, size: int) -> None:
    run = prepared(*words.split(), "launcher=local", "launcher.snapshot=false", "device=cpu")
    assert run.config.training.global_batch_size == size
    assert run.values["training"]["global_batch_size"] == size
    assert run.plan.batch.data * run.plan.batch.samples_per_replica == size
