"""Parquet and Arrow files: the same samples as from an array, and refusals before the run starts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_parallel.data.table_files import find_files, read_columns, with_rows
from hpc_parallel.data.windows import Windows
from hpc_parallel.problems import ConfigError
from tests.composed import prepared

pytest.importorskip("datasets")
import pyarrow as pa
import pyarrow.parquet as pq

RANDOM = np.random.default_rng(0)
TEXTS = [RANDOM.integers(0, 200, size=size).tolist() for size in (3, 70, 0, 41, 128, 9)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(file: Path, columns: dict[str, Any]) -> Path:
    """A file of the kind that its name says."""
    table = pa.table(columns)
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pq.write_table(table, file, row_group_size=2)
    else:
        with pa.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)
    return file


def write_texts(folder: Path, ending: str) -> Path:
    for part in range(2):
        texts = pa.array(TEXTS[part * 3 : part * 3 + 3], pa.list_(pa.int32()))
        write(folder / f"{part}{ending}", {"input_ids": texts, "text": ["a"] * 3})
    return folder


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.usefixtures("cache")
def test_all_rows_are_one_row_of_tokens(tmp_path: Path, ending: str) -> None:
    from hpc_parallel.data.parquet import ParquetData

    folder = write_texts(tmp_path / "data", ending)
    data = ParquetData(path=str(folder), sequence_length=10, vocab_size=200, validation_share=0.2)
    tokens = np.concatenate([np.array(text, dtype=np.int64) for text in TEXTS])
    cut = round(len(tokens) * 0.8)
    for found, part in ((data.train, tokens[:cut]), (data.validation, tokens[cut:])):
        wanted = Windows(part, 10, 200, "wanted")
        assert len(found) == len(wanted)
        order = RANDOM.permutation(len(wanted))
        for one, other in zip(found.batch(order), wanted.batch(order), strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EDQUOT, "Disk quota exceeded"), errno.EDQUOT),  # of the library's writer
        (OSError("Not enough disk space. Needed: 9 GiB (generated)"), errno.ENOSPC),  # its own words
    ],
)
def test_a_full_cache_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, number: int
) -> None:
    """The library writes to the user's home, and its own message names no folder."""
    import datasets

    from hpc_parallel.data.parquet import open_rows

    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write_table", fail)
    files = find_files(str(write_texts(tmp_path / "rows", ".parquet")))
    with pytest.raises(OSError, match=r"Try export HF_DATASETS_CACHE=FOLDER on a larger disk") as full:
        open_rows(files, columns=["input_ids"])
    assert (full.value.errno, full.value.filename) == (number, str(tmp_path / "cache"))


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.usefixtures("cache")
def test_files_without_a_row_are_left_out(tmp_path: Path, ending: str) -> None:
    """Spark and pandas write them, also as the first file and without the type of the column."""
    from hpc_parallel.data.parquet import ParquetData

    folder = write_texts(tmp_path / "data", ending)
    whole = ParquetData(path=str(folder), sequence_length=10, vocab_size=200)
    empty = pa.array([], pa.list_(pa.int32()))
    for name in ("-", "1-", "9"):
        write(folder / f"{name}{ending}", {"input_ids": empty, "text": pa.array([], pa.string())})
    if ending == ".parquet":
        write(folder / f"99{ending}", {"input_ids": pa.array([], pa.null())})
    found = ParquetData(path=str(folder), sequence_length=10, vocab_size=200)
    assert found.digest == whole.digest
    words = ("data=parquet", f"data.path={folder}", "data.sequence_length=10", "data.vocab_size=256")
    prepared(*words, "launcher=local")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    from hpc_parallel.data.parquet import ParquetData

    write(tmp_path / "a.parquet", {"input_ids": pa.array([], pa.list_(pa.int32()))})
    words = ("data=parquet", f"data.path={tmp_path}", "data.sequence_length=10", "data.vocab_size=256")
    with pytest.raises(ConfigError, match=r"a.parquet has no row, nor has any other file"):
        prepared(*words)
    (tmp_path / "b.parquet").touch()
    with pytest.raises(ConfigError, match=r"b.parquet can't be read: .*0 bytes"):
        prepared(*words)
    with pytest.raises(
        ValueError, match=r"b.parquet can't be read: .*0 bytes"
    ):  # beyond those that are checked
        ParquetData(path=str(tmp_path), sequence_length=10, vocab_size=256)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.usefixtures("cache")
