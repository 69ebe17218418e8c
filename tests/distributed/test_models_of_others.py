"""Models that know nothing of this package equal one device on every layout that their adapter allows."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from hpc_parallel.__main__ import main as command
from hpc_parallel.models.adapter import Adapter
from hpc_parallel.models.layered import materialise
from hpc_parallel.problems import ConfigError
from hpc_parallel.strategies.tile.tile_maps import measure
from tests import models_of_others
from tests.marks import in_full
from tests.models_of_others.gpt import GPT, GPTConfig
from tests.models_of_others.gpt_adapter import Stem
from tests.models_of_others.resnet import ResNet
from tests.models_of_others.unet import UNet
from tests.models_of_others.vit import SimpleViT
from tests.models_of_others.vit_adapter import CutViT, Head
from tests.parity import STEPS, assert_follows
from tests.workers import Train, Workers, do_or_refuse

MOST_LINES = 25
COMMON = (
    f"training.steps={STEPS}", "training.log_every=1", f"training.validate_every={STEPS}",
    "training.validation_samples=16", "training.checkpoint_every=null", "training.measure_steps=0",
    "training.global_batch_size=8", "training.precision=float64", "training.clip_norm=0.5",
    "optimizer.warmup_steps=3",
    "strategy.verify=never",  # the tests compare
)  # fmt: skip
TEXT = ("data=text", "data.sequence_length=32", "data.max_bytes=100000")
IMAGES = ("data=digits", "data.height=16", "data.width=24")
# BatchNorm of few values amplifies rounding. The last map of 64 x 64 pixels has 2 x 2 positions.
LARGE_IMAGES = ("data=digits", "data.height=64", "data.width=64")
GPT_SIZES = {"block_size": 32, "n_layer": 4, "n_embd": 32, "n_head": 4}
RESNET_SIZES = {"layers": [2, 1, 1, 1], "num_classes": 10, "width": 8, "in_channels": 1}
VIT_SIZES = {
    "image_size": [16, 24], "patch_size": 4, "channels": 1, "num_classes": 10, "dim": 16, "depth": 3,
    "heads": 4, "mlp_dim": 24,
}  # fmt: skip
UNET_SIZES = {"n_channels": 1, "n_classes": 2, "width": 4}
CELLS = ("data=cells", "data.samples=64", "data.height=16", "data.width=24")
CUT = {  # name: (class of the adapter, sizes, data)
    "gpt": ("gpt_adapter.CutGPT", GPT_SIZES, TEXT),
    "split gpt": ("gpt_split_adapter.SplitGPT", GPT_SIZES | {"dropout": 0.1}, TEXT),
    "resnet": ("resnet_adapter.CutResNet", RESNET_SIZES, LARGE_IMAGES),
    "vit": ("vit_adapter.CutViT", VIT_SIZES, IMAGES),
    "moe": ("moe_adapter.CutMixtral", {"n_layers": 3}, TEXT),
    "unet": ("unet_adapter.CutUNet", UNET_SIZES, CELLS),
}
LAYOUTS = {  # name: (layout, microbatches of one device)
    "data 2": ("strategy=data nodes=2", 1),
    "data 2, accumulating 2": ("strategy=data nodes=2 training.microbatch_size=2", 2),
    "dataparallel 2": ("strategy=dataparallel gpus_per_node=2", 1),
    "server": ("strategy=parameter_server nodes=3", 1),
    "fsdp 2": ("strategy=fsdp nodes=2", 1),
    "hsdp 2 x 2": ("strategy=hsdp nodes=2 gpus_per_node=2", 1),
    "model 2": ("strategy=model nodes=2", 1),
    "pipeline 2": ("strategy=pipeline nodes=2 strategy.microbatches=4", 4),
    "pipeline 2, zero bubble": (
        "strategy=pipeline nodes=2 strategy.microbatches=4 strategy.schedule=interleaved_zero_bubble "
        "strategy.stages_per_rank=1", 4,
    ),
    "pipeline 2 x replicate 2": (
        "strategy=pipeline nodes=4 strategy.pipeline=2 strategy.replicate=2 strategy.microbatches=2", 2,
    ),
    "pipeline 2 x shard 2": (
        "strategy=pipeline nodes=4 strategy.pipeline=2 strategy.shard=2 strategy.microbatches=2", 2,
    ),
    "tensor 2": ("strategy=tensor nodes=2", 1),
    "tensor 2, whole sequence": (
        "strategy=tensor nodes=2 strategy.sequence_parallel=false strategy.loss_parallel=false", 1,
    ),
    "tensor 2 x shard 2": (
        "strategy=tensor nodes=2 gpus_per_node=2 strategy.tensor=2 strategy.shard=2", 1,
    ),
    "hybrid 2 x 2": ("strategy=hybrid nodes=2 gpus_per_node=2 strategy.microbatches=2", 2),
    "context 2": ("strategy=context nodes=2", 1),
    "context 2, gather": ("strategy=context nodes=2 strategy.context_attention=gather", 1),
    "context 2 x tensor 2": (
        "strategy=tensor nodes=2 gpus_per_node=2 strategy.tensor=2 strategy.context=2", 1,
    ),
}  # fmt: skip
EVERY_MODEL = [name for name in LAYOUTS if not name.startswith(("tensor", "hybrid", "context"))]
SPLIT = {"split gpt": list(LAYOUTS), "resnet": [name for name in LAYOUTS if "context" not in name]}
CHEAP = [("split gpt", "tensor 2"), ("vit", "pipeline 2")]
CASES = [(model, layout) for model in CUT for layout in SPLIT.get(model, EVERY_MODEL)]
REFUSED = {
    ("gpt", "context 2"): "CutGPT has no CausalAttention",
    ("gpt", "tensor 2"): "CutGPT.tensor_roles has no role for stem.wte.weight",
    ("moe", "context 2"): "CutMixtral has no CausalAttention",
    ("moe", "tensor 2"): "CutMixtral.tensor_roles has no role for stem.weight",
    ("vit", "tensor 2"): "CutViT.tensor_roles has no role for stem.1.weight",
}


def words_of(model: str) -> tuple[str, ...]:
    target, sizes, data = CUT[model]
    keys = ", ".join(f"{key}: {value}" for key, value in sizes.items())
    return *data, "~model", f"+model={{_target_: tests.models_of_others.{target}, {keys}}}"


@pytest.mark.parametrize(("model", "layout"), [*CHEAP, *in_full(c for c in CASES if c not in CHEAP)])
def test_layout_follows_one_device(trained: Train, model: str, layout: str) -> None:
    overrides, microbatches = LAYOUTS[layout]
    words = (*COMMON, *words_of(model))
    alone = trained("strategy=single", *words, f"training.microbatch_size={8 // microbatches}")
    assert_follows(trained(*words, *overrides.split()), alone, losses=1e-10, weights=1e-9)


@pytest.mark.full
@pytest.mark.parametrize(("model", "sizes"), [("resnet", {}), ("unet", {}), ("unet", {"bilinear": True})])
def test_tiles_of_an_image_model_follow_one_device(workers: Workers, model: str, sizes: dict) -> None:
    words = (*COMMON, *words_of(model), *(f"+model.{key}={value}" for key, value in sizes.items()))
    assert_follows(
        workers.train(*words, "strategy=tile", "nodes=2", "gpus_per_node=2"),
        workers.train(*words, "strategy=single"),
        losses=1e-10,
        weights=1e-9,
    )


@pytest.mark.parametrize(("model", "layout"), in_full(REFUSED))
def test_what_an_adapter_does_not_allow_is_refused(
    workers: Workers, tmp_path: Path, model: str, layout: str
) -> None:
    run = workers.prepare(*COMMON, *words_of(model), *LAYOUTS[layout][0].split())
    reasons = workers.run(run.processes, do_or_refuse, str(run.folder.path), str(tmp_path))
    assert all(REFUSED[model, layout] in reason for reason in reasons)


@pytest.mark.parametrize("name", ["gpt", "resnet", "vit", "moe", "unet"])
def test_an_adapter_is_short(name: str) -> None:
    """Without docstrings and blank lines, with imports."""
    source = Path(models_of_others.__file__).with_name(f"{name}_adapter.py").read_text()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            del node.body[0]
    lines = {node.lineno for node in ast.walk(tree) if hasattr(node, "lineno")}
    ends = {node.end_lineno for node in ast.walk(tree) if hasattr(node, "end_lineno")}
    assert 10 < len(lines | ends) <= MOST_LINES


ORIGINALS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(**GPT_SIZES)),
    "resnet": lambda: ResNet(**RESNET_SIZES),
    "unet": lambda: UNet(**UNET_SIZES),
}


@pytest.mark.parametrize("model", ["gpt", *in_full([("resnet",), ("unet",)])])
def test_weights_go_to_the_original_and_come_back(workers: Workers, tmp_path: Path, model: str) -> None:
    """A run of two stages exports the original's names, and starts from the original's file."""
    layout, short = LAYOUTS["pipeline 2"][0].split(), ("training.steps=1", "training.validate_every=1")
    words = ("training.checkpoint_every=1", "optimizer.warmup_steps=0")
    run = workers.train(*COMMON, *words_of(model), *layout, *short, *words)
    exported, saved = tmp_path / "exported.safetensors", tmp_path / "saved.safetensors"
    assert command(["export", str(run.folder), "--output", str(exported), "--library-names"]) == 0
    original = ORIGINALS[model]().double()
    load_model(original, exported)  # raises an error for a missing or unknown name
    assert sum(weight.numel() for weight in original.parameters()) == sum(
        weight.numel() for weight in run.weights.values()
    )
    save_model(original, str(saved))
    infer = ("task=infer", "task.repeats=1", "task.batch_sizes=[2]", f"weights={saved}")
    folder = workers.do(*COMMON[3:8], *words_of(model), "strategy=fsdp", "nodes=2", *infer)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(run.lines[-1]["validation_loss"], rel=1e-10)


@pytest.mark.full
def test_a_tied_weight_may_have_either_name_in_a_file(workers: Workers, tmp_path: Path) -> None:
    """safetensors keeps only lm_head.weight; torch's state dict has both names."""
    original = ORIGINALS["gpt"]()
    one_name, both_names = tmp_path / "one.safetensors", tmp_path / "both.safetensors"
    save_model(original, str(one_name))
    assert "transformer.wte.weight" not in load_file(one_name)
    save_file({name: weight.clone() for name, weight in original.state_dict().items()}, both_names)
    words = ("task=infer", "task.repeats=1", "task.batch_sizes=[2]", "strategy=single", *COMMON[3:8])
    folders = [
        workers.do(*words, *words_of("gpt"), f"weights={path}", *layout)
        for path, layout in ((one_name, ()), (both_names, ("strategy=pipeline", "nodes=2")))
    ]
    one, both = (json.loads((folder / "summary.json").read_text()) for folder in folders)
    assert one["validation_loss"] == pytest.approx(both["validation_loss"], rel=1e-10)


