"""One device against a layout of many: what the tests of every technique compare, and how."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_parallel.worker.session import Session
from tests.composed import prepared
from tests.workers import Train, Trained

STEPS = 3  # enough for an error of 1e-10; in `make test-full` one case of each technique is LONG
TRAINING = (
    f"training.steps={STEPS}",
    "training.log_every=1",
    f"training.validate_every={STEPS}",
    "training.validation_samples=19",  # its last batch is 3 of 16
    "training.checkpoint_every=null",
    "training.measure_steps=1",  # the last step is counted; test_measure.py proves that it changes nothing
    "training.global_batch_size=16",
    "optimizer.warmup_steps=3",
)
COMMON = (
    *TRAINING, "data.sequence_length=32", "data.max_bytes=400000", "model.layers=4", "model.dim=64",
    "model.ffn_dim=160",
)  # fmt: skip
LONG = "float64, 20 steps"
# Words of a layout that its reference on one device gets too.
SHARED = (
    "model=", "model.", "data.", "training.global_batch_size", "training.steps", "training.validate_every",
)  # fmt: skip
TIED = ("training.precision=float64", "model.tied_head=true")
EXACTNESS = {
    # name: (words, largest difference of losses, of weights)
    "float32": (("training.precision=float32", "model.tied_head=true"), 1e-5, 1e-4),
    "float64": (TIED, 1e-10, 1e-10),
    "float64, untied head": (("training.precision=float64", "model.tied_head=false"), 1e-10, 1e-10),
    LONG: ((*TIED, "training.steps=20", "training.validate_every=10"), 1e-10, 1e-10),
}


def follow_one_device(trained: Train, layout: tuple[str, ...], *, exactness: str = "float64") -> Trained:
    """Train the transformer on `layout` and compare the curve, the weights and the validation with one
    device's; returns what the layout's run left."""
    words, losses, weights = EXACTNESS[exactness]
    shared = (word for word in layout if word.startswith(SHARED))
    split, reference = trained(*COMMON, *words, *layout), trained(*COMMON, *words, "strategy=single", *shared)
    assert_follows(split, reference, losses=losses, weights=weights)
    return split


def assert_follows(split: Trained, reference: Trained, *, losses: float, weights: float) -> None:
    """Curve, weights and validation to these relative differences; the first gradient as near as losses."""
    assert len(reference.losses) >= STEPS
    assert largest_difference(split.losses, reference.losses) < losses
    assert tensor_difference(split.gradients, reference.gradients) < losses
    assert weight_difference(split, reference) < weights
    norms = [[line["grad_norm"] for line in run.lines] for run in (split, reference)]
    assert largest_difference(*norms) < weights
    validated = [line for line in reference.lines if "validation_loss" in line]
    assert len(validated) >= 2  # before the first step and after the last
    for key in [key for key in validated[0] if key.startswith("validation_")]:
        means = [[line[key] for line in run.lines if key in line] for run in (split, reference)]
        if key == "validation_loss" or losses < 1e-9:  # a count changes as a whole where rounding decides
            assert largest_difference(*means) < losses


def largest_difference(found: list[float], wanted: list[float]) -> float:
    """Relative, over the steps."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def weight_difference(found: Trained, wanted: Trained) -> float:
    return tensor_difference(found.weights, wanted.weights)


def tensor_difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest over the tensors of |a - b| / |b|, by tensor norm."""
    assert found.keys() == wanted.keys()
    return max(
        float(torch.linalg.vector_norm(found[name] - tensor) / torch.linalg.vector_norm(tensor))
        for name, tensor in wanted.items()
    )


def opened(*overrides: str) -> Session:
    """This rank's session of a configuration, before any step."""
    return Session.open(prepared(*overrides).config, device=torch.device("cpu"))