def test_rows_are_samples(tmp_path: Path, ending: str) -> None:
    from hpc_parallel.data.parquet import ParquetData

    images = RANDOM.normal(size=(20, 2, 3))
    labels = RANDOM.integers(0, 5, size=20)
    write(tmp_path / f"data{ending}", {"image": images.tolist(), "label": labels})
    data = ParquetData(path=str(tmp_path / f"data{ending}"), input="image", target="label")
    assert data.sample_shape == (2, 3)
    for part in (data.train, data.validation):
        positions = np.arange(len(part))
        places = part.indices(positions)  # type: ignore[attr-defined]
        inputs, targets = part.batch(positions)
        assert np.array_equal(inputs.numpy(), images[places])
        assert np.array_equal(targets.numpy(), labels[places])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            [[1, 2], [3]],
            r"training samples have the shape \[2\], but held-out samples have \[1\]|\[1\].*\[2\]",
        ),
        (
            [[1, 2], [3, None]],
            r"row 1 of .*data.arrow \(counted from 0\) is null or has a null in the column x",
        ),
        ([[1, 2], None], r"row 1 of .*data.arrow"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, column: list[Any], message: str) -> None:
    from hpc_parallel.data.parquet import ParquetData

    write(tmp_path / "data.arrow", {"x": pa.array(column, pa.list_(pa.int64())), "y": [1, 2]})
    with pytest.raises(ValueError, match=message):
        ParquetData(path=str(tmp_path), input="x", target="y")


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.usefixtures("cache")
def test_a_null_is_refused_with_its_file_and_row(tmp_path: Path, ending: str) -> None:
    """A null text was left out of the tokens without a word."""
    from hpc_parallel.data.parquet import ParquetData

    for name, texts in (("0", TEXTS), ("1", []), ("2", [*TEXTS[:4], None])):
        write(tmp_path / f"{name}{ending}", {"input_ids": pa.array(texts, pa.list_(pa.int32()))})
    with pytest.raises(ValueError, match=rf"row 4 of {tmp_path}/2{ending} \(counted from 0\) is null"):
        ParquetData(path=str(tmp_path), sequence_length=10, vocab_size=200)


def test_nulls_of_a_column_of_numbers_are_told_before_the_run_starts(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"input_ids": [1, 2]})
    write(tmp_path / "1.parquet", {"input_ids": [1, None, 2, 3, None]})
    assert f"data.input = input_ids names a column with 2 nulls in {tmp_path}/1.parquet" in told(
        f"data.path={tmp_path}", "data.sequence_length=1", "data.vocab_size=256"
    )


def test_all_files_below_a_folder_are_listed(tmp_path: Path) -> None:
    """Also behind links, with an ending in capitals, and beyond empty files."""
    root, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for file in (root / "a.parquet", root / "b.PARQUET", elsewhere / "c.parquet"):
        write(file.with_suffix(".parquet"), {"x": [1]}).rename(file)
    (root / "linked").symlink_to(elsewhere)
    assert find_files(str(root)) == [root / "a.parquet", root / "b.PARQUET", root / "linked/c.parquet"]
    write(root / "0.parquet", {"x": pa.array([], pa.int64())})
    assert with_rows(find_files(str(root)), most=1) == [root / "a.parquet"]
    assert read_columns(root / "b.PARQUET", ("x",))["x"].bounds == (1, 1)


