"""docs/seeds.md: each row has an approach, a command that is accepted, and what was measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hpc_parallel.__main__ import COMMANDS
from hpc_parallel.run import main

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs/seeds.md").read_text().splitlines()
    if line.startswith("| ") and "| command |" not in line
]
COMMANDS_SHOWN = dict.fromkeys(code for row in ROWS for code in re.findall(r"`([^`]+)`", row[1]))
ALONE = {"any training", "every run folder"}  # rows whose command is not one
NEEDS_A_JOB = {"profile=nsys": ["launcher=script", "launcher.modules=[nsight-systems]"]}


def test_every_row_is_complete() -> None:
    assert len(ROWS) >= 25
    for approach, command, measured in ROWS:
        assert approach
        assert re.search(r"`[^`]+`", command) or command in ALONE, approach
        assert measured
        assert not measured.startswith("not measured"), approach


@pytest.mark.parametrize("shown", COMMANDS_SHOWN)
def test_its_command_is_accepted(
    shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(shown.removeprefix("python -m hpc_parallel ")) if word != "-m"]
    if words[0].startswith("jobs="):  # tests/commands/test_studies.py plans each
        assert (ROOT / "jobs" / f"{words[0].removeprefix('jobs=')}.yaml").is_file()
    elif words[0] in COMMANDS:
        assert len(words) <= 2
    else:
        launcher = NEEDS_A_JOB.get(shown, ["launcher=local"])
        assert main([*words, *launcher, "dry_run=true"]) == 0, capsys.readouterr().err
