"""Lets the ranks of a job meet through torch.distributed, with Gloo.

The store outlives the group, so that ``init`` after ``shutdown`` need not agree on an address again.
"""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from gradcomp.core.config import Config, secret
from gradcomp.core.errors import ConfigError, TransportError
from gradcomp.core.scheme import AUTO
from gradcomp.job import horovodrun
from gradcomp.job.generations import Generation, Limits, Member
from gradcomp.job.jobstore import (
    Deadline,
    Meeting,
    first_line,
    interface_address,
    is_loopback,
    open_store,
    with_interface,
)
from gradcomp.job.launch import Address, Launch, Ranks, discover
from gradcomp.job.network import Network
from gradcomp.transport.control import cut, open_sockets
from gradcomp.transport.torch import TorchControl, TorchTransport

_met: Meeting | None = None
_meetings = 0
#: This process in an elastic job, through all generations.
_member: Member | None = None

#: Seconds between looks at the members of a generation while they are connected.
_LOOK_SECONDS = 0.05


def join(
    timeout_seconds: float, process_group: Any = None, chosen: Ranks | None = None
) -> tuple[Launch, Network]:
    """Meet the other ranks: those of ``process_group``, of torch.distributed's default group, or of a new one.

    ``chosen``: the ranks that form the job, if not all; only possible where torch.distributed was initialised before.
    Collective. ConfigError for a half-set environment, TransportError if the ranks do not meet in time.
    """
    owns = not dist.is_initialized()
    launch = discover() if owns else _launch_of_existing_group()
    if process_group is not None and owns:
        raise ConfigError("process_group was given, but torch.distributed is not initialised")
    if chosen is not None:
        _check_chosen(chosen, launch, owns)
    if owns and launch.size > 1:
        launch = connect(launch, timeout_seconds)
    if not dist.is_initialized():
        return launch, TorchNetwork((0,), 0, False, None)
    ranks = chosen or tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    return launch, TorchNetwork(ranks, ranks.index(dist.get_rank()), owns, launch.served_attempt)


def _check_chosen(chosen: Ranks, launch: Launch, owns: bool) -> None:
    """Raise ConfigError for ranks that do not exist, or that cannot meet without the others."""
    rank, size = (launch.rank, launch.size) if owns else (dist.get_rank(), dist.get_world_size())
    if chosen[-1] >= size or rank not in chosen:
        raise ConfigError(
            f"comm={list(chosen)}: this is rank {rank} of 0 .. {size - 1}, and must be one of those given"
        )
    if owns and len(chosen) < size:
        raise ConfigError(
            f"comm={list(chosen)}: the ranks of a launcher meet all together. Call init() on every rank, and give "
            f"process_set=ProcessSet({list(chosen)}) to what these ranks do; or initialise torch.distributed first"
        )


def _launch_of_existing_group() -> Launch:
    """Return a launch with local rank and size from the launcher, if it set them; the rest is torch.distributed's."""
    with suppress(ConfigError):
        found = discover()
        if found.size == dist.get_world_size():
            return found
    return Launch.existing(dist.get_rank(), dist.get_world_size())


def join_elastic(config: Config) -> tuple[Launch, Network]:
    """Take part in the next generation of the elastic job whose store ``config.store`` names.

    The first call of a process makes it a member of the job. Collective over those that form the generation.
    ConfigError for settings or a launcher that do not go with it; otherwise as :meth:`Member.join`.
    """
    global _member
    address = store_address(config.store)
    if config.transport not in (AUTO, "torch"):
        raise ConfigError(f"transport={config.transport}: an elastic job needs transport=torch")
    by_horovodrun = horovodrun.is_elastic()
    launcher = "single" if by_horovodrun else discover().launcher
    if launcher != "single" or dist.is_initialized():
        raise ConfigError(
            f"store={config.store} is for processes of horovodrun --min-np or without a launcher, and this one belongs "
            f"to {'torch.distributed' if dist.is_initialized() else launcher}"
        )
    connect = partial(_store_client, address, config.timeout_seconds)
    if _member is None:
        limits = Limits(
            config.min_ranks, config.max_ranks, config.join_window_seconds, config.timeout_seconds
        )
        driver = horovodrun.HorovodDriver() if by_horovodrun else None
        _member = Member(connect, limits, config.store, driver)
    interface = "lo" if is_loopback(address[0]) else os.environ.get("HOROVOD_GLOO_IFACE")
    if interface and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # Gloo reads it for every group
    generation = _member.join()
    rank, size = generation.rank, len(generation.members)
    launch = Launch(rank, size, 0, 1, rank, size, "store", socket.gethostname(), placed=size == 1)
    return replace(launch, secret=secret(os.environ)), ElasticNetwork(_member, generation, connect)


