"""All ranks make the same process groups in the same order, before anything uses one.

Every group has `cluster.collective_timeout_s`, and the group of saves has its own time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_parallel.layout.layout import layout_of
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies import groups
from hpc_parallel.torch_internals import group_of, operator_arguments, operator_name, set_default_timeout
from hpc_parallel.worker import session
from hpc_parallel.worker.session import read_config
from tests.workers import Workers, do_here

SMALL = (
    "training.steps=1", "training.checkpoint_every=1", "training.validate_every=null",
    "training.measure_steps=0", "training.global_batch_size=8", "training.validation_samples=8",
)  # fmt: skip
TEXT = (
    *SMALL, "data.max_bytes=100000", "data.sequence_length=16", "model.layers=3", "model.dim=16",
    "model.heads=2", "model.kv_heads=2", "model.ffn_dim=32",
)  # fmt: skip
IMAGES = (*SMALL, "data=digits", "model=convnet", "data.width=64", "data.height=64")
INFER = ("task=infer", "task.batch_sizes=[8]", "task.repeats=1")
GENERATE = ("task=generate", "task.new_tokens=2", "task.prompt_length=4")
FOUR, SIX = ("nodes=2", "gpus_per_node=2"), ("nodes=3", "gpus_per_node=2")
SAVING = ("saving", (0, 1, 2, 3))


@dataclass
class Made:
    """The groups that a rank made, by name and ranks, in order.

    counts: at the first group of each axis, how many this rank had; torch names a split of NCCL by it.
    early: whether a collective ran before all groups were made; late: the groups that were made later.
    """

    groups: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    early: bool = False
    late: int = 0


@contextmanager
def recorded() -> Iterator[Made]:
    made, done = Made(), []
    world = dist.distributed_c10d._world
    before = len(world.pg_names)

    def new_group(ranks: Any = None, *, group_desc: str = "saving", **options: Any) -> Any:
        if group_desc.startswith("mesh_") and (not made.groups or made.groups[-1][0] != group_desc):
            made.counts.append(len(world.pg_names) - before)
        made.groups.append((group_desc, tuple(ranks or range(dist.get_world_size()))))
        made.late += bool(done)
        return original(ranks, group_desc=group_desc, **options)

    def make_groups(*args: Any, **options: Any) -> groups.Groups:
        result = groups.make_groups(*args, **options)
        done.append(result)
        return result

    def noting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            made.early |= not done
            return collective(*args, **options)

        return noted

    original = dist.new_group
    with (
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(device_mesh, "new_group", new_group),
        mock.patch.object(session, "make_groups", make_groups),
        mock.patch.object(dist, "all_gather", noting(dist.all_gather)),
        mock.patch.object(dist, "all_reduce", noting(dist.all_reduce)),
        mock.patch.object(dist, "broadcast", noting(dist.broadcast)),
        mock.patch.object(dist, "barrier", noting(dist.barrier)),
    ):
        yield made


def groups_of_runs(folders: list[str]) -> list[Made]:
    """The groups of several runs, one after the other on the same ranks."""
    results = []
    for folder in folders:
        with recorded() as made:
            do_here(folder)
        results.append(made)
    return results


def agreed(workers: Workers, *cases: tuple[str, ...]) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The groups of each run, after a check that all ranks made them alike and in time."""
    runs = [workers.prepare(*case) for case in cases]
    by_rank = workers.run(runs[0].processes, groups_of_runs, [str(run.folder.path) for run in runs])
    for case, (first, *others) in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert all(other == first for other in others), case
        assert (first.early, first.late) == (False, 0), case
    return [made.groups for made in by_rank[0]]


def mesh(name: str, *ranks: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"mesh_{name}", group) for group in ranks]


def test_strategies_of_one_axis(workers: Workers) -> None:
    """An axis of all ranks uses the default group, so that only saves have a group of their own."""
    model = (*TEXT, *FOUR, "model.heads=4", "model.kv_heads=4", "model.layers=4")
    cases = [(*model, f"strategy={name}") for name in ("fsdp", "model")]
    served = (*model, "strategy=parameter_server", "strategy.dedicated_server=false")
    expected = [[SAVING], [SAVING, ("tied ends", (0, 3))], [SAVING]]
    assert agreed(workers, *cases, served) == expected


