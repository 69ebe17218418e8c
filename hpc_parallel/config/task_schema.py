"""The keys of each task and of your own script; `schema.py` says how its comments are used."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from hpc_parallel.config.script import STARTS, STOP_SIGNALS, STYLES
from hpc_parallel.rules import above, at_least, key, one_of, some_of

NAMES = ("train", "infer", "generate", "proof", "collectives", "preflight", "calibrate", "script")
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "send_recv", "barrier",
)  # fmt: skip
COLLECTIVE_DTYPES = ("float32", "bfloat16")
# Where `task.seconds` is null. A job has waited in a queue, and has more groups to measure; it takes at most
# half of its time limit.
LOCAL_SECONDS, JOB_SECONDS = 60.0, 300.0
SECONDS = replace(above(0, finite=False), legal=(LOCAL_SECONDS,))


@dataclass
class TaskConfig:
    """What the job does."""

    name: str = key(MISSING, one_of(*NAMES))  # The name of the task.


@dataclass
class InferConfig(TaskConfig):
    """Take the validation loss forward only, then time each batch size."""

    name: str = "infer"  # The name of the task.
    batch_sizes: list[int] | None = None  # Samples over all replicas; null: 1, 2, 4, ... for each replica.
    repeats: int = key(100, at_least(1))  # The most timed passes of each batch size.
    # Seconds for all passes, which decide their number and the largest batch size; null: 60 on this machine,
    # 300 in a job (at most half of its time limit).
    seconds: float | None = key(None, SECONDS)
    # Take the validation loss of each newest checkpoint of the run that `weights` names, until its training
    # ends, and time nothing. The lines also come into the metrics of that run.
    follow: bool = False


@dataclass
class GenerateConfig(TaskConfig):
    """Continue prompts token by token with a key-value cache."""

    name: str = "generate"  # The name of the task.
    prompts: list[str] | None = None  # The prompts; null: the beginnings of validation samples.
    prompt_length: int = key(32, at_least(1))  # Tokens in each of those beginnings.
    new_tokens: int = key(128, at_least(1))  # Tokens that are generated for each prompt.
    # The sampling temperature; 0 takes the most likely token (greedy).
    temperature: float = key(0.0, at_least(0, finite=False))
    # The number of texts that are printed; `generated.jsonl` has all of them.
    show: int = key(4, at_least(0))


@dataclass
class CollectivesConfig(TaskConfig):
    """Check and time collectives between all ranks, inside nodes, across nodes and over each axis."""

    name: str = "collectives"  # The name of the task.
    operations: list[str] | None = key(None, some_of(*COLLECTIVES))  # The collectives; null: all.
    # The types of numbers.
    dtypes: list[str] = key([*COLLECTIVE_DTYPES], some_of(*COLLECTIVE_DTYPES))
    min_bytes: int = key(8, at_least(1))  # The smallest size, counted as nccl-tests counts it.
    max_bytes: int | None = None  # The largest size; null: 1 GiB on GPUs, 64 MiB on CPUs.
    factor: int = key(4, at_least(2))  # Each size is the size before times this factor.
    # Seconds for all measurements, which decide the rounds and how many sizes lie between the smallest, the
    # middle and the largest; null: 60 on this machine, 300 in a job (at most half of its time limit).
    seconds: float | None = key(None, SECONDS)


@dataclass
class PreflightTaskConfig(TaskConfig):
    """Measure devices, storage, and each link between hosts, and name what is slow."""

    name: str = "preflight"  # The name of the task.
    # The size of messages between two hosts, and of sums inside a node.
    message_bytes: int = key(2**24, at_least(4))
    read_bytes: int = key(2**27, at_least(2**22))  # The size of the file that each process reads.
    storage: str | None = None  # The folder of these files; null: the run folder.
    # Seconds for all measurements: what does not fit is left out; null: 60 on this machine, 300 in a job (at
    # most half of its time limit).
    seconds: float | None = key(None, SECONDS)


@dataclass
class CalibrateConfig(TaskConfig):
    """Measure products, memory, launches and links for plans, and write a file of `hardware/`."""

    name: str = "calibrate"  # The name of the task.
    # Seconds for all measurements: what does not fit is left out; null: 60 on this machine, 300 in a job (at
    # most half of its time limit).
    seconds: float | None = key(None, SECONDS)


TASKS: dict[str, type[TaskConfig]] = {
    **dict.fromkeys(NAMES, TaskConfig),
    "infer": InferConfig, "generate": GenerateConfig, "collectives": CollectivesConfig,
    "preflight": PreflightTaskConfig, "calibrate": CalibrateConfig,
}  # fmt: skip


@dataclass
class ScriptConfig:
    """Your own script, which `task=script` starts ([Your own script](own-script.md)).

    What follows `--` on the command line becomes `file`, `module` or `command`, and `words`.
    """

    file: str | None = None  # A Python file to run.
    module: str | None = None  # A Python module to run, as `python -m` does.
    command: str | None = None  # A program to run: its path, or its name on the PATH.
    words: list[str] = field(default_factory=list)  # The first arguments, as they are.
    # More arguments by name, which a sweep may vary (`script.arguments.lr=1e-3,3e-4`).
    arguments: dict[str, Any] = field(default_factory=dict)
    # `ranks`: one process for each device; `torchrun`: torchrun starts them on each node; `node`: one process
    # for each node, which starts others itself.
    start: str = key("ranks", one_of(*STARTS))
    torchrun: list[str] = field(default_factory=list)  # Arguments of torchrun, one word each.
    style: str = key("--key value", one_of(*STYLES))  # How `script.arguments` are written.
    # A regular expression for lines that rank 0 prints; its named groups become metrics. It needs a group
    # `step`: `iter (?P<step>\d+): loss (?P<loss>[\d.]+)`.
    metrics: str | None = None
    # The signal that the script gets `launcher.grace_s` before the time limit and at a preemption; it then
    # saves and ends, and the job starts again.
    stop_signal: str = key("none", one_of(*STOP_SIGNALS))
    requeue_codes: list[int] = field(default_factory=list)  # Exit codes that ask for a new start.
    # Words that are added from the second start on, if the paths among them exist: `--resume {run}/last.pt`.
    resume_arguments: str | None = None
    # The folder in which the script runs, for example `{run}`; null: where the command was typed.
    working_directory: str | None = None
