"""`strategy=auto` and the plan before a start: what is recorded, refused and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from hpc_parallel.commands import run_command, show
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_cells
from hpc_parallel.config.resolve import resolve
from hpc_parallel.failure.summary import summarise
from hpc_parallel.launch.checked_run import checked_run, with_resumed
from hpc_parallel.launch.run_files import write
from hpc_parallel.planning import memory
from hpc_parallel.planning.forecast import certain_bytes
from hpc_parallel.planning.hardware import read_hardware
from hpc_parallel.planning.step_time import step_time
from hpc_parallel.planning.work import work_of_run
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.recorded import read_run
from hpc_parallel.sweep.sweep_plan import plan_sweep
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed, prepared

H100 = "h100_sxm_node8_3200gbit"
SITE = ("launcher=script", "gpus_per_node=8", f"hardware={H100}")
HERE = ("strategy=auto", "launcher=local", "device=cpu", "nodes=2", "gpus_per_node=2", "training.steps=2")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(*words: str):  # type: ignore[no-untyped-def]
    return checked_run(CommandLine.parse([*words, "launcher.snapshot=false"]))


def test_what_auto_chooses_is_recorded_with_its_degrees() -> None:
    run = checked(*HERE)
    assert "strategy=auto" not in run.overrides
    assert run.config.name == "auto"
    assert run.plan_notes[0].startswith("auto        strategy=")
    write(run)
    recorded = yaml.safe_load(run.folder.config.read_text())
    degrees = [recorded["strategy"][axis] for axis in ("pipeline", "replicate", "shard", "tensor")]
    assert -1 not in degrees
    assert recorded["strategy"]["name"] != "auto"
    assert resolve(composed(*run.overrides))[1] == {**run.values, "run_dir": None}


def test_a_resumed_run_keeps_its_layout_unless_it_has_other_devices() -> None:
    run = checked(*HERE)
    write(run)
    typed = [*HERE, "launcher.snapshot=false", "resume=auto"]
    line = with_resumed(CommandLine.parse(typed))
    assert "strategy=auto" not in line.overrides
    assert set(run.overrides) - {"launcher.snapshot=false"} <= set(line.overrides)
    other = with_resumed(CommandLine.parse([*typed[:-1], "nodes=1", f"resume={run.folder.path}"]))
    assert "strategy=auto" in other.overrides


def test_a_sweep_over_auto_and_others() -> None:
    line = CommandLine.parse(["-m", *HERE[1:], "strategy=auto,pipeline", "launcher.snapshot=false"])
    cells = compose_cells(line.overrides, **line.places)
    assert cells is not None
    plan = plan_sweep(cells, command=line.words)
    assert [planned.swept for planned in plan.runs] == [("strategy=auto",), ("strategy=pipeline",)]
    assert plan.runs[0].run.config.strategy.name != "auto"
    assert plan.runs[0].run.config.training.global_batch_size == 16
    assert plan.runs[1].run.plan_notes == []


def test_auto_names_the_hardware_files_where_gpus_are_unknown() -> None:
    with pytest.raises(ConfigError, match=r"strategy=auto needs it\. Choose one of a100_40gb.*h100_sxm"):
        checked("strategy=auto", "model=1b", "device=cuda", "launcher=script")


def test_a_model_that_is_not_planned_is_refused_by_auto() -> None:
    with pytest.raises(ConfigError, match=r"the class .*ConvNet is not planned"):
        checked("strategy=auto", "model=convnet", "data=digits", "launcher=local", "device=cpu")


def test_a_dry_run_shows_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command.main([*HERE, "dry_run=true", "launcher.snapshot=false"]) == 0
    assert "auto        strategy=" in capsys.readouterr().err


@pytest.mark.parametrize("on_overflow", ["stop", "warn", "off"])
def test_a_run_that_cannot_fit_is_stopped_with_layouts_that_do(on_overflow: str) -> None:
    words = (*SITE, "strategy=data", "model=8b", "nodes=2", f"plan.on_overflow={on_overflow}")
    if on_overflow == "stop":
        with pytest.raises(ConfigError) as error:
            checked(*words)
        (problem,) = error.value.problems
        text = str(problem)
        # 8,030,261,248 weights: themselves and two states in float32, before any activation
        assert float(text.partition(" need ")[2].split()[0]) > 3 * 4 * 8030261248 / 2**30
        assert "one NVIDIA H100 SXM has 74.5 GiB. Try strategy=" in text
        near = text.partition("Try ")[2].partition(" (")[0].split()
        assert checked(*SITE, "model=8b", "nodes=2", *near).plan_notes == []
        return
    run = checked(*words)
    assert (run.predicted is None) == (on_overflow == "off")
    warned = [note for note in run.plan_notes if note.startswith("warning     memory: parameters")]
    assert len(warned) == (on_overflow == "warn")


def test_a_run_whose_state_alone_cannot_fit_is_stopped_although_its_activations_are_not_known() -> None:
    """The widest convolution of this U-Net has 3 x 3 weights of 16,384 x 16,384 channels."""
    with pytest.raises(ConfigError) as error:
        checked(*SITE, "model=unet", "data=cells", "model.channels=[4096,8192,16384]", "strategy=data")
    text = str(error.value.problems[0])
    assert "parameters, optimizer state and gradients need" in text
    assert float(text.partition(" need ")[2].split()[0]) > 4 * 4 * 9 * 16384**2 / 2**30


def test_an_estimate_does_not_stop_a_run() -> None:
    """What is certain fits, and the sum with its estimates does not."""
    words = ("strategy=data", "model=1b", "data.sequence_length=2048", "training.global_batch_size=128")
    run = checked(*SITE, *words, "training.microbatch_size=16")
    config, *_ = resolve(composed("device=cuda", "gpus_per_node=8", *words, "training.microbatch_size=16"))
    planned = memory.plan(config)
    room = read_hardware(H100, folders=FOLDERS).device.memory_bytes
    assert certain_bytes(planned.fullest) <= room < planned.fullest.total
    assert "the run may not fit" in run.plan_notes[0]


def test_a_server_without_room_names_layouts_without_one() -> None:
    with pytest.raises(ConfigError, match=r"optimizer state and gradients need .* Try strategy="):
        checked(*SITE, "strategy=parameter_server", "model=8b", "nodes=2", "training.global_batch_size=15")


def test_activations_of_compiled_blocks_are_not_certain() -> None:
    """Those of eager mode would stop this run."""
    words = (*SITE, "strategy=data", "model=1b", "data.sequence_length=2048", "training.microbatch_size=32",
             "training.global_batch_size=256")  # fmt: skip
    with pytest.raises(ConfigError, match="optimizer state and activations need"):
        checked(*words)
    assert "the run may not fit" in checked(*words, "training.compile=true").plan_notes[0]


def test_nothing_is_planned_without_a_known_hardware() -> None:
    run = checked("strategy=data", "model=8b", "launcher=script", "gpus_per_node=8")
    assert run.predicted is None
    assert list(run.plan_notes) == []


def test_a_wrong_name_comes_with_all_other_problems() -> None:
    with pytest.raises(ConfigError) as error:
        checked("strategy=data", "model=1b", "hardware=h100", "training.steps=0")
    text = "\n".join(map(str, error.value.problems))
    assert "Try hardware=h100_pcie_node8_400gbit or hardware=h100_sxm" in text
    assert "training.steps = 0" in text
    with pytest.raises(ConfigError) as error:
        checked("strategy=data", "model=1b", "hardware=nosuch")
    assert "Try" not in str(error.value.problems[0])  # none is near


def test_a_short_time_limit_is_warned_of() -> None:
    words = (*SITE, "strategy=fsdp", "model=1b", "training.steps=100000")
    run = checked(*words, "launcher.time_minutes=5")
    minutes = 100000 * run.predicted["step_time_s"] / 60
    (note,) = run.plan_notes
    assert f"launcher.time_minutes = 5 is less than the {minutes:.0f} minutes" in note
    assert checked(*words, f"launcher.time_minutes={int(minutes) + 1}").plan_notes == []


def test_the_plan_is_in_the_summary_and_beside_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = checked(*SITE, "strategy=fsdp", "model=1b")
    work = work_of_run(run.config)
    step = step_time(work, read_hardware(H100, folders=FOLDERS))
    expected = {
        "step_time_s": step.total_s,
        "samples_per_s": 16 / step.total_s,
        "tokens_per_s": 16 * work.decoder.sequence / step.total_s,
        "bubble_share": 0.0,
        "exposed_communication_share": step.exposed_s / step.total_s,
    }
    assert run.predicted is not None
    planned = dict(run.predicted)
    assert planned.pop("peak_memory_bytes") > 4 * 4 * 1235814400 / 8
    assert planned == pytest.approx(expected, rel=1e-12)
    write(run)
    recorded = read_run(run.folder.path)
    lines = [{"step": at, "samples": 16 * at, "step_time_s": 0.5, "samples_per_s": 32.0} for at in (1, 2)]
    summary = summarise(
        run.values, outcome="completed", lines=lines, history={}, environment=recorded.environment
    )
    assert summary["predicted"] == run.predicted
    assert set(summary["predicted"]) - {"tokens_per_s"} <= set(summary)
    run.folder.summary.write_text(json.dumps(summary))
    assert show.main([str(run.folder.path)]) == 0
    (line,) = (text for text in capsys.readouterr().out.splitlines() if text.startswith("step time"))
    assert line.split()[:3] == ["step", "time", "500"]
    assert f"predicted {1e3 * step.total_s:.1f}"[:12] in line


def test_prepared_runs_of_the_python_interface_keep_the_choice() -> None:
    run = prepared("strategy=auto", "device=cpu", "launcher=local", "gpus_per_node=2")
    again = prepared(*run.overrides)
    assert again.config.strategy == run.config.strategy
