"""The samples that a model can be trained on; for others, one device and many would not agree."""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.data.legal_samples import LegalSamples
from hpc_parallel.problems import ConfigError


@pytest.mark.parametrize(
    ("targets", "ignored", "classes", "told"),
    [
        ([0, -1, 4], None, None, "the target -1, which counts"),
        ([0, -1, 4], None, 5, "the target -1, which counts"),
        ([0, -1, 4], -100, None, None),  # a user's own loss
        ([0, -1, 4], -100, 5, "the target -1, but the model's classes are 0 to 4"),
        ([0, -100, 4], -100, 5, None),
        ([0, 255, 4], 255, 5, None),
        ([0, 255, 5], 255, 5, "the target 5, but"),
        ([0, 5, 4], None, 5, "the target 5, but"),
        ([0, 5, 4], None, None, None),
        ([], None, 5, None),
    ],
)
def test_a_target_without_a_class_is_refused(
    targets: list[int], ignored: int | None, classes: int | None, told: str | None
) -> None:
    legal, tokens = LegalSamples(ignored, classes, tokens=9), torch.tensor([[0, 8]])
    small = (torch.uint8,) if min(targets, default=0) >= 0 else ()
    for dtype in (torch.int16, torch.int32, torch.int64, *small):
        if told is None:
            legal.require(tokens, torch.tensor(targets, dtype=dtype))
        else:
            with pytest.raises(ConfigError, match=told):
                legal.require(tokens, torch.tensor(targets, dtype=dtype))


def test_floats_are_numbers_to_predict_and_no_classes() -> None:
    targets = torch.tensor([-1.5, 7.0])
    LegalSamples().require(torch.tensor([[0, 8]]), targets)
    with pytest.raises(ConfigError, match=r"targets of torch\.float32, but the loss takes classes"):
        LegalSamples(classes=5).require(torch.tensor([[0, 8]]), targets)


@pytest.mark.parametrize(("token", "told"), [(9, 9), (-1, -1), (8, None)])
def test_a_token_outside_the_vocabulary_is_refused(token: int, told: int | None) -> None:
    legal, targets = LegalSamples(None, classes=None, tokens=9, each_token=False), torch.tensor([[20, 3]])
    legal.require(torch.tensor([[[token, 4], [9, -3]]]), targets)  # packed: checked when packed
    legal.require(torch.tensor([[token, 9.0]]), targets)
    if told is None:
        legal.require(torch.tensor([[0, token]]), targets)
    else:
        with pytest.raises(ConfigError, match=f"the token {told}, but the model's vocabulary is 0 to 8"):
            legal.require(torch.tensor([[0, token]]), targets)


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((2, 3), None),
        ((2, 4), r"of shape \[4\] for 3 tokens"),
        ((2, 2), r"of shape \[2\] for 3 tokens"),
        ((2,), r"of shape \[\] for 3 tokens, but the loss takes one target for each token: return \[3\]"),
        ((2, 3, 2), r"of shape \[3, 2\] for 3 tokens"),
    ],
)
@pytest.mark.parametrize("inputs", [(2, 3), (2, 3, 2)], ids=["plain", "packed"])
def test_a_language_model_takes_one_target_for_each_token(
    shape: tuple[int, ...], told: str | None, inputs: tuple[int, ...]
) -> None:
    legal = LegalSamples(None, classes=9, tokens=9, each_token=True)
    batch = torch.ones(inputs, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
    if told is None:
        legal.require(*batch)
        return
    with pytest.raises(ConfigError, match=told):
        legal.require(*batch)


def test_targets_that_are_the_inputs_are_refused() -> None:
    """The loss of the library transformers shifts them; a model of ours would learn to copy."""
    legal = LegalSamples(-100, classes=9, tokens=9, each_token=True, predicts=True)
    tokens = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 4]])
    padded = tokens.masked_fill(tokens == 1, -100)
    legal.require(tokens[:1], tokens[:1])  # the next tokens are the same
    legal.require(tokens, torch.tensor([[0, 0, 0, 0], [2, 3, 4, 4]]))
    legal.require(tokens[1:], torch.tensor([[-100, 2, -100, -100]]))  # one number to find: a chance
    legal._replace(predicts=False).require(tokens, tokens)  # to measure, for example
    for targets in (tokens.to(torch.int32), padded):
        with pytest.raises(ConfigError, match=r"return tokens\[:-1\], tokens\[1:\]"):
            legal.require(tokens, targets)


def test_pixels_are_bytes() -> None:
    """Of images in [0, 1] a model of ours would see black ones, and learn nothing."""
    legal = LegalSamples(None, classes=10, tokens=None, each_token=False, pixels=True)
    images = torch.rand(2, 1, 4, 4)
    for pixels in ((255 * images).to(torch.uint8), 255 * images, 0 * images):
        legal.require(pixels, torch.tensor([3, 9]))
    with pytest.raises(ConfigError, match="from -"):
        legal.require(images / images.std() - 2, torch.tensor([3, 9]))
    with pytest.raises(
        ConfigError, match=r"images of torch\.float32 from .* but the model takes pixels from 0 to 255"
    ):
        legal.require(images, torch.tensor([3, 9]))


def test_all_that_is_wrong_is_told_at_once() -> None:
    legal = LegalSamples(None, classes=9, tokens=9, each_token=True)
    with pytest.raises(ConfigError) as refusal:
        legal.require(torch.tensor([[3, 9]]), torch.tensor([[9, 0, 0]]))
    assert len(refusal.value.problems) == 3
