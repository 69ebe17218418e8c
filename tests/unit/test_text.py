"""Text as bytes: which files, in what order, what is held out, and the windows over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_parallel.data.text import TextData, find_files, name_fraction, usual_pattern
from hpc_parallel.data.windows import Windows
from hpc_parallel.worker.session import held_out_problem


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def bytes_of(part: Windows) -> bytes:
    return part.tokens.tobytes()


def test_the_standard_library_is_there_without_asking() -> None:
    data = TextData(sequence_length=128)
    names = find_files(None, pattern="*.py").matching
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not [name for name in names if "site-packages" in name or "/test" in name or "idlelib" in name]
    assert len(data.train) * 128 > 3_000_000
    assert len(data.validation) >= 256
    assert data.vocab_size == 256
    assert data.sample_shape == (128,)
    assert data.digest == TextData(sequence_length=128).digest


def test_held_out_files_are_chosen_by_name(tmp_path: Path) -> None:
    texts = {f"file{i}": f"<{i}>" * 40 for i in range(30)}
    folder = write(tmp_path, **texts)
    held_out = {name for name in texts if name_fraction(f"{name}.txt") <= 0.2}
    assert 0 < len(held_out) < 15
    data = TextData(path=str(folder), pattern="*.txt", sequence_length=8, validation_share=0.2)
    in_order = sorted(texts)
    assert bytes_of(data.validation) == "".join(texts[n] for n in in_order if n in held_out).encode()
    assert bytes_of(data.train) == "".join(texts[n] for n in in_order if n not in held_out).encode()
    write(folder, file99="new text " * 20)
    more = TextData(path=str(folder), pattern="*.txt", sequence_length=8, validation_share=0.2)
    assert bytes_of(data.validation) in bytes_of(more.validation)
    assert more.digest != data.digest


def test_few_files_hold_out_one_and_one_file_its_end(tmp_path: Path) -> None:
    folder = write(tmp_path, a="a" * 50, b="b" * 50)
    data = TextData(path=str(folder), pattern="*.txt", sequence_length=8, validation_share=0.0001)
    assert {bytes_of(data.train), bytes_of(data.validation)} == {b"a" * 50, b"b" * 50}
    text = bytes(range(100))
    (folder / "one.bin").write_bytes(text)
    single = TextData(path=str(folder / "one.bin"), sequence_length=8, validation_share=0.2)
    assert bytes_of(single.train) + bytes_of(single.validation) == text
    assert len(bytes_of(single.validation)) == 20


def test_no_more_is_read_than_asked(tmp_path: Path) -> None:
    folder = write(tmp_path, a="a" * 50, b="b" * 50, c="c" * 50)
    data = TextData(path=str(folder), pattern="*.txt", sequence_length=4, max_bytes=70)
    assert sorted(bytes_of(data.train) + bytes_of(data.validation)) == sorted(b"a" * 50 + b"b" * 20)


def test_every_token_but_the_first_is_a_target_once() -> None:
    windows = Windows(np.arange(31, dtype=np.uint8), 5, 256, "training")
    assert len(windows) == 6
    inputs, targets = windows.batch(np.arange(6))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == list(range(30))
    assert targets.flatten().tolist() == list(range(1, 31))
    inputs, targets = windows.batch(np.array([4, 0]))
    assert inputs.tolist() == [[20, 21, 22, 23, 24], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[21, 22, 23, 24, 25], [1, 2, 3, 4, 5]]


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, a="a" * 50, b="b" * 5)
    with pytest.raises(ValueError, match=r"data\.sequence_length = 8 needs 9 tokens, but the .* part has 5"):
        TextData(path=str(folder), pattern="*.txt", sequence_length=8)
    with pytest.raises(ValueError, match=r"no file matches data\.pattern = \*\.md"):
        TextData(path=str(folder), pattern="*.md")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("日本語".encode(), "*.txt"),
        (("x" + "日本語" * 2000).encode(), "*.txt"),  # 4,096 bytes end inside a character
        ("Grüße".encode("latin-1"), None),
        (b"a\0b", None),
    ],
    ids=["short", "cut", "latin-1", "binary"],
)
def test_text_in_utf_8_is_suggested(tmp_path: Path, content: bytes, pattern: str | None) -> None:
    """A cut inside a character was taken for a file that is not text."""
    (tmp_path / "a.txt").write_bytes(content)
    assert usual_pattern(tmp_path) == pattern


def test_a_suggestion_does_not_depend_on_the_order_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpc_parallel.data.text._MOST_EXAMPLES", 1)
    for number in range(9, -1, -1):
        (tmp_path / f"f{number}").mkdir()
        (tmp_path / f"f{number}" / f"a.x{number}").write_text("text")
    assert usual_pattern(tmp_path) == "*.x0"


def warning_of(data: TextData, share: Any, *, target: str = "hpc_parallel.data.text.TextData") -> str | None:
    return held_out_problem(data, settings={"_target_": target, "validation_share": share})


def test_more_than_twice_the_share_held_out_is_said(tmp_path: Path) -> None:
    """The name of a large file may put nearly all of the text into the validation part."""
    large, small = sorted(("a", "b"), key=lambda name: name_fraction(f"{name}.txt"))  # the first is held out
    folder = write(tmp_path, **{large: "x" * 901, small: "y" * 101})
    data = TextData(path=str(folder), pattern="*.txt", sequence_length=10)
    assert bytes_of(data.validation) == b"x" * 901
    assert (warning_of(data, 0.05) or "").startswith("90 of 100 samples (90.0%) are held out")
    assert (
        warning_of(data, 0.45) is warning_of(data, None) is warning_of(data, "5%", target="mine.Data") is None
    )
    whole = TextData(path=str(folder / f"{large}.txt"), sequence_length=10)
    assert warning_of(whole, 0.05) is None
