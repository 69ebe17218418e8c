"""Checkpoints and input in the planned time of a training, from rates that are given here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.resolve import resolve
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.planning.forecast import Forecast, forecast
from hpc_parallel.planning.hardware import Hardware, Storage, named_hardware, read_hardware
from hpc_parallel.planning.storage_times import StorageTimes, checkpoint_bytes
from hpc_parallel.planning.work import work_of_run
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed

A100 = "a100_80gb_node8_800gbit"
RATES = Storage(
    write_bytes_per_s=1e9, together_bytes_per_s=8e9, read_bytes_per_s=1e6, copy_bytes_per_s=20e9
)  # fmt: skip
LINE = "storage: {write_bytes_per_s: 1.0e+9, together_bytes_per_s: 8.0e+9, copy_bytes_per_s: 20.0e+9}\n"
WEIGHTS_1B = 1_235_814_400  # model=1b: safetensors of Llama 3.2 1B, whose shape it has
WORDS = (
    "strategy=fsdp", "model=1b", "gpus_per_node=8", "training.global_batch_size=64",
    "training.checkpoint_every=100",
)  # fmt: skip


def times(*words: str, step_s: float, name: str = A100, storage: Storage = RATES) -> StorageTimes:
    hardware: Hardware = replace(read_hardware(name, folders=FOLDERS), storage=storage)
    config, *_ = resolve(composed(*WORDS, f"device={hardware.device.kind}", *words))
    return StorageTimes(config, work_of_run(config), step_s, hardware)


def test_copies_in_memory_wait_for_the_device_and_for_a_slow_network() -> None:
    """12 bytes a weight, 1/8 on each of 8 ranks of 2 nodes; the links of a node send 100 GB/s."""
    words = ("training.memory_checkpoint_every=10", "strategy=hsdp", "nodes=2")
    own = 12 * WEIGHTS_1B / 8
    wait = times(*words, step_s=1.0).memory_copies(1000)
    assert wait.seconds == pytest.approx(99 * own / 20e9, rel=1e-6)
    assert wait.text == (
        "0.9 % of the time: 1.7 GiB a rank each 10 steps; a node holds up to 55.2 GiB, its links send 1.5 % "
        "of the time"
    )
    short = times(*words, step_s=0.001).memory_copies(1000).seconds
    assert short == pytest.approx(99 * (own / 20e9 + 8 * own / 100e9 - 10 * 0.001), rel=1e-6)
    alone = times(*words, "nodes=1", step_s=0.001).memory_copies(1000)
    assert alone.seconds == pytest.approx(99 * own / 20e9, rel=1e-6)
    assert "27.6 GiB, its links send 0.0 %" in alone.text
    both = times(*words, step_s=1.0)
    assert both.training_s(1000) == pytest.approx(1000 + (both.checkpoints(1000).seconds or 0) + wait.seconds)
    unmeasured = times(*words, step_s=1.0, storage=Storage()).memory_copies(1000)
    assert unmeasured.seconds is None
    assert "a node holds up to 55.2 GiB" in unmeasured.text
    assert times(step_s=1.0).memory_copies(1000).seconds == 0


def test_the_cost_of_1_gb_a_rank_over_10_gigabit() -> None:
    """At most 2 % of steps of 1 s: 1 GB is copied from the device, and sent beside ten steps."""
    words = ("training.memory_checkpoint_every=10", "strategy=fsdp", "nodes=16", "gpus_per_node=1")
    found = times(*words, step_s=1.0)
    slow = replace(found.hardware, network=replace(found.hardware.network, bytes_per_s=10e9 / 8))
    wait = replace(found, hardware=slow).memory_copies(1000)
    own = 12 * WEIGHTS_1B / 16
    assert own == pytest.approx(0.93e9, rel=0.01)
    assert wait.seconds is not None
    assert wait.seconds / 1000 < 0.02
    assert "its links send 7.4 % of the time" in wait.text


def test_a_blocking_save_is_waited_for_as_a_whole() -> None:
    """12 bytes a weight: 8 ranks write 1/8 each at 1 GB/s, which 8 GB/s together does not slow down."""
    wait = times("training.checkpoint_async=false", step_s=1.0).checkpoints(1000)
    assert wait.seconds == pytest.approx(10 * 12 * WEIGHTS_1B / 8e9, rel=1e-6)
    slower = times(
        "training.checkpoint_async=false", step_s=1.0, storage=replace(RATES, together_bytes_per_s=2e9)
    )
    assert slower.checkpoints(1000).seconds == pytest.approx(10 * 12 * WEIGHTS_1B / 2e9, rel=1e-6)


def test_a_save_beside_the_steps_is_copied_and_waits_for_the_one_before() -> None:
    """Of 10 saves the last one is waited for; the others only if 100 steps are shorter than a write."""
    own = 12 * WEIGHTS_1B / 8
    assert times(step_s=1.0).checkpoints(1000).seconds == pytest.approx(9 * own / 20e9 + own / 1e9, rel=1e-6)
    short = times(step_s=0.01).checkpoints(1000).seconds
    assert short == pytest.approx(9 * (own / 20e9 + own / 1e9 - 100 * 0.01) + own / 1e9, rel=1e-6)
    assert times(step_s=0.01).training_s(1000) == pytest.approx(10 + short)
    assert times(step_s=1.0).checkpoints(1001).seconds == pytest.approx(  # one more after the last step
        10 * own / 20e9 + own / 1e9, rel=1e-6
    )


def test_what_is_not_known_is_not_counted() -> None:
    unmeasured = times(step_s=1.0, storage=Storage()).checkpoints(1000)
    assert unmeasured.seconds is None
    assert unmeasured.text == (
        "not counted: no storage.write_bytes_per_s in the hardware's file (task=calibrate measures it)"
    )
    own = times("optimizer=custom", "optimizer._target_=mine.Optimizer", step_s=1.0)
    assert own.checkpoints(1000).text == "not counted: the optimizer's state is not known"
    assert own.training_s(1000) == 1000
    never = times("training.checkpoint_every=null", step_s=1.0, storage=Storage())
    assert never.checkpoints(1000).seconds == 0


def test_a_processor_copies_in_its_own_memory() -> None:
    found = times("strategy=data", "training.microbatch_size=1", step_s=10.0, name="cpu")
    hardware = found.hardware
    rate = hardware.device.memory_bytes_per_s * hardware.traffic.share / 2
    expected = 9 * 12 * WEIGHTS_1B / 8 / rate + 12 * WEIGHTS_1B / 8 / 1e9
    assert found.checkpoints(1000).seconds == pytest.approx(expected, rel=1e-6)


def test_the_parameter_server_writes_the_state_of_the_optimizer() -> None:
    config, *_ = resolve(composed("strategy=parameter_server", "model=tiny", "nodes=4"))
    found = checkpoint_bytes(config)
    weights = found.total // 3  # and two states of AdamW
    assert found.most == pytest.approx(2 * weights + weights / 4, abs=100)


def test_input_waits_for_what_takes_longer_than_a_step() -> None:
    """8 samples of 4,096 tokens of at most 4 bytes at 1 MB/s: 0.131 s."""
    words = ("data=tokens", "data.path=x.npy", "data.sequence_length=4096", "training.microbatch_size=8")
    read_s = 8 * 4096 * 4 / 1e6
    assert times(*words, step_s=0.1).input(1000).seconds == pytest.approx(1000 * (read_s - 0.1))
    assert times(*words, step_s=0.2).input(1000).seconds == 0
    unknown = times(*words, step_s=0.2, storage=Storage()).input(1000)
    assert unknown.seconds is None
    assert unknown.text.startswith("not counted: no storage.read_bytes_per_s")
    assert times(step_s=0.2).input(1000).seconds == 0  # data=text is in memory


def test_device_hours_and_cost_contain_the_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(f"extends: {A100}\n{LINE}")
    words = ["plan", *WORDS, "--config-dir", str(tmp_path), "training.checkpoint_async=false"]
    words += ["cluster.device_hour_price=2", "--tokens=1e9"]

    def figures(*more: str) -> dict[str, float]:
        assert command([*words, *more, "--json"]) == 0
        found: dict[str, float] = json.loads(capsys.readouterr().out)
        return found

    with_saves, without = figures("hardware=mine"), figures(f"hardware={A100}")
    assert without["checkpoints_s"] is None
    saved_s = with_saves["checkpoints_s"]
    steps = 1e9 / (64 * 128)
    assert saved_s == pytest.approx((steps // 100 + 1) * 12 * WEIGHTS_1B / 8e9, rel=1e-6)
    assert with_saves["device_hours"] == pytest.approx(without["device_hours"] + 8 * saved_s / 3600)
    assert with_saves["cost"] == pytest.approx(2 * with_saves["device_hours"])
    assert command([*words, "hardware=mine", "--explain"]) == 0
    said = capsys.readouterr().out
    assert f"{saved_s:.4g} s of checkpoints) x 8 devices" in said
    assert "B / 1 GB/s" in said


def test_a_time_limit_has_room_for_the_saves(tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text(f"extends: {A100}\n{LINE}")
    words = (*WORDS, "training.checkpoint_async=false", "launcher=slurm", "device=cuda")
    config, *_ = resolve(composed(*words, "launcher.time_minutes=1"))

    def planned(hardware: str, *, steps: int) -> Forecast:
        asked, training = replace(config.plan, hardware=hardware), replace(config.training, steps=steps)
        run = replace(config, plan=asked, training=training)
        return forecast(run, Plan.of(run), hardware=named_hardware(hardware, user_folder=tmp_path))

    steps = int(59 / planned(A100, steps=1).figures["step_time_s"])  # and at least two saves of 1.9 s
    assert steps > 100
    assert planned(A100, steps=steps).warnings == []
    (warning,) = planned("mine", steps=steps).warnings
    assert "launcher.time_minutes = 1 is less than" in warning


def test_a_wrong_rate_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text("extends: cpu\nstorage: {read_bytes_per_s: -1, x: 2}\n")
    assert command(["plan", "model=tiny", "--config-dir", str(tmp_path), "hardware=mine"]) == 2
    said = capsys.readouterr().err
    assert "mine.yaml: storage: read_bytes_per_s = -1 is not a positive number." in said
    assert "mine.yaml: storage: there is no key x." in said
