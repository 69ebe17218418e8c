"""`plan --output FOLDER`: the page of a plan, with its figures as JSON and its plots as PNG."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_parallel.commands.plan_run import Planned, figures, headline, memory_figure, notes, record
from hpc_parallel.commands.plan_scaling import planned_size, verdict, with_nodes
from hpc_parallel.commands.report import PAGE, PLOTS, output_problems, write_folder
from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.planning import memory
from hpc_parallel.planning.collective_times import on_nodes_of
from hpc_parallel.planning.memory import Held, MemoryPlan
from hpc_parallel.planning.pipeline_orders import ActionKind
from hpc_parallel.planning.ranking import Size
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record.credentials import without_secret_values
from hpc_parallel.record.task_files import RankTimeline, StageWork
from hpc_parallel.report.page import WITHOUT_PLOTS, can_draw
from hpc_parallel.report.plan_html import PlanPage, pictures, render
from hpc_parallel.shell import complain
from hpc_parallel.terminal import say

FIGURES = "plan.json"
BATCH = "training.global_batch_size"
AROUND = 4  # the page has plans for up to this many times as many, or as few, nodes
NAMES = {ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.WEIGHTS: "weights"}


def page_problems(output: Path, *, json: bool) -> Iterator[Problem | str]:
    if json:
        yield f"--json does not go with --output: the folder has {FIGURES}. Try it without --json."
    yield from output_problems(Path(os.path.expanduser(output)).absolute(), beside=FIGURES, near="plan")


def write_page(plan: Planned, output: Path, *, tokens: float) -> int:
    """Write the folder and say where its page is; returns the exit code."""
    place = Path(os.path.expanduser(output)).absolute()
    try:
        write_folder(page_files(plan, tokens=tokens), place)
    except OSError as error:
        complain([f"{place} can't be written: {error.strerror or error}"])
        return FAILED
    if not can_draw():
        complain([WITHOUT_PLOTS])
    say(f"Page: {place / PAGE}")
    return DONE


def page_files(plan: Planned, *, tokens: float) -> dict[str, str | bytes]:
    """The files of the folder, by their paths in it."""
    page = _page(plan, tokens=tokens)
    plots = []
    if can_draw():
        from hpc_parallel.report.drawing import draw

        plots = [draw(picture) for picture in pictures(page)]
    values = record(plan, tokens=tokens)
    return {
        PAGE: render(page, plots),
        FIGURES: json.dumps(values, indent=2, allow_nan=False) + "\n",
        **{f"{PLOTS}/{plot.picture.name}.png": plot.png for plot in plots},
    }


def _page(plan: Planned, *, tokens: float) -> PlanPage:
    config, hardware = plan.config, plan.hardware
    held = memory.plan(config)
    title, *lines = headline(plan)
    sizes, left_out = _sizes(plan)
    return PlanPage(
        title=f"Plan: {title}", lines=lines, command=_command(plan, tokens=tokens),
        figures=[*figures(plan, tokens=tokens), *([] if held is None else [memory_figure(held, hardware)])],
        roles=[] if held is None else _roles(held), device_memory_bytes=hardware.device.memory_bytes,
        ranks=_ranks(plan), sizes=sizes,
        verdict=verdict(sizes) if len(sizes) > 1 else "", left_out=left_out,
        notes=[*notes(config, hardware), *([] if held is None else [*held.unknown, *held.unproven])],
    )  # fmt: skip


def _command(plan: Planned, *, tokens: float) -> str:
    """The shell command that makes the same plan."""
    folder = [] if plan.user_folder is None else ["--config-dir", str(plan.user_folder)]
    arguments = [*folder, "--tokens", f"{tokens:g}", *without_secret_values(plan.overrides)]
    return shlex.join(["python", "-m", "hpc_parallel", "plan", *arguments])


def _roles(held: MemoryPlan) -> list[Held]:
    """The first of the devices that hold the same, with a role that names all of them."""
    groups: dict[tuple[tuple[str, int], ...], list[Held]] = {}
    for device in held.devices:
        groups.setdefault(tuple(device.kinds.items()), []).append(device)
    return [replace(alike[0], role=_label(alike)) for alike in groups.values()]


def _label(alike: Sequence[Held]) -> str:
    first, last, role = alike[0].device, alike[-1].device, alike[0].role
    if len(alike) == 1:
        text = f"device {first}"
    elif last - first + 1 == len(alike):
        text = f"devices {first} to {last}"
    else:
        text = f"device {first} and {len(alike) - 1} more"
    return f"{text} ({role})" if role else text


def _ranks(plan: Planned) -> list[RankTimeline]:
    """The actions of each rank of the pipeline, then the average of gradients and the update."""
    step = plan.step
    spans = StepTerms(plan.work, on_nodes_of(plan.config, plan.hardware)).spans()
    chunks: list[list[StageWork]] = [[] for _ in range(plan.work.pipeline)]
    for span in spans:
        kind, stage, microbatch = span.action
        chunks[span.rank].append(StageWork(span.start_s, span.end_s, stage, NAMES[kind], microbatch))
    ends = step.timeline.total_s, step.timeline.total_s + step.gradients_s, step.total_s
    for rank_chunks in chunks:
        stage = rank_chunks[0].stage
        rank_chunks.append(StageWork(ends[0], ends[1], stage, "average", None))
        rank_chunks.append(StageWork(ends[1], ends[2], stage, "update", None))
    return [
        RankTimeline(rank, step.total_s, tuple(work for work in rank_chunks if work.end_s > work.start_s))
        for rank, rank_chunks in enumerate(chunks)
    ]


def _sizes(plan: Planned) -> tuple[list[Size], list[str]]:
    """Plans of the same batch on about as many nodes, and why some numbers of nodes are left out."""
    overrides = [word for word in plan.overrides if not word.startswith(f"{BATCH}=")]
    overrides.append(f"{BATCH}={plan.config.training.global_batch_size}")
    sizes, left_out = [], []
    for nodes in _numbers_of_nodes(plan.config.nodes):
        try:
            planned = planned_size(
                with_nodes(overrides, str(nodes)), hardware=plan.hardware, user_folder=plan.user_folder
            )
        except ConfigError as error:
            left_out.append(f"nodes={nodes}: {error.problems[0]}")
        else:
            sizes.append(planned)
    return sizes, left_out


def _numbers_of_nodes(nodes: int) -> Iterator[int]:
    """`nodes`, and the powers of two from nodes / AROUND to nodes * AROUND."""
    powers = [2**power for power in range((AROUND * nodes).bit_length())]
    yield from sorted({nodes, *(power for power in powers if nodes <= AROUND * power)})
