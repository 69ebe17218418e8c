"""Experts split over devices against one device, and the mixture against a sum over all experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.auxiliary_loss import AuxiliaryLoss, SequenceSum
from hpc_parallel.models.experts import Experts, LoadBalance, SharedExperts, grouped_product
from hpc_parallel.models.moe import MixtureOfExperts, imbalance
from hpc_parallel.strategies.expert import BalanceExperts, ExpertReplicas, balances_of
from hpc_parallel.torch_internals import group_of, operator_arguments, operator_name
from hpc_parallel.worker.session import Session
from tests.composed import prepared
from tests.marks import in_full
from tests.parity import LONG, follow_one_device
from tests.workers import Train, Workers

MODEL = ("model=moe_tiny", "model.layers=2", "model.ffn_dim=48", "model.balance=0.1")
QWEN = ("model.head_dim=16", "model.qk_norm=true", "model.renormalise=true", "model.experts_per_token=3")
DEEPSEEK = (
    "model.gate=sigmoid", "model.renormalise=true", "model.shared_experts=2", "model.balance=0",
    "model.balance_step=0.1", "model.dense_layers=1", "model.dense_ffn_dim=96", "model.layers=3",
)  # fmt: skip
LAYOUTS = {
    "expert over 2": ("strategy=expert", "nodes=2"),
    "expert over 4, accumulating 4": ("strategy=expert", "nodes=4", "training.microbatch_size=1"),
    "expert over 2, one expert a token": ("strategy=expert", "nodes=2", "model.experts_per_token=1"),
    "replicate 2 x expert 2": (
        "strategy=expert", "nodes=2", "gpus_per_node=2", "strategy.expert=2", "strategy.replicate=2",
        "training.microbatch_size=2",
    ),
    "pipeline 2 x expert 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.microbatches=4",
    ),
    "pipeline 2 x expert 2, zero bubble": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble", "model.layers=4",
    ),
    "checkpointed": ("strategy=expert", "nodes=2", "training.activation_checkpointing=full"),
    "checkpointed, selective": (
        "strategy=expert", "nodes=2", "training.microbatch_size=2",
        "training.activation_checkpointing=selective",
    ),
    "experts on each replica": ("strategy=data", "nodes=2", "training.microbatch_size=4"),
    "experts in slices": ("strategy=fsdp", "nodes=2"),
    "experts in stages": ("strategy=pipeline", "nodes=2", "strategy.microbatches=4"),
    "dataparallel": ("strategy=dataparallel", "gpus_per_node=2"),
    "parameter server": ("strategy=parameter_server", "nodes=3"),
    "shard 2 x expert 2": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2", "training.microbatch_size=2",
    ),
    "shard 2 x expert 2, checkpointed": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2", "training.microbatch_size=2",
        "training.activation_checkpointing=full", "strategy.prefetch=1",
    ),
    "shard 2 x expert 2, selective": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2", "strategy.reshard=false",
        "training.activation_checkpointing=selective",
    ),
    "replicate 2 x shard 2 x expert 2": (
        "strategy=hsdp", "nodes=2", "gpus_per_node=4", "strategy.expert=2", "training.microbatch_size=1",
    ),
    "pipeline 2 x shard 2 x expert 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.shard=2", "strategy.microbatches=4",
    ),
    "tensor 2": ("strategy=tensor", "nodes=2"),
    "expert 2 x tensor 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.expert=2",
        "training.microbatch_size=4",
    ),
    "expert 2 x tensor 2, as Qwen3": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.expert=2", *QWEN,
    ),
    "shard 2 x expert 2, as Qwen3": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2", *QWEN,
        "training.activation_checkpointing=full",
    ),
    "pipeline 2 x expert 2 x context 2, as Qwen3": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.context=2", "strategy.microbatches=4", *QWEN,
    ),
    "shard 2 x expert 2, as DeepSeek": (
        "strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2", *DEEPSEEK,
        "training.microbatch_size=2", "training.activation_checkpointing=full",
    ),
    "expert 2 x tensor 2, as DeepSeek": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.expert=2", *DEEPSEEK,
    ),
    "replicate 2 x expert 2 x context 2, as DeepSeek": (
        "strategy=context", "nodes=2", "gpus_per_node=4", "strategy.context=2", "strategy.expert=2",
        "strategy.replicate=2", *DEEPSEEK, "training.activation_checkpointing=selective",
    ),
    "pipeline 2 x expert 2, zero bubble, as DeepSeek": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble", *DEEPSEEK, "model.layers=4",
    ),
    "pipeline 2 x shard 2 x tensor 2, as DeepSeek": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.shard=2",
        "strategy.tensor=2", "strategy.microbatches=4", *DEEPSEEK,
    ),
    "replicate 2 x tensor 2, whole sequences": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.replicate=2",
        "strategy.sequence_parallel=false",
    ),
    "shard 2 x expert 2 x tensor 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=4", "strategy.tensor=2", "strategy.expert=2",
        "strategy.shard=2", "training.activation_checkpointing=selective",
    ),
    "pipeline 2 x expert 2 x tensor 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.tensor=2", "strategy.microbatches=4",
    ),
    "context 2": ("strategy=context", "nodes=2", "training.microbatch_size=4"),
    "expert 2 x context 2": (
        "strategy=context", "nodes=2", "gpus_per_node=2", "strategy.context=2", "strategy.expert=2",
    ),
    "replicate 2 x expert 2 x context 2": (
        "strategy=context", "nodes=2", "gpus_per_node=4", "strategy.context=2", "strategy.expert=2",
        "strategy.replicate=2", "training.microbatch_size=2",
    ),
    "shard 2 x expert 2 x context 2": (
        "strategy=context", "nodes=2", "gpus_per_node=4", "strategy.context=2", "strategy.expert=2",
        "strategy.shard=2", "training.activation_checkpointing=selective",
    ),
    "expert 2 x context 2 x tensor 2": (
        "strategy=context", "nodes=2", "gpus_per_node=4", "strategy.context=2", "strategy.expert=2",
        "strategy.tensor=2", "strategy.context_attention=all_to_all",
    ),
    "pipeline 2 x expert 2 x context 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.context=2", "strategy.microbatches=4", "strategy.context_attention=gather",
    ),
    "pipeline 2 x shard 2 x expert 2 x tensor 2": (
        "strategy=pipeline", "nodes=4", "gpus_per_node=4", "strategy.pipeline=2", "strategy.shard=2",
        "strategy.expert=2", "strategy.tensor=2", "strategy.microbatches=2",
    ),
    "pipeline 2 x shard 2 x expert 2 x context 2": (
        "strategy=pipeline", "nodes=4", "gpus_per_node=4", "strategy.pipeline=2", "strategy.shard=2",
        "strategy.expert=2", "strategy.context=2", "strategy.microbatches=2",
    ),
    "replicate 2 x pipeline 2 x expert 2, zero bubble": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.replicate=2", "strategy.microbatches=4", "strategy.schedule=interleaved_zero_bubble",
        "model.layers=4",
    ),
}  # fmt: skip
SLOW = (
    "expert 2 x tensor 2, as DeepSeek", "replicate 2 x expert 2 x context 2, as DeepSeek",
    "pipeline 2 x expert 2, zero bubble, as DeepSeek", "pipeline 2 x shard 2 x tensor 2, as DeepSeek",
    "shard 2 x expert 2, as Qwen3", "pipeline 2 x expert 2 x context 2, as Qwen3",
    "checkpointed", "shard 2 x expert 2, checkpointed", "shard 2 x expert 2, selective",
    "tensor 2", "replicate 2 x tensor 2, whole sequences", "shard 2 x expert 2 x tensor 2",
    "pipeline 2 x shard 2 x expert 2 x tensor 2", "pipeline 2 x shard 2 x expert 2 x context 2",
    "pipeline 2 x expert 2 x tensor 2", "context 2", "replicate 2 x expert 2 x context 2",
    "shard 2 x expert 2 x context 2", "expert 2 x context 2 x tensor 2", "pipeline 2 x expert 2 x context 2",
    "replicate 2 x shard 2 x expert 2", "pipeline 2 x shard 2 x expert 2",
    "replicate 2 x pipeline 2 x expert 2, zero bubble", "parameter server", "dataparallel",
    "experts in stages", "expert over 2, one expert a token", "pipeline 2 x expert 2", "experts in slices",
    "expert over 4, accumulating 4",
)  # fmt: skip
CASES = [
    *((layout, "float64") for layout in LAYOUTS if layout not in SLOW),
    *in_full((layout, "float64") for layout in SLOW),
    *in_full(("expert over 2", exactness) for exactness in ("float64, untied head", LONG)),
]


@pytest.mark.parametrize(("layout", "exactness"), CASES)
def test_layout_follows_one_device(trained: Train, layout: str, exactness: str) -> None:
    follow_one_device(trained, (*MODEL, *LAYOUTS[layout]), exactness=exactness)


def _mixture(*, per_token: int, dtype: torch.dtype, **options: Any) -> tuple[MixtureOfExperts, Tensor]:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(Experts(4, dim=16, hidden=24), per_token=per_token, balance=0.5, **options)
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return mixture.to(dtype), torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)


def _sum_over_all_experts(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every expert computes every token; the gates of experts that are not chosen are 0."""
    probabilities = F.softmax(x @ mixture.router.weight.T, dim=-1)
    smallest = probabilities.topk(mixture.per_token).values[..., -1:]
    gates = torch.where(probabilities >= smallest, probabilities, 0)
    experts = mixture.experts
    outputs = [
        (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        for gate, up, down in zip(experts.gate, experts.up, experts.down, strict=True)
    ]
    return torch.einsum("bse,ebsd->bsd", gates, torch.stack(outputs))


@pytest.mark.parametrize("per_token", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_a_mixture_is_the_sum_over_its_experts(per_token: int, dtype: torch.dtype, tolerance: float) -> None:
    mixture, x = _mixture(per_token=per_token, dtype=dtype)
    mixture.balance = 0.0
    reference = _sum_over_all_experts(mixture, x)
    output = mixture(x)
    torch.testing.assert_close(output, reference, rtol=tolerance, atol=tolerance)
    direction = torch.randn_like(output)
    tensors = [x, *mixture.parameters()]
    for gradient, wanted in zip(
        torch.autograd.grad(output, tensors, direction),
        torch.autograd.grad(reference, tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_bias_chooses_and_the_gates_are_sigmoids(renormalise: bool) -> None:
    """Against each token by itself: only the choice of experts sees the bias; shared experts have no gate."""
    mixture, x = _mixture(
        per_token=2, dtype=torch.float64, renormalise=renormalise, gate="sigmoid",
        shared=SharedExperts(dim=16, hidden=10), load=LoadBalance(4, step=0.1),
    )  # fmt: skip
    mixture.balance, bias = 0.0, [0.4, -0.3, 0.2, 0.0]
    mixture.load.expert_bias.copy_(torch.tensor(bias))
    networks, shared, expected = mixture.experts, mixture.shared, []
    chosen_by_bias = 0
    for token in x.flatten(0, 1):
        scores = (1 / (1 + torch.exp(-(mixture.router.weight @ token)))).tolist()
        chosen = sorted(range(4), key=lambda e: scores[e] + bias[e])[-2:]
        chosen_by_bias += set(chosen) != set(sorted(range(4), key=scores.__getitem__)[-2:])
        total = sum(scores[e] for e in chosen) if renormalise else 1.0
        output = shared.down @ (F.silu(shared.gate @ token) * (shared.up @ token))
        for e in chosen:
            hidden = F.silu(networks.gate[e] @ token) * (networks.up[e] @ token)
            output = output + scores[e] / total * (networks.down[e] @ hidden)
        expected.append(output)
    assert chosen_by_bias > 2
    torch.testing.assert_close(mixture(x).flatten(0, 1), torch.stack(expected), rtol=1e-12, atol=1e-12)


def test_a_bias_moves_by_one_step_against_the_load_of_a_batch() -> None:
    mixture, x = _mixture(per_token=1, dtype=torch.float64, load=LoadBalance(4, step=0.25))
    block = nn.Module()
    block.mixture = mixture

    class Twice:
        copies = ()

        def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.no_grad():
                mixture(inputs)  # a validation: not counted
            return sum(mixture(part).sum() for part in inputs.chunk(3))

    schedule = BalanceExperts(Twice(), balances=balances_of([block]), axis=None)
    for _ in range(2):
        before = mixture.load.expert_bias.clone()
        scores = F.softmax(x @ mixture.router.weight.T, dim=-1) + before
        counts = Counter(scores.argmax(-1).flatten().tolist())
        schedule.train(x.detach(), x)
        mean = 15 / 4
        moves = [0.25 if counts[e] < mean else -0.25 for e in range(4)]
        torch.testing.assert_close(
            mixture.load.expert_bias - before, torch.tensor(moves, dtype=torch.float64)
        )
    assert set(mixture.state_dict()) - dict(mixture.named_parameters()).keys() == {"load.expert_bias"}


def test_groups_without_rows_have_gradients_of_zero() -> None:
    for dtype in (torch.float32, torch.float64):
        weights = torch.randn(3, 8, 16, dtype=dtype, requires_grad=True)
        rows = torch.randn(4, 16, dtype=dtype)
        products = grouped_product(rows, weights, torch.tensor([4, 4, 4], dtype=torch.int32))
        torch.testing.assert_close(products, rows @ weights[0].T)
        (gradient,) = torch.autograd.grad(products, weights, torch.ones_like(products))
        torch.testing.assert_close(gradient[0], rows.sum(0).expand(8, 16))
        assert not gradient[1:].any()


def test_the_balancing_loss_is_1_for_each_position_if_experts_are_used_equally() -> None:
    even = torch.full((2, 6, 3), 1 / 3)
    in_turn = torch.arange(6).remainder(3).expand(2, 6).unsqueeze(-1)
    assert float(imbalance(even, in_turn, SequenceSum())) == pytest.approx(2 * 6)
    one = F.one_hot(torch.zeros(2, 6, dtype=torch.int64), 3).float()
    assert float(imbalance(one, torch.zeros(2, 6, 1, dtype=torch.int64), SequenceSum())) == pytest.approx(
        3 * 2 * 6
    )


def test_the_gradient_of_the_balancing_loss_is_as_if_the_loss_had_added_it() -> None:
    mixture, x = _mixture(per_token=2, dtype=torch.float64)
    mixture.auxiliary.loss_terms = 7
    router = mixture.router.weight
    (gradient,) = torch.autograd.grad(mixture(x).sum() / 7, router)
    probabilities = F.softmax(x @ router.T, dim=-1)
    chosen = probabilities.topk(2).indices
    loss = _sum_over_all_experts(mixture, x).sum() + 0.5 * imbalance(probabilities, chosen, SequenceSum())
    (wanted,) = torch.autograd.grad(loss / 7, router)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_an_auxiliary_loss_changes_no_value() -> None:
    x = torch.randn(3, requires_grad=True)
    term = torch.ones((), requires_grad=True)
    assert torch.equal(AuxiliaryLoss()(x, term), x)


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    (part,) = Session.open(config, device=torch.device("cpu")).assembled.parts
    return {
        name: tuple((weight.to_local() if isinstance(weight, DTensor) else weight).shape)
        for name, weight in part.named_parameters()
    }


def test_a_device_holds_its_experts_only(workers: Workers) -> None:
    config = prepared(*MODEL, "data.max_bytes=200000", "strategy=expert", "nodes=4").config
    for shapes in workers.run(4, _shapes, config):
        assert shapes["blocks.0.feed_forward.experts.gate"] == (8 // 4, 48, 128)
        assert shapes["blocks.0.feed_forward.experts.down"] == (8 // 4, 128, 48)
        assert shapes["blocks.0.feed_forward.router.weight"] == (8, 128)


def test_a_device_holds_a_slice_of_its_experts_only(workers: Workers) -> None:
    """The devices of both axes slice all but the experts; those of `shard` slice one device's experts."""
    config = prepared(*MODEL, "data.max_bytes=200000", *LAYOUTS["shard 2 x expert 2"]).config
    for shapes in workers.run(4, _shapes, config):
        assert shapes["blocks.0.feed_forward.experts.gate"] == (8 // 2, 48, 128 // 2)
        assert shapes["blocks.0.feed_forward.experts.down"] == (8 // 2, 128 // 2, 48)
        assert shapes["blocks.0.feed_forward.router.weight"] == (8 // 4, 128)
        assert shapes["blocks.0.attention.query.weight"] == (128 // 4, 128)


def _collectives_of_a_step(config: RunConfig) -> list[tuple[str, int]]:
    """The all-to-alls, and the all-reduces between replicas of experts, of a step's passes in their order.

    With each the number of elements that this rank sends.
    """
    session = Session.open(config, device=torch.device("cpu"))
    assembled = session.assembled
    replicas = assembled.mesh["replicate"].get_group()
    calls: list[tuple[str, int]] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name, given = operator_name(function) or "", operator_arguments(function, args, kwargs)
            if name in ("hpc_parallel::exchange_counts", "hpc_parallel::exchange_rows"):
                calls.append(("all_to_all", 0))
            elif name == "c10d::allreduce_" and group_of(given["process_group"]) == replicas:
                calls.append(("all_reduce", given["tensors"][0].numel()))
            return function(*args, **(kwargs or {}))

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (session.plan.batch.samples_per_replica, 16), generator=generator)
    with Noting():
        assembled.forward_backward.train(tokens, tokens)
    return calls


def test_gradients_of_experts_are_averaged_while_the_backward_pass_goes_on(workers: Workers) -> None:
    """Those of a block before the gradients of its inputs are sent, once for both microbatches."""
    config = prepared(
        *MODEL, "data.max_bytes=200000", "data.sequence_length=16", *LAYOUTS["replicate 2 x expert 2"],
        "training.global_batch_size=16",
    ).config  # fmt: skip
    assert config.training.microbatch_size == 2  # of 4 samples of a replica
    for calls in workers.run(4, _collectives_of_a_step, config):
        weights = [elements for kind, elements in calls if kind == "all_reduce"]
        assert weights == [4 * 48 * 128] * 2 * 3  # 4 of 8 experts; two blocks of three weights
        of_block = ["all_to_all", *["all_reduce"] * 3, "all_to_all"]  # gradients arrive, and go back
        assert [kind for kind, _ in calls[-10:]] == of_block * 2


class _Uses:
    """A schedule of one microbatch that uses some of `weights`, on each rank others."""

    copies = ()

    def __init__(self, weights: dict[str, Parameter], used: str) -> None:
        self._weights, self._used = weights, used

    def train(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = sum((self._weights[name].to_local() * inputs).sum() for name in self._used)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.detach()

    evaluate = train


def _averaged(used_by_rank: list[str]) -> dict[str, list[float] | None]:
    axis = DeviceMesh("cpu", list(range(len(used_by_rank))), mesh_dim_names=("replicate",))
    rank = axis.get_local_rank()
    model = nn.ParameterDict(
        {name: Parameter(DTensor.from_local(torch.zeros(2), axis, [Replicate()])) for name in "abcd"}
    )
    step = ExpertReplicas(
        _Uses(dict(model), used_by_rank[rank]),
        parts=[model],  # type: ignore[list-item]
        replicas=axis,
        microbatches=1,
        finds_unused=True,
    )
    step.train(torch.tensor([1.0, 2.0]) + 10 * rank, torch.zeros(1))
    return {
        name: None if weight.grad is None else weight.grad.to_local().tolist()  # type: ignore[attr-defined]
        for name, weight in model.items()
    }


def test_replicas_may_use_different_experts(workers: Workers) -> None:
    """A gradient that one replica lacks counts as zero; what none uses gets none, as on one device."""
    expected = {"a": [6.0, 7.0], "b": [5.5, 6.0], "c": [0.5, 1.0], "d": None}
    assert workers.run(2, _averaged, ["ac", "ab"]) == [expected] * 2


OF_INTEREST = {
    "_grouped_mm": "product", "exchange_rows": "all_to_all", "wait_for_copy": "wait", "sort": "sort",
    "exchange_counts": "counts", "index": "gather",
}  # fmt: skip


def _operators_of_a_step(configs: list[RunConfig]) -> list[list[str]]:
    """The operators of interest in one pass forward and backward of each configuration, in their order."""
    found = []
    for config in configs:
        session = Session.open(config, device=torch.device("cpu"))
        calls: list[str] = []

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None, calls: list[str] = calls
            ) -> Any:
                name = (operator_name(function) or "").partition("::")[2]
                if name in OF_INTEREST:
                    calls.append(OF_INTEREST[name])
                return function(*args, **(kwargs or {}))

        tokens = torch.randint(256, (session.plan.batch.samples_per_replica, 16))
        with Noting():
            session.assembled.forward_backward.train(tokens, tokens)
        found.append(calls)
    return found


def test_selective_checkpointing_repeats_no_product_and_no_message_of_experts(workers: Workers) -> None:
    """And the host waits once a layer, after it has queued the sorting. Two blocks, one microbatch."""
    words = (*MODEL, "data.max_bytes=200000", "data.sequence_length=16", *LAYOUTS["expert over 2"],
             "training.global_batch_size=4", "training.precision=float32")  # fmt: skip
    policies = ("none", "selective", "full")
    configs = [
        prepared(*words, "training.microbatch_size=2", f"training.activation_checkpointing={keeps}").config
        for keeps in policies
    ]
    for by_policy in workers.run(2, _operators_of_a_step, configs):
        counts = {keeps: Counter(calls) for keeps, calls in zip(policies, by_policy, strict=True)}
        once = {"product": 2 * (3 + 6), "all_to_all": 2 * (2 + 2), "counts": 2, "wait": 2}
        again = {"product": 2 * (3 + 6 + 3), "all_to_all": 2 * (2 + 2 + 2), "counts": 4, "wait": 4}
        expected = {"none": once, "selective": once, "full": again}
        assert {keeps: {name: count[name] for name in once} for keeps, count in counts.items()} == expected
        first_layer = by_policy[0][: by_policy[0].index("wait") + 2]
        assert first_layer[-6:] == ["counts", "sort", "sort", "gather", "wait", "all_to_all"]
