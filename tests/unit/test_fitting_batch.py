"""The default batches: what the layout can split, and what a forward pass keeps against what torch saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.batch_plan import batch_of, plan_batch
from hpc_parallel.layout.counts import fitting_samples, sample_bytes
from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.strategies import checkpointing, precision
from hpc_parallel.strategies.whole_model import build_model
from tests.composed import prepared

WORDS = (
    "launcher=local",
    "device=cpu",
    "model=tiny",
    "data.sequence_length=64",
    "training.global_batch_size=64",
)


def config_of(*words: str) -> RunConfig:
    return prepared(*WORDS, *words).config


def saved_bytes(config: RunConfig, samples: int) -> int:
    """What autograd keeps of `samples`, each memory once, without the weights and their copies."""
    model: LayeredModel = build_model(config)
    model.head, model.tied = None, {}
    checkpointing.apply(model, keeps=config.training.activation_checkpointing, compiled=False)
    precision.apply(model, precision=config.training.precision, device_type="cpu")
    materialise(model, seed=0, device="cpu", dtype=precision.WEIGHTS[config.training.precision])
    memory: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model(torch.zeros(samples, 64, dtype=torch.int64))
    return sum(count for count, _ in memory.values())


@pytest.mark.parametrize(
    "words", [[], ["training.precision=float64"], ["training.precision=bfloat16"]], ids=str
)
def test_the_estimate_is_near_what_torch_keeps(words: list[str]) -> None:
    config = config_of(*words)
    kept = saved_bytes(config, 5) - saved_bytes(config, 1)
    assert 0.9 < 4 * sample_bytes(config, Layout()) / kept < 1.25  # type: ignore[operator]


def test_full_checkpointing_keeps_the_inputs_of_blocks_and_one_block() -> None:
    plain, full = config_of(), config_of("training.activation_checkpointing=full")
    kept = (saved_bytes(full, 5) - saved_bytes(full, 1)) / 4
    one, all_of_them = (sample_bytes(config, Layout()) for config in (config_of("model.layers=1"), plain))
    estimate = sample_bytes(full, Layout())
    assert one is not None and all_of_them is not None and estimate is not None  # noqa: PT018
    assert estimate - one == pytest.approx(kept, rel=0.01)
    assert estimate < all_of_them / 2


def test_the_fewest_microbatches_that_fit() -> None:
    assert [plan_batch(48, layout=Layout(), microbatch_size=None, microbatches=None, fitting=n).microbatches
            for n in (None, 48, 47, 16, 5, 1, 0)] == [1, 1, 2, 3, 12, 48, 48]  # fmt: skip
    pipeline = Layout(pipeline=2)
    assert [plan_batch(48, layout=pipeline, microbatch_size=None, microbatches=None, fitting=n).microbatches
            for n in (None, 6, 5, 1)] == [8, 8, 16, 48]  # fmt: skip


def test_the_default_depends_on_the_memory_and_a_set_size_does_not() -> None:
    config = config_of()
    assert batch_of(config, Layout()).microbatch_size == 64
    small = replace(config, cluster=replace(config.cluster, device_memory_gb=1.9))
    fitting = fitting_samples(small, Layout())
    assert fitting is not None
    assert 1 <= fitting < 64
    size = batch_of(small, Layout()).microbatch_size
    assert size <= fitting < 2 * size
    chosen = replace(small, training=replace(small.training, microbatch_size=64))
    assert batch_of(chosen, Layout()).microbatch_size == 64


def test_other_models_keep_the_whole_share() -> None:
    words = ("launcher=local", "device=cpu", "model=convnet", "data=digits", "cluster.device_memory_gb=1")
    config = prepared(*words).config
    assert fitting_samples(config, Layout()) is None
    assert batch_of(config, Layout()).microbatches == 1


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
def test_the_default_global_batch_is_the_next_number_that_the_layout_can_split(words: str, size: int) -> None:
    run = prepared(*words.split(), "launcher=local", "launcher.snapshot=false", "device=cpu")
    assert run.config.training.global_batch_size == size
    assert run.values["training"]["global_batch_size"] == size
    assert run.plan.batch.data * run.plan.batch.samples_per_replica == size
