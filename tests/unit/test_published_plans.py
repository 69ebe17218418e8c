"""Pages of figures: each row has a command that is accepted, and its figures."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from statistics import mean

import pytest

from hpc_parallel.__main__ import COMMANDS
from hpc_parallel.__main__ import main as command
from hpc_parallel.run import main

KEYS = {
    "strategy": "strategy", "data.sequence_length": "length", "training.global_batch_size": "batch",
    "training.microbatch_size": "microbatch",
}  # fmt: skip
ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/published-results.md"


def table(text: str, head: str) -> list[dict[str, str]]:
    """The rows of the table whose first cells are `head`."""
    lines = text[text.index(f"| {head} |") :].split("\n<!--")[0].splitlines()
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(names, row, strict=True)) for row in rows]


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix(" %"))


def test_each_figure_is_that_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    """What the command prints, its settings and the errors. If a plan changed: python docs/published.py."""
    text = PAGE.read_text()
    rows, commands = table(text, "row | source"), dict(re.findall(r"# row (\d+)\npython (.*)", text))
    assert len(rows) == len(commands) >= 12
    assert len({row["source"] for row in rows}) >= 3
    errors: dict[str, list[float]] = {"A100": [], "H100": []}
    for row in rows:
        words = shlex.split(commands[row["row"]])
        assert words[:3] == ["-m", "hpc_parallel", "plan"]
        assert command(words[2:]) == 0
        said = capsys.readouterr().out
        devices, kind = row["devices"].split(" x ")
        assert f"on {devices} x NVIDIA {kind.split()[0]} SXM" in said
        assert ("training.activation_checkpointing=full" in words) == (row["recompute"] == "full")
        assert all(f"{key}={row[column]}" in words for key, column in KEYS.items())
        rate = number(re.findall(r"tokens/s +([\d,]+)", said)[0]) / int(devices)
        assert number(row["planned"]) == pytest.approx(rate, abs=1)
        error = 100 * (rate / number(row["published"]) - 1)
        assert number(row["error"]) == pytest.approx(error, abs=0.06)
        assert f": {row['memory']}" in said
        errors[kind.split()[0]].append(error)
    for row in table(text, "devices | rows"):
        of_kind = errors[row["devices"]]
        assert int(row["rows"]) == len(of_kind)
        assert number(row["mean absolute error"]) == pytest.approx(mean(map(abs, of_kind)), abs=0.06)
        assert row["errors"] == f"{min(of_kind):+.1f} to {max(of_kind):+.1f} %"


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
    for approach, shown, measured in ROWS:
        assert approach
        assert re.search(r"`[^`]+`", shown) or shown in ALONE, approach
        assert measured
        assert not measured.startswith("not measured"), approach


@pytest.mark.parametrize("shown", COMMANDS_SHOWN)
def test_its_command_is_accepted(shown: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in shlex.split(shown.removeprefix("python -m hpc_parallel ")) if word != "-m"]
    if words[0].startswith("jobs="):  # tests/commands/test_studies.py plans each
        assert (ROOT / "jobs" / f"{words[0].removeprefix('jobs=')}.yaml").is_file()
    elif words[0] in COMMANDS:
        assert len(words) <= 2
    else:
        launcher = NEEDS_A_JOB.get(shown, ["launcher=local"])
        assert main([*words, *launcher, "dry_run=true"]) == 0, capsys.readouterr().err
