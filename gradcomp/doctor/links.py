"""Measures the link between two hosts over a TCP connection of its own: the time of a small message, and the rates.

**Connections.** Every rank has a :class:`Door`, which listens on free ports of the
addresses by which other hosts may reach it, and keeps a connection only if its first
bytes are the text that the rank published in the job's store.

**Measurement.** One side leads. It sends a few bytes to and fro, then messages that double in size until one takes
``_LONG_SECONDS``; the other side confirms each with one byte. So a slow link gets small messages and a fast one large
ones, and both take the same time. Then the other side leads.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from gradcomp.core.errors import TransportError
from gradcomp.doctor.facts import Network
from gradcomp.doctor.reach import Answer, classified

_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"!{_TOKEN_BYTES}sI")
_WELCOME = b"+"
_HELLO_SECONDS = 2.0
#: What the leading side announces: a command and a number of bytes.
_HEAD = struct.Struct("!cQ")
_ECHO, _SINK, _TURN, _END = b"E", b"S", b"T", b"Q"
_PING_BYTES, _PINGS, _PING_SECONDS = 64, 200, 0.2
_FIRST_BYTES, _LAST_BYTES, _LONG_SECONDS = 1 << 16, 1 << 26, 0.2
_SILENCE_SECONDS = 20.0


@dataclass(frozen=True)
class Attempt:
    """How one of a rank's addresses answered."""

    address: str
    answer: Answer


@dataclass(frozen=True)
class Rates:
    """The time of a small message, one way, and the bytes per second that the measuring side sent."""

    latency_seconds: float
    bytes_per_second: float


class Door:
    """Lets the doctors of other ranks connect to this one; a context manager."""

    def __init__(self, addresses: Iterable[str]) -> None:
        """Listen at these addresses of this host; one that cannot be listened at is left out."""
        self.token = secrets.token_hex(_TOKEN_BYTES // 2)
        self.ports: dict[str, int] = {}
        self._listening: list[socket.socket] = []
        self._came: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        for address in dict.fromkeys(addresses):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with contextlib.suppress(OSError):
                listening = socket.create_server((address, 0), family=family)
                self.ports[address] = listening.getsockname()[1]
                self._listening.append(listening)
                thread = threading.Thread(
                    target=self._serve, args=(listening,), name="gradcomp-door", daemon=True
                )
                thread.start()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *error: object) -> None:
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            listening.close()
        for connection in self._came.values():
            connection.close()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            try:
                connection.settimeout(_HELLO_SECONDS)
                token, rank = _HELLO.unpack(_read(connection, _HELLO.size))
                if not hmac.compare_digest(token, self.token.encode()):
                    raise TransportError("a stranger")
                with self._changed:  # before the welcome: whoever has read that may be looked for
                    self._came[rank] = connection
                    self._changed.notify_all()
                connection.sendall(_WELCOME)
            except (OSError, TransportError):
                connection.close()

    def take(self, rank: int, seconds: float) -> socket.socket:
        """Return the last connection of a rank; TransportError if there is none in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._came, seconds):
                raise TransportError(f"rank {rank} did not connect")
            return self._came.pop(rank)


def knock(
    own_rank: int, network: Network, seconds: float = 2.0
) -> tuple[socket.socket | None, list[Attempt]]:
    """Connect to another rank's door, at the first of its addresses that lets it through.

    Return the connection, or None, and how each address answered.
    """
    attempts = []
    for address, port in network.ports.items():
        try:
            connection = socket.create_connection((address, port), timeout=seconds)
        except OSError as error:
            attempts.append(Attempt(address, classified(error)))
            continue
        except OverflowError:  # no port has such a number
            attempts.append(Attempt(address, Answer.NO_WAY))
            continue
        try:
            connection.sendall(_HELLO.pack(network.token.encode(), own_rank))
            welcome = connection.recv(1)
        except OSError:
            welcome = b""
        if welcome == _WELCOME:
            return connection, [*attempts, Attempt(address, Answer.YES)]
        connection.close()
        # Another process listens there: the address is that of another host, or of this one.
        attempts.append(Attempt(address, Answer.REFUSED))
    return None, attempts


def measure(connection: socket.socket, leads: bool) -> Rates:
    """Measure together with the other side, which calls it with the other value of ``leads``; return the own rates.

    TransportError if the other side does not answer in time or breaks the protocol.
    """
    try:
        connection.settimeout(_SILENCE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if leads:
            rates = _lead(connection)
            connection.sendall(_HEAD.pack(_TURN, 0))
            _follow(connection)
        else:
            _follow(connection)
            rates = _lead(connection)
            connection.sendall(_HEAD.pack(_END, 0))
    except OSError as error:
        what = "stopped" if isinstance(error, TimeoutError) else "ended"
        raise TransportError(f"the connection {what} while it was measured ({error})") from error
    finally:
        connection.close()
    return rates


def _lead(connection: socket.socket) -> Rates:
    ping = _HEAD.pack(_ECHO, _PING_BYTES) + bytes(_PING_BYTES)
    trips: list[float] = []
    deadline = time.perf_counter() + _PING_SECONDS
    while len(trips) < 3 or (len(trips) < _PINGS and time.perf_counter() < deadline):
        trips.append(_timed(lambda: connection.sendall(ping), lambda: _read(connection, _PING_BYTES)))
    trip = median(trips)
    block = memoryview(bytes(_FIRST_BYTES))
    nbytes = _FIRST_BYTES
    while True:
        count = nbytes // _FIRST_BYTES

        def send(nbytes: int = nbytes, count: int = count) -> None:
            connection.sendall(_HEAD.pack(_SINK, nbytes))
            for _ in range(count):
                connection.sendall(block)

        seconds = _timed(send, lambda: _read(connection, 1))
        if seconds > _LONG_SECONDS or nbytes >= _LAST_BYTES:
            return Rates(trip / 2, nbytes / max(seconds - trip, 1e-6))
        nbytes *= 2


def _timed(send: Callable[[], object], confirm: Callable[[], object]) -> float:
    begin = time.perf_counter()
    send()
    confirm()
    return time.perf_counter() - begin


def _follow(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(1 << 20))
    while True:
        command, nbytes = _HEAD.unpack(_read(connection, _HEAD.size))
        if command == _ECHO and nbytes == _PING_BYTES:
            connection.sendall(_read(connection, nbytes))
        elif command == _SINK and nbytes <= _LAST_BYTES:
            while nbytes:
                if not (got := connection.recv_into(buffer[: min(nbytes, len(buffer))])):
                    raise TransportError("the other side hung up")
                nbytes -= got
            connection.sendall(_WELCOME)
        elif command in (_TURN, _END):
            return
        else:
            raise TransportError(f"the other side sent {command!r} {nbytes}, which is no command")


def _read(connection: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        part = connection.recv(nbytes - len(found))
        if not part:
            raise TransportError("the other side hung up")
        found += part
    return bytes(found)
