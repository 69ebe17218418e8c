"""Compiled blocks give what their source gives, on layouts and with recomputation, and share their code."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hpc_parallel import torch_internals
from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models import transformer
from hpc_parallel.models.layered import materialise
from hpc_parallel.models.moe import MoeTransformer
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.problems import ConfigError
from hpc_parallel.profiling.traffic import Traffic
from hpc_parallel.strategies import checkpointing, compiling, expert, float8, precision, working_weights
from hpc_parallel.strategies.context import split_sequence
from hpc_parallel.strategies.context.ring import slices_of
from hpc_parallel.strategies.dropout import counted_dropout
from hpc_parallel.strategies.dropout.dropout_shapes import whole_shapes
from hpc_parallel.strategies.tensor import split_layers
from hpc_parallel.training.nonfinite import trace_layers
from tests.dropout_models import Tokens
from tests.marks import in_full
from tests.parity import COMMON, EXACTNESS, assert_follows
from tests.workers import Train, Workers

MIXTURE = (
    "model=moe_tiny", "model.ffn_dim=48", "model.balance=0.1", "model.gate=sigmoid",
    "model.shared_experts=1", "model.dense_layers=1",
)  # fmt: skip
BALANCED = ("model.balance=0", "model.balance_step=0.1", "model.renormalise=true")
LAYOUTS = {
    "fsdp over 2, recomputing": ("float64", "strategy=fsdp", "training.activation_checkpointing=selective"),
    "tensor over 2": ("float32", "strategy=tensor"),
    "tensor over 2, recomputing all": (
        "float64", "strategy=tensor", "training.activation_checkpointing=full"
    ),
    "tensor over 2, shard over 2, recomputing all": (
        "float64", "strategy=fsdp", "gpus_per_node=2", "strategy.tensor=2",
        "training.activation_checkpointing=full",
    ),
    "context over 2, recomputing": (
        "float64", "strategy=context", "training.activation_checkpointing=selective"
    ),
    "context over 2, shard over 2, by heads, recomputing all": (
        "float64", "strategy=fsdp", "gpus_per_node=2", "strategy.context=2",
        "strategy.context_attention=all_to_all", "training.activation_checkpointing=full",
    ),
    "tensor over 2, context over 2": (
        "float64", "strategy=tensor", "gpus_per_node=2", "strategy.tensor=2", "strategy.context=2"
    ),
    "a mixture, fsdp over 2, recomputing all": (
        "float64", "strategy=fsdp", "training.activation_checkpointing=full", *MIXTURE,
    ),
    "a mixture, data over 2": ("float64", "strategy=data", "training.microbatch_size=4", *MIXTURE),
    "a mixture, pipeline over 2": ("float64", "strategy=pipeline", *MIXTURE),
    "a mixture, tensor over 2, recomputing": (
        "float64", "strategy=tensor", *MIXTURE, "training.activation_checkpointing=selective",
    ),
    "a mixture, context over 2": ("float64", "strategy=context", *MIXTURE),
    "a mixture, expert over 2": ("float64", "strategy=expert", *MIXTURE),
    "a mixture without a loss, expert over 2, shard over 2, recomputing all": (
        "float64", "strategy=fsdp", "gpus_per_node=2", "strategy.expert=2", *MIXTURE, *BALANCED,
        "training.microbatch_size=2", "training.activation_checkpointing=full",
    ),
    "a mixture, context over 2, tensor over 2, by heads": (
        "float64", "strategy=context", "gpus_per_node=2", "strategy.context=2", "strategy.tensor=2",
        "strategy.context_attention=all_to_all", *MIXTURE,
    ),
    "a mixture, expert over 2, tensor over 2, shard over 2, recomputing all": (
        "float64", "strategy=fsdp", "gpus_per_node=4", "strategy.expert=2", "strategy.tensor=2", *MIXTURE,
        "training.activation_checkpointing=full",
    ),
    "a mixture without a loss, pipeline over 2, expert over 2, context over 2, recomputing": (
        "float64", "strategy=pipeline", "gpus_per_node=4", "strategy.pipeline=2", "strategy.expert=2",
        "strategy.context=2", *MIXTURE, *BALANCED, "training.activation_checkpointing=selective",
    ),
    "data over 2, in one graph": ("float64", "strategy=data", "training.compile_whole=true"),
}  # fmt: skip


@pytest.fixture(scope="module")
def compiling_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Ranks that take no compiled code, in which groups are written, to another module's tests."""
    with closing(Workers(tmp_path_factory.mktemp("compiling"))) as pool:
        yield pool


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_follow_one_device(compiling_workers: Workers, trained: Train, layout: str) -> None:
    precision, *words = LAYOUTS[layout]
    options, losses, weights = EXACTNESS[precision]
    options += ("model.layers=2",)
    cache = compiling_workers.folder / "cache"
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    before = set(cache.rglob("*.so"))
    counting = "training.callbacks=[{_target_: tests.callbacks.CompiledGraphs}]"
    compiled = compiling_workers.train(
        *COMMON, *options, *words, "nodes=2", "training.compile=true", counting, variables=variables
    )
    assert set(cache.rglob("*.so")) > before  # it did compile
    graphs, breaks = json.loads((compiled.folder / "compiled_graphs.json").read_text())
    assert graphs > 0
    assert breaks == {}
    model = [word for word in words if word.startswith("model")]
    reference = trained(*COMMON, *options, *model, "strategy=single")
    assert_follows(compiled, reference, losses=losses, weights=weights)


