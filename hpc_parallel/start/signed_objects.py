"""Signs pickles between ranks, and verifies the signature before a pickle is loaded.

This package sends only JSON and tensors, but torch's distributed checkpoints and pipelines exchange pickled
objects through torch's object collectives. Any user of these hosts can connect to gloo's sockets.
"""

from __future__ import annotations

import hmac
import io
from typing import Any, BinaryIO

from torch.distributed import distributed_c10d

_MAC_BYTES = 32
_PICKLER, _UNPICKLER = distributed_c10d._pickler, distributed_c10d._unpickler


class ForeignObjectError(RuntimeError):
    """Received a pickle that no rank of this start sent. It was not loaded."""

    def __init__(self) -> None:
        super().__init__(
            "another process sent an object in place of a rank: it is not signed with this start's secret, "
            "and was not loaded. Other users of these hosts can connect to gloo's ports. Try to start the "
            "run again; if the same happens, ask the administrators who connects."
        )


def require_signatures(secret: bytes) -> None:
    """Make torch's object collectives in this process sign what they send and verify what they receive.

    Replaces `_pickler` and `_unpickler` of torch.distributed.distributed_c10d. Every object collective of
    torch 2.11 to 2.13 uses these private names, and torch has no public way. Raises RuntimeError if this
    torch does not use them.
    """
    _require_hooks()

    class Signing:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = io.BytesIO()
            _PICKLER(content).dump(value)
            self._file.write(hmac.digest(secret, content.getvalue(), "sha256") + content.getvalue())

    class Verifying:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            mac, content = self._file.read(_MAC_BYTES), self._file.read()
            if not hmac.compare_digest(mac, hmac.digest(secret, content, "sha256")):
                raise ForeignObjectError
            return _UNPICKLER(io.BytesIO(content)).load()

    distributed_c10d._pickler = Signing  # type: ignore[assignment]
    distributed_c10d._unpickler = Verifying  # type: ignore[assignment]


def _require_hooks() -> None:
    """Raise RuntimeError unless these functions of torch use these names. No other function uses them."""
    for function, hook in (("_object_to_tensor", "_pickler"), ("_tensor_to_object", "_unpickler")):
        code = getattr(getattr(distributed_c10d, function, None), "__code__", None)
        if code is None or hook not in code.co_names:
            raise RuntimeError(
                "this torch pickles objects between ranks in a way that hpc_parallel does not know, so it "
                "can't verify who sent them. Try torch 2.11 to 2.13."
            )
