"""`python -m hpc_parallel tokenize SOURCE... --output tokens.npy`: convert text files to token ids.

Inputs are read in parts, so neither they nor the tokens need to fit into memory.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from hpc_parallel.commands.encode_text import encode_text, tokenizer_failures
from hpc_parallel.data.folder_files import list_files, name_matcher
from hpc_parallel.data.tokens import TOKENIZER_BYTES, Description, description_file, digest_of_tokenizer
from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.problems import as_override, nearest, raise_if_any, shell_word
from hpc_parallel.record.safe_read import DamagedError, list_folder, open_regular, read_bytes
from hpc_parallel.record.safe_write import replacing, write_text
from hpc_parallel.shell import command_parser, complain, output_problems

PIECE = 1 << 18  # bytes read at once


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    """Write tokens and description.

    Returns 0 if they are written, 1 if they can't be written, or 2 after it has printed all problems. Nothing
    is written unless it returns 0.
    """
    options = _parser().parse_args(arguments)
    output: Path = options.output
    problems = [*_output_problems(output, awaited or ())]
    notes: list[str] = []
    sources = [source for source in options.source if source not in (awaited or ())]
    files = _find_sources(sources, pattern=options.pattern, problems=problems, notes=notes)
    is_awaited = Path(options.tokenizer) in (awaited or ())
    encoder = None if is_awaited else _find_encoder(options, problems)
    raise_if_any(problems)
    if awaited is not None or encoder is None:
        return DONE
    try:
        count = _write(output, files, encoder=encoder)
    except OSError as error:  # a full disk, another user's file in a sticky folder
        complain([f"{output} can't be written: {error.strerror or error}."])
        return FAILED
    print(f"{output}: {count:,} tokens of {encoder.vocab_size:,} ({encoder.name}), from {len(files)} files.")
    for note in notes:
        print(note)
    print(
        f"Train on them: data=tokens {as_override('data.path', output)} model.vocab_size={encoder.vocab_size}"
    )
    if encoder.end_of_text is not None:
        print(f"In samples of whole documents: data.packing=true data.separator={encoder.end_of_text}")
    return DONE


@dataclass(frozen=True)
class Encoder:
    """Converts a file to ids: its bytes if `tokenizer` is None, otherwise the tokens of its UTF-8 text."""

    name: str
    vocab_size: int
    tokenizer: Any = None
    end_of_text: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def encode(self, file: Path) -> Iterator[np.ndarray[Any, Any]]:
        """Yields arrays of ids.

        Raises ValueError if the file is not UTF-8 text or the tokenizer fails, DamagedError and OSError.
        """
        with open_regular(file, follow=True) as stream:
            if os.fstat(stream.fileno()).st_size == 0:  # files in /proc have size 0 and may never end
                pass
            elif self.tokenizer is None:
                while data := stream.read(PIECE):
                    yield np.frombuffer(data, dtype=np.uint8)
            else:
                text = TextIOWrapper(stream, encoding="utf-8", newline="")
                yield from encode_text(self.tokenizer, text)
        if self.end_of_text is not None:
            yield np.asarray([self.end_of_text])


def _write(output: Path, files: Sequence[Path], *, encoder: Encoder) -> int:
    """Write the ids and their description; returns the number of ids. Raises ConfigError and OSError."""
    description = description_file(output)
    problems: list[str] = []
    try:
        with replacing(output, mode=0o666) as stream:  # moved last, so tokens never exist without description
            count = _append(files, encoder=encoder, stream=stream, problems=problems)
            if not count and not problems:
                problems.append("the sources hold no text.")
            raise_if_any(problems)
            values = Description(vocab_size=encoder.vocab_size, tokenizer=encoder.name, count=count)
            write_text(description, json.dumps(values, indent=1) + "\n", mode=0o666)
    except BaseException:
        description.unlink(missing_ok=True)
        raise
    return count


def _append(files: Sequence[Path], *, encoder: Encoder, stream: BinaryIO, problems: list[str]) -> int:
    """Append the ids of all files after a header, which is written again at the end; returns their number."""
    header = {"descr": encoder.dtype.str, "fortran_order": False}
    npy.write_array_header_1_0(stream, {**header, "shape": (0,)})
    count = 0
    for file in files:
        try:
            for ids in encoder.encode(file):
                stream.write(ids.astype(encoder.dtype).tobytes())
                count += len(ids)
        except UnicodeDecodeError as error:
            problems.append(f"{file} is not UTF-8 ({error.reason} at byte {error.start} of a piece).")
        except FileNotFoundError:
            problems.append(f"{file} has been removed since it was listed.")
        except DamagedError as error:
            problems.append(f"{error}.")
        except ValueError as error:
            problems.append(f"{file}: {error}.")
    stream.seek(0)
    npy.write_array_header_1_0(stream, {**header, "shape": (count,)})  # it has room for any count
    return count


def _output_problems(output: Path, awaited: Container[Path]) -> Iterator[str]:
    yield from output_problems(output, ending=".npy", awaited=awaited)
    for file in (output, description_file(output)) if output.name else ():
        if os.path.lexists(file):
            yield f"{file} exists already, and a run may be reading it. Try another --output."


def _find_sources(
    sources: Sequence[Path], *, pattern: str, problems: list[str], notes: list[str]
) -> list[Path]:
    """The given files, and the matching files of the given folders, sorted by name.

    notes: receives a line for each folder with files that don't match.
    """
    try:
        matches = name_matcher(pattern)
    except ValueError as error:
        problems.append(f"--pattern {pattern!r}: {error}. Try --pattern '*.txt'.")
        return []
    files: list[Path] = []
    for source in sources:
        if os.path.isdir(source):
            found = list_files(source, matches=matches)
            problems += [f"{problem}." for problem in found.problems]
            if not found.matching and not found.problems:
                problems.append(f"no file in {source} matches {pattern}. Try --pattern '*.md'.")
            if note := found.left_out(f"--pattern {pattern}"):
                notes.append(f"{source}: {note}")
            files += sorted(found.matching.values())
        elif os.path.lexists(source):
            files.append(source)
        else:
            names = nearest(source.name, (entry.name for entry in list_folder(source.parent)))
            near = "".join(f" Try {shell_word(source.with_name(name))}." for name in names)
            problems.append(f"{source} does not exist.{near}")
    return files


def _find_encoder(options: argparse.Namespace, problems: list[str]) -> Encoder | None:
    if options.tokenizer == "bytes":
        if options.end_of_text is not None:
            problems.append("--end-of-text needs a tokenizer: bytes have no such token.")
        return Encoder(name="bytes", vocab_size=256)
    file = Path(options.tokenizer)
    if not os.path.lexists(file):
        problems.append(f"--tokenizer {file} does not exist. Try --tokenizer bytes, or a tokenizer.json.")
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        problems.append("--tokenizer needs the package tokenizers. Try pip install tokenizers.")
        return None
    try:
        content = read_bytes(file, limit_bytes=TOKENIZER_BYTES, follow=True)
        with tokenizer_failures():
            tokenizer = Tokenizer.from_buffer(content)
    except (ValueError, FileNotFoundError) as error:
        problems.append(f"--tokenizer {file} can't be used: {error}.")
        return None
    tokenizer.no_truncation()  # tokenizer.json may request truncation or padding, which change the text
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        problems.append(
            f"--tokenizer {file} leaves out merges at random. Set the model's dropout to null in it."
        )
    end_of_text = None if options.end_of_text is None else tokenizer.token_to_id(options.end_of_text)
    if options.end_of_text is not None and end_of_text is None:
        problems.append(f"--end-of-text {options.end_of_text} is no token of {file}.")
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if not vocabulary:
        problems.append(f"--tokenizer {file} has no vocabulary. Try one that was trained.")
        return None
    vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
    name = f"{file.name} {digest_of_tokenizer(content)}"
    return Encoder(name, vocab_size, tokenizer=tokenizer, end_of_text=end_of_text)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("tokenize", "Make text files into a file of token ids for data=tokens.")
    parser.add_argument("source", nargs="+", type=Path, help="text files, or folders of them")
    parser.add_argument("--output", required=True, type=Path, help="the .npy file; a .json comes beside it")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes (default), or a tokenizer.json of the tokenizers library"
    )
    parser.add_argument("--pattern", default="*.txt", help="which files of a folder (default *.txt)")
    parser.add_argument("--end-of-text", help="a token to put after each file, such as <|endoftext|>")
    return parser