def small_block(keeps: str, *, strategy: StrategyConfig, mesh: DeviceMesh) -> torch.nn.Module:
    """A compiled block of a decoder. The last axis of `mesh` splits its layers or its sequences."""
    model = small_decoder()
    apply = split_layers.apply if strategy.name == "tensor" else split_sequence.apply
    apply(model, axis=mesh[strategy.name], options=strategy)
    checkpointing.apply(model, keeps=keeps, compiled=True)
    compiling.apply(model)
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    return model.distinct_blocks[0]


def small_decoder() -> Transformer:
    return Transformer(layers=1, dim=16, heads=4, kv_heads=2, ffn_dim=24, vocab_size=8)


def of_block(block: torch.nn.Module, rows: torch.Tensor | None = None) -> tuple[list[Tensor], dict[str, int]]:
    """The gradients of one pass of these positions through the block, and the bytes that it sends."""
    numbers = torch.randn(2, 2, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x, gradient = numbers if rows is None else numbers[:, :, rows]
    with Traffic() as traffic:
        block(x.clone().requires_grad_()).backward(gradient)
    gradients = [weight.grad for weight in block.parameters() if weight.grad is not None]
    full = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    return full, dict(traffic.sent)


SPLITS = {  # how a block is split, and the pieces of 8 positions that it sends, without and with repetition
    "slices": ({"name": "tensor"}, {"all_gather": (4, 6), "reduce_scatter": (4, 5)}),
    "whole": ({"name": "tensor", "sequence_parallel": False}, {"all_reduce": (8, 10)}),
    # Keys and values are as wide as the stream, together. Gradients make two hops, in float64 as all.
    "ring": ({"name": "context", "context_attention": "ring"}, {"send": (4, 5)}),
    "gather": (
        {"name": "context", "context_attention": "gather"}, {"all_gather": (2, 3), "reduce_scatter": (1, 1)}
    ),
    # Half of the queries, keys and values go to the other device, and half of the outputs.
    "all_to_all": ({"name": "context", "context_attention": "all_to_all"}, {"all_to_all": (3, 4.5)}),
}  # fmt: skip


def pass_through_split_blocks(splits: Sequence[str]) -> list[tuple[str, str, list[Tensor], dict[str, int]]]:
    """On each of two ranks. The partitioner decides what is computed again, before any code is generated."""
    rank, found = dist.get_rank(), []
    compile_partitioned = partial(torch.compile, backend="aot_eager_decomp_partition")
    with mock.patch.object(torch, "compile", compile_partitioned):
        for split, keeps in itertools.product(splits, ("selective", "full")):
            options, _ = SPLITS[split]
            mesh, strategy = (
                init_device_mesh("cpu", (2,), mesh_dim_names=(options["name"],)),
                StrategyConfig(**options),
            )
            block = small_block(keeps, strategy=strategy, mesh=mesh)
            rows = torch.arange(16)
            if split == "slices":
                rows = rows.chunk(2)[rank]
            elif split != "whole":
                rows = torch.cat([rows[part] for part in slices_of(rank, degree=2, length=16)])
            gradients, sent = of_block(block, rows)
            if strategy.name == "context":
                for gradient in gradients:
                    dist.all_reduce(gradient)
            found.append((split, keeps, gradients, sent))
            torch._dynamo.reset()
    return found


@pytest.mark.parametrize("splits", [("slices", "ring"), *in_full([(("whole", "gather", "all_to_all"),)])])
def test_compiled_blocks_that_are_split_send_no_more_than_they_must(
    compiling_workers: Workers, splits: tuple[str, ...]
) -> None:
    """In one graph each. Only `full` sends again what a recomputation needs: all but the last sum."""
    whole = materialise(small_decoder(), seed=0, device="cpu", dtype=torch.float64)
    expected, _ = of_block(whole.distinct_blocks[0])
    piece = 2 * 8 * 16 * 8  # bytes
    for rank in compiling_workers.run(2, pass_through_split_blocks, splits):
        assert len(rank) == 2 * len(splits)
        for split, keeps, gradients, sent in rank:
            torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-11)
            pieces = SPLITS[split][1]
            assert sent == {kind: counts[keeps == "full"] * piece for kind, counts in pieces.items()}


