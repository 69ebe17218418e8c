"""A store with signed values: only processes that know the start's secret can write to it.

torch's TCPStore answers anyone who connects to its port. `SignedStore` wraps it and gives process groups
the same interface. It stores each value as records with an HMAC-SHA256 (RFC 2104) over the key and the
value, and verifies every record that it reads. Other users can still delete keys, overwrite them,
and restore an older signed value of the same key. The start then usually fails, but it never uses a value
that no rank wrote. torch counts the ranks of a new group by `add`; each `add` is one record.

Between ranks, pickles are signed and verified too: this package sends only JSON and tensors, but torch's
distributed checkpoints and pipelines exchange pickled objects through its object collectives, and any user
of these hosts can connect to gloo's sockets.
"""

from __future__ import annotations

import hmac
import io
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from struct import Struct
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

from torch.distributed import Store, distributed_c10d

from hpc_parallel.record.run_folder import RunFolder
from hpc_parallel.record.safe_read import read_text

SECRET_BYTES = 32
_SET, _APPEND, _ADD = b"=", b">", b"+"  # kinds of records
_HEADER = Struct(">c16sI")  # kind, nonce, length of the payload
_MAC_BYTES = 32
_AMOUNT = Struct(">q")
_NO_NONCE = bytes(16)
_PICKLER, _UNPICKLER = distributed_c10d._pickler, distributed_c10d._unpickler


