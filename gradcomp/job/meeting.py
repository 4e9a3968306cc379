"""Lets some ranks wait for each other before they make a communicator, so that the wait can be watched.

An engine's own rendezvous is a call that returns once all ranks have come, or after a deadline, and reports nothing
meanwhile. Here each rank first publishes that it has come, and then looks for the others.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from gradcomp.core.errors import TransportError
from gradcomp.core.text import printable
from gradcomp.engine.deadlock import Need
from gradcomp.engine.keys import ABORT, LEFT, Answer, arrival_of
from gradcomp.engine.watchdog import LEFT_GRACE_SECONDS
from gradcomp.job.network import Ranks
from gradcomp.job.state import Runtime
from gradcomp.transport.control import StoreSilentError

_POLL_SECONDS = 0.01


def meet(state: Runtime, ranks: Ranks, purpose: str, lacking: str) -> None:
    """Wait for the other ranks, which call this too. Collective over ``ranks``.

    In messages ``purpose`` follows "rank 0 waits to", and ``lacking`` follows the ranks that are missing.
    TransportError if one of them has left, if a rank of the job has failed, or at the deadline. Wire: the purpose, one
    small value per rank in the job's key-value store, read by every other.
    """
    watchdog, control, meeting = state.watchdog, state.watchdog.control, state.next_meeting(ranks)
    roster = state.roster(ranks)
    missing = [member for member, rank in enumerate(ranks) if rank != state.rank]
    asked = -1.0

    def all_there() -> bool:
        nonlocal asked
        if missing and monotonic() - asked < _POLL_SECONDS:
            return False
        asked = monotonic()
        try:
            while missing and control.lookup(arrival_of(meeting, ranks[missing[0]])) is not None:
                del missing[0]
        except StoreSilentError:
            return False
        return not missing

    def look(waited: float) -> TransportError | None:
        if ranks == state.everyone and (abort := control.lookup(ABORT)) is not None:
            return TransportError(f"aborted: {printable(abort)}")
        if waited > LEFT_GRACE_SECONDS and any(watchdog.has_left(ranks[member]) for member in missing):
            return TransportError(absent())
        return None

    def absent() -> str:
        late = list(missing)
        answers: dict[int, Answer] = {}
        with suppress(TransportError):
            answers = watchdog.ask([ranks[member] for member in late])
        text = f"rank {state.rank} waits to {purpose}: {roster.names(late)} {lacking}"
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
    """Return, as text, the first of ``ranks`` that waits to :func:`meet` this one, and its purpose; else None."""
    meeting = state.meeting_to_come(ranks)
    for rank in ranks:
        if rank != state.rank and (purpose := state.watchdog.control.lookup(arrival_of(meeting, rank))):
            return f"rank {rank} waits to {printable(purpose)}"
    return None
