"""What the login node says about optimizers, rules and schedules, before anything starts."""

from __future__ import annotations

import pytest

from hpc_parallel.problems import ConfigError
from tests.composed import prepared

CUSTOM = ("optimizer=custom",)
WRONG = {
    ("optimizer=sgd", "optimizer._target_=torch.optim.Adam"): "sets the arguments of torch.optim.SGD. "
    "Try optimizer=custom optimizer._target_=torch.optim.Adam.",
    (*CUSTOM, "optimizer._target_=tests.optimizers.Lyon"): "Try optimizer._target_=tests.optimizers.Lion.",
    (*CUSTOM, "optimizer._target_=Lion"): "optimizer._target_ = Lion is not the path of a class",
    (*CUSTOM,): "optimizer._target_ has no value and no default.",
    ("optimizer.schedule=cosin",): "Try optimizer.schedule=cosine.",
    ("optimizer.schedule=tests.optimizers.triangl",): "Try optimizer.schedule=tests.optimizers.triangle.",
    ("optimizer.schedule=tests.optimizers.triangle", "optimizer.warmup_steps=5"): "has no effect: "
    "tests.optimizers.triangle decides every step. Try optimizer.warmup_steps=null.",
    ("optimizer.decay_share=1.5",): "optimizer.decay_share = 1.5 must lie between 0 and 1.",
    ("+optimizer.groups.a={match:stem.*}",): "optimizer.groups.a.match = stem.* must be a list of patterns.",
    ("+optimizer.groups.a={weight_decy:0.1}",): "Try optimizer.groups.a.weight_decay.",
    ("+optimizer.groups.a={lr:0.1}",): "optimizer.groups.a.lr: a rule has no such key.",
    ("+optimizer.groups.a={weight_decay:-1}",): "optimizer.groups.a.weight_decay = -1 must be a number",
    ("+optimizer.groups.a={dims:1}",): "must be a list of whole numbers. Try optimizer.groups.a.dims=[1].",
    ("+optimizer.groups.a={_target_:torch.optim.}",): "is not the path of a class",
    ("+optimizer.groups.a=5",): "optimizer.groups.a = 5 must be a table.",
    ("optimizer.eps=0",): "optimizer.eps = 0 must be above 0. Try optimizer.eps=1e-08.",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_a_wrong_optimizer_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepared("launcher=script", *words)
    (problem,) = map(str, raised.value.problems)
    assert WRONG[words] in problem


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_the_files_are_legal(name: str) -> None:
    assert prepared("launcher=script", f"optimizer={name}").config.optimizer.name == name
