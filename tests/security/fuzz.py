"""Damaged run, sweep and checkpoint folders for the reading commands, made by mutations of a sound one.

A case is a list of mutations `(file, how, where, what)` of plain values, so that a failure can be repeated:
`python -m tests.security.fuzz 'CASE'`.
"""

from __future__ import annotations

import base64
import contextlib
import faulthandler
import io
import json
import os
import pickle
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash
import yaml

from hpc_parallel.__main__ import main
from hpc_parallel.record.collectives_file import COLUMNS
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.sweep_folder import SkippedRun, Sweep, SweepRun, write_sweep
from tests.recorded_runs import failed, finished

Mutation = tuple[str, str, int, int]

LIMIT_S, LIMIT_BYTES = 5.0, 2**30  # for one command; CPU time, because machines are shared
WAIT_S, WORK_S = 60.0, 0.05  # a command that computes less than WORK_S in WAIT_S waits on a pipe
STUCK_S = 900.0  # after which the process ends with its stacks: a C extension that never returns
EVERY = 8  # one of 8 cases is also resumed, because composing its configuration takes half a second
SECRET = "the content of a private file"
RUN, BESIDE, SWEEP = "runs/a/20261122-01-aa", "runs/a/20261122-02-bb", "runs/sweeps/1"
CHECKPOINT = f"{RUN}/checkpoints/step-8"
FILES = (
    f"{RUN}/config.yaml", f"{RUN}/environment.json", f"{RUN}/summary.json", f"{RUN}/failure.json",
    f"{RUN}/owner.json", f"{RUN}/attempts.jsonl", f"{RUN}/metrics.jsonl", f"{RUN}/stopped.json",
    f"{RUN}/preflight.json", f"{RUN}/collectives.json", f"{RUN}/machine_check.json", f"{RUN}/rank_times.json",
    f"{RUN}/timeline.json", f"{RUN}/generated.jsonl", f"{RUN}/logs/rank-0.out", f"{RUN}/logs/rank-1.err",
    f"{RUN}/logs", f"{RUN}/rendezvous", f"{RUN}/checkpoints", CHECKPOINT, f"{CHECKPOINT}/manifest.json",
    f"{CHECKPOINT}/complete", f"{CHECKPOINT}/part", f"{RUN}/checkpoints/step-9", f"{SWEEP}/sweep.json",
)  # fmt: skip
SPECIAL = (
    "pipe", "socket", "device", "sparse", "zero", "itself", "secret", "folder", "unreadable", "missing",
    "empty",
)  # fmt: skip
KINDS = ("value", "value", "value", "bytes", "bytes", *SPECIAL)
ODD = (  # JSON, which is also YAML
    "null", "true", "0", "-1", "1.5", "1e308", "-1e308", "1000000000", str(2**63 - 1), "9" * 30, "9" * 6000,
    "NaN", "Infinity", "-Infinity", "1e999", '""', '"x"', '"\\u0000"', '"../tmp/x"', '"/dev/zero"',
    '"\\u001b[31m\\u001b]0;x\\u0007"', '"\\ud800"', '"a\\nb"', '"2026-11-22T01:00:00"', '"$\\\\frac{1}$"',
    '"=cmd|x"', '"' + "x" * 100_000 + '"', "[]", "{}", "[[]]", '[{"a": []}]', '{"1": 2}', "[" * 200_000,
    "[" * 60 + "]" * 60, '["--help", "-x"]', "{" + '"a":{' * 100 + "}" * 101, "[" + "{}," * 300_000 + "{}]",
    '"completed"', '"running"', '"failed"', '".nan"',
)  # fmt: skip
ODD_YAML = (
    '!!int ""', "&a [*a]", "!!python/object/apply:os.system ['true']", ".inf", ".nan", "0x" + "f" * 6000,
    "[&a [x,x,x,x,x,x,x,x,x]," + ",".join(f"&{c} [{','.join([f'*{p}'] * 9)}]" for p, c in
                                          zip("abcdefg", "bcdefgh", strict=True)) + "]",
    "- " * 5000, "? " * 5000, "2026-11-22", "!!set {a, b}", "!!binary aGk=", "!!timestamp 2026-11-22",
)  # fmt: skip
_ODD_MARK = "@@odd@@"
_ALLOWED = ("sacct", "squeue", "scontrol", "sinfo", "sbatch", "git", "nvidia-smi")  # that commands may start
_CONTROL = re.compile(r"[^\n\t\x20-\x7e\x80-\U0010ffff]|[\x80-\x9f]")


class HangError(BaseException):
    """A command computed longer than LIMIT_S, or waits. A BaseException: no `except Exception` hides it."""


class Canary:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self._path),)


