"""The search for the best layout: against all layouts one by one, and against what `run` accepts."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.planning import memory
from hpc_parallel.planning import search as planning_search
from hpc_parallel.planning.auto_strategy import ask
from hpc_parallel.planning.hardware import Hardware, read_hardware
from hpc_parallel.planning.layouts import AXES, Choices, Split, split_of
from hpc_parallel.planning.ranking import advantage, limit, parts_s
from hpc_parallel.planning.search import Candidate, search
from hpc_parallel.planning.step_time import StepTerms, step_time
from hpc_parallel.planning.work import work_of_run
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed, prepared
from tests.marks import in_full

H100 = "h100_sxm_node8_3200gbit"
SMALL = (
    "strategy=auto", "nodes=2", "gpus_per_node=4", "model=tiny", "model.layers=4", "data.sequence_length=512",
    "training.global_batch_size=16", f"plan.hardware={H100}",
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")


def asked(*words: str, room: float | None = None) -> tuple[RunConfig, Hardware, Choices]:
    """What a search is asked. room: bytes of a device, in place of the file's."""
    question = ask(composed(*words), words, user_folder=None)
    hardware = question.hardware
    if room is not None:
        hardware = replace(hardware, device=replace(hardware.device, memory_bytes=room))
    return question.config, hardware, question.choices


@cache
def every_way() -> list[tuple[RunConfig, int, float]]:
    """All that `run` accepts for SMALL, with bytes of the fullest device and seconds of a step."""
    config, hardware, _ = asked(*SMALL)
    ways = []
    devices, batch = config.devices, config.training.global_batch_size
    samples = [size for size in range(1, batch + 1) if batch % size == 0]  # the checks refuse all others
    for degrees in itertools.product(range(1, devices + 1), repeat=len(AXES)):
        if math.prod(degrees) != devices or degrees[AXES.index("tensor")] > config.gpus_per_node:
            continue
        chosen = dict(zip(AXES, degrees, strict=True))
        for schedule in SCHEDULES if chosen["pipeline"] > 1 else ("1f1b",):
            for size, mode in itertools.product(samples, ("none", "full")):
                strategy = replace(config.strategy, schedule=schedule, **chosen)
                training = replace(config.training, microbatch_size=size, activation_checkpointing=mode)
                ways.append(replace(config, strategy=strategy, training=training))
    legal = [way for way in ways if not find_problems(way)]
    plans = map(memory.plan, legal)
    steps = [step_time(work_of_run(way), hardware).total_s for way in legal]
    totals = [plan.fullest.total for plan in plans if plan is not None]
    return list(zip(legal, totals, steps, strict=True))


@pytest.mark.parametrize("share", [1.0, 0.3, 0.05])
def test_the_pruned_search_finds_what_a_search_of_everything_finds(share: float) -> None:
    """share: of all ways that fit in the device's memory."""
    totals = sorted(total for _, total, _ in every_way())
    room = totals[int(share * (len(totals) - 1))]
    fastest: dict[Split, float] = {}
    for way, total, step_s in every_way():
        layout = layout_of(way.strategy, devices=way.devices)
        key = split_of(layout)
        if total <= room:
            fastest[key] = min(fastest.get(key, math.inf), step_s)
    config, hardware, choices = asked(*SMALL, room=room)
    found = search(config, hardware, choices=choices, most=6).best
    assert len(found) == min(6, len(fastest))
    assert len(found) > 1
    expected = sorted(fastest.values())[: len(found)]
    assert [one.step.total_s for one in found] == pytest.approx(expected, rel=1e-12)
    for one in found:
        assert one.step.total_s == step_time(work_of_run(one.config), hardware).total_s
        assert one.memory.fullest.total <= room


