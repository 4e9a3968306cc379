"""The IPv4 addresses of this host's network interfaces."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface


def address_of(name: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such interface or it has no address."""
    request = struct.pack("256s", name.encode()[:15])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def addresses() -> dict[str, str]:
    """Return the address of every interface that has one, by the interface's name."""
    found = {name: address_of(name) for _, name in socket.if_nameindex()}
    return {name: address for name, address in found.items() if address is not None}
