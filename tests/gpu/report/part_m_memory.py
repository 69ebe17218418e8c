"""What `plan` says that a rank holds, beside the most that torch allocates: alone, and as one of many ranks.

The other ranks don't exist: what they send are no weights, so losses mean nothing; sizes do. Pipelines are
two ranks that share the card over NCCL, which alone shows what it holds of the messages between stages.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_parallel.planning import memory
from hpc_parallel.record.run_folder import RunFolder
from tests import printed
from tests.gpu.report import setting
from tests.gpu.report.findings import Findings

TITLE, LIMIT_S = "planned and allocated memory", 210.0
STEPS = 3
BESIDE = 4
ONE_B = ("model.layers=16", "model.dim=2048", "model.heads=32", "model.kv_heads=8", "model.ffn_dim=8192",
         "model.vocab_size=128256")  # fmt: skip
WIDE = ("model.layers=24", "model.dim=1024", "model.heads=16", "model.kv_heads=8", "model.ffn_dim=4096")


def long(*, length: int, samples: int) -> tuple[str, str]:
    return f"data.sequence_length={length}", f"training.global_batch_size={samples}"


# By what differs from `BASE`.
ALONE: dict[str, Sequence[str]] = {
    "base": (),
    "microbatches of 2": ("training.microbatch_size=2",),
    "full checkpointing": ("training.activation_checkpointing=full",),
    "selective checkpointing": ("training.activation_checkpointing=selective",),
    "float32": ("training.precision=float32",),
    "whole logits": ("training.chunked_loss=false",),
    "untied head": ("model.tied_head=false",),
    "sequence 4096": long(length=4096, samples=4),
    "sequence 4096, full": (*long(length=4096, samples=4), "training.activation_checkpointing=full"),
    "350m": WIDE,
    "350m, full, microbatches of 1": (
        *WIDE, "training.activation_checkpointing=full", "training.microbatch_size=1"
    ),
    # Fullest in the backward pass of the first block: the gradients of 48 blocks, and few tokens.
    "48 layers, full, few tokens": (
        "model.layers=48", *WIDE[1:], "model.tied_head=false", "model.vocab_size=8192",
        *long(length=512, samples=8), "training.activation_checkpointing=full"
    ),
    "wide feed-forward": ("model.ffn_dim=6144",),
    "ungrouped heads": ("model.kv_heads=12",),
    "sgd": ("optimizer=sgd",),
    "sequence 512": long(length=512, samples=32),
    "selective, microbatches of 4": (
        "training.activation_checkpointing=selective", "training.microbatch_size=4"
    ),
    "large vocabulary": ("model.vocab_size=128256",),
    "1b, microbatches of 1": (
        *ONE_B, *long(length=2048, samples=4), "training.microbatch_size=1"
    ),
    "1b": (*ONE_B, *long(length=2048, samples=4)),
    "1b, full": (*ONE_B, *long(length=2048, samples=4), "training.activation_checkpointing=full"),
    "1b, selective": (*ONE_B, *long(length=2048, samples=4), "training.activation_checkpointing=selective"),
    "1b, sequence 8192": (*ONE_B, *long(length=8192, samples=1)),
    "1b, float32, full": (
        *ONE_B, *long(length=2048, samples=2), "training.activation_checkpointing=full",
        "training.precision=float32",
    ),
}  # fmt: skip
DRY = ("model.layers=4", "model.dim=64", "model.heads=8", "model.kv_heads=8", "model.ffn_dim=64",
       "model.vocab_size=256", "data.sequence_length=64")  # fmt: skip
EIGHT = ("gpus_per_node=8", "training.global_batch_size=64")
# Rank, then words.
OF_MANY: dict[str, tuple[int, Sequence[str]]] = {
    "data 8": (0, ("strategy=data", *EIGHT)),
    "fsdp 8": (0, ("strategy=fsdp", *EIGHT)),
    "fsdp 8, full": (0, ("strategy=fsdp", *EIGHT, "training.activation_checkpointing=full")),
    "fsdp 8, microbatches of 2": (0, ("strategy=fsdp", *EIGHT, "training.microbatch_size=2")),
    "fsdp 8, 1b": (
        0, ("strategy=fsdp", "gpus_per_node=8", *ONE_B, *long(length=2048, samples=32))
    ),
    "hsdp 2 x 8": (0, ("strategy=hsdp", "nodes=2", *EIGHT[:1], "training.global_batch_size=128")),
    "tensor 4": (0, ("strategy=tensor", "gpus_per_node=4")),
    "tensor 8, 1b": (
        0, ("strategy=tensor", "gpus_per_node=8", *ONE_B, *long(length=2048, samples=4))
    ),
    "context 4": (0, ("strategy=context", "gpus_per_node=4", *long(length=8192, samples=4))),
    "tensor 2 x shard 4": (
        0, ("strategy=hybrid", "strategy.pipeline=1", "strategy.tensor=2", "strategy.replicate=1",
            "strategy.shard=4", *EIGHT)
    ),
    "tensor 2 x replicate 4": (0, ("strategy=hybrid", "strategy.pipeline=1", "strategy.tensor=2", *EIGHT)),
}  # fmt: skip

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped_bfs")  # of torch 2.11 on
BASE = ("data.sequence_length=1024", "training.global_batch_size=8", "training.precision=bfloat16")


def run(findings: Findings) -> None:
    cases = [(name, 0, ("strategy=single", *words)) for name, words in ALONE.items()]
    cases += [(name, rank, tuple(words)) for name, (rank, words) in OF_MANY.items()]
    # A process of its own for each: torch can't have one world after another.
    with multiprocessing.get_context("fork").Pool(BESIDE, maxtasksperchild=1) as pool:
        for name, found in pool.imap_unordered(measured, cases):
            findings.add(**{name: found})
    for schedule in setting.sized(SCHEDULES, SCHEDULES[-1:]):
        findings.add(**{f"pipeline 2, {schedule}, over NCCL": over_nccl(f"strategy.schedule={schedule}")})


def over_nccl(*words: str) -> dict[str, Any]:
    """Planned and allocated bytes of the fullest of two ranks."""
    small = () if setting.on_gpu() else DRY
    fixed = ("strategy=pipeline", "nodes=2", "launcher=local", f"device={setting.device().type}",
             f"training.steps={STEPS}", "training.validate_every=null", "training.checkpoint_every=null",
             "data.max_bytes=400000", "strategy.microbatches=8")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        line = (*fixed, *setting.model_words(), *BASE, *small, *words, "run_dir=run")
        printed("-m", "hpc_parallel.run", *line, cwd=Path(folder))
        summary = json.loads(RunFolder(Path(folder, "run")).summary.read_text())
    planned, peak = (summary["predicted"] or {}).get("peak_memory_bytes"), summary["peak_memory_bytes"]
    return {"planned": planned, "peak": peak, "ratio": planned and planned / peak}


def measured(case: tuple[str, int, Sequence[str]]) -> tuple[str, Any]:
    """Planned and allocated bytes of a case; or what stopped it."""
    name, rank, words = case
    try:
        return name, compared(words, rank=rank)
    except Exception as error:
        return name, f"{type(error).__name__}: {str(error)[:300]}"


def compared(words: Sequence[str], *, rank: int) -> dict[str, Any]:
    """state: between two steps. peak: over all steps. ratio: planned by peak."""
    small = () if setting.on_gpu() else DRY
    built = setting.one_of_many(*setting.model_words(), *BASE, *words, *small, rank=rank)
    planned = memory.plan(built.config)
    assert planned is not None
    held = max((held for held in planned.devices if held.device <= rank), key=lambda held: held.device)
    kinds = {kind: size for kind, size in held.kinds.items() if size}
    outside = sum(kinds.get(kind, 0) for kind in ("device context", "allocator slack"))
    peak, state = [], []
    for _ in range(STEPS):
        peak.append(setting.peak_bytes(built.step))
        state.append(torch.cuda.memory_allocated() if setting.on_gpu() else None)
    found: dict[str, Any] = {"planned": held.total - outside, "kinds": kinds, "peak": peak, "state": state}
    if setting.on_gpu():
        found["ratio"] = found["planned"] / max(peak)
    return found
