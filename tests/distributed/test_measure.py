"""What is measured on a few steps: bytes against closed forms, waits against a clock, and no trace after."""

from __future__ import annotations

import contextlib
import copyreg
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._prims.rng_prims import run_and_save_rng_state
from torch.distributed import Work
from torch.distributed import _functional_collectives as functional
from torch.distributed._functional_collectives import all_reduce
from torch.nn import Linear
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from hpc_parallel.profiling import measurement, rank_times
from hpc_parallel.profiling.timeline import STEP, Timeline, events_of, marked_waits
from hpc_parallel.profiling.traffic import Traffic
from hpc_parallel.record.metrics_file import MetricsReader
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.strategies.pipeline import Stage
from hpc_parallel.training import replicas
from tests.marks import in_full
from tests.matrix import TEXTS
from tests.parity import COMMON
from tests.workers import Train, Workers, train_here

DIM, HIDDEN, VOCABULARY, BATCH, LENGTH = 64, 160, 256, 16, 32
BLOCK = 3 * DIM * DIM + 3 * DIM * HIDDEN + 2 * DIM  # kv_heads are half of heads
ROOT = VOCABULARY * DIM + DIM  # what fully_shard keeps gathered from forward to backward
SHALLOW, DEEP = (layers * BLOCK + ROOT for layers in (2, 4))
FLOAT = 8  # bytes
SHORT = (*(word for word in COMMON if not word.startswith("training.")), "training.global_batch_size=16",
         "training.steps=5", "training.validation_samples=32", "optimizer.warmup_steps=1")  # fmt: skip


def summary(workers: Workers, *words: str) -> dict[str, Any]:
    return workers.train(*SHORT, *words).summary


def ring(ranks: int, amount: float) -> float:
    """Sent by all ranks for an all-gather or a reduce-scatter of `amount` numbers."""
    return (ranks - 1) * amount * FLOAT


NORM = 2 * ring(2, 1)  # of the gradient
CLOSED_FORMS = {
    "one device": {},
    "data over 2": {"all_reduce": 2 * ring(2, DEEP)},
    "fsdp over 2": {
        "all_gather": ring(2, 2 * SHALLOW - ROOT),
        "reduce_scatter": ring(2, SHALLOW),
        "all_reduce": NORM,
    },
    "pipeline of 2 ranks, 1f1b": {
        "send": 2 * BATCH * LENGTH * DIM * FLOAT,  # there and back
        "all_reduce": NORM + 2 * ring(2, VOCABULARY * DIM),  # and the tied weight's gradient
    },
}
COMPILED = ("training.compile=true", "training.activation_checkpointing=full")
MORE = {
    "one device, compiled": ("one device", COMPILED, {}),
    "data over 2, compiled": ("data over 2", COMPILED, CLOSED_FORMS["data over 2"]),
    "data over 4": ("data over 4", (), {"all_reduce": 2 * ring(4, DEEP)}),
    "fsdp over 2, gathered to the end": (
        "fsdp over 2, gathered to the end", (),
        CLOSED_FORMS["fsdp over 2"] | {"all_gather": ring(2, SHALLOW)},
    ),
    "untied stages": (
        "pipeline of 2 ranks, 1f1b", ("model.tied_head=false",),
        CLOSED_FORMS["pipeline of 2 ranks, 1f1b"] | {"all_reduce": NORM},
    ),
}  # fmt: skip
CASES = [*((layout, (), form) for layout, form in CLOSED_FORMS.items()), *in_full(MORE.values())]


@pytest.mark.parametrize(("layout", "words", "form"), CASES)
def test_traffic_is_the_closed_form(
    trained: Train, layout: str, words: tuple[str, ...], form: dict[str, float]
) -> None:
    found = trained(*TEXTS[layout], *words).summary
    assert found["traffic"] == form
    assert found["traffic_bytes"] == sum(form.values())
    devices = found["world_size"]
    assert found["busiest_rank_traffic_bytes"] == 2 * found["traffic_bytes"] / devices  # all do alike


