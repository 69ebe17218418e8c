"""The commands and the notebook of examples/ work in a copy of that folder, as they stand there."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests import printed

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(EXAMPLES, tmp_path / "mine", ignore=shutil.ignore_patterns("runs", "last.pt"))


def typed(folder: Path, word: str, *more: str, nodes: int = 2) -> str:
    """Run the line of README.md that has the word; returns what it prints."""
    (block,) = BLOCK.findall((folder / "README.md").read_text())
    (line,) = (line for line in block.splitlines() if word in line)
    python, *words = shlex.split(line.replace("nodes=2", f"nodes={nodes}"))
    assert python == "python"
    at = words.index("--") if "--" in words else len(words)
    return printed(*words[:at], *more, *words[at:], cwd=folder)


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_a_model_data_and_a_callback(folder: Path) -> None:
    typed(folder, "springs.Best", "launcher=local", "run_dir=run")
    curve, best = losses(folder / "run"), json.loads((folder / "run/best_step.json").read_text())
    assert best == {"loss": min(curve.values()), "step": min(curve, key=lambda step: curve[step])}
    assert best["loss"] < 0.1
    assert "below 0.1" in json.loads((folder / "run/summary.json").read_text())["ended_early"]


def test_a_script(folder: Path) -> None:
    """Its losses on two ranks are those of one."""
    curves = []
    for nodes in (1, 2):
        typed(folder, "train.py", "launcher=local", f"run_dir=run_{nodes}", nodes=nodes)
        curves.append(losses(folder / f"run_{nodes}"))
    assert list(curves[1]) == list(range(1, 21))
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert (folder / "run_2/checkpoints/last.pt").exists()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_model_equals_one_device(folder: Path) -> None:
    assert re.search(r"^(\d+) rows in float64: \1 equal\.", typed(folder, "parity"), re.MULTILINE)


@pytest.mark.full
def test_the_notebook(folder: Path) -> None:
    """Its cells in order, in one process; two replicas follow one device."""
    cells = json.loads((folder / "notebook.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shown = printed("-c", code, cwd=folder)
    rows = re.findall(r"^step +\d+  (\S+)  (\S+)$", shown, re.MULTILINE)
    assert len(rows) == 5
    assert all(math.isclose(float(alone), float(split), rel_tol=1e-4) for alone, split in rows)
    assert "strategy = ddp" in shown
    assert "nodes = two" in shown
