"""Opens the job's key-value store: rank 0 serves it, and the launcher determines how the others find its address."""

from __future__ import annotations

import errno
import http.client
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.core.strings import printable
from gradcomp.job.interfaces import address_of, addresses
from gradcomp.job.launch import Address, Launch
from gradcomp.job.signing import SECRET_BYTES, HostSocket, Seal

logger = logging.getLogger("gradcomp")

_BACKLOG = 4096  # every rank connects several times; the kernel lowers a value that is too large

_Bindable = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]

_POLL_SECONDS = 0.05
_KEY = "/gradcomp/store"  # the scope and the key at horovodrun's server
_ADDRESS_BYTES = 300  # holds a host name (253 bytes), a colon and a port
_MOST_ANSWER_BYTES = 2 * _ADDRESS_BYTES  # holds an address and its signature
_HOST = re.compile(r"[A-Za-z0-9._:-]+")
_PORT = re.compile(r"[1-9][0-9]{0,4}")


def own_address(launch: Launch) -> str:
    """Return the address at which the other ranks reach this host.

    It is a loopback address only if all ranks are on this host or, with a warning, if no other address is found.
    """
    if launch.interface is not None:
        return interface_address(launch)
    if launch.one_host:
        return "127.0.0.1"
    if launch.hostname is not None and not is_loopback(launch.hostname):
        return launch.hostname
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not is_loopback(address):
            return address
    logger.warning(
        "this host's name has no address that other hosts can reach, 127.0.0.1 is published: "
        "set GLOO_SOCKET_IFNAME, or MASTER_ADDR and MASTER_PORT"
    )
    return "127.0.0.1"


def listening_socket(launch: Launch, address: Address) -> socket.socket | None:
    """Return a socket that listens only at the address that the other ranks connect to, or None if that is not known.

    With None the caller must listen at all addresses of this host. That is so for a name with several addresses none of
    which is the chosen interface's, for an address of another machine (a service, a router), and among several hosts
    for a name that resolves to loopback here. Raises OSError.
    """
    found = _choose(launch, address)
    if found is not None:
        listening = socket.socket(found[0], socket.SOCK_STREAM)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(found[1])
            listening.listen(_BACKLOG)
        except OSError as error:
            listening.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
        else:
            return listening
    logger.info(
        "the job's store listens at all addresses of this host, since %s is not the address of one interface: set "
        "GLOO_SOCKET_IFNAME, or MASTER_ADDR to a numeric address",
        address[0],
    )
    return None


def _choose(launch: Launch, address: Address) -> _Bindable | None:
    found: list[_Bindable] = []
    for family, _, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        if family in (socket.AF_INET, socket.AF_INET6) and (family, where) not in found:
            found.append((family, where))  # type: ignore[arg-type]
    chosen = None if launch.interface is None else address_of(launch.interface)
    for one in found:
        if one[1][0] == chosen:
            return one
    if all(ipaddress.ip_address(where[0]).is_loopback for _, where in found):
        if not (launch.one_host or is_loopback(address[0])):
            return None
        return min(found, key=lambda one: one[0])  # "localhost" may be IPv6 too, but every host has IPv4
    return found[0] if len(found) == 1 else None


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach the address."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def with_interface(launch: Launch) -> Launch:
    """Return the launch with an interface: the one it names or, for a job on one host, loopback."""
    if launch.interface is None and launch.one_host and address_of("lo") is not None:
        return replace(launch, interface="lo")
    return launch


def interface_address(launch: Launch) -> str:
    """Return the IPv4 address of the interface that the environment names.

    The ConfigError for a missing interface lists those that have an address.
    """
    name = launch.interface or ""
    address = address_of(name)
    if address is None:
        usable = ", ".join(addresses())
        raise ConfigError(
            f"{launch.interface_variable}={name}: this host has no such interface with an IPv4 address; it has {usable}"
        )
    return address


