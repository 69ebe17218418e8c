"""`make bench`: ours beside its peers, in one run; prints a table and writes JSON.

    python -m tests.benchmarks.peers [ENTRY ...] [--models tiny,20m] [--seconds 60] [--clock cpu]

A ratio is ours divided by theirs in throughput, so above 1 ours is faster: the median of at least ten
alternating pairs with its 95 % interval. Needs an otherwise idle machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.peers import entries, first_step, products, side_by_side, submission, world_size
from tests.workers import Workers

ALONE: dict[str, Callable[[str], dict[str, Any]]] = {
    "first_step": first_step.measure,
    "products": products.measure,
    "submission": submission.measure,
    "world": world_size.measure,
}


def main() -> int:
    options = parsed()
    rows = []
    with tempfile.TemporaryDirectory() as folder, closing(Workers(Path(folder, "ranks"))) as workers:
        for name in options.entries:
            models = options.models.split(",") if name in entries.ENTRIES else [None]
            for model in models:
                rows.append(guarded(name, model, workers=workers, options=options))
                print(text_of(rows[-1]), flush=True)
                write(options.json, rows)
    return int(not all(row["met"] for row in rows))


def parsed() -> argparse.Namespace:
    known = [*entries.ENTRIES, *ALONE]
    parser = argparse.ArgumentParser(prog="make bench")
    parser.add_argument(
        "entries", nargs="*", metavar="ENTRY", help=f"one of {', '.join(known)}; default: all"
    )
    parser.add_argument("--models", default=",".join(entries.MODELS))
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest contest of one row")
    parser.add_argument(
        "--clock", choices=side_by_side.CLOCKS, default="wall", help="which time of a step counts"
    )
    parser.add_argument("--steps", type=int, default=1000, help="the most steps of one row")
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    parser.add_argument("--peers", default=".venv/peers", help="where requirements.txt is installed")
    options = parser.parse_args()
    if unknown := set(options.entries) - set(known):
        parser.error(f"unknown entries {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    options.entries = options.entries or known
    options.peers = str(Path(options.peers).resolve())
    return options


def guarded(name: str, model: str | None, *, workers: Workers, options: argparse.Namespace) -> dict[str, Any]:
    """A row; of an entry that fails, why."""
    try:
        if model is None:
            return {"entry": name, **ALONE[name](options.peers)}
        return entries.measure(
            workers, name, model=model, peers=options.peers, limit_s=options.seconds,
            most_steps=options.steps, clock=options.clock,
        )  # fmt: skip
    except Exception as error:
        traceback.print_exc()
        return {"entry": name, "model": model, "met": False, "error": str(error).strip().splitlines()[-1]}


def text_of(row: dict[str, Any]) -> str:
    label = f"{row['entry']} {row.get('model') or ''}".strip()
    if "error" in row:
        return f"{label}: FAILED: {row['error']}"
    if "text" in row:
        return f"{label}: {row['text']}" + ("" if row["met"] else "  BELOW TARGET")
    theirs = f"{row['peer']} {row['theirs_step_s'] * 1e3:.1f} ms"
    return (
        f"{label}: ours {row['ours_step_s'] * 1e3:.1f} ms a step, {theirs}; ratio {row['ratio']:.3f} "
        f"({row['low']:.3f} to {row['high']:.3f}, {row['pairs']} pairs)"
        + ("" if row["met"] else f"  BELOW TARGET {row['target']}")
    )


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    about = {
        "time": datetime.now(UTC).isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }
    file.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