OF_EXPERTS = {  # the operators of experts in one pass through a block, without and with repetition
    "product_of_groups": (6, 9), "weight_gradients_of_groups": (3, 3), "exchange_rows": (4, 6),
    "exchange_counts": (1, 2), "wait_for_copy": (1, 2),
}  # fmt: skip


class Operators(Traffic):
    """Counts the operators of experts too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (torch_internals.operator_name(function) or "").partition("::")[2]
        self.counts.update({name} & {*OF_EXPERTS, "scaled_product_of_groups"})
        return super().__torch_dispatch__(function, types, args, kwargs)


def mixture_block(
    keeps: str, *, compiled: bool, per_token: int, mesh: DeviceMesh | None, recipe: str
) -> torch.nn.Module:
    """A block with experts, split over the axes of `mesh`. Half of each size is one that float8 takes."""
    model = MoeTransformer(
        layers=1, dim=32, heads=2, kv_heads=2, ffn_dim=32, vocab_size=8, experts=4, shared_experts=1,
        experts_per_token=per_token, balance=0.1, balance_step=0.1, gate="sigmoid",
    )  # fmt: skip
    axes = {} if mesh is None else {name: mesh[name] for name in mesh.mesh_dim_names or ()}
    if "expert" in axes:
        expert.apply(model, axis=axes.pop("expert"))
    for name, axis in axes.items():
        apply = split_layers.apply if name == "tensor" else split_sequence.apply
        apply(model, axis=axis, options=StrategyConfig(name=name))
    float8.apply(model, recipe=recipe, device=torch.device("cpu"), **axes)
    checkpointing.apply(model, keeps=keeps, compiled=compiled)
    if compiled:
        compiling.apply(model)
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    return model.distinct_blocks[0]


def pass_through_split_experts(
    keeps: str, per_token: int, other: str | None, recipe: str
) -> tuple[dict[str, int], list[tuple[Tensor, Tensor]]]:
    """On each of the ranks: the operators of a pass, and pairs of a result and of one device's.

    other: an axis beside `expert`; each has two ranks.
    """
    names = ("expert",) if other is None else ("expert", other)
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    sample, place = (*mesh.get_coordinate(), 0)[:2]
    x, gradient = torch.randn(2, 2, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if per_token == 1:  # all tokens are equal, so one device gets none
        x = x[:1, :1].expand_as(x)
    whole = mixture_block("none", compiled=False, per_token=per_token, mesh=None, recipe=recipe)
    inputs = x.clone().requires_grad_()
    for one, of_one in zip(inputs.split(1), gradient.split(1), strict=True):  # float8 scales a microbatch
        whole(one).backward(of_one)
    positions = torch.arange(32)
    if other == "tensor":
        positions = positions.chunk(2)[place]
    elif other == "context":
        positions = torch.cat([positions[part] for part in slices_of(place, degree=2, length=32)])
    rows = torch.tensor([sample])[:, None], positions
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition")):
        block = mixture_block(keeps, compiled=True, per_token=per_token, mesh=mesh, recipe=recipe)
        mine = x[rows].clone().requires_grad_()
        with Operators() as operators:
            block(mine).backward(gradient[rows])
    torch._dynamo.reset()
    pairs = [(mine.grad, inputs.grad[rows])]
    for name, weight in block.named_parameters():
        gradient, summed = weight.grad, {"expert", "context"}
        if isinstance(gradient, DTensor):
            split = {"expert"} & set(gradient.device_mesh.mesh_dim_names or ())
            gradient = gradient.full_tensor() * (2 if split else 1)  # a mean over devices
            summed -= split
        for axis in summed & set(names):
            dist.all_reduce(gradient, group=mesh[axis].get_group())
        pairs.append((gradient, whole.get_parameter(name).grad))
    load = block.get_buffer("feed_forward.load.expert_load")
    for axis in {"expert", "context"} & set(names):
        dist.all_reduce(load, group=mesh[axis].get_group())
    return operators.counts, [*pairs, (load, whole.get_buffer("feed_forward.load.expert_load"))]


@pytest.mark.parametrize(
    ("keeps", "per_token", "other", "recipe"),
    [
        ("selective", 2, "tensor", "off"),
        *in_full([("none", 2, None, "off"), ("full", 2, None, "off"), ("selective", 1, None, "off")]),
        *in_full([("full", 2, "tensor", "off"), ("selective", 2, "context", "off")]),
        *in_full([("selective", 2, "tensor", "rowwise"), ("full", 2, "context", "rowwise")]),
    ],
)
def test_compiled_experts_on_other_devices_are_one_graph(
    compiling_workers: Workers, keeps: str, per_token: int, other: str | None, recipe: str
) -> None:
    """Rows travel to experts and back in it. `selective` repeats no product and no message."""
    expected = Counter({name: number[keeps == "full"] for name, number in OF_EXPERTS.items()})
    if recipe != "off":
        expected["scaled_product_of_groups"] = expected.pop("product_of_groups")
    words = keeps, per_token, other, recipe
    for counts, pairs in compiling_workers.run(4 if other else 2, pass_through_split_experts, *words):
        assert counts == expected
        for found, wanted in pairs:
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def float8_differences(name: str, recipe: str, keeps: str) -> float:
    """On each of two ranks: how far a compiled block in float8, split over `name`, is from its source."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(name,))
    apply = split_layers.apply if name == "tensor" else split_sequence.apply
    x, gradient = torch.randn(2, 2, 32 if name == "context" else 16, 32, dtype=torch.float64)
    results = []
    for compiled in (False, True):
        model = Transformer(layers=1, dim=32, heads=4, kv_heads=4, ffn_dim=64, vocab_size=8)
        apply(model, axis=mesh[name], options=StrategyConfig(name=name))
        float8.apply(model, recipe=recipe, device=torch.device("cpu"), **{name: mesh[name]})
        checkpointing.apply(model, keeps=keeps, compiled=compiled)
        if compiled:
            compiling.apply(model)
        materialise(model, seed=0, device="cpu", dtype=torch.float64)
        (block,) = model.distinct_blocks
        leaf = x.clone().requires_grad_()
        compile_partitioned = partial(torch.compile, backend="aot_eager_decomp_partition")
        with mock.patch.object(torch, "compile", compile_partitioned):
            output = block(leaf)
        output.backward(gradient)
        results.append([output.detach(), leaf.grad, *(weight.grad for weight in block.parameters())])
    torch._dynamo.reset()
    pairs = [
        [x.to_local() if isinstance(x, DTensor) else x for x in pair] for pair in zip(*results, strict=True)
    ]
    return max(float((eager - fused).abs().max() / eager.abs().max()) for eager, fused in pairs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "recipe", "keeps"),
    [("tensor", "tensorwise", "full"), ("context", "rowwise", "none"), ("tensor", "rowwise", "selective")],
)
def test_a_compiled_block_exchanges_scales(
    compiling_workers: Workers, name: str, recipe: str, keeps: str
) -> None:
    assert max(compiling_workers.run(2, float8_differences, name, recipe, keeps)) < 1e-12


