"""`training.deterministic`: what torch is told before the first kernel, and our models' kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.machine.torch_variables import use_fixed_workspaces
from hpc_parallel.machine.world import World
from hpc_parallel.models.layered import materialise
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.worker.main import prepare_device
from tests.composed import composed


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.set_num_threads(threads)


def config_of(*words: str) -> RunConfig:
    return resolve(composed("strategy=single", "device=cpu", "launcher=local", *words))[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_is_told(deterministic: bool) -> None:
    word = f"training.deterministic={str(deterministic).lower()}"
    prepare_device(config_of(word), World.discover({}))
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def test_a_variable_of_the_user_stays() -> None:
    environment: dict[str, str] = {}
    reasons = use_fixed_workspaces(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert reasons == {"CUBLAS_WORKSPACE_CONFIG": "training.deterministic"}
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    assert use_fixed_workspaces(environment) == {}
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


@pytest.mark.parametrize("model", ["tiny", "moe_tiny"])
def test_our_models_have_deterministic_kernels(model: str) -> None:
    config = config_of("training.deterministic=true", f"model={model}", "model.layers=1", "model.dim=32")
    prepare_device(config, World.discover({}))
    gradients = []
    for _ in range(2):
        built = build_model(config)
        materialise(built, seed=0, device="cpu", dtype=torch.float32)
        tokens = torch.arange(64).reshape(2, 32) % 8
        built.loss(built(tokens), tokens).backward()
        gradients.append([weight.grad for weight in built.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
