"""Callbacks: the user's objects that are called during a training and may end it (`training.callbacks`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_parallel.config.build import build
from hpc_parallel.record.checkpoint_index import complete, keep_best
from hpc_parallel.record.values import number
from hpc_parallel.strategies import exchange
from hpc_parallel.user_code import UserCodeError, described

VALIDATION = "validation_loss"


class Callback:
    """The base of callbacks. They exist on rank 0 only, so no method may call a collective.

    The values are numbers on the host. Slow methods delay the training.
    """

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        """The training begins. `folder`: the run folder. `lines`: the metrics of the run's earlier starts."""

    def on_step(self, step: int) -> None:
        """The 1-based `step` was started on the device; its loss is not known yet."""

    def on_line(self, line: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl` was written. A step that ends a training early may have two."""

    def on_validation(self, step: int, loss: float | None) -> None:
        """The model was validated after `step`. `loss` is None if it is not finite."""

    def on_checkpoint(self, step: int) -> None:
        """The checkpoint of `step` is complete. Training may be some steps further."""

    def on_end(self, step: int) -> None:
        """The training ended after `step`: all steps are done, a signal ended it, or it ended early."""

    def stop_reason(self) -> str | None:
        """Returns why the training must end now; None if it continues. Called after each line."""
        return None


class EarlyStopping(Callback):
    """Ends a training if `key` of its lines does not improve any more."""

    def __init__(
        self, *, patience: int, key: str = VALIDATION, least_change: float = 0.0, largest: bool = False
    ) -> None:
        """`patience`: the number of lines with `key`, without an improvement, after which the training ends.

        An improvement is a change of more than `least_change`. `largest`: whether the largest value is the
        best, as for an accuracy; else the smallest.

        Raises ValueError for a patience below 1.
        """
        if patience < 1:
            raise ValueError(f"patience = {patience} must be at least 1")
        self.patience, self.key, self.least_change = patience, key, least_change
        self._sign = -1 if largest else 1
        self._best: float | None = None
        self._last_step = self._best_step = self._without = 0

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        for line in lines:
            self.on_line(line)

    def on_line(self, line: Mapping[str, Any]) -> None:
        if self.key not in line:
            self._require_key(line)
            return
        if line["step"] == self._last_step:  # again, with the validation of an early end
            return
        self._last_step = line["step"]
        value, sign = number(line[self.key]), self._sign
        if value is not None and (self._best is None or sign * value < sign * self._best - self.least_change):
            self._best, self._best_step, self._without = value, line["step"], 0
        else:
            self._without += 1

    def _require_key(self, line: Mapping[str, Any]) -> None:
        """Only some lines have a validation; any other key is in all lines or in none."""
        if not self.key.startswith("validation_") or VALIDATION in line:
            raise ValueError(f"a line of metrics.jsonl has no {self.key}; it has {', '.join(line)}")

    def stop_reason(self) -> str | None:
        if self._without < self.patience:
            return None
        best = "no finite value" if self._best is None else f"{self._best:.6g} at step {self._best_step}"
        return f"{self.key} did not improve in {self._without} lines; best: {best}"


class KeepBest(Callback):
    """Keeps the checkpoint with the smallest validation loss, whatever `training.keep_last` is.

    Only steps with a validation and a checkpoint count.
    """

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._best: float | None = None
        self._checkpoints = Path()

    def on_start(self, folder: Path, lines: Sequence[Mapping[str, Any]]) -> None:
        self._checkpoints = folder / "checkpoints"
        for line in lines:
            self.on_validation(line["step"], number(line.get("validation_loss")))
        for checkpoint in reversed(complete(self._checkpoints)):  # the oldest first
            self.on_checkpoint(checkpoint.step)

    def on_validation(self, step: int, loss: float | None) -> None:
        if loss is not None:
            self._losses[step] = loss

    def on_checkpoint(self, step: int) -> None:
        loss = self._losses.get(step)
        if loss is not None and (self._best is None or loss < self._best):
            self._best = loss
            keep_best(self._checkpoints, step=step, loss=loss)


class Callbacks:
    """The callbacks of a run. Only rank 0 has them; the other ranks only learn when the training ends."""

    def __init__(
        self,
        tables: Sequence[Mapping[str, Any]],
        *,
        folder: Path,
        lines: Sequence[Mapping[str, Any]],
    ) -> None:
        """`tables`: `training.callbacks`. `lines`: the metrics of earlier starts.

        Raises UserCodeError.
        """
        self._used = bool(tables)
        self._objects: list[Callback] = []
        if dist.get_rank() == 0:
            keys = [f"training.callbacks[{index}]" for index in range(len(tables))]
            self._objects = [build(table, key=key) for table, key in zip(tables, keys, strict=True)]
        self._call("on_start", folder, lines)

    def step(self, step: int) -> None:
        self._call("on_step", step)

    def line(self, line: Mapping[str, Any]) -> str | None:
        """Pass on a line; returns on all ranks why the training must end, or None. Collective."""
        self._call("on_line", line)
        if "validation_loss" in line:
            self._call("on_validation", line["step"], line["validation_loss"])
        return self.reason()

    def reason(self) -> str | None:
        """Returns on all ranks why the training must end, or None. Collective."""
        if not self._used:
            return None
        reason = next(filter(None, self._call("stop_reason")), None)
        if not isinstance(reason, str | None):
            raise UserCodeError([f"stop_reason of a callback returned {reason!r}: return a text, or None."])
        stops_with: str | None = exchange.broadcast(reason)
        return stops_with

    def checkpoint(self, step: int) -> None:
        self._call("on_checkpoint", step)

    def end(self, step: int) -> None:
        self._call("on_end", step)

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        answers = []
        for callback in self._objects:
            try:
                answers.append(getattr(callback, method)(*arguments))
            except Exception as error:
                place = f"{type(callback).__name__}.{method}"
                raise UserCodeError([f"{described(error)}, raised by the callback {place}"]) from error
        return answers