class Field:
    """A folder for the cases: `case` is new for each; no command may change `home` or other files."""

    def __init__(self, root: Path) -> None:
        self.root, self.case, self.home = root, root / "case", root / "home"
        self.canary, self._template = root / "unpickled", root / "template"
        self.home.mkdir()
        (self.home / "secret").write_text(json.dumps({"outcome": SECRET, "line": SECRET}) + "\n")
        (root / "bin").mkdir()
        if git := shutil.which("git"):
            (root / "bin" / "git").symlink_to(git)
        make_template(self._template, canary=self.canary)

    def make(self, mutations: Sequence[Mutation]) -> None:
        if self.case.exists():
            for folder, _, _ in os.walk(self.case):
                os.chmod(folder, 0o700)
            shutil.rmtree(self.case)
        shutil.copytree(self._template, self.case, symlinks=True)
        for name in (f"{SWEEP}/sweep.json", f"{RUN}/environment.json"):
            path = self.case / name
            path.write_text(path.read_text().replace(str(self._template), str(self.case)))
        for file, how, where, what in mutations:
            mutate(self.case / file, how, where, what, home=self.home)

    def commands(self, mutations: Sequence[Mutation]) -> Iterator[list[str]]:
        yield ["status", "--all", "--json"]
        yield ["status", RUN, SWEEP]
        yield ["show", RUN]
        yield ["show", RUN, "--json"]
        yield ["logs", RUN, "--rank", "all"]
        yield ["logs", RUN, "--json"]
        yield ["report", "runs", "--json"]
        yield ["export", RUN]
        if zlib.crc32(repr(list(mutations)).encode()) % EVERY == 0:
            yield ["run", f"resume={self.case / RUN}", "dry_run=true"]

    def listing(self) -> dict[str, tuple[int, ...]]:
        entries = {}
        for folder, folders, files in os.walk(self.root):
            for name in (*folders, *files):
                status = os.lstat(path := os.path.join(folder, name))
                entries[path] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino)
        return entries


def make_template(root: Path, *, canary: Path) -> None:
    words = ("strategy=pipeline", "nodes=2", "training.steps=30")
    run = failed(root / RUN, *words)
    beside = finished(root / BESIDE, *words)
    for folder in (run, beside):
        write_json(folder.environment, _environment(words, root))
    write_json(run.stopped, {"signal": "SIGTERM", "step": 30, "line": "cancelled by SIGTERM"})
    chunks = [[0.0, 0.1, 0, "F", 0], [0.1, 0.2, 0, "B", 0]]
    ranks = [{"rank": rank, "length_s": 0.2, "chunks": chunks} for rank in range(2)]
    write_json(run.timeline, {"step": 3, "ranks": ranks})
    finding = {"host": "n1", "what": "other packages: a 1", "harmful": True}
    write_json(run.preflight, {"took_s": 0.7, "hosts": {}, "findings": [finding]})
    slow = {"rank": 1, "host": "n1", "cause": "data", "line": "rank 1 on n1 is slow: data"}
    accused = [slow | {"first_step": 20, "last_step": 60}]
    gpu = {"rank": 1, "host": "n1", "utilisation": 0.9, "memory_bytes": 2**30}
    samples = [{"step": 20, "ranks": [gpu, gpu | {"rank": 0}]}]
    write_json(run.rank_times, {"samples": samples, "slow": [slow], "accused": accused})
    values = ("world", 2, "all_reduce", "float32", 8, 1e-4, 0.1, 100, 8e4, 8e4)
    write_json(run.collectives, {"rows": [dict(zip(COLUMNS, values, strict=True))]})
    checked = {"hosts": ["n1", "n2"], "links": [{"hosts": ["n1", "n2"], "bytes_per_s": 1e9}]}
    write_json(run.machine_check, {**checked, "findings": [finding], "reads_bytes_per_s": {"n1": {"1": 1e8}}})
    run.generated.write_text(json.dumps({"prompt": "a", "text": "b"}) + "\n")
    for step in (4, 8):
        _checkpoint(run, step, canary=canary)
    sweep = root / SWEEP
    sweep.mkdir(parents=True)
    runs = tuple(SweepRun((f"seed={n}",), folder.path, 2, 1, None) for n, folder in enumerate((run, beside)))
    skipped = (SkippedRun(("seed=2",), ("it can't",)),)
    write_sweep(sweep, Sweep(("-m", "seed=0,1,2"), "2026-11-22T01:00:00+00:00", None, runs, skipped))


