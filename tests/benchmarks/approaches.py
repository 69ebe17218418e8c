"""The approaches of the usual introductions side by side: what each costs and holds, measured in one go.

Processes of one machine stand for devices, so memory, bytes and idle shares mean something here, and
samples a second only how busy the machine's cores were.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = (
    "training.steps=12",
    "training.log_every=4",
    "training.validate_every=null",
    "data.max_bytes=1000000",
)
IMAGES = ("model=segmenter", "data=cells", "data.samples=256", "model.channels=[16,32]")
RUNS = {
    "one device": ("strategy=single",),
    "data (all-reduce)": ("strategy=data", "nodes=2"),
    "data (parameter server)": ("strategy=parameter_server", "nodes=3"),
    "data (nn.DataParallel)": ("strategy=dataparallel", "gpus_per_node=2"),
    "data, sliced (fsdp)": ("strategy=fsdp", "nodes=2"),
    "model, by layers": ("strategy=model", "nodes=2"),
    "model, by tensors": ("strategy=tensor", "nodes=2"),
    "pipeline": ("strategy=pipeline", "nodes=2"),
    "context": ("strategy=context", "nodes=2"),
    "hybrid (pipeline x tensor)": ("strategy=hybrid", "nodes=2", "gpus_per_node=2"),
    "one device, images": ("strategy=single", *IMAGES),
    "tiles": ("strategy=tile", "nodes=2", *IMAGES),
}


def measure(words: tuple[str, ...], folder: Path) -> dict[str, float | None]:
    command = [
        sys.executable,
        "-m",
        "hpc_parallel.run",
        "launcher=local",
        f"run_dir={folder}",
        *STEPS,
        *words,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, float | None] = json.loads((folder / "summary.json").read_text())
    return found


def cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def main() -> None:
    print("| approach | samples/s | idle in the pipeline | exposed communication | sent a step, all ranks "
          "| busiest rank, sent and received |\n|---|---|---|---|---|---|")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(RUNS.items()):
            found = measure(words, Path(folder, str(number)))
            cells = (
                cell(found["samples_per_s"], ".0f"),
                cell(found["bubble_share"], ".1%"),
                cell(found["exposed_communication_share"], ".1%"),
                cell(found["traffic_bytes"], ".2f", 1e-6) + " MB",
                cell(found["busiest_rank_traffic_bytes"], ".2f", 1e-6) + " MB",
            )
            print(f"| {name}: `{' '.join(words)}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
