"""The entry point of every rank under every launcher: join the other ranks, run the task, record failures.

python -m hpc_parallel.worker.main RUN_FOLDER
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

if __name__ == "__main__":
    gc.disable()  # collecting garbage would take a fifth of the start, and imports leave none

import torch
import torch.distributed as dist

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.failure import failure, flight_recorder, standby
from hpc_parallel.layout.layout import processes_per_node
from hpc_parallel.machine import fabric, torch_variables
from hpc_parallel.machine.topology import nvml_module
from hpc_parallel.machine.world import World
from hpc_parallel.machine.xids import XidEvents
from hpc_parallel.problems import print_warning
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.slurm.allocation import ALLOCATION
from hpc_parallel.start import start_checks
from hpc_parallel.start.join import join
from hpc_parallel.training.observers import Progress
from hpc_parallel.worker import rank_files, stop
from hpc_parallel.worker.rank_files import redirect
from hpc_parallel.worker.session import LAYOUT_CHECK, PROFILERS, TaskContext, phases_of, read_config
from hpc_parallel.worker.watchdog import watch

TASKS = {
    "train": "hpc_parallel.worker.train:train",
    "infer": "hpc_parallel.worker.inference:infer",
    "generate": "hpc_parallel.worker.generation:generate",
    "proof": "hpc_parallel.proof.task:prove",
    "collectives": "hpc_parallel.measure.collectives:measure_collectives",
    "preflight": "hpc_parallel.measure.preflight_task:check_machine",
    "calibrate": "hpc_parallel.measure.calibrate:calibrate",
}
"""What runs for each name in conf/task/. A rank imports its own task only."""
OF_TRAINING = (TASKS["train"], LAYOUT_CHECK, PROFILERS)  # what a training looks up by name
WATCHED = ("train", "infer", "generate")


def main(run_folder: str) -> int:
    """Run the task of this rank and return the exit code. A failure is recorded in the run folder."""
    folder = RunFolder(Path(run_folder))
    world = World.discover(os.environ)
    redirect(folder, rank=world.rank)
    # submitit makes Slurm send SIGUSR2 before the time limit. By default the signal ends the process at once.
    signal.signal(signal.SIGUSR2, stop.remember)
    stop.show_place_at_sigterm()  # until the training sets its own handler
    os.register_at_fork(after_in_child=stop.forget_handlers)
    xids, marks = None, Progress()
    try:
        config, values = read_config(folder.config)
        task: Callable[[TaskContext], object] = resolve_name(TASKS[config.task.name])
        require_devices(config, world)
        reasons = fabric.site_variables(config.cluster.environment, os.environ)
        reasons |= fabric.use_scratch(config.cluster.scratch, os.environ, host=world.host)
        reasons |= flight_recorder.set_variables(folder, os.environ)
        warn_of_limits(world)
        if config.training.compile:
            reasons |= torch_variables.use_compiler_cache(folder, os.environ)
        own_slice = fabric.use_own_slice(os.environ, world=world) if config.device != "cpu" else {}
        if config.device != "cpu" and torch.cuda.is_available():
            reasons |= torch_variables.use_expandable_segments(os.environ)
        if config.training.deterministic:
            reasons |= torch_variables.use_fixed_workspaces(os.environ)
        device = prepare_device(config, world, bound=bool(own_slice))
        reasons |= own_slice or share_gpu(device, world=world)
        if world.rank == 0 and (problem := unused_gpus(config, device, host=world.host)) is not None:
            print_warning(problem)
        fabric.require_interfaces(os.environ, host=world.host, nccl=device.type == "cuda")
        xids = XidEvents(nvml_module(), start_checks.gpu_uuid(device))
        on_phase = phases_of(folder, rank=world.rank)
        on_phase(f"connecting {world.world_size} rank{'s' * (world.world_size > 1)}")
        store = join(folder, config=config, world=world, device=device, reasons=reasons)
        on_phase("checks of the hosts")
        start_checks.check(folder, config=config, world=world, device=device, xids=xids)
        watched = watch(
            folder, world=world, timeout_s=config.cluster.hang_timeout_s, store=store,
            compiles=config.training.compile,
        )  # fmt: skip
        with watched as progress:
            marks = progress if config.task.name in WATCHED else marks
            task(TaskContext(config, values, folder, device, os.environ, marks))
        dist.destroy_process_group()
    except BaseException as error:
        marks.locate(error)
        failure.record_exception(
            folder, world=world, error=error, collectives=flight_recorder.entered(marks.begun),
            xids=xids.new() if xids is not None else (),
        )  # fmt: skip
        report(error)
        return 1
    return 0


def warn_of_limits(world: World) -> None:
    """Let this rank open as many files as the system allows, and warn on each host if these are too few."""
    problem = rank_files.shortage(rank_files.raise_limit(), world)
    if problem is not None and world.local_rank == 0:
        print_warning(problem)


def report(error: BaseException) -> None:
    """Print the traceback, or only the message if no code is to blame."""
    kind, source = failure.kind_and_source(error)
    if kind in failure.WITHOUT_CODE:
        print(source, file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def require_devices(config: RunConfig, world: World) -> None:
    """Raise RuntimeError if the launcher did not start as many ranks as the configuration needs."""
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    world_size = config.nodes * per_node
    if world.world_size != world_size:
        raise RuntimeError(
            f"{world.launcher} started {world.world_size} ranks, but nodes={config.nodes} x "
            f"gpus_per_node={config.gpus_per_node} needs {world_size}, {per_node} per node"
        )


def prepare_device(config: RunConfig, world: World, *, bound: bool = False) -> torch.device:
    """Make this rank's (first) device current and set the number of CPU threads; returns the device.

    bound: whether the rank sees its own slice of a GPU only.
    """
    per_node = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
    name = fabric.choose_device(
        config.device,
        world=world,
        visible=torch.cuda.device_count(),
        available=torch.cuda.is_available(),
        devices=config.gpus_per_node // per_node,
        bound=bound,
    )
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # by default torch's convolutions use TF32: 11 of 24 bits
    if config.training.deterministic:
        use_deterministic_kernels()
    torch.set_num_threads(fabric.cpu_threads(world, os.environ))
    return device


def unused_gpus(config: RunConfig, device: torch.device, *, host: str) -> str | None:
    """A warning if the job asked for GPUs and torch finds none, so that it trains without them; else None."""
    wants_gpus = config.launcher.kind in ("slurm", ALLOCATION) and config.cluster.gpus
    if not wants_gpus or config.device != "auto" or device.type != "cpu":
        return None
    return (
        f"the job asked for GPUs, but torch {torch.__version__} finds none on {host}: this run uses the CPU, "
        f"in {config.training.precision}. Try a torch built for these GPUs, or device=cpu if this is meant"
    )


def use_deterministic_kernels() -> None:
    torch.use_deterministic_algorithms(True)
    settings: Any = torch.utils.deterministic
    settings.fill_uninitialized_memory = False  # for debugging only, and one more kernel each time
    torch.backends.cudnn.benchmark = False


def share_gpu(device: torch.device, *, world: World) -> dict[str, str]:
    """Prepare NCCL if ranks of this machine share a GPU, and say so once; returns the reasons."""
    visible = torch.cuda.device_count()
    if not fabric.shares_device(str(device), world=world, visible=visible):
        return {}
    if world.rank == 0:
        gpus = f"{visible} GPU{'s' * (visible > 1)}"
        print(f"{world.world_size} ranks share {gpus}: results are right, speeds mean nothing", flush=True)
    return fabric.share_gpu(os.environ, rank=world.rank)


if __name__ == "__main__":
    if standby.VARIABLE in os.environ:
        for name in OF_TRAINING:
            resolve_name(name)
        standby.await_start()
    gc.freeze()
    gc.enable()
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # after a failure torch's clean-up may wait for ranks that have ended
