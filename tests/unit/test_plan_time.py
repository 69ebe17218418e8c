"""Plans of the time of a step: closed forms of pipelines, measured iterations, groups of ranks."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.config.site_schema import MachineConfig
from hpc_parallel.layout.exchanges import groups_over
from hpc_parallel.layout.holdings import Setup
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.layout.model_weights import weights_of
from hpc_parallel.planning import memory
from hpc_parallel.planning.collective_times import (
    GroupExchange,
    GroupShape,
    bus_bytes_per_s,
    with_measured_links,
)
from hpc_parallel.planning.hardware import hardware_names, read_hardware
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, WEIGHTS, Pipeline, Span, orders, simulate
from hpc_parallel.planning.planned_state import Division
from hpc_parallel.planning.step_time import StepTime, step_time
from hpc_parallel.planning.work import work_of_run
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.metrics_file import size
from tests.benchmarks import plan_table
from tests.benchmarks.calibrate_plan import FOLDERS, HOPPER, NAME, TABLE, errors, good_choices, sample
from tests.benchmarks.plan_table import COLUMNS, plan_row, read_rows, read_table
from tests.composed import composed

ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv", "dualpipev")
SHAPES = [(2, 4), (4, 8), (4, 16), (8, 32)]


def bubble(schedule: str, *, ranks: int, microbatches: int, per_rank: int) -> float:
    """With forward, input and weight gradients that take the same time on a rank, and free links."""
    costs = {FORWARD: 1.0, BACKWARD: 1.0, WEIGHTS: 1.0}
    if schedule not in ZERO_BUBBLE:
        costs = {FORWARD: 1.0, BACKWARD: 2.0, WEIGHTS: 0.0}
    pipeline = Pipeline(schedule, ranks, microbatches, per_rank)
    return simulate(pipeline, action_s=lambda kind, stage: costs[kind] / per_rank).bubble_share


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_bubbles_equal_the_closed_forms(ranks: int, microbatches: int) -> None:
    def exact(value: float) -> object:
        return pytest.approx(value, abs=1e-9)

    for schedule in ("gpipe", "1f1b"):  # Huang et al. 2019
        share = bubble(schedule, ranks=ranks, microbatches=microbatches, per_rank=1)
        assert share == exact((ranks - 1) / (microbatches + ranks - 1))
    for per_rank in (2, 4):  # Narayanan et al. 2021
        for schedule in ("interleaved", "looped_bfs"):
            share = bubble(schedule, ranks=ranks, microbatches=microbatches, per_rank=per_rank)
            assert share == exact((ranks - 1) / (per_rank * microbatches + ranks - 1))
    for schedule in ZERO_BUBBLE:  # one action of half a rank's layers for each rank before the last
        share = bubble(schedule, ranks=ranks, microbatches=microbatches, per_rank=2)
        assert share == exact((ranks - 1) / (6 * microbatches + ranks - 1))
    share = bubble("naive", ranks=ranks, microbatches=microbatches, per_rank=1)
    assert share == exact((ranks - 1) / ranks)


def test_uneven_stages_and_transfers_delay_a_pipeline() -> None:
    """Two stages, two microbatches, by hand: F0 F0 | F1 B1 F1 B1 | B0 B0 with 1 and 3 s, and 0.5 s links."""
    spans: list[Span] = []
    times = simulate(
        Pipeline("1f1b", 2, 2),
        action_s=lambda kind, stage: (1.0, 3.0)[stage],
        transfer_s=lambda source, target: 0.5,
        spans=spans,
    )
    ends = {
        rank: [(one.start_s, one.end_s) for one in spans if one.rank == rank and one.end_s > one.start_s]
        for rank in (0, 1)
    }
    assert ends[1] == [(1.5, 4.5), (4.5, 7.5), (7.5, 10.5), (10.5, 13.5)]
    assert ends[0][:2] == [(0.0, 1.0), (1.0, 2.0)]
    assert ends[0][-1] == (14.0, 15.0)
    assert max(span.end_s for span in spans) == times.total_s == 15.0
    assert times.busy_s == pytest.approx((4.0, 12.0), abs=1e-9)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "looped_bfs", *ZERO_BUBBLE])
def test_every_stage_runs_every_microbatch_once(schedule: str) -> None:
    per_rank = 1 if schedule in ("naive", "gpipe", "1f1b") else 2
    pipeline = Pipeline(schedule, 4, 8, per_rank)
    kinds = (FORWARD, BACKWARD, WEIGHTS) if schedule in ZERO_BUBBLE else (FORWARD, BACKWARD)
    actions = [action for order in orders(pipeline) for action in order]
    expected = {(kind, stage, m) for kind in kinds for stage in range(pipeline.stages) for m in range(8)}
    assert set(actions) == expected
    assert len(actions) == len(expected)


def test_a_stage_of_1f1b_keeps_as_many_microbatches_as_stages_follow() -> None:
    for rank, order in enumerate(orders(Pipeline("1f1b", 4, 8))):
        live = list(accumulate(1 if kind is FORWARD else -1 for kind, _, _ in order))
        assert max(live) == 4 - rank  # Narayanan et al. 2021
        assert live[-1] == 0


@pytest.mark.parametrize(("pipeline", "replicate", "tensor"), [(2, 4, 2), (4, 2, 8), (1, 4, 16), (2, 8, 1)])
def test_groups_are_those_of_the_layout(pipeline: int, replicate: int, tensor: int) -> None:
    layout = Layout(pipeline=pipeline, replicate=replicate, tensor=tensor)
    setup = Setup(StrategyConfig(name="own"), layout)
    nodes = 8  # devices a node
    for axis, stride in (("tensor", 1), ("replicate", tensor), ("pipeline", tensor * replicate)):
        group = GroupShape(layout.degrees[axis], stride, nodes)
        groups = groups_over(setup, axis)
        for ranks in groups:
            hosts = [rank // nodes for rank in ranks]
            assert group.nodes == len(set(hosts))
            assert group.local == max(map(hosts.count, hosts))
        if groups and group.nodes > 1:
            assert group.sharing == sum(any(rank < nodes for rank in ranks) for ranks in groups)


@pytest.mark.parametrize(("pipeline", "tensor"), [(8, 1), (4, 2), (2, 4), (16, 1)])
def test_the_ends_of_a_pipeline_share_a_node_if_the_layout_fits(pipeline: int, tensor: int) -> None:
    """Strides of 7, 6 and 4 of 8 devices; 15 of 8 does not fit."""
    stride = tensor * (pipeline - 1)
    group = GroupShape(2, stride, 8)
    assert group.nodes == len({0, stride // 8})
    assert group.local == 3 - group.nodes


def test_plans_of_rows_that_calibration_did_not_see() -> None:
    """vTrain, which profiles each kernel, has 8.37 % and 14.73 %. Best layouts: 93 of 99."""
    rows, hardware = read_table(TABLE), read_hardware(NAME, folders=FOLDERS)
    seen = set(sample(rows))
    planned = errors([row for at, row in enumerate(rows) if at not in seen], hardware)
    one = [abs(error) for row, error in planned if int(row["gpus"]) <= 8]
    several = [abs(error) for row, error in planned if int(row["gpus"]) > 8]
    assert len(seen) == 100
    assert len(one) + len(several) == 411
    assert sum(one) / len(one) <= 0.08
    assert sum(several) / len(several) <= 0.12
    good, groups = good_choices(planned)
    assert groups > 90
    assert good / groups >= 0.9


@pytest.mark.processes
def test_the_script_adds_a_column(tmp_path: Path) -> None:
    output = tmp_path / "planned.csv"
    words = [plan_table.__file__, str(TABLE), "--output", str(output), f"hardware={NAME}"]
    subprocess.run([sys.executable, *words], check=True)
    with output.open() as stream:
        planned = list(csv.DictReader(stream))
    with TABLE.open() as stream:
        rows = list(csv.DictReader(stream))
    assert [{key: row[key] for key in rows[0]} for row in planned] == rows
    hardware = read_hardware(NAME, folders=FOLDERS)
    assert float(planned[7]["planned_ms"]) == pytest.approx(
        1e3 * plan_row(rows[7], hardware).total_s, abs=1e-5
    )


def test_the_explained_parts_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "model=124m", "--explain", f"hardware={NAME}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = next(line for line in lines if " step = " in line)
    parts = total.partition(" = ")[2].partition(" (")[0]
    assert sum(map(float, parts.split(" + "))) == pytest.approx(float(total.split()[0]), abs=1e-3)
    assert any("feed-forward up = max(2 x " in line for line in lines)


def test_all_problems_of_a_table_at_once() -> None:
    right, several = "2,16,1,1024,16,12,1024,2,1,1", "8,16,1,1024,16,12,1024,2,2,1"
    rows = [",".join(COLUMNS), several, "x,8,3,1024,16,12,1024,1,2,1", "2,8,3,1024,16,12,9,1,2,1", "",
            f"{right},7", right]  # fmt: skip
    with pytest.raises(ConfigError) as refused:
        read_rows("\n".join(rows), name="rows.csv")
    assert list(map(str, refused.value.problems)) == [
        "rows.csv:2: tensor x data x pipeline = 4, but gpus = 8.",
        "rows.csv:3: gpus = 'x' is not a positive integer.",
        "rows.csv:4: data x micro_batch = 6 does not divide global_batch = 8.",
        "rows.csv:6: there are 11 values, more than the 10 columns.",
    ]
    with pytest.raises(ConfigError, match=re.escape("rows.csv:3: field larger than field limit")):
        read_rows(f"{rows[0]}\n{right}\n{'9' * 200_000}", name="rows.csv")


@pytest.mark.parametrize("name", hardware_names(FOLDERS))
def test_hardware_files_are_complete(name: str) -> None:
    hardware = read_hardware(name, folders=FOLDERS)
    assert hardware.products.peak_share < 1
    assert hardware.device.peak_flops


def test_a_file_does_not_inherit_a_calibration(tmp_path: Path) -> None:
    """A machine with other peaks is not the one that was measured, also two files away."""
    (tmp_path / "mine.yaml").write_text(f"extends: {NAME}\ndevice: {{memory_bytes: 9.0e+10}}\n")
    (tmp_path / "fitted.yaml").write_text("extends: mine\ncalibration: by hand\n")
    folders = [tmp_path, *FOLDERS]
    assert read_hardware(NAME, folders=folders).calibration is not None
    assert read_hardware("mine", folders=folders).calibration is None
    assert read_hardware("fitted", folders=folders).calibration == "by hand"
    calibrated = [
        name for name in hardware_names(FOLDERS) if read_hardware(name, folders=FOLDERS).calibration
    ]
    assert calibrated == [NAME, HOPPER["h200"]]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The figures of a plan by their names."""
    assert command(["plan", f"hardware={NAME}", "data.sequence_length=1024", *words]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    return dict((part.strip() for part in line.split("  ", maxsplit=1)) for line in lines)


def test_figures_of_a_configuration_fit_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("strategy=data", "model=124m", "gpus_per_node=8", "training.global_batch_size=64")
    figures = planned(capsys, *words, "--tokens", "1e9")
    step_s = float(figures["step time"].removesuffix(" s"))
    tokens_per_s = float(figures["tokens/s"].replace(",", ""))
    assert tokens_per_s == pytest.approx(64 * 1024 / step_s, rel=1e-3)
    # 12 blocks of 4 x 768^2 + 3 x 768 x 2048 weights and a head of 50257 x 768; scores: 4 x 512.5 x 768
    weights = 12 * (4 * 768**2 + 3 * 768 * 2048) + 50257 * 768
    flops = 3 * (2 * weights + 12 * 4 * 512.5 * 768) * tokens_per_s
    assert float(figures["model FLOP utilisation"].removesuffix(" %")) == pytest.approx(
        100 * flops / (8 * 312e12), abs=0.06
    )
    hours = float(
        figures["to 1e+09 tokens"].partition(", ")[2].removesuffix(" device-hours").replace(",", "")
    )
    assert hours == pytest.approx(8 * 1e9 / tokens_per_s / 3600, abs=0.51)
    assert figures["bubble"] == "0.0 %"


def step_of(*words: str) -> StepTime:
    """The step of a run on A100s with 8 devices a node."""
    config, *_ = resolve(composed("device=cuda", "data.sequence_length=1024", *words))
    return step_time(work_of_run(config), read_hardware(NAME, folders=FOLDERS))


def bytes_of(step: StepTime, name: str) -> float:
    """What a term of a plan moves or sends; 0 if the plan does not have it."""
    formulas = (term.formula for term in step.terms if term.name == name)
    found = re.search(r"([\d.e+]+) B\b", next(formulas, "0 B"))
    return float(found[1])


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=single", "gpus_per_node=1"),
        ("strategy=data", "gpus_per_node=8"),
        ("strategy=fsdp", "gpus_per_node=8"),
        ("strategy=pipeline", "gpus_per_node=4", "strategy.schedule=zbv", "strategy.microbatches=8"),
    ],
)
def test_each_term_is_there_once(words: tuple[str, ...]) -> None:
    step = step_of("model=124m", "training.global_batch_size=64", *words)
    names = [term.name for term in step.terms if "sum of gradients" not in term.name]
    assert sorted(names) == sorted(set(names))
    sent = {"mean of gradients", "gradients of a step"}.intersection(names)
    assert ("exposed gradients" in names) == bool(sent)


