"""Two ranks on one host, over Gloo, for the benchmarks that train on one GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Variables by which another launcher, or another job, could reach the ranks.
_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "GRADCOMP_",
)  # fmt: skip


class RanksError(Exception):
    """A rank failed, or did not end in time."""


def host_kernels() -> str:
    """The setting `kernels`: the compiled module is no condition of a run on a GPU."""
    return "auto" if importlib.util.find_spec("gradcomp._native") else "reference"


def add_arguments(parser: argparse.ArgumentParser, shape: dict[str, int], seconds: float) -> None:
    """What the command and its ranks are told: the model, by default of this shape, the limit, and what a rank does."""
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"of the model (default: {value})")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="limit for ranks (default: %(default)s)"
    )
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)


def launch(script: str, task: dict[str, Any], seconds: float, ranks: int = 2) -> list[dict[str, Any]]:
    """Run `script --task JSON --rank-out PATH` as so many ranks; what each of them has written, by rank.

    RanksError, with the last words of a rank that failed, unless all end well within the time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    inherited.pop("PYTHONSAFEPATH", None)  # a script imports its neighbours
    with tempfile.TemporaryDirectory(prefix="gpu-ranks-") as name:
        folder = Path(name)
        started = []
        try:
            for rank in range(ranks):
                own = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
                variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **own}
                command = [
                    sys.executable,
                    script,
                    "--task",
                    json.dumps(task),
                    "--rank-out",
                    str(folder / f"{rank}.json"),
                ]
                with (folder / f"{rank}.log").open("wb") as log:
                    started.append(
                        subprocess.Popen(
                            command,
                            env=inherited | {key: str(value) for key, value in variables.items()},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            _wait(started, seconds)
        finally:
            for process in started:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for rank, process in enumerate(started):
            if process.returncode:
                words = (folder / f"{rank}.log").read_text(errors="replace").strip()[-3000:]
                how = f"took more than {seconds:.0f} s" if process.returncode == -signal.SIGKILL else "failed"
                raise RanksError(f"rank {rank} {how}:\n{words}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _wait(started: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, or one has failed and the others have had time to say why, or the time is over."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in started) and time.monotonic() < deadline:
        if any(process.poll() for process in started):
            deadline = min(deadline, time.monotonic() + 10.0)
        time.sleep(0.02)
