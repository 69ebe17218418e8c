"""`python -m hpc_parallel logs RUN`: print the output of a rank, or of all with `--rank all`.

Without `--rank`, it is the rank that failed first, and rank 0 of a run that did not fail. RUN is a path, a
run id, a job id or a unique part of a name. Exit codes: 0 done, 2 the run or the rank is unknown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.commands.status import failure_line
from hpc_parallel.exit_codes import DONE, WRONG
from hpc_parallel.failure.run_state import State, states
from hpc_parallel.problems import ConfigError, Problem, tried
from hpc_parallel.record.find import find_run
from hpc_parallel.record.metrics_file import size
from hpc_parallel.record.names import label
from hpc_parallel.record.rank_output import is_noise
from hpc_parallel.record.recorded import RecordedRun, read_run
from hpc_parallel.record.safe_read import MIB, DamagedError, list_folder, open_regular
from hpc_parallel.shell import command_parser
from hpc_parallel.terminal import say, warn

ALL = "all"
PERIOD_S = 0.3  # between two reads of the files
ASK_EVERY_S = 2.0  # Slurm's controller serves many users
MOST_BYTES = 8 * MIB  # of one file in one read: a terminal can't show more
_LOG = re.compile(r"rank-([0-9]{1,9})\.(out|err)")


@dataclass(frozen=True)
class LogFile:
    """A log of one rank. Rank None: the process that starts the ranks (batch script or local agent)."""

    path: Path
    rank: int | None
    stream: str  # out, err

    def __str__(self) -> str:
        return f"rank {self.rank} {self.stream}" if self.rank is not None else self.path.name


class LogReader:
    """Reads the complete lines added to a file since the last read. It skips the start of a huge file."""

    def __init__(self, source: LogFile) -> None:
        self.source = source
        self._offset_bytes: int | None = None

    def read(self, *, to_the_end: bool) -> bytes:
        """Returns the new lines; `to_the_end`: also a last line without a newline. Raises DamagedError."""
        try:
            with open_regular(self.source.path) as file:  # opened again, because NFS caches an open file
                end = file.seek(0, os.SEEK_END)
                if self._offset_bytes is None:
                    self._offset_bytes = self._start(end)
                file.seek(self._offset_bytes)
                added = file.read(MOST_BYTES)
        except FileNotFoundError:
            return b""
        if not to_the_end:
            added = added[: added.rfind(b"\n") + 1]
        self._offset_bytes += len(added)
        return added

    def _start(self, end_bytes: int) -> int:
        start = max(0, end_bytes - MOST_BYTES)
        if start:
            warn(f"{self.source.path}: only the last {MOST_BYTES // MIB} MiB; {size(start)} are before them.")
        return start


def parser() -> argparse.ArgumentParser:
    parser = command_parser("logs", __doc__)
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--rank", help="a number, or `all`: each line then starts with its rank")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue until the run ends, or until Ctrl-C"
    )
    parser.add_argument("--raw", action="store_true", help="the file as it is: no line left out, no escapes")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each line: rank, stream, text"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(list(arguments))
    problems: list[Problem | str] = []
    run = tried(lambda: find_run(options.run), problems)
    problems += _rank_problems(options.rank, run)
    if problems or run is None:
        raise ConfigError(problems)
    rank = options.rank or _first_rank(run)
    show = _printer(options, rank)
    readers: dict[Path, LogReader] = {}
    damaged: dict[Path, DamagedError] = {}
    state: State | None = None
    asked_s = float("-inf")
    while True:
        if time.monotonic() - asked_s >= ASK_EVERY_S:
            run = read_run(run.path)
            before, (state,) = state, states([run])
            asked_s = time.monotonic()
            if state != before and options.follow:
                _print_state(run, state)
        last = not options.follow or (state is not None and state.ended)
        for source in _sources(run, rank):
            reader = readers.setdefault(source.path, LogReader(source))
            try:
                show(source, reader.read(to_the_end=last))
            except DamagedError as error:
                damaged[source.path] = error
        sys.stdout.flush()
        if last:
            break
        time.sleep(PERIOD_S)
    warn(*(f"{error}." for error in damaged.values()))
    if not options.follow and not readers and state is not None:
        _print_state(run, state)
    return WRONG if damaged and len(damaged) == len(readers) else DONE


def _first_rank(run: RecordedRun) -> str:
    """The rank that failed first, or rank 0 if none failed. Print the rank and why, unless it is rank 0."""
    rank = None if run.root_cause is None else run.root_cause.rank
    if not rank or rank < 0:
        return "0"
    warn(f"{failure_line(run) or f'rank {rank} failed first'} (other ranks: --rank 0, --rank all)")
    return str(rank)


def _rank_problems(rank: str | None, run: RecordedRun | None) -> Iterator[Problem]:
    if rank is None or rank == ALL:
        return
    if not re.fullmatch("[0-9]{1,9}", rank):
        yield Problem("--rank", rank, "is neither a rank's number nor all", (0, ALL))
    elif run is not None and int(rank) >= (count := _world_size(run)):
        yield Problem("--rank", int(rank), f"is no rank of a run that has {count}", (count - 1,))


def _world_size(run: RecordedRun) -> int:
    """The number of ranks; without a readable configuration, the number of ranks that have logs."""
    from hpc_parallel.commands.grid import world_size

    count = world_size(run)
    return count if count is not None else max([1, *(1 + (source.rank or 0) for source in _logged(run))])


def _sources(run: RecordedRun, rank: str) -> list[LogFile]:
    """The requested logs; while no rank has a log, the logs of the process that starts the ranks."""
    if logged := _logged(run):
        return [source for source in logged if rank in (ALL, str(source.rank))]
    outputs = run.folder.job_outputs(run.job_ids[-1]) if run.job_ids else []  # of the newest job
    paths = [run.folder.logs / "agent.err", *outputs]
    return [LogFile(path, None, "out") for path in paths if os.path.lexists(path)]


def _logged(run: RecordedRun) -> list[LogFile]:
    """The logs of all ranks, sorted by rank, `out` before `err`."""
    entries = [(entry, _LOG.fullmatch(entry.name)) for entry in list_folder(run.folder.logs)]
    sources = [LogFile(Path(entry.path), int(match[1]), match[2]) for entry, match in entries if match]
    return sorted(sources, key=lambda source: (source.rank or 0, source.stream == "err"))


def _printer(options: argparse.Namespace, rank: str) -> Callable[[LogFile, bytes], None]:
    if options.raw:
        return _print_raw
    if options.json:
        return _print_json
    return _print_prefixed if rank == ALL else _headed()


def _print_raw(source: LogFile, content: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(content)


def _print_json(source: LogFile, content: bytes) -> None:
    for line in _lines(content):
        print(json.dumps({"rank": source.rank, "stream": source.stream, "text": line}))


def _print_prefixed(source: LogFile, content: bytes) -> None:
    rank = "" if source.rank is None else str(source.rank)
    say(*(f"[{rank}{' err' * (source.stream == 'err')}] {line}" for line in _lines(content)))


def _headed() -> Callable[[LogFile, bytes], None]:
    """Print a heading before lines of another file, as `tail` does. A rank's first output has none."""
    printed_path: Path | None = None

    def show(source: LogFile, content: bytes) -> None:
        nonlocal printed_path
        lines = _lines(content)
        if not lines:
            return
        is_main = source.stream != "err" and source.rank is not None
        if source.path != printed_path and (printed_path is not None or not is_main):
            say(f"==> {source} <==")
        printed_path = source.path
        say(*lines)

    return show


def _lines(content: bytes) -> list[str]:
    return [line for line in content.decode(errors="replace").splitlines() if not is_noise(line)]


def _print_state(run: RecordedRun, state: State) -> None:
    """Print the state of the run to stderr, so that stdout has only the logs."""
    job = state.job
    line = failure_line(run) if state.name == "failed" else None
    warn(f"{f'job {job}' if job else label(run.path)}: {state}" + (f": {line}" if line else ""))
