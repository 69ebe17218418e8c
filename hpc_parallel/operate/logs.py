"""`python -m hpc_parallel logs RUN`: what a rank printed, out and err; of all with `--rank all`.

RUN is a path, a run id, a job id or a unique part of a name. Exit codes: 0 done, 2 what was asked for is
unknown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_parallel.config.problems import ConfigError, Problem
from hpc_parallel.launch.names import label
from hpc_parallel.launch.recorded import RecordedRun, read_run
from hpc_parallel.operate.find import find_run
from hpc_parallel.operate.rows import failure_line
from hpc_parallel.operate.state import State, states
from hpc_parallel.operate.terminal import DONE, guarded

ALL = "all"
PERIOD_S = 0.3  # between looks at the files
ASK_EVERY_S = 2.0  # a controller serves many users
_LOG = re.compile(r"rank-(\d+)\.(out|err)")


@dataclass(frozen=True)
class Source:
    """A log of one rank, or with rank None of what starts the ranks: the job's script, the local agent."""

    path: Path
    rank: int | None
    stream: str  # out, err

    def __str__(self) -> str:
        return f"rank {self.rank} {self.stream}" if self.rank is not None else self.path.name


class Reader:
    """Reads the whole lines added to a file since the last look."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._offset_bytes = 0

    def read(self, *, to_the_end: bool) -> list[str]:
        """to_the_end: also what has no line end yet."""
        try:
            with self.source.path.open("rb") as file:  # opened anew, since NFS keeps what an open file had
                file.seek(self._offset_bytes)
                added = file.read()
        except OSError:
            return []
        if not to_the_end:
            added = added[: added.rfind(b"\n") + 1]
        self._offset_bytes += len(added)
        return added.decode(errors="replace").splitlines()


def main(arguments: Sequence[str]) -> int:
    """Print the logs; returns the exit code."""
    given = parser().parse_args(list(arguments))
    return guarded(lambda: _logs(given))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m hpc_parallel logs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("run", metavar="RUN")
    made.add_argument("--rank", default="0", help="a number, or all: each line with its rank before it")
    made.add_argument("--follow", action="store_true", help="until the run ends; Ctrl-C follows no longer")
    made.add_argument("--json", action="store_true", help="an object a line: rank, stream, text")
    return made


def _logs(given: argparse.Namespace) -> int:
    run, problems = None, []
    try:
        run = find_run(given.run)
    except ConfigError as error:
        problems += error.problems
    problems += _rank_problems(given.rank, run)
    if problems or run is None:
        raise ConfigError(problems)
    show = _printer(given)
    readers: dict[Path, Reader] = {}
    state: State | None = None
    asked_s = float("-inf")
    while True:
        if time.monotonic() - asked_s >= ASK_EVERY_S:
            run = read_run(run.path)
            before, (state,) = state, states([run])
            asked_s = time.monotonic()
            if state != before and given.follow:
                _tell(run, state)
        last = not given.follow or (state is not None and state.ended)
        for source in _sources(run, given.rank):
            reader = readers.setdefault(source.path, Reader(source))
            for line in reader.read(to_the_end=last):
                show(source, line)
        sys.stdout.flush()
        if last:
            break
        time.sleep(PERIOD_S)
    if not given.follow and not readers and state is not None:
        _tell(run, state)
    return DONE


def _rank_problems(rank: str, run: RecordedRun | None) -> Iterator[Problem]:
    if rank == ALL:
        return
    if not rank.isdecimal():
        yield Problem("--rank", rank, "is neither a rank's number nor all", (0, ALL))
    elif run is not None and int(rank) >= (count := _world_size(run)):
        yield Problem("--rank", int(rank), f"is no rank of a run that has {count}", (count - 1,))


def _world_size(run: RecordedRun) -> int:
    """Of a run without a readable configuration, as many as have logs (0: anything may come)."""
    from hpc_parallel.operate.grid import ranks

    known = ranks(run)
    return known if known is not None else max([1, *(1 + (source.rank or 0) for source in _logged(run))])


def _sources(run: RecordedRun, rank: str) -> list[Source]:
    """The logs that were asked for; while no rank has any, those of what starts them."""
    logged = _logged(run)
    if not logged:
        return _before(run)
    return [source for source in logged if rank in (ALL, str(source.rank))]


def _logged(run: RecordedRun) -> list[Source]:
    """By rank, out before err."""
    found = [(path, _LOG.fullmatch(path.name)) for path in run.folder.logs.glob("rank-*")]
    sources = [Source(path, int(match[1]), match[2]) for path, match in found if match]
    return sorted(sources, key=lambda source: (source.rank or 0, source.stream == "err"))


def _before(run: RecordedRun) -> list[Source]:
    """The local agent's log, and the output of the newest job."""
    jobs = sorted(run.folder.slurm.glob(f"{run.job_ids[-1]}*.out")) if run.job_ids else []
    return [Source(path, None, "out") for path in (run.folder.logs / "agent.err", *jobs) if path.is_file()]


def _printer(given: argparse.Namespace) -> Callable[[Source, str], None]:
    if given.json:
        return _print_json
    return _print_prefixed if given.rank == ALL else _headed()


def _print_json(source: Source, line: str) -> None:
    print(json.dumps({"rank": source.rank, "stream": source.stream, "text": line}))


def _print_prefixed(source: Source, line: str) -> None:
    rank = "" if source.rank is None else str(source.rank)
    print(f"[{rank}{' err' * (source.stream == 'err')}] {line}")


def _headed() -> Callable[[Source, str], None]:
    """As `tail` does it: a line where another file than before goes on; none above what the rank says."""
    shown: Path | None = None

    def show(source: Source, line: str) -> None:
        nonlocal shown
        if source.path != shown and (shown is not None or source.stream == "err" or source.rank is None):
            print(f"==> {source} <==")
        shown = source.path
        print(line)

    return show


def _tell(run: RecordedRun, state: State) -> None:
    """How the run stands, beside the logs: on stderr."""
    job = state.job
    line = failure_line(run) if state.word == "failed" else None
    print(
        f"{f'job {job}' if job else label(run.path)}: {state}" + (f": {line}" if line else ""),
        file=sys.stderr,
    )
