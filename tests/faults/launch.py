"""Start the ranks of a trial, and wait until they have ended or the deadline has passed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from faults.draw import NETWORK, UNDER_MPI, WORLD, Trial
from faults.judge import Ended
from launching import clean_environment
from ports import free_port

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

_PROGRAMS = {"torch": "faults.rank_torch", "tensorflow": "faults.rank_keras"}
#: What each server imports before it forks: nothing of it may start a thread.
_IMPORTED = {
    # The first optimizer that is made imports torch._dynamo, which takes two seconds.
    "torch": (
        "torch._dynamo",
        "torch.distributed",
        "torch.distributed.fsdp",
        "gradcomp.torch",
        "mpi4py",
        "faults.rank_torch",
    ),
    "tensorflow": ("tensorflow", "keras", "gradcomp.tf", "mpi4py", "faults.rank_keras"),
}
_FULL_KILOBYTES = 16


def framework_of(trial: Trial) -> str:
    """The server that a trial needs."""
    return "tensorflow" if trial.stack == "keras" else "torch"


class Servers:
    """One server per framework, started when it is first needed. A context manager; leaving it ends everything."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gradcomp-faults-")
        self.path = Path(self._directory.name)
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started.values():
            process.kill()  # its ranks have ended: every trial sees to that
            process.wait()
        self._directory.cleanup()

    def address(self, framework: str) -> str:
        """The socket of a server that listens."""
        path = self.path / f"{framework}.socket"
        with self._lock:
            if framework not in self._started:
                command = [sys.executable, str(HERE / "server.py"), str(path), *_IMPORTED[framework]]
                with (self.path / f"{framework}.err").open("wb") as errors:
                    self._started[framework] = subprocess.Popen(
                        command,
                        env=_environment(),
                        stdin=subprocess.DEVNULL,
                        stderr=errors,
                        start_new_session=True,
                    )
                while not path.exists():
                    if self._started[framework].poll() is not None:
                        raise RuntimeError(_text(self.path / f"{framework}.err"))
                    time.sleep(0.02)
        return str(path)


def _environment() -> dict[str, str]:
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **clean_environment(), "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(paths),
        "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow",
    }  # fmt: skip


def run_trial(servers: Servers, trial: Trial) -> list[Ended]:
    """How every rank of the trial ended; nothing of it survives the call."""
    address = servers.address(framework_of(trial))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=servers.path)))
        environment = {**_environment(), "TRIAL": json.dumps(trial.to_plain()), "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": str(free_port()), "TMPDIR": str(directory)}
        if trial.fault == "disk full":
            environment["FULL_DIRECTORY"] = str(stack.enter_context(_full_directory(directory)))
        request = {
            "env": environment, "stdout": str(directory / "{rank}.out"), "stderr": str(directory / "{rank}.err"),
            "network": "", "files": [], "program": _PROGRAMS[framework_of(trial)],
        }  # fmt: skip
        if trial.fault == "launcher killed":
            request["launcher"] = True
            environment["TORCHELASTIC_RUN_ID"] = "trial"  # by which ranks know that their parent is one
        if trial.stack in UNDER_MPI:
            statuses = _run_mpiexec(address, request, trial, directory)
        elif trial.fault in NETWORK:
            statuses = _run_on_hosts(address, request, trial)
        else:
            statuses = _run_here(address, request, trial)
        return [_ended(directory, rank, status) for rank, status in enumerate(statuses)]


# ---------------------------------------------------------------------------------------- ways to start


def _run_here(address: str, request: dict[str, Any], trial: Trial) -> list[int | None]:
    ranks = [_start(address, request, rank, _place(rank)) for rank in range(WORLD)]
    return _wait(ranks, trial.deadline_seconds)


def _run_on_hosts(address: str, request: dict[str, Any], trial: Trial) -> list[int | None]:
    from hosts import Hosts  # benchmarks/hosts.py

    with Hosts(WORLD) as hosts:
        ranks = [
            _start(address, request, rank, hosts.environment(rank), hosts.names[rank])
            for rank in range(WORLD)
        ]
        return _wait(ranks, trial.deadline_seconds)


def _run_mpiexec(address: str, request: dict[str, Any], trial: Trial, directory: Path) -> list[int | None]:
    request["env"]["STATUS_DIRECTORY"] = str(directory)
    command = [
        str(Path(sys.executable).parent / "mpiexec"), "-n", str(WORLD), sys.executable, "-S", "-E",
        str(HERE / "shim.py"), address, json.dumps(request),
    ]  # fmt: skip
    with (directory / "mpiexec.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=clean_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        in_time = True
        try:
            process.wait(trial.deadline_seconds)
        except subprocess.TimeoutExpired:
            in_time = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return [_status_of(directory, rank, in_time) for rank in range(WORLD)]


def _status_of(directory: Path, rank: int, in_time: bool) -> int | None:
    """What the shim noted; one that could not has been ended by the launcher, or by us at the deadline."""
    note = directory / f"{rank}.status"
    if note.exists() and note.read_text():
        return os.waitstatus_to_exitcode(int(note.read_text()))
    return -signal.SIGKILL if in_time else None


def _place(rank: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)
    }  # fmt: skip


def _start(
    address: str, request: dict[str, Any], rank: int, variables: dict[str, str], network: str = ""
) -> socket.socket:
    """Have the server fork a rank; the connection to it."""
    own = request | {"env": request["env"] | variables, "network": network}
    for name in ("stdout", "stderr"):
        own[name] = request[name].replace("{rank}", str(rank))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    connection.send(json.dumps(own).encode())
    connection.recv(64)
    return connection


def _wait(ranks: list[socket.socket], seconds: float) -> list[int | None]:
    """Statuses; None for those that the deadline found alive. To hang up ends them."""
    deadline = time.monotonic() + seconds
    statuses: list[int | None] = []
    for connection in ranks:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            told = connection.recv(64)
        except TimeoutError:
            statuses.append(None)
        else:
            statuses.append(os.waitstatus_to_exitcode(int(told)))
    for connection in ranks:
        connection.close()
    return statuses


# ---------------------------------------------------------------------------------------- what a trial needs


@contextlib.contextmanager
def _full_directory(directory: Path) -> Iterator[Path]:
    """A directory on a file system of its own that has no room left."""
    path = directory / "full"
    path.mkdir()
    options = f"size={_FULL_KILOBYTES}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        with contextlib.suppress(OSError), (path / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 1024)
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def _ended(directory: Path, rank: int, status: int | None) -> Ended:
    out, err = directory / f"{rank}.out", directory / f"{rank}.err"
    said = [json.loads(line) for line in _text(out).splitlines() if line.startswith('{"event"')]
    return Ended(status, said, _text(err))


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
