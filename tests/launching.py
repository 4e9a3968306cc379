"""Start the ranks of a job as real processes, directly or through torchrun; nothing survives the call.

Fault tests start processes directly: torchrun ends the survivors of a dead rank before they can report.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import preloaded
from ports import free_port

#: Variables by which launchers, and the test run itself, could reach the ranks.
_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "HOROVOD_", "OMPI_", "PMI", "MPI_", "SLURM_",
    "GRADCOMP_", "GLOO_", "PYTEST_",
)  # fmt: skip

#: Variables that Python reads when it starts, or frameworks when they are imported: a fork does neither again.
_READ_BY_IMPORTS = ("PYTHON", "TF_", "CUDA_", "OMP_", "KERAS_")

#: torchrun of two ranks of this host. A whole command follows; without it torchrun adds Python's ``-u``.
TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python",
)  # fmt: skip

_GRACE_SECONDS = 5.0


class Finished(NamedTuple):
    """How a process ended, and when. ``returncode`` is negative for a signal; -9 also after a timeout."""

    returncode: int
    stdout: str
    stderr: str
    at: float = 0.0


def run_ranks(
    source: str | Callable[[], None],
    world: int,
    *,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    timeout: float = 60.0,
    arguments: tuple[str, ...] = (),
    imported: tuple[str, ...] = (),
) -> list[Finished]:
    """Run a program as ``world`` ranks of this host; all results, in rank order.

    ``source``: the program, or a function without arguments whose body needs nothing around it. ``env``: further
    variables, for all ranks or by rank; the default is what torch.distributed's ``env://`` reads. A mapping adds to
    that, a function replaces it. ``imported``: modules that ranks have imported when they start, see ``preloaded``.
    """
    if callable(env):
        variables = [env(rank) for rank in range(world)]
    else:
        port = str(free_port())
        variables = [{**plain_variables(rank, world, port), **(env or {})} for rank in range(world)]
    with _program(source) as program:
        command = [sys.executable, str(program), *arguments]
        named = {} if callable(env) else dict(env or {})
        shared = {name: value for name, value in named.items() if name.startswith(_READ_BY_IMPORTS)}
        start = functools.partial(_fork, imported, shared) if imported else _start
        return _finish(
            [start(command, one, program.parent, str(r)) for r, one in enumerate(variables)], timeout
        )


def run_torchrun(
    source: str | Callable[[], None],
    world: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 90.0,
    arguments: tuple[str, ...] = (),
    imported: tuple[str, ...] = (),
) -> list[Finished]:
    """As :func:`run_ranks`, through torchrun; the return code of all ranks is torchrun's.

    ``imported``: torchrun has imported these modules too when it starts.
    """
    with _program(source) as program:
        logs = program.parent / "logs"
        torchrun = importlib.util.find_spec("torch.distributed.run")
        assert torchrun is not None
        options = ["--standalone", f"--nproc-per-node={world}", "--redirects=3", f"--log-dir={logs}"]
        ranks = [str(program)]
        start = _start
        if imported:
            ranks = ["--no-python", *preloaded.program(imported, clean_environment(), program)]
            start = functools.partial(_fork, imported, {})
        command = [sys.executable, str(torchrun.origin), *options, *ranks, *arguments]
        (whole,) = _finish([start(command, env or {}, program.parent, "torchrun")], timeout)
        return [
            Finished(whole.returncode, _log(logs, rank, "stdout"), _log(logs, rank, "stderr") or whole.stderr)
            for rank in range(world)
        ]


def run_command(
    command: list[str], *, env: Mapping[str, str] | None = None, timeout: float = 100.0
) -> Finished:
    """Run a launcher. One that takes too long may end its ranks by itself before it is killed.

    Its ranks share one output, so Python buffers theirs: unbuffered, a line and its end are two writes, and a line of
    another rank may come between them. What a rank wants to be seen in time it prints with ``flush=True``. torchrun
    starts Python unbuffered itself, see ``TORCHRUN``.
    """
    variables = {"PYTHONUNBUFFERED": "", **(env or {})}
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        started = _start(command, variables, Path(directory), "launcher")
        try:
            started.process.wait(timeout)
        except subprocess.TimeoutExpired:
            started.process.terminate()
        return _finish([started], _GRACE_SECONDS)[0]


def plain_variables(rank: int, world: int, port: str) -> dict[str, str]:
    """What a user sets by hand to start ranks on one host."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def clean_environment() -> dict[str, str]:
    """This process's environment without anything a launcher could have set; one thread per rank."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@contextlib.contextmanager
def _program(source: str | Callable[[], None]) -> Iterator[Path]:
    if callable(source):
        text = textwrap.dedent(inspect.getsource(source)) + f"\n\n{source.__name__}()\n"
    else:
        text = textwrap.dedent(source)
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        program = Path(directory) / "program.py"
        program.write_text(text, encoding="utf-8")
        yield program


class _Started(NamedTuple):
    process: subprocess.Popen[bytes] | preloaded.Fork
    stdout: Path
    stderr: Path


def _start(command: list[str], variables: Mapping[str, str], directory: Path, name: str) -> _Started:
    """Output goes to files: a full pipe would stop a rank, and a job with it."""
    stdout, stderr = directory / f"{name}.stdout", directory / f"{name}.stderr"
    with stdout.open("wb") as out, stderr.open("wb") as err:
        process = subprocess.Popen(
            command,
            env={**clean_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return _Started(process, stdout, stderr)


def _fork(
    imported: tuple[str, ...],
    shared: Mapping[str, str],
    command: list[str],
    variables: Mapping[str, str],
    directory: Path,
    name: str,
) -> _Started:
    """As :func:`_start`, in a process that has imported modules with the variables that all ranks share."""
    stdout, stderr = directory / f"{name}.stdout", directory / f"{name}.stderr"
    common = {**clean_environment(), **shared}
    fork = preloaded.start(imported, common, command[1:], {**common, **variables}, stdout, stderr)
    return _Started(fork, stdout, stderr)


def _finish(started: list[_Started], timeout: float) -> list[Finished]:
    deadline = time.monotonic() + timeout
    ended: dict[int, float] = {}
    try:
        while len(ended) < len(started) and time.monotonic() < deadline:
            for number in set(range(len(started))) - ended.keys():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    started[number].process.wait(0.01)
                    ended[number] = time.time()
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)  # its session: children too
            one.process.wait()
    return [
        Finished(
            one.process.returncode,
            one.stdout.read_text(errors="replace"),
            one.stderr.read_text(errors="replace"),
            ended.get(number, time.time()),
        )
        for number, one in enumerate(started)
    ]


def _log(logs: Path, rank: int, stream: str) -> str:
    """What one worker of torchrun wrote: ``<run>/attempt_<last>/<rank>/stdout.log``."""
    found = sorted(logs.glob(f"*/attempt_*/{rank}/{stream}.log"))
    return found[-1].read_text(errors="replace") if found else ""
