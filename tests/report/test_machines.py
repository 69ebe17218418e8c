"""What `task=preflight` measured in a report: input by readers, for each run. Files of others are data."""

from __future__ import annotations

from pathlib import Path

from hpc_parallel.__main__ import main
from hpc_parallel.record.safe_write import write_json
from tests.report.measured_runs import ended


def test_the_input_of_each_run(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    reads = {"a": {"n1": {"1": 1e9, "2": 1.9e9}}, "b": {"n1": {"1": 1e9, "2": 1.1e9}}}
    for name, by_host in reads.items():
        folder = ended(root / name, "strategy=data", "nodes=2", f"seed={ord(name)}")
        write_json(folder.machine_check, {"reads_bytes_per_s": by_host, "findings": []})
    other = ended(root / "c", "strategy=data", "nodes=2", "seed=7")
    write_json(other.machine_check, {"findings": [{"host": "<b>\x1b", "what": "| x"}] * 50})
    assert main(["report", str(root)]) == 0
    text = (root / "report" / "report.md").read_text()
    assert text.count("| read, processes on each host = 1: 1000 MB/s (median of the hosts) |") == 2
    assert text.count("| input scales with the processes: 2 read 1.9 times as fast as 1 |") == 1
    assert text.count("| input does not scale with the processes: 2 read 1.1 times as fast as 1 |") == 1
    assert text.count("\\| x |") == 40
    assert "| and 11 more |" in text
    page = (root / "report" / "index.html").read_text()
    assert page.count("MB/s (median of the hosts)") == 4
    assert "<b>" not in page
    assert "\x1b" not in text + page
