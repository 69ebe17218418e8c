"""Find the root cause after a job has failed; write it to `failure.json` and print one line.

A batch script ends with `python -m hpc_parallel.job conclude RUN_FOLDER RETURNCODE [--log FILE]`. It must
start fast, so neither torch nor Hydra is imported.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpc_parallel.config.script import is_script
from hpc_parallel.exit_codes import AGAIN
from hpc_parallel.failure import failure, normal_end, notify, restart
from hpc_parallel.failure.found_failure import (
    hit_time_limit,
    is_packed,
    looks_cancelled,
    rank_failure,
    signal_of_code,
    slurm_failure,
    without_rank,
)
from hpc_parallel.failure.hang_cause import cause_of
from hpc_parallel.failure.restart import Decision, RestartLimits
from hpc_parallel.failure.root_cause import TERMINATION_SIGNALS, find_root_cause, killed_tasks
from hpc_parallel.failure.summary import computed_as, summarise
from hpc_parallel.problems import as_override
from hpc_parallel.record import attempts, host_memory, owner
from hpc_parallel.record.checkpoint_index import complete
from hpc_parallel.record.endings import STARTS_AGAIN, Failure, Stop, Summary
from hpc_parallel.record.metrics_file import MetricsReader, figure
from hpc_parallel.record.provenance import PREDICTED, read_environment
from hpc_parallel.record.recorded import read_run
from hpc_parallel.record.recorded_slow_ranks import accusations
from hpc_parallel.record.run_folder import RunFolder, note_phase
from hpc_parallel.record.safe_read import DamagedError, read_tail
from hpc_parallel.record.safe_write import write_json, write_text
from hpc_parallel.record.values import texts
from hpc_parallel.slurm.allocation import in_allocation
from hpc_parallel.slurm.jobs import job_of

_NFS_S = 90.0
# What `failure.json` calls a stop after which no start follows.
_KINDS = {
    restart.TIME_LIMIT: failure.TIME_LIMIT,
    restart.REQUEUED: failure.ERROR,
    restart.PREEMPTED: failure.KILLED,
}
_NEXT_TURN = "it goes on when it has its next turn, in this job or in the next one"
_UNSAVED = Stop(signal="SIGTERM", kept="earlier checkpoints")  # of a run that could not save
_UNSTARTED = Stop(signal="SIGUSR2", kept="earlier checkpoints")


def conclude(
    folder: RunFolder,
    *,
    returncode: int,
    text: str = "",
    cancelled: bool | None = None,
    asked_by: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str | None:
    """Find the root cause; write `failure.json` and, if rank 0 wrote none, `summary.json`.

    returncode, text: exit code of the job and end of its log, used if no rank wrote a record;
    cancelled: whether the run was asked to end, None to infer this from the records and the log;
    asked_by: the name of the signal that asked the run to end, if the ranks received another signal;
    environment: Slurm's variables of the job.

    Returns one line that names the cause, or None if nothing failed.
    """
    failure.remove_partial_files(folder)
    summary = Summary.read(folder)
    if summary is not None and (summary.ended_well or summary.outcome == STARTS_AGAIN):
        return None
    if (stopped := Stop.read(folder)) is not None:
        asked = replace(stopped, signal=asked_by or stopped.signal)
        return _conclude_stop(folder, stopped=asked, environment=environment)
    if cancelled is None and _was_starting(folder, returncode=returncode, text=text, environment=environment):
        return _conclude_stop(folder, stopped=_UNSTARTED, environment=environment)
    records = failure.records(folder)
    records += killed_tasks(folder, text=text, recorded={record.rank for record in records})
    # Our own tasks write `summary.json` themselves. A command that starts no rank (`exit 0` in a setup line,
    # `mpirun --version`) ends with code 0 too.
    has_ended = returncode == 0 and not records and not cancelled
    if has_ended and is_script(folder.read_config()) and normal_end.has_ended(folder, rank=0):
        _write_summary(folder, outcome="completed", environment=environment)
        return None
    cause, by = find_root_cause(records), signal_of_code(returncode)
    if cause and cancelled is None and returncode < 0 and by not in TERMINATION_SIGNALS:
        # The process that starts the ranks was killed: then they get SIGTERM, and nobody has asked for it.
        cause = None if cause.signal in TERMINATION_SIGNALS else cause
    if cause is not None and cause.kind in (failure.HANG, failure.LOST_PEER, failure.STOPPED):
        cause = cause_of(folder, records) or cause
    if cancelled or (cancelled is None and looks_cancelled(cause, returncode=returncode, text=text)):
        name = asked_by or (cause.signal if cause else None)
        by = name or by or "SIGTERM"
        why = restart.CANCELLED if cancelled else restart.why_stopped(by, environment=environment)
        if why != restart.CANCELLED:
            return _conclude_stop(folder, stopped=_UNSAVED, environment=environment, how=why)
        first = f", first rank {cause.rank} on {cause.host}" if cause and cause.signal else ""
        line, outcome, how = f"{cancelled_by(name)}{first}", "cancelled", "cancelled"
        ended = Failure()
    else:
        lost = slurm_failure(folder, cause, records=records, text=text) if cancelled is None else None
        ended = lost or rank_failure(folder, cause, records=records, returncode=returncode, text=text)
        ended.write(folder)  # before the summary: a summary means that all other files are written
        line, outcome, how = str(ended.line), "failed", str(ended.kind)
    if summary is None:
        attempts.end(
            folder, how=how, host=ended.host, exclude=texts(ended.details.get("exclude")), rank=ended.rank,
            step=_reached(folder), line=line,
        )  # fmt: skip
        _write_summary(folder, outcome=outcome, environment=environment)
    return line


def conclude_waiting(folder: RunFolder, *, environment: Mapping[str, str]) -> None:
    """Conclude a run that was cancelled before its next start; its newest start has recorded its end."""
    line = "cancelled before its next start" + (_advice(folder) if complete(folder.checkpoints) else "")
    if (stopped := Stop.read(folder)) is not None:
        replace(stopped, how=restart.CANCELLED, line=line).write(folder)
    _write_summary(folder, outcome="cancelled", environment=environment)


def _was_starting(folder: RunFolder, *, returncode: int, text: str, environment: Mapping[str, str]) -> bool:
    """Whether the time limit of a packed job, or its warning, ended a run whose ranks were starting."""
    if not is_packed(folder) or not attempts.is_starting(folder):
        return False
    if signal_of_code(returncode) == "SIGUSR2" or hit_time_limit(text):
        return True
    # An ending job refuses new steps: `Job/step already completing or completed`.
    return returncode != 0 and restart.ending(environment) == restart.TIME_LIMIT


def _await_end(folder: RunFolder) -> None:
    """Wait for the recorded end of rank 0: an NFS client may cache for a minute that a file is missing."""
    deadline = time.monotonic() + _NFS_S
    while time.monotonic() < deadline and any(folder.logs.glob("rank-*.out")):
        names = {*os.listdir(folder.path), *os.listdir(folder.logs)}
        ends = {folder.summary.name, folder.stopped.name, "rank-0.ended.json"}
        if names & ends or any(name.endswith(".failure.json") for name in names):
            return
        time.sleep(1.0)


def cancelled_by(signal_name: str | None) -> str:
    """The cancellation in the words of the user who caused it."""
    causes = {"SIGINT": "Ctrl-C", "SIGHUP": "the end of its terminal (SIGHUP)"}
    return "cancelled" if signal_name is None else f"cancelled by {causes.get(signal_name, signal_name)}"


def _reached(folder: RunFolder) -> int | None:
    """The last step that was logged, saved or continued from; None for a script that logs none."""
    last = read_run(folder.path).last_metrics
    steps: list[int] = [] if last is None else [last["step"]]
    if is_script(folder.read_config()):
        return max(steps, default=None)
    steps += [start.after_step or 0 for start in attempts.starts(folder)[-1:]]  # perhaps a copy in memory
    return max([0, *steps, *(checkpoint.step for checkpoint in complete(folder.checkpoints)[:1])])


def after_failure(
    folder: RunFolder, *, start: int | None = None, environment: Mapping[str, str] = MappingProxyType({})
) -> Decision:
    """What follows the failure in `failure.json`; start: as `restart.RestartLimits` has it."""
    ends = attempts.recent_ends(folder)
    if Failure.read(folder) is None or folder.stopped.exists() or not ends:
        return Decision(restart.END)
    config = folder.read_config()
    limits = RestartLimits.of(config, start=start)
    # A later start in a job had the rest of its time only.
    continues = bool(start) or is_packed(folder) or bool(complete(folder.checkpoints))
    if is_script(config):
        script = config["script"]
        says_so = [script.get(key) for key in ("resume_arguments", "stop_signal", "requeue_codes")]
        continues |= any(says_so) or limits.max_restarts > 0
    decision = restart.decide(ends, limits=limits, continues=continues)
    if not decision.starts_again:
        return decision
    limits = replace(limits, hosts=restart.Hosts.of(folder, environment=environment))
    return restart.decide(ends, limits=limits, continues=continues, by_slurm=restart.ending(environment))


def _conclude_stop(
    folder: RunFolder, *, stopped: Stop, environment: Mapping[str, str], how: str | None = None
) -> str:
    """Conclude a run whose ranks saved their state after a signal, and restart it if this is allowed.

    how: the reason, if Slurm has already said it. Asked again, it may not answer.
    """
    if how is None and stopped.signal is not None:
        how = restart.why_stopped(stopped.signal, environment=environment)
    elif how is None and stopped.code is None:
        raise DamagedError(folder.stopped, "it names no signal and no exit code")
    how = how or restart.REQUEUED
    attempts.end(folder, how=how)
    launcher = folder.read_config()["launcher"]
    # Without a saved step or a script's exit code, the task starts from its beginning.
    packed, saved = is_packed(folder), stopped.step is not None or stopped.code is not None
    continues = saved or (packed and attempts.is_starting(folder))  # it had none of the job's time
    limits, ends = RestartLimits.of(folder.read_config()), attempts.recent_ends(folder)
    if packed:
        limits = replace(limits, time_key="sweep.pack_minutes")
    decision = restart.decide(ends, limits=limits, continues=continues)
    restarts = decision.starts_again
    limit = "the packed job" if packed else f"{launcher['time_minutes']} min"
    limit = "the allocation" if in_allocation(launcher) else limit
    reasons = {
        restart.TIME_LIMIT: f"the time limit of {limit} was near",
        restart.PREEMPTED: "preempted by Slurm",
        restart.CANCELLED: cancelled_by(stopped.signal),
        restart.REQUEUED: "the script asks for a new start",
    }
    if stopped.code is not None:
        kept = f"it ended with {signal_of_code(stopped.code) or f'exit code {stopped.code}'}"
    else:
        kept = f"saved at step {stopped.step}" if saved else f"{stopped.kept} are kept"
    outcome = STARTS_AGAIN if restarts else "cancelled" if how == restart.CANCELLED else "failed"
    why = f"; {decision.why}" if outcome == "failed" else ""
    line = f"{reasons[how]}: {kept}{why}"
    if stopped.step is not None and not restarts:
        line += _advice(folder)
    if outcome == "failed":
        without_rank(kind=_KINDS[how], message=line, line=line).write(folder)
    _write_summary(folder, outcome=outcome, environment=environment)
    replace(stopped, how=how, line=line).write(folder)
    if restarts and packed:
        line += f"; {_NEXT_TURN}"
    elif restarts and job_of(environment) is None:
        line += "; it starts again"
    elif restarts:  # last, because Slurm may end this process at once
        line += f"; {_start_again(folder, launcher=launcher, environment=environment)}"
    return line


def _start_again(folder: RunFolder, *, launcher: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """Ask Slurm for another start; returns a line. If none follows, `failure.json` says so."""
    line = restart.requeue_or_resubmit(folder, launcher=launcher, environment=environment)
    if not line.startswith(restart.NO_START):
        return line
    stopped = Stop.read(folder)
    if complete(folder.checkpoints) or (stopped is not None and stopped.step is not None):
        line += _advice(folder)
    if Failure.read(folder) is None and stopped is not None:
        kind = _KINDS.get(str(stopped.how), failure.KILLED)
        without_rank(kind=kind, message=line, line=str(stopped.line)).write(folder)
        _write_summary(folder, outcome="failed", environment=environment)
    _add_to_line(folder, line)
    return line


def _advice(folder: RunFolder) -> str:
    return f"; go on with {as_override('resume', folder.path)}"


def _add_to_line(folder: RunFolder, text: str) -> None:
    """Say in `failure.json` why no start follows."""
    if (ended := Failure.read(folder)) is not None:
        replace(ended, line=f"{ended.line}; {text}").write(folder)


def _write_summary(folder: RunFolder, *, outcome: str, environment: Mapping[str, str]) -> None:
    config, ran_on = folder.read_config(), read_environment(folder)
    history = attempts.history(
        folder, environment=environment, until=datetime.now(UTC), layout=computed_as(config, ran_on)
    )
    summary = summarise(
        config,
        outcome=outcome,
        lines=MetricsReader(folder.metrics).read(),
        history=vars(history),
        measured={"slow_ranks": accusations(folder)},
        environment=ran_on,
    )
    stopped, logged = Stop.read(folder), summary["steps"]
    if stopped is not None and stopped.step is not None and 0 < logged < stopped.step:
        summary |= {"steps": stopped.step, "samples": summary["samples"] * stopped.step // logged}
    write_json(folder.summary, summary)


def _follow_failure(
    folder: RunFolder, *, start: int | None, environment: Mapping[str, str]
) -> tuple[Decision, str]:
    """Carry out what follows a failure, but for a new start in place; returns it with a line."""
    decision = after_failure(folder, start=start, environment=environment)
    line, config = decision.why, folder.read_config()
    if decision.action not in restart.IN_JOB and config["training"].get("memory_checkpoint_every"):
        host_memory.remove_from_hosts(host_memory.name_of(folder, environment), environment)
    if decision.action == restart.REQUEUE:  # before Slurm is asked, which may end this process at once
        _write_summary(folder, outcome=STARTS_AGAIN, environment=environment)
        line = _NEXT_TURN
        if not is_packed(folder):
            line = _start_again(folder, launcher=config["launcher"], environment=environment)
        if line.startswith(restart.NO_START):
            decision = Decision(restart.END, line)
            _write_summary(folder, outcome="failed", environment=environment)
    elif line and decision.action == restart.END:
        _add_to_line(folder, line)
    elif decision.action == restart.FEWER:
        go_on_with(folder, nodes=len(decision.hosts))
    return decision, line


def go_on_with(folder: RunFolder, *, nodes: int) -> None:
    """Take the configuration on fewer nodes, for which nothing was predicted."""
    write_text(folder.config, folder.on_nodes(nodes).read_text(encoding="utf-8"))
    environment = read_environment(folder)
    if environment.pop(PREDICTED, None) is not None:
        write_json(folder.environment, environment)


def tell_end(folder: RunFolder, *, line: str, decision: Decision) -> None:
    """Tell how a start ended and what follows, if the user wants to be told; line: what `conclude` found."""
    summary = Summary.read(folder) or Summary()
    event = {"completed": "end", "pruned": "end", "cancelled": "end", STARTS_AGAIN: "restart"}.get(
        str(summary.outcome), "failure"
    )
    if decision.starts_again:
        event = f"restart, {decision.action}"
    if summary.completed:
        loss = "" if summary.final_loss is None else f", final loss {figure(summary.final_loss)}"
        line = f"completed{f' {summary.steps} steps' if summary.steps else ''}{loss}"
    elif summary.ended_well:
        line = str(summary.ended_early)
    notify.tell(folder, f"{event}: {line}", about=notify.ENDED, waits=decision.action not in restart.IN_JOB)
    ended = Failure.read(folder)
    is_refused = ended is not None and ended.kind == failure.CONFIGURATION and _is_first(folder)
    if is_refused and folder.take_line_back():  # the next `resume=` goes on from a line that worked
        _add_to_line(folder, "the training that the run had completed is unchanged")


def _is_first(folder: RunFolder) -> bool:
    """Whether the start that has ended is the first one of a user's line, and none of its ranks began."""
    return attempts.is_starting(folder) and len(attempts.recent_ends(folder)) == 1


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m hpc_parallel.job conclude", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("returncode", type=int, help="exit code of srun or of the agent")
    parser.add_argument("--log", type=Path, help="the job's log, used if no rank wrote a record")
    parser.add_argument("--again", action="store_true", help="restart the Slurm job if this is allowed")
    parser.add_argument("--start", type=int, metavar="N", help="exit with code 4 for start N + 1 in this job")
    parser.add_argument("--cancelled", action="store_true", default=None, help="the run was asked to end")
    parser.add_argument("--by", metavar="SIGNAL", help="the signal that asked it to end")
    options = parser.parse_args(arguments)
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(signal_number, signal.SIG_IGN)  # Slurm ends a requeued job, but this must finish first
    environment = os.environ if options.again else {}  # a local run may be inside a job that is not its own
    folder = RunFolder(options.run_folder)
    with suppress(DamagedError):
        if (job := job_of(environment)) and (other := owner.other_job(folder, job)) is not None:
            failure.forget_job(folder, environment["SLURM_JOB_ID"])
            sys.exit(f"the run goes on as {other}: job {job} leaves it alone")
    text = ""
    if options.log:
        with suppress(FileNotFoundError, DamagedError):
            text = read_tail(options.log).decode(errors="replace")
    if options.returncode == 0:
        _await_end(folder)
    line = conclude(
        folder, returncode=options.returncode, text=text, cancelled=options.cancelled, asked_by=options.by,
        environment=environment,
    )  # fmt: skip
    if line:
        print(line, file=sys.stderr, flush=True)
    decision, following = Decision(restart.END), ""
    if "SLURM_JOB_ID" in environment:
        decision, following = _follow_failure(folder, start=options.start, environment=environment)
        if following:
            print(following, file=sys.stderr, flush=True)
    tell_end(folder, line="; ".join(filter(None, (line, following))), decision=decision)
    if decision.action in restart.IN_JOB:
        # How this start ended is not how the next one will.
        folder.begin_anew()
        failure.forget_all(folder)
        note_phase(folder, following)
        if decision.hosts:
            print(",".join(decision.hosts))  # for the batch script
        sys.exit(AGAIN)
    if options.returncode == 0 and folder.failure.exists() and not folder.stopped.exists():
        sys.exit(1)  # the job has failed too
