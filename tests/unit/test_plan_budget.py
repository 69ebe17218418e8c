"""`plan --hours --devices`: what each model sees in the time, by the plan of its best layout."""

from __future__ import annotations

import pytest

from hpc_parallel.commands.plan import main
from hpc_parallel.commands.plan_best import best
from hpc_parallel.commands.plan_budget import Budget, nodes_of, verdict
from hpc_parallel.planning.hardware import named_hardware
from hpc_parallel.planning.ranking import tokens_per_s
from hpc_parallel.problems import ConfigError

HARDWARE = "a100_80gb_node8_800gbit"
ASKED = ("--hours", "10", "--devices", "8", "--tokens", "1e10", f"hardware={HARDWARE}")


def test_a_model_sees_its_rate_times_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=1b", "training.global_batch_size=256", "data.sequence_length=2048"]
    assert main([*ASKED, *words, "cluster.device_hour_price=2.5"]) == 0
    said = capsys.readouterr().out
    place = ["nodes=1", "gpus_per_node=8", f"hardware={HARDWARE}"]
    (candidate,) = best([*words, *place], user_folder=None, rows=1).candidates
    rate = tokens_per_s(candidate.work, candidate.step)
    assert f"{rate:,.0f}" in said
    assert f"{rate * 36000:.3g}" in said
    assert "not given" not in said
    spent = "Spent: 80 device-hours; cost 200.00 at 2.5 a device-hour; energy of the devices 32 kWh at 400 W"
    assert spent in said
    answer = "The largest of these that sees 1e+10 tokens in 10 h: 1b." in said
    assert answer == (rate * 36000 >= 1e10)


def test_a_model_that_does_not_fit_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "model=70b"]) == 0
    said = capsys.readouterr().out
    assert "   70b  no layout fits in memory" in said
    assert "None of these fits on 8 devices." in said
    assert "training.global_batch_size=1024" in said.splitlines()[0]  # what was not given


def test_the_verdict_names_the_largest_in_time_or_what_is_missing() -> None:
    budget = Budget(hours=24, devices=64, tokens=1e12)
    assert verdict(["124m", "1b"], (5e12, "124m"), budget).endswith("in 24 h: 1b.")
    assert "124m sees 4e+11. It needs about 3 times the time." in verdict([], (4e11, "124m"), budget)


def test_nodes_are_full() -> None:
    hardware = named_hardware(HARDWARE, user_folder=None)
    assert [nodes_of(devices, hardware) for devices in (4, 8, 24)] == [(1, 4), (1, 8), (3, 8)]
    with pytest.raises(ConfigError, match="Try --devices 8 or --devices 16"):
        nodes_of(12, hardware)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hours", "24"], ["Try it with --devices 256"]),
        (["--hours", "0", "--devices", "0"], ["--hours 0 is not", "--devices 0: there is at least one"]),
        (
            ["--hours", "1", "--devices", "8", "--tokens", "-1", "--best"],
            ["--tokens -1 is", "--best does not go"],
        ),
        (["--hours", "1", "--devices", "8", "nodes=2"], ["nodes: --devices and the search decide this"]),
    ],
)
def test_wrong_budgets_are_refused_with_all_problems(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"hardware={HARDWARE}"]) == 2
    errors = capsys.readouterr().err
    assert all(text in errors for text in said)
