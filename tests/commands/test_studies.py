"""The studies of `jobs/`: each composes whole, and the user's own words come before its."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from hpc_parallel.config import resolve
from hpc_parallel.config.compose import compose_cells
from hpc_parallel.config.places import find_folder
from hpc_parallel.measure.collectives import requested_bytes
from hpc_parallel.run import main
from hpc_parallel.sweep.sweep_plan import SweepPlan, plan_sweep

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted((ROOT / "jobs").glob("*.yaml"))
NAMES = {
    "compare_strategies", "strong_scaling", "weak_scaling", "microbatches", "pipeline_schedules",
    "batch_latency", "communication", "thread_bottleneck", "server_traffic", "tiles", "collectives",
    "placement", "input",
}  # fmt: skip
pytestmark = pytest.mark.usefixtures("here")


def planned(*words: str, extra_dir: str | None = None) -> SweepPlan:
    cells = compose_cells(
        ["launcher.snapshot=false", *words],
        config_dir=str(find_folder("conf")), config_name="config", extra_dir=extra_dir,
    )  # fmt: skip
    assert cells is not None
    return plan_sweep(cells, command=words)


def test_a_sweep_has_one_answer_for_launcher_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that answers now and then would give some runs to Slurm and others to this machine."""
    answers = iter([("slurm", "it answers"), ("local", "it is silent")] * 9)
    monkeypatch.setattr(
        resolve, "choose_launcher", lambda kind: next(answers) if kind == "auto" else (kind, "")
    )
    plan = planned("training.steps=1,2,3")
    assert [each.run.config.launcher.kind for each in plan.runs] == ["slurm"] * 3


def test_all_studies_are_there() -> None:
    assert {path.stem for path in STUDIES} == NAMES


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_run_of_a_study_can_run(path: Path) -> None:
    said = yaml.safe_load(path.read_text())
    choices = [str(values).split(",") for values in said["hydra"]["sweeper"]["params"].values()]
    plan = planned(f"jobs={path.stem}")
    assert (plan.skipped, plan.duplicates) == ([], 0)
    assert len(plan.runs) == math.prod(map(len, choices)) + len(said.get("sweep", {}).get("also", []))
    # Else as many as the example cluster has hosts.
    most = 8 if path.stem in ("strong_scaling", "collectives") else 4
    assert all(each.run.config.devices <= most for each in plan.runs)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_header_of_a_study_states_its_question_and_duration(path: Path) -> None:
    package, question, time, *_ = path.read_text().splitlines()
    assert package == "# @package _global_"
    assert re.fullmatch(r"# Question: .+\?", question)
    assert re.fullmatch(r"# Takes: .+ here \(.+\); on a cluster .+\.", time)


def test_overrides_replace_the_values_of_a_study() -> None:
    plan = planned("jobs=microbatches", "strategy.schedule=gpipe", "strategy.microbatches=2,4", "nodes=2")
    strategies = [each.run.config.strategy for each in plan.runs]
    assert [(each.schedule, each.microbatches) for each in strategies] == [("gpipe", 2), ("gpipe", 4)]
    assert {each.run.config.nodes for each in plan.runs} == {2}


@pytest.mark.parametrize("name", ["compare_strategies", "batch_latency"])
def test_the_baseline_is_one_device_however_many_the_others_have(name: str) -> None:
    plan = planned(f"jobs={name}", "gpus_per_node=2", "training.global_batch_size=56")
    alone = [each.run.config.devices for each in plan.runs if each.run.config.strategy.name == "single"]
    assert alone == [1]


def test_collectives_measure_the_inside_of_a_node_with_any_number_of_nodes() -> None:
    runs = [each.run.config for each in planned("jobs=collectives").runs]
    assert [(run.nodes, run.gpus_per_node) for run in runs] == [(1, 2), (2, 2), (4, 2)]
    largest = [(requested_bytes(run.task, device=torch.device("cuda")),
                requested_bytes(run.task, device=torch.device("cpu"))) for run in runs]  # fmt: skip
    assert largest == [(2**30, 2**26)] * 3


def test_a_device_has_as_much_work_as_there_are_more_of_them() -> None:
    runs = [each.run.config for each in planned("jobs=weak_scaling", "gpus_per_node=2").runs]
    assert {config.devices for config in runs} == {2, 4, 8}
    assert all(config.training.global_batch_size == 16 * config.devices for config in runs)


