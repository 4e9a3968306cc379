"""The process's life with gradcomp: init, shutdown, who am I."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from gradcomp import kernels
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError, StateError, TransportError, WireFormatError
from gradcomp.core.scheme import AUTO
from gradcomp.core.text import printable
from gradcomp.core.topology import Topology
from gradcomp.engine import Engine, Exchanger
from gradcomp.engine.background import finish_background
from gradcomp.engine.keys import ABORT
from gradcomp.engine.watch import Roster, publish_abort
from gradcomp.engine.watchdog import Watchdog
from gradcomp.job import ending
from gradcomp.job.launch import Launch, placed
from gradcomp.job.network import Network, Ranks
from gradcomp.job.signing import Seal, SignedControl, agree_on_seal
from gradcomp.reduce.header import PROTOCOL
from gradcomp.transport.base import Transport
from gradcomp.transport.control import ControlChannel
from gradcomp.version import __version__

logger = logging.getLogger("gradcomp")


class _Channel(Protocol):
    """A :class:`gradcomp.job.channel.Channel`, which stands above this module."""

    @property
    def failure(self) -> GradcompError | None: ...

    def close(self, reason: str | None = None) -> None: ...


@dataclass(eq=False)
class Runtime:
    """What :func:`begin` set up."""

    launch: Launch
    config: Config
    network: Network
    engine: Engine = field(default_factory=Engine)
    exchangers: list[Exchanger] = field(default_factory=list)
    process: int = field(default_factory=os.getpid)
    #: One group per set of ranks, for the user's own collectives.
    groups: dict[Ranks, Transport] = field(default_factory=dict)
    channels: dict[Ranks, _Channel] = field(default_factory=dict)
    topology: Topology = field(init=False)
    #: The ranks' hosts, by name.
    hosts: tuple[str, ...] = ()
    #: Signs what the ranks publish, if strangers could publish too.
    seal: Seal | None = None
    _names: dict[Ranks, int] = field(default_factory=dict)
    _meetings: dict[Ranks, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.topology = Topology.one_host(self.size)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.network.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.network.ranks)

    @property
    def everyone(self) -> Ranks:
        """All ranks of the job."""
        return tuple(range(self.size))

    def make_group(self, ranks: Ranks) -> Transport:
        """A new communicator of the engine that the ranks met through; collective over ``ranks``."""
        return self.network.group(ranks, self.config.timeout_seconds)

    def group(self, ranks: Ranks) -> Transport:
        """The communicator of the user's own collectives among ``ranks``; the first call is collective."""
        if ranks not in self.groups:
            self.groups[ranks] = self.make_group(ranks)
        return self.groups[ranks]

    def name(self, ranks: Ranks) -> str:
        """A name for one more exchanger among ``ranks``: the same on all of them."""
        number = self._names.get(ranks, 0)
        self._names[ranks] = number + 1
        return f"{self.key(ranks)}-{number}"

    def next_meeting(self, ranks: Ranks) -> str:
        """A name for one more meeting of ``ranks``: the same on all of them."""
        number = self._meetings.get(ranks, 0)
        self._meetings[ranks] = number + 1
        return f"{self.key(ranks)}-{number}"

    def roster(self, ranks: Ranks) -> Roster:
        """Who ``ranks`` are."""
        return Roster(ranks, tuple(self.hosts[rank] for rank in ranks) if self.hosts else ())

    def key(self, ranks: Ranks) -> str:
        """What tells these ranks from others in the job's key-value store."""
        return "all" if ranks == self.everyone else hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]

    def make_control(self) -> ControlChannel:
        """A connection to the job's small values."""
        control = self.network.control(_generation, self.config.timeout_seconds)
        return control if self.seal is None else SignedControl(control, self.seal)

    @cached_property
    def watchdog(self) -> Watchdog:
        """What watches all that this rank waits for, over the only connection."""
        return Watchdog(self.make_control(), self.rank)


_runtime: Runtime | None = None
_generation = 0  # init after shutdown must not read what the last job published


def begin(
    join: Callable[[Config], tuple[Launch, Network]], process_sets: Iterable[Any], settings: dict[str, Any]
) -> None:
    """What every frontend's ``init`` does: settle the settings, meet by ``join``, introduce each other."""
    global _runtime, _generation
    if _runtime is not None:
        if settings or process_sets:
            raise StateError(
                "gradcomp is already initialised; call shutdown() before init() with other settings"
            )
        return
    config = Config.resolve(**settings)
    _start_logging(config)
    _choose_kernels(config)
    launch, network = join(config)
    if config.transport == AUTO and len(network.ranks) > 1:
        config = replace(config, transport=network.engine)
    _generation += 1
    runtime = Runtime(launch, config, network)
    if runtime.size > 1:
        try:
            _introduce(runtime, sorted(_members(one, runtime.size) for one in process_sets))
            # shutdown() needs it, and can make none without the rank that hosts the store.
            runtime.watchdog.start()
        except BaseException:
            _release(runtime, orderly=True)
            raise
    _runtime = runtime
    ending.observe()
    atexit.register(shutdown)
    _banner(runtime)


