"""Weights out of a run and into another: one file, by full names, whatever the layouts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from hpc_parallel.__main__ import main as command
from hpc_parallel.problems import ConfigError
from tests.marks import in_full
from tests.parity import largest_difference
from tests.workers import Trained, Workers, do_or_refuse

STEPS = 6
DATA = ("training.precision=float64", "training.global_batch_size=16", "training.validation_samples=32")
COMMON = (*DATA, f"training.steps={STEPS}", "training.log_every=1", f"training.validate_every={STEPS}",
          "training.measure_steps=0", "optimizer.warmup_steps=3")  # fmt: skip
TRANSFORMER = ("data.sequence_length=32", "data.max_bytes=400000", "model.layers=4", "model.dim=64",
               "model.ffn_dim=160")  # fmt: skip
CONVNET = ("model=segmenter", "data=cells", "data.samples=64", "model.channels=[8,12,16]", "data.height=32",
           "data.width=48")  # fmt: skip
LIBRARY = ("model=huggingface", "data.sequence_length=32", "data.max_bytes=400000",
           "model.config.hidden_size=32", "model.config.num_hidden_layers=2")  # fmt: skip


@pytest.fixture(scope="module")
def run(workers: Workers) -> Trained:
    """A pipeline of two stages, with checkpoints of steps 3 and 6."""
    words = ("strategy=pipeline", "nodes=2", "training.checkpoint_every=3")
    return workers.train(*COMMON, *TRANSFORMER, *words)


@pytest.fixture(scope="module")
def file(run: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "weights.safetensors"
    assert command(["export", str(run.folder), "--output", str(path)]) == 0
    return path


def test_the_file_has_the_weights_that_were_trained(run: Trained, file: Path) -> None:
    """Read by the format's own library; the tied head is there once."""
    from safetensors import safe_open

    found = load_file(file)
    assert found.keys() == run.weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in run.weights.items())
    with safe_open(file, framework="pt") as opened:
        about = opened.metadata()
    assert (about["step"], about["samples"]) == (str(STEPS), str(16 * STEPS))
    assert json.loads(about["model"])["dim"] == 64
    config = json.loads(about["config"])
    assert config.keys() == {"model", "data", "training", "strategy"}  # no launcher, no cluster
    assert config["strategy"]["name"] == "pipeline"


def validation_loss(run: Trained) -> float:
    return float(run.lines[-1]["validation_loss"])


LAYOUTS = {
    "single": ("strategy=single",),
    "fsdp 2 x tensor 2": ("strategy=fsdp", "nodes=4", "strategy.shard=2", "strategy.tensor=2"),
    "dualpipev 2": ("strategy=pipeline", "nodes=2", "strategy.schedule=dualpipev"),
    "server": ("strategy=parameter_server", "nodes=3"),
}


@pytest.mark.parametrize("layout", ["fsdp 2 x tensor 2", *in_full([("dualpipev 2",), ("server",)])])
def test_training_starts_from_them_in_any_layout(
    workers: Workers, run: Trained, file: Path, layout: str
) -> None:
    """With a new optimizer, from step 1: the same losses everywhere, and not the initial weights' ones."""
    words = (*COMMON, *TRANSFORMER, "training.checkpoint_every=null", "training.steps=3", f"weights={file}")
    single, split = (workers.train(*words, *LAYOUTS[name]) for name in ("single", layout))
    assert [line["samples"] for line in split.lines] == [16, 32, 48]
    assert largest_difference(split.losses, single.losses) < 1e-10
    assert single.losses[0] < run.losses[0] - 0.5
    for started in (single, split):
        assert json.loads((started.folder / "summary.json").read_text())["weights"] == str(file)


@pytest.mark.parametrize("layout", ["single", *in_full([("fsdp 2 x tensor 2",)])])
def test_inference_gives_the_loss_that_training_ended_with(
    workers: Workers, run: Trained, file: Path, layout: str
) -> None:
    words = (*DATA, *TRANSFORMER, *LAYOUTS[layout], "task=infer", "task.repeats=1", "task.batch_sizes=[2]")
    for weights, source in ((file, file), (run.folder, run.folder / "checkpoints" / f"step-{STEPS}")):
        folder = workers.do(*words, f"weights={weights}")
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["validation_loss"] == pytest.approx(validation_loss(run), rel=1e-10)
        assert summary["weights"] == str(source)


