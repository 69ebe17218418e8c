"""Which runs a word means, and what `logs`, `cancel` and `show` do with runs in every condition."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_parallel import __version__
from hpc_parallel.__main__ import COMMANDS, main
from hpc_parallel.commands import grid
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.attempts import history
from hpc_parallel.record.find import find_all, find_run
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import Sweep, SweepRun, write_sweep
from tests.recorded_runs import GONE, failed, finished, foreign, half_written, living, own, prepared, started

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("silent_slurm")


def ran(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def shown(capsys: Capture, folder: RunFolder) -> dict[str, Any]:
    code, out, _ = ran(capsys, "show", str(folder.path), "--json")
    assert code == 0
    return json.loads(out)


class TestFind:
    @pytest.fixture(autouse=True)
    def _runs(self, tmp_path: Path) -> None:
        for number, name in enumerate(
            ("data/20261122-01-aa", "data/20261122-02-ab", "pipeline/20261122-03-cc")
        ):
            folder = started(tmp_path / "runs" / name)
            write_json(folder.owner, {"job_id": f"7_{number}" if number else "41"})
            os.utime(folder.config, (number, number))

    @pytest.mark.parametrize(
        ("word", "name"),
        [
            ("runs/data/20261122-01-aa", "aa"),
            ("data/20261122-01-aa", "aa"),
            ("20261122-02-ab", "ab"),
            ("pipe", "cc"),
            ("cc", "cc"),
            ("41", "aa"),
            ("7_2", "cc"),
        ],
    )
    def test_one(self, word: str, name: str) -> None:
        assert find_run(word).path.name.endswith(name)

    def test_an_array_is_all_its_runs(self) -> None:
        (named,) = find_all(["7"])
        assert [run.path.name[-2:] for run in named.runs] == ["cc", "ab"]
        with pytest.raises(ConfigError, match="7 means 2 runs, and one is wanted"):
            find_run("7")

    def test_all_that_is_wrong_at_once(self) -> None:
        with pytest.raises(ConfigError) as error:
            find_all(["data", "20261122-02-ax", "99", "runs/pipeline", ""])
        told = error.value.problems
        assert len(told) == 4
        assert (
            told[0] == "data means 2 runs, and one is wanted. Try data/20261122-02-ab or data/20261122-01-aa."
        )
        assert "no path, run id, job id or part of a name" in str(told[1])
        assert "20261122-02-ab" in str(told[1])
        assert "99 is the job id of no run" in str(told[2])

    def test_a_mistyped_job_id_is_no_piece_of_another_runs_name(self, tmp_path: Path) -> None:
        started(tmp_path / "runs" / "data" / "20251231-04-0c991122")
        with pytest.raises(ConfigError, match="99 is the job id of no run"):
            find_run("99")
        assert find_run("0c99").path.name == find_run("2025").path.name == "20251231-04-0c991122"

    def test_a_tree_is_no_run(self) -> None:
        with pytest.raises(ConfigError, match="means 2 runs"):
            find_run("runs/data")


def test_a_clock_that_was_set_back_gives_no_negative_duration(tmp_path: Path, capsys: Capture) -> None:
    folder = finished(tmp_path / "runs/a/1")
    began = datetime.fromisoformat(str(history(folder).started))
    for seconds, took in ((42, ", took 42 s"), (-42, "")):
        ended = (began + timedelta(seconds=seconds)).isoformat()
        write_json(folder.summary, {**json.loads(folder.summary.read_text()), "ended": ended})
        _, shown, _ = ran(capsys, "show", "1")
        (line,) = (line for line in shown.splitlines() if line.startswith("started"))
        assert line.split(maxsplit=1)[1].rstrip() == f"{began:%Y-%m-%d %H:%M:%S} UTC{took}"


class TestLogs:
    @pytest.mark.parametrize("make", [finished, started])
    def test_of_one_that_has_ended_or_goes_on(self, make: Any, tmp_path: Path, capsys: Capture) -> None:
        """Without --follow, and after the end with it, the lines there are."""
        folder = make(tmp_path / "runs/a/1", "nodes=2")
        if make is started:
            own(folder, os.getpid())
        assert ran(capsys, "logs", "1", "--rank", "1") == (0, "rank 1 on n1\n", "")
        if make is finished:
            assert ran(capsys, "logs", "1", "--follow") == (0, "rank 0 on n1\n", "a/1: completed\n")

    def test_one_rank(self, tmp_path: Path, capsys: Capture) -> None:
        folder = failed(tmp_path / "runs/a/1", "nodes=2")
        assert ran(capsys, "logs", "1", "--rank", "0") == (0, "rank 0 on n1\n", "")
        out = "rank 1 on n1\n==> rank 1 err <==\nTraceback\nValueError: [no]\n"
        assert ran(capsys, "logs", str(folder.path), "--rank", "1") == (0, out, "")

    def test_of_a_failed_run_the_rank_that_failed_first(self, tmp_path: Path, capsys: Capture) -> None:
        folder = failed(tmp_path / "runs/a/1", "nodes=2")
        out = "rank 1 on n1\n==> rank 1 err <==\nTraceback\nValueError: [no]\n"
        reason = "rank 1 on n1 failed first: ValueError: [no]; 1 follower"
        assert ran(capsys, "logs", "1") == (0, out, f"{reason} (other ranks: --rank 0, --rank all)\n")
        for unknown in (None, "1", -3, True):  # no rank is to blame, or the file is damaged
            write_json(folder.failure, {"rank": unknown})
            assert ran(capsys, "logs", "1") == (0, "rank 0 on n1\n", "")

    def test_all_ranks(self, tmp_path: Path, capsys: Capture) -> None:
        failed(tmp_path / "runs/a/1", "nodes=2")
        out = "[0] rank 0 on n1\n[1] rank 1 on n1\n[1 err] Traceback\n[1 err] ValueError: [no]\n"
        assert ran(capsys, "logs", "1", "--rank", "all") == (0, out, "")
        code, out, _ = ran(capsys, "logs", "1", "--rank", "1", "--json")
        assert code == 0
        assert json.loads(out.splitlines()[-1]) == {"rank": 1, "stream": "err", "text": "ValueError: [no]"}

    def test_torchs_warning_of_a_host_name_is_left_out(self, tmp_path: Path, capsys: Capture) -> None:
        folder = finished(tmp_path / "runs/a/1")
        other = "[W1123 10:00:00.1 socket.cpp:9] [c10d] The client socket has failed to connect to n1.\n"
        noise = "[W1123 10:00:00.1 socket.cpp:204] [c10d] The hostname of the client socket cannot be"
        noise += " retrieved. err=-3\n"
        folder.log(0, "err").write_text(f"{noise}[rank0]:{noise}")
        assert ran(capsys, "logs", "1") == (0, "rank 0 on n1\n", "")  # and no heading without lines
        folder.log(0, "err").write_text(f"{noise}{other}[rank0]:{noise}")
        assert ran(capsys, "logs", "1")[1] == f"rank 0 on n1\n==> rank 0 err <==\n{other}"

    def test_a_stranger_among_the_logs(self, tmp_path: Path, capsys: Capture) -> None:
        foreign(tmp_path / "runs/a/1")
        assert ran(capsys, "logs", "1", "--rank", "all")[1] == "[0] rank 0 on n1\n[1] rank 1 on n1\n"
        assert ran(capsys, "logs", "1")[1] == "rank 0 on n1\n"  # its failure.json is no JSON

    def test_before_there_are_any(self, tmp_path: Path, capsys: Capture) -> None:
        folder = half_written(tmp_path / "runs/a/1")
        assert ran(capsys, "logs", "1") == (0, "", "a/1: not started\n")
        (folder.logs / "agent.err").write_text("no torch\n")
        assert ran(capsys, "logs", "1") == (0, "==> agent.err <==\nno torch\n", "")

    @pytest.mark.parametrize(
        ("rank", "said"),
        [
            ("2", "--rank = 2 is no rank of a run that has 2. Try --rank=1."),
            ("x", "--rank = x is neither a rank's number nor all. Try --rank=0 or --rank=all."),
        ],
    )
    def test_a_wrong_rank(self, rank: str, said: str, tmp_path: Path, capsys: Capture) -> None:
        finished(tmp_path / "runs/a/1", "nodes=2")
        code, out, error = ran(capsys, "logs", "1", "--rank", rank)
        assert (code, out) == (2, "")
        assert said in error
        assert ran(capsys, "logs", "nowhere", "--rank", "x")[2].count("\n") == 2  # both are told

    def test_following_ends_with_the_run(self, tmp_path: Path, capsys: Capture) -> None:
        folder = started(tmp_path / "runs/a/1")
        with living() as process:
            own(folder, process.pid)

            def go_on() -> None:
                with folder.log(0, "out").open("a") as file:
                    for words in ("step 1\nst", "ep 2\n", "the end"):
                        time.sleep(0.5)
                        file.write(words)
                        file.flush()
                process.kill()
                process.wait()

            writer = threading.Thread(target=go_on)
            writer.start()
            code, out, error = ran(capsys, "logs", "1", "--follow")
            writer.join()
        assert (code, out) == (0, "rank 0 on n1\nstep 1\nstep 2\nthe end\n")
        assert error == "a/1: running\na/1: broken off (its process is gone)\n"


class TestCancel:
    def test_a_living_one(self, tmp_path: Path, capsys: Capture) -> None:
        folder = started(tmp_path / "runs/a/1")
        with living() as process:
            own(folder, process.pid)
            assert ran(capsys, "cancel", "1")[0] == 2  # nobody to ask: pytest has no terminal
            assert process.poll() is None
            code, out, _ = ran(capsys, "cancel", "1", "--yes")
            assert (code, out) == (0, f"asked to end: a/1 (process {process.pid}, running)\n")
            assert process.wait(10) == -signal.SIGTERM

    @pytest.mark.parametrize(("answer", "code"), [("y", 0), ("Yes", 0), ("n", 1), ("", 1)])
    def test_it_asks(
        self, answer: str, code: int, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = started(tmp_path / "runs/a/1")
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", lambda question: answer)
        with living() as process:
            own(folder, process.pid)
            assert ran(capsys, "cancel", "1")[0] == code
            assert process.wait(10) == -signal.SIGTERM if code == 0 else process.poll() is None

    @pytest.mark.parametrize(
        ("make", "why"),
        [
            (finished, "has ended: completed"),
            (failed, "has ended: failed (error)"),
            (foreign, "has ended: completed"),
            (half_written, "was never started"),
            (started, "has ended: broken off (its process is gone)"),
        ],
    )
    def test_what_has_ended(self, make: Any, why: str, tmp_path: Path, capsys: Capture) -> None:
        make(tmp_path / "runs/a/1")
        assert ran(capsys, "cancel", "1", "--yes") == (1, "", f"a/1 {why}\n")

    def test_another_process_with_the_number(self, tmp_path: Path, capsys: Capture) -> None:
        """The owner is gone, and its number has become another's."""
        folder = started(tmp_path / "runs/a/1")
        with living() as process:
            write_json(folder.owner, {**GONE, "pid": process.pid})
            assert ran(capsys, "cancel", "1", "--yes")[0] == 1
            assert process.poll() is None

    def test_one_on_another_host(self, tmp_path: Path, capsys: Capture) -> None:
        folder = started(tmp_path / "runs/a/1")
        write_json(folder.owner, {"host": "elsewhere", "pid": 4711, "began": "x"})
        code, _, error = ran(capsys, "cancel", "1", "--yes")
        assert code == 1
        assert "runs on elsewhere" in error
        assert "kill 4711" in error

    def test_a_sweep(self, tmp_path: Path, capsys: Capture) -> None:
        folders = [started(tmp_path / f"runs/a/{number}") for number in range(2)]
        folders.append(finished(tmp_path / "runs/a/2"))
        sweep = tmp_path / "sweep"
        sweep.mkdir()
        runs = tuple(SweepRun((), folder.path, nodes=1, gpus_per_node=1) for folder in folders)
        write_sweep(sweep, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, runs, ()))
        with living() as one, living() as two:
            own(folders[0], one.pid)
            own(folders[1], two.pid)
            code, out, _ = ran(capsys, "cancel", "sweep", "--yes", "--json")
            assert (code, [each["asked"] for each in json.loads(out)]) == (0, [True, True, False])
            assert [process.wait(10) for process in (one, two)] == [-signal.SIGTERM] * 2

    def test_a_tree_is_no_sweep(self, tmp_path: Path, capsys: Capture) -> None:
        for number in range(2):
            finished(tmp_path / f"runs/a/{number}")
        code, _, error = ran(capsys, "cancel", "runs", "--yes")
        assert (code, error) == (2, "runs holds 2 runs and is no sweep. Name them.\n")


