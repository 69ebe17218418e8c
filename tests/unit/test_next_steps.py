"""The last line of a sweep is a command that a shell takes as it is, and that the guide shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hpc_parallel.sweep.sweep_table import after_submission, after_the_end

GUIDE = Path(__file__).parents[2] / "docs" / "sweep.md"
pytestmark = pytest.mark.usefixtures("here")


def test_the_guide_shows_the_end_of_a_sweep(here: Path) -> None:
    lines = after_the_end(here / "runs" / "sweeps" / "20261123-050259", completed=True)
    assert "\n".join(["6 completed", *lines, "```"]) in GUIDE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["runs/sweeps/1", "my (first) sweep", "a'b,c=d"])
def test_the_last_line_is_a_command(name: str, here: Path) -> None:
    report = shlex.split(after_the_end(here / name, completed=True)[-1])
    assert report == ["python", "-m", "hpc_parallel", "report", name]
    ended = after_the_end(here / name, completed=False)
    for lines in (ended, after_submission(here / name, submitted=True)):
        python, flag, module, sweeps, *words = shlex.split(lines[-1])
        assert (python, flag, module, sweeps) == ("python", "-m", "hpc_parallel.run", "-m")
        (override,) = OverridesParser.create().parse_overrides(words)
        assert (override.key_or_group, override.value()) == ("sweep.resume", name)


def test_jobs_that_wait_can_be_followed_and_ended(here: Path) -> None:
    folder = here / "runs" / "sweeps" / "1"
    lines = [line.strip() for line in after_submission(folder, submitted=True)]
    assert "python -m hpc_parallel status sweeps/1 --watch" in lines
    assert "python -m hpc_parallel cancel sweeps/1" in lines
    assert len(after_submission(folder, submitted=False)) == 3  # Slurm refused all
