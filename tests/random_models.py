"""Small language models of every combination of parts that a user's model may have, right or wrong."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_parallel.models.attention import CausalAttention
from hpc_parallel.models.layered import Column, LayeredModel
from hpc_parallel.models.transformer import rotate, rotation

CHOICES: dict[str, tuple[Any, ...]] = {
    "layers": (2, 3, 4),
    "positions": ("none", "rotary", "stem", "local_rotary", "arange", "slice", "cumsum"),
    "attention": ("mix", "mix", "fused", "by_hand", "kernel", "no"),
    "norm": ("layer", "rms", "no"),
    "norm_after": (False, True),
    "feed": ("mlp", "gated", "no", "shift", "gains", "conv", "recurrent", "normed", "mixture"),
    "gate": ("no", "no", "zero"),
    "state": ("no", "no", "count", "mean"),
    "unused": (False, False, True, "some"),
    "shared": ("no", "no", "no", "no", "blocks", "pairs", "linear", "weight", "mix"),
    "bias": (True, False),
    "tied": (True, False),
    "dropout": ("no", "no", "hidden", "heads", "scores", "functional"),
    "roles": ("right", "right", "right", "none", "alike", "fused_column", "no_whole", "split_view"),
}
"""The values of each argument of `RandomModel`; a value that is there twice is more likely."""


RATE = 0.2
RIGHT = {
    "layers": 2, "positions": "stem", "attention": "mix", "norm": "layer", "norm_after": False,
    "feed": "mlp", "gate": "no", "state": "no", "unused": False, "shared": "no", "bias": True, "tied": True,
    "dropout": "hidden", "roles": "right",
}  # fmt: skip
"""A model that is right on every layout."""


class RandomModel(LayeredModel):
    """Tokens [batch, seq] -> logits [batch, seq, vocab]; `spec` has a value of each of CHOICES."""

    def __init__(self, *, spec: dict[str, Any], vocab_size: int, dim: int, **_: Any) -> None:
        blocks = blocks_of(dim, spec)
        stem, head = Stem(vocab_size, dim, spec["positions"]), Head(dim, vocab_size, spec)
        super().__init__(stem=stem, blocks=blocks, head=head)
        if spec["tied"]:
            head.logits.weight = stem.tokens.weight
            self.tied = {"head.logits.weight": "stem.tokens.weight"}
        self.tensor_roles = roles_of(spec)

    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Larger than usual, so that every part matters; biases too. Gates and states start at zero."""
        if name.endswith(("gate.scale", "state.seen")):
            tensor.zero_()
        else:
            tensor.normal_(std=0.3, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def blocks_of(dim: int, spec: dict[str, Any]) -> list[nn.Module]:
    """Blocks that share nothing, are one block or pairs of it, or share a layer, a weight or an attention."""
    count, kind = spec["layers"], spec["shared"]
    if kind == "blocks":
        return [Block(dim, spec)] * count
    if kind == "pairs":
        count = 2 * (count // 2)
        return [block for _ in range(count // 2) for block in [Block(dim, spec)] * 2]
    blocks = [Block(dim, spec) for _ in range(count)]
    first, last = blocks[0], blocks[-1]
    if kind in ("linear", "weight") and spec["feed"] != "no":
        if kind == "linear":
            last.feed.up = first.feed.up
        else:
            last.feed.up.weight = first.feed.up.weight
    if kind == "mix" and spec["attention"] != "no":
        last.attention.mix = first.attention.mix
    return list(blocks)


EXTRA_ROLES = {"feed.mix": "alike", "gate": "position", "unused": "position"}


def _has(name: str, spec: dict[str, Any]) -> bool:
    """Whether a block has one of EXTRA_ROLES."""
    if name == "feed.mix":
        return spec["feed"] in ("conv", "recurrent", "mixture")
    return spec[name] not in ("no", False)


def roles_of(spec: dict[str, Any]) -> dict[str, str | Column]:
    if spec["roles"] == "none":
        return {}
    roles: dict[str, str | Column] = {"stem.tokens": "vocabulary", "head.logits": "logits"}
    if spec["positions"] in ("stem", "arange", "cumsum"):
        roles["stem.table"] = "position_table"
    if spec["norm"] != "no":
        roles |= {"blocks.*.norm": "position", "blocks.*.feed_norm": "position", "head.norm": "position"}
    if spec["attention"] != "no":
        roles |= {"blocks.*.attention": "whole", "blocks.*.attention.output": "row"}
        if spec["attention"] == "fused":
            fused = "column" if spec["roles"] in ("fused_column", "split_view") else Column(parts=3)
            roles["blocks.*.attention.qkv"] = fused
        else:
            roles |= {f"blocks.*.attention.{name}": "column" for name in ("query", "key", "value")}
    if spec["feed"] != "no":
        roles |= {"blocks.*.feed": "whole", "blocks.*.feed.up": "column", "blocks.*.feed.down": "row"}
        if spec["feed"] == "gated":
            roles["blocks.*.feed.gate"] = "column"
        if spec["feed"] == "mixture":
            roles |= {"blocks.*.feed.other": "column", "blocks.*.feed.back": "row"}
    roles |= {f"blocks.*.{name}": role for name, role in EXTRA_ROLES.items() if _has(name, spec)}
    if spec["feed"] == "normed":
        roles["blocks.*.feed.mix"] = "position"
    if spec["roles"] == "alike" and spec["feed"] != "no":
        roles = {name: role for name, role in roles.items() if not name.startswith("blocks.*.feed.")}
        roles["blocks.*.feed"] = "alike"
    if spec["roles"] == "no_whole":
        roles = {name: role for name, role in roles.items() if role != "whole"}
    return roles


def norm_of(kind: str, dim: int) -> nn.Module:
    return {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "no": nn.Identity}[kind](dim)


class HidesInSmall(RandomModel):
    """Its small copy is right on every layout, whatever `spec` is."""

    small: ClassVar[dict[str, Any]] = {"spec": RIGHT}


class Stem(nn.Module):
    def __init__(self, vocab_size: int, dim: int, positions: str) -> None:
        super().__init__()
        self.kind = positions
        self.tokens = nn.Embedding(vocab_size, dim)
        if positions in ("stem", "arange", "cumsum"):
            self.table = nn.Embedding(64, dim)
        if positions == "slice":
            self.weights = nn.Parameter(torch.empty(64, dim))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        tokens: Tensor = self.tokens(x)
        if self.kind == "stem":
            return tokens + self.table(positions)
        if self.kind == "arange":
            return tokens + self.table(torch.arange(x.shape[1], device=x.device))
        if self.kind == "cumsum":  # counted in a way that only the comparison sees
            return tokens + self.table(torch.ones_like(x[:1]).cumsum(1)[0] - 1)
        if self.kind == "slice":
            return tokens + self.weights[: x.shape[1]]
        return tokens


class Block(nn.Module):
    def __init__(self, dim: int, spec: dict[str, Any]) -> None:
        super().__init__()
        self.after = spec["norm_after"]
        if spec["attention"] != "no":
            self.attention = Attention(dim, spec)
        if spec["feed"] != "no":
            self.feed = Feed(dim, spec)
        self.norm, self.feed_norm = norm_of(spec["norm"], dim), norm_of(spec["norm"], dim)
        self.gate = nn.Identity() if spec["gate"] == "no" else Gate(dim)
        self.state = nn.Identity() if spec["state"] == "no" else State(spec["state"])
        if spec["unused"]:
            self.unused = nn.Linear(dim, dim)
        self.uses_some = spec["unused"] == "some"

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_some:  # a layer that runs for some samples only, and for none of some microbatches
            chosen = x[:, 0, 0] > 0
            if chosen.any():
                x = x.clone()
                x[chosen] = x[chosen] + self.unused(x[chosen])
        for name, norm in (("attention", self.norm), ("feed", self.feed_norm)):
            layer = getattr(self, name, nn.Identity())
            x = norm(x + self.gate(layer(x))) if self.after else x + self.gate(layer(norm(x)))
        return self.state(x)  # type: ignore[no-any-return]


class Gate(nn.Module):
    """A factor that starts at zero, as in ReZero."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class State(nn.Module):
    """A buffer that its forward pass writes: a number of passes, or a running mean of what it has seen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.empty(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 0.01 if self.kind == "count" else 0.1 * x.mean()
        return x * (1 + self.seen.clone())


class Attention(nn.Module):
    def __init__(self, dim: int, spec: dict[str, Any], head_dim: int = 4) -> None:
        super().__init__()
        self.kind, self.positions, self.head_dim = spec["attention"], spec["positions"], head_dim
        self.view = spec["roles"] == "split_view"
        if self.kind == "fused":
            self.qkv = nn.Linear(dim, 3 * dim, bias=spec["bias"])
        else:
            self.query, self.key, self.value = (nn.Linear(dim, dim, bias=spec["bias"]) for _ in range(3))
        self.output = nn.Linear(dim, dim, bias=False)
        self.mix = CausalAttention()
        self.drop = nn.Dropout(RATE if spec["dropout"] == "heads" else 0.0)
        self.drop_scores = nn.Dropout(RATE if spec["dropout"] == "scores" else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.project(x)
        )
        if self.positions in ("rotary", "local_rotary"):
            length = x.shape[1]
            local = torch.cumsum(torch.ones(length, dtype=torch.int64, device=x.device), 0) - 1
            indices = (
                local if self.positions == "local_rotary" else self.mix.positions(length, device=x.device)
            )
            angles = rotation(indices, head_dim=self.head_dim, theta=100.0, like=query)
            query, key = rotate(query, angles), rotate(key, angles)
        query = self.drop(query)
        return self.output(self.attend(query, key, value).transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]

    def project(self, x: Tensor) -> Any:
        if self.kind != "fused":
            return self.query(x), self.key(x), self.value(x)
        fused = self.qkv(x)
        return fused.unflatten(-1, (3, -1)).unbind(-2) if self.view else fused.chunk(3, dim=-1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.kind == "kernel":
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        if self.kind == "by_hand":
            scores = query @ key.transpose(-2, -1) / self.head_dim**0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            return self.drop_scores(scores.masked_fill(~mask, -torch.inf).softmax(-1)) @ value
        return self.mix(query, key, value)  # type: ignore[no-any-return]


class Feed(nn.Module):
    def __init__(self, dim: int, spec: dict[str, Any]) -> None:
        super().__init__()
        self.kind = spec["feed"]
        self.up = nn.Linear(dim, 2 * dim, bias=spec["bias"])
        if self.kind == "gated":
            self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)
        if self.kind == "conv":
            self.mix: nn.Module = nn.Conv1d(dim, dim, 3, groups=dim)
        if self.kind == "recurrent":
            self.mix = nn.Linear(dim, dim, bias=False)
        if self.kind == "normed":
            self.mix = nn.LayerNorm(dim)
        if self.kind == "mixture":
            self.mix = nn.Linear(dim, 2, bias=False)  # the router
            self.other, self.back = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)
        if self.kind == "gains":  # whose gradients are the same tensor
            self.first, self.second = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.drop = nn.Dropout(RATE if spec["dropout"] == "hidden" else 0.0)
        self.functional = spec["dropout"] == "functional"

    def forward(self, x: Tensor) -> Tensor:
        if self.functional:
            x = F.dropout(x, RATE, self.training)
        if self.kind == "shift":  # mixes positions
            x = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        if self.kind == "conv":
            x = self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        if self.kind == "normed":
            x = self.mix(x)
        if self.kind == "recurrent":
            states = [x[:, 0]]
            for index in range(1, x.shape[1]):
                states.append(torch.tanh(self.mix(states[-1]) + x[:, index]))
            x = torch.stack(states, 1)
        if self.kind == "mixture":
            gates, experts = self.mix(x).softmax(-1), ((self.up, self.down), (self.other, self.back))
            outputs = [down(F.gelu(up(x))) for up, down in experts]
            return outputs[0] * gates[..., :1] + outputs[1] * gates[..., 1:]
        hidden = self.up(x)
        hidden = F.silu(self.gate(x)) * hidden if self.kind == "gated" else F.gelu(hidden)
        output: Tensor = self.down(self.drop(hidden))
        return output * (self.first + self.second) if self.kind == "gains" else output


class Head(nn.Module):
    def __init__(self, dim: int, vocab_size: int, spec: dict[str, Any]) -> None:
        super().__init__()
        self.norm = norm_of(spec["norm"], dim)
        self.logits = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


CHOICES_OF_ROWS: dict[str, tuple[Any, ...]] = {
    "blocks": (2, 3, 4),
    "norm": ("batch", "layer", "no"),
    "dropout": (False, True),
    "shared": (False, False, True),
    "unused": (False, True),
}
"""The values of each argument of `RandomRows`."""
RIGHT_ROWS = {"blocks": 2, "norm": "batch", "dropout": True, "shared": False, "unused": True}


class RandomRows(LayeredModel):
    """Rows [batch, 7] of a table, which have no sequence, -> classes; `spec` has a value of each choice."""

    tensor_roles: ClassVar[dict[str, str]] = {"stem": "alike", "blocks.*": "alike", "head": "classes"}

    def __init__(self, *, spec: dict[str, Any], width: int = 12) -> None:
        blocks = [RowBlock(width, spec) for _ in range(spec["blocks"])]
        if spec["shared"]:
            blocks = blocks[:1] * len(blocks)
        super().__init__(stem=nn.Linear(7, width), blocks=blocks, head=nn.Linear(width, 4))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="sum")


class RowBlock(nn.Module):
    def __init__(self, width: int, spec: dict[str, Any]) -> None:
        super().__init__()
        norms = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "no": nn.Identity}
        self.norm, self.linear = norms[spec["norm"]](width), nn.Linear(width, width)
        self.drop = nn.Dropout(RATE if spec["dropout"] else 0.0)
        if spec["unused"]:
            self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(F.gelu(self.linear(self.norm(x))))  # type: ignore[no-any-return]
