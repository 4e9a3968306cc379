"""Before some ranks make a communicator they wait for each other, where a wait can be watched.

An engine's own meeting is a call that returns when all have come, or after a deadline, without a word. Here each rank
publishes ``meeting/<ranks>-<number>/<rank>`` first, and looks for the others.
"""

from __future__ import annotations

from contextlib import suppress
from time import monotonic

from gradcomp.core.errors import TransportError
from gradcomp.core.text import printable
from gradcomp.engine.patience import hold
from gradcomp.engine.whereabouts import LEFT, LEFT_GRACE_SECONDS
from gradcomp.job.network import Ranks
from gradcomp.job.runtime import ABORT, Runtime
from gradcomp.transport.control import StoreSilentError

_POLL_SECONDS = 0.01


def meet(state: Runtime, ranks: Ranks, purpose: str, lacking: str) -> None:
    """Wait for the other ranks, who come here too.

    ``purpose`` stands after "rank 0 waits to", ``lacking`` behind the ranks that are missing. Collective over
    ``ranks``. TransportError if one has left, if a rank of the job has failed, or at the deadline.
    Wire: one small value per rank in the job's key-value store, read by every other.
    """
    control, prefix = state.engine_control, f"meeting/{state.next_meeting(ranks)}"
    roster = state.roster(ranks)
    missing = [member for member, rank in enumerate(ranks) if rank != state.rank]
    asked = -1.0

    def all_there() -> bool:
        nonlocal asked
        if missing and monotonic() - asked < _POLL_SECONDS:
            return False
        asked = monotonic()
        try:
            while missing and control.lookup(f"{prefix}/{ranks[missing[0]]}") is not None:
                del missing[0]
        except StoreSilentError:
            return False
        return not missing

    def look(seconds: float) -> None:
        with suppress(StoreSilentError):
            if ranks == state.everyone and (abort := control.lookup(ABORT)) is not None:
                raise TransportError(f"aborted: {printable(abort)}")
        if seconds > LEFT_GRACE_SECONDS and any(state.whereabouts.of(ranks[m]) == LEFT for m in missing):
            raise TransportError(absent())

    def absent() -> str:
        text = f"rank {state.rank} waits to {purpose}: {roster.names(missing)} {lacking}"
        for member in missing:
            where = state.whereabouts.of(ranks[member])
            has = f"has left, and is in {LEFT}" if where == LEFT else f"waits in {where}"
            text += f"; {roster.name(member)} {has}" if where else ""
        return text

    control.publish(f"{prefix}/{state.rank}", b"here")
    if not hold(all_there, state.config, absent, look):
        raise TransportError(f"{absent()}; that took longer than {state.config.timeout_seconds:g} s")