class TestShow:
    def test_settings_that_are_not_the_defaults(self, tmp_path: Path, capsys: Capture) -> None:
        words = ("strategy=hybrid", "nodes=2", "gpus_per_node=2", "training.validate_every=null")
        told = shown(capsys, finished(tmp_path / "runs/a/1", *words))["changed"]
        assert {key: (each["value"], each["default"]) for key, each in told.items()} == {
            "nodes": (2, 1), "gpus_per_node": (2, 1), "strategy.name": ("hybrid", "data"),
            "strategy.pipeline": (2, 1), "strategy.tensor": (2, 1), "training.validate_every": (None, 100),
        }  # fmt: skip
        assert shown(capsys, finished(tmp_path / "runs/a/2"))["changed"] == {}

    def test_the_launcher_of_an_older_run(self, tmp_path: Path, capsys: Capture) -> None:
        """Before, config.yaml kept `auto`, which nobody had changed."""
        folder = finished(tmp_path / "runs/a/1")
        text = folder.config.read_text()
        assert "kind: auto" not in text
        folder.config.write_text(text.replace("  kind: local\n", "  kind: auto\n"))
        assert folder.read_config()["launcher"]["kind"] == "auto"
        assert shown(capsys, folder)["changed"] == {}

    def test_layout(self, tmp_path: Path, capsys: Capture) -> None:
        words = ("strategy=hybrid", "nodes=2", "gpus_per_node=2")
        folder = finished(tmp_path / "runs/a/1", *words, hosts={0: "n1", 1: "n1", 2: "n7", 3: "n7"})
        told = shown(capsys, folder)
        assert told["layout"]["pipeline"] == told["layout"]["tensor"] == 2
        assert [
            (host["name"], [device["holds"] for device in host["devices"]]) for host in told["hosts"]
        ] == [
            ("n1", [{"stage": "0", "tensor": "0"}, {"stage": "0", "tensor": "1"}]),
            ("n7", [{"stage": "1", "tensor": "0"}, {"stage": "1", "tensor": "1"}]),
        ]
        out = ran(capsys, "show", "1")[1]
        assert "2 nodes x 2 devices = pipeline 2 x tensor 2" in out
        assert "│ node 1 │ rank 2   │ rank 3   │\n│ n7" in out
        assert "│        │ stage 1  │ stage 1  │\n│        │ tensor 0 │ tensor 1 │\n" in out

    @pytest.mark.parametrize(
        ("words", "held"),
        [
            (("strategy=single",), [(0, {"model": "whole"})]),
            (("strategy=dataparallel", "gpus_per_node=2"), [(0, {"replica": "0"}), (0, {"replica": "1"})]),
            (
                ("strategy=parameter_server", "gpus_per_node=3"),
                [(0, {"server": ""}), (1, {"replica": "0"}), (2, {"replica": "1"})],
            ),
            (
                ("strategy=parameter_server", "gpus_per_node=2", "strategy.dedicated_server=false"),
                [(0, {"server": "", "replica": "0"}), (1, {"replica": "1"})],
            ),
            (
                ("strategy=pipeline", "nodes=2", "strategy.schedule=zbv"),
                [(0, {"stages": "0, 3"}), (1, {"stages": "1, 2"})],
            ),
            (
                ("strategy=pipeline", "nodes=2", "strategy.schedule=interleaved"),
                [(0, {"stages": "0, 2"}), (1, {"stages": "1, 3"})],
            ),
            (("strategy=fsdp", "nodes=2"), [(0, {"shard": "0"}), (1, {"shard": "1"})]),
        ],
    )
    def test_what_devices_hold(self, words: tuple[str, ...], held: list[Any], tmp_path: Path) -> None:
        hosts = grid.hosts(read_run(prepared(tmp_path / "a", *words).path))
        assert [(device.rank, device.holds) for host in hosts for device in host.devices] == held

    def test_many_hosts(self, tmp_path: Path) -> None:
        hosts = grid.hosts(read_run(prepared(tmp_path / "a", "nodes=64", "gpus_per_node=8").path))
        assert hosts[63].devices[7] == grid.GridDevice(511, None, {"replica": "511"})
        console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(grid.draw(hosts))
        text = console.export_text()
        assert text.count("node ") == 8
        assert "and 56 more hosts" in text

    def test_figures_and_failure(self, tmp_path: Path, capsys: Capture) -> None:
        folder = failed(tmp_path / "runs/a/1")
        told = shown(capsys, folder)
        assert told["figures"] == {
            "samples": 480, "loss": 4 / 30, "samples_per_s": 31.0, "step_time_s": 0.5,
            "peak_memory_bytes": 2**30, "bubble_share": 0.125, "restarts": 0, "lost_steps": 0,
        }  # fmt: skip
        code, out, _ = ran(capsys, "show", "1")
        lines = [" ".join(line.split()) for line in out.splitlines()]
        assert code == 0
        for line in (
            "state failed (error)",
            "peak memory of a device 1.0 GiB",
            "pipeline idle (bubble) 12.5%",
            "step time 500 ms",
            "loss 0.1333",
            "rank 1 on n1 failed first: ValueError: [no]; 1 follower",
        ):
            assert line in lines

    def test_a_run_that_goes_on(self, tmp_path: Path, capsys: Capture) -> None:
        folder = started(tmp_path / "runs/a/1", "training.steps=40")
        own(folder, os.getpid())
        assert shown(capsys, folder)["figures"]["loss"] == 4 / 30
        assert "step     30 of 40, about 5 s left" in ran(capsys, "show", "1")[1]
        write_json(folder.environment, {"overrides": ["name=a b"], "config_dir": "/site"})
        assert "  run --config-dir /site 'name=a b' " in ran(capsys, "show", "1")[1]

    def test_what_can_not_be_read(self, tmp_path: Path, capsys: Capture) -> None:
        told = shown(capsys, half_written(tmp_path / "runs/a/1"))
        assert (told["layout"], told["hosts"], told["figures"]) == (
            None,
            [],
            {"restarts": 0, "lost_steps": 0},
        )
        assert shown(capsys, foreign(tmp_path / "runs/a/2"))["damaged"] == {
            "failure.json": "it is not UTF-8 (byte 0)",
            "environment.json": "it holds a list, not a table",
            "owner.json": "it names no process and no job",
        }
        for number in (1, 2):
            assert ran(capsys, "show", f"a/{number}")[0] == 0


