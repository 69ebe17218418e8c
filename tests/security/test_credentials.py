"""Credentials stay where they are: not in `code/`, the recorded diff, exported weights or W&B."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_parallel.__main__ import main
from hpc_parallel.record.credentials import (
    is_credential_file,
    may_be_secret,
    public_part,
    without_secret_values,
)
from hpc_parallel.record.provenance import origin, source_state
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.snapshot import plan_snapshot
from tests.recorded_runs import prepared
from tests.unit.test_snapshot import copied, git

SECRET_FILES = [".env", "creds.txt", "deploy/.env.production", "id_ed25519", "sub/Server.PEM", ".ssh/config",
                "api.key", "secrets.yaml", "hf_token.txt", ".netrc", "aws_credentials.json",
                "secrets/prod.json", ".vault-token", "API-key.txt", "kubeconfig"]  # fmt: skip
SOURCE_FILES = ["secrets.py", "tokenizer.json", "tokens.npy", ".env.example", "keys.py", "credentials.md",
                "environment.yml", "conf/data/tokens.yaml", "password_policy.py",
                "secrets/vault.py"]  # fmt: skip


@pytest.mark.parametrize("name", SECRET_FILES)
def test_files_that_hold_credentials(name: str) -> None:
    assert is_credential_file(name)


@pytest.mark.parametrize("name", SOURCE_FILES)
def test_files_that_a_job_needs(name: str) -> None:
    assert not is_credential_file(name)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Some credentials are tracked and changed since, the others are new and not ignored."""
    root = tmp_path / "mine"
    for index, name in enumerate([*SECRET_FILES, *SOURCE_FILES]):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("before\n")
        if index == 3:
            git(root, "init", "-q")
            git(root, "add", ".")
            git(root, "commit", "-qm", "first")
            for tracked in SECRET_FILES[:3]:
                (root / tracked).write_text("hunter2\n")
    git(root, "add", "secrets.py")
    return root


def test_run_folders_keep_no_credentials_and_name_them(checkout: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    snapshot = plan_snapshot(folder.code, working_directory=checkout)
    snapshot.take()
    assert copied(folder.code / "mine") == set(SOURCE_FILES)
    assert sorted(snapshot.left_out) == sorted(SECRET_FILES)
    (note,) = snapshot.notes
    assert note.startswith("not copied  ")
    assert "creds.txt" in note
    assert " and 10 more (they look like credentials" in note
    state = source_state(checkout)
    assert "hunter2" not in state["git_diff"]
    assert "secrets.py" in state["git_diff"]  # what else changed is there
    assert sorted(state["left_out"]) == sorted(SECRET_FILES[:3])
    said = origin(folder, overrides=[], config_dir=None, snapshot=snapshot, state=lambda place: state)
    assert sorted(said["left_out"]) == sorted(SECRET_FILES)
    assert "hunter2" not in json.dumps(said)


def test_a_huge_diff_is_left_out_and_named(checkout: Path) -> None:
    (checkout / "secrets.py").write_text("x = 1\n" * 2**20)
    state = source_state(checkout)
    assert state["git_diff"] is None
    assert "git_diff" in state["left_out"]


def test_the_diff_of_a_folder_inside_a_checkout_is_that_of_the_checkout(checkout: Path) -> None:
    assert source_state(checkout / "conf") == source_state(checkout)


CONFIG = {
    "model": {"_target_": "x.Model", "dim": 8, "apiKey": "k", "vocab_size": 256, "pad_token_id": 0,
              "eos_token": "<s>", "hf_token": "t"},
    "data": {"path": "https://me:hunter2@host/tokens.npy", "token": "t", "tokenizer": "a.json",
             "nested": [{"password": "p", "rows": 3}, "hf_abcdefghijklmnopqrst"]},
    "training": {"steps": 5},
    "strategy": {"name": "data"},
    "launcher": {"setup": ["export KEY=hunter2"]},
    "cluster": {"environment": {"WANDB_API_KEY": "hunter2"}},
    "optimizer": {"learning_rate": 1},
}  # fmt: skip


def test_exports_contain_model_data_training_and_strategy() -> None:
    assert public_part(CONFIG) == {
        "model": {"_target_": "x.Model", "dim": 8, "vocab_size": 256, "pad_token_id": 0, "eos_token": "<s>"},
        "data": {"tokenizer": "a.json", "nested": [{"rows": 3}, None]},
        "training": {"steps": 5},
        "strategy": {"name": "data"},
    }


def test_a_page_shows_overrides_without_their_secrets() -> None:
    words = ["nodes=2", "launcher.setup=[export KEY=hunter2]", "+cluster.environment.KEY=hunter2",
             "data.token=hunter2", "data.path=s3://me:hunter2@host/x", "launcher.extra={export:K=hunter2}",
             "sweep.also=[launcher.setup=hunter2]", "launcher=slurm", "-m",
             "data={path:s3://me:hunter2@host/x,rows:[3,s3://me:hunter2@host/y],auth:{user:hunter2},size:4}",
             "launcher={extra:{export:hunter2},kind:slurm}", "a={b:'hunter2,'}", "}}={c:1}}{"]  # fmt: skip
    assert without_secret_values(words) == [
        "nodes=2", "launcher.setup=...", "+cluster.environment.KEY=...", "data.token=...", "data.path=...",
        "launcher.extra=...", "sweep.also=...", "launcher=slurm", "-m",
        "data={path:...,rows:[3,s3:...,auth:{user:...},size:4}", "launcher={extra:{export:...},kind:slurm}",
        "a=...", "}}={c:1}}{",
    ]  # fmt: skip


def test_what_show_prints_can_be_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The form for faults asks for it."""
    words = ["launcher.notify=https://h.org/hunter2", "+cluster.environment.KEY=hunter2", "training.steps=42",
             "launcher.setup=['export KEY=hunter2']", "+model.hf_token=hunter2"]  # fmt: skip
    folder = prepared(tmp_path / "run", *words[:4])
    write_json(folder.environment, {"overrides": words})
    assert main(["show", str(folder.path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "hunter2" not in shown
    assert (
        "run launcher.notify=... +cluster.environment.KEY=... training.steps=42 launcher.setup=..." in shown
    )
    for setting in ("launcher.notify = ...", "cluster.environment.KEY = ...", "launcher.setup = ...",
                    "training.steps = 42"):  # fmt: skip
        assert setting in shown
    assert main(["show", "--json", str(folder.path)]) == 0  # for scripts
    assert (
        json.loads(capsys.readouterr().out)["changed"]["launcher.notify"]["value"] == "https://h.org/hunter2"
    )


@pytest.mark.parametrize(
    ("key", "value", "secret"),
    [("data.path", "s3://me:hunter2@host/x", True), ("data.list", ["a", "hf_abcdefghijklmnopqrst"], True),
     ("data.api_key", "", True), ("sweep.also", [], True), ("data.path", "/data/tokens.npy", False),
     ("launcher.partition", "gpu", False), ("strategy.shares", [1, 2], False), ("resume", None, False)],
)  # fmt: skip
def test_a_setting_that_may_be_secret(key: str, value: Any, secret: bool) -> None:
    assert may_be_secret(key, value) == secret


def test_a_repository_without_a_commit_has_no_state(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert source_state(tmp_path) == {"git_commit": None, "git_diff": None, "left_out": []}
