"""Compare the bytes that ranks hold and send, traced without the devices, with those that formulas plan.

The trace needs torch, so it runs in a process of its own (`hpc_parallel/worker/exact_plan.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hpc_parallel.commands.plan_run import checked_config
from hpc_parallel.config.layout import DATAPARALLEL, PARAMETER_SERVER, layout_of, servers
from hpc_parallel.config.model_bytes import trains
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.exit_codes import DONE
from hpc_parallel.planning import memory
from hpc_parallel.planning.auto_strategy import on_nodes_of
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.memory import Role
from hpc_parallel.planning.run_work import unplanned, work_of_run
from hpc_parallel.planning.sent_bytes import sent_by_axes
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.problems import ConfigError, Problem, Problems
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.safe_write import write_text
from hpc_parallel.terminal import say

ROLES = 8  # traced roles, unless --rows is set
REAL_BYTES = 8 * 2**30  # the most that a rank traced in real memory may need
STATE = ("parameters", "gradients", "optimizer")
NOT_TRACED = {
    PARAMETER_SERVER: "messages to and from the server", DATAPARALLEL: "copies between devices of a process"
}  # fmt: skip


@dataclass(frozen=True)
class TracedFigure:
    """A figure in bytes, as traced and as planned; planned is None if no formula knows it."""

    label: str
    traced: int
    planned: float | None

    def __str__(self) -> str:
        if self.planned is None:
            return f"  {self.label:44} {self.traced:>20,} {'-':>20}"
        difference = (self.planned - self.traced) / self.traced if self.traced else self.planned and 1.0
        return f"  {self.label:44} {self.traced:>20,} {round(self.planned):>20,} {100 * difference:>+10.2f} %"


def exact(overrides: Sequence[str], *, hardware: Hardware, user_folder: Path | None, most: int) -> int:
    """Print the figures of each role; returns the exit code. Raises ConfigError with all problems."""
    config, values = checked_config(overrides, hardware=hardware, user_folder=user_folder)
    # The trace runs torch's kernels for CPUs, so the plan uses the formulas for CPUs.
    config, values = replace(config, device="cpu"), {**values, "device": "cpu"}
    roles = memory.roles(config)
    if problems := list(untraceable(config, roles)):
        raise ConfigError(problems)
    steps = _planned_step(config, hardware)
    listed_roles = roles[:most]
    code, traced = trace(values, [role.device for role in listed_roles])
    if traced is None:
        return code
    layout = layout_of(config.strategy, devices=config.devices)
    say(f"{layout} on {config.devices} devices, {config.training.precision}; bytes:")
    for role in listed_roles:
        say(*_report(role, traced[str(role.device)], config=config, step=steps))
    say(*_notes(config, left=len(roles) - len(listed_roles)))
    return DONE


def untraceable(config: RunConfig, roles: Sequence[Role]) -> Problems:
    """Why a checked configuration can't be traced."""
    layout = layout_of(config.strategy, devices=config.devices)
    if not trains(config):
        yield Problem("task", config.task.name, "is not traced, only training is", ("train",))
    if config.training.compile:
        yield Problem("training.compile", True, "is not traced: compiled code reads numbers", (False,))
    if config.training.fp8 != "off":
        rule = "is not traced: float8 needs a GPU that has it"
        yield Problem("training.fp8", config.training.fp8, rule, ("off",))
    if layout.tile > 1 and layout.pipeline > 1:
        yield Problem("strategy.tile", layout.tile, "is not traced in a pipeline", (1,))
    needed = max((role.held.total for role in roles if role.held is not None), default=0)
    if needed > REAL_BYTES and (reason := _needs_numbers(config)):
        yield f"{reason}, so a rank is traced in real memory, and needs {size(needed)}. Try model.layers=1."


def _needs_numbers(config: RunConfig) -> str | None:
    if isinstance(config.model, dict) and config.model.get("experts"):
        return "model.experts: how many tokens an expert gets depends on numbers"
    if config.optimizer._target_ == "torch.optim.Adafactor":
        return "optimizer=adafactor: its steps read numbers"
    return None


