"""`python -m hpc_parallel tokenize SOURCE... --output tokens.npy`: text files made into a file of token ids.

Inputs are read piece by piece, so neither they nor the tokens have to fit into memory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hpc_parallel.data.tokens import Description, description_file

PIECE = 1 << 18  # characters, or bytes, encoded at once
PIECES = 16  # encoded in parallel


def main(arguments: Sequence[str]) -> int:
    """Write tokens and description; returns 0, or 2 with all that is wrong told and nothing written."""
    options = _parser().parse_args(arguments)
    output: Path = options.output
    problems = [*_output_problems(output)]
    files = _find_sources(options.source, pattern=options.pattern, problems=problems)
    encoder = _find_encoder(options, problems)
    if problems or encoder is None:
        return _refuse(problems)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        with beside.open("wb") as stream:
            count = _write(files, encoder=encoder, stream=stream, problems=problems)
        if not count and not problems:
            problems.append("the sources hold no text.")
        if problems:
            return _refuse(problems)
        description = Description(vocab_size=encoder.vocab_size, tokenizer=encoder.name, count=count)
        beside_description = beside.with_name(f"{beside.name}.json")
        beside_description.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        beside_description.replace(description_file(output))
        beside.replace(output)  # last: tokens that exist have their description
    finally:
        beside.unlink(missing_ok=True)
    print(f"{output}: {count:,} tokens of {encoder.vocab_size:,} ({encoder.name}), from {len(files)} files.")
    print(f"Train on them: data=tokens data.path={output} model.vocab_size={encoder.vocab_size}")
    return 0


@dataclass(frozen=True)
class Encoder:
    """From a file to ids: bytes as they are where `tokenizer` is None, else pieces of UTF-8 text."""

    name: str
    vocab_size: int
    tokenizer: Any = None
    end_of_text: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, file: Path) -> Iterator[np.ndarray[Any, Any]]:
        """Raises UnicodeDecodeError where a tokenizer is given text that is not UTF-8."""
        if self.tokenizer is None:
            with file.open("rb") as stream:
                while data := stream.read(PIECE):
                    yield np.frombuffer(data, dtype=np.uint8)
            return
        for pieces in _grouped(_pieces(file)):
            for encoding in self.tokenizer.encode_batch(pieces, add_special_tokens=False):
                yield np.asarray(encoding.ids, dtype=np.int64)
        if self.end_of_text is not None:
            yield np.asarray([self.end_of_text])


def _pieces(file: Path) -> Iterator[str]:
    """Text cut after a line's end (or after twice PIECE, where a line is longer): no word is split."""
    with file.open(encoding="utf-8", newline="") as stream:
        while piece := stream.read(PIECE) + stream.readline(PIECE):
            yield piece


def _grouped(pieces: Iterator[str]) -> Iterator[list[str]]:
    group: list[str] = []
    for piece in pieces:
        group.append(piece)
        if len(group) == PIECES:
            yield group
            group = []
    if group:
        yield group


def _write(files: Sequence[Path], *, encoder: Encoder, stream: BinaryIO, problems: list[str]) -> int:
    """Append every file's ids after a header that is filled in at the end; returns their number."""
    _write_header(stream, dtype=encoder.dtype, count=0)
    count = 0
    for file in files:
        try:
            for ids in encoder.encode(file):
                stream.write(ids.astype(encoder.dtype).tobytes())
                count += len(ids)
        except UnicodeDecodeError as error:
            problems.append(f"{file} is not UTF-8 ({error.reason} at byte {error.start} of a piece).")
        except OSError as error:
            problems.append(f"{file} can't be read: {error.strerror}.")
    stream.seek(0)
    _write_header(stream, dtype=encoder.dtype, count=count)
    return count


def _write_header(stream: BinaryIO, *, dtype: np.dtype[Any], count: int) -> None:
    """The .npy header of a row; 128 bytes for any count, so that it can be written over."""
    fields = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({count},), }}"
    stream.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + fields.ljust(117).encode() + b"\n")


def _output_problems(output: Path) -> Iterator[str]:
    if output.suffix != ".npy":
        yield f"--output {output} must end in .npy. Try --output {output.with_suffix('.npy')}."
    if not output.parent.is_dir():
        yield f"--output {output}: there is no folder {output.parent}. Try mkdir -p {output.parent}."
    for file in (output, description_file(output)):
        if file.exists():
            yield f"{file} exists already, and a run may be reading it. Try another --output."


def _find_sources(sources: Sequence[Path], *, pattern: str, problems: list[str]) -> list[Path]:
    """Files as they are, folders as their matching files by name."""
    files: list[Path] = []
    for source in sources:
        if source.is_dir():
            found = sorted(file for file in source.rglob(pattern) if file.is_file())
            if not found:
                problems.append(f"no file in {source} matches {pattern}. Try --pattern '*.md'.")
            files += found
        elif source.is_file():
            files.append(source)
        else:
            problems.append(f"{source} does not exist.")
    return files


def _find_encoder(options: argparse.Namespace, problems: list[str]) -> Encoder | None:
    if options.tokenizer == "bytes":
        if options.end_of_text is not None:
            problems.append("--end-of-text needs a tokenizer: bytes have no such token.")
        return Encoder(name="bytes", vocab_size=256)
    file = Path(options.tokenizer)
    if not file.is_file():
        problems.append(f"--tokenizer {file} does not exist. Try --tokenizer bytes, or a tokenizer.json.")
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        problems.append("--tokenizer needs the package tokenizers. Try pip install tokenizers.")
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        problems.append(f"--tokenizer {file} can't be read: {error}.")
        return None
    tokenizer.no_truncation()  # a file may ask for either, which would lose or invent text
    tokenizer.no_padding()
    end_of_text = None if options.end_of_text is None else tokenizer.token_to_id(options.end_of_text)
    if options.end_of_text is not None and end_of_text is None:
        problems.append(f"--end-of-text {options.end_of_text} is no token of {file}.")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1  # ids may have gaps
    return Encoder(f"{file.name} {digest}", vocab_size, tokenizer=tokenizer, end_of_text=end_of_text)


def _refuse(problems: Sequence[str]) -> int:
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m hpc_parallel tokenize",
        description="Make text files into a file of token ids for data=tokens.",
    )
    parser.add_argument("source", nargs="+", type=Path, help="text files, or folders of them")
    parser.add_argument("--output", required=True, type=Path, help="the .npy file; a .json comes beside it")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default), or a tokenizer.json of the tokenizers library"
    )
    parser.add_argument("--pattern", default="*.txt", help="which files of a folder (default *.txt)")
    parser.add_argument("--end-of-text", help="a token to put after each file, such as <|endoftext|>")
    return parser
