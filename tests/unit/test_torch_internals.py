"""Each private symbol of torch does what hpc_parallel/torch_internals.py says of it."""

from __future__ import annotations

import ast
import inspect
import mmap
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemWriter,
    SavePlan,
    SavePlanner,
    filesystem,
)
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.serialization import config as serialization

from hpc_parallel import torch_internals
from hpc_parallel.failure import flight_recorder
from hpc_parallel.layout.schedules import SCHEDULES
from hpc_parallel.profiling.traffic import COLLECTIVES, KINDS, WITHOUT_BYTES, Traffic
from hpc_parallel.strategies import pipeline
from hpc_parallel.training.checkpoint import CheckpointWriter
from tests.oracle.fakes import fake_tensors, fake_world, memory_key, replicas_in_buckets

OF_TORCH = ("torch.", "dist.", "DeviceMesh.")
PACKAGE = Path(torch_internals.__file__).parent


@pytest.fixture
def fifth_of_eight() -> Iterator[None]:
    """A process group that sends nothing: enough for meshes."""
    with fake_world(5, size=8):
        yield


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """gloo with one rank."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_axes_are_joined(fifth_of_eight: None) -> None:
    mesh = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("replicate", "shard", "context"))
    slices = torch_internals.flatten(mesh["shard", "context"])
    assert (slices.size(), slices.get_local_rank()) == (4, 1)
    both = torch_internals.concatenate([mesh["replicate"], slices])
    assert both.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_weight_is_sliced_on_a_mesh_of_its_own(fifth_of_eight: None) -> None:
    """The classes that say so, as fully_shard takes them; test_expert.py has what it makes of them."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("shard", "expert"))
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(8, 6)) for name in "ab"})
    placements = torch_internals.slice_on(mesh["expert"], {module["a"]: 1})
    fully_shard(module, mesh=torch_internals.flatten(mesh), shard_placement_fn=placements)
    shapes = {name: weight.to_local().shape for name, weight in module.items()}  # type: ignore[operator]
    assert shapes == {"a": (8, 3), "b": (1, 6)}