def _environment(words: Sequence[str], root: Path) -> dict[str, Any]:
    ranks = [{"host": f"n{rank}", "address": "10.0.0.1", "device": "cuda:0"} for rank in range(2)]
    return {
        "overrides": list(words), "ranks": ranks, "config_dir": None, "working_directory": str(root),
        "import_path": None, "packages": {"torch": "2.11"}, "checkouts": {}, "cuda": None,
        "transport": {"version": "2.27.7", "pairs": {"across nodes": {"NET/IB": 2}}, "problem": "sockets",
                      "gpudirect": {"across nodes": "off"}, "channels": 2, "rings": True},
        "topology": [{"hosts": ["n1"], "parts": [{"name": name, "model": "", "numa": 0} for name in "ab"],
                      "links": [["X", "PIX"], ["PIX", "X"]]}],
    }  # fmt: skip


def _checkpoint(run: RunFolder, step: int, *, canary: Path) -> None:
    """A complete checkpoint with a truncated file, so no command may read its index, which is a pickle."""
    folder = run.checkpoints / f"step-{step}"
    folder.mkdir(parents=True)
    index = pickle.dumps(Canary(canary))
    (folder / ".metadata").write_bytes(index)
    (folder / "part").write_bytes(b"weights")
    files = {
        name: {"bytes": length, "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
        for name, content, length in ((".metadata", index, len(index)), ("part", b"weights", 99))
    }
    manifest = {"step": step, "samples": 16 * step, "data": "x", "config": {"model": {}}, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    _mark(folder)


def _mark(folder: Path) -> None:
    content = (folder / "manifest.json").read_bytes()
    (folder / "complete").write_text(xxhash.xxh3_128(content).hexdigest())


def mutate(path: Path, how: str, where: int, what: int, *, home: Path) -> None:
    """Apply one mutation; does nothing if an earlier mutation left nothing to change."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        if how in SPECIAL:
            _put_special(path, how, home=home)
        elif stat.S_ISREG((status := path.lstat()).st_mode) and status.st_size < 2**20:
            content = path.read_bytes()
            path.write_bytes(_bytes(content, where, what)) if how == "bytes" else _change_value(
                path, where, what
            )


def _bytes(content: bytes, where: int, what: int) -> bytes:
    at = where % (len(content) + 1)
    before, after = content[:at], content[at:]
    changed = (
        before + bytes([what % 256]) + after[1:], before + bytes([what % 256]) * 3 + after,
        before + after[8:],
        before, before + content, b"\xef\xbb\xbf" + content, content.decode().encode("utf-16"),
        content.replace(b"\n", b"\r"), content.replace(b":", b""), before + b"\x1b[2J\x9b" + after,
    )  # fmt: skip
    return changed[what % len(changed)]


def _change_value(path: Path, where: int, what: int) -> None:
    """Replace one value or a complete table by an odd one; a manifest gets a new marker."""
    odd = [*ODD, *ODD_YAML] if path.suffix == ".yaml" else ODD
    text = odd[what % len(odd)]
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        at = where % len(lines) if lines else 0
        lines[at : at + 1] = [_replaced(json.loads(lines[at]), where // 7, text)] if lines else [text]
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".json":
        path.write_text(_replaced(json.loads(path.read_text()), where, text))
    elif path.suffix == ".yaml":
        value = yaml.safe_load(path.read_text())
        if places := list(_places(value)):
            _put(value, places[where % len(places)])
            text = yaml.safe_dump(value, sort_keys=False).replace(_ODD_MARK, text)
        path.write_text(text)
    else:
        path.write_text(text)
    if path.name == "manifest.json":
        _mark(path.parent)


def _replaced(value: Any, where: int, text: str) -> str:
    places = list(_places(value))
    if where % (len(places) + 1) == len(places):
        return text
    _put(value, places[where % (len(places) + 1)])
    return json.dumps(value).replace(f'"{_ODD_MARK}"', text)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*path, key)
        yield from _places(item, (*path, key))


def _put(value: Any, place: tuple[Any, ...]) -> None:
    for key in place[:-1]:
        value = value[key]
    value[place[-1]] = _ODD_MARK


def _put_special(path: Path, how: str, *, home: Path) -> None:
    if how == "unreadable":
        path.chmod(0)
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        before = os.getcwd()
        os.chdir(path.parent)  # a socket's path may have at most 107 bytes
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(before)
    elif how == "device":
        with contextlib.suppress(PermissionError):
            os.mknod(path, 0o20666, os.makedev(1, 5))  # the numbers of /dev/zero
    elif how == "sparse":
        path.touch()
        os.truncate(path, 2**40)
    elif how in ("zero", "itself", "secret"):
        path.symlink_to({"zero": "/dev/zero", "itself": path.name, "secret": home / "secret"}[how])
    elif how == "folder":
        path.mkdir()
    elif how == "empty":
        path.touch()


class Watch:
    """Records harmful actions of this process during a case. An audit hook can't be removed."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.harm: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.root is None:
            return
        harmful = event in ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill")
        if event == "subprocess.Popen":
            harmful = os.path.basename(str(arguments[0])) not in _ALLOWED
        elif event == "pickle.find_class":
            harmful = arguments[0] in ("posix", "os")
        if harmful:
            self.harm.append(f"{event} {arguments!r:.200}")


@contextlib.contextmanager
def limits(limit_s: float) -> Iterator[None]:
    """Limit time and memory for one command. Other work on the machine is no hang."""
    worked_s = time.process_time()

    def expire(*_: object) -> None:
        raise HangError

    def look(*_: object) -> None:
        nonlocal worked_s
        before_s, worked_s = worked_s, time.process_time()
        if worked_s - before_s < WORK_S:
            raise HangError

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = [signal.signal(signal.SIGPROF, expire), signal.signal(signal.SIGALRM, look)]
    faulthandler.dump_traceback_later(STUCK_S, exit=True, file=sys.__stderr__)
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S, WAIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in zip((signal.SIGPROF, signal.SIGALRM), old, strict=True):
            signal.signal(number, handler)


def called(words: Sequence[str], *, limit_s: float = LIMIT_S) -> tuple[Any, str, str]:
    """Run a command in this process; returns its exit code, stdout and stderr."""
    out, error = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv = sys.argv
    sys.argv = ["hpc_parallel", *words[1:]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), limits(limit_s):
            try:
                code: Any = main(list(words))
            except SystemExit as end:
                code = end.code
    finally:
        sys.argv = argv
    texts = []
    for stream in (out, error):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def attempt(
    field: Field,
    mutations: Sequence[Mutation],
    watch: Watch,
    *,
    limit_s: float = LIMIT_S,
) -> None:
    """Make the case and run every command on it.

    Raises AssertionError with what went wrong and the command that repeats the case.
    """
    field.make(mutations)
    repeat = f"python -m tests.security.fuzz {encoded(mutations)}\n{list(mutations)}"
    working_directory = os.getcwd()
    os.chdir(field.case)
    try:
        before = field.listing()
        for words in field.commands(mutations):
            context = f"{' '.join(words)}\n{repeat}"
            watch.harm, watch.root = [], str(field.root)
            try:
                code, out, error = called(words, limit_s=limit_s)
            except HangError as hang:
                raise AssertionError(f"it computes more than {limit_s:g} s, or waits: {context}") from hang
            except BaseException as escaped:
                raise AssertionError(
                    f"{type(escaped).__name__}: {str(escaped)[:300]}: {context}"
                ) from escaped
            finally:
                watch.root = None
            check(words, code, out, error, context=context)
            assert not watch.harm, f"{watch.harm}: {context}"
            after = field.listing()
            assert after == before, (
                f"changed {sorted(set(after.items()) ^ set(before.items()))[:5]}: {context}"
            )
    finally:
        os.chdir(working_directory)


def check(words: Sequence[str], code: Any, out: str, error: str, *, context: str) -> None:
    assert code in range(4), f"exit code {code}: {context}"
    assert "Traceback" not in error, f"{error[-2000:]}: {context}"
    assert SECRET not in out + error, f"a private file is shown: {context}"
    control = _CONTROL.search(out + error)
    assert control is None, f"{control[0]!r} reaches the terminal: {context}"
    if code:
        assert error.strip(), f"exit code {code} without a word: {context}"
    if words[:2] == ["status", "--all"]:
        rows = {row["path"] for row in json.loads(out)}
        assert any(path.endswith(BESIDE) for path in rows), f"a sound run is not listed: {context}"


def encoded(mutations: Sequence[Mutation]) -> str:
    return base64.b64encode(json.dumps(list(mutations)).encode()).decode()


def decoded(case: str) -> list[Mutation]:
    return [(str(file), str(how), int(where), int(what)) for file, how, where, what in
            json.loads(base64.b64decode(case))]  # fmt: skip


@contextlib.contextmanager
def prepared() -> Iterator[Field]:
    """A field in a private folder, with an environment without Slurm."""
    with tempfile.TemporaryDirectory(prefix="hpc_parallel-fuzz-") as folder:
        field = Field(Path(folder).resolve())
        kept = {key: os.environ.get(key) for key in ("HOME", "PATH")}
        os.environ.update(HOME=str(field.home), PATH=str(field.root / "bin"))
        try:
            yield field
        finally:
            for key, value in kept.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
            for folder_path, _, _ in os.walk(field.root):
                os.chmod(folder_path, 0o700)


if __name__ == "__main__":
    with prepared() as only:
        attempt(only, decoded(sys.argv[1]), Watch(), limit_s=60)
        print("nothing went wrong")
