"""The interface of a model that lets every technique cut, shard and initialise it without knowing its class.

To add a model, subclass `LayeredModel`, pass its parts to `__init__` and define `loss`. Everything else has a
default that you can override.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpc_parallel.failure.error_place import mark
from hpc_parallel.layout.stage_cuts import PartCosts, PartFlops
from hpc_parallel.models.attention import Positions, product_dtype
from hpc_parallel.models.drawn_weights import Drawing, by_rows, draw
from hpc_parallel.problems import ConfigError


class SampleIndices:
    """The indices of the current microbatch's samples on this device, counted over the whole training.

    If `used`, the step sets the next batch, and the schedule sets the next microbatch.
    """

    def __init__(self) -> None:
        self.used = False  # whether a layer needs the indices
        self.of_replica: Callable[[Tensor], Tensor] = lambda rows: rows  # set for several replicas
        self._batch = self._current = torch.empty(0, dtype=torch.int64)

    def begin_batch(self, indices: NDArray[np.int64] | Tensor, *, device: torch.device) -> None:
        """Set the `indices` [batch] of the samples in this replica's next batch."""
        batch = torch.as_tensor(indices)
        batch = batch.pin_memory() if device.type == "cuda" and not batch.is_cuda else batch
        self._batch = self._current = batch.to(device, non_blocking=True)

    def begin_microbatch(self, index: int, *, count: int) -> None:
        """Set the microbatch of the next forward passes: number `index` (0-based) of `count`."""
        self._current = self._batch.chunk(count)[index]

    def current(self) -> Tensor:
        """The indices of the current microbatch [samples], for the replica of this thread."""
        return self.of_replica(self._current)

    def exchange(self, microbatch: Tensor) -> Tensor:
        """Set the current indices to `microbatch`, an earlier value of `current`; returns the old ones."""
        before, self._current = self._current, microbatch
        return before


STATISTICS = ("running_mean", "running_var", "num_batches_tracked", "expert_load")
"""Buffers that a training pass writes and does not read, by the ends of their names."""

INPUT_TYPES = (torch.int64, torch.uint8, torch.float32)
"""Of samples whose type is not known yet, in the order of trial: tokens, pixels, numbers."""