class Deadline:
    """Holds the deadline of the rendezvous, and makes the errors that it ends with."""

    def __init__(self, launch: Launch, seconds: float) -> None:
        self._launch = launch
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self.address: Address | None = None

    def left(self) -> timedelta:
        """Return the time left, at least 0.1 s because torch takes 0 for no limit."""
        return timedelta(seconds=max(0.1, self._end - time.monotonic()))

    def poll(self, attempt: Callable[[], Address | None], what: str) -> Address:
        """Repeat ``attempt`` until it returns an address. At the deadline raise TransportError with ``what``."""
        while (found := attempt()) is None:
            if time.monotonic() > self._end:
                raise self.error(f"{what} within {self._seconds:g} s")
            time.sleep(_POLL_SECONDS)
        return found

    def error(self, what: str) -> TransportError:
        """Return an error that names this rank and the address it tried."""
        at = "" if self.address is None else " at {}:{}".format(*self.address)
        return TransportError(f"rendezvous of {self._launch.launcher}, rank {self._launch.rank}{at}: {what}")


class Meeting(NamedTuple):
    """Holds the store through which the ranks have met."""

    store: Any
    #: A secret that the ranks, and nobody else, were told when they met; empty if there is none.
    secret: bytes = b""


def open_store(launch: Launch, deadline: Deadline, once_met: ExitStack) -> Meeting:
    """Return the job's key-value store, which rank 0 or torchrun serves. ``once_met`` is closed after the meeting."""
    if launch.master is not None:
        if launch.served_attempt is None:
            address = launch.master
            if launch.one_host and not is_loopback(address[0]):
                address = "127.0.0.1", address[1]
            serves = launch.rank == 0
            return Meeting(_serve(launch, address, deadline) if serves else _client(address, deadline))
        store = _client(launch.master, deadline)
        return Meeting(PrefixStore(f"gradcomp/attempt-{launch.served_attempt}", store))
    if launch.horovod_server is not None:
        return Meeting(_meet_at_horovodrun(launch, launch.horovod_server, deadline))
    unusable = ""
    if launch.launcher != "torchrun":
        if launch.one_host:
            return Meeting(_meet_on_one_host(launch, deadline, once_met))
        communicator, why = _mpi_world()
        if communicator is not None:
            return _meet_by_mpi(launch, communicator, deadline)
        unusable = f" (mpi4py cannot tell them: {why})"
    raise ConfigError(
        f"{launch.launcher} says that there are {launch.size} ranks, but not where they meet{unusable}: "
        "set MASTER_ADDR and MASTER_PORT to an address of rank 0's host"
    )


def _client(address: Address, deadline: Deadline) -> Any:
    """Return a connection to the store that another process serves."""
    deadline.address = address
    try:
        return TCPStore(*address, None, is_master=False, timeout=deadline.left(), wait_for_workers=False)
    except RuntimeError as error:
        raise deadline.error(f"no store answered in time: {first_line(error)}") from error


def _serve(launch: Launch, address: Address, deadline: Deadline) -> Any:
    """Serve the store on rank 0, if possible only at this address: see :func:`listening_socket`.

    Port 0 stands for any free one.
    """
    deadline.address = address
    host, port = address
    descriptor = None
    try:
        listening = listening_socket(launch, address)
        if listening is not None:
            port = listening.getsockname()[1]
            descriptor = listening.detach()  # torch closes it
        store = TCPStore(
            host,
            port,
            None,
            is_master=True,
            timeout=deadline.left(),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except (OSError, RuntimeError) as error:
        raise deadline.error(f"the store cannot be served: {first_line(error)}") from error
    deadline.address = host, store.port
    return store


def serve_alone(host: str, port: int) -> Any:
    """Serve a store at an address of this host, for processes of which none serves it; port 0 stands for any free one.

    ConfigError if the address cannot be used.
    """
    try:
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG)
        port = listening.getsockname()[1]
        return TCPStore(
            host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"no store can be served at {host}:{port}: {first_line(error)}") from error


def _meet_at_horovodrun(launch: Launch, server: Address, deadline: Deadline) -> Any:
    """Publish rank 0's address at horovodrun's server, in a scope of gradcomp's own; the other ranks poll for it."""
    deadline.address = server
    # The server speaks plain HTTP, and anybody may write to it.
    seal = Seal(launch.secret, "{}:{}".format(*server).encode()) if launch.secret else None
    if launch.rank == 0:
        store, text = _serve_and_say(launch, deadline)
        deadline.address = server
        try:
            status, _ = _http(server, "PUT", text if seal is None else seal.sign(_KEY, text), deadline)
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
        text = answer if seal is None else seal.open(_KEY, answer)
        return None if text is None else _parse(text, deadline)

    return _client(deadline.poll(ask, "rank 0 did not publish its address"), deadline)


