"""The layout check: compares a layout with one device before a user's own model trains on the layout.

A small copy of the model, with random weights, takes two steps on this layout and on one device. A difference
stops the run. Equal results are recorded, so that the next run does not repeat the comparison.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_parallel.config.checks.suggestions import without_axis
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.data.dataset import bytes_of
from hpc_parallel.data.sampler import Data
from hpc_parallel.failure.error_place import located
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.schedules import schedule_of
from hpc_parallel.layout.step_facts import packs
from hpc_parallel.models.layered import STATISTICS, LayeredModel
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.proof.small_checks import check_loss, mixes_documents, mixes_positions
from hpc_parallel.proof.small_model import SmallRun, build_small
from hpc_parallel.proof.small_results import BUFFER, Results, on_layout, on_one_device, sometimes_used
from hpc_parallel.record.safe_write import write_json
from hpc_parallel.record.trust import UntrustedError, require_private
from hpc_parallel.strategies import exchange
from hpc_parallel.strategies.groups import Groups
from hpc_parallel.strategies.model_checks import DifferenceError, is_own
from hpc_parallel.user_code import UserCodeError, described

OWN_SHARE = 1e-5  # of a gradient's own norm: far above float64's rounding, far below a wrong layout
# The size of rounding noise in float64 and in float32, as a share of the whole gradient's norm. A gradient
# that is zero in exact arithmetic consists of such noise.
NOISE, NOISE_OF_FLOAT32 = 1e-12, 1e-6
MOST_WEIGHTS = {"cpu": 40_000_000, "cuda": 400_000_000}
WORST = 1e30  # JSON has no infinity
TASKS = ("train", "infer", "generate")


@located("the comparison with one device")
def verify(config: RunConfig, *, plan: Plan, data: Data, groups: Groups, device: torch.device) -> str | None:
    """Compare the layout of `config` with one device, unless the result is known or not needed.

    All ranks of the default process group call it together, after `model_checks` found no problem. Returns a
    line about the comparison, which rank 0 prints. Raises DifferenceError on all ranks.
    """
    mode, generates = config.strategy.verify, config.task.name == "generate"
    if config.task.name not in TASKS or not (is_own(config) or mode == "always"):
        return None
    if packs(config) and mode != "never" and config.task.name == "train":
        _check_documents(config, plan=plan, data=data, device=device)
    if config.devices == 1 and not generates:
        _check_alone(config, data=data, device=device)
        return None
    omitted = f"WARNING: {config.model_class} was not compared with one device on {plan.layout}"
    if mode == "never":
        return _say(f"{omitted} (strategy.verify=never).")
    model = build_small(config)
    run = SmallRun.of(config, plan=plan, model=model, data=data, device=device)
    equals = f"{config.model_class} equals one device on {plan.layout}"
    if generates:
        equals = f"With cached keys and values, {equals} for texts of {run.inputs.shape[1]} tokens"
    key = layout_check_key(run, model=model)
    folder = proofs_folder(os.environ)
    if mode == "auto" and exchange.broadcast(is_proven(key, folder=folder)):
        return _say(f"{equals}: an earlier run compared them")
    if reason := _too_large(model, device=device):
        return _say(f"{omitted}: {reason}")
    start = time.perf_counter()
    if config.task.name == "train":
        check_loss(build_small(config, as_random=False), seed=config.seed, data=data, device=device)
    largest = compare(run, model=model, groups=groups)
    if mixes_positions(run, build_small(config)):
        rule = (
            f"can't be used: {config.model_class} mixes positions outside of CausalAttention and "
            "FullAttention (docs/own-model.md), which only texts of more than "
            f"{run.inputs.shape[1]} tokens show"
        )
        raise DifferenceError([without_axis("context", rule, config=config, layout=run.layout)])
    if dist.get_rank() == 0:
        about = {"model": config.model["_target_"], "layout": str(plan.layout)}
        record_proof(key, folder=folder, about=about)
    took_s = time.perf_counter() - start
    return _say(f"{equals}: they differ by at most {largest:.0e} ({took_s:.1f} s)")


def _check_documents(config: RunConfig, *, plan: Plan, data: Data, device: torch.device) -> None:
    """Raises DifferenceError if the model lets packed documents see each other."""
    model = build_small(config)
    if mixes_documents(SmallRun.of(config, plan=plan, model=model, data=data, device=device), model):
        rule = (
            f"can't be used: {config.model_class} lets a document see the one before it in the sample. Hand "
            "`documents` on to CausalAttention (docs/own-model.md)"
        )
        raise DifferenceError([Problem("data.packing", True, rule, (False,))])


def _check_alone(config: RunConfig, *, data: Data, device: torch.device) -> None:
    """On one device there is nothing to compare. Check only that the model's loss is a sum of its terms."""
    if config.task.name == "train" and config.strategy.verify != "never":
        model = build_small(config, as_random=False)
        if reason := _too_large(model, device=device):
            _say(f"WARNING: the loss of {config.model_class} was not checked: {reason}")
        else:
            check_loss(model, seed=config.seed, data=data, device=device)


