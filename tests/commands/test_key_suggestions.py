"""Suggestions for unknown keys: the name in other programs, another group, a typing error, or nothing."""

from __future__ import annotations

import os
import random
import string
from collections.abc import Sequence
from pathlib import Path

import pytest
from omegaconf import DictConfig

from hpc_parallel import __version__
from hpc_parallel.commands.run_command import main
from hpc_parallel.config import file_problems, job_python
from hpc_parallel.config.class_paths import missing_part
from hpc_parallel.config.compose import Composer
from hpc_parallel.config.key_suggestions import SYNONYMS, same_quantity, suggest
from hpc_parallel.config.resolve import flat
from tests.composed import composed

LINES = {
    "optimizer.lr=0.1": "Try optimizer.learning_rate=0.1.",
    "lr=0.1": "Try optimizer.learning_rate=0.1.",
    "epochs=3": "Try training.steps=500.",
    "batch_size=32": "Try training.global_batch_size=32.",
    "optimizer.wd=0.01": "Try optimizer.weight_decay=0.01.",
    "fp16=true": "Try training.precision=float16.",
    "training.bf16=true": "Try training.precision=bfloat16.",
    "amp=true": "Try training.precision=bfloat16.",
    "strategy.tp=2": "Try strategy.tensor=2.",
    "pp=2": "Try strategy.pipeline=2.",
    "dp=2": "Try strategy.replicate=2.",
    "ckpt=yes": "Try training.checkpoint_every=500.",
    "eval=true": "Try training.validate_every=100.",
    "gpus=2": "Try gpus_per_node=2.",
    "model.hidden_size=64": "Try model.dim=64.",
    "model.widht=3": "there is no key model.widht.",
    "gradient_accumulation=4": "accumulated over microbatches. Try training.microbatch_size=4.",
    "optimizer._target_=torch.optim.SGD": "Try optimizer=custom optimizer._target_=torch.optim.SGD.",
    "training.foo=1": "there is no key training.foo.",
    "training.learning_rate=0.1": "Try optimizer.learning_rate=0.1.",
    "launcher.schedule=x": "If it is an option of sbatch, try +launcher.extra.schedule=x.",
    "strategy=ddp": "Try strategy=data.",
    "strategy=zero3": "Try strategy=fsdp.",
    "strategy=cp": "Try strategy=context.",
    "device=gpu": "Try device=cuda.",
    "training.precision=half": "Try training.precision=float16.",
    "training.precison=x": "Try training.precision=float32.",
    "training.stepss=0": "Try training.steps=500.",
    "training.complie=x": "Try training.compile=true.",
    "time=2h": "Try launcher.time_minutes=120.",
    "launcher.memory_gb=64G": "Try launcher.memory_gb=64.",
    "launcher.memory_gb=512MiB": "Try launcher.memory_gb=0.5.",
    "data.packing=true": "no key data.packing here. Try data=dataset, data=parquet or data=tokens.",
    "model.experts=4": "Try model=deepseek_v2_lite, model=mixtral_8x7b or model=moe_tiny.",
    "task.seconds=3": "no key task.seconds here. Try task=calibrate, task=collectives or task=infer.",
    "launcher.cpus_per_device=maybe": "is not a whole number. Try launcher.cpus_per_device=1.",
    "script.requeue_codes=maybe": "is not a list of whole numbers [a,b]. Try script.requeue_codes=[].",
    "script.argumnts.lr=1e-3": "Try script.arguments.lr=1e-3.",
    "launcher.extra={nice:10}": "needs a plus. Try +launcher.extra={nice:10}.",
    "optimizer.groups={a:{dims:[1],weight_decay:0}}": "'+optimizer.groups={a:{dims:[1],weight_decay:0}}'.",
    "cluster.environment.A=b": "needs a plus. Try +cluster.environment.A=b.",
    "+training.checkpoint_every=null": "+ adds a new key. Try training.checkpoint_every=null.",
    "launcher.hold=true": "try +launcher.extra.hold=true.",
    "launcher.mail=END,FAIL": "try \"+launcher.extra.mail='END,FAIL'\".",
    "launcher.modules=a,b": "Try launcher.modules=[a,b].",
    "launcher.extr.reservation=mine": "Try +launcher.extra.reservation=mine.",
    "data=words.npy": "Try data=tokens data.path=words.npy.",
    "strategy=Parameter-Server": "Try strategy=parameter_server.",
    "training.steps=10k": "Try training.steps=10000.",
    "launcher.grace_s=5min": "Try launcher.grace_s=300.",
    "launcher.snapshot_mb=1G": "Try launcher.snapshot_mb=1024.",
    "data.max_bytes=64M": "Try data.max_bytes=67108864.",
    "model=mymodel": "is found by --config-dir FOLDER, which holds model/mymodel.yaml.",
}