def test_a_dedicated_server_is_in_no_group_of_the_workers(workers: Workers) -> None:
    case = (
        *TEXT,
        *FOUR,
        "strategy=parameter_server",
        "strategy.dedicated_server=true",
        "training.global_batch_size=6",
    )
    assert agreed(workers, case) == [[SAVING, *mesh("replicate", (1, 2, 3))]]


def test_products(workers: Workers) -> None:
    inner, outer = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    cases = (
        (*TEXT, *FOUR, "strategy=hsdp"),
        (*TEXT, *FOUR, "strategy=hybrid"),
        (*TEXT, *FOUR, "strategy=expert", "strategy.expert=2", "strategy.replicate=2", "model=moe_tiny"),
        (*IMAGES, *FOUR, "strategy=data", "strategy.tile=2"),
        (*TEXT, *FOUR, "strategy=data", "strategy.context=2", *INFER),
    )
    assert agreed(workers, *cases) == [
        [SAVING, *mesh("replicate", *outer), *mesh("shard", *inner)],
        [SAVING, *mesh("pipeline", *outer), *mesh("tensor", *inner)],
        [SAVING, *mesh("replicate", *outer), *mesh("expert", *inner)],
        [SAVING, *mesh("replicate", *outer), *mesh("tile", *inner)],
        [*mesh("replicate", *outer), *mesh("context", *inner)],
    ]


def test_ends_of_pipelines_come_last(workers: Workers) -> None:
    layout = (*SIX, "strategy=pipeline", "strategy.pipeline=3", "strategy.replicate=2")
    stages = (*mesh("pipeline", (0, 2, 4), (1, 3, 5)), *mesh("replicate", (0, 1), (2, 3), (4, 5)))
    ends = [("tied ends", (0, 4)), ("tied ends", (1, 5))]
    assert agreed(workers, (*TEXT, *layout), (*TEXT, *layout, *INFER), (*TEXT, *layout, *GENERATE)) == [
        [("saving", (0, 1, 2, 3, 4, 5)), *stages, *ends],
        [*stages, *ends],
        list(stages),
    ]


def test_gradients_between_stages_have_a_group_in_two_way_schedules(workers: Workers) -> None:
    """One for each pipeline, before the ends, which only some ranks are in; none for inference."""
    layout = (*FOUR, "strategy=pipeline", "strategy.pipeline=2", "strategy.replicate=2", "model.layers=4")
    interleaved = (*TEXT, *layout, "strategy.schedule=interleaved")
    axes = (*mesh("pipeline", (0, 2), (1, 3)), *mesh("replicate", (0, 1), (2, 3)))
    back = [("gradients between stages", ranks) for ranks in ((0, 2), (1, 3))]
    assert agreed(workers, interleaved, (*interleaved, *INFER), (*TEXT, *layout)) == [
        [SAVING, *axes, *back],
        [*axes],
        [SAVING, *axes],
    ]
    three = (*SIX, "strategy=pipeline", "strategy.pipeline=3", "strategy.replicate=2", "model.layers=6")
    (made,) = agreed(workers, (*TEXT, *three, "strategy.schedule=interleaved"))
    assert [name for name, _ in made[-4:]] == ["gradients between stages"] * 2 + ["tied ends"] * 2


def sends_by_group(folder: str) -> tuple[int, int]:
    """Messages of a step in the group of the pipeline's axis and in that of gradients, after a first step."""
    config, _ = read_config(RunFolder(Path(folder)).config)
    opened = session.Session.open(config, device=torch.device("cpu"))
    known = {opened.groups.mesh["pipeline"].get_group(): 0, opened.groups.gradients: 0}

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator_name(function) == "c10d::send":
                known[group_of(operator_arguments(function, args, kwargs)["process_group"])] += 1
            return function(*args, **(kwargs or {}))

    tokens = torch.zeros(opened.plan.batch.samples_per_replica, 16, dtype=torch.int64)
    opened.assembled.forward_backward.train(tokens, tokens)
    with Noting():
        opened.assembled.forward_backward.train(tokens, tokens)
    activations, gradients = known.values()
    return activations, gradients


