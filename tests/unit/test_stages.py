"""The stages of a study: their order and lines, what is refused, and which run again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.commands.run_command import check_words
from hpc_parallel.commands.tokenize import main as tokenize
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.compose import compose_run
from hpc_parallel.launch import local_launcher
from hpc_parallel.launch.resume import resumed
from hpc_parallel.launch.run_files import write
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.checkpoint_index import publish, unfinished_folder
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_start import inherited
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.run import main
from hpc_parallel.sweep import start as sweep_start
from hpc_parallel.sweep import study as study_module
from hpc_parallel.sweep.study_plan import Study, plan
from hpc_parallel.sweep.study_stages import COMMANDS, stages_of

pytestmark = pytest.mark.usefixtures("here")
FIVE: dict[str, Any] = {
    "tokens": {"run": "tokenize corpus.txt --output {tokens}/tokens.npy", "when": "before"},
    "evaluate": {"run": "task=infer", "launcher": {"time_minutes": 7}},
    "export": None,
    "report": None,
}
ORDER = ["tokens", "run", "evaluate", "export", "report"]
LINE = ("launcher=local", "launcher.snapshot=false", "device=cpu", "data=tokens", "data.sequence_length=8",
        "training.validation_samples=1", "training.global_batch_size=1", "name=five")  # fmt: skip


@pytest.mark.parametrize(
    ("then", "after"),
    [
        ("report", {"run": (), "report": ("run",)}),
        (["export", "report"], {"run": (), "export": ("run",), "report": ("export",)}),
        ("task=infer", {"run": (), "infer": ("run",)}),
        ("-- check.py --all", {"run": (), "check": ("run",)}),
        (
            {"a": {"run": "plan", "when": "before"}, "b": {"run": "plan", "when": "before"}, "report": None},
            {"a": (), "b": ("a",), "run": ("a", "b"), "report": ("run",)},
        ),
        (
            {"evaluate": {"run": "task=infer", "when": "beside"}, "report": None},
            {"run": (), "evaluate": (), "report": ("run", "evaluate")},
        ),
        (
            {"export": None, "show": {"after": "run"}, "report": {"after": ["export", "show"]}},
            {"run": (), "export": ("run",), "show": ("run",), "report": ("export", "show")},
        ),
    ],
)
def test_a_stage_comes_after_the_one_before_it_or_after_those_it_names(then: Any, after: Any) -> None:
    stages = stages_of(then)
    assert {stage.name: stage.after for stage in stages} == after
    names = [stage.name for stage in stages]
    assert all(names.index(other) < names.index(stage.name) for stage in stages for other in stage.after)


@pytest.mark.parametrize(
    ("then", "messages"),
    [
        ("reprot", ["then = reprot names no command", "Try then=report"]),
        ("eval.py", ["Try 'then=-- eval.py'"]),
        ({"report": {"when": "latter"}}, ["then.report.when = latter is no time", "report.when=after"]),
        ({"report": {"after": "expot"}, "export": None}, ["expot is no stage", "report.after=export"]),
        ({"a": {"run": "show", "after": "b"}, "b": {"run": "show", "after": "a"}}, ["waits for the next: a"]),
        ({"run": "report"}, ["the name of a stage is reserved. Try then.stage_run"]),
        (["report", "report {run}"], ["two stages of one name"]),
        ({"x": "shwo", "y": {"when": "now", "run": 3}}, ["then.x = shwo", "then.y.when", "then.y.run = 3"]),
    ],
)
def test_all_problems_of_the_stages_are_named_at_once(then: Any, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        stages_of(then)
    for message in messages:
        assert message in str(refused.value)


def test_the_commands_of_stages_are_commands() -> None:
    from hpc_parallel.__main__ import COMMANDS as ALL

    assert set(COMMANDS) <= ALL.keys()


def planned(*words: str, then: Any = FIVE) -> Study:
    """The plan of a line of words, with `then` and the place of the tokens in the user's own file."""
    folder = Path("own/jobs")
    folder.mkdir(parents=True, exist_ok=True)
    content = yaml.safe_dump({"then": then, "data": {"path": "{tokens}/tokens.npy"}}, sort_keys=False)
    (folder / "study.yaml").write_text(f"# @package _global_\n{content}")
    line = CommandLine.parse(["--config-dir", "own", *LINE, "jobs=study", *words])
    return plan(line, compose_run(line.overrides, **line.places).config, check=check_words)


