"""How long a training waits in addition to its steps: for checkpoints, and for input that is read too late.

The rates are those of `storage` in the hardware's file; a wait whose rate is not measured is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from hpc_parallel.config.schema import RunConfig
from hpc_parallel.layout.counts import class_path
from hpc_parallel.layout.holdings import ALL, Setup, first_holdings, model_facts
from hpc_parallel.layout.layout import PARAMETER_SERVER, Layout, layout_of, processes_per_node
from hpc_parallel.layout.model_data_schema import TextDataConfig, TokensDataConfig
from hpc_parallel.layout.model_weights import ModelWeights, sample_shape_of, weights_of
from hpc_parallel.layout.step_facts import memory_copies, weight_bytes
from hpc_parallel.planning.hardware import CPU, MEASURED_BY, Hardware, contended
from hpc_parallel.planning.planned_state import Division, States
from hpc_parallel.planning.work import Work
from hpc_parallel.record.endings import RankState
from hpc_parallel.record.metrics_file import size

TOKEN_BYTES = 4  # of a token in a file: 2 or 4 (data/tokens.py)
COPIED_TWICE = 2  # a processor's copy reads and writes


@dataclass(frozen=True)
class Wait:
    """Seconds that some steps of a training wait in addition to their work; None if they are not known.

    text, formula: text for the user; if the seconds are not known, the reason why they are not counted.
    """

    seconds: float | None
    text: str
    formula: str


@dataclass(frozen=True)
class CheckpointBytes:
    """total: the bytes of a checkpoint. most: the bytes of the rank that writes most."""

    total: int
    most: int


@dataclass(frozen=True)
class StorageTimes:
    """The waits of a planned run. step_s: the planned time of a step."""

    config: RunConfig
    work: Work
    step_s: float
    hardware: Hardware

    def training_s(self, steps: float) -> float:
        """The time of this number of steps, with the waits that are known."""
        waits = (self.checkpoints(steps), self.memory_copies(steps), self.input(steps))
        return steps * self.step_s + sum(wait.seconds or 0.0 for wait in waits)

    def checkpoints(self, steps: float) -> Wait:
        """One each `training.checkpoint_every` steps and one after the last step.

        The run always waits for the last checkpoint. The other checkpoints may be written while the training
        goes on. Each of them is copied first, and waits for the checkpoint before it.
        """
        every, sizes = self.config.training.checkpoint_every, self._checkpoint
        if every is None:
            return Wait(0.0, "none (training.checkpoint_every=null)", "no checkpoint")
        if (unknown := self.unknown_saves()) is not None or sizes is None:
            return _not_counted(unknown or "")
        saves = math.ceil(steps / every)
        waited_s, text = self._save_s(sizes, every)
        seconds = (saves - 1) * waited_s + self._write_s(sizes)
        share = seconds / (steps * self.step_s + seconds)
        share_text = f"{100 * share:.1f} % of the time: {size(sizes.total)} each {every} steps"
        return Wait(seconds, share_text, f"{saves - 1} x {text} + the last one, {self._write_s(sizes):.4g} s")

    def memory_copies(self, steps: float) -> Wait:
        """One each `training.memory_checkpoint_every` steps, which another host receives beside the steps.

        The training waits for the copy from the device, and for the message before if that takes longer.
        """
        every, copied_bytes = self.config.training.memory_checkpoint_every, self._copied_bytes
        if every is None:
            return Wait(0.0, "none (training.memory_checkpoint_every=null)", "no copy")
        if copied_bytes is None:
            return _not_counted("the optimizer's state is not known")
        config, network = self.config, self.hardware.network.bytes_per_s
        ranks = processes_per_node(config.strategy, gpus_per_node=config.gpus_per_node)
        held = memory_copies(config) * ranks * copied_bytes
        sent_s = ranks * copied_bytes / network if config.nodes > 1 else 0.0
        busy = f"{size(copied_bytes)} a rank each {every} steps; a node holds up to {size(held)}"
        busy += f", its links send {100 * sent_s / (every * self.step_s):.1f} % of the time"
        if not self.hardware.device.is_cpu and self.hardware.storage.copy_bytes_per_s is None:
            return Wait(
                None, f"{busy}; not counted: {_unmeasured('copy_bytes_per_s')}", "0 in the figures below"
            )
        rate = self._copy_bytes_per_s
        waited_s = copied_bytes / rate + max(0.0, sent_s - every * self.step_s)
        seconds = max(0, math.ceil(steps / every) - 1) * waited_s
        formula = (
            f"each ({copied_bytes:.4g} B / {rate / 1e9:.4g} GB/s + max(0, {ranks} x {copied_bytes:.4g} B / "
            f"{network / 1e9:.4g} GB/s - {every} x {self.step_s:.4g} s))"
        )
        share = seconds / (steps * self.step_s + seconds)
        return Wait(seconds, f"{100 * share:.1f} % of the time: {busy}", formula)

    def input(self, steps: float) -> Wait:
        """A batch is read while the step before it runs. If reading takes longer, the run waits for it."""
        target = class_path(self.config.data)
        if target == TextDataConfig._target_:
            return Wait(0.0, "in memory before the first step", "no reads")
        if target != TokensDataConfig._target_:
            return _not_counted(f"the time to read samples of {target} is not known")
        rate = self.hardware.storage.read_bytes_per_s
        if rate is None:
            return _not_counted(_unmeasured("read_bytes_per_s"))
        work = self.work
        moved = TOKEN_BYTES * work.microbatches * work.microbatch_size * work.decoder.sequence
        read_s = moved / rate
        waited_s = max(0.0, read_s - self.step_s)
        text = f"{waited_s:.4g} s a step, the rest beside it" if waited_s else "read beside the steps"
        formula = f"max(0, {moved} B / {rate / 1e9:.4g} GB/s - {self.step_s:.4g} s) a step"
        return Wait(steps * waited_s, text, formula)

    def unknown_saves(self) -> str | None:
        """Why it is not known how long a save takes; None if it is."""
        if self._checkpoint is None:
            return "the optimizer's state is not known"
        missing = self._missing_rate()
        return None if missing is None else _unmeasured(missing)

    def save_s(self) -> tuple[float, float]:
        """How long a save that waits for no other one delays the steps, and how long it takes to be written.

        Only if `unknown_saves` is None.
        """
        assert self._checkpoint is not None
        written_s = self._write_s(self._checkpoint)
        copied = self.config.training.checkpoint_async
        return (self._checkpoint.most / self._copy_bytes_per_s if copied else written_s), written_s

    @cached_property
    def _checkpoint(self) -> CheckpointBytes | None:
        return checkpoint_bytes(self.config)

    @cached_property
    def _copied_bytes(self) -> int | None:
        """The weights and the optimizer's state of the fullest rank; None if they are not known."""
        config = self.config
        model = weights_of(config.model, sample_shape=sample_shape_of(config.model, config.data))
        is_server = config.strategy.execution == PARAMETER_SERVER  # it has the whole state
        layout = Layout() if is_server else layout_of(config.strategy, devices=config.devices)
        states = None if model is None else _states_of(config, layout, model)
        return None if states is None else max(state.parameters + state.optimizer for state in states)

    def _missing_rate(self) -> str | None:
        storage = self.hardware.storage
        names = ["write_bytes_per_s", "together_bytes_per_s"]
        if self.config.training.checkpoint_async and not self.hardware.device.is_cpu:
            names.append("copy_bytes_per_s")
        return next((name for name in names if getattr(storage, name) is None), None)

    def _write_s(self, sizes: CheckpointBytes) -> float:
        """The time of the rank that writes most, or of the storage that all ranks share."""
        storage = self.hardware.storage
        assert storage.write_bytes_per_s is not None
        assert storage.together_bytes_per_s is not None
        return max(sizes.most / storage.write_bytes_per_s, sizes.total / storage.together_bytes_per_s)

    def _save_s(self, sizes: CheckpointBytes, every: int) -> tuple[float, str]:
        """Seconds that the training waits for each checkpoint but the last one, and their formula."""
        storage, write_s = self.hardware.storage, self._write_s(sizes)
        assert storage.write_bytes_per_s is not None
        assert storage.together_bytes_per_s is not None
        written = (
            f"max({sizes.most:.4g} B / {storage.write_bytes_per_s / 1e9:.4g} GB/s, "
            f"{sizes.total:.4g} B / {storage.together_bytes_per_s / 1e9:.4g} GB/s)"
        )
        if not self.config.training.checkpoint_async:
            return write_s, written
        rate = self._copy_bytes_per_s
        waited_s = sizes.most / rate + max(0.0, write_s - every * self.step_s)
        copied = f"{sizes.most:.4g} B / {rate / 1e9:.4g} GB/s"
        return waited_s, f"({copied} + max(0, {written} - {every} x {self.step_s:.4g} s))"

    @property
    def _copy_bytes_per_s(self) -> float:
        if not self.hardware.device.is_cpu:
            assert self.hardware.storage.copy_bytes_per_s is not None
            return self.hardware.storage.copy_bytes_per_s
        busy = contended(self.hardware, devices=self.work.devices)
        return busy.device.memory_bytes_per_s * busy.traffic.share / COPIED_TWICE


