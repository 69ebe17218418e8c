"""Every pair of what decides a batch script: accepted, legal shell, and the ranks get the right environment.

A row that is refused follows the advice of its refusal until it is accepted.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from allpairspy import AllPairs

from hpc_parallel.launch.batch_script import ScriptLauncher, needs_own_script, render_array
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.slurm_launcher import SlurmLauncher
from tests.composed import prepared
from tests.distributed.test_pairs import accepted
from tests.marks import in_full
from tests.unit.test_job_python import Site, site
from tests.unit.test_templates import CONTAINERS, PROFILES, SHELLCHECK, STARTS

__all__ = ["site"]  # a fixture
Words = tuple[str, ...]
ARRAY, CONDA, VENV = "array", "conda", "venv"
SWITCHES: dict[str, dict[str, Words]] = {
    "launcher": {name: (f"launcher={name}",) for name in ("script", "slurm")},
    "start": {name: (f"cluster.start={name}",) for name in STARTS},
    "container": CONTAINERS,
    "python": {"own": (), CONDA: ("launcher.conda=torch",), VENV: ("launcher.venv='my env'",)},
    "shape": {"one": (), ARRAY: ()},
    "profile": {name: (f"cluster={name}",) for name in PROFILES},
    "program": {
        "train": ("strategy=data",),
        "infer": ("task=infer", "strategy=fsdp"),
        "file": ("task=script", "script.file=train.py"),
        "command": ("task=script", "script.command=./train.py", "script.working_directory='{run}'"),
        "module": ("task=script", "script.module=train", "script.start=torchrun"),
        "node": ("task=script", "script.file=train.py", "script.start=node"),
    },
    "resubmit": {"null": (), "true": ("launcher.resubmit=true",)},
    "exclusive": {"no": (), "yes": ("+launcher.extra.exclusive=true",)},
    "memory": {"null": (), "16": ("launcher.memory_gb=16",)},
    "snapshot": {"true": (), "false": ("launcher.snapshot=false",)},
    "setup": {"none": (), "lines": ("launcher.setup=['export OF_SETUP=\"b c\"','trap true EXIT TERM']",)},
    "scratch": {"none": (), "variable": ("cluster.scratch='$SLURM_TMPDIR/x y'",)},
}
COMMON = ("nodes=2", "gpus_per_node=2", "launcher.time_minutes=9")
FIRST = 12  # the rows in the gate: they hold most of the pairs
RECORDER = """#!/bin/sh
printf '%s\\0' "$0" "$@" > "$HOME/words"
env -0 > "$HOME/variables"
touch "$RUN_OF_TEST/summary.json" # as a rank 0 that completes
"""


def rows(seed: int) -> Iterator[dict[str, str]]:
    order = random.Random(seed)
    values = [order.sample(list(table), len(table)) for table in SWITCHES.values()]
    yield from (dict(zip(SWITCHES, row, strict=True)) for row in AllPairs(values))


def prepare_site(site: Site) -> None:
    for name in ("srun", "mpirun"):
        site.program(f"bin/{name}", RECORDER)
    site.program("bin/scontrol", "#!/bin/sh\necho n1\n")
    site.program("my env/bin/python", "#!/bin/sh\n")
    activate = f"export VIRTUAL_ENV='{site.home}/my env' PATH=\"{site.home}/my env/bin:$PATH\"\n"
    (site.home / "my env/bin/activate").write_text(activate)
    site.program("train.py", "#!/usr/bin/env python\nprint(1)\n")


def written(row: dict[str, str], folder: Path) -> tuple[PreparedRun, str]:
    """The run of a row in this run folder, which is made, and its batch script."""
    words = [*COMMON, f"run_dir={folder}"]
    words += [word for switch, value in row.items() for word in SWITCHES[switch][value]]
    run = prepared(*accepted(SimpleNamespace(prepare=prepared), words))  # type: ignore[arg-type]
    run.folder.create()
    run.folder.slurm.mkdir()
    if row["shape"] == ARRAY:
        tasks = folder.parent / f"tasks-{folder.name}"
        tasks.mkdir()
        (tasks / "0").symlink_to(folder)
        return run, render_array(run, tasks=tasks, name="n", count=3, parallelism=2)
    launcher = SlurmLauncher() if row["launcher"] == "slurm" else ScriptLauncher()
    return run, launcher.preview(run)


def submitted(site: Site, script: str, run: PreparedRun) -> tuple[list[str], dict[str, str]]:
    """The words and the environment of what starts the ranks, in a job of this script."""
    environment = {
        "PATH": f"{site.home}/bin:{Path(shutil.which('bash') or '').parent}:/usr/bin:/bin",
        "HOME": str(site.home), "RUN_OF_TEST": str(run.folder.path), "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TMPDIR": "/local", "SLURM_EXPORT_ENV": "NONE", "PYTHONPATH": "/before",
        "BASH_FUNC_module%%": "() { export LOADED=$2; }",
    }  # fmt: skip
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = (site.home / "words").read_text().split("\0")[:-1]
    lines = (site.home / "variables").read_text().split("\0")[:-1]
    return words, dict(line.split("=", 1) for line in lines)


def require_flags(script: str, run: PreparedRun, row: dict[str, str]) -> None:
    """Each flag of sbatch once, and those of the row's switches."""
    flags = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    assert len(dict(flags)) == len(flags), flags
    values: dict[str, Any] = dict(flags)
    assert (row["shape"] == ARRAY) == ("array" in values)
    assert (row["exclusive"] == "yes") <= ("exclusive" in values)
    if row["memory"] == "16":
        assert values["mem"] == "16384M"
    assert values["nodes"] == "2"
    assert int(values["ntasks-per-node"]) == run.processes_per_node


