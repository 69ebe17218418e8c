"""The typed configuration: every key a user may set, with its default and its meaning.

The groups of `conf/` fill these dataclasses. Hydra refuses a key that is not here and a value of another
type. The legal words or numbers of a key stand at the key (`rules.py`); `checks/` has what several values
together must satisfy. The comment of each key, at its end or in the lines above it, is its row in
docs/configuration.md: write one sentence, and run `make docs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from hpc_parallel.config.site_schema import (
    ClusterConfig,
    FabricConfig,
    LauncherConfig,
    MachineConfig,
    PreflightConfig,
)
from hpc_parallel.config.task_schema import TASKS, ScriptConfig, TaskConfig
from hpc_parallel.layout.axes import DegreesConfig
from hpc_parallel.layout.layout import EXECUTIONS
from hpc_parallel.layout.model_data_schema import DATA, MODELS
from hpc_parallel.layout.schedules import SCHEDULES, SUFFIX
from hpc_parallel.rules import Rule, above, at_least, between, count, key, one_of

BETAS = Rule(
    lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
    "must be two numbers from 0 to below 1",
)


@dataclass
class StrategyConfig(DegreesConfig):
    """How the devices are used: one degree for each axis, then the options of the techniques.

    The product of the degrees is the number of devices. At most one degree may be -1: it takes what the
    others leave.
    """

    # `spmd` starts one process for each device, `dataparallel` one for each node; with `parameter_server`,
    # rank 0 holds the weights and the optimizer, and the workers send it gradients.
    execution: str = key("spmd", one_of(*EXECUTIONS))
    # The pipeline schedule, or a CSV file with the actions of each rank, as torch writes it.
    schedule: str = key("1f1b", one_of(*SCHEDULES, file=SUFFIX))
    # Microbatches in one step of a pipeline; null: four for each rank if that divides the batch.
    microbatches: int | None = key(None, count())
    # Pipeline stages on one rank; null: 1, or 2 if the schedule needs it.
    stages_per_rank: int | None = key(None, count())
    # The first block of each pipeline stage after the first stage; null: the stages are balanced.
    cuts: list[int] | None = None
    balance: str = key("flops", one_of("flops", "parameters"))  # What is balanced over the pipeline stages.
    # The speeds of uneven devices, one for each replica or each rank of a pipeline: `[3,1]` gives three
    # quarters of the batch or of the blocks to the first. `measured`: each device is timed at the start.
    shares: Any = None
    # The size of one message of gradients in MB, with DistributedDataParallel and the parameter server.
    bucket_mb: float = key(25.0, above(0))
    # DistributedDataParallel may assume that every step uses the same weights in the same order.
    static_graph: bool = False
    # The type in which DistributedDataParallel averages gradients.
    gradient_compression: str = key("none", one_of("none", "bfloat16"))
    dedicated_server: bool = True  # Rank 0 only serves as parameter server; false: rank 0 also trains.
    # fully_shard frees the weights of a block after its forward pass (ZeRO-3); false: they stay (ZeRO-2).
    reshard: bool = True
    # Blocks that fully_shard gathers ahead; null: torch's default, one block ahead in the backward pass.
    prefetch: int | None = key(None, count())
    # `ring` passes keys and values around the devices, `gather` copies all of them to each device, and
    # `all_to_all` gives each device the whole sequence of some of the heads.
    context_attention: str = key("ring", one_of("ring", "gather", "all_to_all"))
    sequence_parallel: bool = True  # With `tensor`, each device keeps a slice of the sequence between layers.
    loss_parallel: bool = True  # With `tensor`, the logits stay split by vocabulary in the loss.
    # Whether the layout is compared with one device before training. `auto`: for a model class of your own,
    # unless an earlier comparison is recorded. `always`: for every model. `never`: a warning
    # says that nothing was compared.
    verify: str = key("auto", one_of("auto", "always", "never"))
    tile_grid: list[int] | None = None  # Rows and columns of the grid of tiles; null: the most square grid.


@dataclass
class OptimizerConfig:
    """The class that updates the weights, and its learning rate over the steps."""

    name: str = "custom"  # The name of the optimizer.
    _target_: str = MISSING  # The class, any `torch.optim.Optimizer`.
    learning_rate: float = key(1e-3, above(0))  # The highest learning rate.
    # Weight decay of matrices; norms and biases have none.
    weight_decay: float = key(0.0, at_least(0), legal=0.1)
    options: dict[str, Any] = field(default_factory=dict)  # Other arguments of the class.
    # The type in which the optimizer keeps its state. `float32` is float64 with precision=float64;
    # `bfloat16` is rounded at random ([Fewer bytes of state](training.md#fewer-bytes-of-state)).
    state: str = key("float32", one_of("float32", "bfloat16"))
    # Rules for some of the weights, by names of your choice ([Your own training](training.md)).
    groups: dict[str, Any] = field(default_factory=dict)
    # How the learning rate changes after the warm-up: `cosine`, `linear`, `constant`, `wsd` (constant, then a
    # linear decay), or the path of a function of (step, steps) that returns a factor.
    schedule: str = "cosine"
    warmup_steps: int | None = None  # Steps of linear warm-up; null: a twentieth of the steps.
    # The share of the learning rate that the schedule ends with.
    final_share: float = key(0.1, between(0, 1))
    decay_share: float = key(0.2, between(0, 1))  # The share of the steps in which `wsd` decays.


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW, with its own arguments as keys."""

    name: str = "adamw"  # The name of the optimizer.
    _target_: str = "torch.optim.AdamW"  # The class, any `torch.optim.Optimizer`.
    betas: list[float] = key([0.9, 0.95], BETAS)  # AdamW's betas.
    eps: float = key(1e-8, above(0))  # AdamW's epsilon.
    weight_decay: float = 0.1  # Weight decay of matrices; norms and biases have none.


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamWConfig}


