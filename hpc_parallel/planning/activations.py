"""The bytes that each part of a model keeps of one microbatch for the backward pass, on one device.

The sizes are those that autograd keeps with torch's CPU kernels (`tests/oracle/saved_tensors.py`).
Each function lists the tensors in the order of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.counts import is_reference_decoder
from hpc_parallel.layout.layout import Layout
from hpc_parallel.layout.step_facts import Types, chunks_loss, types_of

INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Kept:
    """Bytes of one microbatch by part.

    recomputed: what each block keeps again after its recomputation. shared: what all blocks of a stage keep
    once, together. states: the input of each block, which a pipeline sends.
    """

    stem: int
    blocks: tuple[int, ...]
    head: int
    recomputed: tuple[int, ...]
    shared: int = 0
    states: tuple[int, ...] = ()

    def stage(self, blocks: range) -> int:
        """The bytes of a stage with these blocks."""
        ends = self.stem * (blocks.start == 0) + self.head * (blocks.stop == len(self.blocks))
        return sum(self.blocks[blocks.start : blocks.stop]) + ends + self.shared


def kept_of(config: RunConfig, layout: Layout, *, samples: int, sample_shape: tuple[int, ...]) -> Kept | None:
    """What a microbatch of `samples` keeps in eager mode; None for a model whose parts are unknown."""
    if not is_reference_decoder(config):
        return None
    return _decoder(_Run(config, layout, samples, sample_shape))


@dataclass(frozen=True)
class _Run:
    config: RunConfig
    layout: Layout
    samples: int
    shape: tuple[int, ...]

    @property
    def types(self) -> Types:
        return types_of(self.config, self.layout)

    def size(self, key: str) -> int:
        """A number of the model's configuration."""
        return int(self.config.model[key])

    @property
    def mode(self) -> str:
        return self.config.training.activation_checkpointing


def _decoder(run: _Run) -> Kept:
    """The models of transformer.py and moe.py."""
    layout, types = run.layout, run.types
    tensor, dim = layout.tensor, run.size("dim")
    tokens = run.samples * run.shape[0] // layout.context
    sliced = tokens // tensor if run.config.strategy.sequence_parallel else tokens
    head_dim = dim // run.size("heads")
    tables = 0 if run.mode != "none" else run.shape[0] // layout.context * head_dim * types.precise
    # A norm keeps its inputs, the normed inputs and one number for each row. The GPU's kernel keeps its
    # inputs in their own type, and no normed inputs.
    fused = run.config.device != "cpu" and types.cast
    norm = sliced * (dim * (types.stream if fused else 2 * types.precise) + types.precise)
    attention = _attention(run, tokens)
    feed_forward = _experts(run, tokens) if "experts" in run.config.model else _swiglu(run, tokens)
    full = 2 * (norm + tokens * dim * types.product) + attention.kept + feed_forward.kept
    full += 0 if types.cast else _casts(run, tokens)
    stream = sliced * dim * types.stream
    selective = stream + attention.expensive + feed_forward.expensive
    block = {"none": full, "selective": selective, "full": stream}[run.mode]
    layers = run.size("layers")
    return Kept(
        stem=tokens * INDEX,
        blocks=(block,) * layers,
        head=norm + _language_loss(run, tokens),
        recomputed=(0 if run.mode == "none" else full,) * layers,
        shared=tables,
        states=(stream,) * layers,
    )


def _casts(run: _Run, tokens: int) -> int:
    """Autocast casts the weight and the input of each projection; one of the inputs is counted already."""
    tensor = run.layout.tensor
    dim, kv = run.size("dim"), run.size("kv_heads") * (run.size("dim") // run.size("heads"))
    weights, inputs = 2 * dim * (dim + kv), 2
    if "experts" in run.config.model:
        weights += run.size("experts") * dim * tensor
    else:
        weights, inputs = weights + 3 * dim * run.size("ffn_dim"), 3
    return (weights // tensor + inputs * tokens * dim) * run.types.product


@dataclass(frozen=True)
class _Part:
    """kept: the bytes that autograd keeps. expensive: those that selective checkpointing keeps instead."""

    kept: int
    expensive: int


def _attention(run: _Run, tokens: int) -> _Part:
    layout, types = run.layout, run.types
    query = run.size("dim") // layout.tensor
    heads = run.size("heads") // layout.tensor
    projected = kv = run.size("kv_heads") * (run.size("dim") // run.size("heads")) // layout.tensor
    passes = layout.context > 1 and run.config.strategy.context_attention != "all_to_all"
    if layout.context > 1 and not passes:  # a head that serves several devices is sent to each
        kv *= max(1, layout.context // (run.size("kv_heads") // layout.tensor))
    lse = tokens * heads * types.precise
    mixed = tokens * query * types.product + lse
    inputs = tokens * (query + 2 * kv) * types.product
    joined = tokens * query * types.product  # the heads next to each other
    outputs = tokens * (query + 2 * projected + run.size("dim")) * types.product  # of the four projections
    return _Part(inputs + mixed + joined, outputs if passes else outputs + mixed)


def _swiglu(run: _Run, tokens: int) -> _Part:
    """The outputs of gate, silu and up, and their product."""
    columns = run.size("ffn_dim") // run.layout.tensor
    product = run.types.product
    return _Part(4 * tokens * columns * product, tokens * (2 * columns + run.size("dim")) * product)


def _experts(run: _Run, tokens: int) -> _Part:
    """moe.py, experts.py, expert.py. Assumes that the devices of the expert axis get equally many tokens."""
    types = run.types
    dim, columns, experts = run.size("dim"), run.size("ffn_dim"), run.size("experts")
    rows = tokens * run.size("experts_per_token")
    router = tokens * experts * types.precise + rows * INDEX
    orders = (2 if run.layout.expert == 1 else 4) * rows * INDEX
    gates = rows * (types.precise if types.product == types.precise else types.product)
    inputs = 1 if types.cast else 2  # a cast for each of the two first products
    products = rows * ((1 + inputs) * dim + 4 * columns) * types.product
    casts = types.product < types.precise and not run.layout.by_fully_shard
    weights = 3 * experts // run.layout.expert * dim * columns * types.product if casts else 0
    exchanged = 0 if run.layout.expert == 1 else 2  # rows to their experts and back
    outputs = rows * (2 * columns + (1 + exchanged) * dim) * types.product
    return _Part(router + orders + gates + products + weights, tokens * experts * types.product + outputs)


def _language_loss(run: _Run, tokens: int) -> int:
    """The projection and the loss (chunked_loss.py, language.py)."""
    types, split = run.types, run.layout.tensor
    dim, vocabulary = run.size("dim"), run.size("vocab_size")
    if chunks_loss(run.config, tensor=split):
        of_weights = types.product if types.cast else types.precise
        return (tokens * dim + -(-vocabulary // split) * dim) * of_weights  # gradients of inputs and weights
    rows = -(-vocabulary // split)
    columns = rows if run.config.strategy.loss_parallel else vocabulary
    cast = 0 if types.cast else rows * dim * types.product
    return tokens * (dim * types.product + columns * types.precise + INDEX) + cast
