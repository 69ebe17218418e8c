"""Advice for `KEY=VALUE` if the value names a file, a data folder or a class of the user."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hpc_parallel.data.text import usual_pattern
from hpc_parallel.problems import spell
from hpc_parallel.record.safe_read import is_file, is_folder, is_real_folder, list_folder

_READERS = {
    ".npy": "tokens", ".bin": "tokens", ".parquet": "parquet", ".arrow": "parquet", ".txt": "text",
}  # fmt: skip


def of_ones_own(key: str, value: str) -> str | None:
    """A sentence with the overrides to use in place of `key=value`; None if `value` names nothing here."""
    if suggestion := _configuration(key, value) or (_data(value) if key == "data" else None):
        return f"Try {suggestion}."
    if key in ("model", "data") and (target := _class_path(value)):
        return _of_class(key, target)
    return None


def _configuration(key: str, value: str) -> str | None:
    """The overrides for FOLDER/KEY/VALUE.yaml near the current folder, or for the path of such a file."""
    path = Path(value).expanduser()
    if path.suffix in (".yaml", ".yml") and is_file(path) and path.absolute().parent.name == key:
        return f"--config-dir {spell(path.parent.parent)} {key}={path.stem}"
    folders = [Path(), *(Path(entry.name) for entry in list_folder(Path()) if is_real_folder(entry))]
    matches = (folder for folder in sorted(folders) if is_file(folder / key / f"{value}.yaml"))
    return next((f"--config-dir {spell(folder)} {key}={value}" for folder in matches), None)


def _data(value: str) -> str | None:
    """The overrides for a file or a folder of data."""
    path = Path(value).expanduser()
    where = f"data.path={spell(value)}"
    if not is_folder(path):
        kind = _READERS.get(path.suffix)
        return kind and f"data={kind} {where}"
    suffixes = Counter(Path(entry.name).suffix for entry in list_folder(path))
    if suffixes[".parquet"] or suffixes[".arrow"]:
        return f"data=parquet {where}"
    pattern = usual_pattern(path)
    return pattern and f"data=text {where} data.pattern={pattern}"


def _class_path(value: str) -> str | None:
    """The path of the class that a value like `mymodel.Net` or `mymodel.py` names."""
    module, _, name = value.removesuffix(".py").replace("/", ".").rpartition(".")
    if value.endswith(".py"):
        return f"{module}.{name}.CLASS".lstrip(".")
    return value if module and all(part.isidentifier() for part in value.split(".")) else None


def _of_class(key: str, target: str) -> str:
    if key == "data":
        return f"Try data=dataset data.dataset._target_={target}."
    return (
        f"Your own class is chosen by a file site/model/mine.yaml with the line `_target_: {target}` and its "
        "arguments. Then try --config-dir site model=mine."
    )
