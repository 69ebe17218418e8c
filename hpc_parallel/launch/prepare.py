"""A checked run before it starts: configuration, layout, folder. Nothing is written until it launches."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from hpc_parallel.config.checks import starting_weights
from hpc_parallel.config.checks.all_checks import find_problems, in_order
from hpc_parallel.config.compose import resolve
from hpc_parallel.config.layout import BatchPlan, Layout, layout_of, plan_batch, processes_per_node, servers
from hpc_parallel.config.schedules import schedule_of
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.config.tasks import total_steps
from hpc_parallel.launch import resume
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.names import RUNS
from hpc_parallel.record.provenance import State, origin
from hpc_parallel.record.run_folder import RunFolder, new_run_id
from hpc_parallel.record.safe_read import YAML_BYTES, require_plain
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.snapshot import Snapshot, plan_snapshot
from hpc_parallel.record.trust import require_trusted

# libyaml's where PyYAML was built with it: the same text in a quarter of the time.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PlainDumper(_Dumper):  # type: ignore[misc]
    """Writes equal parts as often as they are there: the reader refuses aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


@dataclass(frozen=True)
class PreparedRun:
    """One run that passed every check."""

    config: RunConfig
    values: dict[str, Any]  # the same as plain values, as `config.yaml` keeps them
    layout: Layout
    batch: BatchPlan
    folder: RunFolder
    snapshot: Snapshot | None
    overrides: Sequence[str]  # of the command line, for this run alone where it was a sweep
    config_dir: Path | None  # the user's own configurations (--config-dir)
    command: Sequence[str] | None = None  # what started it; None: this process's command line

    @property
    def variables(self) -> dict[str, str]:
        """What the run's processes need in their environment to import the source that was kept."""
        return {} if self.snapshot is None else self.snapshot.variables(os.environ)

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
        """What the user should know before the run starts, a line each."""
        note = None if self.snapshot is None else self.snapshot.note
        return [] if note is None else [note]

    @property
    def resumes(self) -> bool:
        """Whether it goes on in a run folder that is there."""
        return self.config.resume is not None

    @property
    def steps(self) -> int:
        """How many its metrics count to."""
        return total_steps(self.config)

    def __str__(self) -> str:
        nodes, devices = self.config.nodes, self.config.gpus_per_node
        batch = f"{self.batch.data} x {self.batch.microbatches} x {self.batch.microbatch_size}"
        server = "a server and " if servers(self.config.strategy) else ""
        return (
            f"{self.config.strategy.name}: {nodes} node{'s' * (nodes > 1)} x {devices} "
            f"device{'s' * (devices > 1)} = {server}{self.layout}; "
            f"batch {self.config.training.global_batch_size} = {batch} (replicas x microbatches x samples)"
        )

    def write(self, *, taken: Snapshot | None = None, state: State | None = None) -> None:
        """Make the run folder: configuration, source, and what only this machine knows of the environment.

        Of a sweep, `taken` is the snapshot of a run that was written before, of the same files, and `state`
        remembers what git said. Raises ConfigError if the folder can't be made; then nothing of it is left.
        """
        try:
            self._hold()
            try:
                self._fill(taken, state)
            except BaseException:  # a full disk, a source file that can't be read, Ctrl-C
                self.take_back()
                raise
        except OSError as error:
            raise self._unwritable(error) from error
        except owner.OwnedError as error:
            raise ConfigError([Problem(self._key, self.folder.path, str(error))]) from error

    @contextmanager
    def written(self) -> Iterator[None]:
        """`write`, for a block that hands the run over; if the block fails, nothing is left of either.

        Raises ConfigError also if the block can't write its files.
        """
        self.write()
        try:
            yield
        except BaseException as error:  # a full disk, a site that refuses, Ctrl-C
            self.take_back()
            if not isinstance(error, OSError):
                raise
            raise self._unwritable(error) from error

    def _hold(self) -> None:
        """Make the folder this process's, and set aside what an earlier start left there."""
        if not self.resumes:
            self._require_trusted(next(path for path in self._way_up if os.path.lexists(path)))
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
                self.take_back()
            raise

    def _fill(self, taken: Snapshot | None, state: State | None) -> None:
        if self.snapshot is not None:
            self.snapshot.take() if taken is None else self.snapshot.take_as(taken)
        text = yaml.dump(self.values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
        self._require_readable(text)
        write_text(self.folder.config, text)
        said = origin(
            self.folder, overrides=self.overrides, config_dir=self.config_dir, snapshot=self.snapshot,
            command=self.command, state=state,
        )  # fmt: skip
        write_json(self.folder.environment, said)
        if self.resumes:
            attempts.resumed_by_hand(self.folder)

    def _require_readable(self, text: str) -> None:
        """Raises ConfigError if the job could not read `text`, its config.yaml, back."""
        try:
            if len(text.encode()) > YAML_BYTES:
                raise ValueError(f"it has more than {YAML_BYTES // 2**10} KiB")
            require_plain(self.values)
        except ValueError as error:
            mend = "Try shorter lists, and plain values; long texts belong in files."
            raise ConfigError([f"the configuration can't be kept in config.yaml: {error}. {mend}"]) from error

    @property
    def _way_up(self) -> tuple[Path, ...]:
        return self.folder.path, *self.folder.path.parents

    def _require_trusted(self, path: Path) -> None:
        require_trusted(path, key=self._key, shared_folder=self.config.launcher.shared_folder)

    @property
    def _key(self) -> str:
        """What named the run folder."""
        return "resume" if self.resumes else "run_dir"

    def _unwritable(self, error: OSError) -> ConfigError:
        """Names also the file outside of the run folder that `error` is about."""
        file = None if error.filename is None else os.fsdecode(error.filename)
        place = "" if file is None or Path(file).is_relative_to(self.folder.path) else f"{file}: "
        rule = f"can't hold the run: {place}{error.strerror or error}"
        return ConfigError([Problem(self._key, self.folder.path, rule)])

    def take_back(self) -> None:
        """Undo `write`, where nothing began in the folder: as if the run had never been asked for."""
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
    plan: Callable[..., Snapshot] = plan_snapshot,
) -> PreparedRun:
    """Resolve and check. `plan`: `plan_snapshot`, or one that remembers for many runs what git said.

    Raises ConfigError with every problem.
    """
    config, values = resolve(composed)
    if problems := [*find_problems(config, overrides), *starting_weights.find_problems(config)]:
        raise ConfigError(in_order(problems, overrides))
    path = Path(os.path.expanduser(config.run_dir)) if config.run_dir else RUNS / config.name / new_run_id()
    layout = layout_of(config.strategy, devices=config.devices)
    batch = plan_batch(
        config.training.global_batch_size,
        layout=layout,
        microbatch_size=config.training.microbatch_size,
        microbatches=config.strategy.microbatches,
        in_turn=schedule_of(config.strategy).in_turn,
    )
    folder = RunFolder(path.absolute())
    if config.weights is not None:
        values["weights"] = str(Path(os.path.expanduser(config.weights)).absolute())
    if config.resume and (problems := list(resume.find_problems(folder, values))):
        raise ConfigError(problems)
    values["run_dir"] = str(folder.path)
    snapshot = None
    if config.launcher.snapshot:
        snapshot = plan(
            folder.code, working_directory=Path.cwd(),
            most_mb=config.launcher.snapshot_mb, exclude=config.launcher.snapshot_exclude,
            credentials=config.launcher.snapshot_credentials,
        )  # fmt: skip
    return PreparedRun(
        config, values, layout=layout, batch=batch, folder=folder, snapshot=snapshot,
        overrides=overrides, config_dir=Path(config_dir).absolute() if config_dir else None,
    )  # fmt: skip
