"""Files of the user's own for the groups: mistakes in them, and the settings of a site."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_parallel.commands.run_command import main


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site/cluster").mkdir(parents=True)
    return tmp_path / "site/cluster/mysite.yaml"


WORDS = ["--config-dir", "site", "cluster=mysite", "launcher=script"]
MISTAKES = {
    "name: mysite\ngpus: true\npartiton: gpu\n": "line 3: there is no key cluster.partiton. Try partition.",
    "name: mysite\nwckey: a\n": "line 2: there is no key cluster.wckey. Try launcher.wckey.",
    "name: mysite\nflavour: sour\n": "line 2: there is no key cluster.flavour.",
    "name: [a\nport: 1\n": "line 2, column 5: expected ',' or ']', but got ':'.",
    "name: mysite\n\tport: 1\n": "line 2, column 1: found character '\\t' that cannot start any token.",
}


@pytest.mark.parametrize("text", MISTAKES, ids=list(MISTAKES.values()))
@pytest.mark.parametrize("flag", [[], ["-m"]], ids=["run", "sweep"])
def test_a_mistake_is_named_with_its_line(
    text: str, flag: list[str], site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write_text(text)
    assert main([*flag, *WORDS, "nodes=0"]) == 2
    _, *lines = capsys.readouterr().err.splitlines()
    assert sorted(line.strip() for line in lines) == sorted(
        [f"{site}, {MISTAKES[text]}", "nodes = 0 must be at least 1. Try nodes=1."]
    )


def test_a_site_chooses_partition_account_and_qos(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.write_text("name: mysite\npartition: gpu\naccount: physics\nqos: long\n")
    assert main([*WORDS, "dry_run=true", "launcher.qos=short"]) == 0
    script = capsys.readouterr().out
    for flag in ("--partition=gpu", "--account=physics", "--qos=short"):
        assert f"#SBATCH {flag}\n" in script


def test_wandb_needs_a_login(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    words = ["training.wandb=true", "launcher=script", "dry_run=true"]
    assert main(words) == 2
    assert "Try +cluster.environment.WANDB_MODE=offline." in capsys.readouterr().err
    assert main([*words, "+cluster.environment.WANDB_MODE=offline"]) == 0
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
    assert main(words) == 0
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert main(words) == 2
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert main(words) == 0
