"""Every way to start a job, for every profile and container: legal shell, and exactly these words."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

import pytest

from hpc_parallel.config.places import find_folder
from hpc_parallel.launch.batch_script import needs_own_script, render, render_array, sbatch_flags
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.launch.run_files import write
from hpc_parallel.problems import ConfigError, hydra_value
from tests.composed import prepared
from tests.marks import in_full

PROFILES = sorted(path.stem for path in (find_folder("conf") / "cluster").glob("*.yaml"))
STARTS = ("srun", "torchrun", "mpirun")
CONTAINERS = {
    "none": (),
    "apptainer": ("cluster.container=apptainer", "launcher.container='/images/a b.sif'"),
    "pyxis": ("cluster.container=pyxis", "launcher.container='nvcr.io#nvidia/pytorch:25.01'"),
}
MOUNTS = "launcher.container_mounts=[/data,'/my files:/mnt']"
SHELLCHECK = shutil.which("shellcheck")
pytestmark = pytest.mark.usefixtures("here")


def started(start: str, container: str, *words: str) -> PreparedRun:
    mounts = [MOUNTS] if container != "none" else []
    layout = ("launcher=script", "launcher.snapshot=false", "nodes=2", "gpus_per_node=2")
    return prepared(*layout, f"cluster.start={start}", *CONTAINERS[container], *mounts, *words)


def last_command(script: str) -> list[str]:
    """The words of the command that starts the ranks; the shell's own words are left as they are."""
    lines = script.replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if line.startswith(("srun ", "mpirun "))]
    return shlex.split(line)


ONCE = [("srun", "pyxis"), ("torchrun", "apptainer"), ("mpirun", "none")]
ALL = [
    pair for pair in itertools.product(STARTS, CONTAINERS) if pair != ("mpirun", "pyxis")
]  # refused, below


