"""Reads from the launcher's variables, or from ``init(comm=...)``, which rank this process is and where ranks meet."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gradcomp.core.config import secret
from gradcomp.core.errors import ConfigError

#: Numbers of the job's ranks, ascending.
Ranks = tuple[int, ...]

Address = tuple[str, int]

_INTERFACES = ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE")
_HOROVOD_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


@dataclass(frozen=True)
class Launch:
    """Holds one process's place in the job, and what its launcher set for the ranks to meet."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    #: torchrun, horovodrun, mpirun, slurm, single, or "process group" if torch.distributed was there first.
    launcher: str
    #: This host's name as the launcher knows it: equal for the ranks of one host, different otherwise.
    host: str
    #: False if the launcher did not say which ranks share a host; local and cross values then assume equal blocks.
    placed: bool = True
    #: MASTER_ADDR and MASTER_PORT.
    master: Address | None = None
    #: The number of this attempt, which prefixes its keys, if torchrun's own store listens at ``master``.
    served_attempt: str | None = None
    #: horovodrun's HTTP key-value server.
    horovod_server: Address | None = None
    #: This host as horovodrun names it.
    hostname: str | None = None
    #: The network interface that the environment names, and the variable that does so.
    interface: str | None = None
    interface_variable: str = ""
    #: The launcher's own name for this job; the same for all of its ranks on this host.
    job: str = ""
    #: A secret that only this job's ranks know, from ``GRADCOMP_SECRET`` or through MPI; empty without one.
    secret: bytes = field(default=b"", repr=False)

    @property
    def one_host(self) -> bool:
        """Return whether the launcher said that all ranks share this host."""
        return self.placed and self.local_size == self.size

    @staticmethod
    def existing(rank: int, size: int) -> Launch:
        """Return the place of a process whose ranks met through torch.distributed without gradcomp."""
        return replace(_launch("process group", _Place(rank, size)), secret=secret(os.environ))


@dataclass(frozen=True)
class _Form:
    """Names the variables in which a launcher sets rank and size; None for those that it does not set."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    cross_rank: str | None = None
    cross_size: str | None = None
    #: The variable in which the launcher names or numbers this host.
    host: str | None = None


_TORCHRUN = _Form(
    "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK"
)  # fmt: skip
_HOROVODRUN = _Form(
    "horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME",
)  # fmt: skip
_OPEN_MPI = _Form(
    "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)  # fmt: skip
_HYDRA = _Form("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


@dataclass(frozen=True)
class _Place:
    """Holds the values of one launcher's variables; pairs that it does not set are None."""

    rank: int
    size: int
    local: tuple[int, int] | None = None
    cross: tuple[int, int] | None = None
    #: The host as the launcher names or numbers it.
    host: str = ""


def placed(launch: Launch, index: int, hosts: Sequence[str]) -> Launch:
    """Return the launch with local and cross values from the ranks' hosts.

    As in Horovod, cross values count the ranks that have the same local rank.
    """
    if launch.placed:
        return launch
    before: dict[str, int] = {}
    places = []
    for host in hosts:
        places.append((host, before.get(host, 0)))
        before[host] = before.get(host, 0) + 1
    host, local_rank = places[index]
    peers = [h for h, local in places if local == local_rank]
    return replace(
        launch,
        local_rank=local_rank,
        local_size=before[host],
        cross_rank=peers.index(host),
        cross_size=len(peers),
        placed=True,
    )


