"""Plans a proof: the rows for a command line, and the one-device run that each row is compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from hpc_parallel.config.checks.all_checks import in_order
from hpc_parallel.config.checks.training_checks import OFF
from hpc_parallel.config.compose import COMPOSE_ERRORS, Composer
from hpc_parallel.config.diagnose import diagnose
from hpc_parallel.config.hydra_internals import composing
from hpc_parallel.config.places import find_folder
from hpc_parallel.config.resolve import UnresolvedError
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.site_schema import HERE
from hpc_parallel.launch.import_check import check_models
from hpc_parallel.launch.prepare import PreparedRun, prepare
from hpc_parallel.layout.axes import AXES
from hpc_parallel.layout.counts import is_reference_decoder
from hpc_parallel.layout.model_data_schema import (
    CellsDataConfig,
    ConvNetConfig,
    DigitsDataConfig,
    MoeTransformerConfig,
    SegmenterConfig,
    TransformerConfig,
    UNetConfig,
)
from hpc_parallel.problems import ConfigError, Problem, Problems, raise_if_any
from hpc_parallel.proof.compare import SHARP
from hpc_parallel.proof.rows import COMMON, IMAGES, NETS, RECIPES, ROWS, TWO, ParityRow
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.record.run_folder import new_run_id
from hpc_parallel.record.snapshot import cached_plan_snapshot

ALL_RECIPES = "recipes=true"  # a word of the command line
LAYOUT = ("nodes", "gpus_per_node", *(f"strategy.{axis}" for axis in AXES))
# These change how a step is computed, not its result. The one-device run omits them.
EXECUTION_KEYS = ("strategy", *LAYOUT, "training.microbatch_size", "training.compile",
                  "training.activation_checkpointing")  # fmt: skip
NET_OF = {
    TransformerConfig._target_: "text",
    MoeTransformerConfig._target_: "moe",
    ConvNetConfig._target_: "digits",
    SegmenterConfig._target_: "cells",
    UNetConfig._target_: "unet",
}


@dataclass(frozen=True)
class Case:
    """One line of the table: a run, and the one-device run (`alone`) that it must equal.

    If the strategy does not support the overrides, `problems` gives the reasons and both runs are None.
    """

    row: ParityRow
    net: str
    run: PreparedRun | None
    alone: PreparedRun | None
    problems: Sequence[Problem | str] = ()

    @property
    def layout(self) -> str:
        """The layout and the strategy's options. An option whose value is a name is shown as this name."""
        layout = str(self.run.plan.layout) if self.run else " ".join(self.row.layout)
        return ", ".join([layout, *map(_short_option, self.row.options)])


def _short_option(option: str) -> str:
    key, _, value = option.partition("=")
    is_name = not (value.endswith(("true", "false")) or value[-1].isdigit())
    return value if is_name else f"{key.rpartition('.')[2]}={value}"


def plan(overrides: Sequence[str], *, extra_dir: str | None = None) -> tuple[list[Case], list[str]]:
    """The cases for the overrides of a command line, and a note for each network that lacks one of the keys.

    If only some rows have a problem, their cases list the problem and have no run. The word `recipes=true`
    takes the rows of docs/recipes.md.

    extra_dir: a folder with the user's configuration files.

    Raises ConfigError with all problems if every row has the same problem or no row can run.
    """
    overrides = [f"training.{word}" if word.startswith("precision=") else word for word in overrides]
    rows = tuple(recipe.row for recipe in RECIPES) if ALL_RECIPES in overrides else ROWS
    overrides = [word for word in overrides if word != ALL_RECIPES]
    config_dir = str(find_folder("conf"))
    with composing(config_dir, extra_dir=extra_dir):
        try:
            planner = _RunComposer(overrides, rows, extra_dir)
            cases = planner.cases()
        except _RefusedError as refusal:
            refused, error = refusal.overrides, refusal.error
        else:
            _require_rows(cases, overrides)
            return cases, [f"{net} is left out: {reason}" for net, reason in planner.excluded.items()]
    problems = diagnose(refused, config_dir=config_dir, config_name="config", extra_dir=extra_dir)
    raise ConfigError(problems or [" ".join(str(error).partition("\n\n")[0].split())]) from error


