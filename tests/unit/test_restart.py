"""Whether a run starts again, counted over all its starts."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from hpc_parallel.config.resolve import resolve
from hpc_parallel.config.typed_config import typed
from hpc_parallel.failure import conclude_run, failure, restart
from hpc_parallel.failure.restart import Hosts, RestartLimits
from hpc_parallel.launch import run_files
from hpc_parallel.launch.batch_script import ScriptLauncher
from hpc_parallel.layout.layout import Layout, layout_of
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.attempts import End
from hpc_parallel.record.provenance import read_environment
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.slurm import submit
from hpc_parallel.slurm.jobs import Job, JobState
from tests.composed import composed, prepared

DISABLED = "Requested operation is presently disabled"  # as scontrol of 22.05 says it
LAUNCHER = {"max_requeues": 2, "max_restarts": 1, "exclude": None, "resubmit": False, "partition": None}
TRAINING = {
    "training": {"steps": 9, "on_nonfinite": "stop"}, "task": {"name": "train"}, "nodes": 1,
    "gpus_per_node": 2, "strategy": {"name": "data", "execution": "spmd", **Layout(replicate=2).degrees},
    "launcher": LAUNCHER,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def ends(text: str) -> list[End]:
    """Ends of starts: `how rank@host step`, separated by commas. `-` for what is not known."""
    found = []
    for words in text.split(", "):
        how, place, step = words.split()
        rank, _, host = place.partition("@")
        numbers = {"rank": None if rank == "-" else int(rank), "step": None if step == "-" else int(step)}
        exclude = (host,) if how == "preflight" and host else ()
        found.append(End("2026-01-01", how, host or None, exclude, **numbers))
    return found


SAME = "it failed so twice after step 30, so it does not start again"
USED = "launcher.max_restarts=3 is used up"
KILLED = "killed 1@n2 30"
PLACES = ["killed 1@n2 30", "hang 2@n3 40", "killed 3@n4 50", "lost_peer 0@n1 60"]
TABLE = [  # how the starts ended; what is allowed; what follows in a job
    # A failure that a new start can repair: on the same hosts, as often as it is allowed.
    (KILLED, {}, "in place", "1 of 3"),
    ("lost_peer 1@n2 30", {}, "in place", "1 of 3"),
    ("collective_timeout 1@n2 30", {}, "in place", "1 of 3"),
    ("start 1@n2 0", {}, "in place", "1 of 3"),
    ("hang 1@n2 30", {}, "in place", "1 of 3"),
    ("hang - 30", {}, "in place", "1 of 3"),  # no rank is to blame
    (", ".join(PLACES[:3]), {}, "in place", "3 of 3"),
    (", ".join(PLACES), {}, "end", USED),
    (KILLED, {"max_restarts": 0}, "end", ""),
    # Twice at the same place: a new start would end there too.
    (f"{KILLED}, {KILLED}", {}, "end", f"{SAME}. If n2 is to blame, try launcher.exclude=n2"),
    (f"{KILLED}, killed 1@n3 30", {}, "end", SAME),
    ("hang - 30, hang - 30", {}, "end", SAME),
    (f"{KILLED}, killed 2@n3 30", {}, "in place", "2 of 3"),
    (f"{KILLED}, hang 1@n3 30", {}, "in place", "2 of 3"),
    ("killed 1@n2 -, killed 1@n3 -", {}, "in place", "2 of 3"),  # a script that logs no steps
    (f"{KILLED}, preempted - 30, {KILLED}", {}, "end", f"{SAME}. If n2 is to blame, try launcher.exclude=n2"),
    # What other hosts can repair.
    ("node_lost - 30", {}, "requeue", ""),
    ("killed 1@n2 30, killed 1@n2 40", {}, "requeue", ""),  # a host that failed twice
    ("preflight 0@n1 0", {}, "requeue", ""),
    (f"{KILLED}, start - 30", {"start": 1}, "requeue", ""),  # the ranks did not start again
    (KILLED, {"start": None}, "requeue", ""),  # a batch script of an older version
    # What no start can repair.
    ("start - 0", {}, "end", ""), ("killed - 0", {}, "end", ""),  # set-up lines
    ("error 1@n2 30", {}, "end", ""), ("out_of_memory 1@n2 30", {}, "end", ""),
    ("disk 1@n2 30", {}, "end", ""), ("configuration 1@n2 0", {}, "end", ""),
    ("desync 1@n2 30", {}, "end", ""), ("replicas 1@n2 30", {}, "end", ""),
    ("preflight - 0", {}, "end", ""),  # no host to leave out
    # Values that are not finite: once.
    ("nonfinite 1@n2 30", {}, "end", ""),
    ("nonfinite 1@n2 30", {"rolls_back": True, "max_restarts": 0}, "in place", "from the checkpoint before"),
    ("nonfinite 1@n2 30, nonfinite 1@n2 40", {"rolls_back": True}, "end", ""),
    # Slurm and the user.
    ("cancelled - 30", {}, "end", ""),
    ("preempted - 30", {"max_requeues": 0, "max_restarts": 0}, "requeue", ""),
    ("time_limit - 30, time_limit - 40", {}, "requeue", ""),
    ("time_limit - 30, time_limit - 40, time_limit - 50", {}, "end", "launcher.max_requeues=2 is used up"),
    ("requeued - -", {}, "requeue", ""),
    ("time_limit - 0", {"continues": False}, "end",
     "a new start would reach it again: try a longer launcher.time_minutes, a smaller task.seconds, or "
     "script.resume_arguments"),
    ("time_limit - 0", {"continues": False, "max_requeues": 0}, "end", "launcher.max_requeues=0 is used up"),
    ("time_limit - 0", {"continues": False, "is_own_job": False}, "end", "an allocation is not requeued"),
    ("preempted - 0", {"continues": False}, "requeue", ""),
    # Slurm ends the job while its end is concluded.
    (KILLED, {"by_slurm": "cancelled"}, "end", "the job is cancelled, so it does not start again"),
    (KILLED, {"by_slurm": "preempted"}, "requeue", ""),
    (KILLED, {"by_slurm": "time_limit"}, "requeue", ""),
    ("node_lost - 30", {"by_slurm": "cancelled"}, "requeue", ""),
]  # fmt: skip


@pytest.mark.parametrize(("history", "given", "action", "why"), TABLE)
def test_the_policy(history: str, given: dict[str, Any], action: str, why: str) -> None:
    place = {key: given[key] for key in ("continues", "by_slurm") if key in given}
    most = {"max_restarts": 3, "max_requeues": 2, "rolls_back": False, "start": 0}
    limits = RestartLimits(**most | {key: value for key, value in given.items() if key not in place})
    decision = restart.decide(ends(history), limits=limits, **place)
    here = "the ranks start again in the same job, on the same hosts, "
    assert decision == restart.Decision(action, here + why if action == "in place" else why)


TWICE = "killed 1@n2 30, killed 1@n2 40"
IN_JOB = [  # how the starts ended; the hosts of the last one; those that the job has; what follows, on which
    (KILLED, "n1 n2", "n1 n2 n3", "in place", "on the same hosts, 1 of 3", "n1 n2"),
    ("node_lost -@n2 30", "n1 n2", "n1 n3", "spare", "on the spare n3 in place of n2, 1 of 3", "n1 n3"),
    ("node_lost -@n1 30", "n1 n2", "n2 n3", "spare", "on the spare n3 in place of n1, 1 of 3", "n2 n3"),
    ("hang 1@n2 30", "n1 n2", "n1 n3", "spare", "on the spare n3 in place of n2, 1 of 3", "n1 n3"),
    (TWICE, "n1 n2", "n1 n2 n3", "spare", "on the spare n3 in place of n2, 2 of 3", "n1 n3"),
    ("preflight -@n1 0", "n1 n2", "n1 n2 n3", "spare",
     "on the spare n3 in place of n1, after its checks", "n2 n3"),
    (f"{TWICE}, killed 0@n1 50", "n1 n3", "n1 n2 n3 n4", "in place", "on the same hosts, 3 of 3", "n1 n3"),
    ("node_lost -@n1 30", "n1 n2", "n3 n4", "spare",
     "on the spares n3, n4 in place of n1, n2, 1 of 3", "n3 n4"),
    ("node_lost -@n1 30", "n1 n2", "n3", "requeue", "", ""),  # no spare is left
    # A layout of four hosts, or of two.
    ("node_lost -@n2 30", "n1 n2 n3 n4", "n1 n3 n4", "fewer nodes",
     "on 2 of 4 nodes (failed: n2; waiting: n4), 1 of 3", "n1 n3"),
    ("node_lost -@n2 30", "n1 n2 n3 n4", "n1 n3 n4 n5", "spare", "on the spare n5 in place of n2, 1 of 3",
     "n1 n3 n4 n5"),
    (TWICE, "n1 n2 n3 n4", "n1 n2 n3 n4", "fewer nodes",
     "on 2 of 4 nodes (failed: n2; waiting: n4), 2 of 3", "n1 n3"),
    ("node_lost -@n1 30, node_lost -@n2 40", "n1 n2 n3 n4", "n3 n4", "fewer nodes",
     "on 2 of 4 nodes (failed: n1, n2), 2 of 3", "n3 n4"),
    ("node_lost -@n3 30", "n1 n3", "n1 n4", "spare", "on the spare n4 in place of n3, 1 of 3", "n1 n4"),
    ("node_lost -@n1 30", "n1 n2 n3 n4", "n4", "requeue", "", ""),
    # A host that is fit again waits, and so does one that the layout leaves over.
    (KILLED, "n1 n3", "n1 n2 n3", "in place", "on the same hosts, 1 of 3", "n1 n3"),
    (KILLED, "n2 n4", "n1 n2 n3 n4", "in place", "on the same hosts, 1 of 3", "n2 n4"),
    (f"{TWICE}, node_lost -@n3 50", "n1 n3", "n1 n2", "requeue", "", ""),
    (KILLED, "n1 n2", "", "requeue", "", ""),  # Slurm takes the host of the batch script for lost
    (f"{KILLED}, start - 30", "n1 n2", "n1 n2 n3", "requeue", "", ""),  # nobody knows which host is gone
    ("error 1@n2 30", "n1 n2", "n1 n2 n3", "end", "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("history", "used", "held", "action", "why", "hosts"), IN_JOB)
def test_the_hosts_of_the_next_start(
    history: str, used: str, held: str, action: str, why: str, hosts: str
) -> None:
    sizes = (4, 2) if used.endswith("4") else (2,)
    place = Hosts(tuple(used.split()), tuple(held.split()), sizes=sizes)
    limits = RestartLimits(max_restarts=3, max_requeues=2, rolls_back=False, start=1, hosts=place)
    line = f"the ranks start again in the same job, {why}" if why else ""
    wanted = restart.Decision(action, line, tuple(hosts.split()))
    assert restart.decide(ends(history), limits=limits) == wanted
    if action != "end":
        assert restart.decide(ends(history), limits=limits, by_slurm="preempted").action == "requeue"


@pytest.mark.parametrize(
    ("listed", "batch", "held"),
    [("n[1,3]", "n1", ("n1", "n3")), ("n[2-3]", "n1", ()), ("", "n1", None)],
)
def test_the_hosts_of_a_job_are_those_that_slurm_has_left_it(
    folder: RunFolder, listed: str, batch: str, held: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "job_fields", lambda job: {"NodeList": listed})
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2", "SLURMD_NODENAME": batch}

    def found(**launcher: int) -> Hosts | None:
        folder.config.write_text(json.dumps({"nodes": 2, "launcher": launcher}))
        return Hosts.of(folder, environment=environment)

    assert found() is None
    assert found(spares=1) == (None if held is None else Hosts(("n1", "n2"), held, sizes=(2,)))
    folder.unfit_spares.write_text("n1\nn3\n")  # a host that works is none of the spares
    fit = None if held is None else Hosts(("n1", "n2"), held[:1], sizes=(2,))
    assert found(spares=1) == fit
    folder.unfit_spares.write_text("")
    folder.smaller.mkdir()
    for nodes in (1, 10, 2):
        folder.on_nodes(nodes).write_text("")
    assert found(min_nodes=1) == (None if held is None else Hosts(("n1", "n2"), held, sizes=(10, 2, 1)))


FEWER = ("launcher=script", "strategy=data", "nodes=4", "training.global_batch_size=8")


def test_a_run_keeps_its_configurations_on_fewer_nodes(here: Path) -> None:
    """Those that its layout allows: eight samples can't be split over three."""
    run = prepared(*FEWER, "launcher.min_nodes=1", "launcher.spares=1", "run_dir=run")
    assert ": 4 nodes (and 1 spare, at least 1) x 1 device = replicate 4" in str(run)
    ScriptLauncher().start(run)
    assert run.folder.node_counts() == (4, 2, 1)
    assert run.folder.on_nodes(4).read_text() == run.folder.config.read_text()
    whole = run.folder.read_config()
    assert whole["nodes"] == 4
    small = yaml.safe_load(run.folder.on_nodes(2).read_text())
    assert small == whole | {"nodes": 2}
    environment = read_environment(run.folder)
    write_json(run.folder.environment, {**environment, "predicted": {"step_time_s": 1.0}})
    conclude_run.go_on_with(run.folder, nodes=2)
    assert run.folder.read_config() == small
    assert read_environment(run.folder) == environment  # what was predicted for four nodes is gone
    (line,) = [line for line in run.folder.batch_script.read_text().splitlines() if line.startswith("cp ")]
    subprocess.run(["bash", "-euc", line], check=True)  # at the start of the next job
    assert run.folder.read_config() == whole
    run_files._write_smaller(replace(run, smaller={}), "")  # resumed without launcher.min_nodes
    assert run.folder.node_counts() == ()


