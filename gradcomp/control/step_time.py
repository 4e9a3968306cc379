"""Simulates a step: when the last bucket of an exchange is decoded, and what the exchange takes from the computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: The part of a core that the engine's thread uses while it waits for a collective: it polls. Measured with 1 and 2
#: rounds of messages a bucket: docs/benchmarks/step-parts.md.
POLLING = 0.1


@dataclass(frozen=True)
class Round:
    """One collective of an exchange bucket.

    First the engine's thread codes for ``coding`` seconds. Then the collective occupies the link for ``busy`` seconds,
    and its last byte arrives ``latency`` seconds later. Meanwhile the rank's processor works on it for ``processor``
    seconds.
    """

    busy: float
    latency: float
    coding: float = 0.0
    processor: float = 0.0


@dataclass(frozen=True)
class Trip:
    """One exchange bucket: its layers, its successive collectives, and ``decoding`` seconds after the last one."""

    layers: tuple[int, ...]
    rounds: tuple[Round, ...]
    decoding: float


@dataclass(frozen=True)
class Timeline:
    """The simulated exchange of a step, in seconds.

    ``end``: when the last bucket is decoded. ``taken``: what the exchange has taken from the computing by the time at
    which each bucket begins, and by the end.
    """

    end: float
    taken: tuple[float, ...]


def simulate(
    complete: Sequence[float], trips: Sequence[Trip], shared: bool, *, observed: bool = False
) -> Timeline:
    """Returns the timeline of a step in which bucket k is complete after ``complete[k]`` seconds of computing.

    If the core is ``shared``, exchange and computing take turns on it: all that the exchange has taken so far delays
    the gradients that come after it. With ``observed``, ``complete`` are times of a clock that include such delays.

    Collectives are issued in the pipeline's order. Tick t encodes bucket t once it is complete and issues its first
    round, then codes and issues the next round of each unfinished bucket, the newest first, when its previous round
    has ended; a bucket without further rounds is decoded. The link serves collectives in the order in which they are
    issued. A round takes as long as the link or the processor needs for it, whichever is longer; latencies overlap.
    """
    now = free = used = 0.0
    under_way: list[tuple[int, int, float]] = []  # bucket, round, end; newest first
    taken = []

    def work(seconds: float) -> None:
        nonlocal now, used
        now += seconds
        used += seconds

    def issue(bucket: int, number: int) -> tuple[int, int, float]:
        nonlocal free, used
        one = trips[bucket].rounds[number]
        work(one.coding)
        free = max(free, now) + max(one.busy, one.processor)
        used += one.processor + POLLING * one.busy
        return bucket, number, free + one.latency

    def advance() -> None:
        nonlocal now
        still = []
        for bucket, number, end in under_way:
            now = max(now, end)
            if number + 1 < len(trips[bucket].rounds):
                still.append(issue(bucket, number + 1))
            else:
                work(trips[bucket].decoding)
        under_way[:] = still

    for bucket, ready in enumerate(complete):
        delay = used if shared else 0.0
        taken.append(delay)
        now = max(now, ready if observed else ready + delay)
        if trips[bucket].rounds:
            started = [issue(bucket, 0)]
        else:
            started = []
            work(trips[bucket].decoding)
        advance()
        under_way[:0] = started
    while under_way:
        advance()
    return Timeline(now, (*taken, used if shared else 0.0))
