"""Ours beside other trainers in one run.

A ratio is ours divided by theirs in tokens per second. The peers need the packages of requirements.txt.
"""

from __future__ import annotations

from tests.gpu.report import setting
from tests.gpu.report.findings import Findings
from tests.gpu.report.part_l_benchmark import COMPILED, case_of, measure, of_peer, words_of
from tests.gpu.report.peers import PEERS

TITLE, LIMIT_S = "ours beside its peers", 560.0
SIZES = (("1b", 4, 2048), ("1b", 16, 2048), ("8b width", 4, 2048))
FLOAT8 = ("bf16", None), ("fp8", "tensorwise")


def run(findings: Findings) -> None:
    setting.join()
    setting.compile_quickly()
    for kind, fp8 in FLOAT8:
        for name, samples, seq in SIZES:
            beside(findings, name, samples, seq, kind=kind, fp8=fp8)


def beside(findings: Findings, name: str, samples: int, seq: int, *, kind: str, fp8: str | None) -> None:
    """One case of ours and of each peer, which is Fabric for `1b` only."""
    label, shape, size = case_of(name, samples, seq, f"{kind}, compiled")
    words = [*words_of(shape), *COMPILED, *([f"training.fp8={fp8}"] if fp8 else [])]
    ours = measure(findings, label, *words, **size)
    for peer in PEERS:
        if peer == "Lightning Fabric" and name != "1b":
            continue
        theirs = of_peer(findings, f"{label}, {peer}", peer, shape, fp8=fp8, **size)
        if ours and theirs:
            findings.add(**{f"{label}, ours by {peer}": ours / theirs})