def test_degrees_are_resolved_again_on_fewer_nodes(here: Path) -> None:
    run = prepared(*FEWER, "strategy=hsdp", "gpus_per_node=2", "launcher.min_nodes=2", "model=tiny")
    plans = {nodes: typed(values).strategy for nodes, values in run.smaller.items()}
    layouts = {nodes: layout_of(strategy, devices=2 * nodes).degrees for nodes, strategy in plans.items()}
    assert [(nodes, of["replicate"], of["shard"]) for nodes, of in layouts.items()] == [(2, 2, 2)]


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("launcher.min_nodes=3",),
         "= 3 is not possible with this layout. On 3 nodes: training.global_batch_size = 8"),
        (("launcher.min_nodes=2", "strategy.replicate=4"),
         "= 2 is not possible with this layout. On 2 nodes: strategy.replicate"),
        (("launcher.min_nodes=5",), "= 5 must be at most nodes=4, and at most 64 fewer"),
        (("launcher.min_nodes=2", "task=script", "script.command=sleep",
          "script.resume_arguments='--resume {run}/x'"),
         "= 2 is for our own training: only your script knows how it splits its batch"),
        (("launcher.min_nodes=0",), "= 0 must be at least 1"),
        (("launcher.min_nodes=2", "launcher=local"), "= 2 needs a job of the run's own"),
    ],
)  # fmt: skip
def test_a_layout_that_can_not_shrink_is_refused(words: tuple[str, ...], refusal: str) -> None:
    line = ("launcher=script", "nodes=4") if "task=script" in words else FEWER
    with pytest.raises(ConfigError) as refused:
        prepared(*line, *words)
    (problem,) = refused.value.problems
    assert str(problem).startswith(f"launcher.min_nodes {refusal}"), problem
    advised = re.search(r"Try launcher.min_nodes=(\w+)\.$", str(problem))
    assert advised, problem
    prepared(*line, *words, f"launcher.min_nodes={advised[1]}")  # the last one counts


