"""Early ends in a sweep (`sweep.prune=median`): the rule, whose losses count, and who knows the outcome."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.config.tasks import first_compared
from hpc_parallel.failure.conclude_run import conclude
from hpc_parallel.failure.run_state import states
from hpc_parallel.launch import resume
from hpc_parallel.launch.follow import RunFollower
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, create, write_sweep
from hpc_parallel.record.trust import UntrustedError
from hpc_parallel.report.gather import gather
from hpc_parallel.report.page import render
from hpc_parallel.run import main
from hpc_parallel.sweep import view
from hpc_parallel.sweep.earlier import Earlier
from hpc_parallel.sweep.guided import read_result
from hpc_parallel.training import pruning
from hpc_parallel.training.pruning import Pruning, behind
from tests.composed import prepared
from tests.recorded_runs import finished

INF = math.inf
MEDIAN = ("sweep.prune=median", "training.steps=50", "training.validate_every=10")
LINE = "pruned at step 30: validation_loss: its best is 3, and the median of 3 other runs is 2"


@pytest.mark.parametrize(
    ("best", "others", "middle"),
    [
        (3.0, [1.0, 2.0, 5.0], 2.0),
        (2.0, [1.0, 2.0, 5.0], None),  # as good as the median
        (3.1, [1.0, 2.0, 4.0, 9.0], 3.0),  # the mean of the two in the middle
        (3.0, [1.0, 2.0, 4.0, 9.0], None),
        (9.0, [1.0, 2.0], None),  # too few
        (9.0, [1.0, 1.0, INF], 1.0),
        (9.0, [1.0, INF, INF], None),
        (INF, [1.0, 2.0, INF], 2.0),
        (INF, [INF, INF, INF], None),
    ],
)
def test_a_run_is_behind_if_its_best_is_above_the_median(
    best: float, others: Sequence[float], middle: float | None
) -> None:
    assert behind(best, others) == middle


Compare = Callable[..., str | None]


def lines(*losses: float | None, samples: int = 16, key: str = "validation_loss") -> list[dict[str, Any]]:
    """A loss every ten steps."""
    return [
        {"step": step, "samples": step * samples, key: loss}
        for step, loss in zip((10, 20, 30)[: len(losses)], losses, strict=True)
    ]


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """`why` of a run on rank 0 after each of its lines, in a sweep with runs that have these lines."""
    monkeypatch.setattr(pruning.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(pruning.exchange, "broadcast", lambda value: value)

    def answer(
        mine: Sequence[Mapping[str, Any]], others: Sequence[Sequence[Mapping[str, Any]]],
        *words: str, before: int = 0,
    ) -> list[str | None]:  # fmt: skip
        sweep = tmp_path / "sweep"
        create(sweep)
        runs = [RunFolder(tmp_path / f"run{number}") for number in range(1 + len(others))]
        for folder, values in zip(runs, [mine, *others], strict=True):
            folder.create()
            folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in values))
        listed = tuple(SweepRun((), folder.path, 1, 1) for folder in runs)
        write_sweep(sweep, Sweep((), "", None, listed, ()))
        config = prepared(*MEDIAN, f"sweep.folder={sweep}", *words).config
        own = Pruning(config, folder=runs[0], lines=mine[:before])
        return [own.why(line) for line in mine[before:]]

    return answer


THREE = [lines(5.0, 4.0, 1.0), lines(5.0, 4.0, 2.0), lines(5.0, 4.0, 9.0)]


def test_the_losses_of_the_same_step_are_compared(compare: Compare) -> None:
    """The sixth at step 10 is worse than all others, but a fifth of the steps is the first to count."""
    assert compare(lines(6.0, 4.0, 3.0), THREE, "sweep.prune_after=11") == [None, None, LINE]


def test_the_best_loss_counts_also_of_an_earlier_start(compare: Compare) -> None:
    assert compare(lines(2.0, 9.0, 9.0), THREE, before=2) == [None]


def test_a_list_of_runs_that_cannot_be_read_ends_no_run(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(pruning, "sweep_of", stale)
    assert compare(lines(6.0, 4.0, 3.0), THREE) == [None, None, None]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([lines(5.0, 4.0, 1.0), lines(5.0, 4.0, 1.0), lines(5.0, 4.0)], ()),  # one has not come so far
        ([lines(5.0, 4.0, 1.0), lines(5.0, 4.0, 1.0), lines(5.0, 4.0, 1.0, samples=8)], ()),  # another batch
        (THREE, ("sweep.prune_after=31",)),
    ],
)  # fmt: skip
def test_no_comparison_without_enough_others(
    compare: Compare, others: Sequence[Any], words: Sequence[str]
) -> None:
    assert compare(lines(4.0, 4.0, 8.0), others, *words)[-1] is None


def test_the_training_loss_without_a_validation(compare: Compare) -> None:
    others = [lines(1.0, 1.0, 1.0, key="loss")] * 3
    (why,) = compare(lines(None, key="loss"), others, "training.validate_every=null")
    assert why == "pruned at step 10: loss: it is never finite, and the median of 3 other runs is 1"


def test_a_folder_that_others_can_write_decides_nothing(
    compare: Compare, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise UntrustedError(f"{path.name} can be written by anyone")

    monkeypatch.setattr(pruning, "require_private", refuse)
    assert compare(lines(9.0, 9.0, 9.0), THREE) == [None] * 3
    text = "WARNING: sweep.prune compares nothing: sweep can be written by anyone\n"
    assert text in capsys.readouterr().err


def test_another_run_that_cannot_be_read_is_left_out(
    compare: Compare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [*THREE, lines()]
    read = pruning.MetricsReader.read

    def broken(reader: Any) -> Any:
        if reader._path.parent.name == "run4":
            raise PermissionError("no")
        return read(reader)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning.MetricsReader, "read", broken)
        assert compare(lines(5.0, 4.0, 3.0), others)[-1] == LINE
    assert f"can't read {tmp_path / 'run4'}: no" in capsys.readouterr().err


def ended(path: Path, *overrides: str, **summary: Any) -> RunFolder:
    folder = finished(path, *overrides)
    write_json(folder.summary, json.loads(folder.summary.read_text()) | summary)
    return folder


def test_every_command_knows_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pruned run is no failure, is not started again by its sweep, and competes with no other run."""
    run = ended(tmp_path / "a", outcome="pruned", ended_early=LINE, steps=30, final_loss=0.5)
    others = [
        ended(tmp_path / f"b{loss}", f"strategy.bucket_mb={loss}", final_loss=loss) for loss in (1.0, 2.0)
    ]
    (state,) = states([read_run(run.path)])
    assert (state.name, state.ended) == ("pruned", True)
    assert conclude(run, returncode=0, environment={}) is None
    assert not run.failure.exists()
    assert view.outcome_line(run) == ("pruned", f"{LINE}, loss 0.5, 31 samples/s")
    assert RunFollower(run, steps=50).finish() == 0
    assert "continue after step" not in capsys.readouterr().err
    assert resume._ended_early(run) is None
    create(tmp_path / "sweep")
    listed = tuple(SweepRun((), folder.path, 1, 1) for folder in (run, *others))
    write_sweep(tmp_path / "sweep", Sweep((), "", None, listed, ()))
    assert Earlier.read(tmp_path / "sweep").state(listed[0]).settled
    result = read_result(run.path, names=["final_loss"])
    assert (result.failure, result.end) == (None, LINE)
    report = render(gather([tmp_path / "sweep"])).markdown
    losses = [line.split("|")[-4].strip() for line in report.splitlines() if "| one device |" in line]
    assert losses == ["0.5000", "**1.000**", "2.000"]
    assert "(pruned at step 30) | pruned | " in report
    assert f"| pruned | {LINE} |" in report
    early = {"ended_early": "it got worse", "steps": 20}
    write_json(others[1].summary, json.loads(others[1].summary.read_text()) | early)
    assert read_result(others[1].path, names=["final_loss"]).end == "completed early: it got worse"
    report = render(gather([tmp_path / "sweep"])).markdown
    assert "(ended early at step 20) | completed | " in report
    assert report.count("(ended early") == report.count("bucket_mb=2 (ended early") == 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["seed=1,2,3"], "sweep.prune = median compares a run with 3 others, and this sweep has 3. "
                         "Try sweep.prune=off."),
        (["seed=1,2,3,4", "training.global_batch_size=8,16"],
         "sweep.prune = median compares losses at the same step, and training.global_batch_size has several "
         "values. Try sweep.prune=off."),
        (["seed=1,2,3,4", "data.max_bytes=1000000,2000000"], "and data has several values."),
        (["seed=1,2,3,4", "task=infer"],
         "sweep.prune = median compares the losses of trainings, and task=infer is none. Try sweep.prune"),
        (["seed=1,2,3,4", "sweep.prune_after=50"],
         "sweep.prune_after = 50 leaves nothing to end: the last step is training.steps=50. "
         "Try sweep.prune_after=10."),
        (["seed=1,2,3,4", "training.validate_every=50"],
         "training.validate_every = 50 leaves no loss for sweep.prune from step 10 on, before the last step. "
         "Try training.validate_every=20."),
        (["seed=1,2,3,4", "sweep.prune=best"], "sweep.prune = best is not one of off, median."),
        (["seed=1,2,3,4", "sweep.prune=off", "sweep.prune_after=5"],
         "sweep.prune_after = 5 needs sweep.prune=median. Try sweep.prune_after=null."),
        (["seed=1,2,3,4", "sweep.folder=mine"], "sweep.folder = mine is hydra.sweep.dir in a sweep. "),
    ],
)  # fmt: skip
def test_refusals(words: list[str], problem: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *MEDIAN, "dry_run=true", "launcher=local", *words]) == 2
    assert problem in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("steps", [2, 3, 5, 6, 39])
def test_advice_is_accepted(steps: int) -> None:
    """The interval that a refusal advises has a comparison before the last step."""
    words = ("sweep.prune=median", f"training.steps={steps}")
    with pytest.raises(ConfigError) as error:
        prepared(*words, f"training.validate_every={steps}")
    (problem,) = error.value.problems
    (advice,) = problem.legal  # type: ignore[union-attr]
    config = prepared(*words, f"training.validate_every={advice}").config
    assert any(step % advice == 0 for step in range(first_compared(config), steps))
