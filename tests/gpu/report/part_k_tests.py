"""All tests of tests/gpu, several at a time; a test that did not end in time is named as such."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

from tests import ROOT, python_path
from tests.gpu.report import setting
from tests.gpu.report.findings import NOT_AVAILABLE, Findings

TITLE, LIMIT_S = "the tests of tests/gpu", 75.0
OUTCOME = re.compile(r"(?:\[gw\d+\].*?)?(PASSED|FAILED|ERROR|SKIPPED)")
NAME = re.compile(r"(tests/gpu/\S+::\S+)")
ON_CPU = "starts_from_the_weights"  # all that a dry run has time for


def run(findings: Findings) -> None:
    if importlib.util.find_spec("pytest") is None:
        findings.add(tests=f"{NOT_AVAILABLE}: pytest is not installed")
        return
    cores = os.cpu_count() or 1
    beside = importlib.util.find_spec("xdist") is not None and cores > 3
    words = ["--numprocesses", str(min(14, cores - 2))] if beside else []
    chosen = [] if setting.on_gpu() else ["-k", ON_CPU]
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-v", "-p", "no:cacheprovider", "-o", "addopts="]
    process = subprocess.Popen(
        [*command, *words, *chosen], cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    outcomes: dict[str, str] = {}
    for line in process.stdout:
        print(line, end="")  # the end of it stands in gpu.md if a test fails
        if (name := NAME.search(line)) and (outcome := OUTCOME.search(line)):
            outcomes[name[1]] = outcome[1]
            findings.add(outcomes=outcomes)
    findings.add(outcomes=outcomes, returncode=process.wait())
    if process.returncode:
        raise RuntimeError(f"pytest ended with {process.returncode}")