def complete(study: Study) -> None:
    """Record that all stages of the plan ran and completed, as runs do, and what they wrote."""
    study.folder.mkdir(parents=True, exist_ok=True)
    for stage in study.stages:
        if stage.is_done:
            continue
        write(stage.run)
        folder = stage.run.folder
        attempts.begin(folder, step=0, environment={})
        if stage.name == "tokens":
            assert tokenize(["corpus.txt", "--output", str(folder.path / "tokens.npy")]) == 0
            Path("written.txt").write_text("by the stage")
        if stage.name == "export":
            (folder.path / "weights.safetensors").touch()
        if stage.name == "run":
            unfinished_folder(folder.checkpoints, 1).mkdir(parents=True)
            publish(folder.checkpoints, step=1, files={}, about={"config": stage.run.values})
        ended = datetime.now(UTC).isoformat()
        write_json(folder.summary, {"outcome": "completed", "ended": ended})
        owner.release(folder)
    study.record({})


def starting(study: Study) -> list[str]:
    return [stage.name for stage in study.stages if not stage.is_done]


def edit(path: str) -> None:
    """Change a file long after the stages have ended."""
    Path(path).write_text("other = 1")
    os.utime(path, (time.time() + 100, time.time() + 100))


@pytest.fixture
def study(here: Path) -> Study:
    (here / "corpus.txt").write_text(40 * "some words ")
    first = planned()
    assert [stage.name for stage in first.stages] == starting(first) == ORDER
    complete(first)
    return first


def test_a_study_of_five_stages_typed_twice_starts_nothing(study: Study) -> None:
    again = planned()
    assert starting(again) == []
    assert [stage.record.run_dir for stage in again.stages] == [one.record.run_dir for one in study.stages]


def test_a_changed_line_starts_what_depends_on_it(study: Study) -> None:
    changes: dict[tuple[str, ...], list[str]] = {
        ("training.steps=7",): ORDER[1:],
        ("+then.evaluate.seed=3",): ORDER[2:],
        ("+then.evaluate.launcher.partition=other", "launcher.time_minutes=9"): [],
        ("~then.evaluate",): ["export", "report"],
    }
    assert {words: starting(planned(*words)) for words in changes} == changes


def test_a_changed_file_starts_what_depends_on_it(study: Study) -> None:
    edit("corpus.txt")
    again = planned()
    assert starting(again) == ORDER
    assert again.stages[0].because == "corpus.txt has changed"
    assert again.stages[1].because == "tokens runs again"


def test_only_what_comes_after_a_changed_script_starts(here: Path) -> None:
    (here / "corpus.txt").write_text(40 * "some words ")
    (here / "judge.py").write_text("print(1)")
    then = FIVE | {"judge": {"run": "-- judge.py {evaluate} written.txt", "after": "evaluate"}}
    complete(planned(then=then))
    assert starting(planned(then=then)) == []  # `written.txt` is by a stage before it
    edit("judge.py")
    assert starting(planned(then=then)) == ["judge"]


def test_a_failed_stage_starts_again_and_what_comes_after_it(study: Study) -> None:
    evaluate = study.stages[2].run.folder
    write_json(evaluate.summary, {"outcome": "failed"})
    again = planned()
    assert starting(again) == ORDER[2:]
    assert again.stages[2].because == "it was failed"


def test_a_stage_that_is_going_on_is_not_started_twice(study: Study) -> None:
    owner.take(study.main.run.folder)
    study.main.run.folder.summary.unlink()
    with pytest.raises(ConfigError, match=r"the stage run is going on in five/.*: running"):
        planned()


def test_a_line_that_is_typed_twice_at_once_starts_its_stages_once(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "corpus.txt").write_text(40 * "some words ")
    original = sweep_start.held

    @contextmanager
    def held_later(folder: Path, *, key: str) -> Iterator[None]:
        complete(planned())  # by the other line, since this one was planned
        with original(folder, key=key):
            yield

    monkeypatch.setattr(sweep_start, "held", held_later)
    planned()
    assert main(["--config-dir", "own", *LINE, "jobs=study"]) == 0
    assert capsys.readouterr().out.count("is done, and its inputs did not change") == len(ORDER)


def test_a_stage_has_resources_of_its_own(study: Study) -> None:
    by_name = {stage.name: stage.run for stage in study.stages}
    minutes = {name: run.config.launcher.time_minutes for name, run in by_name.items()}
    assert minutes["evaluate"] == 7 != minutes["run"] == minutes["export"]
    assert by_name["evaluate"].config.weights == str(by_name["run"].folder.path)
    assert by_name["run"].config.data["path"] == str(by_name["tokens"].folder.path / "tokens.npy")
    assert by_name["evaluate"].config.data["path"] == by_name["run"].config.data["path"]
    export = by_name["export"].config
    output = str(by_name["export"].folder.path / "weights.safetensors")
    assert export.script.words == ["export", str(by_name["run"].folder.path), "--output", output]
    assert (export.device, export.cluster.gpus, export.devices) == ("cpu", False, 1)
    assert all(run.config.then is None and run.values["then"] is None for run in by_name.values())


