"""Write the folder of a prepared run, or undo it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from hpc_parallel.config.script import TORCHRUN
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.layout.schedules import file_of
from hpc_parallel.problems import ConfigError, Problem
from hpc_parallel.record import attempts, owner
from hpc_parallel.record.provenance import PREDICTED, GitState, origin
from hpc_parallel.record.safe_read import YAML_BYTES, require_plain
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.snapshot import Snapshot
from hpc_parallel.record.trust import require_trusted

# The libyaml dumper, if PyYAML was built with it, writes the same text in a quarter of the time.
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _PlainDumper(_Dumper):  # type: ignore[misc]
    """Writes repeated objects in full, because the reader refuses YAML aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write(run: PreparedRun, *, copied: Snapshot | None = None, git_state: GitState | None = None) -> None:
    """Write the run folder: configuration, source, and environment facts that only this machine knows.

    copied: in a sweep, the snapshot of the same files in a run that is already written.
    git_state: in a sweep, a cached `source_state`.

    Raises ConfigError if the folder can't be made. In this case, nothing of the folder remains.
    """
    try:
        _claim_folder(run)
        try:
            _write_files(run, copied, git_state)
        except BaseException:  # a full disk, a source file that can't be read, Ctrl-C
            undo_write(run)
            raise
    except OSError as error:
        raise _unwritable(run, error) from error
    except owner.OwnedError as error:
        raise ConfigError([Problem(_key(run), run.folder.path, str(error))]) from error


@contextmanager
def written(run: PreparedRun) -> Iterator[None]:
    """Call `write`, then run a block that submits the run. If the block fails, the write is undone.

    Raises ConfigError also if the block can't write its files.
    """
    write(run)
    try:
        yield
    except BaseException as error:  # a full disk, a site that refuses, Ctrl-C
        undo_write(run)
        if not isinstance(error, OSError):
            raise
        raise _unwritable(run, error) from error


def undo_write(run: PreparedRun) -> None:
    """Undo `write` if no process has started in the folder."""
    if run.resumes:
        run.folder.put_back()
        owner.release(run.folder)
    else:
        shutil.rmtree(run.folder.path, ignore_errors=True)


def _claim_folder(run: PreparedRun) -> None:
    """Make this process the owner of the folder, and set aside the files of an earlier start."""
    path = run.folder.path
    if not run.resumes:
        _require_trusted(run, path)
        run.folder.create()
    try:
        owner.claim(run.folder)
        _require_trusted(run, path)
        if run.resumes:
            run.folder.set_aside()
    except BaseException:
        if run.resumes:
            owner.release(run.folder)
        else:
            undo_write(run)
        raise


def _write_files(run: PreparedRun, copied: Snapshot | None, git_state: GitState | None) -> None:
    if run.snapshot is not None:
        run.snapshot.take() if copied is None else run.snapshot.take_as(copied)
    if (schedule := file_of(run.config.strategy.schedule)) is not None:
        from hpc_parallel.layout import action_file

        write_text(Path(run.values["strategy"]["schedule"]), action_file.read(schedule).text)
    text = yaml.dump(run.values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
    _require_readable(run, text)
    write_text(run.folder.config, text)
    _write_smaller(run, text)
    if TORCHRUN in (run.config.cluster.start, run.config.script.start):
        write_text(run.folder.torchrun_secret, secrets.token_hex())
    provenance = origin(
        run.folder, overrides=run.overrides, config_dir=run.config_dir, snapshot=run.snapshot,
        command=run.command, state=git_state,
    )  # fmt: skip
    if run.predicted:
        provenance[PREDICTED] = dict(run.predicted)
    write_json(run.folder.environment, provenance)
    attempts.note(run.folder, "resumed" if run.resumes else "submitted")


def _write_smaller(run: PreparedRun, text: str) -> None:
    """Write the configurations on fewer nodes, and that of all nodes, which the next job takes again."""
    folder = run.folder
    shutil.rmtree(folder.smaller, ignore_errors=True)  # of an earlier start
    if not run.smaller:
        return
    folder.smaller.mkdir(mode=0o700)
    write_text(folder.on_nodes(run.config.nodes), text)
    for nodes, values in run.smaller.items():
        text = yaml.dump(values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)
        write_text(folder.on_nodes(nodes), text)


def _require_readable(run: PreparedRun, text: str) -> None:
    """Raises ConfigError if the job could not read `text` back from config.yaml."""
    try:
        if len(text.encode()) > YAML_BYTES:
            raise ValueError(f"it has more than {YAML_BYTES // 2**10} KiB")
        require_plain(run.values)
    except ValueError as error:
        hint = "Try shorter lists and plain values; put long texts in files."
        raise ConfigError([f"the configuration can't be kept in config.yaml: {error}. {hint}"]) from error


def _require_trusted(run: PreparedRun, path: Path) -> None:
    require_trusted(path, key=_key(run), shared_folder=run.config.launcher.shared_folder)


def _key(run: PreparedRun) -> str:
    """The configuration key that names the run folder."""
    return "resume" if run.resumes else "run_dir"


def _unwritable(run: PreparedRun, error: OSError) -> ConfigError:
    """The problem with the run folder. A file outside the folder is named too."""
    file = None if error.filename is None else os.fsdecode(error.filename)
    prefix = "" if file is None or Path(file).is_relative_to(run.folder.path) else f"{file}: "
    rule = f"can't hold the run: {prefix}{error.strerror or error}"
    return ConfigError([Problem(_key(run), run.folder.path, rule)])
