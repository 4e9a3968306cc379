"""NCCL as a transport, for ranks that each have a GPU of their own; CuPy calls it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError, TransportError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.mirrors import is_mirror, mirror
from gradcomp.kernels.devices import Device
from gradcomp.transport.base import (
    Allocator,
    Bytes,
    Done,
    Handle,
    Messages,
    PointToPoint,
    host_allocator,
    in_time,
)

#: A blocking all-gather of bytes among the ranks, as :meth:`gradcomp.transport.Transport.allgather_bytes`.
Meet = Callable[[bytes], Sequence[bytes]]

_IN_PROGRESS = 7  # ncclInProgress of ncclResult_t
_INSTALL = "pip install 'gradcomp[nccl13]', or 'gradcomp[nccl12]' where CUDA is 12.x"

Array = npt.NDArray[Any]
#: Messages in staging memory begin at multiples of this many bytes, because elements of sums must be aligned.
_BOUNDARY = 16


def nccl_transport(rank: int, size: int, meet: Meet, timeout_seconds: float) -> NcclTransport:
    """Make an NCCL transport among ``size`` ranks, each on the device that is current in the calling thread.

    The call is collective.

    Args:
        rank: This rank.
        size: The number of ranks.
        meet: An all-gather of bytes among them.
        timeout_seconds: The time within which all ranks must connect.

    Raises:
        ConfigError: A rank has no CuPy, no NCCL or no GPU, or two ranks are on one GPU. All ranks raise it.
        TransportError: The ranks did not connect in time.
    """
    own: dict[str, str] = {}
    try:
        nccl, driver, own["device"] = _engine()
        try:
            own["id"] = nccl.get_unique_id().hex() if rank == 0 else ""
        except nccl.NcclError as error:
            raise ConfigError(f"NCCL cannot begin: {error}") from error
    except ConfigError as error:
        own = {"problem": str(error)}
    told = [_introduction(part) for part in meet(json.dumps(own).encode())]
    for other, each in enumerate(told):
        if problem := each.get("problem"):
            raise ConfigError(f"rank {other}: {printable(str(problem))}")
        if (first := [one.get("device") for one in told].index(each.get("device"))) < other:
            raise ConfigError(
                f"ranks {first} and {other} are both on GPU {printable(str(each.get('device')))}, but NCCL needs one "
                "for each: call torch.cuda.set_device(gc.local_rank()) before the optimizer is made, or choose another "
                "transport"
            )
    try:
        identity = bytes.fromhex(told[0]["id"])
    except (KeyError, ValueError) as error:
        raise WireFormatError("the start-up message of rank 0 has no identity for NCCL") from error

    def make() -> CupyCommunicator:
        driver.make_current()  # a new thread has no current device
        return CupyCommunicator(nccl, driver, identity, rank, size)

    communicator = in_time(make, timeout_seconds, "gradcomp-nccl")
    if communicator is None:
        raise TransportError(f"NCCL did not connect {size} ranks in {timeout_seconds:.0f} s")
    return NcclTransport(communicator, timeout_seconds)


def _engine() -> tuple[Any, Any, str]:
    """Return CuPy's NCCL, a driver for the current device, and a name of that device that is unique among hosts."""
    # With this setting NCCL makes all connections when a communicator is made, not when an algorithm is first used; see
    # gradcomp.transport.nccl. NCCL reads it at its first use in a process, so it has no effect if PyTorch has made a
    # group over NCCL before.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    try:
        import cupy
        from cupy.cuda import nccl

        from gradcomp.kernels.cuda.over_cupy import driver
    except ImportError as error:
        raise ConfigError(f"the nccl transport needs CuPy and NCCL: {_INSTALL} ({error})") from error
    if not nccl.available:
        raise ConfigError(f"the nccl transport needs NCCL, which CuPy does not find: {_INSTALL}")
    try:
        device = cupy.cuda.Device()
        # Hosts may have the same name. The boot id differs between hosts, and containers on one host share it.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        name = f"{device.pci_bus_id} of {os.uname().nodename} ({boot})"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"the nccl transport needs a GPU: {error}") from error
    return nccl, driver(device.id), name


def _introduction(part: bytes) -> dict[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads(part).items()}
    except (ValueError, AttributeError) as error:
        raise WireFormatError(f"the start-up message of a rank is not JSON: {part!r:.80}") from error


