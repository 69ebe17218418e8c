"""Every command where it meets the shell: one line or silence, and the exit code of the table."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from hpc_parallel import __main__, shell
from hpc_parallel.__main__ import COMMANDS, main
from hpc_parallel.problems import ConfigError, Problem

RUN = ["run", "dry_run=true", "launcher.snapshot=false", "launcher=local"]


@contextmanager
def stdout(target: str | int, *, encoding: str = "utf-8") -> Iterator[None]:
    """This process's sys.stdout on another file; nothing of pytest's is touched."""
    before, sys.stdout = sys.stdout, open(target, "w", encoding=encoding)  # noqa: SIM115
    try:
        yield
    finally:
        replaced, sys.stdout = sys.stdout, before
        replaced.close()  # raises if something that can't be written is left


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    return capfd.readouterr().err.splitlines()


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], RUN, ["status"], ["report", "--help"]])
def test_a_full_stdout_is_reported_in_one_line(
    words: list[str], capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hpc-parallel", *words])
    with stdout("/dev/full"):
        try:
            code = main(words)
        except SystemExit as end:
            code = int(str(end.code))
    assert (code, said(capfd)) == (1, ["stdout can't be written: No space left on device."])


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["tokenize", "--help"], 0),
        (["check"], 0),  # a table of rich
        (RUN, 0),
        (["run", "launcher.snapshot=false", "launcher=local", "device=cpu"], 1),  # nothing was trained
    ],
)
def test_a_reader_that_has_enough_is_no_error_of_a_command_that_only_shows(
    words: list[str],
    code: int,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["hpc-parallel", *words])
    read, write = os.pipe()
    os.close(read)
    with stdout(write):
        assert main(words) == code
    assert said(capfd) == []
    assert list(tmp_path.rglob("config.yaml")) == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 1, []),
        (BrokenPipeError(32, "Broken pipe"), 0, []),
        (OSError(28, "No space left on device"), 1, ["The system reports: No space left on device."]),
        (PermissionError(13, "Permission denied", "/a\x1b[31m"), 1, ["/a\\x1b[31m: Permission denied."]),
        (ConfigError(["one\x1b[2J", "two"]), 2, ["one\\x1b[2J", "two"]),
    ],
)
def test_every_command_ends_so(
    name: str, error: BaseException, code: int, line: list[str],
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    class Module:
        @staticmethod
        def main(words: list[str]) -> int:
            raise error

    monkeypatch.setattr(__main__, "import_module", lambda _: Module)
    with stdout(os.devnull):
        assert main([name]) == code
    assert said(capfd) == line


def test_unencodable_characters_are_escaped(tmp_path: Path) -> None:
    def work() -> int:
        print("café \udc80 …")
        return 0

    with stdout(str(tmp_path / "out"), encoding="ascii"):
        assert shell.run_command(work) == 0
    assert (tmp_path / "out").read_text() == "caf\\u00e9 \\x80 \\u2026\n"


def test_a_byte_that_is_no_utf8_is_shown_as_one(tmp_path: Path) -> None:
    """Python reads it as a surrogate; with LC_ALL=C, each byte of an accented letter may be one."""
    word = b"resume=caf\xc3\xa9\xff"
    for variables in ({"LC_ALL": "C", "PYTHONUTF8": "0"}, {"LC_ALL": "C.UTF-8"}):
        done = subprocess.run(
            [sys.executable, "-m", "hpc_parallel.run", word], cwd=tmp_path, capture_output=True,
            env={"PATH": os.environ["PATH"], **variables},
        )  # fmt: skip
        assert done.returncode == 2
        assert rb"caf\xc3\xa9\xff" in done.stderr.replace("é".encode(), rb"\xc3\xa9"), done.stderr


def test_a_deleted_folder_is_reported(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "gone").mkdir()
    os.chdir("gone")
    (here / "gone").rmdir()
    assert main(["status"]) == 2
    assert said(capfd) == ["The current folder has been deleted. Try cd to another one."]


def test_a_full_stderr_changes_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", open("/dev/full", "w"))  # noqa: SIM115
    assert main(["statsu"]) == 2
    sys.stderr.close()  # nothing is left that can't be written


def test_streams_without_a_file_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main(["--help"]) == 0
    assert sys.stdout.getvalue().startswith("usage")  # type: ignore[attr-defined]


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_closed_streams(redirection: str, tmp_path: Path) -> None:
    """What runs afterwards must not print into a file that took the number of stdout."""
    code = (
        "import os, sys; from hpc_parallel.shell import complain, run_command\n"
        "def work():\n"
        f"    open({str(tmp_path / 'file')!r}, 'w').close(); os.system('echo lost'); print('x')\n"
        "    complain(['y']); return 5\n"
        "sys.exit(run_command(work))"
    )
    line = f'"{sys.executable}" -c "$0" {redirection}'
    done = subprocess.run(["sh", "-c", line, code], capture_output=True, text=True)
    assert done.returncode == 5
    assert (tmp_path / "file").read_text() == ""
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_silent(tmp_path: Path) -> None:
    """As a shell sends it: while `run` composes."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "hpc_parallel", *RUN], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a job in the background of a script ignores SIGINT, and so do its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    for line in process.stderr:  # one a module: it is in the midst of them
        if "hpc_parallel.shell" in line:
            break
    for line in process.stderr:
        if "hydra.errors" in line or "omegaconf.errors" in line:
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 1
    assert [line for line in rest.splitlines() if not line.startswith("import time:")] == []
    assert list(tmp_path.iterdir()) == []


def test_without_a_home(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        [sys.executable, "-m", "hpc_parallel", *RUN, "run_dir='~nobody-here/x'"], cwd=tmp_path,
        env=environment | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.startswith("each rank sets:\n")
    assert "nobody-here" in done.stdout


def test_a_ctrl_c_while_python_ends_does_not_change_the_exit_code() -> None:
    """A third one, for example, of a user to whom a run ends too slowly."""
    script = """
import os, signal, sys
from hpc_parallel.shell import run_command

class Last:
    def __del__(self, kill=os.kill, process=os.getpid(), number=int(signal.SIGINT)):
        kill(process, number)

last = Last()
def work():
    raise KeyboardInterrupt
sys.exit(run_command(work))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "name",
    ["a'$(touch x)", "a;touch x", "a;b", "a|b", "a&b", "a>b", "a<b", "a(b)", "it's \"`id`\"", "$HOME",
     "a'b\"c", "plain-1.5/x", "a*b?", "#a", "~/x", "{a,b}", "{1..3}", "node[1-2],n7", "a=b", "!x", "a\\",
     "null", "1_0", "true", "{run}", "a\nb", "\x1b[31m", "Gr\xfc\xdfe\xad", "\u202e"],
)  # fmt: skip
def test_a_shell_expands_nothing_in_advice(name: str, tmp_path: Path) -> None:
    """Another user may have named the run that an error suggests."""
    legal = {"resume": Path(name), "list": [name, "z"], "table": {"a": name, "b": 1}, "--output": name}
    problems = (str(Problem(key, "x", "is wrong", (value,))) for key, value in legal.items())
    words = " ".join(problem.rpartition("Try ")[2].removesuffix(".") for problem in problems)
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {words}"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    *overrides, flag, end = done.stdout.split("\0")
    values = [OverridesParser.create().parse_override(override).value() for override in overrides]
    assert [str(values[0]), *(str(value) for value in [*values[1], *values[2].values()])] == [
        name, name, "z", name, "1",
    ]  # fmt: skip
    assert (flag, end, done.stderr) == (f"--output={name}", "", "")
    assert not any(tmp_path.iterdir())