def test_a_study_of_the_users_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = here / "mine" / "jobs" / "mine.yaml"
    study.parent.mkdir(parents=True)
    text = "training: {steps: 7}\nhydra: {sweeper: {params: {nodes: '1,2', strategy: 'data,fsdp'}}}\n"
    study.write_text(f"# @package _global_\n{text}")
    runs = [each.run.config for each in planned("jobs=mine", "seed=3", extra_dir=str(here / "mine")).runs]
    assert [(run.nodes, run.strategy.name, run.seed, run.training.steps) for run in runs] == [
        (1, "data", 3, 7), (1, "fsdp", 3, 7), (2, "data", 3, 7), (2, "fsdp", 3, 7)
    ]  # fmt: skip
    study.write_text(text)
    assert main(["--config-dir", "mine", "-m", "jobs=mine", "launcher=script"]) == 2
    assert "the first line of mine.yaml must be '# @package _global_'" in capsys.readouterr().err
    assert list(here.iterdir()) == [here / "mine"]


_DEFAULTS = "# @package _global_\ndefaults: [{}]\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("nodes: 2\n", "the first line of mine.yaml must be '# @package _global_', and its keys those of "),
        ("# @package _global_\nnodez: 2\n", "{file}, line 2: there is no key nodez. Try nodes."),
        ("# @package _global_\nnodes: [\n", "{file}, line 3, column 1: "),
        (_DEFAULTS.format("override strategy: fsdp"), "{file}: Could not override '{group}/strategy@"
         "strategy'. No match in the defaults list. Its defaults choose a file by '- override /strategy: "),
        (_DEFAULTS.format("/strategy: fsdp"), "{file}: Multiple values for strategy. Its defaults choose a "
         "file by '- override /strategy: fsdp'."),
        (_DEFAULTS.format("override /strategy: fsdq"), "{file}: Could not find 'strategy/fsdq'."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("group", ["jobs", "experiment"])
def test_what_is_wrong_in_a_file_of_whole_runs_is_named(
    group: str, content: str, line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = here / "mine" / group / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert main(["--config-dir", "mine", f"+{group}=mine", "launcher=script"]) == 2
    assert line.format(file=file, group=group) in capsys.readouterr().err


def test_a_group_of_the_users_own_is_chosen_by_a_plus(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = here / "mine" / "experiment" / "mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(_DEFAULTS.format("override /strategy: fsdp") + "nodes: 2\n")
    for word, line in [
        ("experiment=mine", "experiment is a group of your own, which a plus chooses. Try +experiment=mine."),
        ("experiment=min", "+experiment = min is not one of mine. Try +experiment=mine."),
    ]:
        assert main(["--config-dir", "mine", word, "launcher=script"]) == 2
        assert line in capsys.readouterr().err
    assert main(["--config-dir", "mine", "--cfg", "job", "+experiment=mine"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["nodes"], shown["strategy"]["name"]) == (2, "fsdp")


def test_a_configuration_of_the_users_own_has_ours(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "mine.yaml").write_text("defaults: [_self_, strategy: fsdp]\nnodes: 3\n")
    assert main(["--config-dir", "mine", "--config-name", "mine", "dry_run=true", "launcher=script"]) == 2
    assert "--config-name mine: its defaults need ours: [config, _self_]." in capsys.readouterr().err


def test_one_run_of_a_study_is_a_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["jobs=server_traffic", "strategy=data", "launcher=script"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  jobs=server_traffic: a study has many runs. Try run -m jobs=server_traffic, or one: "
        "jobs=server_traffic nodes=2."
    ]
    assert list(here.iterdir()) == []
    words = ("jobs=server_traffic", "strategy=data", "nodes=3", "dry_run=true", "launcher=script")
    for said in (words, (f"+{words[0]}", *words[1:])):
        assert main(said) == 0
        assert "#SBATCH --nodes=3" in capsys.readouterr().out


def test_the_study_of_the_guide_is_one(here: Path) -> None:
    text = re.search(r"```yaml\n(# @package.*?)```", (ROOT / "docs/sweep.md").read_text(), re.DOTALL)
    (here / "jobs").mkdir()
    (here / "jobs" / "mine.yaml").write_text(text[1])
    runs = [each.run.config for each in planned("jobs=mine", extra_dir=str(here)).runs]
    assert [(run.strategy.name, run.nodes, run.training.global_batch_size) for run in runs] == [
        ("data", 2, 16), ("data", 4, 32), ("fsdp", 2, 16), ("fsdp", 4, 32), ("single", 1, 8)
    ]  # fmt: skip