class Prepared(torch.nn.Module):
    """A block with a method of the user's own, and one that fills a cache for compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.cached = 0.0

    def prepare(self) -> None:
        raise AssertionError("it is the user's own")

    def prepare_compiled(self, x: Tensor) -> None:
        self.cached = float(x.sum())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cached


def test_only_prepare_compiled_runs_before_compiled_code() -> None:
    block = Prepared()
    output = compiling.run_compiled(lambda forward: forward, set(), Prepared.forward, block, torch.ones(3))
    assert output.tolist() == [4.0] * 3


def test_a_memory_budget_keeps_less_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitioner decides, before any code is generated."""
    compile_partitioned = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", compile_partitioned)
    tokens = torch.arange(64).reshape(2, 32) % 8
    kept_bytes, gradients = [], []
    for budget in (None, 0.0):
        torch._dynamo.reset()
        model = Transformer(layers=1, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
        materialise(model, seed=0, device="cpu", dtype=torch.float64)
        compiling.apply(model, memory_budget=budget)
        kept: list[int] = []

        def note(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(tokens)
        loss = compiling.compile_loss(model.loss)(output, tokens)
        loss.backward()
        torch.testing.assert_close(loss, model.loss(output, tokens))
        kept_bytes.append(sum(kept))
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    torch_internals.set_memory_budget(1.0)
    torch._dynamo.reset()
    assert kept_bytes[1] < 0.7 * kept_bytes[0]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


def test_blocks_of_one_shape_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For training, and once more for evaluation; names stay."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = Transformer(layers=3, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    names, tokens = list(model.state_dict()), torch.arange(8).reshape(2, 4)
    expected = model(tokens)
    compiling.apply(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(tokens), expected)
    assert counters["stats"]["unique_graphs"] == 1
    with torch.no_grad():
        model.eval()(tokens)
    assert counters["stats"]["unique_graphs"] == 2
    torch._dynamo.reset()


@pytest.mark.parametrize("keeps", ["none", "selective", "full"])
def test_compiled_decoder_with_recomputation(monkeypatch: pytest.MonkeyPatch, keeps: str) -> None:
    """torch allows no side effect in a recomputation; the rotary tables are kept before, once for all."""
    tables: list[bool] = []
    rotation = transformer.rotation

    def noting(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        tables.append(torch.compiler.is_compiling())
        return rotation(*arguments, **options)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tokens = torch.arange(64).reshape(2, 32) % 8
    gradients = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = Transformer(layers=3, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
        materialise(model, seed=0, device="cpu", dtype=torch.float64)
        if compiled:
            checkpointing.apply(model, keeps=keeps, compiled=True)
            compiling.apply(model)
            monkeypatch.setattr(transformer, "rotation", noting)
        for _ in range(2):
            model.loss(model(tokens), tokens).backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    torch._dynamo.reset()
    assert tables == [False]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("keeps", "whole"), [("none", False), ("selective", False), ("none", True)])
def test_compiled_blocks_use_the_weights_that_a_step_casts(
    monkeypatch: pytest.MonkeyPatch, keeps: str, whole: bool
) -> None:
    """New tensors take the place of the weights in each step, and no step compiles again."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    tokens = torch.arange(64).reshape(2, 32) % 8
    outcomes = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        model = Transformer(layers=3, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
        if compiled:
            checkpointing.apply(model, keeps=keeps, compiled=True)
            compiling.apply(model, whole=whole)
        precision.apply(model, precision="bfloat16", device_type="cpu")
        materialise(model, seed=0, device="cpu", dtype=torch.float32)
        for _ in range(3):
            with working_weights.cast_weights([model]):
                output = model(tokens)
                model.loss(output, tokens).backward()
        outcomes.append((output.dtype, [weight.grad for weight in model.parameters()]))
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    (of_source, expected), (of_compiled, gradients) = outcomes
    assert of_source == of_compiled == torch.bfloat16
    for gradient, other in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, other, rtol=2**-6, atol=2**-8 * other.abs().max().item())


def dropped_output(*, compiled: bool) -> list[Any]:
    """Two trained microbatches of a model with dropout, then an evaluation of another number of samples."""
    tokens = (torch.arange(128) * 37 % 256).reshape(8, 16)
    with torch.device("meta"):
        model = Tokens(layers=2, width=16, rate=0.3)
    shapes = whole_shapes(model, sample_shape=(16,))
    counted_dropout.apply(
        model, shapes=shapes, part=counted_dropout.SamplePart(), seed=0, device=torch.device("cpu")
    )
    if compiled:
        compiling.apply(model, whole=True)
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    outputs = []
    for step in range(2):
        model.sample_indices.begin_batch(torch.arange(8) + 8 * step, device=torch.device("cpu"))
        for index, samples in enumerate(tokens.chunk(2)):
            model.sample_indices.begin_microbatch(index, count=2)
            outputs.append(model(samples))
            model.loss(outputs[-1], samples).backward()
    with torch.no_grad():
        outputs.append(model.eval()(tokens[:3]))
    return [[output.detach() for output in outputs], {n: w.grad for n, w in model.named_parameters()}]


def test_a_model_in_one_graph_drops_as_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch has drops of its own, and none is taken for a constant."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    (outputs, gradients), (expected, expected_gradients) = (
        dropped_output(compiled=compiled) for compiled in (True, False)
    )
    torch._dynamo.reset()
    assert not torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-11)


def test_a_decoder_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, whose rotary tables are made before it, for each length once in a row; names stay."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    tables: list[bool] = []
    rotation = transformer.rotation

    def noting(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        tables.append(torch.compiler.is_compiling())
        return rotation(*arguments, **options)

    monkeypatch.setattr(transformer, "rotation", noting)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model, source = (
        materialise(
            Transformer(layers=3, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8),
            seed=0, device="cpu", dtype=torch.float64,
        )
        for _ in range(2)
    )  # fmt: skip
    names = list(model.state_dict())
    compiling.apply(model, whole=True)
    assert list(model.state_dict()) == names
    for length, graphs in ((32, 1), (32, 1), (16, 2)):
        tokens = torch.arange(2 * length).reshape(2, length) % 8
        tables.clear()
        model.loss(model(tokens), tokens).backward()
        assert not any(tables)
        assert counters["stats"]["unique_graphs"] == graphs
        source.loss(source(tokens), tokens).backward()
    torch._dynamo.reset()
    for weight, other in zip(model.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=0, atol=1e-12)


def test_a_layer_of_a_model_in_one_graph_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks of layers do not run inside the graph, so the step runs again without it."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    model = Transformer(layers=3, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    compiling.apply(model, whole=True)
    tokens = torch.arange(64).reshape(2, 32) % 8
    model(tokens)
    with torch.no_grad():
        model.blocks["1"].feed_forward.up.weight[3, 5] = torch.inf  # type: ignore[union-attr,index,operator]
    findings = trace_layers([model], compiled=True, whole=True, replay=lambda: model(tokens))
    torch._dynamo.reset()
    assert findings["output"][0] == "blocks.1.feed_forward.up"


def test_a_model_that_breaks_its_graph_names_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    model = Transformer(layers=1, dim=16, heads=2, kv_heads=2, ffn_dim=24, vocab_size=8)
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(type(model.head), "forward", lambda self, x: print(end="") or x)
    compiling.apply(model, whole=True)
    with pytest.raises(
        ConfigError, match=r"compile_whole = true .* the model in one piece.*compile_whole=false"
    ):
        model(torch.zeros(1, 4, dtype=torch.int64))
    torch._dynamo.reset()
