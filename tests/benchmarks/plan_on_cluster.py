"""Planned and measured steps on the test cluster, with links of 1 Gbit/s and of 200 Mbit/s.

    python -m tests.benchmarks.plan_on_cluster --output FOLDER [--minutes 12] [--only context expert]

Needs root, Slurm, and two cores that do nothing else. The cluster's hosts share them, which the profile says
(`shared_cores`). The profile is calibrated once, at 1 Gbit/s: `task=calibrate`, then `plan --calibrate` on
CALIBRATION. At 200 Mbit/s only the bandwidth of the wire changes. RUNS have other models, and strategies on
other numbers of nodes, which the calibration did not see. `--only` measures runs of some strategies at
1 Gbit/s, also those of OTHERS. FOLDER gets the profile, `plan_on_cluster.json` and `plan_on_cluster.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_parallel.commands.plan import calibrated
from hpc_parallel.planning.calibration import planned_s, read_runs
from hpc_parallel.planning.hardware import Hardware, read_hardware
from hpc_parallel.problems import ConfigError

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "slurm"))
from cluster import Cluster, ClusterError  # noqa: E402

RATES = {"1gbit": 1.0, "200mbit": 0.2}  # in Gbit/s
BURST = "128k"  # a larger one would let a small model's gradients pass at once
CLOSE, CLOSE_CHOICE = 0.15, 0.05
STEPS = 6
COMMON = (
    "data.max_bytes=300000", "training.validate_every=null", "training.checkpoint_every=null",
    "training.measure_steps=0", "training.compare_replicas=false", "training.log_every=1",
    f"training.steps={STEPS}", "optimizer.warmup_steps=0", "training.precision=float32", "device=cpu",
    "launcher=slurm", "launcher.wait=true", "launcher.snapshot=false", "launcher.check_imports=false",
    "preflight.act=off", "strategy.verify=never",
)  # fmt: skip


def _model(layers: int, dim: int, heads: int, ffn: int, sequence: int) -> tuple[str, ...]:
    return (
        "model=tiny", f"model.layers={layers}", f"model.dim={dim}", f"model.heads={heads}",
        f"model.kv_heads={heads}", f"model.ffn_dim={ffn}", f"data.sequence_length={sequence}",
    )  # fmt: skip


MODELS = {
    # Of the calibration: one that computes, one that communicates.
    "k": _model(4, 256, 4, 704, 128),
    "l": _model(3, 384, 6, 1024, 32),
    # Of the runs.
    "a": _model(6, 192, 4, 512, 128),
    "b": _model(6, 320, 4, 960, 64),
    "c": _model(3, 512, 8, 1408, 96),
    "m": (
        "model=moe_tiny",
        "model.layers=3",
        "model.dim=256",
        "model.ffn_dim=512",
        "data.sequence_length=96",
    ),
}
BATCH = 16
STRATEGIES = {
    "single": ("strategy=single",),
    "data": ("strategy=data",),
    "fsdp": ("strategy=fsdp",),
    "hsdp": ("strategy=hsdp",),
    "tensor": ("strategy=tensor",),
    "pipeline": ("strategy=pipeline", "strategy.microbatches=8"),
    "hybrid": ("strategy=hybrid", "strategy.microbatches=4"),
    "context": ("strategy=context",),
    "gather": ("strategy=context", "strategy.context_attention=gather"),
    "expert": ("strategy=expert",),
    "parameter_server": ("strategy=parameter_server",),
}


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    strategy: str
    nodes: int = 1
    devices: int = 1

    @property
    def name(self) -> str:
        return f"{self.model} {self.strategy} {self.nodes}x{self.devices}"

    @property
    def words(self) -> tuple[str, ...]:
        return (
            *COMMON, *MODELS[self.model], *STRATEGIES[self.strategy], f"nodes={self.nodes}",
            f"gpus_per_node={self.devices}", f"training.global_batch_size={BATCH}",
        )  # fmt: skip


def _cases(model: str, nodes: int, devices: int, *strategies: str) -> list[Case]:
    return [Case(model, strategy, nodes, devices) for strategy in strategies]


CALIBRATION = [
    *_cases("k", 1, 1, "single"),
    *_cases("k", 2, 1, "data", "fsdp", "pipeline", "tensor"),
    *_cases("l", 2, 1, "data", "fsdp"),
    *_cases("l", 2, 2, "data", "hybrid"),
]
RUNS = [
    *_cases("a", 2, 1, "data", "fsdp", "pipeline"),
    *_cases("b", 2, 1, "data", "fsdp", "pipeline"),
    *_cases("c", 2, 1, "data", "tensor"),
    *_cases("a", 4, 1, "data", "fsdp", "pipeline"),
    *_cases("b", 2, 2, "hsdp", "hybrid", "data"),
]
OTHERS = [  # of --only
    *_cases("a", 2, 1, "context", "gather"),
    *_cases("c", 2, 1, "context"),
    *_cases("a", 3, 1, "parameter_server"),
    *_cases("c", 2, 1, "parameter_server"),
    *_cases("m", 2, 1, "expert", "data"),
    *_cases("m", 2, 2, "expert"),
]


@dataclass(frozen=True)
class Result:
    """A run beside its plan. error: planned / measured - 1."""

    rate: str
    case: Case
    planned_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.planned_s / self.measured_s - 1


class Site:
    """A shell on the cluster. end_s: when no run may begin any more, by the monotonic clock."""

    def __init__(self, cluster: Cluster, folder: Path, *, end_s: float) -> None:
        self._cluster, self._folder, self._end_s = cluster, folder, end_s

    @property
    def late(self) -> bool:
        return time.monotonic() > self._end_s

    def run(self, name: str, *words: str) -> Path:
        """Submit a run and wait for it; returns its folder. Raises RuntimeError if it fails."""
        folder = self._folder / name.replace(" ", "_")
        done = subprocess.run(
            [sys.executable, "-m", "hpc_parallel.run", *words, f"run_dir={folder}"], cwd=self._folder,
            env={**os.environ, **self._cluster.environment, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return folder


def calibrate(site: Site, output: Path) -> Hardware:
    """Measure the devices and links, then fit to the runs of the calibration; writes the profiles."""
    task = ("task=calibrate", "task.seconds=50", "nodes=2", "gpus_per_node=2", "strategy=hsdp", "device=cpu")
    folder = site.run("calibrate", *task, "launcher=slurm", "launcher.wait=true", "preflight.act=off")
    (output / "hardware").mkdir(parents=True, exist_ok=True)
    (output / "hardware" / "measured.yaml").write_text((folder / "hardware.yaml").read_text())
    runs = [str(site.run(f"calibration {case.name}", *case.words)) for case in CALIBRATION]
    file = output / "hardware" / "cluster.yaml"
    content, lines = calibrated(runs, name="measured", output=file, user_folder=output)
    file.write_text(content)
    print(*lines, sep="\n", flush=True)
    return read_hardware("cluster", folders=[output / "hardware"])


def at_rate(hardware: Hardware, rate: str) -> Hardware:
    """The wire of another rate: the same share of it arrives."""
    share = RATES[rate] / RATES["1gbit"]
    network = replace(hardware.network, bytes_per_s=hardware.network.bytes_per_s * share)
    return replace(hardware, network=network)


def measure(site: Site, hardware: Hardware, *, rate: str, cases: Sequence[Case]) -> list[Result]:
    results = []
    for case in cases:
        if site.late:
            print(f"left out, the time is used: {rate} {case.name}", flush=True)
            continue
        try:
            (run,) = read_runs([site.run(f"{rate} {case.name}", *case.words)], hardware)
        except (RuntimeError, ConfigError) as error:  # the others count nevertheless, and the table lacks it
            print(error, flush=True)
            continue
        results.append(Result(rate, case, planned_s(run, hardware), run.step_s))
        print(row(results[-1]), flush=True)
    return results


def row(result: Result) -> str:
    case = result.case
    return (
        f"| {result.rate} | {case.model} | {case.nodes} x {case.devices} | {case.strategy} | "
        f"{1e3 * result.planned_s:.0f} ms | {1e3 * result.measured_s:.0f} ms | {100 * result.error:+.1f} % |"
    )


@dataclass(frozen=True)
class Comparison:
    """Strategies for one model on the same nodes. loss: what the planned best costs more than the best."""

    name: str
    planned: str
    measured: str
    loss: float


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    groups: dict[tuple[str, str, int, int], list[Result]] = defaultdict(list)
    for one in results:
        groups[one.rate, one.case.model, one.case.nodes, one.case.devices].append(one)
    found = []
    for (rate, model, nodes, devices), group in groups.items():
        if len(group) > 1:
            chosen = min(group, key=lambda one: one.planned_s)
            best = min(group, key=lambda one: one.measured_s)
            name = f"{rate}, {model}, {nodes} x {devices}"
            loss = chosen.measured_s / best.measured_s - 1
            found.append(Comparison(name, chosen.case.strategy, best.case.strategy, loss))
    return found


def summary(results: Sequence[Result]) -> list[str]:
    compared = comparisons(results)
    near = sum(abs(one.error) <= CLOSE for one in results)
    mean = sum(abs(one.error) for one in results) / len(results)
    right = sum(one.planned == one.measured for one in compared)
    good = sum(one.loss < CLOSE_CHOICE for one in compared)
    return [
        f"Within {CLOSE:.0%}: {near} of {len(results)} runs; mean error {mean:.1%}.",
        f"The planned best is the measured best in {right} of {len(compared)} comparisons, "
        f"and costs less than {CLOSE_CHOICE:.0%} more in {good}.",
    ]


def markdown(results: Sequence[Result]) -> str:
    lines = [
        "| links | model | nodes | strategy | planned | measured | error |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        *map(row, results),
        "",
        "| comparison | planned best | measured best | costs more |",
        "|---|---|---|---|",
    ]
    lines += [f"| {c.name} | {c.planned} | {c.measured} | {c.loss:.1%} |" for c in comparisons(results)]
    return "\n".join([*lines, "", *summary(results), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0, help="no run begins later (default 12)")
    parser.add_argument("--only", nargs="+", choices=sorted(STRATEGIES), help="runs of these, at 1 Gbit/s")
    options = parser.parse_args()
    began_s = time.monotonic()
    cases, rates = RUNS, list(RATES)
    if options.only:
        cases, rates = [case for case in [*RUNS, *OTHERS] if case.strategy in options.only], ["1gbit"]
    results: list[Result] = []
    with Cluster.start(hosts=4) as cluster, tempfile.TemporaryDirectory() as folder:
        site = Site(cluster, Path(folder), end_s=began_s + 60 * options.minutes - 20)
        cluster.shape("1gbit", burst=BURST)
        hardware = calibrate(site, options.output)
        for rate in rates:
            cluster.shape(rate, burst=BURST)
            results += measure(site, at_rate(hardware, rate), rate=rate, cases=cases)
    rows = [{**asdict(one), "error": one.error} for one in results]
    record = {"rows": rows, "comparisons": list(map(asdict, comparisons(results)))}
    (options.output / "plan_on_cluster.json").write_text(json.dumps(record, indent=1))
    (options.output / "plan_on_cluster.md").write_text(markdown(results))
    print(*summary(results), f"{time.monotonic() - began_s:.0f} s", sep="\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ClusterError as problem:
        sys.exit(str(problem))
