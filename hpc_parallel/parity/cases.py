"""From a command line to the runs of a proof: which rows, and the one device that each is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose
from omegaconf import DictConfig

from hpc_parallel.config.axes import AXES
from hpc_parallel.config.checks.all_checks import in_order
from hpc_parallel.config.checks.counts import is_reference_decoder
from hpc_parallel.config.compose import UnresolvedError, composing, find_folder
from hpc_parallel.config.diagnose import COMPOSE_ERRORS, diagnose
from hpc_parallel.config.schema import (
    ConvNetConfig,
    MoeTransformerConfig,
    RunConfig,
    SegmenterConfig,
    TransformerConfig,
)
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.parity.compare import TOLERANCES
from hpc_parallel.parity.rows import COMMON, LAYERS, NETS, ROWS, TWO, Row
from hpc_parallel.problems import ConfigError, Found, Problem
from hpc_parallel.record.run_folder import new_run_id

LAYOUT = ("nodes", "gpus_per_node", *(f"strategy.{axis}" for axis in AXES))
# What changes how a step is computed, never what: one device goes without.
MEANS = ("strategy", *LAYOUT, "training.microbatch_size", "training.compile",
         "training.activation_checkpointing")  # fmt: skip
NET_OF = {
    TransformerConfig._target_: "text",
    MoeTransformerConfig._target_: "moe",
    ConvNetConfig._target_: "digits",
    SegmenterConfig._target_: "cells",
}


@dataclass(frozen=True)
class Case:
    """One line of the table: a run, and that of one device which it must equal.

    Where the strategy can't take what the command line asks for, `problems` say why, and there is no run.
    """

    row: Row
    net: str
    run: PreparedRun | None
    alone: PreparedRun | None
    problems: Sequence[Problem | str] = ()

    @property
    def layout(self) -> str:
        """And what the strategy is told besides; a name (of a schedule, say) stands for itself."""
        said = [option.rpartition(".")[2] for option in self.row.options]
        said = [s if s.endswith(("true", "false")) or s[-1].isdigit() else s.partition("=")[2] for s in said]
        return ", ".join([str(self.run.layout) if self.run else " ".join(self.row.layout), *said])


def plan(words: Sequence[str], *, extra_dir: str | None = None) -> tuple[list[Case], list[str]]:
    """The cases of a command line's overrides, and which networks it leaves out because they lack a key.

    A problem of some rows alone is theirs: they say so, and have no run. Raises ConfigError with all
    problems where one is every row's, or no row is without. `extra_dir`: configurations of the user's own.
    """
    words = [f"training.{word}" if word.startswith("precision=") else word for word in words]
    configs = str(find_folder("conf"))
    with composing(configs, extra_dir=extra_dir):
        try:
            planner = _Planner(words, extra_dir)
            cases = planner.cases()
        except _RefusedError as refused:
            said, error = refused.words, refused.error
        else:
            _require_rows(cases, words)
            return cases, [f"{net} is left out: {why}" for net, why in planner.without.items()]
    found = diagnose(said, config_dir=configs, config_name="config", extra_dir=extra_dir)
    raise ConfigError(found or [" ".join(str(error).partition("\n\n")[0].split())]) from error


class _RefusedError(Exception):
    """Hydra or the schema refuses these words, so nothing can be known of the rest."""

    def __init__(self, words: Sequence[str], error: Exception) -> None:
        super().__init__(str(error))
        self.words, self.error = words, error


class _Planner:
    """Composes each run once: many rows share one device's."""

    def __init__(self, words: Sequence[str], extra_dir: str | None) -> None:
        self.words = words
        self.extra_dir = extra_dir
        self.net: str | None = None  # of the model that the user names
        self.without: dict[str, str] = {}  # networks that the words don't fit, and why
        if has(words, "model"):
            base = self._compose(merged(COMMON, words))
            self.net = NET_OF.get(base.model.get("_target_"), "own")
        else:
            base = self._find_fitting()
        self.folder = Path(base.run_dir or Path("runs", base.name, new_run_id()))
        self.alone: dict[tuple[str, ...], PreparedRun] = {}

    def _find_fitting(self) -> DictConfig:
        """One of the networks' configurations; `model.layers=3` is none of an image's, say."""
        fitting, refusals = [], []
        for net, ours in NETS.items():
            try:
                fitting.append(self._compose(merged([*COMMON, *ours], self.words)))
            except _RefusedError as refused:
                refusals.append(refused)
                self.without[net] = str(refused).splitlines()[0]
        if not fitting:
            raise refusals[0]
        return fitting[0]

    def cases(self) -> list[Case]:
        pairs = [pair for pair in rows_of(self.words, net=self.net) if pair[1] not in self.without]
        return [self._case(row, net, number) for number, (row, net) in enumerate(pairs, start=1)]

    def _case(self, row: Row, net: str, number: int) -> Case:
        task = [*COMMON, *NETS.get(net, ())]
        means = [f"strategy={row.strategy}", *row.layout, *row.options]
        try:
            run = self._prepare(merged([*means, *task], self.words), f"{number:02d}-{row.strategy}-{net}")
            count = None
            if not is_reference_decoder(run.config):  # it may hold BatchNorm, which looks at a microbatch
                count = run.config.training.global_batch_size // run.batch.microbatches
            plain = ("strategy=single", f"training.microbatch_size={count or 'null'}")
            words = (
                *plain,
                *(word for word in merged(task, self.words) if not key_of(word).startswith(MEANS)),
            )
            if words not in self.alone:
                self.alone[words] = self._prepare(words, f"alone-{len(self.alone) + 1}-{net}")
            return Case(row, net, run, self.alone[words])
        except ConfigError as error:
            return Case(row, net, None, None, problems=error.problems)

    def _prepare(self, words: Sequence[str], name: str) -> PreparedRun:
        config = self._compose(words)
        config.run_dir = str(self.folder / name)
        try:
            run = prepare(config, overrides=words, config_dir=self.extra_dir)
        except UnresolvedError as error:
            raise _RefusedError(words, error) from error
        if problems := list(_problems(run.config)):
            raise ConfigError(problems)
        return run

    def _compose(self, words: Sequence[str]) -> DictConfig:
        try:
            return compose("config", overrides=list(words))
        except COMPOSE_ERRORS as error:
            raise _RefusedError(words, error) from error


