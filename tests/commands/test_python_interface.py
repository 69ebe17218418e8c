"""`hpc_parallel.compose`, `submit`, `runs` and `Run`: what the commands do, without a command's habits."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import hpc_parallel
from hpc_parallel import ConfigError, Run, RunConfig, SiteRefusedError
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.hydra_internals import composing
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.schema import register
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.run import main
from tests import recorded_runs
from tests.recorded_runs import living

ROOT = Path(__file__).resolve().parents[2]
QUIET = ("launcher=script", "launcher.snapshot=false")
pytestmark = pytest.mark.usefixtures("silent_slurm")


def own_files(folder: Path) -> list[str]:
    """A folder of the user's own with a model; returns overrides that use it."""
    (folder / "model").mkdir(parents=True)
    (folder / "model/mine.yaml").write_text("defaults: [tiny]\nlayers: 6\n")
    return ["model=mine", "nodes=2", "strategy=pipeline"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(store: Any) -> Any:
    return {name: names(node) for name, node in store.items()} if isinstance(store, dict) else None


class TestCompose:
    @pytest.mark.parametrize(
        "words",
        [
            [],
            ["strategy=pipeline", "nodes=2"],
            ["model=convnet", "data=digits", "strategy=fsdp", "gpus_per_node=4", "name=mine"],
            ["task=infer", "task.batch_sizes=[1,2]", "+launcher.extra.mail-user=me", "~jobs"],
        ],
    )
    def test_it_is_what_the_command_composes(self, words: list[str]) -> None:
        config = hpc_parallel.compose(words)
        assert isinstance(config, RunConfig)
        assert config == checked_run(CommandLine.parse(words)).config

    def test_files_of_the_users_own(self, here: Path) -> None:
        words = own_files(here / "site")
        expected = checked_run(CommandLine.parse(["--config-dir", "site", *words])).config
        assert hpc_parallel.compose(words, config_dir=here / "site") == expected
        assert expected.model["layers"] == 6
        with pytest.raises(ConfigError, match="this folder does not exist"):
            hpc_parallel.compose(config_dir="elsewhere")

    def test_all_problems_are_told_as_the_command_tells_them(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["nodes=0", "strategi=data", "training.steps=few", "model.heads=3"]
        with pytest.raises(ConfigError) as caught:
            hpc_parallel.compose(words)
        assert capsys.readouterr() == ("", "")
        assert main(words) == 2
        told = [line.strip() for line in capsys.readouterr().err.splitlines()[1:]]
        assert list(map(str, caught.value.problems)) == told
        assert [line.split()[0] for line in told[:3]] == ["nodes", "strategi=data:", "training.steps"]

    @pytest.mark.parametrize("word", ["-m", "--config-dir=site", "--help", "--cfg", "hydra.mode=MULTIRUN"])
    def test_flags_and_sweeps_are_for_the_command(self, word: str) -> None:
        with pytest.raises(ConfigError, match=r"Try (config_dir=|python -m hpc_parallel\.run -m)"):
            hpc_parallel.compose(["nodes=2", word])

    @pytest.mark.parametrize("words", ["nodes=2", [2], b"nodes=2"])
    def test_overrides_are_a_list_of_texts(self, words: Any) -> None:
        with pytest.raises(TypeError, match="a list of overrides"):
            hpc_parallel.compose(words)

    def test_overrides_that_can_be_read_once(self) -> None:
        words: Any = iter(["nodes=2", "seed=7"])
        assert hpc_parallel.compose(words).nodes == 2

    def test_hydras_state_is_left_as_it_was(self, here: Path) -> None:
        """Also after a refusal, beside a Hydra of the user's own with a resolver of the same name."""
        (here / "own.yaml").write_text("own: ${product:2,3}\n")
        OmegaConf.register_new_resolver("product", lambda *_: "mine", replace=True)
        store = ConfigStore.instance()
        usual = store.repo
        store.repo = {name: node for name, node in usual.items() if name[0] in "_h"}  # Hydra's own alone
        vars(store).pop("__deepcopy__", None)
        before = names(store.repo)
        HydraConfig.instance().cfg = kept = OmegaConf.create({"hydra": None})
        try:
            with initialize_config_dir(config_dir=str(here), version_base="1.3"):
                mine = GlobalHydra.instance().hydra
                for words in ["nodes=2"], ["nodes=0"], ["nodez=1"]:
                    try:
                        hpc_parallel.compose(words)
                    except ConfigError:
                        assert words != ["nodes=2"]
                    assert GlobalHydra.instance().hydra is mine
                    assert HydraConfig.instance().cfg is kept
                    assert names(store.repo) == before
                    assert copy.deepcopy(store) is not store  # an own Hydra copies it
                    assert hydra_compose("own").own == "mine"
        finally:
            HydraConfig.instance().cfg = None
            store.repo = usual
            register()

    def test_no_composition_copies_all_schemas(self) -> None:
        """Hydra copies its repository each time; it had a copy of the store of schemas in it."""
        register()
        with composing(str(find_folder("conf"))):
            repository = GlobalHydra.instance().config_loader().repository
            assert copy.deepcopy(repository).get_schema_source().store is ConfigStore.instance()

    def test_threads(self) -> None:
        composed: dict[int, RunConfig] = {}

        def work(nodes: int) -> None:
            composed[nodes] = hpc_parallel.compose([f"nodes={nodes}"])

        threads = [threading.Thread(target=work, args=(nodes,)) for nodes in (1, 2, 4, 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {nodes: config.nodes for nodes, config in composed.items()} == {1: 1, 2: 2, 4: 4, 8: 8}


IMPORTED = """
import signal, sys
sys.argv = ["kernel", "-f", "/run/kernel.json"]  # as in a notebook
import hpc_parallel
ours = {name for name in sys.modules if name.startswith("hpc_parallel")}
assert ours == {"hpc_parallel", "hpc_parallel.shadowing"}, ours
others = {"argparse", "hydra", "omegaconf", "subprocess", "torch", "typing", "yaml"} & set(sys.modules)
assert not others, others
assert {"compose", "submit", "runs", "Run"} <= set(dir(hpc_parallel))
before = [signal.getsignal(number) for number in range(1, 32)]
config = hpc_parallel.compose(["nodes=2", "launcher=script", "launcher.snapshot=false"])
run = hpc_parallel.submit(config)
assert hpc_parallel.runs()[0].path == run.path
assert run.config["nodes"] == 2
assert before == [signal.getsignal(number) for number in range(1, 32)]
assert "torch" not in sys.modules
assert sys.argv == ["kernel", "-f", "/run/kernel.json"]
try:
    hpc_parallel.nothing
except AttributeError as error:
    assert str(error) == "module 'hpc_parallel' has no attribute 'nothing'"
"""


def test_the_package_is_light_and_the_interface_quiet() -> None:
    """Nothing but two modules of ours at import; no output, no handler, no torch, nothing of `sys.argv`."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def submitted(config: RunConfig) -> tuple[Run, list[str]]:
    """The run, and the overrides that it recorded."""
    run = hpc_parallel.submit(config)
    record = json.loads((run.path / "environment.json").read_text())
    assert record["command"] == ["hpc_parallel.submit"]  # and not the command line of a kernel or a test
    return run, record["overrides"]


class TestSubmit:
    def test_a_script_is_written_and_waits_for_the_user(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = [*QUIET, "nodes=2", "run_dir=mine"]
        config = hpc_parallel.compose(words)
        run, recorded = submitted(config)
        assert recorded == words
        assert run.path == Path("mine").absolute()
        assert "#SBATCH --nodes=2" in (run.path / "batch_script.sh").read_text()
        assert (str(run.state), run.summary, run.metrics()) == ("not started", None, [])
        with pytest.raises(RuntimeError, match="has no summary: not started"):
            run.wait()
        run.cancel()  # must not end this process, which has written the run
        assert capsys.readouterr() == ("", "")
        with pytest.raises(ConfigError, match="a run is never overwritten"):
            hpc_parallel.submit(config)
        config.run_dir = "second"
        assert hpc_parallel.submit(config).path == Path("second").absolute()

    def test_what_slurm_says_is_the_error(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (here / "bin").mkdir()
        (here / "bin/sbatch").write_text(
            "#!/bin/sh\n[ \"$1\" = --test-only ] || echo 'sbatch: error: no such partition' >&2\nexit 1\n"
        )
        (here / "bin/sbatch").chmod(0o755)
        monkeypatch.setenv("PATH", f"{here / 'bin'}:{os.environ['PATH']}")
        config = hpc_parallel.compose(["launcher=slurm", "launcher.snapshot=false", "run_dir=mine"])
        with pytest.raises(SiteRefusedError, match="no such partition"):
            hpc_parallel.submit(config)
        assert not (here / "mine").exists()

    def test_a_dry_run_starts_nothing(self, here: Path) -> None:
        with pytest.raises(ConfigError, match=r"dry_run = true starts nothing.* Try dry_run=false"):
            hpc_parallel.submit(hpc_parallel.compose([*QUIET, "dry_run=true"]))
        assert not (here / "runs").exists()

    def test_other_objects_are_no_configurations(self) -> None:
        with pytest.raises(TypeError, match="not a dict"):
            hpc_parallel.submit({"nodes": 2})  # type: ignore[arg-type]

    def test_files_of_the_users_own_are_recorded(self, here: Path) -> None:
        words = [*own_files(here / "site"), *QUIET]
        run = hpc_parallel.submit(hpc_parallel.compose(words, config_dir="site"))
        assert run.config["model"]["layers"] == 6
        assert json.loads((run.path / "environment.json").read_text())["config_dir"] == str(here / "site")


def set_at(config: RunConfig, key: str, value: Any) -> None:
    node: Any = config
    *parents, last = key.split(".")
    for part in parents:
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    if isinstance(node, dict):
        node[last] = value
    else:
        setattr(node, last, value)


class TestChangedConfiguration:
    """A run records the overrides that give its configuration, so `resume` and `rerun` start from it."""

    @pytest.mark.parametrize(
        ("key", "value", "word"),
        [
            ("nodes", 4, "nodes=4"),  # said before: in its place
            ("training.steps", 7, "training.steps=7"),
            ("optimizer.learning_rate", 1e-5, "optimizer.learning_rate=1e-05"),
            ("training.clip_norm", None, "training.clip_norm=null"),
            ("training.checkpoint_async", False, "training.checkpoint_async=false"),
            ("optimizer.betas", (0.8, 0.9), "optimizer.betas=[0.8,0.9]"),
            ("launcher.setup", ["export A='b c'", "true"], None),
            ("launcher.partition", "it's \\ $HOME, [a]", None),
            ("launcher.partition", "null", "launcher.partition='null'"),
            ("launcher.extra", {"mail-user": "me"}, "+launcher.extra.mail-user=me"),
            ("cluster.environment", {"OMP_PROC_BIND": "true", "A": 1}, None),
            ("model.layers", 2, "model.layers=2"),
            ("run_dir", Path("somewhere"), "run_dir=somewhere"),
            ("training.steps", np.int64(9), "training.steps=9"),
            ("optimizer.learning_rate", np.float32(0.5), "optimizer.learning_rate=0.5"),
        ],
    )
    def test_a_changed_value_is_recorded(self, key: str, value: Any, word: str | None) -> None:
        words = [*QUIET, "nodes=2", "strategy=pipeline"]
        config = hpc_parallel.compose(words)
        set_at(config, key, value)
        run, recorded = submitted(config)
        assert word is None or recorded == [each for each in words if each != "nodes=2" or key != "nodes"] + [
            word
        ]
        again = checked_run(CommandLine.parse([each for each in recorded if each[:7] != "run_dir"]))
        kept = run.config | {"run_dir": None}
        assert again.values | {"run_dir": None} == kept
        assert set_value(kept, key) == (None if key == "run_dir" else plain(value))

    def test_what_follows_from_a_changed_value_stays_as_it_is(self) -> None:
        """`name` is `${strategy.name}`, and the configuration at hand has it as a text."""
        batch = "training.global_batch_size='${product:4,${nodes}}'"
        config = hpc_parallel.compose([*QUIET, batch, "name=${strategy.name}"])
        config.strategy.name, config.nodes = "mine", 2
        run, recorded = submitted(config)
        kept = run.config
        assert (kept["strategy"]["name"], kept["name"], kept["training"]["global_batch_size"]) == (
            "mine", "data", 4,
        )  # fmt: skip
        assert {"strategy.name=mine", "name=data", "training.global_batch_size=4"} <= set(recorded)

    def test_copies(self) -> None:
        config = hpc_parallel.compose([*QUIET, "model=convnet", "data=digits", "strategy=fsdp"])
        twin = copy.deepcopy(config)
        twin.nodes = 2
        assert submitted(twin)[1] == [*QUIET, "model=convnet", "data=digits", "strategy=fsdp", "nodes=2"]
        assert config.nodes == 1
        # A new object does not know the overrides: what differs from the defaults is recorded.
        run, recorded = submitted(replace(hpc_parallel.compose([*QUIET, "strategy=fsdp"]), nodes=2))
        assert {"nodes=2", "strategy.shard=-1", "launcher.kind=script"} <= set(recorded)
        assert run.config["strategy"]["name"] == "fsdp"

    @pytest.mark.parametrize(
        ("key", "value", "problem"),
        [
            ("nodes", 0, r"nodes = 0 must be at least 1\. Try nodes=1\."),
            ("training.steps", "few", "training.steps = few is not a whole number"),
            ("training.steps", "3", "training.steps = 3 was set in Python as a str, but no override can"),
            ("nodez", 2, r"there is no key nodez\. Try nodes=2"),
            ("training.stepz", 2, r"there is no key training\.stepz\. Try training\.steps=2"),
            ("training.learning_rate", 2, r"there is no key training\.learning_rate"),
            ("launcher.partition", object(), "launcher.partition = .*object.* no override can set it"),
            ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate"),
            ("launcher.extra", {"a.b": 1}, "launcher.extra"),
            ("seed", "${oc.env:HOME}", "seed"),
        ],
    )
    def test_what_no_override_gives_is_refused(self, here: Path, key: str, value: Any, problem: str) -> None:
        config = hpc_parallel.compose(QUIET)
        set_at(config, key, value)
        with pytest.raises(ConfigError, match=problem):
            hpc_parallel.submit(config)
        assert not (here / "runs").exists()

    def test_a_key_that_was_taken_away(self) -> None:
        config = hpc_parallel.compose(QUIET)
        del config.model["layers"]
        with pytest.raises(ConfigError, match=r"model\.layers was removed"):
            hpc_parallel.submit(config)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def set_value(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node[part]
    return node


class TestRuns:
    def test_every_run_is_listed_whatever_its_condition(self, here: Path) -> None:
        made = {
            "finished": recorded_runs.finished(here / "runs/a/1"),
            "failed": recorded_runs.failed(here / "runs/a/2"),
            "half": recorded_runs.half_written(here / "runs/b/1"),
            "foreign": recorded_runs.foreign(here / "runs/b/2"),
        }
        (here / "runs/b/notes").mkdir()
        (here / "runs/b/notes/config.yaml").write_text("nodes: 1")
        before = files(here)
        listed = hpc_parallel.runs("runs")
        assert [run.path for run in listed] == [folder.path for folder in made.values()]
        finished, failed, half, foreign = listed
        assert [run.state.name for run in listed] == ["completed", "failed", "not started", "completed"]
        assert [line["step"] for line in finished.metrics()] == [10, 20, 30]
        assert finished.config["nodes"] == 1
        assert finished.wait()["final_loss"] == pytest.approx(4 / 30)
        assert failed.wait()["outcome"] == "failed"
        assert failed.failure["line"].startswith("rank 1 on n1 failed first")
        assert (half.config["nodes"], half.summary, half.metrics()) == (2, None, [])
        with pytest.raises(RuntimeError, match="has no summary"):
            half.wait()
        assert (foreign.summary["outcome"], foreign.failure) == ("completed", None)
        assert foreign.damaged.keys() >= {"failure.json", "environment.json", "owner.json"}
        for run in listed:
            run.cancel()  # all have ended
        assert files(here) == before
        assert repr(finished) == f"hpc_parallel.Run('{here / 'runs/a/1'}')"

    def test_one_run_by_its_folder(self, here: Path) -> None:
        folder = recorded_runs.finished(here / "elsewhere/1")
        (run,) = hpc_parallel.runs(folder.path)
        assert run.path == folder.path == Run("elsewhere/1").path
        assert hpc_parallel.runs("nowhere") == hpc_parallel.runs() == []

    def test_a_run_that_goes_on(self, here: Path) -> None:
        folder = recorded_runs.started(here / "runs/a/1")
        with living() as process:
            recorded_runs.own(folder, process.pid)
            (run,) = hpc_parallel.runs()
            assert str(run.state) == "running"
            with pytest.raises(TimeoutError, match=r"has not ended after 0\.2 s: running"):
                run.wait(timeout_s=0.2)
            run.cancel()
            assert process.wait() == -signal.SIGTERM
        write_json(folder.summary, {"outcome": "cancelled"})
        assert run.wait() == {"outcome": "cancelled"}

    def test_what_can_not_be_ended_says_why(self, here: Path) -> None:
        folder = recorded_runs.started(here / "runs/a/1")
        folder.owner.write_text('{"pid": "none"}')
        with pytest.raises(RuntimeError, match=r"owner\.json can't be read .* what runs there is not known"):
            Run(folder.path).cancel()

    def test_a_configuration_is_read_and_not_resolved(self, here: Path) -> None:
        """A foreign config.yaml must not read this user's environment."""
        folder = RunFolder(recorded_runs.finished(here / "runs/a/1").path)
        folder.config.write_text("name: ${oc.env:HOME}\nnodes: !!python/object/apply:os.getpid []\n")
        (run,) = hpc_parallel.runs()
        assert run.config is None
        folder.config.write_text("name: ${oc.env:HOME}\n")
        assert run.config == {"name": "${oc.env:HOME}"}
