"""The parts in their order, and running one of them in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.gpu.report.findings import Findings

# In the order of their worth, since time may end.
MODULES = (
    "part_l_benchmark", "part_k_tests", "part_n_points", "part_a_saves", "part_b_syncs", "part_c_profile",
    "part_d_attention", "part_e_groups", "part_f_large", "part_g_tensor", "part_h_cores", "part_i_generation",
    "part_j_harm", "part_m_memory", "part_o_peers", "part_p_whole",
)  # fmt: skip
LETTERS = {name.split("_")[1]: f"tests.gpu.report.{name}" for name in MODULES}
TOTAL_S = 480.0
LEAST_S = 5.0  # of a part that has almost no time left
PRELOADED = ("tests.gpu.report.setting",)  # once, for all parts: none of it touches a device


@dataclass(frozen=True)
class Outcome:
    """How a part ended: done, failed, killed (by a signal) or out of time."""

    letter: str
    title: str
    outcome: str
    seconds: float
    found: Mapping[str, Any]
    error: str | None


def run_parts(
    letters: Sequence[str],
    folder: Path,
    *,
    total_s: float = TOTAL_S,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Each part within its own limit, and all within `total_s`; none stops the next."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    first = context.Process(target=int)  # starts the server, which imports what all parts need
    first.start()
    first.join()
    began, outcomes = clock(), []
    for letter in letters:
        left_s = total_s - (clock() - began)
        outcomes.append(run_part(letter, folder, context=context, most_s=max(left_s, LEAST_S)))
        print(
            f"({letter}) {outcomes[-1].title}: {outcomes[-1].outcome}, {outcomes[-1].seconds:.1f} s",
            flush=True,
        )
    return outcomes


def run_part(letter: str, folder: Path, *, context: Any, most_s: float = TOTAL_S) -> Outcome:
    """One part in a process of its own, which is killed with its children after its limit."""
    module = LETTERS[letter]
    title, limit_s = heading(module)
    log, findings = folder / f"{letter}.log", Findings(folder / f"{letter}.jsonl")
    environment = dict(os.environ)  # the server has that of its start
    arguments = (module, str(findings.file), str(log), environment)
    process = context.Process(target=_in_part, args=arguments, daemon=False)
    began = time.monotonic()
    process.start()
    process.join(min(limit_s, most_s))
    outcome = "done"
    if process.is_alive():
        outcome = "out of time"
    elif process.exitcode:
        outcome = "failed" if process.exitcode > 0 else f"killed by signal {-process.exitcode}"
    _end(process)
    error = None if outcome == "done" else "\n".join(tail(log))
    return Outcome(letter, title, outcome, time.monotonic() - began, findings.read(), error)


def heading(module: str) -> tuple[str, float]:
    """The title and limit of a part, read without importing it here."""
    source = Path(__file__).with_name(f"{module.rpartition('.')[2]}.py").read_text(encoding="utf-8")
    (line,) = [line for line in source.splitlines() if line.startswith("TITLE, LIMIT_S = ")]
    title, limit = line.removeprefix("TITLE, LIMIT_S = ").rsplit(", ", 1)
    return title.strip('"'), float(limit)


def tail(log: Path) -> list[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return lines[-15:]


def _in_part(module: str, findings: str, log: str, environment: Mapping[str, str]) -> None:
    os.setsid()  # so that its children end with it
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    code = 0
    try:
        import_module(module).run(Findings(Path(findings)))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a process group of NCCL may wait for a kernel that never ends


def _end(process: Any) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(10)