def test_watched_steps_do_not_count_in_the_speed(workers: Workers) -> None:
    trained = workers.train(*SHORT, "strategy=single", "training.steps=7", "training.log_every=1")
    assert [line["timed_steps"] for line in trained.lines] == [1, 1, 0, 0, 0, 1, 1]
    timed = [line["step_time_s"] for line in trained.lines]
    assert timed[2:5] == [timed[1]] * 3
    found = trained.summary
    assert found["step_time_s"] == sorted((timed[1], *timed[5:]))[1]
    assert found["samples_per_s"] == pytest.approx(BATCH / found["step_time_s"])


def test_halos_of_tiles(workers: Workers) -> None:
    """Each border's rows go both ways, and their gradients back, except the image's own."""
    words = ("model=segmenter", "model.channels=[4,8]", "data=cells", "data.height=32", "data.width=16")
    trained = workers.train(*words, "strategy=tile", "nodes=2", "strategy.tile_grid=[2,1]",
                            "training.steps=3", "training.global_batch_size=16")  # fmt: skip
    rows = 1 * 16 + 2 * 4 * 8  # [channel x width] of each convolution's input: the image; both passes
    assert trained.summary["traffic"]["all_to_all"] == 2 * BATCH * rows * 4


def test_short_runs_measure_fewer_steps(workers: Workers) -> None:
    keys = ("traffic", "bubble_share", "exposed_communication_share")
    for steps, measured in ((2, []), (3, keys[:1]), (4, keys)):
        found = summary(workers, "strategy=single", f"training.steps={steps}")
        assert [key for key in keys if found[key] is not None] == [*measured]
    off = summary(workers, "strategy=single", "training.measure_steps=0")
    assert [off[key] for key in keys] == [None] * 3


def test_one_device_has_no_communication_time(workers: Workers) -> None:
    found = summary(workers, "strategy=single")
    assert (found["exposed_communication_share"], found["bubble_share"]) == (0.0, 0.0)
    parts = found["step_parts_s"]
    assert (parts["communication"], parts["bubble"]) == (0.0, 0.0)
    assert parts["compute"] > parts["other"] > 0
    assert parts["data"] > 0


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        *in_full([
            (("strategy=pipeline", "strategy.schedule=1f1b"), ("forward", "backward")),
            (("strategy=model", "strategy.microbatches=4"), ("forward", "backward")),
        ]),
        (
            ("strategy=pipeline", "strategy.schedule=interleaved_zero_bubble"),
            ("forward", "backward", "weights"),
        ),
    ],
    ids=["1f1b", "naive", "zero bubble"],
)  # fmt: skip
def test_a_pipelines_timeline_has_every_chunk_once(
    workers: Workers, options: tuple[str, ...], kinds: tuple[str, ...]
) -> None:
    """Of the first pipeline alone, each microbatch through each stage, and not before it could go there."""
    words = (*SHORT, "nodes=2", "gpus_per_node=2", "strategy.pipeline=2", "strategy.replicate=2")
    many = ("strategy.microbatches=4",) if "strategy=pipeline" in options else ()
    folder = workers.train(*words, *options, *many).folder
    chart = json.loads((folder / "timeline.json").read_text())
    ranks = {rank["rank"]: rank for rank in chart["ranks"]}
    assert sorted(ranks) == [0, 2]  # pipeline is the outer axis
    ends: dict[tuple[int, str, int], tuple[float, float]] = {}
    for rank in ranks.values():
        for start, end, stage, kind, microbatch in rank["chunks"]:
            assert 0 <= start < end <= rank["length_s"]
            if microbatch is not None:
                assert (stage, kind, microbatch) not in ends
                ends[stage, kind, microbatch] = start, end
    stages = 1 + max(stage for stage, _, _ in ends)
    assert stages == (4 if "weights" in kinds else 2)
    expected = {
        (stage, kind, m) for stage in range(stages) for kind in ("forward", "backward") for m in range(4)
    }
    assert {key for key in ends if key[1] != "weights"} == expected
    assert {kind for _, kind, _ in ends} == set(kinds)
    together_s = 0.02  # ranks leave the barrier that a step starts with: not at the same instant
    for stage in range(stages - 1):
        for m in range(4):
            assert ends[stage, "forward", m][1] < ends[stage + 1, "forward", m][1] + together_s
            assert ends[stage + 1, "backward", m][1] < ends[stage, "backward", m][1] + together_s