@pytest.mark.full
def test_generation_continues_as_the_original_does(workers: Workers, tmp_path: Path) -> None:
    """The original reads the whole text again for each token."""
    torch.manual_seed(0)
    original = ORIGINALS["gpt"]()
    with torch.no_grad():
        for weight in original.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.3)  # else every text ends in one token
    path = tmp_path / "gpt.safetensors"
    save_model(original, str(path))
    words = ("task=generate", "task.prompts=[def,class]", "task.new_tokens=6", "training.precision=float64")
    layout = ("strategy=tensor", "nodes=2", f"weights={path}")
    folder = workers.do("strategy.verify=never", *words_of("split gpt"), *words, *layout)
    lines = [json.loads(line) for line in (folder / "generated.jsonl").read_text().splitlines()]
    original.double().eval()
    for line in lines:
        tokens = list(line["prompt"].encode())
        for _ in line["tokens"]:
            tokens.append(int(original(torch.tensor([tokens]))[0][0, -1].argmax()))
        assert line["tokens"] == tokens[len(line["prompt"]) :]
        assert len(set(line["tokens"])) > 2


def test_a_weight_in_no_part_is_named() -> None:
    gpt = GPT(GPTConfig(**GPT_SIZES))
    parts = {"stem": Stem(gpt.transformer), "blocks": gpt.transformer.h}
    with pytest.raises(ValueError, match=r"^Adapter has transformer.ln_f.weight, .* in no part"):
        Adapter(gpt, **parts, head=gpt.lm_head)


def test_tiles_refuse_a_model_with_a_table_as_any_other() -> None:
    """The table is on the CPU, and the rest of the model on meta."""
    with torch.device("meta"):
        model = CutViT(**VIT_SIZES)
    with pytest.raises(ConfigError, match=r"strategy.tile"):
        measure(model, sample_shape=(1, 16, 24), grid=(1, 2))


@pytest.mark.parametrize("kind", ["plain", "buffer"])
def test_a_table_without_values_is_refused(kind: str) -> None:
    """As a plain attribute it stays on meta; as a buffer, random numbers would take its place."""
    with torch.device("meta"):
        vit = SimpleViT(**VIT_SIZES)
        stem = nn.Sequential(*vit.to_patch_embedding)
        if kind == "buffer":
            stem.register_buffer("table", vit.positions())
        else:
            stem.table = vit.positions()
        blocks = (nn.Sequential(*layer) for layer in vit.transformer.layers)
        model = Adapter(vit, stem=stem, blocks=blocks, head=Head(vit.transformer.norm, vit.linear_head))
    with pytest.raises(ConfigError, match=r"^Adapter: stem.table has no values, .* built without memory"):
        materialise(model, seed=1, device="cpu", dtype=torch.float64)
