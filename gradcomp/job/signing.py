"""Signs published values if others can write to the store: HMAC-SHA-256 with a key that only the job's ranks know.

A signature covers the name under which a value is published, and the key is new after every ``init``: a value that is
copied to another name, or from another job, does not verify. Processes of one user on one host pass the key through a
socket of the host, without a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import socket
import struct
import threading

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel

_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group
#: One second, as a ``struct timeval``: a process that offers a text answers at once, unless it was stopped.
_PATIENCE = struct.pack("ll", 1, 0)

logger = logging.getLogger("gradcomp")
SECRET_BYTES = 32
_MOST_SIGNED_BYTES = 1 << 20
_SIGNATURE_BYTES = 65  # hexadecimal digits and a colon
_NAME = re.compile(r"[0-9a-f]{32}")


class HostSocket:
    """Offers a short text to other processes of its user, under a name derived from a job's.

    The name is that of an abstract Unix socket, which Linux keeps without a file: it disappears with its process,
    however that ends. The kernel tells the user of the process at the other end; no other user's text is read, and no
    other user is told anything. The processes must share a network namespace.
    """

    def __init__(self, job: str) -> None:
        self.name = f"gradcomp-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def offer(self, text: str) -> None:
        """Let other processes read the text until :meth:`close`. ConfigError if the socket cannot be opened."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(f"\0{self.name}")
            listening.listen(socket.SOMAXCONN)
        except OSError as error:
            listening.close()
            raise ConfigError(
                f"cannot listen at the Unix socket @{self.name}, by which the ranks of this host meet "
                f"({error.strerror}): set MASTER_ADDR and MASTER_PORT"
            ) from error
        self._listening = listening
        self._thread = threading.Thread(
            target=_tell, args=(listening, text.encode()), name="gradcomp-meeting", daemon=True
        )
        self._thread.start()

    def read(self) -> str | None:
        """Return the text, or None while no process of this user offers one."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                # The first bounds connect(), which blocks while the backlog is full.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _PATIENCE)
                connection.connect(f"\0{self.name}")
                if not _is_own(connection):
                    return None
                content = b""
                while len(content) < _MOST_BYTES and (part := connection.recv(_MOST_BYTES)):
                    content += part
                return content.decode()
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Stop offering the text."""
        listening, thread = self._listening, self._thread
        self._listening = self._thread = None
        if listening is not None and thread is not None:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()
            listening.close()


def _tell(listening: socket.socket, content: bytes) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            if _is_own(connection):
                connection.sendall(content)  # fits into the socket's buffer, so it does not block


