"""Who is told of the end of a start and of a full disk, how often, and what a bad notifier does."""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import shlex
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_parallel.failure import conclude_run, failure, notify, restart
from hpc_parallel.launch.batch_script import render
from hpc_parallel.layout.layout import Layout
from hpc_parallel.machine.world import World
from hpc_parallel.problems import ConfigError, hydra_value
from hpc_parallel.record import attempts, checkpoint_index
from hpc_parallel.record.recorded_start import read_start
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from tests.composed import composed, prepared
from tests.waiting import wait_for

WORLD = World(1, 2, 1, 2, 0, 1, host="n1", launcher="slurm", attempt="x")
CONFIG = {
    "training": {"steps": 9, "on_nonfinite": "stop"}, "task": {"name": "train"}, "nodes": 1,
    "gpus_per_node": 2,
    "strategy": {"name": "data", "execution": "spmd", **Layout(replicate=2).degrees},
}  # fmt: skip
LAUNCHER = {"max_requeues": 1, "max_restarts": 1, "exclude": None, "resubmit": False, "partition": None,
            "time_minutes": 60, "kind": "slurm"}  # fmt: skip
COMPLETED = "end: completed 9 steps, final loss 1.235"
DIED = "rank 1 on n1 failed first: killed by SIGKILL"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose lines go to the file `told` beside its folder."""
    folder = RunFolder(tmp_path / "mine" / "run")
    folder.create()
    use(folder, f"cat >> {shlex.quote(str(tmp_path / 'told'))}")
    return folder


def use(folder: RunFolder, target: str | None) -> None:
    folder.config.write_text(json.dumps({**CONFIG, "launcher": {**LAUNCHER, "notify": target}}))


def told(folder: RunFolder, *, count: int = 1) -> list[str]:
    """What the command received, without the name of the run; waits until these are `count` lines."""
    path = folder.path.parents[1] / "told"
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count)
    lines = path.read_text().splitlines()
    assert all(line.startswith(f"{folder.path}: ") for line in lines)
    return [line.removeprefix(f"{folder.path}: ") for line in lines]


def end_by(folder: RunFolder, way: str) -> None:
    """Leave the records of a start that ended so."""
    if way == "completed":
        write_json(folder.summary, {"outcome": "completed", "steps": 9, "final_loss": 1.23456})
    elif way == "killed":
        failure.record_death(folder, world=WORLD, returncode=-9)
    elif way == "error":
        failure.record_exception(folder, world=WORLD, error=ValueError("x"))
    else:
        write_json(folder.stopped, {"signal": way, "step": 3})


def conclude(folder: RunFolder, way: str, *words: str) -> int:
    """As the end of a batch script does; returns the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_JOB_ID", "7")
        for name, answer in (("job_fields", {"JobState": "RUNNING"}), ("requeue", None)):
            patch.setattr(restart, name, lambda *_, answer=answer, **__: answer)
        patch.setattr(conclude_run.signal, "signal", lambda *_: None)
        try:
            conclude_run.main([str(folder.path), "0" if way == "completed" else "137", "--again", *words])
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


IN_PLACE = "the ranks start again in the same job, on the same hosts, 1 of 1"
USED = "launcher.max_requeues=1 is used up; go on with resume={}"
TABLE = [  # how each start of a run ends, and what is told
    (["completed"], [COMPLETED]),
    (["killed"], [f"restart, in place: {DIED}; {IN_PLACE}"]),
    (["killed", "completed"], [f"restart, in place: {DIED}; {IN_PLACE}", COMPLETED]),
    (["error"], ["failure: rank 1 on n1 failed first: ValueError: x"]),
    (["SIGINT"], ["end: cancelled by Ctrl-C: saved at step 3; go on with resume={}"]),
    (["SIGUSR2", "SIGUSR2"],
     ["restart: the time limit of 60 min was near: saved at step 3; requeued as job 7",
      f"failure: the time limit of 60 min was near: saved at step 3; {USED}"]),
]  # fmt: skip


@pytest.mark.parametrize(("ways", "lines"), TABLE, ids=["+".join(ways) for ways, _ in TABLE])
def test_each_end_of_a_start_is_told_once(folder: RunFolder, ways: list[str], lines: list[str]) -> None:
    for way in ways:
        folder.begin_anew()
        attempts.note(folder, "launched")
        end_by(folder, way)
        again = conclude(folder, way, "--start", "0")
        assert again == (4 if way == "killed" else 0)
        end_by(folder, way)
        conclude(folder, way, "--start", "0")  # a second conclusion of the same end
    # One that nobody waits for may come after the next one.
    assert sorted(told(folder, count=len(lines))) == sorted(line.format(folder.path) for line in lines)