def test_a_run_that_goes_on_with_fewer_nodes_takes_their_configuration(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"nodes": 2, "training": {"on_nonfinite": "stop"}, "launcher": LAUNCHER | {"min_nodes": 1}}
    folder.config.write_text(json.dumps(config))
    folder.smaller.mkdir()
    for nodes in (1, 2):
        folder.on_nodes(nodes).write_text(json.dumps(config | {"nodes": nodes}))
    attempts.end(folder, how="node_lost", host="n2", step=30)
    folder.failure.write_text('{"kind": "node_lost", "host": "n2", "line": "node n2 was lost"}')
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING", "NodeList": "n1"})
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURMD_NODENAME": "n1"}
    followed = conclude_run._follow_failure(folder, start=0, environment=environment)
    said = "the ranks start again in the same job, on 1 of 2 nodes (failed: n2), 1 of 1"
    assert followed == (restart.Decision("fewer nodes", said, ("n1",)), said)
    assert folder.read_config() == config | {"nodes": 1}


SCRIPT = ("task=script", "script.command=true")
RESUMES = "script.resume_arguments='--resume {run}/last.pt'"


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("launcher=script",), 3), (("launcher=local",), 0),
        (("launcher=script", "launcher.max_restarts=1"), 1),
        (("launcher=local", "launcher.max_restarts=1"), 1),
        (("launcher=script", "training.checkpoint_every=null"), 0), (("launcher=script", "task=infer"), 0),
        (("launcher=script", *SCRIPT, RESUMES), 3), (("launcher=script", *SCRIPT), 0),
        (("launcher=local", *SCRIPT, RESUMES), 0),
    ],
)  # fmt: skip
def test_a_job_that_can_go_on_restarts_by_default(words: tuple[str, ...], most: int) -> None:
    assert resolve(composed(*words)).config.launcher.max_restarts == most


