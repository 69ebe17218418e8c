"""Check switches that most strategies allow against the few that don't, and against this machine."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from urllib.parse import urlparse

from hpc_parallel.config.checks.torch_version import too_old
from hpc_parallel.config.layout import SPMD, Layout, layout_of
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import Problem, Problems


def find_problems(config: RunConfig) -> Problems:
    try:
        layout = layout_of(config.strategy, devices=config.devices)
    except (ValueError, ZeroDivisionError):  # layout_checks reports it
        layout = Layout()
    yield from _selective(config, layout)
    if config.training.on_nonfinite == "rollback" and config.training.checkpoint_every is None:
        rule = "needs a checkpoint to go back to (training.checkpoint_every)"
        yield Problem("training.on_nonfinite", "rollback", rule, ("stop", "skip"))
    if config.training.compile:
        yield from _compiler(config)
    if config.training.compile_whole:
        yield from _compile_whole(config, layout)
    yield from _memory_budget(config)
    for switch, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.training, switch) and find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed here (pip install {package})"
            yield Problem(f"training.{switch}", True, rule, (False,))
    if config.training.wandb and not _can_use_wandb(config.cluster.environment):
        rule = "needs a login, and neither WANDB_API_KEY nor ~/.netrc has one (wandb login)."
        yield f"training.wandb = true {rule} Try +cluster.environment.WANDB_MODE=offline."


def _can_use_wandb(site_variables: Mapping[str, object]) -> bool:
    """Whether wandb finds a login here, as its own client looks for it, or needs none."""
    variables = {**{name: str(value) for name, value in site_variables.items()}, **os.environ}
    if variables.get("WANDB_API_KEY") or variables.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    host = urlparse(variables.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(variables.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _selective(config: RunConfig, layout: Layout) -> Problems:
    """torch returns a kept result once, so the second half of a split backward pass would get none."""
    strategy, keeps = config.strategy, config.training.activation_checkpointing
    if keeps == "selective" and (problem := selective_problem()):
        yield problem
    if layout.pipeline > 1 and schedule_of(strategy).splits_backward and keeps == "selective":
        rule = (
            f"can't be combined with strategy.schedule = {strategy.schedule}, which splits the backward pass"
        )
        yield Problem("training.activation_checkpointing", keeps, rule, ("full", "none"))


def selective_problem() -> Problem | None:
    """Before torch 2.12, a block that overwrites a kept result could not be noticed."""
    rule = too_old((2, 12))
    if rule is None:
        return None
    return Problem("training.activation_checkpointing", "selective", rule, ("full", "none"))


def _memory_budget(config: RunConfig) -> Problems:
    """The compiler spends the budget, on what no other switch has decided already."""
    training = config.training
    if training.memory_budget is None:
        return
    if not training.compile:
        rule = "needs training.compile=true: the compiler chooses what is computed again"
        yield Problem("training.memory_budget", training.memory_budget, rule, (None,))
    elif training.activation_checkpointing != "none":
        rule = "can't be combined with training.memory_budget, which decides the same"
        yield Problem("training.activation_checkpointing", training.activation_checkpointing, rule, ("none",))


def _compile_whole(config: RunConfig, layout: Layout) -> Problems:
    """One graph of the whole model leaves no place for what a strategy or switch puts around its blocks."""
    training, strategy = config.training, config.strategy
    divided = [
        f"{axis}={degree}" for axis, degree in layout.degrees.items() if axis != "replicate" and degree > 1
    ]
    reasons = (
        (not training.compile, "needs training.compile=true"),
        (
            bool(divided),
            f"can't be used: strategy.{', strategy.'.join(divided)} divides the model or its samples",
        ),
        (strategy.execution != SPMD, f"can't be used: strategy={strategy.name} does more around the model"),
        (
            training.activation_checkpointing != "none",
            f"can't be used with training.activation_checkpointing={training.activation_checkpointing}",
        ),
        (
            training.fp8 != "off",
            f"can't be used with training.fp8={training.fp8}: it was compared in blocks only",
        ),
        (
            not str(config.model.get("_target_", "")).startswith("hpc_parallel.models."),
            "is for the models of this package: yours are compiled block by block",
        ),
    )
    for applies, rule in reasons:
        if applies:
            yield Problem("training.compile_whole", True, rule, (False,))


def _compiler(config: RunConfig) -> Problems:
    compiler = os.environ.get("CXX", "g++")  # torch uses the same rule
    if _runs_here(config) and shutil.which(compiler) is None:
        rule = f"needs a C++ compiler, but there is no {compiler} here (install g++, or set CXX)"
        yield Problem("training.compile", True, rule, (False,))


def _runs_here(config: RunConfig) -> bool:
    kind = config.launcher.kind
    return kind == "local" or (kind == "auto" and shutil.which("sbatch") is None)
