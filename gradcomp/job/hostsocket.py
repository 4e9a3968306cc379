"""A few bytes from one process to the others of the same user on the same host, without a network."""

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
#: For how long a process that offers a text may be silent: it answers at once, or is stopped. As the kernel has it.
_PATIENCE = struct.pack("ll", 1, 0)


class HostSocket:
    """A short text that a process offers to others of its user, under a name after a job.

    The name is that of a Unix socket without a file (an abstract one, of Linux): it is gone when its process is,
    however that ends. The kernel says which user is at the other end; nobody else's text is read, and nobody else is
    told. The processes share a network namespace.
    """

    def __init__(self, job: str) -> None:
        self.name = f"gradcomp-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}"
        self._listening: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def offer(self, text: str) -> None:
        """Let the others read the text until :meth:`close`. Raises ConfigError if that is not possible."""
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
        """The text, or None as long as no process of this user offers one."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE
                )  # many may be connecting
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
        """Offer it no longer; the others have read it."""
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
                connection.sendall(content)  # less than a socket's buffer: waits for nobody


def _is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())
