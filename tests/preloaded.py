"""What the server of the pool of ranks imports before it forks any: see `Workers`."""

from __future__ import annotations

import gc
import os

import hpc_parallel.worker.train  # noqa: F401
import tests.workers  # noqa: F401

os.fsync = lambda file: None  # no test takes the power away, and a disk that is shared is slow
gc.freeze()  # as worker/main.py does: a rank does not search all of torch for garbage
