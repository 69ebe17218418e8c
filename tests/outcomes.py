"""How a target of the Makefile ends: failures of processes are tried once more alone, and one line says all.

A plugin of pytest. Each session adds its record to pytest's cache. The first one of a target empties the
cache by --cache-clear, and the last one names the target. Only the process that collects results writes.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

PROCESSES = "processes"  # the mark of tests that start processes, hosts or timers
RECORDS = "outcomes/sessions"  # the key in pytest's cache
WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("outcomes")
    group.addoption("--target", help="end with one line for this target of the Makefile")
    group.addoption(
        "--again",
        type=int,
        metavar="N",
        help="repeat what failed in the N sessions before, if all of it may be",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(config), "outcomes")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of Slurm and of seconds depend on what else the machine does."""
    if item.get_closest_marker("slurm") or item.get_closest_marker("timing"):
        item.add_marker(PROCESSES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A rank that a signal ended gave no number: torch's threads may crash a process (gloo, torch 2.13)."""
    if call.excinfo is not None and call.excinfo.errisinstance(ChildProcessError):
        item.add_marker(PROCESSES)


class Outcomes:
    """The record of this session and of those before it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cache: pytest.Cache | None = getattr(config, "cache", None)  # None with -p no:cacheprovider
        self._began = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._errors: dict[str, str] = {}  # test -> the first line of its first error
        self._repeatable: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._config.getoption("dist", "no") == "loadgroup":
            report.nodeid = report.nodeid.rpartition("@")[0] or report.nodeid  # for --last-failed
        if report.when == "call" or not report.passed:
            self._counts[report.outcome] += 1
        if report.failed:
            self._errors.setdefault(report.nodeid, first_line(report))
            if PROCESSES in report.keywords:
                self._repeatable.add(report.nodeid)

    def pytest_sessionstart(self) -> None:
        """Refuse a repetition that would hide an error."""
        if self._config.option.again is None:
            return
        if reason := reason_against(self._records(), sessions=self._config.option.again):
            pytest.exit(reason, returncode=1)

    def pytest_ignore_collect(self) -> bool | None:
        nothing = self._config.option.again is not None and not any(r["errors"] for r in self._records())
        return nothing or None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._config.option.again is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            session.exitstatus = pytest.ExitCode.OK  # nothing had failed
        record = {
            "whole": exitstatus in WHOLE,
            "seconds": time.monotonic() - self._began,
            "counts": self._counts,
            "errors": self._errors,
            "not repeatable": sorted(self._errors.keys() - self._repeatable),
            "again": self._config.option.again is not None,
        }
        if self._cache is not None:
            self._cache.set(RECORDS, [*self._records(), record])

    def pytest_unconfigure(self) -> None:
        if self._config.option.target:
            print("\n".join(lines(self._records(), target=self._config.option.target, commit=commit())))

    def _records(self) -> list[dict[str, Any]]:
        return list(self._cache.get(RECORDS, [])) if self._cache is not None else []


def first_line(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash else report.longrepr or "").strip()
    return text.splitlines()[0] if text else "no message"


def reason_against(records: list[dict[str, Any]], *, sessions: int) -> str | None:
    """Why the failures of these sessions are not repeated; None if they may be, or if there are none."""
    if len(records) != sessions or not all(record["whole"] for record in records):
        return "a session before this one did not run to its end"
    if proofs := [test for record in records for test in record["not repeatable"]]:
        return "not repeated, because a failure of these is no matter of time: " + ", ".join(proofs)
    return None


def lines(records: list[dict[str, Any]], *, target: str, commit: str) -> list[str]:
    """The tests that passed only when they were repeated, and the line of the target."""
    counts: Counter[str] = Counter()
    failed: dict[str, str] = {}
    unstable: dict[str, str] = {}
    for record in records:
        counts.update(record["counts"])
        if record["again"] and record["whole"]:
            unstable = {test: error for test, error in failed.items() if test not in record["errors"]}
            failed = {test: error for test, error in failed.items() if test in record["errors"]}
        failed |= {test: error for test, error in record["errors"].items() if test not in failed}
    ended = "" if records and all(record["whole"] for record in records) else "a session did not end, "
    seconds = sum(record["seconds"] for record in records)
    return [
        *(f"unstable: {test}: {error}" for test, error in unstable.items()),
        f"make {target} {commit}: {ended}{counts['passed']:,} passed, {len(failed)} failed, "
        f"{len(unstable)} unstable, {counts['skipped']} skipped, {seconds:,.0f} s",
    ]


def commit() -> str:
    """The commit that was tested, with a plus sign if files were changed since."""
    words = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "without git"
