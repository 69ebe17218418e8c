"""Image data that needs no download: handwritten digits and generated cells."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DIGIT_SIDE = 8  # pixels


@dataclass(frozen=True)
class Digits:
    """Images uint8 [count, 8, 8] with their labels, repeated over a canvas of height x width pixels."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    height: int
    width: int

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Images uint8 [batch, 1, height, width] and labels int64 [batch]."""
        repeats = (1, 1, self.height // DIGIT_SIDE, self.width // DIGIT_SIDE)
        images = np.tile(self.images[positions][:, None], repeats)
        return torch.from_numpy(images), torch.from_numpy(self.labels[positions])


class DigitsData:
    """The 1,797 handwritten digits of scikit-learn (Alpaydin and Kaynak 1998).

    Each digit is repeated in both directions to fill height x width pixels. The last `validation_share` of
    the images is held out.

    Raises ValueError if height or width is not a multiple of 8 pixels.
    """

    def __init__(self, *, height: int = 32, width: int = 32, validation_share: float = 0.1) -> None:
        if height % DIGIT_SIDE or width % DIGIT_SIDE:
            raise ValueError(f"data.height and data.width must be multiples of {DIGIT_SIDE}")
        spec = find_spec("sklearn")  # its import takes two seconds on each rank
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError("data=digits needs scikit-learn (pip install scikit-learn)")
        table = np.loadtxt(Path(spec.origin).with_name("datasets") / "data/digits.csv.gz", delimiter=",")
        images = np.round(table[:, :-1].reshape(-1, DIGIT_SIDE, DIGIT_SIDE) * (255 / 16)).astype(np.uint8)
        labels = table[:, -1].astype(np.int64)
        cut = round(len(labels) * (1 - validation_share))
        self.sample_shape = (1, height, width)
        self.digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
        self.train = Digits(images[:cut], labels[:cut], height, width)
        self.validation = Digits(images[cut:], labels[cut:], height, width)


@dataclass(frozen=True)
class Cells:
    """Synthetic microscope images; each is a pure function of (seed, its number)."""

    seed: int
    first: int
    count: int
    height: int
    width: int

    def __len__(self) -> int:
        return self.count

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Images uint8 [batch, 1, height, width] and masks uint8 [batch, height, width], 1 in a cell."""
        drawn = [self.draw(int(position)) for position in positions]
        images, masks = (np.stack(part) for part in zip(*drawn, strict=True))
        return torch.from_numpy(images)[:, None], torch.from_numpy(masks)

    def draw(self, position: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Draw bright ellipses with soft edges on an uneven, noisy background: about one for 400 pixels."""
        random = np.random.Generator(np.random.Philox(key=[self.seed, self.first + position]))
        shape = (self.height, self.width)
        rows, columns = np.arange(self.height)[:, None], np.arange(self.width)[None, :]
        tilt = random.uniform(-20, 20, size=2)
        image = 70 + tilt[0] * rows / self.height + tilt[1] * columns / self.width
        image = image + random.normal(0, 12, size=shape)
        mask = np.zeros(shape, dtype=np.uint8)
        for _ in range(1 + random.poisson(self.height * self.width / 400)):
            centre = random.uniform(0, shape)
            radii, angle = random.uniform(3, 8, size=2), random.uniform(0, np.pi)
            box = tuple(slice(max(0, int(x) - 9), int(x) + 10) for x in centre)
            down, right = rows[box[0]] - centre[0], columns[:, box[1]] - centre[1]
            along = (down * np.cos(angle) + right * np.sin(angle)) / radii[0]
            across = (right * np.cos(angle) - down * np.sin(angle)) / radii[1]
            distance = np.hypot(along, across)  # 1 on the edge
            image[box] += random.uniform(30, 90) * np.clip(3 - 3 * distance, 0, 1)
            mask[box] |= distance < 1
        return np.clip(np.round(image), 0, 255).astype(np.uint8), mask


class CellsData:
    """Synthetic images of cells with masks: `samples` for training, a tenth as many for validation."""

    def __init__(self, *, height: int = 64, width: int = 64, samples: int = 4096, seed: int = 0) -> None:
        self.sample_shape = (1, height, width)
        self.train = Cells(seed, 0, samples, height, width)
        self.validation = Cells(seed, samples, max(1, samples // 10), height, width)
        first_images = (
            part.tobytes() for population in (self.train, self.validation) for part in population.draw(0)
        )
        self.digest = hashlib.sha256(b"".join(first_images)).hexdigest()  # numpy may change its generators