def test_the_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hpc_parallel {__version__}\n")


def test_the_suggestion_means_what_was_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """In a few commands that have each key once: an override has its own line, whatever the others are."""
    left = LINES
    while left:
        command = {override.partition("=")[0]: override for override in left}.values()
        left = {override: end for override, end in left.items() if override not in command}
        assert main([*command, "launcher=script"]) == 2
        told = [line.strip().replace(" = ", "=", 1) for line in capsys.readouterr().err.splitlines()[1:]]
        assert len(told) == len(command)
        for override in command:
            (line,) = (line for line in told if line.startswith(override))
            assert line.endswith(LINES[override])


def test_a_typing_error_composes_no_other_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No file of conf/model has the key: composing with each of them would take two seconds."""
    composed_with: list[str] = []
    compose = Composer.compose

    def noted(self: Composer, overrides: Sequence[str]) -> DictConfig:
        composed_with.extend(overrides)
        return compose(self, overrides)

    monkeypatch.setattr(Composer, "compose", noted)
    assert main(["model.hiden=3", "launcher=script"]) == 2
    assert capsys.readouterr().err.splitlines()[1].strip() == "model.hiden=3: there is no key model.hiden."
    assert {"model.hiden=3", "launcher=script"} == set(composed_with)


def test_a_file_may_take_the_key_from_another_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "model/mine.yaml": "defaults: [/extras/a@_here_, _self_]\n_target_: my.Net\n",
        "extras/a.yaml": "special_width: 3\n",
    }
    for name, text in files.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True)
        (tmp_path / "site" / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", "site", "model.special_width=4", "launcher=script"]) == 2
    assert (
        capsys.readouterr().err.splitlines()[1].endswith("no key model.special_width here. Try model=mine.")
    )


FLAGS = {
    ("--nodes", "2"): "--nodes: a key has no dashes before it. Try nodes=2.",
    ("strategy=data", "--strategy=pipeline"): "--strategy=pipeline: a key has no dashes before it. "
    "Try strategy=pipeline.",
    ("--num-nodes", "4"): "--num-nodes: a key has no dashes before it. Try nodes=4.",
    ("--training.steps=5",): "--training.steps=5: a key has no dashes before it. Try training.steps=5.",
    ("--verbose",): "--verbose: there is no such flag. `run --help` lists the flags and keys.",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_flag_that_is_a_key_becomes_an_override(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.splitlines()[1].strip() == FLAGS[words]


def test_flags_may_follow_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodes=1,0", "-m", "strategy=data", "sweep.on_invalid=stop", "launcher=script"]) == 2
    assert "nodes = 0" in capsys.readouterr().err


def test_each_synonym_names_a_key_of_some_model() -> None:
    keys = {key for model in ("tiny", "moe_tiny") for key in flat(composed(f"model={model}"))}
    assert {name.partition("=")[0] for name in SYNONYMS.values()} <= keys
    assert not SYNONYMS.keys() & {key for key in keys if "." not in key}


def test_nothing_far_is_suggested() -> None:
    """A key of random letters has no suggestion, unless another program or another group has this key."""
    keys = flat(composed())
    letters = random.Random(0)
    for _ in range(500):
        group = letters.choice(["optimizer.", "training.", "strategy.", "launcher.", ""])
        word = "".join(letters.choices(string.ascii_lowercase, k=letters.randint(2, 10)))
        suggestion = suggest(group + word, keys)
        if suggestion is not None and word not in SYNONYMS and group + word not in keys:
            assert suggestion.rpartition(".")[2] == word


def test_a_typing_error_has_its_key() -> None:
    """Each key of a group with at least four letters, two of them swapped."""
    keys = flat(composed())
    for key in (key for key in keys if key.startswith(("training.", "strategy.", "launcher."))):
        parent, _, name = key.rpartition(".")
        swapped = name[:1] + name[2:3] + name[1:2] + name[3:] if len(name) > 3 else name
        assert suggest(f"{parent}.{swapped}", keys) == key or f"{parent}.{swapped}" in keys


FOLDERS = {
    "data=notes": "Try data=text data.path=notes 'data.pattern=*.txt'.",
    "data.path=notes": "no file matches data.pattern = *.py in notes. Try 'data.pattern=*.txt'.",
    "data.path=notes data.pattern=*.c": "no file matches data.pattern = *.c in notes. Try 'data.pattern="
    "*.txt'.",
    "data.path=pictures": "in pictures. It must be a text file or a folder of text files.",
    "data=pictures": "Try data=text.",
    "data=tables": "Try data=parquet data.path=tables.",
    "data=mydata.Points": "Try data=dataset data.dataset._target_=mydata.Points.",
    "model=mine": "Try --config-dir site model=mine.",
    "model=site/model/mine.yaml": "Try --config-dir site model=mine.",
    "model=mymodel.Net": "chosen by a file site/model/mine.yaml with the line `_target_: mymodel.Net` and "
    "its arguments. Then try --config-dir site model=mine.",
    "model=lib/mymodel.py": "with the line `_target_: lib.mymodel.CLASS` and its arguments. Then try "
    "--config-dir site model=mine.",
    "model._target_=mymodel.Net": "names no class: there is no module mymodel here, but in HERE/lib: start "
    "in that folder, or with PYTHONPATH=HERE/lib.",
    "model._target_=trian.Net": "names no class: there is no module trian here, in this folder or on "
    "PYTHONPATH. Try model._target_=train.Net.",
    "optimizer=custom optimizer._target_=mymodel.Sgd": "there is no module mymodel here, but in HERE/lib: "
    "start in that folder, or with PYTHONPATH=HERE/lib.",
}  # fmt: skip


@pytest.mark.parametrize("words", FOLDERS)
def test_what_a_user_has_here_is_found(words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "notes/a.txt": b"one", "notes/deep/b.txt": b"two", "notes/README.md": b"three",
        "pictures/a.png": b"\x89PNG\0\xff", "tables/part-0.parquet": b"PAR1",
        "site/model/mine.yaml": b"_target_: mymodel.Net\n", "lib/mymodel.py": b"class Net: ...\n",
        "train.py": b"class Net: ...\n",
    }  # fmt: skip
    for name, content in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(content)
    assert main([*words.split(), "launcher=script"]) == 2
    problem = capsys.readouterr().err.splitlines()[1]
    assert problem.endswith(FOLDERS[words].replace("HERE", str(here)))


def test_a_run_from_a_folder_below_names_the_one_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/__init__.py").write_text("class Net: ...\n")
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path / "results")
    assert main(["model._target_=mine.Net", "launcher=script"]) == 2
    assert f"PYTHONPATH={tmp_path}." in capsys.readouterr().err


def test_a_closed_folder_of_another_user_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root can look into every folder, so the test answers for the file system."""
    for folder in ("open", "closed"):
        (tmp_path / folder).mkdir()
    (tmp_path / "open" / "shy.py").write_text("class Net: ...\n")
    monkeypatch.chdir(tmp_path)
    stat = Path.stat

    def guarded(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if "closed" in path.absolute().parent.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", guarded)
    rule, _ = missing_part("shy.Net") or ("", ())
    assert f"but in {tmp_path}/open" in rule
    assert job_python.named({"CONDA_ENVS_PATH": str(tmp_path), "HOME": str(tmp_path), "PATH": ""}) == {}
    assert job_python.find_environment("closed/torch", variables={"PATH": ""}) is None
    assert file_problems.of_ones_own("model", "mine") is None
    assert file_problems.of_ones_own("data", "closed/notes") is None


@pytest.mark.parametrize(
    ("key", "value", "number"),
    [
        ("cluster.start_timeout_s", "500msec", 0.5),
        ("cluster.start_timeout_s", "90 sec", 90.0),
        ("cluster.start_timeout_s", "2minutes", 120.0),
        ("launcher.time_minutes", "2hr", 120.0),
        ("launcher.time_minutes", "1day", 1440.0),
        ("launcher.time_minutes", "2months", None),
        ("cluster.start_timeout_s", "3standard", None),
        ("cluster.start_timeout_s", "3us", None),
    ],
)
def test_only_units_of_time_that_are_known_are_converted(key: str, value: str, number: float | None) -> None:
    assert same_quantity(key, value) == number
