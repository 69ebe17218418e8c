"""What a model must offer so that every technique can cut, shard and fill it without knowing its class.

A model of your own subclasses `LayeredModel`, hands its parts to `__init__`, and writes `loss`;
everything else has a default that may be replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_parallel.supervise.error_place import mark

Loss = Callable[[Tensor, Tensor], Tensor]
"""From the head's output and the targets to the SUM of the loss terms, as `LayeredModel.loss`."""


@dataclass(frozen=True)
class PartCosts:
    """What each part of a model costs, in one unit."""

    stem: int
    blocks: tuple[int, ...]
    head: int

    @property
    def total(self) -> int:
        return self.stem + sum(self.blocks) + self.head


class PartFlops(PartCosts):
    """Floating-point operations of one sample's forward pass by part (an add and a multiply are two)."""


class LayeredModel(nn.Module):
    """A stem, blocks in a row, a head; a pipeline stage is the same object with parts taken out.

    Blocks are keyed by their place in the whole model ("0", "1", ...), so a parameter has the same
    full name in a stage as in the whole. Each part takes one tensor and returns one.
    """

    stem: nn.Module | None
    head: nn.Module | None
    tied: Mapping[str, str] = MappingProxyType({})
    """Names of parameters that are another's alias -> the other's (canonical) name."""
    tensor_roles: Mapping[str, str] = MappingProxyType({})
    """How single layers split over devices: name of a module (`*`: any block) -> its role.

    `column`, `row`: a linear layer, by its outputs or its inputs (the next is then by the other);
    `vocabulary`: an embedding, by its rows; `logits`: the last linear layer, by its outputs;
    `position`: a layer that treats each position alone, never split; `heads`: the same for each head
    of `[batch, seq, head, head_dim]`; `whole`: a module that needs all positions of its input. A model
    without positions: `alike`, a module of any kind that every device computes whole; `classes`: the last
    linear layer, by its outputs. Every weight needs a role; a model without any is not split.
    """
    pixelwise: bool = False
    """Of an image model: whether the head gives each place of the image an output and has a target for it."""

    def __init__(self, *, stem: nn.Module, blocks: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleDict({str(index): block for index, block in enumerate(blocks)})
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Run what is there, in order: a stage without a stem takes the previous stage's output."""
        part = "stem"
        try:
            if self.stem is not None:
                x = self.stem(x)
            for name, block in self.blocks.items():
                part = f"block {name}"
                x = block(x)
            part = "head"
            return x if self.head is None else self.head(x)
        except Exception as error:
            mark(error, part)
            raise

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The SUM of the loss terms, in float32 or better; whoever divides knows the global count."""
        raise NotImplementedError(f"{type(self).__name__} must define loss(output, target)")

    def loss_terms(self, target: Tensor) -> int:
        """How many terms `loss` sums: known from the shape, so that no device is asked."""
        return target.numel()

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one parameter or buffer in place; `name` is its full (canonical) name.

        Random numbers come from `generator` alone, which depends on (seed, name). A buffer that holds
        anything but running statistics (a table, a mask) needs a line of its own here.
        """
        if name.endswith(("bias", "running_mean")) or not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        else:
            tensor.normal_(std=0.02, generator=generator)

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """FLOPs of one sample, asked of the whole model (before it is cut).

        The default takes each weight of a matrix as used once at each position of `sample_shape`, as
        token models do; lookups cost nothing. A model that uses its weights otherwise overrides this.
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


def keep(model: LayeredModel, *, blocks: Iterable[int], stem: bool, head: bool) -> LayeredModel:
    """Cut `model` down to one stage in place, and return it; the names of what stays don't change.

    Where the cut separates a tied pair, each stage holds a parameter of its own, which `materialise`
    fills alike; keeping their gradients alike is the pipeline's work (`model.tied` names the pair).

    Raises ValueError for a part that the model doesn't have.
    """
    wanted = {str(index) for index in blocks}
    if missing := sorted(wanted - set(model.blocks)):
        raise ValueError(f"there is no block {', '.join(missing)} among {', '.join(model.blocks)}")
    if (stem and model.stem is None) or (head and model.head is None):
        raise ValueError("a stem or head that was cut away can't be kept")
    for name in [name for name in model.blocks if name not in wanted]:
        del model.blocks[name]
    if not stem:
        model.stem = None
    if not head:
        model.head = None
    return model


@torch.no_grad()
def materialise(
    model: LayeredModel, *, seed: int, device: torch.device | str, dtype: torch.dtype
) -> LayeredModel:
    """Give every parameter and meta buffer of `model` memory and values, in place; returns it.

    Each tensor is filled from a generator of its own, seeded by (seed, canonical name): a stage gets
    the very bits that the whole model has there. Values are drawn in float32 and then cast, so runs
    of different precision start from the same numbers. Parameters that were one object stay one
    (`nn.Module.to_empty` would part them, since a meta tensor can't change its storage). Of a weight
    that is distributed this rank keeps its slice: no more than one weight is ever whole.
    """
    made: dict[int, Tensor] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            values = _filled(model, name, parameter, seed=seed, device=device, dtype=dtype)
            made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        _assign(model, name, made[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if id(buffer) not in made:
            if buffer.is_meta:
                made[id(buffer)] = _filled(model, name, buffer, seed=seed, device=device, dtype=dtype)
            else:
                made[id(buffer)] = buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype)
        _assign(model, name, made[id(buffer)])
    return model


def tensor_seed(seed: int, name: str) -> int:
    """64 bits that depend on nothing but (seed, name); Python's own `hash` changes with the process."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")


def _filled(
    model: LayeredModel, name: str, like: Tensor, *, seed: int, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    canonical = model.tied.get(name, name)
    # The low 63 bits: a CUDA generator and a CPU one both take them.
    generator = torch.Generator(device=device).manual_seed(tensor_seed(seed, canonical) >> 1)
    floating = like.is_floating_point()
    values = torch.empty(like.shape, dtype=torch.float32 if floating else like.dtype, device=device)
    model.initialise(canonical, values, generator)
    values = values.to(dtype) if floating else values
    return own_slice(values, like=like) if isinstance(like, DTensor) else values


def own_slice(whole: Tensor, *, like: DTensor) -> DTensor:
    """This rank's part of `whole`, placed as `like`, without asking another rank.

    Inner mesh axes cut first: where two cut the same dim, fully_shard slices what tensor parallelism left.
    """
    mesh, part = like.device_mesh, whole
    for axis in reversed(range(mesh.ndim)):
        placement = like.placements[axis]
        if not placement.is_replicate():
            dim: int = placement.dim  # type: ignore[attr-defined]  # Shard's, and of a kind that torch keeps private
            chunks = part.chunk(mesh.size(axis), dim=dim)
            rank = mesh.get_local_rank(axis)
            part = chunks[rank] if rank < len(chunks) else part.narrow(dim, 0, 0)
    return DTensor.from_local(
        part.clone(), mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _assign(model: nn.Module, name: str, tensor: Any) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, tensor)
