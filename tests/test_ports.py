"""Jobs that start at the same time never share a port."""

from __future__ import annotations

import socket
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from ports import free_port


def test_processes_get_different_ports() -> None:
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as processes:
        calls = [processes.submit(free_port) for _ in range(60)]
        ports = [call.result() for call in calls]
    assert len(set(ports)) == 60
    clients = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if clients.exists():
        assert max(ports) < int(clients.read_text().split()[0])


def test_a_port_in_use_is_left_out() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", free_port() + 1))
        taken = held.getsockname()[1]
        assert free_port() != taken


def test_no_port_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ports._can_listen", lambda port: False)
    with pytest.raises(OSError, match="are taken"):
        free_port()
