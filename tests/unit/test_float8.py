"""Products in float8: exact numbers of rounded factors, gradients, scales, and what is refused."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel import torch_internals
from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.experts import grouped_product
from hpc_parallel.models.layered import materialise
from hpc_parallel.models.moe import MoeTransformer
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies import checkpointing, compiling, float8, precision
from hpc_parallel.strategies.working_weights import cast_weights
from tests.composed import prepared

RECIPES = ("tensorwise", "rowwise")
MULTIPLY = {recipe: partial(float8.multiply, by_rows=recipe == "rowwise") for recipe in RECIPES}
ROUNDING = 2.0**-8  # of a bfloat16, which has 8 bits: half a unit in the last place, and a float32 sum
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def numbers(*shape: int, spread: float = 4.0) -> Tensor:
    """bfloat16 numbers whose rows and columns have different sizes."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator)
    for dim, size in enumerate(shape):
        factors = torch.exp2(torch.linspace(-spread, spread, size))
        x = x * factors.view([-1 if other == dim else 1 for other in range(len(shape))])
    return x.to(torch.bfloat16)


def rounded(x: Tensor, dtype: torch.dtype, *, dim: int | None) -> Tensor:
    """What float8 keeps of `x`, in float64: with scales by powers of two, computed in another way."""
    exact = x.double()
    largest = exact.abs().amax() if dim is None else exact.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / largest)))
    return (exact * scale).float().to(dtype).double() / scale


