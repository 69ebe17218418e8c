"""`make gpu`: what only an NVIDIA GPU shows, within 8 minutes, offline; writes gpu.json and gpu.md.

    python -m tests.gpu.report [PART ...] [--out FOLDER]

Needs Python 3.11 and torch 2.11, or newer ones, and the packages that tests/gpu names; nothing is installed.
Each part (a to p) runs in a process of its own with its own limit, the benchmark (l) first. Part o, the
peers, takes 9 minutes and the packages of requirements.txt: `o --total 560`.
HPC_PARALLEL_TEST_DEVICE=cpu runs all of it in tiny sizes on a machine without a GPU: the figures then mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.gpu.report import setting
from tests.gpu.report.markdown import page
from tests.gpu.report.parts import LETTERS, TOTAL_S, run_parts


def main() -> int:
    parser = argparse.ArgumentParser(prog="make gpu")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(LETTERS)}; default: all")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu.json and gpu.md")
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds for all parts")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(LETTERS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    if setting.on_gpu() and not torch.cuda.is_available():
        print("There is no NVIDIA GPU here. Try HPC_PARALLEL_TEST_DEVICE=cpu for a dry run.", file=sys.stderr)
        return 2
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_parts(options.parts or list(LETTERS), Path(folder), total_s=options.total)
    options.out.mkdir(parents=True, exist_ok=True)
    record = {**about, "parts": [asdict(outcome) for outcome in outcomes]}
    (options.out / "gpu.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    (options.out / "gpu.md").write_text(page(about, outcomes), encoding="utf-8")
    print(f"wrote {options.out / 'gpu.json'} and {options.out / 'gpu.md'}")
    return int(any(outcome.outcome != "done" for outcome in outcomes))


def machine() -> dict[str, Any]:
    """Date, device and versions. CUDA stays untouched: the parts must find it fresh."""
    names = torch.cuda.device_count() if setting.on_gpu() else 0
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": gpu_name() if names else "cpu (a dry run: the figures mean nothing)",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": setting.os.cpu_count(),
    }


def gpu_name() -> str:
    from hpc_parallel.machine.topology import nvml_module

    nvml = nvml_module()
    if nvml is None:
        return "an NVIDIA GPU (no NVML to ask for its name)"
    nvml.nvmlInit()
    name = nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0))
    return name.decode() if isinstance(name, bytes) else str(name)


if __name__ == "__main__":
    sys.exit(main())
