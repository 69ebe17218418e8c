"""The findings of the checks at the start of a run, from `preflight.json`, which anybody may have written."""

from __future__ import annotations

from hpc_parallel.problems import printable
from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_json
from hpc_parallel.record.values import table, text

MOST_FINDINGS = 20


def finding_lines(folder: RunFolder) -> list[tuple[str, str]]:
    """Host and what is wrong with it; empty if nothing is or the file can't be read."""
    try:
        findings = table(read_json(folder.preflight)).get("findings")
    except (OSError, ValueError):
        return []
    tables = [table(finding) for finding in findings[:MOST_FINDINGS]] if isinstance(findings, list) else []
    known = [(text(finding.get("host")), text(finding.get("what"))) for finding in tables]
    return [(printable(host), printable(what)) for host, what in known if host and what]
