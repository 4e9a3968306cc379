"""Passes a short text between processes of one user on one host, without a network."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading

from gradcomp.core.errors import ConfigError

_MOST_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")  # process, user, group
#: One second, as a ``struct timeval``: a process that offers a text answers at once, unless it was stopped.
_PATIENCE = struct.pack("ll", 1, 0)


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
