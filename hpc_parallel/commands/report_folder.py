"""Write a folder with a page in one move. It replaces only an earlier folder of its kind or an empty one."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpc_parallel.problems import Problem
from hpc_parallel.record.safe_write import write_bytes, write_text

PAGE, PLOTS = "index.html", "plots"


def output_problems(output: Path, *, beside: str, near: str) -> Iterator[Problem | str]:
    """Yields the reasons why a page can't be written to `output`, an absolute path.

    beside: a file that an earlier folder of this kind has next to PAGE. near: a legal value.
    """
    if os.path.lexists(output) and not is_replaceable(output, beside=beside):
        rule = f"is there and is no {near}, which alone would be replaced"
        yield Problem("--output", output, rule, (output.with_name(f"{output.name}-1"),))
    elif not os.path.isdir(parent := _parent(output)) or not os.access(parent, os.W_OK | os.X_OK):
        yield Problem("--output", output, f"can't be made: {parent} is no folder that you may write", (near,))


def is_replaceable(path: Path, *, beside: str) -> bool:
    """Whether `path` is an earlier folder of this kind, or an empty folder."""
    return (
        os.access(path, os.R_OK | os.X_OK)
        and path.is_dir()
        and (not any(path.iterdir()) or ((path / PAGE).is_file() and (path / beside).is_file()))
    )


def _parent(path: Path) -> Path:
    """The nearest path above `path` that exists: the folder to make it in, or a file that is in the way."""
    return next(above for above in path.parents if os.path.lexists(above) or above == above.parent)


def write_folder(files: Mapping[str, str | bytes], output: Path) -> None:
    """Write all files to a new folder, then move it to `output`, in place of an earlier folder.

    files: path in the folder -> content. A path is a name, or a name in PLOTS.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}."))
    try:
        (beside / PLOTS).mkdir()
        for name, content in files.items():
            if isinstance(content, str):
                write_text(beside / name, content, mode=0o666)
            else:
                write_bytes(beside / name, content, mode=0o666)
        if output.exists():
            before = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-before."))
            output.rename(before / output.name)
            beside.rename(output)
            shutil.rmtree(before)
        else:
            beside.rename(output)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
