"""What a report reckons: best figures, scaling, hours, claims, each against numbers made by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.commands import grid
from hpc_parallel.failure.summary import summarise
from hpc_parallel.layout.axes import AXES
from hpc_parallel.record import owner
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, SweepRun, create, write_sweep
from hpc_parallel.record.task_files import RankTimeline, StageWork
from hpc_parallel.report.claims import judged
from hpc_parallel.report.gather import Gathered, Row, gather, timeline
from hpc_parallel.report.labels import titles_of_work
from hpc_parallel.report.measures import BACKED, CONTRADICTED, EVEN, NO_FIGURE, NO_VERDICT, OPEN, Runs
from hpc_parallel.report.page import table
from hpc_parallel.report.picture import kinds
from hpc_parallel.report.tables import (
    COLUMNS,
    STRONG,
    UNMEASURED,
    WEAK,
    compare,
    digits,
    records,
    scaling,
    unit_of,
)
from hpc_parallel.report.verdict import pools, predictions
from tests.report.measured_runs import BEGAN, ended, note, started, state, written


def rows(tmp_path: Path) -> list[Row]:
    return list(gather([tmp_path / "runs"]).rows)


def best(tmp_path: Path) -> dict[str, list[int]]:
    """Column -> places of the rows that are marked."""
    comparison = compare(rows(tmp_path))
    return {column.key: [] for column in COLUMNS} | {
        column.key: [place for place, row in enumerate(comparison.cells) if row[at].best]
        for at, column in enumerate(comparison.columns)
    }


def test_best_is_more_of_throughput_and_less_of_all_else(tmp_path: Path, new: Callable[[], Path]) -> None:
    shares = {"bubble_share": 0.2, "exposed_communication_share": 0.3, "traffic_bytes": 900, "latency_s": 0.2}
    words = ("strategy=pipeline", "nodes=2")
    ended(
        new(), *words, samples_per_s=50, peak_memory_bytes=400, hours=2, final_loss=2.5, restarts=1,
        rank_state_bytes=state(160, 80), **shares,
    )  # fmt: skip
    ended(
        new(), *words, "strategy.schedule=gpipe", samples_per_s=80, peak_memory_bytes=300, hours=1,
        final_loss=2.4, restarts=0,
        rank_state_bytes=state(120, 120), **{key: value / 2 for key, value in shares.items()},
    )  # fmt: skip
    assert best(tmp_path) == {column.key: [1] for column in COLUMNS}


def test_a_count_is_a_whole_number(tmp_path: Path, new: Callable[[], Path]) -> None:
    for restarts in (0, 1, 1234):
        ended(new(), "strategy=data", "nodes=2", restarts=restarts)
    comparison = compare(rows(tmp_path))
    at = [column.key for column in comparison.columns].index("restarts")
    assert [cells[at].text for cells in comparison.cells] == ["0", "1", "1234"]


def test_only_comparable_runs_can_be_best(tmp_path: Path, new: Callable[[], Path]) -> None:
    """One device waits for nobody, data has no bubble; what failed or goes on or is not measured is none."""
    zero = {"bubble_share": 0.0, "exposed_communication_share": 0.0, "traffic_bytes": 0}
    ended(new(), "strategy=single", samples_per_s=10, **zero)
    ended(new(), "strategy=data", "nodes=2", samples_per_s=20, **{**zero, "exposed_communication_share": 0.3})
    ended(
        new(), "strategy=pipeline", "nodes=2", samples_per_s=20.004, bubble_share=0.4,
        exposed_communication_share=0.2, traffic_bytes=70,
    )  # fmt: skip
    ended(new(), "strategy=pipeline", "nodes=2", samples_per_s=99, outcome="failed", bubble_share=0.1)
    started(new(), "strategy=pipeline", "nodes=2", samples_per_s=99)
    ended(new(), "strategy=data", "nodes=2", samples_per_s=15)
    found = best(tmp_path)
    assert found["samples_per_s"] == []  # two are alike to the digits shown
    assert found["bubble_share"] == []  # one alone
    assert found["exposed_communication_share"] == [2]
    assert found["traffic_bytes"] == [1]
    assert found["final_loss"] == found["peak_memory_bytes"] == []  # all alike
    assert found["latency_s"] == []
    comparison = compare(rows(tmp_path))
    texts = {
        column.key: [row[at].text for row in comparison.cells] for at, column in enumerate(comparison.columns)
    }
    assert "latency_s" not in texts  # nobody measured it
    assert texts["bubble_share"] == ["-", "-", "40.0", "10.0", UNMEASURED, UNMEASURED]


@pytest.mark.parametrize(
    "words",
    [("training.precision=bfloat16",), ("optimizer=sgd",), ("model.layers=8",), ("training.clip_norm=null",)],
    ids=str,
)
def test_no_star_is_won_across_other_settings(
    tmp_path: Path, new: Callable[[], Path], words: tuple[str, ...]
) -> None:
    figures = {"peak_memory_bytes": 100, "rank_state_bytes": state(100), "samples_per_s": 10.0}
    ended(new(), "strategy=data", "nodes=2", **figures)
    ended(new(), "strategy=data", "nodes=2", *words, **{**figures, "samples_per_s": 20.0, "final_loss": 0.1})
    assert not any(best(tmp_path).values())


def test_no_star_is_won_on_another_device(tmp_path: Path, new: Callable[[], Path]) -> None:
    for device, rate in (("A", 10), ("B", 20)):
        folder = ended(new(), "strategy=data", "nodes=2", samples_per_s=rate)
        write_json(folder.environment, {"cuda": "13", "device": device})
    assert not any(best(tmp_path).values())


def test_settings_that_change_no_speed_don_t_part_speeds_but_losses(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    for seed, rate in ((1, 10), (2, 20)):
        words = (f"seed={seed}", f"optimizer.learning_rate={seed}e-3")
        ended(new(), "strategy=data", "nodes=2", *words, samples_per_s=rate, final_loss=3.0 / seed)
    found = best(tmp_path)
    assert (found["samples_per_s"], found["final_loss"]) == ([1], [])


def test_no_star_is_won_within_the_noise_or_without_a_spread(tmp_path: Path, new: Callable[[], Path]) -> None:
    """5 % for measured figures; bytes that were counted are exact. The peak of a process on a CPU is none."""
    for memory, counted in ((100.0, 1000), (104.0, 1001)):
        ended(
            new(), "strategy=pipeline", "nodes=2", peak_memory_bytes=int(memory), latency_s=memory,
            bubble_share=memory / 1000, traffic_bytes=counted,
        )  # fmt: skip
    found = best(tmp_path)
    assert [key for key, places in found.items() if places] == []  # 1000 and 1001 are equal as shown
    words = ("strategy=pipeline", "nodes=2", "strategy.schedule=gpipe")
    ended(new(), *words, peak_memory_bytes=50, traffic_bytes=990, samples_per_s=500)
    found = best(tmp_path)
    assert [key for key, places in found.items() if places] == [
        "samples_per_s", "step_time_s", "peak_memory_bytes", "traffic_bytes",
    ]  # fmt: skip
    short = ended(new(), "strategy=pipeline", "nodes=2", peak_memory_bytes=50, samples_per_s=1)
    lines = short.metrics.read_text().splitlines()[:2]
    short.metrics.write_text("\n".join(lines))
    assert best(tmp_path)["samples_per_s"] == []
    for row in rows(tmp_path):
        write_json(RunFolder(row.run.path).environment, {"cuda": None})
    assert best(tmp_path)["peak_memory_bytes"] == []


@pytest.mark.parametrize(("other", "marked"), [(2.995, []), (2.98, [1])])
def test_no_loss_wins_by_what_bfloat16_rounds(
    other: float, marked: list[int], tmp_path: Path, new: Callable[[], Path]
) -> None:
    for strategy, loss in (("data", 3.0), ("fsdp", other)):
        ended(new(), f"strategy={strategy}", "nodes=2", "training.precision=bfloat16", final_loss=loss)
    assert best(tmp_path)["final_loss"] == marked


def test_losses_compare_after_as_many_samples_of_the_same_work(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    ended(new(), "strategy=single", final_loss=2.0)
    ended(new(), "strategy=data", "nodes=2", final_loss=2.1)
    ended(new(), "strategy=data", "nodes=2", "training.global_batch_size=32", final_loss=1.0)
    ended(new(), "strategy=data", "nodes=2", "model.layers=8", final_loss=0.5)
    assert best(tmp_path)["final_loss"] == [0]


def test_scaling_is_found_and_reckoned(tmp_path: Path, new: Callable[[], Path]) -> None:
    for nodes, rate in ((1, 100), (2, 180), (4, 320), (4, 300), (4, 340)):
        ended(new(), "strategy=data", f"nodes={nodes}", samples_per_s=rate)
    for nodes, rate in ((2, 190), (4, 360)):
        ended(
            new(), "strategy=data", f"nodes={nodes}", f"training.global_batch_size={16 * nodes}",
            samples_per_s=rate,
        )  # fmt: skip
    ended(new(), "strategy=data", "nodes=2", "strategy.bucket_mb=1", samples_per_s=1)  # another configuration
    ended(new(), "strategy=data", "nodes=2", outcome="failed", samples_per_s=1)
    for gpus in (1, 2):  # of two axes one is held
        ended(new(), "strategy=hsdp", "nodes=2", f"gpus_per_node={gpus}", samples_per_s=50 * gpus)
    found = {(each.kind, each.label): each.points for each in scaling(rows(tmp_path))}
    assert {key: [point.devices for point in points] for key, points in found.items()} == {
        (STRONG, "data, batch 16"): [1, 2, 4],
        (WEAK, "data, batch 16 per device"): [1, 2, 4],
        (STRONG, "hsdp, replicate 2, batch 16"): [2, 4],
    }
    strong, weak = (found[key] for key in list(found)[:2])
    assert [point.efficiency for point in strong] == pytest.approx([1, 0.9, 0.8])  # of 4: the median of three
    assert [point.speedup for point in strong] == pytest.approx([1, 1.8, 3.2])
    assert [point.efficiency for point in weak] == pytest.approx([1, 0.95, 0.9])
    assert [point.global_batch_size for point in weak] == [16, 32, 64]
    assert [point.efficiency for point in found[STRONG, "hsdp, replicate 2, batch 16"]] == [1, 1]
    assert [point.runs_text for point in strong] == ["1", "1", "3: 300 to 340"]
    said = [
        each["strong_efficiency"]
        for each in records(rows(tmp_path), scaling(rows(tmp_path)))
        if each["nodes"] == 4 and each["samples_per_s"] != 360
    ]
    assert said == pytest.approx([0.8, 0.75, 0.85])  # each by its own throughput


def test_the_efficiency_of_a_run_is_that_over_the_fewest_devices(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    """The second run also begins a series; the last is in two, and both begin with 2 devices."""
    for pipeline, replicate, rate in ((1, 1, 100), (1, 2, 180), (2, 1, 120), (2, 2, 240)):
        words = (f"strategy.pipeline={pipeline}", f"strategy.replicate={replicate}", "strategy.tensor=1")
        ended(new(), "strategy=hybrid", f"nodes={pipeline * replicate}", *words, samples_per_s=rate)
    found = records(rows(tmp_path), scaling(rows(tmp_path)))
    assert [each["strong_efficiency"] for each in found] == [1.0, 0.9, 0.6, None]


def test_a_series_names_the_settings_common_to_its_runs(tmp_path: Path, new: Callable[[], Path]) -> None:
    for words in ((), ("strategy.pipeline=2",)):
        for nodes in (2, 4):
            steps = f"training.steps={10 * nodes}"  # how long a run takes is no part of how fast it is
            ended(new(), "strategy=data", f"nodes={nodes}", steps, *words, samples_per_s=50 * nodes)
    ended(new(), "strategy=data", "training.steps=20", samples_per_s=50)
    assert {each.label for each in scaling(rows(tmp_path)) if each.kind == STRONG} == {
        "data, batch 16, by replicate", "data, batch 16, by pipeline", "data, pipeline 2, batch 16",
        "data, replicate 2, batch 16",
    }  # fmt: skip


def test_a_run_that_is_older_than_a_key_stands_on_the_curve_of_its_default(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    older = ended(new(), "strategy=data", "nodes=1", samples_per_s=50)
    ended(new(), "strategy=data", "nodes=2", samples_per_s=90)
    ended(new(), "strategy=data", "nodes=4", "training.compile=true", samples_per_s=400)
    config = yaml.safe_load(older.config.read_text())
    del config["training"]["compile_whole"], config["plan"]
    older.config.write_text(yaml.safe_dump(config))
    strong = [series for series in scaling(rows(tmp_path)) if series.kind == STRONG]
    assert [[point.devices for point in series.points] for series in strong] == [[1, 2]]
    first, second, _ = rows(tmp_path)
    assert first.settings == second.settings
    assert first.loss_settings == second.loss_settings


def test_runs_of_one_name_are_distinguished_by_layout(tmp_path: Path, new: Callable[[], Path]) -> None:
    for words in ((), ("strategy.pipeline=2",), ("strategy.pipeline=2",)):
        ended(new(), "strategy=data", "nodes=2", *words)
    assert [row.label for row in rows(tmp_path)] == [
        "data 2 x 1, replicate 2", "data 2 x 1, pipeline 2 (001)", "data 2 x 1, pipeline 2 (002)",
    ]  # fmt: skip


@pytest.mark.parametrize("recorded", [{"pipeline": 1, "replicate": 2, "shard": 1}, {}])
def test_an_axis_that_a_recorded_run_does_not_have_is_1(
    recorded: dict[str, int], tmp_path: Path, new: Callable[[], Path]
) -> None:
    """As in a run of an older version; without any axis, the configuration decides."""
    run = ended(new(), "strategy=data", "nodes=2")
    write_json(run.summary, {**json.loads(run.summary.read_text()), "layout": recorded})
    config = yaml.safe_load(run.config.read_text())
    del config["strategy"]["expert"]
    run.config.write_text(yaml.safe_dump(config))
    (row,) = rows(tmp_path)
    assert row.layout == {**dict.fromkeys(AXES, 1), "replicate": 2}
    assert str(grid.layout(read_run(run.path))) == "replicate 2"


def test_figures_of_another_batch_are_no_rivals(tmp_path: Path, new: Callable[[], Path]) -> None:
    for strategy, batch, step_s in (("data", 16, 2.0), ("fsdp", 16, 1.5), ("data", 8, 1.0)):
        ended(
            new(), f"strategy={strategy}", "nodes=2", f"training.global_batch_size={batch}",
            step_time_s=step_s, samples_per_s=batch / step_s,
        )  # fmt: skip
    assert best(tmp_path)["step_time_s"] == [1]


def test_one_layout_by_two_names_is_no_contest(tmp_path: Path, new: Callable[[], Path]) -> None:
    for strategy, rate in (("hybrid", 60), ("pipeline", 80), ("model", 30)):
        ended(new(), f"strategy={strategy}", "nodes=2", samples_per_s=rate)
    verdict, figure = verdicts(tmp_path)["hybrid", "highest efficiency"]
    assert verdict == BACKED
    assert "best of the others 30.0 samples/s (model 2 x 1)" in figure


def test_device_hours_are_those_of_every_start(tmp_path: Path, new: Callable[[], Path]) -> None:
    twice = ended(new(), "strategy=data", "nodes=2", "gpus_per_node=2", hours=5)
    note(twice.attempts, ended=(BEGAN + timedelta(hours=2)).isoformat(), how="preempted", host=None)
    note(
        twice.attempts,
        began=(BEGAN + timedelta(hours=4)).isoformat(),
        job_id=None,
        after_step=3,
        lost_steps=1,
    )
    spare = ("launcher.kind=script", "launcher.spares=1", "cluster=cpu")
    ended(new(), "strategy=data", "nodes=2", "gpus_per_node=2", *spare)  # on three nodes
    lost = ended(new(), hours=5)  # nobody noted how its first start ended
    note(
        lost.attempts, began=(BEGAN + timedelta(hours=4)).isoformat(), job_id=None, after_step=3, lost_steps=1
    )
    other = ended(new(), "strategy=data", "nodes=2", "gpus_per_node=2", hours=5)  # then on another layout
    note(other.attempts, ended=(BEGAN + timedelta(hours=2)).isoformat(), how="preempted", host=None)
    note(
        other.attempts, began=(BEGAN + timedelta(hours=4)).isoformat(), job_id=None, after_step=3,
        lost_steps=1, layout={"nodes": 1, "gpus_per_node": 1},
    )  # fmt: skip
    started(new(), "strategy=data", "nodes=3", "training.global_batch_size=12")  # to its last line
    written(new())
    slow = ended(new(), "strategy=data", "nodes=2", hours=5)  # held for an hour before its ranks began
    launch = json.dumps({"launched": (BEGAN - timedelta(hours=1)).isoformat()})
    slow.attempts.write_text(f"{launch}\n{slow.attempts.read_text()}")
    note(slow.attempts, ended=(BEGAN + timedelta(hours=2)).isoformat(), how="preempted", host=None)
    note(slow.attempts, resumed=(BEGAN + timedelta(hours=3)).isoformat())
    note(slow.attempts, launched=(BEGAN + timedelta(hours=4)).isoformat())  # and its ranks never began
    hours = [row.figures["device_hours"] for row in rows(tmp_path)]
    assert hours == [
        pytest.approx((2 + 1) * 4), pytest.approx(6), None, pytest.approx(2 * 4 + 1 * 1),
        pytest.approx(3 * 4 / 60), None, pytest.approx(2 * (3 + 1)),
    ]  # fmt: skip


def test_every_state_is_a_row(tmp_path: Path, new: Callable[[], Path]) -> None:
    ended(new(), "strategy=data", "nodes=2")
    owner.take(going := started(new(), "strategy=data", "nodes=2"))  # by this process
    note(going.evaluations, step=9, samples=1, validation_loss=2.0)  # of another run that follows it
    failed = ended(new(), "strategy=data", "nodes=2", outcome="failed")
    write_json(failed.failure, {"kind": "error", "line": "rank 1 on n2 failed first: no"})
    torn = started(new(), "strategy=tensor", "nodes=2")
    torn.summary.write_text('{"outcome": "comp')
    torn.timeline.write_text("[1]")
    with torn.metrics.open("a") as file:
        file.write('{"step": 5, "lo')
    foreign = ended(new(), "strategy=data", "nodes=2")
    (foreign.path / "notes.txt").write_text("mine")
    foreign.summary.write_text(
        json.dumps({"outcome": "completed", "samples_per_s": "fast", "layout": 7, "step_parts_s": [1]})
    )
    other = started(new(), "strategy=data", "nodes=2")  # its newest layout has trained nothing yet
    note(
        other.attempts, began=BEGAN.isoformat(), job_id=None, after_step=0, lost_steps=0, layout={"nodes": 1}
    )
    for name, text in (("config.yaml", "[1, 2"), ("metrics.jsonl", "no json\n")):
        path = tmp_path / "runs" / "strange"
        path.mkdir(exist_ok=True)
        (path / name).write_text(text)
    (tmp_path / "runs" / "file.txt").write_text("no run")
    found = rows(tmp_path)
    assert [row.state for row in found] == [
        "completed", "running", "failed", "broken off", "completed", "broken off", "not started",
    ]  # fmt: skip
    assert [row.figures["samples_per_s"] for row in found] == [100, 100, 100, 100, None, None, None]
    assert [row.figures["final_loss"] for row in found] == [1, 1, 1, 1, None, 1, None]
    assert found[2].notes == ["rank 1 on n2 failed first: no"]
    assert found[3].notes == [
        "can't be read: summary.json (Unterminated string starting at: line 1 column 13 (char 12))"
    ]
    assert found[4].layout_text == "replicate 2"
    assert found[5].spread.timed_steps == 0
    assert found[6].layout_text == "unknown"
    assert [timeline(row) for row in found] == [[]] * 7
    assert compare(found).cells[5][0].text == UNMEASURED
    assert scaling(found) == predictions(found) == []


@pytest.mark.parametrize("value", ["x", -7, [1], None], ids=str)
def test_no_strangers_value_ends_a_report(tmp_path: Path, new: Callable[[], Path], value: Any) -> None:
    """Each key of a summary and each table of a configuration in turn; the other rows stay as they are."""
    whole = [ended(new(), "strategy=data", f"nodes={nodes}", samples_per_s=50 * nodes) for nodes in (1, 2)]
    summary = json.loads(whole[1].summary.read_text())
    config = yaml.safe_load(whole[1].config.read_text())
    for file, values in (("summary.json", summary), ("config.yaml", config)):
        for key in values:
            path = new()
            shutil.copytree(whole[1].path, path)
            (path / file).write_text(json.dumps({**values, key: value}))
    found = rows(tmp_path)
    assert len(found) == 2 + len(summary) + len(config)
    comparison = compare(found)
    assert [cell.value for cell in comparison.cells[1][:3]] == [100.0, 0.16, 10**8]
    series = scaling(found)
    table(Gathered([], found), series)
    judged(Runs(found, series))
    predictions(found)
    (strong,) = [each for each in series if whole[0].path in {row.run.path for row in each.points[0].runs}]
    assert strong.points[1].efficiency == pytest.approx(1)


def test_runs_that_a_sweep_left_out_are_listed(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    run = ended(tmp_path / "a", "strategy=data", "nodes=2")
    create(sweep)
    write_sweep(
        sweep,
        Sweep(
            ("-m", "seed=1", "task.prompts=[a b]"), "2026-11-22T01:00:00+00:00", None,
            runs=(SweepRun(("seed=1", "nodes=2"), run.path, 2, 1),
                SweepRun(("seed=1", "nodes=4"), tmp_path / "gone", 4, 1),
            ),
            skipped=(SkippedRun(("seed=1", "nodes=3"), ("3 does not divide 16.",)),),
        ),
    )  # fmt: skip
    gathered = gather([sweep, run.path])
    assert [row.run.path for row in gathered.rows] == [run.path]
    assert gathered.commands == [("sweep", "python -m hpc_parallel.run -m seed=1 'task.prompts=[a b]'")]
    assert gathered.left_out == [
        ("nodes=3", "3 does not divide 16."), ("nodes=4", f"{tmp_path / 'gone'} is not there (any more)"),
    ]  # fmt: skip


def test_losses_of_scripts_compete_with_equal_arguments(tmp_path: Path, new: Callable[[], Path]) -> None:
    """Another rate, another model or another script has another loss: the least one is not the best."""
    runs = (({"lr": 0.1}, 1, 3.0), ({"lr": 0.2}, 1, 1.0), ({"model": "big"}, 1, 0.5), ({"lr": 0.1}, 2, 2.0))
    for arguments, nodes, loss in runs:
        folder = ended(new(), f"nodes={nodes}", final_loss=loss)
        config = folder.read_config()
        config |= {"task": {"name": "script"}, "script": config["script"] | {"arguments": arguments}}
        folder.config.write_text(yaml.safe_dump(config))
    assert best(tmp_path)["final_loss"] == [3]
    lines = [{"step": 1, "loss": 2.0, "validation_loss": 3.0}, {"step": 2, "loss": 1.0}]
    summary = summarise(folder.read_config(), outcome="completed", lines=lines, history={})
    assert (summary["final_loss"], summary["validation_loss"]) == (1.0, 3.0)


def test_labels_distinguish_runs(tmp_path: Path, new: Callable[[], Path]) -> None:
    for words in (("nodes=1",), ("nodes=2",), ("nodes=2", "strategy.bucket_mb=5"), ("nodes=2",)):
        ended(new(), "strategy=data", *words)
    ended(new(), "strategy=pipeline", "nodes=2")
    assert [row.label for row in rows(tmp_path)] == [
        "data 1 x 1", "data 2 x 1 (001)", "data 2 x 1, bucket_mb=5", "data 2 x 1 (003)", "pipeline 2 x 1",
    ]  # fmt: skip


def test_a_label_names_the_settings_that_differ_between_runs(tmp_path: Path, new: Callable[[], Path]) -> None:
    """And of a model of another class that alone, not each of its keys."""
    for count in (4, 8):
        ended(new(), "strategy=pipeline", "nodes=2", f"strategy.microbatches={count}")
    for words in ((), (), ("model=convnet", "data=digits", "training.global_batch_size=16")):
        ended(new(), "strategy=single", *words)
    assert [row.label for row in rows(tmp_path)] == [
        "pipeline 2 x 1, microbatches=4", "pipeline 2 x 1, microbatches=8", "single 1 x 1 (002)",
        "single 1 x 1 (003)", "single 1 x 1, model=ConvNet, data=DigitsData",
    ]  # fmt: skip


def test_a_label_names_a_key_that_only_some_runs_have(tmp_path: Path, new: Callable[[], Path]) -> None:
    """A key of the schema that an older run lacks has its default there, and is not named."""
    for options in ({}, {"fused": True}, {}):
        folder = ended(new(), "strategy=single")
        config = folder.read_config()
        config["optimizer"]["options"] = options
        folder.config.write_text(yaml.safe_dump(config))
    del config["training"]["clip_norm"], config["cluster"]["hang_timeout_s"]
    folder.config.write_text(yaml.safe_dump(config))
    assert [row.label for row in rows(tmp_path)] == [
        "single 1 x 1 (000)", "single 1 x 1, fused=true", "single 1 x 1 (002)"
    ]  # fmt: skip


def test_figures_of_different_scripts_are_no_rivals(tmp_path: Path, new: Callable[[], Path]) -> None:
    """Neither their losses nor their speeds: they have two panels, each with its own best."""
    for file, rate, loss in (("a.py", 100.0, 3.0), ("b.py", 900.0, 0.5), ("a.py", 300.0, 2.0)):
        folder = ended(new(), final_loss=loss, samples_per_s=rate)
        config = folder.read_config()
        config |= {"task": {"name": "script"}, "script": config["script"] | {"file": file}}
        folder.config.write_text(yaml.safe_dump(config))
    found = rows(tmp_path)
    assert [kind.title for kind in kinds(found, most=9)] == ["file=a.py", "file=b.py"]
    assert [[row.label for row in kind.rows] for kind in kinds(found, most=9)] == [
        ["data 1 x 1 (000)", "data 1 x 1 (002)"], ["data 1 x 1, file=b.py"]
    ]  # fmt: skip
    assert compare(found).settings == 2
    assert 1 not in best(tmp_path)["final_loss"] + best(tmp_path)["samples_per_s"]


def test_classes_and_their_keys_are_both_named(tmp_path: Path, new: Callable[[], Path]) -> None:
    """Also where several seeds are one line. A key that ends as another one has all its parts."""
    for name, rate, seed in product(("adamw", "sgd"), (0.1, 0.2), (1, 2)):
        words = (f"optimizer={name}", f"optimizer.learning_rate={rate}", f"seed={seed}")
        ended(new(), "strategy=single", *words, final_loss=rate + seed)
    found = rows(tmp_path)
    kinds = [f"optimizer={name}, learning_rate={rate}" for name in ("AdamW", "SGD") for rate in (0.1, 0.2)]
    assert [row.label for row in found] == [
        f"single 1 x 1, seed={seed}, {kind}" for kind in kinds for seed in (1, 2)
    ]
    assert [pool.label for pool in pools(found)] == [f"single, one device, {kind}" for kind in kinds]


def test_works_and_equal_ends_of_keys_are_told_apart(tmp_path: Path, new: Callable[[], Path]) -> None:
    runs = (("tiny", 64, 90, 20), ("moe_tiny", 64, 90, 20), ("moe_tiny", 128, 90, 10), ("tiny", 64, 70, 20))
    for model, dim, *counts in runs:
        words = [
            f"+data.{part}={{_target_:tests.datasets.Sentences,count:{count}}}"
            for part, count in zip(("dataset", "validation"), counts, strict=True)
        ]
        written(new(), "strategy=single", f"model={model}", f"model.dim={dim}", "data=dataset", *words)
    found = rows(tmp_path)
    assert [row.label for row in found] == [
        "single 1 x 1, model=Transformer",
        "single 1 x 1, model=MoeTransformer, dim=64",
        "single 1 x 1, model=MoeTransformer, dim=128, data.validation.count=10",
        "single 1 x 1, model=Transformer, data.dataset.count=70",
    ]
    assert titles_of_work([row.run for row in found]) == [
        "model=Transformer, data.dataset.count=90, data.validation.count=20",
        "model=MoeTransformer, dim=64, data.dataset.count=90 and 1 more",
        "model=MoeTransformer, dim=128, data.dataset.count=90 and 1 more",
        "model=Transformer, data.dataset.count=70, data.validation.count=20",
    ]


def verdicts(tmp_path: Path) -> dict[tuple[str, str], tuple[str, str]]:
    found = rows(tmp_path)
    return {
        (approach.strategy, claim.text): (evidence.verdict, evidence.figure)
        for approach, claims in judged(Runs(found, scaling(found)))
        for claim, evidence in claims
    }


def test_claims_are_backed_or_contradicted_by_figures(tmp_path: Path, new: Callable[[], Path]) -> None:
    assert {verdict for verdict, _ in verdicts(tmp_path).values()} == {OPEN, NO_FIGURE}
    ended(new(), "strategy=single", rank_state_bytes=state(1000))
    for nodes, rate in ((1, 100), (4, 360)):
        ended(new(), "strategy=data", f"nodes={nodes}", samples_per_s=rate,
              rank_state_bytes=state(*[1012] * nodes),
              exposed_communication_share=0.04, busiest_rank_traffic_bytes=300)  # fmt: skip
    ended(new(), "strategy=model", "nodes=4", samples_per_s=100, bubble_share=0.75,
          rank_state_bytes=state(400, 240, 240, 400))  # fmt: skip
    ended(new(), "strategy=pipeline", "nodes=4", samples_per_s=98, bubble_share=0.2)
    ended(
        new(),
        "strategy=tensor",
        "nodes=4",
        "strategy.tensor=2",
        "strategy.replicate=2",
        rank_state_bytes=state(*[500] * 4),
        exposed_communication_share=0.5,
    )
    found = verdicts(tmp_path)
    verdict, figure = found["data", "close to n times as fast on up to 8 devices"]
    assert verdict == BACKED
    assert figure.startswith("efficiency 90% on 4 devices, from 1 (strong scaling")
    assert found["data", "high communication overhead"] == (
        CONTRADICTED, "exposed communication: 4.00 % (data 4 x 1); 10 % or more would be much",
    )  # fmt: skip
    assert found["model", "trains models that one device can't hold"][0] == BACKED
    assert found["pipeline", "less idle time than layers in turn"] == (
        BACKED, "bubble: 20.0 % (pipeline 4 x 1) against 75.0 % (model 4 x 1)",
    )  # fmt: skip
    assert found["pipeline", "uses the devices well"][0] == EVEN  # 2 % apart
    assert found["data", "moves less than a parameter server does"] == (OPEN, "")
    assert found["tensor", "less memory for each device"][0] == BACKED


def test_claims_compare_seconds_of_communication_and_not_shares_of_unlike_steps(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    for strategy, step_s, share in (("data", 0.3, 0.5), ("tensor", 1.8, 0.35), ("hybrid", 0.5, 0.5)):
        ended(new(), f"strategy={strategy}", "nodes=2", step_time_s=step_s, exposed_communication_share=share)
    found = verdicts(tmp_path)
    assert found["tensor", "communicates in every layer, hidden by nothing: for fast links only"] == (
        BACKED, "exposed communication of a step: 630 ms (tensor 2 x 1) against 150 ms (data 2 x 1)",
    )  # fmt: skip
    assert found["hybrid", "least overhead"] == (
        CONTRADICTED,
        "exposed communication of a step: 250 ms (hybrid 2 x 1), best of the others 150 ms (data 2 x 1)",
    )


def test_threads_that_share_their_weights_send_the_least_for_no_merit(
    tmp_path: Path, new: Callable[[], Path]
) -> None:
    for words, sent, ranks in (
        ("dataparallel gpus_per_node=4", 10, 1), ("data nodes=4", 900, 4), ("pipeline nodes=4", 70, 4)
    ):  # fmt: skip
        folder = ended(new(), *f"strategy={words}".split(), traffic_bytes=sent, world_size=ranks)
        write_json(folder.environment, {"cuda": None})
    assert best(tmp_path)["traffic_bytes"] == [2]


def test_a_cpus_memory_backs_no_claim(tmp_path: Path, new: Callable[[], Path]) -> None:
    """Of a process it is more than of a device; on a GPU it is what was allocated."""
    for cuda, expected in (("13.0", BACKED), (None, NO_VERDICT)):
        for words, memory in (("strategy=single", 1000), ("strategy=tile nodes=4", 400)):
            images = ("model=segmenter", "data=cells")
            folder = ended(new(), *words.split(), *images, peak_memory_bytes=memory)
            write_json(folder.environment, {"cuda": cuda})
        verdict, figure = verdicts(tmp_path)["tile", "images that one device can't hold"]
        assert verdict == expected
        assert figure == "memory per device: 0.400 kB (tile 4 x 1) against 1.00 kB (single 1 x 1)"
        shutil.rmtree(tmp_path / "runs")


def test_a_prediction_is_shown_beside_the_measured_value(tmp_path: Path, new: Callable[[], Path]) -> None:
    ended(
        new(), "nodes=2", samples_per_s=50, predicted={"samples_per_s": 40.0, "latency_s": 1.0, "layout": {}}
    )
    ended(new(), "nodes=2")
    found = [(each.key, each.predicted, each.measured, each.ratio) for each in predictions(rows(tmp_path))]
    assert found == [("samples_per_s", 40.0, 50, 1.25), ("latency_s", 1.0, None, None)]


def test_a_timeline_is_read_by_rank(tmp_path: Path) -> None:
    folder: RunFolder = ended(tmp_path / "runs" / "a", "strategy=pipeline", "nodes=2")
    chunk = [0.0, 0.5, 1, "forward", 0]
    ranks = [{"rank": 1, "length_s": 1.0, "chunks": [chunk]}, {"rank": 0, "length_s": 1.0, "chunks": []}]
    write_json(folder.timeline, {"ranks": ranks})
    assert timeline(rows(tmp_path)[0]) == [
        RankTimeline(0, 1.0, ()), RankTimeline(1, 1.0, (StageWork(0.0, 0.5, 1, "forward", 0),))
    ]  # fmt: skip
    write_json(
        folder.timeline, {"ranks": [{"rank": 0, "length_s": 1.0, "chunks": [[1, 0, 0, "forward", 0]]}]}
    )
    assert timeline(rows(tmp_path)[0]) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (123.4, "123"),
        (1234.0, "1230"),
        (0.012345, "0.0123"),
        (9.996, "10.0"),
        (1e-7, "0.000000100"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert digits(value, 3) == text


def test_one_unit_for_a_column() -> None:
    assert [unit_of("seconds", [0.2, 0.003]).show(value) for value in (0.2, 0.003, None)] == [
        "200", "3.00", UNMEASURED,
    ]  # fmt: skip
    assert unit_of("bytes", [3e9, 5e6]).name == "GB"
    assert unit_of("seconds", [None]).name == "s"