def test_a_head_of_its_own_is_updated_and_sent_but_not_summed() -> None:
    """8b: a vocabulary of 128,256 and a width of 4,096, in bfloat16, gradients in float32."""
    end = 128256 * 4096
    pipeline = ("model=8b", "gpus_per_node=8", "training.global_batch_size=64", "strategy=pipeline")
    shared = "gradient of the shared weight"
    assert bytes_of(step_of(*pipeline), shared) == 0
    tied = bytes_of(step_of(*pipeline, "model.tied_head=true"), shared)
    assert tied == pytest.approx(4 * end, rel=1e-3)
    v_shaped = ("strategy.schedule=zbv", "strategy.microbatches=16")
    assert bytes_of(step_of(*pipeline, *v_shaped, "model.tied_head=true"), shared) == 0  # on one device
    data = ("model=8b", "gpus_per_node=8", "training.global_batch_size=64", "strategy=fsdp")
    assert bytes_of(step_of(*data), "weights of a step") == pytest.approx(2 * 2 * end, rel=1e-3)
    tied = bytes_of(step_of(*data, "model.tied_head=true"), "weights of a step")
    assert tied == pytest.approx(2 * end, rel=1e-3)
    optimizer_bytes = read_hardware(NAME, folders=FOLDERS).traffic.optimizer_bytes
    update = bytes_of(step_of(*data), "update") - bytes_of(step_of(*data, "model.tied_head=true"), "update")
    assert update == pytest.approx(optimizer_bytes * end / 8, rel=1e-2)


