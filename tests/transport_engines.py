"""The transports that the contract suite runs over. One more is one more row, and what it needs to start."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract import Engine, Rank
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
    return run_ranks(source, world, timeout=_LAUNCH_SECONDS)


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
def mpiexec() -> str | None:
    """The launcher of the MPI that mpi4py finds."""
    beside = _BIN / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@functools.cache
def no_mpi() -> str:
    if importlib.util.find_spec("mpi4py") is None or mpiexec() is None:
        return "needs mpi4py and mpiexec: pip install gradcomp[mpi]"
    return ""


def under_mpiexec(source: str, world: int, env: Mapping[str, str] | None = None) -> Finished:
    return under(str(mpiexec()), "-n", str(world), sys.executable, "-c", source, env=env)


def mpi(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.mpi import MpiTransport

    return MpiTransport(None if len(ranks) == r.size else ranks, 30.0, world=r.size)


# ------------------------------------------------------------------------------------------ Horovod


@functools.cache
def no_horovod() -> str:
    probe = "import sys, horovod.torch as hvd; sys.exit(not hvd.gloo_built())"
    if importlib.util.find_spec("horovod") is not None:
        done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=False)
        if done.returncode == 0:
            return ""
    return f"needs Horovod: scripts/install_horovod.sh {sys.executable}"


def under_horovodrun(source: str, world: int) -> list[Finished]:
    # Its cache, in the home directory, remembers what was found on other machines of this name.
    launcher = [str(_BIN / "horovodrun"), "--disable-cache", "--gloo", "-np", str(world)]
    with tempfile.TemporaryDirectory(prefix="gradcomp-test-") as directory:
        program = Path(directory) / "program.py"
        program.write_text(source)
        return [under(*launcher, sys.executable, str(program))]


def begin_horovod(r: Rank) -> None:
    from gradcomp.transport.horovod import process_set

    process_set([0, r.size - 1])  # for the check that wants it: made by all


def horovod(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.horovod import HorovodTransport

    return HorovodTransport(ranks)


# ------------------------------------------------------------------------------------------ shared memory


def shm(r: Rank, ranks: Sequence[int]) -> Transport:
    from gradcomp.transport.shm import ShmTransport

    return ShmTransport(ranks.index(r.rank), len(ranks), lambda mine: r.meet(mine, ranks))


def shm_and_torch(r: Rank, ranks: Sequence[int]) -> Transport:
    """Even and odd ranks are two hosts."""
    from gradcomp.core.topology import Topology
    from gradcomp.transport.two_level import TwoLevelTransport

    topology = Topology.of([str(rank % 2) for rank in ranks])
    members = [ranks[place] for place in topology.members(ranks.index(r.rank))]
    leaders = [ranks[place] for place in topology.leaders]
    return TwoLevelTransport(
        shm(r, members),
        torch(r, ranks),
        topology,
        torch(r, leaders) if r.rank in leaders else None,
        shm(r, members),
    )


# ------------------------------------------------------------------------------------------ all of them


ENGINES = [
    Engine("inprocess", inprocess, launch=None, worlds=(1, 2, 3, 5), leave=leave_world),
    Engine("torch", torch, by_hand, worlds=(2, 3, 4), begin=begin_torch),
    Engine("shm", shm, by_hand),
    Engine("shm+torch", shm_and_torch, by_hand, worlds=(3, 4), begin=begin_torch, flat=False),
    Engine("mpi", mpi, lambda *job: [under_mpiexec(*job)], leave=None, missing=no_mpi),
    Engine(
        "horovod",
        horovod,
        under_horovodrun,
        worlds=(2, 3),
        begin=begin_horovod,
        leave=None,
        missing=no_horovod,
    ),
]
