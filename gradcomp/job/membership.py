"""Ranks exchange hosts, compare transports, process sets and versions, wait for each other, and leave together."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from secrets import token_hex
from time import monotonic, sleep
from typing import Any

import numpy as np

from gradcomp.core.config import unknown_variables
from gradcomp.core.errors import ConfigError, TransportError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.core.topology import Topology
from gradcomp.exchange.deadlock import Need
from gradcomp.exchange.members import publish_abort, publish_departure
from gradcomp.exchange.watchdog import (
    ABORT,
    LEFT,
    LEFT_GRACE_SECONDS,
    Answer,
    all_arrived_of,
    arrival_of,
    calls_among,
)
from gradcomp.job.launch import Ranks, placed
from gradcomp.job.signing import agree_on_seal
from gradcomp.job.state import Runtime
from gradcomp.reduce.header import PROTOCOL
from gradcomp.transport.control import StoreSilentError
from gradcomp.version import __version__

logger = logging.getLogger("gradcomp")

#: The ranks of a meeting look for each other at most this often, a rank and all of them together. The process that
#: serves the store answers about 50,000 calls a second.
_POLL_SECONDS, _POLLS_PER_SECOND = 0.01, 10_000
#: Rank 0 waits this long for the others to read why the job failed. Live ranks read it within a second.
_LONGEST_READING_SECONDS = 2.0
_PAUSE_SECONDS = 0.02


def set_of(process_set: Any, size: int) -> Ranks:
    """Return the sorted ranks of a process set that was given to ``init``; ConfigError if it is not a process set."""
    given = getattr(process_set, "ranks", process_set)
    ranks = list(given) if isinstance(given, Iterable) else []
    if not ranks or len(set(ranks)) < len(ranks) or not all(type(r) is int and 0 <= r < size for r in ranks):
        raise ConfigError(f"process_sets: {given!r} is not a list of some of the ranks 0 .. {size - 1}")
    return tuple(sorted(ranks))


def introduce(runtime: Runtime, process_sets: Sequence[Ranks]) -> None:
    """Exchange hosts, transports, process sets, versions and warnings with the other ranks. Collective.

    Rank 0 names the job. The topology follows from the hosts, and so do local and cross ranks if the launcher did not
    give them. If strangers may write to the job's store, the ranks agree on a key for signatures. Process sets are made
    here for Horovod only, which makes them on all ranks together. ConfigError on every rank if versions, transports or
    process sets differ.
    """
    version = f"gradcomp {__version__}, wire protocol {PROTOCOL}"
    unknown = unknown_variables(os.environ)
    own = json.dumps(
        [runtime.launch.host, runtime.config.transport, str(process_sets), version, token_hex(8), *unknown]
    )
    told = [_introduction(part) for part in runtime.group(runtime.everyone).allgather_bytes(own.encode())]
    if runtime.rank == 0:
        warn_of_variables([warnings for *_, warnings in told])
    for place, said, advice in (
        (3, "rank 0 runs {}, rank {} {}", "need the same version"),
        (1, "rank 0 has transport={}, rank {} has {}", "need the same one"),
        (2, "rank 0 has process_sets={}, rank {} has {}", "must pass the same process sets"),
    ):
        for rank, theirs in enumerate(told):
            if theirs[place] != told[0][place]:
                raise ConfigError(f"{said.format(told[0][place], rank, theirs[place])}: all ranks {advice}")
    hosts, runtime.job = [host for host, *_ in told], told[0][4]
    runtime.hosts = tuple(hosts)
    runtime.topology = Topology.of(hosts)
    runtime.launch = placed(runtime.launch, runtime.rank, hosts)
    if runtime.network.exposed:
        one_host = len(runtime.topology.leaders) == 1
        runtime.seal = agree_on_seal(runtime.group(runtime.everyone), one_host, runtime.launch.secret)
    if process_sets and runtime.config.transport == "horovod":
        from gradcomp.transport.horovod import process_set  # Horovod is imported only where it is used

        for ranks in process_sets:
            process_set([runtime.network.ranks[rank] for rank in ranks])


def warn_of_variables(by_rank: Sequence[Sequence[str]]) -> None:
    """Log each distinct warning once, and name the ranks that gave it unless all did."""
    for text in sorted({text for texts in by_rank for text in texts}):
        ranks = [rank for rank, texts in enumerate(by_rank) if text in texts]
        where = "" if len(ranks) == len(by_rank) else f" (on rank {', '.join(map(str, ranks))})"
        logger.warning("%s%s", text, where)


def _introduction(message: bytes) -> tuple[str, str, str, str, str, list[str]]:
    try:
        introduction = json.loads(message)
    except ValueError as error:
        raise WireFormatError(f"the start-up message of a rank is not JSON: {message!r:.80}") from error
    if not isinstance(introduction, list) or len(introduction) < 5:
        raise ConfigError(
            f"the start-up message {message!r:.80} is that of another version of gradcomp; all ranks need the same"
        )
    host, transport, process_sets, version, token, *warnings = (printable(str(item)) for item in introduction)
    return host, transport, process_sets, version, token, warnings


def meet(state: Runtime, ranks: Ranks, purpose: str, lacking: str) -> None:
    """Wait for the other ranks, which call this too. Collective over ``ranks``.

    Messages are made of ``purpose`` and ``lacking``: "rank 0 waits to <purpose>: rank 1 <lacking>".
    TransportError if one of them has left, at the deadline, and, if ``ranks`` are the whole job, if a rank has failed.
    Wire: every rank writes its purpose to the job's key-value store. The first of ``ranks`` looks for that of every
    other, then writes that all are there, for which the others look. So N ranks make a multiple of N calls, not of N^2.
    """
    watchdog, control, meeting = state.watchdog, state.watchdog.control, state.next_meeting(ranks)
    roster, first = state.roster(ranks), state.rank == ranks[0]
    pause = max(_POLL_SECONDS, len(ranks) / _POLLS_PER_SECOND)
    missing = list(ranks[1:])  # which only the first rank follows
    asked = -1.0

    def all_there() -> bool:
        nonlocal asked
        if monotonic() - asked < pause:
            return False
        asked = monotonic()
        try:
            if not first:
                return control.lookup(all_arrived_of(meeting)) is not None
            while missing and control.lookup(arrival_of(meeting, missing[0])) is not None:
                del missing[0]
            if not missing:
                control.publish(all_arrived_of(meeting), b"all")
        except StoreSilentError:
            return False
        return not missing

    def away() -> list[int]:
        """Return the members that have not arrived. It takes N calls at the store, so no rank does it repeatedly."""
        others = [member for member, rank in enumerate(ranks) if rank != state.rank]
        return [m for m in others if control.lookup(arrival_of(meeting, ranks[m])) is None]

    def look(waited: float) -> TransportError | None:
        if ranks == state.everyone and (abort := control.lookup(ABORT)) is not None:
            return TransportError(f"aborted: {printable(abort)}")
        if waited <= LEFT_GRACE_SECONDS or not watchdog.some_rank_left():
            return None
        gone = any(watchdog.has_left(ranks[member]) for member in away())
        return TransportError(absent()) if gone else None

    def absent() -> str:
        waits = f"rank {state.rank} waits to {purpose}"
        try:
            late = away()
        except TransportError as error:
            return f"{waits}, and cannot find out which ranks are missing: {error}"
        if not late:
            return f"{waits}: all ranks are there, and {roster.name(0)} has not reported it"
        answers: dict[int, Answer] = {}
        with suppress(TransportError):
            answers = watchdog.ask([ranks[member] for member in late])
        text = f"{waits}: {roster.names(late)} {lacking}"
        for member in late:
            where = answers[ranks[member]].waits_for if ranks[member] in answers else ""
            has = f"has left, and is in {LEFT}" if where == LEFT else f"waits in {where}"
            text += f"; {roster.name(member)} {has}" if where else ""
        return text

    scope = f"meeting/{state.key(ranks)}"
    watchdog.met[scope] = number = watchdog.met.get(scope, 0) + 1
    control.publish(arrival_of(meeting, state.rank), purpose.encode())
    need = Need(scope, ranks, number, where=f"a call in which ranks {list(ranks)} meet to {purpose}")
    if not watchdog.hold(all_there, state.config, absent, look, need):
        raise TransportError(f"{absent()}; that took longer than {state.config.timeout_seconds:g} s")


def who_waits(state: Runtime, ranks: Ranks) -> str | None:
    """Return a sentence that names a rank of ``ranks`` that waits for this one in :func:`meet`; None if none does."""
    meeting = state.meeting_to_come(ranks)
    for rank in ranks:
        if rank != state.rank and (purpose := state.watchdog.control.lookup(arrival_of(meeting, rank))):
            return f"rank {rank} waits to {printable(purpose)}"
    return None


def part(runtime: Runtime, reason: str | None) -> bool:
    """Leave the job and wait for the other ranks. Return whether all have reached the end without an error.

    ``reason`` says why this rank failed, or is None. After a failure this rank tells the others to stop, and only
    rank 0 waits.
    """
    for exchanger in runtime.exchangers:
        if reason is not None:
            exchanger.abort(reason)
        else:
            exchanger.before_end()
    for channel in runtime.channels.values():
        channel.close(reason)
    failures = [e.error for e in runtime.exchangers if e.error is not None]
    failures += [channel.failure for channel in runtime.channels.values() if channel.failure is not None]
    if reason is not None or failures:
        runtime.watchdog.leave()
        message = reason or f"rank {runtime.rank} ended after {describe(failures[0])}"
        publish_abort(runtime.watchdog, ABORT, message)
        if runtime.rank == 0 and runtime.network.member is None:
            _let_others_read(runtime)
        return False
    runtime.network.finish(runtime.config.timeout_seconds)
    for exchanger in runtime.exchangers:
        exchanger.part()
        exchanger.leave()
    if runtime.everyone not in runtime.channels:
        # Without a channel there is no close() that publishes the departure. Others may wait in their first collective.
        publish_departure(runtime.watchdog, calls_among(runtime.key(runtime.everyone)), runtime.rank)
    runtime.watchdog.leave()
    return _farewell(runtime)


def _let_others_read(runtime: Runtime) -> None:
    """Wait until the other ranks have left too, two seconds at most.

    They look in the job's store for the cause of the failure. This rank may serve the store, which ends with it.
    """
    deadline = monotonic() + _LONGEST_READING_SECONDS
    waiting = set(runtime.everyone) - {runtime.rank}
    while waiting and monotonic() < deadline:
        waiting = {rank for rank in waiting if not runtime.watchdog.has_left(rank)}
        sleep(_PAUSE_SECONDS)


def _farewell(runtime: Runtime) -> bool:
    """Wait at most ``timeout_seconds`` until all ranks call this. Return whether all have and none has failed.

    The rank that serves the job's store must not leave before the others. A rank that failed does not call this, so the
    others do not wait for it.
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
            logger.warning("%s: this time is over, so this rank ends without them", waits_for())
            return False
    except TransportError as error:
        logger.debug("shutdown: %s", error)
        return False
    return not failed()


def describe(error: BaseException) -> str:
    """Return an error's type and text, or only its type if ``str()`` of it raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - str() of another program's error may raise anything
        return type(error).__name__
