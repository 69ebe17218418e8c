"""Any text in any key: refused, or passed on as it is, and never run by a shell.

The scripts that Slurm would get are run by bash, with `srun` and `module` replaced by programs that note
their arguments; a text that is run by mistake would leave the file `pwned`.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hpc_parallel.config.checks import cluster_checks, key_checks, site_checks
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.launch.batch_script import render
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import Problem
from hpc_parallel.record.run_folder import RunFolder
from tests.composed import prepared

PIECES = [
    "a", "n1", " ", "\t", "\n", "\r", "\0", "'", '"', "\\", "`touch pwned`", "$(touch pwned)",
    "; touch pwned;", "\ntouch pwned\n", "\n#SBATCH --wrap='touch pwned'\n", "&& touch pwned",
    "| touch pwned", "> pwned", "$HOME", "${IFS}", "-n", "--", "--wrap=pwned", "#", "~", "*", "?", "[a]",
    "{a,b}", "!", "%j", "%", "=", ":", "/", "..", "é", "日本", "\u2028", "\u202e", "\x1b[31m", "'\"'\"'",
    "{{ 1 }}", "EOF",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(), min_size=1, max_size=5).map("".join)
KEYS = ("partition", "account", "qos", "constraint", "exclude", "wckey")


@dataclass(frozen=True)
class Machine:
    """A folder in which the scripts run, with what they call."""

    home: Path
    run: PreparedRun
    venv: Path

    def submit(self, script: str, *, run_folder: Path) -> tuple[list[str], list[list[str]]]:
        """Run it; srun leaves a summary. Returns the arguments of srun, and those of each call of module."""
        for name in ("srun.args", "module.args"):
            (self.home / name).unlink(missing_ok=True)
        path = f"{self.home}/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.home, capture_output=True, timeout=240,
            env={"PATH": path, "HOME": str(self.home), "SLURM_JOB_ID": "7", "NOTES": str(self.home),
                 "SUMMARY": str(run_folder / "summary.json")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (run_folder / "summary.json").unlink()
        assert not list(self.home.rglob("pwned*"))
        (srun,) = self.noted("srun")
        return srun, self.noted("module")

    def noted(self, program: str) -> list[list[str]]:
        file = self.home / f"{program}.args"
        calls = file.read_bytes().decode(errors="surrogateescape").split("\0\0") if file.exists() else []
        return [call.split("\0") for call in calls if call]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    home = tmp_path_factory.mktemp("machine")
    for program in ("srun", "module"):
        file = home / "bin" / program
        file.parent.mkdir(exist_ok=True)
        file.write_text(
            f'#!/bin/bash\n{{ printf "%s" "$1"; shift; printf "\\0%s" "$@"; printf "\\0\\0"; }}'
            f' >> "$NOTES/{program}.args"\n' + 'touch "$SUMMARY"\n' * (program == "srun")
        )
        file.chmod(0o755)
    venv = home / "it's a $(touch pwned) venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").write_text("")
    run = prepared("nodes=2", "launcher.snapshot=false", f"run_dir={home}/mine", "cluster=cpu")
    return Machine(home, run, venv)


def options_of(script: str) -> dict[str, str | None]:
    """What the script's `#SBATCH` lines say; they end, to sbatch, with the first command."""
    options: dict[str, str | None] = {}
    for line in script.split("\n"):
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            flag, equals, value = word.removeprefix("--").partition("=")
            options[flag] = value if equals else None
    return options


