"""The table at the end of `make chaos`."""

from __future__ import annotations

from typing import Any

from chaos import Row

HEADS = ("case", "seed", "what was done", "lost", "restarts", "back after s", "s", "verdict")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """pytest's hook: print a row for each case that ran."""
    rows = [HEADS]
    for verdict in ("passed", "failed"):
        for report in terminalreporter.stats.get(verdict, ()):
            properties = dict(report.user_properties)
            if report.when == "call" and "chaos" in properties:
                row = Row(**properties["chaos"])
                rows.append(cells(report, row, verdict="green" if verdict == "passed" else "RED"))
    if len(rows) == 1:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    terminalreporter.section("chaos")
    for row in rows:
        columns = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        terminalreporter.write_line("  ".join(columns).rstrip())


def cells(report: Any, row: Row, *, verdict: str) -> tuple[str, ...]:
    name = report.nodeid.rpartition("::test_")[2].replace("_", " ")
    back_s = None if row.back_s is None else f"{row.back_s:.1f}"
    figures = ("-" if value is None else str(value) for value in (row.lost, row.restarts, back_s))
    return (name, str(row.seed), ", ".join(row.done), *figures, f"{report.duration:.0f}", verdict)
