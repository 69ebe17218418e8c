"""The temporary memory of a step, in addition to state and activations, estimated for each device."""

from __future__ import annotations

import math

from hpc_parallel.layout.holdings import Holding
from hpc_parallel.layout.layout import PARAMETER_SERVER, SPMD
from hpc_parallel.layout.model_bytes import HALF, LOSS_CHUNK_BYTES
from hpc_parallel.layout.model_weights import HEAD, STEM, Weight
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.planning.activations import casts_once, chunks_loss, types_of
from hpc_parallel.planning.planned_state import Division

MB = 2**20


def cast_weights(division: Division, stages: tuple[int, ...], holding: Holding) -> int:
    """The copies in bfloat16 that a step without fully_shard computes with (working_weights.py)."""
    if division.layout.by_fully_shard or not casts_once(division.config):
        return 0
    weights = [weight for weight in division.weights(stages) if weight.casts]
    return 2 * sum(math.prod(division.local_shape(weight, holding)) for weight in weights)


def gathered_weights(division: Division, stages: tuple[int, ...], holding: Holding) -> int:
    """The weights that fully_shard has gathered at most: the ends, a block, and those gathered ahead."""
    blocks, ends = _gathered(division, stages, holding)
    if not blocks:
        return 0
    strategy, layout = division.config.strategy, division.layout
    ahead = 1 if strategy.prefetch is None else strategy.prefetch
    reshards = strategy.reshard and layout.pipeline == 1
    held = sorted(blocks)[-1 - ahead :] if reshards else blocks
    return (sum(held) + ends) * _gathered_bytes(division)


def embedding_gradient(division: Division, stages: tuple[int, ...], holding: Holding, *, again: bool) -> int:
    """Temporary bytes for the embedding's gradient, which a backward pass computes last.

    The part of a tied head waits for this gradient. again: it is added to the gradient of earlier
    microbatches. The gradient that stays is not included.
    """
    ends = [weight for weight in division.weights(stages) if weight.part == STEM and len(weight.shape) > 1]
    numbers = sum(math.prod(division.unsliced_shape(weight, holding)) for weight in ends)
    half = casts_once(division.config) or (
        division.layout.by_fully_shard and division.config.training.precision in HALF
    )
    tied = bool(division.model.tied) and len(stages) == division.layout.pipeline == 1
    if half:
        return numbers * (2 * (1 + tied) + division.number_bytes * again)
    return numbers * division.number_bytes * (tied + again)


def gradient_messages(division: Division, stages: tuple[int, ...], holding: Holding) -> int:
    """Gradients on their way to other devices, in addition to the gradients that the device keeps."""
    config, layout = division.config, division.layout
    numbers = [math.prod(division.gradient_shape(weight, holding)) for weight in division.optimized(stages)]
    bucket = int(config.strategy.bucket_mb * MB)
    if config.strategy.execution == PARAMETER_SERVER:
        return 2 * max(bucket, max(numbers) * division.number_bytes)
    if config.strategy.execution != SPMD:
        return 0
    if layout.by_fully_shard:  # of the ends and a block, and the block's again in the type of the sum
        blocks, ends = _gathered(division, stages, holding)
        gathered_bytes = _gathered_bytes(division)
        return (max(blocks) + ends) * gathered_bytes + max(blocks) * division.number_bytes
    if layout.averaged == 1:
        return 0
    if schedule_of(config.strategy).splits_backward and layout.pipeline > 1:  # replicate.py: Average
        return sum(numbers) * division.number_bytes
    return bucket // 2 if config.strategy.gradient_compression == "bfloat16" else 0


def loss_buffers(division: Division, *, samples: int, sample_shape: tuple[int, ...]) -> int:
    """Logits, their logarithms and gradients, for the tokens that exist at a time; 0 for models of images.

    These bytes do not include what is kept for the backward pass (`activations.Kept.head`).
    """
    config, layout = division.config, division.layout
    if len(sample_shape) > 1:
        return 0
    types = types_of(config, layout)
    vocabulary, dim = _projection(division).shape
    rows = -(-vocabulary // layout.tensor)
    tokens = samples * sample_shape[0] // layout.context
    half = types.product if types.product < types.precise else 0
    if not chunks_loss(config, layout):
        columns = rows if config.strategy.loss_parallel else vocabulary
        return tokens * columns * 2 * types.precise
    chunk = LOSS_CHUNK_BYTES["cpu" if config.device == "cpu" else "cuda"]
    chunks = max(1, -(-tokens * rows * 4 // chunk))
    number = half + 2 * types.precise  # of logits as they are and in float32, and of logarithms
    total = rows * dim * types.precise if chunks > 1 else 0  # the gradient of the weight so far
    kept = rows * dim * (types.product if types.cast else types.precise)  # part of `Kept.head`
    return max(-(-tokens // chunks) * rows * number + total - kept, rows * dim * types.precise)


def _projection(division: Division) -> Weight:
    """The weight of the logits. If it is tied, the stem has it."""
    last = division.model.weights[-1]
    return last if len(last.shape) > 1 else division.model.weights[0]


def _gathered(division: Division, stages: tuple[int, ...], holding: Holding) -> tuple[list[int], int]:
    """The numbers in each block of these stages and in the ends that stay gathered (shard.py)."""
    if not division.layout.by_fully_shard:
        return [], 0
    sizes: dict[str, int] = {}
    for weight in division.weights(stages):
        sizes[weight.part] = sizes.get(weight.part, 0) + math.prod(division.unsliced_shape(weight, holding))
    stem, head = sizes.pop(STEM, 0), sizes.pop(HEAD, 0)
    shared = bool(division.model.tied) and stem and head
    return list(sizes.values()), head + (stem if shared else 0)


def _gathered_bytes(division: Division) -> int:
    return 2 if division.config.training.precision in HALF else division.number_bytes