def accepted(config: RunConfig, spoilt: RunConfig) -> tuple[RunConfig, set[str]]:
    """`spoilt` with the values of `config` where a check refuses its own; the keys refused."""
    problems = found_in(spoilt)
    keys = {str(problem).partition(" ")[0].rstrip(":") for problem in problems}
    for problem in problems:
        assert isinstance(problem, Problem) or "launcher.extra" in problem
        assert str(problem).isprintable()  # nor may what a terminal is told hold control characters
    launcher = replace(spoilt.launcher, **{
        key: getattr(config.launcher, key) for key in (*KEYS, "extra")
        if any(found.startswith(f"launcher.{key}") for found in keys)
    })  # fmt: skip
    launcher.modules = [
        text for index, text in enumerate(launcher.modules) if f"launcher.modules[{index}]" not in keys
    ]
    cluster = replace(spoilt.cluster, gpu_type=None) if "cluster.gpu_type" in keys else spoilt.cluster
    name = config.name if "name" in keys else spoilt.name
    run_dir = config.run_dir if "run_dir" in keys else spoilt.run_dir
    good = replace(spoilt, name=name, run_dir=run_dir, launcher=launcher, cluster=cluster)
    assert found_in(good) == []
    return good, keys


def found_in(config: RunConfig) -> list[Problem | str]:
    checks = (key_checks, site_checks, cluster_checks)
    return [problem for check in checks for problem in check.find_problems(config)]


# Smaller examples of a failure would take minutes: each one is two scripts.
QUICK = settings(
    max_examples=40, derandomize=True, phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


@QUICK
@given(
    name=TEXTS, folder=TEXTS, gpu_type=TEXTS, extra=TEXTS, setup=TEXTS,
    keys=st.fixed_dictionaries(dict.fromkeys(KEYS, TEXTS)), modules=st.lists(TEXTS, max_size=3),
)  # fmt: skip
def test_no_text_is_run(
    machine: Machine, name: str, folder: str, gpu_type: str, extra: str, keys: dict[str, str],
    modules: list[str], setup: str,
) -> None:  # fmt: skip
    config = machine.run.config
    launcher = replace(
        config.launcher, **keys, modules=modules, venv=str(machine.venv), extra={"comment": extra},
        setup=[f"printf %s {shlex.quote(setup)} >&2"] if "\0" not in setup else [],
    )  # fmt: skip
    cluster = replace(config.cluster, gpus=True, gpu_flag="gres", gpu_type=gpu_type)
    spoilt = replace(
        config, name=name, run_dir=f"{machine.home}/x{folder}", launcher=launcher, cluster=cluster
    )
    good, refused = accepted(config, spoilt)
    if all(text.isprintable() and text.strip() for text in (*keys.values(), extra)):
        assert not {found for found in refused if found.startswith(("launcher.ex", "launcher.p"))}
    path = RunFolder(Path(good.run_dir))
    run = replace(machine.run, config=good, folder=path)
    path.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    for script in (render(run), render(run, payload=True)):
        options = options_of(script)
        wanted = {key: getattr(good.launcher, key) for key in KEYS}
        wanted |= {"job-name": good.name, "comment": good.launcher.extra.get("comment")}
        assert {key: options.get(key) for key in wanted} == wanted
        assert options["output"].startswith(f"{path.slurm}/%j")
        assert "wrap" not in options
        srun, loaded = machine.submit(script, run_folder=path.path)
        assert str(machine.venv / "bin" / "python") in srun
        assert loaded == [["load", module] for module in good.launcher.modules]
        path.attempts.unlink()  # of the script that has run
    assert srun[-1] == str(path.slurm) or str(path.path) in srun[-1]


@QUICK
@given(variable=TEXTS, key=TEXTS.filter(lambda text: text.isprintable()))
def test_values_in_the_configuration_need_no_quoting(variable: str, key: str) -> None:
    """Values of the environment and of a model meet no shell: they go by `config.yaml`."""
    values = {"cluster": {"environment": {"MINE": variable}}, "model": {key: variable}}
    written = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    assert yaml.safe_load(written) == values


@pytest.mark.parametrize("name", ["a\ntouch pwned", "100%", "a:b", "back\\slash"])
def test_the_folder_that_one_is_in_is_checked_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run folder lies in it, and is named in a line of the script."""
    from hpc_parallel.run import main

    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / name)
    monkeypatch.setattr(sys, "argv", ["run"])
    assert main(["launcher=script"]) == 2
    assert "run_dir = " in capsys.readouterr().err
    assert not list((tmp_path / name).iterdir())
