"""Finds roles of a model (`LayeredModel.tensor_roles`) that are missing or contradict each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from hpc_parallel.config.schema import StrategyConfig
from hpc_parallel.models.experts import Experts, width_dim
from hpc_parallel.models.layered import Column, LayeredModel, part_of
from hpc_parallel.problems import Problem, Problems
from hpc_parallel.strategies.dropout.dropout_shapes import whole_shapes
from hpc_parallel.strategies.dry_forward import first_clause

FULL = ("alike", "classes")  # every device computes these from the full input
ROLES = (
    "vocabulary",
    "whole",
    "column",
    "row",
    "position",
    "position_table",
    "heads",
    "logits",
    "experts",
    *FULL,
)


NORMS = (nn.LayerNorm, nn.RMSNorm)
SEQUENTIAL = (nn.RNNBase, nn.RNNCellBase, nn.Conv1d)
BY_ROWS = {"vocabulary", "logits", "classes"}  # roles that split a weight in the same way


def matches(name: str, pattern: str) -> bool:
    """Match names between dots one by one, so that `blocks.*` does not match the modules inside a block."""
    names, patterns = name.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def find_problems(model: LayeredModel, *, degree: int, options: StrategyConfig) -> Problems:
    """Returns why the layers of `model`, which is not split yet, can't be split over `degree` devices."""
    others = (role for role in model.tensor_roles.values() if role not in ROLES)
    unknown = [repr(role) for role in others if not (isinstance(role, Column) and role.parts > 0)]
    if unknown:
        yield _problem(model, degree, f"has the unknown role {', '.join(unknown)}; {', '.join(ROLES)} exist")
        return
    roles = roles_of(model)
    rules = [*_missing(model, roles), *_unpaired(roles), *_parts(model, roles, degree), *_fused(model, roles)]
    rules += [*_of_shared(model, roles), *_sequential(model, roles), *_experts(model, roles, degree)]
    if options.sequence_parallel:
        rules += [*_full_and_sliced(roles), *_sliced_inputs(roles)]
    for rule in rules:
        yield _problem(model, degree, rule)


def find_fused_dropouts(model: LayeredModel, *, degree: int, sample_shape: tuple[int, ...]) -> Problems:
    """Returns a problem for each dropout on the outputs of a fused layer.

    A device has some columns of each projection, so the dropout can't know which columns the device has.
    """
    fused = [
        (name, model.get_submodule(name))
        for name, role in roles_of(model).items()
        if isinstance(role, Column) and role.parts > 1
    ]
    if not fused:
        return
    for dropout, shape in whole_shapes(model, sample_shape=sample_shape).items():
        for name, layer in fused:
            if part_of(dropout) == part_of(name) and getattr(layer, "out_features", None) == shape.sizes[-1]:
                clause = f"splits the columns of {name}, and {dropout} drops all its projections together"
                advice = f"Give each projection a dropout, or set the rate of {dropout} to 0"
                yield _problem(model, degree, f"{clause}. {advice}")


def roles_of(model: LayeredModel) -> dict[str, str | Column]:
    """Returns the role of each module that has one, by module name. The last pattern that matches counts."""
    return {
        name: role
        for name, _ in model.named_modules()
        for pattern, role in model.tensor_roles.items()
        if matches(name, pattern)
    }


def _problem(model: LayeredModel, degree: int, clause: str) -> Problem:
    return Problem(
        "strategy.tensor", degree, f"can't be used: {type(model).__name__}.tensor_roles {clause}", (1,)
    )


def _missing(model: LayeredModel, roles: Mapping[str, str | Column]) -> Iterator[str]:
    """Without a role it is unknown whether a device has a weight's full gradient or a partial sum."""
    owners = {name for name, role in roles.items() if role != "whole"}
    left_out = [name for name, _ in model.named_parameters() if not is_within(name, owners)]
    if left_out:
        yield f"has no role for {', '.join(left_out[:3])}. {_advice(model, left_out[0].rpartition('.')[0])}"


def _advice(model: LayeredModel, name: str) -> str:
    """Which role the module `name` may have."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return f"{name} may have the role vocabulary, or position_table if it is read at positions"
    if isinstance(module, nn.Linear) and part_of(name) == "head":
        return f"{name} may have the role logits, or classes in a model without positions"
    if isinstance(module, NORMS):
        return f"{name} may have the role position"
    return f"{name} may always have the role alike, with strategy.sequence_parallel=false"


def _sequential(model: LayeredModel, roles: Mapping[str, str | Column]) -> Iterator[str]:
    """A recurrence or convolution sees other positions, so it can't have the role position."""
    for name, role in roles.items():
        module = model.get_submodule(name)
        if role == "position" and isinstance(module, SEQUENTIAL):
            yield (
                f"has the role position for {name}, a {type(module).__name__}, which needs all positions. "
                "Give it the role alike, with strategy.sequence_parallel=false"
            )
            return


