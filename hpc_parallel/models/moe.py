"""The reference decoder with a mixture of experts in each block.

Shazeer et al. 2017 (experts and router), Fedus et al. 2021 (Switch: gates that are not renormalised, and the
balancing loss), Jiang et al. 2024 (Mixtral: gates that are), DeepSeek-AI 2024 (balance within each sequence,
so that it does not depend on the layout; shared experts; sigmoid gates). No token is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hpc_parallel.models.auxiliary_loss import AuxiliaryLoss, SequenceSum
from hpc_parallel.models.experts import Experts, LoadBalance, Reorder, SharedExperts
from hpc_parallel.models.layered import Column, PartFlops
from hpc_parallel.models.transformer import FeedForward, Transformer


class MoeTransformer(Transformer):
    """Tokens [batch, seq] -> logits [batch, seq, vocab]; `ffn_dim` is the inner width of each expert.

    The first `dense_layers` blocks have one feed-forward network of the inner width `dense_ffn_dim` (None:
    `ffn_dim`) instead. The other keys are those of `MixtureOfExperts`.

    Raises ValueError as Transformer does, and if `experts_per_token` is not between 1 and `experts`.
    """

    tensor_roles: Mapping[str, str | Column] = MappingProxyType(
        {
            **{name: role for name, role in Transformer.tensor_roles.items() if ".feed_forward." not in name},
            "blocks.*.feed_forward": "experts",
        }
    )
    into_stream = (*Transformer.into_stream, ".experts.down", ".shared.down")

    def __init__(
        self,
        *,
        experts: int,
        experts_per_token: int,
        balance: float,
        dim: int,
        ffn_dim: int,
        renormalise: bool = False,
        gate: str = "softmax",
        shared_experts: int = 0,
        balance_step: float = 0.0,
        dense_layers: int = 0,
        dense_ffn_dim: int | None = None,
        **shape: Any,
    ) -> None:
        if not 1 <= experts_per_token <= experts:
            raise ValueError(f"model.experts_per_token = {experts_per_token} must be 1 to {experts}")
        super().__init__(dim=dim, ffn_dim=ffn_dim, **shape)
        roles = dict(self.tensor_roles)
        for index, block in enumerate(self.blocks.values()):
            if index < dense_layers:
                block.feed_forward = FeedForward(dim, hidden=dense_ffn_dim or ffn_dim)
                of_block = f"blocks.{index}.feed_forward"
                roles |= {
                    name.replace("blocks.*.feed_forward", of_block): role
                    for name, role in Transformer.tensor_roles.items()
                    if ".feed_forward" in name and "norm" not in name
                }
                continue
            block.feed_forward = MixtureOfExperts(
                Experts(experts, dim=dim, hidden=ffn_dim),
                per_token=experts_per_token,
                balance=balance,
                renormalise=renormalise,
                gate=gate,
                shared=SharedExperts(dim=dim, hidden=shared_experts * ffn_dim) if shared_experts else None,
                load=LoadBalance(experts, step=balance_step) if balance_step else None,
            )
        self.tensor_roles = roles

    def forward_flops(self, sample_shape: tuple[int, ...]) -> PartFlops:
        """As in Transformer, but only the experts that a token uses count."""
        (seq,) = sample_shape
        flops = super().forward_flops(sample_shape)
        networks = [block.feed_forward for block in self.blocks.values()]
        blocks = tuple(
            part - 2 * seq * (network.unused_weights if isinstance(network, MixtureOfExperts) else 0)
            for part, network in zip(flops.blocks, networks, strict=True)
        )
        return PartFlops(stem=flops.stem, blocks=blocks, head=flops.head)


class MixtureOfExperts(nn.Module):
    """Each token goes to the experts with the largest scores of the router; these weight the outputs.

    gate: `softmax` or `sigmoid`, which makes scores of the router's logits. renormalise: the weights of a
    token's experts are divided by their sum. balance: the weight of the loss that balances the experts.
    shared: experts that every token uses, with the weight 1. load: a bias that balances the experts.
    """

    def __init__(
        self,
        experts: Experts,
        *,
        per_token: int,
        balance: float,
        renormalise: bool = False,
        gate: str = "softmax",
        shared: SharedExperts | None = None,
        load: LoadBalance | None = None,
    ) -> None:
        super().__init__()
        dim = experts.gate.shape[-1]
        self.router = nn.Linear(dim, experts.count, bias=False)
        self.experts = experts
        self.per_token = per_token
        self.balance = balance
        self.renormalise = renormalise
        self.sigmoid = gate == "sigmoid"
        self.shared = shared
        self.load = load
        self.auxiliary = AuxiliaryLoss() if balance else None
        self.over_positions = SequenceSum()

    @property
    def unused_weights(self) -> int:
        """Number of weights of the experts that a token does not use."""
        weights = sum(weight.numel() for weight in self.experts.parameters())
        return weights - weights * self.per_token // self.experts.count

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like `x` [batch, seq, dim]."""
        logits = self.router(x)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)  # [batch, seq, expert]
        gates, chosen = self._choose(scores)  # [batch, seq, per_token]
        if self.renormalise:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        output = self._mix(x.flatten(0, 1), chosen.flatten(0, 1), gates.flatten(0, 1)).view_as(x)
        if self.shared is not None:
            output = output + self.shared(x)
        if self.auxiliary is None:
            return output
        probabilities = scores / scores.sum(dim=-1, keepdim=True) if self.sigmoid else scores
        return self.auxiliary(output, self.balance * imbalance(probabilities, chosen, self.over_positions))  # type: ignore[no-any-return]

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The scores of each token's experts, and the experts; a bias only has a part in the choice."""
        if self.load is None:
            gates, chosen = scores.topk(self.per_token, dim=-1)
            return gates, chosen
        chosen = (scores.detach() + self.load.expert_bias).topk(self.per_token, dim=-1).indices
        return scores.gather(-1, chosen), chosen

    def _mix(self, tokens: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Returns [token, dim]: for each token the sum of its experts' outputs, weighted by `gates`."""
        assignments = chosen.flatten()
        # Unlike bincount, scatter_add does not make the host wait for the device.
        zeros, ones = assignments.new_zeros(self.experts.count), torch.ones_like(assignments)
        counts = zeros.scatter_add(0, assignments, ones)
        announced = self.experts.announce(counts)
        if self.load is not None:
            self.load.count(counts)
        order = assignments.argsort(stable=True)  # by expert
        inverse = order.argsort()
        outputs = self.experts(Reorder.apply(tokens, order, inverse, self.per_token), announced)
        by_token = Reorder.apply(outputs, inverse, order).unflatten(0, (-1, self.per_token))
        return torch.sum(by_token * gates.to(outputs.dtype).unsqueeze(-1), dim=1)


def imbalance(probabilities: Tensor, chosen: Tensor, over_positions: SequenceSum) -> Tensor:
    """The balancing loss summed over positions; 1 for each position if all experts are used equally.

    For a sequence of S positions it is S x experts x sum over experts of f P, where f is an expert's share of
    the assignments and P its mean probability (Fedus et al. 2021, eq. 4). `probabilities` [batch, seq,
    expert]; `chosen` [batch, seq, per_token]. `over_positions`: adds up what devices have of a sequence.
    """
    experts, positions = probabilities.shape[-1], probabilities.shape[1] * over_positions.parts
    assigned = torch.zeros_like(probabilities).scatter(-1, chosen, 1.0)
    assigned, summed = over_positions(torch.stack((assigned.sum(dim=1), probabilities.sum(dim=1)))).unbind()
    balance: Tensor = experts * (assigned / (positions * chosen.shape[-1]) * summed).sum()
    return balance
