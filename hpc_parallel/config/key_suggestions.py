"""Suggest the key that an unknown key was meant to be.

A wrong suggestion costs more than none, because it is accepted and trains something else. Therefore only
these keys are suggested: a key for which other programs use the typed name, the same key in another group,
and a key of the same group from which the typed name differs by a typing error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpc_parallel.problems import nearest

_MOST_EDITS = 2

# The name in other programs: our key. A value after `=` replaces the typed value, which has another meaning.
# `=` alone stands for the current value of our key.
SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "learning_rate_schedule": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "lr_scheduler_type": "optimizer.schedule",
    "wd": "optimizer.weight_decay",
    "warmup": "optimizer.warmup_steps",
    "num_warmup_steps": "optimizer.warmup_steps",
    "adam_epsilon": "optimizer.eps",
    "batch": "training.global_batch_size",
    "batch_size": "training.global_batch_size",
    "bs": "training.global_batch_size",
    "gbs": "training.global_batch_size",
    "global_batch": "training.global_batch_size",
    "train_batch_size": "training.global_batch_size",
    "mbs": "training.microbatch_size",
    "micro_batch_size": "training.microbatch_size",
    "microbatch": "training.microbatch_size",
    "per_device_train_batch_size": "training.microbatch_size",
    "num_microbatches": "strategy.microbatches",
    "steps": "training.steps",
    "epochs": "training.steps=",
    "max_epochs": "training.steps=",
    "num_epochs": "training.steps=",
    "num_train_epochs": "training.steps=",
    "iters": "training.steps",
    "max_iters": "training.steps",
    "max_steps": "training.steps",
    "num_steps": "training.steps",
    "train_steps": "training.steps",
    "amp": "training.precision=bfloat16",
    "bf16": "training.precision=bfloat16",
    "dtype": "training.precision",
    "float8": "training.fp8=tensorwise",
    "fp16": "training.precision=float16",
    "fp32": "training.precision=float32",
    "mixed_precision": "training.precision=bfloat16",
    "clip": "training.clip_norm",
    "clip_grad": "training.clip_norm",
    "grad_clip": "training.clip_norm",
    "gradient_clip_val": "training.clip_norm",
    "max_grad_norm": "training.clip_norm",
    "max_norm": "training.clip_norm",
    "checkpoint_interval": "training.checkpoint_every",
    "ckpt": "training.checkpoint_every=",
    "ckpt_every": "training.checkpoint_every",
    "save_every": "training.checkpoint_every",
    "save_interval": "training.checkpoint_every",
    "save_steps": "training.checkpoint_every",
    "save_total_limit": "training.keep_last",
    "eval": "training.validate_every=",
    "eval_every": "training.validate_every",
    "eval_interval": "training.validate_every",
    "eval_steps": "training.validate_every",
    "val_every": "training.validate_every",
    "logging_steps": "training.log_every",
    "log_interval": "training.log_every",
    "gradient_checkpointing": "training.activation_checkpointing=full",
    "recompute": "training.activation_checkpointing=full",
    "torch_compile": "training.compile",
    "cp": "strategy.context",
    "ddp": "strategy=data",
    "dp": "strategy.replicate",
    "data_parallel_size": "strategy.replicate",
    "ep": "strategy.expert",
    "fsdp": "strategy=fsdp",
    "pp": "strategy.pipeline",
    "pipeline_parallel_size": "strategy.pipeline",
    "sp": "strategy.sequence_parallel=true",
    "tp": "strategy.tensor",
    "tensor_parallel_size": "strategy.tensor",
    "zero": "strategy=fsdp",
    "devices": "gpus_per_node",
    "gpus": "gpus_per_node",
    "n_gpus": "gpus_per_node",
    "ngpus": "gpus_per_node",
    "nproc_per_node": "gpus_per_node",
    "num_gpus": "gpus_per_node",
    "nnodes": "nodes",
    "num_nodes": "nodes",
    "account": "launcher.account",
    "partition": "launcher.partition",
    "kind": "launcher.kind",
    "setup": "launcher.setup",
    "modules": "launcher.modules",
    "extra": "launcher.extra",
    "container": "launcher.container",
    "cpus_per_device": "launcher.cpus_per_device",
    "constraint": "launcher.constraint",
    "resubmit": "launcher.resubmit",
    "qos": "launcher.qos",
    "cpus_per_task": "launcher.cpus_per_device",
    "mem": "launcher.memory_gb=",
    "memory": "launcher.memory_gb=",
    "time": "launcher.time_minutes=",
    "time_limit": "launcher.time_minutes=",
    "timeout_min": "launcher.time_minutes",
    "walltime": "launcher.time_minutes=",
    "block_size": "data.sequence_length",
    "context_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "max_seq_len": "data.sequence_length",
    "seq_len": "data.sequence_length",
    "seq_length": "data.sequence_length",
    "d_model": "model.dim",
    "embed_dim": "model.dim",
    "hidden_dim": "model.dim",
    "hidden_size": "model.dim",
    "n_embd": "model.dim",
    "depth": "model.layers",
    "n_layer": "model.layers",
    "n_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "num_layers": "model.layers",
    "n_head": "model.heads",
    "n_heads": "model.heads",
    "num_attention_heads": "model.heads",
    "num_heads": "model.heads",
    "num_experts": "model.experts",
    "top_k": "model.experts_per_token",
    "out_dir": "run_dir",
    "output_dir": "run_dir",
    "resume_from": "resume",
    "resume_from_checkpoint": "resume",
    "job_name": "name",
    "random_seed": "seed",
    "preflight.action": "preflight.act",
    "profile.window": "profile.steps",
}
# For each key: the names of its values in other programs, with our values.
VALUES = {
    "strategy": {
        "ddp": "data",
        "dp": "data",
        "data_parallel": "data",
        "distributed": "data",
        "none": "single",
        "zero": "fsdp",
        "zero1": "fsdp",
        "zero2": "fsdp",
        "zero3": "fsdp",
        "deepspeed": "fsdp",
        "fsdp2": "fsdp",
        "tp": "tensor",
        "megatron": "tensor",
        "sp": "context",
        "cp": "context",
        "ring": "context",
        "ulysses": "context",
        "pp": "pipeline",
        "gpipe": "pipeline",
        "1f1b": "pipeline",
        "ep": "expert",
        "moe": "expert",
        "ps": "parameter_server",
        "3d": "hybrid",
        "spatial": "tile",
    },
    "training.precision": {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "fp32": "float32",
        "single": "float32",
        "fp64": "float64",
        "double": "float64",
    },
    "device": {"gpu": "cuda", "gpus": "cuda", "nvidia": "cuda", "rocm": "cuda"},
    "profile": {"nsight": "nsys", "nsight-systems": "nsys", "nsight-compute": "ncu", "pytorch": "torch"},
    "cluster.container": {"enroot": "pyxis", "singularity": "apptainer"},
}
# Other programs' names for the number of microbatches whose gradients are accumulated.
ACCUMULATION = (
    "accumulate_grad_batches",
    "grad_accum",
    "gradient_accumulation",
    "gradient_accumulation_steps",
)


def choice_near(key: str, value: str, choices: Sequence[str], *, most: int = 2) -> list[str]:
    """The choices of `key` that `value` was probably meant to be; none if no name is near."""
    names = {_plain(name): choice for name, choice in VALUES.get(key, {}).items()}
    names |= {_plain(choice): choice for choice in choices}
    synonym = names.get(_plain(value))
    return [synonym] if synonym is not None and synonym in choices else nearest(value, choices, most=most)


def _plain(name: str) -> str:
    return name.lower().translate(dict.fromkeys(map(ord, "-_ ")))


def suggest(key: str, keys: Iterable[str]) -> str | None:
    """Suggest which of the legal `keys` (dotted names) `key` was meant to be.

    Returns `key`, `key=value` if the typed value has another meaning, `key=` for the current value, or None.
    """
    legal = set(keys)
    parent, _, last = key.rpartition(".")
    synonym = SYNONYMS.get(key) or SYNONYMS.get(last.lower().replace("-", "_"))
    if synonym is not None and synonym.partition("=")[0] in legal:
        return synonym
    same_name = [other for other in legal if other.rpartition(".")[2] == last]
    if len(same_name) == 1:
        return same_name[0]
    group = [other for other in legal if other.rpartition(".")[0] == parent]
    distances = [(edits(last, other.rpartition(".")[2]), other) for other in group]
    near = [pair for pair in distances if pair[0] <= min(_MOST_EDITS, len(last) // 2)]
    return min(near)[1] if near else None


def similar(value: str, choices: Iterable[str]) -> list[str]:
    """The choices that begin with `value`, or have a typing error or two."""
    near = min(_MOST_EDITS, len(value) // 2)
    return [choice for choice in choices if choice.startswith(value) or edits(value, choice) <= near]


def edits(a: str, b: str) -> int:
    """The number of inserted, deleted and replaced characters from `a` to `b` (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        previous, row = row, [i]
        for j, y in enumerate(b, start=1):
            row.append(min(previous[j] + 1, row[j - 1] + 1, previous[j - 1] + (x != y)))
    return row[-1]
