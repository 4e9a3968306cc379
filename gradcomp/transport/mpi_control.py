"""The control channel of jobs that MPI started sends small values as MPI messages."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import Any

from gradcomp.core.errors import TransportError
from gradcomp.transport.control import ControlChannel
from gradcomp.transport.mpi_process import mpi_process, reason

#: The largest message; those of the exchanger and of users are far smaller.
MOST_VALUE_BYTES = 1 << 20
#: The head of a message: the Lamport clock at which its value was published, and the length of its key.
_HEAD = struct.Struct("<QI")


class MpiControl(ControlChannel):
    """Keeps every value on every rank: publishing sends it to all ranks, and a lookup first takes what has arrived.

    No call blocks. If a key gets two values, all ranks end with the one that is later by a Lamport clock, or from the
    higher rank if the clocks are equal. So a rank that publishes after it has seen another rank's value replaces that
    value everywhere, in whatever order they arrive.

    Construction is collective over ``ranks`` (None: all), on a communicator of its own. A rank that is killed ends the
    job through the launcher. A rank that is stopped sends nothing, which a lookup cannot tell from having published
    nothing.
    """

    def __init__(
        self, ranks: Sequence[int] | None = None, timeout_seconds: float = 600.0, *, world: int | None = None
    ) -> None:
        self._process = mpi_process(world)
        self._comm = self._process.communicator(ranks, timeout_seconds)
        self._clock = 0
        self._values: dict[str, tuple[int, int, bytes]] = {}
        self._sent: list[tuple[Any, bytes]] = []
        self._arriving: tuple[Any, bytearray, int] | None = None
        self._one_thread = threading.Lock()

    def publish(self, key: str, value: bytes) -> None:
        name = key.encode()
        assert _HEAD.size + len(name) + len(value) <= MOST_VALUE_BYTES, f"{key}: {len(value)} bytes"
        with self._one_thread:
            self._receive()
            self._clock += 1
            self._take(key, self._clock, self._comm.rank, value)
            message = _HEAD.pack(self._clock, len(name)) + name + value
            MPI = self._process.MPI
            try:
                with self._process.lock:
                    self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
                    for rank in range(self._comm.size):
                        if rank != self._comm.rank:
                            self._sent.append((self._comm.Isend([message, MPI.BYTE], rank, 0), message))
            except MPI.Exception as error:
                raise TransportError(f"{key} could not be published over MPI: {reason(error)}") from error

    def lookup(self, key: str) -> bytes | None:
        with self._one_thread:
            self._receive()
            found = self._values.get(key)
            return None if found is None else found[2]

    def _receive(self) -> None:
        """Store the values of all messages that have arrived."""
        MPI = self._process.MPI
        try:
            with self._process.lock:
                while (arriving := self._arriving or self._probe()) is not None:
                    request, message, source = self._arriving = arriving
                    if not request.Test():
                        return
                    self._arriving = None
                    self._parse(bytes(message), source)
        except MPI.Exception as error:
            raise TransportError(f"the control channel over MPI failed: {reason(error)}") from error

    def _probe(self) -> tuple[Any, bytearray, int] | None:
        MPI = self._process.MPI
        status = MPI.Status()
        found = self._comm.Improbe(MPI.ANY_SOURCE, 0, status)
        if found is None:
            return None
        length, source = status.Get_count(MPI.BYTE), status.Get_source()
        if not _HEAD.size <= length <= MOST_VALUE_BYTES:
            raise TransportError(
                f"rank {source} published a message of {length} bytes, which is not in "
                f"{_HEAD.size}..{MOST_VALUE_BYTES}"
            )
        message = bytearray(length)
        return found.Irecv([message, MPI.BYTE]), message, source

    def _parse(self, message: bytes, source: int) -> None:
        clock, length = _HEAD.unpack_from(message)
        name, value = message[_HEAD.size :][:length], message[_HEAD.size + length :]
        if len(name) != length:
            raise TransportError(f"rank {source} published a message that ends within its key")
        self._clock = max(self._clock, clock)
        self._take(name.decode(errors="replace"), clock, source, value)

    def _take(self, key: str, clock: int, source: int, value: bytes) -> None:
        before = self._values.get(key)
        if before is None or before[:2] < (clock, source):
            self._values[key] = (clock, source, value)
