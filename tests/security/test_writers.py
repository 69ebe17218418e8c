"""Every file is written by record/safe_write: under a name that nobody can guess, through no link."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hpc_parallel
from hpc_parallel.commands import tokenize
from hpc_parallel.proof import task as proof  # noqa: F401  (what a forked child imports it could not read)
from hpc_parallel.record.safe_write import open_append, replacing
from tests.security.users import ATTACKER, VICTIM, call_as, give, needs_root

PACKAGE = Path(hpc_parallel.__file__).parent
# Functions that make or fill a file by its name, by the last part of what is called.
WRITERS = {
    "write_text", "write_bytes", "touch", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryFile", "mknod",
    "copy", "copy2", "copyfile", "copytree", "copyfileobj", "move", "save", "savez", "savez_compressed",
    "savetxt", "savefig", "save_file", "to_csv", "to_json", "to_file", "dump", "ZipFile", "make_archive",
    "FileHandler", "SummaryWriter", "link", "symlink", "symlink_to", "hardlink_to", "mkfifo", "memmap",
    "open_memmap", "export_chrome_trace", "_dump_snapshot", "from_file", "dump_traceback_later",
}  # fmt: skip
OWN = {"write_text", "write_bytes"}  # names that safe_write has too: as functions, not as methods
ALLOWED = {
    ("data/parquet.py", "from_file"): "maps an Arrow file to read it",
    ("data/tokens.py", "open_memmap"): "reads: mode r",
    ("record/snapshot.py", "copy2"): "into the run's own 0700 folder, which was empty",
    ("record/snapshot.py", "link"): "into the run's own 0700 folder, which was empty",
    ("record/snapshot.py", "symlink_to"): "into the run's own 0700 folder, which was empty",
    ("job_context.py", "symlink"): "a number in the run's own 0700 folder, which nobody follows",
    ("launch/run_files.py", "dump"): "yaml.dump to a text",
    ("report/drawing.py", "savefig"): "to memory",
    ("report/page.py", "to_csv"): "makes a text",
    ("record/safe_read.py", "open"): "flags that read",
    ("shell.py", "open"): "/dev/null",
    ("sweep/arrays.py", "symlink_to"): "into the sweep's own 0700 folder, which was empty",
    ("failure/flight_recorder.py", "mkfifo"): "in a 0700 folder of its own",
    ("failure/flight_recorder.py", "open"): "that pipe",
    ("training/saver.py", "save"): "torch's streams, into a checkpoint folder of the run's own 0700 folder",
    ("failure/notify.py", "open"): "the address of a webhook",
    ("failure/notify.py", "TemporaryFile"): "has no name, and is gone when it is closed",
    ("record/checkpoint_index.py", "TemporaryFile"): "has no name, and is gone when it is closed",
    ("machine/host_facts.py", "TemporaryFile"): "has no name, and is gone when it is closed",
    ("measure/storage_rates.py", "TemporaryFile"): "has no name, and is gone when it is closed",
    ("torch_internals.py", "_dump_snapshot"): "torch's, into the run's own 0700 folder",
    ("training/trainer.py", "save"): "asks the saver",
    ("torch_internals.py", "dump"): "in memory",
    ("start/signed_store.py", "dump"): "in memory",
    ("training/export_weights.py", "from_file"): "maps the descriptor of replacing()",
    ("proof/task.py", "savez"): "to the file of replacing()",
    ("training/writers.py", "SummaryWriter"): "names of its own, in the run's own 0700 folder",
}


def writers(source: str) -> Iterator[str]:
    """The names of the calls that write a file, other than those of safe_write."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in OWN and isinstance(function, ast.Name):
            continue
        if name in WRITERS and ast.unparse(function) not in ("copy.copy", "json.dumps"):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            if name == "move" and ast.unparse(function) != "shutil.move":
                continue
            if name not in ("copy", "link") or arguments:  # a copy of a list has none
                yield name
        if name in ("open", "fdopen") and not _reads(call):
            yield name


def _reads(call: ast.Call) -> bool:
    """Whether an `open` has a mode, or flags, that can't write; of a descriptor its maker decides."""
    function = ast.unparse(call.func)
    if function.endswith("fdopen"):
        return True
    if function == "os.open":
        return "O_RDONLY" in ast.unparse(call.args[1]) and "O_CREAT" not in ast.unparse(call.args[1])
    if function.endswith(("Session.open", "safe_open", "self._open", "webbrowser.open")):
        return True
    place = 1 if isinstance(call.func, ast.Name) else 0
    modes = [*call.args[place : place + 1], *(word.value for word in call.keywords if word.arg == "mode")]
    return all(isinstance(mode, ast.Constant) and not set(str(mode.value)) & set("wax+") for mode in modes)