class CupyCommunicator:
    """Represents one rank of an NCCL communicator, whose operations run on the driver's stream and memory.

    All calls raise TransportError if NCCL fails. Tests give :class:`NcclTransport` objects of other classes.
    """

    def __init__(self, nccl: Any, driver: Any, identity: bytes, rank: int, size: int) -> None:
        self.rank, self.size, self.driver = rank, size, driver
        self._nccl = nccl
        self._stream = driver.stream
        with self._calls():
            self._communicator = nccl.NcclCommunicator(size, identity, rank)

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Make the communicator's device current, and turn NCCL's errors into TransportError."""
        try:
            with self.driver.current():
                yield
        except self._nccl.NcclError as error:
            raise TransportError(f"NCCL failed: {error}") from error
        except KeyError as error:  # CuPy raises it for a status that it has no name for
            raise TransportError(f"NCCL failed with status {error}") from error

    @contextmanager
    def together(self) -> Iterator[None]:
        """Return a context in which calls start as one group, without an order among their messages."""
        with self._calls():
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    def send(self, address: int, nbytes: int, to: int) -> None:
        """Start to send bytes at a device address to a rank, within :meth:`together`."""
        self._communicator.send(address, nbytes, self._nccl.NCCL_UINT8, to, self._stream)

    def recv(self, address: int, nbytes: int, source: int) -> None:
        """Start to receive bytes from a rank at a device address, within :meth:`together`."""
        self._communicator.recv(address, nbytes, self._nccl.NCCL_UINT8, source, self._stream)

    def add_up(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        """Start a sum over ranks, in place, of ``count`` elements of float32 or float64."""
        kind = {"float32": self._nccl.NCCL_FLOAT32, "float64": self._nccl.NCCL_FLOAT64}[dtype.name]
        with self._calls():
            self._communicator.allReduce(address, address, count, kind, self._nccl.NCCL_SUM, self._stream)

    def reduce(self, address: int, count: int, root: int) -> None:
        """Start a sum of ``count`` elements of float32 over ranks, in place on ``root``; others are only read."""
        kind, add = self._nccl.NCCL_FLOAT32, self._nccl.NCCL_SUM
        with self._calls():
            self._communicator.reduce(address, address, count, kind, add, root, self._stream)

    def broadcast(self, address: int, nbytes: int, root: int) -> None:
        """Start to send bytes from ``root`` to all ranks."""
        with self._calls():
            self._communicator.broadcast(address, address, nbytes, self._nccl.NCCL_UINT8, root, self._stream)

    def check(self) -> None:
        """Raise TransportError if NCCL has an asynchronous error."""
        with self._calls():
            try:
                self._communicator.check_async_error()
            except KeyError as error:
                # CuPy has no name for "in progress" and raises KeyError, although that is no failure.
                if error.args != (_IN_PROGRESS,):
                    raise

    def abort(self) -> None:
        """End the operations that run and give the communicator up, without waiting for other ranks.

        NCCL waits until its kernels have ended, which is soon because they check for it often.
        """
        with self._calls():
            self._communicator.abort()

    def destroy(self) -> None:
        """Wait for the stream, then release the communicator; no operation may be running."""
        self.driver.synchronize()
        with self._calls():
            self._communicator.destroy()


class _Staging:
    """Copies the messages of an operation between the host and the device.

    Host messages lie in pinned memory in the same order as on the device, sent ones before received ones, so there is
    one copy each way. Of messages on the device the headers are copied, one by one. A message that is both sent and
    received has one place. Pinned memory must be kept until the stream has passed the copies.
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
        """Return the message's address on the device."""
        return message.address if is_mirror(message) else self._block.address + self._places[_key(message)]

    def up(self) -> None:
        """Start to copy what is sent to the device."""
        for message, at in self._sent:
            self._pinned[at : at + len(message)] = message
        if self._sent:
            first, end = _span(self._sent)
            self._driver.upload(self._block.address + first, self._pinned[first:end])
        for part, staged, address in self._headers(self._up, self._headers_at[0]):
            staged[:] = part
            self._driver.upload(address, staged)

    def down(self) -> None:
        """Start to copy what is received to pinned memory."""
        if self._received:
            first, end = _span(self._received)
            self._driver.download(self._pinned[first:end], self._block.address + first)
        for _, staged, address in self._headers(self._down, self._headers_at[1]):
            self._driver.download(staged, address)

    def deliver(self) -> None:
        """Copy what was received from pinned memory to the messages and headers on the host."""
        for message, at in self._received:
            message[:] = self._pinned[at : at + len(message)]
        for part, staged, _ in self._headers(self._down, self._headers_at[1]):
            part[:] = staged

    def _headers(self, parts: Sequence[tuple[Bytes, int]], at: int) -> Iterator[tuple[Bytes, Bytes, int]]:
        for part, address in parts:
            yield part, self._pinned[at : at + len(part)], address
            at += len(part)


def _span(placed: Sequence[tuple[Bytes, int]]) -> tuple[int, int]:
    """Return the first byte of messages that are placed in order, and the end of the last one."""
    message, last = placed[-1]
    return placed[0][1], last + len(message)


def _key(message: Array) -> tuple[int, int]:
    """Return a key that is equal for messages in the same memory."""
    return message.ctypes.data, message.nbytes


