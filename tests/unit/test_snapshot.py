"""The source kept with a run: what git knows and what is new, the state at submission, imported first."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hpc_parallel.config.task_schema import ScriptConfig
from hpc_parallel.launch.prepare import _kept_notes
from hpc_parallel.problems import ConfigError
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.snapshot import plan_snapshot
from hpc_parallel.record.sweep_folder import Sweep, write_sweep


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A user's checkout: a tracked file that was changed since, a new one, an ignored one, a deleted one."""
    root = tmp_path / "mine"
    (root / "sub").mkdir(parents=True)
    for name in ("tracked_one.py", "sub/deep_one.py", "deleted.py"):
        (root / name).write_text("value = 1\n")
    (root / ".gitignore").write_text("*.bin\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "tracked_one.py").write_text("value = 2\n")
    (root / "new_one.py").write_text("value = 3\n")
    (root / "weights.bin").write_bytes(b"0" * 100)
    (root / "deleted.py").unlink()
    return root


def copied(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(folder)) for path in files}


def linked(folder: Path) -> dict[str, Path]:
    links = (path for path in folder.rglob("*") if path.is_symlink())
    return {str(path.relative_to(folder)): path.readlink() for path in links}


def test_it_contains_tracked_and_unignored_files(checkout: Path, tmp_path: Path) -> None:
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    assert copied(tmp_path / "code" / "mine") == {
        ".gitignore", "tracked_one.py", "sub/deep_one.py", "new_one.py",
    }  # fmt: skip
    assert (tmp_path / "code/mine/tracked_one.py").read_text() == "value = 2\n"
    assert linked(tmp_path / "code" / "mine") == {"weights.bin": checkout / "weights.bin"}


IGNORED = {  # name -> whether it is copied (True), a link (False) or neither (None)
    "package/_version.py": True, "package/fast.cpython-311-x86_64-linux-gnu.so": True,
    "package/generated/messages.py": True, "package/generated/table.npy": False,
    "made/__init__.py": True, "made/sub/deep.py": True, "settings_local.py": True,
    "build/lib/package/__init__.py": None, "data/train/0.npy": None, "package/weights.bin": False,
    ".env": None, ".venv/lib.py": None, "venv/lib.py": None, "package/__pycache__/old.py": None,
    "runs/earlier.txt": None, ".hidden.bin": False,
}  # fmt: skip


def test_modules_that_git_ignores_are_copied_and_the_rest_are_links(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".gitignore").write_text(
        "_version.py\n*.so\ngenerated\nmade/\nsettings_local.py\nbuild/\ndata/*\n*.bin\n.env\n.venv\nvenv\n"
        "__pycache__\nruns\n"
    )
    for name in [*IGNORED, "venv/pyvenv.cfg"]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    (checkout / "package" / "__init__.py").write_text("from package._version import VERSION\n")
    code = checkout / "runs" / "1" / "code"
    kept = plan_snapshot(code, working_directory=checkout)
    kept.take()
    known = {".gitignore", "tracked_one.py", "sub/deep_one.py", "new_one.py", "package/__init__.py"}
    assert copied(code / "mine") == known | {name for name, is_copied in IGNORED.items() if is_copied}
    links = {name for name, is_copied in IGNORED.items() if is_copied is False}
    links |= {"build", "data", "weights.bin"}
    assert linked(code / "mine") == {name: checkout / name for name in links}
    assert kept.left_out == (".env",)  # hidden from a script, so it is named


def test_a_module_that_git_ignores_and_that_is_too_large_is_a_link_and_named(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / ".gitignore").write_text("*.bin\n*.so\n")
    for name, megabytes in (("small.so", 1), ("large.so", 11)):
        (checkout / name).write_bytes(b"0" * (megabytes * 2**20))
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout, most_mb=12)
    kept.take()
    assert "small.so" in copied(tmp_path / "code/mine")
    assert linked(tmp_path / "code/mine")["large.so"] == checkout / "large.so"
    text = "(larger than launcher.snapshot_mb allows): later edits change the run"
    assert list(kept.notes) == [f"not kept    {checkout / 'large.so'} {text}"]