class _RefusedError(Exception):
    """Hydra or the schema refuses these overrides, so no further check is possible."""

    def __init__(self, overrides: Sequence[str], error: Exception) -> None:
        super().__init__(str(error))
        self.overrides, self.error = overrides, error


class _RunComposer:
    """Composes each run once, because many rows share the same one-device run."""

    def __init__(self, overrides: Sequence[str], rows: Sequence[ParityRow], extra_dir: str | None) -> None:
        self._composer = Composer("config")
        self._plan_snapshot = cached_plan_snapshot()
        self.overrides, self.rows = overrides, rows
        self.extra_dir = extra_dir
        self.net: str | None = None  # the network of the model that the user names
        self.like: tuple[str, ...] = ()  # the networks whose rows this network takes
        self.excluded: dict[str, str] = {}  # networks that the overrides don't fit -> reason
        if sets_key(overrides, "model"):
            base = self._compose(merge(COMMON, overrides))
            self.net = NET_OF.get(base.model.get("_target_"), "own")
            self.like = (self.net,) if self.net in NETS else nets_that_read(base.data)
        else:
            base = self._find_fitting()
        self.folder = Path(base.run_dir or Path("runs", base.name, new_run_id()))
        self.alone: dict[tuple[str, ...], PreparedRun] = {}

    def _find_fitting(self) -> DictConfig:
        """The configuration of the first network that the overrides fit: `model.layers=3` fits text only."""
        fitting, refusals = [], []
        for net in (net for net in NETS if any(net in row.nets for row in self.rows)):
            try:
                fitting.append(self._compose(merge([*COMMON, *NETS[net]], self.overrides)))
            except _RefusedError as refusal:
                refusals.append(refusal)
                self.excluded[net] = str(refusal).splitlines()[0]
        if not fitting:
            raise refusals[0]
        return fitting[0]

    def cases(self) -> list[Case]:
        rows = rows_of(self.overrides, self.rows, net=self.net, like=self.like)
        pairs = [(row, net) for row, net in rows if net not in self.excluded]
        return [self._case(row, net, number) for number, (row, net) in enumerate(pairs, start=1)]

    def _case(self, row: ParityRow, net: str, number: int) -> Case:
        task = merge([*COMMON, *NETS.get(net, ())], row.options)  # the one-device run gets the options too
        execution = [f"strategy={row.strategy}", *row.layout]
        try:
            run = self._prepare(
                merge([*execution, *task], self.overrides), f"{number:02d}-{row.strategy}-{net}"
            )
            return Case(row, net, run, self._prepare_alone(run, task, net))
        except ConfigError as error:
            return Case(row, net, None, None, problems=error.problems)

    def _prepare_alone(self, run: PreparedRun, task: Sequence[str], net: str) -> PreparedRun:
        """The one-device run that `run` must equal."""
        microbatch_size = None
        if not is_reference_decoder(run.config):  # BatchNorm sees a microbatch
            microbatch_size = run.config.training.global_batch_size // run.plan.batch.microbatches
        if run.config.training.fp8 != OFF:  # a scale is for a rank's microbatch
            microbatch_size = run.plan.batch.microbatch_size
        overrides = (
            "strategy=single",
            f"training.microbatch_size={microbatch_size or 'null'}",
            *(word for word in merge(task, self.overrides) if not key_of(word).startswith(EXECUTION_KEYS)),
        )
        if overrides not in self.alone:
            self.alone[overrides] = self._prepare(overrides, f"alone-{len(self.alone) + 1}-{net}")
        return self.alone[overrides]

    def _prepare(self, overrides: Sequence[str], name: str) -> PreparedRun:
        config = self._compose(overrides)
        config.run_dir = str(self.folder / name)
        try:
            run = prepare(config, overrides=overrides, config_dir=self.extra_dir, keep=self._plan_snapshot)
        except UnresolvedError as error:
            raise _RefusedError(overrides, error) from error
        raise_if_any(_problems(run.config, self.overrides))
        return run

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        try:
            return self._composer.compose(overrides).copy()
        except COMPOSE_ERRORS as error:
            raise _RefusedError(overrides, error) from error


