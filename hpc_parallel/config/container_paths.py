"""Paths of a configuration that the container of a job would not see, because nothing mounts them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hpc_parallel.config.conda import find_environment
from hpc_parallel.config.node_devices import launcher_kind
from hpc_parallel.config.schema import RunConfig
from hpc_parallel.problems import spell
from hpc_parallel.record.values import flatten

# Apptainer mounts the home, the current folder and these, unless an argument says otherwise.
_OF_APPTAINER = ("/tmp", "/var/tmp", "/proc", "/sys", "/dev")
_CONTAINED = ("-c", "--contain", "-C", "--containall", "--no-mount")


def container_warnings(config: RunConfig, *, run_folder: Path, source: Iterable[Path] = ()) -> Iterator[str]:
    """One line that names the user's paths outside of all mounts; no line without a container.

    run_folder: it is always mounted; source: folders from which the job imports.
    """
    launcher = config.launcher
    if launcher.container is None or launcher_kind(launcher.kind) == "local":
        return
    mounted = [run_folder, *_mounted(config)]
    paths = [*_paths(config), *(("PYTHONPATH", path) for path in source)]
    hidden = [(key, place) for key, path in paths if (place := _hidden(path, mounted)) is not None]
    if hidden:
        named = ", ".join(f"{place} ({key})" for key, place in hidden)
        mounts = [*launcher.container_mounts, *dict.fromkeys(str(place) for _, place in hidden)]
        yield f"the container does not see {named}. Try launcher.container_mounts={spell(mounts)}."


def _mounted(config: RunConfig) -> Iterator[Path]:
    """The folders of the host that the container has under the same path."""
    for mount in config.launcher.container_mounts:
        source, _, target = mount.partition(":")
        if target.partition(":")[0] in ("", source):
            yield Path(source)
    arguments = config.cluster.container_arguments or []
    if config.cluster.container == "apptainer" and not any(word in _CONTAINED for word in arguments):
        yield from map(Path, _OF_APPTAINER)
        if "--no-home" not in arguments:
            yield from (Path.home(), Path.cwd())


def _paths(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yields (key, path) for each path outside of the run folder that the ranks read."""
    launcher = config.launcher
    environment = find_environment(launcher.conda) if launcher.conda is not None else None
    texts: dict[str, Any] = {"weights": config.weights, "launcher.venv": launcher.venv}
    texts |= {"launcher.conda": None if environment is None else str(environment.folder)}
    texts |= {f"data.{key}": value for key, value in flatten(dict(config.data)).items()}
    texts["task.storage"] = getattr(config.task, "storage", None)
    for key, text in texts.items():
        if isinstance(text, str) and (os.sep in text or key.endswith("path")):
            path = Path(os.path.expanduser(text)).absolute()
            if path.exists():
                yield key, path


def _hidden(path: Path, mounted: Iterable[Path]) -> Path | None:
    """The path, or the target of its links, if no mount contains it; None if mounts contain both."""
    places = (path, path.resolve())
    return next((place for place in places if not any(place.is_relative_to(root) for root in mounted)), None)