def _is_own(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


class Seal:
    """Signs values, and tells those of this job from a stranger's.

    ``secret``: known to the job's ranks only. ``context``: not secret; tells this use of the secret from others. Wire:
    65 bytes before each value.
    """

    def __init__(self, secret: bytes, context: bytes) -> None:
        self._key = hmac.digest(secret, b"gradcomp 1\0" + context, "sha256")
        self._reported = False

    def sign(self, name: str, value: bytes) -> bytes:
        """Return the value, signed for this name."""
        return self._signature(name, value) + b":" + value

    def open(self, name: str, signed: bytes) -> bytes | None:
        """Return the value; None, and a warning the first time, if it was not signed for this name with this key."""
        signature, value = signed[: _SIGNATURE_BYTES - 1], signed[_SIGNATURE_BYTES:]
        if len(signed) <= _MOST_SIGNED_BYTES and hmac.compare_digest(signature, self._signature(name, value)):
            return value
        if not self._reported:
            self._reported = True
            logger.warning(
                "%s is not signed with this job's secret and is ignored, as is all that follows like it: somebody "
                "else writes where the ranks meet, or GRADCOMP_SECRET differs between ranks",
                printable(name, 200),
            )
        return None

    def confirmation(self) -> bytes:
        """Return a value by which ranks find out that they have the same key; it does not reveal the key."""
        return self._signature("confirmation", b"")

    def _signature(self, name: str, value: bytes) -> bytes:
        # The length keeps the end of the name apart from the beginning of the value.
        encoded = name.encode()
        message = len(encoded).to_bytes(8, "little") + encoded + value
        return hmac.digest(self._key, message, "sha256").hex().encode()


class SignedControl(ControlChannel):
    """Signs the values of a control channel; those that do not verify count as missing."""

    def __init__(self, control: ControlChannel, seal: Seal) -> None:
        self._control = control
        self._seal = seal

    def publish(self, key: str, value: bytes) -> None:
        self._control.publish(key, self._seal.sign(key, value))

    def lookup(self, key: str) -> bytes | None:
        found = self._control.lookup(key)
        return None if found is None else self._seal.open(key, found)


def _greeting(rank: int, part: bytes) -> tuple[str, bool, str]:
    """Return what a rank sent before the ranks have a key: a nonce, whether it was given a secret, and an offer.

    The offer is the name of rank 0's host socket, empty without one.
    """
    try:
        nonce, has_secret, offer = json.loads(part)
        if _NAME.fullmatch(nonce) and type(has_secret) is bool and (offer == "" or _NAME.fullmatch(offer)):
            return nonce, has_secret, offer
    except (ValueError, TypeError):
        pass
    raise WireFormatError(f"rank {rank} began the agreement on a secret with {part!r:.80}")


def agree_on_seal(group: Transport, one_host: bool, given: bytes) -> Seal | None:
    """Return the seal of the ranks of ``group``, from the secret they were ``given`` or, on one host, from rank 0's.

    Rank 0's secret goes through a socket that only this user can read. Without either, the result is None, and rank 0
    logs a warning that says what to set. Collective. Every rank adds a nonce to the key, so that no earlier job's
    values verify. Wire: two rounds of about a hundred bytes per rank.

    Raises ConfigError on every rank if some have been given a secret and others not, or another one.
    """
    offer, made, problem = "", b"", ""
    host_socket: HostSocket | None = None
    if group.rank == 0 and one_host and not given:
        offer, made = secrets.token_hex(16), secrets.token_bytes(SECRET_BYTES)
        host_socket = HostSocket(offer)
        try:
            host_socket.offer(made.hex())
        except ConfigError as error:
            offer, made, problem = "", b"", f" ({error})"
    try:
        own = json.dumps([secrets.token_hex(16), bool(given), offer]).encode()
        parts = group.allgather_bytes(own)
        nonces, have_secret, offers = zip(*(_greeting(*each) for each in enumerate(parts)), strict=True)
        if len(set(have_secret)) > 1:
            without = ", ".join(str(rank) for rank, has_secret in enumerate(have_secret) if not has_secret)
            raise ConfigError(
                f"GRADCOMP_SECRET is set on some ranks, but not on rank {without}: "
                "set it to the same text on all ranks"
            )
        secret = given or made or _offered(offers[0])
        seal = Seal(secret, b"control:" + ",".join(nonces).encode()) if secret else None
        confirmations = group.allgather_bytes(b"" if seal is None else seal.confirmation())
    finally:
        if host_socket is not None:
            host_socket.close()
    other = next((rank for rank, one in enumerate(confirmations) if one != confirmations[0]), None)
    if seal is not None and other is None:
        return seal
    if given:
        raise ConfigError(
            f"GRADCOMP_SECRET differs between rank 0 and rank {other}: set it to the same text on all ranks"
        )
    if group.rank == 0:
        if one_host and not problem:
            problem = f" (rank {other} could not read what rank 0 offers at a Unix socket)"
        logger.warning(
            "what the ranks publish is not signed, anybody who reaches the job's store can stop it%s: set "
            "GRADCOMP_SECRET to the same random text on all ranks",
            problem,
        )
    return None


def _offered(name: str) -> bytes:
    """Return rank 0's secret, or no bytes if no process of this rank's user offers one."""
    text = HostSocket(name).read() if name else None
    try:
        secret = bytes.fromhex(text or "")
    except ValueError:
        return b""
    return secret if len(secret) == SECRET_BYTES else b""
