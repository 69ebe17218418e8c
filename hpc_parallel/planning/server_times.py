"""The exchange with a parameter server: its link carries the gradients and the weights of all workers.

strategies/parameter_server.py sends flat messages one after the other, so no two workers send at the same
time, and no device computes meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_parallel.planning.group_times import send_s
from hpc_parallel.planning.hardware import Hardware
from hpc_parallel.planning.kernels import Term

JOINED, ADDED, DIVIDED = 2, 3, 2  # reads and writes of a byte: copied, added to a sum, divided


@dataclass(frozen=True)
class Serving:
    """The exchange of a step between rank 0 and the `workers` ranks after it.

    trains: whether rank 0 also computes gradients. bytes: the bytes of all gradients, which equal the bytes
    of all weights. They are sent in `messages` messages.
    """

    workers: int
    trains: bool
    bytes: float
    messages: int

    def collect(self, hardware: Hardware) -> Term:
        """Every worker joins its gradients. The server receives them in turn, adds them, and divides."""
        added = self.workers if self.trains else self.workers - 1  # the first message starts the sum
        return self._term("gradients to the server", JOINED + ADDED * added + DIVIDED, hardware)

    def hand_out(self, hardware: Hardware) -> Term:
        """The server joins the weights and sends them to each worker in turn; the last worker copies them."""
        return self._term("weights from the server", 2 * JOINED, hardware)

    def _term(self, name: str, moved: int, hardware: Hardware) -> Term:
        """moved: the reads and writes of each byte. Nothing is sent at the same time."""
        inside = min(self.workers, hardware.node.devices - 1)
        size = self.bytes / self.messages
        counts = {False: inside, True: self.workers - inside}
        sent_s = self.messages * sum(
            count * send_s(size, hardware, crosses=crosses, senders=1) for crosses, count in counts.items()
        )
        copied_s = moved * self.bytes / (hardware.device.memory_bytes_per_s * hardware.traffic.share)
        text = (
            f"{self.messages} messages of {size:.4g} B in turn, {inside} workers on the server's node and "
            f"{counts[True]} on others: {sent_s:.4g} s + {moved} x {self.bytes:.4g} B / memory bandwidth"
        )
        return Term(name, sent_s + copied_s, text)