@pytest.mark.parametrize("strategy", ["pipeline", *in_full([("fsdp",), ("data",), ("tensor",)])])
def test_measuring_changes_no_result(workers: Workers, strategy: str) -> None:
    words = (*SHORT, f"strategy={strategy}", "nodes=2", "model.layers=2", "training.log_every=1")
    watched, plain = (workers.train(*words, f"training.measure_steps={steps}") for steps in (2, 0))
    assert watched.losses == plain.losses
    assert all((watched.weights[name] == weight).all() for name, weight in plain.weights.items())
    assert all(line["step_time_s"] > 0 for line in watched.lines)
    times = [line["step_time_s"] for line in watched.lines]
    assert times[1] == times[2] == times[3] == times[4]  # 3 to 5 were watched: they say nothing of the others


def _trained_without_measurements(folder: str) -> tuple[list[float], str]:
    """The losses of a training whose measurements all fail on some rank, and what rank 1 prints."""

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("No space\nleft on device")

    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(rank_times, "FIRST_STEP", 6))
        stack.enter_context(mock.patch.object(rank_times, "COST", 1e9))
        stack.enter_context(mock.patch.object(rank_times, "LEAST_STEPS", 1))
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(measurement, "events_of", fails))
            stack.enter_context(mock.patch.object(replicas, "checksums", fails))
            stack.enter_context(contextlib.redirect_stderr(printed))
        train_here(folder, {})
    return [
        line["loss"] for line in MetricsReader(RunFolder(Path(folder)).metrics).read()
    ], printed.getvalue()


def test_a_measurement_that_fails_on_one_rank_is_left_out(workers: Workers) -> None:
    words = (*SHORT, "strategy=pipeline", "nodes=2", "strategy.microbatches=2", "model.layers=2",
             "training.steps=8", "training.log_every=1")  # fmt: skip
    run = workers.prepare(*words)
    (losses, _), (_, printed) = workers.run(2, _trained_without_measurements, str(run.folder.path))
    assert losses == workers.train(*words).losses
    reason = "(OSError: No space left on device); the training goes on\n"
    lines = [f"WARNING: the comparison of replicas is left out {reason}"]
    lines += [f"WARNING: the times of a step are left out {reason}"] * 5  # 4 and 5, then 6, 7 and 8
    assert printed == "".join(lines)
    found = json.loads(run.folder.summary.read_text())
    keys = ("exposed_communication_share", "bubble_share", "step_parts_s")
    assert [found[key] for key in keys] == [None] * 3
    assert found["traffic_bytes"] > 0
    assert not (run.folder.path / "timeline.json").exists()
    assert not run.folder.rank_times.exists()


def test_operators_that_run_others_are_called_or_named() -> None:
    """Compiled code keeps the generator's state for dropout and for attention."""
    ones = torch.ones(3)
    with Traffic() as traffic:
        state, drawn = run_and_save_rng_state(torch.ops.aten.rand_like.default, ones, device="cpu")
        torch.set_rng_state(state)
        assert torch.equal(drawn, torch.rand(3))
        assert traffic.unknown == set()
        (more,) = torch.ops.higher_order.cond(torch.tensor(True), lambda x: (x + 1,), lambda x: (x,), (ones,))
    assert more.tolist() == [2.0] * 3
    assert traffic.unknown == {"higher_order::cond"}


