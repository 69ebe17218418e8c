"""The bytes that a step needs on a device in addition to its state and activations, by kind."""

from __future__ import annotations

import math

from hpc_parallel.layout.counts import LOSS_CHUNK_BYTES, MIB
from hpc_parallel.layout.holdings import Holding
from hpc_parallel.layout.layout import PARAMETER_SERVER, SPMD
from hpc_parallel.layout.model_weights import HEAD, STEM
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.layout.step_facts import (
    casts_once,
    chunks_loss,
    number_bytes,
    product_bytes,
    types_of,
    weight_bytes,
)
from hpc_parallel.planning.planned_state import Division


def cast_weights(division: Division, holding: Holding) -> int:
    """The copies in bfloat16 that a step without fully_shard computes with (working_weights.py)."""
    if division.layout.by_fully_shard or not casts_once(division.config):
        return 0
    weights = [weight for weight in division.weights(holding) if weight.casts]
    return 2 * sum(math.prod(division.local_shape(weight, holding)) for weight in weights)


def gathered_weights(division: Division, holding: Holding) -> int:
    """The weights that fully_shard has gathered at most: the ends, a block, and those gathered ahead."""
    blocks, ends = _gathered(division, holding)
    if not blocks:
        return 0
    strategy, layout = division.config.strategy, division.layout
    ahead = 1 if strategy.prefetch is None else strategy.prefetch
    reshards = strategy.reshard and layout.pipeline == 1
    held = sorted(blocks)[-1 - ahead :] if reshards else blocks
    return (sum(held) + ends) * product_bytes(division.config)


def embedding_gradient(division: Division, holding: Holding, *, again: bool) -> int:
    """Temporary bytes for the embedding's gradient, which a backward pass computes last.

    The part of a tied head waits for this gradient. again: it is added to the gradient of earlier
    microbatches. The gradient that stays is not included.
    """
    numbers, (number, halved) = _numbers(division, holding, STEM), _gradient_bytes(division)
    tied = _is_tied(division, holding)
    if halved:
        return numbers * (2 * (1 + tied) + number * again)
    return numbers * number * (tied + again)


def head_gradient(division: Division, holding: Holding, *, alone: bool) -> int:
    """The gradient of the head's weight while the blocks compute theirs, unless it is counted elsewhere.

    A tied one waits for that of the embedding, and fully_shard sums those of the ends last. alone: no
    gradients of earlier microbatches are kept.
    """
    tied, (number, halved) = _is_tied(division, holding), _gradient_bytes(division)
    if not (tied or alone or division.layout.by_fully_shard):
        return 0
    return _numbers(division, holding, STEM if tied else HEAD) * (2 if halved else number)


def gradients_before_last(division: Division, holding: Holding, *, of_all: int) -> int:
    """Of the bytes of all gradients, those that exist when only the first block and the stem are left.

    fully_shard sums those of the head at the end, too.
    """
    weights = division.optimized(holding)
    last = {STEM, next(weight.part for weight in weights if weight.part != STEM)}
    last |= {HEAD} if division.layout.by_fully_shard else set()
    sizes = [(weight.part, math.prod(division.gradient_shape(weight, holding))) for weight in weights]
    left = sum(size for part, size in sizes if part in last)
    numbers = sum(size for _, size in sizes)  # 0: the others hold all rows
    return of_all - of_all * left // max(numbers, 1)


def _numbers(division: Division, holding: Holding, part: str) -> int:
    """The numbers of the matrices of an end, on a device that has this end."""
    weights = [weight for weight in division.weights(holding) if weight.part == part]
    return sum(math.prod(division.unsliced_shape(one, holding)) for one in weights if len(one.shape) > 1)


def _gradient_bytes(division: Division) -> tuple[int, bool]:
    """The bytes of a number of a weight, and whether its gradient is computed in 2 bytes."""
    types, number = types_of(division.config, division.layout), weight_bytes(division.config)
    return number, types.cast and types.product < number


def _is_tied(division: Division, holding: Holding) -> bool:
    """Whether one weight of this device is the embedding and the head."""
    return bool(division.model.tied) and len(holding.stages) == division.layout.pipeline == 1


def gradient_messages(division: Division, holding: Holding) -> int:
    """Gradients on their way to other devices, in addition to the gradients that the device keeps."""
    config, layout = division.config, division.layout
    numbers = [math.prod(division.gradient_shape(weight, holding)) for weight in division.optimized(holding)]
    bucket = min(int(config.strategy.bucket_mb * MIB), sum(numbers) * weight_bytes(config))
    if config.strategy.execution == PARAMETER_SERVER:
        return 2 * max(bucket, max(numbers) * number_bytes(division.config))
    if config.strategy.execution != SPMD:
        return 0
    if layout.by_fully_shard:  # of the ends and a block, and the block's again in the type of the sum
        blocks, ends = _gathered(division, holding)
        return (max(blocks) + ends) * product_bytes(config) + max(blocks) * number_bytes(config)
    if layout.averaged == 1:
        return 0
    if schedule_of(config.strategy).splits_backward and layout.pipeline > 1:  # replicate.py: Average
        return sum(numbers) * number_bytes(division.config)
    if config.strategy.gradient_compression == "bfloat16":
        return bucket // 2
    return 2 * bucket if weight_bytes(config) < number_bytes(config) else 0  # averaged in float32


