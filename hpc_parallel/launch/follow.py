"""Follows a run or its job from outside: shows Slurm's state, metrics as a bar or lines, then the outcome."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from hpc_parallel.exit_codes import DONE, FAILED
from hpc_parallel.failure.conclude_run import cancelled_by, conclude
from hpc_parallel.failure.failure import CONFIGURATION, signal_name
from hpc_parallel.failure.run_state import NO_OUTPUT
from hpc_parallel.launch.prepare import PreparedRun
from hpc_parallel.problems import as_override, printable
from hpc_parallel.record import owner
from hpc_parallel.record.attempts import ends, ends_before_start, is_queued
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.endings import Failure, Stop, Summary, has_final_summary
from hpc_parallel.record.metrics_file import (
    SEPARATOR,
    MetricsLine,
    MetricsReader,
    described,
    fitting,
    loss_figure,
)
from hpc_parallel.record.names import RUN_COMMAND, command_on, from_here
from hpc_parallel.record.rank_output import WARNS, OutputTail, is_noise
from hpc_parallel.record.results import results
from hpc_parallel.record.run_folder import RunFolder, read_phase
from hpc_parallel.record.safe_read import read_tail, size_of
from hpc_parallel.slurm.jobs import FORGOTTEN, SILENT, UNKNOWN, Job, JobState, job_state
from hpc_parallel.terminal import progress_bars, room_beside_bar, stdout_console

_TAIL_LINES = 12
_STEP = re.compile(r"\s*(step )?\d+/\d+\s")  # a line of metrics in the output of rank 0
_RANK = re.compile(r"rank 0 of \d+ on ")  # how rank 0 introduces itself
PERIOD_S = 0.3  # between two reads of the run folder
ASK_EVERY_S = 2.0  # between two queries to Slurm, whose controller serves many users
SUMMARY_S = 10.0  # time for a failed job's summary to appear on this host
COMPLETED_SUMMARY_S = 90.0  # the same for a completed job: an NFS client may cache for a minute


def lasting_line(line: MetricsLine, parts: list[str], *, columns: int) -> str:
    """A result, cut to the columns of a terminal. If some parts don't fit, the step and result come first."""
    if line.cells:
        return fitting(line.cells, columns=columns)  # the bar shows the line's number
    if len(SEPARATOR.join(parts)) > columns:
        parts = sorted(parts, key=lambda part: not part.startswith(("step", "batch size", "validation")))
    return fitting(parts, columns=columns)