@dataclass(eq=False)
class _Handle:
    """Tracks an operation; the transport keeps its memory until the stream has passed it, even without the handle."""

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


class NcclTransport(PointToPoint):
    """Runs collectives of NCCL over a communicator that the transport owns and destroys.

    Construction is collective and takes at most ``timeout_seconds``. While an operation runs, it uses memory from
    pools: host messages once on the device and once in pinned memory, headers of device messages once in pinned memory.

    Errors: TransportError if the ranks do not connect in time.
    """

    checksums = False  # Python code cannot read messages on the device

    def __init__(self, communicator: CupyCommunicator, timeout_seconds: float = 600.0) -> None:
        self._communicator = communicator
        self._driver = communicator.driver
        self.rank, self.size = communicator.rank, communicator.size
        self.bytes_sent = 0
        self._under_way: set[_Handle] = set()
        self._closed = False
        self._connect(timeout_seconds)

    def allreduce(self, array: npt.NDArray[Any]) -> Handle:
        # NCCL's allreduce gives all ranks the sums that one rank computed, so they have the same bits.
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        if self.size == 1 or not array.nbytes:
            return Done()
        staging = _Staging(self._driver, [array], [array])
        staging.up()
        self._communicator.add_up(staging.address(array), len(array), array.dtype)
        return self._issued(staging)

    def reduce(self, array: npt.NDArray[np.float32], root: int) -> Handle:
        """Sum to ``root``, see :class:`gradcomp.transport.base.Rooted`."""
        is_root = self.rank == root
        self.bytes_sent += 0 if is_root else array.nbytes
        if self.size == 1 or not array.nbytes:
            return Done()
        staging = _Staging(self._driver, [array], [array] if is_root else [])
        staging.up()
        self._communicator.reduce(staging.address(array), len(array), root)
        return self._issued(staging)

    def broadcast(self, buffer: Bytes, root: int) -> Handle:
        """Send from ``root`` to all, see :class:`gradcomp.transport.base.Rooted`."""
        is_root = self.rank == root
        self.bytes_sent += len(buffer) * (self.size - 1) if is_root else 0
        if self.size == 1 or not len(buffer):
            return Done()
        staging = _Staging(self._driver, [buffer] if is_root else [], [] if is_root else [buffer])
        staging.up()
        self._communicator.broadcast(staging.address(buffer), len(buffer), root)
        return self._issued(staging)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> Handle:
        to_itself = send_counts[self.rank] and (is_mirror(send) or is_mirror(recv))
        assert not to_itself, "a rank cannot send itself a part of a message on the device"
        return super().alltoallv(send, send_counts, recv, recv_counts)

    def exchange(self, sends: Messages, recvs: Messages) -> Handle:
        """Start all messages as one group; a message to several ranks is copied to the device once."""
        self.bytes_sent += sum(len(message) for _, message in sends)
        # Both ranks know the lengths, so a message of no bytes need not travel.
        sends, recvs = [each for each in sends if len(each[1])], [each for each in recvs if len(each[1])]
        if not sends and not recvs:
            return Done()
        staging = _Staging(self._driver, [message for _, message in sends], [target for _, target in recvs])
        staging.up()
        with self._communicator.together():
            for to, message in sends:
                self._communicator.send(staging.address(message), len(message), to)
            for source, target in recvs:
                self._communicator.recv(staging.address(target), len(target), source)
        return self._issued(staging)

    def allocator(self, device: Device) -> Allocator:
        """Return an allocator on the device, if ``device`` is that of the communicator."""
        if device.driver is None:
            return host_allocator
        block = device.driver.allocate(1)
        return partial(mirror, device.driver) if self._driver.reaches(block.address) else host_allocator

    def abandon(self) -> None:
        """Abort the communicator, which ends the operations that run; their memory is kept."""
        if not self._closed:
            self._closed = True
            self._communicator.abort()

    def close(self) -> None:
        """Destroy the communicator, unless it was abandoned."""
        if not self._closed:
            self._closed = True
            self._communicator.destroy()

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
        """Run each kind of collective once, so that NCCL connects all ranks."""
        byte, one = np.zeros(self.size, dtype=np.uint8), np.zeros(1, dtype=np.float32)
        handles = [self.allgatherv(byte, [1] * self.size), self.allreduce(one)]
        handles += [self.reduce(one, 0), self.broadcast(byte, 0)]
        deadline = monotonic() + timeout_seconds
        try:
            while not all(handle.poll() for handle in handles):
                if monotonic() > deadline:
                    raise TransportError(
                        f"NCCL did not connect all of {self.size} ranks in {timeout_seconds:.0f} s"
                    )
                sleep(1e-3)
        except TransportError:
            self.abandon()
            raise
        self.bytes_sent = 0
