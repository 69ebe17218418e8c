"""Scripts that do what a training should not: each ends in a clear sentence, and leaves nothing running."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.scripts.test_local_scripts import TWO_NODES, ended, only_run, processes_of, run, started
from tests.waiting import wait_for

pytestmark = pytest.mark.processes
DAEMON = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
print("the parent ends")
"""
DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.environ["RANK"] == "1":
    time.sleep(1)
    raise ValueError("no data")
time.sleep(600)
"""
DEAF_LINE = r"rank 1 on \S+ failed first: ValueError: no data \(script\.py:6\); 1 follower"
FLOOD = """
import sys
for _ in range(int(sys.argv[1])): print("x" * 1023)
print("the last line")
"""


@pytest.mark.parametrize(
    ("words", "body", "code", "sentence"),
    [
        (("--", "script.py"), "", 0, "completed, but rank 0 printed nothing"),
        (("script.metrics=step (?P<step>.*)", "--", "script.py"), "print('usage: ...')", 0,
         "completed, but no line of rank 0 matches script.metrics"),
        pytest.param(("--", "script.py"), DAEMON, 0, "completed", marks=pytest.mark.full),
        pytest.param(("--", "script.py"), DEAF, 1, DEAF_LINE, marks=pytest.mark.full),
        (("--", "script.py"), "import os; os.chdir('/'); print(1); open('none.txt')", 1,
         r"rank \d on \S+ failed first: FileNotFoundError: .*'none\.txt' \(script\.py:1\).*"),
        (("--", "script.py"), "input()", 1, r"rank \d on \S+ failed first: EOFError: .* \(script\.py:1\).*"),
        (("--", "script.py", "20000"), FLOOD, 0, "completed"),
        pytest.param(("--", "script.py", "1000000"), FLOOD, 0, "completed", marks=pytest.mark.full),
        (("--", "script.p"), "", 2, r"script\.command = script\.p is not on the PATH.*"),
        (("--", "-m", "scrip"), "", 2, r"script\.module = scrip can't be found.*"),
    ],
    ids=["ends", "no metrics", "forks", "deaf", "leaves", "reads", "floods", "1 GB", "no file", "no module"],
)  # fmt: skip
def test_a_wrong_use_ends_in_a_sentence(
    home: Path, words: tuple[str, ...], body: str, code: int, sentence: str
) -> None:
    (home / "script.py").write_text(body)
    done = run(home, *TWO_NODES, *words)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    assert any(re.fullmatch(sentence, line) for line in lines), lines[-20:]
    assert processes_of(str(home)) == []
    if body == FLOOD:
        assert "the last line" in lines
        printed_bytes = (only_run(home) / "logs" / "rank-1.out").stat().st_size
        assert printed_bytes == int(words[-1]) * 1024 + 14
        assert len(done.stdout) < max(2 * 10**6, printed_bytes / 50)  # the terminal is not flooded


def test_a_script_that_hangs_at_an_import_is_ended_by_one_signal(home: Path) -> None:
    (home / "slow.py").write_text("import time; time.sleep(600)\n")
    (home / "script.py").write_text("print('before', flush=True)\nimport slow\n")
    process = started(home, *TWO_NODES, "--", "script.py")
    outs = "runs/*/*/logs/rank-?.out"
    wait_for(lambda: [out.read_text() for out in home.glob(outs)] == ["before\n"] * 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(240) == 1
    assert ended(home) == ("cancelled", None)
    assert processes_of(str(home)) == []
