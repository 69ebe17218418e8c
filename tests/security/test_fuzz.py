"""Damaged folders through the commands that look: no traceback, no hang, no harm (`fuzz.py`).

100 cases in the suite; `make fuzz` tries 20,000 others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.security import fuzz

CASES = int(os.environ.get("FUZZ_CASES", "100"))
SEED = int(os.environ.get("FUZZ_SEED", "0" if CASES == 100 else str(random.SystemRandom().getrandbits(32))))

mutations = st.tuples(
    st.sampled_from(fuzz.FILES), st.sampled_from(fuzz.KINDS), st.integers(0, 999), st.integers(0, 999)
)
WATCH = fuzz.Watch()


@pytest.fixture(scope="module")
def field() -> Iterator[fuzz.Field]:
    with fuzz.prepared() as made:
        fuzz.attempt(
            made, [], WATCH, limit_s=120
        )  # imports take their time once, and a sound folder has no problem
        yield made


@pytest.mark.timeout(0)  # 20,000 take over an hour; fuzz.STUCK_S ends a case that hangs
def test_damaged_folders(field: fuzz.Field) -> None:
    @seed(SEED)
    @settings(
        max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )  # fmt: skip
    @given(st.lists(mutations, min_size=1, max_size=3))
    def one(case: list[fuzz.Mutation]) -> None:
        nonlocal tried
        fuzz.attempt(field, case, WATCH)
        tried += 1
        if tried % 1000 == 0:
            print(f"{tried:,} damaged folders", flush=True)

    tried = 0
    print(f"seed {SEED}: FUZZ_CASES={CASES} FUZZ_SEED={SEED}")
    one()


@pytest.mark.parametrize("file", fuzz.FILES)
def test_special_files(file: str, field: fuzz.Field) -> None:
    """Two kinds in the place of each file; chance has the others."""
    at = fuzz.FILES.index(file)
    for how in ("pipe", fuzz.SPECIAL[1 + at % (len(fuzz.SPECIAL) - 1)]):
        fuzz.attempt(field, [(file, how, 0, 0)], WATCH)


def test_no_canary(field: fuzz.Field) -> None:
    """The last test of this file: nothing was unpickled in the others."""
    assert not field.canary.exists()
    assert Path(field.case / fuzz.RUN).parent.is_dir()
