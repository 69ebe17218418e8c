"""Acts on findings about hosts: prints a warning, ends the run, or lets the next start leave out these hosts.

The start checks and `task=preflight` both use this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hpc_parallel.machine.host_findings import Finding
from hpc_parallel.record.recorded_preflight import listed_hosts
from hpc_parallel.strategies.exchange import FollowerError

STOP, EXCLUDE = "stop", "exclude"


class PreflightError(RuntimeError):
    """Raised on the ranks of the hosts that are to blame. `details` is for `failure.json`.

    exclude: the hosts that the next start leaves out; if empty, there is no next start.
    """

    def __init__(self, message: str, *, exclude: Sequence[str]) -> None:
        super().__init__(message)
        self.details = {"exclude": list(exclude)}


def warn(findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and the override that leaves out the hosts to blame."""
    for finding in findings:
        print(f"WARNING: preflight: {finding.line}", file=sys.stderr, flush=True)
    if hosts := accused(findings):
        print(f"To start without them: launcher.exclude={','.join(hosts)}", file=sys.stderr, flush=True)


def accused(findings: Sequence[Finding]) -> list[str]:
    """The hosts to blame for harmful findings."""
    return list(dict.fromkeys(finding.host for finding in findings if finding.harmful and finding.excludable))


def act_on(findings: Sequence[Finding], *, act: str, host: str, hosts: Sequence[str]) -> None:
    """Stop this rank if `act` is `stop` or `exclude` and a finding is harmful. All ranks decide alike.

    act: `preflight.act`. host: the host of this rank. hosts: all hosts of the run.

    Raises PreflightError on the ranks of all hosts to blame and FollowerError on the others.
    """
    harmful = [finding for finding in findings if finding.harmful]
    if not harmful or act not in (STOP, EXCLUDE):
        return
    # A finding about several hosts would occur again at the next start.
    first = next((finding for finding in harmful if not finding.excludable), harmful[0])
    blamed = accused(harmful) if first.excludable else [first.host]
    message = first.line + (f"; also accused: {listed_hosts(blamed[1:])}" if len(blamed) > 1 else "")
    if host not in blamed:
        raise FollowerError(f"ended with {message}")
    exclude = blamed if act == EXCLUDE and first.excludable and len(blamed) < len(hosts) else []
    raise PreflightError(message + ("" if exclude else _advice(first, blamed=blamed)), exclude=exclude)


def _advice(first: Finding, *, blamed: Sequence[str]) -> str:
    if first.excludable:
        return f". Try launcher.exclude={','.join(blamed)}, or preflight.act=report"
    return ". No host alone is to blame, so none is excluded. Correct the cause, or try preflight.act=report"