def _too_large(model: LayeredModel, *, device: torch.device) -> str | None:
    """Returns why a model of `build_small` takes too long, and the remedy."""
    weights = sum(weight.numel() for weight in model.parameters())
    if weights <= MOST_WEIGHTS[device.type]:
        return None
    name = type(model).__name__
    return (
        f"{len(model.blocks)} of its blocks have {weights:,} weights. "
        f"Define {name}.small, the arguments of a small model."
    )


def compare(run: SmallRun, *, model: LayeredModel, groups: Groups) -> float:
    """Returns the largest relative difference. Raises DifferenceError on all ranks.

    `model`: from `build_small`. The generators of random numbers keep their state.
    """
    config = run.config
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        reference = on_one_device(run, model)
        as_random = reference.is_finite
        if not as_random:
            _say(f"{config.model_class} starts with its own weights here: with random ones, it is not finite")
            reference = on_one_device(run, build_small(config, as_random=False))
        _require_gradients(run, as_random=as_random)
        try:
            small = build_small(config, as_random=as_random)
            result = on_layout(run, small, groups=groups, reference=reference)
        except ConfigError:
            raise
        except Exception as error:  # of the user's code, which worked on one device
            if run.layout.tensor == 1:
                raise
            raise UserCodeError([
                f"{described(error)}, raised by {config.model_class} on {run.layout}, but not on one device."
                f"{_advice(run)}"
            ]) from error  # fmt: skip
    noise = NOISE_OF_FLOAT32 if reference.rounds else NOISE
    by_rank: list[dict[str, float]] = exchange.all_gather(dict(_differences(result, reference, noise=noise)))
    differences: dict[str, float] = {}
    for rank in by_rank:
        for name, difference in rank.items():
            differences[name] = max(difference, differences.get(name, 0.0))
    if reasons := list(_reasons(result.losses, differences, reference=reference)):
        raise DifferenceError([
            f"{config.model_class} does not equal one device on {run.layout}: {'; '.join(reasons)}. Its code "
            f"or its hints do not fit this layout (docs/own-model.md).{_advice(run)} To start nevertheless, "
            "set strategy.verify=never."
        ])  # fmt: skip
    if written := [name for name in reference.written if not name.endswith(STATISTICS)]:
        _say(
            f"WARNING: the forward pass of {config.model_class} writes the buffer {written[0]}, once for "
            "each microbatch: results depend on their number."
        )
    return OWN_SHARE * max(differences.values(), default=0.0)


def _require_gradients(run: SmallRun, *, as_random: bool) -> None:
    """A split backward pass waits for the same gradients on every rank. `as_random`: as in `build_small`."""
    waits = run.layout.averaged > 1 or run.layout.by_fully_shard
    if run.config.task.name != "train" or not (waits and schedule_of(run.config.strategy).splits_backward):
        return
    if names := sometimes_used(run, build_small(run.config, as_random=as_random)):
        raise ConfigError([
            f"{run.config.model_class} uses {names[0]} for some samples only, and {run.layout} waits for its "
            "gradient on every device. Use it for all samples (times zero where it should not count), or "
            "strategy.schedule=1f1b."
        ])  # fmt: skip


def _advice(run: SmallRun) -> str:
    """Advice that works for every layer, if roles may be wrong; otherwise empty."""
    if run.layout.tensor == 1:
        return ""
    along = ", with strategy.sequence_parallel=false" if run.config.strategy.sequence_parallel else ""
    return (
        " Give the role alike to the module that contains layers that are not split"
        f"{along}; every device then computes all of it."
    )