NO_JOB = "needs a job of the run's own, and launcher.kind=local submits none"
NO_RESTART = "has no use: launcher.max_restarts=0 lets no start follow a failure"
INFER = ("launcher=script", "task=infer")  # which starts anew


@pytest.mark.parametrize(
    ("key", "words", "refusal"),
    [
        ("spares=1", ("launcher=local",), NO_JOB),
        ("spares=1", ("launcher=script", "launcher.max_restarts=0"), NO_RESTART),
        ("spares=1", INFER, NO_RESTART),
        ("spares=-1", ("launcher=script",), "must be at least 0"),
        ("standby=true", ("launcher=local",), NO_JOB),
        ("standby=true", ("launcher=script", "training.checkpoint_every=null"),
         f"{NO_RESTART}, and a training without checkpoints needs training.checkpoint_every first"),
        ("standby=true", ("launcher=script", "task=script", "script.command=bash", RESUMES),
         "is for our own training: your script imports torch itself"),
        ("standby=true", ("launcher=script", "+cluster.srun.input=none", "+cluster.srun.mem-per-cpu=1G"),
         "needs the standard input of srun and its --mem=0, and cluster.srun has input, mem-per-cpu"),
        ("standby=true", ("launcher=script", "cluster.start=torchrun"),
         "needs cluster.start=srun, and it is torchrun"),
        ("standby=true", ("launcher=script", "profile=nsys", "launcher.modules=[nsight]"),
         "starts ranks without a profiler, and profile=nsys is one"),
    ],
)  # fmt: skip
def test_hosts_and_ranks_that_could_not_take_over_are_refused(
    key: str, words: tuple[str, ...], refusal: str
) -> None:
    name, value = key.split("=")
    legal = f"launcher.{name}={'0' if name == 'spares' else 'false'}"
    with pytest.raises(ConfigError) as refused:
        prepared(f"launcher.{key}", *words)
    assert [str(problem) for problem in refused.value.problems] == [
        f"launcher.{name} = {value} {refusal}. Try {legal}."
    ]
    if name == "spares":
        prepared(*words, legal)


