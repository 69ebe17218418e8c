"""What others may write is not run: folders and links on the way to a run, and what unpickles."""

from __future__ import annotations

import ast
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.shadowing import is_own_group
from tests.composed import prepared

ROOT = Path(__file__).resolve().parents[2]
STRANGER = 12345  # a user and a group without a name here


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """One that others can enter: pytest's own lies behind a closed folder, where all is well."""
    with tempfile.TemporaryDirectory() as made:
        path = Path(made).resolve()
        path.chmod(0o755)
        if not all(parent.stat().st_mode & 0o011 for parent in path.parents):
            pytest.skip(f"{path} lies behind a closed folder")
        yield path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above" / "run"
    made.mkdir(parents=True)
    for path in (made.parent, made):
        path.chmod(0o755)
    return made


def test_the_users_own_folder_is_trusted(folder: Path) -> None:
    require_private(folder)  # under /tmp, which anyone may write and which is sticky
    with pytest.raises(FileNotFoundError):
        require_private(folder / "none")


@pytest.mark.parametrize("place", ["above", "above/run", "above/run/file"])
@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_place_that_others_may_write_is_named(folder: Path, tmp_path: Path, place: str, mode: int) -> None:
    (folder / "file").touch(mode=0o644)
    (tmp_path / place).chmod(mode)
    with pytest.raises(UntrustedError) as refused:
        require_private(folder / "file")
    assert str(refused.value) == (
        f"{tmp_path / place} (mode {mode:04o}) can be written by anyone. Try: chmod go-w {tmp_path / place}"
    )
    (tmp_path / place).chmod(mode & ~0o022)  # the mend
    require_private(folder / "file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_group_of_others_may_not_write(folder: Path) -> None:
    os.chown(folder.parent, -1, STRANGER)
    folder.parent.chmod(0o775)
    with pytest.raises(UntrustedError, match=f"can be written by the group {STRANGER}"):
        require_private(folder)
    folder.parent.chmod(0o755)
    require_private(folder)


def test_a_group_of_the_users_own_is_the_user(folder: Path) -> None:
    """As `useradd` makes them, with a umask of 002: all that the user makes is group-writable."""
    if not is_own_group(os.getgid()):
        pytest.skip("this user's group has another name")
    folder.chmod(0o775)
    require_private(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("place", ["above", "above/run"])
def test_anothers_folder_is_not_trusted(folder: Path, tmp_path: Path, place: str) -> None:
    os.chown(tmp_path / place, STRANGER, -1)
    with pytest.raises(UntrustedError, match=f"{place} belongs to user {STRANGER}"):
        require_private(folder)


def test_a_sticky_folder_keeps_its_entries_and_not_itself(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    require_private(folder)
    with pytest.raises(UntrustedError, match=r"above \(mode 1777\) can be written by anyone"):
        require_private(folder.parent)


def test_a_closed_folder_protects_its_contents(folder: Path) -> None:
    folder.chmod(0o777)
    folder.parent.chmod(0o700)
    require_private(folder)
    folder.parent.chmod(0o710)  # the group may pass
    with pytest.raises(UntrustedError, match=r"run \(mode 0777\)"):
        require_private(folder)


def test_a_link_is_judged_by_where_it_lies_and_where_it_leads(folder: Path, tmp_path: Path) -> None:
    """Who may write a link's folder decides where it leads; who may write its target, what is there."""
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    (open_folder / "link").symlink_to(folder)
    require_private(open_folder / "link")
    open_folder.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"{open_folder} "):
        require_private(open_folder / "link")
    (tmp_path / "second").symlink_to("open/link")  # relative, through another
    with pytest.raises(UntrustedError, match=f"{open_folder} "):
        require_private(tmp_path / "second")
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(UntrustedError, match="too many links"):
        require_private(tmp_path / "round")


def test_dots_lead_up(folder: Path) -> None:
    folder.chmod(0o777)
    require_private(folder.parent)
    with pytest.raises(UntrustedError, match=r"run \(mode 0777\)"):
        require_private(folder / ".." / "run")


def test_slurm_gets_no_payload_that_others_could_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpc_parallel.run import main

    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.chdir(shared)
    monkeypatch.setattr("sys.argv", ["run"])
    words = ["launcher=slurm", "run_dir=mine", "launcher.snapshot=false"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert f"{shared} (mode 0777) can be written by anyone. Try: chmod go-w {shared}" in told
    assert not (tmp_path / "asked").exists()
    assert not list(shared.iterdir())
    assert main([*words, "launcher.shared_folder=true"]) == 0
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("words", [[], ["-m", "seed=1,2", "hydra.sweep.dir=mine"]])
@pytest.mark.parametrize("launcher", ["local", "script"])
def test_every_launcher_refuses_a_folder_that_others_could_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    launcher: str, words: list[str],
) -> None:  # fmt: skip
    """A folder beside the printed path could be put in its place before sbatch or Python reads it."""
    from hpc_parallel.run import main

    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.chdir(shared)
    monkeypatch.setattr("sys.argv", ["run"])
    assert main([*words, f"launcher={launcher}", "launcher.snapshot=false"]) == 2
    printed = capsys.readouterr()
    assert f"{shared} (mode 0777) can be written by anyone. Try: chmod go-w {shared}" in printed.err
    assert "If you trust them: launcher.shared_folder=true" in printed.err
    assert "sbatch" not in printed.out
    assert not [path for path in shared.rglob("*") if path.is_file()]
    if launcher == "script":
        assert (
            main([*words, "launcher=script", "launcher.shared_folder=true", "launcher.snapshot=false"]) == 0
        )


def test_folders_that_a_run_makes_are_not_for_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    try:
        run = prepared("launcher.snapshot=false")
        run.folder.create()
    finally:
        os.umask(before)
    require_private(run.folder.path)


# What runs code that it reads, and the words that make it safe.
RUNS_WHAT_IT_READS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
SAFE_ONLY_WITH = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}
NEVER = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


@pytest.mark.parametrize("file", sorted((ROOT / "hpc_parallel").rglob("*.py")), ids=lambda file: file.stem)
def test_nothing_that_is_read_is_run(file: Path) -> None:
    tree = ast.parse(file.read_text())
    used = {node.attr for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle"}  # fmt: skip
    plain = used == {"Unpickler", "UnpicklingError"}  # a subclass that refuses every class by name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = {alias.name.partition(".")[0] for alias in node.names}
            assert not (imported - ({"pickle"} if plain else set())) & RUNS_WHAT_IT_READS
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in RUNS_WHAT_IT_READS
        elif isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
            assert name not in NEVER, name
            assert "shell" not in given, f"{name} through a shell"
            if name in SAFE_ONLY_WITH:
                keyword, value = SAFE_ONLY_WITH[name]
                assert ast.literal_eval(given[keyword]) is value, f"{name} without {keyword}={value}"
