"""`weights=` and `export` as the login node sees them: what can't be used is told before anything starts."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from hpc_parallel.__main__ import main as command
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.checkpoint_index import checksum, keep_best, publish, unfinished_folder
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safetensors_header import read_header
from hpc_parallel.training import export_weights, load_weights
from tests.composed import composed, prepared

MODEL = dict(composed("model=tiny").model)
DATA = dict(composed("model=tiny").data)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.safetensors"
    tensors = {"stem.weight": np.zeros((3, 2), dtype=np.float32), "count": np.zeros((), dtype=np.int64)}
    save_file(tensors, path, metadata={"model": json.dumps(MODEL)})
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with a checkpoint of one file at the steps 5 and 10."""
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.config.write_text(yaml.safe_dump({"model": MODEL}))
    folder.checkpoints.mkdir()
    for step in (5, 10):
        unfinished_folder(folder.checkpoints, step).mkdir()
        part = unfinished_folder(folder.checkpoints, step) / "part"
        part.write_bytes(b"numbers")
        files = {"part": {"bytes": 7, "xxh3_128": checksum(part)}}
        publish(folder.checkpoints, step=step, files=files, about={"config": {"model": MODEL, "data": DATA}})
    return folder


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        prepared("launcher=local", "launcher.snapshot=false", *words)
    return [str(problem) for problem in raised.value.problems]


def test_the_header_lists_names_and_shapes(file: Path) -> None:
    """As the format's own library wrote it."""
    shapes, about = read_header(file)
    assert shapes == {"stem.weight": (3, 2), "count": ()}
    assert json.loads(about["model"])["dim"] == MODEL["dim"]


