"""What failures cost a training, and how often it should save, from `cluster.node_mtbf_hours`.

J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006): failures come independently of each other, at any time, also while a run restarts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_parallel.planning.storage_times import StorageTimes

HOUR_S = 3600.0
# Assumed: from a failure to the first step of the next start, beside the reading of the state.
RESTART_S = 120.0


@dataclass(frozen=True)
class Failures:
    """Failures of a planned run.

    mtbf_s: the mean time between failures of any of its nodes. save_s: how long a save delays the steps.
    restart_s: what a failure costs beside the steps that are computed again. least_steps: the fewest steps
    between two saves that do not wait for each other.
    """

    mtbf_s: float
    save_s: float
    restart_s: float
    step_s: float
    least_steps: int

    def useful_share(self, every: int) -> float:
        """The share of time that goes to steps that count, with a save each `every` steps."""
        work_s = every * self.step_s
        lost = self.mtbf_s * math.exp(self.restart_s / self.mtbf_s)
        exponent = (work_s + self.save_s) / self.mtbf_s
        return 0.0 if exponent > 700 else work_s / (lost * math.expm1(exponent))  # e^709 is the largest float

    @property
    def best_every(self) -> int:
        """The number of steps between two saves with the largest useful share."""
        mtbf_s, save_s = self.mtbf_s, self.save_s
        ratio = save_s / (2 * mtbf_s)
        best_s = mtbf_s
        if ratio < 1:
            best_s = math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s
        return max(self.least_steps, round(best_s / self.step_s), 1)


def failures_of(times: StorageTimes) -> Failures | None:
    """None without `cluster.node_mtbf_hours`, or if it is not known how long a save takes."""
    hours, nodes = times.config.cluster.node_mtbf_hours, times.config.nodes
    if hours is None or times.unknown_saves() is not None:
        return None
    delay_s, written_s = times.save_s()
    # A failure during a save that runs beside the steps loses them too.
    restart_s = RESTART_S + written_s + (written_s if times.config.training.checkpoint_async else 0.0)
    least_steps = math.ceil(written_s / times.step_s)
    return Failures(hours * HOUR_S / nodes, delay_s, restart_s, times.step_s, least_steps)