@dataclass
class TrainingConfig:
    """How long, with which batch, in which precision, and how often results are logged and saved."""

    steps: int = key(100, count())  # The number of optimizer steps.
    # Samples in one optimizer step, whatever the layout is. null: 16 (convnet 64, segmenter and unet 8), or
    # the next number that the layout can split. Runs of a sweep do not take the next number, so that they can
    # be compared.
    global_batch_size: int = key(16, count())
    # Samples in one forward pass. null: the most that the layout allows; for our decoders at most what is
    # estimated to fit in the device's memory.
    microbatch_size: int | None = key(None, count())
    # The type of the computation, over float32 weights: with bfloat16 they are cast once a step, with float16
    # by autocast. null: bfloat16 on GPUs, float32 on CPUs.
    precision: str = key("float32", one_of("float32", "bfloat16", "float16", "float64"))
    # The type in which weights are kept. `float32` is float64 with precision=float64; `bfloat16` is rounded
    # at random after each step ([Fewer bytes of state](training.md#fewer-bytes-of-state)).
    weights: str = key("float32", one_of("float32", "bfloat16"))
    # With precision=bfloat16, linear layers and experts inside blocks multiply in float8: with one scale for
    # a tensor (`tensorwise`), one for each row (`rowwise`), or not at all (`off`).
    fp8: str = key("off", one_of("off", "tensorwise", "rowwise"))
    # The factor of the loss at the start, with float16.
    loss_scale: float = key(65536.0, between(1, 2.0**64))
    # Finite steps after which float16 doubles the factor of the loss.
    loss_scale_every: int = key(2000, count())
    # Two runs on the same devices have the same bits: slower kernels, and an error where torch has none.
    deterministic: bool = False
    # The largest norm of the gradient; null: gradients are not clipped.
    clip_norm: float | None = key(1.0, above(0))
    # What happens after a loss or gradient that is not finite: `stop` the run, `skip` the step on all ranks,
    # or `rollback` to the checkpoint before, once.
    on_nonfinite: str = key("stop", one_of("stop", "skip", "rollback"))
    log_every: int = key(10, count())  # Steps between two lines of `metrics.jsonl`.
    # Steps between two validations; null: the run does not validate.
    validate_every: int | None = key(100, count())
    validation_samples: int = key(256, count())  # The most samples in one validation.
    # Early steps that the profiler times, after one step that counts bytes; 0: nothing is measured.
    measure_steps: int = key(2, at_least(0))
    # Steps between two checkpoints, with one more after the last step; null: only a signal saves one.
    checkpoint_every: int | None = key(500, count())
    checkpoint_async: bool = True  # Checkpoints are written while the training goes on.
    # Steps between two copies of the state to the memory of the rank's host and of another host, from which a
    # restart in the same job continues ([Survive](survive.md#copies-in-memory)); null: none.
    memory_checkpoint_every: int | None = key(None, count())
    # Replicas compare their weights at the start, and before each checkpoint and each copy in memory.
    compare_replicas: bool = True
    keep_last: int = key(2, count())  # The number of checkpoints that are kept.
    # Checkpoints of every n-th step are never deleted; null: none of them.
    keep_every: int | None = key(None, count())
    # `full` recomputes whole blocks in the backward pass, `selective` all operations but matrix products.
    activation_checkpointing: str = key("none", one_of("none", "full", "selective"))
    compile: bool = False  # torch.compile compiles each block and the loss; `auto`: as `training.speed` says.
    # With `training.compile`: one graph of the whole model. Small models are faster, and the compilation of
    # many layers takes long ([Strategies](strategies.md#speed)).
    compile_whole: bool = False
    # With `training.compile`: the share of activations, 0 to 1, that the compiler may keep for the backward
    # pass; it computes the cheapest of the others again. null: it keeps all.
    memory_budget: float | None = key(None, between(0, 1), legal=0.5)
    # Steps between two collections of Python's garbage, the same on all ranks; null: Python decides.
    collect_every: int | None = key(50, count())
    # What `auto` means for the switches of speed: `safe` leaves out what no measurement on GPUs supports yet,
    # `max` takes all of it ([Strategies](strategies.md#speed)).
    speed: str = key("safe", one_of("safe", "max"))
    # Language models compute logits and loss for some tokens at a time, so not all logits exist at once.
    chunked_loss: bool = True
    # Objects that follow the training: `_target_` and arguments of each ([Your own training](training.md)).
    callbacks: list[Any] = field(default_factory=list)
    tensorboard: bool = False  # Metrics also go to TensorBoard files in the run folder.
    wandb: bool = False  # Metrics also go to a Weights & Biases run.