class RunFollower:
    """Shows the progress of a run step by step, and its outcome.

    The launcher calls `poll` repeatedly while the run runs, and `finish` after it has ended. Lines that are
    in the folder when the follower is made come from an earlier start and are not shown.
    """

    def __init__(
        self, folder: RunFolder, *, steps: int, console: Console | None = None, is_script: bool = False
    ) -> None:
        """is_script: whether the run is a user's script. If so, the whole output of rank 0 is shown.

        Of our tasks, what rank 0 says before its first step is shown: what it leaves out, for example. Its
        warnings are always shown: a damaged checkpoint, or one that could not be written.
        """
        self._output, self._errors = (OutputTail(folder.log(0, stream)) for stream in ("out", "err"))
        self._is_script = is_script
        self._is_starting = not is_script
        self._folder = folder
        self._steps = steps
        self._console = console or stdout_console()
        self._reader = MetricsReader(folder.metrics)
        self._last: MetricsLine | None = None
        self._validation: list[str] = []
        self._has_new = False
        self._note = ""
        self._phase: str | None = None
        self._ends = len(ends(folder))
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        for line in map(MetricsLine.of, self._reader.read()):
            self._keep(line)

    def note(self, text: str) -> None:
        """Show what the run waits for (a place in the queue, its start); repeats are not shown."""
        if text == self._note:
            return
        self._note = text
        self._announce(text)

    def poll(self) -> None:
        """Show the steps logged since the last call, and each new phase of the start or the end."""
        self._show_output()
        for line in map(MetricsLine.of, self._reader.read()):
            self._has_new = True
            self._keep(line)
            if self._is_script:  # the output has the same figures
                continue
            parts = described(line, steps=self._steps)
            if not self._console.is_terminal:
                self._say(SEPARATOR.join(parts))
                continue
            if line.is_lasting:
                self._say(lasting_line(line, parts, columns=self._console.width))
            self._show_bar(self._progress(line, parts))
        if (phase := read_phase(self._folder)) not in (None, self._phase):
            self._phase = phase
            ended = ends_before_start(self._folder)
            for end in ended[self._ends :]:
                self._say(f"{end.line or end.how.replace('_', ' ')}; it starts again")
            self._ends = max(self._ends, len(ended))
            started = self._has_new or self._is_script
            self._announce(str(phase) if started else f"starting: {phase}")

    def _show_output(self, *, last: bool = False) -> None:
        for line in self._output.read(last=last) if self._is_script or self._is_starting else ():
            self._is_starting = self._is_starting and not _STEP.match(line)
            if self._is_script or (self._is_starting and not _RANK.match(line)):
                self._say(line)
        for line in () if self._is_script else self._errors.read(last=last):
            if line.startswith(WARNS):
                self._say(line)

    def _announce(self, text: str) -> None:
        if self._console.is_terminal:
            self._show_bar([text])
        else:
            self._say(text)

    def _keep(self, line: MetricsLine) -> None:
        self._last = line
        if "validation_loss" in line.values:
            self._validation.append(loss_figure(line.validation_loss))

    def finish(self, signals: Sequence[int] = ()) -> int:
        """Show the outcome; after a failure the cause comes last. Returns the exit code: 0 if it ended well.

        signals: the signals with which the user ended the run.
        """
        self.poll()
        self._show_output(last=True)
        if self._bar is not None:
            self._bar.stop()
        if not (config := self._folder.config).exists():  # what others write there again explains nothing
            self._say(f"failed: {from_here(config)} is gone. Was the run folder removed or renamed?")
            return 1
        summary = Summary.read(self._folder) or Summary()
        outcome = summary.outcome or "failed"
        failure = Failure.read(self._folder) if outcome == "failed" else None
        if failure is not None:
            for line in self._error_lines(failure):
                self._say(line)
        for line in results(self._folder, summary):
            self._say(line)
        self._say(self._outcome(outcome, signals))
        self._say(f"results: {from_here(self._folder.path)}")
        if self._last is not None or self._drawn():
            self._say(f"plots: {self._plots()}")
        if not summary.completed:
            self._say_how_to_go_on(failure)
        return int(not summary.ended_well)

    def _say_how_to_go_on(self, failure: Failure | None) -> None:
        """Print the command that continues from the newest checkpoint, then the cause."""
        ended = Stop.read(self._folder) if failure is None else failure
        line = (None if ended is None else ended.line) or ""
        checkpoints = complete(self._folder.checkpoints)
        is_done = bool(checkpoints) and checkpoints[0].step >= self._steps > 0  # what failed came afterwards
        is_refused = failure is not None and failure.kind == CONFIGURATION  # the same line would be again
        if checkpoints and not is_done and not is_refused and "resume=" not in line:
            command = " ".join([*RUN_COMMAND, as_override("resume", from_here(self._folder.path))])
            self._say(f"continue after step {checkpoints[0].step}: {command}")
        if line:
            self._say(line)

    def _outcome(self, outcome: str, signals: Sequence[int]) -> str:
        step = 0 if self._last is None else self._last.step
        if outcome == "cancelled" and signals:
            outcome = cancelled_by(signal_name(signals[0]))
        of_steps = f": step {step}" if step and self._is_script else ""
        parts = [outcome + (f": step {step} of {self._steps}" if self._steps else of_steps)]
        if self._last is not None and "loss" in self._last.values:
            parts.append(f"loss {loss_figure(self._last.loss)}")
        if self._validation:
            first, last = self._validation[0], self._validation[-1]
            parts.append(f"validation loss {first}" + (f" -> {last}" if last != first else ""))
        if outcome == "completed" and self._is_script and self._last is None:
            parts += self._doubts()
        return ", ".join(parts)

    def _doubts(self) -> list[str]:
        """Signs that a script did not do its work, although it ended with code 0."""
        if not any(size_of(self._folder.log(0, stream)) for stream in ("out", "err")):
            return ["but rank 0 printed nothing"]
        has_pattern = self._folder.read_config()["script"]["metrics"] is not None
        return ["but no line of rank 0 matches script.metrics"] if has_pattern else []

    def _plots(self) -> str:
        """The plots that the run has drawn, and the command that shows all."""
        report = shlex.join(["python", "-m", "hpc_parallel", "report", from_here(self._folder.path)])
        drawn = self._drawn()
        plots = f"{from_here(drawn[0] if len(drawn) == 1 else self._folder.plots)}; all: " if drawn else ""
        return plots + report

    def _drawn(self) -> list[Path]:
        return sorted(self._folder.plots.glob("*.png"))

    def _error_lines(self, failure: Failure) -> list[str]:
        """The end of the traceback (or of the job's log), else the end of the failing rank's `.err` log.

        Empty for a configuration that can't run, because the one line at the end is enough.
        """
        if failure.kind == CONFIGURATION:
            return []
        lines, rank = list(failure.traceback), failure.rank
        if not lines and rank is not None and failure.signal != "SIGKILL":  # a killed process writes nothing
            with suppress(FileNotFoundError):
                log = read_tail(self._folder.log(rank, "err"))
                lines = [line for line in log.decode(errors="replace").splitlines() if not is_noise(line)]
        return lines[-_TAIL_LINES:]

    def _progress(self, line: MetricsLine, parts: list[str]) -> list[str]:
        """The parts of the newest line for the bar. The last validation loss stays visible."""
        if line.cells:
            return list(filter(None, [f"{parts[0].strip()} measured", line.time_left]))
        if self._validation and "validation_loss" not in line.values:
            return [*parts, f"validation loss {self._validation[-1]}"]
        return parts

    def _show_bar(self, parts: list[str]) -> None:
        timed = self._steps > 0  # tasks without steps report the time left themselves
        if self._bar is None:
            self._bar = progress_bars(self._console, timed=timed)
            self._task = self._bar.add_task("", total=None)
            self._bar.start()
        assert self._task is not None
        last = self._last
        description = fitting(parts, columns=room_beside_bar(self._console, timed=timed))
        self._bar.update(
            self._task, description=description, completed=0 if last is None else last.step,
            total=(None if last is None else last.steps) or self._steps or None, refresh=True,
        )  # fmt: skip

    def _say(self, line: str) -> None:
        """Print a line without markup or wrapping: paths and tracebacks contain brackets and are long."""
        self._console.print(printable(line, keep="\t"), markup=False, highlight=False, soft_wrap=True)


