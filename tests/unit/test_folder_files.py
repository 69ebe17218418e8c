"""The files of a folder of data: all of them, each once, and a word about those that can't be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hpc_parallel.__main__ import main as command
from hpc_parallel.data.folder_files import FolderFiles, list_files, name_matcher
from hpc_parallel.data.text import TextData, find_files, usual_pattern
from hpc_parallel.problems import ConfigError
from tests.composed import prepared
from tests.security.users import ATTACKER, VICTIM, call_as, give, needs_root, open_folder


def listed(root: Path, pattern: str = "*.txt") -> FolderFiles:
    return list_files(root, matches=name_matcher(pattern))


def write(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"<{file.name}>" * 20)


shared = pytest.fixture(open_folder)


@pytest.fixture
def root(shared: Path) -> Path:
    """A folder with two files and a link to a folder of two more."""
    write(shared / "data/a.txt", shared / "data/deep/b.txt")
    write(shared / "else/c.txt", shared / "else/deep/d.txt")
    (shared / "data/0-linked").symlink_to(shared / "else")
    return shared / "data"


NAMES = ["0-linked/c.txt", "0-linked/deep/d.txt", "a.txt", "deep/b.txt"]


def test_the_target_of_each_link_is_listed_once(root: Path) -> None:
    (root / "0-again.txt").symlink_to("a.txt")
    (root / "0-deep").symlink_to("deep")
    (root / "loop").symlink_to("..")
    (root / "deep/up").symlink_to(root)
    (root / "z.txt").symlink_to(root.parent / "else/e.txt")
    write(root.parent / "else/e.txt")
    names = [*NAMES[:2], "0-linked/e.txt", *NAMES[2:]]
    found = listed(root)
    assert (list(found.matching), found.problems) == (names, [])
    assert {name: file.read_text() for name, file in found.matching.items()} == {
        name: f"<{Path(name).name}>" * 20 for name in names
    }


def test_text_and_tokenize_read_behind_links(root: Path, tmp_path: Path) -> None:
    """A linked folder was left out without a word."""
    assert command(["tokenize", str(root), "--output", str(tmp_path / "t.npy")]) == 0
    tokens = np.load(tmp_path / "t.npy").astype(np.uint8).tobytes()
    files = [root / name for name in NAMES]
    assert tokens == b"".join(file.read_bytes() for file in files)
    data = TextData(path=str(root), pattern="*.txt", sequence_length=8)
    assert len(data.train.tokens) + len(data.validation.tokens) == len(tokens)
    for file in (root / "a.txt", root / "deep/b.txt"):
        file.rename(root.parent / "else" / file.name)
    assert usual_pattern(root) == "*.txt"


def test_what_a_run_leaves_out_is_named(root: Path) -> None:
    write(root / "B.TXT", root / "c.txt.gz", root / "deep/d.gz", root / "README")
    words = ("data=text", f"data.path={root}", "data.sequence_length=8", "launcher=local")
    notes = prepared(*words, "data.pattern=*.txt", "data.max_bytes=100").notes
    assert f"warning     data.path={root}: 4 files do not match data.pattern=*.txt and are left out: " \
        "2 .gz, 1 .TXT, 1 without a suffix." in notes  # fmt: skip
    assert f"warning     data.path={root}: only the first 100 of 560 bytes are read. For all, add " \
        "data.max_bytes=560." in notes  # fmt: skip
    notes = prepared(*words, "data.pattern=*", "data.max_bytes=10_000").notes
    assert not [note for note in notes if "data.path" in note]


def test_tokenize_names_what_it_leaves_out(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root / "c.md")
    assert command(["tokenize", str(root), "--output", str(root / "t.npy")]) == 0
    assert (
        f"{root}: 1 file does not match --pattern *.txt and is left out: 1 .md.\n" in capsys.readouterr().out
    )


def test_a_link_that_leads_nowhere_is_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a node where a file system is missing, its data was left out."""
    (root / "notes.so").symlink_to("libnotes.so.1")  # neither text nor a folder
    (root / ".#a.txt").symlink_to("alice@host.12:345")
    assert listed(root).problems == []
    (root / "part-2").symlink_to("/not/mounted")
    (root / "c.txt").symlink_to("c.txt")
    reasons = [
        f"the link {root}/c.txt can't be followed: {os.strerror(40)}",
        f"the link {root}/part-2 can't be followed: what it leads to is missing",
    ]
    assert listed(root).problems == reasons
    assert command(["tokenize", str(root), "--output", str(root / "t.npy")]) == 2
    assert capsys.readouterr().err.splitlines() == [f"{reason}." for reason in reasons]
    with pytest.raises(ValueError, match=r"c\.txt can't be followed: .* \(and 1 more\)"):
        TextData(path=str(root), pattern="*.txt", sequence_length=8)
    with pytest.raises(ConfigError, match=r"c\.txt can't be followed"):
        prepared("data=text", f"data.path={root}", "data.pattern=*.txt", "launcher=local")


@needs_root
@pytest.mark.processes
def test_what_the_user_may_not_read_is_named(root: Path) -> None:
    (root / "closed").mkdir(mode=0o700)
    (root / "b.txt").touch(mode=0o600)
    (root / "b.md").touch(mode=0o600)
    problems = call_as(VICTIM, lambda: [*listed(root).problems, *listed(root / "b.txt").problems])
    assert problems == [
        f"{root}/b.txt can't be read: you have no permission",
        f"{root}/closed can't be listed: Permission denied",
        f"{root}/b.txt can't be read: you have no permission",
    ]


@needs_root
@pytest.mark.processes
def test_a_link_of_another_user_leads_to_files_of_that_user_only(root: Path) -> None:
    """In a shared folder, it could lead to a private file of the user who trains."""
    for name, owner in (("hers.txt", ATTACKER), ("his.txt", VICTIM)):
        write(root.parent / name)
        give(root.parent / name, owner)
        (root / name).symlink_to(root.parent / name)
        os.lchown(root / name, ATTACKER, ATTACKER)
    found = call_as(VICTIM, lambda: listed(root))
    assert list(found.matching) == [*NAMES, "hers.txt"]
    (problem,) = found.problems
    assert problem.startswith(f"{root}/his.txt is a link that ")


def test_patterns_of_paths(root: Path) -> None:
    assert list(listed(root, "deep/*.txt").matching) == ["0-linked/deep/d.txt", "deep/b.txt"]
    assert list(listed(root, "**/*.txt").matching) == NAMES
    for pattern in ("a/**/*.txt", ""):
        with pytest.raises(ValueError, match=r"\*\* can only stand|empty pattern"):
            name_matcher(pattern)


def test_a_folder_without_a_match_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"no file matches data\.pattern = \*\.md"):
        find_files(str(root), pattern="*.md")
