"""What can't be true together, found on the login node: every contradiction at once, each with its mend."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_parallel.config import image_checks, site_checks
from hpc_parallel.config.layout import AXES, BatchPlan, Layout, divisors, plan_batch
from hpc_parallel.config.problems import Found, Problem, nearest
from hpc_parallel.config.schema import RunConfig, StrategyConfig, TransformerConfig
from hpc_parallel.config.targets import missing_part

CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "strategy.schedule": ("gpipe", "1f1b", "interleaved"),
    "optimizer.name": ("adamw",),
    "optimizer.schedule": ("cosine", "constant"),
    "training.precision": ("float32", "bfloat16", "float64"),
    "launcher.kind": ("auto", "local", "slurm", "script"),
    "cluster.gpu_flag": ("gpus-per-node", "gres"),
}
# An axis can be used once the file of its technique is there: strategies/<axis>.py.
TECHNIQUES = {file.stem for file in (Path(__file__).parents[1] / "strategies").glob("*.py")}
INTERLEAVED = ("interleaved",)
# Keys of the public contract whose work is still to be done, with the one value that they take now.
NOT_YET: dict[str, tuple[Any, str]] = {
    "resume": (None, "runs keep no checkpoints so far"),
    "training.checkpoint_every": (None, "runs keep no checkpoints so far"),
    "training.activation_checkpointing": ("none", "activations are always kept"),
    "training.compile": (False, "models run as they are written"),
}


def find_problems(config: RunConfig, overrides: Sequence[str] = ()) -> list[Problem | str]:
    """All that is wrong with `config`, in the order of the command line's `overrides`."""
    checks = (
        _counts, _choices, _ranges, _layout, _model, _data,
        image_checks.find_problems, site_checks.find_problems, _switches,
    )  # fmt: skip
    return in_order([problem for check in checks for problem in check(config)], overrides)


def in_order(problems: Sequence[Problem | str], overrides: Sequence[str]) -> list[Problem | str]:
    """Sorted as the command line names the keys; problems of keys that it doesn't name come last."""
    keys = [override.partition("=")[0].lstrip("+~") for override in overrides]

    def place(problem: Problem | str) -> int:
        text = problem.key if isinstance(problem, Problem) else problem.lstrip("+~")
        key = re.split(r"[\s=:]", text, maxsplit=1)[0]
        named = [i for i, name in enumerate(keys) if key == name or key.startswith(f"{name}.")]
        return named[-1] if named else len(keys)

    return sorted(problems, key=place)


