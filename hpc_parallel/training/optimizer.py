"""The optimizers of a run: which one updates each weight, and their state under full names."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from hydra.utils import get_class
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import SGD, Adam, AdamW, Optimizer

from hpc_parallel.config.optimizer_rules import Settings, applies, settings_for
from hpc_parallel.config.schema import OptimizerConfig
from hpc_parallel.layout.step_facts import UPDATED_AT_ONCE
from hpc_parallel.models.drawn_weights import local_of, placed
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.gradients import local_gradients
from hpc_parallel.torch_internals import hold_updates_by
from hpc_parallel.training.optimizer_trial import NUMBERS, changed_settings, require_usable
from hpc_parallel.training.rounding import (
    Noise,
    RandomRounding,
    coordinates_of,
    local_part,
    round_to_bfloat16,
    wide_dtype,
)
from hpc_parallel.training.whole_weights import SharedWeight, share

SKIPS_ON_DEVICE = (Adam, AdamW)
"""Classes whose fused kernel leaves weights and state as they are if a flag on the device says so."""
ELEMENTWISE = (*SKIPS_ON_DEVICE, SGD)
"""Classes that update each number by its own gradient and state, so that a rank can update its slices."""
OF_STATE, OF_GROUP = "number:", "group:"
"""Before the keys of plain numbers: of a weight's state, and of the settings that it shares with others."""


class Update:
    """One optimizer of torch with the weights that it updates in place.

    torch sees this rank's parts as plain tensors. For a DTensor, each call would find out for each weight
    which rank holds what, which takes longer than the update of a small weight.
    """

    def __init__(
        self, kind: type[Optimizer], weights: Mapping[str, Parameter], *, options: Mapping[str, Any]
    ) -> None:
        """`options`: arguments of `kind`. Raises what `kind` raises if it refuses them."""
        self.weights = weights
        self.held = {
            name: Parameter(local_of(weight.detach()), weight.requires_grad)
            if isinstance(weight, DTensor)
            else weight
            for name, weight in weights.items()
        }
        self.optimizer = kind([{"params": list(self.held.values())}], **options)
        self._built = dict(self.optimizer.param_groups[0])

    @property
    def skips_on_device(self) -> bool:
        return isinstance(self.optimizer, SKIPS_ON_DEVICE) and bool(self.optimizer.defaults["fused"])

    def step(self, number: int) -> None:
        """Update the weights in the 1-based step `number` of the training."""
        self._take_gradients()
        self._update(number)
        for name, weight in self.weights.items():
            if self.held[name] is not weight:
                self.held[name].grad = None

    def _update(self, number: int) -> None:
        self.optimizer.step()

    @torch.no_grad()
    def _take_gradients(self) -> None:
        """Let `held` have the parts of the weights, which fully_shard moves once, and of their gradients.

        A gradient gets the strides of its weight, as backward() does unless it is split or compiled. On CPUs
        the fused AdamW of torch 2.13 assumes that both have the same strides.
        """
        present = {name: weight for name, weight in self.weights.items() if weight.grad is not None}
        for (name, weight), gradient in zip(present.items(), local_gradients(present.values()), strict=True):
            held = self.held[name]
            if isinstance(weight, DTensor):
                held.data = weight.to_local()
            if gradient.stride() != held.stride():
                gradient = torch.empty_like(held).copy_(gradient)
                weight.grad = placed(gradient, like=weight) if isinstance(weight, DTensor) else gradient
            held.grad = gradient

    def numbers(self, name: str) -> dict[str, Any]:
        """The plain numbers that the class keeps for a weight, in its state and in its group."""
        (group,) = self.optimizer.param_groups
        state = self.optimizer.state.get(self.held[name], {})
        of_state = {f"{OF_STATE}{key}": value for key, value in state.items()}
        of_group = {f"{OF_GROUP}{key}": group[key] for key in changed_settings(group, self._built)}
        return {key: value for key, value in (of_state | of_group).items() if type(value) in NUMBERS}

    def table_of(self, name: str, key: str) -> tuple[dict[str, Any], str] | None:
        """Where the number `key` of `numbers` belongs; None if `key` is no number's."""
        if key.startswith(OF_STATE):
            return self.optimizer.state[self.held[name]], key.removeprefix(OF_STATE)
        (group,) = self.optimizer.param_groups
        return (group, key.removeprefix(OF_GROUP)) if key.startswith(OF_GROUP) else None

    def state_dtype(self, weight: Tensor, recorded: torch.dtype | None) -> torch.dtype:
        """The type of a state with the shape of `weight` that a checkpoint has as `recorded`.

        None stands for the type of the weight.
        """
        return wide_dtype(weight) if recorded == torch.bfloat16 else recorded or weight.dtype


