"""`resume=`: whose command line, what may change, and that one alone goes on."""

from __future__ import annotations

import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hpc_parallel.failure import failure, restart
from hpc_parallel.failure.conclude_run import conclude, tell_end
from hpc_parallel.launch.resume import newest, resumed
from hpc_parallel.launch.run_files import write
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.endings import Failure
from hpc_parallel.record.provenance import read_environment
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.run import main
from hpc_parallel.training.restore import restore
from tests.composed import prepared
from tests.recorded_runs import finished
from tests.unit.test_checkpoint_index import write as write_checkpoint

STARTED = ["strategy=pipeline", "strategy.microbatches=8", "nodes=2", "launcher.partition=gpu", "name=mine"]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run that left a checkpoint of step 40 of 500 and is over."""
    monkeypatch.chdir(tmp_path)
    run = prepared(*STARTED, "launcher=local", "launcher.snapshot=false", f"run_dir={tmp_path / 'run'}")
    write(run)
    values = {"overrides": [*STARTED, "launcher=local", "launcher.snapshot=false", "run_dir=run"],
              "config_dir": None}  # fmt: skip
    write_json(run.folder.environment, values)
    run.folder.owner.unlink()
    write_checkpoint(run.folder.checkpoints, 40)
    return run.folder


def test_new_overrides_replace_those_of_the_old_command(started: RunFolder) -> None:
    place = str(started.path)
    end = [f"run_dir={place}", f"resume={place}"]
    kept = ["launcher=local", "launcher.snapshot=false"]
    batch = "training.global_batch_size=16"  # chosen for the first layout
    assert resumed(["resume=run"]) == [*STARTED, *kept, batch, *end]
    assert resumed(["nodes=4", "resume=run"]) == [
        "strategy=pipeline", "strategy.microbatches=8", "launcher.partition=gpu", "name=mine", *kept,
        batch, "nodes=4", *end,
    ]  # fmt: skip
    # another strategy takes its options along; another launcher does not take the site's
    assert resumed(["resume=run", "strategy=fsdp", "launcher=slurm"]) == [
        "nodes=2", "launcher.partition=gpu", "name=mine", "launcher.snapshot=false", batch,
        "strategy=fsdp", "launcher=slurm", *end,
    ]  # fmt: skip
    assert resumed(["nodes=4", "resume=null"]) == ["nodes=4", "resume=null"]
    assert resumed(["nodes=4"]) == ["nodes=4"]


def cosine(step: int, *, steps: int) -> float:
    """The default schedule after 25 steps of warm-up, to a tenth of 3e-3."""
    return 3e-3 * (0.55 + 0.45 * math.cos(math.pi * (step - 25) / (steps - 25)))


def test_another_number_of_steps_keeps_the_warm_up_and_names_a_jump(started: RunFolder) -> None:
    """The warm-up of the first start is a twentieth of 500 steps, not of the new number."""
    longer = resumed(["resume=run", "training.steps=50"])
    assert "optimizer.warmup_steps=25" in longer
    assert not any(word.startswith("optimizer.") for word in resumed(["resume=run"]))
    for typed in ("optimizer.warmup_steps=9", "optimizer.schedule=package.function"):
        own = resumed(["resume=run", "training.steps=50", typed])
        assert [word for word in own if word.startswith("optimizer.")] == [typed]
    assert "optimizer.warmup_steps=20" in resumed(["resume=run", "training.steps=20"])  # no more than steps
    assert (
        f"warning     the learning rate goes from {cosine(40, steps=500):.3g} at step 40 to "
        f"{cosine(41, steps=50):.3g} at step 41: training.steps was 500 and is 50. "
        "optimizer.schedule=constant, and wsd before its decay, can be extended without a jump"
    ) in prepared(*longer).notes


@pytest.mark.parametrize(
    ("before", "words", "jumps"),
    [
        ("cosine", [], False), ("cosine", ["training.steps=505"], False),
        ("cosine", ["optimizer.learning_rate=0.001"], True),
        ("constant", ["training.steps=1000"], False), ("wsd", ["training.steps=1000"], False),
        ("linear", ["training.steps=1000"], True),
    ],
)  # fmt: skip
def test_a_schedule_that_goes_on_is_not_a_jump(
    started: RunFolder, before: str, words: list[str], jumps: bool
) -> None:
    schedule = f"optimizer.schedule={before}"
    values = started.read_config()
    values["optimizer"]["schedule"] = before
    started.config.write_text(yaml.safe_dump(values))
    notes = prepared(*resumed(["resume=run", schedule, *words])).notes
    assert any("the learning rate goes" in note for note in notes) == jumps


@pytest.mark.parametrize(
    ("words", "number"),
    [([], 0), (["training.validate_every=7"], 0), (["training.validation_samples=9"], 1),
     (["training.validation_samples=9", "training.validate_every=null"], 0)],
)  # fmt: skip
def test_validations_of_another_number_of_samples_are_named(
    started: RunFolder, words: list[str], number: int
) -> None:
    notes = prepared(*resumed(["resume=run", *words])).notes
    line = (
        "warning     training.validation_samples was 512 and is 9: the validation losses before and after "
        "the start can't be compared. KeepBest and EarlyStopping compare them"
    )
    assert [note for note in notes if "validation" in note] == number * [line]


def test_what_changes_without_being_typed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a group drops the run's own overrides below it."""
    monkeypatch.chdir(tmp_path)
    own = [
        "optimizer.weight_decay=0.3",
        "optimizer.betas=[0.8,0.9]",
        "launcher=local",
        "launcher.snapshot=false",
    ]
    write(run := prepared(*own, "run_dir=run"))
    write_json(run.folder.environment, {"overrides": own, "config_dir": None})
    run.folder.owner.unlink()
    write_checkpoint(run.folder.checkpoints, 40)

    def notes(*words: str) -> list[str]:
        return [note for note in prepared(*resumed(["resume=run", *words])).notes if "no override" in note]

    assert notes() == notes("optimizer.weight_decay=0.2", "training.steps=900") == []
    assert notes("optimizer={weight_decay:0.2,betas:[0.7,0.9]}") == []
    assert notes("optimizer=adamw", "optimizer.betas=[0.7,0.9]") == [
        "warning     no override of the run or of this line sets optimizer.weight_decay=0.1 (was 0.3)"
    ]


