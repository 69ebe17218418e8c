"""A plain nn.Module is built as its author knows it, and what can't be done with it is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpc_parallel.layout.layout import Layout
from hpc_parallel.models.layered import LayeredModel, materialise
from hpc_parallel.problems import ConfigError
from hpc_parallel.proof import verify
from hpc_parallel.proof.small_checks import check_loss
from hpc_parallel.proof.small_model import build_small
from hpc_parallel.strategies import batch_norm
from hpc_parallel.strategies.model_checks import find_problems
from hpc_parallel.strategies.whole_model import build_whole
from hpc_parallel.user_code import UserCodeError
from tests.composed import prepared
from tests.marks import in_full
from tests.plain_models import Large, SharedNet, TableNet

SEED = 5


def built(name: str, **arguments: Any) -> LayeredModel:
    return build_whole({"_target_": f"tests.plain_models.{name}", **arguments}, seed=SEED)


def original(kind: type[nn.Module]) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)
    return dict(kind().state_dict())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("TableNet", TableNet), ("made", SharedNet), ("SharedNet", SharedNet), ("made_table", TableNet)],
)
def test_it_starts_with_what_its_constructor_draws(name: str, kind: type[nn.Module]) -> None:
    before = torch.get_rng_state()
    model = built(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(model).__name__ == kind.__name__
    assert all(weight.is_meta for weight in model.parameters())
    materialise(model, seed=1, device="cpu", dtype=torch.float64)
    state = {model.library_name(key): value for key, value in model.state_dict().items()}
    wanted = original(kind)
    assert state.keys() <= wanted.keys()
    assert all(torch.equal(value, wanted[key].to(value.dtype)) for key, value in state.items())
    if kind is SharedNet:
        module = model.blocks["0"]
        assert module.output.weight is module.embedding.weight
        assert dict(model.tied) == {"blocks.0.output.weight": "blocks.0.embedding.weight"}


def test_sync_batch_norm_leaves_the_ranks_to_the_layout() -> None:
    """torch's own refuses CPUs, as DDP does with it, and would take the other stages of a pipeline along."""
    rows, outputs, means = torch.rand(9, 7, dtype=torch.float64), [], []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("TableNet", "synced"):
            model = built(name, rate=0.0)
            materialise(model, seed=1, device="cpu", dtype=torch.float64)
            outputs.append(DistributedDataParallel(model)(rows))
            means.append([value for key, value in model.state_dict().items() if "running_mean" in key])
    finally:
        dist.destroy_process_group()
    assert torch.equal(outputs[0], outputs[1])
    assert all(map(torch.equal, *means))
    assert [bool(mean.any()) for mean in means[0]] == [True, True]


@pytest.mark.parametrize("change", ["none", "momentum", "removed", "untracked", "uncounted"])
def test_running_statistics_are_those_of_torch(change: str) -> None:
    """Also if a model has changed them: some set the statistics to None, for those of each batch."""
    norms = [nn.BatchNorm1d(7, dtype=torch.float64), nn.BatchNorm1d(7, dtype=torch.float64)]
    for norm in norms:
        norm.momentum = None if change in ("momentum", "uncounted") else 0.1
        if change == "removed":
            norm.running_mean = norm.running_var = None
        norm.track_running_stats = change != "untracked"
        if change == "uncounted":
            norm.num_batches_tracked = None
    for _ in range(2):
        rows = torch.rand(9, 7, dtype=torch.float64)
        norms[0](rows)
        variance, mean = torch.var_mean(rows, 0, correction=0)
        batch_norm.track(norms[1], mean=mean, variance=variance, count=torch.tensor(9.0, dtype=torch.float64))
    torch.testing.assert_close(dict(norms[1].named_buffers()), dict(norms[0].named_buffers()))


def test_its_flops_are_counted() -> None:
    """Each layer once for a row, not once for each column of the row."""
    assert built("TableNet").forward_flops((7,)).total == 2 * (7 * 16 + 2 * 16 * 16 + 16 * 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Lossless", r"Lossless \(model\) has no loss: define its method loss\(output, target\), which"),
        ("own_synced", r"Own \(model\) is a subclass of SyncBatchNorm. Derive it from BatchNorm2d."),
        (
            "hooked",
            r"TableNet.first.weight \(model\) has a hook, which would be lost: weights get their memory",
        ),
        (
            "complex_weight",
            r"TableNet.gate \(model\) is a weight of torch.complex64, which is not supported. Keep its two "
            r"real parts as a weight \[16, 2\], and use torch.view_as_complex\(weight\) in the forward pass.",
        ),
        ("hooked_parts", r"LayeredModel.head.bias \(model\) has a hook, which would be lost"),
        ("normed", r"TableNet.last.weight \(model\) is computed from weights, which get their values after"),
        ("not_a_module", r"tests.plain_models.not_a_module \(model\) is a int, not a torch.nn.Module."),
    ],
)
def test_what_is_no_model_is_told_what_to_do(name: str, sentence: str) -> None:
    sizes = {"in_features": 2, "out_features": 2} if name == "Lossless" else {}
    with pytest.raises(ConfigError, match=sentence):
        built(name, **sizes)


