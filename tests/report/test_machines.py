"""The machines of each run in a report: input by readers, what carried its data, how its hosts are connected.

Files of others are data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpc_parallel.__main__ import main
from hpc_parallel.record.safe_write import write_json
from tests.report.measured_runs import ended

PARTS = [{"name": name, "model": "", "numa": 0} for name in ("GPU0", "GPU1")]


def transport(**more: Any) -> dict[str, Any]:
    pairs = {"inside a node": {"P2P (CUMEM)": 24}, "across nodes": {"NET/IB, GPUDirect RDMA": 16}}
    return {
        "version": "2.27.7",
        "network": "IB",
        "nvls_channels": 16,
        "pairs": pairs,
        "problem": None,
        **more,
    }


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


def test_it_is_drawn_once_for_runs_on_hosts_that_are_alike(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    shape = {"hosts": ["n1", "n2"], "parts": PARTS, "links": [["X", "NV18"], ["NV18", "X"]]}
    for name, problem in (("a", None), ("b", "<b>sockets```")):
        folder = ended(root / name, "strategy=data", "nodes=2", f"seed={ord(name)}")
        write_json(folder.environment, {"transport": transport(problem=problem), "topology": [shape]})
    assert main(["report", str(root)]) == 0
    text = (root / "report" / "report.md").read_text()
    assert text.count("| across nodes | NET/IB, GPUDirect RDMA (16 channels) |") == 2
    assert text.count("| transport | NCCL 2.27.7, IB, connected so far |") == 2
    assert text.count("| NVLS | 16 channels |") == 2
    assert text.count("GPU0  X     NV18  0") == 1
    page = (root / "report" / "index.html").read_text()
    assert page.count('<pre class="scroll"') == 1
    assert "<b>" not in page
    assert text.count("```") == 2


def test_devices_and_slow_ranks_stand_beside_it(tmp_path: Path) -> None:
    folder = ended(tmp_path / "runs" / "a", "strategy=data", "nodes=2")
    ranks = [{"rank": rank, "host": f"n{rank}", "temperature_c": 60 + 20 * rank} for rank in range(3)]
    line = "rank 2 on n2 is slow: compute takes 1.50 x (150.0 ms, and 100.0 elsewhere)"
    slow = {"rank": 2, "host": "n2", "cause": "compute", "line": line, "first_step": 60, "last_step": 90}
    write_json(folder.rank_times, {"samples": [{"ranks": ranks}], "slow": [], "accused": [slow]})
    energy = {"gpu_kwh": 0.5, "gpus": 3, "of_gpus": 3}
    write_json(folder.summary, {**json.loads(folder.summary.read_text()), "energy": energy})
    assert main(["report", str(tmp_path / "runs")]) == 0
    text = (tmp_path / "runs" / "report" / "report.md").read_text()
    assert "| devices: temperature | median 80 °C, worst 100 °C (rank 2 on n2) |" in text
    assert f"| slow rank | {line}, from step 60 to 90 |" in text
    assert "| energy of the GPUs | 0.5 kWh |" in text


def test_runs_without_a_record_have_no_section(tmp_path: Path) -> None:
    ended(tmp_path / "runs" / "a", "strategy=data", "nodes=2")
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "## Network" not in (tmp_path / "runs" / "report" / "report.md").read_text()
