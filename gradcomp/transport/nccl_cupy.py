"""CuPy's NCCL bindings make a communicator on one device and on a stream of its own."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from gradcomp.core.errors import ConfigError, TransportError, WireFormatError
from gradcomp.core.text import printable
from gradcomp.transport.nccl import NcclTransport

#: A blocking all-gather of bytes among the ranks, as :meth:`gradcomp.transport.Transport.allgather_bytes`.
Meet = Callable[[bytes], Sequence[bytes]]

_IN_PROGRESS = 7  # ncclInProgress of ncclResult_t
_INSTALL = "pip install 'gradcomp[nccl13]', or 'gradcomp[nccl12]' where CUDA is 12.x"


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
        own["id"] = _identity(nccl) if rank == 0 else ""
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
        raise WireFormatError("rank 0 introduced itself without an identity for NCCL") from error

    def make() -> CupyCommunicator:
        driver.make_current()  # a new thread has no current device
        return CupyCommunicator(nccl, driver, identity, rank, size)

    communicator = _within(timeout_seconds, make, f"{size} ranks")
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


def _identity(nccl: Any) -> str:
    """Return NCCL's id for a new communicator, in hexadecimal digits."""
    try:
        return str(nccl.get_unique_id().hex())
    except nccl.NcclError as error:
        raise ConfigError(f"NCCL cannot begin: {error}") from error


def _introduction(part: bytes) -> dict[str, str]:
    try:
        return {str(key): str(value) for key, value in json.loads(part).items()}
    except (ValueError, AttributeError) as error:
        raise WireFormatError(f"a rank introduced itself with {part!r:.80}") from error


def _within(seconds: float, make: Callable[[], CupyCommunicator], who: str) -> CupyCommunicator:
    """Return ``make()``, run by another thread, because NCCL waits for the last rank without a deadline."""
    made: list[CupyCommunicator] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:  # noqa: BLE001 - the calling thread raises it
            failed.append(error)

    thread = threading.Thread(target=work, name="gradcomp-nccl", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not made:
        raise TransportError(f"NCCL did not connect {who} in {seconds:.0f} s")
    return made[0]


class CupyCommunicator:
    """Implements :class:`gradcomp.transport.nccl.Communicator` with CuPy's NCCL bindings."""

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
        with self._calls():
            self._nccl.groupStart()
            try:
                yield
            finally:
                self._nccl.groupEnd()

    def send(self, address: int, nbytes: int, to: int) -> None:
        with self._calls():
            self._communicator.send(address, nbytes, self._nccl.NCCL_UINT8, to, self._stream)

    def recv(self, address: int, nbytes: int, source: int) -> None:
        with self._calls():
            self._communicator.recv(address, nbytes, self._nccl.NCCL_UINT8, source, self._stream)

    def add_up(self, address: int, count: int, dtype: np.dtype[Any]) -> None:
        kind = {"float32": self._nccl.NCCL_FLOAT32, "float64": self._nccl.NCCL_FLOAT64}[dtype.name]
        with self._calls():
            self._communicator.allReduce(address, address, count, kind, self._nccl.NCCL_SUM, self._stream)

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
        """Abort; NCCL waits until its kernels have ended, which is soon because they check for it often."""
        with self._calls():
            self._communicator.abort()

    def destroy(self) -> None:
        """Wait for the stream, then release the communicator."""
        self.driver.synchronize()
        with self._calls():
            self._communicator.destroy()
