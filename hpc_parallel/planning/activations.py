"""The bytes that each part of a model keeps of one microbatch for the backward pass, on one device.

The sizes are those that autograd keeps with torch's CPU kernels (`tests/oracle/saved_tensors.py`).
Each function lists the tensors in the order of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.counts import DecoderSizes, decoder_sizes
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.step_facts import Types, chunks_loss, types_of

INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Kept:
    """Bytes of one microbatch by part.

    whole: what each block keeps in its backward pass, computed again or not. gradients: those that exist then
    in addition, at the moment with most. shared: what all blocks of a stage keep once, together. states: the
    input of each block, which a pipeline sends. results and head_results: what is computed from a weight, in
    each block and in the head.
    """

    stem: int
    blocks: tuple[int, ...]
    head: int
    whole: tuple[int, ...]
    gradients: tuple[int, ...]
    shared: int = 0
    states: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    head_results: int = 0

    def stage(self, blocks: range) -> int:
        """The bytes of a stage with these blocks."""
        ends = self.stem * (blocks.start == 0) + self.head * (blocks.stop == len(self.blocks))
        return sum(self.blocks[blocks.start : blocks.stop]) + ends + self.shared

    def again(self, block: int) -> int:
        """The bytes that a block has in its backward pass in addition to what it kept until then."""
        return self.whole[block] - self.blocks[block]

    def waiting(self, blocks: range) -> int:
        """The gradients that a stage keeps in addition between the halves of a split backward pass.

        The gradients of weights are computed from those of results. The first stage computes all in one.
        """
        if blocks.start == 0:
            return 0
        head = self.head_results * (blocks.stop == len(self.blocks))
        return sum(self.results[blocks.start : blocks.stop]) + head


def kept_of(config: RunConfig, layout: Layout, *, samples: int) -> Kept | None:
    """What a microbatch of `samples` keeps in eager mode; None for a model whose parts are unknown."""
    sizes = decoder_sizes(config)
    if sizes is None:
        return None
    return _decoder(_Run(config, layout, sizes, samples * sizes.sequence // layout.context))


@dataclass(frozen=True)
class _Run:
    """tokens: those of one microbatch on one device."""

    config: RunConfig
    layout: Layout
    sizes: DecoderSizes
    tokens: int

    @cached_property
    def types(self) -> Types:
        return types_of(self.config, self.layout)

    @property
    def is_mixture(self) -> bool:
        return "experts" in self.config.model


def _decoder(run: _Run) -> Kept:
    """The models of transformer.py and moe.py."""
    layout, types, sizes, tokens = run.layout, run.types, run.sizes, run.tokens
    mode, dim = run.config.training.activation_checkpointing, sizes.dim
    sliced = tokens // layout.tensor if run.config.strategy.sequence_parallel else tokens
    rows = sizes.sequence // layout.context
    tables = 0 if mode != "none" else rows * sizes.head_width * types.precise
    # A norm keeps its inputs, the normed inputs and one number for each row. The GPU's kernel keeps its
    # inputs in their own type, and no normed inputs.
    norm = sliced * (dim * (types.stream if _norm_is_fused(run) else 2 * types.precise) + types.precise)
    attention = _attention(run)
    stream, normed = sliced * dim * types.stream, sliced * dim * types.precise

    gathers = types.product < types.stream or sliced < tokens
    arriving = stream + (tokens * dim * types.product if gathers else 0)  # the gradient of its outputs

    def block(feed_forward: _Part, casts: int) -> tuple[int, int, int, int]:
        """The items of `Kept.blocks`, `whole`, `gradients` and `results` for a block."""
        full = 2 * (norm + tokens * dim * types.product) + attention.kept + feed_forward.kept
        full += 0 if types.cast else casts
        selective = stream + attention.expensive + feed_forward.expensive + _exchanged(run, sliced)
        kept = {"none": full, "selective": selective, "full": stream}[mode]
        results = 2 * normed + attention.results + feed_forward.results
        return kept, full, arriving + feed_forward.gradients, results

    columns, dense = (
        (sizes.dense_ffn_dim, sizes.dense_layers) if run.is_mixture else (sizes.ffn_dim, sizes.layers)
    )
    blocks = [block(_swiglu(run, columns), _casts(run, columns))] * dense
    if run.is_mixture:
        blocks += [block(_experts(run), _casts(run))] * (sizes.layers - dense)
    kept, whole, gradients, results = zip(*blocks, strict=True)
    logits = 0 if chunks_loss(run.config, tensor=layout.tensor) else _logits(run)
    return Kept(
        stem=tokens * INDEX * (2 if sizes.masked else 1), blocks=kept, head=norm + _language_loss(run),
        whole=whole, gradients=gradients, shared=tables + _documents(run), states=(stream,) * sizes.layers,
        results=results, head_results=normed + logits,
    )  # fmt: skip


def _exchanged(run: _Run, sliced: int) -> int:
    """What selective checkpointing keeps of the sums and gathered slices of `strategy.tensor`."""
    if run.layout.tensor == 1:
        return 0
    gathered = run.types.product if run.types.cast else run.types.precise
    slices = run.tokens * gathered if run.config.strategy.sequence_parallel else 0
    return 2 * run.sizes.dim * (slices + sliced * run.types.product)


def _documents(run: _Run) -> int:
    """The bias of packed documents, for the queries and the keys of the attention on this device.

    A ring makes it for each hop and keeps where the documents begin, which are numbers of the stem.
    """
    if not run.sizes.masked or _is_ring(run):
        return 0
    return run.tokens * (run.layout.context if _has_heads(run) else 1) * run.sizes.sequence * run.types.stream


def _has_heads(run: _Run) -> bool:
    """Whether the devices of a context axis divide the heads in attention, not the queries."""
    return run.layout.context > 1 and run.config.strategy.context_attention == "all_to_all"


def _is_ring(run: _Run) -> bool:
    return run.layout.context > 1 and run.config.strategy.context_attention == "ring"


def _casts(run: _Run, columns: int | None = None) -> int:
    """Autocast casts the weight and the input of each projection; one of the inputs is counted already.

    columns: the inner width of the feed-forward network; None: a mixture of experts.
    """
    sizes, tensor = run.sizes, run.layout.tensor
    if columns is None:
        inputs = 4 if sizes.shared else 2
        weights = sizes.attention_weights + sizes.experts * sizes.dim * tensor
        weights += sizes.shared * sizes.expert_weights
    else:
        weights, inputs = sizes.attention_weights + sizes.ffn_matrices * sizes.dim * columns, 3
    return (weights // tensor + inputs * run.tokens * sizes.dim) * run.types.product


@dataclass(frozen=True)
class _Part:
    """Bytes of a part of a block."""

    kept: int  # by autograd
    expensive: int  # kept instead by selective checkpointing
    results: int  # computed from a weight
    gradients: int = 0  # at once in its backward pass, less what it no longer needs then


def _attention(run: _Run) -> _Part:
    layout, types, sizes, tokens = run.layout, run.types, run.sizes, run.tokens
    query, heads = sizes.query_dim // layout.tensor, sizes.heads // layout.tensor
    projected = kv = sizes.kv_dim // layout.tensor
    passes = layout.context > 1 and not _has_heads(run)
    if layout.context > 1 and not passes:  # a head that serves several devices is sent to each
        kv *= max(1, layout.context // (sizes.kv_heads // layout.tensor))
    # Keys and values are repeated for the query heads; `gather` keeps those of all devices.
    if sizes.masked and not _is_ring(run):
        kv, passes = query * (layout.context if passes else 1), False
    lse = tokens * heads * types.precise
    mixed = tokens * query * types.product + lse
    inputs = tokens * (query + 2 * kv) * types.product
    # The heads next to each other. `sequence_attention` writes them so.
    joined = 0 if passes else tokens * query * types.product
    outputs = tokens * (query + 2 * projected + sizes.dim) * types.product  # of the four projections
    arrived = inputs + joined if _has_heads(run) else 0  # from the other devices
    results = outputs + tokens * sizes.normed_dim // layout.tensor * types.precise
    return _Part(inputs + mixed + joined + _norms_of_heads(run), outputs + mixed + arrived, results)


def _norms_of_heads(run: _Run) -> int:
    """Each head's norm of queries and keys keeps what the norm of a block keeps."""
    types, normed = run.types, run.sizes.normed_dim // run.layout.tensor
    of_each = types.product if _norm_is_fused(run) else 2 * types.precise
    return run.tokens * normed * of_each + run.tokens * normed // run.sizes.head_width * types.precise