def test_too_many_files_that_git_ignores_are_named_and_no_links(checkout: Path, tmp_path: Path) -> None:
    for number in range(2_000):
        (checkout / "sub" / f"{number}.bin").touch()
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout)
    assert kept.links[checkout] == {}
    text = "(git ignores more than 2,000 files): launcher.snapshot=false runs in place"
    assert list(kept.notes) == [f"not kept    {checkout} {text}"]


@pytest.mark.processes
def test_processes_import_the_kept_source(checkout: Path, tmp_path: Path) -> None:
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout / "sub")
    kept.take()
    (checkout / "sub" / "deep_one.py").write_text("value = 99\n")
    done = subprocess.run(
        [sys.executable, "-c", "import deep_one, hpc_parallel; print(deep_one.value, hpc_parallel.__file__)"],
        cwd=checkout / "sub", env=kept.variables({}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    value, package = done.stdout.split()
    assert value == "1"
    assert Path(package).is_relative_to(tmp_path / "code")


def test_planning_writes_nothing(checkout: Path, tmp_path: Path) -> None:
    plan_snapshot(tmp_path / "code", working_directory=checkout)
    assert not (tmp_path / "code").exists()


def test_more_than_source_is_refused_with_its_largest_file(checkout: Path, tmp_path: Path) -> None:
    (checkout / "data").mkdir()
    (checkout / "data" / "big one.csv").write_bytes(b"0" * (9 * 2**20))
    with pytest.raises(ConfigError) as refused:
        plan_snapshot(tmp_path / "code", working_directory=checkout, most_mb=7)
    (problem,) = map(str, refused.value.problems)
    assert problem.startswith("launcher.snapshot_mb = 7 (MiB) is less than what git knows in ")
    assert "data/big one.csv has 9.0" in problem
    # both mends are legal: the larger limit, and the pattern
    (more,) = re.findall(r"Try launcher.snapshot_mb=(\d+)\.", problem)
    (pattern,) = re.findall(r"launcher.snapshot_exclude=\['(.*?)'\]", problem)
    plan_snapshot(tmp_path / "code", working_directory=checkout, most_mb=int(more))
    plan_snapshot(tmp_path / "code", working_directory=checkout, most_mb=7, exclude=[pattern])


def elf(kind: int) -> bytes:
    """The head of a 64-bit little-endian ELF file of a type, and its machine (man 5 elf)."""
    return b"\x7fELF" + bytes([2, 1, 1]) + bytes(9) + kind.to_bytes(2, "little") + b"\x3e\0"


def test_the_memory_of_a_process_that_was_aborted_is_no_source(checkout: Path, tmp_path: Path) -> None:
    for folder in (checkout, tmp_path / "no_git"):
        folder.mkdir(exist_ok=True)
        for name, content in (("core", elf(4)), ("core.4711", elf(4)), ("core.12", elf(3)), ("core.py", b"")):
            (folder / name).write_bytes(content)
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub/core").write_text("of the matter")
        code = tmp_path / f"code_{folder.name}"
        plan_snapshot(code, working_directory=folder).take()
        kept = {name for name in copied(code / folder.name) if "core" in name}
        assert kept == {"core.12", "core.py", "sub/core"}


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("*_one.py", {".gitignore"}),
        ("sub", {".gitignore", "tracked_one.py", "new_one.py"}),
        ("sub/", {".gitignore", "tracked_one.py", "new_one.py"}),
        ("sub/*.py", {".gitignore", "tracked_one.py", "new_one.py"}),
        ("tracked*", {".gitignore", "sub/deep_one.py", "new_one.py"}),
        ("one.py", {".gitignore", "sub/deep_one.py", "tracked_one.py", "new_one.py"}),
    ],
)
def test_patterns_leave_files_and_folders_out(
    checkout: Path, tmp_path: Path, pattern: str, left: set[str]
) -> None:
    plan_snapshot(tmp_path / "code", working_directory=checkout, exclude=[pattern]).take()
    assert copied(tmp_path / "code" / "mine") == left
    copy = tmp_path / "code" / "mine"
    for name in {".gitignore", "tracked_one.py", "sub/deep_one.py", "new_one.py"} - left:
        assert (copy / name).resolve() == checkout / name  # by a link to the file or a folder above it


