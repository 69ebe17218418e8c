"""Which ranks exchange what in one step of a real run: seen where torch dispatches collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Seen = tuple[str, tuple[int, ...]]  # the kind of collective, and the ranks of its group; of a send both ends


@contextmanager
def watched() -> Iterator[Counter[Seen]]:
    """The collectives of this rank in the step that a run counts, without those of no bytes."""
    import torch.distributed as dist

    from hpc_parallel.profiling import measurement, traffic

    seen: Counter[Seen] = Counter()

    class Watching(traffic.Traffic):
        """Knows the peer of a send that it counts."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.call = function, args, kwargs
            return super().__torch_dispatch__(function, types, args, kwargs)

        def _count(self, kind: str, moved: traffic.Moved, group: dist.ProcessGroup) -> None:
            super()._count(kind, moved, group)
            ranks = tuple(dist.get_process_group_ranks(group))
            if kind == "send":
                if moved.sent:
                    peer = traffic.operator_arguments(*self.call)["dst"]
                    seen[kind, (dist.get_rank(), ranks[peer])] += 1
            elif moved.sent or moved.received:
                seen[kind, ranks] += 1

    with mock.patch.object(measurement, "Traffic", Watching):
        yield seen