def shutdown() -> None:
    """Leave the job: drain, say goodbye to the other ranks, release everything. Idempotent; registered at exit.

    After an uncaught exception the other ranks are told to stop instead.
    """
    global _runtime
    runtime, _runtime = _runtime, None
    if runtime is None:
        return
    atexit.unregister(shutdown)
    if os.getpid() != runtime.process:
        return  # a forked child has nothing of its own to leave
    failed = ending.uncaught()
    ending.stop_observing()
    reason = None if failed is None else f"rank {runtime.rank} ended with {describe(failed)}"
    orderly = _part(runtime, reason) if runtime.size > 1 else reason is None
    runtime.engine.stop()
    finish_background()
    for exchanger in runtime.exchangers:
        exchanger.close()
    if runtime.size > 1:
        runtime.watchdog.stop()
    _release(runtime, orderly)


def _part(runtime: Runtime, reason: str | None) -> bool:
    """Tell the others that this rank leaves, and wait for them; whether all have left in good order."""
    for exchanger in runtime.exchangers:
        if reason is not None:
            exchanger.abort(reason)
    for channel in runtime.channels.values():
        channel.close(reason)
    failures = [e.error for e in runtime.exchangers if e.error is not None]
    failures += [channel.failure for channel in runtime.channels.values() if channel.failure is not None]
    if reason is not None or failures:
        runtime.watchdog.leave()
        message = reason or f"rank {runtime.rank} ended after {describe(failures[0])}"
        publish_abort(runtime.watchdog, ABORT, message)
        return False
    runtime.network.finish(runtime.config.timeout_seconds)
    for exchanger in runtime.exchangers:
        exchanger.part()
        exchanger.leave()
    runtime.watchdog.leave()
    return _farewell(runtime)


def leave_first() -> None:
    """Let :func:`shutdown` run at exit before what engines that were started since ``init`` do: it still needs them."""
    atexit.unregister(shutdown)
    atexit.register(shutdown)


def _release(runtime: Runtime, orderly: bool) -> None:
    for group in runtime.groups.values():
        if orderly:
            group.close()
        else:
            group.abandon()
    runtime.network.close()


def _members(process_set: Any, size: int) -> Ranks:
    """The ranks of a process set that :func:`init` was given."""
    given = getattr(process_set, "ranks", process_set)
    ranks = list(given) if isinstance(given, Iterable) else []
    if not ranks or len(set(ranks)) < len(ranks) or not all(type(r) is int and 0 <= r < size for r in ranks):
        raise ConfigError(f"process_sets: {given!r} is not a list of some of the ranks 0 .. {size - 1}")
    return tuple(sorted(ranks))


def _introduce(runtime: Runtime, process_sets: Sequence[Ranks]) -> None:
    """The ranks tell each other which host they are on, for places and topology, and which transport they will use.

    Then the process sets are made that all ranks must make together.
    """
    version = f"gradcomp {__version__}, wire protocol {PROTOCOL}"
    own = json.dumps([runtime.launch.host, runtime.config.transport, str(process_sets), version])
    told = [_introduction(part) for part in runtime.group(runtime.everyone).allgather_bytes(own.encode())]
    if others := [rank for rank, (_, _, _, theirs) in enumerate(told) if theirs != told[0][3]]:
        raise ConfigError(
            f"rank 0 runs {told[0][3]}, rank {others[0]} {told[others[0]][3]}: all ranks need the same version"
        )
    transports = [transport for _, transport, _, _ in told]
    if others := [rank for rank, name in enumerate(transports) if name != transports[0]]:
        raise ConfigError(
            f"rank 0 has transport={transports[0]}, rank {others[0]} has {transports[others[0]]}: "
            "all ranks need the same one"
        )
    if others := [rank for rank, (_, _, sets, _) in enumerate(told) if sets != told[0][2]]:
        raise ConfigError(
            f"rank 0 has process_sets={told[0][2]}, rank {others[0]} has {told[others[0]][2]}: all ranks name them all"
        )
    hosts = [host for host, _, _, _ in told]
    runtime.hosts = tuple(hosts)
    runtime.topology = Topology.of(hosts)
    runtime.launch = placed(runtime.launch, runtime.rank, hosts)
    if runtime.network.exposed:
        one_host = len(runtime.topology.leaders) == 1
        runtime.seal = agree_on_seal(runtime.group(runtime.everyone), one_host, runtime.launch.secret)
    if process_sets and runtime.config.transport == "horovod":
        from gradcomp.transport.horovod import process_set  # an engine, imported when it is asked for

        for ranks in process_sets:
            process_set([runtime.network.ranks[rank] for rank in ranks])


