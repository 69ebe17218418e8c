"""`plan nodes=1,2,4`: each row is the plan of its size, and more nodes pay as long as they bring enough."""

from __future__ import annotations

import re

import pytest

from hpc_parallel.commands.plan import main
from hpc_parallel.commands.plan_run import planned_run
from hpc_parallel.commands.plan_scaling import verdict
from hpc_parallel.layout.layout import Layout
from hpc_parallel.planning.hardware import named_hardware
from hpc_parallel.planning.ranking import Size

HARDWARE = "h100_sxm_node8_3200gbit"
RUN = (
    "strategy=fsdp",
    "model=1b",
    "gpus_per_node=8",
    f"hardware={HARDWARE}",
    "training.global_batch_size=64",
)


def test_each_row_is_the_plan_of_its_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "nodes=1,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if re.match(r" +\d+  ", line)]
    assert len(rows) == 2
    rates = {}
    for nodes, line in zip((1, 4), rows, strict=True):
        words = [*RUN, f"nodes={nodes}"]
        plan = planned_run(words, hardware=named_hardware(HARDWARE, user_folder=None), user_folder=None)
        work, step = plan.work, plan.step
        rates[nodes] = work.samples * work.decoder.sequence / step.total_s
        cells = re.split(r" {2,}", line.strip())
        assert cells[:2] == [str(nodes), f"shard {8 * nodes}"]
        assert cells[2] == f"{step.total_s:.4g}s"
        assert cells[3] == f"{rates[nodes]:,.0f}"
    percent = f"{100 * rates[4] / rates[1] / 4:.0f}%"
    assert percent in rows[1]


def test_all_sizes_train_the_same_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """The defaults of 8 and 24 devices are 16 and 24 samples."""
    outputs = []
    for batch in ((), ("training.global_batch_size=48",)):
        assert main([*RUN[:-1], *batch, "nodes=1,3"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert ", 48 samples a step\n" in outputs[0]


def size(nodes: int, tokens_per_s: float) -> Size:
    return Size(nodes, nodes * 4, Layout(), 64, 1.0, tokens_per_s, 0.4, None)


def test_more_nodes_pay_until_an_added_device_brings_less_than_half() -> None:
    sizes = [size(1, 100.0), size(2, 180.0), size(4, 270.0), size(8, 300.0)]
    assert [each.efficiency(sizes[0]) for each in sizes] == [1.0, 0.9, 0.675, 0.375]
    share = "% of a device's tokens/s on 1 node:"
    assert verdict(sizes[:2]) == f"Each added device brings at least 50 {share} all sizes pay."
    until_2 = f"From 2 to 4 nodes each added device brings 45 {share} more than 2 nodes do not pay"
    assert verdict(sizes).startswith(until_2)
    assert ": more than 1 node does not pay for one" in verdict([size(1, 100.0), size(2, 120.0)])


def test_the_problems_of_all_sizes_come_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "nodes=two,3,4"]) == 2
    said = capsys.readouterr().err
    assert "nodes=two: nodes" in said
    assert "nodes=3: " in said  # 64 samples over 24 devices
    assert "nodes=4: " not in said


@pytest.mark.parametrize("option", ["--explain", "--tokens=1e9", "--best"])
def test_options_of_one_size_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN[1:], "nodes=1,2", option]) == 2
    assert "Try " in capsys.readouterr().err