def checkpoint_bytes(config: RunConfig) -> CheckpointBytes | None:
    """The weights and the optimizer's state of a decoder, without small parts: random states, the index.

    Among the ranks that hold the same part of a tensor, the tensor's name decides which one writes it. So
    these ranks write about the same number of bytes, unless a tensor is large. None if the optimizer's state
    is not known.
    """
    model = weights_of(config.model, sample_shape=sample_shape_of(config.model, config.data))
    if model is None:
        return None
    layout = layout_of(config.strategy, devices=config.devices)
    whole = _states_of(config, Layout(), model)
    if whole is None:
        return None
    total = whole[0].parameters + whole[0].optimizer
    ranks = config.devices // layout.pipeline  # the ranks that hold parts of the same stages
    if config.strategy.execution == PARAMETER_SERVER:  # only the server has the optimizer's state
        return CheckpointBytes(total, whole[0].optimizer + whole[0].parameters // ranks)
    stages = _states_of(config, Layout(pipeline=layout.pipeline), model) or []
    even = max(stage.parameters + stage.optimizer for stage in stages) // ranks
    return CheckpointBytes(total, max(even, _largest_part(config, layout, model)))


def _states_of(config: RunConfig, layout: Layout, model: ModelWeights) -> list[RankState] | None:
    states = States(Division(config, layout, model))
    if states.unknown:
        return None
    setup = Setup(config.strategy, layout, model_facts(config.model), gpus=config.device != CPU)
    return [states.of(replace(holding, keeps=ALL)) for holding in first_holdings(setup)]


def _largest_part(config: RunConfig, layout: Layout, model: ModelWeights) -> int:
    division = Division(config, layout, model)
    setup = Setup(config.strategy, layout, model_facts(config.model), gpus=config.device != CPU)
    holding = first_holdings(setup)[0]
    sizes = (math.prod(division.local_shape(weight, holding)) for weight in model.weights)
    return max(sizes) * weight_bytes(division.config)


def _not_counted(reason: str) -> Wait:
    return Wait(None, f"not counted: {reason}", "0 in the figures below")


def _unmeasured(rate: str) -> str:
    return f"no storage.{rate} in the hardware's file ({MEASURED_BY} measures it)"
