"""What failures cost a training (`planning/failures.py`), against a simulation, and in `plan`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.planning.failures import Failures, failures_of
from tests.unit.test_plan_storage import A100, LINE, WEIGHTS_1B, WORDS, times

MTBF_S, SAVE_S, RESTART_S = 7.9 * 3600, 20.0, 300.0  # published: a failure each 7.9 h with 1,024 GPUs


def simulated_share(work_s: float, *, segments: int) -> float:
    """Segments of work and a save, each repeated until no failure meets it; a restart can fail too."""
    draw, clock = random.Random(17), 0.0
    for _ in range(segments):
        needed = work_s + SAVE_S
        while (fails := draw.expovariate(1 / MTBF_S)) < needed:
            clock += fails
            needed = RESTART_S + work_s + SAVE_S
        clock += needed
    return segments * work_s / clock


@pytest.mark.parametrize("work_s", [200.0, 1000.0, 8000.0])
def test_the_useful_share_is_that_of_simulated_failures(work_s: float) -> None:
    failures = Failures(MTBF_S, SAVE_S, RESTART_S, step_s=2.0, least_steps=1)
    simulated = simulated_share(work_s, segments=100_000)
    assert failures.useful_share(round(work_s / 2)) == pytest.approx(simulated, rel=0.003)


@pytest.mark.parametrize("save_s", [1.0, 20.0, 600.0])
def test_the_best_interval_is_where_the_useful_share_is_largest(save_s: float) -> None:
    failures = Failures(MTBF_S, save_s, RESTART_S, step_s=2.0, least_steps=1)
    best = max(failures.useful_share(every) for every in range(1, 20_000))
    assert failures.useful_share(failures.best_every) == pytest.approx(best, rel=1e-5)
    assert Failures(MTBF_S, save_s, RESTART_S, 2.0, least_steps=9999).best_every == 9999


def test_a_save_beside_the_steps_delays_them_by_its_copy() -> None:
    own = 12 * WEIGHTS_1B / 8
    failures = failures_of(times("cluster.node_mtbf_hours=1000", step_s=1.0))
    assert failures is not None
    assert failures.save_s == pytest.approx(own / 20e9, rel=1e-6)
    assert (failures.mtbf_s, failures.least_steps) == (3_600_000, 2)
    assert failures_of(times(step_s=1.0)) is None


def test_a_plan_names_the_best_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(f"extends: {A100}\n{LINE}")
    words = [
        "plan",
        *WORDS,
        "nodes=4",
        "--config-dir",
        str(tmp_path),
        "cluster.node_mtbf_hours=1000",
        "hardware=mine",
    ]
    assert command([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert command([*words]) == 0
    shown = capsys.readouterr().out
    assert f"{found['useful_share']:.1%} with a failure each 10 d 10 h" in shown
    assert f"training.checkpoint_every={found['best_checkpoint_every']}: " in shown
    assert command([*words[:-1], f"hardware={A100}"]) == 0
    assert "useful time              not known: no storage.write_bytes_per_s" in capsys.readouterr().out