def test_memory_changes_the_choice() -> None:
    """Otherwise the test above would compare the same search three times."""
    totals = sorted(total for _, total, _ in every_way())
    found = [
        search(*asked(*SMALL, room=room)[:2], choices=Choices(), most=1).best[0].overrides
        for room in (totals[-1], totals[len(totals) // 20])
    ]
    assert found[0] != found[1]


def test_a_search_on_shared_cores_finds_what_a_search_of_everything_finds() -> None:
    """There a rank of a pipeline is fast while others wait, so deep pipelines are among the fastest."""
    config, hardware, choices = asked(*SMALL, "device=cpu", "plan.hardware=cpu", room=math.inf)
    hardware = replace(hardware, shared_cores=2)
    fastest: dict[Split, float] = {}
    for way, _, _ in every_way():
        batch = {key: getattr(way.training, key) for key in ("microbatch_size", "activation_checkpointing")}
        run = replace(config, strategy=way.strategy, training=replace(config.training, **batch))
        key = split_of(layout_of(way.strategy, devices=way.devices))
        fastest[key] = min(fastest.get(key, math.inf), step_time(work_of_run(run), hardware).total_s)
    found = search(config, hardware, choices=choices, most=8).best
    expected = sorted(fastest.values())[:8]
    assert [one.step.total_s for one in found] == pytest.approx(expected, rel=1e-12)
    assert found[0].layout.pipeline == 4


def test_long_sequences_are_split_over_more_devices_than_there_are_samples() -> None:
    words = ("strategy=auto", "model=8b", "nodes=2", "gpus_per_node=8", "data.sequence_length=131072",
             "training.global_batch_size=4", f"plan.hardware={H100}")  # fmt: skip
    found = search(*asked(*words)[:2], choices=Choices(), most=1).best[0]
    assert found.layout.context * found.layout.tensor * found.layout.pipeline >= 4
    assert found.layout.context > 1
    kept = asked(*words, "strategy.context=1")
    assert {one.layout.context for one in search(*kept[:2], choices=kept[2], most=3).best} == {1}


@pytest.mark.parametrize(
    "words",
    [
        ("model=70b", "nodes=64", "gpus_per_node=8", f"plan.hardware={H100}"),
        ("model=8b", "nodes=4", "gpus_per_node=8", "training.global_batch_size=64", f"plan.hardware={H100}"),
        ("model=124m", "nodes=4", "gpus_per_node=2", "training.global_batch_size=64", "device=cpu",
         "plan.hardware=cpu"),
    ],
)  # fmt: skip
def test_what_is_next_is_never_faster_than_its_bound(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the bounds that leave the queue, each looked at more closely than the one before, only grow."""
    left: list[float] = []

    def pop(queue: list[Any]) -> Any:
        entry = heapq.heappop(queue)
        left.append(entry.bound_s)
        return entry

    queues = SimpleNamespace(heapify=heapq.heapify, heappush=heapq.heappush, heappop=pop)
    monkeypatch.setattr(planning_search, "heapq", queues)
    found = search(*asked("strategy=auto", *words)[:2], choices=Choices(), most=6)
    assert len(found.best) == 6
    assert len(left) > 100
    assert all(bound_s >= before_s * (1 - 1e-12) for before_s, bound_s in pairwise(left))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("microbatches", [8, 16])
def test_a_bound_is_never_above_the_simulated_step(schedule: str, microbatches: int) -> None:
    words = (
        "strategy=pipeline", "strategy.pipeline=4", f"strategy.schedule={schedule}", "device=cuda",
        f"strategy.microbatches={microbatches}", "training.global_batch_size=16", "gpus_per_node=4",
        "model=124m", "data.sequence_length=512",
    )  # fmt: skip
    config, *_ = resolve(composed(*words))
    step = StepTerms(work_of_run(config), read_hardware(H100, folders=FOLDERS))
    bound_s, simulated_s = step.least_s(), step.result().total_s
    assert bound_s <= simulated_s * (1 + 1e-12)
    assert bound_s > 0.85 * simulated_s


def test_the_bound_is_exact_where_the_last_stage_is_the_longest() -> None:
    """1F1B takes all stages and links once and the longest m - 1 times more (Narayanan et al. 2021)."""
    words = (
        "strategy=pipeline", "strategy.pipeline=4", "strategy.microbatches=8", "gpus_per_node=4",
        "training.global_batch_size=8", "device=cuda", "model=124m", "data.sequence_length=512",
    )  # fmt: skip
    work = replace(work_of_run(resolve(composed(*words))[0]), blocks=(2, 2, 2, 6))
    step = StepTerms(work, read_hardware(H100, folders=FOLDERS))
    result = step.result()
    longest_s = result.timeline.busy_s[-1] / 8
    assert longest_s == max(result.timeline.busy_s) / 8
    links_s = sum(term.seconds for term in result.terms if term.name.startswith("send from stage"))
    closed_s = step.microbatch_s() + 2 * links_s + 7 * longest_s
    assert links_s > 0
    assert step.least_s() == pytest.approx(closed_s + result.gradients_s + result.update_s, rel=1e-12)


@pytest.mark.parametrize(
    "words",
    [
        SMALL,
        (*SMALL, "nodes=1", "gpus_per_node=6", "training.global_batch_size=48"),
        (*SMALL, "strategy.gradient_compression=bfloat16", "strategy.shard=1"),  # not with every schedule
        ("strategy=auto", "model=1b", "nodes=4", "gpus_per_node=8", f"plan.hardware={H100}"),
        (*SMALL, "training.global_batch_size=1"),  # strategy=context among others
        (*SMALL, "training.global_batch_size=2", "strategy.context_attention=all_to_all"),  # four heads
        *in_full([(("strategy=auto", "model=70b", "nodes=16", "gpus_per_node=8", f"plan.hardware={H100}"),)]),
    ],
)
def test_a_run_accepts_what_is_proposed_and_composes_the_same(words: tuple[str, ...]) -> None:
    config, hardware, choices = asked(*words)
    others = [word for word in words if word != "strategy=auto" and "batch_size" not in word]
    found = search(config, hardware, choices=choices, most=5).best
    assert len(found) >= 3
    for candidate in found:
        run = prepared(*others, *candidate.overrides, "dry_run=true")
        assert run.plan.layout == candidate.layout
        assert run.config.strategy == candidate.config.strategy
        for key in ("global_batch_size", "microbatch_size", "activation_checkpointing"):
            assert getattr(run.config.training, key) == getattr(candidate.config.training, key)


def test_what_is_set_is_kept() -> None:
    words = (*SMALL, "strategy.pipeline=2", "strategy.schedule=gpipe", "training.microbatch_size=2")
    config, hardware, choices = asked(*words, "training.activation_checkpointing=none")
    found = search(config, hardware, choices=choices, most=20).best
    assert found
    for candidate in found:
        assert candidate.layout.pipeline == 2
        assert candidate.work.schedule == "gpipe"
        assert candidate.work.microbatch_size == 2
        assert not candidate.work.recomputations


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=fsdp", "gpus_per_node=8"),
        ("strategy=fsdp", "gpus_per_node=8", "optimizer=muon", "model.layers=3"),  # device 4 owns most
        ("strategy=hsdp", "nodes=2", "gpus_per_node=4", "optimizer=muon"),
        ("strategy=fsdp", "gpus_per_node=3", "optimizer=adafactor"),
        ("strategy=pipeline", "gpus_per_node=4", "strategy.schedule=interleaved", "model.layers=9"),
        ("strategy=pipeline", "gpus_per_node=4", "strategy.schedule=zbv", "model.layers=8"),
        ("strategy=hybrid", "nodes=2", "gpus_per_node=8", "strategy.tensor=2", "strategy.replicate=1",
         "strategy.shard=4"),
    ],
)  # fmt: skip
def test_the_fullest_device_is_among_those_that_are_planned(words: tuple[str, ...]) -> None:
    config, *_ = resolve(composed("model=tiny", "training.global_batch_size=48", "device=cpu", *words))
    whole, part = memory.plan(config), memory.plan_fullest(config)
    assert part.fullest.kinds == whole.fullest.kinds
    assert memory.may_fit(config, room=whole.fullest.total)
    activations = max(held.kinds["activations"] for held in whole.devices)
    assert not memory.may_fit(config, room=activations - 1)


def test_the_parts_of_a_step_add_up_and_name_the_limit() -> None:
    config, hardware, _ = asked(*SMALL, "training.global_batch_size=32")

    def planned(*, size: int, pipeline: int, mode: str = "none") -> Candidate:
        layout = Layout(pipeline=pipeline, replicate=8 // pipeline)
        strategy = replace(config.strategy, pipeline=pipeline, replicate=layout.replicate)
        training = replace(config.training, microbatch_size=size, activation_checkpointing=mode)
        way = replace(config, strategy=strategy, training=training)
        work, plan = work_of_run(way), memory.plan_fullest(way)
        assert plan is not None
        return Candidate(way, work, step_time(work, hardware), plan)

    flat, deep = planned(size=4, pipeline=1), planned(size=2, pipeline=4)
    for one in (flat, deep, planned(size=1, pipeline=1, mode="full")):
        parts = parts_s(one.work, one.step)
        assert sum(parts.values()) == pytest.approx(one.step.total_s, rel=1e-12)
        assert min(parts.values()) >= 0
    share = deep.step.timeline.bubble_share * deep.step.timeline.total_s / deep.step.total_s
    assert limit(deep.work, deep.step) == f"bubble {share:.0%}"
    single = planned(size=1, pipeline=4)
    assert limit(single.work, single.step).startswith("batch ")
    gained = 1 - flat.step.total_s / deep.step.total_s
    assert f"{gained:.1%} less time than the second (pipeline 4 x replicate 2)" in advantage([flat, deep])
    assert "can tell apart" in advantage([flat, flat])


def test_the_command_ends_with_the_line_to_run(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=1b", "nodes=4", "gpus_per_node=8", f"hardware={H100}"]
    assert command(["plan", "--best", "--rows", "3", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[2:5]] == ["1", "2", "3"]
    assert lines[5].startswith("Why the first: ")
    line = lines[-1]
    assert line.startswith(f"python -m hpc_parallel.run {' '.join(words)} strategy=")
    run = prepared(*(word for word in line.split()[3:] if not word.startswith("hardware=")))
    assert run.plan.layout.devices == 32


def test_a_site_names_the_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=1b", "gpus_per_node=8", "cluster=infiniband_h100"]
    assert command(["plan", "--best", *words]) == 0
    assert "NVIDIA H100 SXM" in capsys.readouterr().out
    assert command(["plan", "strategy=fsdp", *words]) == 0
    assert "shard 8 on 8 x NVIDIA H100 SXM" in capsys.readouterr().out


def test_without_room_the_nearest_layout_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=70b", "gpus_per_node=8", f"hardware={H100}"]
    assert command(["plan", "--best", *words]) == 2
    message = capsys.readouterr().err
    assert "no layout fits in the 74.5 GiB of one NVIDIA H100 SXM. The nearest one, strategy=" in message
    assert "training.activation_checkpointing=full needs " in message
    advice = message.partition(" Try ")[2].partition(", or a smaller model.")[0]
    assert advice.startswith("nodes=2 with strategy=")
    layout = [word for word in advice.split() if word not in ("nodes=2", "with")]
    assert command(["plan", *words[:2], words[2], "nodes=2", *layout]) == 0
    assert ": fits" in capsys.readouterr().out


def test_more_nodes_are_not_advised_if_they_do_not_help(capsys: pytest.CaptureFixture[str]) -> None:
    """One sample of 2**20 tokens stays on one device of these axes, whatever their number."""
    words = ["model=70b", "gpus_per_node=1", f"hardware={H100}", "training.global_batch_size=1",
             "training.microbatch_size=1", "data.sequence_length=1048576", "strategy.pipeline=1",
             "strategy.context=1"]  # fmt: skip
    assert command(["plan", "--best", *words]) == 2
    message = capsys.readouterr().err
    assert message.rstrip().endswith("Nor does one on up to 64 nodes. Try a smaller model.")


def test_all_problems_of_a_search_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=1b", "gpus_per_node=9", f"hardware={H100}", "training.steps=0"]
    assert command(["plan", "--best", "--rows", "0", "--tokens", "5", *words]) == 2
    message = capsys.readouterr().err
    for text in (
        "--tokens does not go with --best.",
        "--rows 0: the table has at least one row. Try --rows 5.",
        "Try training.steps=1",
        "Try gpus_per_node=8",
    ):
        assert text in message
    assert command(["plan", "--best", "strategy=fsdp", "model=1b"]) == 2
    assert "--best chooses the strategy. Try it without strategy=fsdp." in capsys.readouterr().err
    assert command(["plan", "--best", "model=1b", "gpus_per_node=8", "device=cuda"]) == 2
    assert (
        "hardware=NAME is missing: strategy=auto needs it. Choose one of a100_40gb" in capsys.readouterr().err
    )


def test_degrees_and_batches_without_a_layout_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=1b", "gpus_per_node=8", f"hardware={H100}"]
    assert command(["plan", "--best", *words, "strategy.tensor=3"]) == 2
    assert (
        "strategy.tensor=3: no legal layout of 8 devices has this. Try without it." in capsys.readouterr().err
    )
