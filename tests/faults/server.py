"""A process that has imported a framework and forks one rank per request: a rank then starts in milliseconds.

    python server.py SOCKET MODULE...

A client connects to the socket and sends one request: a JSON object with ``env``, ``stdout``, ``stderr``, ``network``
(the name of a network namespace, or empty) and ``program`` (a module whose ``main`` is called) or ``command`` (a file
that is run, and its arguments), and perhaps open files, whose numbers in the rank are in ``files``. The answer is the
rank's process id, and later its status as ``waitpid`` gives it. A client that hangs up ends its rank.

The server has one thread and never initialises gradcomp: a rank begins as a new interpreter would, and its atexit
handlers run, because it leaves the loop and comes to the end of this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 17
_CLONE_NEWNET = 0x40000000
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02


def serve(path: str) -> dict[str, Any]:
    """Fork ranks until the parent is gone. Returns in each rank, with its request."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads and keep their locks"  # noqa: PTH208
    gc.freeze()  # else the first collection in a rank would copy most of this process's memory
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    Path(f"{path}.new").rename(path)  # who sees it can connect
    ranks: dict[socket.socket, int] = {}  # process ids; of a rank without its launcher the group's, negative
    launchers: set[int] = set()
    parent = os.getppid()
    while os.getppid() == parent:
        ready, _, _ = select.select([listener, *ranks], [], [], _POLL_SECONDS)
        if listener in ready:
            client, _ = listener.accept()
            data, files, _, _ = socket.recv_fds(client, _MOST_BYTES, 8)
            if not data:
                client.close()
                continue
            request: dict[str, Any] = json.loads(data)
            if request.get("launcher"):  # its rank, whose parent may die, becomes a child of this process
                ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            pid = os.fork()
            if pid == 0:
                _leave([listener, client, *ranks])
                if request.get("launcher") and (rank := os.fork()):
                    _end_as(rank)
                _become(request, files)
                return request
            if request.get("launcher"):
                launchers.add(pid)
            for file in files:
                os.close(file)
            client.send(str(pid).encode())
            ranks[client] = pid
        for client in [one for one in ready if one in ranks]:
            _kill(ranks[client])  # the client has hung up: it says nothing else
        _report(ranks, launchers)
    for pid in ranks.values():
        _kill(pid)
    os._exit(0)


def _end_as(rank: int) -> None:
    """What a launcher is to its rank."""
    _, status = os.waitpid(rank, 0)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def _report(ranks: dict[socket.socket, int], launchers: set[int]) -> None:
    for client, pid in list(ranks.items()):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done in launchers and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            launchers.remove(pid)
            ranks[client] = -pid
        elif done:
            _kill(pid)  # what it started
            del ranks[client]
            with contextlib.suppress(OSError):  # it has hung up
                client.send(str(status).encode())
            client.close()


def _kill(pid: int) -> None:
    try:
        os.killpg(abs(pid), signal.SIGKILL)
    except ProcessLookupError:
        return


def _leave(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()
    os.setsid()


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Take the environment, the output files, the network and the open files that the request names."""
    os.environ.clear()
    os.environ.update(request["env"])
    if "numpy" in sys.modules:  # Python's own generator draws anew by itself
        sys.modules["numpy"].random.seed()
    wanted = [os.open(os.devnull, os.O_RDONLY)]
    wanted += [
        os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("stdout", "stderr")
    ]
    if request["network"]:
        _enter(request["network"])
    # Through numbers that nobody uses, for what is received may have a number that is wanted for another file.
    high = [
        (os.dup2(file, 200 + i), to)
        for i, (file, to) in enumerate(
            [*zip(wanted, range(3), strict=True), *zip(files, request["files"], strict=True)]
        )
    ]
    for file in [*wanted, *files]:
        os.close(file)
    for file, to in high:
        os.dup2(file, to, inheritable=True)
        os.close(file)


def _enter(network: str) -> None:
    handle = os.open(f"/run/netns/{network}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns {network}")
    os.close(handle)


def run(command: list[str]) -> None:
    """Run a file as ``python FILE ARGUMENT...`` does; what it does not catch is shown without this function's frame."""
    sys.argv = command
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = command[0]
    code = compile(Path(command[0]).read_text(encoding="utf-8"), command[0], "exec")
    try:
        exec(code, vars(module))
    except Exception as error:  # noqa: BLE001 - whatever it is
        shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    sys.modules["pyarrow"] = None  # type: ignore[assignment]  # TensorFlow imports it where it is, and it starts a thread
    for module in sys.argv[2:]:
        importlib.import_module(module)
    rank = serve(sys.argv[1])
    if "command" in rank:
        run(rank["command"])
    else:
        importlib.import_module(rank["program"]).main()