def wait_for_job(run: PreparedRun, job: Job) -> int:
    """Show the job's state and metrics until it ends; returns 0 if the run completed, else 1.

    Ctrl-C does not stop the job. It raises KeyboardInterrupt here, so that a sweep does not continue.
    """
    job_id = job.id
    follower = RunFollower(run.folder, steps=run.steps, is_script=run.is_script)
    try:
        state = _follow(follower, run.folder, job)
        deadline = time.monotonic() + summary_timeout_s(state.state)
        while owner.is_job(run.folder, job_id) and not has_summary(run) and time.monotonic() < deadline:
            follower.poll()
            time.sleep(PERIOD_S)
    except KeyboardInterrupt:
        cancel = command_on(run.folder.path, "cancel")
        print(f"\nno longer following; job {job_id} continues ({cancel} ends it)", file=sys.stderr)
        raise
    if not owner.is_job(run.folder, job_id):
        print(f"job {job_id} {state}; the run has been resumed since: {run.folder.path}")
        summary = Summary.read(run.folder)  # the job may also have ended with code 0 to go on as another job
        return DONE if summary is not None and summary.ended_well else FAILED
    if not has_summary(run):
        conclude_job(run.folder, job_id, state)
    return follower.finish()


def summary_timeout_s(state: str) -> float:
    """How long to wait for the summary of a job that has ended in this Slurm state."""
    return COMPLETED_SUMMARY_S if state.upper() == "COMPLETED" else SUMMARY_S


def _follow(follower: RunFollower, folder: RunFolder, job: Job) -> JobState:
    last_query_s = float("-inf")
    while True:
        if time.monotonic() - last_query_s >= ASK_EVERY_S:
            last_query_s = time.monotonic()
            state = job_state(job)
            follower.note(f"job {job.id} {state}")
            if has_ended(folder, state):
                return state
        follower.poll()
        time.sleep(PERIOD_S)


def has_ended(folder: RunFolder, state: JobState) -> bool:
    """Whether the job of a run has ended. If Slurm does not say so, the summary does.

    While Slurm is silent, only a completed run has: a failed one may be in the queue again.
    """
    if state.state == SILENT:
        summary = Summary.read(folder)
        return summary is not None and summary.ended_well
    if (holder := owner.Owner.read(folder)) is not None and holder.over:
        return True
    return state.ended or (state.state == UNKNOWN and has_final_summary(folder))


def has_summary(run: PreparedRun) -> bool:
    """Whether `summary.json` exists. Lists the folder: an NFS client may cache that a name is missing."""
    return run.folder.summary.name in os.listdir(run.folder.path)


def conclude_job(folder: RunFolder, job_id: str, state: JobState) -> None:
    """Record how a job ended if it could not do so itself: cancelled in the queue, or its node lost.

    A run that has been resumed since is left alone, because it has not ended.
    """
    if not owner.is_job(folder, job_id):
        return
    logs = folder.job_outputs(job_id)
    text = read_tail(logs[0]).decode(errors="replace") if logs else ""
    unseen = f"; {NO_OUTPUT}" if state.state == "FAILED" and not logs else ""
    # Slurm forgets a job that is cancelled before it has begun.
    forgotten_in_queue = state.state == FORGOTTEN and not logs and is_queued(folder)
    conclude(
        folder,
        returncode=0 if state.state == "COMPLETED" else 1,
        text=f"{text}\nSlurm says of job {job_id}: {state}{unseen}",
        cancelled=True if state.state == "CANCELLED" or forgotten_in_queue else None,
        environment={"SLURM_JOB_ID": job_id},
    )