def difference(found: Tensor, wanted: Tensor) -> float:
    """The largest, relative to the largest number."""
    return float((found.detach().double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_three_products_are_those_of_the_rounded_factors(recipe: str) -> None:
    x, weight, gradient = numbers(2, 24, 32), numbers(48, 32), numbers(2, 24, 48)
    model = nn.Linear(32, 48, bias=False)
    x.requires_grad_()
    layer = nn.Parameter(weight.clone())
    model.weight = layer
    output = MULTIPLY[recipe](nn.Linear.forward, model, x)
    output.backward(gradient)
    flat, rows = x.detach().flatten(0, 1), gradient.flatten(0, 1)
    by_rows = recipe == "rowwise"
    inner, outer, of_gradients = (-1, 0, E4M3) if by_rows else (None, None, E5M2)
    wanted = rounded(flat, E4M3, dim=inner) @ rounded(weight, E4M3, dim=inner).t()
    by_input = rounded(rows, of_gradients, dim=inner) @ rounded(weight, E4M3, dim=outer)
    by_weight = rounded(rows, of_gradients, dim=outer).t() @ rounded(flat, E4M3, dim=outer)
    assert output.dtype == torch.bfloat16
    assert layer.grad is not None
    assert difference(output.flatten(0, 1), wanted) < ROUNDING
    assert difference(x.grad.flatten(0, 1), by_input) < ROUNDING
    assert difference(layer.grad, by_weight) < ROUNDING
    exact = flat.double() @ weight.double().t()
    assert ROUNDING < difference(wanted, exact) < 2.0**-3  # float8 did round


ENDS = torch.tensor([5, 5, 40], dtype=torch.int32)  # a group without rows, and uneven ones


def test_experts_multiply_the_rounded_rows() -> None:
    """The gradient of the weights is that of bfloat16."""
    rows, weights, gradient = numbers(40, 32), numbers(3, 48, 32), numbers(40, 48)
    leaves = rows.requires_grad_(), weights.requires_grad_()
    output = float8.product_of_groups(*leaves, ENDS, splits=float8.LayerSplits())
    output.backward(gradient)
    rows8, gradient8 = rounded(rows.detach(), E4M3, dim=-1), rounded(gradient, E4M3, dim=-1)
    starts = (0, *ENDS.tolist())
    for place, (start, end) in enumerate(zip(starts, ENDS.tolist(), strict=False)):
        weight, here = weights.detach()[place], slice(start, end)
        by_weight = gradient[here].double().t() @ rows.detach()[here].double()
        assert difference(weights.grad[place], by_weight) < ROUNDING if end > start else not by_weight.any()
        if end > start:
            wanted = rows8[here] @ rounded(weight, E4M3, dim=-1).t()
            assert difference(output[here], wanted) < ROUNDING
            assert difference(wanted, rows.detach()[here].double() @ weight.double().t()) > ROUNDING
            by_rows = gradient8[here] @ rounded(weight, E4M3, dim=-2)
            assert difference(rows.grad[here], by_rows) < ROUNDING
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_gets_what_cublas_takes(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    """torch's CPUs have the operator of GPUs too, and give the same numbers as ours.

    Its rules for GPUs: rows of the first and columns of the second factor are contiguous, dims are multiples
    of 16, scales are one float32, or [m, 1] and [1, n].
    """
    multiply = torch._scaled_mm
    calls: list[tuple[object, ...]] = []

    def note(first: Tensor, second: Tensor, **named: Any) -> Tensor:
        scales = named["scale_a"], named["scale_b"]
        calls.append((first.dtype, second.dtype, *(tuple(x.shape) for x in scales), named["use_fast_accum"]))
        assert first.stride() == (first.shape[1], 1)
        assert second.stride() == (1, second.shape[0])
        torch._meta_registrations._check_scaled_mm_sizes(first, second, **named)
        return multiply(first, second, **named)

    def products() -> list[Tensor]:
        x, layer = numbers(2, 16, 64).requires_grad_(), nn.Linear(64, 48, bias=False, dtype=torch.bfloat16)
        layer.weight.data = numbers(48, 64)
        output = MULTIPLY[recipe](nn.Linear.forward, layer, x)
        output.backward(numbers(2, 48, 16).transpose(1, 2))
        assert x.grad is not None
        assert layer.weight.grad is not None
        return [output.detach(), x.grad, layer.weight.grad]

    ours = products()
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda tensor: "cuda")
    monkeypatch.setattr(torch, "_scaled_mm", note)
    monkeypatch.setattr(
        float8, "scaled_product",
        lambda *factors, dtype, **options: torch_internals.cuda_scaled_product(*factors, **options).to(dtype),
    )  # fmt: skip
    for found, wanted in zip(products(), ours, strict=True):
        assert difference(found, wanted.double()) < ROUNDING
    by_rows = recipe == "rowwise"
    gradients, forward = (E4M3, ((32, 1), (1, 48))) if by_rows else (E5M2, ((), ()))
    assert calls == [
        (E4M3, E4M3, *forward, True),
        (gradients, E4M3, (), (), False),
        (gradients, E4M3, (), (), False),
    ]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_uses_the_range_and_does_not_leave_it(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    for largest in (1.0, most, 1.5 * most, 1e-9, 1e30, 2.0**-20):
        x = torch.tensor([[largest, -largest / 3], [0.0, largest / 16]])
        float8_x, inverse = float8.quantise(x, dtype, dim=None)
        assert most / 2 < largest / float(inverse) <= most
        assert torch.frexp(inverse)[0] == 0.5  # a power of two
        torch.testing.assert_close(float8_x.float() * inverse, x, rtol=0.126, atol=0)
    zeros, inverse = float8.quantise(torch.zeros(2, 2), dtype, dim=None)
    assert (zeros.float() * inverse).tolist() == [[0.0, 0.0]] * 2


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("dim", [None, -1])
def test_what_is_not_finite_stays_so(value: float, dim: int | None) -> None:
    x = torch.ones(16, 16)
    x[3, 5] = value
    x8, inverse = float8.quantise(x, E4M3, dim=dim)
    ones, of_ones = float8.quantise(torch.ones(16, 16), E4M3, dim=dim)
    product = torch_internals.scaled_product(x8, ones.t(), scales=(inverse, of_ones.t()), fast=True)
    assert not product[3].isfinite().any()


def test_another_split_of_a_batch_rounds_to_the_same_numbers() -> None:
    """A half has a smaller largest value; a power of two leaves the significant bits as they are."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[0, 0] = 37.0
    both = [float8.quantise(part, E4M3, dim=None) for part in (x, x[32:])]
    assert both[0][1] > both[1][1]
    whole, half = ((part.float() * inverse)[-32:] for part, inverse in both)
    normal = x[32:].abs() > 2.0**-6 * both[0][1]  # smaller ones have fewer bits
    assert normal.float().mean() > 0.7
    assert torch.equal(whole[normal], half[normal])


def decoder(*, dim: int = 32, ffn_dim: int = 64) -> Transformer:
    model = Transformer(
        layers=2, dim=dim, heads=2, kv_heads=1, ffn_dim=ffn_dim, vocab_size=48, tied_head=False
    )
    materialise(model, seed=0, device="cpu", dtype=torch.float32)
    return model


def test_only_linear_layers_of_blocks_with_fitting_sizes_are_replaced() -> None:
    names = {
        name for name, module in float8.apply(
            decoder(ffn_dim=40), recipe="tensorwise", device=torch.device("cpu")
        ).named_modules() if type(module).__name__ == "Float8Linear"
    }  # fmt: skip
    layers = ("attention.query", "attention.key", "attention.value", "attention.output")
    assert names == {f"blocks.{block}.{layer}" for block in (0, 1) for layer in layers}
    odd = decoder(dim=24, ffn_dim=40)
    (problem,) = float8.find_problems(odd, recipe="rowwise", layout=Layout(), sample_shape=(8,))
    assert "training.fp8 = rowwise has no effect" in str(problem)
    assert not list(float8.find_problems(odd, recipe="off", layout=Layout(), sample_shape=(8,)))


def test_experts_are_replaced_and_their_router_is_not() -> None:
    """With 16 experts, a router has the sizes of a layer that could be in float8."""
    sizes = {"dim": 64, "heads": 2, "kv_heads": 2, "ffn_dim": 48, "vocab_size": 48}
    model = MoeTransformer(layers=1, experts=16, experts_per_token=2, balance=0.0, shared_experts=1, **sizes)
    assert list(float8.find_problems(model, recipe="rowwise", layout=Layout(), sample_shape=(8,))) == []
    (problem,) = float8.find_problems(model, recipe="tensorwise", layout=Layout(), sample_shape=(8,))
    assert "Try training.fp8=rowwise" in str(problem)
    (problem,) = float8.find_problems(model, recipe="rowwise", layout=Layout(tensor=2), sample_shape=(8,))
    assert "of 48 numbers of experts strategy.tensor = 2 leaves 24" in str(problem)
    float8.apply(model, recipe="rowwise", device=torch.device("cpu"))
    mixture = model.blocks["0"].feed_forward
    assert type(mixture.router) is nn.Linear
    replaced = [part.widen is not original and part.narrow is not original for part, original in
                ((mixture.experts, grouped_product), (mixture.shared, nn.functional.linear))]  # fmt: skip
    assert all(replaced)


class Products(TorchDispatchMode):
    """Counts operators by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[function.name().partition("::")[2]] += 1
        return function(*args, **(kwargs or {}))


def block_of(
    recipe: str, *, keeps: str = "none", apart: bool = False, dtype: torch.dtype = torch.float64
) -> nn.Module:
    """It has four layers of attention, and three of the feed-forward; or, but for `tensorwise`, a mixture.

    A mixture has three layers of shared experts, three products of experts, and a router.
    """
    model: Transformer = decoder()
    if recipe != "tensorwise":
        model = MoeTransformer(
            layers=1, dim=32, heads=2, kv_heads=1, ffn_dim=48, vocab_size=48, experts=4, experts_per_token=2,
            balance=0.1, shared_experts=1,
        )  # fmt: skip
    float8.apply(model, recipe=recipe, device=torch.device("cpu"), apart=apart)
    checkpointing.apply(model, keeps=keeps, compiled=False)
    materialise(model, seed=0, device="cpu", dtype=dtype)
    block: nn.Module = model.distinct_blocks[0]
    return block


@pytest.mark.parametrize(("keeps", "again"), [("none", 0), ("selective", 0), ("full", 1)])
def test_only_full_recomputation_multiplies_again(keeps: str, again: int) -> None:
    block = block_of("rowwise", keeps=keeps)
    with Products() as products:
        block(torch.randn(2, 16, 32, dtype=torch.float64)).sum().backward()
    assert products.counts["scaled_product"] == 7 * (3 + again)
    assert products.counts["scaled_product_of_groups"] == 3 * (2 + again)


PASSES: dict[str, tuple[dict[str, int], dict[str, int]]] = {  # products of the passes for inputs and weights
    "off": ({"mm": 8, "_grouped_mm": 3}, {"mm": 8, "_grouped_mm": 3}),
    "tensorwise": ({"scaled_product": 7}, {"scaled_product": 7}),
    "rowwise": (
        {"scaled_product": 7, "scaled_product_of_groups": 3, "weight_gradients_of_groups": 0},
        {"scaled_product": 7, "scaled_product_of_groups": 0, "weight_gradients_of_groups": 3},
    ),
}


@pytest.mark.parametrize("recipe", PASSES)
def test_a_split_backward_pass_computes_each_gradient_once(recipe: str) -> None:
    """The gradients by weights follow those by inputs, and equal those of one pass."""
    dtype = torch.float32 if recipe == "off" else torch.float64  # torch's kernel of groups takes no float64
    one_pass, split = (block_of(recipe, apart=apart, dtype=dtype) for apart in (False, True))
    x = numbers(2, 16, 32).to(dtype)
    wanted = x.clone().requires_grad_()
    one_pass(wanted).square().sum().backward()
    x.requires_grad_()
    output = split(x).square().sum()
    with Products() as of_inputs:
        gradients, groups = stage_backward_input([output], None, [x], split.parameters())
    with Products() as of_weights:
        stage_backward_weight(split.parameters(), groups)
    for products, expected in zip((of_inputs, of_weights), PASSES[recipe], strict=True):
        assert {name: products.counts[name] for name in expected} == expected
    assert gradients[0] is not None
    assert wanted.grad is not None
    torch.testing.assert_close(gradients[0], wanted.grad, rtol=0, atol=0)
    for weight, reference in zip(split.parameters(), one_pass.parameters(), strict=True):
        assert reference.grad is not None
        torch.testing.assert_close(weight.grad, reference.grad, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("keeps", ["none", "full", "selective"])
def test_a_compiled_mixture_is_one_graph_with_the_same_numbers(keeps: str) -> None:
    sizes = {"dim": 32, "heads": 2, "kv_heads": 1, "ffn_dim": 48, "vocab_size": 48}
    model = MoeTransformer(layers=1, experts=4, experts_per_token=2, balance=0.1, shared_experts=1, **sizes)
    float8.apply(model, recipe="rowwise", device=torch.device("cpu"))
    checkpointing.apply(model, keeps=keeps, compiled=True)
    materialise(model, seed=0, device="cpu", dtype=torch.float64)
    (block,) = model.distinct_blocks
    x, gradient = torch.randn(2, 2, 16, 32, dtype=torch.float64)
    results = []
    for run in (block, torch.compile(block, backend="aot_eager_decomp_partition", fullgraph=True)):
        block.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(leaf)
        output.backward(gradient)
        results.append([output, leaf.grad, *(weight.grad for weight in block.parameters())])
    torch._dynamo.reset()
    for eager, compiled in zip(*results, strict=True):
        assert difference(compiled, eager.detach()) < 1e-12


@pytest.mark.parametrize("fault", [None, "scaled", "raised"])
def test_a_gpu_without_the_kernel_of_groups_is_refused(
    monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    calls = []

    def kernel(*factors: Any) -> Tensor:
        calls.append(factors)
        if len(calls) == 1 or fault is None:
            return torch_internals.scaled_product_of_groups(*factors)
        if fault == "raised":
            raise RuntimeError("needs compute capability 9.0")
        return torch_internals.scaled_product_of_groups(*factors) * 1.1

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "L4")
    monkeypatch.setattr(float8, "scaled_product_of_groups", kernel)
    problem = float8.groups_problem("rowwise", torch.device("cpu"))
    assert (problem is None) == (fault is None)
    if problem is not None:
        assert "training.fp8 = rowwise" in str(problem)
        assert "(L4). Try training.fp8=off." in str(problem)


def test_a_gpu_gets_what_the_kernel_of_groups_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the checks of torch's own description of the kernel."""
    calls = []

    def note(first: Tensor, second: Tensor, scale_a: Tensor, scale_b: Tensor, **named: Any) -> Tensor:
        calls.append(named.pop("use_fast_accum"))
        described = torch._meta_registrations._meta_grouped_mm_common(
            first.to("meta"), second.to("meta"), scale_a.to("meta"), scale_b.to("meta"), **named
        )
        exact = scaled(first, second, named["offs"], scale_a[:, None], scale_b[:, None], False)
        assert exact.shape == described.shape
        return exact

    scaled = torch_internals.scaled_product_of_groups
    monkeypatch.setattr(torch, "_scaled_grouped_mm", note)
    of_gpus = torch_internals.cuda_product_of_groups
    monkeypatch.setattr(float8, "scaled_product_of_groups", lambda *given: of_gpus(*given[:-1]))
    found = []
    for _ in range(2):
        leaves = numbers(40, 32).requires_grad_(), numbers(3, 48, 32).requires_grad_()
        output = float8.product_of_groups(*leaves, ENDS, splits=float8.LayerSplits())
        output.backward(numbers(48, 40).t())
        found.append([output, *(leaf.grad for leaf in leaves)])
        monkeypatch.undo()
    assert calls == [True, True]
    assert all(map(torch.equal, *found))


def test_rows_that_are_no_multiple_of_16_keep_bfloat16() -> None:
    layer, x = nn.Linear(32, 16), torch.randn(3, 5, 32)
    assert torch.equal(MULTIPLY["tensorwise"](nn.Linear.forward, layer, x), layer(x))
    assert not torch.equal(
        MULTIPLY["tensorwise"](nn.Linear.forward, layer, torch.cat([x[:, :4]] * 4)), layer(x)
    )


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_code_gives_the_same(recipe: str) -> None:
    layer, x = nn.Linear(32, 48, dtype=torch.bfloat16), numbers(2, 16, 32, spread=1.0)
    results = []
    for run in (MULTIPLY[recipe], torch.compile(MULTIPLY[recipe], fullgraph=True, dynamic=False)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = run(nn.Linear.forward, layer, leaf)
        output.backward(numbers(2, 16, 48, spread=1.0))
        results.append([output, leaf.grad, layer.weight.grad, layer.bias.grad])
    for eager, compiled in zip(*results, strict=True):
        assert compiled is not None
        assert difference(compiled, eager.detach().double()) < 2 * ROUNDING


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_with_the_same_input_compile(recipe: str) -> None:
    def both(x: Tensor, *weights: Tensor) -> Tensor:
        splits, doubled = float8.LayerSplits(), 2 * x
        return sum(
            float8.product(doubled, weight, by_rows=recipe == "rowwise", splits=splits) for weight in weights
        )

    leaves = [numbers(32, 32, spread=1.0).requires_grad_() for _ in range(3)]
    results = []
    for run in (both, torch.compile(both, fullgraph=True, dynamic=False)):
        output = run(*leaves)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert difference(compiled, eager.detach().double()) < 4 * ROUNDING


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_block_is_one_graph(recipe: str) -> None:
    """Under autocast and with weights that are cast once.

    Fused code rounds less often to bfloat16, so some numbers are rounded to another float8, which is up to a
    quarter (e5m2) away.
    """
    tokens = torch.arange(32).reshape(2, 16) % 48
    results = []
    for compiled in (False, True):
        model = float8.apply(decoder(), recipe=recipe, device=torch.device("cpu"))
        if compiled:
            compiling.apply(model)
        precision.apply(model, precision="bfloat16", device_type="cpu")
        with cast_weights([model]):
            output = model(tokens)
            output.float().square().mean().backward()
        results.append([output, *(weight.grad for weight in model.parameters())])
    torch._dynamo.reset()
    for eager, fused in zip(*results, strict=True):
        norm = torch.linalg.vector_norm
        assert norm((eager - fused).float()) < 0.1 * norm(eager.float())


@pytest.mark.parametrize(
    ("name", "capability", "sentence"),
    [
        ("A100", (8, 0), "training.fp8 = rowwise needs an NVIDIA GPU of compute capability 8.9 or newer, and "
         "A100 has 8.0. Try training.fp8=off."),
        ("L4", (8, 9), None),
        ("H200", (9, 0), None),
    ],
)  # fmt: skip
def test_an_old_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], sentence: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    if sentence is None:
        float8.apply(decoder(), recipe="rowwise", device=device)
        return
    with pytest.raises(ConfigError) as raised:
        float8.apply(decoder(), recipe="rowwise", device=device)
    assert str(raised.value) == sentence


HALF = "training.precision=bfloat16"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("training.fp8=on",), "training.fp8 = on is not one of off, tensorwise, rowwise"),
        (("training.precision=float32",), "Try training.precision=bfloat16."),
        ((HALF, "strategy=tile", "nodes=2", "model=convnet", "data=digits"),
         "strategy.tile = 2 can't be combined with training.fp8"),
        ((HALF, "strategy=tensor", "nodes=2", "model.ffn_dim=80"),
         "needs parts that are multiples of 16: of 80 (model.ffn_dim) strategy.tensor = 2 leaves 40. Try "),
        ((HALF, "strategy=context", "nodes=2", "data.sequence_length=48"),
         "of 48 (data.sequence_length) strategy.context = 2 leaves 24. Try training.fp8=off"),
        ((HALF, "model=moe_tiny"), "but an expert multiplies tokens of several devices at once. Try "
         "training.fp8=rowwise or training.fp8=off."),
        ((HALF, "model=convnet", "data=digits"), "this model has convolutions"),
        ((HALF, "strategy=parameter_server", "nodes=2"), "with strategy.execution = parameter_server"),
        ((HALF, "task=generate"), "which decodes one token at a time. Try training.fp8=off"),
    ],
)  # fmt: skip
def test_what_can_not_be_together_is_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("launcher=local", "device=cpu", "training.fp8=tensorwise", *words)
    assert sentence in str(raised.value)
