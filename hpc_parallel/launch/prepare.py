"""A checked run before it starts: configuration, layout, folder. Nothing is written before the launch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config import job_python
from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.checks.data_checks import data_warnings
from hpc_parallel.config.checks.script_checks import script_warnings
from hpc_parallel.config.checks.training_checks import callback_warnings, rounding_warnings
from hpc_parallel.config.resolve import resolve, with_values
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK, absolute, kind_of, mentions
from hpc_parallel.config.site_limits import container_warnings, local_problems, site_warnings
from hpc_parallel.config.task_schema import ScriptConfig
from hpc_parallel.config.tasks import total_steps
from hpc_parallel.launch.import_check import check_imports
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.counts import trains
from hpc_parallel.layout.layout import processes_per_node, servers
from hpc_parallel.layout.schedules import file_of
from hpc_parallel.machine import fabric
from hpc_parallel.problems import ConfigError, Problem, raise_if_any, spell, tried
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.run_folder import RunFolder, new_run_id

if TYPE_CHECKING:
    from hpc_parallel.planning.forecast import Forecast
    from hpc_parallel.planning.hardware import Hardware
    from hpc_parallel.record.snapshot import Snapshot


_OWN_FILE = re.compile(rb"\b__file__\b|\bargv\[0\]")


@dataclass(frozen=True)
class PreparedRun:
    """One run that passed every check."""

    config: RunConfig
    values: dict[str, Any]  # `config` as plain values with the places of its files: what `config.yaml` has
    plan: Plan
    folder: RunFolder
    snapshot: Snapshot | None
    overrides: Sequence[str]  # from the command line; in a sweep, the overrides of this run
    config_dir: Path | None  # the user's configuration files (--config-dir)
    launcher_reason: str = ""  # why `launcher.kind=auto` chose this launcher
    import_note: str | None = None  # why the user's classes were not imported
    predicted: Mapping[str, Any] | None = None  # planned figures, by the names of `summary.json`
    plan_notes: Sequence[str] = ()  # the choice of `strategy=auto`, and the plan's warnings
    smaller: Mapping[int, Any] = field(default_factory=dict)  # `values` on fewer nodes, by their number
    command: Sequence[str] | None = None  # that started it; None: the command line of this process
    dependency: str = ""  # on jobs of Slurm, as sbatch has it

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that let the run's processes import the kept source."""
        return {} if self.imports is None else self.imports.variables(os.environ)

    @property
    def imports(self) -> Snapshot | None:
        """From where the run's processes import; None: from the working directory, as Python does."""
        if self.snapshot is None and not _imports_here(self.config.script):
            from hpc_parallel.record.snapshot import in_place

            return in_place()
        return self.snapshot

    @cached_property
    def processes_per_node(self) -> int:
        return processes_per_node(self.config.strategy, gpus_per_node=self.config.gpus_per_node)

    @cached_property
    def processes(self) -> int:
        return self.config.nodes * self.processes_per_node

    @property
    def cpus_per_process(self) -> int:
        return self.config.launcher.cpus_per_device * self.config.gpus_per_node // self.processes_per_node

    @property
    def notes(self) -> list[str]:
        """Lines that the user should read before the run starts."""
        kept = [] if self.snapshot is None else [*self.snapshot.notes]
        texts = (
            *job_python.warnings(self.config), *self.container_warnings, *script_warnings(self.config),
            *data_warnings(self.config), *callback_warnings(self.config), *rounding_warnings(self.config),
        )  # fmt: skip
        warnings = [*site_warnings(self.config), *(f"warning     {text}" for text in texts)]
        kept = [*kept, *_kept_notes(self.config.script, snapshot=self.snapshot)]
        return [*self.plan_notes, *warnings, *kept, *filter(None, [self.import_note])]

    @property
    def container_warnings(self) -> list[str]:
        """Paths that the container of the job would not see."""
        import_path = () if self.imports is None else self.imports.import_path
        return list(container_warnings(self.config, run_folder=self.folder.path, source=import_path))

    @property
    def resumes(self) -> bool:
        return self.config.resume is not None

    @cached_property
    def is_script(self) -> bool:
        """Whether the run executes a user's script instead of one of our tasks."""
        return self.config.task.name == TASK

    @property
    def steps(self) -> int:
        """The last step number in the metrics."""
        return total_steps(self.config)

    def __str__(self) -> str:
        nodes, devices = self.config.nodes, self.config.gpus_per_node
        spares, least = self.config.launcher.spares, self.config.launcher.min_nodes
        besides = [f"and {spares} spare{'s' * (spares > 1)}"] if spares else []
        besides += [] if least is None else [f"at least {least}"]
        hosts = f"{nodes} node{'s' * (nodes > 1)}" + (f" ({', '.join(besides)})" if besides else "")
        start = f"; continues after step {self._checkpoint_step}" if self.resumes else ""
        if self.is_script:
            kind = kind_of(self.values["script"]) or TASK
            script = ("-m " if kind == "module" else "") + str(getattr(self.config.script, kind))
            processes = f"{self.processes} process{'es' * (self.processes > 1)}"
            return f"{script}: {hosts} x {devices} device{'s' * (devices > 1)} = {processes}" + (
                "; continues" if self.resumes else ""
            )
        server = "a server and " if servers(self.config.strategy) else ""
        return (
            f"{self.config.strategy.name}: {hosts} x {devices} "
            f"device{'s' * (devices > 1)} = {server}{self.plan.layout}; "
            f"batch {self.config.training.global_batch_size} = {self.plan.batch}{start}"
        )

    @property
    def _checkpoint_step(self) -> int:
        """The step of the newest checkpoint, 0 without one. The job checks whether it is undamaged."""
        from hpc_parallel.record.checkpoint_index import complete

        return max((checkpoint.step for checkpoint in complete(self.folder.checkpoints)), default=0)


