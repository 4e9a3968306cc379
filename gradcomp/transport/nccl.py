"""NCCL as a transport, for ranks that each have a GPU of their own.

Messages that this transport made room for stay on the device: only their headers are copied, up before they are sent
and back when they have come (see :mod:`gradcomp.kernels.cuda.mirrors`). Others are the host's, as over every transport:
they are copied to the device, exchanged there and copied back. All of it is in the order of one stream that belongs to
the transport; a poll asks whether the stream has come that far. Whoever computes what is sent has waited for it.

**Connections.** NCCL connects two ranks when they first talk, and makes the caller wait for the other one meanwhile. So
construction lets all of them talk; no call after that waits.

**Failure.** A poll asks NCCL too. What NCCL cannot see, a rank that is stopped or killed on the same host, the engine's
watch finds. Abandoning aborts the communicator: its kernels leave the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import TransportError
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import is_mirror, mirror
from gradcomp.kernels.devices import Device
from gradcomp.transport.base import Allocator, Bytes, Handle, Messages, Transport, host_allocator, parts_of

Array = npt.NDArray[Any]

_BOUNDARY = 16  # of messages in staging memory: elements of sums must be aligned


class Communicator(Protocol):
    """A rank of an NCCL communicator. Operations run on the driver's stream, on its memory.

    :class:`gradcomp.transport.nccl_cupy.CupyCommunicator` is the real one. All calls raise TransportError.
    """

    rank: int
    size: int
    driver: Driver

    def together(self) -> AbstractContextManager[None]:
        """What is called inside starts as one: no order among its messages."""
        ...

    def send(self, address: int, nbytes: int, to: int) -> None:
        """Start to send bytes of the device's memory to a rank."""
        ...

    def recv(self, address: int, nbytes: int, source: int) -> None:
        """Start to receive bytes from a rank."""
        ...

    def add_up(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        """Start a sum over ranks, in place; float32 or float64."""
        ...

    def check(self) -> None:
        """Raise if NCCL has seen a failure."""
        ...

    def abort(self) -> None:
        """End what is under way and give the communicator up. Does not wait."""
        ...

    def destroy(self) -> None:
        """Release it; nothing is under way."""
        ...


class _Staging:
    """The messages of an operation on their way between the host and the device.

    Messages of the host lie in pinned memory as they do on the device, what is sent before what is received: one copy
    each way. Of those that lie on the device their headers are copied, one by one. A message that is both sent and
    received is so in place. Pinned memory must stay until the stream is behind the copies.
    """

    def __init__(self, driver: Driver, sends: Sequence[Array], recvs: Sequence[Array]) -> None:
        self._driver = driver
        self._kept = sends, recvs
        sent, received = ({_key(message): message for message in messages} for messages in (sends, recvs))
        self._places: dict[tuple[int, int], int] = {}
        at = 0
        for key, message in (sent | received).items():
            if not is_mirror(message):
                self._places[key] = at
                at += -(-message.nbytes // _BOUNDARY) * _BOUNDARY
        self._block = driver.allocate(max(at, 1))
        self._sent, self._received = (
            [
                (message.view(np.uint8), self._places[key])
                for key, message in each.items()
                if key in self._places
            ]
            for each in (sent, received)
        )
        self._up, self._down = (
            [part for message in each.values() if is_mirror(message) for part in message.host_parts()]
            for each in (sent, received)
        )
        self._headers_at = at, at + sum(len(part) for part, _ in self._up)
        self._pinned = driver.pinned(self._headers_at[1] + sum(len(part) for part, _ in self._down))

    def address(self, message: Array) -> int:
        """Where it is on the device."""
        return message.address if is_mirror(message) else self._block.address + self._places[_key(message)]

    def up(self) -> None:
        """Start to copy what is sent."""
        for message, at in self._sent:
            self._pinned[at : at + len(message)] = message
        if self._sent:
            first, end = _span(self._sent)
            self._driver.upload(self._block.address + first, self._pinned[first:end])
        for part, staged, address in self._headers(self._up, self._headers_at[0]):
            staged[:] = part
            self._driver.upload(address, staged)

    def down(self) -> None:
        """Start to copy what is received."""
        if self._received:
            first, end = _span(self._received)
            self._driver.download(self._pinned[first:end], self._block.address + first)
        for _, staged, address in self._headers(self._down, self._headers_at[1]):
            self._driver.download(staged, address)

    def deliver(self) -> None:
        """Hand out what has been received."""
        for message, at in self._received:
            message[:] = self._pinned[at : at + len(message)]
        for part, staged, _ in self._headers(self._down, self._headers_at[1]):
            part[:] = staged

    def _headers(self, parts: Sequence[tuple[Bytes, int]], at: int) -> Iterator[tuple[Bytes, Bytes, int]]:
        for part, address in parts:
            yield part, self._pinned[at : at + len(part)], address
            at += len(part)


def _span(placed: Sequence[tuple[Bytes, int]]) -> tuple[int, int]:
    """From where to where messages lie that are placed in order."""
    message, last = placed[-1]
    return placed[0][1], last + len(message)


def _key(message: Array) -> tuple[int, int]:
    """Two messages that are the same memory have the same one."""
    return message.ctypes.data, message.nbytes


@dataclass(eq=False)
class _Handle:
    """An operation under way: its memory stays until the stream is behind it, whoever forgets the handle."""

    transport: NcclTransport
    event: Any
    staging: _Staging | None

    def poll(self) -> bool:
        if self.staging is None:
            return True
        if not self.transport._reached(self.event):
            return False
        self.staging.deliver()
        self.event = self.staging = None
        self.transport._under_way.discard(self)
        return True


class _Done:
    """An operation that had nothing to do."""

    def poll(self) -> bool:
        return True


class NcclTransport(Transport):
    """Collectives of NCCL over a communicator of its own, which the transport destroys.

    Construction is collective and takes at most ``timeout_seconds``. Memory, in use while an operation is: messages of
    the host once on the device and once in pinned memory, headers of others once pinned; from pools. Raises
    TransportError if the ranks do not meet in time.
    """

    checksums = False  # messages lie on the device

    def __init__(self, communicator: Communicator, timeout_seconds: float = 600.0) -> None:
        self._communicator = communicator
        self._driver = communicator.driver
        self.rank, self.size = communicator.rank, communicator.size
        self.bytes_sent = 0
        self._under_way: set[_Handle] = set()
        self._closed = False
        self._connect(timeout_seconds)

    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        """See :class:`Transport`; NCCL's own, which gives all ranks what one of them added up."""
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        if self.size == 1 or not array.nbytes:
            return _Done()
        staging = _Staging(self._driver, [array], [array])
        staging.up()
        self._communicator.add_up(staging.address(array), len(array), array.dtype)
        return self._issued(staging)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        """See :class:`Transport`; a message to each rank that gets something, all of them together."""
        sent, received = parts_of(send, send_counts), parts_of(recv, recv_counts)
        to_itself = send_counts[self.rank] and (is_mirror(send) or is_mirror(recv))
        assert not to_itself, "no reduction sends itself what kernels write or read"
        received[self.rank][:] = sent[self.rank]
        return self.exchange(self._to_others(sent), self._to_others(received))

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> Handle:
        """See :class:`Transport`; a message to each other rank, all of them together."""
        parts = parts_of(buffer, counts)
        return self.exchange(self._to_others([parts[self.rank]] * self.size), self._to_others(parts))

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """See :class:`Transport`; all messages together. What goes to several ranks is copied up once."""
        self.bytes_sent += sum(len(message) for _, message in sends)
        # Both ranks know the lengths, so one of nothing need not travel.
        sends, recvs = [each for each in sends if len(each[1])], [each for each in recvs if len(each[1])]
        if not sends and not recvs:
            return _Done()
        staging = _Staging(self._driver, [message for _, message in sends], [target for _, target in recvs])
        staging.up()
        with self._communicator.together():
            for to, message in sends:
                self._communicator.send(staging.address(message), len(message), to)
            for source, target in recvs:
                self._communicator.recv(staging.address(target), len(target), source)
        return self._issued(staging)

    def allocator(self, device: Device) -> Allocator:
        """See :class:`Transport`; on the device, if it is this communicator's."""
        if device.driver is None:
            return host_allocator
        block = device.driver.allocate(1)
        return partial(mirror, device.driver) if self._driver.reaches(block.address) else host_allocator

    def abandon(self) -> None:
        """See :class:`Transport`. What is under way ends; its memory is kept."""
        if not self._closed:
            self._closed = True
            self._communicator.abort()

    def close(self) -> None:
        """Destroy the communicator, unless it was abandoned."""
        if not self._closed:
            self._closed = True
            self._communicator.destroy()

    def _to_others(self, parts: Sequence[Bytes]) -> Messages:
        return [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]

    def _issued(self, staging: _Staging) -> _Handle:
        staging.down()
        handle = _Handle(self, self._driver.mark(self._driver.stream), staging)
        self._under_way.add(handle)
        return handle

    def _reached(self, event: Any) -> bool:
        if self._driver.reached(event):
            return True
        self._communicator.check()
        return False

    def _connect(self, timeout_seconds: float) -> None:
        """Let every rank talk to every other, and all of them add up."""
        byte = np.zeros(self.size, dtype=np.uint8)
        handles = [self.allgatherv(byte, [1] * self.size), self.allreduce(np.zeros(1, dtype=np.float32))]
        deadline = monotonic() + timeout_seconds
        try:
            while not all(handle.poll() for handle in handles):
                if monotonic() > deadline:
                    raise TransportError(
                        f"NCCL connected not all of {self.size} ranks in {timeout_seconds:.0f} s"
                    )
                sleep(1e-3)
        except TransportError:
            self.abandon()
            raise
        self.bytes_sent = 0
