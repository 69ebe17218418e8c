"""Async saves while training: how long steps stall, what is reported, what torch uses to copy."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "async saves while training", 35.0
STEPS, EVERY = 70, 30  # a save is written before the next one begins


def run(findings: Findings) -> None:
    setting.join()
    marks, calls = setting.Marks(), Counter[str]()
    sequence = setting.sized(1024, 16)
    words = (
        *setting.model_words(), "strategy=single", f"training.steps={STEPS}",
        f"training.checkpoint_every={EVERY}",
        "training.global_batch_size=4", f"data.sequence_length={sequence}", "training.validate_every=null",
        "training.measure_steps=0", "data.max_bytes=4000000",
    )  # fmt: skip
    with counted(calls), tempfile.TemporaryFile("w+") as errors, redirected(errors):
        folder = setting.trained(*words, marks=marks)
        errors.seek(0)
        reported = [line for line in errors.read().splitlines() if line.strip()]
    usual_s = median(marks.steps_s[2:])
    # A save follows its step, before the next fetch of a batch.
    with_save_s = [marks.steps_s[step - 1] for step in range(EVERY, STEPS, EVERY)]
    findings.add(
        step_s=usual_s,
        step_with_save_s=with_save_s,
        stall_s=median(with_save_s) - usual_s,
        checkpoints=sorted(path.name for path in folder.checkpoints.glob("step-*")),
        calls=dict(calls),
        reported=reported[:20],
    )


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """Counts torch's loaders and each wait for a stream."""
    places: list[tuple[Any, str]] = [
        (getattr(filesystem, name), "__init__")
        for name in ("_OverlappingCpuLoader", "_SerialCpuLoader")
        if hasattr(filesystem, name)
    ]
    places += [
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
        (torch.cuda, "synchronize"),
    ]
    before = [(place, name, getattr(place, name)) for place, name in places]
    for place, name, original in before:
        setattr(place, name, counting(original, calls, f"{place.__name__}.{name}"))
    try:
        yield
    finally:
        for place, name, original in before:
            setattr(place, name, original)


def counting(original: Callable[..., Any], calls: Counter[str], name: str) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls[name] += 1
        return original(*arguments, **options)

    return call


@contextmanager
def redirected(stream: Any) -> Iterator[None]:
    """Python's errors into `stream`."""
    before, sys.stderr = sys.stderr, stream
    try:
        yield
    finally:
        sys.stderr = before