def test_auto_is_the_newest_of_that_name(here: Path) -> None:
    for name in ("20260101-000000-ffff", "20260102-000000-0000", "20260101-120000-aaaa"):
        (here / "runs" / "mine" / name / "rendezvous").mkdir(parents=True)
        (here / "runs" / "mine" / name / "config.yaml").touch()
    assert newest(["name=mine"]).name == "20260102-000000-0000"
    with pytest.raises(ConfigError, match="finds no run of yours in runs/mime"):
        newest(["name=mime"])


@pytest.mark.parametrize(
    ("words", "name"),
    [([], "data"), (["strategy=pipeline"], "pipeline"), (["strategy=fsdp", "name=mine"], "mine"),
     (["name=${strategy.name}-${nodes}", "nodes=2"], "data-2")],
)  # fmt: skip
def test_auto_looks_where_the_same_line_would_write(words: list[str], name: str, here: Path) -> None:
    for other in ("single", "data", "pipeline", "mine", "data-2"):
        (here / "runs" / other / "20260101-000000-ffff" / "rendezvous").mkdir(parents=True)
        (here / "runs" / other / "20260101-000000-ffff" / "config.yaml").touch()
    assert newest([*words, "resume=auto"]).parent.name == name
    assert newest([*words, "run_dir=runs/single/x", "resume=auto"]) == here / "runs/single/x"


@pytest.mark.parametrize(
    ("word", "legal"),
    [
        ("model.layers=8", "model.layers=4"),
        ("model.vocab_size=300", "model.vocab_size=256"),
        ("data.sequence_length=64", "data.sequence_length=128"),
        ("seed=1", "seed=0"),
        ("training.global_batch_size=32", "training.global_batch_size=16"),
        ("task=infer", "weights={run}."),
        ("training.steps=40", "training.steps=80"),
    ],
)
def test_settings_of_samples_and_weights_must_not_change(
    started: RunFolder, capsys: pytest.CaptureFixture[str], word: str, legal: str
) -> None:
    before = sorted(started.path.rglob("*"))
    assert main(["resume=run", word, "dry_run=true"]) == 2
    assert f"ry {legal.format(run=started.path)}" in capsys.readouterr().err
    assert sorted(started.path.rglob("*")) == before


