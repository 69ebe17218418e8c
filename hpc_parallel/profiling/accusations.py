"""Every rank that was slow in a training, with the first and the last step in which it was slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpc_parallel.profiling.slow_ranks import SlowRank
from hpc_parallel.record.recorded_slow_ranks import MOST_ACCUSATIONS


class Accusations:
    """The slow ranks of earlier starts of the run, and those of this start."""

    def __init__(self, earlier: Sequence[Mapping[str, Any]], *, steps_done: int) -> None:
        """steps_done: the steps of earlier starts."""
        self._steps_done = steps_done
        self._records = {_key(record): dict(record) for record in earlier}

    def add(self, slow: Sequence[SlowRank], *, step: int) -> None:
        """Add the ranks that were slow in the 1-based `step` of this start. Their newest times are kept."""
        step += self._steps_done
        for rank in slow:
            record = rank.as_record()
            key = _key(record)
            if key not in self._records and len(self._records) >= MOST_ACCUSATIONS:
                continue
            first_step = self._records.get(key, {}).get("first_step", step)
            self._records[key] = record | {"first_step": first_step, "last_step": step}

    def as_records(self) -> list[dict[str, Any]]:
        return list(self._records.values())


def _key(record: Mapping[str, Any]) -> tuple[int, str, str]:
    return record["rank"], record["host"], record["cause"]