@pytest.mark.parametrize(
    ("precision", "number", "stream", "gradient"),
    [("bfloat16", 2, 2, 4), ("float16", 2, 4, 4), ("float32", 4, 4, 4), ("float64", 8, 8, 8)],
)
def test_bytes_are_those_of_the_precision(precision: str, number: int, stream: int, gradient: int) -> None:
    """Without fully_shard, autocast with float16 leaves what passes between stages in float32."""
    words = ("model=8b", "gpus_per_node=8", "training.global_batch_size=64", "training.microbatch_size=1",
             f"training.precision={precision}")  # fmt: skip
    end, hidden, block = 128256 * 4096, 1024 * 4096, 4096**2 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    sharded = step_of("strategy=fsdp", *words)
    assert bytes_of(sharded, "weights of a block") == pytest.approx(number * block, rel=1e-3)
    assert bytes_of(sharded, "gradients of a block") == pytest.approx(gradient * block, rel=1e-3)
    of_step = 8 * number * 2 * end  # the ends are gathered for each of the 8 microbatches
    assert bytes_of(sharded, "weights of a step") == pytest.approx(of_step, rel=1e-3)
    down = number * (1024 * (4096 + 14336) + 4096 * 14336)
    assert bytes_of(sharded, "block forward: feed-forward down") == pytest.approx(down, rel=1e-3)
    pipeline = step_of("strategy=pipeline", *words)
    assert bytes_of(pipeline, "send from stage 0") == pytest.approx(stream * hidden, rel=1e-3)
    tensor = step_of("strategy=tensor", *words)
    assert bytes_of(tensor, "sum over the tensor axis") == pytest.approx(number * hidden, rel=1e-3)