def _unpaired(roles: Mapping[str, str | Column]) -> Iterator[str]:
    """Outputs of a column layer are slices, which only a row layer of the same block makes full again."""
    columns = {part_of(name) for name, role in roles.items() if _is_column(role)}
    rows = {part_of(name) for name, role in roles.items() if role == "row"}
    for part in sorted(columns - rows):
        yield f"splits columns in {part} without a row layer that follows"
    for part in sorted(rows - columns):
        yield f"splits rows in {part} without a column layer before it"


def _parts(model: LayeredModel, roles: Mapping[str, str | Column], degree: int) -> Iterator[str]:
    for name, role in roles.items():
        if isinstance(role, Column):
            outputs = getattr(model.get_submodule(name), "out_features", None)
            unit = role.parts * degree
            if outputs is None:
                yield f"has {role} for {name}, which is not a linear layer"
            elif outputs % unit:
                yield f"has {role} for {name}, whose {outputs} outputs do not divide by {unit}"


def _experts(model: LayeredModel, roles: Mapping[str, str | Column], degree: int) -> Iterator[str]:
    """The width of each expert is split; without `Experts` every device would compute the whole output."""
    for name in (name for name, role in roles.items() if role == "experts"):
        experts = [part for part in model.get_submodule(name).modules() if isinstance(part, Experts)]
        if not experts:
            yield f"has the role experts for {name}, which has no Experts (models/experts.py)"
        elif any(_widths(model.get_submodule(name), degree)):
            yield f"has the role experts for {name}, whose experts' width does not divide by {degree}"


def _widths(module: nn.Module, degree: int) -> Iterator[int]:
    """What `degree` devices leave of the inner width of each expert, and of shared experts."""
    for part in module.modules():
        if (dim := width_dim(part, "gate")) is not None:
            yield part.get_parameter("gate").shape[dim] % degree


def _of_shared(model: LayeredModel, roles: Mapping[str, str | Column]) -> Iterator[str]:
    """A weight under several names is split once, so all its modules must split it alike."""

    def role_of(weight: str) -> str | Column | None:
        names = weight.split(".")[:-1]
        owners = (".".join(names[:end]) for end in range(len(names), 0, -1))
        return next((roles[owner] for owner in owners if roles.get(owner, "whole") != "whole"), None)

    for alias, name in model.tied.items():
        pair = role_of(alias), role_of(name)
        if None not in pair and pair[0] != pair[1] and not set(pair) <= BY_ROWS:
            yield (
                f"has the role {pair[1]} for {name} and the role {pair[0]} for {alias}, which are one "
                "weight. Give both one role, such as alike with strategy.sequence_parallel=false"
            )
            return


def _fused(model: LayeredModel, roles: Mapping[str, str | Column]) -> Iterator[str]:
    """If a model cuts the outputs of a column layer into projections, a device would mix them up."""
    columns = {name for name, role in roles.items() if role == "column"}
    outputs: dict[int, tuple[str, Tensor]] = {}  # keeps the tensors, so that no other tensor gets their id

    def judge(place: str, operator: str, args: Sequence[Any], output: Any) -> str | None:
        if operator.startswith("aten::split") and id(args[0]) in outputs:
            return f"cuts the outputs of {outputs[id(args[0])][0]} into {len(output)}"
        if place in columns and isinstance(output, Tensor):
            outputs[id(output)] = place, output
        return None

    if clause := first_clause(model, judge):
        yield (
            f"has the role column for a layer of several projections: {clause}. Give it the role "
            "Column(parts=...)"
        )


def _full_and_sliced(roles: Mapping[str, str | Column]) -> Iterator[str]:
    """With sequence parallelism a device has a slice of the sequence, so nothing sees the full input."""
    full = [name for name, role in roles.items() if role in FULL]
    sliced = [name for name, role in roles.items() if role not in FULL]
    if full and sliced:
        yield (
            f"has the role {roles[full[0]]} for {full[0]}, which needs the full sequence, beside the role "
            f"{roles[sliced[0]]} for {sliced[0]}. Give {full[0]} the role position if it treats each "
            "position separately, or set strategy.sequence_parallel=false"
        )


def _sliced_inputs(roles: Mapping[str, str | Column]) -> Iterator[str]:
    """With sequence parallelism a column layer needs a module around it that gathers the sequence."""
    gathering = {name for name, role in roles.items() if role == "whole"}
    for name, role in roles.items():
        if _is_column(role) and not is_within(name, gathering):
            yield (
                f"has the role column for {name} in no module of the role whole, so its input would be a "
                "slice of the sequence. Give the role whole to the module around it, or set "
                "strategy.sequence_parallel=false"
            )
            return


def _is_column(role: str | Column) -> bool:
    return role == "column" or isinstance(role, Column)


def is_within(name: str, modules: set[str]) -> bool:
    """Whether `name` is one of the modules or is inside one."""
    names = name.split(".")
    return any(".".join(names[:end]) in modules for end in range(1, len(names) + 1))
