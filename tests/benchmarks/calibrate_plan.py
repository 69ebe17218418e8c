"""Calibrate conf/hardware/a100_80gb_node8_800gbit.yaml, and print the errors of the plans.

    python tests/benchmarks/calibrate_plan.py                   # errors of the coefficients in the file
    python tests/benchmarks/calibrate_plan.py --fit             # fit them to 100 random rows, print both
    python tests/benchmarks/calibrate_plan.py --leave-out       # fit without a model size, plan that size
    python tests/benchmarks/calibrate_plan.py --hopper          # the runs of tests/data/hopper_steps.json

Each coefficient starts from what a data sheet or a profile of a similar machine says
(`planning/coefficient_fit.py`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hpc_parallel.config.resolve import resolve
from hpc_parallel.planning import coefficient_fit
from hpc_parallel.planning.calibration import MeasuredRun, calibrate, planned_s
from hpc_parallel.planning.hardware import Hardware, read_hardware, with_coefficients
from hpc_parallel.planning.work import work_of_run
from tests.benchmarks.plan_table import Row, plan_row, read_table
from tests.composed import composed

ROOT = Path(__file__).resolve().parents[2]
TABLE, FOLDERS = ROOT / "tests" / "data" / "a100_iterations.csv", [ROOT / "conf" / "hardware"]
NAME = "a100_80gb_node8_800gbit"
SEED, ROWS = 0, 100
HOPPER = {"h200": "h200_sxm_node8_3200gbit", "h100": "h100_sxm_node8_3200gbit"}
HOPPER_WORDS = (
    "strategy=single", "launcher=local", "device=cuda", "training.precision=bfloat16",
)  # fmt: skip
# Coefficient: the expected value, and the tolerance of its logarithm.
EXPECTED = {
    "products.peak_share": (0.9, 0.06),
    "products.tile_intensity": (14.0, 0.4),
    "products.depth": (60.0, 0.5),
    "traffic.share": (0.85, 0.1),
    "traffic.kernel_s": (4e-6, 0.3),
    "traffic.elementwise": (1.0, 0.2),
    "traffic.attention": (1.0, 0.2),
    "traffic.loss_bytes": (80.0, 0.3),
    "traffic.optimizer_bytes": (40.0, 0.3),
    "host.forward_s": (0.7e-3, 0.5),
    "host.backward_s": (2.5e-3, 0.5),
    "host.collective_s": (20e-6, 0.7),
    "host.unfused_s": (0.3e-3, 0.7),
    "host.microbatch_s": (0.75e-3, 0.7),
    "host.action_s": (0.3e-3, 0.7),
    "host.step_s": (5e-3, 0.7),
    "host.sharpness": (8.0, 0.5),
    "node.collective.latency_s": (20e-6, 0.7),
    "node.collective.bytes_per_s": (200e9, 0.2),
    "node.send.latency_s": (50e-6, 0.7),
    "node.send.bytes_per_s": (100e9, 0.5),
    "network.latency_s": (40e-6, 0.5),
    "network.share": (0.85, 0.1),
    "network.spread": (0.03, 0.4),
}


def sample(rows: Sequence[Row], seed: int = SEED) -> list[int]:
    """The rows of the calibration."""
    return sorted(random.Random(seed).sample(range(len(rows)), min(ROWS, len(rows))))


def measured_s(row: Row) -> float:
    return float(row["iteration_ms"]) / 1e3


def fit(rows: Sequence[Row], hardware: Hardware) -> dict[str, float]:
    """The coefficients by name."""
    _, fitted = coefficient_fit.fit(
        with_coefficients(hardware, {name: value for name, (value, _) in EXPECTED.items()}),
        tolerances={name: tolerance for name, (_, tolerance) in EXPECTED.items()},
        measured_s=list(map(measured_s, rows)),
        planned_s=lambda machine: [plan_row(row, machine).total_s for row in rows],
    )
    return {name: one.value for name, one in fitted.items()}


def errors(rows: Sequence[Row], hardware: Hardware) -> list[tuple[Row, float]]:
    """The relative error of each row's plan."""
    return [(row, plan_row(row, hardware).total_s / measured_s(row) - 1) for row in rows]


