"""Planned activations against what autograd keeps (its saved-tensor hooks) in the same layouts on CPUs."""

from __future__ import annotations

import pytest

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning.memory import plan
from tests.composed import composed
from tests.marks import in_full
from tests.oracle.traced_rank import measure

SMALL = "model.layers=2 data.sequence_length=64"
MOE = f"model=moe_tiny model.ffn_dim=176 {SMALL}"  # grouped products in bfloat16 need a multiple of 8
QWEN = f"{MOE} model.head_dim=16 model.qk_norm=true model.renormalise=true"
DEEPSEEK = (
    f"{MOE} model.shared_experts=2 model.dense_layers=1 model.dense_ffn_dim=352 model.gate=sigmoid "
    "model.renormalise=true model.balance=0 model.balance_step=0.01"
)
HALF, DOUBLE, FLOAT16 = (f"training.precision={name}" for name in ("bfloat16", "float64", "float16"))
FULL, SELECTIVE = (f"training.activation_checkpointing={keeps}" for keeps in ("full", "selective"))
PACKED = "data=dataset data.dataset._target_=tests.datasets.Texts data.vocab_size=256 data.packing=true"
LOGITS = "training.chunked_loss=false"
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
CASES = [  # words, rank
    (f"strategy=single {SMALL}", 0),
    (f"strategy=single {SMALL} {FLOAT16} {LOGITS}", 0),
    (f"strategy=data {TWO} {SMALL} {HALF} {FULL}", 0),
    (f"strategy=fsdp {TWO} {SMALL} {HALF} {SELECTIVE}", 1),
    (f"strategy=hsdp {FOUR} {SMALL} {HALF} {LOGITS}", 3),
    (f"strategy=tensor {TWO} {SMALL} {HALF}", 1),
    (f"strategy=tensor {TWO} {SMALL} {SELECTIVE} {LOGITS}", 1),
    (f"strategy=tensor {TWO} {SMALL} strategy.sequence_parallel=false strategy.loss_parallel=false", 0),
    (f"strategy=context {TWO} {SMALL} {HALF}", 1),
    (f"strategy=context nodes=4 {SMALL} strategy.context_attention=all_to_all {SELECTIVE}", 2),
    (f"strategy=context {TWO} {SMALL} strategy.context_attention=gather {SELECTIVE}", 0),
    (f"strategy=expert {FOUR} {MOE} {HALF}", 3),
    (f"strategy=pipeline {TWO} strategy.schedule=zbv {HALF}", 1),  # with autocast
    (f"strategy=pipeline {TWO} {MOE} {SELECTIVE}", 1),
    (f"strategy=hybrid {EIGHT} strategy.tensor=2 {HALF}", 6),
    (f"strategy=tensor {TWO} {QWEN} {HALF}", 1),
    (f"strategy=expert {TWO} {DEEPSEEK}", 1),
    (f"strategy=single {SMALL} {PACKED}", 0),
    (f"strategy=context {TWO} {SMALL} {PACKED} strategy.context_attention=gather {SELECTIVE}", 1),
]  # fmt: skip
MORE = [
    (f"strategy=single {SMALL} {HALF}", 0),
    (f"strategy=single {SMALL} {PACKED} {HALF}", 0),
    (f"strategy=single {SMALL} {PACKED} {HALF} {FULL}", 0),
    (f"strategy=tensor {TWO} {SMALL} {PACKED} {HALF}", 1),
    (f"strategy=context nodes=4 {SMALL} {PACKED} strategy.context_attention=all_to_all {HALF}", 2),
    (f"strategy=fsdp {FOUR} {SMALL} {PACKED} strategy.context=2 strategy.context_attention=gather", 3),
    (f"strategy=context {TWO} {SMALL} {PACKED} {HALF}", 1),
    (f"strategy=context {TWO} {SMALL} {PACKED} {SELECTIVE}", 0),
    (f"strategy=single {SMALL} {DOUBLE}", 0),
    (f"strategy=single {SMALL} {FLOAT16}", 0),
    (f"strategy=single {SMALL} {HALF} {SELECTIVE}", 0),
    (f"strategy=single {SMALL} {DOUBLE} {SELECTIVE} {LOGITS}", 0),
    (f"strategy=single {SMALL} {FULL} {LOGITS} model.tied_head=false", 0),
    (f"strategy=single {MOE}", 0),
    (f"strategy=single {QWEN}", 0),
    (f"strategy=single {DEEPSEEK} {FLOAT16}", 0),
    (f"strategy=single {DEEPSEEK} {HALF} {SELECTIVE}", 0),
    (f"strategy=fsdp {TWO} {DEEPSEEK} {HALF}", 1),
    (f"strategy=tensor {TWO} {DEEPSEEK} {FULL}", 1),
    (f"strategy=single {QWEN} {DOUBLE} {SELECTIVE}", 0),
    (f"strategy=single {QWEN} {FLOAT16}", 0),
    (f"strategy=fsdp {TWO} {QWEN} {HALF}", 0),
    (f"strategy=context {TWO} {QWEN} {FULL} strategy.context_attention=all_to_all", 0),
    (f"strategy=single {MOE} {DOUBLE}", 0),
    (f"strategy=single {MOE} {FLOAT16}", 0),
    (f"strategy=single {MOE} {HALF} {SELECTIVE}", 0),
    (f"strategy=single {MOE} {FULL} model.experts_per_token=3", 0),
    (f"strategy=single model=124m {SMALL} {HALF}", 0),
    (f"strategy=single model=20m {SMALL} {LOGITS} {FULL}", 0),
    (f"strategy=data {TWO} {SMALL} training.microbatch_size=2", 1),
    (f"strategy=parameter_server nodes=3 {SMALL} {HALF} training.global_batch_size=8", 1),
    (f"strategy=fsdp {TWO} {SMALL} {DOUBLE} {FULL}", 1),
    (f"strategy=fsdp {TWO} {MOE} {HALF}", 1),
    (f"strategy=fsdp nodes=8 gpus_per_node=8 {SMALL} model=8b {HALF} {FULL}", 63),
    (f"strategy=fsdp {FOUR} {SMALL} strategy.tensor=2 {HALF}", 3),
    (f"strategy=fsdp {FOUR} {SMALL} strategy.context=2 {HALF} {SELECTIVE}", 3),
    (f"strategy=fsdp {EIGHT} {SMALL} strategy.tensor=2 strategy.context=2 {HALF}", 7),
    (f"strategy=tensor {TWO} {SMALL} {FULL}", 0),
    (f"strategy=tensor {TWO} {SMALL} {HALF} {SELECTIVE} strategy.sequence_parallel=false", 0),
    (f"strategy=tensor {TWO} {SMALL} {HALF} {SELECTIVE}", 1),
    (f"strategy=data {FOUR} {SMALL} strategy.tensor=2 {HALF} {LOGITS}", 3),
    (f"strategy=context {TWO} {SMALL} strategy.context_attention=gather {HALF} {LOGITS}", 1),
    (f"strategy=context {TWO} {SMALL} strategy.context_attention=all_to_all {HALF}", 1),
    (f"strategy=context {TWO} {SMALL} {DOUBLE} {FULL}", 0),
    (f"strategy=expert {TWO} {MOE} {FULL}", 1),
    (f"strategy=expert {TWO} {MOE} {SELECTIVE}", 1),
    (f"strategy=expert {FOUR} {MOE} strategy.expert=2 strategy.replicate=2 {DOUBLE}", 1),
    (f"strategy=model {TWO} {HALF}", 1),
    (f"strategy=pipeline {FOUR} {HALF} {SELECTIVE}", 2),
    (f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2 {HALF}", 3),
    (f"strategy=pipeline {TWO} strategy.schedule=interleaved {FULL}", 1),
    (f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.context=2 {HALF}", 1),
    (f"strategy=hybrid nodes=8 gpus_per_node=8 model=70b {HALF} {FULL}", 60),
]  # fmt: skip


def test_there_are_fifty_configurations() -> None:
    assert len({*CASES, *MORE}) >= 50


@pytest.mark.processes
@pytest.mark.parametrize(("words", "rank"), [*CASES, *in_full(MORE)])
def test_activations_are_those_that_autograd_keeps(words: str, rank: int) -> None:
    """Within 1 %: two numbers of the loss and the shares of experts are left out."""
    config, *_ = resolve(composed(*words.split(), "device=cpu"))  # whose kernels autograd is asked about
    found = plan(config)
    (measured,) = measure(config, [rank], microbatches=1)
    assert found.devices[rank].stages == pytest.approx(measured.activations, rel=0.01)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks_keep_less_than_the_plan_of_eager_mode(dtype: str) -> None:
    """Of torch 2.13 on CPUs: 0.78 and 0.65 of it."""
    eager, compiled = (kept_bytes(dtype, compiles=compiles) for compiles in (False, True))
    assert 0.5 * eager < compiled < eager


def kept_bytes(dtype: str, *, compiles: bool) -> int:
    """Of two blocks, without their weights."""
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    from hpc_parallel.models.transformer import Transformer
    from hpc_parallel.strategies import compiling

    model = Transformer(layers=2, dim=128, heads=4, kv_heads=2, ffn_dim=352, vocab_size=256)
    model = model.to(getattr(torch, dtype))
    if compiles:
        compiling.apply(model)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = model.stem(torch.zeros(2, 128, dtype=torch.int64))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks.values():
            x = block(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
