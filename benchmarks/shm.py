"""Shared memory beside Gloo over loopback and MPICH, among ranks of one host.

    python benchmarks/shm.py [--worlds 2 4] [--rounds 15] [--json PATH]

The engines take turns in the same processes, A B C A B C ...; a figure is the median over rounds of the slowest rank's
time, from a barrier on. Shared memory is polled as the engine polls: it spins for 50 microseconds, then sleeps up to
200. Gloo's and MPICH's own collectives block. MPICH's column needs mpi4py and mpiexec, and is left out without.

Rows
    allreduce       float32, in place
    4 bits, wire    what a scatter-reduce-allgather of 16 M elements at 4 bits sends: an all-to-all, then an all-gather
    4 bits          that exchange with its kernels: a gradient becomes its mean, in slices; both over gradcomp's
                    transports, both polled
    4 bits, kernels what encoding, adding and decoding took of that, by gradcomp's own clock: no transport can do
                    better
    waiting         of a core, what a process takes whose peer comes late: shared memory's rank polls as above

Bars: allreduce of 64 MB at most 0.6 x Gloo and 1.0 x MPICH; the 4-bit exchange at most 0.5 x Gloo; 1 KB at most 0.3 ms
more than MPICH; waiting at most 15%. The exit status is 1 if one is missed. With more ranks than cores figures are of
scheduling as well; MPICH, which never sleeps, suffers most.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import report

ELEMENTS = 1 << 24
BITS = 4
MEGABYTE = 1 << 20
Times = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Row:
    """Median milliseconds of an operation, or shares of a core."""

    ranks: int
    operation: str
    shm: float
    gloo: float | None
    mpich: float | None
    verdict: str


# ------------------------------------------------------------------------------------------ a rank


def settle(poll: Callable[[], bool]) -> None:
    """Wait as the engine does."""
    begin, pause = time.perf_counter(), 25e-6
    while not poll():
        if time.perf_counter() - begin > 50e-6:
            pause = min(2 * pause, 200e-6)
            time.sleep(pause)
        else:
            time.sleep(0)


def prepared_exchange(
    transport: Any, gradient: Any, kernels: list[float]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """To be called before and within the timed part: hand a gradient in; exchange it at 4 bits.

    Appends the seconds that the kernels took.
    """
    from gradcomp import Config, Filter, LayerSpec, Policy, Quantize
    from gradcomp.exchange.arrivals import Submission
    from gradcomp.exchange.pipeline import Pipeline
    from gradcomp.exchange.waiting import Waiting

    layers = [LayerSpec("gradient", (ELEMENTS,), "float32")]
    plan = Policy(Quantize(BITS), filter=Filter(min_elements=0, min_dimensions=0)).plan(layers)
    out = gradient.copy()
    pipeline = Pipeline(layers, plan, transport, Config(), lambda layer: out.ctypes.data)

    def before() -> None:
        out[:] = gradient

    def exchange() -> None:
        begin = time.perf_counter()
        pipeline.open()
        pipeline.arrivals.submit(Submission(0, out.ctypes.data, out.ctypes.data, out))
        pipeline.arrivals.flush()
        settle(lambda: pipeline.poll() is Waiting.NOTHING)
        spans = [span for span in pipeline.trace.spans() if span.begin >= begin]
        kernels.append(sum(s.end - s.begin for s in spans if s.name in ("compress", "reduce", "decompress")))
        pipeline.discard()

    return before, exchange


def run_rank(rounds: int, out: Path) -> None:
    """All operations on all engines; this rank's seconds go to a file."""
    import torch
    import torch.distributed as dist

    from gradcomp.transport.shm import ShmTransport
    from gradcomp.transport.torch import TorchTransport

    world = None
    if os.environ.get("PMI_RANK"):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    rank, size = int(os.environ.get("PMI_RANK", os.environ.get("RANK", ""))), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    gloo = TorchTransport(range(size), 120.0)
    shm = ShmTransport(rank, size, gloo.allgather_bytes)
    nothing = lambda: None  # noqa: E731
    operations: dict[str, dict[str, tuple[Callable[[], None], Callable[[], None]]]] = {}

    for nbytes, name in ((1 << 10, "1 KB"), (4 * MEGABYTE, "4 MB"), (64 * MEGABYTE, "64 MB")):
        array = np.ones(nbytes // 4, np.float32)
        tensor = torch.from_numpy(array)
        fill = lambda a=array: a.fill(1.0)  # noqa: E731
        row = operations[f"allreduce, {name}"] = {
            "shm": (fill, lambda a=array: settle(shm.allreduce(a).poll)),
            "gloo": (fill, lambda t=tensor: dist.all_reduce(t)),
        }
        if world is not None:
            row["mpich"] = (fill, lambda a=array: world.Allreduce(MPI.IN_PLACE, a))

    chunk = ELEMENTS * BITS // 8 // size
    send, parts = np.ones((size - 1) * chunk, np.uint8), np.ones(size * chunk, np.uint8)
    received = np.empty_like(send)
    counts = [0 if r == rank else chunk for r in range(size)]

    def wire(transport: Any) -> None:
        settle(transport.alltoallv(send, counts, received, counts).poll)
        settle(transport.allgatherv(parts, [chunk] * size).poll)

    operations["4 bits, wire"] = {"shm": (nothing, lambda: wire(shm)), "gloo": (nothing, lambda: wire(gloo))}
    gradient = np.random.default_rng(rank).standard_normal(ELEMENTS, np.float32)
    kernels: dict[str, list[float]] = {"shm": [], "gloo": []}
    operations["4 bits"] = {
        name: prepared_exchange(transport, gradient, kernels[name])
        for name, transport in (("shm", shm), ("gloo", gloo))
    }

    times: Times = {}
    for operation, engines in operations.items():
        found = times[operation] = {engine: [] for engine in engines}
        for _ in range(rounds + 1):
            for engine, (before, call) in engines.items():
                before()
                dist.barrier()
                begin = time.perf_counter()
                call()
                found[engine].append(time.perf_counter() - begin)
    times["4 bits, kernels"] = kernels
    times["waiting"] = {"shm": [share_while_waiting(lambda: settle(shm.allreduce(array).poll), rank)]}
    if world is not None:
        dist.barrier()
        times["waiting"]["mpich"] = [share_while_waiting(world.Barrier, rank)]
    out.with_suffix(f".{rank}").write_text(json.dumps(times))
    shm.close()


def share_while_waiting(call: Callable[[], Any], rank: int) -> float:
    """Processor seconds per second in a collective that rank 0 joins a second late."""
    if rank == 0:
        time.sleep(1.0)
    begin, used = time.perf_counter(), time.process_time()
    call()
    share = (time.process_time() - used) / (time.perf_counter() - begin)
    return 0.0 if rank == 0 else share


# ------------------------------------------------------------------------------------------ all ranks


def launch(size: int, rounds: int) -> list[Times]:
    """Run the ranks; what each found."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-shm-") as directory:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        out = Path(directory) / "times"
        command = [sys.executable, __file__, "--rank-out", str(out), "--rounds", str(rounds)]
        env = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if mpiexec():
            subprocess.run([str(mpiexec()), "-n", str(size), *command], env=env, check=True)
        else:
            ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(size)]
            if any([rank.wait() for rank in ranks]):  # noqa: C419 - all are to be waited for
                raise SystemExit("a rank failed")
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(size)]


def mpiexec() -> Path | None:
    """The launcher beside this Python or on the path, if mpi4py is there too."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    return Path(found) if found and importlib.util.find_spec("mpi4py") else None


def judge(size: int, operation: str, times: list[Times]) -> Row:
    """One row: medians of the slowest ranks, beside its bars."""
    figures = {}
    for engine in times[0][operation]:
        rounds = [max(values) for values in zip(*(one[operation][engine] for one in times), strict=True)]
        figures[engine] = 1e3 * statistics.median(rounds[1:] or [rounds[0] / 1e3])
    shm, gloo, mpich = figures["shm"], figures.get("gloo"), figures.get("mpich")
    bars = []
    if operation == "allreduce, 64 MB" and gloo:
        bars.append(("0.6 x Gloo", shm / gloo <= 0.6))
        bars += [("1.0 x MPICH", shm / mpich <= 1.0)] if mpich else []
    if operation == "allreduce, 1 KB" and mpich:
        bars.append(("MPICH + 0.3 ms", shm <= mpich + 0.3))
    if operation == "4 bits" and gloo:
        bars.append(("0.5 x Gloo", shm / gloo <= 0.5))
    if operation == "waiting":
        bars.append(("15%", shm <= 0.15))
    verdict = ", ".join(f"{name} {'met' if met else 'MISSED'}" for name, met in bars)
    return Row(size, operation, shm, gloo, mpich, verdict)


def show(rows: list[Row]) -> str:
    """The table."""

    def cell(row: Row, value: float | None) -> str | None:
        if value is None:
            return None
        return f"{100 * value:.1f}%" if row.operation == "waiting" else f"{value:.3g} ms"

    def ratio(row: Row, value: float | None) -> str | None:
        return (
            None
            if value is None or row.operation in ("waiting", "4 bits, kernels")
            else f"{row.shm / value:.2f}"
        )

    headers = ("operation", "ranks", "shm", "Gloo", "shm / Gloo", "MPICH", "shm / MPICH", "bars")
    return report.table(
        headers,
        [
            (
                row.operation, row.ranks, cell(row, row.shm), cell(row, row.gloo), ratio(row, row.gloo),
                cell(row, row.mpich), ratio(row, row.mpich), row.verdict,
            )
            for row in rows
        ],
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], metavar="RANKS")
    parser.add_argument("--rounds", type=int, default=15, help="per figure (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_out is not None:
        run_rank(arguments.rounds, arguments.rank_out)
        return 0

    machine = report.machine()
    print(report.describe(machine), flush=True)
    rows = []
    for size in arguments.worlds:
        times = launch(size, arguments.rounds)
        rows += [judge(size, operation, times) for operation in times[0]]
    print(show(rows))
    figures = {"machine": machine, "rounds": arguments.rounds, "rows": [asdict(row) for row in rows]}
    report.write_json(arguments.json, figures)
    return 1 if any("MISSED" in row.verdict for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
