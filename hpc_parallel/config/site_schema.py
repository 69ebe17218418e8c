"""The keys about the cluster and its Slurm; `schema.py` says how its comments are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from hpc_parallel.config import fabric_kinds
from hpc_parallel.rules import above, at_least, between, count, key, line, matches, one_of

HERE = ("local", "allocation")  # launchers that submit no job
RUNTIMES = ("apptainer", "pyxis")  # of containers


@dataclass
class LauncherConfig:
    """Where the job runs, and what is asked of Slurm."""

    # `auto` takes the allocation that the shell is in, else Slurm if it answers, else this machine.
    kind: str = key("auto", one_of("auto", "local", "slurm", "script", "allocation"))
    wait: bool = False  # Follow a submitted job and exit with its outcome.
    partition: str | None = key(None, line())  # sbatch `--partition`.
    account: str | None = key(None, line())  # sbatch `--account`.
    qos: str | None = key(None, line())  # sbatch `--qos`.
    constraint: str | None = key(None, line())  # sbatch `--constraint`.
    exclude: str | None = key(None, line())  # sbatch `--exclude`.
    wckey: str | None = key(None, line())  # sbatch `--wckey`.
    snapshot: bool = True  # Keep a copy of the source in the run folder, and run that copy.
    snapshot_mb: int = key(64, at_least(1))  # The largest size of that copy in MiB.
    # Patterns of files and folders that are not copied: the copy has links to them.
    snapshot_exclude: list[str] = field(default_factory=list)
    snapshot_credentials: bool = False  # Also copy files that look like credentials (`.env`, `*.pem`, ...).
    shared_folder: bool = False  # Trust the users who can write a folder above the run folder.
    time_minutes: int = key(60, count())  # The time limit of the job in minutes.
    # Memory of one node in GB; null: the partition's default.
    memory_gb: float | None = key(None, above(0), legal=16)
    cpus_per_device: int = key(1, count())  # CPU cores for each device.
    modules: list[str] = field(default_factory=list)  # Names for `module load`, in this order.
    # The Python of the job: a path, or a name that the job finds after `launcher.modules` and
    # `launcher.setup`; null: that of `launcher.conda` or `launcher.venv`, or else the current one. With a
    # container, that of the image.
    python: str | None = None
    conda: str | None = None  # A conda environment that the job activates: its name, or its folder.
    venv: str | None = None  # A virtual environment that the job activates.
    # Shell commands that run before the job; the job stops at the first command that fails.
    setup: list[str] = field(default_factory=list)
    container: str | None = None  # The image in which the ranks run; `cluster.container` says how.
    # Folders that the container sees beside the run folder: `/data` or `/data:/mnt`.
    container_mounts: list[str] = field(default_factory=list)
    check_imports: bool = True  # Before a run starts, try classes that are not this package's.
    # Seconds before the time limit at which the run saves its state and ends.
    grace_s: int = key(90, between(1, 3600))
    max_requeues: int = key(20, at_least(0))  # How often the job may start again after a time limit.
    # How often the run may start again after a failure that a new start can repair. null: 3 in a job of its
    # own, if the run can go on from where it was (a training with checkpoints, a script with
    # `script.resume_arguments`); otherwise 0.
    max_restarts: int | None = key(None, at_least(0), legal=0)
    # Whether the ranks of the next start wait beside the training and have imported torch already. That saves
    # a start on the same hosts some seconds, and takes about 0.3 GB of memory for each rank.
    standby: bool = False
    # Hosts that the job has beside `nodes`. A spare takes the place of a host that is lost, that failed twice
    # within 24 h, or that the checks at the start accuse.
    spares: int = key(0, at_least(0))
    # The fewest nodes on which the training may go on in its job, if no spare is left; null: `nodes`.
    min_nodes: int | None = key(None, count())
    resubmit: bool = False  # Submit a new job if Slurm does not requeue the old one.
    # Who is told of failures, restarts, a full disk and the end: a shell command, which gets a line on its
    # standard input, or the address of a webhook (`https://`).
    notify: str | None = key(None, line(), legal="mail -s hpc_parallel $USER")
    # Any other flag of sbatch, without its dashes.
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class ClusterConfig:
    """What is particular to a site: how to ask for GPUs, host names, ports, variables and time-outs."""

    name: str = MISSING  # The name of the site, as messages show it.
    partition: str | None = None  # sbatch `--partition`, if `launcher.partition` is not set.
    account: str | None = None  # sbatch `--account`, if `launcher.account` is not set.
    qos: str | None = None  # sbatch `--qos`, if `launcher.qos` is not set.
    constraint: str | None = None  # sbatch `--constraint`, if `launcher.constraint` is not set.
    # Limits of partitions by name: `nodes`, `time_minutes`, `memory_gb` (of a node), `gpus_per_node`.
    # A partition that is not listed: ask `sinfo`.
    partitions: dict[str, Any] = field(default_factory=dict)
    gpus: bool = True  # The nodes have GPUs; false: a cluster of CPUs.
    # The flag of sbatch that asks for GPUs; `none`: whole nodes are given, with their GPUs.
    gpu_flag: str = key("gpus-per-node", one_of("gpus-per-node", "gres", "none"))
    # The type of GPU, such as `a100` in `--gres=gpu:a100:4`.
    gpu_type: str | None = key(None, matches(r"[\w.-]+", "can't be the name of a GPU type"))
    # Devices on each node, for `gpus_per_node=auto`; null: ask `sinfo`.
    gpus_per_node: int | None = key(None, count(most=1024))
    # Memory of one device in GB: a model that can't fit by its weights alone is refused, and microbatches are
    # as small as the memory needs; null: not checked, and read from the GPUs when the job starts.
    device_memory_gb: float | None = key(None, above(0), legal=80)
    hardware: str | None = None  # The file of `conf/hardware/` that describes the nodes, for plans of runs.
    # What an hour of one device costs, in your currency, for the cost in plans; null: no cost.
    device_hour_price: float | None = key(None, at_least(0), legal=2.5)
    # Mean hours between two failures of one node, for the useful time and the best interval of checkpoints in
    # plans; null: not planned.
    node_mtbf_hours: float | None = key(None, above(0), legal=1000)
    # CPU cores for each device, if `launcher.cpus_per_device` is not set; null: the CPUs of a node that
    # jobs can have, divided by its GPUs, or 1 if Slurm does not say.
    cpus_per_device: int | None = key(None, count())
    # Memory for each device in GB, if `launcher.memory_gb` is not set. null: if `cluster.cpus_per_device` is
    # null, nine tenths of the memory of a node that jobs can have, divided by its GPUs; otherwise, or if
    # Slurm does not say, the partition's default.
    memory_gb_per_device: float | None = key(None, above(0), legal=16)
    modules: list[str] = field(default_factory=list)  # Names for `module load`, before `launcher.modules`.
    setup: list[str] = field(default_factory=list)  # Shell commands of every job, before `launcher.setup`.
    # Flags of sbatch for every job, without dashes; `launcher.extra` replaces them.
    extra: dict[str, Any] = field(default_factory=dict)
    # Flags of srun for every job, without dashes: `cpu-bind: cores`, `mpi: none`.
    srun: dict[str, Any] = field(default_factory=dict)
    # What starts the ranks of a job: `srun`, `torchrun` (one launcher for each node) or `mpirun`.
    start: str = key("srun", one_of("srun", "torchrun", "mpirun"))
    mpirun: list[str] = field(default_factory=list)  # Arguments of mpirun, one word each.
    # What runs `launcher.container`.
    container: str | None = key(None, one_of(*RUNTIMES), legal=RUNTIMES)
    # Arguments of `apptainer exec`; null: `--nv` on a cluster with GPUs.
    container_arguments: list[str] | None = None
    # A folder of each node for temporary files (`TMPDIR`), also in a container; `$VARIABLES` are those of
    # the job.
    scratch: str | None = key(None, line("must be the path of a folder of each node"))
    max_array_size: int | None = key(None, count())  # The most runs in a job array; null: ask `scontrol`.
    # `sweep.pack` of sweeps on Slurm, if it is not set: `auto` for a site that gives whole nodes.
    pack: str = key("off", one_of("off", "auto"))
    resubmit: bool = False  # The site does not requeue jobs, so a run continues in a new one.
    # Appended to the host name of rank 0 (some sites name the fast network this way).
    master_suffix: str = key("", matches(r"[A-Za-z0-9.-]*", "can't end a host name"), legal="i")
    # The port of rank 0 on a closed network; null: any free port.
    port: int | None = key(None, between(1024, 65535), legal=29500)
    start_timeout_s: float = key(300.0, above(0))  # Seconds within which all ranks must start.
    collective_timeout_s: float = key(600.0, above(0))  # Seconds within which a collective must end.
    # Seconds within which all ranks must have written a checkpoint; later, that save has failed.
    checkpoint_timeout_s: float = key(1800.0, above(0))
    # Seconds without progress after which a rank counts as hanging; null: never.
    hang_timeout_s: float | None = key(300.0, above(0))
    # Environment variables of every rank (`NCCL_*`, `GLOO_*`, `OMP_*`), unless they are set already.
    environment: dict[str, Any] = field(default_factory=dict)
    # What connects the nodes; `auto`: the fastest kind of device that a host has.
    fabric: str = key("auto", one_of(*fabric_kinds.KINDS))


@dataclass
class MachineConfig:
    """What a run of `task=collectives` measured (its `machine.yaml`), as `FOLDER/machine/NAME.yaml`."""

    site: str | None = None  # The name of the site, as messages show it.
    device_type: str | None = None  # The kind of device that was measured, `cpu` or `cuda`.
    measured: str | None = None  # The day of the measurement.
    # A table for each group of ranks, with `ranks` and the latency and bandwidth of each collective.
    collectives: dict[str, Any] = field(default_factory=dict)


@dataclass
class FabricConfig:
    """What is proven about the network before the task begins."""

    require: bool = False  # Stop the run if data between nodes goes through sockets; false: warn.


@dataclass
class PreflightConfig:
    """What a start does about hosts that differ from the others or are not healthy."""

    # `off`: no checks; `report`: name the hosts; `stop`: end the run; `exclude`: start again without them.
    act: str = key("report", one_of("off", "report", "stop", "exclude"))