class RoundedUpdate(Update):
    """An elementwise optimizer that keeps its weights, its state, or both in bfloat16.

    Some rows of a weight at a time are widened to float32 (float64 if the weight is held in float64), updated
    by torch, and rounded at random (`rounding.py`).
    """

    def __init__(
        self,
        kind: type[Optimizer],
        weights: Mapping[str, Parameter],
        *,
        options: Mapping[str, Any],
        rounding: RandomRounding,
    ) -> None:
        super().__init__(kind, weights, options=options)
        self._rounding = rounding
        self._coordinates = {name: coordinates_of(weight) for name, weight in weights.items()}

    def state_dtype(self, weight: Tensor, recorded: torch.dtype | None) -> torch.dtype:
        return torch.bfloat16 if self._rounding.state else wide_dtype(weight)

    @torch.no_grad()
    def _update(self, number: int) -> None:
        (group,) = self.optimizer.param_groups
        for name, weight in self.held.items():
            if weight.grad is not None:
                self._update_rows(name, weight, number=number, group=group)
        group["params"] = list(self.held.values())

    def _update_rows(self, name: str, weight: Parameter, *, number: int, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        held, gradient, dtype = local_part(weight), local_part(weight.grad), wide_dtype(weight)
        state = self.optimizer.state[weight]
        before = dict(state)  # counts of steps too; empty in the first step
        first, *others = self._coordinates[name]
        rows = max(1, UPDATED_AT_ONCE[held.device.type] // max(1, held[:1].numel()))
        for start in range(0, max(1, len(held)), rows):  # a rank without rows counts its steps too
            part = slice(start, start + rows)
            wide = Parameter(held[part].to(dtype), requires_grad=False)  # a view, if that is its type
            wide.grad = gradient[part].to(dtype)
            group["params"] = [wide]
            if before:
                self.optimizer.state[wide] = {
                    key: local_part(value)[part].to(dtype)
                    if _is_whole(key, value.shape, weight)
                    else value.clone()
                    for key, value in before.items()
                }
            self.optimizer.step()
            noise = Noise(name, [first[part], *others], seed=self._rounding.seed, step=number)
            if self._rounding.weights:
                held[part].copy_(round_to_bfloat16(wide, noise(0)))
            self._keep_state(self.optimizer.state.pop(wide, {}), weight=weight, part=part, noise=noise)

    def _keep_state(
        self, updated: Mapping[str, Any], *, weight: Parameter, part: slice, noise: Noise
    ) -> None:
        """Store what torch has `updated` for the rows `part` of `weight`."""
        state = self.optimizer.state[weight]
        shape = local_part(weight)[part].shape
        tensors = {key: value for key, value in sorted(updated.items()) if isinstance(value, Tensor)}
        for index, (key, value) in enumerate(tensors.items(), start=1):
            if value.shape != shape:
                state[key] = value
                continue
            if key not in state:
                (group,) = self.optimizer.param_groups
                dtype = self.state_dtype(weight, None)
                state[key] = _zeros(weight.shape, dtype, like=weight, group=group)
            kept = local_part(state[key])[part]
            if self._rounding.state:
                kept.copy_(round_to_bfloat16(value, noise(index)))
            elif kept.data_ptr() != value.data_ptr():
                kept.copy_(value)


class WholeUpdate(Update):
    """An optimizer that needs whole weights. This rank updates the split weights that it owns."""

    def __init__(
        self, kind: type[Optimizer], weights: Mapping[str, Parameter], *, options: Mapping[str, Any]
    ) -> None:
        split = {name: weight for name, weight in weights.items() if isinstance(weight, DTensor)}
        self._shared: Sequence[SharedWeight] = share(split.values())
        whole = {name: shared.whole for name, shared in zip(split, self._shared, strict=True) if shared.owned}
        held = {name: whole.get(name, weight) for name, weight in weights.items()}
        owned = {name: weight for name, weight in held.items() if not isinstance(weight, DTensor)}
        super().__init__(kind, owned, options=options)

    def step(self, number: int) -> None:
        for shared in self._shared:
            shared.gather()
        super().step(number)
        for shared in self._shared:
            shared.hand_out()


class ModelOptimizer:
    """Updates all weights of this rank."""

    def __init__(
        self, parameters: Mapping[str, Parameter], updates: Mapping[float, Sequence[Update]]
    ) -> None:
        """`updates`: factor of the learning rate -> the updates with this factor."""
        self._parameters = parameters
        self._by_scale = updates
        self._updates = [update for group in updates.values() for update in group]
        self._withhold: Tensor | None = None
        self._number = 0
        self._restored: dict[str, tuple[Tensor, dict[str, Any], str]] = {}  # numbers of a checkpoint

    def step(self) -> None:
        """Update the weights by their `.grad`, unless the flag of `withhold_by` is 1.

        If an optimizer does not read the flag on the device, the host reads it and so waits for the device.
        """
        if self._withhold is not None and bool(self._withhold):
            return
        for update in self._updates:
            update.step(self._number)

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def begin_step(self, number: int, *, rate: float) -> None:
        """The next update is that of the 1-based step `number`, with the learning rate `rate`."""
        for value, table, key in self._restored.values():
            table[key] = value.item()
        self._restored.clear()
        self._number = number
        for scale, updates in self._by_scale.items():
            for update in updates:
                for group in update.optimizer.param_groups:
                    group["lr"] = rate * scale

    def withhold_by(self, flag: Tensor) -> None:
        """While the scalar `flag` on the device is 1, `step` changes neither weights nor state."""
        if not all(update.skips_on_device for update in self._updates):
            self._withhold = flag
            return
        for update in self._updates:
            hold_updates_by(flag, update.optimizer)

    def state(self) -> dict[str, Tensor]:
        """Returns the state that this rank keeps, by `NAME OF THE WEIGHT/KEY`. Plain numbers are copies."""
        tensors = {
            f"{name}/{key}": placed(value, like=weight)
            if isinstance(weight, DTensor) and _is_whole(key, value.shape, update.held[name])
            else value
            for update in self._updates
            for name, weight in update.weights.items()
            for key, value in update.optimizer.state.get(update.held[name], {}).items()
            if isinstance(value, Tensor)
        }
        numbers = {
            f"{name}/{key}": torch.tensor(value, dtype=NUMBERS[type(value)])
            for update in self._updates
            for name in update.weights
            for key, value in update.numbers(name).items()
        }
        return tensors | numbers | {name: value for name, (value, *_) in self._restored.items()}

    def create_state(self, sizes: Mapping[str, tuple[torch.Size, torch.dtype | None]]) -> None:
        """Create state of these sizes and types, by the names of `state`, for a checkpoint to fill.

        Without a type, it has that of its weight. Names of weights whose state other ranks keep are left out.
        """
        by_weight: defaultdict[str, list[str]] = defaultdict(list)
        for name in sizes:
            by_weight[name.rpartition("/")[0]].append(name)
        for update in self._updates:
            (group,) = update.optimizer.param_groups
            for name, weight in update.weights.items():
                for full_name in by_weight[name]:
                    size, dtype = sizes[full_name]
                    key = full_name.rpartition("/")[2]
                    if (place := update.table_of(name, key)) is not None:
                        self._restored[full_name] = (torch.zeros((), dtype=dtype or torch.float64), *place)
                        continue
                    if _is_whole(key, size, weight) or dtype is None:
                        dtype = update.state_dtype(weight, dtype)
                    held = update.held[name]
                    size = held.shape if size == weight.shape else size
                    update.optimizer.state[held][key] = _zeros(size, dtype, like=held, group=group)


def _is_whole(key: str, size: torch.Size, weight: Tensor) -> bool:
    """Whether a state has a number for each number of `weight`; the count of steps of a scalar has not."""
    return key != "step" and size == weight.shape


def _zeros(size: torch.Size, dtype: torch.dtype, *, like: Parameter, group: Mapping[str, Any]) -> Tensor:
    if size == like.shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False, memory_format=torch.contiguous_format)
    on_host = not size and not (group.get("fused") or group.get("capturable"))  # as torch keeps step counts
    return torch.zeros(size, dtype=dtype, device="cpu" if on_host else like.device)


def build_optimizer(
    parameters: Mapping[str, Parameter],
    config: OptimizerConfig,
    *,
    split: bool = False,
    rounding: RandomRounding | None = None,
    ranks: int | None = None,
) -> ModelOptimizer:
    """Build the optimizers of this rank's weights, by full name.

    `split`: other ranks hold other weights or slices. `rounding`: what is kept in bfloat16. `ranks`: their
    number, before they run. All ranks must call it together. Raises ConfigError if a class or its arguments
    can't be used, or for a pattern that matches no weight on any rank.
    """
    require_matches(list(parameters), config.groups)
    groups: dict[str, tuple[Settings, dict[str, Parameter]]] = {}
    for name, parameter in parameters.items():
        settings = settings_for(name, parameter.ndim, config)
        groups.setdefault(str(settings), (settings, {}))[1][name] = parameter
    updates: defaultdict[float, list[Update]] = defaultdict(list)
    for settings, weights in groups.values():
        update = _update(
            settings, weights, rate=config.learning_rate, split=split, rounding=rounding,
            ranks=ranks or number_of_ranks(),
        )  # fmt: skip
        updates[settings.learning_rate_scale].append(update)
    return ModelOptimizer(parameters, updates)


def _update(
    settings: Settings,
    weights: dict[str, Parameter],
    *,
    rate: float,
    split: bool,
    rounding: RandomRounding | None,
    ranks: int,
) -> Update:
    try:
        kind = get_class(settings.target)
        options = _arguments(kind, settings, rate=rate)
        if kind in SKIPS_ON_DEVICE:
            # The fused kernel reads each weight once; it was the fastest on CPUs too (docs/performance.md).
            options = {"fused": True, **options}
        if kind in ELEMENTWISE:
            if rounding is not None:
                return RoundedUpdate(kind, weights, options=options, rounding=rounding)
            return Update(kind, weights, options=options)
        if rounding is not None:
            raise ConfigError(
                [f"optimizer: {settings.target} keeps nothing in bfloat16. Try optimizer=adamw."]
            )
        device = next(iter(weights.values())).device
        require_usable(kind, options, device=device, ranks=ranks, split=split)
        return WholeUpdate(kind, weights, options=options)
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # of any kind: it may be the user's class
        reason = " ".join(str(error).split())
        raise ConfigError(
            [f"optimizer: {settings.target} refuses {next(iter(weights))}: {reason}"]
        ) from error


def number_of_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _arguments(kind: Any, settings: Settings, *, rate: float) -> dict[str, Any]:
    """The arguments of the class. Raises ConfigError for one that it doesn't take."""
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError([Problem("optimizer._target_", settings.target, "is no torch.optim.Optimizer")])
    arguments = {**settings.options, "lr": rate * settings.learning_rate_scale}
    parameters = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if takes_any or settings.weight_decay or "weight_decay" in parameters:  # the class's default may differ
        arguments["weight_decay"] = settings.weight_decay
    if takes_any:
        return arguments
    if unknown := sorted(arguments.keys() - parameters.keys()):
        legal = ", ".join(list(parameters)[1:])
        raise ConfigError(
            [f"optimizer: {settings.target} takes no {', '.join(unknown)}. Its arguments are {legal}."]
        )
    return arguments


def require_matches(names: list[str], rules: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError for a rule that matches none of the `names` of any rank."""
    matched = [key for key, rule in rules.items() if any(applies(rule.get("match"), name) for name in names)]
    by_rank = exchange.all_gather(matched) if rules else [matched]
    if unmatched := rules.keys() - {key for matched_keys in by_rank for key in matched_keys}:
        rule = f"matches no weight of the model, whose first is {names[0]}"
        keys = {f"optimizer.groups.{key}.match": rules[key]["match"] for key in sorted(unmatched)}
        raise ConfigError([Problem(key, match, rule, (["*.weight"],)) for key, match in keys.items()])