def test_gradients_travel_in_their_group(workers: Workers) -> None:
    """Four stages on two ranks, 4 microbatches: the stages 0 and 2 are on rank 0, 1 and 3 on rank 1."""
    run = workers.prepare(
        *TEXT, "nodes=2", "strategy=pipeline", "model.layers=4", "strategy.schedule=interleaved",
        "strategy.microbatches=4",
    )  # fmt: skip
    first, second = workers.run(2, sends_by_group, str(run.folder.path))
    assert first == (2 * 4, 1 * 4)
    assert second == (1 * 4, 2 * 4)


def test_joined_axes(workers: Workers) -> None:
    """The replicas of one stage are the ranks of two axes."""
    layout = ("strategy=pipeline", "strategy.pipeline=2", "strategy.replicate=2", "strategy.context=2")
    (made,) = agreed(
        workers, (*TEXT, "nodes=2", "gpus_per_node=4", *layout, "training.checkpoint_async=false")
    )
    assert made == [
        ("saving", tuple(range(8))),
        *mesh("pipeline", (0, 4), (1, 5), (2, 6), (3, 7)),
        *mesh("replicate", (0, 2), (1, 3), (4, 6), (5, 7)),
        *mesh("context", (0, 1), (2, 3), (4, 5), (6, 7)),
        *mesh("replicate_context", (0, 1, 2, 3), (4, 5, 6, 7)),
    ]


TIMES = ("cluster.collective_timeout_s=77", "cluster.checkpoint_timeout_s=99", "cluster.hang_timeout_s=40")
# A layout, and how many groups a rank of it has beside the default one and that of saves, at most.
GROUPS = {
    ("strategy=data",): 0,
    ("strategy=hsdp",): 2,
    ("strategy=hybrid",): 2,
    ("strategy=data", "strategy.context=2"): 2,
    ("strategy=expert", "strategy.expert=2", "strategy.replicate=2", "model=moe_tiny"): 2,
    ("strategy=model", "model.layers=4"): 1,  # the ends of the pipeline
    (
        "strategy=pipeline",
        "strategy.pipeline=2",
        "strategy.replicate=2",
        "strategy.schedule=interleaved",
    ): 3,  # one more for gradients between stages
    ("strategy=parameter_server", "training.global_batch_size=6"): 1,  # the workers
    ("strategy=fsdp", "strategy.context=2"): 2,  # both axes made one are all ranks
}


def timeouts_s(folders: list[str]) -> list[dict[str, list[float]]]:
    """Of the groups of this rank in each layout, as they are set: the default one, of saves, all others."""
    module = dist.distributed_c10d
    earlier = module.default_pg_timeout, module.default_pg_nccl_timeout
    found = []
    for folder in folders:
        config, _ = read_config(RunFolder(Path(folder)).config)
        before = set(module._world.pg_map)
        try:
            set_default_timeout(timedelta(seconds=config.cluster.collective_timeout_s))
            made = groups.make_groups(
                config, layout_of(config.strategy, devices=config.devices), device_type="cpu"
            )
        finally:
            module.default_pg_timeout, module.default_pg_nccl_timeout = earlier
        kinds: dict[str, list[float]] = {"default": [], "saving": [], "others": []}
        for group in module._world.pg_map:
            named = {id(dist.group.WORLD): "default", id(made.saving): "saving"}
            kind = named.get(id(group), "others")
            if group not in before or kind == "default":
                options = group._get_backend(torch.device("cpu")).options
                kinds[kind].append(options._timeout.total_seconds())
        found.append(kinds)
    return found


def test_every_group_of_every_layout(workers: Workers) -> None:
    folders = [str(workers.prepare(*FOUR, *TIMES, *layout).folder.path) for layout in GROUPS]
    of_ranks = workers.run(4, timeouts_s, folders)
    for layout, *kinds in zip(GROUPS, *of_ranks, strict=True):
        for found in kinds:
            assert found["default"] == [77.0], layout
            assert found["saving"] == [99.0], layout
            assert set(found["others"]) <= {77.0}, layout
        assert max(len(found["others"]) for found in kinds) == GROUPS[layout], layout
