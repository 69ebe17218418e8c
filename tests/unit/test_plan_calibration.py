"""Fits of hardware files: synthetic measurements give back the coefficients that made them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from unittest import mock

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.planning import device_fit
from hpc_parallel.planning.calibration import TOLERANCES, MeasuredRun, calibrate, planned_s, read_runs
from hpc_parallel.planning.collective_times import with_measured_links
from hpc_parallel.planning.device_fit import DeviceRow, Machine, device_hardware
from hpc_parallel.planning.exchange_times import left_after
from hpc_parallel.planning.hardware import (
    Hardware,
    coefficient,
    hardware_names,
    hardware_text,
    read_hardware,
    with_coefficients,
)
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, Pipeline, simulate
from hpc_parallel.planning.step_time import step_time
from hpc_parallel.planning.work import Work, work_of_run
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from tests.benchmarks.calibrate_plan import FOLDERS, HOPPER, hopper_runs
from tests.composed import composed
from tests.recorded_runs import finished

CPU = read_hardware("cpu", folders=FOLDERS)
MODEL = ("model=20m", "device=cpu", "training.precision=float32", "data.sequence_length=64")
STRATEGIES = (
    ("strategy=single",),
    ("strategy=data", "nodes=2"),
    ("strategy=fsdp", "nodes=2"),
    ("strategy=hsdp", "nodes=2", "gpus_per_node=2"),
    ("strategy=tensor", "nodes=2"),
    ("strategy=pipeline", "nodes=4"),
)
SIZES = ((), ("model.dim=64", "model.ffn_dim=192"), ("training.global_batch_size=64", "model.layers=4"))


@pytest.fixture(scope="module")
def works() -> list[tuple[Work, int]]:
    from hpc_parallel.config.resolve import resolve

    configs = [resolve(composed(*MODEL, *strategy, *size))[0] for strategy in STRATEGIES for size in SIZES]
    return [(work_of_run(config), config.gpus_per_node) for config in configs]


def measured(works: Sequence[tuple[Work, int]], hardware: Hardware) -> list[MeasuredRun]:
    """Runs whose steps take what a plan on this hardware says."""
    runs = [MeasuredRun(f"run {at}", work, devices, "cpu", 1.0) for at, (work, devices) in enumerate(works)]
    return [replace(run, step_s=planned_s(run, hardware)) for run in runs]


def test_runs_give_back_the_coefficients_that_made_them(works: list[tuple[Work, int]]) -> None:
    truth = {"products.peak_share": 0.6, "network.share": 0.7, "host.backward_s": 5e-3}
    base = replace(CPU, shared_cores=2, network=replace(CPU.network, bytes_per_s=125e6))
    found = calibrate(measured(works, with_coefficients(base, truth)), base)
    assert found.mean_error < 0.01
    for name, value in truth.items():
        assert coefficient(found.hardware, name) == pytest.approx(value, rel=0.05)
        assert found.identified(name)


def test_what_the_runs_do_not_use_is_named_and_stays(works: list[tuple[Work, int]]) -> None:
    alone = [one for one in works if one[0].devices == 1] * 2
    with_network = alone + works[:4]
    found = calibrate(measured(with_network, CPU), CPU)
    for name in ("host.action_s", "host.collective_s", "node.send.latency_s"):
        assert not found.identified(name)
        assert found.fitted[name].spread == pytest.approx(TOLERANCES[name])
        assert coefficient(found.hardware, name) == pytest.approx(coefficient(CPU, name))


@pytest.mark.parametrize("name", hardware_names(FOLDERS))
def test_a_file_has_what_was_written(name: str, tmp_path: Path) -> None:
    hardware = read_hardware(name, folders=FOLDERS)
    hardware = replace(
        hardware, shared_cores=2, ring_factors={"reduce_scatter": 1.875}, calibration='a "b": c'
    )
    odd = replace(hardware.host, step_s=1e-5)  # which YAML would take for a text
    hardware = replace(hardware, host=odd)
    (tmp_path / "mine.yaml").write_text(
        hardware_text(hardware, head=["one", "two"], sources={"host": "of x"})
    )
    again = read_hardware("mine", folders=[tmp_path])
    assert again.calibration == hardware.calibration
    assert again.shared_cores == 2
    for field in TOLERANCES:
        assert coefficient(again, field) == pytest.approx(coefficient(hardware, field), rel=1e-5)
    assert again.device.peak_flops == pytest.approx(hardware.device.peak_flops, rel=1e-5)
    assert again.ring_factors == pytest.approx(hardware.ring_factors)


def test_wrong_values_of_the_new_keys_are_refused(tmp_path: Path) -> None:
    text = "extends: cpu\nshared_cores: 1.5\nring_factors: {reduce_scatter: -1}\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        read_hardware("mine", folders=[tmp_path, *FOLDERS])
    assert [str(problem) for problem in error.value.problems] == [
        "mine.yaml: ring_factors = {'reduce_scatter': -1} is not a table of positive numbers by name. "
        "Try {reduce_scatter: 2.0}.",
        "mine.yaml: shared_cores = 1.5 is not a whole number. Try shared_cores: 2.",
    ]


def test_rows_of_a_device_give_back_its_coefficients() -> None:
    truth = {
        "products.peak_share": 0.8,
        "host.forward_s": 0.2e-3,
        "host.step_s": 0.5e-3,
        "traffic.kernel_s": 2e-6,
    }
    device = replace(CPU.device, memory_bytes_per_s=5e9, peak_flops={"float32": 40e9})
    real = replace(
        with_coefficients(CPU, truth), device=device, traffic=replace(CPU.traffic, kernel_s=2e-6, share=1.0)
    )
    real = replace(real, node=replace(real.node, devices=1))
    shapes = [
        *((device_fit.PRODUCT, side, 1) for side in (64, 128, 256, 512, 1024)),
        *((device_fit.ELEMENTWISE, size, 1) for size in (2**18, 2**26)),
        (device_fit.LAUNCH, 4, 1),
        *((device_fit.UPDATE, count, 1) for count in (2**10, 2**22)),
        *((kind, width, tokens) for width, tokens in ((32, 8), (256, 256))
          for kind in (device_fit.BLOCK_FORWARD, device_fit.BLOCK_BACKWARD, device_fit.ENDS)),
    ]  # fmt: skip
    rows = [
        replace(row, time_s=device_fit.planned_s(row, real))
        for row in (DeviceRow(kind, "float32", size, 1.0, tokens) for kind, size, tokens in shapes)
    ]
    machine = Machine("mine", "cpu", 4e9, 1, 2, devices=4, shared_cores=2, spread=0.01)
    found = device_hardware(rows, machine, base=CPU)
    for row in rows:
        alone = replace(found, shared_cores=None, node=replace(found.node, devices=1))
        assert device_fit.planned_s(row, alone) == pytest.approx(row.time_s, rel=0.1)
    rate = found.products.peak_share * found.device.peak_flops["float32"]
    assert rate == pytest.approx(0.8 * 40e9, rel=0.1)
    assert found.host.forward_s == pytest.approx(0.2e-3, rel=0.1)
    assert found.host.step_s == pytest.approx(0.5e-3, rel=0.1)
    assert (found.shared_cores, found.node.devices, found.device.name) == (2, 2, "mine")


def test_links_are_those_of_a_rank_with_a_core_of_its_own() -> None:
    fits = {
        "all_reduce": {"latency_s": 400e-6, "bandwidth_bytes_per_s": 0.5e9},
        "send_recv": {"latency_s": 200e-6, "bandwidth_bytes_per_s": 0.25e9},
    }
    across = {
        "all_reduce": {"latency_s": 600e-6, "bandwidth_bytes_per_s": 50e6},
    }
    profile = MachineConfig(
        collectives={"inside a node": {"ranks": 2, **fits}, "across nodes": {"ranks": 2, **across}}
    )
    found, names = with_measured_links(CPU, profile, turns=2.0)
    assert found.node.collective.bytes_per_s == pytest.approx(1e9)
    assert found.node.collective.latency_s == pytest.approx(100e-6)  # 400 in two steps, two in turn
    assert found.network.bytes_per_s == pytest.approx(100e6)  # two groups at 50
    assert found.network.latency_s == pytest.approx(300e-6)
    assert found.node.send.bytes_per_s == pytest.approx(0.5e9)
    assert names == ["all_reduce inside a node", "send_recv inside a node", "all_reduce across nodes"]


@pytest.mark.parametrize(("ranks", "at_once", "total_s"), [(2, 2, 15.0), (2, 1, 12.0 + 4.0), (4, 4, None)])
def test_ranks_that_share_cores_slow_each_other(ranks: int, at_once: float, total_s: float | None) -> None:
    """The case of `test_uneven_stages_and_transfers_delay_a_pipeline`; on one core all work is in turn."""
    pipeline = Pipeline("1f1b", ranks, 2 if ranks == 2 else 8)
    costs = (1.0, 3.0) if ranks == 2 else (1.0,) * 4
    link_s = 0.5 if at_once == 2 else 0.0

    def times(cores: float | None) -> float:
        return simulate(
            pipeline, action_s=lambda kind, stage: costs[stage] if kind in (FORWARD, BACKWARD) else 0.0,
            transfer_s=lambda source, target: link_s, at_once=cores,
        ).total_s  # fmt: skip

    if total_s is not None:
        assert times(at_once) == pytest.approx(total_s, abs=1e-9)
    else:  # as many cores as ranks, but for the rule that decides who simulates
        assert times(at_once - 1e-9) == pytest.approx(times(None), rel=1e-6)


def test_devices_that_share_cores_compute_in_turn(works: list[tuple[Work, int]]) -> None:
    """Four replicas on two cores: twice the computation of two, and the wire waits for nobody.

    All are on one node, so none is slower.
    """
    one = replace(works[3][0], data=2, shard=1)
    two, four = (step_time(replace(one, data=n), replace(CPU, shared_cores=2)) for n in (2, 4))
    assert four.timeline.total_s == pytest.approx(two.timeline.total_s * 2, rel=1e-3)
    assert four.update_s == pytest.approx(2 * two.update_s)


def test_fully_shard_waits_on_a_cpu(works: list[tuple[Work, int]]) -> None:
    fsdp = next(work for work, _ in works if work.shard == 2 and work.data == 2)
    step = step_time(fsdp, replace(CPU, node=replace(CPU.node, devices=1)))
    terms = {term.name: term.seconds for term in step.terms}
    gathers = fsdp.decoder.layers * (2 * terms["weights of a block"] + terms["gradients of a block"])
    ends = terms["weights of a step"] + terms["gradients of a step"]
    assert step.exposed_s == pytest.approx(gathers + ends)


@pytest.mark.parametrize("computed_s", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.3, 0.01, 0.0])
def test_messages_leave_one_after_the_other(computed_s: float, share: float) -> None:
    """Against the messages one by one."""
    sent_s, done, end_s = 4.0, 0.0, 0.0
    part = share or 1e-5
    while done < 1 - 1e-9:
        size = min(part, 1 - done)
        done += size
        end_s = max(end_s, done * computed_s) + size * sent_s
    left_s = end_s - computed_s
    assert left_after(computed_s, sent_s, share=share) == pytest.approx(
        left_s, abs=1e-3 if share == 0 else 1e-9
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Four trainings of tiny, as their run folders."""
    folders = []
    for at, words in enumerate(
        (("nodes=1",), ("nodes=2",), ("strategy=fsdp", "nodes=2"), ("model.layers=8",))
    ):
        folder = finished(tmp_path / f"run-{at}", "device=cpu", *words, hosts={0: "n1"})
        change(folder, "environment", device="x86_64")
        change(folder, "summary", step_time_s=0.1 + 0.05 * at)
        folders.append(folder.path)
    return folders


