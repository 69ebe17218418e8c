"""The operations of a decoder-only transformer on one device, for one microbatch, and their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from hpc_parallel.layout.counts import DecoderSizes
from hpc_parallel.layout.step_facts import ALIGNED
from hpc_parallel.planning.hardware import Hardware, MemoryTraffic
from hpc_parallel.planning.operations import (
    FLOAT32_BYTES,
    MatrixProduct,
    Move,
    Operation,
    Rounding,
    in_float8,
    precise_bytes,
)

# Bytes that a forward pass moves per element, if an element has HALF_BYTES. Each line names its elements.
HALF_BYTES = 2
WHOLE_BYTES = 22  # of a token's width: two norms (4 each), two sums with dropout and its mask (7 each)
HEADS_BYTES = 12  # of a device's part: transposed heads
NORM_BYTES = 4  # of a device's normed queries and keys
ACTIVATION_BYTES = 16  # of a device's part: the activation, at four times the width
SCORE_BYTES = 9  # of a score: scaled softmax (4), dropout and its mask (5)
UNFUSED_BYTES = 24  # of a score, in addition, if scale, mask and softmax in float32 are separate kernels
EMBEDDING_BYTES = (8, 12)  # of a token's width, forward and backward
VALUES = "weighted values"
SOFTMAX = "softmax"
SCORES = "scores"  # a flash kernel does not keep them for the backward pass
QKV, UP, DOWN = "queries, keys, values", "feed-forward up", "feed-forward down"
OUTPUT, SHARED_UP, SHARED_DOWN = "attention output", "shared experts up", "shared experts down"
# A mixture of experts (models/moe.py, experts.py). Bytes for each number of a token's copy, as above:
GATED_BYTES = 14  # sorted by expert (4) and back (4), weighted (4), summed (2)
ARRIVED_BYTES = 8  # in addition if experts are split: sorted on arrival (4) and back (4)
ROUTED_BYTES = 32  # of each probability, in float32: softmax, the largest ones, balance
MIXTURE_KERNELS = 14  # (25 forward + 17 backward) / 3: operations.py counts a backward pass twice
CAST_BYTES = 6  # of an expert's weight for a product in 16 bits: read 4, write 2
LOSS_FORWARD = 0.6  # the share of the loss's traffic that is in the forward pass


@dataclass(frozen=True)
class Share:
    """The part of a decoder that one device computes: `samples` samples on one of `tensor` devices.

    number_bytes: the bytes of a number in the inputs and results of matrix products. context: the number of
    parts of a sequence; the device has one. rounding: how linear products round to float8. expert: the number
    of devices that split the experts.
    """

    decoder: DecoderSizes
    samples: int
    tensor: int
    traffic: MemoryTraffic
    number_bytes: int
    context: int = 1
    rounding: Rounding | None = None
    expert: int = 1

    @property
    def tokens(self) -> int:
        return self.samples * self.decoder.sequence // self.context

    @property
    def activation_bytes(self) -> int:
        """Bytes of the result of a block's attention or feed-forward network."""
        return self.number_bytes * self.tokens * self.decoder.dim

    @property
    def unfused(self) -> bool:
        """Whether Megatron's softmax runs as several kernels: the fused one takes multiples of four heads."""
        return not self.decoder.flash and (self.samples * self.decoder.heads / self.tensor) % 4 != 0

    def block(self) -> list[Operation]:
        """The forward pass of one block."""
        operations = self._block()
        if self.rounding is None:
            return operations
        return [*operations, *self.rounding.forward(in_float8(operations), layers=self._layers)]

    def scale_messages(self, axis: str, *, is_backward: bool) -> Iterator[tuple[str, int, float]]:
        """What the ranks of `axis` exchange for float8's scales: a product, its messages, numbers of each."""
        if (rounding := self.rounding) is None:
            return
        for product in in_float8(self._block()):
            layers = self._layers.get(product.name, 1)
            one = replace(product, columns=product.columns / layers)
            splits_inputs = product.name in (OUTPUT, DOWN, SHARED_DOWN)
            numbers = rounding.exchanged(one, axis=axis, splits_inputs=splits_inputs, is_backward=is_backward)
            if numbers:
                yield product.name, layers * (rounding.passes if is_backward else 1), numbers

    @property
    def _layers(self) -> dict[str, int]:
        """How many linear layers a product stands for, if more than one. Each layer rounds its own input."""
        return {QKV: 3, UP: self.decoder.ffn_matrices - 1, SHARED_UP: 2}

    def _linear(self, name: str, columns: float, depth: float) -> MatrixProduct:
        """The product of a linear layer for all tokens. Float8 needs sizes that are multiples of 16."""
        aligned = all(size % ALIGNED == 0 for size in (self.tokens, columns, depth))
        float8 = self.rounding is not None and aligned
        return MatrixProduct(name, self.tokens, columns, depth, self.number_bytes, float8=float8)

    def _block(self) -> list[Operation]:
        """The forward pass of one block without the rounding to float8."""
        decoder, tokens, tensor = self.decoder, self.tokens, self.tensor
        dim, width, queries = decoder.dim, decoder.head_width, decoder.query_dim
        columns, head_batch = decoder.ffn_dim / tensor, self.samples * decoder.heads / tensor
        score_bytes: float = SCORE_BYTES + UNFUSED_BYTES * self.unfused
        if decoder.flash:
            head_batch *= 1.0 if decoder.masked else self.traffic.flash_share or 1.0
            score_bytes = self.traffic.flash_bytes or 0.0
        scores = head_batch * decoder.sequence**2 / self.context
        activated = ACTIVATION_BYTES / 4 * self._copied if decoder.router else ACTIVATION_BYTES
        of_heads = HEADS_BYTES * queries + NORM_BYTES * decoder.normed_dim
        of_token = WHOLE_BYTES * dim + (of_heads + activated * dim) / tensor
        moved = tokens * of_token * self.traffic.elementwise
        wider, number = self.number_bytes / HALF_BYTES, self.number_bytes
        flash, seq, rows = decoder.flash, decoder.sequence, decoder.sequence / self.context
        return [
            self._linear(QKV, (queries + 2 * decoder.kv_dim) / tensor, dim),
            MatrixProduct(SCORES, rows, seq, width, number, batch=head_batch, in_cache=flash),
            MatrixProduct(VALUES, rows, width, seq, number, batch=head_batch, in_cache=flash),
            self._linear(OUTPUT, dim, queries / tensor),
            *self._feed_forward(columns),
            Move("norms, activation, sums", wider * moved, kernels=7),
            Move(SOFTMAX, wider * score_bytes * scores * self.traffic.attention, kernels=3),
        ]

    @property
    def _copied(self) -> float:
        """The inner width of all experts of a token, as a multiple of the model's width."""
        used = self.decoder.per_token + self.decoder.shared
        return used * self.decoder.ffn_dim / self.decoder.dim

    def _feed_forward(self, columns: float) -> Iterator[Operation]:
        """columns: the inner width of this device's part."""
        decoder, dim = self.decoder, self.decoder.dim
        if not decoder.router:
            yield self._linear(UP, (decoder.ffn_matrices - 1) * columns, dim)
            yield self._linear(DOWN, dim, columns)
            return
        held, number = decoder.experts / self.expert, self.number_bytes
        rows = self.tokens * decoder.per_token / held  # assumes that the router uses all experts equally
        yield MatrixProduct("router", self.tokens, decoder.experts, dim, number)
        aligned = columns % ALIGNED == dim % ALIGNED == 0
        of_experts = partial(
            MatrixProduct, rows=rows, number_bytes=number, batch=held, experts=True,
            float8=self.rounding is not None and aligned,
        )  # fmt: skip
        yield of_experts(UP, columns=(decoder.ffn_matrices - 1) * columns, depth=dim)
        yield of_experts(DOWN, columns=dim, depth=columns)
        if decoder.shared:
            yield self._linear(SHARED_UP, 2 * decoder.shared * columns, dim)
            yield self._linear(SHARED_DOWN, dim, decoder.shared * columns)
        width_bytes = GATED_BYTES + (ARRIVED_BYTES if self.expert > 1 else 0)
        copied = width_bytes * number / HALF_BYTES * self.tokens * decoder.per_token * dim
        routed = ROUTED_BYTES * self.tokens * decoder.experts
        cast = CAST_BYTES * held * decoder.expert_weights if number < FLOAT32_BYTES else 0
        yield Move("routing and order", copied + routed + cast, kernels=MIXTURE_KERNELS)

    def block_backward(self) -> list[Operation]:
        """The backward pass of one block, without recomputation (`training.activation_checkpointing`)."""
        forward = self._block()
        again = [
            one for one in forward if isinstance(one, MatrixProduct) and one.name == SCORES and one.in_cache
        ]
        gradients = [gradient for one in forward for gradient in one.backward()]
        operations = [*again, *gradients, self._block_gradients()]
        if self.rounding is None:
            return operations
        return [*operations, *self.rounding.backward(in_float8(forward), layers=self._layers)]

    def _block_gradients(self) -> Move:
        """Add the gradients of one block's weights to those of earlier microbatches."""
        weights = self.decoder.weights_with(self.decoder.experts / self.expert) / self.tensor
        return Move("sum of gradients", self._gradient_bytes * weights, kernels=20)

    @property
    def _gradient_bytes(self) -> int:
        """Bytes that move to add the gradient of a weight to a sum: read both, write the sum."""
        return self.number_bytes + 2 * precise_bytes(self.number_bytes)

    def head(self) -> list[Operation]:
        """The forward pass of the last layer and the loss."""
        return [self._logits(), Move("loss", LOSS_FORWARD * self._loss_bytes)]

    def head_backward(self) -> list[Operation]:
        moves = Move("loss: gradient", (1 - LOSS_FORWARD) * self._loss_bytes)
        return [moves, *self._logits().backward(), self._end_gradients()]

    def embedding(self) -> list[Operation]:
        return [Move("embedding", self._embedding_bytes(EMBEDDING_BYTES[0]))]

    def embedding_backward(self) -> list[Operation]:
        moved = self._embedding_bytes(EMBEDDING_BYTES[1])
        return [Move("embedding: gradient", moved), self._end_gradients()]

    def _embedding_bytes(self, half_bytes: int) -> float:
        return half_bytes * self.number_bytes / HALF_BYTES * self.tokens * self.decoder.dim

    def _logits(self) -> MatrixProduct:
        columns = self.decoder.vocabulary / self.tensor
        return MatrixProduct("logits", self.tokens, columns, self.decoder.dim, self.number_bytes)

    @property
    def _loss_bytes(self) -> float:
        wider = precise_bytes(self.number_bytes) / FLOAT32_BYTES
        return wider * self.traffic.loss_bytes * self.tokens * self.decoder.vocabulary / self.tensor

    def _end_gradients(self) -> Move:
        return Move("sum of gradients", self._gradient_bytes * self.decoder.end_weights / self.tensor)


