"""What a launcher starts in place of a rank's interpreter: it has a server fork the rank, and ends as that ends.

    LAUNCHER ... python -S -E launched.py SOCKET FILE ARGUMENT...

The rank gets this process's environment, output and socket of MPI. The socket is that of ``faults/server.py``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys


def main() -> None:
    """Ask, wait, imitate."""
    files = [1, 2, *(int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ)]
    nowhere = {"stdout": os.devnull, "stderr": os.devnull, "network": ""}  # what is sent replaces them
    request = {**nowhere, "env": dict(os.environ), "files": files, "command": sys.argv[2:]}
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    connection.recv(64)  # the process id
    for file in files[2:]:
        os.close(file)  # the launcher hears when the rank closes it
    status = connection.recv(64)
    if not status:
        os._exit(70)
    number = int(status)
    if os.WIFSIGNALED(number):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if os.WTERMSIG(number) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(number), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(number))
    os._exit(os.WEXITSTATUS(number))


main()
