"""A command line is parsed, composed, resolved, laid out and planned once."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

from hydra._internal.config_loader_impl import ConfigLoaderImpl

import hpc_parallel
from hpc_parallel.commands.run_command import main
from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.resolve import resolve
from hpc_parallel.launch.prepare import prepare
from hpc_parallel.layout.batch_plan import Plan
from hpc_parallel.layout.layout import _resolve
from tests.composed import composed

ONCE: dict[str, Callable[..., object]] = {
    "parsed": CommandLine.parse.__func__,  # type: ignore[attr-defined]
    "composed": ConfigLoaderImpl.load_configuration,
    "resolved": resolve,
    "laid out": _resolve,
    "planned": Plan.of.__func__,  # type: ignore[attr-defined]
}


ROOM = "config/hydra_internals.py"
PACKAGE = Path(hpc_parallel.__file__).parent


def test_the_private_parts_of_hydra_are_in_one_file() -> None:
    users = [path for path in PACKAGE.rglob("*.py") if "from hydra._internal" in path.read_text()]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == [ROOM]


def calls(*words: str) -> Counter[str]:
    """How often the command calls each function of ONCE."""
    _resolve.cache_clear()
    names: dict[CodeType, str] = {inspect.unwrap(function).__code__: name for name, function in ONCE.items()}
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in names:
            counts[names[frame.f_code]] += 1

    sys.setprofile(note)
    try:
        assert main(words) == 0
    finally:
        sys.setprofile(None)
    return counts


def test_a_dry_run_decides_once(here: Path) -> None:
    words = ("strategy=pipeline", "nodes=2", "dry_run=true", "launcher=local", "launcher.snapshot=false")
    assert calls(*words) == dict.fromkeys(ONCE, 1)


def test_the_answers_of_a_sweep_stay_out_of_what_was_composed() -> None:
    """Runs of a sweep may share what was composed."""
    config = composed("launcher=local", "launcher.snapshot=false")
    before = config.copy()
    run = prepare(config, overrides=(), preset={"training.global_batch_size": 32, "launcher.kind": "script"})
    assert (run.config.training.global_batch_size, run.config.launcher.kind) == (32, "script")
    assert config == before
