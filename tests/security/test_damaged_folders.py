"""What looking does with single damages and with other users' folders; `test_fuzz.py` has the many."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash

from hpc_parallel.__main__ import main
from hpc_parallel.commands import grid, status
from hpc_parallel.problems import printable
from hpc_parallel.record import checkpoint_index, safetensors_header
from hpc_parallel.record.metrics_file import MetricsReader, last_line, read_metrics
from hpc_parallel.record.recorded import find_runs, read_run
from hpc_parallel.record.run_folder import RunFolder, unreadable
from hpc_parallel.record.safe_read import DamagedError
from hpc_parallel.record.safe_write import write_json
from tests.recorded_runs import failed, finished, prepared, started
from tests.security.users import ATTACKER, VICTIM, call_as, give, needs_root

Capture = pytest.CaptureFixture[str]
DEEP = "[" * 200_000
LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
ESCAPE = "\x1b]0;stolen\x07\x1b[2J\u202e\x9b1m"
pytestmark = pytest.mark.usefixtures("silent_slurm")


def ran(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = main(words)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def sparse(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, 2**40)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def linked(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def holding(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(text) and None


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("config.yaml", pipe, "it is a pipe, not a regular file"),
    ("config.yaml", sparse, "it has more than 256 KiB"),
    ("config.yaml", holding(f"nodes: {DEEP}\n"), "it nests more than 64 deep"),
    ("config.yaml", holding(f"nodes: {'[' * 200}\n"), "it nests more than 64 deep"),
    ("config.yaml", holding(LAUGHS), "it repeats parts of itself (YAML aliases)"),
    ("config.yaml", holding('nodes: !!int ""\n'), "it has a YAML tag: tag:yaml.org,2002:int"),
    ("config.yaml", holding("nodes: &a [*a]\n"), "it repeats parts of itself (YAML aliases)"),
    ("config.yaml", holding("nodes: .nan\n"), "it has a number that is not finite"),
    ("config.yaml", holding(f"nodes: 0x{'f' * 6000}\n"), "it has an integer of more than 64 bits"),
    ("summary.json", linked, "it is a link, not a regular file"),
    ("summary.json", holding('{"final_loss": Infinity}'), "it has Infinity, which is no JSON number"),
    ("summary.json", holding(f'{{"a": {DEEP}'), "it nests more than 64 deep"),
    (
        "summary.json",
        holding('{"a": [' + "{}," * 600_000 + "{}]}"),
        "it has more than 500,000 lists and tables",
    ),
    (  # a text without an end; it takes hours if each of its quotes is searched from
        "summary.json",
        holding('{"a": [' + "{}," * 70 + '"' + r"\"" * 1_000_000),
        "Unterminated string starting at: line 1 column 218 (char 217)",
    ),
    ("owner.json", pipe, "it is a pipe, not a regular file"),
    ("owner.json", holding('{"pid": "../tmp/x", "host": "", "began": ""}'), "it names no process and no job"),
    ("owner.json", holding('{"pid": 1e400}'), "it has 1e400, which is too large a number"),
    ("attempts.jsonl", sparse, "it has more than 32 MiB"),
    ("metrics.jsonl", pipe, "it is a pipe, not a regular file"),
]


@pytest.mark.parametrize(("file", "damage", "reason"), DAMAGES)
def test_one_line_names_the_damage(
    file: str, damage: Callable[[Path], None], reason: str, tmp_path: Path, capsys: Capture
) -> None:
    folder = finished(tmp_path / "runs/a/1", "strategy=single")
    finished(tmp_path / "runs/a/2", "strategy=single")
    damage(folder.path / file)
    code, out, error = ran(capsys, "status", "--json")
    assert (code, error) == (0, "")
    found = {row["run"]: row for row in json.loads(out)}
    assert (found["a/1"]["damaged"], found["a/2"]["damaged"]) == ({file: reason}, {})
    code, out, error = ran(capsys, "status")
    assert (code, error) == (0, "")
    assert out.count(f"a/1 can't be read: {file}: {reason}\n") == 1
    code, out, error = ran(capsys, "show", "a/1")
    assert (code, error) == (0, "")
    assert " ".join(out.split()).count(f"can't be read {file} ({reason})") == 1
    assert main(["logs", "a/1"]) == 0


def test_logs_that_can_not_be_read(tmp_path: Path, capsys: Capture) -> None:
    folder = finished(tmp_path / "runs/a/1", "nodes=2")
    pipe(folder.log(0, "out"))
    sparse(folder.log(0, "err"))
    linked(folder.log(1, "out"))
    code, out, error = ran(capsys, "logs", "1", "--rank", "all")
    assert (code, len(out)) == (0, len("[0 err] \n") + 8 * 2**20 * len("\\x00"))
    assert f"{folder.log(0, 'err')}: only the last 8 MiB; 1024.0 GiB are before them." in error
    assert f"{folder.log(0, 'out')} can't be read: it is a pipe, not a regular file." in error
    assert f"{folder.log(1, 'out')} can't be read: it is a link, not a regular file." in error


@pytest.mark.parametrize(
    ("key", "value"),
    [("nodes", 10**9), ("gpus_per_node", 2**63 - 1), ("nodes", -1), ("nodes", "x"), ("nodes", None)],
)
def test_counts_that_no_machine_has(key: str, value: Any, tmp_path: Path, capsys: Capture) -> None:
    folder = prepared(tmp_path / "runs/a/1", "strategy=single")
    text = folder.config.read_text().replace(f"{key}: 1\n", f"{key}: {json.dumps(value)}\n", 1)
    folder.config.write_text(text)
    assert grid.hosts(read_run(folder.path)) == []
    assert ran(capsys, "show", "1", "--json")[0] == 0
    assert ran(capsys, "logs", "1")[0] == 0


def test_values_of_other_types(tmp_path: Path, capsys: Capture) -> None:
    folder = finished(tmp_path / "runs/a/1", "strategy=data")
    config = folder.config.read_text()
    folder.config.write_text(config.replace("replicate: -1", "replicate: 0"))
    told = json.loads(folder.summary.read_text())
    write_json(folder.summary, {**told, "ended": "2026-11-22T01:02:05", "outcome": ["completed"]})
    write_json(folder.environment, {"overrides": [1, {}], "ranks": [{"host": 5, "device": 7}]})
    code, out, _ = ran(capsys, "show", "1", "--json")
    shown = json.loads(out)
    assert (code, shown["layout"], shown["hosts"]) == (0, None, [])
    folder.config.write_text(config)
    code, out, _ = ran(capsys, "show", "1", "--json")
    device = json.loads(out)["hosts"][0]
    assert (code, device["name"], device["devices"][0]["name"]) == (0, None, None)
    assert ran(capsys, "show", "1")[0] == 0


def test_the_last_defence(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a folder surprises us with, the other runs are listed."""
    for number in (1, 2):
        finished(tmp_path / f"runs/a/{number}")
    build = status.row_of
    surprise = lambda run, state: 1 / 0 if run.run_id == "1" else build(run, state)  # noqa: E731
    monkeypatch.setattr(status, "row_of", surprise)
    code, out, _ = ran(capsys, "status", "--json")
    found = {row["run"]: (row["state"], row["reason"]) for row in json.loads(out)}
    assert code == 0
    assert found == {
        "a/1": ("damaged", "ZeroDivisionError: division by zero"),
        "a/2": ("completed", ""),
    }
    assert "damaged (ZeroDivisionError: division by zero)" in ran(capsys, "status")[1]


