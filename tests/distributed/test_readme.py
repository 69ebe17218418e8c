"""What the README shows works as it stands there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
IMPORTS = """
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.layered import LayeredModel

"""


def test_a_model_of_the_users_own_trains_as_a_pipeline(tmp_path: Path) -> None:
    section = README.read_text().split("## Add a model")[1]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    (tmp_path / "mymodel.py").write_text(IMPORTS + code[1])
    (tmp_path / "site" / "model").mkdir(parents=True)
    (tmp_path / "site/model/mine.yaml").write_text("_target_: mymodel.MyModel\nwidth: 64\ndepth: 4\n")
    words = ("--config-dir", "site", "model=mine", "strategy=pipeline", "nodes=2", "launcher=local")
    small = ("training.steps=3", "training.log_every=1", "data.max_bytes=200000", "run_dir=run")
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel.run", *words, *small],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[2] < losses[0]