def good_choices(planned: Sequence[tuple[Row, float]]) -> tuple[int, int]:
    """Groups of rows that differ in layout and microbatch only: those whose planned best is within 5 % of
    the measured best, and all of at least two rows.
    """
    groups = defaultdict(list)
    for row, error in planned:
        key = tuple(row[k] for k in ("gpus", "global_batch", "hidden", "heads", "layers", "sequence"))
        groups[key].append((measured_s(row) * (1 + error), measured_s(row)))
    several = [group for group in groups.values() if len(group) > 1]
    good = sum(min(group)[1] <= 1.05 * min(measured for _, measured in group) for group in several)
    return good, len(several)


def line(name: str, planned: Sequence[tuple[Row, float]]) -> str:
    parts = []
    for label, where in (("one node", lambda n: n <= 8), ("several nodes", lambda n: n > 8)):
        sizes = [100 * abs(error) for row, error in planned if where(int(row["gpus"]))]
        mean = f"{sum(sizes) / len(sizes):5.2f} %" if sizes else "   -   "
        parts.append(f"{label} {mean} of {len(sizes):3}")
    good, count = good_choices(planned)
    return f"{name:<34} {', '.join(parts)}, best layout {good} of {count}"


def leave_out(rows: Sequence[Row], hardware: Hardware) -> None:
    """For each model size: fit to 100 rows of other sizes, and plan its rows."""
    together: list[tuple[Row, float]] = []
    sizes = sorted({(int(row["hidden"]), int(row["layers"])) for row in rows})
    for size in sizes:
        inside = [row for row in rows if (int(row["hidden"]), int(row["layers"])) == size]
        others = [row for row in rows if row not in inside]
        machine = with_coefficients(hardware, fit([others[i] for i in sample(others)], hardware))
        planned = errors(inside, machine)
        together += planned
        print(line(f"without hidden {size[0]}, layers {size[1]}", planned), flush=True)
    print(line("all sizes left out in turn", together))


def hopper_runs(gpu: str) -> dict[str, list[MeasuredRun]]:
    """Measured steps of one `gpu` of HOPPER, by kind. The fit took those of the H200 of its kind."""
    table = json.loads((ROOT / "tests" / "data" / "hopper_steps.json").read_text())
    runs = defaultdict(list)
    for row in table["rows"]:
        config = resolve(composed(*HOPPER_WORDS, *row["words"].split()))[0]
        run = MeasuredRun(row["name"], work_of_run(config), 1, gpu, row["step_ms"][gpu] / 1e3)
        runs[row["kind"]].append(run)
    return runs


def hopper() -> None:
    """Print the errors of the two files, and those of a fit to H200's runs that starts from its file."""
    for gpu, name in HOPPER.items():
        hardware, runs = read_hardware(name, folders=FOLDERS), hopper_runs(gpu)
        machines = {gpu: hardware}
        if gpu == "h200":
            machines[f"{gpu}, fitted again"] = calibrate(runs["fit"], hardware).hardware
        for label, machine in machines.items():
            for kind, several in runs.items():
                sizes = [100 * abs(planned_s(run, machine) / run.step_s - 1) for run in several]
                print(
                    f"{label:<19} {kind:<9} {fmean(sizes):5.2f} % of {len(sizes)}, at most {max(sizes):.2f} %"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--hopper", action="store_true")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    if options.hopper:
        hopper()
        return
    rows, hardware = read_table(TABLE), read_hardware(NAME, folders=FOLDERS)
    if options.leave_out:
        leave_out(rows, hardware)
        return
    chosen = sample(rows, options.seed)
    if options.fit:
        values = fit([rows[i] for i in chosen], hardware)
        hardware = with_coefficients(hardware, values)
        for name, (value, tolerance) in EXPECTED.items():
            print(f"{name:<30} {values[name]:.4g}  (expected {value:.4g}, tolerance {tolerance:g})")
    planned = errors(rows, hardware)
    print(line("rows of the calibration", [planned[i] for i in chosen]))
    print(line("other rows", [one for i, one in enumerate(planned) if i not in set(chosen)]))


if __name__ == "__main__":
    main()
