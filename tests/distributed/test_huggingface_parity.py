"""A model of the library transformers follows one device on every layout that its plan allows."""

from __future__ import annotations

import json

import pytest
import torch
from hydra.utils import instantiate

from hpc_parallel.models.layered import materialise
from hpc_parallel.worker.session import read_config
from tests.marks import in_full
from tests.parity import STEPS, assert_follows
from tests.workers import Train, Workers

AutoModelForCausalLM = pytest.importorskip("transformers").AutoModelForCausalLM
configuration = pytest.importorskip("hpc_parallel.models.huggingface").configuration

SMALL = (
    "model=huggingface", "model.config.num_hidden_layers=3", "model.config.hidden_size=32",
    "model.config.intermediate_size=80", f"training.steps={STEPS}", "training.log_every=1",
    f"training.validate_every={STEPS}", "training.validation_samples=32", "data.sequence_length=32",
    "data.max_bytes=400000", "optimizer.warmup_steps=3", "training.clip_norm=0.5",
)  # fmt: skip
LLAMA = ("model.config.model_type=llama", "model.config.num_key_value_heads=2")
# With this seed a norm that rounds to float32 shows: 3e-10 in the losses.
QWEN3 = ("model.config.model_type=qwen3", "model.config.tie_word_embeddings=false", "seed=2")
GPT2 = ("model.config.model_type=gpt2",)
DATA = ("strategy=data", "nodes=2", "training.microbatch_size=4")
PIPELINE = ("strategy=pipeline", "nodes=2", "strategy.microbatches=4")
FSDP = ("strategy=fsdp", "nodes=2")
TENSOR = ("strategy=tensor", "nodes=2")
CONTEXT = ("strategy=context", "nodes=2")
CASES = [
    *((LLAMA, layout, "float64") for layout in (PIPELINE, TENSOR)),
    (GPT2, DATA, "float64"),
    *in_full(
        [
            *((LLAMA, layout, "float64") for layout in (FSDP, CONTEXT)),
            (QWEN3, TENSOR, "float64"),
            (GPT2, PIPELINE, "float64"),
            (LLAMA, TENSOR, "float32"),
            (LLAMA, DATA, "float64"),
            (QWEN3, PIPELINE, "float64"),
            (GPT2, CONTEXT, "float64"),
            (LLAMA, (*TENSOR, "strategy.sequence_parallel=false"), "float64"),
        ]
    ),
]
PACKED = (
    "data=dataset", "data.dataset._target_=tests.datasets.Texts", "data.packing=true", "data.vocab_size=256",
    "data.validation_share=0.2", "training.precision=float64",
)  # fmt: skip
CLOSE = {"float64": (1e-10, 1e-10), "float32": (1e-5, 1e-4)}


@pytest.mark.parametrize(
    ("kind", "layout", "precision"), CASES, ids=lambda v: v if isinstance(v, str) else " ".join(v[:1] + v[2:])
)
def test_layout_follows_one_device(
    trained: Train, kind: tuple[str, ...], layout: tuple[str, ...], precision: str
) -> None:
    words = (*SMALL, *kind, f"training.precision={precision}")
    reference = trained(*words, "strategy=single")
    assert any(line["grad_norm"] > 0.5 for line in reference.lines)  # clipping is active
    losses, weights = CLOSE[precision]
    assert_follows(trained(*words, *layout), reference, losses=losses, weights=weights)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (LLAMA, CONTEXT),
        *in_full([
            (LLAMA, TENSOR),
            (LLAMA, PIPELINE),
            (LLAMA, (*CONTEXT, "strategy.context_attention=all_to_all")),
            (GPT2, (*FSDP, "training.activation_checkpointing=full")),
            (GPT2, (*CONTEXT, "strategy.context_attention=gather")),
            (QWEN3, (*TENSOR, "strategy.sequence_parallel=false")),
        ]),
    ],
)  # fmt: skip
def test_packed_documents_follow_one_device(
    trained: Train, kind: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    """On one device, tests/unit/test_packed_documents.py compares with the documents one by one."""
    words = (*(word for word in SMALL if word != "data.max_bytes=400000"), *kind, *PACKED)
    assert_follows(trained(*words, *layout), trained(*words, "strategy=single"), losses=1e-10, weights=1e-10)


@pytest.mark.parametrize(("kind", "layout"), [(LLAMA, TENSOR), (GPT2, PIPELINE[:2])], ids=["llama", "gpt2"])
def test_generated_tokens_are_those_of_the_librarys_own_model(
    workers: Workers, kind: tuple[str, ...], layout: tuple[str, ...]
) -> None:
    """Its model reads the whole text anew for each token, without our attention, cache and positions."""
    words = ("task=generate", "task.prompts=[def,class]", "task.new_tokens=12", "training.precision=float64")
    spread = "+model.config.initializer_range=0.5"  # else every text ends in one token, whatever is before
    folder = workers.do(*SMALL, *kind, *words, *layout, spread)
    lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    config, _ = read_config(folder / "config.yaml")
    model = instantiate(config.model)
    materialise(model, seed=config.seed, device="cpu", dtype=torch.float64)
    library = AutoModelForCausalLM.from_config(configuration(config.model["config"])).double().eval()
    named = model.named_parameters(remove_duplicate=False)
    library.load_state_dict({model.library_name(name): weight for name, weight in named})
    for line in lines:
        tokens = list(line["prompt"].encode())
        for _ in line["tokens"]:
            logits = library(torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
        assert line["tokens"] == tokens[len(line["prompt"]) :]
        assert len(set(line["tokens"])) > 3
