"""`task=infer` and `task=generate` in each precision, on each strategy, with another layout's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate

from hpc_parallel.models.layered import LayeredModel
from hpc_parallel.worker.session import read_config
from tests.marks import in_full
from tests.workers import Trained, Workers

SAMPLES, NEW_TOKENS = 32, 12
PROMPTS = ("def", "class Generation:", "é")
TEXT = (
    "data.max_bytes=300000", "data.sequence_length=32", "model.dim=64", "model.ffn_dim=160",
    "model.tied_head=false", "training.global_batch_size=8", f"training.validation_samples={SAMPLES}",
)  # fmt: skip
TASKS = {
    "infer": ("task=infer", "task.batch_sizes=[4]", "task.repeats=1"),
    "generate": ("task=generate", f"task.new_tokens={NEW_TOKENS}",
                 f"task.prompts=[{','.join(repr(prompt) for prompt in PROMPTS)}]"),
}  # fmt: skip
ROUNDING = {"bfloat16": 2**-9, "float16": 2**-12, "float32": 2**-25}  # of numbers with 8, 11 and 24 bits
LOSS = 4  # roundings, as a share of a mean over hundreds of tokens
LOGIT = 64  # roundings: those of all blocks' sums add up, and a token follows from a single row of logits
SPLIT = {
    "single": "strategy=single",
    "data": "strategy=data nodes=2",
    "fsdp": "strategy=fsdp nodes=2",
    "tensor": "strategy=tensor nodes=2",
    "pipeline": "strategy=pipeline nodes=2",
    "model": "strategy=model nodes=2",
    "pipeline x tensor": "strategy=hybrid nodes=2 gpus_per_node=2",
    "shard x tensor": "strategy=tensor nodes=2 gpus_per_node=2 strategy.tensor=2 strategy.shard=2",
}
LAYOUTS = {
    "generate": SPLIT,
    "infer": SPLIT
    | {
        "context": "strategy=context nodes=2",
        "dataparallel": "strategy=dataparallel gpus_per_node=2",
        "server": "strategy=parameter_server nodes=3 strategy.dedicated_server=true",
    },
}
# `make test` has what broke, and a strategy whose weights fully_shard casts.
QUICK = [
    ("infer", "tensor", "bfloat16"),
    ("generate", "tensor", "bfloat16"),
    ("generate", "fsdp", "float16"),
]
CELLS = [(task, layout, precision) for task in TASKS for layout in LAYOUTS[task] for precision in ROUNDING]
COMPILED = ("infer", "tensor", "bfloat16", "training.compile=true")


@pytest.fixture(scope="module")
def trained(workers: Workers) -> Trained:
    """A checkpoint of slices, with weights so large that each token depends on all before it."""
    steps = ("training.steps=1", "training.checkpoint_every=1", "training.validate_every=null")
    model = ("model._target_=tests.models.Decided", "strategy.verify=never")
    return workers.train("strategy=fsdp", "nodes=2", *TEXT, *steps, *model)


def whole(trained: Trained, folder: Path) -> LayeredModel:
    """The model of a run in float64, on one device, with the weights of `trained`."""
    config, _ = read_config(folder / "config.yaml")
    model: LayeredModel = instantiate(config.model).double().eval()
    model.load_state_dict({name: weight.double() for name, weight in trained.weights.items()})
    return model


@torch.no_grad()
def loss_of(model: LayeredModel, folder: Path) -> float:
    config, _ = read_config(folder / "config.yaml")
    inputs, targets = instantiate(config.data).validation.batch(np.arange(SAMPLES))
    return (model.loss(model(inputs), targets) / model.loss_terms(targets)).item()


@torch.no_grad()
def lacks(model: LayeredModel, *, prompt: list[int], new: list[int]) -> torch.Tensor:
    """By how much the logit of each new token is below the largest, as a share of the logits' mean size."""
    logits = model(torch.tensor([[*prompt, *new[:-1]]]))[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(new)[:, None])[:, 0]
    return (logits.amax(1) - chosen) / logits.square().mean(1).sqrt()


@pytest.mark.parametrize(
    ("task", "layout", "precision", "more"),
    [*((*cell, "") for cell in QUICK), *in_full((*cell, "") for cell in CELLS if cell not in QUICK),
     *in_full([COMPILED])],
)  # fmt: skip
def test_a_forward_pass_in_each_precision_is_that_of_one_device(
    workers: Workers, trained: Trained, task: str, layout: str, precision: str, more: str
) -> None:
    split = (*LAYOUTS[task][layout].split(), *more.split())
    words = (*TEXT, *TASKS[task], *split, f"training.precision={precision}")
    folder = workers.do(*words, f"weights={trained.folder}")
    model = whole(trained, folder)
    if task == "infer":
        (loss,) = [
            line["validation_loss"]
            for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
            if "validation_loss" in line
        ]
        assert loss == pytest.approx(loss_of(model, folder), rel=LOSS * ROUNDING[precision])
        return
    lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    shares = [lacks(model, prompt=line["prompt_tokens"], new=line["tokens"]) for line in lines]
    assert [line["prompt"] for line in lines] == list(PROMPTS)
    assert float(torch.cat(shares).max()) < LOGIT * ROUNDING[precision]
    assert len({token for line in lines for token in line["tokens"]}) > NEW_TOKENS  # they say something
