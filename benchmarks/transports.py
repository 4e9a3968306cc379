"""Each transport beside its engine's own bare collective: two ranks of one host.

    python benchmarks/transports.py [--transports torch mpi shm horovod] [--rounds 15] [--json PATH]

A row is one collective of so many bytes of float32 per rank. `bare` calls the engine as a program without gradcomp
would, and waits in it; `gradcomp` issues the same through the transport and polls as gradcomp's engine does. Both
alternate in one run; a time is that of the slower rank, the figures are medians. `CPU waiting` is the processor time
of all threads of the process, as a share of one core, that a rank takes while its peer is one second late.

The bars: at 4 MB and above at most 1.05 x the bare collective, at 1 KB at most 0.3 ms more, waiting at most 15% of a
core. A figure that misses its bar is marked and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report

from gradcomp.exchange.thread import LONGEST_SLEEP_SECONDS, SPIN_SECONDS, sleep_precisely
from gradcomp.transport.base import Handle, Transport

WORLD = 2
SIZES = (1 << 10, 1 << 16, 1 << 22, 1 << 26)
COLLECTIVES = ("alltoall", "allreduce")
LATE_SECONDS = 1.0

MOST_RATIO, MOST_RATIO_FROM_BYTES = 1.05, 4 << 20
MOST_EXTRA_MS, MOST_EXTRA_UP_TO_BYTES = 0.3, 1 << 10
MOST_WAITING_SHARE = 0.15


@dataclass(frozen=True)
class Row:
    """One figure of one transport."""

    transport: str
    collective: str
    nbytes: int
    bare_ms: float | None
    gradcomp_ms: float

    @property
    def ratio(self) -> float | None:
        return None if self.bare_ms is None else self.gradcomp_ms / self.bare_ms

    @property
    def missed(self) -> bool:
        if self.bare_ms is None:
            return False
        if self.nbytes >= MOST_RATIO_FROM_BYTES:
            return self.gradcomp_ms > MOST_RATIO * self.bare_ms
        return self.nbytes <= MOST_EXTRA_UP_TO_BYTES and self.gradcomp_ms > self.bare_ms + MOST_EXTRA_MS


# ------------------------------------------------------------------------------------------ on a rank


class Bare:
    """An engine as this rank has it: the transport over it, and what a program without gradcomp would call."""

    rank: int
    transport: Transport

    def alltoall(self, send: Any, recv: Any) -> None:
        """Equal parts."""
        raise NotImplementedError

    def allreduce(self, array: Any) -> None:
        """In place."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave together."""


class Torch(Bare):
    def __init__(self, directory: Path) -> None:
        import torch
        import torch.distributed as dist

        from gradcomp.transport.torch import TorchTransport

        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank = dist.get_rank()
        self.transport = TorchTransport(range(WORLD), 60.0)

    def alltoall(self, send: Any, recv: Any) -> None:
        self.dist.all_to_all_single(self.torch.from_numpy(recv), self.torch.from_numpy(send))

    def allreduce(self, array: Any) -> None:
        self.dist.all_reduce(self.torch.from_numpy(array))

    def close(self) -> None:
        self.dist.destroy_process_group()


class Mpi(Bare):
    def __init__(self, directory: Path) -> None:
        from mpi4py import MPI

        from gradcomp.transport.mpi import MpiTransport

        self.MPI = MPI
        self.rank = MPI.COMM_WORLD.rank
        self.transport = MpiTransport(None, 60.0)

    def alltoall(self, send: Any, recv: Any) -> None:
        self.MPI.COMM_WORLD.Alltoall(send, recv)

    def allreduce(self, array: Any) -> None:
        self.MPI.COMM_WORLD.Allreduce(self.MPI.IN_PLACE, array)


class Shm(Bare):
    """Has no other engine to be beside; benchmarks/shm.py compares it with Gloo and MPICH."""

    def __init__(self, directory: Path) -> None:
        import torch.distributed as dist

        from gradcomp.transport.shm import ShmTransport
        from gradcomp.transport.torch import TorchTransport

        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.transport = ShmTransport(self.rank, WORLD, TorchTransport(range(WORLD), 60.0).allgather_bytes)


