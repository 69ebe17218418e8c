"""Cost and energy of a planned training, and its figures as JSON."""

from __future__ import annotations

import json
import re

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.commands.plan_run import energy

RUN = (
    "plan",
    "strategy=fsdp",
    "model=1b",
    "gpus_per_node=8",
    "training.global_batch_size=64",
    "--tokens=1e10",
)
A100, PRICE = "hardware=a100_80gb_node8_800gbit", "cluster.device_hour_price=2.5"


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, float]:
    assert command([*RUN, *words, "--json"]) == 0
    found: dict[str, float] = json.loads(capsys.readouterr().out)
    return found


def test_cost_and_energy_are_products_of_the_device_hours(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, A100, PRICE)
    hours = 1e10 / found["tokens_per_s"] / 3600 * 8
    assert found["device_hours"] == pytest.approx(hours)
    assert found["cost"] == pytest.approx(2.5 * hours)
    assert found["energy_kwh"] == pytest.approx(0.4 * hours)  # 400 W in the data sheet
    assert command([*RUN, A100, PRICE, "--explain"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        rf"  cost +{2.5 * hours:,.2f} at 2.5 a device-hour = {hours:,.0f} device-hours x 2.5\n", said
    )
    assert f"{0.4 * hours:.3g} kWh at 400 W a device = {hours:,.0f} device-hours x 400 W\n" in said
    assert "Energy: all devices at their board power all the time." in said


def test_what_is_not_known_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    """No price by default, and no board power of a CPU core."""
    assert {"cost", "energy_kwh"}.isdisjoint(figures(capsys, "hardware=cpu", "training.microbatch_size=1"))
    assert command([*RUN, "hardware=cpu"]) == 0
    assert "energy" not in capsys.readouterr().out.lower()


@pytest.mark.parametrize(
    ("energy_wh", "text"), [(500, "0.5 kWh"), (5.12e5, "512 kWh"), (2.89e7, "28.9 MWh"), (4e9, "4 GWh")]
)
def test_energies_have_a_unit_of_their_size(energy_wh: float, text: str) -> None:
    assert energy(energy_wh) == text


def test_a_wrong_price_and_options_for_something_else_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*RUN, A100, "cluster.device_hour_price=-1"]) == 2
    assert "Try cluster.device_hour_price=2.5" in capsys.readouterr().err
    assert command(["plan", A100, "--best", "--json", "model=1b"]) == 2
    assert "--json does not go with --best" in capsys.readouterr().err
    assert command(["plan", A100, "model=1b", "nodes=1,2", "--json"]) == 2
    assert "--json: only for one number of nodes. Try nodes=1." in capsys.readouterr().err
