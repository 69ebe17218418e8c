"""Text as token ids and back, for who reads along: bytes where tokens are bytes, else the ids in figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.data.text import VOCAB_SIZE
from hpc_parallel.data.tokens import read_description


def reads_bytes(data: Mapping[str, Any]) -> bool:
    """Whether the tokens of this configuration of data are bytes; of a user's own class that is not known."""
    if data["_target_"] == "hpc_parallel.data.tokens.TokensData":
        return read_description(Path(os.path.expanduser(data["path"])))["tokenizer"] == "bytes"
    return bool(data["_target_"] == "hpc_parallel.data.text.TextData")


def encode(text: str, *, as_bytes: bool) -> list[int]:
    """Raises ValueError where ids are wanted and `text` is not a row of them."""
    return list(text.encode()) if as_bytes else [int(word) for word in text.split()]


def decode(tokens: Sequence[int], *, as_bytes: bool) -> str:
    """What is no text is shown as the replacement character (U+FFFD), an id beyond the bytes too."""
    if not as_bytes:
        return " ".join(map(str, tokens))
    # 0xFF is never a part of UTF-8
    return bytes(t if t < VOCAB_SIZE else 0xFF for t in tokens).decode(errors="replace")