@pytest.mark.parametrize("action", [restart.SPARE, restart.FEWER, "an answer of tomorrow"])
def test_each_answer_of_the_policy_is_told(
    folder: RunFolder, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fewer = folder.on_nodes(1)
    fewer.parent.mkdir(exist_ok=True)
    fewer.write_text(folder.config.read_text())
    attempts.note(folder, "launched")
    end_by(folder, "killed")
    decision = restart.Decision(action, "the run goes on on n1", ("n1",))
    monkeypatch.setattr(conclude_run, "after_failure", lambda *_, **__: decision)
    conclude(folder, "killed")
    assert told(folder) == [f"restart, {action}: {DIED}; the run goes on on n1"]


def test_a_job_that_was_lost_with_its_host_is_told_by_the_next_start(folder: RunFolder) -> None:
    attempts.note(folder, "launched")
    notify.main([str(folder.path), "--requeued"])
    attempts.note(folder, "launched")
    attempts.end(folder, how="preempted")
    attempts.note(folder, "launched")
    notify.main([str(folder.path), "--requeued"])
    assert not (folder.path.parents[1] / "told").exists()
    attempts.note(folder, "launched")
    for _ in range(2):
        notify.main([str(folder.path), "--requeued"])
    assert told(folder) == ["restart: nothing of the job was left to say why; Slurm has started it again"]
    end_by(folder, "completed")
    conclude(folder, "completed")
    assert told(folder, count=2)[1:] == [COMPLETED]


def test_a_full_disk_is_told_once_until_a_user_starts_the_run_again(folder: RunFolder) -> None:
    for event in ("submitted", "launched", "launched", "resumed", "launched"):
        attempts.note(folder, event)
        notify.tell(folder, f"storage: {event}", about=notify.STORAGE)
    assert told(folder, count=2) == ["storage: submitted", "storage: resumed"]


def test_a_run_without_a_notifier_tells_nobody(folder: RunFolder) -> None:
    use(folder, None)
    before = len(attempts.read_lines(folder.attempts))
    notify.tell(folder, "end: x", about=notify.ENDED)
    assert len(attempts.read_lines(folder.attempts)) == before


def test_a_folder_that_others_may_write_runs_no_command(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (folder.path, folder.config):
        path.chmod(0o777)
        notify.tell(folder, "end: x", about=notify.ENDED)
        assert "can be written by anyone" in capsys.readouterr().err
        path.chmod(0o700)
    assert not (folder.path.parents[1] / "told").exists()


@pytest.mark.parametrize(
    ("command", "problem"),
    [("sleep 600 & sleep 600", "the command did not end within 0.3 s"),
     ("echo no such list >&2; exit 3", "the command ended with 3: no such list"),
     ("exec 0<&-; true", None), ("sleep 60 & true", None)],
)  # fmt: skip
def test_a_command_that_fails_or_hangs_is_one_line(
    folder: RunFolder, command: str, problem: str | None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    use(folder, f"echo $$ > {folder.path}/group; {command}")
    monkeypatch.setattr(notify, "LIMIT_S", 0.3 if problem and "within" in problem else 20.0)
    monkeypatch.setattr(sys, "stdin", io.StringIO("a line"))
    notify.main([str(folder.path)])
    assert capsys.readouterr().err == ("" if problem is None else f"launcher.notify: {problem}\n")
    group = int((folder.path / "group").read_text())
    wait_for(lambda: alive(group) == ["sleep"] * (command == "sleep 60 & true"))
    with suppress(ProcessLookupError):
        os.killpg(group, 9)


def alive(group: int) -> list[str]:
    """The programs of a process group that have not ended."""
    names = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            if rest.split()[2] == str(group) and rest.split()[0] != "Z":
                names.append(name)
    return names


def test_a_notifier_that_hangs_delays_no_restart(folder: RunFolder) -> None:
    fifo = folder.path / "gate"
    os.mkfifo(fifo)
    use(folder, f"cat {shlex.quote(str(fifo))} - >> {shlex.quote(str(folder.path.parents[1] / 'told'))}")
    attempts.note(folder, "launched")
    code = (
        "import sys; from hpc_parallel.failure.notify import *\n"
        "tell(RunFolder(Path(sys.argv[1])), 'x', about=ENDED, waits=False)"
    )
    # As the batch script reads the hosts of the next start: to the end of the output.
    subprocess.run([sys.executable, "-c", code, folder.path], stdout=subprocess.PIPE, check=True)
    fifo.write_text("")  # only now can the command end
    assert told(folder) == ["x"]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Any]]]:
    """An https server: its address, and what it receives. `/moved` redirects."""
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response({"/moved": 302, "/gone": 410}.get(self.path, 200))
            self.send_header("Location", "/other")
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    key, certificate = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", certificate, "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("localhost", 0), Handler) as https:
        https.socket = context.wrap_socket(https.socket, server_side=True)
        thread = threading.Thread(target=https.serve_forever, daemon=True)
        thread.start()
        yield f"https://localhost:{https.server_port}", received
        https.shutdown()


