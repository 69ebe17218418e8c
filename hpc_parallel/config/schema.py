"""The typed configuration: every key a user may set, with its default and its meaning.

The groups of `conf/` fill these dataclasses. Hydra refuses a key that is not here and a value of another
type. `checks/` has the legal words and ranges, and what several values together must satisfy. The comment of
each key, at its end or in the lines above it, is its row in docs/configuration.md: write one sentence, and
run `make docs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf


@dataclass
class StrategyConfig:
    """How the devices are used: one degree for each axis, then the options of the techniques.

    The product of the degrees is the number of devices. At most one degree may be -1: it takes what the
    others leave.
    """

    name: str = MISSING  # The name of the strategy, as reports show it.
    pipeline: int = 1  # The number of pipeline stages on different devices.
    replicate: int = 1  # The number of replicas that average their gradients (DistributedDataParallel).
    shard: int = 1  # The number of devices that share each weight with its gradient and state (fully_shard).
    expert: int = 1  # The number of devices that share the experts of each block.
    context: int = 1  # The number of devices that share each sequence.
    tensor: int = 1  # The number of devices that share each layer.
    tile: int = 1  # The number of devices that share each image.
    # `spmd` starts one process for each device, `dataparallel` one for each node; with `parameter_server`,
    # rank 0 holds the weights and the optimizer, and the workers send it gradients.
    execution: str = "spmd"
    schedule: str = "1f1b"  # The pipeline schedule.
    # Microbatches in one step of a pipeline; null: four for each rank if that divides the batch.
    microbatches: int | None = None
    stages_per_rank: int | None = None  # Pipeline stages on one rank; null: 1, or 2 if the schedule needs it.
    # The first block of each pipeline stage after the first stage; null: the stages are balanced.
    cuts: list[int] | None = None
    balance: str = "flops"  # What is balanced over the pipeline stages.
    # The size of one message of gradients in MB, with DistributedDataParallel and the parameter server.
    bucket_mb: float = 25.0
    # DistributedDataParallel may assume that every step uses the same weights in the same order.
    static_graph: bool = False
    gradient_compression: str = "none"  # The type in which DistributedDataParallel averages gradients.
    dedicated_server: bool = True  # Rank 0 only serves as parameter server; false: rank 0 also trains.
    # fully_shard frees the weights of a block after its forward pass (ZeRO-3); false: they stay (ZeRO-2).
    reshard: bool = True
    # Blocks that fully_shard gathers ahead; null: torch's default, one block ahead in the backward pass.
    prefetch: int | None = None
    # `ring` passes keys and values around the devices, `gather` copies all of them to each device.
    context_attention: str = "ring"
    sequence_parallel: bool = True  # With `tensor`, each device keeps a slice of the sequence between layers.
    loss_parallel: bool = True  # With `tensor`, the logits stay split by vocabulary in the loss.
    # Compare this layout with one device before a model class of your own trains on it; `auto`: unless that
    # is recorded, `always`: also classes of this package, `never`: only say that it was not compared.
    verify: str = "auto"
    tile_grid: list[int] | None = None  # Rows and columns of the grid of tiles; null: the most square grid.


@dataclass
class TransformerConfig:
    """Shape of the reference decoder (`models/transformer.py`)."""

    _target_: str = "hpc_parallel.models.transformer.Transformer"  # The class of the model.
    layers: int = MISSING  # The number of blocks.
    dim: int = MISSING  # The width of the model.
    heads: int = MISSING  # The number of attention heads.
    kv_heads: int = MISSING  # The number of key-value heads (grouped-query attention); it divides `heads`.
    ffn_dim: int = MISSING  # The inner width of the feed-forward layers.
    vocab_size: int = MISSING  # The number of tokens in the vocabulary.
    tied_head: bool = True  # The head uses the weight of the embedding.
    rope_theta: float = 10000.0  # The base of the rotary positions.
    norm_eps: float = 1e-5  # The epsilon of RMSNorm.


@dataclass
class MoeTransformerConfig(TransformerConfig):
    """The reference decoder with a mixture of experts in each block (`models/moe.py`)."""

    _target_: str = "hpc_parallel.models.moe.MoeTransformer"  # The class of the model.
    experts: int = MISSING  # The number of experts in each block; `ffn_dim` is the width of one.
    experts_per_token: int = 2  # The number of experts that each token uses.
    balance: float = 0.01  # The weight of the loss that balances the experts' use.


@dataclass
class HuggingFaceConfig:
    """A causal language model of the library transformers (`models/huggingface.py`)."""

    _target_: str = "hpc_parallel.models.huggingface.HuggingFaceModel"  # The class of the model.
    _convert_: str = "all"  # Hydra hands plain tables and lists to the library.
    config: dict[str, Any] = field(default_factory=dict)  # `model_type`, and keys of its configuration.


@dataclass
class ConvNetConfig:
    """Shape of the reference convnet (`models/convnet.py`): one label for each image."""

    _target_: str = "hpc_parallel.models.convnet.ConvNet"  # The class of the model.
    # The channels of each block.
    channels: list[int] = field(default_factory=lambda: [16, 32, 128, 256, 512])
    classes: int = 10  # The number of labels.
    in_channels: int = 1  # The number of channels of an image.
    kernel_size: int = 3  # The width of the convolutions in pixels, an odd number.


@dataclass
class SegmenterConfig(ConvNetConfig):
    """The same blocks with one label for each pixel."""

    _target_: str = "hpc_parallel.models.convnet.Segmenter"  # The class of the model.
    channels: list[int] = field(default_factory=lambda: [16, 32, 128])  # The channels of each block.
    classes: int = 2  # The number of labels.


@dataclass
class UNetConfig(ConvNetConfig):
    """A U-Net (`models/unet.py`): one label for each pixel, with skip connections."""

    _target_: str = "hpc_parallel.models.unet.UNet"  # The class of the model.
    # The channels of each level; each level but the last halves the image.
    channels: list[int] = field(default_factory=lambda: [16, 32, 64, 128])
    classes: int = 2  # The number of labels.


@dataclass
class TextDataConfig:
    """Bytes of text files; the source of Python's standard library unless `path` names other files."""

    _target_: str = "hpc_parallel.data.text.TextData"  # The class of the data.
    path: str | None = None  # A folder of text files, or one file; null: Python's standard library.
    pattern: str = "*.py"  # The names of the files that are read in a folder.
    sequence_length: int = 128  # Tokens in one sample.
    max_bytes: int = 6_000_000  # The number of bytes that are read at most.
    validation_share: float = 0.05  # The share of the files that is held out for validation.


