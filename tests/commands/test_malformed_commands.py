"""Command lines that can't be right: exit code 2, the key and a legal value named, nothing written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException

from hpc_parallel.config import diagnose
from hpc_parallel.config.checks.all_checks import find_problems
from hpc_parallel.config.compose import Composer
from hpc_parallel.config.resolve import resolve
from hpc_parallel.problems import ConfigError
from hpc_parallel.run import main
from tests.composed import composed
from tests.marks import in_full


@dataclass(frozen=True)
class Wrong:
    """`says`: what the message must hold (a key, a rule); `offers`: an override that it must propose."""

    command: str
    says: tuple[str, ...]
    offers: str | None = None


def wrong(command: str, *says: str, offers: str | None = None) -> Wrong:
    return Wrong(command, says, offers)


OF_16 = " training.global_batch_size=16"  # without it, a batch is chosen that fits
OWN_DATA = "data=dataset data.dataset._target_=tests.datasets.Sentences +data.dataset.count=9"
UNKNOWN = [
    wrong(
        f"{OWN_DATA} data.validation={{count:3}}",
        "data.validation has no such key yet",
        offers="+data.validation={count:3}",
    ),
    wrong("nodez=2", "nodez", offers="nodes=2"),
    wrong("preflight.action=stop", "preflight.action", offers="preflight.act=stop"),
    wrong("profile.window=2", "profile.window", offers="profile.steps=2"),
    wrong("profile=nsight launcher.modules=[nsight]", "profile = nsight", offers="profile=nsys"),
    wrong("cluster=grez", "cluster = grez", offers="cluster=gres"),
    wrong(
        "cluster.container=enroot launcher.container=x",
        "cluster.container = enroot",
        offers="cluster.container=pyxis",
    ),
    wrong("nodez=many", "nodez", offers="nodes=1"),
    wrong("training.step=5", "training.step", offers="training.steps=5"),
    wrong("steps=5", "steps", offers="training.steps=5"),
    wrong("strategy.name=tensor", "only a name, and strategy = data", offers="strategy=tensor"),
    wrong("-m strategy.name=tensor nodes=1,2", "only a name", offers="strategy=tensor"),
    wrong("optimizer.name=sdg", "only a name, and optimizer = adamw", offers="optimizer=sgd"),
    wrong("optimizer=sgd optimizer.name=adamw", "only a name", offers="optimizer=adamw"),
    wrong("stratgy=data", "stratgy", offers="strategy=data"),
    wrong("+nodez=2", "nodez", offers="nodes=2"),
    wrong("+foo=1", "no key foo"),
    wrong("script=a.py", "script=a.py: script is a table. Keys of script: file, module, command, "),
    wrong("strategy.foo=1", "no key strategy.foo"),
    wrong("launcher.extra.mail-type=END", "plus", offers="+launcher.extra.mail-type=END"),
    wrong(
        "launcher.environment={A:x}",
        "no key launcher.environment",
        offers="+cluster.environment={A:x}",
    ),
    wrong("launcher.setup=[ls${SCRATCH:-x}]", "launcher.setup[0]", "another key. Try \\${...} for"),
    wrong("strategy=pipelin", "strategy", "is not one of", "pipeline", offers="strategy=pipeline"),
    wrong("launcher=slrum", "launcher", offers="launcher=slurm"),
    wrong("data=imagenet", "data", offers="data=text"),
    wrong("strategy=null", "strategy", offers="strategy=data"),
    wrong(f"model=[{'a' * 300},tiny]", "model = [aaa", "is not one of", "Try model="),
    wrong("model=[1,2]", "model = [1,2]", "is not one of", "Try model="),
    wrong("hydra/launcher=submitit", "hydra/launcher", offers="hydra/launcher=basic"),
    wrong("~training.steps", "training.steps", "deleted"),
    wrong("~foo", "foo", "deleted"),
    wrong("~strategy", "strategy.name", "no value"),
    wrong("+strategy=data", "has a place already", offers="strategy=data"),
    wrong("model=[tiny,124m] nodez=2", "a run has one file of model/", "nodez=2", offers="model=tiny"),
    wrong(
        "-m strategy=[tensor,pipeline],data",
        "a run has one file of strategy/. Try strategy=tensor, or a sweep: run -m strategy=tensor,pipeline",
    ),
    wrong("jobs=tile", "jobs = tile is not one of batch_latency, ", offers="jobs=tiles"),
    wrong("-m jobs=nope nodes=x", "jobs = nope is not one of", "nodes = x", offers="nodes=1"),
    wrong("-m hydra.launcher._target_=x.Y jobs=tiles,microbatches", "a sweep has one", offers="jobs=tiles"),
    wrong("-m jobs=tiles,microbatches", "a sweep has one", offers="jobs=tiles"),
    wrong("-m jobs=tiles 'sweep.also=[\"nodse=1\"]'", "no key nodse", offers="nodes=1"),
    wrong("-m nodes=1,2 'sweep.also=[foo]'", "'foo' is not key=value"),
    wrong('-m nodes=1,2 \'sweep.also=["nodes=\\"1"]\'', "sweep.also"),
    wrong("-m nodes=1,2 'sweep.also=3'", "sweep.also"),
    wrong("-m seed=1,2 'sweep.also=[\"hydra.job.chdir=true\"]'", "Could not override 'hydra.job.chdir'"),
    wrong("--config-name nope", "primary config 'nope'"),
    wrong("--config-dir nowhere", "--config-dir nowhere: this folder does not exist"),
    wrong("--config-path /nowhere", "/nowhere"),
]
TYPES = [
    wrong("model.dim=99999999999999999999", "model.dim", "at most", offers="model.dim=2147483648"),
    wrong("nodes=99999999999 gpus_per_node=99999999999", "nodes = 99999999999", offers="gpus_per_node=1024"),
    wrong("seed=99999999999999999999", "seed", "at most", offers="seed=9223372036854775807"),
    wrong("training.steps=-99999999999999999999", "training.steps", "at least -2147483648"),
    wrong("name=.hidden", "name = .hidden", "hidden folder", offers="name=hidden"),
    wrong("data=tokens data.path=/dev/zero", "data.path = /dev/zero", "is no .npy file"),
    wrong("data.path=/dev/zero", "data.path = /dev/zero", "no file matches"),
    wrong("nodes=abc", "nodes = abc", "whole number", offers="nodes=1"),
    wrong("nodes=1.5", "nodes = 1.5", "whole number", offers="nodes=1"),
    wrong("nodes=", "nodes = ''", "whole number", offers="nodes=1"),
    wrong("nodes=null", "nodes = null", offers="nodes=1"),
    wrong("dry_run=maybe", "is not true or false. Try dry_run=true or ", offers="dry_run=false"),
    wrong("training.steps=1e3", "training.steps", offers="training.steps=1000"),
    wrong("optimizer.learning_rate=fast", "optimizer.learning_rate", "a number"),
    wrong("cluster.port=x", "cluster.port", offers="cluster.port=null"),
    wrong("launcher.setup=hello", "launcher.setup", "list", offers="launcher.setup=[hello]"),
    wrong("optimizer.betas=0.9", "optimizer.betas", "list of numbers", offers="optimizer.betas=[0.9,0.95]"),
    wrong("optimizer.betas=[a,b]", "optimizer.betas", "list of numbers", offers="optimizer.betas=[0.9,0.95]"),
    wrong("launcher.extra=foo", "launcher.extra", "table", offers="launcher.extra={}"),
    wrong("launcher.time_minutes=1:00:00", "launcher.time_minutes", offers="launcher.time_minutes=60"),
    wrong("launcher.time_minutes=2-12", "launcher.time_minutes", offers="launcher.time_minutes=3600"),
    wrong("launcher.time_minutes=90m", "launcher.time_minutes", offers="launcher.time_minutes=90"),
    wrong("nodes==2", "nodes==2", "key=value"),
    wrong("nodes", "nodes has no =", "key=value"),
    wrong("nodes=2 train.py --lr 3", "train.py is no key=value.", "try -- train.py at the end of the line"),
    wrong("launcher.setup=[a,b", "launcher.setup", "key=value"),
    wrong("'nodes=2 gpus_per_node=3'", "nodes=2", "key=value"),
    wrong("nodes=1,2", "nodes=1,2", "sweep", offers="nodes=1"),
    wrong(
        "task=script script.command=[true] 'script.arguments.a=b c,d'",
        "Try run -m 'script.arguments.a=b c,d', or one value: 'script.arguments.a=b c'.",
    ),
    wrong("strategy=data,pipeline", "several values are a sweep", offers="strategy=data"),
    wrong(
        "launcher.exclude=n1,n2 +launcher.extra.nodelist=n3,n4",
        "they are one: \"launcher.exclude='n1,n2'\". To sweep them: run -m launcher.exclude=n1,n2.",
        "For Slurm, they are one: \"+launcher.extra.nodelist='n3,n4'\".",
    ),
    wrong(
        "launcher.reservation=a,b launcher.reservatoin=c launcher.partitoin=d,e",
        "try \"+launcher.extra.reservation='a,b'\".",
        "try +launcher.extra.reservatoin=c.",
        "Try \"launcher.partition='d,e'\".",
    ),
    wrong("'launcher.exclude=n[1-2],n7'", "again for the shell. Try \"launcher.exclude='n[1-2],n7'\"."),
    wrong("'launcher.modules=a[b'", "again for the shell.\n"),
    wrong("'my train*.py'", "try -- 'my train*.py' at the end of the line"),
    wrong("+launcher.setup_too=a,b", "there is no key launcher.setup_too."),
    wrong("nodes=2 strategy=pipeline strategy.pipeline=1", "uses one device", offers="strategy.pipeline=2"),
    wrong("--config-dir nowhere -m jobs=mine", "--config-dir nowhere: this folder does not exist"),
    wrong("'name=${nope}'", "name", "nope"),
    wrong("'nodes=${nope}'", "nodes", "nope"),
    wrong("'name=${oc.env:HPC_PARALLEL_NOT_SET}'", "name", "HPC_PARALLEL_NOT_SET"),
    wrong("model._target_=null", "model._target_"),
    wrong("training.precison=bf16", "training.precison", offers="training.precision=bfloat16"),
    wrong("training.checkpoint_async=maybe", "training.checkpoint_async"),
    wrong("data=tokens", "data.path", "no value"),
    wrong("resume=runs/old", "resume", offers="resume=null"),
    wrong(
        "model=huggingface model.config.rms_norm_eps=1e-6", "plus", offers="+model.config.rms_norm_eps=1e-6"
    ),
    wrong("task=infr", "task = infr", "train", offers="task=infer"),
    wrong("task.repeats=5", "no key task.repeats"),
    wrong("task=infer task.batch_sizes=4", "list of whole numbers", offers="task.batch_sizes=null"),
]
COUNTED = [
    "nodes", "gpus_per_node", "training.steps", "training.global_batch_size", "training.microbatch_size",
    "training.log_every", "training.validate_every", "training.validation_samples", "strategy.microbatches",
    "strategy.stages_per_rank", "launcher.time_minutes", "launcher.cpus_per_device", "data.sequence_length",
    "data.max_bytes", "model.layers", "model.dim", "model.heads", "model.kv_heads", "model.ffn_dim",
    "model.vocab_size",
]  # fmt: skip
LAYOUTS = [
    wrong("strategy.pipeline=0", "strategy.pipeline = 0", offers="strategy.pipeline=1"),
    wrong("strategy.replicate=-2", "strategy.replicate = -2", offers="strategy.replicate=-1"),
    wrong("nodes=4 strategy.pipeline=3", "strategy.pipeline = 3", "4 devices", offers="strategy.pipeline=2"),
    wrong("strategy=single strategy.pipeline=3 nodes=4", "strategy.pipeline", offers="strategy.pipeline=4"),
    wrong("strategy=single nodes=2", "strategy = single", "2 devices", offers="strategy=data"),
    wrong("nodes=2 strategy.pipeline=-1", "strategy.replicate = -1", offers="strategy.replicate=1"),
    wrong("nodes=2 strategy.tile=2", "strategy.tile", "reads text", offers="strategy.tile=1"),
    wrong("strategy=pipeline nodes=8", "strategy.pipeline", "model.layers = 4",
          offers="strategy.pipeline=4 strategy.replicate=-1"),
    wrong("strategy=pipeline nodes=4 strategy.schedule=interleaved", "strategy.pipeline", "8 stages"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=interleaved strategy.stages_per_rank=1",
          "strategy.stages_per_rank = 1", offers="strategy.stages_per_rank=2"),
    wrong("strategy=pipeline nodes=2 strategy.stages_per_rank=2", "strategy.stages_per_rank = 2",
          offers="strategy.stages_per_rank=1"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=zbv strategy.stages_per_rank=3",
          "strategy.stages_per_rank = 3", offers="strategy.stages_per_rank=2"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=dualpipev strategy.microbatches=2",
          "strategy.microbatches = 2", "4 stages", offers="strategy.microbatches=4"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=dualpipev training.global_batch_size=2",
          "training.global_batch_size = 2", offers="training.global_batch_size=4"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=interleaved_zero_bubble strategy.microbatches=5"
          " training.global_batch_size=20", "strategy.microbatches = 5", "rounds",
          offers="strategy.microbatches=4"),
    wrong("strategy=pipeline nodes=4 strategy.pipeline=2 strategy.shard=2 strategy.schedule=zbv",
          "strategy.reshard = true", "zbv", offers="strategy.reshard=false"),
    wrong("strategy=pipeline nodes=8 strategy.pipeline=2 strategy.replicate=2 strategy.tensor=2"
          " strategy.schedule=zbv", "strategy.reshard = true", offers="strategy.reshard=false"),
    wrong("strategy=pipeline nodes=8 strategy.pipeline=2 strategy.context=2 strategy.tensor=2"
          " strategy.schedule=zbv", "strategy.reshard = true", offers="strategy.reshard=false"),
    wrong("strategy=pipeline nodes=4 strategy.pipeline=2 strategy.replicate=2 strategy.schedule=zbv"
          " strategy.gradient_compression=bfloat16", "strategy.gradient_compression = bfloat16",
          "splits the backward pass", offers="strategy.gradient_compression=none"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=zbv training.compile=true", "training.compile = true",
          "splits the backward pass", offers="training.compile=false"),
    wrong("strategy=model nodes=2 strategy.stages_per_rank=2", "strategy.stages_per_rank = 2", "naive",
          offers="strategy.stages_per_rank=1"),
    wrong("strategy=pipeline nodes=2 strategy.cuts=[4]", "strategy.cuts = [4]", "from 1 to 3",
          offers="strategy.cuts=[2]"),
    wrong("strategy=pipeline nodes=2 strategy.cuts=[1,2]", "strategy.cuts = [1,2]",
          offers="strategy.cuts=[2]"),
    wrong("strategy=pipeline nodes=4 strategy.cuts=[3,2,1]", "strategy.cuts = [3,2,1]", "rising",
          offers="strategy.cuts=[1,2,3]"),
    wrong("strategy=data nodes=2 strategy.cuts=[2]", "strategy.cuts = [2]", "one stage",
          offers="strategy.cuts=null"),
    wrong("strategy=pipeline nodes=2 strategy.balance=weights", "strategy.balance = weights",
          offers="strategy.balance=flops"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=1F1B", "strategy.schedule",
          offers="strategy.schedule=1f1b"),
    wrong("strategy=pipeline nodes=2 strategy.static_graph=true", "strategy.static_graph",
          offers="strategy.static_graph=false"),
    wrong("nodes=2 training.global_batch_size=15", "training.global_batch_size = 15", "2 replicas",
          offers="training.global_batch_size=16"),
    wrong("nodes=2 training.global_batch_size=15 training.microbatch_size=4", "global_batch_size = 15",
          offers="training.global_batch_size=16"),
    wrong("training.microbatch_size=5" + OF_16,
          "training.microbatch_size = 5", offers="training.microbatch_size=4"),
    wrong("strategy=pipeline nodes=2 strategy.microbatches=3" + OF_16,
          "strategy.microbatches = 3",
          offers="strategy.microbatches=4"),
    wrong("strategy=pipeline nodes=2 training.microbatch_size=4 strategy.microbatches=8" + OF_16,
          "training.microbatch_size = 4", "strategy.microbatches = 8", offers="training.microbatch_size=2"),
    wrong("strategy=pipeline nodes=4 strategy.microbatches=2", "strategy.microbatches = 2", "1f1b",
          offers="strategy.microbatches=4"),
    wrong("strategy=pipeline nodes=4 training.microbatch_size=8" + OF_16,
          "training.microbatch_size = 8", "1f1b",
          offers="training.microbatch_size=4"),
    wrong("strategy=pipeline nodes=4 training.global_batch_size=2", "training.global_batch_size = 2",
          offers="training.global_batch_size=4"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=interleaved strategy.microbatches=5"
          " training.global_batch_size=20", "strategy.microbatches = 5", "rounds",
          offers="strategy.microbatches=4"),
    wrong("strategy=tensor nodes=4", "strategy.tensor = 4", "model.kv_heads = 2",
          offers="strategy.tensor=2 strategy.replicate=-1"),
    wrong("strategy=hybrid nodes=2 gpus_per_node=4", "strategy.tensor = 4", "whole heads",
          offers="strategy.tensor=2"),
    wrong("strategy=tensor nodes=2 data.sequence_length=33", "data.sequence_length = 33", "positions",
          offers="data.sequence_length=34"),
    wrong("strategy=tensor nodes=2 gpus_per_node=2 strategy.tensor=2 strategy.context=2"
          " data.sequence_length=30", "data.sequence_length = 30", "divide by 4",
          "strategy.context = 2 and strategy.tensor = 2", offers="data.sequence_length=28"),
    wrong("strategy=context nodes=4 data.sequence_length=100", "data.sequence_length = 100", "divide by 8",
          "two slices", offers="data.sequence_length=104"),
    wrong("strategy=context nodes=2 strategy.context_attention=rign", "strategy.context_attention = rign",
          "ring, gather", offers="strategy.context_attention=ring"),
    wrong("strategy=context nodes=8 strategy.context_attention=all_to_all",
          "strategy.context_attention = all_to_all", "each of 8 devices whole heads", "model.heads = 4",
          offers="strategy.context_attention=ring"),
    wrong("strategy=context nodes=6 strategy.context_attention=all_to_all model.dim=96 model.heads=12 "
          "model.kv_heads=4 data.sequence_length=96", "each of 6 devices whole heads", "model.kv_heads = 4",
          offers="strategy.context_attention=gather"),
    wrong("strategy=tensor nodes=8 strategy.tensor=2 strategy.context=4 "
          "strategy.context_attention=all_to_all",
          "strategy.tensor leaves 2 and 1", offers="strategy.context_attention=ring"),
    wrong("strategy=context nodes=4 strategy.context=3", "strategy.context = 3", offers="strategy.context=4"),
    wrong("strategy=tensor nodes=2 model.vocab_size=257", "model.vocab_size = 257",
          offers="model.vocab_size=258"),
    wrong("strategy=tensor nodes=2 model.ffn_dim=345", "model.ffn_dim = 345", "columns",
          offers="model.ffn_dim=346"),
    wrong("strategy=dataparallel nodes=2 gpus_per_node=2", "nodes = 2", "one node", offers="nodes=1"),
    wrong("strategy=dataparallel gpus_per_node=4 strategy.tensor=2", "strategy.tensor = 2", "whole models",
          offers="strategy.tensor=1"),
    wrong("strategy=dataparallel gpus_per_node=4 strategy.replicate=1 strategy.shard=4",
          "strategy.shard = 4", "whole models", offers="strategy.shard=1 strategy.replicate=-1"),
    wrong("strategy=dataparallel gpus_per_node=4 training.microbatch_size=3" + OF_16,
          "training.microbatch_size = 3",
          offers="training.microbatch_size=4"),
    wrong("strategy=parameter_server", "gpus_per_node = 1", "server alone", offers="gpus_per_node=2"),
    wrong("strategy=parameter_server training.weights=bfloat16", "training.weights = ", "server alone"),
    wrong("strategy=parameter_server strategy.dedicated_server=false", "gpus_per_node = 1", "server alone",
          offers="gpus_per_node=2"),
    wrong("strategy=parameter_server nodes=4" + OF_16,
          "training.global_batch_size = 16", "3 replicas",
          offers="training.global_batch_size=18"),
    wrong("strategy=parameter_server nodes=4 strategy.replicate=4 training.global_batch_size=12",
          "strategy.replicate = 4", "without the server = 3 devices", offers="strategy.replicate=3"),
    wrong("strategy=parameter_server nodes=5 strategy.pipeline=2", "strategy.pipeline = 2", "whole models",
          offers="strategy.pipeline=1"),
    wrong("strategy=data strategy.execution=serve", "strategy.execution = serve", "spmd"),
    wrong("strategy=data nodes=2 strategy.gradient_compression=bf16", "strategy.gradient_compression = bf16",
          offers="strategy.gradient_compression=bfloat16"),
    *(wrong(f"{command} strategy.gradient_compression=bfloat16", "strategy.gradient_compression = bfloat16",
            "DistributedDataParallel", offers="strategy.gradient_compression=none")
      for command in ("strategy=fsdp nodes=2", "strategy=tensor nodes=2", "strategy=pipeline nodes=2",
                      "strategy=dataparallel gpus_per_node=2", "strategy=parameter_server nodes=3")),
    wrong("strategy=fsdp nodes=3" + OF_16,
          "training.global_batch_size = 16", "3 replicas",
          offers="training.global_batch_size=18"),
    wrong("strategy=hsdp nodes=2 gpus_per_node=2 strategy.replicate=3", "strategy.replicate = 3",
          offers="strategy.replicate=2"),
]  # fmt: skip
VALUES = [
    wrong("model.heads=5 model.kv_heads=5", "model.heads = 5", "model.dim = 128",
          offers="model.heads=4 model.kv_heads=4"),
    wrong("model.heads=128", "model.heads = 128", "even width", offers="model.heads=64"),
    wrong("model.kv_heads=3", "model.kv_heads = 3", "model.heads = 4", offers="model.kv_heads=2"),
    wrong("model.rope_theta=0", "model.rope_theta", offers="model.rope_theta=10000"),
    wrong("model.vocab_size=100", "model.vocab_size = 100", "255", offers="model.vocab_size=256"),
    wrong("model._target_=nowhere.Model", "model._target_", "no module nowhere"),
    wrong("model._target_=Model", "model._target_", "package.module.Class"),
    wrong("model._target_=hpc_parallel.models.transformer.Transfomer", "model._target_", "no Transfomer",
          offers="model._target_=hpc_parallel.models.transformer.Transformer"),
    wrong("data._target_=hpc_parallel.data.nothing.Data", "data._target_", "hpc_parallel.data.nothing"),
    wrong("data.path=/nowhere/x", "data.path", "does not exist"),
    wrong("data.path=txets", "data.path", "does not exist", offers="data.path=texts"),
    wrong("data.path=empty", "data.path = empty", "no file matches"),
    wrong("training.checkpoint_every=0", "training.checkpoint_every", offers="training.checkpoint_every=1"),
    wrong("training.keep_last=0", "training.keep_last", offers="training.keep_last=1"),
    wrong("training.keep_every=-2", "training.keep_every", offers="training.keep_every=1"),
    wrong("launcher.grace_s=0", "launcher.grace_s", offers="launcher.grace_s=90"),
    wrong("launcher.max_requeues=-1", "launcher.max_requeues", offers="launcher.max_requeues=20"),
    wrong("launcher.max_restarts=-1", "launcher.max_restarts", offers="launcher.max_restarts=0"),
    wrong("training.activation_checkpointing=some", "training.activation_checkpointing = some",
          "none, full, selective", offers="training.activation_checkpointing=none"),
    wrong("training.activation_checkpointing=selektive", "is not one of",
          offers="training.activation_checkpointing=selective"),
    wrong("strategy=pipeline nodes=2 strategy.schedule=zbv training.activation_checkpointing=selective",
          "training.activation_checkpointing = selective", "zbv",
          offers="training.activation_checkpointing=full"),
    wrong("strategy=fsdp nodes=2 strategy.prefetch=0", "strategy.prefetch = 0", "at least 1",
          offers="strategy.prefetch=1"),
    wrong("data.path=", "data.path", "does not exist"),
    wrong("data=tokens data.path=texts", "data.path", "tokenize"),
    wrong("data=tokens data.path=bare.npy", "bare.json is missing", "tokenize"),
    wrong("name=a/b", "name = a/b", offers="name=a-b"),
    wrong("name=50%", "name = 50%", offers="name=50"),
    wrong("name=..", "name", offers="name=run"),
    wrong("'name=\"a\nb\"'", "name", offers="name=a-b"),
    wrong("run_dir=full", "run_dir", "never overwritten", offers="run_dir=full-3"),
    wrong("run_dir=log%j", "run_dir", "%", offers="run_dir=runs/mine"),
    wrong("run_dir=full/file", "run_dir", "never overwritten"),
    wrong("training.precision=fp16", "training.precision", "float32, bfloat16, float16, float64"),
    wrong("training.precision=bf16", "training.precision", offers="training.precision=bfloat16"),
    wrong("device=gpu", "device = gpu", "auto, cpu, cuda"),
    wrong("launcher.kind=sbatch", "launcher.kind", "auto, local, slurm, script"),
    wrong("optimizer.learning_rate=0", "optimizer.learning_rate = 0", "above 0"),
    wrong("optimizer.learning_rate=-1", "optimizer.learning_rate = -1", "above 0"),
    wrong("optimizer.learning_rate=nan", "optimizer.learning_rate = nan", "above 0"),
    wrong("optimizer.learning_rate=inf", "optimizer.learning_rate = inf", "above 0"),
    wrong("optimizer.betas=[0.9]", "optimizer.betas", offers="optimizer.betas=[0.9,0.95]"),
    wrong("optimizer.betas=[0.9,1.0]", "optimizer.betas", offers="optimizer.betas=[0.9,0.95]"),
    wrong("optimizer.warmup_steps=1000", "optimizer.warmup_steps = 1000", "0 and 500"),
    wrong("cluster.port=80", "cluster.port = 80", "1024 and 65535", offers="cluster.port=29500"),
    wrong("data.validation_share=0.9", "data.validation_share", "0 and 0.5"),
    wrong("seed=-1", "seed = -1", offers="seed=0"),
    wrong("launcher.memory_gb=0", "launcher.memory_gb", "above 0", offers="launcher.memory_gb=16"),
    wrong("launcher.venv=/nowhere", "launcher.venv", "bin/activate"),
    wrong("launcher.partition=", "launcher.partition", offers="launcher.partition=null"),
    wrong("'launcher.modules=[\" \"]'", "launcher.modules[0]"),
    wrong("+launcher.extra.nodes=3", "launcher.extra.nodes", offers="nodes=3"),
    wrong("+launcher.extra.time=1:30:00", "launcher.extra.time", offers="launcher.time_minutes=90"),
    wrong("+launcher.extra.mem=64G", "launcher.extra.mem", offers="launcher.memory_gb=64"),
    wrong("+launcher.extra.gres=gpu:a100:4", "launcher.extra.gres", offers="gpus_per_node=4"),
    wrong("+launcher.extra.output=x", "launcher.extra.output", "launcher"),
    wrong("+launcher.extra.Mail_Type=END", "Mail_Type", offers="+launcher.extra.mail-type=END"),
    wrong("+launcher.extra.comment=[a]", "launcher.extra.comment", "one printable value"),
    wrong("+cluster.environment.NCCL-DEBUG=INFO", "NCCL-DEBUG",
          offers="+cluster.environment.NCCL_DEBUG=INFO"),
    wrong("cluster.master_suffix=a_b", "cluster.master_suffix", offers="cluster.master_suffix=i"),
    wrong("cluster.gpu_flag=gpus", "cluster.gpu_flag", offers="cluster.gpu_flag=gres"),
]  # fmt: skip
IMAGES = [
    wrong("model=convnet", "data = text", "ConvNet", offers="data=digits"),
    wrong("data=cells", "data = cells", "Transformer", offers="data=text"),
    wrong("model=segmenter data=digits", "data = digits", offers="data=cells"),
    *(wrong(f"model=convnet data=digits {key}=0", f"{key} = 0", "at least 1", offers=f"{key}={mend}")
      for key, mend in (("model.classes", 10), ("model.in_channels", 1), ("data.height", 32))),
    wrong("model=convnet data=digits strategy=context nodes=2", "strategy.context = 2", "reads images",
          offers="strategy.context=1 strategy.replicate=-1"),
    wrong("strategy=tile nodes=2", "strategy.tile = 2", "reads text",
          offers="strategy.tile=1 strategy.replicate=-1"),
    wrong("model=segmenter data=cells data.samples=-1", "data.samples = -1", offers="data.samples=4096"),
    wrong("model=convnet data=digits model.channels=[]", "model.channels = []", "each block"),
    wrong("model=convnet data=digits model.channels=[16,0]", "model.channels", "above 0"),
    wrong("model=convnet data=digits model.kernel_size=4", "model.kernel_size = 4",
          offers="model.kernel_size=5"),
    wrong("model=convnet data=digits model.in_channels=3", "model.in_channels", offers="model.in_channels=1"),
    wrong("model=convnet data=digits model.classes=3", "model.classes", offers="model.classes=10"),
    wrong("model=convnet data=digits data.width=36", "data.width = 36", "multiple of 8",
          offers="data.width=40"),
    wrong("model=convnet data=digits data.height=16", "data.height = 16", "5 blocks",
          offers="data.height=32"),
    wrong("model=segmenter data=cells data.height=100", "data.height = 100", offers="data.height=104"),
    wrong("model=unet data=cells data.height=100", "data.height = 100", "3 blocks", offers="data.height=104"),
    wrong("model=unet data=cells strategy=pipeline nodes=8", "strategy.pipeline = 8",
          "2 x the length of model.channels - 1 = 7", offers="strategy.pipeline=4 strategy.replicate=-1"),
    wrong("model=segmenter data=cells strategy=tile nodes=2 data.width=72", "data.width = 72", "2 tiles",
          offers="data.width=80"),
    wrong("model=convnet data=digits strategy=tile nodes=2", "data.width = 32", "2 tiles",
          offers="data.width=64"),
    wrong("model=segmenter data=cells strategy=tile nodes=4 strategy.tile=2 strategy.shard=-1",
          "strategy.shard = 2", "strategy.tile = 2", offers="strategy.shard=1 strategy.replicate=-1"),
    wrong("strategy=expert nodes=2 model=convnet data=digits", "strategy.expert = 2",
          "none (model=moe_tiny has)", offers="strategy.expert=1 strategy.replicate=-1"),
    wrong("strategy=expert nodes=2", "strategy.expert = 2", "none (model=moe_tiny has)",
          offers="strategy.expert=1 strategy.replicate=-1"),
    wrong("model=moe_tiny strategy=expert nodes=6", "strategy.expert = 6", "model.experts = 8",
          offers="strategy.expert=2 strategy.replicate=-1"),
    wrong("model=moe_tiny strategy=fsdp nodes=12 strategy.expert=2 training.global_batch_size=12",
          "strategy.shard = 6", "their width, 128", offers="strategy.shard=1 strategy.replicate=-1"),
    wrong("model=moe_tiny model.experts_per_token=1 model.renormalise=true", "model.renormalise = true",
          "learns nothing", offers="model.renormalise=false"),
    wrong("model=moe_tiny model.balance_step=0.1 strategy=dataparallel", "model.balance_step = 0.1",
          "every sample", offers="model.balance_step=0"),
    wrong("model=moe_tiny model.dense_layers=4", "model.dense_layers = 4", "model.layers = 4",
          offers="model.dense_layers=3"),
    wrong("model=moe_tiny strategy=tensor nodes=2 model.dense_layers=1 model.dense_ffn_dim=99",
          "model.dense_ffn_dim = 99", "strategy.tensor = 2", offers="model.dense_ffn_dim=100"),
    wrong("model.head_dim=5", "model.head_dim = 5", "even number", offers="model.head_dim=6"),
    wrong("model=moe_tiny model.experts_per_token=9", "model.experts_per_token = 9", "model.experts = 8",
          offers="model.experts_per_token=2"),
    wrong("model=segmenter data=cells strategy=fsdp nodes=4 strategy.tile=2", "strategy.shard = 2",
          "strategy.tile = 2", offers="strategy.shard=1 strategy.replicate=-1"),
    wrong("model=segmenter data=cells strategy=tile nodes=4 strategy.tile_grid=[3,1]",
          "strategy.tile_grid = [3,1]", "4 tiles", offers="strategy.tile_grid=[2,2]"),
    wrong("model=segmenter data=cells strategy=tile nodes=2 training.compile=true", "training.compile = true",
          "halos", offers="training.compile=false"),
    wrong("model=segmenter data=cells strategy=tensor nodes=2", "strategy.tensor = 2", "linear",
          offers="strategy.tensor=1 strategy.replicate=-1"),
    wrong("model=convnet data=digits strategy=tensor nodes=4", "model.classes = 10", "4",
          offers="model.classes=12"),
    wrong("model=convnet data=digits strategy=pipeline nodes=8", "strategy.pipeline = 8",
          "model.channels = 5"),
]  # fmt: skip
TASKS = [
    wrong("task.name=inference", "task.name = inference", offers="task.name=infer"),
    wrong("task=infer task.repeats=0", "task.repeats = 0", offers="task.repeats=100"),
    wrong("task=infer task.batch_sizes=[]", "task.batch_sizes = []", offers="task.batch_sizes=[1]"),
    wrong("task=infer task.batch_sizes=[0,4]", "numbers above 0", offers="task.batch_sizes=[1,4]"),
    wrong("task=infer nodes=2 task.batch_sizes=[1,3,8]", "multiples of 2", offers="task.batch_sizes=[2,4,8]"),
    wrong("task=generate model=convnet data=digits", "task = generate", "ConvNet", offers="task=infer"),
    wrong("task=generate model=segmenter data=cells strategy=tile nodes=2", "strategy.tile = 2",
          "task = generate", offers="strategy.tile=1 strategy.replicate=-1"),
    wrong("task=generate strategy=dataparallel gpus_per_node=2", "strategy = dataparallel", "to decode",
          offers="strategy=data"),
    wrong("task=generate task.prompts=[]", "task.prompts = []", "a byte or more", offers="task.prompts=null"),
    wrong("task=generate \"task.prompts=[a,'']\"", "task.prompts = [a,'']", offers="task.prompts=null"),
    wrong("task=generate task.prompt_length=129", "task.prompt_length = 129", "data.sequence_length = 128",
          offers="task.prompt_length=128"),
    *(wrong(f"task=generate task.{key}={least - 1}", f"task.{key} = {least - 1}", f"at least {least}",
            offers=f"task.{key}={mend}")
      for key, least, mend in (("prompt_length", 1, 32), ("new_tokens", 1, 128), ("show", 0, 4),
                               ("temperature", 0, 0))),
    wrong("task=generate training.compile=true", "training.compile = true", "every token",
          offers="training.compile=false"),
    wrong("task=generate task.temperature=nan", "task.temperature = nan", offers="task.temperature=0"),
]  # fmt: skip
HUGGINGFACE = [
    wrong("model=huggingface model.config.model_type=lama", "model.config.model_type = lama", "gpt2, llama",
          offers="model.config.model_type=llama"),
    wrong("model=huggingface model.config.model_type=null", "model.config.model_type = null",
          offers="model.config.model_type=llama"),
    wrong("model=huggingface +model.config.num_hiden_layers=2", "num_hiden_layers = 2 is not a key of",
          "llama's", "model.config.num_hidden_layers is", offers="++model.config.num_hiden_layers=null"),
    wrong("model=huggingface model.config.model_type=gpt2 +model.config.n_layer=2", "n_layer",
          "model.config.num_hidden_layers is", offers="++model.config.n_layer=null"),
    wrong("model=huggingface model.config.model_type=gpt2 model.config.num_key_value_heads=2",
          "not a key of gpt2's", offers="++model.config.num_key_value_heads=null"),
    wrong("model=huggingface model.config.model_type=gpt2 +model.config.resid_pdrop=0.1",
          "would depend on the layout", offers="++model.config.resid_pdrop=0"),
    wrong("model=huggingface model.config.model_type=mistral +model.config.sliding_window=64", "window",
          offers="++model.config.sliding_window=null"),
    *(wrong(f"model=huggingface model.config.{key}=null", f"model.config.{key} = null must be given")
      for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")),
    wrong("model=huggingface model.config.hidden_size=wide", "hidden_size = wide", "whole number",
          offers="model.config.hidden_size=128"),
    wrong("model=huggingface model.config.num_hidden_layers=0", "num_hidden_layers = 0", "at least 1",
          offers="model.config.num_hidden_layers=4"),
    wrong("model=huggingface model.config.num_attention_heads=5", "num_attention_heads = 5",
          "hidden_size = 128", offers="model.config.num_attention_heads=4"),
    wrong("model=huggingface model.config.num_key_value_heads=3", "num_key_value_heads = 3",
          offers="model.config.num_key_value_heads=4"),
    wrong("model=huggingface model.config.vocab_size=100", "model.config.vocab_size = 100", "255",
          offers="model.config.vocab_size=256"),
    wrong("model=huggingface strategy=pipeline nodes=8", "model.config.num_hidden_layers = 4",
          offers="strategy.pipeline=4 strategy.replicate=-1"),
    wrong("model=huggingface strategy=tensor nodes=8", "model.config.num_attention_heads = 4", "whole heads",
          offers="strategy.tensor=4 strategy.replicate=-1"),
    wrong("model=huggingface strategy=tensor nodes=2 model.config.vocab_size=257", "vocab_size = 257",
          offers="model.config.vocab_size=258"),
    wrong("model=huggingface strategy=tensor nodes=2 model.config.model_type=gpt2", "no tensor plan for gpt2",
          offers="strategy.tensor=1 strategy.replicate=-1"),
    wrong("model=huggingface strategy=tensor nodes=2 model.config.model_type=olmo2", "can't be followed",
          offers="strategy.tensor=1 strategy.replicate=-1"),
    wrong("model=huggingface model.config.model_type=gpt2 data.sequence_length=2048",
          "data.sequence_length = 2048", "learned positions", offers="data.sequence_length=1024"),
    wrong("model=huggingface model.config.model_type=gpt2 task=generate task.new_tokens=1000",
          "task.new_tokens = 1000", "with its prompt", offers="task.new_tokens=993"),
    wrong("model=huggingface data=digits", "data = digits", "HuggingFaceModel", offers="data=text"),
    wrong("model=huggingface strategy=tile nodes=2", "strategy.tile", "reads text",
          offers="strategy.tile=1 strategy.replicate=-1"),
]  # fmt: skip
SWEEPS = [
    wrong("-m nodes=1,x", "nodes = x", offers="nodes=1"),
    wrong("-m nodes=1,0 strategy=data sweep.on_invalid=stop", "nodes = 0", offers="nodes=1"),
    wrong("-m nodes=1,2 nodez=3", "nodez", offers="nodes=3"),
    wrong("-m strategy=data,pipelin", "strategy = pipelin", offers="strategy=pipeline"),
]
CHECKED = [*LAYOUTS, *VALUES, *IMAGES, *HUGGINGFACE, *TASKS]  # Hydra composes them; the checks refuse them
BY_COMMAND = [*UNKNOWN, *TYPES, *SWEEPS, *CHECKED[::25]]
SHARED_COMPOSER = cache(Composer)  # reads the files of a selection of groups once for all rows


@pytest.fixture
def here(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a few files of a user's."""
    (here / "texts").mkdir()
    (here / "texts" / "one.py").write_text("text = 1\n")
    (here / "empty").mkdir()
    (here / "bare.npy").touch()
    for folder in ("full", "full-2"):
        (here / folder).mkdir()
        (here / folder / "file").touch()
    monkeypatch.setattr(diagnose, "Composer", SHARED_COMPOSER)
    return here