def _left_behind(folder: str) -> list[str]:
    """What a session with measured steps has changed in torch or in our own classes."""
    watched = (Work, Stage, torch.Tensor)
    for kind in watched:
        copyreg._slotnames(kind)  # type: ignore[attr-defined]  # pickle keeps this name on each class it meets
    attributes_before = {kind: dict(vars(kind)) for kind in watched}
    train_here(folder, {})
    changed = [
        f"{kind.__name__}.{name}"
        for kind, before in attributes_before.items()
        for name in {*before, *vars(kind)}
        if vars(kind).get(name) is not before.get(name)
    ]
    modes = [str(mode) for mode in _get_current_dispatch_mode_stack()]
    return changed + modes + ["profiler"] * torch.autograd._profiler_enabled()


def test_nothing_stays_behind(workers: Workers) -> None:
    run = workers.prepare(*SHORT, "strategy=pipeline", "nodes=2")
    assert workers.run(2, _left_behind, str(run.folder.path)) == [[], []]


SLEEP_S = 0.4


def _waited(job: Callable[[int], float]) -> tuple[float, float]:
    """Seconds that the timeline says this rank waited in `job`, and those that the job itself timed."""
    with marked_waits(), profile(activities=[ProfilerActivity.CPU]) as profiled:
        dist.barrier()
        with record_function(STEP):
            timed_s = job(dist.get_rank())
    return Timeline.read(events_of(profiled), on_gpu=False).exposed(None) / 1e9, timed_s


def _collective(rank: int) -> float:
    time.sleep(SLEEP_S * rank)
    started = time.perf_counter()
    dist.all_reduce(torch.ones(10))
    return time.perf_counter() - started


def _functional(rank: int) -> float:
    time.sleep(SLEEP_S * rank)
    started = time.perf_counter()
    all_reduce(torch.ones(10), "sum", dist.group.WORLD) + 1
    return time.perf_counter() - started


def _data_parallel(rank: int) -> float:
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    loss = model(torch.ones(2, 10)).sum()
    time.sleep(SLEEP_S * rank)
    started = time.perf_counter()
    loss.backward()
    return time.perf_counter() - started


def _buckets(rank: int) -> float:
    """The second bucket is as late as the first: a rank that is early waits for each."""
    layers = Linear(600, 600), Linear(600, 600)  # one alone fills a bucket of 1 MiB
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=1, find_unused_parameters=True
    )  # the last: or all of the first step is one bucket
    layers[1].register_full_backward_hook(lambda *_: time.sleep(SLEEP_S * rank))
    loss = model(torch.ones(2, 600)).sum()
    time.sleep(SLEEP_S * rank)
    started = time.perf_counter()
    loss.backward()
    return time.perf_counter() - started


def _hidden(rank: int) -> float:
    """The collective of `_collective`, with something else to do until it is done."""
    time.sleep(SLEEP_S * rank)
    work = dist.all_reduce(torch.ones(10), async_op=True)
    time.sleep(2 * SLEEP_S * (1 - rank))
    started = time.perf_counter()
    work.wait()
    return time.perf_counter() - started


@pytest.mark.timing
@pytest.mark.parametrize("job", [_collective, _functional, _data_parallel])
def test_a_wait_for_a_late_rank_is_seen(workers: Workers, job: Callable[[int], float]) -> None:
    (early_s, timed_s), (late_s, _) = workers.run(2, _waited, job)
    assert SLEEP_S / 2 < early_s <= timed_s
    assert late_s < SLEEP_S / 2


@pytest.mark.timing
def test_the_wait_for_each_bucket_is_seen(workers: Workers) -> None:
    (early_s, timed_s), (late_s, _) = workers.run(2, _waited, _buckets)
    assert 1.5 * SLEEP_S < early_s <= timed_s
    assert late_s < SLEEP_S / 2


@pytest.mark.timing
def test_a_hidden_collective_is_not_seen(workers: Workers) -> None:
    (early_s, timed_s), _ = workers.run(2, _waited, _hidden)
    assert early_s <= timed_s + 1e-3
    assert early_s < SLEEP_S / 2


