"""What `-m` starts: composed as Hydra would, checked together, grouped by what Slurm is asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from hydra import compose

from hpc_parallel.config.compose import compose_cells
from hpc_parallel.config.hydra_internals import composing
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure.end_runs import is_script_of
from hpc_parallel.record.attempts import history
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import Sweep, read_sweep
from hpc_parallel.record.trust import UntrustedError
from hpc_parallel.run import main
from hpc_parallel.slurm.jobs import job_of

CONF = str(find_folder("conf"))
CHEAP = ("launcher.snapshot=false", "cluster=cpu")
pytestmark = pytest.mark.usefixtures("here")


def only_sweep(here: Path) -> tuple[Path, Sweep]:
    (folder,) = here.glob("runs/sweeps/*")
    return folder, read_sweep(folder)


def cells(*words: str, extra_dir: str | None = None) -> list[tuple[list[str], list[str], RunConfig]]:
    found = compose_cells(words, config_dir=CONF, config_name="config", extra_dir=extra_dir)
    return [(cell.overrides, cell.swept, resolve(cell.config)[0]) for cell in found.cells]


def hydras(overrides: Sequence[str]) -> RunConfig:
    """The same as Hydra composes it alone."""
    with composing(CONF):
        return resolve(compose("config", overrides=list(overrides)))[0]


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=data,pipeline,tensor", "nodes=1,2,4"],
        ["nodes=range(1,4)", "strategy.pipeline=1", "model=choice(tiny,124m)"],
        ["strategy=glob(*sdp)", "training.clip_norm=null,0.5"],
        ["+launcher.extra.nice=1,2", "name=x-${nodes}-${strategy.name}", "nodes=1,3"],
        ["~nodes", "seed=1,2", "data.pattern='*.md','*.txt'"],
        ["optimizer.betas=[0.1,0.2],[0.3,0.4]", "optimizer.eps=1e-6"],
        ["task=infer,generate", "seed=1,2"],
    ],
)  # fmt: skip
def test_combinations_equal_those_of_hydra(words: list[str]) -> None:
    found = cells(*words)
    assert len({tuple(overrides) for overrides, _, _ in found}) == len(found) > 1
    for overrides, swept, config in found:
        assert config == hydras(overrides)
        assert set(swept) < set(overrides) or set(swept) == set(overrides)


def test_order_and_overrides_equal_the_basic_sweepers() -> None:
    found = cells("nodes=1,2", "strategy=data,fsdp", "seed=7")
    assert [overrides for overrides, _, _ in found] == [
        ["nodes=1", "strategy=data", "seed=7"], ["nodes=1", "strategy=fsdp", "seed=7"],
        ["nodes=2", "strategy=data", "seed=7"], ["nodes=2", "strategy=fsdp", "seed=7"],
    ]  # fmt: skip
    assert [swept for _, swept, _ in found][1] == ["nodes=1", "strategy=fsdp"]


def test_more_combinations_equal_those_of_hydra() -> None:
    more = ["strategy=hybrid strategy.pipeline=2", "strategy=hybrid training.steps=5 nodes=4"]
    found = cells("strategy=data,fsdp", "nodes=2,4", "training.steps=3", f"sweep.also={json.dumps(more)}")
    assert [swept for _, swept, _ in found[4:]] == [
        ["strategy=hybrid", "nodes=2", "training.steps=3", "strategy.pipeline=2"],
        ["strategy=hybrid", "nodes=4", "training.steps=3", "strategy.pipeline=2"],
        ["strategy=hybrid", "nodes=4", "training.steps=5"],  # and its pipeline is nobody's but its own
    ]
    for overrides, _, config in found:
        assert config == hydras(overrides)


def test_hydras_own_values_are_the_combinations(here: Path) -> None:
    found = cells("seed=5,6", "name=n${hydra:job.num}")
    assert [(config.name, config.seed) for *_, config in found] == [("n0", 5), ("n1", 6)]


def test_another_sweeper_chooses_the_runs() -> None:
    assert compose_cells(
        ["nodes=1,2", "hydra.launcher._target_=other.Launcher"], config_dir=CONF, config_name="config"
    ) is None  # fmt: skip


@pytest.mark.parametrize("sizes", ["2,4", "2"])
def test_losses_of_other_statistics_of_batch_norm_are_named(
    sizes: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two replicas share the statistics of a microbatch."""
    words = ("strategy=data", "nodes=2", "model=convnet", "data=digits", "seed=1,2", "launcher=script")
    assert main(["-m", *words, f"training.microbatch_size={sizes}", "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert ("over 4 samples in seed=1 training.microbatch_size=2, " in told) == (sizes == "2,4")
    assert ("Losses can't be compared" in told) == (sizes == "2,4")


@pytest.mark.parametrize("kinds", ["float32,bfloat16", "bfloat16"])
def test_runs_that_keep_other_parts_in_bfloat16_are_named(
    kinds: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("strategy=single", "seed=1,2", "launcher=script", f"optimizer.state={kinds}")
    assert main(["-m", *words, *CHEAP, "dry_run=true"]) == 0
    told = capsys.readouterr().out
    assert ("bfloat16: nothing in seed=1 optimizer.state=float32, " in told) == ("," in kinds)
    assert ("optimizer state in seed=1 optimizer.state=bfloat16, " in told) == ("," in kinds)


def test_a_dry_run_says_what_the_runs_take_at_most_before_a_requeue(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("strategy=data", "nodes=1,3", "gpus_per_node=2", "launcher.time_minutes=45", "launcher=script")
    assert main(["-m", *words, *CHEAP, "training.global_batch_size=6", "dry_run=true"]) == 0
    said = "# 2 runs of 8 devices together, at most 6 device-hours by their time limits, before a requeue"
    assert capsys.readouterr().out.splitlines()[-1] == said  # (2 + 6) x 0.75 h, each start of them


def test_impossible_ones_are_listed_and_skipped_and_duplicates_dropped(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "strategy=pipeline", "nodes=1,2,2,8", "launcher=script", *CHEAP]) == 0
    told = capsys.readouterr().out
    assert "skipped 1 combination that can't run:\n  nodes=8: strategy.pipeline = 8 gives 8 stages" in told
    assert "dropped 1 duplicate" in told
    folder, sweep = only_sweep(here)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [run.nodes for run in sweep.runs] == [1, 2]
    assert "nodes=8" in sweep.skipped[0].overrides
    assert sweep.command[:3] == ("-m", "strategy=pipeline", "nodes=1,2,2,8")
    for run in sweep.runs:
        assert yaml.safe_load((run.run_dir / "config.yaml").read_text())["nodes"] == run.nodes


def test_on_invalid_stop_starts_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "nodes=1,0", "sweep.on_invalid=stop", "launcher=script"]) == 2
    assert "nodes = 0 must be at least 1. Try nodes=1." in capsys.readouterr().err
    assert not list(here.iterdir())


@pytest.mark.parametrize("word", ["sweep.wait=true", "sweep.resume=x", "sweep.parallelism=2"])
def test_only_a_sweep_has_keys_of_a_sweep(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word, "launcher=script"]) == 2
    assert f"{word}: only a sweep has this. Try run -m {word}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["+hydra.callbacks.mine._target_=mine.Noting"],
         "hydra.callbacks: only a sweep calls them. Try the same line with -m."),
        (["+hydra.job.env_set.DEPTH=3"],
         "hydra.job.env_set has no effect here. Try cluster.environment={NAME: value}."),
        (["hydra.job.chdir=true"],
         "hydra.job.chdir has no effect here: a run stays in the folder where it was started."),
        (["hydra.run.dir=${now:%Y}"], "hydra.run.dir=${now:%Y} has no effect here. Try 'run_dir=${now:%Y}'."),
        (["-m", "nodes=1,2", "hydra.sweep.subdir=${hydra.job.num}"],
         "hydra.sweep.subdir=${hydra.job.num} has no effect here: a sweep numbers the folders of its runs."),
        (["hydra.sweep.dir=x"], "hydra.sweep.dir=x: only a sweep has this. Try run -m hydra.sweep.dir=x."),
        (["--experimental-rerun", "config.pickle"],
         "--experimental-rerun would run a pickled configuration. Try python -m hpc_parallel rerun RUN."),
    ],
)  # fmt: skip
def test_unsupported_settings_of_hydra_are_refused(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", argv := ["run", "nodes=3"])  # is read where no words are given, and kept
    assert main([*words, "launcher=script"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"  {line}"]
    assert argv == ["run", "nodes=3"]


STUB = """#!/bin/sh
case "${0##*/} $1 $2" in
  sbatch*) for last; do :; done; cp "$last" "$CALLS.$$"; echo "$last" >> "$CALLS.paths"
    echo "$$" >> "$CALLS"; tail -1 "$CALLS" ;;
  "scontrol ping"*) echo "Slurmctld(primary) at here is UP" ;;
  "scontrol show config") echo "MaxArraySize            = $MOST" ;;
esac
"""


@pytest.fixture
def slurm(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for a Slurm that takes everything: the file of calls; a script a call beside it."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("sbatch", "scontrol", "squeue", "sacct", "scancel", "sinfo"):
        (folder / name).write_text(STUB)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    monkeypatch.setenv("MOST", "1001")
    return folder / "calls"


def scripts(calls: Path) -> dict[str, str]:
    return {job: Path(f"{calls}.{job}").read_text() for job in calls.read_text().split()}


def test_runs_with_equal_sbatch_flags_form_one_array(slurm: Path, here: Path) -> None:
    """Not the node count alone: time limits are resources, too; names, seeds and strategies are not."""
    words = ["strategy=data,fsdp", "launcher.time_minutes=10,20", "seed=1,2", "nodes=2", "launcher=slurm"]
    assert main(["-m", *words, *CHEAP, "sweep.parallelism=3"]) == 0
    folder, sweep = only_sweep(here)
    given = scripts(slurm)
    assert len(given) == 2
    for job, script in given.items():
        runs = [run for run in sweep.runs if (run.job_id or "").startswith(f"{job}_")]
        assert [run.job_id for run in runs] == [f"{job}_{index}" for index in range(4)]
        minutes = {word for run in runs for word in run.overrides if "time_minutes" in word}
        assert len(minutes) == 1
        assert f"#SBATCH --time={minutes.pop().partition('=')[2]}\n" in script
        assert "#SBATCH --array=0-3%3\n" in script
        (tasks,) = {path.parent for path in folder.glob("arrays/*/0") if path.resolve() == runs[0].run_dir}
        assert [(tasks / str(index)).resolve() for index in range(4)] == [run.run_dir for run in runs]
        assert f"#SBATCH --output={tasks}/%a/slurm/%A_%a.out\n" in script
        for run in runs:
            assert json.loads((run.run_dir / "owner.json").read_text())["job_id"] == run.job_id
            assert (run.run_dir / "batch_script.sh").read_text() == script
            assert str(run.run_dir) in (run.run_dir / "slurm" / "resubmit.sh").read_text()


def test_the_job_of_a_run_without_an_array_can_be_cancelled(slurm: Path, here: Path) -> None:
    """Its script was in a folder of the sweep, and `cancel` took the job for another one."""
    assert main(["-m", "nodes=1,2", "launcher=slurm", *CHEAP]) == 0
    _, sweep = only_sweep(here)
    submitted = Path(f"{slurm}.paths").read_text().split()
    for run, script in zip(sweep.runs, submitted, strict=True):
        assert is_script_of(RunFolder(run.run_dir), script, job=str(run.job_id))


def test_where_one_run_cannot_be_none_is_left(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "seed=1,2", "run_dir=${seed}", "launcher=slurm", *CHEAP]
    assert main([*words, "hydra.sweep.dir=2/x"]) == 2
    assert "can't hold the run" in capsys.readouterr().err
    assert not (here / "1").exists()
    assert not (here / "2" / "x").exists()

    def distrust(path: Path) -> None:
        raise UntrustedError(f"{path} can be written by anyone.")

    monkeypatch.setattr("hpc_parallel.record.trust.require_private", distrust)
    (here / "2").rmdir()
    assert main(words) == 2
    assert "can be written by anyone" in capsys.readouterr().err
    assert not [path for path in here.glob("*") if path.name in "12"]
    assert not list(here.glob("runs/sweeps/*"))
    assert not slurm.exists()
    (here / "kept").mkdir()  # a folder that was there, and is no sweep's
    (here / "kept" / "mine").touch()
    assert main([*words, "hydra.sweep.dir=kept"]) == 2
    assert [path.name for path in (here / "kept").iterdir()] == ["mine"]


def test_a_task_finds_its_run_by_its_number(slurm: Path, here: Path) -> None:
    assert main(["-m", "seed=1,2,3", "name='it is'", "launcher=slurm", *CHEAP]) == 0
    _, sweep = only_sweep(here)
    (script,) = scripts(slurm).values()
    srun = '() { printf \'%s\\n\' "$@"; touch "${@: -1}/summary.json"; }'
    job = {**os.environ, "BASH_FUNC_srun%%": srun, "SLURM_ARRAY_JOB_ID": "9"}
    for index, run in enumerate(sweep.runs):
        environment = {**job, "SLURM_ARRAY_TASK_ID": str(index)}
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(run.run_dir)
        assert f"of job 9_{index} on" in done.stderr
    lost = {**job, "SLURM_ARRAY_TASK_ID": "7"}
    assert subprocess.run(["bash", "-c", script], env=lost, capture_output=True).returncode != 0


def test_arrays_that_the_site_would_not_take_are_split(
    slurm: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOST", "3")  # task numbers 0 to 2
    assert main(["-m", "seed=range(7)", "launcher=slurm", *CHEAP]) == 0
    lines = [line for script in scripts(slurm).values() for line in script.splitlines() if "--array" in line]
    assert lines == ["#SBATCH --array=0-2", "#SBATCH --array=0-2"]  # and one that is no array
    _, sweep = only_sweep(here)
    assert [(run.job_id or "").partition("_")[2] for run in sweep.runs] == ["0", "1", "2", "0", "1", "2", ""]


def test_resume_runs_only_missing_and_failed_runs(
    slurm: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-m", "seed=range(4)", "launcher=slurm", *CHEAP]
    assert main(words) == 0
    folder, first = only_sweep(here)
    write_json(first.runs[0].run_dir / "summary.json", {"outcome": "completed"})
    write_json(first.runs[1].run_dir / "summary.json", {"outcome": "failed"})
    write_json(first.runs[2].run_dir / "owner.json", {"host": "elsewhere", "pid": 1, "began": None})
    write_json(first.runs[3].run_dir / "owner.json", {"job_id": first.runs[3].job_id})  # gone, and not new
    capsys.readouterr()
    assert main(["-m", f"sweep.resume={folder}", "launcher.time_minutes=90"]) == 0
    counted = (
        "earlier runs: 1 completed, 1 in progress: unknown (its process is on elsewhere), 2 from the start"
    )
    assert capsys.readouterr().out.startswith(f"{counted}\nsweep of 2 runs; ")
    assert read_sweep(folder).started == first.started
    again = read_sweep(folder).runs
    assert len(again) == 4
    assert [old == new for old, new in zip(first.runs, again, strict=True)] == [True, False, True, False]
    assert again[1].run_dir != first.runs[1].run_dir
    assert "launcher.time_minutes=90" in again[3].overrides
    assert len(scripts(slurm)) == 2
    assert main([*words, f"sweep.resume={folder}", "dry_run=true"]) == 0
    assert read_sweep(folder).runs == again
    assert read_sweep(folder).command.count("-m") == 1


def test_resume_takes_more_values_and_leaves_no_run_out(
    slurm: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "seed=1,2", "launcher=slurm", *CHEAP]) == 0
    folder, first = only_sweep(here)
    capsys.readouterr()
    shutil.move(first.runs[1].run_dir, here / "elsewhere")
    assert main(["-m", f"sweep.resume={folder}", "dry_run=true"]) == 0
    assert ", 1 from the start, without a folder\n" in capsys.readouterr().out
    for words, labels in (("seed=2,3", "seed=1"), ("training.steps=7", "seed=1; seed=2")):
        assert main(["-m", f"sweep.resume={folder}", words]) == 2
        said = f"{labels.count('seed')} of its 2 runs are not in this command ({labels})"
        assert said in capsys.readouterr().err
    assert only_sweep(here)[1] == first
    assert main(["-m", f"sweep.resume={folder}", "seed=1,2,3"]) == 0
    more = only_sweep(here)[1].runs
    assert [[word for word in run.overrides if "seed" in word] for run in more] == [
        ["seed=1"], ["seed=2"], ["seed=3"],
    ]  # fmt: skip


def test_resume_leaves_no_run_out_beside_impossible_ones(
    slurm: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-m", "seed=1,2", "nodes=1,0", "launcher=slurm", *CHEAP]) == 0
    folder, first = only_sweep(here)
    assert (len(first.runs), len(first.skipped)) == (2, 2)
    assert main(["-m", f"sweep.resume={folder}", "seed=2,3"]) == 2
    assert "1 of its 2 runs are not in this command (seed=1 nodes=1)" in capsys.readouterr().err
    assert main(["-m", f"sweep.resume={folder}"]) == 0


def test_one_run_goes_on_without_m(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "resume=auto", "strategy=data,pipeline", "launcher=script"]) == 2
    assert "resume = auto continues one run, but -m starts several." in capsys.readouterr().err


def test_an_impossible_setting_is_reported_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "strategy=pipeline", "nodes=1,8,8", "launcher=script", *CHEAP]) == 0
    assert "skipped 1 combination" in capsys.readouterr().out
    assert len(only_sweep(here)[1].skipped) == 1


def test_source_is_copied_once_and_linked(here: Path) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    (here / "sub").mkdir()
    (here / "sub" / "mine_one.py").write_text("value = 1\n")
    (here / ".gitignore").write_text("*.bin\n")
    (here / "weights.bin").touch()
    assert main(["-m", "seed=1,2,3", "launcher=script", "cluster=cpu"]) == 0
    _, sweep = only_sweep(here)
    files = [run.run_dir / "code" / here.name / "sub" / "mine_one.py" for run in sweep.runs]
    assert {file.read_text() for file in files} == {"value = 1\n"}
    links = [run.run_dir / "code" / here.name / "weights.bin" for run in sweep.runs]
    assert {link.readlink() for link in links} == {here / "weights.bin"}
    paths = {
        (run.run_dir / "batch_script.sh").read_text().count(f"{run.run_dir}/code/{here.name}")
        for run in sweep.runs
    }
    assert paths == {1}


def test_an_array_task_is_identified_by_its_number(tmp_path: Path) -> None:
    raw = {"SLURM_JOB_ID": "127"}
    task = {**raw, "SLURM_ARRAY_JOB_ID": "123", "SLURM_ARRAY_TASK_ID": "4"}
    assert (job_of(raw), job_of(task), job_of({})) == ("127", "123_4", None)
    from hpc_parallel.record.run_folder import RunFolder

    assert history(RunFolder(tmp_path), environment=task).job_ids == ("123_4",)


def test_a_sweep_never_imports_torch(slurm: Path) -> None:
    words = ["-m", "nodes=1,2", "launcher=slurm", *CHEAP]
    code = (
        f"import sys, hpc_parallel.run as run; assert run.main({words}) == 0; print('torch' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