@dataclass
class TokensDataConfig:
    """A file of token ids made by `python -m hpc_parallel tokenize`."""

    _target_: str = "hpc_parallel.data.tokens.TokensData"  # The class of the data.
    path: str = MISSING  # The `.npy` file.
    sequence_length: int = 1024  # Tokens in one sample.
    validation_share: float = 0.05  # The share of the tokens, at the end, that is held out for validation.


@dataclass
class DigitsDataConfig:
    """The handwritten digits of scikit-learn, 8 x 8 pixels, repeated over a larger canvas."""

    _target_: str = "hpc_parallel.data.images.DigitsData"  # The class of the data.
    height: int = 32  # The height of an image in pixels, a multiple of 8.
    width: int = 32  # The width of an image in pixels, a multiple of 8.
    validation_share: float = 0.1  # The share of the images, at the end, that is held out for validation.


@dataclass
class CellsDataConfig:
    """Drawn cells with masks, made on each device as they are needed."""

    _target_: str = "hpc_parallel.data.images.CellsData"  # The class of the data.
    height: int = 64  # The height of an image in pixels.
    width: int = 64  # The width of an image in pixels.
    samples: int = 4096  # The number of training images; a tenth as many are held out for validation.
    seed: int = 0  # The seed of the drawing.


@dataclass
class DatasetDataConfig:
    """Samples of your own: an object with `__len__` and `__getitem__`, which returns (input, target)."""

    _target_: str = "hpc_parallel.data.dataset.DatasetData"  # The class of the data.
    _convert_: str = "all"  # Hydra hands plain tables and lists to your class.
    # `_target_`, the class of your dataset, and its arguments.
    dataset: dict[str, Any] = field(default_factory=lambda: {"_target_": MISSING})
    # The same for a dataset of held-out samples; null: a share of `dataset` is held out.
    validation: dict[str, Any] | None = None
    validation_share: float = 0.05  # The share of the samples that is held out, chosen by a fixed shuffle.
    sequence_length: int | None = None  # Tokens in one sample, if the samples are tokens.
    vocab_size: int | None = None  # The number of tokens in the vocabulary, if the samples are tokens.


