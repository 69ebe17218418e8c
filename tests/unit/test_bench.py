"""The figures of `make bench`: ratios, their intervals, that another loss curve is seen; and its scripts."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from tests import ROOT
from tests.benchmarks.peers import world_size
from tests.benchmarks.peers.ratio import blocks_s, interval_places, ratio_of
from tests.benchmarks.peers.side_by_side import largest_difference


def test_a_peer_that_takes_twice_as_long_is_two_whatever_the_machine_does() -> None:
    moods = [1.0 + index % 7 for index in range(21)]  # both sides of a pair meet the same one
    ratio = ratio_of(moods, [2 * mood for mood in moods])
    assert (ratio.median, ratio.low, ratio.high, ratio.pairs) == (2.0, 2.0, 2.0, 21)


@pytest.mark.parametrize(("count", "places"), [(6, (0, 5)), (10, (1, 8)), (20, (5, 14)), (100, (39, 60))])
def test_the_interval_is_that_of_the_sign_test(count: int, places: tuple[int, int]) -> None:
    """Of the usual tables (Conover, Practical Nonparametric Statistics): 1-based 1, 2, 6, 40 of these."""
    assert interval_places(count) == places


def test_the_interval_has_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    inside = 0
    for _ in range(2000):
        values = sorted(draw.gauss(1.0, 0.2) for _ in range(15))
        low, high = interval_places(15)
        inside += values[low] <= 1.0 <= values[high]
    assert 0.95 <= inside / 2000 <= 0.98  # of 15 values the interval has 96.5 %


def test_blocks_are_complete() -> None:
    assert blocks_s([1.0, 2.0, 3.0, 4.0, 5.0], steps=2) == [3.0, 7.0]
    assert median(blocks_s([0.5] * 10, steps=10)) == 5.0


def test_curves_are_compared_where_both_have_a_loss() -> None:
    assert largest_difference({1: 2.0, 10: 1.0}, {1: 2.0, 2: 9.0, 10: 1.25}) == pytest.approx(0.2)


@pytest.mark.full
@pytest.mark.processes
def test_the_costs_of_a_world_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make bench` measures them; their seconds say nothing beside other tests."""
    monkeypatch.chdir(Path(__file__).parents[2])
    row = world_size.measure("nowhere", worlds=(8, 16))
    for ranks in (8, 16):
        assert set(world_size.PER_STEP) < row["seconds"][ranks].keys() == row["growth"].keys()
        assert all(seconds > 0 for seconds in row["seconds"][ranks].values())


IMPORT_ALL = """
import runpy, sys
from pathlib import Path

path = list(sys.path)
for script in sorted(Path(sys.argv[1]).glob("*.py")):
    sys.path[:] = [sys.argv[1], *path]  # as `python FILE` begins
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "cluster")]:
        del sys.modules[name]
    try:
        runpy.run_path(str(script), run_name="imported")
    except ImportError as error:
        print(f"{script.name}: {error}")
"""


@pytest.mark.processes
def test_each_script_finds_its_imports_from_any_folder(tmp_path: Path) -> None:
    """As `python tests/benchmarks/NAME.py` begins, which does not have this tree on its path."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT_ALL, str(ROOT / "tests/benchmarks")],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == ""