def test_the_problems_of_all_stages_are_named_at_once() -> None:
    Path("corpus.txt").write_text("words")
    with pytest.raises(ConfigError) as refused:
        planned("+then.export.nodes=0", "+then.evaluate.model.heads=3", "training.steps=0")
    text = str(refused.value)
    for problem in ("training.steps = 0", "then.export: nodes = 0", "then.evaluate: model.heads = 3"):
        assert problem in text


def test_a_problem_of_the_words_of_the_run_is_named_once() -> None:
    Path("corpus.txt").write_text("words")
    wrong = ("launcher.time_minutes=0", "training.steps=0")
    then = FIVE | {"report": {"launcher": {"time_minutes": 0}}}  # the stage sets it itself
    starts = [text.partition(" must be")[0] for text in refusal(*wrong, then=then)]
    own = "then.report: launcher.time_minutes = 0"
    assert starts == ["launcher.time_minutes = 0", "training.steps = 0", own]


def refusal(*words: str, then: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        planned(*words, then=then)
    return [str(problem) for problem in refused.value.problems]


def test_the_words_of_all_commands_are_checked_before_any_stage_starts() -> None:
    Path("corpus.txt").write_text("words")
    then = {
        "tokens": {"run": "tokenize corpus.tx --output {tokens}/tokens.np", "when": "before"},
        "export": "export {run} --stp 3",
        "other": "export {run} --output nowhere/x.safetensors",
        "report": "report {run} --output corpus.txt",
        "show": "show {tokens} --jsn",
        "check": "check nodez=2 data=tokens data.path={tokens}/tokens.npy",
        "parity": "parity strategy=data nodez=3",
        "plan": "plan model=1b hardware=h100_sxm_node8_3200gbit --rows 3",
    }
    found = refusal("training.steps=0", then=then)
    starts = [
        "then.tokens: --output {tokens}/tokens.np must end in .npy. Try --output {tokens}/tokens.npy.",
        "then.tokens: corpus.tx does not exist. Try corpus.txt.",
        "training.steps = 0 must be at least 1",
        "then.export: unrecognized arguments: --stp 3. Try python -m hpc_parallel export [-h] [--step STEP] ",
        "then.other: --output nowhere/x.safetensors: there is no folder nowhere. Try mkdir -p nowhere.",
        f"then.report: --output = {Path('corpus.txt').absolute()} is there and is no report",
        "then.show: unrecognized arguments: --jsn. Try python -m hpc_parallel show [-h] [--json] RUN.",
        "then.check: nodez=2: there is no key nodez. Try nodes=2.",
        "then.parity: nodez=3: there is no key nodez. Try nodes=3.",
        "then.plan: --rows is for --best. Try it with --best.",
    ]
    assert [text[: len(start)] for text, start in zip(found, starts, strict=True)] == starts
    assert {path.name for path in Path().iterdir()} == {"corpus.txt", "own"}


def test_what_stages_write_before_is_checked_once_it_exists(study: Study) -> None:
    wrong = FIVE | {"export": "export {run} --step 7"}
    assert refusal(then=wrong) == ["then.export: {run} has no checkpoint of step 7. It has: 1."]
    assert starting(planned("training.steps=7", then=wrong)) == ORDER[1:]  # a new run may have it


def test_a_file_that_a_command_would_overwrite_is_refused_unless_it_has_written_it(here: Path) -> None:
    (here / "corpus.txt").write_text(40 * "some words ")
    then = FIVE | {"export": "export {run} --output fixed.safetensors"}
    complete(planned(then=then))
    (here / "fixed.safetensors").touch()
    assert starting(planned(then=then)) == []
    (problem,) = refusal("training.steps=7", then=then)
    assert problem.startswith("then.export: fixed.safetensors exists already")


def test_a_changed_script_of_the_run_starts_it_again(here: Path) -> None:
    (here / "train.py").write_text("print(1)")
    words = ("launcher=local", "launcher.snapshot=false", "device=cpu", "name=own", "then=report")
    line = CommandLine.parse([*words, "--", "train.py", "--out", "results"])

    def plan_again() -> Study:
        return plan(line, compose_run(line.overrides, **line.places).config, check=check_words)

    complete(plan_again())
    assert starting(plan_again()) == []
    edit("train.py")
    assert starting(plan_again()) == ["run", "report"]


def test_a_stage_that_needs_weights_needs_a_checkpoint() -> None:
    Path("corpus.txt").write_text("words")
    with pytest.raises(ConfigError) as refused:
        planned("training.checkpoint_every=null")
    assert "training.checkpoint_every = null leaves no checkpoint for evaluate and export" in str(
        refused.value
    )
    assert starting(planned("training.checkpoint_every=5")) == ORDER


def test_an_export_of_the_best_checkpoint_needs_a_callback_that_keeps_it() -> None:
    Path("corpus.txt").write_text("words")
    then = FIVE | {"export": "export {run} --step best"}
    stops = "{_target_:hpc_parallel.training.callbacks.EarlyStopping}"
    keeps = "{_target_:hpc_parallel.training.callbacks.KeepBest}"
    every = ("training.steps=4", "training.checkpoint_every=2", "training.validate_every=2")
    (problem,) = refusal(*every, f"training.callbacks=[{stops}]", then=then)
    assert "leaves no best checkpoint for export. Try " in problem
    legal = problem.partition(" Try ")[2].rstrip(".").strip("'")
    assert legal == f"training.callbacks=[{stops},{keeps}]"
    assert starting(planned(*every, legal, then=then)) == ORDER


def test_a_folder_of_a_later_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\{report\} is the folder of a stage that does not come before"):
        planned(then={"export": "export {report}", "report": None})


def test_a_run_folder_starts_no_stages(study: Study) -> None:
    """Only what is typed now names commands: `resume=` and `rerun` leave out what a folder says."""
    folder = study.main.run.folder
    assert "then=null" in json.loads(folder.environment.read_text())["overrides"]
    assert inherited(["seed=1", "then=report", "+then.x=report", "then=null"]) == ["seed=1", "then=null"]
    start = json.loads(folder.environment.read_text())
    write_json(folder.environment, start | {"overrides": [*start["overrides"], "then=report"]})
    words = resumed([f"resume={folder.path}"])
    line = CommandLine.parse(words)
    assert compose_run(line.overrides, **line.places).config.then is None
    line = CommandLine.parse(resumed([f"resume={folder.path}", "then=show"]))
    assert compose_run(line.overrides, **line.places).config.then == "show"


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("-m", "nodes=1,2"), "once the runs have ended: python -m hpc_parallel report FOLDER."),
        (("launcher=script",), "leaves the start of stages to you. Try launcher=slurm."),
    ],
)
def test_what_can_have_no_stages_says_so(
    words: tuple[str, ...], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "device=cpu", "launcher.snapshot=false", "then=report"]) == 2
    assert instead in capsys.readouterr().err