def discover(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return this process's place, from torchrun, horovodrun, Open MPI, MPICH's Hydra or srun; else a world of one.

    Where several have set variables, the innermost counts: torchrun's workers, then those of horovodrun and mpirun,
    then Slurm's. RANK and WORLD_SIZE that a user exported under another launcher must agree with it. Raises
    ConfigError, which names the variables, for a half-set, impossible or contradictory environment and for elastic
    horovodrun.
    """
    told = {form: place for form in _FORMS if (place := _read(form, environ)) is not None}
    if _TORCHRUN in told and "TORCHELASTIC_RUN_ID" in environ:
        told = {_TORCHRUN: told[_TORCHRUN]}
    else:
        _check_horovodrun(told, environ)
    _check_agreement(told, environ)
    launcher, place = "single", _Place(0, 1, (0, 1), (0, 1))
    if told:
        form = max(told, key=lambda f: (told[f].local is not None) + (told[f].cross is not None))
        launcher, place = form.launcher, told[form]
    # srun --mpi=pmi2 sets MPICH's rank and size, but none of its other variables.
    if not told or (list(told) == [_HYDRA] and place.local is None):
        step = _read_slurm(environ)
        if step is not None and (not told or (step.rank, step.size) == (place.rank, place.size)):
            launcher, place = "slurm", step
    if place.size == 1:
        return _launch(launcher, place)
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The interface that the user chose, else the one that horovodrun found.
    named = ((environ.get(name, "").split(",")[0], name) for name in _INTERFACES)
    interface, interface_variable = next((both for both in named if both[0]), (None, ""))
    return replace(
        _launch(launcher, place),
        master=_address("MASTER_ADDR", "MASTER_PORT", environ),
        served_attempt=environ.get("TORCHELASTIC_RESTART_COUNT", "0") if served else None,
        horovod_server=_address(*_HOROVOD_SERVER, environ),
        hostname=environ.get("HOROVOD_HOSTNAME") or None,
        interface=interface,
        interface_variable=interface_variable,
        job=_job(launcher, environ),
        secret=secret(environ),
    )


_FORMS = (_TORCHRUN, _HOROVODRUN, _OPEN_MPI, _HYDRA)


def _read(form: _Form, environ: Mapping[str, str]) -> _Place | None:
    both = _pair(form.rank, form.size, environ)
    local = _pair(form.local_rank, form.local_size, environ)
    if both is None:
        if local is not None:
            raise ConfigError(f"{form.local_rank} is set, but {form.rank} and {form.size} are not")
        return None
    rank, size = both
    if local is not None and local[1] > size:
        raise ConfigError(f"{form.local_size}={local[1]} is larger than {form.size}={size}")
    cross = None
    if form.cross_rank is not None and form.cross_size is not None:
        cross = _pair(form.cross_rank, form.cross_size, environ)
    return _Place(rank, size, local, cross, environ.get(form.host or "", ""))


def _read_slurm(environ: Mapping[str, str]) -> _Place | None:
    """Return the place in a step of srun; None in a batch script, in a shell of salloc and in a step of one task."""
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    both = _pair("SLURM_PROCID", tasks, environ)
    if both is None or both[1] == 1:
        return None
    nodes = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    cross = _pair("SLURM_NODEID", nodes, environ) if nodes in environ else None
    local = None
    counts = _tasks_per_node(
        environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    )
    if (
        "SLURM_LOCALID" in environ
        and cross is not None
        and len(counts) == cross[1]
        and sum(counts) == both[1]
    ):
        local = (_number("SLURM_LOCALID", environ), counts[cross[0]])
    host = environ.get("SLURMD_NODENAME") or environ.get("SLURM_NODEID", "")
    return _Place(*both, local, cross, host)


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: "2(x3),1" stands for 2, 2, 2, 1. Return an empty list for anything else."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, times = part.rstrip(")").partition("(x")
        if not count.isdecimal() or not (times or "1").isdecimal():
            return []
        counts += [int(count)] * int(times or "1")
    return counts


def _are_set(one: str, other: str, environ: Mapping[str, str]) -> bool:
    """Return whether both variables are set; ConfigError if one is."""
    present = [name for name in (one, other) if environ.get(name, "") != ""]
    if len(present) == 1:
        raise ConfigError(f"{present[0]} is set, but {other if present == [one] else one} is not")
    return bool(present)


def _pair(rank: str, size: str, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return a rank and its size: both must be set or neither, and the rank must be below the size."""
    if not _are_set(rank, size, environ):
        return None
    values = _number(rank, environ), _number(size, environ)
    if not 0 <= values[0] < values[1]:
        raise ConfigError(f"{rank}={values[0]} is not in 0 .. {size} - 1, with {size}={values[1]}")
    return values


def _number(name: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name} must be an integer, got {environ[name]!r}") from None


def _check_agreement(told: Mapping[_Form, _Place], environ: Mapping[str, str]) -> None:
    for one, other in pairwise(told):
        if (told[one].rank, told[one].size) != (told[other].rank, told[other].size):
            said = ", ".join(f"{n}={environ[n]}" for f in (one, other) for n in (f.rank, f.size))
            raise ConfigError(
                f"two launchers disagree about this process: {said}; unset the variables of one"
            )


def _launch(launcher: str, place: _Place) -> Launch:
    """Fill in what the launcher did not set: exactly on one host, else by a guess, which ``placed=False`` marks."""
    rank, size = place.rank, place.size
    one_host = size == 1 or (place.local is not None and place.local[1] == size)
    local_rank, local_size = (rank, size) if place.local is None and one_host else place.local or (0, 1)
    guess = (0, 1) if one_host else (rank // local_size, -(-size // local_size))
    cross_rank, cross_size = place.cross or guess
    placed = one_host or (place.local is not None and place.cross is not None)
    host = place.host or socket.gethostname()
    return Launch(rank, size, local_rank, local_size, cross_rank, cross_size, launcher, host, placed)


def _address(host: str, port: str, environ: Mapping[str, str]) -> Address | None:
    if not _are_set(host, port, environ):
        return None
    number = _number(port, environ)
    if not 0 < number < 65536:
        raise ConfigError(f"{port} must be in 1 .. 65535, got {number}")
    return environ[host], number


def _check_horovodrun(told: Mapping[_Form, _Place], environ: Mapping[str, str]) -> None:
    """Refuse an environment that only partly comes from horovodrun, before any rank waits for its server."""
    server = _address(*_HOROVOD_SERVER, environ)
    if environ.get("HOROVOD_ELASTIC") == "1" and (server is not None or _HOROVODRUN in told):
        raise ConfigError(
            "HOROVOD_ELASTIC=1: the ranks of an elastic job meet in a store that none of them serves: start "
            "`python -m gradcomp store`, and set GRADCOMP_STORE to its address"
        )
    if server is not None and _HOROVODRUN not in told:
        raise ConfigError(
            f"{_HOROVOD_SERVER[0]} is set, but {_HOROVODRUN.rank} and {_HOROVODRUN.size} are not: "
            "horovodrun sets them all for its workers"
        )
    alone = list(told) == [_HOROVODRUN] and told[_HOROVODRUN].size > 1
    if server is not None or not alone or environ.get("MASTER_ADDR") or environ.get("MASTER_PORT"):
        return
    why = ""
    if environ.get("HOROVOD_CONTROLLER") == "mpi":
        why = "HOROVOD_CONTROLLER=mpi, but no mpirun started this process (OMPI_COMM_WORLD_RANK, PMI_RANK); "
    raise ConfigError(
        f"{why}{_HOROVODRUN.rank} and {_HOROVODRUN.size} are set, but {' and '.join(_HOROVOD_SERVER)}, where "
        "horovodrun's ranks meet, are not: start the job by horovodrun or mpirun, or set MASTER_ADDR and MASTER_PORT"
    )


def _job(launcher: str, environ: Mapping[str, str]) -> str:
    """Return this job's name from its launcher. Hydra gives none: there it is the process that started the ranks."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID") if launcher == "slurm" else ("PMIX_NAMESPACE",)
    if all(environ.get(name) for name in names):
        return ",".join(f"{name}={environ[name]}" for name in names)
    try:  # the parent of this session's leader, whether or not a shell is between the launcher and Python
        parent = int(Path(f"/proc/{os.getsid(0)}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        parent = os.getppid()
    return f"parent={parent}"


def ranks_of(comm: Any) -> Ranks | None:
    """Return the ranks that ``comm`` names, or None for all.

    ``comm`` is None, an ascending list of ranks of the world, or a communicator of mpi4py. ConfigError for anything
    else, and for a list that does not ascend: ranks keep their order.
    """
    mpi = sys.modules.get("mpi4py.MPI")  # a caller who has a communicator has imported mpi4py
    if mpi is not None and isinstance(comm, mpi.Comm):
        own, world = comm.Get_group(), mpi.COMM_WORLD.Get_group()
        comm = list(mpi.Group.Translate_ranks(own, list(range(own.Get_size())), world))
    if comm is not None and (isinstance(comm, str) or not isinstance(comm, Iterable)):
        raise ConfigError(
            f"comm must be a list of ranks, a communicator of mpi4py or None, got {type(comm).__name__}"
        )
    ranks = () if comm is None else tuple(comm)
    if any(type(rank) is not int or rank < 0 for rank in ranks):
        raise ConfigError(f"comm must list ranks, whole numbers of at least 0, got {list(ranks)}")
    if list(ranks) != sorted(set(ranks)):
        raise ConfigError(f"comm must list each rank only once, in ascending order, got {list(ranks)}")
    return ranks or None
