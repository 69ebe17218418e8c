"""A model whose weights alone exceed a device is refused; the counts are those of the built model."""

from __future__ import annotations

import re

import hydra
import pytest
import torch

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.site_limits import local_warnings
from hpc_parallel.layout.counts import least_bytes, parameters
from hpc_parallel.layout.layout import Layout
from hpc_parallel.problems import ConfigError
from tests.composed import composed, prepared

B1 = 1_235_814_400  # parameters of Llama 3.2 1B, as its authors publish them


@pytest.mark.parametrize("model", ["tiny", "124m", "moe_tiny"])
def test_the_count_is_that_of_the_model(model: str) -> None:
    config, values, _ = resolve(composed(f"model={model}"))
    with torch.device("meta"):
        built = hydra.utils.instantiate(values["model"])
    weights = {id(weight): weight.numel() for weight in built.parameters()}
    assert parameters(config) == sum(weights.values())


@pytest.mark.parametrize(
    ("words", "layout", "bytes_"),
    [
        ([], Layout(replicate=8), 16 * B1),  # weights, gradients and two states of AdamW, 4 bytes each
        ([], Layout(shard=4, replicate=2), 16 * B1 // 4),
        ([], Layout(pipeline=2, tensor=2, context=2), 16 * B1 // 4),
        (["training.precision=bfloat16"], Layout(), 16 * B1),
        (["training.precision=float64"], Layout(), 32 * B1),
        (["task=infer"], Layout(), 4 * B1),
        (["strategy=parameter_server"], Layout(), 8 * B1),
    ],
)
def test_bytes_of_a_device(words: list[str], layout: Layout, bytes_: int) -> None:
    config, *_ = resolve(composed("model=1b", *words))
    assert least_bytes(config, layout) == bytes_


def test_other_models_are_not_counted() -> None:
    assert least_bytes(resolve(composed("model=convnet", "data=digits"))[0], Layout()) is None


def test_what_can_not_fit_is_refused() -> None:
    words = ("model=1b", "nodes=2", "training.global_batch_size=16", "launcher=script")
    prepared(*words, "strategy=data")  # nobody knows the memory
    with pytest.raises(ConfigError, match=r"device_memory_gb = 16 is less than the 18\.4 GB of weights"):
        prepared(*words, "strategy=data", "cluster.device_memory_gb=16")
    prepared(*words, "strategy=data", "cluster.device_memory_gb=19")
    prepared(*words, "strategy=fsdp", "cluster.device_memory_gb=16")


@pytest.mark.parametrize(
    ("words", "environment", "needed_gb"),
    [
        ("strategy=data nodes=2", {}, 2 * 16 * B1 / 2**30),
        ("strategy=fsdp nodes=2", {}, 16 * B1 / 2**30),
        ("strategy=data nodes=2 device=cuda", {}, None),
    ],
)
def test_a_run_that_this_machine_can_not_hold_is_announced(
    words: str, environment: dict[str, str], needed_gb: float | None
) -> None:
    config, *_ = resolve(composed("model=1b", *words.split()))
    warnings = local_warnings(config, memory_bytes=16 * 2**30, environment=environment)
    assert [float(re.search(r"at least ([0-9.]+) GB", line)[1]) for line in warnings] == (
        [] if needed_gb is None else [pytest.approx(needed_gb, abs=0.05)]
    )
    assert local_warnings(config, memory_bytes=2**40, environment=environment) == []
