"""`python -m hpc_parallel check [OVERRIDES]`: check the site and a configuration without a job.

It takes the same words as a run (`check --config-dir site cluster=mysite nodes=2`) and starts nothing. Each
line is ok, a warning or an error. Exit codes: 0 without errors, 1 a check failed, 2 the configuration is
wrong, 3 Slurm would refuse the job.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from hpc_parallel.config.command_line import CommandLine
from hpc_parallel.config.schema import register
from hpc_parallel.exit_codes import DONE, FAILED, REFUSED, WRONG
from hpc_parallel.launch.checked_run import checked_run
from hpc_parallel.problems import ConfigError, printable
from hpc_parallel.record.recorded_start import key_of
from hpc_parallel.shell import refuse
from hpc_parallel.site.checks import ERROR, OK, WARNING, Line, other_lines, site_lines
from hpc_parallel.terminal import cell, stdout_console

_SITE_KEYS = ("cluster", "launcher", "device", "run_dir")
_STYLES = {OK: "green", WARNING: "yellow", ERROR: "bold red"}


def main(arguments: Sequence[str], *, awaited: Container[Path] | None = None) -> int:
    """Print the results; returns the exit code. Check the site even if the configuration is wrong."""
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return DONE
    register()
    try:
        line = CommandLine.parse(list(arguments))
        if line.sweeps:
            raise ConfigError(["check takes one configuration. Try it without -m."])
    except ConfigError as error:
        return refuse(error.problems)
    if awaited is not None:
        checked_run(line, awaited=awaited)
        return DONE
    try:
        lines = list(site_lines(checked_run(line)))
    except ConfigError as error:
        lines = [Line(ERROR, "configuration", str(problem)) for problem in error.problems]
        stdout_console().print(_table([*lines, *_site_lines_if_wrong(line)]))
        return WRONG
    stdout_console().print(_table(lines))
    errors = [line for line in lines if line.state == ERROR]
    if any(line.refused for line in errors):
        return REFUSED
    return FAILED if errors else DONE


def _site_lines_if_wrong(line: CommandLine) -> list[Line]:
    """Check the site if the configuration is wrong, with those overrides of the site that are legal."""
    flags = [word for word in line.words if word not in line.overrides]
    site_overrides = [word for word in line.overrides if key_of(word).partition(".")[0] in _SITE_KEYS]
    groups = [word for word in site_overrides if key_of(word) in ("cluster", "launcher")]
    for kept in (site_overrides, groups, []):
        try:
            run = checked_run(CommandLine.parse([*flags, *kept]))
        except ConfigError:
            continue
        return list(other_lines(run, submits=False))
    return []


def _table(lines: Sequence[Line]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        state = Text(line.state, style=_STYLES[line.state])
        table.add_row(state, line.subject, cell(printable(line.text, keep="\n")))
    return table