@pytest.mark.parametrize(
    ("profile", "pairs"),
    [
        ("generic", ALL),
        *((profile, ONCE) for profile in PROFILES if profile != "generic"),
        *in_full((profile, ALL) for profile in PROFILES if profile != "generic"),
    ],
)
def test_all_scripts_are_legal_shell(profile: str, pairs: Sequence[tuple[str, str]], tmp_path: Path) -> None:
    """For bash, and for shellcheck where it is installed (`make test` does that)."""
    scripts = []
    for start, container in pairs:
        bound = ["++cluster.srun.cpu-bind=cores"] if start == "torchrun" else []
        run = started(
            start, container, f"cluster={profile}", "cluster.scratch=/local/$SLURM_JOB_ID",
            "launcher.setup=['export A=\"b c\"']", *bound,
        )  # fmt: skip
        for kind, text in (
            ("one", render(run)),
            ("array", render_array(run, tasks=tmp_path, name="n", count=3)),
            ("spares", render(started(start, container, f"cluster={profile}", "launcher.spares=1", *bound))),
        ):
            scripts.append(tmp_path / f"{start}-{container}-{kind}.sh")
            scripts[-1].write_text(text)
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed: bash alone has read the scripts")
    checked = subprocess.run([SHELLCHECK, "--shell=bash", *scripts], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


RANK = ["python", "-m", "hpc_parallel.job", "rank", "RUN"]
MOUNTED = ["--bind", "/data", "--bind", "/my files:/mnt"]
APPTAINER = ["apptainer", "exec", "--nv", "--bind", "RUN", *MOUNTED, "/images/a b.sif"]
PYXIS = ["--container-image=nvcr.io#nvidia/pytorch:25.01",
         "--container-mounts=RUN:RUN,/data:/data,/my files:/mnt"]  # fmt: skip
SRUN = ["srun", "--cpus-per-task=3", "--distribution=block:block", "--kill-on-bad-exit=1", "--wait=0"]
NODES = ["srun", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--distribution=block:block",
         "--kill-on-bad-exit=1", "--wait=0"]  # fmt: skip
TORCHRUN = ["bash", "-c", 'trap "" TERM USR2; exec "$@"', "torchrun"]
MODULE = ["-m", "hpc_parallel.job", "torchrun", "RUN", "--nnodes=2", "--nproc-per-node=2",
          "--rdzv-backend=c10d", "--rdzv-id=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}.$hpc_parallel_start",
          "--rdzv-endpoint=$hpc_parallel_firsti:29511", "--module", *RANK[2:]]  # fmt: skip
EARLY = ["sh", "-c", 'trap "" USR2; exec "$@"', "rank"]  # the rank sets its own handler
MPIRUN = ["mpirun", "-np", "4", "--mca", "btl", "^openib", *EARLY]


@pytest.mark.parametrize(
    ("start", "container", "words"),
    [
        ("srun", "none", [*SRUN, *EARLY, *RANK]),
        ("srun", "apptainer", [*SRUN, *EARLY, *APPTAINER, "python3", *RANK[1:]]),
        ("srun", "pyxis", [*SRUN, *PYXIS, *EARLY, "python3", *RANK[1:]]),
        ("torchrun", "none", [*NODES, *TORCHRUN, "python", *MODULE]),
        ("torchrun", "apptainer", [*NODES, *TORCHRUN, *APPTAINER, "python3", *MODULE]),
        ("torchrun", "pyxis", [*NODES, *PYXIS, *TORCHRUN, "python3", *MODULE]),
        ("mpirun", "none", [*MPIRUN, *RANK, "&"]),
        ("mpirun", "apptainer", [*MPIRUN, *APPTAINER, "python3", *RANK[1:], "&"]),
    ],
)
def test_the_words_that_start_the_ranks(start: str, container: str, words: list[str]) -> None:
    run = started(
        start, container, "launcher.cpus_per_device=3", "cluster.mpirun=[--mca,btl,'^openib']",
        "cluster.port=29511", "cluster.master_suffix=i",
    )  # fmt: skip
    folder = str(run.folder.path)
    found = [word.replace(folder, "RUN") for word in last_command(render(run))]
    assert [Path(word).name if word.endswith("/bin/python") else word for word in found] == words
    assert needs_own_script(run) == (start != "srun" or container != "none")


def test_the_cpus_of_a_node_are_not_compared_with_those_of_a_rank() -> None:
    """srun warns if --cpus-per-task is more than SLURM_CPUS_PER_TASK, which it reads from 23.11 on."""
    script = render(started("torchrun", "none", "launcher.cpus_per_device=3"))
    part = script[script.index("# One torchrun for each node") : script.rindex("hpc_parallel_next")]
    stubs = 'scontrol() { echo n1; }; srun() { echo "$* ${SLURM_CPUS_PER_TASK:-none}"; }\n'
    done = subprocess.run(
        ["bash", "-ec", stubs + part], env=os.environ | {"SLURM_CPUS_PER_TASK": "3"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    words = done.stdout.split()
    assert (words[2], words[-1]) == ("--cpus-per-task=6", "none")


@pytest.mark.parametrize("start", STARTS)
def test_a_job_with_spares_places_its_ranks(start: str, tmp_path: Path) -> None:
    """On its first hosts, then on those that the end of a start has named."""
    run = started(start, "none", "launcher.spares=2")
    flags = sbatch_flags(run)
    assert (flags["nodes"], flags["no-kill"]) == (4, True)
    assert not {"no-kill"} & sbatch_flags(started(start, "none")).keys()
    assert ": 2 nodes (and 2 spares) x 2 devices = replicate 4" in str(run)
    script = render(run)
    placing = script[script.index("hpc_parallel_place() {") : script.index("# Slurm does not end a job with")]
    show = 'echo "$SLURM_JOB_NODELIST $SLURM_NNODES $SLURM_NTASKS $SLURM_TASKS_PER_NODE $SLURM_OVERLAP"\n'
    hosts = "scontrol() { printf 'n%s\\n' 1 2 3 4; }\nSLURM_JOB_NODELIST='n[1-4]'\n"
    done = subprocess.run(
        ["bash", "-euc", f"{hosts}{placing}{show}hpc_parallel_place n2,n4\n{show}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["n1,n2 2 4 2(x2) 1", "n2,n4 2 4 2(x2) 1"]
    if start != "mpirun":  # which reads the variables
        (line,) = [line for line in script.replace("\\\n", " ").splitlines() if line.startswith("srun --")]
        tasks = 1 if start == "torchrun" else 2
        assert shlex.split(line)[1:5] == [
            "--nodes=$SLURM_JOB_NUM_NODES", "--nodelist=$SLURM_JOB_NODELIST",
            f"--ntasks=$((SLURM_JOB_NUM_NODES * {tasks}))", f"--ntasks-per-node={tasks}",
        ]  # fmt: skip


def test_a_spare_that_fails_its_checks_is_named(tmp_path: Path) -> None:
    """n3 finds something, n4 is fit, and n5 does not answer: the log of the job names n3 and n5."""
    run = started("srun", "none", "launcher.spares=3", "launcher.notify=cat", f"run_dir={tmp_path}/a b")
    (run.folder.path / "logs").mkdir(parents=True)
    script = render(run)
    checks = script[script.index(": > ") : script.index("# Places the ranks on these hosts")]
    checks = checks.replace(next(word for word in shlex.split(checks) if word.endswith("python")), "notifier")
    stubs = r"""
scontrol() { printf 'n%s\n' 1 2 3 4 5; }
timeout() {
    case "$*" in
    *--nodelist=n3*) printf '%s\n' Warning "memory: bad" "srun: error: n3: task 0: Exited"; return 1 ;;
    *--nodelist=n5*) echo "srun: error: Node failure on n5"; sleep 0.2; return 1 ;;
    *--nodelist=n4*) return 0 ;;
    esac
    exit 9
}
notifier() { cat >> told; }
SLURM_JOB_NODELIST=n[1-5]
"""
    done = subprocess.run(
        ["bash", "-uc", f'{stubs}{checks}wait "$hpc_parallel_checks"'],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    log = run.folder.logs / "spare-n5.log"
    lines = [
        "the spare n3 failed its checks and is not used: memory: bad",
        f"the spare n5 failed its checks and is not used: they did not run, see {log}",
    ]
    assert done.stderr.splitlines() == lines
    told = (tmp_path / "told").read_text().splitlines()
    assert told == [f"{run.folder.path}: {line}" for line in lines]
    assert run.folder.unfit_spares.read_text() == "n3\nn5\n"
    assert "job spare" not in render(started("srun", "none", "launcher.spares=1", "preflight.act=off"))
    assert "job spare" not in render(started("srun", "none", "launcher.min_nodes=1"))


def test_the_guard_of_an_array_task_ends_no_other_run(tmp_path: Path) -> None:
    """The number of an array's last task is that of the whole array."""
    script = render_array(started("srun", "none", "launcher.spares=1"), tasks=tmp_path, name="n", count=2)
    guard = script[script.index("hpc_parallel_guard() {") : script.index("hpc_parallel_guard_pid=$!")]
    assert 'scancel "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in guard
    assert guard.count('--jobs="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"') == 4
    assert "$SLURM_JOB_ID" not in guard


def test_the_guard_outlives_the_loss_of_one_of_its_hosts(tmp_path: Path) -> None:
    """Together with the host of the batch script. The spare n4 was lost before."""
    script = render(started("srun", "none", "launcher.spares=1"))
    guard = script[script.index("hpc_parallel_guard() {") : script.index("# A start that ends so that")]
    # Slurm is silent at first.
    stubs = "squeue() { echo n[1-3]; }; scontrol() { [ -n \"$asked\" ] && printf '%s\\n' n1 n2 n3; }\n"
    stubs += 'sleep() { [ "$1" = 2 ] && asked=yes; }'
    words = tmp_path / "words"
    program = tmp_path / "srun"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {words}\n")
    program.chmod(0o755)
    lines = [f"PATH={tmp_path}:$PATH", stubs, guard]
    lines += ["hpc_parallel_guard", 'wait "$hpc_parallel_guard_pid"']
    subprocess.run(["bash", "-c", "\n".join(lines)], check=True, env=os.environ | {"SLURMD_NODENAME": "n1"})
    assert words.read_text().splitlines()[:5] == [
        "--overlap", "--no-kill", "--nodes=2", "--nodelist=n2,n3", "--ntasks=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("concludes", "waits"), [(False, "30 60"), (True, "30 60" + " 6" * 100)], ids=["not", "concludes"]
)
def test_the_second_guard_waits_for_the_first_one(tmp_path: Path, concludes: bool, waits: str) -> None:
    """If both concluded the run, two jobs could follow. Slurm may take minutes to answer the first one."""
    script = render(started("srun", "none", "launcher.spares=1"))
    guard = script[script.index("hpc_parallel_guard() {") :]
    program = guard[guard.index("bash -c '") + len("bash -c '") : guard.index("' guard ")]
    stubs = """
waited=
sleep() { waited="$waited $1"; [ "$1" != 5 ] || { echo $waited; exit; }; }
squeue() { case "$*" in *"%B %N"*) echo n1 "n[2-3]" ;; *) echo n1 ;; esac; }
scontrol() { printf '%s\\n' n2 n3; }
"""
    if concludes:
        (tmp_path / "summary.json").touch()
    words = ["true", "-m", "hpc_parallel.job", "conclude", str(tmp_path)]
    done = subprocess.run(
        ["bash", "-c", stubs + program, "guard", str(tmp_path / "log"), *words],
        check=True, capture_output=True, text=True,
        env=os.environ | {"SLURM_PROCID": "1", "SLURM_JOB_ID": "7"},
    )  # fmt: skip
    assert done.stdout == f"{waits} 5\n"


def test_arguments_of_the_container() -> None:
    words = last_command(render(started("srun", "apptainer", "cluster.container_arguments=[--rocm]")))
    assert words[words.index("exec") + 1] == "--rocm"
    words = last_command(render(started("srun", "apptainer", "cluster=cpu")))
    assert words[words.index("exec") + 1] == "--bind"


@pytest.mark.parametrize("start", ["srun", "torchrun"])
def test_nodes_whose_gpus_need_no_flag(start: str) -> None:
    """`gpu_flag: none` leaves the flag out. The container still sees the GPUs."""
    run = started(start, "apptainer", "cluster=mpi", f"cluster.start={start}")
    assert not {"gres", "gpus-per-node"} & sbatch_flags(run).keys()
    words = last_command(render(run))
    assert words[words.index("exec") + 1] == "--nv"


def shell_words(run: PreparedRun, folder: Path, **environment: str) -> list[str]:
    """The words that srun gets from the shell of a job with these variables, or a last one: its message."""
    program = folder / "bin" / "srun"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    script = shlex.join(["export", f"PATH={program.parent}:{os.environ['PATH']}"])
    line = render(run).replace("\\\n", " ").splitlines()[-3]
    job = subprocess.run(["bash", "-c", f"{script}\n{line}"], env=environment, capture_output=True, text=True)
    return job.stdout.splitlines() if job.returncode == 0 else [job.stderr]


@pytest.mark.parametrize(
    ("scratch", "path"),
    [("/local/$SLURM_JOB_ID", "/local/7"), ("$SLURM_JOB_ID/x y/$$a`b`", "7/x y/$a`b`"), ("/fast", "/fast")],
)
def test_a_container_sees_the_scratch_folder(scratch: str, path: str, tmp_path: Path) -> None:
    """`$VARIABLES` are those of the job, and nothing else in the path is for the shell."""
    word = f"cluster.scratch='{scratch}'"
    words = shell_words(started("srun", "apptainer", word), tmp_path, SLURM_JOB_ID="7")
    assert words[words.index(path) - 1] == "--bind"
    assert path == Template(scratch).safe_substitute(SLURM_JOB_ID="7")  # as `use_scratch` reads it
    mounts = shell_words(started("srun", "pyxis", word), tmp_path, SLURM_JOB_ID="7")
    assert f"{path}:{path}" in next(word for word in mounts if "mounts" in word).split(",")
    assert path not in " ".join(shell_words(started("srun", "none", word), tmp_path, SLURM_JOB_ID="7"))


def test_a_variable_of_scratch_that_the_job_lacks_is_named(tmp_path: Path) -> None:
    (message,) = shell_words(started("srun", "apptainer", "cluster.scratch=$SLURM_TMPDIR"), tmp_path)
    assert message.strip().endswith("SLURM_TMPDIR: in cluster.scratch is not set in this job")


@pytest.mark.parametrize(
    ("start", "signal"), [("srun", "USR2@90"), ("torchrun", "USR2@90"), ("mpirun", "B:USR2@90")]
)
def test_who_gets_the_signal_before_the_time_limit(start: str, signal: str) -> None:
    assert f"#SBATCH --signal={signal}\n" in render(started(start, "none"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launcher.container=a.sif"],
         "cluster.container = null does not say what runs launcher.container. "
         "Try cluster.container=apptainer or cluster.container=pyxis."),
        (["launcher.container=a.sif", "cluster.container=pyxis", "cluster.start=mpirun"],
         "cluster.container = pyxis can't be with cluster.start=mpirun: pyxis is a plugin of srun. "
         "Try cluster.container=apptainer."),
        (["launcher.container=a.sif", "cluster.container=aptainer"],
         "cluster.container = aptainer is not one of apptainer, pyxis. Try cluster.container=apptainer."),
        (["launcher.container_mounts=[/data]"],
         "launcher.container_mounts = [/data] needs an image: launcher.container=IMAGE. "
         "Try launcher.container_mounts=[]."),
        (["launcher.container='a,b'", "cluster.container=pyxis"],
         "launcher.container = a,b must be one printable line without a comma."),
        (["launcher.container=a.sif", "cluster.container=apptainer", "cluster.scratch=/a:b"],
         "cluster.scratch = /a:b is mounted into the container, so it can't have a comma or a colon. "
         "Try cluster.scratch=null."),
        (["cluster.start=mpi"],
         "cluster.start = mpi is not one of srun, torchrun, mpirun. Try cluster.start=mpirun."),
        (["cluster.start=torchrun", "+cluster.srun.cpu-bind='mask_cpu:f,f0'"],
         "cluster.srun.cpu-bind = mask_cpu:f,f0 is for one task a device, and cluster.start=torchrun starts "
         "one a node. Try cluster.srun.cpu-bind=cores."),
    ],
)  # fmt: skip
def test_what_can_not_be_started(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared("launcher=script", *words)
    assert message in map(str, caught.value.problems)


@pytest.mark.parametrize("removed", [False, True])
def test_traps_of_setup_lines_run_beside_ours(removed: bool, tmp_path: Path) -> None:
    """A line that removes the traps has no effect. A signal to a job that concludes has no effect either."""
    lines = (
        ["trap - EXIT TERM"] if removed else ["trap 'echo \"gone: $?\" > cleaned' EXIT", "trap 'true' TERM"]
    )
    run = started("srun", "none", f"launcher.setup={hydra_value(lines)}", f"run_dir={tmp_path / 'run'}")
    write(run)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, line, code in (("srun", "", 3), ("noted", "kill -TERM $$ $PPID\n", 0)):
        (tools / name).write_text(f'#!/bin/sh\n{line}echo "$@" >> {tmp_path}/{name}.args\nexit {code}\n')
        (tools / name).chmod(0o755)
    script = render(run).replace(shlex.quote(sys.executable), "noted")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_EXPORT_ENV": "NONE"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr
    assert (
        (tmp_path / "noted.args").read_text().startswith(f"-m hpc_parallel.job conclude {run.folder.path} 3 ")
    )
    assert (tmp_path / "cleaned").exists() is not removed


@pytest.mark.parametrize(
    ("signal", "codes", "starts", "status"),
    [
        ("", "4 4 0", ["0", "1", "2"], 3),
        ("", "0", ["0"], 3),
        ("", "1", ["0"], 3),
        ("kill -TERM $$ $PPID", "4 0", ["0", ""], 143),  # scancel: concluded again, as a cancelled job
        ("kill -TERM $$ $PPID", "0", ["0"], 3),  # what Slurm does to a job that has been requeued
    ],
)
def test_the_ranks_start_again_while_the_conclusion_says_so(
    signal: str, codes: str, starts: list[str], status: int, tmp_path: Path
) -> None:
    """A signal while the end is concluded prevents the next start."""
    run = started("torchrun", "none", "launcher.setup=['set -eu']", f"run_dir={tmp_path / 'run'}")
    write(run)
    tools = tmp_path / "bin"
    tools.mkdir()
    conclude = f"""#!/bin/bash
{signal}
echo "$@" >> {tmp_path}/concluded
set -- {codes}
number=$(wc -l < {tmp_path}/concluded)
exit "${{!number}}"
"""
    srun = f"""#!/bin/sh
for word; do case $word in --rdzv-id=*) echo "$word" >> {tmp_path}/started; esac; done
exit 3
"""
    for name, text in (("srun", srun), ("noted", conclude), ("scontrol", "#!/bin/sh\necho n1\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = render(run).replace(shlex.quote(sys.executable), "noted")
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    concluded = (tmp_path / "concluded").read_text().splitlines()
    assert [line.partition("--again")[2].removeprefix(" --start ") for line in concluded] == starts
    numbers = [number for number in starts if number]
    assert [line.split()[4] for line in concluded] == ["3"] * len(numbers) + ["143"] * starts.count("")
    assert (tmp_path / "started").read_text().splitlines() == [f"--rdzv-id=7.0.{n}" for n in numbers]
    attempts = [f"hpc_parallel attempt 0{f'.{n}' if n != '0' else ''} of job 7 on n1" for n in numbers]
    assert [line for line in done.stderr.splitlines() if "attempt" in line] == attempts


WAITING_SRUN = """#!/bin/bash
word=fresh
[ -z "${HPC_PARALLEL_STANDBY-}" ] || read -r word
echo "$SLURM_JOB_NODELIST $word"
[ "$word" != end ] || exit 0
exit 3
"""
BEGINNING = """
export SLURM_JOB_NODELIST
SLURM_JOB_NUM_NODES=2
begin() { SLURM_JOB_NODELIST=$1; hpc_parallel_begin; wait "$hpc_parallel_started"; echo $?; }
"""


def test_ranks_that_wait_begin_on_the_same_hosts_only(tmp_path: Path) -> None:
    script = render(started("srun", "none", "launcher.standby=true", "launcher.spares=1"))
    waiting = script[script.index("hpc_parallel_ranks() {") : script.index("# A start that ends so that")]
    starts = "begin n1,n2\nbegin n1,n2\nbegin n1,n3\nbegin n1,n3\nhpc_parallel_dismiss\n"
    (tmp_path / "srun").write_text(WAITING_SRUN)
    (tmp_path / "srun").chmod(0o755)
    done = subprocess.run(
        ["bash", "-uc", f"{BEGINNING}{waiting}{starts}"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "n1,n2 fresh", "3", "n1,n2 start", "3", "n1,n2 end",
        "n1,n3 fresh", "3", "n1,n3 start", "3", "n1,n3 end",
    ]  # fmt: skip
    assert not done.stderr


def test_a_signal_is_heeded_after_the_ranks_have_ended(tmp_path: Path) -> None:
    """A step in the background would let the shell end before its ranks have saved.

    The signal comes to all processes of the batch script, as from Slurm without cgroups.
    """
    run = started("srun", "none", "launcher.standby=true", f"run_dir={tmp_path / 'run'}")
    write(run)
    tools = tmp_path / "bin"
    tools.mkdir()
    srun = f"""#!/bin/sh
trap '' TERM
[ -z "$HPC_PARALLEL_STANDBY" ] || {{ read -r word; exit; }}
kill -TERM 0
sleep 0.5
touch {tmp_path}/saved
exit 3
"""
    for name, text in (
        ("srun", srun),
        ("noted", f'#!/bin/sh\necho "$5 $(ls {tmp_path})" > {tmp_path}/end\n'),
    ):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n1"}
    script = render(run).replace(shlex.quote(sys.executable), "noted")
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, start_new_session=True
    )
    assert done.returncode == 143, done.stderr
    assert "saved" in (tmp_path / "end").read_text().split()


def test_srun_hands_on_what_the_script_has_set() -> None:
    """With --export=NONE Slurm sets this variable in the job, and srun would start the edited source."""
    assert "\nunset SLURM_EXPORT_ENV\n" in render(started("srun", "none"))