def prepare(
    composed: DictConfig,
    *,
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    keep: Callable[..., Snapshot] | None = None,
    build_model: bool = False,
    preset: Mapping[str, Any] = MappingProxyType({}),
    awaited: Container[Path] = (),
) -> PreparedRun:
    """Resolve and check a configuration.

    keep: a `plan_snapshot` that caches git's answers for many runs.
    preset: values that all runs of a sweep have in common, by dotted key.
    build_model: whether to also build the user's model class, without memory.
    awaited: places that need not exist, because another run writes them before.

    Raises ConfigError with every problem.
    """
    user_folder = Path(config_dir).absolute() if config_dir else None
    notes: list[str] = []
    if OmegaConf.select(composed, "strategy.name", default=None) == "auto":
        from hpc_parallel.planning.auto_strategy import choose

        choice = choose(with_values(composed, preset), overrides, user_folder=user_folder)
        composed, overrides, notes, preset = choice.composed, choice.overrides, [choice.note], {}
    config, values, launcher_reason = resolve(composed, preset=preset)
    problems = find_problems(config, overrides) + _weights_problems(config) + _stage_problems(config)
    problems = [problem for problem in problems if not is_awaited(problem, awaited)]
    if not problems and not config.dry_run:
        problems = list(local_problems(config))
    hardware = _hardware(config, user_folder, problems)
    if problems:
        if config.resume is not None:
            from hpc_parallel.launch.resume import without_fixed_keys

            problems = [without_fixed_keys(problem) for problem in problems]
        raise ConfigError(in_order(problems, overrides))
    path = Path(os.path.expanduser(config.run_dir)) if config.run_dir else RUNS / config.name / new_run_id()
    folder = RunFolder(path.absolute())
    snapshot = _snapshot(config, folder, keep)
    imports = check_imports(config, snapshot=snapshot, values=values if build_model else None)
    if problems := [*_missing_interfaces(config), *imports.problems]:
        raise ConfigError([_with_own_file(str(problem), overrides) for problem in problems])
    plan = Plan.of(config)
    planned = _forecast(config, plan, hardware)
    notes += [] if planned is None else planned.warnings
    recorded = values | _places(config, values, folder, snapshot)
    notes += _notes_of_resume(config, recorded, folder, overrides) + _notes_of_weights(config, recorded)
    smaller = {}
    if config.launcher.min_nodes is not None:
        from hpc_parallel.launch.fewer_nodes import smaller_runs

        smaller = smaller_runs(composed, config, preset=preset, check=partial(_checked, hardware=hardware))
        smaller = {nodes: run | _places(config, run, folder, snapshot) for nodes, run in smaller.items()}
    return PreparedRun(
        config, recorded, plan=plan, folder=folder, snapshot=snapshot, overrides=overrides,
        config_dir=user_folder, launcher_reason=launcher_reason, import_note=imports.note,
        predicted=None if planned is None else planned.figures, plan_notes=notes, smaller=smaller,
    )  # fmt: skip