def store_address(text: str) -> Address:
    """Return host and port of ``host:port``; ConfigError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"store must be host:port, as 127.0.0.1:29400, got {text!r}")
    return host.strip("[]"), int(port)


def _store_client(address: Address, timeout_seconds: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_seconds)
    try:
        return TCPStore(*address, None, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise TransportError(
            "no store answers at {}:{}: start one with `python -m gradcomp store` ({})".format(
                *address, first_line(error)
            )
        ) from error


class TorchNetwork(Network):
    """Connects some of the default group's ranks, or ``(0,)`` without such a group.

    ``attempt``: the number of torchrun's attempt, if torchrun serves the store.
    """

    engine = "torch"
    exposed = True

    def __init__(self, ranks: Ranks, rank: int, owns_default_group: bool, attempt: str | None) -> None:
        self.ranks = ranks
        self.rank = rank
        self._owns_default_group = owns_default_group
        self._attempt = attempt
        self._controls: list[TorchControl] = []

    def group(self, ranks: Ranks, timeout_seconds: float) -> TorchTransport:
        there = [self.ranks[rank] for rank in ranks]
        return TorchTransport(there, timeout_seconds, self._attempt or "0")

    def control(self, life: int, timeout_seconds: float) -> TorchControl:
        """Connect to the job's key-value store. Make few connections: where names resolve slowly each takes long."""
        # The keys have the attempt's number: torchrun's store keeps what a failed attempt published, its abort too.
        control = TorchControl(
            f"gradcomp/{self._attempt or 0}/{life}/{hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]}",
            timeout_seconds,
            "rank 0" if self._attempt is None else "torchrun",
        )
        self._controls.append(control)
        return control

    def members(self, group: Any) -> Ranks | None:
        """Return the ranks of a process group, or of a DeviceMesh of one dimension; None for other objects."""
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ConfigError(
                    f"a mesh of {group.ndim} dimensions is no process set; give one dimension, as mesh['name']"
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            return None
        there = dist.get_process_group_ranks(group)
        if not set(there) <= set(self.ranks):
            raise ConfigError(f"the group has ranks {there}, gradcomp was initialised on {list(self.ranks)}")
        return tuple(sorted(self.ranks.index(rank) for rank in there))

    def close(self) -> None:
        """End the connections, and destroy the default group if gradcomp made it."""
        for control in self._controls:
            control.close()
        if self._owns_default_group and dist.is_initialized():
            dist.destroy_process_group()

    def describe(self) -> str:
        return f"torch {torch.__version__}"


class ElasticNetwork(TorchNetwork):
    """Connects the ranks of one generation of an elastic job. It has no default group, which could not be given up."""

    def __init__(self, member: Member, generation: Generation, connect: Callable[[], TCPStore]) -> None:
        ranks = tuple(range(len(generation.members)))
        super().__init__(ranks, generation.rank, False, f"generation-{generation.number}")
        self.member = member
        self._connect = connect

    def group(self, ranks: Ranks, timeout_seconds: float) -> TorchTransport:
        """Make a communicator, on a thread that is left alone if a rank of the generation dies meanwhile.

        Gloo waits for a rank that is gone until its timeout, and cannot be interrupted.
        """
        made: list[TorchTransport | Exception] = []
        before = open_sockets()
        store = self._connect()
        opened = open_sockets().items() - before.items()

        def make() -> None:
            try:
                made.append(TorchTransport(ranks, timeout_seconds, self._attempt or "", self.rank, store))
            except Exception as error:  # noqa: BLE001 - raised below, on the caller's thread
                made.append(error)

        thread = threading.Thread(target=make, name="gradcomp-connect", daemon=True)
        thread.start()
        while not made:
            thread.join(_LOOK_SECONDS)
            if not made and self.member is not None and self.member.broken:
                for connection in opened:
                    cut(*connection)
                raise TransportError(f"the ranks cannot be connected: {self.member.broken}")
        if isinstance(made[0], Exception):
            raise made[0]
        return made[0]

    def control(self, life: int, timeout_seconds: float) -> TorchControl:
        """Connect to the store. Members differ in the number of their lives, a generation has one."""
        control = TorchControl(
            f"gradcomp/{self._attempt}", timeout_seconds, "`gradcomp store`", self._connect
        )
        self._controls.append(control)
        return control


def connect(launch: Launch, timeout_seconds: float) -> Launch:
    """Form torch.distributed's default group (Gloo) unless there is one. Return the launch with a secret learned there.

    Collective; ``timeout_seconds`` bounds the whole rendezvous and becomes the group's timeout. A world of one needs no
    group and gets none. Wire: a few small values per rank, over TCP to rank 0's store.

    Raises ConfigError if nothing says where to meet or if the interface that the environment names does not exist;
    TransportError, which names the missing ranks and the address, if not all ranks arrive in time.
    """
    global _met, _meetings
    if launch.size == 1 or dist.is_initialized():
        return launch
    launch = with_interface(launch)
    if launch.interface is not None:
        interface_address(launch)
        # Gloo reads it for this group and for all later ones.
        if not os.environ.get("GLOO_SOCKET_IFNAME"):
            os.environ["GLOO_SOCKET_IFNAME"] = launch.interface
    deadline = Deadline(launch, timeout_seconds)
    _meetings += 1
    with ExitStack() as once_met:
        met, _met = _met, None  # kept only if the meeting succeeds
        if met is None:
            met = open_store(launch, deadline, once_met)
        meeting = PrefixStore(f"gradcomp/meeting-{_meetings}", met.store)
        _check_in(meeting, launch, deadline)
    try:
        dist.init_process_group(
            "gloo",
            store=meeting,
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except RuntimeError as error:
        raise deadline.error(
            f"the ranks met, but Gloo could not connect them: {first_line(error)}"
        ) from error
    _met = met
    return replace(launch, secret=launch.secret or met.secret)


def _check_in(store: Any, launch: Launch, deadline: Deadline) -> None:
    """Wait until every rank has arrived."""
    keys = [f"here/{rank}" for rank in range(launch.size)]
    try:
        if store.add(f"claim/{launch.rank}", 1) != 1:
            raise deadline.error(f"another process says that it is rank {launch.rank}")
        store.set(f"here/{launch.rank}", "")
        try:
            store.wait(keys, deadline.left())
        except dist.DistStoreError:
            missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
            raise deadline.error(f"rank {missing} of {launch.size} did not arrive in time") from None
    except TransportError:
        raise
    except RuntimeError as error:
        raise deadline.error(f"the store is gone: {first_line(error)}") from error