@dataclass
class ParquetDataConfig:
    """A folder of parquet or Arrow files (`pip install ".[datasets]"`)."""

    _target_: str = "hpc_parallel.data.parquet.ParquetData"  # The class of the data.
    path: str = MISSING  # A folder of `.parquet` or of `.arrow` files, or one file.
    input: str = "input_ids"  # The column of the inputs.
    # The column of the targets; null: `input` has token ids, and all rows in their order are one text.
    target: str | None = None
    sequence_length: int | None = None  # Tokens in one sample; needed for token ids.
    vocab_size: int | None = None  # The number of tokens in the vocabulary; needed for token ids.
    validation_share: float = 0.05  # The share of the rows, or of the tokens at the end, that is held out.


@dataclass
class OptimizerConfig:
    """The class that updates the weights, and its learning rate over the steps."""

    name: str = "custom"  # The name of the optimizer.
    _target_: str = MISSING  # The class, any `torch.optim.Optimizer`.
    learning_rate: float = 1e-3  # The highest learning rate.
    weight_decay: float = 0.0  # Weight decay of matrices; norms and biases have none.
    options: dict[str, Any] = field(default_factory=dict)  # Other arguments of the class.
    # Rules for some of the weights, by names of your choice ([Your own training](training.md)).
    groups: dict[str, Any] = field(default_factory=dict)
    # How the learning rate changes after the warm-up: `cosine`, `linear`, `constant`, `wsd` (constant, then a
    # linear decay), or the path of a function of (step, steps) that returns a factor.
    schedule: str = "cosine"
    warmup_steps: int | None = None  # Steps of linear warm-up; null: a twentieth of the steps.
    final_share: float = 0.1  # The share of the learning rate that the schedule ends with.
    decay_share: float = 0.2  # The share of the steps in which `wsd` decays.


@dataclass
class AdamWConfig(OptimizerConfig):
    """AdamW, with its own arguments as keys."""

    name: str = "adamw"  # The name of the optimizer.
    _target_: str = "torch.optim.AdamW"  # The class, any `torch.optim.Optimizer`.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # AdamW's betas.
    eps: float = 1e-8  # AdamW's epsilon.
    weight_decay: float = 0.1  # Weight decay of matrices; norms and biases have none.


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {"adamw": AdamWConfig}


@dataclass
class TrainingConfig:
    """How long, with which batch, in which precision, and how often results are logged and saved."""

    steps: int = 100  # The number of optimizer steps.
    # Samples in one optimizer step, whatever the layout is. null: 16 (convnet 64, segmenter and unet 8), or
    # the next number that the layout can split. A sweep takes the first number, so its runs can be compared.
    global_batch_size: int = 16
    microbatch_size: int | None = None  # Samples in one forward pass; null: as many as the layout allows.
    # The type of the computation; bfloat16 and float16 are autocast over float32 weights.
    precision: str = "float32"
    loss_scale: float = 65536.0  # The factor of the loss at the start, with float16.
    loss_scale_every: int = 2000  # Finite steps after which float16 doubles the factor of the loss.
    clip_norm: float | None = 1.0  # The largest norm of the gradient; null: gradients are not clipped.
    # What happens after a loss or gradient that is not finite: `stop` the run, `skip` the step on all ranks,
    # or `rollback` to the checkpoint before, once.
    on_nonfinite: str = "stop"
    log_every: int = 10  # Steps between two lines of `metrics.jsonl`.
    validate_every: int | None = 100  # Steps between two validations; null: the run does not validate.
    validation_samples: int = 256  # The number of samples in one validation.
    # Early steps that the profiler times, after one step that counts bytes; 0: nothing is measured.
    measure_steps: int = 2
    # Steps between two checkpoints, with one more after the last step; null: only a signal saves one.
    checkpoint_every: int | None = 500
    checkpoint_async: bool = True  # Checkpoints are written while the training goes on.
    keep_last: int = 2  # The number of checkpoints that are kept.
    keep_every: int | None = None  # Checkpoints of every n-th step are never deleted; null: none of them.
    # `full` recomputes whole blocks in the backward pass, `selective` all operations but matrix products.
    activation_checkpointing: str = "none"
    compile: bool = False  # torch.compile compiles each block.
    # Objects that follow the training: `_target_` and arguments of each ([Your own training](training.md)).
    callbacks: list[Any] = field(default_factory=list)
    tensorboard: bool = False  # Metrics also go to TensorBoard files in the run folder.
    wandb: bool = False  # Metrics also go to a Weights & Biases run.