def _with_own_file(problem: str, overrides: Sequence[str]) -> str:
    """`problem`, with the way to arguments of its own for a class that was typed in the place of ours."""
    for override in overrides:
        key, typed, target = override.partition("._target_=")
        if typed and key in ("model", "data") and problem.startswith("TypeError") and f"({key})" in problem:
            from hpc_parallel.config.file_problems import of_class

            rest = f"The class gets all keys of the chosen {key} file as arguments. {of_class(key, target)}"
            return f"{problem.rstrip('.')}. {rest}"
    return problem


def _checked(config: RunConfig, *, hardware: Hardware | None) -> Plan:
    """The plan of the run on fewer nodes. Raises ConfigError."""
    raise_if_any(find_problems(config))
    plan = Plan.of(config)
    _forecast(config, plan, hardware)
    return plan


def _weights_problems(config: RunConfig) -> list[Problem | str]:
    if config.weights is None or config.resume is not None:  # a resumed run uses its own checkpoints
        return []
    from hpc_parallel.launch.resume import weights_problems

    return [*weights_problems(config, config.weights)]


def _stage_problems(config: RunConfig) -> list[Problem | str]:
    """The problem of stages where nothing would start them."""
    rule = "names stages of one run that the command run starts, without -m and not from Python"
    instead = "Try then=null, and once the runs have ended: python -m hpc_parallel report FOLDER"
    return [] if config.then is None else [f"then = {spell(config.then)} {rule}. {instead}."]


def is_awaited(problem: Problem | str, awaited: Container[Path]) -> bool:
    """Whether the problem is only that the file or folder of an earlier stage does not exist yet."""
    if isinstance(problem, str) or not isinstance(problem.value, str):
        return False
    path = absolute(problem.value)
    return path in awaited and not os.path.exists(path)


def _hardware(config: RunConfig, user_folder: Path | None, problems: list[Problem | str]) -> Hardware | None:
    """The hardware to plan for; None if nothing is planned, and then no planning module is loaded."""
    if config.plan.hardware is None or config.plan.on_overflow == "off":
        return None
    from hpc_parallel.planning.hardware import named_hardware

    return tried(lambda: named_hardware(config.plan.hardware, user_folder=user_folder), problems)


def _notes_of_resume(
    config: RunConfig, values: Mapping[str, Any], folder: RunFolder, overrides: Sequence[str]
) -> list[str]:
    """What the user should read of a run that continues. Raises ConfigError if it can't continue."""
    if config.resume is None:
        return []
    from hpc_parallel.launch import resume

    raise_if_any(resume.find_problems(folder, values))
    changes = [resume.rate_jump(folder, config), resume.other_validation(folder, config)]
    changes.append(resume.unasked_changes(folder, values, overrides))
    return [f"warning     {change}" for change in changes if change is not None]


def _notes_of_weights(config: RunConfig, values: Mapping[str, Any]) -> list[str]:
    """What the user should read of the weights that the run starts from, if they exist already."""
    if config.weights is None or config.resume is not None or not os.path.exists(values["weights"]):
        return []
    from hpc_parallel.launch.resume import other_than_trained

    other = other_than_trained(config, Path(values["weights"]))
    return [] if other is None else [f"warning     {other}"]


def _places(
    config: RunConfig, values: Mapping[str, Any], folder: RunFolder, snapshot: Snapshot | None
) -> dict[str, Any]:
    """The values of keys that name places, as `config.yaml` has them: absolute, or in the run folder."""
    places: dict[str, Any] = {"run_dir": str(folder.path)}
    if config.weights is not None:
        from hpc_parallel.record.find import path_of

        places["weights"] = str(path_of(config.weights))
    if config.task.name == TASK:
        places["script"] = values["script"] | _script_places(config.script, folder=folder, snapshot=snapshot)
    if (schedule := file_of(config.strategy.schedule)) is not None:  # `run_files` copies it there
        from hpc_parallel.layout import action_file

        kept = folder.path / action_file.read(schedule).named(schedule.stem)
        places["strategy"] = values["strategy"] | {"schedule": str(kept)}
    return places