class Horovod(Bare):
    def __init__(self, directory: Path) -> None:
        import horovod.torch as hvd
        import torch

        from gradcomp.transport.horovod import HorovodTransport

        self.transport = HorovodTransport()
        self.torch, self.hvd = torch, hvd
        self.rank = hvd.rank()
        self.parts = torch.zeros(WORLD, dtype=torch.int32)

    def alltoall(self, send: Any, recv: Any) -> None:
        self.hvd.alltoall(self.torch.from_numpy(send), self.parts + len(send) // WORLD, name="bare alltoall")

    def allreduce(self, array: Any) -> None:
        self.hvd.allreduce_(self.torch.from_numpy(array), name="bare allreduce", op=self.hvd.Sum)


def wait(handle: Handle) -> None:
    """As gradcomp's engine does."""
    begin, pause = time.monotonic(), SPIN_SECONDS / 2
    while not handle.poll():
        if time.monotonic() - begin > SPIN_SECONDS:
            pause = min(2 * pause, LONGEST_SLEEP_SECONDS)
            time.sleep(pause)
        else:
            time.sleep(0)


class Measurement:
    """What a rank measures; each time is that of the slower rank."""

    def __init__(self, name: str, engine: Bare, rounds: int) -> None:
        self.name, self.engine, self.rounds = name, engine, rounds
        self.token = np.zeros(1, np.float32)

    def meet(self) -> None:
        """Without sleeping, so that the ranks go on together."""
        handle = self.engine.transport.allreduce(self.token)
        while not handle.poll():
            time.sleep(0)

    def row(self, collective: str, nbytes: int) -> Row:
        array = np.ones(nbytes // 4, np.float32)
        recv = np.zeros_like(array)
        parts = [nbytes // WORLD] * WORLD
        transport = self.engine.transport
        ours: dict[str, Callable[[], None]] = {
            "alltoall": lambda: wait(
                transport.alltoallv(array.view(np.uint8), parts, recv.view(np.uint8), parts)
            ),
            "allreduce": lambda: wait(transport.allreduce(array)),
        }
        bare: dict[str, Callable[[], None]] = {
            "alltoall": lambda: self.engine.alltoall(array, recv),
            "allreduce": lambda: self.engine.allreduce(array),
        }
        rounds = self.rounds * (10 if nbytes <= MOST_EXTRA_UP_TO_BYTES else 1)
        times = np.zeros((2, rounds + 2))
        for number in range(times.shape[1]):
            for which, call in enumerate((bare[collective], ours[collective])):
                array[:] = 1
                self.meet()
                begin = time.perf_counter()
                try:
                    call()
                    times[which, number] = time.perf_counter() - begin
                except NotImplementedError:
                    times[which, number] = np.nan
        replies = transport.allgather_bytes(times.tobytes())
        slower = np.max([np.frombuffer(reply).reshape(times.shape) for reply in replies], axis=0)
        bare_ms, ours_ms = (1e3 * float(np.median(kind[2:])) for kind in slower)
        return Row(self.name, collective, nbytes, None if np.isnan(bare_ms) else bare_ms, ours_ms)

    def waiting_shares(self) -> list[float | None]:
        """Processor time while the peer is late, as a share of one core: of the bare engine, of gradcomp."""
        return [
            self.waiting_share(lambda: self.engine.allreduce(self.token)),
            self.waiting_share(lambda: wait(self.engine.transport.allreduce(self.token))),
        ]

    def waiting_share(self, call: Callable[[], None]) -> float | None:
        shares = []
        for _ in range(3):
            self.meet()
            if self.engine.rank != 0:
                time.sleep(LATE_SECONDS)
            processor, begin = time.process_time(), time.perf_counter()
            try:
                call()
            except NotImplementedError:
                return None
            shares.append((time.process_time() - processor) / (time.perf_counter() - begin))
        return statistics.median(shares)


def work(name: str, rounds: int, sizes: list[int], directory: Path) -> None:
    """What a rank's process does."""
    engine = ENGINES[name].make(directory)
    sleep_precisely()  # threads that the engine has started keep their own
    measurement = Measurement(name, engine, rounds)
    rows = [measurement.row(collective, size) for collective in COLLECTIVES for size in sizes]
    shares = measurement.waiting_shares()
    if engine.rank == 0:
        found = {"rows": [asdict(row) for row in rows], "waiting_shares": shares}
        (directory / "found.json").write_text(json.dumps(found))
    engine.transport.close()
    engine.close()


# ------------------------------------------------------------------------------------------ launching


def by_hand(command: list[str]) -> list[subprocess.Popen[bytes]]:
    """Without a launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [
        _start(
            command,
            {"RANK": str(r), "WORLD_SIZE": str(WORLD), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for r in range(WORLD)
    ]


def mpiexec(command: list[str]) -> list[subprocess.Popen[bytes]]:
    return [_start([_program("mpiexec"), "-n", str(WORLD), *command], {})]


def horovodrun(command: list[str]) -> list[subprocess.Popen[bytes]]:
    # Its cache, in the home directory, remembers what was found on other machines of this name.
    launcher = [_program("horovodrun"), "--disable-cache", "--gloo", "-np", str(WORLD)]
    return [_start([*launcher, *command], {})]


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"there is no {name}")
    return found


def _start(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables})


@dataclass(frozen=True)
class Engine:
    make: Callable[[Path], Bare]
    launch: Callable[[list[str]], list[subprocess.Popen[bytes]]]


ENGINES = {
    "torch": Engine(Torch, by_hand),
    "mpi": Engine(Mpi, mpiexec),
    "shm": Engine(Shm, by_hand),
    "horovod": Engine(Horovod, horovodrun),
}


def measure(name: str, rounds: int, sizes: list[int]) -> tuple[list[Row], list[float | None]]:
    """All figures of a transport."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--rank-of", name, "--directory", directory]
        command += ["--rounds", str(rounds), "--sizes", *map(str, sizes)]
        processes = ENGINES[name].launch(command)
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.terminate()
        if any(codes):
            sys.exit(f"{name}: the ranks ended with {codes}")
        found = json.loads((Path(directory) / "found.json").read_text())
        return [Row(**row) for row in found["rows"]], found["waiting_shares"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", nargs="+", choices=ENGINES, default=["torch", "mpi", "shm"])
    parser.add_argument("--rounds", type=int, default=15, help="per figure (default: %(default)s)")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), metavar="BYTES")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank-of", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        work(arguments.rank_of, arguments.rounds, arguments.sizes, arguments.directory)
        return 0

    machine = report.machine()
    print(report.describe(machine) + "\n")
    rows: list[Row] = []
    shares: dict[str, list[float | None]] = {}
    for name in arguments.transports:
        found, shares[name] = measure(name, arguments.rounds, arguments.sizes)
        rows += found
    cells = [
        [
            row.transport, row.collective, f"{row.nbytes >> 10} KB",
            None if row.bare_ms is None else f"{row.bare_ms:.3f}", f"{row.gradcomp_ms:.3f}",
            None if row.ratio is None else f"{row.ratio:.2f}", "MISSED" if row.missed else "",
        ]
        for row in rows
    ]  # fmt: skip
    print(report.table(["transport", "collective", "size", "bare ms", "gradcomp ms", "ratio", "bar"], cells))
    missed = {name for name, (_, share) in shares.items() if share and share > MOST_WAITING_SHARE}
    waiting = [
        [
            name, None if bare is None else f"{100 * bare:.1f}%", None if share is None else f"{100 * share:.1f}%",
            "MISSED" if name in missed else "",
        ]
        for name, (bare, share) in shares.items()
    ]  # fmt: skip
    print("\n" + report.table(["CPU waiting", "bare", "gradcomp", "bar"], waiting))
    report.write_json(
        arguments.json,
        {
            "machine": machine,
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
            "waiting_shares": shares,
        },
    )
    return int(bool(missed) or any(row.missed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
