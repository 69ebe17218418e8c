"""Planned parameters, gradients and optimizer state equal those of a rank that is assembled and trained.

`tests/oracle` assembles the rank as a run does, in a world whose other ranks are fakes. The layouts
of `tests/distributed/test_rank_bytes.py` are also compared with runs of real processes.
"""

from __future__ import annotations

import pytest
import torch

from hpc_parallel.config.build import build
from hpc_parallel.config.resolve import resolve
from hpc_parallel.layout.model_weights import sample_shape_of, weights_of
from hpc_parallel.planning.memory import plan
from hpc_parallel.planning.planned_state import KINDS
from tests.composed import composed
from tests.marks import in_full
from tests.oracle.traced_rank import measure

SMALL = "model.layers=2"
EXPERTS = f"model=moe_tiny {SMALL}"
DEEPSEEK = (
    "model.shared_experts=2 model.dense_layers=1 model.dense_ffn_dim=352 model.gate=sigmoid "
    "model.balance_step=0.01"
)
UNET, SEGMENTER = "model=unet data=cells", "model=segmenter data=cells"
CONVNET = "model=convnet data=digits data.height=64 data.width=64"
TWO, FOUR, EIGHT = "nodes=2", "nodes=2 gpus_per_node=2", "nodes=2 gpus_per_node=4"
MODELS = {
    "124m": "", "1b": "", "20m": "", "70b": "", "8b": "", "convnet": "data=digits",
    "deepseek_v2_lite": "", "huggingface": "",
    "mixtral_8x7b": "", "moe_tiny": "", "qwen3_30b_a3b": "", "segmenter": "data=cells", "tiny": "",
    "unet": "data=cells",
}  # fmt: skip
ROUNDED = "training.precision=bfloat16 training.weights=bfloat16 optimizer.state=bfloat16"
CASES = [  # words, ranks
    (f"strategy=single {SMALL}", [0]),
    (f"strategy=single {SMALL} training.precision=float64 optimizer=sgd", [0]),
    (f"strategy=data {TWO} {SMALL} optimizer=muon", [0]),
    (f"strategy=dataparallel gpus_per_node=2 {SMALL} device=cpu", [0]),
    (f"strategy=parameter_server nodes=3 {SMALL}", [0, 2]),
    (f"strategy=fsdp {TWO} {UNET} optimizer=adafactor", [1]),
    # More ranks than a norm has weights, so that some slices are empty.
    (f"strategy=fsdp nodes=8 gpus_per_node=32 training.global_batch_size=256 {SMALL}", [0, 200]),
    (f"strategy=hsdp {FOUR} {SMALL} optimizer=adafactor", [1]),
    (f"strategy=tensor {TWO} {SMALL}", [0]),
    (f"strategy=tensor {TWO} {CONVNET}", [1]),
    (f"strategy=tensor {TWO} model=huggingface model.config.num_hidden_layers=2", [0]),
    (f"strategy=data {FOUR} strategy.tensor=2 {SMALL} optimizer=muon", [0, 3]),
    (f"strategy=context {FOUR} strategy.shard=2 {SMALL}", [3]),
    (f"strategy=expert {FOUR} strategy.replicate=2 {EXPERTS} optimizer=muon", [0, 3]),
    (f"strategy=fsdp {EIGHT} strategy.expert=2 {EXPERTS} optimizer=muon", [0, 7]),
    (f"strategy=context {EIGHT} strategy.context=2 strategy.expert=2 strategy.shard=2 {EXPERTS}", [6]),
    (f"strategy=tensor {EIGHT} strategy.tensor=2 strategy.expert=2 strategy.shard=2 {EXPERTS}", [5]),
    (f"strategy=tile {TWO} {SEGMENTER}", [1]),
    (f"strategy=model {TWO} {UNET}", [0, 1]),
    (f"strategy=pipeline {TWO} strategy.schedule=zbv", [0, 1]),
    (f"strategy=pipeline {TWO} strategy.schedule=interleaved strategy.balance=parameters", [0, 1]),
    (f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2 strategy.cuts=[3]", [0, 3]),
    (f"strategy=hybrid {EIGHT} strategy.tensor=2", [0, 7]),
    (f"strategy=fsdp {FOUR} strategy.tensor=2 {SMALL} {ROUNDED}", [3]),
    (f"strategy=tensor {TWO} {EXPERTS} model.head_dim=16 model.qk_norm=true", [1]),
    (f"strategy=tensor {FOUR} strategy.tensor=2 strategy.expert=2 {EXPERTS} {DEEPSEEK}", [3]),
    (f"strategy=data {TWO} {SMALL} training.precision=float64 optimizer.state=bfloat16", [0]),
]  # fmt: skip
MORE = [
    (f"strategy=fsdp nodes=3 training.global_batch_size=3 {SMALL}", [0, 2]),
    (f"strategy=fsdp nodes=3 training.global_batch_size=3 {SMALL} optimizer=muon", [0, 2]),
    (f"strategy=tensor {TWO} {SMALL} model.tied_head=false", [1]),
    (f"strategy=fsdp {FOUR} strategy.tensor=2 {SMALL} optimizer=muon", [0, 3]),
    (f"strategy=hsdp {EIGHT} strategy.expert=2 {EXPERTS} model.ffn_dim=50", [1, 6]),
    (f"strategy=pipeline {FOUR} strategy.shares=[3,1,1,1] model=20m", [0, 3]),
    ("strategy=fsdp nodes=2 gpus_per_node=8 model=1b", [15]),
    ("strategy=fsdp nodes=8 gpus_per_node=8 model=8b", [0]),
    ("strategy=hybrid nodes=8 gpus_per_node=8 model=70b", [0, 29, 63]),
    (f"strategy=data {TWO} {SMALL} {ROUNDED} optimizer=sgd", [0]),
    (f"strategy=pipeline {FOUR} strategy.pipeline=2 strategy.shard=2 {ROUNDED}", [0, 3]),
    (f"strategy=expert {FOUR} strategy.replicate=2 {EXPERTS} {ROUNDED}", [0, 3]),
]
EVERY = [
    (f"strategy={strategy} {nodes} model={model} {data} {optimizer} device=cpu", [0, 1])
    for model, data in MODELS.items()
    # These took minutes, and more memory than the machine of the tests has.
    if model not in ("deepseek_v2_lite", "mixtral_8x7b", "qwen3_30b_a3b")
    for strategy, nodes in (("data", TWO), ("fsdp", TWO), ("pipeline", TWO), ("parameter_server", TWO))
    for optimizer in ("optimizer=adamw", "optimizer=muon", "optimizer=sgd")
]


def planned_and_measured(words: str, ranks: list[int]) -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    config, *_ = resolve(composed(*words.split()))
    plan_of_all = plan(config)
    assert all("activations" in clause for clause in plan_of_all.unknown)
    kinds = ("parameters", "gradients", "optimizer")
    planned = [vars(plan_of_all.devices[rank].state) for rank in ranks]
    measured = [
        {kind: getattr(held, kind) for kind in kinds} for held in measure(config, ranks, microbatches=1)
    ]
    return planned, measured


@pytest.mark.processes
@pytest.mark.parametrize(("words", "ranks"), [*CASES, *in_full([*MORE, *EVERY])])
def test_the_state_is_that_of_the_assembled_rank(words: str, ranks: list[int]) -> None:
    planned, measured = planned_and_measured(words, ranks)
    assert planned == measured


@pytest.mark.parametrize("model", MODELS)
def test_the_weights_are_those_of_the_model(model: str) -> None:
    """Names and shapes in their order, and what stages are balanced by."""
    config, values, _ = resolve(composed(f"model={model}", *MODELS[model].split()))
    shape = sample_shape_of(config.model, config.data)
    assert shape is not None
    weights = weights_of(config.model, sample_shape=shape)
    with torch.device("meta"):
        built = build(values["model"], key="model")
    assert [(w.name, w.shape) for w in weights.weights] == [
        (name, tuple(weight.shape)) for name, weight in built.named_parameters()
    ]
    assert dict(built.tied) == dict(weights.tied)
    assert built.forward_flops(shape) == weights.flops


def test_every_optimizer_of_torch_that_we_ship_is_known() -> None:
    for name in ("adamw", "sgd", "adafactor", "muon"):
        config, *_ = resolve(composed(f"optimizer={name}"))
        targets = {
            config.optimizer._target_,
            *(rule["_target_"] for rule in config.optimizer.groups.values()),
        }
        assert targets <= KINDS.keys()


def test_another_optimizer_is_announced() -> None:
    config, *_ = resolve(composed("optimizer=custom", "optimizer._target_=torch.optim.RMSprop"))
    found = plan(config)
    assert found.unknown == ["the state of torch.optim.RMSprop counts as 0, because it is not known"]


def test_a_model_of_another_class_has_no_plan() -> None:
    words = ("model=huggingface", "model.config.model_type=gpt2")
    assert plan(resolve(composed(*words))[0]) is None


def test_an_8b_model_fits_one_h200_in_bfloat16() -> None:
    """With 2 bytes of weights, 2 of gradients and 4 of state for each of 8,030,261,248 parameters."""
    run = (
        "model=8b", "strategy=single", "device=cuda", "data.sequence_length=4096",
        "training.global_batch_size=8", "training.microbatch_size=4",
        "training.activation_checkpointing=full", "training.precision=bfloat16",
    )  # fmt: skip
    wide, rounded = (plan(resolve(composed(*run, *words.split()))[0]).fullest for words in ("", ROUNDED))
    count, capacity = 8_030_261_248, 141e9
    assert (rounded.state.parameters, rounded.state.gradients) == (2 * count, 2 * count)
    assert rounded.state.optimizer == 4 * count + 4 * 291  # a count of steps for each weight
    assert 8 * count < rounded.total < 90e9 < capacity < wide.total
