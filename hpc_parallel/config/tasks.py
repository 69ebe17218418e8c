"""What a task sets itself to do, known from the configuration alone: both halves ask here."""

from __future__ import annotations

from hpc_parallel.config.layout import layout_of
from hpc_parallel.config.schema import GenerateConfig, InferConfig, RunConfig
from hpc_parallel.data.codec import encode, reads_bytes


def total_steps(config: RunConfig) -> int:
    """How many steps the lines of `metrics.jsonl` count to."""
    if isinstance(config.task, InferConfig):
        return 1 + len(batch_sizes(config))  # the first is the pass over the validation data
    if isinstance(config.task, GenerateConfig):
        lengths = prompt_lengths(config)
        return max(lengths) - min(lengths) + config.task.new_tokens
    return config.training.steps


def batch_sizes(config: RunConfig) -> list[int]:
    """Samples at once that `task=infer` measures, rising; one sample a replica always comes first."""
    assert isinstance(config.task, InferConfig)
    replicas = layout_of(config.strategy, devices=config.devices).data
    sizes = config.task.batch_sizes
    if sizes is None:
        most = config.training.global_batch_size // replicas
        sizes = [replicas << power for power in range(most.bit_length())]
    return sorted({replicas, *sizes})


def prompt_lengths(config: RunConfig) -> list[int]:
    """Tokens of each prompt of `task=generate`."""
    task = config.task
    assert isinstance(task, GenerateConfig)
    if task.prompts is None:
        return [task.prompt_length] * config.training.global_batch_size
    return [len(tokens) for tokens in encoded_prompts(config)]


def encoded_prompts(config: RunConfig) -> list[list[int]]:
    """Those that the configuration brings itself. Raises ValueError where one is no row of tokens."""
    assert isinstance(config.task, GenerateConfig)
    as_bytes = reads_bytes(config.data)
    return [encode(text, as_bytes=as_bytes) for text in config.task.prompts or ()]