def _http(server: Address, method: str, body: bytes | None, deadline: Deadline) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*server, timeout=deadline.left().total_seconds())
    try:
        connection.request(method, _KEY, body)
        response = connection.getresponse()
        return response.status, response.read(_MOST_ANSWER_BYTES)
    except http.client.HTTPException as error:
        raise deadline.error(
            f"not an HTTP server: {type(error).__name__}: {printable(str(error))}"
        ) from error
    finally:
        connection.close()


def _meet_on_one_host(launch: Launch, deadline: Deadline, once_met: ExitStack) -> Any:
    """Offer rank 0's port at a Unix socket, to processes of this user only; all ranks share this host."""
    offered = HostSocket(launch.job)
    if launch.rank == 0:
        store = _serve(launch, ("127.0.0.1", 0), deadline)
        offered.offer(str(store.port))
        once_met.callback(offered.close)
        return store

    def look() -> Address | None:
        port = offered.read()
        return None if port is None else _parse(f"127.0.0.1:{port}".encode(), deadline)

    return _client(
        deadline.poll(look, f"rank 0 did not offer its port at the Unix socket @{offered.name}"), deadline
    )


def _mpi_world() -> tuple[Any, str]:
    """Return MPI's communicator of all ranks, or None and the reason."""
    from gradcomp.transport.mpi_process import initialise, load

    try:
        MPI = load()
    # A RuntimeError means that no MPI library can be loaded, or the wrong one.
    except (ImportError, RuntimeError) as error:
        return None, first_line(error)
    initialise(MPI)
    return MPI.COMM_WORLD, ""


def _meet_by_mpi(launch: Launch, world: Any, deadline: Deadline) -> Meeting:
    """Broadcast a secret and rank 0's address over MPI. MPI has no deadline, so the broadcast is polled."""
    if (world.Get_rank(), world.Get_size()) != (launch.rank, launch.size):
        hint = "srun tells MPI by --mpi=pmi2 or pmix; " if launch.launcher == "slurm" else ""
        raise ConfigError(
            f"mpi4py belongs to another MPI than the launcher: it says rank {world.Get_rank()} of {world.Get_size()}, "
            f"the launcher {launch.rank} of {launch.size}; {hint}set MASTER_ADDR and MASTER_PORT, or reinstall mpi4py"
        )
    buffer = bytearray(SECRET_BYTES + _ADDRESS_BYTES)
    store = None
    if launch.rank == 0:
        store, text = _serve_and_say(launch, deadline)
        told = secrets.token_bytes(SECRET_BYTES) + text
        buffer[: len(told)] = told
    request = world.Ibcast(buffer, root=0)
    found = deadline.poll(
        lambda: _parse(bytes(buffer[SECRET_BYTES:]).rstrip(b"\0"), deadline) if request.Test() else None,
        "rank 0 did not broadcast its address",
    )
    return Meeting(store or _client(found, deadline), bytes(buffer[:SECRET_BYTES]))


def _serve_and_say(launch: Launch, deadline: Deadline) -> tuple[Any, bytes]:
    """Serve the store on a free port. Return it with the text that tells the other ranks its address."""
    host = own_address(launch)
    store = _serve(launch, (host, 0), deadline)
    return store, f"{host}:{store.port}".encode()


def _parse(answer: bytes, deadline: Deadline) -> Address:
    """Return the address that another rank sent, checked before anything connects to it."""
    host, _, port = answer.decode("ascii", errors="replace").rpartition(":")
    well_formed = len(answer) <= _ADDRESS_BYTES and _HOST.fullmatch(host) and _PORT.fullmatch(port)
    if not well_formed or int(port) > 65535:
        raise deadline.error(f"what was read is not an address of rank 0: {answer[:_ADDRESS_BYTES]!r}")
    return host, int(port)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; torch appends the C++ stack."""
    return str(error).partition("\n")[0]