def test_patterns_that_leave_nothing_are_refused(checkout: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"leaves nothing of .*mine.* Try launcher.snapshot_exclude=\[\]"):
        plan_snapshot(tmp_path / "code", working_directory=checkout, exclude=["*.py", ".git*"])


def test_folders_of_the_import_path_are_kept(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of the user's own may lie in another checkout than the working directory's."""
    monkeypatch.syspath_prepend(checkout / "sub")
    kept = plan_snapshot(tmp_path / "code", working_directory=tmp_path)
    assert tmp_path / "code" / "mine" / "sub" in kept.import_path
    kept.take()
    assert (tmp_path / "code/mine/sub/deep_one.py").is_file()


def test_a_script_file_imports_what_python_imports_and_not_the_working_directory(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python puts the script's own folder first by itself, and the copies of PYTHONPATH follow."""
    entries = [entry for entry in sys.path if "tests" not in Path(entry).parts]  # other tests add theirs
    monkeypatch.setattr(sys, "path", entries)
    kept = plan_snapshot(
        tmp_path / "code", working_directory=checkout, also=[checkout / "sub"], imports_here=False
    )
    (package,) = [copy for root, copy in kept.copies.items() if root != checkout]
    assert kept.import_path == (package,)
    assert "sub/deep_one.py" in kept.files[checkout]
    assert kept.variables({"PYTHONPATH": "x"}) == {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{package}:x"}
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    monkeypatch.syspath_prepend(checkout)
    (checkout / "sched.py").touch()
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout, imports_here=False)
    assert set(kept.import_path) == {package, tmp_path / "code/mine"}


def test_folders_of_editable_packages_are_kept_unless_they_hide_a_module_of_python(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks there last, and into the copies first. setuptools' finder is not on `sys.path`."""
    finder = types.ModuleType("__editable___mine_1_0_finder")
    finder.MAPPING = {"sub": f"{checkout}/sub", "other.name": f"{tmp_path}/elsewhere"}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, finder.__name__, finder)
    kept = plan_snapshot(tmp_path / "code", working_directory=tmp_path, imports_here=False)
    assert tmp_path / "code/mine" in kept.import_path
    assert list(kept.notes) == []
    (checkout / "sched.py").touch()
    kept = plan_snapshot(tmp_path / "code", working_directory=tmp_path, imports_here=False)
    assert tmp_path / "code/mine" not in kept.import_path
    text = "(sched.py in it would hide Python's own): later edits change the run"
    assert list(kept.notes) == [f"not kept    {checkout} {text}"]


def test_links_lead_where_they_led(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "o.py").write_text("value = 7\n")
    (checkout / "within").symlink_to("sub")
    (checkout / "absolute").symlink_to(checkout / "sub")
    (checkout / "far").symlink_to("../outside")
    (checkout / "file.py").symlink_to("tracked_one.py")
    (checkout / "alone.py").symlink_to("../outside/o.py")
    (checkout / "broken").symlink_to("nowhere")
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    copy = tmp_path / "code" / "mine"
    assert (copy / "within").resolve() == copy / "sub"
    assert (copy / "absolute").resolve() == copy / "sub"
    assert (copy / "far" / "o.py").read_text() == "value = 7\n"
    assert (copy / "file.py").resolve() == copy / "tracked_one.py"  # Python imports from where a link leads
    assert (copy / "alone.py").read_text() == "value = 7\n"
    assert not (copy / "alone.py").is_symlink()
    assert not (copy / "broken").is_symlink()


def test_a_kept_source_is_kept_again_and_nothing_of_today(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rerun plans it: the import path leads into a run's code, the working directory is today's."""
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    first.create()
    first.config.write_text("nodes: 1\n")
    before = plan_snapshot(first.code, working_directory=checkout / "sub")
    before.take()
    (checkout / "sub" / "deep_one.py").write_text("value = 99\n")
    monkeypatch.setattr(sys, "path", [*map(str, before.import_path), *sys.path])
    again = plan_snapshot(second.code, working_directory=checkout / "sub")
    again.take()
    assert again.origin == first
    assert copied(second.code) == copied(first.code)
    assert linked(second.code) == linked(first.code) != {}
    assert (second.code / "mine/sub/deep_one.py").read_text() == "value = 1\n"
    assert again.import_path == tuple(
        second.code / place.relative_to(first.code) if place.is_relative_to(first.code) else place
        for place in before.import_path
    )


@pytest.fixture
def loose(tmp_path: Path) -> Path:
    """A user's folder without git."""
    root = tmp_path / "loose"
    for name in ("model_one.py", "parts/part_one.py", ".env/lib.py", "env/lib.py", "parts/words.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("value = 1\n")
    (root / "env/pyvenv.cfg").touch()
    (root / "weights.bin").write_bytes(b"0" * 2**21)
    root.chmod(0o700)
    return root


@pytest.mark.parametrize("git_is_there", [True, False])
def test_files_of_a_folder_without_git_are_kept(
    loose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git_is_there: bool
) -> None:
    if not git_is_there:
        monkeypatch.setenv("PATH", "")
    kept = plan_snapshot(tmp_path / "code", working_directory=loose)
    kept.take()
    assert copied(tmp_path / "code/loose") == {"model_one.py", "parts/part_one.py", "parts/words.txt"}
    assert linked(tmp_path / "code/loose") == {"weights.bin": loose / "weights.bin"}
    (loose / "model_one.py").write_text("value = 99\n")
    done = subprocess.run(
        [sys.executable, "-c", "import model_one; print(model_one.value)"], cwd=loose,
        env=kept.variables({}), capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1\n"
    assert list(kept.notes) == []


def test_a_folder_that_is_no_source_is_named(loose: Path, tmp_path: Path) -> None:
    for number in range(2_000):
        (loose / f"{number}.txt").touch()
    kept = plan_snapshot(tmp_path / "code", working_directory=loose)
    reason = "no git checkout, and more than 2,000 files"
    assert list(kept.notes) == [f"not kept    {loose} ({reason}): later edits change the run"]
    assert loose not in kept.copies
    assert kept.import_path[-1] == loose


def test_a_folder_that_others_can_write_is_not_kept(loose: Path, tmp_path: Path) -> None:
    loose.chmod(0o777)
    kept = plan_snapshot(tmp_path / "code", working_directory=loose)
    assert loose not in kept.copies
    reason = "(other users may write there; try chmod go-w): later edits change the run"
    assert list(kept.notes) == [f"not kept    {loose} {reason}"]
    (script,) = _kept_notes(ScriptConfig(file=str(loose / "model_one.py")), snapshot=kept)
    assert script == f"not kept    {loose}/model_one.py {reason}"  # it is neither ignored nor too large


def test_outside_a_checkout_only_the_package_is_kept(tmp_path: Path) -> None:
    kept = plan_snapshot(tmp_path / "code", working_directory=tmp_path)
    (root,) = kept.copies
    assert (root / "hpc_parallel").is_dir()
    assert kept.import_path[-1] == tmp_path


def test_earlier_runs_are_left_out(checkout: Path, tmp_path: Path) -> None:
    """A checkout that does not ignore runs/: each run would hold all before it."""
    for number in (1, 2):
        run = RunFolder(checkout / "runs" / "mine" / str(number))
        run.create()
        run.config.write_text("nodes: 1\n")
        plan_snapshot(run.code, working_directory=checkout).take()
    assert (checkout / "runs/mine/2/code/mine/new_one.py").is_file()
    assert not (checkout / "runs/mine/2/code/mine/runs").exists()


def test_sweeps_are_left_out(checkout: Path, tmp_path: Path) -> None:
    """But not a folder of source with a `sweep.json` of another program's."""
    sweep = checkout / "sweeps" / "1"
    sweep.mkdir(parents=True)
    write_sweep(sweep, Sweep(("-m",), "2026-11-22T01:00:00+00:00", None, (), ()))
    (sweep / "slurm.out").write_text("")
    (checkout / "sub" / "sweep.json").write_text('{"command": ["wandb"]}')
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    assert not (tmp_path / "code/mine/sweeps").exists()
    assert (tmp_path / "code/mine/sub/deep_one.py").is_file()


def test_documentation_is_left_out(checkout: Path, tmp_path: Path) -> None:
    """A module in docs/ may be an example's model; a package may have a folder docs of its own."""
    for name in ("docs/guide.md", "docs/images/one.png", "docs/example.py", "sub/docs/table.csv"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    assert {name for name in copied(tmp_path / "code" / "mine") if "docs" in name} == {
        "docs/example.py", "sub/docs/table.csv",
    }  # fmt: skip


def test_a_rerun_copies_links_and_not_what_they_lead_to(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else may have put a link into the code of a run that was unpacked here."""
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    first.create()
    first.config.write_text("nodes: 1\n")
    before = plan_snapshot(first.code, working_directory=checkout)
    before.take()
    (tmp_path / "private.txt").write_text("hunter2\n")
    (first.code / "mine" / "up").symlink_to("../../../private.txt")
    (first.code / "mine" / "there").symlink_to(tmp_path / "private.txt")
    monkeypatch.setattr(sys, "path", [*map(str, before.import_path), *sys.path])
    plan_snapshot(second.code, working_directory=checkout).take()
    assert {"up", "there"} <= linked(second.code / "mine").keys()
    assert not {"up", "there"} & copied(second.code / "mine")


@pytest.mark.parametrize("damaged", ["index", "submodule"])
def test_source_that_git_can_not_list_is_refused_and_not_left_out(
    checkout: Path, tmp_path: Path, damaged: str
) -> None:
    if damaged == "index":
        (checkout / ".git" / "index").write_bytes(b"damaged" * 9)
    else:
        git(checkout / "sub", "init", "-q")
        git(checkout / "sub", "commit", "-qm", "first", "--allow-empty")
        git(checkout, "rm", "-rq", "--cached", "sub")
        git(checkout, "add", "sub")
        (checkout / "sub" / ".git" / "index").write_bytes(b"damaged" * 9)
    with pytest.raises(ConfigError, match="git can't list the files of"):
        plan_snapshot(tmp_path / "code", working_directory=checkout)


def test_a_repository_in_a_checkout_is_a_link_and_named(checkout: Path, tmp_path: Path) -> None:
    (checkout / "vendored").mkdir()
    git(checkout / "vendored", "init", "-q")
    (checkout / "vendored" / "inner_one.py").touch()
    kept = plan_snapshot(tmp_path / "code", working_directory=checkout)
    kept.take()
    assert linked(tmp_path / "code/mine")["vendored"] == checkout / "vendored"
    text = "(a git checkout of its own): later edits change the run"
    assert list(kept.notes) == [f"not kept    {checkout / 'vendored'} {text}"]


def test_submodules_are_source_too(checkout: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "inner_one.py").write_text("value = 5\n")
    (inner / ".gitignore").write_text("_version.py\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "inner")):
        git(inner, *words)
    git(checkout, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner), "vendored")
    for name in ("_version.py", "new_one.py"):
        (checkout / "vendored" / name).touch()
    plan_snapshot(tmp_path / "code", working_directory=checkout).take()
    names = {"inner_one.py", "_version.py", "new_one.py"}
    assert {f"vendored/{name}" for name in names} <= copied(tmp_path / "code/mine")
