"""A run folder of another user grants no trust and runs no code in `resume=`, `rerun` and `weights=`."""

from __future__ import annotations

import json
import os
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_parallel.problems import ConfigError
from hpc_parallel.record.checkpoint_index import CHECKSUM, Digest
from hpc_parallel.record.recorded_start import read_start
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.run import main
from tests.composed import prepared
from tests.security.users import ATTACKER, give, needs_root

pytestmark = needs_root
START = ["launcher=script", "launcher.snapshot=false", "training.steps=100"]


def pickle_that_makes(folder: Path) -> bytes:
    """A pickle that makes `folder` when it is read."""
    return b"cos\nmkdir\n(S'" + str(folder).encode() + b"'\ntR."


@cache
def values() -> dict[str, Any]:
    return prepared(*START).values


def plant(path: Path, *overrides: str, canary: Path, config_dir: str | None = None) -> RunFolder:
    """The attacker's run folder: sound in every respect, with a pickle as the checkpoint's index."""
    folder = RunFolder(path)
    folder.create()
    write_text(folder.config, yaml.safe_dump(values()))
    write_json(folder.environment, {"overrides": [*START, *overrides], "config_dir": config_dir,
                                    "working_directory": "/", "import_path": []})  # fmt: skip
    checkpoint = folder.checkpoints / "step-40"
    checkpoint.mkdir(parents=True)
    index = pickle_that_makes(canary)
    (checkpoint / ".metadata").write_bytes(index)
    files = {".metadata": {"bytes": len(index), CHECKSUM: Digest(index).hexdigest()}}
    manifest = json.dumps({"step": 40, "config": values(), "data": "", "files": files}).encode()
    (checkpoint / "manifest.json").write_bytes(manifest)
    (checkpoint / "complete").write_text(Digest(manifest).hexdigest() + "\n")
    give(folder.path, ATTACKER)
    folder.path.chmod(0o777)
    return folder


@pytest.fixture
def canary(shared: Path) -> Path:
    return shared / "executed"


