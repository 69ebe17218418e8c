"""Write docs/approaches.md and its drawings, or check that they are current.

    python docs/diagrams.py            # writes docs/approaches.md and docs/images/approach_*.svg
    python docs/diagrams.py --check    # exits with 1 and names what is stale

The drawings come from the configuration of each command, as `show` prints it for a run. The tables come from
the example report. Approaches that it lacks have theirs from `counted_runs.csv`: lines of a `report.csv` with
the figures that do not depend on the speed of a machine.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import fill

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))  # the package of this checkout

from docs.drawn_layout import draw  # noqa: E402
from hpc_parallel.api import compose  # noqa: E402
from hpc_parallel.layout.holdings import Setup, model_facts  # noqa: E402
from hpc_parallel.layout.layout import DATAPARALLEL, layout_of, servers  # noqa: E402
from hpc_parallel.report.tables import digits  # noqa: E402

PAGE, IMAGES, REPORT = DOCS / "approaches.md", DOCS / "images", DOCS / "example_report/report.csv"
COUNTED = DOCS / "counted_runs.csv"
INTRODUCTION = """\
<!-- Written by docs/diagrams.py: edit that. -->

# Approaches in pictures

```bash
python -m hpc_parallel.run strategy=fsdp model=20m nodes=4
```

Each section has the command of one approach, a picture of who holds what and who sends what to whom, and
what was measured. `python -m hpc_parallel show RUN` prints the same about your own run.

Read a picture from the top. The boxes are devices in their nodes. Each has bars for the weights, their
gradients and the state of the optimizer, and one for the samples of a step: the coloured part is what this
device holds. Below, time goes down, through one training step. A line with dots is a collective operation
among the dotted devices, an arrow is a message to one device, and the colour says to which bar the sent
data belongs (grey: a few numbers). Microbatches and blocks repeat their rows. Checkpoints, log lines and
the agreement on when to stop are left out.

