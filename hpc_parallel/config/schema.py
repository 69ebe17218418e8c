"""The typed configuration: every key a user may set, with its default and its meaning.

The groups of `conf/` fill these dataclasses; Hydra refuses a key that is not here and a value of
another type. What can't be seen from one value alone is in `checks.py`.
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
    """How the devices are used: one degree an axis (-1: what is left), then the techniques' options."""

    name: str = MISSING
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    tile: int = 1
    # spmd: a process a device; dataparallel: one process drives a node's devices; parameter_server: rank 0
    # holds the weights and the optimizer, workers send gradients and get weights back
    execution: str = "spmd"
    # pipeline
    schedule: str = "1f1b"  # the names: config/schedules.py
    microbatches: int | None = None  # of one pipeline in one step; null: four a rank where that divides
    stages_per_rank: int | None = None  # null: 1, or 2 where the schedule wants several
    cuts: list[int] | None = None  # the block that each stage after the first starts with; null: balanced
    balance: str = "flops"  # what is made even over the stages: flops, parameters
    # replicate (DistributedDataParallel)
    bucket_mb: float = 25.0
    static_graph: bool = False  # every step uses the same weights in the same order
    gradient_compression: str = "none"  # none, bfloat16: what gradients are summed in
    # parameter_server (its messages are of bucket_mb too)
    dedicated_server: bool = True  # rank 0 serves and does nothing else; false: it works as well
    # shard (fully_shard)
    reshard: bool = True  # let a block's weights go after its forward pass; false: ZeRO-2
    prefetch: int | None = None  # blocks gathered ahead; null: torch's way, one ahead in the backward pass
    # context
    context_attention: str = "ring"  # ring, gather (all keys and values on each device)
    # tensor
    sequence_parallel: bool = True  # between layers a device keeps a slice of the sequence
    loss_parallel: bool = True  # logits stay split by vocabulary
    # tile
    tile_grid: list[int] | None = None  # [rows, columns]; null: the most square


@dataclass
class TransformerConfig:
    """Shape of the reference decoder (`models/transformer.py`)."""

    _target_: str = "hpc_parallel.models.transformer.Transformer"
    layers: int = MISSING
    dim: int = MISSING
    heads: int = MISSING
    kv_heads: int = MISSING  # grouped-query attention: divides heads
    ffn_dim: int = MISSING
    vocab_size: int = MISSING
    tied_head: bool = True  # the head's weight is the embedding's
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass
class HuggingFaceConfig:
    """A causal language model of the library transformers (`models/huggingface.py`)."""

    _target_: str = "hpc_parallel.models.huggingface.HuggingFaceModel"
    _convert_: str = "all"  # the library wants plain tables and lists
    config: dict[str, Any] = field(default_factory=dict)  # model_type, and keys of its own configuration


@dataclass
class ConvNetConfig:
    """Shape of the reference convnet (`models/convnet.py`): a label an image."""

    _target_: str = "hpc_parallel.models.convnet.ConvNet"
    channels: list[int] = field(default_factory=lambda: [16, 32, 128, 256, 512])  # of each block
    classes: int = 10
    in_channels: int = 1
    kernel_size: int = 3  # odd


@dataclass
class SegmenterConfig(ConvNetConfig):
    """The same blocks with a label for each pixel."""

    _target_: str = "hpc_parallel.models.convnet.Segmenter"
    channels: list[int] = field(default_factory=lambda: [16, 32, 128])
    classes: int = 2


@dataclass
class TextDataConfig:
    """Bytes of source files; the installed Python's standard library unless `path` names another folder."""

    _target_: str = "hpc_parallel.data.text.TextData"
    path: str | None = None  # a folder of text files, or one file
    pattern: str = "*.py"
    sequence_length: int = 128  # tokens a sample
    max_bytes: int = 6_000_000
    validation_share: float = 0.05  # of the files


@dataclass
class TokensDataConfig:
    """A file of token ids made by `python -m hpc_parallel tokenize`."""

    _target_: str = "hpc_parallel.data.tokens.TokensData"
    path: str = MISSING
    sequence_length: int = 1024  # tokens a sample
    validation_share: float = 0.05  # of the tokens, taken from the end


@dataclass
class DigitsDataConfig:
    """The handwritten digits of scikit-learn, 8 x 8 pixels, repeated over a larger canvas."""

    _target_: str = "hpc_parallel.data.images.DigitsData"
    height: int = 32  # pixels, a multiple of 8
    width: int = 32
    validation_share: float = 0.1  # of the images, taken from the end


@dataclass
class CellsDataConfig:
    """Drawn cells with masks, made where they are needed."""

    _target_: str = "hpc_parallel.data.images.CellsData"
    height: int = 64  # pixels
    width: int = 64
    samples: int = 4096  # to learn from; a tenth as many are held out
    seed: int = 0