@pytest.mark.parametrize(("gpus", "beside"), [(0, ["evaluate"]), (1, []), (2, ["evaluate"])])
def test_a_stage_beside_a_run_needs_a_gpu_only_if_there_are_some(
    gpus: int, beside: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    then = {"evaluate": {"run": "task=infer", "when": "beside"}}
    Path("corpus.txt").write_text(40 * "some words ")
    found = planned("device=auto", "data=text", "data.path=corpus.txt", then=then)
    monkeypatch.setattr(study_module, "visible_gpus", lambda environment: gpus)
    monkeypatch.setattr(study_module, "write", lambda run: None)
    monkeypatch.setattr(local_launcher, "watched_agent", lambda folder, start: None)
    started = study_module._start_beside(found.main, found.stages[1:], {})
    assert [name for name, _ in started] == beside


@pytest.mark.full
@pytest.mark.processes
def test_five_stages_that_have_run_are_not_started_again(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They run to their ends here, and the second time only what depends on a change does."""
    (here / "corpus.txt").write_text(40 * "some words ")
    infer = {"run": "task=infer task.seconds=1 task.batch_sizes=[1]"}
    planned(then=FIVE | {"evaluate": infer})  # writes the file of the study
    line = ["--config-dir", "own", *LINE, "jobs=study", "training.steps=2"]
    started = []
    for words in ((), (), ("+then.evaluate.seed=3",)):
        assert main([*line, *words]) == 0
        lines = capfd.readouterr().out.splitlines()
        started.append([text.split()[0] for text in lines if " starts: " in text])
    assert started == [ORDER, [], ORDER[2:]]
    folders = [*here.glob("runs/five*/2*")]
    assert len(folders) == len(ORDER) + len(ORDER[2:])
    assert {read_run(folder).totals.outcome for folder in folders} == {"completed"}