def test_another_class_is_one_problem(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of the other class mean nothing for the run, so none of them is advised."""
    words = ("model=convnet", "data=digits", "optimizer=muon")
    assert main(["resume=run", *words, "dry_run=true"]) == 2
    rows = (
        ("optimizer", "torch.optim.Muon", "torch.optim.AdamW", "its state would not fit"),
        ("model", "models.convnet.ConvNet", "models.transformer.Transformer", "its weights would not fit"),
        ("data", "data.images.DigitsData", "data.text.TextData", "the order of samples would not continue"),
    )
    told = capsys.readouterr().err.replace(" hpc_parallel.", " ").splitlines()[1:]
    assert sorted(told) == sorted(
        f"  {group}._target_ = {new} differs from the run to resume, which has {old}: {why}. "
        f"Leave out what changes {group}."
        for group, new, old, why in rows
    )


def test_all_that_is_wrong_at_once(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume=run", "seed=1", "model.layers=8", "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "seed = 1" in said
    assert "model.layers = 8" in said
    assert main(["resume=rum", "training.steps=0", "dry_run=true"]) == 2
    said = capsys.readouterr().err
    assert "is not a run folder" in said
    assert "training.steps = 0" in said


@pytest.mark.parametrize(
    "words",
    [["strategy=fsdp", "nodes=4"], ["training.steps=200"], ["strategy.microbatches=4"],
     ["training.log_every=1"], ["optimizer.learning_rate=1e-4"], ["training.microbatch_size=2"]],
)  # fmt: skip
def test_where_and_how_it_runs_may_change(started: RunFolder, words: list[str]) -> None:
    assert main(["resume=run", *words, "dry_run=true"]) == 0


def test_data_may_have_moved(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The start compares its content, so the place of the same data may be another."""
    (started.path.parent / "texts").mkdir()
    (started.path.parent / "texts" / "a.py").write_text("a text\n" * 1000)
    assert main(["resume=run", "data.path=texts", "dry_run=true"]) == 0
    assert main(["resume=run", "data.path=text", "dry_run=true"]) == 2
    assert "data.path = text does not exist here. Try data.path=texts." in capsys.readouterr().err
    moved = SimpleNamespace(step=40, manifest={"data": "old", "config": {"data": {"path": "texts"}}})
    with pytest.raises(ConfigError, match=r"was at data\.path=texts, or has changed since\.$"):
        restore(moved, {}, reader=None, digest="new", device=torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("begun", [False, True])
def test_a_start_that_the_job_refuses_leaves_the_line_of_the_run(started: RunFolder, begun: bool) -> None:
    """Only the job reads the data; without this, each later `resume=run` has the wrong place again."""
    (started.path.parent / "texts").mkdir()
    (started.path.parent / "texts" / "a.py").write_text("a text\n" * 1000)
    config, before = started.config.read_text(), resumed(["resume=run"])
    write_json(started.summary, {"outcome": "completed"})
    words = resumed(["resume=run", "data.path=texts", "training.steps=900"])
    run = prepared(*words)
    write(run)
    assert yaml.safe_load(started.config.read_text())["data"]["path"] == "texts"
    if begun:
        attempts.begin(started, step=40, environment={})
    failure.record_exception(started, world=World.discover({}), error=ConfigError(["other data."]))
    refused = {"ranks": ["of the refused start"], "import_path": ["code"]}
    write_json(started.environment, read_environment(started) | refused)
    line = conclude(started, returncode=1, environment={})
    tell_end(started, line=str(line), decision=restart.Decision(restart.END))
    assert [end.line for end in attempts.ends(started)] == [
        line
    ]  # the end is recorded, with the line that was refused
    ended = Failure.read(started)
    assert ended is not None
    unchanged = "; the training that the run had completed is unchanged"
    assert ended.line == f"{line}{'' if begun else unchanged}"
    record = read_environment(started)
    assert [record.get("ranks"), record["import_path"]] == [refused["ranks"] if begun else None, ["code"]]
    started.owner.unlink()
    again = resumed(["resume=run"])
    if begun:  # it trained with what was typed
        assert "training.steps=900" in again
        return
    assert started.config.read_text() == config
    batch, end = "training.global_batch_size=16", before[-2:]
    assert [word for word in again if word not in (batch, *end)] == before[: -len(end) - 1]


def test_a_run_goes_on_in_its_own_folder(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (started.path.parent / "link").symlink_to(started.path)
    assert main(["resume=link", "run_dir=run/../run", "dry_run=true"]) == 0
    capsys.readouterr()
    assert main(["resume=run", "run_dir=elsewhere", "dry_run=true"]) == 2
    rule = "run_dir = elsewhere is not the folder of the run to resume, in which it goes on"
    assert f"{rule}. Try run_dir={started.path}.\n" in capsys.readouterr().err
    assert main(["resume=run", "run_dir=run", "dry_run=true"]) == 0


def test_no_run_and_no_checkpoint(started: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume=rum"]) == 2
    assert f"is not a run folder. Try resume={started.path}" in capsys.readouterr().err
    assert main([f"resume={started.path.parent}"]) == 2
    assert f"is not a run folder. Try resume={started.path}" in capsys.readouterr().err
    (started.checkpoints / "step-40" / "complete").unlink()
    assert main(["resume=run"]) == 2
    anew = "has no checkpoint, so it can't continue. Try python -m hpc_parallel rerun run for a new run."
    assert anew in capsys.readouterr().err
    owner.take(started)
    assert main(["resume=run"]) == 2
    assert f"is going on already, as process {os.getpid()}.\n" in capsys.readouterr().err


def test_what_a_run_that_continues_can_not_change_is_not_suggested(
    started: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume=run", "strategy=data", "nodes=3"]) == 2
    told = capsys.readouterr().err
    assert "16 does not divide by the 3 replicas" in told
    assert "A run that continues can't change it: samples would be left out or seen twice." in told
    assert "Try" not in told


def test_a_folder_that_others_may_write_is_refused(
    started: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:  # pytest's own folders are closed to others
        Path(open_to_all).chmod(0o755)
        shared = Path(open_to_all).resolve() / "run"
        shutil.copytree(started.path, shared)
        shared.chmod(0o777)
        assert main([f"resume={shared}", "dry_run=true"]) == 2
        said = capsys.readouterr().err
        assert "can be written by anyone" in said
        assert f"chmod go-w {shared}" in said


def test_a_living_owner_keeps_the_run(started: RunFolder) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        owner.claim(started)  # nobody's before
        assert owner.living_owner(started) == f"process {os.getpid()}"
        with pytest.raises(owner.OwnedError, match=f"is going on already, as process {os.getpid()}"):
            owner.claim(started)
        write_json(started.owner, {**asdict(owner.this_process()), "pid": process.pid})
        assert owner.living_owner(started) is None  # a number that another process has now
    finally:
        process.kill()
        process.wait()


def _claim(path: str, start: float, answers: multiprocessing.Queue[bool]) -> None:
    time.sleep(max(0.0, start - time.time()))
    try:
        owner.claim(RunFolder(Path(path)))
        answers.put(True)
    except owner.OwnedError:
        answers.put(False)
    signal.pause()


@pytest.mark.processes
def test_of_two_that_start_at_once_one_must_refuse(started: RunFolder) -> None:
    context = multiprocessing.get_context("fork")
    answers: multiprocessing.Queue[bool] = context.Queue()
    begin = time.time() + 0.3
    claimants = [context.Process(target=_claim, args=(str(started.path), begin, answers)) for _ in range(8)]
    for claimant in claimants:
        claimant.start()
    got = [answers.get(timeout=240) for _ in claimants]
    for claimant in claimants:
        claimant.kill()
        claimant.join()
    assert sorted(got) == [False] * 7 + [True]
    assert owner.living_owner(started) is None  # all are gone


def test_a_name_like_no_other_is_answered_with_the_newest_runs(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(here / "runs" / "data" / "20261122-01-aa", "training.steps=30")
    assert main(["resume=unlike"]) == 2
    assert "unlike is not a run folder. Try resume=data/20261122-01-aa." in capsys.readouterr().err