The figures are those of the [example report](example_report/report.md): `-m jobs=compare_strategies`, a
model of 20 million weights, 12 samples of 128 bytes in each step, 2 CPU cores, four simulated hosts with
links of 1 Gbit/s, gloo, float32. All devices share two cores, so twice the throughput of `single` is the
ideal there, and memory includes the interpreter and its libraries.
[Performance](performance.md) has the machine and the command. Approaches that this report lacks were counted
in a run of their own; their state is the weights, gradients and optimizer state of a device. A picture has
the layout and the model of the figures below it.
"""
FIGURES = (
    # title, key of the report, its unit, what a unit is
    ("throughput, samples/s", "samples_per_s", 1.0),
    ("step time, s", "step_time_s", 1.0),
    ("memory per device, GB", "peak_memory_bytes", 1e9),
    ("traffic per step, MB", "traffic_bytes", 1e6),
    ("exposed communication, %", "exposed_communication_share", 0.01),
    ("bubble, %", "bubble_share", 0.01),
)
COUNTED_FIGURES = (
    ("memory per device, GB", "peak_memory_bytes", 1e9),
    ("state per device, MB", "state_bytes", 1e6),
    ("traffic per step, MB", "traffic_bytes", 1e6),
)


@dataclass(frozen=True)
class Approach:
    """One section. run: its row in the example report; counted: that in COUNTED, if it has none there.

    measure: the command of the run in COUNTED.
    """

    name: str
    title: str
    command: str
    text: str
    run: str | None = None
    counted: str = ""
    measure: str = ""
    image: str | None = None  # the end of the drawing's name, if not `name`

    @property
    def drawing(self) -> Path:
        return IMAGES / f"approach_{self.image or self.name}.svg"


APPROACHES = (
    Approach(
        "single", "One device", "strategy=single model=20m",
        "One device holds everything. It is the reference: every other approach computes the same losses "
        "and weights.",
        run="single 1 x 1",
    ),
    Approach(
        "data", "Data parallel", "strategy=data model=20m nodes=4",
        "Each device has the whole model and a part of the batch. The mean of the gradients is the only "
        "traffic. It starts during the backward pass, a bucket of 25 MB at a time.",
        run="data 4 x 1",
    ),
    Approach(
        "parameter_server", "Data parallel with a parameter server",
        "strategy=parameter_server model=20m nodes=4",
        "Rank 0 has the weights and the optimizer. Every worker sends its gradients there and receives "
        "the new weights, so the server's link carries twice the weights for each worker. Workers have no "
        "state of the optimizer. With `strategy.dedicated_server=false`, rank 0 also trains.",
        run="parameter_server 4 x 1",
    ),
    Approach(
        "dataparallel", "Data parallel in one process", "strategy=dataparallel model=20m gpus_per_node=4",
        "One process drives all devices of a node, and everything passes through the first device "
        "(nn.DataParallel). The picture shows GPUs. The figures are of threads on CPUs, which share one "
        "model, so that no weight is copied.",
        run="dataparallel 1 x 4",
    ),
    Approach(
        "fsdp", "Sliced data parallel", "strategy=fsdp model=20m nodes=4",
        "Each device has a part of the batch, and keeps a slice of each weight, gradient and optimizer "
        "state (ZeRO-3). It collects the weights of a block just before it needs them, and frees them "
        "afterwards. With `strategy.reshard=false` it keeps them from the forward to the backward pass.",
        run="fsdp 4 x 1",
    ),
    Approach(
        "hsdp", "Slices inside a node, replicas across nodes",
        "strategy=hsdp model=20m nodes=2 gpus_per_node=2",
        "Weights are collected inside a node only. Between nodes, each device exchanges the gradients of "
        "its own slice once a step.",
        counted="hsdp 2 x 2", measure="-m jobs=communication",
    ),
    Approach(
        "tensor", "Tensor parallel", "strategy=tensor model=20m nodes=4",
        "Each device computes its columns or rows of every layer, for all samples. Before and after each "
        "attention and each feed-forward layer, devices exchange activations. That needs fast links: keep "
        "it inside a node.",
        run="tensor 4 x 1",
    ),
    Approach(
        "model", "Model parallel", "strategy=model model=20m nodes=4",
        "Each device has some of the blocks. The batch passes them as one piece, so one device works at a "
        "time. This model uses the weight of its first layer again in its last one: both ends sum that "
        "gradient.",
        run="model 4 x 1",
    ),
    Approach(
        "pipeline", "Pipeline", "strategy=pipeline model=20m nodes=4",
        "The same parts of the model, but the batch is cut into microbatches, so that all devices work at "
        "the same time on different ones. The messages are the same; the idle time (bubble) is smaller.",
        run="pipeline 4 x 1",
    ),
    Approach(
        "context", "Context parallel", "strategy=context model=20m nodes=4",
        "Each device has two slices of every sequence, an early and a late one, which balances the causal "
        "attention. Keys and values go around the ring in every attention.",
        run="context 4 x 1",
    ),
    Approach(
        "expert", "Expert parallel", "strategy=expert model=moe_tiny nodes=4",
        "Each device has a part of the batch and some of the experts. Tokens travel to the devices of "
        "their experts and back. All other weights are replicas.",
        counted="expert 4 x 1", measure="strategy=expert model=moe_tiny nodes=4 training.steps=7",
    ),
    Approach(
        "tile", "Tiles of images", "strategy=tile model=segmenter data=cells gpus_per_node=4",
        "Each device has one tile of every image. Before each convolution it fetches the pixels beyond "
        "its borders. BatchNorm takes its moments over all tiles.",
        counted="tile 1 x 4", measure="-m jobs=tiles",
    ),
    Approach(
        "hybrid", "Hybrid", "strategy=hybrid model=20m nodes=4 strategy.pipeline=2",
        "Two or more approaches at once: here two pipelines, each with two stages, that average their "
        "gradients.",
        run="hybrid 4 x 1",
    ),
    Approach(
        "hybrid", "Three axes at once", "strategy=hybrid model=20m nodes=2 gpus_per_node=4 strategy.tensor=2",
        "The layers are split between neighbours inside a node, replicas are inside a node too, and the "
        "pipeline crosses nodes: the approach with the most traffic has the nearest devices.",
        counted="hybrid 2 x 4",
        measure="strategy=hybrid model=20m nodes=2 gpus_per_node=4 strategy.tensor=2 training.steps=7",
        image="hybrid_three",
    ),
)  # fmt: skip


@cache
def setup_of(command: str) -> tuple[Setup, int, int]:
    """The setup of a command, its nodes, and its devices of a node."""
    config = compose([*shlex.split(command), "launcher=local"])
    strategy = config.strategy
    setup = Setup(
        strategy,
        layout_of(strategy, devices=config.devices),
        model=model_facts(config.model),
        gpus=True if strategy.execution == DATAPARALLEL else None,
    )
    if setup.uncovered:
        raise ValueError(f"{command}: {setup.uncovered}")
    return setup, config.nodes, config.gpus_per_node


def drawing(approach: Approach) -> str:
    setup, _, gpus_per_node = setup_of(approach.command)
    return draw(setup, devices_per_node=gpus_per_node, title=approach.command)


def page() -> str:
    parts = [INTRODUCTION.strip()]
    for approach in APPROACHES:
        setup, *_ = setup_of(approach.command)
        parts += [
            f"## {approach.title}",
            f"```bash\npython -m hpc_parallel.run {approach.command}\n```",
            fill(approach.text, 120),
            f"![{approach.title}: who holds what and who sends what to whom, {layout_text(setup)}]"
            f"(images/{approach.drawing.name})",
            figures(approach),
        ]
    return "\n\n".join(parts) + "\n"


def layout_text(setup: Setup) -> str:
    return "a server and " * servers(setup.strategy) + str(setup.layout)


def figures(approach: Approach) -> str:
    """The measured table; without speeds for an approach that is not in the example report."""
    if approach.run is not None:
        return table(approach, file=REPORT, run=approach.run, columns=FIGURES)
    command = f"`python -m hpc_parallel.run {approach.measure}`"
    note = (
        f"Counted in a run of {command} on 2 CPU cores. Its speed is not in the example report; "
        "that command, then `show` or `report`, measures it."
    )
    counted = table(approach, file=COUNTED, run=approach.counted, columns=COUNTED_FIGURES)
    return f"{counted}\n\n{fill(note, 120, break_long_words=False, break_on_hyphens=False)}"


def table(approach: Approach, *, file: Path, run: str, columns: tuple[tuple[str, str, float], ...]) -> str:
    """columns: title, key and unit of each."""
    with file.open(newline="") as lines:
        rows = {row["run"]: row for row in csv.DictReader(lines)}
    row = rows[run]
    setup, nodes, gpus_per_node = setup_of(approach.command)
    shape = (layout_text(setup), str(nodes), str(gpus_per_node))
    if (row["layout"], row["nodes"], row["gpus_per_node"]) != shape:
        raise ValueError(f"{approach.command} has another layout than {run} in {file.name}")
    cells = [figure(row, key, unit, setup) for _, key, unit in columns]
    titles = [title for title, *_ in columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---:"] * len(columns), cells))


def figure(row: dict[str, str], key: str, unit: float, setup: Setup) -> str:
    """A figure with three digits; a dash where the approach has none."""
    nothing = (key == "bubble_share" and setup.layout.pipeline == 1) or (
        key != "peak_memory_bytes" and "communication" in key and setup.strategy.execution == DATAPARALLEL
    )
    if nothing or (setup.layout.devices == 1 and ("communication" in key or "traffic" in key)):
        return "-"
    if not row[key]:
        return "not measured"
    limits = [row.get(f"{key}_{end}") for end in ("low", "high")]  # its spread
    spread = f" ({' to '.join(digits(float(limit), 3) for limit in limits if limit)})" if all(limits) else ""
    return digits(float(row[key]) / unit, 3) + spread


def files() -> Iterator[tuple[Path, str]]:
    """Every generated file with its content."""
    yield PAGE, page()
    for approach in APPROACHES:
        yield approach.drawing, drawing(approach)


def problems() -> Iterator[str]:
    """Yields one line for each stale file."""
    expected = dict(files())
    for path, content in expected.items():
        if not path.exists() or path.read_text() != content:
            yield f"docs/{path.relative_to(DOCS)} is stale. Try python docs/diagrams.py."
    for path in sorted(set(IMAGES.glob("approach_*.svg")) - set(expected)):
        yield f"docs/{path.relative_to(DOCS)} belongs to no approach. Delete it."


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    if not parser.parse_args().check:
        for path, content in files():
            path.write_text(content)
    stale = list(problems())
    print("\n".join(stale) or "docs/approaches.md and its drawings are current.")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
