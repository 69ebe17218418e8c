"""Converts prompts to tokens, and generated tokens to text. Tokens that are not bytes are decimal ids."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_parallel.data.text import VOCAB_SIZE
from hpc_parallel.data.tokens import TOKENS_DATA, read_description


def reads_bytes(data: Mapping[str, Any]) -> bool:
    """Whether the tokens of this data configuration are bytes; False for a user's own class."""
    if data["_target_"] == TOKENS_DATA:
        return read_description(Path(os.path.expanduser(data["path"])))["tokenizer"] == "bytes"
    return bool(data["_target_"] == "hpc_parallel.data.text.TextData")


def encode(text: str, *, as_bytes: bool) -> list[int]:
    """Returns the token ids of `text`: its bytes, or the decimal ids that it lists.

    Raises ValueError if `text` must list ids and has a word that is not a number.
    """
    return list(text.encode()) if as_bytes else [int(token) for token in text.split()]


def decode(tokens: Sequence[int], *, as_bytes: bool) -> str:
    """Returns text, or the ids in decimal.

    Invalid UTF-8 and ids above 255 become the replacement character (U+FFFD).
    """
    if not as_bytes:
        return " ".join(map(str, tokens))
    # 0xFF never occurs in UTF-8
    return bytes(t if t < VOCAB_SIZE else 0xFF for t in tokens).decode(errors="replace")