def test_a_file_or_a_run_is_recorded_by_its_full_path(
    file: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    for name, path in ((file.name, file), ("run", run.path)):
        assert prepared("launcher=local", "launcher.snapshot=false", f"weights={name}").values[
            "weights"
        ] == str(path)


def test_a_missing_file_has_a_near_name(file: Path) -> None:
    wrong = file.with_name("tinny.safetensors")
    assert problems(f"weights={wrong}") == [f"weights = {wrong} does not exist here. Try weights={file}."]


def test_a_file_that_is_none_or_cut_short(file: Path, tmp_path: Path) -> None:
    size = file.stat().st_size
    other = tmp_path / "other.safetensors"
    for content, why in {
        file.read_bytes()[:-3]: f"it has {size - 3} of {size} bytes",
        file.read_bytes()[:20]: "it is not a safetensors file",
        b"\x93NUMPY" * 40: "it is not a safetensors file",
        b"": "it is not a safetensors file",
    }.items():
        other.write_bytes(content)
        assert problems(f"weights={other}") == [f"weights = {other} can't be used: {why}"]


def test_a_folder_that_is_no_run_or_has_no_checkpoint(run: RunFolder, tmp_path: Path) -> None:
    assert problems(f"weights={tmp_path}") == [
        f"weights = {tmp_path} can't be used: the folder is not a run folder. Name a run folder or one "
        ".safetensors file (docs/models-and-data.md joins several)"
    ]
    (tmp_path / "model.safetensors").touch()  # as Hugging Face names it
    (line,) = problems(f"weights={tmp_path}")
    assert line.endswith(f"not a run folder. Try weights={tmp_path / 'model.safetensors'}.")
    for step in (5, 10):
        (run.checkpoints / f"step-{step}" / "complete").unlink()
    assert problems(f"weights={run.path}") == [
        f"weights = {run.path} can't be used: the run has no checkpoint"
    ]


def test_a_run_that_others_may_write_is_not_unpickled(run: RunFolder) -> None:
    """In a place that others can enter: pytest's own lies behind a closed folder, where all is well."""
    with tempfile.TemporaryDirectory() as made:
        open_folder = Path(made).resolve()
        open_folder.chmod(0o755)
        if not all(parent.stat().st_mode & 0o011 for parent in open_folder.parents):
            pytest.skip(f"{open_folder} lies behind a closed folder")
        moved = RunFolder(run.path.rename(open_folder / "run"))
        assert prepared("launcher=local", "launcher.snapshot=false", f"weights={moved.path}")
        moved.path.chmod(0o755)
        moved.checkpoints.chmod(0o777)
        (said,) = problems(f"weights={moved.path}")
        why = f"{moved.checkpoints} (mode 0777) can be written by anyone"
        assert said.startswith(f"weights = {moved.path} can't be used: {why}")
        trusted = ("launcher.shared_folder=true", "launcher=local", "launcher.snapshot=false")
        assert prepared(*trusted, f"weights={moved.path}")
        assert command(["export", str(moved.path)]) == 2


def test_a_model_of_another_shape_is_refused_with_the_right_shape(file: Path, run: RunFolder) -> None:
    for source in (file, run.path):
        assert problems(f"weights={source}", "model.layers=2", "model.dim=64", "model.rope_theta=5000") == [
            f"model.{key} = {value} differs from the model that the weights were trained with. "
            f"Try model.{key}={MODEL[key]}."
            for key, value in (("layers", 2), ("dim", 64))
        ]


def test_values_that_fit_but_mean_something_else_are_named(file: Path, run: RunFolder) -> None:
    """The rotation of the positions has no weight; another text has another validation loss."""
    words = ("launcher=local", "launcher.snapshot=false", "model.rope_theta=5000", "data.max_bytes=70000")
    rotation = "model.rope_theta=5000 (trained with 10000)"
    text = "data.max_bytes=70000 (trained with 6000000)"
    for source, task, differ in (
        (file, "train", rotation),
        (file, "infer", rotation),
        (run.path, "train", rotation),
        (run.path, "infer", f"{rotation}, {text}"),
    ):
        notes = prepared(*words, f"task={task}", f"weights={source}").notes
        assert f"warning     the weights of {source} were trained otherwise: {differ}" in notes
        equal = prepared(*words[:2], f"task={task}", f"weights={source}").notes
        assert not [note for note in equal if "trained otherwise" in note]


def test_a_file_of_another_program_may_say_anything_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({"a": np.zeros(1)}, path, metadata={"model": "llama", "config": "[1]"})
    notes = prepared("launcher=local", "launcher.snapshot=false", f"weights={path}").notes
    assert not [note for note in notes if "weights" in note]


def test_a_resumed_run_does_not_look_at_them(run: RunFolder) -> None:
    """It goes on from its own checkpoints: the file may be gone by then."""
    values = prepared("launcher=local", "launcher.snapshot=false").values
    run.config.write_text(yaml.safe_dump({**values, "weights": "/gone.safetensors"}))
    words = (
        "launcher=local",
        "launcher.snapshot=false",
        f"resume={run.path}",
        f"run_dir={run.path}",
        "weights=/gone.safetensors",
    )
    assert prepared(*words).values["weights"] == "/gone.safetensors"
    other = problems(*words[:-1], "weights=/other.safetensors")
    assert other == [
        "weights = /other.safetensors differs from the run to resume: it continues from its own weights. "
        "Try weights=/gone.safetensors."
    ]


def test_an_export_that_can_not_be(
    run: RunFolder, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each ends with 2, says what would do, and leaves no file."""
    before = set(tmp_path.rglob("*"))
    free = tmp_path / "new.safetensors"
    for words, said in {
        (str(tmp_path),): f"{tmp_path} is not a run folder (no config.yaml and rendezvous in it).",
        (str(run.path), "--step", "7"): f"{run.path} has no checkpoint of step 7. It has: 10, 5.",
        (str(run.path), "--step", "best"): (
            f"{run.path} records no best checkpoint (the callback KeepBest). It has: 10, 5."
        ),
        (str(run.path), "--output", str(file)): (
            f"{file} exists already, and a job may be reading it. Try another --output."
        ),
        (str(run.path), "--output", str(tmp_path / "new.bin")): (
            f"--output {tmp_path / 'new.bin'} must end in .safetensors. Try --output {free}."
        ),
        (str(run.path), "--output", str(tmp_path / "none" / "new.safetensors")): (
            f"--output {tmp_path / 'none' / 'new.safetensors'}: there is no folder {tmp_path / 'none'}. "
            f"Try mkdir -p {tmp_path / 'none'}."
        ),
    }.items():
        assert command(["export", *words]) == 2
        assert capsys.readouterr().err.strip() == said
    (run.checkpoints / "step-10" / "part").write_bytes(b"letters")
    broken = "the checkpoint of step 10 is damaged (part is not what was written (its checksum differs))"
    assert command(["export", str(run.path), "--step", "10"]) == 2
    assert capsys.readouterr().err.strip() == f"{broken}. Try --step 5."
    (run.checkpoints / "step-5" / "part").write_bytes(b"cut")
    assert command(["export", str(run.path)]) == 2
    assert capsys.readouterr().err.strip() == (
        f"{broken}; the checkpoint of step 5 is damaged (part has 3 of 7 bytes), and no sound one is before."
    )
    for step in (5, 10):
        os.unlink(run.checkpoints / f"step-{step}" / "complete")
    assert command(["export", str(run.path)]) == 2
    assert capsys.readouterr().err.strip() == f"{run.path} has no checkpoint (training.checkpoint_every)."
    assert set(tmp_path.rglob("*")) <= before


def test_the_best_checkpoint_is_exported_and_never_another(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[Path] = []
    monkeypatch.setattr(
        export_weights, "write", lambda checkpoint, output, **names: written.append(checkpoint.path) or 7
    )
    keep_best(run.checkpoints, step=5, loss=1.0)
    for words in (["--step", "best"], ["--step=best"], []):
        assert command(["export", str(run.path), *words]) == 0
    assert [path.name for path in written] == ["step-5", "step-5", "step-10"]
    assert f"{run.path / 'step-5.safetensors'}: the weights of step 5, 7 bytes." in capsys.readouterr().out
    keep_best(run.checkpoints, step=10, loss=0.5)
    (run.checkpoints / "step-10" / "part").write_bytes(b"letters")
    assert command(["export", str(run.path), "--step", "best"]) == 2
    assert capsys.readouterr().err.strip().endswith("(its checksum differs)). Try --step 5.")
    (run.checkpoints / "best.json").write_text("{")
    assert command(["export", str(run.path), "--step", "best"]) == 2
    assert "best.json can't be read: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(["export", str(run.path), "--step", "bests"])
    assert "bests is no step. Try a number, or best" in capsys.readouterr().err


@pytest.mark.parametrize("head", [0.0, 1e-3])
def test_two_values_for_a_tied_weight_are_refused(
    head: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of an untied model (most of transformers are) was dropped without a word."""
    embedding = np.ones((5, 3), dtype=np.float16)
    save_file({"lm_head.weight": embedding + np.float16(head), "embed.weight": embedding}, tmp_path / "file")
    monkeypatch.setattr(load_weights.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(load_weights.exchange, "broadcast", lambda value: value)
    source = load_weights.WeightsFile(tmp_path / "file")
    aliases = {"lm_head.weight": "embed.weight", "other.weight": "embed.weight"}  # one that the file lacks
    if head == 0:
        load_weights.require_tied(source, aliases, path=tmp_path)
        return
    with pytest.raises(
        ConfigError, match=r"other values in lm_head\.weight than in embed\.weight, which are"
    ):
        load_weights.require_tied(source, aliases, path=tmp_path)


def test_names_of_a_model_that_is_not_here_say_where_to_look() -> None:
    with pytest.raises(ConfigError) as raised:
        export_weights.library_name({"_target_": "nothere.Net"})
    assert [str(problem) for problem in raised.value.problems] == [
        "model._target_ = nothere.Net names no class: there is no module nothere here, in this folder or on "
        "PYTHONPATH."
    ]