def _introduction(part: bytes) -> tuple[str, str, str, str]:
    try:
        introduction = json.loads(part)
    except ValueError as error:
        raise WireFormatError(f"a rank introduced itself with {part!r:.80}") from error
    if not isinstance(introduction, list) or len(introduction) != 4:
        raise ConfigError(
            f"a rank introduced itself with {part!r:.80}: it runs another version of gradcomp; all ranks need the same"
        )
    host, transport, process_sets, version = (printable(str(item)) for item in introduction)
    return host, transport, process_sets, version


def _farewell(runtime: Runtime) -> bool:
    """Wait until all ranks are here, as long as ``timeout_seconds``; whether they are.

    The rank that hosts the job's store must not leave before them. A rank that failed will not come: the others need
    not wait for it.
    """
    group, watchdog = runtime.group(runtime.everyone), runtime.watchdog
    aborted = False

    def look(_: float) -> None:
        nonlocal aborted
        aborted = watchdog.control.lookup(ABORT) is not None

    def failed() -> bool:
        return aborted or any(exchanger.error is not None for exchanger in runtime.exchangers)

    def waits_for() -> str:
        others = [rank for rank in runtime.everyone if rank != runtime.rank]
        absent = [rank for rank in others if not watchdog.has_left(rank)]
        names = runtime.roster(runtime.everyone).names(absent) or "the others"
        return (
            f"shutdown: rank {runtime.rank} is done and waits for {names} to end, at most "
            f"{runtime.config.timeout_seconds:g} s"
        )

    try:
        handle = group.allreduce(np.zeros(1, dtype=np.float32))
        if not watchdog.hold(lambda: failed() or handle.poll(), runtime.config, waits_for, look):
            logger.warning("%s: that is over, this rank ends", waits_for())
            return False
    except TransportError as error:
        logger.debug("shutdown: %s", error)
        return False
    return not failed()


def describe(error: BaseException) -> str:
    """An error with its type; another program's may not be able to say its text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - as it says
        return type(error).__name__


def is_initialized() -> bool:
    """Whether :func:`init` was called and :func:`shutdown` was not."""
    return _runtime is not None


def current() -> Runtime:
    """The runtime; StateError before :func:`init`."""
    if _runtime is None:
        raise StateError("gradcomp is not initialised; call gc.init() first")
    return _runtime


def rank() -> int:
    """This process's number, 0 .. size - 1."""
    return current().rank


def size() -> int:
    """Number of processes in the job."""
    return current().size


def local_rank() -> int:
    """This process's number on its host."""
    return current().launch.local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return current().launch.local_size


def cross_rank() -> int:
    """This process's number among those with its local rank, one on each host that has so many."""
    return current().launch.cross_rank


def cross_size() -> int:
    """Number of processes with this one's local rank."""
    return current().launch.cross_size


def _choose_kernels(config: Config) -> None:
    try:
        kernels.use("reference" if config.kernels == "reference" else "native")
        if config.isa != "auto":
            from gradcomp import _native

            _native.set_isa(config.isa)
    except ValueError as error:
        raise ConfigError(f"kernels={config.kernels}, isa={config.isa}: {error}") from error


def _start_logging(config: Config) -> None:
    """Be heard: a program that has configured logging keeps its configuration."""
    if logger.level == logging.NOTSET:
        logger.setLevel(config.log_level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("gradcomp: %(message)s"))
        logger.addHandler(handler)


def _banner(runtime: Runtime) -> None:
    if runtime.rank == 0:
        logger.info(
            "%s: %d ranks on %d host%s by %s, transport %s, interface %s, %s, kernels %s",
            __version__,
            runtime.size,
            len(runtime.topology.leaders),
            "s" * (len(runtime.topology.leaders) > 1),
            runtime.launch.launcher,
            runtime.config.transport,
            runtime.launch.interface or "chosen by the system",
            runtime.network.describe(),
            kernels.body(),
        )
        if runtime.size == 1:
            logger.info("a world of one rank: nothing is exchanged, compression is bypassed")
