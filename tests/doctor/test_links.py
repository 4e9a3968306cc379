"""Connections between two doctors of this machine: what they measure, and whom they refuse."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradcomp.core.errors import TransportError
from gradcomp.doctor import links, reach
from gradcomp.doctor.facts import Network
from gradcomp.doctor.links import Door, knock, measure
from gradcomp.doctor.reach import Answer


def together(*work: Callable[[], Any]) -> list[Any]:
    """What the functions return, each run by a thread of its own; an error is returned as it is."""
    found: list[Any] = [None] * len(work)

    def run(place: int) -> None:
        try:
            found[place] = work[place]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def at(door: Door, *before: str, **changes: Any) -> Network:
    """What a rank tells of its door; ``before``: addresses that are tried first."""
    port = door.ports["127.0.0.1"]
    ports = {**dict.fromkeys(before, port), "127.0.0.1": port}
    return Network(**{"ports": ports, "token": door.token, **changes})


def test_both_sides_measure_their_own_direction():
    with Door(["127.0.0.1"]) as door:
        connection, attempts = knock(3, at(door))
        assert [one.answer for one in attempts] == [Answer.YES]
        mine, theirs = together(lambda: measure(connection, True), lambda: measure(door.take(3, 5), False))
    for rates in (mine, theirs):
        assert 0 < rates.latency_seconds < 1
        assert 1e6 < rates.bytes_per_second < 1e12


def test_the_first_address_that_lets_through_is_used():
    with Door(["127.0.0.1", "127.0.0.1", "192.0.2.77"]) as door:  # the last is of no host
        assert list(door.ports) == ["127.0.0.1"]
        connection, attempts = knock(0, at(door, "255.255.255.255", "127.0.0.2"))
        connection.close()
    assert [one.address for one in attempts] == ["255.255.255.255", "127.0.0.2", "127.0.0.1"]
    assert [one.answer is Answer.YES for one in attempts] == [False, False, True]


def test_a_stranger_is_refused_and_does_not_count():
    with Door(["127.0.0.1"]) as door:
        connection, attempts = knock(0, at(door, token="0" * 32))
        assert connection is None
        assert [one.answer for one in attempts] == [Answer.REFUSED]
        with pytest.raises(TransportError, match="rank 0 did not connect"):
            door.take(0, 0.1)
        connection, _ = knock(1, at(door))  # the door still opens
        door.take(1, 5).close()
        connection.close()


@pytest.mark.parametrize(
    "sent", [b"", links._HEAD.pack(b"S", 1 << 40), links._HEAD.pack(b"?", 1), links._HEAD.pack(b"E", 1 << 30)]
)
def test_another_side_that_breaks_the_protocol_is_an_error(sent: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        theirs = socket.create_connection(listening.getsockname())
        ours, _ = listening.accept()
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(TransportError, match=r"hung up|no command"):
        measure(ours, leads=False)
    theirs.close()


def test_addresses_answer_in_their_ways():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        assert reach.ask(address) is Answer.YES
    assert reach.ask(address) is Answer.REFUSED
    assert reach.wait_for(address, 0.5) is Answer.REFUSED
    assert reach.ask(("name.invalid", 1)) is Answer.NO_NAME
    assert reach.is_up("127.0.0.1")


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (TimeoutError("timed out"), Answer.SILENT),
        (OSError(errno.ETIMEDOUT, ""), Answer.SILENT),
        (OSError(errno.EHOSTUNREACH, ""), Answer.NO_WAY),
        (OSError(errno.ENETUNREACH, ""), Answer.NO_WAY),
        (PermissionError(errno.EACCES, ""), Answer.FORBIDDEN),
        (ConnectionRefusedError(errno.ECONNREFUSED, ""), Answer.REFUSED),
    ],
)
def test_errors_of_connections_are_classified(error: OSError, answer: Answer):
    assert reach.classified(error) is answer