def test_a_damaged_checkpoint_is_replaced_by_the_previous_one(
    workers: Workers, run: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a job and in the export alike; what another start is writing there is left alone."""
    damaged = tmp_path / "run"
    shutil.copytree(run.folder, damaged)
    being_written = damaged / "checkpoints" / ".step-9"
    being_written.mkdir()
    file = damaged / "checkpoints" / f"step-{STEPS}" / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-8])
    words = (*DATA, *TRANSFORMER, "strategy=data", "nodes=2", "task=infer", "task.repeats=1")
    folder = workers.do(*words, "task.batch_sizes=[2]", f"weights={damaged}")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["weights"] == str(damaged / "checkpoints" / "step-3")
    assert being_written.is_dir()
    assert command(["export", str(damaged), "--step", str(STEPS)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"the checkpoint of step {STEPS} is damaged (__1_0.distcp has ")
    assert said.endswith("). Try --step 3.\n")
    assert command(["export", str(damaged)]) == 0
    assert capsys.readouterr().err.startswith(f"WARNING: the checkpoint of step {STEPS} is damaged")
    half = load_file(damaged / "step-3.safetensors")
    assert half.keys() == run.weights.keys()
    assert not torch.equal(half["stem.weight"], run.weights["stem.weight"])


def test_generation_continues_as_the_trained_weights_do(workers: Workers, run: Trained, file: Path) -> None:
    """The same tokens on two layouts, and other ones than the initial weights give."""
    words = (*DATA, *TRANSFORMER, "task=generate", "task.new_tokens=12", "training.global_batch_size=4")
    layouts = (("strategy=pipeline", "nodes=2"), ("strategy=single",))
    folders = [workers.do(*words, *layout, f"weights={file}") for layout in layouts]
    folders.append(workers.do(*words, "strategy=single"))
    pipeline, single, initial = (
        [json.loads(line)["tokens"] for line in (folder / "generated.jsonl").read_text().splitlines()]
        for folder in folders
    )
    assert pipeline == single
    assert single != initial
    assert json.loads((folders[0] / "summary.json").read_text())["weights"] == str(file)


def test_running_statistics_come_along(workers: Workers, tmp_path: Path) -> None:
    """The last validation uses them, so inference from tiles can give its loss only with them."""
    trained = workers.train(*COMMON, *CONVNET, "strategy=fsdp", "nodes=2")
    path = tmp_path / "net.safetensors"
    assert command(["export", str(trained.folder), "--output", str(path)]) == 0
    assert load_file(path).keys() > trained.weights.keys()
    words = (*DATA, *CONVNET, "strategy=tile", "nodes=2", "task=infer", "task.repeats=1")
    folder = workers.do(*words, "task.batch_sizes=[2]", f"weights={path}")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(validation_loss(trained), rel=1e-10)


def test_a_file_that_differs_between_hosts_is_refused(
    workers: Workers, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads its slices on its own host, so a model would be made of two."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        own = {name: tensor + rank for name, tensor in load_file(file).items()}
        save_file(own, tmp_path / str(rank) / "own.safetensors")
    monkeypatch.chdir(tmp_path / "0")
    name = "weights=/proc/self/cwd/own.safetensors"
    run = workers.prepare(*COMMON, *TRANSFORMER, "strategy=fsdp", "nodes=2", name)
    for told in workers.run(2, refusal_beside, str(run.folder.path), str(tmp_path)):
        assert "own.safetensors has another content on rank 1 than on rank 0" in told


def refusal_beside(run_folder: str, place: str) -> str:
    """What a rank says whose working folder is the one of its number in `place`."""
    before = os.getcwd()
    os.chdir(Path(place, str(dist.get_rank())))
    try:
        return do_or_refuse(run_folder, place)
    finally:
        os.chdir(before)


def test_weights_that_do_not_fit_are_refused_all_at_once(
    workers: Workers, file: Path, tmp_path: Path
) -> None:
    """On every rank alike, with both shapes; nothing in the file says here what it was trained as."""
    weights = load_file(file)
    weights["blocks.3.attention.extra"] = torch.zeros(2)
    del weights["head.norm.weight"]
    weights["stem.weight"] = weights["stem.weight"][:200].clone()
    wrong = tmp_path / "wrong.safetensors"
    save_file(weights, wrong)
    words = (*COMMON, *TRANSFORMER, "strategy=fsdp", "nodes=2", f"weights={wrong}")
    with pytest.raises(AssertionError) as raised:
        workers.train(*words)
    said = str(raised.value)
    assert f"weights = {wrong} does not have what the model has: head.norm.weight." in said
    assert f"weights = {wrong} has what the model does not have: blocks.3.attention.extra." in said
    assert f"weights = {wrong} has another shape: stem.weight [200, 64] instead of [256, 64]." in said
    assert said.count(ConfigError.__name__) >= 2


@pytest.mark.full
def test_a_librarys_model_is_exported_and_read_under_its_own_names(workers: Workers, tmp_path: Path) -> None:
    """The library's own model takes the file; and a file with its names is one to start from."""
    transformers = pytest.importorskip("transformers")
    trained = workers.train(*COMMON, *LIBRARY, "strategy=pipeline", "nodes=2")
    path = tmp_path / "llama.safetensors"
    assert command(["export", str(trained.folder), "--output", str(path), "--library-names"]) == 0
    shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 344, "num_hidden_layers": 2}
    settings = transformers.AutoConfig.for_model(
        "llama", **shape, num_attention_heads=4, tie_word_embeddings=True
    )
    library = transformers.AutoModelForCausalLM.from_config(settings)
    missing, unexpected = library.load_state_dict(load_file(path), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # which is the embedding
    words = (*DATA, *LIBRARY, "strategy=tensor", "nodes=2", "task=infer", "task.repeats=1")
    folder = workers.do(*words, "task.batch_sizes=[2]", f"weights={path}")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(validation_loss(trained), rel=1e-10)
