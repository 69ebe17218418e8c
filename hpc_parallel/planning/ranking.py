"""What limits planned candidates, and why one is faster than another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.layout import SPMD, Layout
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.layouts import Choices
from hpc_parallel.planning.search import DOUBLINGS, Candidate, SearchResult, enough_nodes, search
from hpc_parallel.planning.step_time import StepTime, tokens_per_s
from hpc_parallel.planning.work import Work
from hpc_parallel.problems import alternatives, printable
from hpc_parallel.record.metrics_file import aligned, milliseconds, size

TOGETHER = 3  # a forward and a backward pass cost this many forward passes (PaLM, Chowdhery et al. 2022)
SMALL = 0.05  # a share of a step that does not count as a limit
ALIKE = 0.01  # a relative difference of steps that a plan can't tell apart
NEAR = 2  # the number of fitting layouts to suggest
COMPUTATION, RECOMPUTATION, BUBBLE, NETWORK, UPDATE = (
    "computation", "recomputation", "bubble", "exposed communication", "update",
)  # fmt: skip


def model_flops(work: Work) -> float:
    """The FLOPs of one step. A backward pass counts as two forward passes, even with recomputation."""
    return TOGETHER * work.decoder.forward_flops * work.samples


@dataclass(frozen=True)
class Size:
    """The plan on `nodes`. samples: of a step. memory_bytes: of the fullest device; None if not known."""

    nodes: int
    devices: int
    layout: Layout
    samples: int
    step_s: float
    tokens_per_s: float
    mfu: float
    memory_bytes: int | None

    def efficiency(self, first: Size) -> float:
        """The tokens/s of a device relative to those at the first size."""
        return self.tokens_per_s / self.devices / (first.tokens_per_s / first.devices)


def mfu(work: Work, step: StepTime, hardware: Hardware) -> float:
    """Model FLOPs utilisation: the share of all devices' peak."""
    return model_flops(work) / (step.total_s * work.devices * hardware.device.peak_flops[work.precision])


def parts_s(work: Work, step: StepTime) -> dict[str, float]:
    """The seconds of a step by what an average device does; their sum is the step's time."""
    bubble_s = step.timeline.bubble_share * step.timeline.total_s
    computed_s = step.total_s - bubble_s - step.exposed_s - step.update_s
    again_s = computed_s * work.recomputations / (TOGETHER + work.recomputations)
    return {
        COMPUTATION: computed_s - again_s, RECOMPUTATION: again_s, BUBBLE: bubble_s,
        NETWORK: step.exposed_s, UPDATE: step.update_s,
    }  # fmt: skip


def limit(work: Work, step: StepTime) -> str:
    """What costs most after computation, with its share of the step: memory, bubble, network or batch.

    memory: blocks are computed again. batch: a bubble that only more samples shorten, because microbatches
    have one sample.
    """
    parts = parts_s(work, step)
    bubble = "batch" if work.microbatch_size == 1 else "bubble"
    names = {RECOMPUTATION: "memory", BUBBLE: bubble, NETWORK: "network"}
    largest = max(names, key=lambda part: parts[part])
    share = parts[largest] / step.total_s
    return f"{names[largest]} {share:.0%}" if share >= SMALL else "compute"


def advantage(candidates: Sequence[Candidate]) -> str:
    """One sentence: why the first of two candidates is faster than the second."""
    first, second = (candidate.step for candidate in candidates)
    gained = (second.total_s - first.total_s) / second.total_s
    pair = f"the second ({candidates[1].layout})"
    if gained < ALIKE:
        return f"It is as fast as {pair}: {gained:.1%} is less than a plan can tell apart."
    before, after = (parts_s(candidate.work, candidate.step) for candidate in candidates)
    part = max(before, key=lambda name: after[name] - before[name])
    spent = f"{seconds(before[part])} of {part} instead of {seconds(after[part])}"
    return f"It takes {gained:.1%} less time than {pair}, because it has {spent}."


def seconds(value: float) -> str:
    """`42.1 ms`, `1.76 s`."""
    return milliseconds(value) if value < 1 else f"{value:.4g} s"


def table(candidates: Sequence[Candidate], hardware: Hardware) -> list[str]:
    """One line for each candidate, best first."""
    headings = (
        "", "layout", "schedule", "samples", "recompute", "step", "tokens/s", "MFU", "memory", "limit",
    )  # fmt: skip
    rows = [headings, *(_row(at, one, hardware) for at, one in enumerate(candidates, start=1))]
    return aligned(rows, right=("", "samples", "step", "tokens/s", "MFU", "memory"))


def _row(at: int, candidate: Candidate, hardware: Hardware) -> tuple[str, ...]:
    work, step = candidate.work, candidate.step
    lower = ">= " if candidate.memory.unknown else ""
    return (
        str(at),
        printable(candidate.layout),
        work.schedule if work.pipeline > 1 else "-",
        str(work.microbatch_size),
        candidate.config.training.activation_checkpointing,
        seconds(step.total_s),
        f"{tokens_per_s(work, step):,.0f}",
        f"{mfu(work, step, hardware):.1%}",
        lower + size(candidate.memory.fullest.total),
        limit(work, step),
    )


def without_room(
    result: SearchResult, config: RunConfig, hardware: Hardware, *, choices: Choices
) -> list[str]:
    """The problem if no layout of a configuration fits; names the layout that needs least memory."""
    there = size(hardware.device.memory_bytes)
    if result.nearest is None:
        return ["no layout passes all checks of a run. Try strategy=fsdp, which names the problems."]
    needed = size(result.nearest.memory.fullest.total)
    near = f"{' '.join(result.nearest.overrides)} needs {needed}"
    larger = enough_nodes(config, hardware, choices=choices)
    if larger is None:
        advice = f"Nor does one on up to {2**DOUBLINGS * config.nodes} nodes. Try a smaller model."
    else:
        advice = f"Try nodes={larger.config.nodes} with {' '.join(larger.overrides)}, or a smaller model."
    return [f"no layout fits in the {there} of one {hardware.device.name}. The nearest one, {near}. {advice}"]


def layouts_that_fit(config: RunConfig, hardware: Hardware) -> str:
    """Advice for a run without room: the fastest layouts that fit."""
    searched = replace(
        config,
        strategy=replace(config.strategy, execution=SPMD, microbatches=None, stages_per_rank=None, cuts=None),
        training=replace(config.training, microbatch_size=None, compile_whole=False),
    )
    choices = Choices()
    result = search(searched, hardware, choices=choices, most=NEAR)
    if not result.best:
        line = without_room(result, searched, hardware, choices=choices)[0]
        return f" {line[0].upper()}{line[1:]}"
    ways = [f"{' '.join(one.overrides)} ({seconds(one.step.total_s)} a step)" for one in result.best]
    without = " with training.compile_whole=false" if config.training.compile_whole else ""
    return f" Try {alternatives(ways)}{without}."