@pytest.mark.parametrize("axis", ["pipeline", "context", "tensor", "tile", "expert"])
def test_what_cuts_a_model_is_refused_with_what_it_needs(axis: str) -> None:
    config = prepared("launcher=local").config
    (found,) = find_problems(
        built("TableNet"), config=config, layout=Layout(**{axis: 2}), sample_shape=(7,), dtype=torch.float32
    )
    start = (
        f"strategy.{axis} = 2 can't be used: TableNet is a plain torch.nn.Module, and strategy.{axis} needs"
    )
    assert str(found).startswith(f"{start} a LayeredModel, with ")


@pytest.mark.parametrize("axis", ["replicate", *in_full([("shard",)])])
def test_what_does_not_cut_it_has_no_problem(axis: str) -> None:
    own = ("~model", "+model={_target_: tests.plain_models.TableNet}")
    config = prepared("launcher=local", "nodes=2", "strategy=data", *own).config
    layout = Layout(**{axis: 2})
    assert not list(
        find_problems(built("TableNet"), config=config, layout=layout, sample_shape=(7,), dtype=torch.float32)
    )


class Pixels:
    """Rows of whole numbers, as images have them."""

    def __init__(self, columns: int, dtype: torch.dtype) -> None:
        self.columns, self.dtype = columns, dtype

    def __len__(self) -> int:
        return 8

    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(indices), self.columns, dtype=self.dtype), torch.zeros(len(indices)).long()


@pytest.mark.parametrize(
    ("columns", "dtype", "error"),
    [
        (7, torch.uint8, r"RuntimeError: .*dtype.* \(plain_models.py:\d+\), raised by TableNet for samples "
                         r"of shape \[7\] \(torch.uint8\). The data has uint8: try x.float\(\) / 255 "),
        (9, torch.float32, r"RuntimeError: .*2x9 and 7x16.* \(plain_models.py:\d+\), raised by TableNet"),
    ],
    ids=["whole numbers", "a wrong size"],
)  # fmt: skip
def test_samples_that_it_can_not_take_are_named_with_its_line(
    columns: int, dtype: torch.dtype, error: str
) -> None:
    data: Any = SimpleNamespace(train=Pixels(columns, dtype))
    with pytest.raises(UserCodeError, match=f"^{error}"):
        check_loss(built("TableNet"), seed=1, data=data, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "returns"), [("NamesItsOutput", "a dict"), ("HalfNamesItsOutput", "a tuple with a dict in it")]
)
def test_an_output_that_is_no_tensor_is_refused(name: str, returns: str) -> None:
    data: Any = SimpleNamespace(train=Pixels(7, torch.float32))
    message = rf"^{name}\.forward returns {returns}\. It must return a tensor, or a tuple of tensors"
    with pytest.raises(UserCodeError, match=message):
        check_loss(built(name), seed=1, data=data, device=torch.device("cpu"))


class Signs(LayeredModel):
    def __init__(self) -> None:
        super().__init__(stem=nn.Identity(), blocks=[nn.Linear(3, 3)], head=nn.Identity())

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(output, targets.to(output), reduction="sum")


class SignedPixels(Pixels):
    def batch(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, _ = super().batch(indices)
        return pixels, pixels > 0


def test_targets_may_be_truth_values() -> None:
    data: Any = SimpleNamespace(train=SignedPixels(3, torch.float32))
    check_loss(Signs(), seed=1, data=data, device=torch.device("cpu"))


@pytest.mark.parametrize("strategy", ["pipeline", "tensor", "expert"])
def test_keys_of_a_users_class_mean_what_the_user_says(strategy: str) -> None:
    """Its `layers`, `heads` and `experts` need not be what a technique splits."""
    own = (
        "~model",
        "+model={_target_: tests.plain_models.TableNet, layers: 1, heads: 3, kv_heads: 3, experts: 5}",
    )
    words = (
        "launcher=script",
        "launcher.check_imports=false",
        "nodes=4",
        f"strategy={strategy}",
        "strategy.replicate=1",
    )
    words = (*words, "training.global_batch_size=16")
    assert prepared(*words, *own).config.devices == 4


def test_its_small_copy_is_built_without_the_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank of a host would have all weights in memory for nothing."""
    monkeypatch.setattr(Large, "built", [])
    config = prepared("launcher=local", "~model", "+model={_target_: tests.plain_models.Large}").config
    assert type(build_small(config)).__name__ == "Large"
    assert Large.built == [4]


@pytest.mark.parametrize(
    ("schedule", "layout", "built"),
    [
        ("1f1b", Layout(shard=2), []),
        ("interleaved_zero_bubble", Layout(pipeline=2), []),
        ("interleaved_zero_bubble", Layout(replicate=2), [4]),
        *in_full([("interleaved_zero_bubble", Layout(shard=2), [4])]),
    ],
)
def test_a_small_copy_for_its_gradients_is_built_only_if_they_are_compared(
    schedule: str, layout: Layout, built: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Large, "built", [])
    monkeypatch.setattr(verify, "sometimes_used", lambda run, model: [])
    config = prepared("launcher=local", "~model", "+model={_target_: tests.plain_models.Large}").config
    config.strategy.schedule = schedule
    run: Any = SimpleNamespace(config=config, layout=layout)
    verify._require_gradients(run, as_random=True)
    assert Large.built == built
