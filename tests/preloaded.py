"""Ranks that start with a framework imported: forks of one process, which has imported it and nothing else.

An import of PyTorch takes two seconds of a core, and its first optimizer two more, for every rank of every launch, and
TensorFlow five. A fork has all else of its own, see ``faults/server.py``. Whatever tests how a program starts or
imports takes processes of its own instead.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

#: By its distribution: this folder's tests/torch looks like a package without files.
HAS_TORCH = any(importlib.metadata.distributions(name="torch"))

PLAIN = ("batch", "contract", "gradcomp.transport.shm")
TORCH = ("batch", "torch._dynamo", "gradcomp.torch")
TENSORFLOW = ("batch", "tensorflow", "keras", *["gradcomp.torch"] * HAS_TORCH, "gradcomp.tf")
HOROVOD = ("batch", "horovod.torch", "gradcomp.torch")
TENSORFLOW_ALONE = ("without_torch", "tensorflow", "keras", "gradcomp.tf")
_starting = threading.Lock()
_SERVER = Path(__file__).parent / "faults/server.py"
_LAUNCHED = Path(__file__).with_name("launched.py")


class Fork:
    """A rank, as subprocess.Popen has it."""

    def __init__(self, address: str, request: Mapping[str, object]) -> None:
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(address)
        self._connection.send(json.dumps(request).encode())
        self.pid = int(self._connection.recv(64))

    def wait(self, timeout: float | None = None) -> int:
        """How it ended, or subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(None if timeout is None else max(0.001, timeout))
            try:
                status = self._connection.recv(64)
            except TimeoutError:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0) from None
            self.returncode = os.waitstatus_to_exitcode(int(status))
            self._connection.close()
        return self.returncode


def start(
    modules: tuple[str, ...],
    shared: Mapping[str, str],
    command: list[str],
    variables: Mapping[str, str],
    stdout: Path,
    stderr: Path,
) -> Fork:
    """A fork of the process that has imported ``modules`` under the variables ``shared``. It runs a file."""
    request = {
        "env": dict(variables),
        "stdout": str(stdout),
        "stderr": str(stderr),
        "network": "",
        "files": [],
    }
    with _starting:
        address = _server(modules, frozenset(shared.items()))
    return Fork(address, {**request, "command": command})


def program(modules: tuple[str, ...], shared: Mapping[str, str], file: Path) -> list[str]:
    """What a launcher starts instead of ``python FILE``, for ranks that are forks as in :func:`start`."""
    with _starting:
        address = _server(modules, frozenset(shared.items()))
    return [sys.executable, "-S", "-E", str(_LAUNCHED), address, str(file)]


@functools.cache
def _server(modules: tuple[str, ...], shared: frozenset[tuple[str, str]]) -> str:
    """The socket of the process, which is started when it is first asked for and ends with this one."""
    directory = tempfile.TemporaryDirectory(prefix="gradcomp-ranks-")
    address, errors = Path(directory.name) / "socket", Path(directory.name) / "stderr"
    with errors.open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, str(_SERVER), str(address), *modules],
            env=dict(shared),
            stdin=subprocess.DEVNULL,
            stdout=err,
            stderr=err,
            start_new_session=True,
        )

    def end() -> None:
        process.kill()
        process.wait()
        directory.cleanup()

    atexit.register(end)
    while not address.exists():
        if process.poll() is not None:
            raise RuntimeError(errors.read_text(errors="replace"))
        time.sleep(0.01)
    return str(address)
