"""Digits and drawn cells: populations that depend on nothing but their configuration."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from hpc_parallel.data.images import CellsData, DigitsData


def test_digits_are_all_there_and_repeated_over_the_canvas() -> None:
    data = DigitsData(height=16, width=24)
    assert len(data.train) + len(data.validation) == 1797
    assert len(data.validation) == 180
    images, labels = data.train.batch(np.arange(len(data.train)))
    assert images.dtype == torch.uint8
    assert images.shape == (1617, *data.sample_shape)
    assert torch.equal(images[..., :8, :8], images[..., 8:, 16:])
    assert (images.min(), images.max()) == (0, 255)
    assert labels.bincount(minlength=10).min() > 150
    assert data.digest == DigitsData().digest
    with pytest.raises(ValueError, match="multiples of 8"):
        DigitsData(height=20)


def test_digits_are_those_of_scikit_learn_without_its_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import takes two seconds on each rank."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "sklearn.datasets", None)  # its import raises
        data = DigitsData(height=8, width=8)
    from sklearn.datasets import load_digits

    expected = load_digits()
    parts = [part.batch(np.arange(len(part))) for part in (data.train, data.validation)]
    images, labels = map(torch.cat, zip(*parts, strict=True))
    assert np.array_equal(images[:, 0], np.round(expected.images * (255 / 16)))
    assert np.array_equal(labels, expected.target)


def test_cells_are_a_function_of_seed_and_number() -> None:
    data = CellsData(height=48, width=80, samples=20)
    images, masks = data.train.batch(np.array([3, 7]))
    assert images.shape == (2, *data.sample_shape)
    assert (images.dtype, masks.dtype) == (torch.uint8, torch.uint8)
    assert masks.shape == (2, 48, 80)
    again, _ = CellsData(height=48, width=80, samples=20).train.batch(np.array([7]))
    assert torch.equal(again[0], images[1])
    assert not torch.equal(images[0], images[1])
    held_out, _ = data.validation.batch(np.array([0]))
    assert not any(torch.equal(held_out[0], data.train.batch(np.array([i]))[0][0]) for i in range(20))
    assert data.digest != CellsData(height=48, width=80, samples=20, seed=1).digest


def test_cells_differ_from_the_background() -> None:
    images, masks = CellsData(height=128, width=128, samples=8).train.batch(np.arange(8))
    inside = masks.bool()
    assert 0.1 < inside.float().mean() < 0.6
    grey = images[:, 0].float()
    assert grey[inside].mean() > grey[~inside].mean() + 20
