"""`python -m hpc_parallel.run` as Hydra's users expect it, without torch and without litter."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from hpc_parallel.config.run_help import USAGE
from hpc_parallel.run import main

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("here")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(arguments)
    told = capsys.readouterr()
    assert code == 0
    assert told.err == "" or told.err.startswith("each rank sets:\n")  # a dry run's
    assert not GlobalHydra.instance().is_initialized()
    return told.out


def python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, **path, **environment}, capture_output=True, text=True
    )


def test_cfg_job_prints_the_full_configuration(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = yaml.safe_load(printed(capsys, "--cfg", "job", "strategy=pipeline", "nodes=3"))
    assert (shown["nodes"], shown["strategy"]["pipeline"], shown["model"]["layers"]) == (3, -1, 4)
    assert set(shown) >= {"strategy", "model", "data", "optimizer", "training", "launcher", "cluster", "task"}
    assert list(here.iterdir()) == []


def test_a_list_of_long_texts_is_no_list_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is longer than a path may be."""
    prompts = f"task.prompts=['{'to be or not ' * 500}','{'that is ' * 700}']"
    assert main(["task=generate", prompts, "launcher=script", "dry_run=true"]) == 0


def test_resolve_says_which_value_only_a_start_knows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", "job", "--resolve"]) == 2
    assert "--resolve: only a start knows launcher.cpus_per_device." in capsys.readouterr().err
    shown = yaml.safe_load(printed(capsys, "--cfg", "job", "--resolve", "cluster.cpus_per_device=3"))
    assert shown["launcher"]["cpus_per_device"] == 3