@dataclass
class LauncherConfig:
    """Where the job runs, and what is asked of Slurm."""

    kind: str = "auto"  # `auto` takes Slurm if it answers, else this machine.
    wait: bool = False  # Follow a submitted job and exit with its outcome.
    partition: str | None = None  # sbatch `--partition`.
    account: str | None = None  # sbatch `--account`.
    qos: str | None = None  # sbatch `--qos`.
    constraint: str | None = None  # sbatch `--constraint`.
    exclude: str | None = None  # sbatch `--exclude`.
    wckey: str | None = None  # sbatch `--wckey`.
    snapshot: bool = True  # Keep a copy of the source in the run folder, and run that copy.
    snapshot_mb: int = 64  # The largest size of that copy in MiB.
    # Patterns of files and folders that the copy leaves out.
    snapshot_exclude: list[str] = field(default_factory=list)
    snapshot_credentials: bool = False  # Also copy files that look like credentials (`.env`, `*.pem`, ...).
    shared_folder: bool = False  # Trust the users who can write a folder above the run folder.
    time_minutes: int = 60  # The time limit of the job in minutes.
    memory_gb: float | None = None  # Memory of one node in GB; null: the partition's default.
    cpus_per_device: int = 1  # CPU cores for each device.
    modules: list[str] = field(default_factory=list)  # Names for `module load`, in this order.
    venv: str | None = None  # A virtual environment that the job activates.
    # Shell commands that run before the job; the job stops at the first command that fails.
    setup: list[str] = field(default_factory=list)
    container: str | None = None  # The image in which the ranks run; `cluster.container` says how.
    # Folders that the container sees beside the run folder: `/data` or `/data:/mnt`.
    container_mounts: list[str] = field(default_factory=list)
    check_imports: bool = True  # Before a submission, import classes that are not this package's.
    grace_s: int = 90  # Seconds before the time limit at which the run saves its state and ends.
    max_requeues: int = 20  # How often the job may start again after a time limit.
    max_restarts: int = 0  # How often the job may start again after a failure that a new start can repair.
    resubmit: bool = False  # Submit a new job if Slurm does not requeue the old one.
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
    gpus: bool = True  # The job asks for GPUs; false: a cluster of CPUs.
    gpu_flag: str = "gpus-per-node"  # The flag of sbatch that asks for GPUs.
    gpu_type: str | None = None  # The type of GPU, such as `a100` in `--gres=gpu:a100:4`.
    # Devices on each node, for `gpus_per_node=auto`; null: ask `sinfo`.
    gpus_per_node: int | None = None
    # Memory of one device in GB: a model that can't fit by its weights alone is refused; null: not checked.
    device_memory_gb: float | None = None
    cpus_per_device: int = 1  # CPU cores for each device, if `launcher.cpus_per_device` is not set.
    # Memory for each device in GB, if `launcher.memory_gb` is not set; null: the partition's default.
    memory_gb_per_device: float | None = None
    modules: list[str] = field(default_factory=list)  # Names for `module load`, before `launcher.modules`.
    setup: list[str] = field(default_factory=list)  # Shell commands of every job, before `launcher.setup`.
    # Flags of sbatch for every job, without dashes; `launcher.extra` replaces them.
    extra: dict[str, Any] = field(default_factory=dict)
    # Flags of srun for every job, without dashes: `cpu-bind: cores`, `mpi: none`.
    srun: dict[str, Any] = field(default_factory=dict)
    # What starts the ranks of a job: `srun`, `torchrun` (one launcher for each node) or `mpirun`.
    start: str = "srun"
    mpirun: list[str] = field(default_factory=list)  # Arguments of mpirun, one word each.
    container: str | None = None  # What runs `launcher.container`: `apptainer` or `pyxis`.
    # Arguments of `apptainer exec`; null: `--nv` on a cluster with GPUs.
    container_arguments: list[str] | None = None
    # A folder of each node for temporary files (`TMPDIR`); `$VARIABLES` are those of the job.
    scratch: str | None = None
    max_array_size: int | None = None  # The most runs in a job array; null: ask `scontrol`.
    resubmit: bool = False  # The site does not requeue jobs, so a run continues in a new one.
    master_suffix: str = ""  # Appended to the host name of rank 0 (some sites name the fast network so).
    port: int | None = None  # The port of rank 0 on a closed network; null: any free port.
    start_timeout_s: float = 300.0  # Seconds within which all ranks must start.
    collective_timeout_s: float = 600.0  # Seconds within which a collective must end.
    # Seconds without progress after which a training rank counts as hanging; null: never.
    hang_timeout_s: float | None = 300.0
    # Environment variables of every rank (`NCCL_*`, `GLOO_*`, `OMP_*`), unless they are set already.
    environment: dict[str, Any] = field(default_factory=dict)
    fabric: str = "auto"  # What connects the nodes; `auto`: the fastest kind of device that a host has.