class ForgedError(RuntimeError):
    """The store has a value that no rank of this start wrote."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"another process wrote to the store of this start: the value of {key!r} is not signed by a "
            "rank. The value was not used. Other users of these hosts can connect to the store's port. "
            "Try to start the run again; if the same happens, ask the administrators who connects."
        )
        self.key = key

    def __reduce__(self) -> tuple[type[ForgedError], tuple[str]]:
        return type(self), (self.key,)


@dataclass(frozen=True)
class _Record:
    kind: bytes
    nonce: bytes
    payload: bytes


class SignedStore(Store):
    """Wraps `store`; all clients of one start must have the same `secret`.

    A key's stored bytes are a sequence of records: one that sets the value, and those that append to it or
    add to it. A record that appends or adds carries a random nonce, so that a repeated record is detected.
    A call takes an idle connection, or opens one, because TCPStore holds a lock for as long as a `get` waits.
    So there is one connection for each simultaneous call. One for each thread would be too many: gloo has two
    threads for each group, and rank 0's host serves the connections of all ranks.

    The methods are those that torch's C++ code calls (PythonStore in torch/csrc/distributed/c10d/init.cpp).
    Each raises ForgedError for a value that fails the verification.
    """

    timeout: timedelta  # missing in torch's stubs

    def __init__(self, store: Any, *, secret: bytes) -> None:
        """`store`: a torch.distributed.Store; torch's stubs lack half of its methods."""
        super().__init__()
        self._secret = secret
        self._first = store
        self._idle = [store]
        self.set_timeout(store.timeout)

    def derived_secret(self, purpose: str) -> bytes:
        """Returns another secret of this start, for `purpose`."""
        return hmac.digest(self._secret, b"derived/" + purpose.encode(), "sha256")

    def clone(self) -> Store:
        """Returns itself, because several threads can use it at once."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        with self._connection() as connection:
            connection.set(key, self._set_record(key, value))

    def get(self, key: str) -> bytes:
        with self._connection() as connection:
            stored = connection.get(key)
        return self._value(key, stored)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        records = [self._set_record(key, value) for key, value in zip(keys, values, strict=True)]
        with self._connection() as connection:
            connection.multi_set(list(keys), records)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with self._connection() as connection:
            stored = connection.multi_get(list(keys))
        return [self._value(key, raw) for key, raw in zip(keys, stored, strict=True)]

    def append(self, key: str, value: str | bytes) -> None:
        self._append(key, _APPEND, _bytes(value))

    def add(self, key: str, amount: int) -> int:
        """Returns the sum of all amounts up to this one, in the order in which they reached the server."""
        if amount == 0:  # reads, and adds no record
            with self._connection() as connection:
                stored = connection.get(key) if connection.check([key]) else None
            return 0 if stored is None else int(self._value(key, stored) or 0)
        nonce = self._append(key, _ADD, _AMOUNT.pack(amount))
        with self._connection() as connection:
            stored = connection.get(key)
        return int(self._value(key, stored, until=nonce))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        before = self._set_record(key, expected) if expected else b""  # empty: the key must be new
        with self._connection() as connection:
            stored = connection.compare_set(key, before, self._set_record(key, desired))
        return self._value(key, stored)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist. Verifies their values."""
        with self._connection() as connection:
            if not connection.check(list(keys)):
                return False
        self.multi_get(keys)
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Verifies their values."""
        with self._connection() as connection:
            connection.wait(list(keys), timeout or self.timeout)
        self.multi_get(keys)

    def delete_key(self, key: str) -> bool:
        with self._connection() as connection:
            return bool(connection.delete_key(key))

    def num_keys(self) -> int:
        with self._connection() as connection:
            return int(connection.num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  # torch's C++ code uses these names

    def has_extended_api(self) -> bool:
        """True: `append`, `multi_get` and `multi_set` exist, so gloo reads all addresses at once."""
        return True

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        try:
            connection = self._idle.pop()
        except IndexError:  # other threads use all connections
            connection = self._first.clone()
        try:
            if connection.timeout != self.timeout:
                connection.set_timeout(self.timeout)
            yield connection
        finally:
            self._idle.append(connection)

    def _append(self, key: str, kind: bytes, payload: bytes) -> bytes:
        nonce = secrets.token_bytes(len(_NO_NONCE))
        with self._connection() as connection:
            connection.append(key, self._signed(key, _Record(kind, nonce, payload)))
        return nonce

    def _set_record(self, key: str, value: str | bytes) -> bytes:
        """A record that sets a value. It has no nonce, because `compare_set` compares stored bytes."""
        return self._signed(key, _Record(_SET, _NO_NONCE, _bytes(value)))

    def _signed(self, key: str, record: _Record) -> bytes:
        body = _HEADER.pack(record.kind, record.nonce, len(record.payload)) + record.payload
        return body + self._mac(key, body)

    def _mac(self, key: str, body: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(4, "big") + name + body, "sha256")

    def _value(self, key: str, stored: bytes, *, until: bytes | None = None) -> bytes:
        """Returns the value of all records; with `until`, of the records up to the one with this nonce."""
        value, nonces = b"", set[bytes]()
        for record in self._verified(key, stored):
            if record.nonce in nonces:
                raise ForgedError(key)
            nonces.add(record.nonce)
            if record.kind == _ADD:
                value = str(int(value or 0) + cast(int, _AMOUNT.unpack(record.payload)[0])).encode()
            else:
                value += record.payload
            if record.nonce == until:
                return value
        if until is not None:  # our record was removed
            raise ForgedError(key)
        return value

    def _verified(self, key: str, stored: bytes) -> Iterator[_Record]:
        if not stored:
            raise ForgedError(key)
        start = 0
        while start < len(stored):
            if start + _HEADER.size > len(stored):
                raise ForgedError(key)
            kind, nonce, length = _HEADER.unpack_from(stored, start)
            end = start + _HEADER.size + length
            body, mac = stored[start:end], stored[end : end + _MAC_BYTES]
            if not hmac.compare_digest(mac, self._mac(key, body)) or (kind == _SET and start > 0):
                raise ForgedError(key)
            yield _Record(kind, nonce, body[_HEADER.size :])
            start = end + _MAC_BYTES


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


class ForeignObjectError(RuntimeError):
    """Received a pickle that no rank of this start sent. It was not loaded."""

    def __init__(self) -> None:
        super().__init__(
            "another process sent an object in place of a rank: it is not signed with this start's secret, "
            "and was not loaded. Other users of these hosts can connect to its ports. Try to start the "
            "run again; if the same happens, ask the administrators who connects."
        )


def require_signatures(secret: bytes) -> None:
    """Make torch's object collectives in this process sign what they send and verify what they receive.

    Replaces `_pickler` and `_unpickler` of torch.distributed.distributed_c10d. Every object collective of
    torch 2.11 to 2.14 uses these private names, and torch has no public way. Raises RuntimeError if this
    torch does not use them.
    """
    _require_hooks()

    class Signing:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def dump(self, value: Any) -> None:
            content = io.BytesIO()
            _PICKLER(content).dump(value)
            self._file.write(_sign(secret, content.getvalue()))

    class Verifying:
        def __init__(self, file: BinaryIO) -> None:
            self._file = file

        def load(self) -> Any:
            return _UNPICKLER(io.BytesIO(_verify(secret, self._file.read()))).load()

    distributed_c10d._pickler = Signing  # type: ignore[assignment]
    distributed_c10d._unpickler = Verifying  # type: ignore[assignment]


def _sign(secret: bytes, content: bytes) -> bytes:
    return hmac.digest(secret, content, "sha256") + content


def _verify(secret: bytes, message: bytes) -> bytes:
    mac, content = message[:_MAC_BYTES], message[_MAC_BYTES:]
    if not hmac.compare_digest(mac, hmac.digest(secret, content, "sha256")):
        raise ForeignObjectError
    return content


def run_torchrun(arguments: Sequence[str]) -> None:
    """Run torchrun, which opens only pickles that are signed with the secret in the run folder.

    As long as the ranks run, the torchruns of a start exchange pickles through a TCPStore.
    arguments: the run folder, then the words of torchrun.
    """
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    run_folder, *words = arguments
    secret = bytes.fromhex(read_text(RunFolder(Path(run_folder)).torchrun_secret))
    plain: Any = dynamic_rendezvous.pickle
    dynamic_rendezvous.pickle = SimpleNamespace(  # type: ignore[assignment]
        dumps=lambda value: _sign(secret, plain.dumps(value)),
        loads=lambda message: plain.loads(_verify(secret, message)),
        PickleError=plain.PickleError,
    )
    sys.argv[0] = "torchrun"  # its name in its own messages
    run.main(words)


def _require_hooks() -> None:
    """Raise RuntimeError unless these functions of torch use these names. No other function uses them."""
    for function, hook in (("_object_to_tensor", "_pickler"), ("_tensor_to_object", "_unpickler")):
        code = getattr(getattr(distributed_c10d, function, None), "__code__", None)
        if code is None or hook not in code.co_names:
            raise RuntimeError(
                "this torch pickles objects between ranks in a way that hpc_parallel does not know, so it "
                "can't verify who sent them. Try torch 2.11 to 2.14."
            )
