"""What the server of the pool of ranks imports before it forks any: see `Workers`."""

from __future__ import annotations

import gc

import hpc_parallel.worker.train  # noqa: F401
import tests.workers  # noqa: F401

gc.freeze()  # as worker/main.py does: a rank does not search all of torch for garbage
