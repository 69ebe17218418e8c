"""Checks new tokens: with cached keys and values, their logits must be those of the whole text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.decode import Decoder
from hpc_parallel.strategies.model_checks import DifferenceError
from hpc_parallel.strategies.precision import HALF, WEIGHTS


@dataclass(frozen=True)
class Text:
    """The index of a prompt, and all tokens [seq] of its text; `prompt_tokens` of them are the prompt."""

    prompt: int
    prompt_tokens: int
    tokens: Tensor


def require_whole_texts(
    texts: Sequence[Text],
    *,
    decoder: Decoder,
    shortest: int,
    config: RunConfig,
    on_text: Callable[[], None],
) -> str:
    """Compute each text of this replica from its start, and compare the logits of all its new tokens.

    `shortest`: the length of the prompts in the first pass of `decoder`. `on_text` is called after each text.
    All ranks call it together. Returns a line about the comparison. Raises DifferenceError on all ranks.

    The comparison at the start has random weights, few blocks and short texts. It can't show a difference of
    the run's own weights, or of a block that looks far back.
    """
    started = time.perf_counter()
    bound = _rounding(config.training.precision) ** 0.5
    shares: dict[tuple[int, int], float] = {}
    for row, text in enumerate(texts):
        shares |= _shares_of_text(text, row=row, decoder=decoder, shortest=shortest)
        on_text()
    too_far = [place for place, share in shares.items() if not share <= bound]
    by_rank = exchange.all_gather((repr(max(shares.values(), default=0.0)), too_far))  # JSON has no infinity
    largest = max(float(share) for share, _ in by_rank)
    if wrong := sorted({(prompt, number) for _, places in by_rank for prompt, number in places}):
        raise DifferenceError([_reason(wrong, largest=largest, config=config)])
    return (
        f"The logits of all new tokens are those that {_name(config)} computes from the whole text: they "
        f"differ by at most {largest:.0e} of their norm ({time.perf_counter() - started:.1f} s)"
    )


def _reason(wrong: Sequence[tuple[int, int]], *, largest: float, config: RunConfig) -> str:
    """`wrong`: prompts and the numbers of their tokens that are `largest` of the norm off, or less."""
    (prompt, number), precision = wrong[0], config.training.precision
    advice = ", so task=generate can't be used. Try task=infer."
    if precision in HALF:
        advice = f", or enlarges the rounding of {precision}: training.precision=float32 shows which."
    return (
        f"{_name(config)} computes something else with cached keys and values than from the whole text: "
        f"{len(wrong)} new tokens have other logits, the first is token {number} after prompt {prompt + 1}, "
        f"and they are off by up to {largest:.1g} of their norm. It mixes positions outside of "
        f"CausalAttention (docs/own-model.md){advice}"
    )


def _rounding(precision: str) -> float:
    """The step of numbers near 1 in a product."""
    if precision == "float32" and torch.backends.cuda.matmul.allow_tf32:
        return 2**-10
    return torch.finfo(HALF.get(precision, WEIGHTS[precision])).eps


def _name(config: RunConfig) -> str:
    return str(config.model["_target_"]).rpartition(".")[2]


def _shares_of_text(text: Text, *, row: int, decoder: Decoder, shortest: int) -> dict[tuple[int, int], float]:
    """The distance of the logits by prompt and number of the new token; empty on a rank without logits."""
    passes = slice(text.prompt_tokens - shortest, len(text.tokens) - shortest)
    logits = decoder.compare(text.tokens[None, :-1], row=row, passes=passes)
    if logits is None:
        return {}
    shares = shares_of_norm(*logits).tolist()
    return {(text.prompt, number): share for number, share in enumerate(shares, start=1)}


def shares_of_norm(whole: Tensor, cached: Tensor) -> Tensor:
    """The distance of the logits [new, vocab] as a share of their norm, [new]; infinity if it is not finite.

    An entry that both exclude (-inf) has no distance.
    """
    distance: Tensor = torch.where(whole == cached, 0.0, whole - cached)
    finite = torch.where(whole.isfinite(), whole, 0.0)
    norms = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (distance, finite)]
    shares: Tensor = norms[0] / norms[1].clamp_min(1e-300)
    return shares.nan_to_num(torch.inf, posinf=torch.inf)