def rows_of(words: Sequence[str], *, net: str | None) -> Iterator[tuple[Row, str]]:
    """Each row with each network that it is proven on; `net`: of the model that the user names.

    A strategy of the user's limits the rows to its own; with a layout of the user's each strategy has one
    row, on that layout and with no options of ours.
    """
    name = next((word.partition("=")[2] for word in words if key_of(word) == "strategy"), None)
    rows = [row for row in ROWS if name in (None, row.strategy)] or [Row(str(name), TWO)]
    if any(key_of(word) in LAYOUT for word in words):
        rows = [replace(row, layout=(), options=()) for row in rows if row.layout or name == row.strategy]
    pairs = [(replace(row, nets=()), each) for row in rows for each in row.nets]
    if net is not None:
        like = [row for row, each in pairs if each == (LAYERS[1] if net == "own" else net)]
        pairs = [(row, net) for row in like or [row for row, _ in pairs if name]]
    yield from dict.fromkeys(pairs)


def merged(ours: Sequence[str], words: Sequence[str]) -> list[str]:
    """Our overrides where the user says nothing of the key or of its group, then the user's."""
    groups = [f"{group}." for group in ("model", "data") if has(words, group)]
    said = {key_of(word) for word in words}
    return [w for w in ours if key_of(w) not in said and not w.startswith(tuple(groups))] + list(words)


def has(words: Sequence[str], key: str) -> bool:
    return any(key_of(word) == key for word in words)


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _problems(config: RunConfig) -> Found:
    """What a run may be, and a proof not."""
    precision, launcher = config.training.precision, config.launcher
    if precision not in TOLERANCES:
        rule = "rounds so coarsely that another order of sums is another result"
        yield Problem("training.precision", precision, rule, tuple(TOLERANCES))
    if config.task.name != "proof":
        yield Problem("task", config.task.name, "keeps nothing that could be compared", ("proof",))
    if launcher.kind == "script":
        yield Problem("launcher", "script", "starts nothing that could be compared", ("local",))
    elif launcher.kind != "local" and not launcher.wait:
        yield Problem("launcher.wait", False, "would compare runs that have not ended", (True,))


def _require_rows(cases: Sequence[Case], words: Sequence[str]) -> None:
    found = {str(problem): problem for case in cases for problem in case.problems}
    shared = [text for text in found if all(text in map(str, case.problems) for case in cases)]
    if shared or all(case.problems for case in cases):
        raise ConfigError(in_order(list(found.values()), words))
