"""Other trainers on the same card: a plain compiled loop, one with FSDP2, Lightning Fabric, torchtitan.

Each trains a model of the same shape in bfloat16 beside float32 weights, with clipping and fused AdamW,
compiled. What they need beyond torch is in requirements.txt; a peer that is not installed is named as such.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

from tests.benchmarks.peers.plain_transformer import PlainTransformer, cross_entropy
from tests.gpu.report import setting

STEPS = 4  # between two waits of the host, as in trainings of ours
MAX_NORM = 1.0
Step = Callable[[], None]


def step_s(peer: str, shape: Mapping[str, Any], *, samples: int, seq: int, fp8: str | None = None) -> float:
    """The median step of `peer`; `fp8` names a recipe of torchao. ImportError: a package is missing."""
    tokens = torch.randint(min(256, shape["vocab_size"]), (samples, seq), device=setting.device())
    full = {"norm_eps": 1e-5, "rope_theta": 10000.0, "tied_head": True, **shape}
    step = PEERS[peer](full, tokens, fp8)

    def steps() -> None:
        for _ in range(STEPS):
            step()

    return setting.seconds(steps, repeats=setting.sized(5, 1), warm_up=1) / STEPS


def free() -> None:
    """What the last case compiled and kept."""
    torch.compiler.reset()
    gc.enable()  # torchtitan's trainer turns it off
    gc.collect()
    if setting.on_gpu():
        torch.cuda.empty_cache()


def plain(shape: dict[str, Any], tokens: Tensor, fp8: str | None) -> Step:
    """In the manner of nanoGPT: one model in one graph, autocast, nothing else."""
    model = model_of(shape, seq=tokens.shape[1], fp8=fp8)
    return by_hand(model, partial(autocast, torch.compile(model)), tokens)


def fsdp2(shape: dict[str, Any], tokens: Tensor, fp8: str | None) -> Step:
    """fully_shard around each compiled block, on a mesh of this rank."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(shape, seq=tokens.shape[1], fp8=fp8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        block.compile()
        fully_shard(block, mesh=setting.mesh_of("shard"), mp_policy=policy)
    fully_shard(model, mesh=setting.mesh_of("shard"), mp_policy=policy)
    return by_hand(model, model, tokens, loss_of=torch.compile(cross_entropy))


def fabric(shape: dict[str, Any], tokens: Tensor, fp8: str | None) -> Step:
    from lightning_fabric import Fabric

    gpu = setting.on_gpu()
    runs = Fabric(accelerator="cuda" if gpu else "cpu", devices=1, precision="bf16-mixed")
    plain = model_of(shape, seq=tokens.shape[1], fp8=fp8)
    model, optimizer = runs.setup(torch.compile(plain), adamw(plain))

    def step() -> None:
        runs.backward(cross_entropy(model(tokens), tokens))
        runs.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchtitan(shape: dict[str, Any], tokens: Tensor, fp8: str | None) -> Step:
    """Its trainer with its model of this shape, whose head is tied as ours is."""
    for name in ("datasets", "datasets.distributed", "torch.utils.tensorboard"):
        sys.modules.setdefault(name, MagicMock())  # imported at once, used by no step
    if not setting.on_gpu():
        torch._utils._get_available_device_type = lambda: "cpu"  # it takes no GPU for a GPU that is missing
    os.environ.setdefault("LOCAL_RANK", "0")
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import _extra_train_specs
    from torchtitan.train import Trainer

    class Tied(llama3.Transformer):  # type: ignore[misc]
        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            super().init_weights(buffer_device)
            self.output.weight = self.tok_embeddings.weight

    spec, lines = llama3.get_train_spec(), MagicMock()
    spec.model_cls, spec.build_metrics_processor_fn = Tied, lambda *_: lines
    spec.build_tokenizer_fn = spec.build_dataloader_fn = spec.state_dict_adapter = None
    lines.should_log.return_value = False
    peak = lines.device_memory_monitor.get_peak_stats.return_value
    peak.max_reserved_gib = peak.max_reserved_pct = 0.0
    width = int(8 * shape["dim"] / 3)
    spec.model_args = {"same": llama3.TransformerModelArgs(
        dim=shape["dim"], n_layers=shape["layers"], n_heads=shape["heads"], n_kv_heads=shape["kv_heads"],
        vocab_size=shape["vocab_size"], rope_theta=shape["rope_theta"], norm_eps=shape["norm_eps"],
        multiple_of=shape["ffn_dim"], ffn_dim_multiplier=shape["ffn_dim"] / width,
    )}  # fmt: skip
    _extra_train_specs["same"] = spec
    job = JobConfig()
    job.model.name = job.model.flavor = "same"
    job.training.local_batch_size, job.training.seq_len = tokens.shape
    job.training.max_norm, job.optimizer.lr = MAX_NORM, 1e-4
    job.activation_checkpoint.mode, job.compile.enable = "none", True
    if fp8:
        job.model.converters = ["quantize.linear.float8"]
        job.quantize.linear.float8.recipe_name = fp8
        job.quantize.linear.float8.filter_fqns = ["output"]
    trainer = Trainer(job)
    with torch.device("meta"):
        assert weights_of(trainer.model_parts[0]) == weights_of(PlainTransformer(shape, seq=tokens.shape[1]))
    on_host = tokens.cpu()  # from where its loader brings each batch
    return lambda: trainer.train_step(iter([({"input": on_host}, on_host)]))


def model_of(shape: dict[str, Any], *, seq: int, fp8: str | None) -> PlainTransformer:
    with torch.device(setting.device()):
        model = PlainTransformer(shape, seq=seq)
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    if fp8:  # of the blocks, as ours
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(fp8)
        convert_to_float8_training(
            model.blocks, config=recipe if setting.on_gpu() else Float8LinearConfig(emulate=True)
        )
    return model


def weights_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def autocast(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    with torch.autocast(setting.device().type, dtype=torch.bfloat16):
        return run(tokens)


def by_hand(
    model: nn.Module,
    run: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
) -> Step:
    optimizer = adamw(model)

    def step() -> None:
        loss_of(run(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


PEERS: Mapping[str, Callable[[dict[str, Any], Tensor, str | None], Step]] = {
    "plain compiled loop": plain,
    "FSDP2 loop": fsdp2,
    "torchtitan": torchtitan,
    "Lightning Fabric": fabric,
}
