"""The layouts of all techniques in float64, each trained once in a test run, for the tests that ask about it.

The files of the techniques prove that each follows one device; who imports this asks about the same runs.
"""

from __future__ import annotations

from tests.distributed import (
    test_context,
    test_expert,
    test_image_parity,
    test_parity,
    test_schedules,
)
from tests.marks import in_full
from tests.parity import COMMON, TIED

_TEXTS = {
    "one device": ("strategy=single",),
    **test_parity.LAYOUTS,
    **{name: words for name, words in test_context.LAYOUTS.items() if name not in test_context.ENCODERS},
    **test_schedules.LAYOUTS,
    **{name: (*test_expert.MODEL, *words) for name, words in test_expert.LAYOUTS.items()},
}
TEXTS = {name: (*COMMON, *TIED, *words) for name, words in _TEXTS.items()}
IMAGES = {
    f"{net}, {layout}": (
        *test_image_parity.COMMON, *test_image_parity.NETS[net], f"training.precision={precision}",
        *test_image_parity.LAYOUTS[layout][0],
    )
    for net, layout, precision in test_image_parity.FLOAT64
}  # fmt: skip
_SLOW = {
    *(name for file in (test_parity, test_context, test_schedules, test_expert)
      for name in file.SLOW),
    *(f"{net}, {layout}" for net, layout, _ in filter(test_image_parity.is_slow, test_image_parity.FLOAT64)),
}  # fmt: skip


def cases(names: dict[str, tuple[str, ...]]) -> list[object]:
    """For a parametrised test: what a file leaves to `make test-full` is not trained for others either."""
    return [
        *(name for name in names if name not in _SLOW),
        *in_full((name,) for name in names if name in _SLOW),
    ]
