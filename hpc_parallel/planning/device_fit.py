"""Derive hardware values from the rows of `task=calibrate`: peaks, and coefficients that fit all rows.

The formulas of a step give the planned time of a row, so a coefficient means the same in a row and a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpc_parallel.layout.counts import DecoderSizes
from hpc_parallel.planning.coefficient_fit import fit
from hpc_parallel.planning.hardware import MEASURED_BY, Hardware
from hpc_parallel.planning.operations import NUMBER_BYTES, MatrixProduct, Move
from hpc_parallel.planning.pipeline_orders import BACKWARD, FORWARD
from hpc_parallel.planning.step_time import StepTerms
from hpc_parallel.planning.work import Work

PRODUCT, ELEMENTWISE, LAUNCH, UPDATE = "product", "elementwise", "launch", "update"
BLOCK_FORWARD, BLOCK_BACKWARD, ENDS = "block forward", "block backward", "embedding and head"
# Of the blocks, and of the products that are fitted.
FITTED_PRECISION = {"cpu": "float32", "cuda": "bfloat16"}
VOCABULARY = 256  # of the measured blocks and ends
HEADS, HEAD_DIM = 4, 128  # the fewest heads, and the widest: fused attention takes no wider heads
ERROR = 0.1  # the relative error of the formulas
# Coefficient -> the tolerance of its logarithm: a file of another device may be far off.
TOLERANCES = {
    "products.peak_share": 0.5, "products.depth": 1.0, "traffic.kernel_s": 2.0, "traffic.elementwise": 1.0,
    "traffic.optimizer_bytes": 0.7, "host.forward_s": 2.0, "host.backward_s": 2.0, "host.microbatch_s": 2.0,
    "host.step_s": 2.0,
}  # fmt: skip


@dataclass(frozen=True)
class DeviceRow:
    """One measurement.

    size: the side of a product, the bytes that are moved, the weights of an update, or the width of a block.
    tokens: the tokens of a sample, for a row of a block.
    """

    kind: str
    precision: str
    size: int
    time_s: float
    tokens: int = 1


@dataclass(frozen=True)
class Machine:
    """The values that are not fitted.

    devices: how many devices measured at the same time. spread: the relative standard deviation of their
    speeds.
    """

    name: str
    kind: str
    memory_bytes: float
    multiprocessors: int
    node_devices: int
    devices: int
    shared_cores: int | None
    spread: float


def rate(row: DeviceRow) -> float:
    """FLOP/s of a product, bytes/s of elementwise work."""
    work = 2 * row.size**3 if row.kind == PRODUCT else row.size
    return work / row.time_s


def planned_s(row: DeviceRow, hardware: Hardware) -> float:
    """The time of a row by the formulas of a step."""
    peak, number_bytes = hardware.device.peak_flops[row.precision], NUMBER_BYTES[row.precision]
    if row.kind == PRODUCT:
        return MatrixProduct("", row.size, row.size, row.size, number_bytes).seconds(hardware, peak=peak)
    if row.kind in (ELEMENTWISE, LAUNCH):
        return Move("", row.size, 1).seconds(hardware, peak=peak)
    if row.kind == UPDATE:
        rate = hardware.device.memory_bytes_per_s * hardware.traffic.share
        return hardware.host.step_s + hardware.traffic.optimizer_bytes * row.size / rate
    step = StepTerms(_work(row), hardware)
    if row.kind == ENDS:
        blocks_s = step.block_s(FORWARD) + step.block_s(BACKWARD)
        return step.microbatch_s() - blocks_s
    return step.block_s(FORWARD if row.kind == BLOCK_FORWARD else BACKWARD)


def _work(row: DeviceRow) -> Work:
    """One block with embedding and head, on one device."""
    decoder = DecoderSizes(
        layers=1, dim=row.size, heads=heads_of(row.size), kv_heads=heads_of(row.size),
        ffn_dim=ffn_dim(row.size), vocabulary=VOCABULARY, sequence=row.tokens, ffn_matrices=3, flash=True,
    )  # fmt: skip
    return Work(
        decoder, tensor=1, data=1, pipeline=1, microbatch_size=1, microbatches=1, blocks=(1,),
        precision=row.precision, recomputations=0, blocking=False,
    )  # fmt: skip


def ffn_dim(width: int) -> int:
    """The width of the feed-forward network of the measured blocks."""
    return 3 * width


def heads_of(width: int) -> int:
    """The number of heads of the measured blocks."""
    return max(HEADS, width // HEAD_DIM)


def device_hardware(rows: Sequence[DeviceRow], machine: Machine, *, base: Hardware) -> Hardware:
    """The coefficients of a device. base: where the fit starts, and the values that no row measures.

    Raises ValueError if there is no product of the fitted precision or no elementwise row.
    """
    precision = FITTED_PRECISION[machine.kind]
    peaks = {
        one: max(rate(row) for row in rows if row.kind == PRODUCT and row.precision == one)
        for one in sorted({row.precision for row in rows if row.kind == PRODUCT})
    }
    if precision not in peaks:
        raise ValueError(f"no product of {precision} was measured")
    peaks.setdefault("float16", peaks.get("bfloat16", peaks[precision]))
    bandwidth = rate(max((row for row in rows if row.kind == ELEMENTWISE), key=lambda row: row.size))
    device = replace(
        base.device, name=machine.name, kind=machine.kind, peak_flops=peaks,
        memory_bytes=machine.memory_bytes, memory_bytes_per_s=bandwidth,
        multiprocessors=machine.multiprocessors, power_w=None,  # `base` has the power of another device
    )  # fmt: skip
    traffic, network = replace(base.traffic, share=1.0), replace(base.network, spread=machine.spread)
    node = replace(base.node, devices=1)  # while rows are planned
    start = replace(base, device=device, traffic=traffic, network=network, node=node, shared_cores=None)
    fitted = [row for row in rows if row.precision == precision or row.kind != PRODUCT]
    hardware, _ = fit(
        start,
        tolerances=TOLERANCES,
        measured_s=[row.time_s for row in fitted],
        planned_s=lambda trial: [planned_s(row, trial) for row in fitted],
        error=ERROR,
    )
    return replace(
        hardware,
        node=replace(base.node, devices=machine.node_devices),
        shared_cores=machine.shared_cores,
        calibration=f"{MEASURED_BY} on {machine.devices} devices",
    )
