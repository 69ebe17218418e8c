"""What the server of the pool of ranks imports before it forks any: see `Workers`."""

from __future__ import annotations

import gc
import os
from pkgutil import resolve_name

import hpc_parallel.data.images
import hpc_parallel.data.windows
import hpc_parallel.models.moe  # noqa: F401
import tests.workers  # noqa: F401
from hpc_parallel.worker.main import OF_TRAINING

for name in OF_TRAINING:  # as the local agent does
    resolve_name(name)

os.fsync = lambda file: None  # no test takes the power away, and a disk that is shared is slow
gc.freeze()  # as worker/main.py does: a rank does not search all of torch for garbage