def change(folder: RunFolder, name: str, **values: object) -> None:
    path = getattr(folder, name)
    write_json(path, {**json.loads(path.read_text()), **values})


def test_the_command_writes_a_file_that_plans_read(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "site" / "hardware" / "mine.yaml"
    file.parent.mkdir(parents=True)
    assert command(["plan", "--calibrate", *map(str, runs), "hardware=cpu", "--output", str(file)]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].split() == ["planned", "measured", "error", "run"]
    assert any(line.startswith("error of the fit: mean ") for line in output)
    assert any(line.startswith("These runs say little about: ") for line in output)
    assert output[-1].endswith(f"`plan --config-dir {tmp_path / 'site'} hardware=mine`, or in a run.")
    assert command(["plan", "--config-dir", str(tmp_path / "site"), "hardware=mine", "model=tiny"]) == 0
    assert "Its coefficients come from this machine: plan --calibrate, 4 runs" in capsys.readouterr().out


def refusals(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert command(["plan", "--calibrate", *words]) == 2
    return [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]


def test_all_problems_of_a_calibration_are_told(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--output", str(tmp_path / "mine.yaml")]
    few = refusals([*map(str, runs[:2]), "hardware=cpu", *out], capsys)
    assert few == ["--calibrate has 2 runs, and needs at least 4, with other strategies and models."]
    alike = refusals([*[str(runs[0])] * 4, "hardware=cpu", *out], capsys)
    assert alike == [
        "--calibrate has 4 runs with 1 different steps, and needs at least 3: other strategies, models or "
        "batches."
    ]
    change(RunFolder(runs[1]), "environment", device="\x1b[31mother")
    (unlike,) = refusals([*map(str, runs), "hardware=cpu", *out], capsys)
    assert unlike.startswith("--calibrate has runs on different devices: ")
    assert "\x1b" not in unlike
    change(RunFolder(runs[2]), "summary", outcome="failed")
    several = refusals([str(tmp_path), *map(str, runs), "hardware=h100_sxm_node8_3200gbit"], capsys)
    assert several[0] == "--output is missing. Try --output site/hardware/mycluster.yaml."
    assert several[1] == f"{tmp_path}: is not a run folder (no config.yaml and rendezvous in it)."
    assert any("ran on cpu, but hardware= describes a device of kind cuda" in line for line in several)
    assert f"{runs[2]}: has not completed, so its steps are not measured." in several
    assert refusals(["--best", *map(str, runs), "hardware=cpu", *out], capsys) == [
        "--best does not go with --calibrate. Try it without --best."
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("layers: 4", "layers: 1000000000000"),
        ("layers: 4", "layers: -4"),
        ("layers: 4", "layers: [4]"),
        ("dim: 128", "dim: 0"),
        ("nodes: 1", "nodes: 1000000000"),
        ("heads: 4", "heads: 0"),
        ("sequence_length: ", "sequence_length: -"),
        ("layers: 4", "layers: 16000000"),  # below the limit of all numbers
        (
            "global_batch_size: 16",
            "global_batch_size: 4611686018427387904",
        ),  # 2**62, of which plans try divisors
    ],
)
def test_a_hostile_configuration_is_refused(runs: list[Path], old: str, new: str) -> None:
    folder = RunFolder(runs[0])
    text = folder.config.read_text()
    assert old in text
    folder.config.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError):
        calibrate(read_runs(runs, CPU), CPU)


def test_a_step_of_too_many_passes_is_refused(runs: list[Path]) -> None:
    """2**22 microbatches x 4 stages would be simulated one by one."""
    folder = RunFolder(runs[0])
    text = folder.config.read_text()
    for old, new in (
        ("nodes: 1", "nodes: 4"), ("pipeline: 1", "pipeline: 4"),
        ("global_batch_size: 16", "global_batch_size: 4194304"),
        ("microbatch_size: null", "microbatch_size: 1"),
    ):  # fmt: skip
        assert old in text
        text = text.replace(old, new, 1)
    folder.config.write_text(text)
    with pytest.raises(ConfigError, match="numbers that no plan takes"):
        read_runs(runs, CPU)


def test_processes_on_the_cores_of_a_machine_with_gpus_take_turns() -> None:
    """A calibration with device=cpu measures its cores, whatever else the machine has."""
    import torch

    from hpc_parallel.config.resolve import resolve
    from hpc_parallel.measure import calibrate as module

    config, *_ = resolve(composed("nodes=2", "gpus_per_node=4", "device=cpu"))
    with (
        mock.patch.object(module, "all_gather", side_effect=lambda machine: [machine] * 8),
        mock.patch.object(module.dist, "get_rank", return_value=0),
        mock.patch.object(module.os, "sched_getaffinity", return_value={0, 1}),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        assert module.turns_of(config, {}, device=torch.device("cpu")) == (4.0, 2)
        assert module.turns_of(config, {}, device=torch.device("cuda", 0)) == (1.0, None)


def errors_of(several: Iterable[MeasuredRun], hardware: Hardware) -> list[float]:
    return sorted(abs(planned_s(run, hardware) / run.step_s - 1) for run in several)


def test_steps_of_a_gpu_are_planned_that_the_fit_did_not_see() -> None:
    """Sizes, lengths, recomputation, microbatches, compiled code: tests/data/hopper_steps.json."""
    hardware = read_hardware(HOPPER["h200"], folders=FOLDERS)
    runs = hopper_runs("h200")
    assert {kind: len(several) for kind, several in runs.items()} == {"fit": 6, "other": 7, "compiled": 6}
    for several in runs.values():
        errors = errors_of(several, hardware)
        assert max(errors) <= 0.06
        assert sum(errors) / len(errors) <= 0.03


def test_steps_of_an_h100_are_planned_from_those_of_an_h200() -> None:
    """No run of an H100 was in a fit. The host decides the time of one, and it was slower (25 %)."""
    hardware = read_hardware(HOPPER["h100"], folders=FOLDERS)
    errors = errors_of(chain.from_iterable(hopper_runs("h100").values()), hardware)
    assert len(errors) == 19
    assert errors[-2] <= 0.11
    assert sum(errors) / len(errors) <= 0.06