_PARTS: dict[str, Callable[[Share], list[Operation]]] = {
    "block forward": Share.block,
    "block backward": Share.block_backward,
    "embedding": Share.embedding,
    "embedding backward": Share.embedding_backward,
    "head": Share.head,
    "head backward": Share.head_backward,
}


@dataclass(frozen=True)
class Term:
    """One number of a plan, with the formula and the inputs that it comes from."""

    name: str
    seconds: float
    formula: str


class Terms(list[Term]):
    """The terms of a plan, collected while they are computed."""

    def add(self, name: str, seconds: float, formula: str) -> float:
        self.append(Term(name, seconds, formula))
        return seconds


class Kernels:
    """The terms of a decoder's parts on one hardware, each computed once for all plans."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._terms: dict[tuple[str, str, Share], tuple[Term, ...]] = {}

    def terms(self, part: str, share: Share, *, precision: str) -> tuple[Term, ...]:
        """One term for each operation of a part (_PARTS). Raises KeyError for a precision without a peak."""
        key = (part, precision, share)
        if key not in self._terms:
            peak, name = self._hardware.device.peak_flops[precision], part.removesuffix(" backward")
            where = part if part.startswith("block") else name
            self._terms[key] = tuple(
                Term(f"{where}: {one.name}", one.seconds(self._hardware, peak=peak), one.formula())
                for one in _PARTS[part](share)
            )
        return self._terms[key]
