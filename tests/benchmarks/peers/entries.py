"""The entries of `make bench` that train: which configuration of ours meets which peer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from tests.benchmarks.peers.ratio import blocks_s, ratio_of
from tests.benchmarks.peers.side_by_side import BLOCK, LOSS_TOLERANCE, WARM_UP, contest, largest_difference
from tests.workers import Workers

# Nothing that the peers lack: they neither validate nor save. At the default rate, 3e-3, `tiny` has a spike
# after 25 steps in which a difference of the last bit grows to 1e-2, and no curves could be compared.
COMMON = (
    "optimizer.learning_rate=3e-4",
    "nodes=2",
    "data.max_bytes=1000000",
    "training.validate_every=null",
    "training.checkpoint_every=null",
)
MODELS: Mapping[str, tuple[str, ...]] = {
    "tiny": ("model=tiny",),
    "20m": ("model=20m",),
}


@dataclass(frozen=True)
class Entry:
    """`words`: of ours; `module`: the peer's file, or file:function; the ratio should be `target`, its lower
    end `least`."""

    peer: str
    module: str
    words: tuple[str, ...]
    target: float = 1.0
    least: float = 0.98
    coincides: bool = True  # whether both sides have the same loss curve


DATA = ("strategy=data",)
COMPILED = (*DATA, "training.compile=true")
WHOLE = (*COMPILED, "training.compile_whole=true")
PIPELINE = ("strategy=pipeline", "strategy.microbatches=4", "model.tied_head=false")
ENTRIES: Mapping[str, Entry] = {
    "bare": Entry("bare DDP loop", "bare_ddp", DATA),
    "compiled": Entry("compiled bare DDP loop", "bare_ddp:compiled", COMPILED),
    "compiled_whole": Entry("compiled bare DDP loop", "bare_ddp:compiled", WHOLE),
    "fabric": Entry("Lightning Fabric", "with_fabric", DATA),
    "accelerate": Entry("accelerate", "with_accelerate", DATA),
    "pipelining": Entry("torch.distributed.pipelining", "bare_pipelining", PIPELINE),
    # Ours on two processes against twice the throughput of one, and against two that exchange nothing: what
    # two processes of this machine cost each other is in the first ratio only.
    "one_process": Entry(
        "twice one process", "bare_ddp:one_process", DATA, target=0.97, least=0.0, coincides=False
    ),
    "apart": Entry("two processes apart", "bare_ddp:apart", DATA, target=0.97, least=0.0, coincides=False),
}
LAYERS = {"tiny": 4, "20m": 16}


def measure(
    workers: Workers, name: str, *, model: str, peers: str, limit_s: float, most_steps: int = 1000,
    extra: tuple[str, ...] = (), clock: str = "wall",
) -> dict[str, Any]:  # fmt: skip
    """One row. Raises AssertionError if a side fails or the loss curves differ.

    `peers`: the folder where Fabric and accelerate are installed; `extra`: more words for ours.
    """
    entry = ENTRIES[name]
    words = (*COMMON, *MODELS[model], *entry.words, *extra)
    if name == "pipelining":  # the same cut as the peer's
        words = (*words, f"strategy.cuts=[{LAYERS[model] // 2}]")
    steps = f"training.steps={most_steps}"
    run = workers.prepare(*words, steps)
    times = workers.run(
        2, limited_contest, str(run.folder.path), entry.module, peers, (limit_s, most_steps, clock)
    )[0]
    row = row_of(times)
    if entry.coincides:
        row["largest_loss_difference"] = largest_difference(times["ours_losses"], times["theirs_losses"])
        assert row["largest_loss_difference"] < LOSS_TOLERANCE, f"the loss curves differ: {row}"
    row["met"] = row["ratio"] >= entry.target and row["low"] >= entry.least
    return {"entry": name, "peer": entry.peer, "model": model, "words": words, "target": entry.target, **row}


def limited_contest(
    run_folder: str, module: str, peers: str, limits: tuple[float, int, str]
) -> dict[str, Any]:
    limit_s, most_steps, clock = limits
    return contest(run_folder, module, peers, limit_s=limit_s, most_steps=most_steps, clock=clock)


def row_of(times: Mapping[str, Any]) -> dict[str, Any]:
    """The ratio of the blocks after the warm-up, and the median step of both sides."""
    steps = min(len(times["ours_s"]), len(times["theirs_s"]))
    warm_up = WARM_UP if steps >= WARM_UP + BLOCK else 0
    ours_s, theirs_s = (times[side][warm_up:steps] for side in ("ours_s", "theirs_s"))
    ratio = ratio_of(blocks_s(ours_s, steps=BLOCK), blocks_s(theirs_s, steps=BLOCK))
    measured = asdict(ratio)
    measured["ratio"] = measured.pop("median")
    return {
        **measured,
        "spread": ratio.spread,
        "ours_step_s": median(ours_s),
        "theirs_step_s": median(theirs_s),
        "total_ratio": sum(theirs_s) / sum(ours_s),
    }