def test_a_file_of_hosts_to_exclude_becomes_a_list(here: Path) -> None:
    """A requeued job leaves out further hosts: Slurm would take both for one name."""
    null = "launcher.exclude=null"
    for content, named in (
        ("n[1-2]\n# old\nlogin, # slow\n", "\"launcher.exclude='n[1-2],login'\""),
        ("", ""),
        ("$(ls)", ""),
        (None, ""),
    ):
        if content is not None:
            (here / "bad").write_text(content)
        with pytest.raises(ConfigError) as refused:
            prepared("launcher=script", f"launcher.exclude={here}/bad")
        (problem,) = map(str, refused.value.problems)
        assert problem.startswith(f"launcher.exclude = {here}/bad is a file, to which no restart could add")
        assert problem.endswith(f"name the hosts themselves{named and f', as {named}'}. Try {null}.")
        (here / "bad").unlink(missing_ok=True)
        prepared("launcher=script", *shlex.split(named or null))


def test_the_end_of_a_start_says_that_the_ranks_start_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its exit code, if the batch script can do it; one of an older version gets its job requeued."""
    folder.config.write_text(json.dumps(TRAINING))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: None)
    monkeypatch.setattr(conclude_run.signal, "signal", lambda *_: None)
    world = World(1, 2, 1, 2, 0, 1, host="n1", launcher="slurm", attempt="x")
    for words, line in (
        (("--start", "0"), "the ranks start again in the same job, on the same hosts, 1 of 1"),
        ((), "requeued as job 7"),
    ):
        attempts.note(folder, "resumed")
        failure.record_death(folder, world=world, returncode=-9)
        with suppress(SystemExit):
            conclude_run.main([str(folder.path), "137", "--again", *words])
            assert not words
        cause = "rank 1 on n1 failed first: killed by SIGKILL"
        assert capsys.readouterr().err.splitlines() == [cause, line]
        assert [end.line for end in attempts.recent_ends(folder)] == [cause]
        assert [folder.failure.exists(), folder.summary.exists()] == [not words] * 2
        assert (failure.records(folder) == []) == bool(words)
    assert json.loads(folder.summary.read_text())["outcome"] == "preempted"  # so a user may still cancel it


@pytest.mark.parametrize("ended", [False, True])
def test_a_job_does_not_conclude_a_run_that_goes_on_as_another_one(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ended: bool
) -> None:
    """A user may give the same script to sbatch twice; the ranks of the second job are refused."""
    folder.config.write_text(json.dumps(TRAINING))
    owner.hand_to_job(folder, Job("6"))
    for rank, attempt in enumerate(("slurm-6-0-0", "slurm-7-0-0")):
        world = World(rank, 2, 0, 1, rank, 2, host="n1", launcher="slurm", attempt=attempt)
        failure.record_death(folder, world=world, returncode=-9)
    state = JobState("COMPLETED" if ended else "RUNNING")
    monkeypatch.setattr(owner, "job_state", {Job("6"): state}.__getitem__)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setattr(conclude_run.signal, "signal", lambda *_: None)
    with suppress(SystemExit) if ended else pytest.raises(SystemExit, match="job 7 leaves it alone"):
        conclude_run.main([str(folder.path), "3", "--again"])
    assert (folder.summary.exists(), folder.failure.exists()) == (ended, ended)
    assert bool(attempts.ends(folder)) == ended
    assert [record.rank for record in failure.records(folder)] == [1 if ended else 0]


def test_why_no_start_follows_is_in_the_line_of_the_failure(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.end(folder, how="killed", host="n1", rank=1, step=30)
    folder.failure.write_text('{"kind": "killed", "rank": 1, "host": "n1", "line": "killed"}')
    folder.config.write_text(json.dumps({"training": {"on_nonfinite": "stop"}, "launcher": LAUNCHER}))
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "CANCELLED"})
    conclude_run._follow_failure(folder, start=0, environment={"SLURM_JOB_ID": "7"})
    line = "killed; the job is cancelled, so it does not start again"
    assert json.loads(folder.failure.read_text())["line"] == line


def test_ends_count_from_the_last_resume(folder: RunFolder) -> None:
    for host in ("n2", "n3"):
        attempts.end(folder, how="killed", host=host, rank=1, step=0, exclude=[], line="why")
    attempts.note(folder, "resumed")
    attempts.end(folder, how="killed", host="n2", rank=0, step=30)
    (end,) = attempts.recent_ends(folder)
    assert (end.how, end.host, end.rank, end.step, end.line) == ("killed", "n2", 0, 30, None)
    first, *_ = attempts.ends(folder)
    assert (first.rank, first.step, first.line) == (1, 0, "why")


@pytest.mark.parametrize(
    ("failed", "now", "exclude"),  # in hours; of the requeued job, None: as before
    [
        ((0, 23), 23, "n2"), ((0, 25), 25, None), ((0, 1), 25, "n2"), ((0, 1), 26, ""),
        ((0, 30, 53), 53, "n2"), ((0, 1, 26), 26, ""), ((0,), 1, None),
    ],
)  # fmt: skip
def test_a_host_that_failed_twice_in_a_day_is_left_out_for_a_day(
    failed: tuple[int, ...], now: int, exclude: str | None, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[str | None] = []
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: requeued.append(exclude))
    for host, hour in (*(("n2", hour) for hour in failed), ("n1", now)):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
        attempts.append_line(folder.attempts, {"ended": at.isoformat(), "how": "killed", "host": host})
    restart.requeue_or_resubmit(folder, launcher=LAUNCHER, environment={"SLURM_JOB_ID": "7"})
    assert requeued == [exclude]


@pytest.mark.parametrize(("days", "action"), [(0, "end"), (1, "end"), (2, "requeue")])
def test_hosts_that_the_checks_leave_out_do_not_end_a_run_of_weeks(days: int, action: str) -> None:
    limits = RestartLimits(max_restarts=0, max_requeues=0, rolls_back=False, start=0)
    accused = [End("2026-01-01", "preflight", "n2", ("n2",))] * restart.MOST_EXCLUSIONS
    last = End(f"2026-01-0{1 + days}", "preflight", "n3", ("n3",))
    assert restart.decide([*accused, last], limits=limits).action == action


def test_a_host_that_failed_twice_is_left_out(folder: RunFolder) -> None:
    for how, host in (("killed", "n2"), ("hang", "n3"), ("time_limit", "n3"), ("node_lost", "n2"),
                      ("killed", None), ("killed", None)):  # fmt: skip
        attempts.end(folder, how=how, host=host)
    assert restart.hosts_to_exclude(folder) == ["n2"]


@pytest.mark.parametrize(
    ("exclude", "listed", "end"),
    [
        (None, "n1 n2 n3 n4", None),
        ("n[3-4]", "n1 n2 n3 n4", "has 1 host, and the job needs 2"),
        (None, "n1 n2", "has 1 host, and the job needs 2"),
        ("hosts/slow.txt", "n1 n2 n3", None),
        (None, "n1 n5", None),  # sinfo does not show all
        (None, "", None),
    ],
)
def test_a_job_for_which_too_few_hosts_are_left_is_not_requeued(
    folder: RunFolder, exclude: str | None, listed: str, end: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.end(folder, how=failure.PREFLIGHT, host="n2", exclude=["n2"])
    requeued = []
    monkeypatch.setattr(restart, "hosts_of", {"main": set(listed.split())}.__getitem__)
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: requeued.append((job, exclude)))
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NODELIST": "n[1-2]"}
    launcher = LAUNCHER | {"exclude": exclude}
    line = restart.requeue_or_resubmit(folder, launcher=launcher, environment=environment)
    if end is None:
        assert (line, requeued) == (
            "requeued as job 7, without n2",
            [("7", f"{exclude},n2" if exclude else "n2")],
        )
    else:
        advice = "Start it again with fewer nodes, or when these hosts are repaired"
        assert (line, requeued) == (f"not requeued: without n2 partition main {end}. {advice}", [])


def test_a_host_that_slurm_does_not_leave_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is requeued, but the controller does not answer a second time."""

    def run(*command: str, **_: object) -> CompletedProcess[str]:
        return CompletedProcess(command, int("update" in command), "", "timed out")

    monkeypatch.setattr(submit, "run", run)
    assert submit.requeue("7", exclude="n2") is None
    assert capsys.readouterr().err == "WARNING: job 7 is requeued without ExcNodeList=n2: timed out\n"


