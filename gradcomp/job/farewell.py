"""Lets a rank leave the job: it tells the other ranks, and waits for them if nothing has failed."""

from __future__ import annotations

import logging
from time import monotonic, sleep

import numpy as np

from gradcomp.core.errors import TransportError
from gradcomp.engine.keys import ABORT, calls_among
from gradcomp.engine.watch import publish_abort, publish_departure
from gradcomp.job.state import Runtime

logger = logging.getLogger("gradcomp")

#: Live ranks look within a second of a failure for its cause; rank 0 does not wait longer, for ranks that are dead.
_LONGEST_READING_SECONDS = 2.0
_PAUSE_SECONDS = 0.02


def part(runtime: Runtime, reason: str | None) -> bool:
    """Tell the other ranks that this one leaves, and wait for them. Return whether all have left without an error."""
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
        if runtime.rank == 0:
            _let_others_read(runtime)
        return False
    runtime.network.finish(runtime.config.timeout_seconds)
    for exchanger in runtime.exchangers:
        exchanger.part()
        exchanger.leave()
    if runtime.everyone not in runtime.channels:
        # A channel's close() would have published it. Other ranks may be in their first call.
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
    """Wait until all ranks are here, at most ``timeout_seconds``. Return whether they are.

    The rank that serves the job's store must not leave before the others. A rank that failed will not come, so the
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
    """Return an error's type and text, or only its type where the text of another program's error cannot be made."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - str() of another program's error may raise anything
        return type(error).__name__