def test_a_deep_tree_of_folders(tmp_path: Path) -> None:
    """os.scandir takes paths of 4,096 bytes, and Python calls of 1,000 levels."""
    place = tmp_path / "runs"
    place.mkdir()
    here = os.getcwd()
    os.chdir(place)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    folder = finished(place / "a" / "1")
    assert [run.path for run in find_runs(place)] == [folder.path]
    subprocess.run(["rm", "-rf", place / "d"], check=True)  # neither can shutil.rmtree


def test_a_runs_own_metrics_may_be_long(tmp_path: Path) -> None:
    """Nothing limits them where the run itself reads them; a look reads their end."""
    folder = started(tmp_path / "runs/a/1")
    line = json.dumps({"step": 7, "loss": 1.0, "note": "x" * 2**20}) + "\n"
    with folder.metrics.open("w") as file:
        for _ in range(32):
            file.write(line)
        file.write(line.replace("7", "8"))
    assert len(MetricsReader(folder.metrics).read()) == 33
    assert last_line(folder.metrics) is None  # a line of over a MiB is none that a look shows
    assert [values["step"] for values in read_metrics(folder.metrics)] == [7] * 30 + [8]  # the last 32 MiB


class TestTerminal:
    def test_no_file_reaches_a_terminal_raw(self, tmp_path: Path, capsys: Capture) -> None:
        folder = failed(tmp_path / "runs/a/1", "nodes=2")
        words = f"rank 1{ESCAPE}\r failed"
        write_json(folder.failure, {"rank": 1, "kind": ESCAPE, "line": words, "traceback": []})
        write_json(folder.environment, {"overrides": [ESCAPE], "ranks": [{"host": ESCAPE}] * 2})
        folder.log(1, "out").write_text(f"a\tb{ESCAPE}\n")
        shown = printable(words)
        assert not set(shown) & set("\x1b\x07\r\x9b\u202e")
        for command in (["status", "1"], ["show", "1"], ["logs", "1", "--rank", "1"],
                        ["logs", "1", "--rank", "all"], ["cancel", "1", "--yes"]):  # fmt: skip
            _, out, error = ran(capsys, *command)
            assert not set(out + error) & set("\x1b\x07\r\x9b\u202e"), command
        assert shown in ran(capsys, "status", "1")[1]
        assert "a\tb\\x1b]0;stolen" in ran(capsys, "logs", "1", "--rank", "1")[1]
        assert json.loads(ran(capsys, "status", "1", "--json")[1])[0]["failure"] == words

    def test_raw(self, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
        folder = failed(tmp_path / "runs/a/1", "nodes=2")
        content = f"a{ESCAPE}\n".encode() + b"\xff\r\n"
        folder.log(1, "out").write_bytes(content)
        folder.log(1, "err").unlink()
        assert main(["logs", "1", "--rank", "1", "--raw"]) == 0
        assert capfdbinary.readouterr().out == content

    def test_a_message_of_an_unknown_word(self, tmp_path: Path, capsys: Capture) -> None:
        finished(tmp_path / "runs/a" / f"1{ESCAPE}")
        _, out, error = ran(capsys, "status", f"x{ESCAPE}")
        assert not set(out + error) & set("\x1b\x07\x9b\u202e")

    def test_the_time_grows_linearly_with_the_text(self) -> None:
        assert len(printable("\x00" * 2**22)) == 4 * 2**22
        words = "".join(map(chr, range(0xE000, 0xF8FF)))
        assert len(printable(words)) == 6 * 6399
        few_s, many_s = (
            min(timeit.repeat(partial(printable, words * count), number=1, repeat=3)) for count in (10, 100)
        )
        assert many_s < 40 * few_s  # in quadratic time: 100


class TestCheckpoints:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> RunFolder:
        folder = finished(tmp_path / "runs/a/1", "strategy=single")
        for step in (2, 4):
            self.write(folder, step, {})
        return folder

    def write(self, folder: RunFolder, step: int, change: dict[str, Any]) -> None:
        path = folder.checkpoints / f"step-{step}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "part").write_bytes(b"x")
        files = {"part": {"bytes": 1, "xxh3_128": xxhash.xxh3_128(b"x").hexdigest()}}
        content = json.dumps({"step": step, "files": files, **change}).encode()
        (path / "manifest.json").write_bytes(content)
        (path / "complete").write_text(xxhash.xxh3_128(content).hexdigest())

    def test_links_and_files_are_skipped_with_a_word(self, folder: RunFolder, capsys: Capture) -> None:
        (folder.checkpoints / "step-9").symlink_to("step-4")
        (folder.checkpoints / "step-10").write_text("notes")
        assert [each.step for each in checkpoint_index.complete(folder.checkpoints)] == [4, 2]
        checkpoint_index.clear(folder.checkpoints)
        assert sorted(os.listdir(folder.checkpoints)) == ["step-10", "step-2", "step-4", "step-9"]
        out = " ".join(ran(capsys, "show", "1")[1].split())
        assert "checkpoints 2, 4 not checkpoints step-10, step-9 (links and files are skipped)" in out
        (folder.checkpoints / "step-4" / "part").write_bytes(b"")
        (folder.checkpoints / "step-2" / "part").write_bytes(b"")
        code, _, error = ran(capsys, "export", "runs/a/1")
        assert code == 2
        assert "WARNING: step-10, step-9 in" in error

    def test_one_of_a_later_step_takes_the_place_of_a_file(self, folder: RunFolder) -> None:
        (folder.checkpoints / "step-9").write_text("notes")
        beside = checkpoint_index.unfinished_folder(folder.checkpoints, 9)
        beside.mkdir()
        checkpoint_index.publish(folder.checkpoints, step=9, files={}, about={})
        assert checkpoint_index.complete(folder.checkpoints)[0].step == 9
        assert (folder.checkpoints / "not-a-checkpoint-step-9").read_text() == "notes"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"step": 5}, "manifest.json is of step 5"),
            ({"step": "4"}, "manifest.json is of step 4"),
            ({"files": {}}, "manifest.json lists no files"),
            (
                {"files": {"../../../dev/zero": {"bytes": 0}}},
                "names '../../../dev/zero', which is not a file",
            ),
            ({"files": {"..": {"bytes": 0}}}, "names '..', which is not a file of a checkpoint"),
            ({"files": {"part": {"bytes": "1"}}}, "part has 1 of None bytes"),
            ({"files": {"part": 7}}, "part has 1 of None bytes"),
            ({"files": {"gone": {"bytes": 1}}}, "gone is missing"),
        ],
    )
    def test_odd_manifests(self, change: dict[str, Any], words: str, folder: RunFolder) -> None:
        self.write(folder, 4, change)
        assert words in (checkpoint_index.complete(folder.checkpoints)[0].damage() or "")

    @pytest.mark.parametrize("damage", [pipe, linked, sparse])
    def test_odd_files(self, damage: Callable[[Path], None], folder: RunFolder) -> None:
        for name in ("part", "manifest.json", "complete"):
            self.write(folder, 4, {})
            damage(folder.checkpoints / "step-4" / name)
            found = checkpoint_index.complete(folder.checkpoints)[0]
            assert found.step == 2 or found.damage()
            (folder.checkpoints / "step-4" / name).unlink()

    @needs_root
    def test_trust_comes_before_a_foreign_manifest(
        self, folder: RunFolder, shared: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The manifest of another user is not opened."""
        theirs = shared / "theirs"
        shutil.copytree(folder.path, theirs)
        give(theirs, ATTACKER)
        opened: list[str] = []
        open_file = os.open
        monkeypatch.setattr(os, "open", lambda path, *rest, **more: opened.append(str(path)) or
                            open_file(path, *rest, **more))  # fmt: skip
        code, _, error = ran(capsys, "export", str(theirs))
        assert code == 2
        assert f"{theirs} belongs to user {ATTACKER}, who could put other content there" in error
        assert not [path for path in opened if path.startswith(str(theirs))]


class TestWeights:
    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "it is not a safetensors file"),
            ((2**62).to_bytes(8, "little") + b"{}", "it is not a safetensors file"),
            ((200_000).to_bytes(8, "little") + b"[" * 200_000, "it is not a safetensors file"),
            ((22).to_bytes(8, "little") + b'{"a": {"shape": "xy"}}', "it is not a safetensors file"),
            ((53).to_bytes(8, "little") + b'{"a": {"shape": [-1], "data_offsets": [0, 1000000]} }',
             "it is not a safetensors file"),
        ],
    )  # fmt: skip
    def test_odd_headers(self, content: bytes, why: str, tmp_path: Path) -> None:
        path = tmp_path / "a.safetensors"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=why):
            safetensors_header.read_header(path)

    def test_special_files(self, tmp_path: Path) -> None:
        pipe(tmp_path / "a")
        (tmp_path / "zero").symlink_to("/dev/zero")
        for name, why in (("a", "it is a pipe"), ("zero", "it is a device")):
            with pytest.raises(DamagedError, match=why):
                safetensors_header.read_header(tmp_path / name)


@needs_root
class TestAColleaguesFolder:
    """runs/ with a run and a sweep that this user can't enter, beside one that is theirs."""

    @pytest.fixture
    def runs(self, shared: Path) -> Path:
        finished(shared / "runs/a/1", "strategy=single")
        give(shared / "runs", VICTIM)
        for place in ("a/2", "b", "sweeps/1"):
            folder = shared / "runs" / place
            folder.mkdir(parents=True)
            (folder / "config.yaml").touch()
            (folder / "sweep.json").touch()
            folder.chmod(0o700)
            os.chown(folder, ATTACKER, ATTACKER)
        (shared / "runs/sweeps").chmod(0o755)
        return shared / "runs"

    def as_victim(self, runs: Path, *words: str) -> tuple[int, str, str]:
        import contextlib
        import io

        def work() -> tuple[int, str, str]:
            os.chdir(runs.parent)
            os.environ["HOME"] = str(runs.parent)
            out, error = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                try:
                    code = main(list(words))
                except SystemExit as end:
                    code = int(end.code or 0)
            return code, out.getvalue(), error.getvalue()

        found: tuple[int, str, str] = call_as(VICTIM, work)
        return found

    def test_what_is_beside_is_passed_by(self, runs: Path) -> None:
        code, out, error = self.as_victim(runs, "status", "--json")
        assert (code, [row["run"] for row in json.loads(out)], error) == (0, ["a/1"], "")
        for words in (["show", "a/1"], ["logs", "a/1"], ["status", "a"], ["status", "1"]):
            assert self.as_victim(runs, *words)[0] == 0, words
        assert self.as_victim(runs, "cancel", "a/1", "--yes")[0] == 1  # it has ended

    @pytest.mark.parametrize("command", ["status", "show", "logs", "cancel", "export"])
    def test_a_named_one_is_said_to_be_anothers(self, command: str, runs: Path) -> None:
        for place, closed in (("a/2", "a/2"), ("b/1", "b"), ("sweeps/1", "sweeps/1")):
            found = self.as_victim(runs, command, f"runs/{place}")
            refusal = f"{runs / closed} belongs to another user, and you may not read it.\n"
            assert found == (2, "", refusal), place

    def test_a_run_folder_can_not_be_made_there(self, runs: Path) -> None:
        refusal = call_as(VICTIM, lambda: unreadable(runs / "b" / "mine"))
        assert refusal == f"{runs / 'b'} belongs to another user, and you may not read it."
        assert call_as(VICTIM, lambda: unreadable(runs / "a" / "1" / "gone")) is None
