"""The job's key-value store: rank 0 serves it, and the launcher decides how the others learn where."""

from __future__ import annotations

import fcntl
import http.client
import logging
import re
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.job.hostfile import HostFile
from gradcomp.job.launch import Address, Launch

logger = logging.getLogger("gradcomp")

_POLL_SECONDS = 0.05
_KEY = "/gradcomp/store"  # scope and key at horovodrun's server
_ADDRESS_BYTES = 300  # room for a host name (253) and a port
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


class Deadline:
    """The end of patience, and the words in which it is said."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self._launch = launch
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.address: Address | None = None

    def left(self) -> timedelta:
        """Time left; never quite nothing, which torch takes for "for ever"."""
        return timedelta(seconds=max(0.1, self._end - time.monotonic()))

    def poll(self, attempt: Callable[[], Address | None], what: str) -> Address:
        """Repeat ``attempt`` until it returns an address."""
        while (found := attempt()) is None:
            if time.monotonic() > self._end:
                raise self.error(f"{what} within {self._seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return found

    def error(self, what: str) -> TransportError:
        """What went wrong, with this rank and the address it tried."""
        at = "" if self.address is None else " at {}:{}".format(*self.address)
        return TransportError(f"rendezvous of {self._launch.launcher}, rank {self._launch.rank}{at}: {what}")


def open_store(launch: Launch, deadline: Deadline, once_met: ExitStack) -> Any:
    """The job's key-value store, served by rank 0 or by torchrun; ``once_met`` clears up behind the meeting."""
    if launch.master is not None:
        if launch.served_attempt is None:
            return _tcp_store(launch.master, launch.rank == 0, deadline)
        store = _tcp_store(launch.master, False, deadline)
        return PrefixStore(f"gradcomp/attempt-{launch.served_attempt}", store)
    if launch.horovod_server is not None:
        return _meet_at_horovodrun(launch, launch.horovod_server, deadline)
    unusable = ""
    if launch.launcher != "torchrun":
        if launch.placed and launch.local_size == launch.size:
            return _meet_on_one_host(launch, deadline, once_met)
        communicator, why = _mpi_world()
        if communicator is not None:
            return _meet_by_mpi(launch, communicator, deadline)
        unusable = f" (mpi4py cannot tell them: {why})"
    raise ConfigError(
        f"{launch.launcher} says that there are {launch.size} ranks, but not where they meet{unusable}: "
        "set MASTER_ADDR and MASTER_PORT to an address of rank 0's host"
    )


def _tcp_store(address: Address, serve: bool, deadline: Deadline) -> Any:
    deadline.address = address
    try:
        store = TCPStore(
            address[0], address[1], None, is_master=serve, timeout=deadline.left(), wait_for_workers=False
        )
    except RuntimeError as error:
        doing = "the store cannot be served" if serve else "no store answered in time"
        raise deadline.error(f"{doing}: {first_line(error)}") from error
    deadline.address = address[0], store.port
    return store


def _meet_at_horovodrun(launch: Launch, server: Address, deadline: Deadline) -> Any:
    """Rank 0 puts its address under a scope of gradcomp's own; the others poll for it."""
    deadline.address = server
    if launch.rank == 0:
        store, address = _serve(launch, deadline)
        deadline.address = server
        try:
            status, _ = _http(server, "PUT", "{}:{}".format(*address).encode(), deadline)
        except OSError as error:
            raise deadline.error(f"the address cannot be published: {error}") from error
        if status != 200:
            raise deadline.error(f"the server refused the address: HTTP {status}")
        return store

    def ask() -> Address | None:
        try:
            status, answer = _http(server, "GET", None, deadline)
        except OSError as error:
            raise deadline.error(f"the server does not answer: {error}") from error
        if status == 404:
            return None
        if status != 200:
            raise deadline.error(f"the server answered HTTP {status}")
        return _parse(answer, deadline)

    return _tcp_store(deadline.poll(ask, "rank 0 did not publish its address"), False, deadline)


