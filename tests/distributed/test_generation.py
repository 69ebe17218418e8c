"""Generated tokens are those of one device that reads the whole text anew for each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hydra.utils import instantiate

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.models.layered import materialise
from hpc_parallel.worker.session import read_config
from tests.marks import in_full
from tests.workers import Workers, do_here

PROMPTS = ("def", "class Generation:", "import torch", "return x", "é")  # of unequal length, in bytes too
NEW_TOKENS = 24
COMMON = (
    "task=generate",
    f"task.prompts=[{','.join(repr(prompt) for prompt in PROMPTS)}]",
    f"task.new_tokens={NEW_TOKENS}",
    "training.precision=float64",
    "data.max_bytes=300000",
    "data.sequence_length=32",
    "model._target_=tests.models.Decided",
    "model.dim=64",
    "model.ffn_dim=160",
    "model.tied_head=false",
)
LAYOUTS = {
    "single": ("strategy=single",),
    "data over 2, with a prompt too few": ("strategy=data", "nodes=2"),
    "fsdp over 2": ("strategy=fsdp", "nodes=2"),
    "tensor over 2": ("strategy=tensor", "nodes=2"),
    "pipeline of 2": ("strategy=pipeline", "nodes=2"),
    "pipeline of 4": ("strategy=pipeline", "nodes=4"),
    "pipeline of 2, interleaved in training": (
        "strategy=pipeline", "nodes=2", "strategy.schedule=interleaved",
    ),
    "pipeline 2 x tensor 2": ("strategy=hybrid", "nodes=2", "gpus_per_node=2"),
    "replicate 2 x tensor 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.replicate=2",
    ),
    "pipeline 2 x replicate 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.replicate=2",
    ),
}  # fmt: skip


@torch.no_grad()
def recomputed(config: RunConfig, prompt: list[int]) -> list[int]:
    """Greedy decoding without a cache, on the whole model."""
    model = instantiate(config.model)
    materialise(model, seed=config.seed, device="cpu", dtype=torch.float64)
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = model(torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def wanted(workers: Workers) -> list[list[int]]:
    config, _ = read_config(workers.prepare(*COMMON, "strategy=single").folder.config)
    found = [recomputed(config, list(prompt.encode())) for prompt in PROMPTS]
    assert len(set(map(tuple, found))) == len(PROMPTS)
    assert min(len(set(tokens)) for tokens in found) > NEW_TOKENS // 3  # no prompt ends in a rut
    return found


def generated(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]


# `make test` proves one layout of each technique.
IN_FULL = (
    "pipeline 2 x tensor 2", "pipeline of 4", "pipeline of 2, interleaved in training", "fsdp over 2",
    "pipeline 2 x replicate 2", "replicate 2 x tensor 2",
)  # fmt: skip
CASES = [*(layout for layout in LAYOUTS if layout not in IN_FULL), *in_full((layout,) for layout in IN_FULL)]


@pytest.mark.parametrize("layout", CASES)
def test_tokens_are_those_of_one_device(workers: Workers, wanted: list[list[int]], layout: str) -> None:
    folder = workers.do(*COMMON, *LAYOUTS[layout])
    lines = generated(folder)
    assert [line["prompt"] for line in lines] == list(PROMPTS)
    assert [line["tokens"] for line in lines] == wanted
    assert [line["text"] for line in lines] == [bytes(t).decode(errors="replace") for t in wanted]
    assert "The logits of all new tokens are those that Decided computes" in comparison(folder)


def comparison(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["comparison"])


MIXTURE = (
    *COMMON, "model=moe_tiny", "model._target_=tests.models.DecidedExperts", "model.layers=3",
    "model.experts_per_token=3", "model.gate=sigmoid", "model.shared_experts=1", "model.dense_layers=1",
    "model.qk_norm=true", "model.ffn_dim=48",
)  # fmt: skip
MIXTURES = {
    "expert 2 x tensor 2": (
        "strategy=tensor", "nodes=2", "gpus_per_node=2", "strategy.tensor=2", "strategy.expert=2",
    ),
    "expert over 2": ("strategy=expert", "nodes=2"),
    "shard 2 x expert 2": ("strategy=fsdp", "nodes=2", "gpus_per_node=2", "strategy.expert=2"),
    "pipeline 2 x expert 2": (
        "strategy=pipeline", "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.expert=2",
    ),
    "tensor over 2": ("strategy=tensor", "nodes=2"),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["expert 2 x tensor 2", *in_full((name,) for name in list(MIXTURES)[1:])])
def test_tokens_of_a_mixture_are_those_of_one_device(workers: Workers, layout: str) -> None:
    """Also with a prompt too few for two devices that share experts. The model is a user's own class."""
    folder = workers.do(*MIXTURE, *MIXTURES[layout])
    config, _ = read_config(folder / "config.yaml")
    wanted = [recomputed(config, list(prompt.encode())) for prompt in PROMPTS]
    assert len(set(map(tuple, wanted))) == len(PROMPTS)
    assert [line["tokens"] for line in generated(folder)] == wanted
    assert "The logits of all new tokens are those that" in comparison(folder)


