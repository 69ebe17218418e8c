"""Common claims about each approach to parallel training, with the measured figure for or against each.

Claims that are wrong in general have a correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_parallel.report.measures import (
    NO_FIGURE,
    Evidence,
    Measure,
    Runs,
    ahead_of_all,
    hybrid_keeps_memory,
    level,
    near_ideal,
    slower_across_machines,
    versus,
    workers_hold_less_than_a_replica,
    workers_hold_less_than_the_server,
    workers_hold_no_optimizer,
    workers_near_ideal,
)


@dataclass(frozen=True)
class Claim:
    """A claim about an approach."""

    side: str  # pro or con
    text: str
    measure: Measure | None = None  # None if no figure could decide it
    correction: str = ""
    study: str = ""  # a study in `jobs/` whose runs have the figures for `measure`

    @property
    def command(self) -> str:
        """The command that measures the figures; empty if no figure could decide it."""
        return f"python -m hpc_parallel.run -m jobs={self.study}" if self.study else ""

    def judge(self, runs: Runs) -> Evidence:
        return self.measure(runs) if self.measure else Evidence(NO_FIGURE)


@dataclass(frozen=True)
class Approach:
    """An approach to parallel training, and the claims about it."""

    name: str
    strategy: str  # the value of `strategy=`
    feature: str
    claims: Sequence[Claim]


APPROACHES = (
    Approach(
        "data parallel, all-reduce", "data",
        "each device holds the whole model and takes a part of the batch; gradients are averaged",
        (
            Claim("pro", "close to n times as fast on up to 8 devices", near_ideal,
                  study="strong_scaling"),
            Claim("pro", "simple: the model's code does not change"),
            Claim("pro", "moves less than a parameter server does",
                  versus("data", "parameter_server", "busiest_rank_traffic_bytes", more=False),
                  "Not '1 x the weights': a ring all-reduce sends 2(n-1)/n x the weights from each device. "
                  "It avoids the server's link, which carries 2 x the weights for every worker.",
                  study="server_traffic"),
            Claim("con", "high communication overhead",
                  level("data", "exposed_communication_share"),
                  "Bytes alone do not show this: buckets are sent while the backward pass still runs, and "
                  "only exposed communication costs time.", study="communication"),
            Claim("con", "slower across machines than inside one", slower_across_machines,
                  "How much depends on the links, the size of the model and the time of a step.",
                  study="placement"),
            Claim("con", "the model must fit on one device: no memory is saved",
                  versus("fsdp", "data", "state_bytes", more=False),
                  "True only for replicas. fsdp is also data parallel and shards all of the model (the "
                  "figure compares them).", study="compare_strategies"),
        ),
    ),
    Approach(
        "data parallel, parameter server", "parameter_server",
        "workers send gradients to a server with the weights and the optimizer, and receive weights",
        (
            Claim("pro", "close to n times as fast with up to 8 workers", workers_near_ideal,
                  study="server_traffic"),
            Claim("pro", "workers hold no optimizer state", workers_hold_no_optimizer,
                  study="server_traffic"),
            Claim("pro", "a worker needs less memory than the server", workers_hold_less_than_the_server,
                  "With AdamW in float32 a worker holds half of what the server holds: weights and gradients "
                  "without two moments. Its activations come on top; a dedicated server has none.",
                  study="server_traffic"),
            Claim("pro", "a worker needs less memory than a replica with its own optimizer",
                  workers_hold_less_than_a_replica,
                  "The same half. The model must still fit on each worker.", study="server_traffic"),
            Claim("con", "synchronisation is slow with many devices",
                  versus("parameter_server", "data", "exposed_communication_s", more=True),
                  study="server_traffic"),
            Claim("con", "moves 2 x the weights for every worker, all through the server",
                  versus("parameter_server", "data", "busiest_rank_traffic_bytes", more=True),
                  study="server_traffic"),
        ),
    ),
    Approach(
        "data parallel, threads (nn.DataParallel)", "dataparallel",
        "one process drives all devices of a node and sends batch and weights from the first device",
        (
            Claim("pro", "one line of code, no launcher"),
            Claim("con", "the first device is the bottleneck",
                  versus("dataparallel", "data", "samples_per_s", more=False),
                  "Its successor, DistributedDataParallel, does not 'synchronise only the weights': it "
                  "averages gradients, and the weights stay equal because they start equal.",
                  study="thread_bottleneck"),
        ),
    ),
    Approach(
        "model parallel", "model",
        "layers split over the devices, which work one after another",
        (
            Claim("pro", "trains models that one device can't hold",
                  versus("model", "single", "state_bytes", more=False), study="compare_strategies"),
            Claim("pro", "uses the strengths of different devices", None,
                  "Not true today: the devices of a cluster are alike, and cuts make the stages equal."),
            Claim("con", "devices are idle", level("model", "bubble_share"),
                  study="compare_strategies"),
            Claim("con", "dependencies between devices"),
        ),
    ),
    Approach(
        "pipeline parallel", "pipeline",
        "the same split, with microbatches that keep all stages busy at the same time",
        (
            Claim("pro", "less idle time than layers in turn",
                  versus("pipeline", "model", "bubble_share", more=False), study="compare_strategies"),
            Claim("pro", "uses the devices well", versus("pipeline", "model", "samples_per_s", more=True),
                  study="compare_strategies"),
            Claim("pro", "moves little: activations at the cuts",
                  versus("pipeline", "data", "traffic_bytes", more=False), study="compare_strategies"),
            Claim("con", "still a bubble, (P-1)/(M+P-1) of the schedule with GPipe and 1F1B",
                  level("pipeline", "bubble_share"),
                  "'Processed in sequence' is true for a sample, not for a batch: stages work on several "
                  "microbatches at once.", study="compare_strategies"),
            Claim("con", "schedules and data flow are complex"),
        ),
    ),
    Approach(
        "tensor parallel", "tensor",
        "every layer split over the devices, which exchange activations in each layer",
        (
            Claim("pro", "less memory for each device", versus("tensor", "data", "state_bytes", more=False),
                  study="compare_strategies"),
            Claim("con", "communicates in every layer, hidden by nothing: for fast links only",
                  versus("tensor", "data", "exposed_communication_s", more=True),
                  "Often called 'model parallel', but its devices do not wait for each other in turn.",
                  study="compare_strategies"),
        ),
    ),
    Approach(
        "hybrid", "hybrid",
        "pipeline over nodes, tensor inside a node, replicas of both",
        (
            Claim("pro", "keeps the memory of model parallelism", hybrid_keeps_memory,
                  "With as many parts of the model. Replicas save nothing: a device of two replicas in two "
                  "parts holds twice as much as a device of one replica in four parts.",
                  study="communication"),
            Claim("pro", "least overhead",
                  ahead_of_all("hybrid", "exposed_communication_s", best=min),
                  "Not in general: a product has the overhead of each factor. It is best if no single factor "
                  "fits the model or the links.", study="communication"),
            Claim("pro", "highest efficiency", ahead_of_all("hybrid", "samples_per_s", best=max),
                  study="compare_strategies"),
            Claim("con", "complex, and needs fast links inside a node"),
        ),
    ),
    Approach(
        "tile parallel", "tile",
        "images split into tiles, one per device, with the same weights",
        (
            Claim("pro", "images that one device can't hold",
                  versus("tile", "single", "peak_memory_bytes", more=False), study="tiles"),
            Claim("con", "borders need care: neighbours exchange halos",
                  level("tile", "exposed_communication_share"),
                  "Tiles that are computed separately are wrong at every border and in BatchNorm. Here the "
                  "result equals one device.", study="tiles"),
        ),
    ),
)  # fmt: skip


def judged(runs: Runs) -> list[tuple[Approach, list[tuple[Claim, Evidence]]]]:
    return [(approach, [(claim, claim.judge(runs)) for claim in approach.claims]) for approach in APPROACHES]
