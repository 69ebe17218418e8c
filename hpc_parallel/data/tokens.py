"""Token ids from a memory-mapped file that `python -m hpc_parallel tokenize` writes.

`NAME.npy` has the ids (uint16 or uint32, one dim), and `NAME.json` beside it describes them. The login node
reads the description only, so torch and numpy are imported only when the tokens are opened.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from hpc_parallel.record.safe_read import open_regular, read_json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpc_parallel.data.packing import Packed
    from hpc_parallel.data.windows import Windows

TOKENS_DATA = "hpc_parallel.data.tokens.TokensData"
TOKENIZER_BYTES = 256 << 20  # ten times the largest vocabularies of today
MAKE_IT = "Make both with `python -m hpc_parallel tokenize SOURCE --output tokens.npy`."


class Description(TypedDict):
    """The content of `NAME.json`."""

    vocab_size: int
    tokenizer: str  # "bytes", or the tokenizer file's name and hash
    count: int


class TokensData:
    """Windows of `sequence_length` tokens; the last `validation_share` of the tokens is held out.

    With `packing`, samples of whole documents (`packing.py`); each document ends with the token `separator`.

    Raises ValueError if the file or its description is missing or malformed, if they don't match, or if there
    are too few tokens.
    """

    train: Windows | Packed
    validation: Windows | Packed

    def __init__(
        self,
        *,
        path: str,
        sequence_length: int = 1024,
        validation_share: float = 0.05,
        packing: bool = False,
        separator: int | None = None,
    ) -> None:
        from hpc_parallel.data.packing import document_ends, packed_parts
        from hpc_parallel.data.windows import Windows

        file = Path(os.path.expanduser(path))
        description = read_description(file)
        tokens = open_tokens(file, count=description["count"])
        cut, _ = parts_of(len(tokens), validation_share)
        self.vocab_size = description["vocab_size"]
        self.sequence_length = sequence_length
        self.sample_shape = (sequence_length,)
        self.digest = sampled_digest(tokens, description=description)
        if packing:
            if separator is None:
                raise ValueError(
                    "data.packing = true needs data.separator, the token that ends each document"
                )
            ends = document_ends(tokens, separator=separator)
            parts = packed_parts(
                tokens, ends, sequence_length=sequence_length, vocab_size=self.vocab_size,
                validation_share=validation_share, digest=self.digest,
            )  # fmt: skip
            vars(self).update(parts)
            return
        self.train = Windows(tokens[:cut], sequence_length, self.vocab_size, "training")
        self.validation = Windows(tokens[cut:], sequence_length, self.vocab_size, "validation")


def parts_of(count: int, validation_share: float) -> tuple[int, int]:
    """How many of the `count` tokens are trained on, and how many are held out."""
    cut = round(count * (1 - validation_share))
    return cut, count - cut


def digest_of_tokenizer(content: bytes) -> str:
    """The end of the name that a description gives to a tokenizer with this file."""
    return hashlib.sha256(content).hexdigest()[:12]


def description_file(tokens_file: Path) -> Path:
    """The JSON file beside the tokens that names their tokenizer."""
    return tokens_file.with_suffix(".json")


def read_description(tokens_file: Path) -> Description:
    """Read the description of the tokens without opening the tokens.

    Raises ValueError if either file is missing or the description is malformed.
    """
    json_file = description_file(tokens_file)
    if tokens_file.suffix != ".npy":
        raise ValueError(f"{tokens_file.name} is no .npy file of token ids. {MAKE_IT}")
    for file in (tokens_file, json_file):
        if not os.path.isfile(file):
            state = "is no regular file" if os.path.lexists(file) else "is missing"
            raise ValueError(f"{file} {state}. {MAKE_IT}")
    try:
        fields = read_json(json_file, follow=True) or {}
        description = Description(
            vocab_size=fields["vocab_size"], tokenizer=fields["tokenizer"], count=fields["count"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{json_file} does not describe tokens ({error!r}). {MAKE_IT}") from error
    for key in ("vocab_size", "count"):
        value = fields[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{json_file}: {key} = {value!r} must be a whole number above 0. {MAKE_IT}")
    if not isinstance(description["tokenizer"], str):
        raise ValueError(f"{json_file}: tokenizer = {description['tokenizer']!r} must be a name. {MAKE_IT}")
    size, least = os.stat(tokens_file).st_size, 2 * fields["count"]  # uint16 or uint32
    if size < least:
        raise ValueError(
            f"{tokens_file} has {size:,} bytes, and its {fields['count']:,} tokens need {least:,} or more: "
            f"it is a copy that was cut short. {MAKE_IT}"
        )
    return description


def open_tokens(file: Path, *, count: int) -> NDArray[Any]:
    """Map the ids [count] into memory.

    Raises ValueError if the file is not such an array or has another number of tokens.
    """
    import numpy as np

    try:
        with open_regular(file, follow=True):  # numpy would block on a named pipe
            pass
        tokens: NDArray[Any] = np.lib.format.open_memmap(file, mode="r")
    except (ValueError, OSError, EOFError, TypeError, ArithmeticError, SyntaxError, MemoryError) as error:
        raise ValueError(f"{file} can't be read as an array ({error}). {MAKE_IT}") from error
    if tokens.ndim != 1 or tokens.dtype not in (np.uint16, np.uint32):
        shape = f"{tokens.ndim} dims of {tokens.dtype}"
        raise ValueError(f"{file} has {shape}, not one dim of uint16 or uint32. {MAKE_IT}")
    if len(tokens) != count:
        raise ValueError(
            f"{file} has {len(tokens)} tokens, but {description_file(file).name} says {count}. {MAKE_IT}"
        )
    return tokens


def sampled_digest(tokens: NDArray[Any], *, description: Description) -> str:
    """Hash of the description and of 1,024 tokens at each of 64 offsets; fast for large files too."""
    import numpy as np

    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for start in np.linspace(0, max(0, len(tokens) - 1024), 64).astype(np.int64):
        digest.update(np.ascontiguousarray(tokens[start : start + 1024], dtype="<u4").tobytes())
    return digest.hexdigest()