def trace(values: Mapping[str, Any], ranks: Sequence[int]) -> tuple[int, dict[str, Any] | None]:
    """The exit code, and rank -> what it holds and sends. None if the trace failed; it has printed why."""
    with tempfile.TemporaryDirectory(prefix="hpc_parallel-") as folder:
        path = Path(folder) / "config.yaml"
        write_text(path, yaml.safe_dump(values, sort_keys=False))
        command = [sys.executable, "-W", "ignore", "-m", "hpc_parallel.worker.exact_plan", str(path)]
        done = subprocess.run([*command, *map(str, ranks)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != DONE:
        return done.returncode, None
    return DONE, json.loads(done.stdout.splitlines()[-1])


def _planned_step(config: RunConfig, hardware: Hardware) -> StepTerms | None:
    """The planned step; None if its time is not planned."""
    layout = layout_of(config.strategy, devices=config.devices)
    if any(unplanned(config, layout, hardware)):
        return None
    step = StepTerms(work_of_run(config), on_nodes_of(config, hardware))
    step.result()
    return step


def _report(
    role: Role, traced: Mapping[str, Any], *, config: RunConfig, step: StepTerms | None
) -> Iterator[str]:
    alike = f", as {role.count} of {config.devices} ranks do" if role.count > 1 else ""
    kind = f" ({role.held.role})" if role.held is not None and role.held.role else ""
    yield f"rank {role.device}{kind}{alike}"
    yield f"  {'':44} {'traced':>20} {'planned':>20} {'difference':>12}"
    yield from map(str, _state_rows(role, traced))
    yield from _sent_rows(traced["collectives"], _planned_sent(role, config, step))


def _state_rows(role: Role, traced: Mapping[str, Any]) -> Iterator[TracedFigure]:
    state = {} if role.held is None else asdict(role.held.state)
    for kind in STATE:
        yield TracedFigure(kind, traced[kind], state.get(kind))
    planned = () if role.held is None else role.held.stages
    for index, kept in enumerate(traced["activations"]):
        stage = f", stage {index} of the rank" if len(traced["activations"]) > 1 else ""
        name = f"activations of a microbatch{stage}"
        yield TracedFigure(name, kept, planned[index] if planned else None)


def _planned_sent(role: Role, config: RunConfig, step: StepTerms | None) -> dict[str, float]:
    if step is None:
        return {}
    layout = layout_of(config.strategy, devices=config.devices)
    place = layout.coordinates(role.device - servers(config.strategy))["pipeline"]
    return sent_by_axes(step, config, pipeline_rank=place)


def _sent_rows(collectives: Sequence[Mapping[str, Any]], planned: Mapping[str, float]) -> Iterator[str]:
    """Yields for each group of axes the sum beside the plan, then each kind of collective."""
    by_axes: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for collective in collectives:
        by_axes[collective["over"]].append(collective)
    for over in dict.fromkeys((*by_axes, *planned)):
        total = sum(collective["sent_bytes"] for collective in by_axes[over])
        yield str(TracedFigure(f"sent over {over}", total, planned.get(over)))
        for one in by_axes[over]:
            label = f"  {one['kind']}, {one['ranks']} ranks, {one['calls']} calls"
            yield str(TracedFigure(label, one["sent_bytes"], None)).rstrip(" -")


def _notes(config: RunConfig, *, left: int) -> Iterator[str]:
    yield "Activations are those of torch's kernels for CPUs. Sent: in a step, by ring algorithms."
    if (what := NOT_TRACED.get(config.strategy.execution)) is not None:
        yield f"Not traced: {what}."
    if layout_of(config.strategy, devices=config.devices).expert > 1:
        yield "Traced tokens are alike and go to the same experts; planned ones go to all experts alike."
    if left > 0:
        yield f"{left} more roles are not traced: their ranks hold other bytes. Try --rows {left + ROLES}."