FAR = (*COMMON, "model._target_=tests.models.LooksBack")


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("pipeline of 2", "float64"),
        *in_full(
            [
                ("single", "bfloat16"),
                ("data over 2, with a prompt too few", "float32"),
                ("fsdp over 2", "float16"),
            ]
        ),
    ],
)
def test_every_new_token_is_compared_with_the_whole_text(
    workers: Workers, layout: str, precision: str
) -> None:
    """With a cache, position 20 and later ones lack the input of 20 positions before."""
    wrong = {
        (prompt, number)
        for prompt, text in enumerate(PROMPTS)
        for number in range(1, NEW_TOKENS + 1)
        if len(text.encode()) + number - 2 >= 20  # the position that the token follows
    }
    prompt, number = min(wrong)
    found = (
        f"{len(wrong)} new tokens have other logits, the first is token {number} after prompt {prompt + 1},"
    )
    rounds = f"or enlarges the rounding of {precision}: training.precision=float32 shows which."
    with pytest.raises(AssertionError) as refused:
        workers.do(*FAR, *LAYOUTS[layout], f"training.precision={precision}")
    assert found in str(refused.value)
    assert (rounds in str(refused.value)) == (precision in ("bfloat16", "float16"))


def test_tokens_before_the_difference_are_those_of_one_device(workers: Workers) -> None:
    words = (*FAR, "strategy=single", "task.new_tokens=4")
    folder = workers.do(*words)
    config, _ = read_config(folder / "config.yaml")
    wanted = [recomputed(config, list(prompt.encode())) for prompt in PROMPTS]
    assert [line["tokens"] for line in generated(folder)] == [tokens[:4] for tokens in wanted]
    assert "LooksBack equals one device on one device for texts of 16 tokens" in comparison(folder)


@pytest.mark.full  # test_huggingface_parity.py has it by the library's own model
def test_a_model_that_looks_its_positions_up(workers: Workers) -> None:
    """GPT-2 learns a weight a position: a module that only asks where it is, and keeps nothing."""
    pytest.importorskip("transformers")
    gpt2 = ("model=huggingface", "model.config.model_type=gpt2", "model.config.hidden_size=64",
            "model.config.intermediate_size=160", "model.config.num_hidden_layers=2",
            "model.config.tie_word_embeddings=false", "+model.config.initializer_range=0.3")  # fmt: skip
    words = (*(word for word in COMMON if not word.startswith("model.")), *gpt2)
    run = workers.prepare(*words, "strategy=single")
    config, _ = read_config(run.folder.config)
    found = generated(workers.do(*words, "strategy=pipeline", "nodes=2"))
    wanted = [recomputed(config, list(prompt.encode())) for prompt in PROMPTS]
    assert [line["tokens"] for line in found] == wanted
    assert min(len(set(tokens)) for tokens in wanted) > NEW_TOKENS // 3


def test_a_draw_depends_on_the_prompt_and_the_place_alone(workers: Workers, wanted: list[list[int]]) -> None:
    drawn = [
        [line["tokens"] for line in generated(workers.do(*COMMON, *layout, "task.temperature=2"))]
        for layout in (("strategy=single",), ("strategy=data", "nodes=2"))
    ]
    assert drawn[0] == drawn[1]
    assert not any(mine == greedy for mine, greedy in zip(drawn[0], wanted, strict=True))


def test_a_generation_writes_its_results(workers: Workers) -> None:
    """Without prompts of its own it continues the held-out samples; a step is a token of all of them."""
    words = ("task=generate", "task.prompt_length=8", "task.new_tokens=13", "data.max_bytes=300000")
    rest = ("training.global_batch_size=4", "training.log_every=5", "strategy.verify=always")
    folder = workers.do("strategy=single", *words, *rest)
    lines = generated(folder)
    assert [(len(line["prompt_tokens"]), len(line["tokens"])) for line in lines] == [(8, 13)] * 4
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 5, 10, 13]
    assert all(line["tokens_per_s"] == pytest.approx(4 / line["step_time_s"]) for line in metrics)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["outcome"], summary["steps"], summary["samples"]) == ("completed", 0, 4)
    assert summary["weights"] == "initial"
    assert summary["prompt_time_s"] == metrics[0]["step_time_s"]
    assert "The logits of all new tokens are those that Transformer computes" in summary["comparison"]


def test_a_model_without_our_attention_is_refused(workers: Workers) -> None:
    words = ("task=generate", "model._target_=tests.models.Bigram", "data.max_bytes=300000")
    with pytest.raises(AssertionError, match="needs a model with CausalAttention"):
        workers.do("strategy=single", *words)


def phases_and_work(run_folder: str) -> list[str]:
    """The phases that a run of `task=generate` names, between the work that they announce."""
    from hpc_parallel.worker import generation, session

    events: list[str] = []

    def noted(name: str) -> Any:
        work = getattr(generation, name)
        return lambda *arguments, **options: (events.append(name), work(*arguments, **options))[1]

    with (
        mock.patch.object(session, "note_phase", lambda folder, text: events.append(text)),
        mock.patch.object(generation, "prompts_of", noted("prompts_of")),
        mock.patch.object(generation, "continue_prompts", noted("continue_prompts")),
    ):
        do_here(run_folder)
    return events


def test_each_phase_is_named_before_its_work(workers: Workers) -> None:
    run = workers.prepare(*COMMON, "strategy=single", "task.new_tokens=1")
    (events,) = workers.run(1, phases_and_work, str(run.folder.path))
    assert events[-4:] == ["reading the prompts", "prompts_of", "first tokens", "continue_prompts"]
