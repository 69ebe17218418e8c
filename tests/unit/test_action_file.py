"""A pipeline schedule from a file: torch's own files are read as torch runs them; wrong files are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.launch import run_files
from hpc_parallel.launch.prepare import prepare
from hpc_parallel.layout.action_file import ActionFile, parse, read
from hpc_parallel.layout.schedules import SCHEDULES, schedule_named
from hpc_parallel.planning.pipeline_orders import WEIGHTS, Pipeline, fullest_moments, orders, simulate
from hpc_parallel.strategies.pipeline import KINDS
from tests.composed import composed

EXAMPLE = Path(__file__).parents[2] / "examples" / "schedule.csv"
OF_TORCH = [name for name, kind in KINDS.items() if issubclass(kind, PipelineScheduleMulti)]
PIPELINE = ("strategy=pipeline", "launcher=local", "model.layers=8")


def _of_torch(name: str, *, ranks: int, microbatches: int, path: Path) -> tuple[Any, ActionFile]:
    """A schedule of torch's, with stages that never run, and the file that it writes of itself."""
    numbers = {"num_stages": 2 * ranks, "group_size": ranks, "group_rank": 0, "stage_index": 0}
    stages = [SimpleNamespace(submod=nn.Linear(1, 1), **numbers) for _ in range(2)]
    schedule: Any = KINDS[name](stages, n_microbatches=microbatches, loss_fn=lambda output, target: output)
    PipelineScheduleMulti._dump_csv(schedule, str(path))
    return schedule, read(path)


@pytest.mark.parametrize("name", OF_TORCH)
def test_files_of_torch_are_read_as_torch_runs_them(name: str, tmp_path: Path) -> None:
    ranks, microbatches, path = 3, 6, tmp_path / f"{name}.csv"
    schedule, file = _of_torch(name, ranks=ranks, microbatches=microbatches, path=path)
    assert file.problems == ()
    assert (len(file.ranks), file.microbatches, file.per_rank) == (ranks, microbatches, 2)
    assert file.v_shaped == SCHEDULES[name].v_shaped
    assert file.splits_backward == SCHEDULES[name].splits_backward
    for rank, actions in enumerate(file.ranks):
        of_torch = filter(None, schedule.pipeline_order[rank])
        single = [one for action in of_torch for one in action.sub_actions or [action]]
        assert [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in single] == [*actions]
    of_file, of_name = (StrategyConfig(name="", schedule=one, stages_per_rank=2) for one in (str(path), name))
    for rank in range(ranks):  # the table of the planner is tested against torch's tables
        shape = {"rank": rank, "ranks": ranks, "microbatches": microbatches}
        most = [
            max((live for live, _ in fullest_moments(options, **shape)), key=sum)
            for options in (of_file, of_name)
        ]
        assert most[0] == most[1]


def test_the_planned_time_is_that_of_the_actions() -> None:
    """Each action takes 1 s, and a whole backward pass as long as its two halves."""
    pipeline = Pipeline(str(EXAMPLE), 2, 4, 2)
    made = orders(pipeline)
    assert [len(actions) for actions in made] == [24, 24]
    assert sum(kind is WEIGHTS for actions in made for kind, *_ in actions) == 16
    planned = simulate(pipeline, action_s=lambda kind, stage: 1.0)
    assert planned.busy_s == (24.0, 24.0)
    assert 24 <= planned.total_s <= 27


GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize(("text", "problem"), [
    ("", "has no actions"),
    (GOOD.replace("1B1", "1X1"), "has '1X1' in line 2, which is not an action such as 1F0"),
    (GOOD.replace("0F0", "0SEND_F0"), "has '0SEND_F0' in line 1, which is not an action such as 1F0"),
    (GOOD.replace("1B1", "1F1"), "has 1F1 2 times"),
    (GOOD.replace(",1B1", ""), "has F for microbatch 1 of stage 1, not F and B, or F, I and W"),
    (GOOD.replace("1B1", "1I1"), "has FI for microbatch 1 of stage 1, not F and B, or F, I and W"),
    (GOOD.replace("1B1", "99999B1"), "lacks actions: it names stage 99999 and microbatch 1"),
    ("0F0,1B0\n1F0,0B0", "gives rank 0 the stages [0, 1], not [0, 2] or [0, 3]"),
    (f"0B0,{GOOD.replace('0B0,', '')}", "lets rank 0 wait for ever: its 0B0 needs 0F0, which comes later"),
    ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "lets rank 0 wait for ever: its 0B0 needs 1B0, which comes later"),
    # torch 2.13 takes the loss of microbatch 0 for that of 1, without a word: 5.72 for a norm of 7.56
    ("0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0", "does not run the microbatches in the last stage in order: [1, 0]"),
])  # fmt: skip
def test_wrong_files_are_refused(text: str, problem: str) -> None:
    assert problem in parse(text).problems
    assert parse(GOOD).problems == ()
    assert parse("0F1,0F0,0B0,0B1\n1F0,1F1,1B0,1B1").problems == ()  # only the last stage needs an order


def test_what_does_not_fit_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(GOOD)

    def problems(*overrides: str) -> list[str]:
        given = (*PIPELINE, f"strategy.schedule={path}", *overrides)
        return [str(problem) for problem in find_problems(resolve(composed(*given)).config, given)]

    assert problems("nodes=2") == []
    assert problems("nodes=4", "strategy.pipeline=2", "strategy.replicate=2") == []
    assert problems("nodes=4") == [
        f"strategy.pipeline = 4 is not the number of ranks in {path}, 2. Try strategy.pipeline=2."
    ]
    assert problems("nodes=2", "strategy.microbatches=4") == [
        f"strategy.microbatches = 4 is not the number of {path}, 2. Try strategy.microbatches=2."
    ]
    (stages,) = problems("nodes=2", "strategy.stages_per_rank=2")
    assert stages.endswith(f"does not fit strategy.schedule = {path}. Try strategy.stages_per_rank=1.")
    (tmp_path / "own-results.csv").write_text("loss,5\n")  # no schedule
    for name, near in {"ow.csv": path, "own.csvv": path, "gpip": "gpipe", "a/zzzz": "1f1b"}.items():
        (problem,) = problems("nodes=2", f"strategy.schedule={tmp_path / name}")
        assert problem.endswith(f". Try strategy.schedule={near}.")
    path.unlink()
    assert problems("nodes=2") == [
        f"strategy.schedule = {path} can't be read: No such file or directory. Try strategy.schedule=1f1b."
    ]


def test_the_run_keeps_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job reads the copy in its folder: what the user changes later does not reach it."""
    monkeypatch.chdir(tmp_path)
    Path("own.csv").write_text(GOOD)
    overrides = (*PIPELINE, "nodes=2", "strategy.schedule=own.csv", "launcher.snapshot=false")
    run = prepare(composed(*overrides), overrides=overrides)
    run_files.write(run)
    Path("own.csv").write_text("")
    recorded = yaml.safe_load(run.folder.config.read_text())["strategy"]
    assert Path(recorded["schedule"]).parent == run.folder.path
    file = schedule_named(recorded["schedule"]).file
    assert file == parse(GOOD)
    assert recorded["microbatches"] == 2
    assert file.named("own") == Path(recorded["schedule"]).name == file.named(file.named("own")[:-4])
    assert replace(file, text="").named("own") != file.named("own")