def has_buckets(division: Division) -> bool:
    """Whether DistributedDataParallel averages gradients, in buckets of which they are views in the end."""
    layout, strategy = division.layout, division.config.strategy
    replicates = strategy.execution == SPMD and layout.averaged > 1 and not layout.by_fully_shard
    return replicates and not schedule_of(strategy).splits_backward


def early_gradients(division: Division, holding: Holding, *, of_all: int, again: bool) -> int:
    """The gradients before the last backward pass of a step, if some exist then.

    of_all: those at the end of this pass. again: there are earlier microbatches. Their gradients are beside
    the buckets, and whole in a pipeline with fully_shard, which sums them after the last microbatch.
    """
    if not again:
        return of_all
    weights = division.optimized(holding)
    if division.layout.by_fully_shard and division.layout.pipeline > 1:
        numbers = sum(math.prod(division.unsliced_shape(weight, holding)) for weight in weights)
        return numbers * number_bytes(division.config)
    beside = [weight for weight in weights if has_buckets(division) and not division.distributed(weight)]
    numbers = sum(math.prod(division.gradient_shape(weight, holding)) for weight in beside)
    return of_all + numbers * weight_bytes(division.config)


def gradients_under_way(division: Division, holding: Holding, *, of_all: int, again: bool) -> int:
    """The gradients of other blocks that wait for their average while a block computes its own.

    fully_shard sums those of a block. Those of a bucket are copied into it together.

    of_all: the bytes of all gradients. again: earlier microbatches have gradients too, beside the buckets.
    """
    config = division.config
    blocks, _ = _gathered(division, holding)
    if has_buckets(division) and not again:
        sizes = [math.prod(division.local_shape(one, holding)) for one in division.optimized(holding)]
        return min(of_all, max(int(config.strategy.bucket_mb * MIB), max(sizes) * weight_bytes(config)))
    return max(blocks) * number_bytes(config) if len(blocks) > 1 else 0


def loss_buffers(division: Division, *, samples: int, sample_shape: tuple[int, ...]) -> int:
    """Logits, their logarithms and gradients, for the tokens that exist at a time; 0 for models of images.

    These bytes do not include what is kept for the backward pass (`activations.Kept.head`).
    """
    config, layout = division.config, division.layout
    if len(sample_shape) > 1:
        return 0
    types = types_of(config, layout)
    last = division.model.weights[-1]  # the weight of the logits; if it is tied, the stem has it
    vocabulary, dim = (last if len(last.shape) > 1 else division.model.weights[0]).shape
    rows = -(-vocabulary // layout.tensor)
    tokens = samples * sample_shape[0] // layout.context
    # A loss of slices of the vocabulary keeps the logits as they are beside those less their maximum.
    keeps = types.product < types.precise or (layout.tensor > 1 and config.strategy.loss_parallel)
    logits = types.product if keeps else 0
    gathers = layout.tensor > 1 and config.strategy.sequence_parallel
    inputs = tokens * dim * types.product if gathers else 0  # of the tokens of all slices
    if not chunks_loss(config, tensor=layout.tensor):
        columns = rows if config.strategy.loss_parallel else vocabulary
        return inputs + tokens * columns * 2 * types.precise
    chunk = LOSS_CHUNK_BYTES["cpu" if config.device == "cpu" else "cuda"]
    chunks = max(1, -(-tokens * rows * 4 // chunk))
    number = logits + 2 * types.precise  # of logits as they are and in float32, and of logarithms
    total = rows * dim * types.precise if chunks > 1 else 0  # the gradient of the weight so far
    kept = rows * dim * (types.product if types.cast else types.precise)  # part of `Kept.head`
    return inputs + max(-(-tokens // chunks) * rows * number + total - kept, rows * dim * types.precise)


def _gathered(division: Division, holding: Holding) -> tuple[list[int], int]:
    """The numbers in each block of its stages and in the ends that stay gathered (shard.py)."""
    if not division.layout.by_fully_shard:
        return [], 0
    sizes: dict[str, int] = {}
    for weight in division.weights(holding):
        sizes[weight.part] = sizes.get(weight.part, 0) + math.prod(division.unsliced_shape(weight, holding))
    stem, head = sizes.pop(STEM, 0), sizes.pop(HEAD, 0)
    shared = bool(division.model.tied) and stem and head
    return list(sizes.values()), head + (stem if shared else 0)
