"""Scripts of the user's own on this machine, over two simulated nodes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import psutil
import pytest

from hpc_parallel.__main__ import main as command_main
from hpc_parallel.run import main as run_main
from tests.marks import in_full
from tests.scripts.loops import losses_alone, printed_losses
from tests.waiting import wait_for

pytestmark = pytest.mark.processes
ROOT = str(Path(__file__).resolve().parents[2])
HERE = ("launcher=local", "launcher.snapshot=false")  # copies of 900 files take a third of a short run
TWO_NODES = ("nodes=2", *HERE)
VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "OF_THE_USER",
)  # fmt: skip
SHOW = f"""
import json, os, sys, beside
variables = {{name: os.environ.get(name) for name in {VARIABLES}}}
print(json.dumps([variables, sys.argv[1:], os.getcwd(), beside.VALUE]))
"""


def run(
    home: Path, *words: str, main: Callable[[Sequence[str]], int] = run_main, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What `python -m hpc_parallel.run` does and prints, in this process; its ranks are real ones."""
    out, error = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.chdir(home)
        for name, value in {"PYTHONPATH": ROOT, **environment}.items():
            patch.setenv(name, value)
        code = main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), error.getvalue())


def started(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "hpc_parallel.run", *words], cwd=home,
        env={**os.environ, "PYTHONPATH": ROOT}, stdout=subprocess.PIPE, text=True,
        # A shell's job in the background ignores it, and so would the run.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def command(home: Path, *words: str) -> str:
    done = run(home, *words, main=command_main)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only_run(home: Path) -> Path:
    (folder,) = home.glob("runs/*/*")
    return folder


def ended(home: Path) -> tuple[str, str | None]:
    """The outcome, and the line that names the cause."""
    folder = only_run(home)
    summary, failure = folder / "summary.json", folder / "failure.json"
    line = json.loads(failure.read_text())["line"] if failure.exists() else None
    return json.loads(summary.read_text())["outcome"], line


def processes_of(marker: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]


def test_each_rank_has_the_variables_of_torchrun_and_the_kept_source(home: Path) -> None:
    (home / "show.py").write_text(SHOW)
    (home / "beside.py").write_text("VALUE = 1\n")
    words = ("script.arguments.lr=3e-4", "script.arguments.out={run}/{rank}/{seed}", "seed=7")
    shape = ("nodes=2", "gpus_per_node=2", "launcher=local")
    done = run(home, *shape, *words, "--", "show.py", "a b", "$x", OF_THE_USER="kept")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = only_run(home)
    assert (folder / "code" / home.name / "show.py").exists()
    assert folder.parent.name == "show"
    for rank in range(4):
        variables, arguments, place, value = json.loads((folder / "logs" / f"rank-{rank}.out").read_text())
        assert variables == {
            "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2), "MASTER_ADDR": "127.0.0.1", "OF_THE_USER": "kept",
        }  # fmt: skip
        assert arguments == ["a b", "$x", "--lr", "3e-4", "--out", f"{folder}/{rank}/7"]
        assert (place, value) == (str(home), 1)