@dataclass
class FabricConfig:
    """What is proven about the network before the task begins."""

    require: bool = False  # Stop the run if data between nodes goes through sockets; false: warn.


@dataclass
class ProfileConfig:
    """Which steps of which ranks a profiler records."""

    # `torch`: a trace for Perfetto and a summary; `nsys`, `ncu`: NVIDIA's profilers around ranks of a job.
    kind: str = "none"
    first_step: int = 10  # The first recorded step, counted from the start or the restart.
    steps: int = 3  # The number of recorded steps.
    ranks: list[int] = field(default_factory=lambda: [0])  # The ranks that are recorded.
    memory: bool = False  # With `torch`: also the allocations of GPU memory, for pytorch.org/memory_viz.
    arguments: list[str] = field(default_factory=list)  # More arguments of nsys or ncu.


@dataclass
class PreflightConfig:
    """What a start does about hosts that differ from the others or are not healthy."""

    # `off`: no checks; `report`: name the hosts; `stop`: end the run; `exclude`: start again without them.
    act: str = "report"


@dataclass
class TaskConfig:
    """What the job does."""

    name: str = MISSING  # The name of the task.


@dataclass
class InferConfig(TaskConfig):
    """Take the validation loss forward only, then time each batch size."""

    name: str = "infer"  # The name of the task.
    batch_sizes: list[int] | None = None  # Samples over all replicas; null: 1, 2, 4, ... for each replica.
    repeats: int = 100  # The number of timed passes of each batch size.


@dataclass
class GenerateConfig(TaskConfig):
    """Continue prompts token by token with a key-value cache."""

    name: str = "generate"  # The name of the task.
    prompts: list[str] | None = None  # The prompts; null: the beginnings of validation samples.
    prompt_length: int = 32  # Tokens in each of those beginnings.
    new_tokens: int = 128  # Tokens that are generated for each prompt.
    temperature: float = 0.0  # The sampling temperature; 0 takes the most likely token (greedy).
    show: int = 4  # The number of texts that are printed; `generated.jsonl` has all of them.


@dataclass
class CollectivesConfig(TaskConfig):
    """Check and time collectives between all ranks, inside nodes, across nodes and over each axis."""

    name: str = "collectives"  # The name of the task.
    operations: list[str] | None = None  # The collectives; null: all.
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])  # The types of numbers.
    min_bytes: int = 8  # The smallest size, counted as nccl-tests counts it.
    max_bytes: int = 2**30  # The largest size.
    factor: int = 4  # Each size is so many times the one before.
    seconds: float = 0.5  # The time for one collective of one size; at least eight rounds are run.


@dataclass
class PreflightTaskConfig(TaskConfig):
    """Measure devices, storage, and each link between hosts, and name what is slow."""

    name: str = "preflight"  # The name of the task.
    message_bytes: int = 2**24  # What two hosts send to each other, and what a node sums.
    read_bytes: int = 2**27  # The size of the file that each process reads.
    storage: str | None = None  # The folder of these files; null: the run folder.


TASKS: dict[str, type[TaskConfig]] = {
    "train": TaskConfig, "infer": InferConfig, "generate": GenerateConfig, "proof": TaskConfig,
    "collectives": CollectivesConfig, "preflight": PreflightTaskConfig,
}  # fmt: skip


@dataclass
class SweepConfig:
    """How the runs of `-m` go together."""

    # `skip` an impossible combination and list it, or `stop` before anything starts.
    on_invalid: str = "skip"
    # Runs of an array at the same time; null: no limit on Slurm, 1 on this machine.
    parallelism: int | None = None
    wait: bool = False  # Follow all runs until they end, and exit with their outcome.
    resume: str | None = None  # A sweep folder: start only the runs that are missing or failed.
    # The figure of `summary.json` that another sweeper optimises; a list names several figures.
    objective: Any = "final_loss"
    # More runs, each as overrides in one text; they take precedence over the values of the sweep.
    also: list[str] = field(default_factory=list)