def test_a_stage_sends_its_part_of_a_sequence_and_nothing_is_gathered() -> None:
    """The next stage begins with the part that it gets. Without sequence_parallel it gets all."""
    words = ("strategy=hybrid", "model=8b", "gpus_per_node=8", "strategy.pipeline=2", "strategy.tensor=4",
             "strategy.shard=1", "training.global_batch_size=8", "training.microbatch_size=1",
             "training.precision=bfloat16")  # fmt: skip
    send, hidden = read_hardware(NAME, folders=FOLDERS).node.send, 2 * 1024 * 4096
    for sequence_parallel, sent in ((True, hidden / 4), (False, hidden)):
        step = step_of(*words, f"strategy.sequence_parallel={sequence_parallel}")
        assert bytes_of(step, "send from stage 0") == pytest.approx(sent, rel=1e-3)
        (seconds,) = (term.seconds for term in step.terms if term.name == "send from stage 0")
        assert seconds == pytest.approx(send.latency_s + sent / send.bytes_per_s)


def test_measured_links_take_the_place_of_the_files() -> None:
    """A profile of 8 ranks in a node and of 4 nodes; each link keeps what the profile lacks."""
    fit = {"latency_s": 140e-6, "bandwidth_bytes_per_s": 5e10, "fit_error": 0.0}
    inside = {"ranks": 8, "all_reduce": fit}
    across = {"ranks": 4, "all_reduce": {**fit, "latency_s": 60e-6, "bandwidth_bytes_per_s": 2e9}}
    hardware = read_hardware(NAME, folders=FOLDERS)
    machine = MachineConfig(collectives={"inside a node": inside, "across nodes": across})
    found, measured = with_measured_links(hardware, machine)
    assert measured == ["all_reduce inside a node", "all_reduce across nodes"]
    assert (found.node.collective.latency_s, found.node.collective.bytes_per_s) == pytest.approx(
        (10e-6, 5e10)
    )
    assert found.node.send == hardware.node.send
    for group, expected in (
        (GroupShape(8, 1, 8), 140e-6),
        (GroupShape(4, 8, 8), 60e-6),
    ):  # as the profile has them
        exchange = GroupExchange("sum", "all_reduce", 0, group)
        assert exchange.seconds(found) == pytest.approx(expected)
    one_of_eight = GroupShape(4, 8, 8)  # groups that work at the same time, as in the profile
    assert bus_bytes_per_s(one_of_eight, found) == pytest.approx(2e9)
    across_s = GroupExchange("sum", "all_reduce", 2e9, one_of_eight).seconds(found)
    assert across_s == pytest.approx(60e-6 + 1.5)
    assert with_measured_links(hardware, MachineConfig()) == (hardware, [])


