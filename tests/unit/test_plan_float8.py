"""The planned time of `training.fp8`: the hardware's rates, and the rounding that the code really does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.__main__ import main as command
from hpc_parallel.config.resolve import resolve
from hpc_parallel.models.experts import Experts
from hpc_parallel.models.transformer import Transformer
from hpc_parallel.planning.hardware import read_hardware
from hpc_parallel.planning.operations import ROUNDED, ROUNDING_KERNELS, MatrixProduct, in_float8
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD, ActionKind
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.planning.work import work_of_run
from hpc_parallel.strategies import float8, float8_scales
from tests.benchmarks.calibrate_plan import FOLDERS
from tests.composed import composed

H100 = "h100_sxm_node8_3200gbit"
RUN = (
    "strategy=fsdp", "gpus_per_node=8", "device=cuda", "training.precision=bfloat16", "model=1b",
    "data.sequence_length=4096", "training.global_batch_size=8",
)  # fmt: skip
LINEAR = ("queries, keys, values", "attention output", "feed-forward up", "feed-forward down")


class Bytes(TorchDispatchMode):
    """Counts the bytes that operations read and write, and the operations on large tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.kernels = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            read = [argument for argument in args if isinstance(argument, Tensor)]
            self.moved += sum(tensor.nbytes for tensor in (*read, result))
            self.kernels += 1
        return result