def test_a_style_of_our_own_is_asked_to_split(fifth_of_eight: None) -> None:
    class Style(torch_internals.LayerStyle):
        def split(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            module.split_over = mesh.size()
            return module

    mesh = DeviceMesh("cpu", torch.arange(8), mesh_dim_names=("tensor",))
    assert parallelize_module(nn.Linear(2, 2), mesh, Style()).split_over == 8


def test_slices_of_unused_weights_get_zeros_that_can_be_dropped(alone: None) -> None:
    """As if another rank had used the weight: fully_shard reduces all gradients."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x)

    model: Any = fully_shard(Model(), mesh=DeviceMesh("cpu", [0]))
    gradients = torch_internals.SlicedGradients(model)
    for accumulates in (True, False):
        model.set_requires_gradient_sync(not accumulates)
        model(torch.ones(1, 2)).sum().backward()
    used, unused = model.used.weight, model.unused.weight
    assert used.grad.full_tensor().eq(2).all()
    assert not unused.grad.full_tensor().any()
    gradients.drop(gradients.used())
    assert used.grad is not None
    assert unused.grad is None
    assert gradients.used() == [False, False]  # since the last call


@pytest.mark.processes  # of the compiler
def test_compiled_code_wraps_integers() -> None:
    """The transposed numbers keep it from vectors, whose arithmetic wraps in any case."""

    def positive(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return torch.where(numbers * 0x7FEB352D > 0, x, -x)

    torch_internals.wrap_integers()
    torch_internals.wrap_integers()
    x = torch.ones(4, 32, 4, 4, dtype=torch.float64).transpose(1, 2)
    numbers = (torch.arange(4 * 4 * 32 * 4) * 987_654_321 % 2**31).int().view(4, 4, 32, 4)
    compiled = torch.compile(positive, fullgraph=True, dynamic=False)
    assert compiled(x, numbers).equal(positive(x, numbers))


def test_what_is_written_has_another_version() -> None:
    buffer = torch.zeros(2)
    before = torch_internals.version_of(buffer)
    assert torch_internals.version_of(buffer) == before
    buffer += 1
    assert torch_internals.version_of(buffer) > before


def test_the_profiler_is_seen_and_its_events_have_a_thread() -> None:
    assert not torch_internals.profiler_is_on()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        assert torch_internals.profiler_is_on()
        with record_function("here"):
            torch.ones(3).sum()
    (event,) = (event for event in torch_internals.profiler_events(profiled) if event.name() == "here")
    assert event.is_user_annotation()
    assert event.start_ns() < event.end_ns()
    assert event.start_thread_id() > 0
    assert event.device_type() == torch.autograd.DeviceType.CPU


def test_operators_have_names_and_arguments() -> None:
    add = torch.ops.aten.add_.Tensor
    one, two = torch.ones(1), torch.ones(1)
    assert torch_internals.operator_name(add) == "aten::add_"
    assert torch_internals.operator_name(len) is None
    assert torch_internals.operator_arguments(add, (one, two), {"alpha": 3}) == {
        "self": one, "other": two, "alpha": 3,
    }  # fmt: skip
    (written,) = torch_internals.written_arguments(add, (one, two))
    assert written is one
    assert torch_internals.written_arguments(torch.ops.aten.add.Tensor, (one, two)) == []


def test_every_collective_of_torch_has_a_rule() -> None:
    """But for those that neither hpc_parallel nor torch calls for it: they would be named as unknown."""
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    collectives = {name for name in names if name.startswith(COLLECTIVES) and not name.startswith("symm_mem")}
    others = {
        "_c10d_functional::batch_p2p_ops", "_c10d_functional::irecv", "_c10d_functional::isend",
        "_c10d_functional_autograd::all_gather_into_tensor", "_c10d_functional_autograd::all_to_all_single",
        "_c10d_functional_autograd::reduce_scatter_tensor", "c10d::gather_into_tensor_",
    }  # fmt: skip
    assert collectives - KINDS.keys() - WITHOUT_BYTES - others == set()
    assert KINDS.keys() - names == set()


def test_an_unknown_collective_is_named(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, "c10d::allreduce_")
    with Traffic() as traffic:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    assert traffic.unknown == {"c10d::allreduce_"}
    assert not traffic.sent


def test_a_group_is_found_by_itself_and_by_its_name(alone: None) -> None:
    world = dist.group.WORLD
    assert torch_internals.group_of(world) is world
    assert torch_internals.group_of(world.group_name).size() == 1


def test_buffers_can_be_exchanged() -> None:
    norm = torch_internals.BatchNorm(2)
    assert isinstance(nn.BatchNorm2d(2), torch_internals.BatchNorm)
    other = torch.full((2,), 7.0)
    torch_internals.buffers_of(norm)["running_mean"] = other
    assert norm.running_mean is other


def test_hooks_of_a_weight_are_seen() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = torch.nn.Parameter(torch.ones(3))
        assert not torch_internals.has_hooks(weight)
        hook = getattr(weight, register)(lambda gradient: None)
        assert torch_internals.has_hooks(weight)
        hook.remove()
        assert not torch_internals.has_hooks(weight)


def test_a_batch_norm_refuses_other_dims() -> None:
    with pytest.raises(ValueError, match="expected 4D input"):
        torch_internals.require_dims(nn.BatchNorm2d(2), torch.ones(2, 2))


def test_views_are_known() -> None:
    x = torch.ones(4)
    assert torch_internals.is_view(x.view(2, 2))
    assert not torch_internals.is_view(x.clone())


def test_the_limit_of_recompiles_only_rises() -> None:
    before = torch._dynamo.config.recompile_limit
    torch_internals.allow_recompiles(before + 1)
    torch_internals.allow_recompiles(1)
    assert torch._dynamo.config.recompile_limit == before + 1
    torch._dynamo.config.recompile_limit = before


def test_tensors_are_taken_together() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([[12.0]])]
    assert [norm.item() for norm in torch_internals.norms(tensors)] == [5.0, 12.0]
    torch_internals.scale(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[6.0, 8.0], [[24.0]]]
    torch_internals.copy_into(tensors, targets := [torch.zeros(2), torch.zeros(1, 1)])
    assert [target.tolist() for target in targets] == [[6.0, 8.0], [[24.0]]]


def test_torch_writes_no_checksums_meanwhile() -> None:
    assert serialization.save.compute_crc32
    with torch_internals.without_checksums():
        assert not serialization.save.compute_crc32
    assert serialization.save.compute_crc32


def test_torch_reads_the_variables_that_are_set() -> None:
    """The wheels of torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 have the same names."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    recorder = (headers / "FlightRecorder.hpp").read_text()
    assert '{"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}' in recorder
    nccl = (headers / "ProcessGroupNCCL.hpp").read_text()
    assert '"TORCH_NCCL_DUMP_ON_TIMEOUT"' in nccl
    assert '"TORCH_NCCL_ENABLE_TIMING"' in nccl
    assert flight_recorder._PIPE == "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    for text in (flight_recorder._PIPE, 'c10::str(fileStem, rank, ".pipe")', "O_RDONLY | O_NONBLOCK"):
        assert text in nccl
    with (Path(torch.__file__).parent / "lib/libtorch_cpu.so").open("rb") as library:
        code = mmap.mmap(library.fileno(), 0, access=mmap.ACCESS_READ)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        assert code.find(name.encode() + b"\0") >= 0
    assert list(flight_recorder._VARIABLES) == [
        "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_ENABLE_TIMING",
    ]  # fmt: skip


def plan(key: str, state: dict[str, torch.Tensor]) -> SavePlan:
    """What a rank sends to the coordinator; the save then goes on to its end."""
    planner = torch_internals.planner_with_memory(key)
    planner.set_up_planner(state, is_coordinator=True)
    local = planner.create_local_plan()
    planner.finish_plan(planner.create_global_plan([local])[0][0])
    return local


def test_an_equal_plan_is_not_sent_again() -> None:
    state = {"weights/a": torch.ones(3)}
    other = {"weights/a": torch.ones(4)}
    assert [item.index.fqn for item in plan("run 1", state).items] == ["weights/a"]
    again = plan("run 1", {"weights/a": torch.zeros(3)})
    assert (again.items, again.usable) == ([], False)
    assert plan("run 2", state).usable
    assert plan("run 1", other).usable
    torch_internals.forget_plans("run 1")
    assert plan("run 1", other).usable
    for key in ("run 1", "run 2"):
        torch_internals.forget_plans(key)
    assert not any("run" in key for key in SavePlanner._cached_save_plan)


def test_a_distributed_tensor_takes_other_local_values(fifth_of_eight: None) -> None:
    mesh = dist.init_device_mesh("cpu", (8,))
    shard = distribute_tensor(torch.zeros(8), mesh, [Shard(0)], src_data_rank=None)
    local = torch.ones(1)
    copy = torch_internals.with_local(shard, local)
    assert copy.to_local().data_ptr() == local.data_ptr()
    assert (copy.shape, copy.placements, copy.device_mesh) == (shard.shape, shard.placements, mesh)


@pytest.mark.parametrize("left", [False, True])
def test_averaging_is_left_to_the_caller(alone: None, left: bool) -> None:
    averaged = []
    replica = DistributedDataParallel(nn.Linear(2, 1))

    def average(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged.append(bucket.index())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # Through a lambda: torch refuses annotations that are strings.
    replica.register_comm_hook(None, lambda state, bucket: average(bucket))
    if left:
        torch_internals.leave_averaging_to_the_caller(replica)
    replica(torch.ones(1, 2)).sum().backward()
    assert averaged == ([] if left else [0])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_update_is_held_by_a_flag(kind: type[torch.optim.Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.5, fused=True)  # type: ignore[call-arg]
    flag = torch.ones(())
    torch_internals.hold_updates_by(flag, optimizer)
    weight.grad = torch.full((3,), torch.nan)
    optimizer.step()
    assert weight.tolist() == [1, 1, 1]
    weight.grad = torch.ones(3)
    flag.zero_()
    optimizer.step()
    assert max(weight.tolist()) < 1


def test_an_optimizer_that_ignores_the_flag_is_refused() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters: list[nn.Parameter], lr: float = 0.1) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for weight in group["params"]:
                    weight -= group["lr"] * weight.grad

    weight = nn.Parameter(torch.ones(3))
    for optimizer in (Plain([weight]), torch.optim.AdamW([weight], fused=False)):
        with pytest.raises(RuntimeError, match="ignores found_inf, so NaN would reach the weights"):
            torch_internals.hold_updates_by(torch.ones(()), optimizer)


class Nested(torch.autograd.Function):
    """Its backward pass runs another one: past 60 of them, autograd goes on in a thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.depth:
            with torch.enable_grad():
                Nested.apply(torch.ones(2, requires_grad=True), ctx.depth - 1).sum().backward()
        return gradient, None


def test_a_dispatch_mode_sees_what_autograds_own_threads_call() -> None:
    """So collectives of a backward pass on a GPU, which runs in such a thread, are counted."""
    threads = set()

    class Watch(torch_internals.DispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            threads.add(threading.get_ident())
            return function(*args, **(kwargs or {}))

    with Watch():
        Nested.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
    assert threads > {threading.get_ident()}


def test_a_dump_of_torch_tells_what_a_rank_has_queued(alone: None, tmp_path: Path) -> None:
    """gloo's, in the form in which NCCL writes its own."""
    from torch._C import _distributed_c10d as c10d

    earlier = len(torch_internals.flight_recorder_entries())
    dist.all_reduce(torch.ones(3, 5))
    dist.broadcast(torch.ones(3), src=0)
    made = flight_recorder.DumpRequest(pipe=tmp_path / "none", dump=tmp_path / "dump")
    made.dump.write_bytes(c10d._dump_fr_trace().replace(b"gloo:", b"nccl:"))
    entries = torch_internals.flight_recorder_entries()
    group = " ".join(entries[-1]["process_group"])
    progress = made.answer()
    assert len(entries) == earlier + 2
    assert progress.queued[group] == entries[-1]["collective_seq_id"]


def test_the_flight_recorder_lists_started_collectives(alone: None) -> None:
    dist.all_reduce(torch.ones(3, 5))
    (ranks,) = torch_internals.process_groups().values()
    assert ranks == [0]
    entry = torch_internals.flight_recorder_entries()[-1]
    assert entry["profiling_name"] == "gloo:all_reduce"
    assert entry["input_sizes"] == [[3, 5]]
    assert entry["process_group"][0] in torch_internals.process_groups()
    assert {"time_created_ns", "collective_seq_id"} <= entry.keys()


def test_replicas_ignore_the_parameters_that_are_left_out(alone: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch_internals.leave_out_of_replicas(model, ["1.weight"])
    replica = nn.parallel.DistributedDataParallel(model)
    replica(torch.ones(1, 2)).sum().backward()
    assert replica.parameters_to_ignore == {"1.weight"}
    bucketed = sum(weight.numel() for weight in replica._module_parameters)
    assert bucketed == sum(weight.numel() for weight in model.parameters()) - 4


def test_replicas_have_small_buckets_in_the_first_step(alone: None) -> None:
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for small, seen in sizes.items():
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
        with replicas_in_buckets(2 * 8 * 8 * 4) if small else nullcontext():
            replica = nn.parallel.DistributedDataParallel(model)
        replica.register_comm_hook(seen, lambda seen, bucket: _note_size(seen, bucket))
        replica(torch.ones(1, 8)).sum().backward()
    assert sizes == {True: [128, 128], False: [256]}


def _note_size(seen: list[int], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    seen.append(bucket.buffer().numel())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_overridden_methods_still_exist() -> None:
    methods = {
        "forward_one_chunk": "fwd_chunk_id", "backward_one_chunk": "bwd_chunk_id",
        "backward_weight_one_chunk": "bwd_chunk_id", "get_local_bwd_output": "mb_index",
        "set_local_bwd_input": "next_stage_bwd_outputs", "perform_reduce_grad": "grad_scale_factor",
    }  # fmt: skip
    for name, first in methods.items():
        assert list(inspect.signature(getattr(PipelineStage, name)).parameters)[1] == first, name
    assert "last_backward" in inspect.signature(PipelineStage.backward_one_chunk).parameters
    assert {"create_stream", "rename"} <= vars(FileSystem).keys()


def test_a_save_copies_nothing_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU torch would take a loader that uses the stream of GPU 0, and opens a context on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("copies ahead")

    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refuse)
    folder = tmp_path / ".step-1"
    state = {"weight": torch.arange(3.0)}
    writer = CheckpointWriter(folder, folder=tmp_path, step=1, about={}, prune=lambda: None)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer._files.written
    with pytest.raises(CheckpointException, match="copies ahead"):
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "other"), no_dist=True)


def test_a_checkpoint_is_written_through_its_file_system(tmp_path: Path) -> None:
    assert type(FileSystemWriter(tmp_path).fs) is FileSystem


def test_no_other_module_uses_private_symbols_of_torch() -> None:
    """By the names of what is imported from torch, and of attributes of `torch` and `dist`."""
    private = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith(OF_TORCH):
                names = [node.attr]
            if any(name.startswith("_") and not name.startswith("__") for name in names):
                private.append(f"{file.relative_to(PACKAGE)}: {ast.unparse(node)}")
    assert [use for use in private if not use.startswith("torch_internals.py")] == []
    assert len(private) > 5, private


def test_a_fake_world_has_one_rank_and_sends_nothing() -> None:
    """A tensor of 2^40 bytes goes through a collective of 1,024 ranks without memory."""
    with fake_world(7, size=1024), fake_tensors():
        assert (dist.get_rank(), dist.get_world_size()) == (7, 1024)
        shard = torch.zeros(2**28)
        whole = torch.zeros(2**38)
        dist.all_gather_into_tensor(whole, shard)
        assert whole.untyped_storage().nbytes() == 2**40
    assert not dist.is_initialized()


def test_tensors_that_share_memory_have_one_key() -> None:
    with fake_tensors():
        tensor = torch.zeros(4, 4)
        assert memory_key(tensor) == memory_key(tensor.T[1:])
        assert memory_key(tensor) != memory_key(tensor.clone())


def test_schedules_that_batch_activations_with_gradients_are_known() -> None:
    """A batch runs on the group of its first message, so only the others may have two groups."""
    for name, rules in SCHEDULES.items():
        assert torch_internals.sends_apart(pipeline.KINDS[name]) == rules.two_way, name