def test_the_loss_curve_of_two_ranks_equals_that_of_one_process(home: Path) -> None:
    metrics = r"script.metrics=step (?P<step>\d+).* loss (?P<loss>[\d.]+)"
    done = run(home, *TWO_NODES, metrics, "--", "ddp.py", "--steps", "8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 8 of 8 loss" in done.stdout  # rank 0's output
    assert "completed: step 8, loss" in done.stdout
    assert "of 0" not in done.stdout
    assert printed_losses(only_run(home)) == pytest.approx(losses_alone("ddp.py", "--steps", "8"), rel=1e-5)
    assert json.loads((home / "losses.json").read_text())  # in the folder of the command
    shown = command(home, "show", str(only_run(home)))
    assert "completed" in shown
    assert not any(line.startswith("step ") for line in shown.splitlines())
    (row,) = json.loads(command(home, "status", "--json"))
    assert (row["state"], row["step"]) == ("completed", 8)
    lines = [json.loads(line) for line in (only_run(home) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["loss"] for line in lines] == printed_losses(only_run(home))
    assert "step 8 of 8 loss" in command(home, "logs", str(only_run(home)))


def test_a_sweep_varies_arguments_in_the_style_of_the_script(home: Path) -> None:
    (home / "show.py").write_text("import sys; print(sys.argv[1:])\n")
    words = ("launcher=local", "script.style=key=value", "script.arguments.model.lr=1e-3,3e-4")
    done = run(home, "-m", *words, "--", "show.py", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = {(path / "logs" / "rank-0.out").read_text() for path in home.glob("runs/show/*")}
    assert printed == {"['x', 'model.lr=1e-3']\n", "['x', 'model.lr=3e-4']\n"}


@pytest.mark.full
def test_a_later_edit_changes_neither_a_module_that_runs_nor_its_repetition(home: Path) -> None:
    (home / "package").mkdir()
    for name, text in (("__init__", ""), ("part", "TEXT = 'first'\n")):
        (home / "package" / f"{name}.py").write_text(text)
    (home / "package" / "__main__.py").write_text("from package.part import TEXT\nprint(TEXT)\n")
    assert run(home, "launcher=local", "--", "-m", "package").returncode == 0
    first = only_run(home)
    (home / "package" / "part.py").write_text("TEXT = 'second'\n")
    again = subprocess.run(  # this process would become the new run
        [sys.executable, "-m", "hpc_parallel", "rerun", str(first)], cwd=home, capture_output=True, text=True
    )
    assert "first" in again.stdout
    assert "second" in run(home, "launcher=local", "--", "-m", "package").stdout


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("import sys; sys.exit('which file?')", r"the script ended with exit code 1: which file\?"),
        ("import os; os.kill(os.getpid(), 11)", r"killed by SIGSEGV at \S+/script\.py:1 in <module>"),
        (
            "import os; os.environ['SLURM_PROCID']",
            r"KeyError: 'SLURM_PROCID' \(script\.py:1\)\. Slurm sets it .*: RANK, .* are always set",
        ),
        *in_full(
            [
                ("import sys; sys.exit(75)", "the script ended with exit code 75"),
                ("raise MemoryError('no')", r"MemoryError: no \(script\.py:1\)"),
            ]
        ),
    ],
)
def test_a_failure_is_one_clear_line(home: Path, body: str, line: str) -> None:
    (home / "script.py").write_text(body)
    done = run(home, *HERE, "--", "script.py")
    assert done.returncode == 1
    outcome, recorded = ended(home)
    assert outcome == "failed"
    assert re.fullmatch(rf"rank 0 on \S+ failed first: {line}", recorded or ""), recorded
    assert done.stdout.splitlines()[-1] == recorded


def test_the_file_of_torchs_record_names_the_exception_where_the_log_is_silent(home: Path) -> None:
    body = """
from torch.distributed.elastic.multiprocessing.errors import record
import sys
@record
def main():
    sys.stderr = open("/dev/null", "w")
    {}["the key"]
main()
"""
    (home / "script.py").write_text(body)
    done = run(home, *HERE, "--", "script.py")
    assert done.stdout.splitlines()[-1].endswith("failed first: KeyError: 'the key' (script.py:7)")


@pytest.mark.full  # test_scripts.py of tests/slurm asks the same over two hosts
def test_a_rank_that_lost_its_peer_is_not_to_blame(home: Path) -> None:
    done = run(home, *TWO_NODES, "--", "ddp.py", "--fail-at", "2")
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert re.match(r"rank 1 on \S+ failed first: ValueError: no data for step 2 \(ddp\.py:\d+\)", last), last


@pytest.mark.parametrize("way", ["ends", "fails"])
def test_processes_that_outlive_their_script_end_with_it(home: Path, way: str) -> None:
    marker = f"7{os.getpid()}"
    (home / "script.py").write_text(f"""
import subprocess, sys
subprocess.Popen(["sleep", "{marker}"], start_new_session=True)
sys.exit({int(way == "fails")})
""")
    assert run(home, *HERE, "--", "script.py").returncode == int(way == "fails")
    assert processes_of(f"sleep {marker}") == []


@pytest.mark.parametrize("signals", [[signal.SIGTERM], *in_full([([signal.SIGINT, signal.SIGINT],)])])
def test_a_cancelled_script_leaves_nothing_running(home: Path, signals: list[signal.Signals]) -> None:
    marker = f"6{os.getpid()}"
    ignore = "trap '' TERM\n" * (len(signals) > 1)  # it then takes two
    (home / "solver").write_text(f"#!/bin/bash\n{ignore}setsid sleep {marker} &\nsleep {marker}\n")
    (home / "solver").chmod(0o755)
    process = started(home, *TWO_NODES, "--", "./solver")
    wait_for(lambda: len(processes_of(f"sleep {marker}")) >= 4)
    for number in signals:
        process.send_signal(number)
        time.sleep(1)
    while len(signals) > 1 and process.poll() is None:
        process.send_signal(signals[-1])  # a busy machine may have delivered two as one
        time.sleep(2)
    assert process.wait(240) == 1
    assert processes_of(f"sleep {marker}") == []
    assert ended(home)[0] == "cancelled"


@pytest.mark.full
def test_much_and_binary_output_neither_stops_the_run_nor_floods_the_terminal(home: Path) -> None:
    (home / "script.py").write_text("""
import sys
sys.stdout.buffer.write(bytes(range(256)) * 2 + b"\\n")
for number in range(400_000): print("line", number)
""")
    done = run(home, "launcher=local", "--", "script.py")
    assert done.returncode == 0
    assert "bytes are not shown" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout) < 10**6
    assert "line 399999" in done.stdout


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("sys.exit(75)", ("script.requeue_codes=[75]",)),
        ("os.kill(os.getpid(), 9) if rank == '1' else time.sleep(600)", ("launcher.max_restarts=1",)),
        *in_full([("sys.exit(75)", ("script.requeue_codes=[75]", "script.start=torchrun"))]),
    ],
)
def test_an_exit_code_or_a_killed_rank_leads_to_a_new_start_which_resumes(
    end: str, words: tuple[str, ...], home: Path
) -> None:
    (home / "script.py").write_text(f"""
import os, pathlib, sys, time
saved = pathlib.Path(sys.argv[1])
if "--resume" in sys.argv:
    sys.exit(print("resumed from", saved.read_text()))
rank = os.environ["RANK"]
if rank == "1":
    saved.write_text("its checkpoint")
{end}
""")
    resume = "script.resume_arguments=--resume {run}/saved"
    done = run(home, *TWO_NODES, resume, *words, "--", "script.py", "{run}/saved")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        assert (only_run(home) / f"logs/rank-{rank}.out").read_text() == "resumed from its checkpoint\n"
    assert json.loads((only_run(home) / "summary.json").read_text())["restarts"] == 1


