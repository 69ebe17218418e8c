"""An installed wheel works from any folder, with its configurations and templates inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("conf", "hpc_parallel", "sbatch_templates", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(target), str(wheel))
    return target


def pip(*words: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    done = subprocess.run(
        [sys.executable, "-m", "pip", words[0], *quiet, *words[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def command(installed: Path, here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `here` with the installed package alone: PYTHONPATH comes before the editable one."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )


def test_the_wheel_holds_every_file_of_the_checkout(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, suffix, inside in (
        ("hpc_parallel", "py", ""),
        ("conf", "yaml", "hpc_parallel/"),
        ("jobs", "yaml", "hpc_parallel/conf/"),
        ("sbatch_templates", "j2", "hpc_parallel/"),
        ("hpc_parallel", "j2", ""),
        ("hpc_parallel", "typed", ""),
    ):
        files = {f"{inside}{file.relative_to(ROOT)}" for file in (ROOT / folder).rglob(f"*.{suffix}")}
        assert files
        assert files <= names
    assert not [name for name in names if name.startswith("tests")]


def test_an_installed_run_finds_its_own_files(installed: Path, tmp_path: Path) -> None:
    done = command(
        installed, tmp_path,
        "-c", "import sys, hpc_parallel; from hpc_parallel.run import main; print(hpc_parallel.__file__);"
        "sys.exit(main(sys.argv[1:]))",
        "launcher=script", "nodes=2", "strategy=data", "run_dir=mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(installed / "hpc_parallel" / "__init__.py")
    assert yaml.safe_load((tmp_path / "mine" / "config.yaml").read_text())["nodes"] == 2
    script = (tmp_path / "mine" / "batch_script.sh").read_text()
    assert "#SBATCH --nodes=2" in script
    assert str(ROOT / "hpc_parallel") not in script


def test_both_modules_are_commands(installed: Path, tmp_path: Path) -> None:
    for module in ("hpc_parallel.run", "hpc_parallel"):
        done = command(installed, tmp_path, "-m", module, "strategy=pipeline", "nodes=2", "dry_run=true",
                       "launcher=script")  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "#SBATCH --job-name=pipeline" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_the_command(installed: Path, tmp_path: Path) -> None:
    (entries,) = installed.glob("hpc_parallel-*.dist-info/entry_points.txt")
    scripts = ConfigParser()
    scripts.read(entries)
    assert dict(scripts["console_scripts"]) == {"hpc-parallel": "hpc_parallel.__main__:main"}
    script = str(installed / "bin" / "hpc-parallel")
    done = command(installed, tmp_path, script, "run", "strategy=single", "dry_run=true", "launcher=local")
    assert done.returncode == 0, done.stderr
    refused = command(installed, tmp_path, script, "nodez=1")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)


def test_tokens_can_be_made(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be" * 2000)
    done = command(
        installed, tmp_path, "-m", "hpc_parallel", "tokenize", "text.txt", "--output", "tokens.npy"
    )
    assert done.returncode == 0, done.stderr
    words = ("data=tokens", "data.path=tokens.npy", "dry_run=true", "launcher=script")
    run = command(installed, tmp_path, "-m", "hpc_parallel", *words)
    assert run.returncode == 0, run.stderr


def test_the_checkout_stays_clean(installed: Path) -> None:
    assert not (ROOT / "build").exists()
    assert not list(ROOT.glob("*.egg-info"))


def test_make_train_installs_the_plots_and_says_how_to_use_its_environment(tmp_path: Path) -> None:
    # A make inside make test would take its flags over and print which folder it leaves.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    words = ["make", "--dry-run", "train", f"VENV={tmp_path}/env"]
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (editable,) = [line for line in lines if "--editable" in line]
    assert editable.endswith('--editable ".[report]"')
    assert lines[-1] == f'echo "To use this environment in your shell: source {tmp_path}/env/bin/activate"'
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert any(line.startswith("matplotlib==") for line in pinned)