def without_refused(cases: Sequence[Case], overrides: Sequence[str]) -> list[Case]:
    """The cases. A case that the user's own model class refuses gets the problems and no run.

    Raises ConfigError if no row is left that can run.
    """
    runs = [case.run for case in cases if case.run is not None]
    refusals = iter(check_models([(run.config, run.values) for run in runs]))
    checked = []
    for case in cases:
        problems = next(refusals) if case.run is not None else []
        checked.append(replace(case, run=None, alone=None, problems=problems) if problems else case)
    _require_rows(checked, overrides)
    return checked


def nets_that_read(data: DictConfig) -> tuple[str, ...]:
    """The networks that read data of this kind; all of them if its class is not one of this package."""
    if data.get("sequence_length") is not None:
        return "text", "moe"
    kinds = {kind._target_ for kind in (DigitsDataConfig, CellsDataConfig)}
    return IMAGES if data.get("_target_") in kinds else tuple(NETS)


def rows_of(
    overrides: Sequence[str], table: Sequence[ParityRow], *, net: str | None, like: Sequence[str] = ()
) -> Iterator[tuple[ParityRow, str]]:
    """Each row of the table with each network on which it is proven.

    If the user names a strategy, only its rows remain. If the user sets a layout, each strategy of `ROWS` has
    one row, on that layout and without the row's options.

    net: the network of the model that the user names. like: the networks whose rows this network takes.
    """
    name = next((word.partition("=")[2] for word in overrides if key_of(word) == "strategy"), None)
    rows = [row for row in table if name in (None, row.strategy)] or [ParityRow(str(name), TWO)]
    if table is ROWS and any(key_of(word) in LAYOUT for word in overrides):
        rows = [replace(row, layout=(), options=()) for row in rows if row.layout or name == row.strategy]
    pairs = [(replace(row, nets=()), row_net) for row in rows for row_net in row.nets]
    if net is not None:
        matches = [row for row, row_net in pairs if row_net in like]
        pairs = [(row, net) for row in matches or [row for row, _ in pairs if name]]
    yield from dict.fromkeys(pairs)


def merge(defaults: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The defaults whose key or group the user does not set, then the user's overrides."""
    user_groups = tuple(f"{group}." for group in ("model", "data") if sets_key(overrides, group))
    user_keys = {key_of(word) for word in overrides}
    kept = [word for word in defaults if key_of(word) not in user_keys and not word.startswith(user_groups)]
    return [*kept, *overrides]


def sets_key(overrides: Sequence[str], key: str) -> bool:
    return any(key_of(word) == key for word in overrides)


def _problems(config: RunConfig, overrides: Sequence[str]) -> Problems:
    """Settings that a run allows but a proof does not. Only a recipe is compared in half precision."""
    precision, launcher = config.training.precision, config.launcher
    if precision not in SHARP and sets_key(overrides, "training.precision"):
        rule = "rounds so coarsely that another order of sums gives another result"
        yield Problem("training.precision", precision, rule, SHARP)
    if config.task.name != "proof":
        yield Problem("task", config.task.name, "keeps nothing to compare", ("proof",))
    if launcher.kind == "script":
        yield Problem("launcher", "script", "starts nothing to compare", ("local",))
    elif launcher.kind not in HERE and not launcher.wait:
        yield Problem("launcher.wait", False, "would compare runs that have not ended", (True,))


def _require_rows(cases: Sequence[Case], overrides: Sequence[str]) -> None:
    problems = {str(problem): problem for case in cases for problem in case.problems}
    shared = [text for text in problems if all(text in map(str, case.problems) for case in cases)]
    if shared or all(case.problems for case in cases):
        raise ConfigError(in_order(list(problems.values()), overrides))