class Rounded(TorchDispatchMode):
    """Counts the numbers that are rounded to float8."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and result.itemsize == 1:
            self.numbers += result.numel()
        return result


@pytest.mark.parametrize("dim", [None, -1, -2])
def test_the_rounding_moves_the_bytes_that_are_planned(dim: int | None) -> None:
    matrix = torch.randn(512, 1024).bfloat16()
    with Bytes() as counted:
        float8.quantise(matrix, float8.INPUT, dim=dim)
    assert counted.moved / matrix.numel() == pytest.approx(ROUNDED[False], rel=0.05)
    assert counted.kernels == pytest.approx(ROUNDING_KERNELS[False], abs=1)


ZERO_BUBBLE = ("strategy=pipeline", "strategy.pipeline=2", "strategy.schedule=interleaved_zero_bubble")


@pytest.mark.parametrize("schedule", [("strategy=single",), ZERO_BUBBLE])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_as_many_numbers_are_rounded_as_planned(recipe: str, schedule: tuple[str, ...]) -> None:
    """By the blocks of a decoder with a gate and fewer heads of keys than of queries."""
    apart = schedule == ZERO_BUBBLE
    sizes = {"dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": 256}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    config, *_ = resolve(composed(
        *RUN, *schedule, f"gpus_per_node={2 if apart else 1}", *words, "data.sequence_length=32",
        "model.layers=4", "training.microbatch_size=2", f"training.fp8={recipe}",
    ))  # fmt: skip
    share = StepTerms(work_of_run(config), read_hardware(H100, folders=FOLDERS)).share
    model = Transformer(layers=1, **sizes)
    layers = [*float8.layers_of(model)]
    float8.apply(model, recipe=recipe, device=torch.device("cpu"), apart=apart)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    with Rounded() as rounded:
        loss = model.loss(model(ids), ids)
        forward = rounded.numbers
        loss.backward()
    planned = {one.name: one for one in (*share.block(), *share.block_backward())}
    assert forward == sum(planned[f"{name}: to float8"].bytes for name in LINEAR) / ROUNDED[False]
    copies, scaled = 2, 20
    inputs, weights, results = 0, 0, 0
    for layer in layers:
        inputs, weights = inputs + 64 * layer.in_features, weights + layer.weight.numel()
        results += 64 * layer.out_features
    extra = copies * (inputs + weights + results) + scaled * (inputs + weights) * (recipe == "rowwise")
    of_rounding = sum(planned[f"{name}: gradients to float8"].bytes for name in LINEAR) - extra
    assert rounded.numbers - forward == of_rounding / ROUNDED[False]


def test_only_the_linear_products_of_blocks_are_faster() -> None:
    hardware = read_hardware(H100, folders=FOLDERS)
    steps = {
        recipe: StepTerms(work_of_run(resolve(composed(*RUN, f"training.fp8={recipe}"))[0]), hardware)
        for recipe in ("off", "tensorwise")
    }
    products = {
        recipe: {
            one.name: one for one in (*step.share.block(), *step.share.block_backward(), *step.share.head())
        }
        for recipe, step in steps.items()
    }
    peak = hardware.device.peak_flops["bfloat16"]
    assert len(in_float8(list(products["tensorwise"].values()))) == 3 * len(LINEAR)
    for name, before in products["off"].items():
        times = [one.seconds(hardware, peak=peak) - hardware.traffic.kernel_s
                 for one in (before, products["tensorwise"][name])]  # fmt: skip
        faster = 1979 / 989 if name.startswith(LINEAR) else 1.0
        assert times[0] == pytest.approx(faster * times[1], rel=1e-9), name


def test_fused_rounding_pays_and_one_kernel_after_the_other_does_not() -> None:
    """Rounding kernel by kernel moves more bytes than the products save time."""
    hardware = read_hardware(H100, folders=FOLDERS)
    bfloat16, fused, eager = (
        StepTerms(work_of_run(resolve(composed(*RUN, "model=8b", *words))[0]), hardware).result().total_s
        for words in (
            (), ("training.fp8=tensorwise", "training.compile=true"), ("training.fp8=tensorwise",)
        )
    )  # fmt: skip
    assert fused < bfloat16 < eager


def test_hardware_without_a_peak_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["strategy=fsdp", "model=1b", "gpus_per_node=8", "training.fp8=tensorwise"]
    assert command(["plan", *words, "hardware=a100_80gb_node8_800gbit"]) == 2
    message = capsys.readouterr().err
    assert (
        "training.fp8 = tensorwise has no peak in the hardware's file (device.peak_flops: float8)" in message
    )
    assert command(["plan", *words, f"hardware={H100}"]) == 0
    assert "Two trainings in float8 were compared with plans (docs/plan.md)." in capsys.readouterr().out
    assert command(["plan", *words[:-1], "training.precision=float16x", f"hardware={H100}"]) == 2
    assert "float8" not in capsys.readouterr().err


@pytest.mark.parametrize("tensor", [1, 2])
def test_experts_round_and_exchange_as_planned(tensor: int) -> None:
    """One device's part of the experts of a block, for 32 tokens of two experts each."""
    config, *_ = resolve(composed(
        *RUN, "strategy=tensor", f"gpus_per_node={tensor}", "model=moe_tiny", "model.dim=64",
        "model.layers=1", "model.ffn_dim=96", "model.shared_experts=1", "data.sequence_length=32",
        "training.global_batch_size=1", "training.fp8=rowwise",
    ))  # fmt: skip
    step = StepTerms(work_of_run(config), read_hardware(H100, folders=FOLDERS))
    experts = Experts(8, dim=64, hidden=96 // tensor)
    over = (float8_scales.ScaleAxis("tensor", "group"),) * (tensor > 1)
    experts.widen, experts.narrow = (
        partial(float8.product_of_groups, splits=float8.LayerSplits(**{name: over}))
        for name in ("outputs", "inputs")
    )
    sent, counts = [], torch.full((8,), 8)

    def largest(numbers: Tensor, *, group: str) -> Tensor:
        sent.append(numbers.nbytes)
        return numbers

    with Rounded() as rounded, mock.patch.object(float8_scales, "largest_of_group", largest):
        for weight in experts.parameters():
            torch.nn.init.ones_(weight)
        output = experts(torch.randn(64, 64).requires_grad_(), counts)
        forward, forward_bytes = rounded.numbers, sum(sent)
        output.sum().backward()
    operations = (*step.share.block(), *step.share.block_backward())
    planned = {one.name: one for one in operations}
    up, down = "feed-forward up", "feed-forward down"
    assert forward == sum(planned[f"{name}: to float8"].bytes for name in (up, down)) / ROUNDED[False]
    copies = 2 * sum(weight.numel() for weight in experts.parameters())
    backward = sum(planned[f"{name}: gradients to float8"].bytes for name in (up, down)) - copies
    assert rounded.numbers - forward == backward / ROUNDED[False]
    in_half = [one.name for one in operations if isinstance(one, MatrixProduct) and not one.float8]
    assert {f"{name}: gradient of weights" for name in (up, down)} <= {*in_half}
    assert not {up, down, "shared experts up", "shared experts down"} & {*in_half}
    exchanged = {
        kind: sum(count * one.bytes for count, one in step.exchanges._scales(kind) if "feed" in one.name)
        for kind in (FORWARD, BACKWARD)
    }
    assert exchanged == {FORWARD: forward_bytes, BACKWARD: sum(sent) - forward_bytes}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("axis", ["tensor", "context"])
@pytest.mark.parametrize("schedule", [(), ZERO_BUBBLE])
def test_as_many_largest_values_are_exchanged_as_planned(
    axis: str, recipe: str, schedule: tuple[str, ...]
) -> None:
    """By a block whose layers and tokens are split; the messages are counted without other ranks."""
    sizes = {"dim": 64, "heads": 4, "kv_heads": 2, "ffn_dim": 192, "vocab_size": 256}
    words = [f"model.{key}={value}" for key, value in sizes.items()]
    config, *_ = resolve(composed(
        *RUN, *(schedule or (f"strategy={axis}",)), f"strategy.{axis}=2", "model.layers=4", *words,
        f"gpus_per_node={4 if schedule else 2}", "data.sequence_length=64", "training.microbatch_size=1",
        f"training.fp8={recipe}",
    ))  # fmt: skip
    exchanges = StepTerms(work_of_run(config), read_hardware(H100, folders=FOLDERS)).exchanges
    planned = Counter(
        {
            kind: sum(count * exchange.bytes for count, exchange in exchanges._scales(kind))
            for kind in (FORWARD, BACKWARD)
        }
    )
    tokens = 64 if axis == "tensor" else 32
    over, found = (float8_scales.ScaleAxis(axis, "group"),), Counter[ActionKind]()
    messages = Counter[ActionKind]()
    pairs = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 192), (64, 192), (192, 64))  # inputs, outputs
    for place, (inputs, outputs) in enumerate(pairs):
        is_row = place in (3, 6)
        if axis == "tensor":
            inputs, outputs = (inputs // 2, outputs) if is_row else (inputs, outputs // 2)
            splits = float8.LayerSplits(inputs=over) if is_row else float8.LayerSplits(outputs=over)
        else:
            splits = float8.LayerSplits(rows=over)
        x, weight = torch.randn(tokens, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
        sent: list[int] = []

        def counted(numbers: Tensor, *, group: str, sent: list[int] = sent) -> Tensor:
            sent.append(numbers.nbytes)
            return numbers

        largest = (
            float8_scales.largest_of(weight, dim=None) if recipe == "tensorwise" else None
        )  # once a step
        with mock.patch.object(float8_scales, "largest_of_group", counted):
            factors = x.requires_grad_(), weight.requires_grad_()
            output = float8.product(
                *factors, by_rows=recipe == "rowwise", splits=splits, largest=largest, apart=bool(schedule)
            )
            found[FORWARD] += sum(sent)
            messages[FORWARD] += len(sent)
            sent.clear()
            output.sum().backward()
            found[BACKWARD] += sum(sent)
            messages[BACKWARD] += len(sent)
    for kind in planned:
        assert exchanges.scale_messages(kind) == messages[kind]
    assert found == planned