@dataclass
class RunConfig:
    """One run. `model`, `data` and `task` have the keys of the file that is chosen for them."""

    nodes: int = 1  # The number of nodes.
    gpus_per_node: int = 1  # Devices on each node (on CPUs, processes); `auto`: all that a node has.
    name: str = "${strategy.name}"  # The name of the run, and of the folder that holds its run folders.
    run_dir: str | None = None  # The run folder; null: `runs/<name>/<run id>`.
    seed: int = 0  # The seed of the weights and of the order of the samples.
    device: str = "auto"  # The kind of device; `auto` takes GPUs if there are any.
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
    fabric: FabricConfig = field(default_factory=FabricConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def devices(self) -> int:
        """The devices of all nodes, with a parameter server's."""
        return self.nodes * self.gpus_per_node


@dataclass
class ComposedTraining(TrainingConfig):
    """What Hydra composes for `training`."""

    global_batch_size: int | None = None  # type: ignore[assignment]  # null: chosen by `default_batch.py`


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


def register() -> None:
    """Store the schemas by the names in the defaults lists of `conf/`, and add a resolver for products.

    Example: `${product:16,${nodes},${gpus_per_node}}`. A product with a null is null.
    """
    OmegaConf.register_new_resolver("product", _product, replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=ComposedConfig)
    store.store(group="model", name="transformer_schema", node=TransformerConfig)
    store.store(group="model", name="moe_schema", node=MoeTransformerConfig)
    store.store(group="model", name="huggingface_schema", node=HuggingFaceConfig)
    store.store(group="model", name="convnet_schema", node=ConvNetConfig)
    store.store(group="model", name="segmenter_schema", node=SegmenterConfig)
    store.store(group="model", name="unet_schema", node=UNetConfig)
    store.store(group="data", name="text_schema", node=TextDataConfig)
    store.store(group="data", name="tokens_schema", node=TokensDataConfig)
    store.store(group="data", name="digits_schema", node=DigitsDataConfig)
    store.store(group="data", name="cells_schema", node=CellsDataConfig)
    store.store(group="optimizer", name="adamw_schema", node=AdamWConfig)
    store.store(group="data", name="dataset_schema", node=DatasetDataConfig)
    store.store(group="data", name="parquet_schema", node=ParquetDataConfig)
    for name, schema in TASKS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)


def _product(*factors: Any) -> Any:
    return None if None in factors else math.prod(factors)


def typed(config: Any) -> RunConfig:
    """The dataclass tree of a resolved configuration (a mapping or an OmegaConf node)."""
    values = OmegaConf.create(config)
    task = TASKS.get(OmegaConf.select(values, "task.name"), TaskConfig)
    optimizer = OPTIMIZERS.get(OmegaConf.select(values, "optimizer.name"), OptimizerConfig)
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig(task=task(), optimizer=optimizer())), config)
    run = OmegaConf.to_object(merged)
    assert isinstance(run, RunConfig)
    return run


def filled(values: Any) -> RunConfig | None:
    """As `typed`, for values that have every key and type already: OmegaConf takes fifty times as long.

    Returns None if a value needs conversion, is missing, or is invalid.
    """
    run = _filled(RunConfig, values)
    return run if isinstance(run, RunConfig) else None


_VARIANTS: dict[type, Mapping[str, type]] = {TaskConfig: TASKS, OptimizerConfig: OPTIMIZERS}
"""Classes whose keys depend on the `name` in them."""


def _filled(schema: type, values: Mapping[str, Any]) -> Any:
    hints = _hints(schema)
    if values.keys() != hints.keys():
        return None
    arguments: dict[str, Any] = {}
    for name, hint in hints.items():
        value = values[name]
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, dict):
                return None
            variants = _VARIANTS.get(hint, {})
            value = _filled(variants.get(value.get("name", ""), hint), value)
            if value is None:
                return None
        elif hint is not Any and not _is(value, hint):
            return None
        arguments[name] = value
    return schema(**arguments)


@cache
def _hints(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {field.name: hints[field.name] for field in fields(schema)}


def _is(value: Any, hint: Any) -> bool:
    """Whether the value is what the field says, to the letter: true is no 1, and 1 no 1.0."""
    if isinstance(hint, UnionType):
        return any(_is(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        (kind,) = get_args(hint)
        return isinstance(value, list) and (kind is Any or all(type(item) is kind for item in value))
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(type(key) is str for key in value)
    return type(value) is hint
