"""The first law where processes are no devices: one that drives several, and one that serves the others."""

from __future__ import annotations

import pytest

from tests.marks import in_full
from tests.parity import LONG, follow_one_device
from tests.workers import Train

SHALLOW = ("model.layers=2",)
SERVER = ("strategy=parameter_server", *SHALLOW)
NO_SERVER = (*SERVER, "strategy.dedicated_server=false")
# name: (layout, processes)
LAYOUTS = {
    "dataparallel over 2": (("strategy=dataparallel", "gpus_per_node=2", *SHALLOW), 1),
    "dataparallel over 4, accumulating 4": (
        ("strategy=dataparallel", "gpus_per_node=4", "training.microbatch_size=1", *SHALLOW), 1,
    ),
    "server with 1 worker": ((*SERVER, "nodes=2"), 2),
    "server with 2 workers, small buckets": ((*SERVER, "nodes=3", "strategy.bucket_mb=0.05"), 3),
    "server with 4 workers, accumulating 4": ((*SERVER, "nodes=5", "training.microbatch_size=1"), 5),
    "server that works, over 2": ((*NO_SERVER, "nodes=2"), 2),
    "server that works, over 4, accumulating 4": (
        (*NO_SERVER, "nodes=2", "gpus_per_node=2", "training.microbatch_size=1"), 4,
    ),
}  # fmt: skip


SLOW = [
    "dataparallel over 4, accumulating 4", "server with 1 worker", "server with 4 workers, accumulating 4",
    "server that works, over 4, accumulating 4",
]  # fmt: skip
IN_FLOAT32 = ["dataparallel over 2", "server with 2 workers, small buckets", "server that works, over 2"]


@pytest.mark.parametrize(
    ("layout", "exactness"),
    [
        *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
        *in_full((layout, "float64") for layout in SLOW),
        *in_full((layout, exactness) for layout in IN_FLOAT32 for exactness in ("float32", LONG)),
    ],
)
def test_execution_follows_one_device(trained: Train, layout: str, exactness: str) -> None:
    options, processes = LAYOUTS[layout]
    found = follow_one_device(trained, options, exactness=exactness)
    assert found.summary["world_size"] == processes