def test_the_memory_is_that_of_the_fullest_device(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("strategy=data", "model=8b", "gpus_per_node=8", "training.global_batch_size=8",
             "data.sequence_length=1024")  # fmt: skip
    config, *_ = resolve(composed(*words, "device=cuda"))
    found = memory.plan(config)
    assert planned(capsys, *words)["memory, estimate"] == (
        f"{size(found.fullest.total)} of 74.5 GiB: may not fit"
    )
    weights = 4 * found.fullest.kinds["parameters"]  # with gradients and both moments of AdamW
    assert found.fullest.total > weights > 74.51 * 2**30
    sharded = (*words, "strategy=fsdp")
    assert planned(capsys, *sharded)["memory, estimate"].endswith(" of 74.5 GiB: fits")
    compiled = planned(capsys, *sharded, "training.compile=true")["memory, estimate"]
    assert compiled.endswith(
        " of 74.5 GiB: fits (activations are those of eager mode; compiled blocks keep others, mostly fewer)"
    )


def test_layouts_change_a_plan_as_they_must(capsys: pytest.CaptureFixture[str]) -> None:
    def step_s(*words: str) -> float:
        figures = planned(capsys, "model=1b", "training.global_batch_size=64", *words)
        return float(figures["step time"].removesuffix(" s"))

    one = step_s("strategy=data", "gpus_per_node=1", "training.microbatch_size=4")
    eight = step_s("strategy=data", "gpus_per_node=8", "training.microbatch_size=4")
    assert one / 8 < eight < one / 6
    recomputed = step_s(
        "strategy=data",
        "gpus_per_node=8",
        "training.microbatch_size=4",
        "training.activation_checkpointing=full",
    )
    assert 1.15 * eight < recomputed < 1.4 * eight
    few = step_s("strategy=pipeline", "gpus_per_node=4", "strategy.microbatches=4")
    many = step_s("strategy=pipeline", "gpus_per_node=4", "strategy.microbatches=16")
    assert many < few
    inside = step_s("strategy=tensor", "gpus_per_node=8")
    across = step_s("strategy=tensor", "gpus_per_node=4", "nodes=2", "strategy.tensor=8")
    assert across > 1.1 * inside


def test_a_wrong_number_of_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", f"hardware={NAME}", "model=124m", "--explain", "--tokens", "-1"]) == 2
    assert "--tokens -1 is not a positive number. Try --tokens 1e+12." in capsys.readouterr().err


def test_the_kind_of_a_device_is_in_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that extends cpu is planned in the precision of runs on CPUs."""
    (tmp_path / "hardware").mkdir()
    file = tmp_path / "hardware" / "mine.yaml"
    words = ["plan", "hardware=mine", "--config-dir", str(tmp_path), "strategy=single"]
    file.write_text("extends: cpu\n")
    assert command(words) == 0
    assert "on 1 x CPU core, float32" in capsys.readouterr().out
    file.write_text("extends: cpu\ndevice: {kind: gpu, name: 3}\nnode: {devices: 0.5}\n")
    assert command(words) == 2
    message = capsys.readouterr().err
    assert "mine.yaml: device: kind = 'gpu' is none of cuda, cpu. Try kind: cuda." in message
    assert "mine.yaml: device: name = 3 is not a text." in message
    assert "mine.yaml: node: devices = 0.5 is not a whole number. Try devices: 1." in message


def test_what_is_not_planned_is_refused_together(capsys: pytest.CaptureFixture[str]) -> None:
    tiles = ("model=segmenter", "data=cells", "data.height=128", "strategy=tile")
    assert command(["plan", f"hardware={NAME}", *tiles, "gpus_per_node=16", "task=infer"]) == 2
    message = capsys.readouterr().err
    assert "task = infer is not planned, only training is. Try task=train." in message
    assert "strategy.tile = 16 is not planned yet. Try strategy.tile=1." in message
    assert "convnet.Segmenter is not planned, only the reference decoders are" in message
    assert "gpus_per_node = 16 is more than the hardware's 8. Try gpus_per_node=8." in message


@pytest.mark.parametrize(
    ("words", "blocks"),
    [
        ([], (1, 4, 5, 5, 5, 5, 5, 2)),
        (["strategy.balance=parameters"], (1, 4, 5, 5, 5, 5, 5, 2)),
        (["strategy.cuts=[1,2,3,4,5,6,7]"], (1, 1, 1, 1, 1, 1, 1, 25)),
        (
            ["strategy.schedule=interleaved", "strategy.stages_per_rank=2"],
            (1, 1, 1, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 1),
        ),
    ],
)
def test_stages_have_the_blocks_of_the_run(words: list[str], blocks: tuple[int, ...]) -> None:
    """As `divide_blocks` cuts 32 blocks for the run and for the plan of its memory."""
    config, *_ = resolve(composed("model=8b", "strategy=pipeline", "gpus_per_node=8", "device=cuda",
                                 "data.sequence_length=8192", *words))  # fmt: skip
    model = weights_of(config.model, sample_shape=(8192,))
    assert model is not None
    division = Division(config, layout_of(config.strategy, devices=8), model)
    assert work_of_run(config).blocks == blocks == tuple(len(stage) for stage in division.blocks)


def test_an_update_takes_as_long_as_that_of_the_largest_stage() -> None:
    """25 blocks and a head of its own, against 18 blocks and the head."""
    words = ("model=8b", "strategy=pipeline", "gpus_per_node=8", "training.global_batch_size=64")
    block, end = 4096**2 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 128256 * 4096
    moved = [bytes_of(step_of(*words, f"strategy.cuts=[1,2,3,4,5,6,{last}]"), "update") for last in (7, 14)]
    assert moved[0] / moved[1] == pytest.approx((25 * block + end) / (18 * block + end), rel=1e-3)


@pytest.mark.parametrize(("split", "repeated"), [(True, 1.5), (False, 1.0)])
def test_recomputation_stops_before_the_last_sum(split: bool, repeated: float) -> None:
    """As the collectives of a traced rank."""
    words = ("strategy=tensor", "gpus_per_node=2", "training.global_batch_size=4",
             "training.microbatch_size=2", f"strategy.sequence_parallel={split}")  # fmt: skip
    without, full = (
        step_of(*words, f"training.activation_checkpointing={mode}") for mode in ("none", "full")
    )
    sums = {term.name: term.seconds for term in full.terms}["sum over the tensor axis"]
    blocks, microbatches = 4, 2
    longer_s = full.exposed_s - without.exposed_s
    assert longer_s == pytest.approx(repeated * blocks * microbatches * sums)


def test_both_halves_of_a_split_backward_pass_recompute() -> None:
    def again_s(schedule: str) -> float:
        words = ("model=8b", "data.sequence_length=4096", "strategy=pipeline", "gpus_per_node=2",
                 f"strategy.schedule={schedule}")  # fmt: skip
        none, full = (
            step_of(*words, f"training.activation_checkpointing={mode}").timeline for mode in ("none", "full")
        )
        return sum(full.busy_s) - sum(none.busy_s)

    assert again_s("zbv") == pytest.approx(2 * again_s("interleaved"), rel=1e-3)
