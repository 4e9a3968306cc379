"""Chooses the address of this host at which rank 0 serves the job's store and which the other ranks are told."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import socket
import struct
from contextlib import suppress
from dataclasses import replace

from gradcomp.core.errors import ConfigError
from gradcomp.job.launch import Address, Launch

logger = logging.getLogger("gradcomp")

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_BACKLOG = 4096  # every rank connects several times; the kernel lowers a value that is too large

_Bindable = tuple[socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]]


def own_address(launch: Launch) -> str:
    """Return the address at which the other ranks reach this host.

    It is a loopback address only if all ranks are on this host or, with a warning, if no other address is found.
    """
    if launch.interface is not None:
        return interface_address(launch)
    if launch.one_host:
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


def master_address(launch: Launch, master: Address) -> Address:
    """Return the address at which ranks that were given MASTER_ADDR meet: a loopback address if all share one host."""
    host, port = master
    return ("127.0.0.1", port) if launch.one_host and not _is_loopback(host) else master


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
    chosen = None if launch.interface is None else _address_of_interface(launch.interface)
    for one in found:
        if one[1][0] == chosen:
            return one
    if all(ipaddress.ip_address(where[0]).is_loopback for _, where in found):
        if not (launch.one_host or _is_loopback(address[0])):
            return None
        return min(found, key=lambda one: one[0])  # "localhost" may be IPv6 too, but every host has IPv4
    return found[0] if len(found) == 1 else None


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def with_interface(launch: Launch) -> Launch:
    """Return the launch with an interface: the one it names or, for a job on one host, loopback."""
    if launch.interface is None and launch.one_host and _address_of_interface("lo") is not None:
        return replace(launch, interface="lo")
    return launch


def interface_address(launch: Launch) -> str:
    """Return the IPv4 address of the interface that the environment names.

    The ConfigError for a missing interface lists those that have an address.
    """
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