@dataclass
class ProfileConfig:
    """Which steps of which ranks a profiler records."""

    # `torch`: a trace for Perfetto and a summary; `nsys`, `ncu`: NVIDIA's profilers around ranks of a job.
    kind: str = key("none", one_of("none", "torch", "nsys", "ncu"))
    first_step: int = key(10, count())  # The first recorded step, counted from the start or the restart.
    steps: int = key(3, count())  # The number of recorded steps.
    ranks: list[int] = field(default_factory=lambda: [0])  # The ranks that are recorded.
    memory: bool = False  # With `torch`: also the allocations of GPU memory, for pytorch.org/memory_viz.
    arguments: list[str] = field(default_factory=list)  # More arguments of nsys or ncu.


@dataclass
class SweepConfig:
    """How the runs of `-m` go together."""

    # `skip` an impossible combination and list it, or `stop` before anything starts.
    on_invalid: str = key("skip", one_of("skip", "stop"))
    # Runs of an array at the same time; null: no limit on Slurm, 1 on this machine.
    parallelism: int | None = key(None, count())
    # `auto` puts runs that are smaller than a node side by side into jobs of whole nodes ([Sweep](sweep.md));
    # null: `cluster.pack` for jobs of Slurm, else `off`.
    pack: str | None = key(None, one_of("off", "auto"), legal=("off", "auto"))
    pack_nodes: int | None = key(None, count())  # Nodes of a packed job; null: those of the largest run.
    # The time limit of a packed job in minutes; null: the longest `launcher.time_minutes` of its runs.
    pack_minutes: int | None = key(None, count())
    runs_per_gpu: int = key(1, count())  # Packed runs of one GPU that share it and its CPUs.
    wait: bool = False  # Follow all runs until they end, and exit with their outcome.
    resume: str | None = None  # A sweep folder: start only the runs that are missing or failed.
    # What another sweeper optimises: a figure of `summary.json` or `validation_<name>`; a list names several.
    objective: Any = "final_loss"
    # `median` ends a training whose best loss is worse than the median of the other runs' at the same step
    # ([Sweep](sweep.md#end-runs-that-are-behind)).
    prune: str = key("off", one_of("off", "median"))
    # The first step at which `sweep.prune` compares; null: after a fifth of `training.steps`.
    prune_after: int | None = key(None, count())
    folder: str | None = None  # The sweep folder, which `-m` writes for `sweep.prune`.
    # More runs, each as overrides in one text; they take precedence over the values of the sweep.
    also: list[str] = field(default_factory=list)


@dataclass
class PlanConfig:
    """The plan of a run before it starts ([Plan](plan.md))."""

    # The file of `conf/hardware/` that describes the devices; `hardware=NAME` is short for it. null: the
    # site's `cluster.hardware`; if that is null too, nothing is planned.
    hardware: str | None = None
    # If parameters, optimizer state and activations need more memory than a device has: `stop` before the run
    # starts, or `warn`. `off` plans nothing.
    on_overflow: str = key("stop", one_of("stop", "warn", "off"))