def listing(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refused(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is told when `arguments` are refused, all of it on stderr."""
    code = main(arguments)
    told = capsys.readouterr()
    assert code == 2, told
    assert told.out == ""
    assert not GlobalHydra.instance().is_initialized()
    return told.err


def words_of(case: Wrong) -> list[str]:
    return shlex.split(case.command) + ["launcher=script"] * ("launcher=" not in case.command)


def command_of(case: Wrong) -> str:
    return case.command


def assert_explains(case: Wrong, message: str) -> None:
    for words in case.says:
        assert words in message
    if case.offers:
        assert re.search(rf"(Try|or|,|:) {re.escape(case.offers)}( or |, |\.$)", message, re.MULTILINE)


@pytest.mark.parametrize("case", CHECKED, ids=command_of)
def test_a_check_names_the_key_the_rule_and_a_legal_value(case: Wrong, here: Path) -> None:
    words = words_of(case)
    message = "\n".join(map(str, find_problems(resolve(composed(*words))[0], words)))
    assert_explains(case, message)
    assert_offers_are_legal(words, f"problems:\n{message}")


@pytest.mark.parametrize(
    "case", [*BY_COMMAND, *in_full((case,) for case in CHECKED if case not in BY_COMMAND)], ids=command_of
)
def test_a_wrong_command_is_refused(case: Wrong, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(here)
    message = refused(words_of(case), capsys)
    assert re.match(r"\d+ problems? in the configuration; nothing was started\.\n  ", message)
    assert "Traceback" not in message
    assert_explains(case, message)
    assert listing(here) == before


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [case for case in (*UNKNOWN, *TYPES) if "-m" not in case.command.split()], ids=command_of
)
def test_what_a_message_offers_is_legal(case: Wrong, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(case)
    assert_offers_are_legal(words, refused(words, capsys))


NO_FILE = "w" * 300  # longer than the name of a file may be


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["resume=NO_FILE"], "is not a run folder"),
        (["then=NO_FILE"], "names no command of a stage"),
        (["weights=NO_FILE"], "does not exist here"),
        (["NO_FILE"], "has no ="),
        (["--config-dir=NO_FILE"], "this folder does not exist"),
        (["launcher.venv=NO_FILE"], "is not a virtual environment"),
        (["script.working_directory=NO_FILE", "--", "ls"], "is not a folder"),
        (["--", "NO_FILE"], "is not on the PATH"),
        (["--", "./NO_FILE"], "does not exist"),
        (["--", "NO_FILE.py"], "does not exist in"),
    ],
)
def test_a_word_that_can_name_no_file_is_refused_by_its_key(
    words: list[str], says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused([word.replace("NO_FILE", NO_FILE) for word in words], capsys)
    assert NO_FILE in told
    assert says in told


@pytest.mark.parametrize("count", [0, -3])
def test_counts_are_at_least_one(count: int, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refused([f"{key}={count}" for key in COUNTED], capsys).splitlines()[1:]
    assert [
        line.partition(".  Try")[0].split(" Try")[0].strip() for line in told if "at least 1" in line
    ] == [f"{key} = {count} must be at least 1." for key in COUNTED]


OFFERED = re.compile(r"(.*?) Try (?:run -m [^ ]+, or one value: )?(.*)\.$")


def assert_offers_are_legal(words: Sequence[str], told: str) -> None:
    """Every value that a message proposes makes its problem go, and brings no other problem."""
    for line in told.splitlines()[1:]:
        match = OFFERED.match(line)
        if not match or "tokens.npy" in match[2] or "VALUE" in match[2]:  # an example, not a value
            continue
        complaint, offers = match[1].strip(), match[2]
        refused_key = re.split(r"[\s=:]", complaint.lstrip("+"), maxsplit=1)[0]
        for offer in re.split(r", (?=[+\w.]+=)| or (?=[+\w.]+=)|, or [a-z ]+: ", offers):
            mended = shlex.split(offer)
            if mended[:2] == ["run", "-m"]:  # a sweep
                continue
            gone = {refused_key, *(mend.partition("=")[0].lstrip("+") for mend in mended)}
            kept = [word for word in words if word.partition("=")[0].lstrip("+") not in gone]
            try:
                problems = [str(found) for found in find_problems(resolve(composed(*kept, *mended))[0])]
            except ConfigError as error:
                problems = list(map(str, error.problems))
            except HydraException:  # for another of the words
                problems = []
            assert not [p for p in problems if p.startswith((complaint, f"{refused_key} "))], offer
            others_remain = len(told.splitlines()) > 2
            assert others_remain or problems == [], offer


def test_all_problems_are_printed_in_the_order_of_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "nodes=2 nodez=3 training.precision=fp16 strategy.pipeline=3 launcher.time_minutes=1:00:00 +foo=1"
    told = refused([*words.split(), "data=tokens", "cluster.port=80"], capsys).splitlines()
    assert told[0] == "7 problems in the configuration; nothing was started."
    keys = [re.split(r"[\s=:]", line.strip())[0] for line in told[1:]]
    assert keys == [
        "nodez", "training.precision", "strategy.pipeline", "launcher.time_minutes", "+foo", "data.path",
        "cluster.port",
    ]  # fmt: skip


def test_a_sweep_starts_nothing_unless_all_its_runs_are_right(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(["-m", "nodes=1,0", "seed=1,-1", "sweep.on_invalid=stop", "launcher=script"], capsys)
    assert "2 problems" in told
    assert not (here / "runs").exists()


def write_tokens(folder: Path) -> None:
    (folder / "bare.json").write_text('{"vocab_size": 5000, "tokenizer": "x", "count": 40000}')
    os.truncate(folder / "bare.npy", 80_128)


def test_tokens_are_too_many_for_the_vocabulary(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokens(here)
    told = refused(["data=tokens", "data.path=bare.npy"], capsys)
    assert "model.vocab_size = 256 is too small for the data" in told
    assert "Try model.vocab_size=5000." in told


@pytest.mark.parametrize("prompt", ["five", "5000", "-1"])
def test_prompts_for_other_tokens_are_ids(
    prompt: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tokens(here)
    words = ["data=tokens", "data.path=bare.npy", "model.vocab_size=5000", "task=generate", "launcher=script"]
    assert main([*words, "task.prompts=['4999 0']", "dry_run=true"]) == 0
    capsys.readouterr()
    told = refused([*words, f"task.prompts=['4999 0','{prompt}']"], capsys)
    assert "must be token ids below 5000, as '5 3'. Try task.prompts=null." in told


def test_compiling_here_needs_a_compiler(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    told = refused(["training.compile=true", "launcher=local"], capsys)
    assert "training.compile = true needs a C++ compiler" in told
    assert "no-such-compiler" in told
    assert "Try training.compile=false." in told


def test_an_internal_error_is_not_blamed_on_the_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*words: object, **more: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("hpc_parallel.launch.checked_run.prepare", fault)
    with pytest.raises(ZeroDivisionError):
        main(["nodes=1"])


MINE = """
from torch import nn

class Mine(nn.Module):
    def __init__(self, **shape):
        super().__init__()

    def loss(self, output, target): ...
"""


def test_a_class_of_the_users_own_is_found_in_the_working_directory(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mymodel.py").write_text(MINE)
    unchecked = "launcher.check_imports=false"  # test_import_check.py has it: a process that imports torch
    assert main(["model._target_=mymodel.Mine", "launcher=script", "dry_run=true", unchecked]) == 0
    capsys.readouterr()
    told = refused(["model._target_=mymodel.Mien"], capsys)
    assert "there is no Mien in mymodel. Try model._target_=mymodel.Mine." in told
    shutil.rmtree(here / "__pycache__", ignore_errors=True)


def test_a_site_without_a_profile_is_sent_to_init_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster=lumi", "dry_run=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert line.startswith("  cluster = lumi is not one of address_suffix, cpu, efa, ")
    assert line.endswith(
        "Try python -m hpc_parallel init-cluster lumi, which writes a profile of this site, then "
        "--config-dir site cluster=lumi."
    )


@pytest.mark.parametrize("name", ["lumi", "roce2"])  # the second looks like a profile of ours
def test_a_profile_without_its_folder_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site" / "cluster"
    folder.mkdir(parents=True)
    (folder / f"{name}.yaml").write_text(f"name: {name}\n")
    assert main([f"cluster={name}", "dry_run=true"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        f"  cluster = {name} is in site/. Try cluster={name} --config-dir site."
    ]
    assert main(["--config-dir", "site", f"cluster={name}", "dry_run=true", "launcher=script"]) == 0


@pytest.mark.parametrize(
    ("file", "content", "folder", "line"),
    [
        ("site/cluster/mine.yaml", None, "site",
         "cluster=mine: {here}/site/cluster/mine.yaml must be a table of keys (Merge error: list is not a "
         "subclass of ClusterConfig. value: ['mine'])."),
        ("site/cluster/mine.yaml", "defaults: [/model: nothing]", "site",
         "cluster=mine: {here}/site/cluster/mine.yaml: Could not find 'model/nothing'."),
        ("site/cluster/mine.yml", "gpus: true", "site",
         "cluster = mine is not found: {here}/site/cluster/mine.yml must end in .yaml. "
         "Try mv {here}/site/cluster/mine.yml {here}/site/cluster/mine.yaml."),
        ("other/cluster/mine.yaml", "gpus: true", "other/cluster",
         "cluster = mine is not found: mine.yaml is in {here}/other/cluster itself. "
         "Try --config-dir {here}/other cluster=mine."),
    ],
)  # fmt: skip
def test_a_profile_that_can_not_be_used_says_why(
    file: str, content: str | None, folder: str, line: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("[mine]\n" if content is None else f"name: mine\n{content}\n")
    assert main(["--config-dir", folder, "cluster=mine", "dry_run=true", "launcher=script"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"  {line.format(here=tmp_path)}"]


def refusals_of_profile(content: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    file = Path("site/cluster/mine.yaml")
    file.parent.mkdir(parents=True)
    file.write_text(content)
    SHARED_COMPOSER.cache_clear()  # it knows the folders of the first command only
    told = refused(["--config-dir=site", "cluster=mine", "launcher=script"], capsys)
    SHARED_COMPOSER.cache_clear()
    return told.splitlines()[1:]


def test_all_keys_that_a_profile_has_wrong_are_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = "name: mine\ngpus_per_node: four\nacount: m1\nenvironment: [A=1]\nmodules: gcc\n"
    file = here / "site/cluster/mine.yaml"
    assert refusals_of_profile(content, capsys) == [
        f"  {file}, line 2: cluster.gpus_per_node is not a whole number.",
        f"  {file}, line 3: there is no key cluster.acount. Try account.",
        f"  {file}, line 4: cluster.environment is not a table {{key: value}}.",
        f"  {file}, line 5: cluster.modules is not a list [a,b] of texts.",
    ]


def test_a_profile_without_a_name_is_checked_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusals_of_profile("start: sru\n", capsys) == [
        "  cluster.name has no value and no default. Try cluster.name=mysite.",
        "  cluster.start = sru is not one of srun, torchrun, mpirun. Try cluster.start=srun.",
    ]