@dataclass
class OptimizerConfig:
    """AdamW and its learning rate over the steps."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    weight_decay: float = 0.1  # matrices only; norms and biases are left alone
    schedule: str = "cosine"  # cosine, constant
    warmup_steps: int | None = None  # null: a twentieth of the steps
    final_share: float = 0.1  # of the learning rate, at the last step of a cosine


@dataclass
class TrainingConfig:
    """How long, how much at once, how exact, how often measured."""

    steps: int = 100
    global_batch_size: int = 16  # samples of one optimizer step, whatever the layout
    microbatch_size: int | None = None  # samples of one forward pass; null: what the layout leaves
    precision: str = "float32"  # float32, bfloat16 (autocast, float32 weights), float64
    clip_norm: float | None = 1.0
    on_nonfinite: str = "stop"  # a loss or gradient that is not finite: stop, skip (that step), rollback
    log_every: int = 10
    validate_every: int | None = 100  # steps; null: never
    validation_samples: int = 256
    measure_steps: int = 2  # timed by the profiler early in the run, after one that counts bytes; 0: none
    checkpoint_every: int | None = 500  # steps, and after the last; null: only where a signal ends the run
    checkpoint_async: bool = True  # written while training goes on
    keep_last: int = 2  # checkpoints
    keep_every: int | None = None  # steps; of these the checkpoints are kept for good; null: none
    activation_checkpointing: str = "none"  # none, full (recompute blocks), selective (all but products)
    compile: bool = False  # torch.compile for each block
    tensorboard: bool = False
    wandb: bool = False


@dataclass
class LauncherConfig:
    """Where the job runs and what is asked of Slurm."""

    kind: str = "auto"  # auto, local, slurm, script
    wait: bool = False  # follow a submitted job and exit with its outcome
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    wckey: str | None = None
    snapshot: bool = True  # keep the source with the run, and run that
    snapshot_mb: int = 64  # MiB: more is not source alone
    snapshot_exclude: list[str] = field(default_factory=list)  # patterns of files and folders not kept
    snapshot_credentials: bool = False  # true: keep also files that look like credentials (.env, *.pem, ...)
    shared_folder: bool = False  # true: others may write a folder above the run folder, and are trusted
    time_minutes: int = 60
    memory_gb: float | None = None  # a node; null: the partition's default
    cpus_per_device: int = 1
    modules: list[str] = field(default_factory=list)  # `module load`, in this order
    venv: str | None = None  # a virtual environment to activate in the job
    setup: list[str] = field(default_factory=list)  # shell commands before the job; a failing one stops it
    grace_s: int = 90  # before the time limit the run saves its state and ends
    max_requeues: int = 20  # starts that a time limit may be followed by; after a preemption, always
    max_restarts: int = 0  # starts that failures may be followed by which a new start can mend
    resubmit: bool = False  # where Slurm will not requeue the job, submit a new one
    extra: dict[str, Any] = field(default_factory=dict)  # any other sbatch flag, without its dashes


@dataclass
class ClusterConfig:
    """What is particular to a site: how GPUs are asked for, names, ports, fabric variables, patience."""

    name: str = MISSING
    gpus: bool = True  # false: a cluster of CPUs, nothing is asked for
    gpu_flag: str = "gpus-per-node"  # or gres
    gpu_type: str | None = None  # a100 in --gres=gpu:a100:4
    gpus_per_node: int | None = None  # what a node has, for gpus_per_node=auto; null: ask sinfo
    master_suffix: str = ""  # appended to the master's host name (some sites name the fast network so)
    port: int | None = None  # a fixed port for closed networks; null: one that is free
    start_timeout_s: float = 300.0  # for all ranks to arrive
    collective_timeout_s: float = 600.0
    hang_timeout_s: float | None = 300.0  # for a training rank without progress; null: any time
    environment: dict[str, Any] = field(default_factory=dict)  # NCCL_*, GLOO_*, FI_*, OMP_*: set where unset


@dataclass
class TaskConfig:
    """What the job does; a task with keys of its own has a schema below, in `TASKS`."""

    name: str = MISSING


@dataclass
class InferConfig(TaskConfig):
    """Forward only over the validation data, then how fast each batch size goes through."""

    name: str = "infer"
    batch_sizes: list[int] | None = None  # samples at once, of all replicas; null: 1, 2, 4, ... a replica
    repeats: int = 100  # timed passes of each batch size


@dataclass
class GenerateConfig(TaskConfig):
    """Prompts continued token by token, with keys and values kept."""

    name: str = "generate"
    prompts: list[str] | None = None  # null: the beginnings of a global batch of validation samples
    prompt_length: int = 32  # tokens, of those beginnings
    new_tokens: int = 128  # for each prompt
    temperature: float = 0.0  # of the draw; 0: the likeliest token (greedy)
    show: int = 4  # texts told at the end; all are in generated.jsonl


TASKS: dict[str, type[TaskConfig]] = {
    "train": TaskConfig, "infer": InferConfig, "generate": GenerateConfig, "proof": TaskConfig
}  # fmt: skip


@dataclass
class SweepConfig:
    """How the runs of `-m` go together."""

    on_invalid: str = "skip"  # a combination that can't run: skip (it is listed), stop (nothing starts)
    parallelism: int | None = None  # runs at once, of each array; null: no limit on Slurm, 1 on this machine
    wait: bool = False  # follow all runs until they end, and exit with their outcome
    resume: str | None = None  # a sweep folder: run only what is missing or failed in it
    objective: Any = "final_loss"  # what another sweeper gets of summary.json; a list: several figures
    also: list[str] = field(default_factory=list)  # more runs: overrides in one text, in place of the sweep's


@dataclass
class RunConfig:
    """One run, whole. `model`, `data` and `task` take the schema of the group file chosen, and `model` and
    `data` any class path."""

    nodes: int = 1
    gpus_per_node: int = 1  # devices a node, CPU processes where there are no GPUs; auto: all that a node has
    name: str = "${strategy.name}"
    run_dir: str | None = None  # the run folder itself; null: runs/<name>/<run id>
    seed: int = 0
    device: str = "auto"  # auto, cpu, cuda
    dry_run: bool = False
    resume: str | None = None
    weights: str | None = None  # to start from: a .safetensors file, or a run folder; null: initial ones
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    model: Any = MISSING
    data: Any = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def devices(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass
class ComposedConfig(RunConfig):
    """What Hydra composes: `gpus_per_node=auto` is a number only once the launcher and the site are known."""

    gpus_per_node: int | str = 1  # type: ignore[assignment]


def register() -> None:
    """Put the schemas where the files of `conf/` name them in their defaults lists, and let values be
    products: `${product:16,${nodes},${gpus_per_node}}`."""
    OmegaConf.register_new_resolver("product", lambda *factors: math.prod(factors), replace=True)
    store = ConfigStore.instance()
    store.store(name="run_schema", node=ComposedConfig)
    store.store(group="model", name="transformer_schema", node=TransformerConfig)
    store.store(group="model", name="huggingface_schema", node=HuggingFaceConfig)
    store.store(group="model", name="convnet_schema", node=ConvNetConfig)
    store.store(group="model", name="segmenter_schema", node=SegmenterConfig)
    store.store(group="data", name="text_schema", node=TextDataConfig)
    store.store(group="data", name="tokens_schema", node=TokensDataConfig)
    store.store(group="data", name="digits_schema", node=DigitsDataConfig)
    store.store(group="data", name="cells_schema", node=CellsDataConfig)
    for name, schema in TASKS.items():
        store.store(group="task", name=f"{name}_schema", node=schema)


def typed(config: Any) -> RunConfig:
    """The dataclass tree of a resolved configuration (a mapping or an OmegaConf node)."""
    task = TASKS.get(OmegaConf.select(OmegaConf.create(config), "task.name"), TaskConfig)
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig(task=task())), config)
    run = OmegaConf.to_object(merged)
    assert isinstance(run, RunConfig)
    return run


def filled(values: Any) -> RunConfig | None:
    """The same for values that have every key and every type already: OmegaConf takes fifty times as long.
    None where it is to convert, to complete or to complain."""
    run = _filled(RunConfig, values)
    return run if isinstance(run, RunConfig) else None


def _filled(schema: type, values: Mapping[str, Any]) -> Any:
    hints = _hints(schema)
    if values.keys() != hints.keys():
        return None
    found: dict[str, Any] = {}
    for name, hint in hints.items():
        value = values[name]
        if isinstance(hint, type) and is_dataclass(hint):
            if not isinstance(value, dict):
                return None
            hint = TASKS.get(value.get("name", ""), TaskConfig) if hint is TaskConfig else hint
            value = _filled(hint, value)
            if value is None:
                return None
        elif hint is not Any and not _is(value, hint):
            return None
        found[name] = value
    return schema(**found)


@cache
def _hints(schema: type) -> dict[str, Any]:
    hints = get_type_hints(schema)
    return {each.name: hints[each.name] for each in fields(schema)}


def _is(value: Any, hint: Any) -> bool:
    """Whether the value is what the field says, to the letter: true is no 1, and 1 no 1.0."""
    if isinstance(hint, UnionType):
        return any(_is(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(type(item) is get_args(hint)[0] for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(type(key) is str for key in value)
    return type(value) is hint
