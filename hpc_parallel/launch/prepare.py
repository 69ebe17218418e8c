"""A checked run before it starts: configuration, layout, folder. Nothing is written before the launch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf

from hpc_parallel.config import job_python
from hpc_parallel.config.checks import model_size_checks
from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.checks.data_checks import data_warnings
from hpc_parallel.config.checks.script_checks import script_warnings
from hpc_parallel.config.resolve import resolve, with_values
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.script import TASK, kind_of
from hpc_parallel.config.site_limits import container_warnings, site_warnings
from hpc_parallel.config.tasks import total_steps
from hpc_parallel.launch import resume
from hpc_parallel.launch.import_check import check_imports
from hpc_parallel.launch.script_places import imports_here, kept_notes, script_folders, script_places
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.counts import trains
from hpc_parallel.layout.layout import processes_per_node, servers
from hpc_parallel.machine import fabric
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.find import path_of
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.provenance import PREDICTED, GitState, origin
from hpc_parallel.record.run_folder import RunFolder, new_run_id
from hpc_parallel.record.safe_read import YAML_BYTES, require_plain
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.snapshot import Snapshot, in_place, plan_snapshot
from hpc_parallel.record.trust import require_trusted

if TYPE_CHECKING:
    from hpc_parallel.planning.forecast import Forecast

# The libyaml dumper, if PyYAML was built with it, writes the same text in a quarter of the time.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PlainDumper(_Dumper):  # type: ignore[misc]
    """Writes repeated objects in full, because the reader refuses YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True)