def _norm_is_fused(run: _Run) -> bool:
    """Whether a norm keeps its inputs in their own type, and no normed inputs."""
    return run.config.device != "cpu" and run.types.cast


def _swiglu(run: _Run, columns: int) -> _Part:
    """The outputs of gate, silu and up, and their product. columns: the inner width on all devices."""
    columns, of_one = columns // run.layout.tensor, run.tokens * run.types.product
    outputs = (2 * columns + run.sizes.dim) * of_one
    # Of the last weight, and of both factors of the product, when the product itself is no longer needed.
    gradients = run.sizes.dim * columns * run.types.product + 2 * columns * of_one
    return _Part(4 * columns * of_one, outputs, outputs, gradients)


def _experts(run: _Run) -> _Part:
    """moe.py, experts.py, expert.py. Assumes that the devices of the expert axis get equally many tokens."""
    types, sizes, tokens = run.types, run.sizes, run.tokens
    dim, columns, experts = sizes.dim, sizes.ffn_dim // run.layout.tensor, sizes.experts
    rows = tokens * sizes.per_token
    router = tokens * experts * types.precise + rows * INDEX
    orders = (2 if run.layout.expert == 1 else 4) * rows * INDEX
    gates = rows * (types.precise if types.product == types.precise else types.product)
    inputs = 1 if types.cast else 2  # a cast for each of the two first products
    products = rows * ((1 + inputs) * dim + 4 * columns) * types.product
    casts = types.product < types.precise and not run.layout.by_fully_shard
    weights = 3 * experts // run.layout.expert * dim * columns * types.product if casts else 0
    exchanged = 0 if run.layout.expert == 1 else 2  # rows to their experts and back
    outputs = (rows * (2 * columns + dim) + tokens * experts) * types.product
    sent = rows * exchanged * dim * types.product
    shared = _swiglu(run, sizes.shared * sizes.ffn_dim) if sizes.shared else _Part(0, 0, 0)
    kept = router + orders + gates + products + weights + shared.kept
    gradients = (rows * (2 * columns + dim) + experts // run.layout.expert * dim * columns) * types.product
    return _Part(kept, outputs + sent + shared.expensive, outputs + shared.results, gradients)


def _language_loss(run: _Run) -> int:
    """The projection and the loss (chunked_loss.py, language.py)."""
    types, sizes, tokens = run.types, run.sizes, run.tokens
    rows = -(-sizes.vocabulary // run.layout.tensor)
    if chunks_loss(run.config, tensor=run.layout.tensor):
        of_weights = types.product if types.cast else types.precise
        return (tokens + rows) * sizes.dim * of_weights  # gradients of inputs and weights
    cast = 0 if types.cast else rows * sizes.dim * types.product
    return tokens * (sizes.dim * types.product + INDEX) + _logits(run) + cast


def _logits(run: _Run) -> int:
    sizes, whole = run.sizes, not run.config.strategy.loss_parallel
    columns = sizes.vocabulary if whole else -(-sizes.vocabulary // run.layout.tensor)
    return run.tokens * columns * run.types.precise