def test_new_starts_end_after_the_allowed_number(home: Path) -> None:
    (home / "script.py").write_text("raise SystemExit(75)\n")
    words = (*HERE, "script.requeue_codes=[75]", "launcher.max_requeues=1")
    done = run(home, *words, "script.resume_arguments=--resume {run}/saved", "--", "script.py")
    assert done.returncode == 1
    missing = only_run(home) / "saved"
    phase = (only_run(home) / "phase").read_text()
    assert phase == f"running script from its beginning: there is no {missing}\n"
    outcome, line = ended(home)
    assert outcome == "failed"
    assert "the script asks for a new start: it ended with exit code 75" in (line or "")
    assert "launcher.max_requeues=1 is used up" in (line or "")


@pytest.mark.full
def test_a_killed_rank_starts_again_from_the_scripts_own_checkpoint(home: Path) -> None:
    resume = "script.resume_arguments=--init_from=resume --out_dir={run}/out"
    words = ("run_dir=run", "launcher.max_restarts=1", resume)
    arguments = ("nano.py", "--max_iters=10", "--out_dir={run}/out", "--die_at=6")
    done = run(home, *TWO_NODES, *words, "--", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = losses_alone("nano.py", "--max_iters=10")
    assert printed_losses(home / "run")[-5:] == pytest.approx(whole[5:], rel=1e-4)
    assert json.loads((home / "run" / "summary.json").read_text())["outcome"] == "completed"


SEES = """
import beside, os, sched, sys
from pathlib import Path
here = Path(__file__).parent
(here / "new.txt").touch()
print(beside.__file__, __file__, sys.path[0], os.path.dirname(sched.__file__), (here / "data/x").read_text())
"""


def test_a_script_of_a_checkout_is_kept_and_an_ignored_program_runs_where_it_is(home: Path) -> None:
    """As with torchrun: it imports from its own folder, not from the working one, and finds its data."""
    for name, text in (
        ("src/script.py", SEES), ("src/beside.py", "import _version\n"), ("src/_version.py", ""),
        ("src/data/x", "its data"), ("statistics.py", "raise SystemExit(3)\n"), ("sched.py", ""),
        ("solver", "#!/bin/sh\necho $0 $RANK\n"), (".gitignore", "solver\nruns\ndata\n_version.py\n"),
    ):  # fmt: skip
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    (home / "solver").chmod(0o755)
    subprocess.run(["git", "init", "--quiet"], cwd=home, check=True)
    done = run(home, "launcher=local", "run_dir=runs/1", "--", "src/script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in a copy   src/script.py uses __file__: " in done.stdout
    kept = home / "runs" / "1" / "code" / home.name / "src"
    printed = (home / "runs" / "1" / "logs" / "rank-0.out").read_text().split(maxsplit=4)
    library = sysconfig.get_path("stdlib")
    assert printed == [f"{kept}/beside.py", f"{kept}/script.py", str(kept), library, "its data\n"]
    assert not (home / "src" / "new.txt").exists()
    done = run(home, "launcher=local", "run_dir=runs/2", "--", "./solver")
    assert "not kept    ./solver" in done.stdout
    assert (home / "runs" / "2" / "logs" / "rank-0.out").read_text() == f"{home}/solver 0\n"