class PreparedRun:
    """One run that passed every check."""

    config: RunConfig
    values: dict[str, Any]  # `config` as plain values, as in `config.yaml`
    plan: Plan
    folder: RunFolder
    snapshot: Snapshot | None
    overrides: Sequence[str]  # from the command line; in a sweep, the overrides of this run
    config_dir: Path | None  # the user's configuration files (--config-dir)
    launcher_reason: str = ""  # why `launcher.kind=auto` chose this launcher
    import_note: str | None = None  # why the user's classes were not imported
    predicted: Mapping[str, Any] | None = None  # planned figures, by the names of `summary.json`
    plan_notes: Sequence[str] = ()  # the choice of `strategy=auto`, and the plan's warnings
    command: Sequence[str] | None = (
        None  # the command that started it; None: the command line of this process
    )

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that let the run's processes import the kept source."""
        return {} if self.imports is None else self.imports.variables(os.environ)

    @property
    def imports(self) -> Snapshot | None:
        """From where the run's processes import; None: from the working directory, as Python does."""
        if self.snapshot is None and not imports_here(self.config.script):
            return in_place()
        return self.snapshot

    @property
    def processes_per_node(self) -> int:
        return processes_per_node(self.config.strategy, gpus_per_node=self.config.gpus_per_node)

    @property
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
            *data_warnings(self.config),
        )  # fmt: skip
        warnings = [*site_warnings(self.config), *(f"warning     {text}" for text in texts)]
        kept = [*kept, *kept_notes(self.config.script, snapshot=self.snapshot)]
        return [*self.plan_notes, *warnings, *kept, *filter(None, [self.import_note])]

    @property
    def container_warnings(self) -> list[str]:
        """Paths that the container of the job would not see."""
        import_path = () if self.imports is None else self.imports.import_path
        return list(container_warnings(self.config, run_folder=self.folder.path, source=import_path))

    @property
    def resumes(self) -> bool:
        """Whether the run continues in an existing run folder."""
        return self.config.resume is not None

    @property
    def is_script(self) -> bool:
        """Whether the run executes a user's script instead of one of our tasks."""
        return self.config.task.name == TASK

    @property
    def steps(self) -> int:
        """The last step number in the metrics."""
        return total_steps(self.config)

    def __str__(self) -> str:
        nodes, devices = self.config.nodes, self.config.gpus_per_node
        start = f"; continues after step {self._checkpoint_step}" if self.resumes else ""
        if self.is_script:
            kind = kind_of(self.values["script"]) or TASK
            script = ("-m " if kind == "module" else "") + str(getattr(self.config.script, kind))
            processes = f"{self.processes} process{'es' * (self.processes > 1)}"
            return (
                f"{script}: {nodes} node{'s' * (nodes > 1)} x {devices} device{'s' * (devices > 1)} "
                f"= {processes}" + ("; continues" if self.resumes else "")
            )
        server = "a server and " if servers(self.config.strategy) else ""
        return (
            f"{self.config.strategy.name}: {nodes} node{'s' * (nodes > 1)} x {devices} "
            f"device{'s' * (devices > 1)} = {server}{self.plan.layout}; "
            f"batch {self.config.training.global_batch_size} = {self.plan.batch}{start}"
        )

    @property
    def _checkpoint_step(self) -> int:
        """The step of the newest checkpoint, 0 without one. The job checks whether it is undamaged."""
        return max((checkpoint.step for checkpoint in complete(self.folder.checkpoints)), default=0)

    def write(self, *, copied: Snapshot | None = None, git_state: GitState | None = None) -> None:
        """Write the run folder: configuration, source, and environment facts that only this machine knows.

        copied: in a sweep, the snapshot of the same files in a run that is already written.
        git_state: in a sweep, a cached `source_state`.

        Raises ConfigError if the folder can't be made. In this case, nothing of the folder remains.
        """
        try:
            self._claim_folder()
            try:
                self._write_files(copied, git_state)
            except BaseException:  # a full disk, a source file that can't be read, Ctrl-C
                self.undo_write()
                raise
        except OSError as error:
            raise self._unwritable(error) from error
        except owner.OwnedError as error:
            raise ConfigError([Problem(self._key, self.folder.path, str(error))]) from error

    @contextmanager
    def written(self) -> Iterator[None]:
        """Call `write`, then run a block that submits the run. If the block fails, the write is undone.

        Raises ConfigError also if the block can't write its files.
        """
        self.write()
        try:
            yield
        except BaseException as error:  # a full disk, a site that refuses, Ctrl-C
            self.undo_write()
            if not isinstance(error, OSError):
                raise
            raise self._unwritable(error) from error

    def _claim_folder(self) -> None:
        """Make this process the owner of the folder, and set aside the files of an earlier start."""
        if not self.resumes:
            self._require_trusted(next(path for path in self._path_and_parents if os.path.lexists(path)))
            self.folder.create()
        try:
            owner.claim(self.folder)
            self._require_trusted(self.folder.path)
            if self.resumes:
                self.folder.set_aside()
        except BaseException:
            if self.resumes:
                owner.release(self.folder)
            else:
                self.undo_write()
            raise

    def _write_files(self, copied: Snapshot | None, git_state: GitState | None) -> None:
        if self.snapshot is not None:
            self.snapshot.take() if copied is None else self.snapshot.take_as(copied)
        text = yaml.dump(self.values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
        self._require_readable(text)
        write_text(self.folder.config, text)
        provenance = origin(
            self.folder, overrides=self.overrides, config_dir=self.config_dir, snapshot=self.snapshot,
            command=self.command, state=git_state,
        )  # fmt: skip
        if self.predicted:
            provenance[PREDICTED] = dict(self.predicted)
        write_json(self.folder.environment, provenance)
        if self.resumes:
            attempts.resumed_by_hand(self.folder)

    def _require_readable(self, text: str) -> None:
        """Raises ConfigError if the job could not read `text` back from config.yaml."""
        try:
            if len(text.encode()) > YAML_BYTES:
                raise ValueError(f"it has more than {YAML_BYTES // 2**10} KiB")
            require_plain(self.values)
        except ValueError as error:
            hint = "Try shorter lists and plain values; put long texts in files."
            raise ConfigError([f"the configuration can't be kept in config.yaml: {error}. {hint}"]) from error

    @property
    def _path_and_parents(self) -> tuple[Path, ...]:
        return self.folder.path, *self.folder.path.parents

    def _require_trusted(self, path: Path) -> None:
        require_trusted(path, key=self._key, shared_folder=self.config.launcher.shared_folder)

    @property
    def _key(self) -> str:
        """The configuration key that names the run folder."""
        return "resume" if self.resumes else "run_dir"

    def _unwritable(self, error: OSError) -> ConfigError:
        """The problem with the run folder. A file outside the folder is named too."""
        file = None if error.filename is None else os.fsdecode(error.filename)
        prefix = "" if file is None or Path(file).is_relative_to(self.folder.path) else f"{file}: "
        rule = f"can't hold the run: {prefix}{error.strerror or error}"
        return ConfigError([Problem(self._key, self.folder.path, rule)])

    def undo_write(self) -> None:
        """Undo `write` if no process has started in the folder."""
        if self.resumes:
            self.folder.put_back()
            owner.release(self.folder)
        else:
            shutil.rmtree(self.folder.path, ignore_errors=True)


def prepare(
    composed: DictConfig,
    *,
    overrides: Sequence[str],
    config_dir: str | Path | None = None,
    keep: Callable[..., Snapshot] = plan_snapshot,
    build_model: bool = False,
    preset: Mapping[str, Any] = MappingProxyType({}),
) -> PreparedRun:
    """Resolve and check a configuration.

    keep: `plan_snapshot`, or a version that caches git's answers for many runs.
    preset: values that all runs of a sweep have in common, by dotted key.
    build_model: whether to also build the user's model class, without memory.

    Raises ConfigError with every problem.
    """
    user_folder = Path(config_dir).absolute() if config_dir else None
    notes: list[str] = []
    if OmegaConf.select(composed, "strategy.name", default=None) == "auto":
        composed, overrides, notes = _with_strategy(with_values(composed, preset), overrides, user_folder)
        preset = {}
    config, values, launcher_reason = resolve(composed, preset=preset)
    problems = [*find_problems(config, overrides), *model_size_checks.weights_problems(config)]
    if problems := [*problems, *_hardware_problems(config, user_folder)]:
        raise ConfigError(in_order(problems, overrides))
    path = Path(os.path.expanduser(config.run_dir)) if config.run_dir else RUNS / config.name / new_run_id()
    folder = RunFolder(path.absolute())
    snapshot = _snapshot(config, folder, keep)
    imports = check_imports(config, snapshot=snapshot, values=values if build_model else None)
    if problems := [*_missing_interfaces(config), *imports.problems]:
        raise ConfigError(problems)
    plan = Plan.of(config)
    planned = _forecast(config, plan, user_folder)
    notes += [] if planned is None else planned.warnings
    if config.weights is not None:
        values["weights"] = str(path_of(config.weights))
    if config.resume and (problems := list(resume.find_problems(folder, values))):
        raise ConfigError(problems)
    if config.resume and (jump := resume.rate_jump(folder, config)):
        notes.append(f"warning     {jump}")
    values["run_dir"] = str(folder.path)
    if config.task.name == TASK:
        values["script"] |= script_places(config.script, folder=folder, snapshot=snapshot)
    return PreparedRun(
        config, values, plan=plan, folder=folder, snapshot=snapshot, overrides=overrides,
        config_dir=user_folder, launcher_reason=launcher_reason, import_note=imports.note,
        predicted=None if planned is None else planned.figures, plan_notes=notes,
    )  # fmt: skip


def _with_strategy(
    composed: DictConfig, overrides: Sequence[str], user_folder: Path | None
) -> tuple[DictConfig, Sequence[str], list[str]]:
    """Replace `strategy=auto` by a layout, and return a line that names the layout. Raises ConfigError."""
    from hpc_parallel.planning.auto_strategy import choose

    choice = choose(composed, overrides, user_folder=user_folder)
    return choice.composed, choice.overrides, [choice.note]


def _hardware_problems(config: RunConfig, user_folder: Path | None) -> list[Problem | str]:
    """The problems of the file that `plan.hardware` names."""
    if not _is_planned(config):
        return []
    from hpc_parallel.planning.hardware import named_hardware

    try:
        named_hardware(config.plan.hardware, user_folder=user_folder)
    except ConfigError as error:
        return error.problems
    return []


def _forecast(config: RunConfig, plan: Plan, user_folder: Path | None) -> Forecast | None:
    """The plan of the run. Without known hardware, nothing is planned and no planning module is loaded."""
    if not _is_planned(config) or not trains(config):
        return None
    from hpc_parallel.planning.forecast import forecast

    return forecast(config, plan, user_folder=user_folder)


def _is_planned(config: RunConfig) -> bool:
    return config.plan.hardware is not None and config.plan.on_overflow != "off"


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


def _snapshot(config: RunConfig, folder: RunFolder, keep: Callable[..., Snapshot]) -> Snapshot | None:
    launcher = config.launcher
    if not launcher.snapshot:
        return None
    return keep(
        folder.code, working_directory=Path.cwd(), most_mb=launcher.snapshot_mb,
        exclude=launcher.snapshot_exclude, credentials=launcher.snapshot_credentials,
        also=script_folders(config.script), imports_here=imports_here(config.script),
    )  # fmt: skip