def test_a_negative_token_is_found_without_statistics() -> None:
    tokens = np.array([3, 1, -1, 2, 0], dtype=np.int32)
    with pytest.raises(ValueError, match="token -1 in the training part: token ids start at 0"):
        Windows(tokens, 2, 10, "training").batch(np.array([0]))


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared("data=parquet", "launcher=local", *words)
    return str(caught.value)


def test_problems_are_told_before_the_run_starts(tmp_path: Path) -> None:
    folder = write_texts(tmp_path / "data", ".parquet")
    path = f"data.path={folder}"
    tokens = (path, "data.sequence_length=8", "data.vocab_size=256")
    assert prepared("data=parquet", "launcher=local", *tokens).config.data["input"] == "input_ids"
    assert (
        "data.vocab_size = 100 is too small: the files have the token 199. Try data.vocab_size=256."
        in told(*tokens, "data.vocab_size=100")
    )
    assert "has no column 'ids', but input_ids, text" in told(*tokens, "data.input=ids")
    assert "names a column of string, but token ids are integers" in told(*tokens, "data.input=text")
    assert "names a column of string, but numbers and lists of numbers can be read" in told(
        *tokens, "data.target=text"
    )
    assert "data.vocab_size = null must be given for token ids" in told(path, "data.sequence_length=8")
    assert "data.sequence_length = null must be given" in told(path, "data.vocab_size=256")
    assert "model.vocab_size = 256 is too small for the data" in told(*tokens, "data.vocab_size=300")
    flat = write(tmp_path / "flat.parquet", {"input_ids": [1, 2]})
    assert "names a column without one list of token ids in each row" in told(
        *tokens, f"data.path={flat}", "data.packing=true"
    )
    padded = pa.array([[3, -1], [199]], pa.list_(pa.int32()))
    write(folder / "1b.parquet", {"input_ids": padded, "text": ["a", "a"]})
    assert "data.input = input_ids names a column with the token -1, but token ids start at 0" in told(
        *tokens
    )
    write(folder / "2.parquet", {"input_ids": [1, 2]})
    assert "names columns of different types: int64, list<" in told(*tokens)
    (folder / "3.parquet").write_text("no table")
    assert "3.parquet can't be read: " in told(*tokens)
    assert "has no .parquet or .arrow file" in told("data.path=/usr/include", *tokens[1:])


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(ValueError, match=r"no(t a)? regular file"):
        read_columns(tmp_path / "pipe.parquet", ("x",))
    with pytest.raises(ValueError, match=r"has no \.parquet or \.arrow file"):
        find_files(str(tmp_path))


@pytest.mark.processes
def test_the_login_node_reads_the_files_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", {"x": [1, 2]})
    code = (
        "import sys; from pathlib import Path; from hpc_parallel.data import table_files as t;"
        f"assert t.read_columns(t.find_files({str(tmp_path)!r})[0], ('x',))['x'].bounds == (1, 2);"
        f"assert Path({str(file)!r}) == t.find_files({str(file)!r})[0]; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("ending", [".parquet", ".arrow"])
@pytest.mark.usefixtures("cache")
def test_rows_are_packed_as_documents(tmp_path: Path, ending: str) -> None:
    from hpc_parallel.data.parquet import ParquetData

    write(tmp_path / f"a{ending}", {"input_ids": [[1, 2, 3, 4], [5, 6], [7]]})
    write(tmp_path / f"b{ending}", {"input_ids": [[8, 9, 10], [11, 12, 13]]})
    data = ParquetData(
        path=str(tmp_path), sequence_length=4, vocab_size=20, validation_share=0.2, packing=True
    )
    inputs, targets = data.train.batch(np.arange(len(data.train)))
    assert inputs.tolist() == [[[1, 0], [2, 0], [3, 0], [5, 3]], [[8, 0], [9, 0], [0, 2], [0, 2]]]
    assert targets.tolist() == [[2, 3, 4, 6], [9, 10, -100, -100]]
    assert data.validation.batch(np.zeros(1, dtype=np.int64))[1].tolist() == [[12, 13, -100, -100]]