@pytest.fixture
def here(shared: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The victim's working directory, in which `runs/` is open to all."""
    place = shared / "here"
    (place / "runs" / "mine").mkdir(parents=True)
    (place / "runs" / "mine").chmod(0o777)
    monkeypatch.chdir(place)
    return place


def test_the_canary_works(canary: Path) -> None:
    pickle.loads(pickle_that_makes(canary))
    assert canary.exists()


@pytest.mark.parametrize("granted", [[], ["launcher.shared_folder=true"]])
def test_a_foreign_folder_can_not_grant_trust_to_itself(
    shared: Path, here: Path, canary: Path, granted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plant(shared / "theirs", *granted, canary=canary)
    assert main([f"resume={folder.path}", "training.steps=200", "launcher=local"]) == 2
    message = capsys.readouterr().err
    assert f"resume = {folder.path} is not to be trusted: {folder.path} belongs to user {ATTACKER}" in message
    assert not canary.exists()


@pytest.mark.parametrize(
    "recorded",
    ["launcher.setup=[touch /tmp/x]", "launcher.extra.wrap=x", "+launcher.venv=/tmp/x", "launcher=mine",
     "launcher.python=/tmp/x/python", "launcher.conda=/tmp/x",
     "hydra.callbacks.p={_target_:os.system}", "+hydra.job_logging.x=1", "model._target_=os.system",
     "optimizer.schedule=os.system", "+data._target_=os.system", "model={_target_:os.system}",
     "cluster.environment.LD_PRELOAD=/tmp/x.so",
     "model=../../../tmp/evil", "name=${oc.env:HOME}", "weights=/tmp/x"],
)  # fmt: skip
def test_settings_of_others_that_run_code_are_refused_even_if_the_user_trusts_the_folder(
    shared: Path, canary: Path, recorded: str
) -> None:
    folder = plant(shared / "theirs", recorded, canary=canary)
    with pytest.raises(ConfigError) as refused:
        read_start(folder, key="resume", shared_folder=True)
    message = f"the run belongs to user {ATTACKER}, and its setting {recorded} could run code"
    assert any(message in str(problem) for problem in refused.value.problems)


def test_their_setup_reaches_no_batch_script(
    shared: Path, here: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plant(shared / "theirs", "launcher.setup=[touch stolen]", canary=canary)
    typed = ["launcher=script", "launcher.snapshot=false", "launcher.shared_folder=true", "dry_run=true"]
    assert main([f"resume={folder.path}", *typed]) == 2
    printed = capsys.readouterr()
    assert "its setting launcher.setup=[touch stolen] could run code" in printed.err
    assert "touch" not in printed.out
    assert not canary.exists()


def test_a_configuration_folder_of_others_is_refused(shared: Path, canary: Path) -> None:
    folder = plant(shared / "theirs", canary=canary, config_dir="/tmp/theirs")
    with pytest.raises(ConfigError, match="has a configuration folder of theirs, /tmp/theirs"):
        read_start(folder, key="resume", shared_folder=True)


def test_trust_that_is_typed_reaches_plain_settings(shared: Path, canary: Path) -> None:
    plain = ["model=tiny", "strategy.microbatches=4", "nodes=2", "data.path=/data/x.npy"]
    folder = plant(shared / "theirs", *plain, "launcher.shared_folder=true", canary=canary)
    environment = json.loads(folder.environment.read_text())
    typed = ["launcher.shared_folder=true", "launcher.notify=https://h.org"]
    write_json(folder.environment, environment | {"overrides": [*plain, *typed]})
    os.chown(folder.environment, ATTACKER, ATTACKER)
    start = read_start(folder, key="resume", shared_folder=True)
    assert list(start.overrides) == plain  # neither trust nor who is told is ever inherited


def test_resume_auto_takes_no_planted_run(
    here: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = plant(here / "runs" / "mine" / "99999999-000000-00000000", canary=canary)
    assert main(["resume=auto", "name=mine", "launcher=local"]) == 2
    message = capsys.readouterr().err
    assert f"skips runs/mine/{planted.path.name}, which belongs to user {ATTACKER}" in message
    assert "finds no run of yours in runs/mine" in message
    assert not canary.exists()


def test_a_link_to_a_foreign_run_is_no_run_of_mine(shared: Path, here: Path, canary: Path) -> None:
    folder = plant(shared / "theirs", canary=canary)
    link = here / "runs" / "mine" / "99999999-000000-00000000"
    link.symlink_to(folder.path)
    assert main(["resume=auto", "name=mine", "launcher=local"]) == 2
    assert not canary.exists()


def test_rerun_and_weights_take_nothing_of_others(
    shared: Path, here: Path, canary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpc_parallel.commands.rerun import main as rerun

    folder = plant(shared / "theirs", "launcher.shared_folder=true", canary=canary)
    assert rerun([str(folder.path)]) == 2
    assert "is not to be trusted" in capsys.readouterr().err
    assert main([f"weights={folder.path}", "launcher=local"]) == 2
    assert f"belongs to user {ATTACKER}" in capsys.readouterr().err
    assert not canary.exists()


def test_a_sweep_of_others_is_not_gone_on_with(
    shared: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = here / "theirs"
    sweep.mkdir()
    write_json(sweep / "sweep.json", {
        "command": ["-m", "seed=1,2", "launcher.setup=[touch stolen]", "launcher.shared_folder=true"],
        "started": "2026-01-01T00:00:00Z", "parallelism": None, "runs": [], "skipped": [],
    })  # fmt: skip
    assert main(["-m", f"sweep.resume={sweep}", "launcher=script", "dry_run=true"]) == 0
    give(sweep, ATTACKER)
    for granted in ([], ["launcher.shared_folder=true"]):
        assert main(["-m", f"sweep.resume={sweep}", "launcher=script", "dry_run=true", *granted]) == 2
        assert f"{sweep} belongs to user {ATTACKER}" in capsys.readouterr().err


def test_the_files_of_another_sweeper_follow_no_link_of_others(
    shared: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra writes multirun.yaml itself, before the first run."""
    sweep, mine = shared / "theirs", here / "precious"
    mine.write_text("precious")
    sweep.mkdir()
    (sweep / "multirun.yaml").symlink_to(mine)
    give(sweep, ATTACKER)
    sweep.chmod(0o777)
    called = "+hydra.callbacks.mine._target_=hydra.experimental.callback.Callback"
    words = ["-m", "seed=1,2", called, "launcher=local", "launcher.snapshot=false"]
    for folder in (sweep, sweep / "new"):
        assert main([*words, f"hydra.sweep.dir={folder}", "training.steps=0"]) == 2
        message = capsys.readouterr().err
        assert f"hydra.sweep.dir = {folder} would hold what the run executes" in message
        assert f"{sweep} belongs to user {ATTACKER}" in message
        assert "training.steps = 0" in message  # beside all other problems
    assert mine.read_text() == "precious"