def test_a_webhook_gets_the_line(
    folder: RunFolder, server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Over https whose certificate is known; no redirect is followed, and no message shows the address."""
    address, received = server
    use(folder, f"{address}/secret")
    attempts.note(folder, "launched")
    notify.tell(folder, "end: completed", about=notify.ENDED)
    assert received == [{"text": f"{folder.path}: end: completed"}]
    for path, problem in (("/moved", "HTTPError: Found"), ("/gone", "HTTPError: Gone")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
        use(folder, address + path)
        notify.main([str(folder.path)])
        assert capsys.readouterr().err == f"launcher.notify: the webhook failed: {problem}\n"
    assert len(received) == 3
    monkeypatch.delenv("SSL_CERT_FILE")
    notify.main([str(folder.path)])
    assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
    assert len(received) == 3


@pytest.mark.parametrize(
    ("target", "suggestion"),
    [("http://h.org/x", "https://h.org/x"), ("https://u:p@h.org/x?y=1", "https://h.org/x?y=1"),
     ("ftp://h.org", "https://h.org"), ("HTTPS://h.org:9/x", "https://h.org:9/x"), ("https://", "null"),
     ("https:///x y", "null"), ("https://h.org/x", None), ("mail -s x me", None),
     ("curl http://h.org -d @-", None)],
)  # fmt: skip
def test_a_webhook_needs_https(target: str, suggestion: str | None) -> None:
    def problems(value: str) -> list[str]:
        words = ("launcher=local", "launcher.snapshot=false", f"launcher.notify={hydra_value(value)}")
        try:
            prepared(*words)
        except ConfigError as error:
            return list(map(str, error.problems))
        return []

    found = problems(target)
    assert len(found) == (suggestion is not None)
    if suggestion is not None:
        advised = found[0].rpartition(" Try ")[2].removesuffix(".")
        assert composed(*shlex.split(advised)).launcher.notify == (
            None if suggestion == "null" else suggestion
        )
        assert suggestion == "null" or problems(suggestion) == []


def test_only_what_is_typed_is_used(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """A copied or unpacked run folder is this user's own, and would otherwise send lines to its author."""
    write_json(folder.environment, {"overrides": ["nodes=2", "+launcher.notify=https://h.org"]})
    assert read_start(folder, key="resume").overrides == ("nodes=2",)
    assert "launcher.notify is not used: only what is typed now counts" in capsys.readouterr().err


def test_the_batch_script_concludes_a_run_that_completed_if_it_must(here: Path) -> None:
    plain = render(prepared("launcher=script", "launcher.snapshot=false"))
    script = render(prepared("launcher=script", "launcher.snapshot=false", "launcher.notify=mail me"))
    assert "job notify" not in plain
    assert "mail me" not in script
    assert [line for line in script.splitlines() if line not in plain.splitlines() and "true" in line]
    copies = ("training.checkpoint_every=100", "training.memory_checkpoint_every=10")
    frees = render(prepared("launcher=script", "launcher.snapshot=false", "launcher.spares=1", *copies))
    assert "|| true; then" in frees  # hosts of earlier starts may have copies
    assert "|| true; then" not in plain
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_next_two_checkpoints_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 250
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result((1, 1, 0, 0, free, 0, 0, 0, 0, 255)))

    def shortage(**kept: int | None) -> str | None:
        return checkpoint_index.shortage(tmp_path, **{"keep_last": 2, "keep_every": None, **kept})

    def save(step: int) -> None:
        written = checkpoint_index.unfinished_folder(tmp_path, step)
        written.mkdir()
        checkpoint_index.publish(
            tmp_path, step=step, files={"a": {"bytes": 100}, "b": {"bytes": 50}}, about={}
        )

    assert shortage() is None  # no checkpoint, so nothing is known
    save(10)
    assert shortage() == "has 250 bytes free, and the next two checkpoints need 300 bytes"
    save(20)
    assert shortage() is None  # step 10 will be removed before the second one
    assert shortage(keep_every=10) == "has 250 bytes free, and the next two checkpoints need 300 bytes"
    checkpoint_index.keep_best(tmp_path, step=10, loss=1.0)
    assert shortage() == "has 250 bytes free, and the next two checkpoints need 300 bytes"
    free = 300
    assert shortage(keep_every=10) is None


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.EDQUOT, "quota"), (errno.ENOSPC, "space"), (errno.EOPNOTSUPP, "")]
)
def test_a_quota_shows_when_space_is_reserved(
    tmp_path: Path, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoint_index._refuses(tmp_path, 4096) is None
    refusing = SimpleNamespace(fallocate=Refusing(number))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: refusing)
    assert reason in (checkpoint_index._refuses(tmp_path, 4096) or "").lower()
    assert bool(reason) == bool(checkpoint_index._refuses(tmp_path, 4096))
    assert refusing.fallocate.asked == [(1, 0, 4096)] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_one_more_file_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise OSError(errno.EDQUOT, "it is full")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert checkpoint_index._refuses(tmp_path, 4096) == os.strerror(errno.EDQUOT)


class Refusing:
    """fallocate(2) of a file system that does not reserve."""

    def __init__(self, number: int) -> None:
        self.number, self.asked = number, list[tuple[int, ...]]()

    def __call__(self, handle: int, *values: int) -> int:
        self.asked.append(values)
        ctypes.set_errno(self.number)
        return -1