def test_cfg_shows_one_package(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, "--cfg", "job", "--package", "strategy", "strategy=pipeline")
    assert yaml.safe_load(shown)["name"] == "pipeline"
    assert "nodes" not in yaml.safe_load(shown)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hydra-help"], ["--multirun", "--config-dir"]),
        (["--info", "defaults"], ["strategy/data", "model/tiny"]),
        (["--info", "searchpath"], ["main", "file://"]),
    ],
)
def test_hydra_explains(flags: list[str], words: list[str], here: Path) -> None:
    done = python("-m", "hpc_parallel.run", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    for word in words:
        assert word in done.stdout
    assert list(here.iterdir()) == []


def test_help_is_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """50 lines of 110 columns, with the user's own files and without the schemas."""
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("defaults: [data]\n")
    shown = printed(capsys, "--config-dir", str(tmp_path), "--help")
    for words in (
        "strategy   auto context data* dataparallel expert fsdp hsdp hybrid mine model parameter_server",
        "model      124m 1b 20m 70b 8b convnet deepseek_v2_lite huggingface mixtral_8x7b moe_tiny",
        "             qwen3_30b_a3b segmenter tiny* unet",
        "nodes=2",
    ):
        assert words in shown
    assert "schema" not in shown
    lines = shown.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 110


def test_every_example_of_the_help_is_legal(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text("import os\nprint(os.environ['RANK'])\n")
    examples = re.findall(r"^  python -m hpc_parallel\.run(.*?)(?:  |$)", USAGE, re.MULTILINE)
    assert len(examples) == 7
    for example in examples:
        words = [word for word in shlex.split(example) if not word.startswith(("resume=", "launcher="))]
        told = main(["launcher=script", *["dry_run=true"] * ("dry_run=true" not in words), *words])
        assert told == 0, capsys.readouterr().err


def test_the_shell_can_complete() -> None:
    done = python("-m", "hpc_parallel.run", "-sc", "install=bash")
    assert done.returncode == 0
    assert "complete" in done.stdout
    assert "hydra_bash_completion" in done.stdout


def test_a_sweep_makes_one_run_for_each_value(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(
        capsys, "-m", "nodes=1,2", "strategy=data,pipeline", "dry_run=true", "launcher=script", "cluster=cpu"
    )
    asked = [
        line for line in shown.splitlines() if line.startswith(("#SBATCH --nodes", "#SBATCH --job-name"))
    ]
    assert asked == [
        f"#SBATCH --{flag}" for nodes in (1, 2) for name in ("data", "pipeline")
        for flag in (f"job-name={name}", f"nodes={nodes}")
    ]  # fmt: skip
    assert not list(here.iterdir())


def test_a_sweep_into_one_folder_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=1,2", "run_dir=same", "launcher=script"]) == 2
    assert "run_dir = same is the same for several runs" in capsys.readouterr().err
    assert not list(here.iterdir())


def test_a_folder_that_cannot_be_created_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run_dir=/proc/mine", "launcher=script"]) == 2
    told = capsys.readouterr().err
    assert "run_dir = /proc/mine can't hold the run" in told
    assert "Traceback" not in told


def test_a_sweep_of_scripts_writes_every_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "-m", "nodes=1,2", "launcher=script", "launcher.snapshot=false")
    configs = [yaml.safe_load(file.read_text()) for file in here.glob("runs/data/*/config.yaml")]
    assert sorted(config["nodes"] for config in configs) == [1, 2]


@pytest.fixture
def own(here: Path) -> str:
    """A folder of the user's own configurations."""
    folder = here / "own conf"
    for group, name, text in (
        ("strategy", "mine", "name: mine\npipeline: 2\nreplicate: -1\n"),
        ("model", "mymodel", "_target_: types.SimpleNamespace\nwidth: 3\n"),
    ):
        (folder / group).mkdir(parents=True)
        (folder / group / f"{name}.yaml").write_text(text)
    return str(folder)


def test_a_folder_of_the_users_own_adds_choices(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-dir", own, "strategy=mine", "model=mymodel", "model.width=5", "nodes=4"]
    shown = yaml.safe_load(printed(capsys, *words, "--cfg", "job"))
    assert (shown["strategy"]["pipeline"], shown["model"]) == (
        2, {"_target_": "types.SimpleNamespace", "width": 5},
    )  # fmt: skip
    printed(capsys, *words, "dry_run=true", "launcher=script", "launcher.check_imports=false")


def test_faults_are_explained_with_the_users_own_choices(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config-dir", own, "strategy=mine", "model=mymodel", "nodes=4"]
    assert main([*words, "model.widht=5", "nodez=4"]) == 2
    told = capsys.readouterr().err
    assert "2 problems" in told
    assert "nodez" in told
    assert main(["--config-dir", own, "strategy=mien"]) == 2
    told = capsys.readouterr().err
    assert "strategy = mien is not one of auto, context, data, " in told
    assert ", mine, " in told
    assert "Try strategy=mine or" in told


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("arguments", [["--cfg", "job"], ["nodez=1"], ["dry_run=true", "launcher=local"]])
def test_the_users_environment_stays(
    value: str | None,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if value is not None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", value)
    before = dict(os.environ)
    main(arguments)
    assert dict(os.environ) == before


def test_the_launcher_does_not_see_hydras_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    seen: list[bool] = []
    monkeypatch.setattr(
        "hpc_parallel.commands.run_command.launch",
        lambda run: seen.append("HYDRA_FULL_ERROR" in os.environ) or 0,
    )
    assert main(["nodes=2"]) == 0
    assert seen == [False]


@pytest.mark.parametrize("launcher", ["slurm", "script", "local"])
def test_a_dry_run_writes_nothing(launcher: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "dry_run=true", f"launcher={launcher}", "nodes=2", "strategy=pipeline")
    assert list(here.iterdir()) == []


def test_nothing_of_hydras_lies_beside_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "launcher=script", "run_dir=mine", "launcher.snapshot=false")
    assert [path.name for path in here.iterdir()] == ["mine"]
    assert sorted(path.name for path in (here / "mine").iterdir()) == [
        "attempts.jsonl", "batch_script.sh", "config.yaml", "environment.json", "logs", "rendezvous", "slurm",
    ]  # fmt: skip


def test_the_full_configuration_is_recorded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a key that was deleted from the command line has its default in `config.yaml`."""
    printed(capsys, "launcher=script", "run_dir=mine", "~nodes", "~training", "launcher.snapshot=false")
    kept = yaml.safe_load((here / "mine" / "config.yaml").read_text())
    assert (kept["nodes"], kept["training"]["steps"], kept["name"]) == (1, 100, "data")
    assert kept["run_dir"] == str(here / "mine")
    assert "command" in json.loads((here / "mine" / "environment.json").read_text())


def test_overrides_are_recorded_for_each_run_of_a_sweep(own: str, here: Path) -> None:
    words = ["-m", "--config-dir", Path(own).name, "strategy=mine", "nodes=2,4", "name='it is'"]
    assert main([*words, "launcher=script", "launcher.snapshot=false"]) == 0
    kept = [json.loads(file.read_text()) for file in here.glob("runs/it is/*/environment.json")]
    shared = ["launcher=script", "launcher.snapshot=False"]  # in the sweeper's spelling
    assert sorted(each["overrides"] for each in kept) == [
        ["strategy=mine", f"nodes={nodes}", "name='it is'", *shared] for nodes in (2, 4)
    ]
    assert [each["config_dir"] for each in kept] == [own, own]


def test_an_interpolation_is_kept_as_it_was_typed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["name=${strategy.name}-${nodes}", "nodes=2", "run_dir=mine", "launcher=script"]
    printed(capsys, *words, "launcher.snapshot=false")
    kept = json.loads((here / "mine" / "environment.json").read_text())
    assert kept["overrides"] == [*words, "launcher.snapshot=false"]
    assert yaml.safe_load((here / "mine" / "config.yaml").read_text())["name"] == "data-2"


IMPORTED = """
import sys
import hpc_parallel.run
from hpc_parallel.__main__ import main
from hpc_parallel.config.override_words import override_words
assert override_words("training.")
for words in ("import", *sys.argv[1:]):
    code = 0 if words == "import" else main(words.split())
    assert code == 0, (code, words)
    assert not {"torch", "transformers"} & set(sys.modules), words
"""


def test_torch_is_never_imported(here: Path) -> None:
    done = python(
        "-c", IMPORTED, "plan --best model=1b gpus_per_node=8 hardware=h100_sxm_node8_3200gbit",
        *(f"run dry_run=true nodes=2 strategy=pipeline launcher={kind}"
          for kind in ("slurm", "script", "local")),
        "run dry_run=true nodes=2 strategy=tensor launcher=script model=huggingface",
        "run launcher=script nodes=2 run_dir=mine", "run --cfg job",
        "parity dry_run=true nodes=2 strategy=fsdp",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("fsdp: 2 nodes x 1 device = shard 2;")
    assert (here / "mine" / "batch_script.sh").exists()
    assert list(here.iterdir()) == [here / "mine"]