def test_a_new_job_stays_on_the_cluster_and_is_what_its_script_says(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside the job, whose environment has the variables of the shell but not SLURM_CLUSTERS."""
    environments = []

    def run(*command: str, environment: dict[str, str], **_: object) -> CompletedProcess[str]:
        environments.append(environment)
        return CompletedProcess(command, 0, "13\n", "")

    monkeypatch.setattr(submit, "run", run)
    monkeypatch.setattr(restart, "requeue", lambda *_, **__: f"{DISABLED} for job 12")
    monkeypatch.setattr(restart, "job_fields", lambda job: {"JobState": "RUNNING"})
    monkeypatch.setenv("SBATCH_TIMELIMIT", "5")
    owner.hand_to_job(folder, Job("12", "big"))
    folder.resubmission.parent.mkdir(exist_ok=True)
    folder.resubmission.write_text("#!/bin/sh\n#SBATCH --time=60\n")
    line = restart.requeue_or_resubmit(
        folder, launcher=LAUNCHER | {"resubmit": True}, environment={"SLURM_JOB_ID": "12"}
    )
    new = owner.Owner.read(folder)
    assert (line, new.job_id, new.clusters) == ("resubmitted as job 13", "13", "big")
    assert [environment for environment in environments if "SBATCH_TIMELIMIT" in environment] == []


def test_a_signal_without_a_job_is_a_cancellation(folder: RunFolder) -> None:
    meaning = {name: restart.why_stopped(name, environment={}) for name in ("SIGUSR2", "SIGTERM", "SIGINT")}
    assert meaning == {"SIGUSR2": "time_limit", "SIGTERM": "cancelled", "SIGINT": "cancelled"}


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING"])
def test_a_job_that_slurm_has_requeued_is_not_submitted_again(
    folder: RunFolder, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else two jobs would train in one folder."""
    fields = {"JobState": state, "PreemptTime": "None", "Restarts": "1"}
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    monkeypatch.setattr(restart, "requeue", lambda job, *, exclude: f"Job is pending execution for job {job}")
    monkeypatch.setattr(restart, "resubmit", lambda script, *, exclude: "8")
    environment, launcher = {"SLURM_JOB_ID": "7"}, LAUNCHER | {"resubmit": True}
    line = restart.requeue_or_resubmit(folder, launcher=launcher, environment=environment)
    assert line == "requeued by Slurm itself as job 7"


@pytest.mark.parametrize(
    ("fields", "count", "reason"),
    [
        ({"JobState": "RUNNING", "PreemptTime": "2026-01-01T00:00:00", "Restarts": "0"}, None, "preempted"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, None, "preempted"),
        ({"JobState": "PENDING", "PreemptTime": "None", "Restarts": "2"}, "1", "preempted"),
        ({"JobState": "COMPLETING", "PreemptTime": "None", "Restarts": "1"}, "1", "cancelled"),
        ({"JobState": "CANCELLED", "PreemptTime": "None", "Restarts": "1"}, None, "cancelled"),
        ({"JobState": "TIMEOUT", "PreemptTime": "None", "Restarts": "0"}, None, "time_limit"),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit", "Restarts": "0"}, None, "time_limit"),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit", "Restarts": "1"}, "1", "time_limit"),
        ({"JobState": "COMPLETING", "Reason": "None", "Restarts": "0"}, None, "cancelled"),
        ({}, None, "cancelled"),
        ({}, "1", "cancelled"),
    ],
)
def test_slurms_record_tells_a_preemption_also_after_the_grace_time(
    fields: dict[str, str], count: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    environment = {"SLURM_JOB_ID": "7"} | ({} if count is None else {"SLURM_RESTART_COUNT": count})
    assert restart.why_stopped("SIGTERM", environment=environment) == reason
    assert restart.ending(environment) == (reason if fields else None)


@pytest.mark.parametrize(
    ("fields", "environment"),
    [({"JobState": "RUNNING", "PreemptTime": "None", "Restarts": "1"}, {"SLURM_RESTART_COUNT": "1"}),
     ({"JobState": "RUNNING"}, {}), ({"JobState": "SIGNALING"}, {}), (None, {})],
)  # fmt: skip
def test_a_job_that_runs_is_not_ending(
    fields: dict[str, str] | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    assert restart.ending({"SLURM_JOB_ID": "7", **environment}) is None
    assert restart.ending({}) is None


@pytest.mark.parametrize(("year", "reason"), [(2020, "time_limit"), (2120, None)])
def test_a_job_whose_time_is_over_ends_at_its_limit(
    year: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm looks every 30 s for such jobs, and until then makes no steps."""
    fields = {"JobState": "RUNNING", "EndTime": f"{year}-01-01T00:00:00"}
    monkeypatch.setattr(restart, "job_fields", lambda job: fields)
    environment = {"SLURM_JOB_ID": "7"}
    assert restart.ending(environment) == reason
    assert restart.why_stopped("SIGTERM", environment=environment) == "cancelled"  # of this run, by a user


def test_a_line_torn_by_a_crash_takes_no_other_along(folder: RunFolder) -> None:
    folder.metrics.write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    attempts.begin(folder, step=2, environment={})
    attempts.append_line(folder.metrics, {"step": 3})
    assert folder.metrics.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
