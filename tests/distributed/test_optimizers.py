"""Every optimizer updates as on one device, in every layout, and its state goes on in any other layout."""

from __future__ import annotations

import pytest

from hpc_parallel.record.checkpoint_index import complete
from tests.marks import in_full
from tests.parity import largest_difference, weight_difference
from tests.workers import Train, Trained, Workers

STEPS, HALF = 4, 2
COMMON = (
    f"training.steps={STEPS}", f"training.checkpoint_every={HALF}", "training.log_every=1",
    "training.validate_every=null", "training.measure_steps=0", "training.precision=float64",
    "training.global_batch_size=8", "data.sequence_length=16", "data.max_bytes=200000", "model.layers=2",
    "model.dim=32", "model.ffn_dim=80", "optimizer.warmup_steps=1",
)  # fmt: skip
OPTIMIZERS = {
    "muon": ("optimizer=muon",),
    "sgd": ("optimizer=sgd", "+optimizer.options.nesterov=true", "optimizer.schedule=wsd"),
    "adafactor": ("optimizer=adafactor", "optimizer.schedule=linear"),
    "radam": ("optimizer=custom", "optimizer._target_=torch.optim.RAdam", "optimizer.weight_decay=0.1"),
    "lion": (
        "optimizer=custom", "optimizer._target_=tests.optimizers.Lion", "optimizer.weight_decay=0.1",
        "optimizer.warmup_steps=null", "optimizer.schedule=tests.optimizers.triangle",
    ),
    "counting": ("optimizer=custom", "optimizer._target_=tests.optimizers.Counting"),
    "adamw by rules": (
        "+optimizer.groups.ends={match:['stem.*','head.*'],learning_rate_scale:0.1}",
        "+optimizer.groups.norms={match:['*norm*'],weight_decay:0.3,options:{betas:[0.5,0.6]}}",
        "+optimizer.groups.values={match:['*.value.*'],_target_:torch.optim.SGD,options:{momentum:0.5}}",
    ),
}  # fmt: skip
LAYOUTS = {
    "data 2": ("strategy=data", "nodes=2"),
    "fsdp 2": ("strategy=fsdp", "nodes=2"),
    "hsdp 2 x 2": ("strategy=hsdp", "nodes=2", "gpus_per_node=2"),
    "tensor 2": ("strategy=tensor", "nodes=2"),
    "shard 2 x tensor 2": ("strategy=tensor", "nodes=4", "strategy.tensor=2", "strategy.shard=2"),
    "pipeline 2": ("strategy=pipeline", "nodes=2"),
    "pipeline 2 x shard 2": (
        "strategy=pipeline", "nodes=4", "strategy.pipeline=2", "strategy.shard=2",
    ),
    "context 2": ("strategy=context", "nodes=2"),
    "server": ("strategy=parameter_server", "nodes=3"),
}  # fmt: skip
QUICK = [("muon", "shard 2 x tensor 2"), ("adamw by rules", "fsdp 2")]
ALL = [(optimizer, layout) for optimizer in OPTIMIZERS for layout in LAYOUTS]
# (optimizer, layout that writes, layout that goes on)
RESUMED = [
    ("muon", "shard 2 x tensor 2", "pipeline 2"),
    ("muon", "pipeline 2 x shard 2", "tensor 2"),
    ("muon", "tensor 2", "server"),
    ("sgd", "single", "hsdp 2 x 2"),
    ("adafactor", "shard 2 x tensor 2", "pipeline 2"),
    ("lion", "server", "fsdp 2"),
    ("adamw by rules", "fsdp 2", "single"),
    ("counting", "fsdp 2", "pipeline 2"),
    ("counting", "server", "tensor 2"),
]
EXPERTS = ("model=moe_tiny", "model.ffn_dim=24")


def words(optimizer: str, layout: str) -> tuple[str, ...]:
    return (*COMMON, *OPTIMIZERS[optimizer], *LAYOUTS.get(layout, (f"strategy={layout}",)))


def assert_equal(split: Trained, reference: Trained, *, steps: int = STEPS) -> None:
    assert [line["step"] for line in split.lines] == list(range(STEPS - steps + 1, STEPS + 1))
    assert largest_difference(split.losses, reference.losses[-steps:]) < 1e-10
    assert weight_difference(split, reference) < 1e-10


@pytest.mark.parametrize(
    ("optimizer", "layout"), [*QUICK, *in_full(case for case in ALL if case not in QUICK)]
)
def test_updates_are_those_of_one_device(trained: Train, optimizer: str, layout: str) -> None:
    assert_equal(trained(*words(optimizer, layout)), trained(*words(optimizer, "single")))


@pytest.mark.parametrize(("optimizer", "before", "after"), [RESUMED[0], *in_full(RESUMED[1:])])
def test_state_goes_on_in_another_layout(
    workers: Workers, trained: Train, optimizer: str, before: str, after: str
) -> None:
    wrote = trained(*words(optimizer, before))
    (half,) = (each for each in complete(wrote.folder / "checkpoints") if each.step == HALF)
    resumed = workers.train(*words(optimizer, after), resume_from=half.path)
    assert_equal(resumed, trained(*words(optimizer, "single")), steps=STEPS - HALF)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "sgd"])
@pytest.mark.parametrize(
    "layout",
    [
        ("strategy=expert", "nodes=2"),
        ("strategy=expert", "nodes=4", "strategy.expert=2", "strategy.replicate=2"),
        ("strategy=fsdp", "nodes=4", "strategy.expert=2"),
    ],
    ids=["expert 2", "expert 2 x replicate 2", "expert 2 x shard 2"],
)
def test_experts_are_updated_as_on_one_device(
    trained: Train, optimizer: str, layout: tuple[str, ...]
) -> None:
    common = (*EXPERTS, *COMMON[:-2], *OPTIMIZERS[optimizer])
    assert_equal(trained(*common, *layout), trained(*common, "strategy=single"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        ("Noisy", LAYOUTS["data 2"], "gives other weights in a second trial"),
        ("Coupled", LAYOUTS["fsdp 2"], "updates a weight by the gradients of others"),
        ("Forgetful", ("strategy=single",), "keeps parts outside of tensors"),
    ],
)
def test_a_class_that_would_not_be_equal_is_refused(
    workers: Workers, kind: str, layout: tuple[str, ...], message: str
) -> None:
    target = f"optimizer._target_=tests.optimizers.{kind}"
    with pytest.raises(AssertionError, match=f"ConfigError: optimizer: tests.optimizers.{kind} {message}"):
        workers.train(*COMMON, "optimizer=custom", target, *layout)