__all__ = ["Column", "LayeredModel", "Loss", "PartCosts", "PartFlops", "as_tuple", "keep", "materialise"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""(head's output, targets) -> the SUM of the loss terms, as `LayeredModel.loss`."""


@dataclass(frozen=True)
class Column:
    """The role of a linear layer whose outputs are `parts` projections of equal width, one after another.

    Each device computes its columns of each projection. It stores all weights of the layer, because its
    columns are not next to each other.
    """

    parts: int


class LayeredModel(nn.Module):
    """A stem, a sequence of blocks and a head; a pipeline stage is a LayeredModel with some of these parts.

    Blocks are keyed by their index in the whole model ("0", "1", ...), so a parameter has the same full name
    in a stage as in the whole model. Each part takes one tensor and returns one. A part may also return
    several tensors as a tuple. The next part gets them as its arguments, so each part hands a skip connection
    on until a part uses it. With `training.precision=bfloat16`, tensors between parts may be float32 or
    bfloat16.

    The stem gets tokens [batch, seq] as int64, or images [batch, channel, height, width] as uint8 (0 to 255),
    which it converts to the dtype of its weights.

    A block's method `prepare_compiled` gets the inputs of the block and runs before its compiled code. It
    fills caches there, because torch allows no side effect in a recomputation.

    If the stem's forward pass has a parameter `positions`, it gets the index of each input position in its
    sample: [seq], int64. A stem must not count positions itself, because it may get only some of them.

    If `documents` is the last parameter of every block's forward pass, the model can train on packed
    documents. A block gets the argument after its inputs and hands it on to `CausalAttention`. `positions`
    are then counted from the begin of each document: [batch, seq].
    """

    stem: nn.Module | None
    head: nn.Module | None
    tied: Mapping[str, str] = MappingProxyType({})
    """Alias of a shared parameter -> its canonical name; what is shared need not be declared."""
    tensor_roles: Mapping[str, str | Column] = MappingProxyType({})
    """How layers split over devices: name of a module (`*`: any block) -> its role.

    - `column`, `row`: a linear layer split by outputs or by inputs; a `row` layer follows a `column` layer.
    - `Column(parts=3)`: one linear layer whose outputs are 3 projections, as query, key and value.
    - `vocabulary`: an embedding split by rows. `logits`: the last linear layer split by outputs.
    - `position_table`: an embedding that the stem reads at `positions`; not split.
    - `position`: a layer that treats each position separately; not split. `heads`: the same for each head
      of `[batch, seq, head, head_dim]`.
    - `whole`: a module that needs all positions of its input.
    - In a model without positions, `alike`: any module that every device computes fully; `classes`: the last
      linear layer split by outputs.

    Every weight needs a role. A model without roles is not split.
    """
    small: Mapping[str, Any] = MappingProxyType({})
    """Constructor arguments of a small model of this class, for the comparison with one device."""
    ignore_index: int | None = None
    """The target that `loss` leaves out (-100 in torch); the mean is taken over all other targets."""
    pixelwise: bool = False
    """Whether an image model has an output and a target for each position of the image."""
    channels_last: bool = False
    """Whether GPUs may compute its 2d convolutions in torch's channels_last order, which is faster in half
    precision. Outputs then have other strides, so `view` may fail where `reshape` or `flatten` works."""

    def __init__(self, *, stem: nn.Module, blocks: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.sample_positions = Positions()
        self.sample_indices = SampleIndices()
        self.packed_samples = False  # whether samples [batch, seq, 2] are packed documents (`unpacked`)
        self._stem_takes_positions = "positions" in inspect.signature(stem.forward).parameters
        self.stem = stem
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.head = head

    @property
    def distinct_blocks(self) -> list[nn.Module]:
        """The blocks without repeats: a model may use the same block several times, as ALBERT does."""
        return list(dict.fromkeys(self.blocks.values()))

    def forward(self, *inputs: Tensor, document_starts: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """Run the present parts in order; a stage without a stem takes the previous stage's outputs.

        It also needs the `document_starts` of packed samples, which a stem's inputs hold (`unpacked`).
        """
        part, state = "stem", inputs
        try:
            if self.stem is not None:
                tokens, document_starts = unpacked(self, *inputs)
                state = stem_outputs(self, tokens, document_starts)
            documents = documents_of(self, document_starts, like=state[0])
            for name, block in self.blocks.items():
                part = f"block {name}"
                state = as_tuple(block(*state, *documents))
            part = "head"
            if self.head is not None:
                state = as_tuple(self.head(*state))
            return state[0] if len(state) == 1 else state
        except Exception as error:
            mark(error, part)
            raise

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the SUM of the loss terms, in float32 or better; the caller divides by the global count."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(output, target)")

    def loss_terms(self, target: Tensor) -> int:
        """The number of terms that `loss` sums, from the shape only: no device is synchronised.

        A model with an `ignore_index` has one for each target that is not ignored.
        """
        return target.numel()

    def metrics(self, output: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Returns other metrics of a validation by name: numbers, each the SUM over the same terms as `loss`.

        Example: `{"accuracy": (output.argmax(-1) == target).sum()}`. Called without gradients.
        """
        return {}

    @by_rows
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter or buffer in place; `name` is its full (canonical) name.

        Draw random numbers from `generator` only, which depends on (seed, name). `generator` and `tensor` are
        on the CPU, also for a model on GPUs. An override marked `@by_rows` (models/drawn_weights.py) is
        faster for a large model, because it may fill a tensor in parts. Values that a constructor writes into
        a weight are lost, because a model is built on meta. Override this method for buffers other than
        running statistics, such as a table or a mask, or create them on the device "cpu".

        Raises ConfigError for a buffer that needs an override.
        """
        if not name.endswith(STATISTICS) and _is_buffer(self, name):
            raise _without_values(self, name)
        if name.endswith(("bias", "running_mean")) or not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02, generator=generator)

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """FLOPs of one sample; called on the whole model, before it is cut.

        The default counts each weight of a matrix once for each position of `sample_shape`, as in token
        models; embeddings cost nothing. Override this for a model that uses its weights differently.
        """
        positions = torch.Size(sample_shape).numel()

        def flops(part: nn.Module | None) -> int:
            modules = [] if part is None else [m for m in part.modules() if not isinstance(m, nn.Embedding)]
            weights = [p for module in modules for p in module.parameters(recurse=False) if p.dim() > 1]
            return sum(2 * positions * weight.numel() for weight in weights)

        return PartFlops(
            stem=flops(self.stem),
            blocks=tuple(flops(block) for block in self.blocks.values()),
            head=flops(self.head),
        )


def unpacked(model: LayeredModel, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The inputs of the stem, and where the documents of packed samples begin: both [batch, seq].

    A model that trains on packed samples also takes plain ones, such as prompts.
    """
    if not model.packed_samples or x.dim() != 3:
        return x, None
    tokens, starts = x.unbind(-1)
    return tokens, starts


def stem_outputs(model: LayeredModel, x: Tensor, document_starts: Tensor | None = None) -> tuple[Tensor, ...]:
    """Run the stem of `model` on the samples `x`; returns the inputs of the first block."""
    assert model.stem is not None
    if not model._stem_takes_positions:
        return as_tuple(model.stem(x))
    positions = model.sample_positions(x.shape[1], device=x.device)
    return as_tuple(
        model.stem(x, positions=positions if document_starts is None else positions - document_starts)
    )


def documents_of(model: LayeredModel, starts: Tensor | None, *, like: Tensor) -> tuple[Tensor, ...]:
    """The last argument of each block for packed samples, computed once for all blocks; else nothing."""
    if starts is None:
        return ()
    return (model.sample_positions.documents(starts, dtype=product_dtype(like)),)


def as_tuple(output: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output of a part as the arguments of the next part."""
    return output if isinstance(output, tuple) else (output,)


def with_ties(model: LayeredModel) -> LayeredModel:
    """Add every parameter that has several names in the whole `model` to `model.tied`; returns `model`."""
    canonical = {id(weight): name for name, weight in model.named_parameters()}
    names = [(name, canonical[id(w)]) for name, w in model.named_parameters(remove_duplicate=False)]
    model.tied = {**model.tied, **{alias: name for alias, name in names if alias != name}}
    return model


def part_of(name: str) -> str:
    """The part of a model that has the parameter or module `name`: `stem`, `head`, `blocks.3`."""
    names = name.split(".")
    return ".".join(names[:2] if names[0] == "blocks" else names[:1])


def keep(model: LayeredModel, *, blocks: Iterable[int], stem: bool, head: bool) -> LayeredModel:
    """Reduce `model` to one stage in place and return it; remaining parts keep their names.

    If the cut separates a tied pair (`model.tied`), each stage has its own parameter. `materialise` fills
    both with the same values, and the pipeline keeps their gradients equal.

    Raises ValueError for a part that the model doesn't have.
    """
    kept = {str(index) for index in blocks}
    if missing := sorted(kept - set(model.blocks)):
        raise ValueError(f"there is no block {', '.join(missing)} among {', '.join(model.blocks)}")
    if (stem and model.stem is None) or (head and model.head is None):
        raise ValueError("a stem or head that was cut away can't be kept")
    for name in [name for name in model.blocks if name not in kept]:
        del model.blocks[name]
    if not stem:
        model.stem = None
    if not head:
        model.head = None
    return model


@torch.no_grad()
def materialise(
    model: LayeredModel,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype,
    buffers: torch.dtype | None = None,
) -> LayeredModel:
    """Allocate and fill every parameter and meta buffer of `model` in place, and return it.

    `dtype`: of the weights, and of the floating-point buffers if `buffers` names no other type.

    Each tensor has its own generator on the CPU, seeded by (seed, canonical name), so a stage gets the same
    bits as the whole model, and a GPU gets the same bits as a CPU. Values are drawn in float32 and then cast,
    so runs of different precision start from the same numbers. Shared parameters stay shared
    (`nn.Module.to_empty` would make them two, because a meta tensor can't change its storage). This rank
    keeps only its slice of a distributed weight.

    Raises ConfigError if a tensor that is neither a parameter nor a buffer has no values.
    """
    created: dict[int, Tensor] = {}
    buffers = buffers or dtype

    def drawing(name: str) -> Drawing:
        return Drawing(model.initialise, model.tied.get(name, name), seed)

    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in created:
            values = draw(drawing(name), like=parameter, device=device, dtype=dtype)
            created[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        _assign(model, name, created[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if id(buffer) not in created:
            if buffer.is_meta:
                created[id(buffer)] = draw(drawing(name), like=buffer, device=device, dtype=buffers)
            else:
                created[id(buffer)] = buffer.to(
                    device, buffers if buffer.is_floating_point() else buffer.dtype
                )
        _assign(model, name, created[id(buffer)])
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise _without_values(model, f"{path}.{name}".lstrip("."))
    return model


def _without_values(model: LayeredModel, name: str) -> ConfigError:
    return ConfigError([
        f"{type(model).__name__}: {name} has no values, because a model is built without memory (on meta). "
        'Register it as a buffer under `with torch.device("cpu"):`, or fill the buffer in '
        f"{type(model).__name__}.initialise."
    ])  # fmt: skip


def _is_buffer(model: nn.Module, name: str) -> bool:
    try:
        model.get_buffer(name)
    except AttributeError:
        return False
    return True


def _assign(model: nn.Module, name: str, tensor: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