def test_show_has_the_warnings_of_rank_0(tmp_path: Path, capsys: Capture) -> None:
    """Those of the first start and of the last one, which a job that nobody followed has in its log only."""
    folder = finished(tmp_path / "runs/a/1")
    folder.logs.mkdir(exist_ok=True)
    noise = "WARNING:root:of a library\n" + "step 1 of 2\n" * 5000
    first, again = "WARNING: no copy in memory: full\x1b[2J\n", "WARNING: sent by sockets\n"
    folder.log(0, "err").write_text(first + again + noise + again)
    folder.log(0, "out").write_text("WARNING: not compared\n")
    warnings = ["not compared", "no copy in memory: full\\x1b[2J", "sent by sockets"]
    assert shown(capsys, folder)["warnings"] == warnings
    out = ran(capsys, "show", str(folder.path))[1]
    assert "\n".join(["warnings", *warnings]) in out


def test_help_lists_the_commands(capsys: Capture) -> None:
    code, out, _ = ran(capsys, "--help")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == list(COMMANDS)


def test_a_mistyped_command(capsys: Capture) -> None:
    assert ran(capsys, "statsu") == (2, "", "There is no command statsu. Try status.\n")


@pytest.mark.parametrize("flag", ["--cfg=job", "-m", "--config-dir=site", "--nonsense"])
def test_flags_may_stand_before_the_overrides_of_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, flag: str
) -> None:
    lines: list[list[str]] = []
    monkeypatch.setattr("hpc_parallel.commands.run_command.main", lambda words: lines.append(words) or 0)
    assert ran(capsys, flag, "nodes=2") == (0, "", "")
    assert lines == [[flag, "nodes=2"]]


def test_the_version_needs_no_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"hpc_parallel {__version__}\n")


@pytest.mark.processes
def test_neither_torch_nor_hydra_is_loaded() -> None:
    """They start in a fraction of a second; `show` composes the defaults only once it has found its run."""
    words = (
        "import sys; from hpc_parallel.commands import cancel, logs, show, status;"
        "[command.parser() for command in (cancel, logs, show, status)];"
        "print([name for name in ('torch', 'hydra', 'rich.table') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("hpc-parallel st", ["status "]),
        ("hpc-parallel ru", ["run "]),
        ("hpc-parallel run strategy=pi", ["strategy=pipeline "]),
        ("hpc-parallel nodes=2 training.pre", ["training.precision="]),
        ("hpc-parallel show pi", ["pipeline/1 "]),
        ("hpc-parallel cancel --y", ["--yes "]),
    ],
)
def test_tab_completion(line: str, offered: list[str], tmp_path: Path) -> None:
    pytest.importorskip("argcomplete")
    finished(tmp_path / "runs/pipeline/1")
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "hpc_parallel"], env={**os.environ, **asked}, check=True)
    assert answer.read_text().split("\n") == offered
