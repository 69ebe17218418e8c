"""Measure what ranks of a run would hold and send, on a machine without the run's devices and memory.

    python -m hpc_parallel.worker.exact_plan CONFIG.YAML RANK...

A rank's part of the model is assembled as for the run, in a world whose other ranks don't exist. Its tensors
have shapes but no numbers. The rank takes a step of up to three microbatches. `plan --exact` and the tests
run this module and compare the formulas of `planning/` with its figures.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

from hpc_parallel import torch_internals
from hpc_parallel.config.layout import DATAPARALLEL
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.typed_config import typed
from hpc_parallel.exit_codes import DONE
from hpc_parallel.models.experts import Experts
from hpc_parallel.record.safe_read import read_yaml
from hpc_parallel.shell import run_command
from hpc_parallel.strategies.whole_model import build_model
from hpc_parallel.worker.traced_rank import HeldAndSent, TracedRank


def measure(config: RunConfig, ranks: Sequence[int], *, microbatches: int | None = None) -> list[HeldAndSent]:
    """What each of `ranks` of the run's world would hold. Each is measured in a process of its own.

    microbatches: the number in the traced step; None: as many as the run has.

    torch keeps names of process groups in caches, so a process can't have one world after another. Raises
    ConfigError as `assemble` does, and also for tiles in a pipeline and for data whose shape must be read.
    """
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return [pool.apply(measure_here, (config, rank, microbatches)) for rank in ranks]


def measure_here(config: RunConfig, rank: int, microbatches: int | None = None) -> HeldAndSent:
    """Measure one rank in this process, which must not have or have had a default process group."""
    model = build_model(config)
    size = config.nodes if config.strategy.execution == DATAPARALLEL else config.devices
    # How many rows an expert gets depends on the numbers.
    needs_numbers = any(isinstance(module, Experts) for module in model.modules())
    needs_numbers |= config.optimizer._target_ == "torch.optim.Adafactor"  # its steps depend on them too
    fakes = nullcontext() if needs_numbers else torch_internals.fake_tensors()
    with torch_internals.fake_world(rank, size=size):
        return TracedRank(model, config, fakes=fakes).measure(microbatches=microbatches)


def main(path: str, *ranks: str) -> int:
    """Print what the ranks hold as JSON, by rank. Returns the exit code."""
    config = typed(read_yaml(Path(path)))
    numbers = [int(rank) for rank in ranks]
    measured = measure(config, numbers)
    print(json.dumps({rank: asdict(held) for rank, held in zip(numbers, measured, strict=True)}))
    return DONE


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(*sys.argv[1:])))