def _moved() -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Bytes that this rank sends and receives in each collective on 10 float32, of 3 ranks."""
    rank, ten = dist.get_rank(), torch.ones(10)
    thirty = torch.ones(30)
    pieces = list(thirty.chunk(3))
    jobs = {
        "all_reduce": lambda: dist.all_reduce(ten),
        "all_gather": lambda: dist.all_gather(pieces, ten),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(thirty, ten),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(ten, thirty),
        "broadcast": lambda: dist.broadcast(ten, src=1),
        "reduce": lambda: dist.reduce(ten, dst=1),
        "gather": lambda: dist.gather(ten, pieces if rank == 1 else None, dst=1),
        "scatter": lambda: dist.scatter(ten, pieces if rank == 1 else None, src=1),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(30), thirty),
        "all_to_all_single, uneven": lambda: dist.all_to_all_single(
            torch.empty(3 * (rank + 1)), torch.ones(6), [rank + 1] * 3, [1, 2, 3]
        ),
        "send": lambda: dist.send(ten, dst=1) if rank == 0 else dist.recv(ten, src=0) if rank == 1 else None,
        "functional all_reduce": lambda: functional.all_reduce(ten, "sum", dist.group.WORLD) + 1,
        "functional all_gather": lambda: functional.all_gather_tensor(ten, 0, dist.group.WORLD) + 1,
        "functional reduce_scatter": lambda: functional.reduce_scatter_tensor(
            thirty, "sum", 0, dist.group.WORLD
        ) + 1,
        "functional all_to_all, uneven": lambda: functional.all_to_all_single(
            torch.ones(6), [rank + 1] * 3, [1, 2, 3], dist.group.WORLD
        ) + 1,
        "barrier": lambda: dist.barrier(),
    }  # fmt: skip
    found = {}
    for name, job in jobs.items():
        with Traffic() as traffic:
            job()
        job()  # not counted any more
        found[name] = dict(+traffic.sent), dict(+traffic.received)
    return found


EVENLY = [(80, 80)] * 3
UNEVEN = [(20, 8), (16, 16), (12, 24)]  # of 1, 2 and 3 numbers for the ranks, all but one's own
KINDS = {
    # name: (kind, (sent, received) of each rank)
    "all_reduce": ("all_reduce", [(53, 53)] * 3),  # 2 x 2/3 x 40
    "all_gather": ("all_gather", EVENLY),
    "all_gather_into_tensor": ("all_gather", EVENLY),
    "reduce_scatter_tensor": ("reduce_scatter", EVENLY),
    "broadcast": ("broadcast", [(0, 40), (80, 0), (0, 40)]),
    "reduce": ("reduce", [(40, 0), (0, 80), (40, 0)]),
    "gather": ("gather", [(40, 0), (0, 80), (40, 0)]),
    "scatter": ("scatter", [(0, 40), (80, 0), (0, 40)]),
    "all_to_all_single": ("all_to_all", EVENLY),
    "all_to_all_single, uneven": ("all_to_all", UNEVEN),
    "send": ("send", [(40, 0), (0, 40), (0, 0)]),
    "functional all_reduce": ("all_reduce", [(53, 53)] * 3),
    "functional all_gather": ("all_gather", EVENLY),
    "functional reduce_scatter": ("reduce_scatter", EVENLY),
    "functional all_to_all, uneven": ("all_to_all", UNEVEN),
    "barrier": ("barrier", [(0, 0)] * 3),
}


def test_each_collective_counts(workers: Workers) -> None:
    by_rank = workers.run(3, _moved)
    for name, (kind, expected) in KINDS.items():
        found = [of_rank[name] for of_rank in by_rank]
        assert [(sent.get(kind, 0), received.get(kind, 0)) for sent, received in found] == expected, name
        assert all({*sent, *received} <= {kind} for sent, received in found), name
