"""What mpiexec starts in place of a rank: it has a server fork the rank, lends it MPI's socket, and ends as it ends.

    mpiexec -n 3 python -S -E shim.py SOCKET REQUEST

REQUEST is JSON; ``{rank}`` in the names of the output files becomes the rank's number.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path


def main() -> None:
    """Ask, wait, imitate."""
    request = json.loads(sys.argv[2])
    rank = os.environ["PMI_RANK"]
    request["env"] |= {k: v for k, v in os.environ.items() if k.startswith(("PMI", "MPI", "HYD"))}
    for name in ("stdout", "stderr"):
        request[name] = request[name].replace("{rank}", rank)
    files = [int(os.environ[name]) for name in ("PMI_FD",) if name in os.environ]
    request["files"] = files
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    connection.recv(64)  # the process id
    for file in files:
        os.close(file)
    status = connection.recv(64)
    if not status:
        os._exit(70)
    number = int(status)
    Path(request["env"]["STATUS_DIRECTORY"], f"{rank}.status").write_text(str(number))
    if os.WIFSIGNALED(number):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(os.WTERMSIG(number), signal.SIG_DFL) if os.WTERMSIG(number) != signal.SIGKILL else None
        os.kill(os.getpid(), os.WTERMSIG(number))
    os._exit(os.WEXITSTATUS(number))


main()