def _http(server: Address, method: str, body: bytes | None, deadline: Deadline) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server, timeout=deadline.left().total_seconds())
    try:
        connection.request(method, _KEY, body)
        response = connection.getresponse()
        return response.status, response.read(_ADDRESS_BYTES + 1)
    except http.client.HTTPException as error:
        raise deadline.error(f"not an HTTP server: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _meet_on_one_host(launch: Launch, deadline: Deadline, once_met: ExitStack) -> Any:
    """All ranks share a host: rank 0 leaves its port in a file that only this user can read."""
    file = HostFile(launch.job)
    if launch.rank == 0:
        store = _tcp_store(("127.0.0.1", 0), True, deadline)
        file.write(store.port)
        once_met.callback(file.remove)
        return store

    def look() -> Address | None:
        port = file.read()
        return None if port is None else ("127.0.0.1", port)

    return _tcp_store(deadline.poll(look, f"rank 0 did not write {file.path}"), False, deadline)


def _mpi_world() -> tuple[Any, str]:
    """MPI's communicator of all ranks, or None and why."""
    from gradcomp.transport.mpi_process import initialise, load

    try:
        MPI = load()
    except (
        ImportError,
        RuntimeError,
    ) as error:  # the second: no MPI library can be loaded, or it is the wrong one
        return None, first_line(error)
    initialise(MPI)
    return MPI.COMM_WORLD, ""


def _meet_by_mpi(launch: Launch, world: Any, deadline: Deadline) -> Any:
    """Rank 0 broadcasts its address over MPI; without a deadline of MPI's own, so it is polled."""
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.size):
        hint = "srun tells MPI by --mpi=pmi2 or pmix; " if launch.launcher == "slurm" else ""
        raise ConfigError(
            f"mpi4py belongs to another MPI than the launcher: it says rank {world.Get_rank()} of {world.Get_size()}, "
            f"the launcher {launch.rank} of {launch.size}; {hint}set MASTER_ADDR and MASTER_PORT, or reinstall mpi4py"
        )
    buffer = bytearray(_ADDRESS_BYTES)
    store = None
    if launch.rank == 0:
        store, address = _serve(launch, deadline)
        text = "{}:{}".format(*address).encode()
        buffer[: len(text)] = text
    request = world.Ibcast(buffer, root=0)
    found = deadline.poll(
        lambda: _parse(bytes(buffer).rstrip(b"\0"), deadline) if request.Test() else None,
        "rank 0 did not broadcast its address",
    )
    return store or _tcp_store(found, False, deadline)


def _serve(launch: Launch, deadline: Deadline) -> tuple[Any, Address]:
    """Rank 0's store on a free port, and the address at which the others reach it."""
    host = own_address(launch)
    store = _tcp_store((host, 0), True, deadline)
    return store, (host, store.port)


def own_address(launch: Launch) -> str:
    """Where the other ranks reach this host; a loopback address only if they are on it, or with a warning."""
    if launch.interface is not None:
        return interface_address(launch)
    if launch.placed and launch.local_size == launch.size:
        return "127.0.0.1"
    if launch.hostname is not None and not _is_loopback(launch.hostname):
        return launch.hostname
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not _is_loopback(address):
            return address
    logger.warning(
        "this host's name has no address that other hosts can reach, 127.0.0.1 is published: "
        "set GLOO_SOCKET_IFNAME, or MASTER_ADDR and MASTER_PORT"
    )
    return "127.0.0.1"


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def interface_address(launch: Launch) -> str:
    """The IPv4 address of the interface that the environment asks for; ConfigError names those that have one."""
    name = launch.interface or ""
    address = _address_of_interface(name)
    if address is None:
        usable = ", ".join(other for _, other in socket.if_nameindex() if _address_of_interface(other))
        raise ConfigError(
            f"{launch.interface_variable}={name}: this host has no such interface with an IPv4 address; it has {usable}"
        )
    return address


def _address_of_interface(name: str) -> str | None:
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def _parse(answer: bytes, deadline: Deadline) -> Address:
    """An address from another rank, checked before anything connects to it."""
    host, _, port = answer.decode("ascii", errors="replace").rpartition(":")
    well_formed = len(answer) <= _ADDRESS_BYTES and _HOST.fullmatch(host) and _PORT.fullmatch(port)
    if not well_formed or int(port) > 65535:
        raise deadline.error(f"this is not an address of rank 0: {answer[:_ADDRESS_BYTES]!r}")
    return host, int(port)


def first_line(error: Exception) -> str:
    """What torch says, without the C++ stack behind it."""
    return str(error).partition("\n")[0]