def _forecast(config: RunConfig, plan: Plan, hardware: Hardware | None) -> Forecast | None:
    """The plan of a training; None without known hardware."""
    if hardware is None or not trains(config):
        return None
    from hpc_parallel.planning.forecast import forecast

    return forecast(config, plan, hardware=hardware)


def _missing_interfaces(config: RunConfig) -> list[str]:
    """The problem of a local run whose variable for gloo names an interface that this machine lacks."""
    if config.launcher.kind != "local":
        return []
    variables = dict(os.environ)
    fabric.site_variables(config.cluster.environment, variables)
    try:
        fabric.require_interfaces(variables, host="this machine", nccl=False)
    except fabric.DeviceError as error:
        return [str(error)]
    return []


def _snapshot(config: RunConfig, folder: RunFolder, keep: Callable[..., Snapshot] | None) -> Snapshot | None:
    launcher = config.launcher
    if not launcher.snapshot:
        return None
    from hpc_parallel.record.snapshot import kept_code, plan_snapshot

    return (keep or plan_snapshot)(
        folder.code, working_directory=Path.cwd(), most_mb=launcher.snapshot_mb,
        exclude=launcher.snapshot_exclude, credentials=launcher.snapshot_credentials,
        also=_script_folders(config.script, kept_code), imports_here=_imports_here(config.script),
    )  # fmt: skip


def _script_folders(script: ScriptConfig, kept_code: Callable[[Path], object]) -> list[Path]:
    """The folder of a Python file, from which Python imports; if it is a link, that of its target.

    Also the folder of a program that another run keeps.
    """
    folders = {key: absolute(text).resolve().parent for key, text in _paths(script).items()}
    return [folder for key, folder in folders.items() if key == "file" or kept_code(folder) is not None]


def _imports_here(script: ScriptConfig) -> bool:
    """Whether Python imports from the working directory: for `-m` and for the classes of our own tasks."""
    return not (script.file or script.command)


def _script_places(script: ScriptConfig, *, folder: RunFolder, snapshot: Snapshot | None) -> dict[str, str]:
    """The keys `file`, `command` and `working_directory` for `config.yaml`.

    A path in the kept source is relative to the run folder, every other one is absolute. A command without a
    slash stays a name, which each host looks up on its PATH.
    """
    places = {"working_directory": str(absolute(script.working_directory or "."))}
    if script.working_directory and script.working_directory.startswith("{run}"):
        places["working_directory"] = script.working_directory
    for key, text in _paths(script).items():
        kept = _kept(text, snapshot)
        places[key] = str(absolute(text)) if kept is None else str(kept.relative_to(folder.path))
    return places


def _kept_notes(script: ScriptConfig, *, snapshot: Snapshot | None) -> Iterator[str]:
    """A line for a script that the run does not keep, and for one that may write beside its own file."""
    for text in _paths(script).values():
        if snapshot is not None and _kept(text, snapshot) is None:
            folders = (why for path, why in snapshot.unkept.items() if absolute(text).is_relative_to(path))
            reason = next(folders, "(elsewhere, ignored by git or too large): later edits change the run")
            yield f"not kept    {text} {reason}"
        elif snapshot is not None and mentions(absolute(text), _OWN_FILE):
            yield (
                f"in a copy   {text} uses __file__: what it writes there is not in the copy of the next run. "
                "Write to {run}, or try launcher.snapshot=false, which runs it in place."
            )


def _paths(script: ScriptConfig) -> dict[str, str]:
    paths = {"file": script.file}
    if script.command and os.sep in script.command:
        paths["command"] = script.command
    return {key: text for key, text in paths.items() if text}


def _kept(text: str, snapshot: Snapshot | None) -> Path | None:
    return None if snapshot is None else snapshot.copy_of(absolute(text))