def _differences(result: Results, reference: Results, *, noise: float) -> Iterator[tuple[str, float]]:
    """Yields the difference of each tensor, divided by the allowed difference. Above 1 the tensor is wrong.

    `noise`: the difference that is always allowed, as a share of the norm of all tensors of the kind.
    """
    for name, tensor in result.tensors.items():
        exact = reference.tensors.get(name)
        distance = float((tensor if exact is None else tensor - exact).norm())
        exact_norm = 0.0 if exact is None else float(exact.norm())
        allowed = noise * reference.norms.get(name, result.norms[name]) + OWN_SHARE * exact_norm
        if distance == 0:
            yield name, 0.0
        else:
            yield name, min(distance / allowed, WORST) if allowed and math.isfinite(distance) else WORST


def _reasons(losses: Sequence[float], differences: dict[str, float], *, reference: Results) -> Iterator[str]:
    """Yields clauses about the first loss and the first tensor that differ, in the order of the model."""
    for step, (loss, exact) in enumerate(zip(losses, reference.losses, strict=True), start=1):
        if not abs(loss - exact) <= OWN_SHARE * abs(exact):
            later = f" of step {step}" if step > 1 else ""
            yield f"the loss{later} is {loss:.6g} instead of {exact:.6g}"
            break
    missing = [name for name in reference.tensors if name not in differences]
    wrong = [name for name, difference in differences.items() if difference > 1]
    names = [name for name in (*reference.tensors, *wrong) if name in missing or name in wrong]
    if names:
        names.sort(key=lambda name: not name.startswith(BUFFER))  # a buffer may be why all gradients differ
        share = OWN_SHARE * differences.get(names[0], 0.0)
        off = "none" if names[0] in missing else f"off by {share:.1g} of its norm"
        yield f"{names[0]}: {off} ({len({*missing, *wrong})} of {len(reference.tensors)} differ)"


def _say(line: str) -> str:
    """Print on rank 0; returns the line."""
    if dist.get_rank() == 0:
        print(line, flush=True)
    return line


TECHNIQUES = ("strategies", "models", "proof", "worker")  # folders of this package


def layout_check_key(run: SmallRun, *, model: LayeredModel) -> str:
    """Hash what a layout check of `run` compares.

    That is the model's source and arguments, the techniques' source and options, the samples, their
    microbatches, and torch's version.
    """
    config = run.config
    content = {
        "torch": torch.__version__,
        "device": run.device.type,
        "samples": [_digest_of(x) for x in (run.inputs, run.targets, run.sequence) if x is not None],
        "microbatches": run.microbatches,
        "seed": config.seed,
        "generates": config.task.name == "generate",
        "model": config.model,
        "source": sorted({_digest(path) for path in _sources(model)}),
        "techniques": sorted({_digest(path) for path in _techniques()}),
        "strategy": asdict(replace(config.strategy, shares=None)),  # measured shares differ at each start
        "layout": run.layout.degrees,
        "checkpointing": config.training.activation_checkpointing,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _sources(model: LayeredModel) -> Iterator[Path]:
    """The files of the model's classes, and all imported modules that no package manager has installed."""
    kinds = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    package = Path(__file__).parents[1]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not path or not path.endswith(".py") or Path(path).is_relative_to(package):
            continue
        is_users = not any(Path(path).is_relative_to(folder) for folder in installed)
        if is_users or (name in kinds and name.partition(".")[0] != "torch"):
            yield Path(path)


def _techniques() -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for folder in TECHNIQUES:
        yield from (package / folder).rglob("*.py")


def _digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + bytes_of(tensor)).hexdigest()


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return str(path)


def proofs_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the proofs, below XDG_CACHE_HOME or ~/.cache."""
    cache = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache, "hpc_parallel", "proofs")


def is_proven(key: str, *, folder: Path) -> bool:
    """Whether the proof `key` (hexadecimal) is recorded, in a folder that only this user can change."""
    try:
        require_private(folder)
        return (folder / f"{key}.json").is_file()
    except (OSError, UntrustedError):
        return False


def record_proof(key: str, *, folder: Path, about: Mapping[str, object]) -> None:
    """Record the proof. If the folder can't be written, the next run only takes a few seconds longer."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(folder / f"{key}.json", {**about, "time": datetime.now(UTC).isoformat()})
    except OSError:
        pass