def require_environment(words: list[str], variables: dict[str, str], run: PreparedRun, site: Site) -> None:
    """The ranks import the kept source first, with the chosen Python, and nothing of ours is left over."""
    config = run.config
    expected = {"SLURM_TMPDIR": "/local", "PYTHONPATH": "/before"}
    if run.imports is not None:
        path = os.pathsep.join([*map(str, run.imports.import_path), "/before"])
        expected |= {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    if config.launcher.venv:
        expected |= {"VIRTUAL_ENV": f"{site.home}/my env"}
    if config.launcher.conda:
        expected |= {"CONDA_PREFIX": f"{site.conda}/envs/torch"}
    if config.launcher.setup:
        expected |= {"OF_SETUP": "b c"}
    if modules := [*config.cluster.modules, *config.launcher.modules]:
        expected |= {"LOADED": modules[-1]}
    if config.cluster.start == "torchrun":
        expected |= {"OMP_NUM_THREADS": str(run.cpus_per_process)}
        expected |= {"PET_SIGNALS_TO_HANDLE": "SIGINT,SIGHUP,SIGQUIT"}
    if config.cluster.start == "mpirun":
        names = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")
        expected |= dict.fromkeys(names, "none")
    assert expected.items() <= variables.items()
    assert ("PYTHONSAFEPATH" in variables) == (run.imports is not None)
    assert not [name for name in variables if name.startswith("hpc_parallel")]
    assert "SLURM_EXPORT_ENV" not in variables
    if image := config.launcher.container:
        assert {image, f"--container-image={image}"} & set(words)
        assert any("/local/x y" in word for word in words) == (config.cluster.scratch is not None)
    prefix = f"{site.home}/my env" * bool(config.launcher.venv) or f"{site.conda}/envs/torch"
    if config.launcher.container is None and (config.launcher.venv or config.launcher.conda):
        assert f"{prefix}/bin/python" in words


@pytest.mark.processes
@pytest.mark.timeout(3600)  # of all rows, beside other work
@pytest.mark.parametrize(("seed", "most"), [(0, FIRST), *in_full([(0, None), (1, None)])])
def test_every_pair_of_switches_writes_a_script_that_runs(seed: int, most: int | None, site: Site) -> None:
    prepare_site(site)
    scripts = []
    for number, row in enumerate(islice(rows(seed), most)):
        run, script = written(row, site.home / f"r {number}")
        scripts.append(site.home / f"{number}.sh")
        scripts[-1].write_text(script)
        require_flags(script, run, row)
        words, variables = submitted(site, script, run)
        assert Path(words[0]).name == ("mpirun" if run.config.cluster.start == "mpirun" else "srun")
        if row["shape"] != ARRAY and row["launcher"] == "slurm" and not needs_own_script(run):
            assert words[-2:] == ["submitit.core._submit", str(run.folder.slurm)]
        else:
            assert words[-3:] == ["hpc_parallel.job", "rank", str(run.folder.path)]
        require_environment(words, variables, run, site)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed: bash alone has read the scripts")
    checked = subprocess.run([SHELLCHECK, "--shell=bash", *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