@dataclass
class RunConfig:
    """One run. `model`, `data` and `task` have the keys of the file that is chosen for them."""

    nodes: int = key(1, count(most=1_000_000))  # The number of nodes.
    # Devices on each node (on CPUs, processes); `auto`: all that a node has.
    gpus_per_node: int = key(1, count(most=1024))
    name: str = "${strategy.name}"  # The name of the run, and of the folder that holds its run folders.
    run_dir: str | None = None  # The run folder; null: `runs/<name>/<run id>`.
    seed: int = key(0, between(0, 2.0**63))  # The seed of the weights and of the order of the samples.
    # The kind of device; `auto` takes GPUs if there are any.
    device: str = key("auto", one_of("auto", "cpu", "cuda"))
    dry_run: bool = False  # Print what would be started or submitted, and start nothing.
    resume: str | None = None  # A run folder to continue; `auto`: the newest one of this name.
    # Weights to start from: a `.safetensors` file or a run folder; null: initial weights.
    weights: str | None = None
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: Any = MISSING
    data: Any = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    fabric: FabricConfig = field(default_factory=FabricConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    script: ScriptConfig = field(default_factory=ScriptConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    # What runs before, beside and after the run: a command, a list, or a table of stages
    # ([Stages](stages.md)); null: nothing.
    then: Any = None
    plan: PlanConfig = field(default_factory=PlanConfig)

    @property
    def model_class(self) -> str:
        """The name of the model's class."""
        return str(self.model["_target_"]).rpartition(".")[2]

    @property
    def devices(self) -> int:
        """The devices of all nodes, including that of a parameter server."""
        return self.nodes * self.gpus_per_node

    @property
    def devices_of_job(self) -> int:
        """`devices`, and those of the spares."""
        return self.devices + self.launcher.spares * self.gpus_per_node


@dataclass
class ComposedTraining(TrainingConfig):
    """What Hydra composes for `training`."""

    global_batch_size: int | None = None  # type: ignore[assignment]  # null: chosen by `resolve.py`
    precision: str | None = None  # type: ignore[assignment]  # null: chosen by `node_devices.py`
    compile: bool | int | str = "auto"  # type: ignore[assignment]


@dataclass
class ComposedConfig(RunConfig):
    """What Hydra composes, with references to the site that `resolve` replaces by values."""

    gpus_per_node: int | str = 1  # type: ignore[assignment]
    training: TrainingConfig = field(default_factory=ComposedTraining)
    launcher: LauncherConfig = field(
        default_factory=lambda: LauncherConfig(
            partition="${cluster.partition}",
            account="${cluster.account}",
            qos="${cluster.qos}",
            constraint="${cluster.constraint}",
            cpus_per_device="${cluster.cpus_per_device}",  # type: ignore[arg-type]
            memory_gb="${product:${cluster.memory_gb_per_device},${gpus_per_node}}",  # type: ignore[arg-type]
            resubmit="${cluster.resubmit}",  # type: ignore[arg-type]
        )
    )
    plan: PlanConfig = field(default_factory=lambda: PlanConfig(hardware="${cluster.hardware}"))


# Groups with a schema for each choice.
GROUPS: Mapping[str, Mapping[str, type[Any]]] = {
    "model": MODELS, "data": DATA, "optimizer": OPTIMIZERS, "task": TASKS,
}  # fmt: skip


def register() -> None:
    """Store the schemas by the names in the defaults lists of `conf/`, and add a resolver for products.

    Example: `${product:16,${nodes},${gpus_per_node}}`. A product with a null is null.
    """
    OmegaConf.register_new_resolver(
        "product", lambda *factors: None if None in factors else math.prod(factors), replace=True
    )
    store = ConfigStore.instance()
    # Hydra copies the store for each composition, and copies each schema again when it reads it. The first
    # copy takes a sixth of the time and is not needed.
    vars(store)["__deepcopy__"] = lambda _memo: store
    if "run_schema.yaml" in store.repo:
        return  # by an earlier command of this process
    composed = OmegaConf.structured(ComposedConfig)
    OmegaConf.set_struct(composed.script.arguments, False)  # any name, without a plus
    store.store(name="run_schema", node=composed)
    for group, schemas in GROUPS.items():
        for name, schema in schemas.items():
            store.store(group=group, name=f"{name}_schema", node=schema)