def test_no_code_writes_files_by_itself() -> None:
    found = {
        (str(file.relative_to(PACKAGE)), name)
        for file in PACKAGE.rglob("*.py")
        if file.name != "safe_write.py"
        for name in writers(file.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "path.open('wb')", "open(path, 'a')", "open(path, mode=how)", "path.write_text('x')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)", "np.savez(path, x)", "shutil.copy2(a, b)",
        "path.open('r+')", "tempfile.mkstemp()", "torch.save(x, path)", "json.dump(x, file)", "path.touch()",
    ],
)  # fmt: skip
def test_the_scan_finds(line: str) -> None:
    assert list(writers(line))


@pytest.mark.parametrize(
    "line",
    [
        "path.open()", "path.open('rb')", "open(path, encoding='utf-8')", "os.open(path, os.O_RDONLY)",
        "write_text(path, 'x')", "values.copy()", "json.dumps(x)",
    ],
)  # fmt: skip
def test_the_scan_passes(line: str) -> None:
    assert not list(writers(line))


@needs_root
def test_tokens_follow_no_planted_link(shared: Path) -> None:
    """The attacker knows the victim's next process ids, and owns the sticky folder that both write."""
    private = shared / "private"
    private.write_text("secret")
    give(private, VICTIM)
    private.chmod(0o600)
    data = shared / "data"
    data.mkdir()
    (shared / "text.txt").write_text("some text")

    def plant() -> None:
        for pid in range(os.getpid(), os.getpid() + 400):
            for name in (f".tokens.npy.{pid}", f".tokens.npy.{pid}.json", f".tokens.npy.{pid}.npy"):
                (data / name).symlink_to(private)

    give(data, ATTACKER)
    data.chmod(0o1777)
    call_as(ATTACKER, plant)
    planted = len(list(data.iterdir()))
    words = [str(shared / "text.txt"), "--output", str(data / "tokens.npy")]
    assert call_as(VICTIM, lambda: tokenize.main(words)) == 0
    assert private.read_text() == "secret"
    assert np.load(data / "tokens.npy").astype(np.uint8).tobytes() == b"some text"
    assert len(list(data.iterdir())) == planted + 2


@needs_root
def test_a_planted_link_of_the_same_name_is_not_followed(shared: Path) -> None:
    """In a folder that is not sticky, where the link can be replaced."""
    private = shared / "private"
    private.write_text("secret")
    give(private, VICTIM)
    folder = shared / "open"
    folder.mkdir()
    folder.chmod(0o777)
    call_as(ATTACKER, lambda: (folder / "agent.err").symlink_to(private))
    call_as(ATTACKER, lambda: (folder / "page.html").symlink_to(private))

    def append() -> None:
        os.close(open_append(folder / "agent.err"))

    def replace() -> None:
        with replacing(folder / "page.html", mode=0o666) as file:
            file.write(b"page")

    with pytest.raises(AssertionError, match="Too many levels of symbolic links"):
        call_as(VICTIM, append)
    call_as(VICTIM, replace)
    assert private.read_text() == "secret"
    assert (folder / "page.html").read_text() == "page"
    assert not (folder / "page.html").is_symlink()


def test_a_temporary_name_is_never_used_again(tmp_path: Path) -> None:
    """An attacker who saw the names of earlier writes has put links there."""
    private = tmp_path / "private"
    private.write_text("secret")
    folder = tmp_path / "open"
    folder.mkdir()
    for _ in range(20):
        before = set(folder.iterdir())
        with replacing(folder / "page.html") as file:
            (temporary,) = set(folder.iterdir()) - before
            file.write(b"page")
        temporary.symlink_to(private)
    assert private.read_text() == "secret"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_exported_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    (tmp_path / "text.txt").write_text("some text")
    before = os.umask(umask)
    try:
        assert tokenize.main([str(tmp_path / "text.txt"), "--output", str(tmp_path / "tokens.npy")]) == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("tokens.*")}
    assert modes == {"tokens.npy": mode, "tokens.json": mode}
