"""Early ends in a sweep (`sweep.prune=median`): a training that is behind the other runs saves and ends.

Each run compares itself with what the others have logged in their folders. So nobody has to follow the sweep,
and job arrays, packed jobs, scripts and runs on one machine do the same.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.tasks import LEAST_OTHERS, first_compared
from hpc_parallel.problems import print_warning
from hpc_parallel.record.metrics_file import MetricsReader, figure
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.sweep_folder import sweep_of
from hpc_parallel.record.trust import UntrustedError, owner_name, require_private
from hpc_parallel.record.values import number
from hpc_parallel.strategies import exchange

_Values = dict[tuple[Any, Any], float]  # (step, samples) -> loss


class Pruning:
    """What this run and the other runs of its sweep have reached. Only rank 0 reads it."""

    def __init__(self, config: RunConfig, *, folder: RunFolder, lines: Sequence[Mapping[str, Any]]) -> None:
        """`lines`: the metrics of the run's earlier starts."""
        assert config.sweep.folder is not None
        validates = config.training.validate_every is not None
        self._key = "validation_loss" if validates else "loss"
        self._first_step = first_compared(config)
        self._run, self._sweep = os.path.realpath(folder.path), Path(config.sweep.folder)
        self._others: dict[Path, tuple[MetricsReader, _Values]] = {}
        self._best = min(_values(lines, key=self._key).values(), default=math.inf)
        self._trusted = dist.get_rank() == 0 and _trusts(self._sweep, shared=config.launcher.shared_folder)

    def why(self, line: Mapping[str, Any]) -> str | None:
        """Returns on all ranks why the training must end after this line, or None. Collective."""
        if self._key not in line:
            return None
        self._best = min(self._best, *_values([line], key=self._key).values())
        if line["step"] < self._first_step:
            return None
        reason: str | None = exchange.broadcast(self._reason(line) if self._trusted else None)
        return reason

    def _reason(self, line: Mapping[str, Any]) -> str | None:
        place = (line["step"], line["samples"])
        others = [values[place] for values in self._read(place) if place in values]
        if (middle := behind(self._best, others)) is None:
            return None
        best = f"its best is {figure(self._best)}" if math.isfinite(self._best) else "it is never finite"
        return (
            f"pruned at step {line['step']}: {self._key}: {best}, "
            f"and the median of {len(others)} other runs is {figure(middle)}"
        )

    def _read(self, place: tuple[Any, Any]) -> list[_Values]:
        """The losses of the other runs, with the new ones of those that have not been seen at this place."""
        sweep = None
        with suppress(OSError):  # of NFS: the sweep may replace the list at any time
            sweep = sweep_of(self._sweep)
        for run in () if sweep is None else sweep.runs:
            if os.path.realpath(run.run_dir) == self._run or owner_name(run.run_dir) is not None:
                continue
            unread: tuple[MetricsReader, _Values] = MetricsReader(RunFolder(run.run_dir).metrics), {}
            reader, values = self._others.setdefault(run.run_dir, unread)
            if place in values:
                continue
            try:
                values.update(_values(reader.read(), key=self._key))
            except (OSError, DamagedError) as error:  # this run must not end because of another one
                print_warning(f"sweep.prune can't read {run.run_dir}: {error}")
        return [values for _, values in self._others.values()]


def behind(best: float, others: Sequence[float]) -> float | None:
    """Returns the median of the others' losses if a run with this best loss is behind; otherwise None.

    This is the rule of Optuna's MedianPruner, but other runs count from the step on that they have reached.
    """
    if len(others) < LEAST_OTHERS:
        return None
    middle = median(others)
    return middle if best > middle else None


def _values(lines: Sequence[Mapping[str, Any]], *, key: str) -> _Values:
    """The losses of these lines; infinite if they are not finite."""
    losses = {(line["step"], line.get("samples")): number(line[key]) for line in lines if key in line}
    return {place: math.inf if value is None else value for place, value in losses.items()}


def _trusts(sweep: Path, *, shared: bool) -> bool:
    """Whether only this user can have written the list of runs, or the user trusts the others."""
    try:
        if not shared:
            require_private(sweep)
        if (owner := owner_name(sweep)) is not None:
            raise UntrustedError(f"{sweep} belongs to {owner}.")
    except (OSError, UntrustedError) as error:
        print_warning(f"sweep.prune compares nothing: {error}")
        return False
    return True
