"""What is said of a schedule is what torch raises on; where stages stand; cuts and versions."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from hpc_parallel.config.checks import training_checks
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.checks.pipeline_checks import cuts_problem
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.layout import schedules
from hpc_parallel.layout.batch_plan import plan_batch
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.schedules import SCHEDULES, stages_of, unfit, version_problem
from hpc_parallel.strategies.pipeline import KINDS
from tests.composed import composed


def test_every_schedule_has_its_kind() -> None:
    assert KINDS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=25)
@given(ranks=st.integers(2, 6), several=st.integers(2, 3), microbatches=st.integers(1, 20))
def test_torch_accepts_every_accepted_schedule(
    name: str, ranks: int, several: int, microbatches: int
) -> None:
    """Torch itself is asked, with stages that never run."""
    fewest, most, _ = SCHEDULES[name].stages_per_rank
    per_rank = several if most is None else fewest
    strategy = StrategyConfig(name="pipeline", schedule=name, stages_per_rank=per_rank)
    count = 1 if SCHEDULES[name].in_turn else microbatches
    torch_takes = _taken(name, ranks=ranks, per_rank=per_rank, microbatches=count)
    assert (unfit(strategy, microbatches=microbatches, ranks=ranks) is None) == torch_takes


def _taken(name: str, *, ranks: int, per_rank: int, microbatches: int) -> bool:
    kind = KINDS[name]
    stages = [
        SimpleNamespace(
            num_stages=ranks * per_rank, group_size=ranks, group_rank=0, stage_index=0, submod=nn.Identity()
        )
        for _ in range(per_rank)
    ]
    wanted = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    try:
        schedule = kind(wanted, n_microbatches=microbatches, loss_fn=lambda output, target: output)
    except ValueError:
        return False
    if issubclass(kind, PipelineScheduleMulti):  # torch places the stages as we do
        shape = {"degree": ranks, "per_rank": per_rank, "v_shaped": SCHEDULES[name].v_shaped}
        ours = {stage: rank for rank in range(ranks) for stage in stages_of(rank, **shape)}
        assert schedule.stage_index_to_group_rank == ours
    return True


def test_stages_go_round_the_ranks_or_there_and_back() -> None:
    shape = {"degree": 3, "per_rank": 2}
    assert [stages_of(r, v_shaped=False, **shape) for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [stages_of(r, v_shaped=True, **shape) for r in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize(("cuts", "stages", "blocks"), [
    ([3], 2, 7), ([1, 2, 6], 4, 8), ([], 1, 3), ([1, 2], 3, 3), ([5, 900], 3, None),
])  # fmt: skip
def test_good_cuts(cuts: list[int], stages: int, blocks: int | None) -> None:
    assert cuts_problem(cuts, stages=stages, blocks=blocks) is None


@pytest.mark.parametrize(("cuts", "stages", "blocks"), [
    ([], 2, 7), ([1, 2], 4, 8), ([0], 2, 7), ([7], 2, 7), ([2, 2], 3, 7), ([3, 1], 3, 7), ([-1], 2, None),
    ([1, 2, 3], 3, None), ([2, 1], 3, None),
])  # fmt: skip
def test_bad_cuts_are_offered_good_ones(cuts: list[int], stages: int, blocks: int | None) -> None:
    problem = cuts_problem(cuts, stages=stages, blocks=blocks)
    assert problem.legal[1] is None
    assert cuts_problem(problem.legal[0], stages=stages, blocks=blocks) is None


@pytest.mark.parametrize(
    ("schedule", "options", "advised"),
    [
        ("interleaved_zero_bubble", [], "interleaved"),
        ("interleaved_zero_bubble", ["strategy.stages_per_rank=1"], "1f1b"),
        ("interleaved_zero_bubble", ["strategy.stages_per_rank=1", "strategy.microbatches=1"], "gpipe"),
        ("zbv", ["strategy.microbatches=5", "training.global_batch_size=20"], "looped_bfs"),
        ("dualpipev", [], "interleaved"),
    ],
)
def test_a_torch_that_is_too_old_to_split_the_backward_pass_is_named(
    monkeypatch: pytest.MonkeyPatch, schedule: str, options: list[str], advised: str
) -> None:
    """Its advice passes, with any number of stages on a rank and of microbatches."""
    assert version_problem(schedule) is None
    words = ["strategy=pipeline", "nodes=2", f"strategy.schedule={schedule}", "model.layers=8", *options]
    assert find_problems(resolve(composed(*words))[0]) == []
    monkeypatch.setattr(schedules, "version", lambda package: "2.12.1+cu130")
    [problem] = find_problems(resolve(composed(*words))[0])
    assert str(problem) == (
        f"strategy.schedule = {schedule} needs torch 2.13 or newer, and torch 2.12 is installed here. "
        f"Try strategy.schedule={advised}."
    )
    assert find_problems(resolve(composed(*words, f"strategy.schedule={advised}"))[0]) == []


def test_a_torch_that_is_too_old_for_selective_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ("strategy=data", "nodes=2", "training.activation_checkpointing=selective")
    assert list(training_checks.switch_problems(resolve(composed(*words))[0])) == []
    monkeypatch.setattr(schedules, "version", lambda package: "2.11.0+cu130")
    assert [str(problem) for problem in training_checks.switch_problems(resolve(composed(*words))[0])] == [
        "training.activation_checkpointing = selective needs torch 2.12 or newer, and torch 2.11 is "
        "installed here. "
        "Try training.activation_checkpointing=full or training.activation_checkpointing=none."
    ]


def test_the_naive_schedule_has_one_microbatch_by_default() -> None:
    sizes = {"layout": Layout(pipeline=4), "microbatch_size": None, "microbatches": None}
    assert plan_batch(16, **sizes, in_turn=True).microbatches == 1
    assert plan_batch(16, **sizes).microbatches == 16
