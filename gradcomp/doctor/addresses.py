"""Finds the interfaces of this host, the address that Gloo would listen at, and the one that leads to rank 0."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from gradcomp.doctor.facts import Interface, Network
from gradcomp.job.interfaces import address_of, addresses
from gradcomp.job.launch import Launch

_CLASS = Path("/sys/class/net")
_LOOPBACK = "127.0.0.1"
#: An address of no host (RFC 5737). The way to it is the default one; no packet is sent.
_ELSEWHERE = ("192.0.2.1", 9)


def network(launch: Launch) -> Network:
    """Return how the other ranks reach this one."""
    interfaces = tuple(_interface(name, address) for name, address in addresses().items())
    named = launch.interface or ""
    address = address_of(named) or "" if named else _LOOPBACK if launch.one_host else _of_hostname()
    routed = _LOOPBACK if launch.one_host else _routed(launch)
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Network(
        hostname=socket.gethostname(),
        boot=boot,
        interfaces=interfaces,
        named=named,
        variable=launch.interface_variable,
        address=address,
        routed=routed,
        nccl=os.environ.get("NCCL_SOCKET_IFNAME", ""),
    )


def _interface(name: str, address: str) -> Interface:
    here = _CLASS / name
    return Interface(
        name, address, _number(here / "mtu", 0), _number(here / "speed", -1), (here / "device").exists()
    )


def _number(path: Path, otherwise: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # a driver without a rate says that the argument is invalid
        return otherwise


def _of_hostname() -> str:
    """Return the address that Gloo takes without an interface: the host name's if it is one of this host's."""
    with suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(
            socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return _LOOPBACK


def _routed(launch: Launch) -> str:
    """Return the address from which packets to rank 0's host leave, or to the world where its address is not known."""
    for target in (launch.master, launch.horovod_server, _ELSEWHERE):
        if target is None:
            continue
        with suppress(OSError):
            for family, _, _, _, where in socket.getaddrinfo(*target, type=socket.SOCK_DGRAM):
                with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(where)
                    return str(probe.getsockname()[0])
    return ""