def value_at(config: RunConfig, key: str) -> Any:
    """The value of a dotted key; None where a free-form table doesn't have it."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else getattr(node, part)
    return node


def _counts(config: RunConfig) -> Found:
    """What is counted is at least one."""
    keys = [
        "nodes", "gpus_per_node", "training.steps", "training.global_batch_size",
        "training.microbatch_size", "training.log_every", "training.validate_every",
        "training.validation_samples", "strategy.microbatches", "strategy.stages_per_rank",
        "launcher.time_minutes", "launcher.cpus_per_device", "data.sequence_length", "data.max_bytes",
    ]  # fmt: skip
    if _is_transformer(config):
        sizes = ("layers", "dim", "heads", "kv_heads", "ffn_dim", "vocab_size")
        keys += [f"model.{name}" for name in sizes]
    for key in keys:
        count = value_at(config, key)
        if isinstance(count, int) and count < 1:
            yield Problem(key, count, "must be at least 1", (256 if key == "model.vocab_size" else 1,))


def _choices(config: RunConfig) -> Found:
    for key, choices in CHOICES.items():
        value = value_at(config, key)
        if value not in choices:
            close = nearest(str(value), choices) or choices[:1]
            yield Problem(key, value, f"is not one of {', '.join(choices)}", tuple(close))


def _ranges(config: RunConfig) -> Found:
    """Numbers inside their interval: key, its least, its most, whether the ends count, a legal value."""
    steps = max(1, config.training.steps)  # of a count that is wrong, _counts speaks
    table: list[tuple[str, float, float, bool, Any]] = [
        ("seed", 0, 2**63 - 1, True, 0),
        ("optimizer.learning_rate", 0, math.inf, False, 0.001),
        ("optimizer.eps", 0, math.inf, False, 1e-8),
        ("optimizer.weight_decay", 0, math.inf, True, 0.1),
        ("optimizer.final_share", 0, 1, True, 0.1),
        ("optimizer.warmup_steps", 0, steps, True, steps // 20),
        ("training.clip_norm", 0, math.inf, False, 1.0),
        ("strategy.bucket_mb", 0, math.inf, False, 25),
        ("launcher.memory_gb", 0, math.inf, False, 16),
        ("cluster.port", 1024, 65535, True, 29500),
        ("cluster.start_timeout_s", 0, math.inf, False, 300),
        ("cluster.collective_timeout_s", 0, math.inf, False, 600),
        ("data.validation_share", 0, 0.5, False, 0.05),
    ]
    for key, least, most, closed, legal in table:
        value = value_at(config, key)
        if value is None:
            continue
        inside = least <= value <= most if closed else least < value < most
        if not inside or not math.isfinite(value):
            bounds = f"{least:g}" if most == math.inf else f"{least:g} and {most:g}"
            word = "must be above" if most == math.inf and not closed else "must be at least"
            word = word if most == math.inf else "must lie between"
            yield Problem(key, value, f"{word} {bounds}", (legal,))
    betas = config.optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        yield Problem(
            "optimizer.betas", betas, "must be two numbers from 0 up to, not with, 1", ([0.9, 0.95],)
        )


def _layout(config: RunConfig) -> Found:
    """Degrees against devices, stages against blocks, batch against both."""
    strategy = config.strategy
    if config.nodes < 1 or config.gpus_per_node < 1:
        return
    devices = config.nodes * config.gpus_per_node
    broken = False
    for axis in AXES:
        degree = getattr(strategy, axis)
        if degree < 1 and degree != -1:
            broken = True
            yield Problem(f"strategy.{axis}", degree, "must be at least 1, or -1 for what is left", (1, -1))
        elif degree != 1 and axis not in TECHNIQUES:
            broken = True
            yield Problem(f"strategy.{axis}", degree, "asks for an axis that has no technique yet", (1,))
    free = [axis for axis in AXES if getattr(strategy, axis) == -1]
    if len(free) > 1:
        for axis in free[1:]:
            rule = f"leaves two axes open, as strategy.{free[0]} is -1 too"
            yield Problem(f"strategy.{axis}", -1, rule, (1,))
    if broken or len(free) > 1:
        return
    try:
        layout = Layout.resolve(strategy, devices=devices)
    except ValueError:
        yield _degrees_problem(config, strategy, devices, free)
        return
    yield from _stages(config, layout)
    yield from _batch(config, layout)
    yield from _splits(config, layout)


def _degrees_problem(config: RunConfig, strategy: StrategyConfig, devices: int, free: list[str]) -> Problem:
    set_axes = {axis: getattr(strategy, axis) for axis in AXES if getattr(strategy, axis) > 1}
    product = math.prod(set_axes.values())
    where = f"nodes={config.nodes} x gpus_per_node={config.gpus_per_node} = {devices} devices"
    if not set_axes:
        rule = f"uses one device, but there are {where}"
        return Problem("strategy", strategy.name, rule, ("data", "pipeline"))
    axis, degree = max(set_axes.items(), key=lambda item: item[1])
    rest = product // degree
    if free:
        legal = [d for d in divisors(devices) if d * rest <= devices and devices % (d * rest) == 0]
        rule = f"does not divide {where}" if rest == 1 else f"times {rest} does not divide {where}"
    else:
        legal = [devices // rest] if devices % rest == 0 else []
        rule = f"makes {product} of the axes together, but there are {where}"
    if axis == "pipeline" and (layers := _blocks(config)[1]) is not None:
        legal = [d for d in legal if d * stages_per_rank(strategy) <= layers]
    legal.sort(key=lambda d: abs(d - degree))
    return Problem(f"strategy.{axis}", degree, rule, tuple(sorted(legal[:2])))


def _stages(config: RunConfig, layout: Layout) -> Found:
    """Every stage needs a block, and the schedule as many stages a rank as it is made for."""
    strategy = config.strategy
    interleaved = strategy.schedule in INTERLEAVED
    if layout.pipeline == 1:
        return
    if strategy.static_graph:
        rule = "can't be in a pipeline, which accumulates gradients from its first step on"
        yield Problem("strategy.static_graph", True, rule, (False,))
    per_rank = stages_per_rank(strategy)
    if interleaved != (per_rank > 1):
        rule = f"does not fit strategy.schedule = {strategy.schedule}"
        yield Problem("strategy.stages_per_rank", per_rank, rule, (2 if interleaved else 1,))
    stages = layout.pipeline * per_rank
    key, layers = _blocks(config)
    if layers is not None and stages > layers >= 1:
        most = max((d for d in divisors(layout.devices) if d * per_rank <= layers), default=1)
        others_fixed = -1 not in (getattr(strategy, axis) for axis in AXES if axis != "pipeline")
        along = ("strategy.replicate=-1",) if others_fixed and most < layout.pipeline else ()
        detail = f" ({layout.pipeline} ranks x {per_rank})" if per_rank > 1 else ""
        rule = f"gives {stages} stages{detail}, more than {key} = {layers}: each needs a block"
        yield Problem("strategy.pipeline", layout.pipeline, rule, (most,), along)


def _blocks(config: RunConfig) -> tuple[str, int | None]:
    """How many blocks the model has, and what says so; None where only its class knows."""
    known = config.model if isinstance(config.model, dict) else {}
    if isinstance(known.get("channels"), list):
        return "the length of model.channels", len(known["channels"])
    return "model.layers", known["layers"] if isinstance(known.get("layers"), int) else None


def stages_per_rank(strategy: StrategyConfig) -> int:
    return strategy.stages_per_rank or (2 if strategy.schedule in INTERLEAVED else 1)


def _batch(config: RunConfig, layout: Layout) -> Found:
    """The global batch splits over replicas and microbatches without remainder."""
    training, strategy = config.training, config.strategy
    batch, size, count = training.global_batch_size, training.microbatch_size, strategy.microbatches
    if any(number is not None and number < 1 for number in (batch, size, count)):
        return
    if batch % layout.data:
        rule = f"does not divide by the {layout.data} replicas: each needs as many samples"
        unit = layout.data * (size or 1) * (count or 1)
        yield Problem("training.global_batch_size", batch, rule, _multiples_near(batch, unit))
        return
    samples = batch // layout.data
    key, value = ("strategy.microbatches", count) if count else ("training.microbatch_size", size)
    try:
        plan = plan_batch(batch, layout=layout, microbatch_size=size, microbatches=count)
    except ValueError:
        assert value is not None
        if count and size and samples % count == 0:
            rule = f"contradicts strategy.microbatches = {count}, with {samples} samples a replica"
            yield Problem("training.microbatch_size", size, rule, (samples // count, None))
        else:
            rule = f"does not divide the {samples} samples that each of {layout.data} replicas has a step"
            near = sorted(divisors(samples), key=lambda d: abs(d - value))[:2]
            yield Problem(key, value, rule, tuple(sorted(near)))
        return
    stages = layout.pipeline * stages_per_rank(strategy)
    if layout.pipeline == 1:
        return
    if strategy.schedule == "1f1b" and plan.microbatches < stages:
        rule = f"leaves stages without work: 1f1b wants at least as many as its {stages} stages"
        legal = [d for d in divisors(samples) if d >= stages][:2]
        if legal:
            yield _microbatches_problem(config, plan, rule, legal)
        else:
            rule = f"gives a replica {samples} samples, too few for {stages} microbatches of 1f1b"
            yield Problem("training.global_batch_size", batch, rule, (stages * layout.data,))
    elif strategy.schedule in INTERLEAVED:
        rounds = max(1, plan.microbatches // layout.pipeline)
        if plan.microbatches % rounds:
            fitting = [d for d in divisors(samples) if d % max(1, d // layout.pipeline) == 0]
            near = sorted(fitting, key=lambda d: abs(d - plan.microbatches))[:2]
            rule = f"does not split into {rounds} equal rounds of {layout.pipeline} stages"
            yield _microbatches_problem(config, plan, rule, sorted(near))


def _splits(config: RunConfig, layout: Layout) -> Found:
    """What the tensor axis splits divides by its degree: heads, columns, vocabulary, sequence."""
    degree = layout.tensor
    if degree == 1:
        return
    if _is_transformer(config):
        sizes = {name: config.model[name] for name in ("heads", "kv_heads", "ffn_dim", "vocab_size")}
        if min(sizes.values()) < 1:
            return
        if math.gcd(sizes["heads"], sizes["kv_heads"]) % degree:
            yield _heads_problem(config, layout, heads=sizes["heads"], kv_heads=sizes["kv_heads"])
            return
        for name, what in (("ffn_dim", "columns"), ("vocab_size", "rows of the embedding")):
            if sizes[name] % degree:
                rule = f"does not divide by strategy.tensor = {degree}: each device has as many {what}"
                above = -(-sizes[name] // degree) * degree  # below, a vocabulary would lose tokens
                yield Problem(f"model.{name}", sizes[name], rule, (above,))
    length = config.data.get("sequence_length") if isinstance(config.data, dict) else None
    if config.strategy.sequence_parallel and isinstance(length, int) and length >= 1 and length % degree:
        rule = f"does not divide by strategy.tensor = {degree}: each device keeps as many positions"
        yield Problem("data.sequence_length", length, rule, _multiples_near(length, degree))


def _heads_problem(config: RunConfig, layout: Layout, *, heads: int, kv_heads: int) -> Problem:
    others = {axis: getattr(config.strategy, axis) for axis in AXES if axis != "tensor"}
    free = -1 in others.values()  # else replicate takes what a smaller degree leaves
    fixed = [d for axis, d in others.items() if d > 1 and (free or axis != "replicate")]
    legal = divisors(math.gcd(heads, kv_heads, layout.devices // math.prod(fixed)))
    near = sorted(legal, key=lambda d: abs(d - layout.tensor))[:2]
    along = () if free else ("strategy.replicate=-1",)
    counts = f"model.heads = {heads} and model.kv_heads = {kv_heads}"
    rule = f"does not divide {counts}: each device needs whole heads"
    return Problem("strategy.tensor", layout.tensor, rule, tuple(sorted(near)), along)


def _microbatches_problem(config: RunConfig, plan: BatchPlan, rule: str, legal: Sequence[int]) -> Problem:
    """Said of the key that decides the count: the size of a microbatch where the user set that."""
    size = config.training.microbatch_size
    if size is None:
        return Problem("strategy.microbatches", plan.microbatches, rule, tuple(legal))
    sizes = tuple(plan.samples_per_replica // count for count in legal)
    along = () if config.strategy.microbatches is None else ("strategy.microbatches=null",)
    return Problem(
        "training.microbatch_size",
        size,
        f"makes {plan.microbatches} microbatches, which {rule}",
        sizes,
        along,
    )


def _multiples_near(value: int, unit: int) -> tuple[int, ...]:
    below = value // unit * unit
    return (below, below + unit) if below else (unit,)


def _is_transformer(config: RunConfig) -> bool:
    return isinstance(config.model, dict) and config.model.get("_target_") == TransformerConfig._target_


def _model(config: RunConfig) -> Found:
    if not isinstance(config.model, dict) or not config.model.get("_target_"):
        yield "model._target_ is missing: name the class of your model. Try model=tiny."
        return
    yield from _target("model._target_", config.model["_target_"])
    if not _is_transformer(config):
        return
    dim, heads, kv_heads = (config.model[name] for name in ("dim", "heads", "kv_heads"))
    if min(dim, heads, kv_heads) < 1:
        return
    if dim % heads or (dim // heads) % 2:
        legal = [d for d in divisors(dim) if (dim // d) % 2 == 0]
        near = sorted(legal, key=lambda d: abs(d - heads))[:2]
        rule = f"does not split model.dim = {dim} into heads of an even width (rotary positions turn pairs)"
        yield Problem("model.heads", heads, rule, tuple(sorted(near)))
    if heads % kv_heads:
        near = sorted(divisors(heads), key=lambda d: abs(d - kv_heads))[:2]
        rule = f"does not divide model.heads = {heads}: each key-value head serves as many heads"
        yield Problem("model.kv_heads", kv_heads, rule, tuple(sorted(near)))
    for key in ("model.rope_theta", "model.norm_eps"):
        if not 0 < value_at(config, key) < math.inf:
            legal = getattr(TransformerConfig, key.removeprefix("model."))
            yield Problem(key, value_at(config, key), "must be above 0", (legal,))


def _target(key: str, target: Any) -> Found:
    missing = missing_part(str(target))
    if missing is not None:
        rule, near = missing
        yield Problem(key, target, rule, near)


def _data(config: RunConfig) -> Found:
    """The data is where the configuration says, and its tokens fit the model's vocabulary."""
    if not isinstance(config.data, dict) or not config.data.get("_target_"):
        yield "data._target_ is missing: name the class of your data. Try data=text."
        return
    yield from _target("data._target_", config.data["_target_"])
    vocab_size: int | None = 256 if config.data["_target_"].endswith("TextData") else None
    if (path := config.data.get("path")) is not None:
        if not path or not Path(path).expanduser().exists():
            parent = Path(path).expanduser().parent
            names = [p.name for p in parent.iterdir()] if path and parent.is_dir() else []
            near = nearest(Path(path).name, names)
            yield Problem("data.path", path, "does not exist here", tuple(parent / name for name in near))
        else:
            try:
                vocab_size = _look_into(config.data) or vocab_size
            except (ValueError, OSError) as error:
                yield f"data.path = {path} can't be used: {error}"
    room = config.model.get("vocab_size") if isinstance(config.model, dict) else None
    if vocab_size and isinstance(room, int) and 1 <= room < vocab_size:
        rule = f"is too small for the data, whose tokens run from 0 to {vocab_size - 1}"
        yield Problem("model.vocab_size", room, rule, (vocab_size,))


def _look_into(data: dict[str, Any]) -> int | None:
    """The vocabulary of the tokens at `data.path`. Raises ValueError where the files are no such data."""
    from hpc_parallel.data import text, tokens  # neither imports torch

    if data["_target_"] == "hpc_parallel.data.tokens.TokensData":
        return tokens.read_description(Path(data["path"]).expanduser())["vocab_size"]
    if data["_target_"] == "hpc_parallel.data.text.TextData":
        text.find_files(data["path"], pattern=data["pattern"])
    return None


def _switches(config: RunConfig) -> Found:
    for key, (default, what) in NOT_YET.items():
        if (value := value_at(config, key)) != default:
            yield Problem(key, value, f"can't be done yet: {what}", (default,))
    for switch, package in (("tensorboard", "tensorboard"), ("wandb", "wandb")):
        if getattr(config.training, switch) and find_spec(package) is None:
            rule = f"needs the package {package}, which is not installed here (pip install {package})"
            yield Problem(f"training.{switch}", True, rule, (False,))
