"""Every rank records where the time of its steps goes; once in a window of steps rank 0 learns all ranks' times."""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter

import numpy as np
import numpy.typing as npt

from gradcomp.core.run_lines import ByRank, Window
from gradcomp.core.trace import Statistics
from gradcomp.exchange.waiting import Waiting, until_complete
from gradcomp.transport.base import AllGather, Handle, Transport

Doubles = npt.NDArray[np.float64]

#: A step is waited for by at least this share of its time, on the mean of the other ranks; else nobody waited.
_LEAST_SHARE = 0.01
#: The parts of a step that are recorded: all of it, its backward pass, its exposed communication.
_PARTS = 3
#: The numbers that are recorded of a whole window: seconds of kernels, seconds of rounds, bytes.
_TOTALS = 3


class StepTimes:
    """Records the parts of each step on this rank, and gathers those of a window of ``every`` steps from all ranks.

    The training thread calls :meth:`opened` and :meth:`waited`, on all ranks alike; the engine's thread calls
    :meth:`issue` and :meth:`gather` within the step after a window. The gather is under way together with the step's
    last exchange bucket. Wire: one all-gather of 24 (``every`` + 1) bytes from each rank in ``every`` steps, not
    counted in ``bytes_sent``.

    A rank knows only its own clock. Since all ranks end an exchange together, the time from the end of one exchange to
    the wait for the next, compared over ranks, says who was last.
    """

    def __init__(self, every: int, statistics: Statistics, transport: Transport) -> None:
        self._every, self._statistics, self._transport = every, statistics, transport
        self._opened_at = self._ended_at = 0.0
        self._exchanges = 0  # begun so far
        #: The first step of the window that is gathered, if one is, and of the one that is recorded.
        self._firsts: list[int] = []
        self._row = np.full(_PARTS * every + _TOTALS, np.nan)
        self._reached = self._before = (0.0, 0.0, float(transport.bytes_sent))
        self._table: Doubles | None = None
        self._handle: Handle | None = None
        self._gathered: Window | None = None

    def opened(self, step: int) -> None:
        """Record that an exchange begins, with the first gradient of ``step``."""
        if self._exchanges % self._every == 0:
            self._firsts.append(step)
        self._exchanges += 1
        self._opened_at = perf_counter()
        self._exposed_before = self._statistics.exposed_seconds

    def waited(self) -> None:
        """Record that the means of the step are there."""
        now, s = perf_counter(), self._statistics
        if self._ended_at:  # the first step has no step before it, and is slower than all others
            exposed = s.exposed_seconds - self._exposed_before
            at = _PARTS * ((self._exchanges - 1) % self._every)
            backward = max(now - self._opened_at - exposed, 0.0)
            self._row[at : at + _PARTS] = now - self._ended_at, backward, exposed
        self._ended_at = now
        self._reached = s.codec_seconds, s.wire_seconds, float(s.wire_bytes)

    def issue(self) -> None:
        """Start to gather the last window, if it is complete."""
        if self._exchanges == 1 or (self._exchanges - 1) % self._every:
            return
        table = np.zeros((self._transport.size, len(self._row)))
        table[self._transport.rank] = self._totalled()
        self._row[:] = np.nan
        counts = [table[0].nbytes] * self._transport.size
        self._table, buffer = table, table.reshape(-1).view(np.uint8)
        self._handle = AllGather(buffer, counts).issue(self._transport)

    def gather(self) -> Generator[Waiting, None, None]:
        """Wait for the times of all ranks, if they are under way."""
        if self._handle is None:
            return
        yield from until_complete(self._handle)
        self._handle = None
        first = self._firsts.pop(0)
        if self._transport.rank == 0:
            assert self._table is not None, "it was issued"
            self._gathered = window(first, self._every, self._table)

    def take(self) -> Window | None:
        """Return the window that was gathered last, once; None on ranks other than 0."""
        found, self._gathered = self._gathered, None
        return found

    def rest(self) -> Window | None:
        """Return the steps since the last window, of which only this rank's times are known; None if there are none."""
        steps = (self._exchanges - 1) % self._every + 1 if self._exchanges else 0
        if not self._firsts or not steps:
            return None
        table = np.full((self._transport.size, len(self._row)), np.nan)
        table[self._transport.rank] = self._totalled()
        return window(self._firsts[-1], steps, table)

    def _totalled(self) -> Doubles:
        """Return the recorded parts, and the totals since the last window."""
        self._row[-_TOTALS:] = np.subtract(self._reached, self._before)
        self._before = self._reached
        return self._row


def window(first: int, steps: int, table: Doubles) -> Window | None:
    """Return what the run log holds of a table that has a row for each rank; NaN stands for what is not known.

    It is None if no time of a step is known.
    """
    parts = table[:, :-_TOTALS].reshape(len(table), -1, _PARTS).transpose(2, 1, 0)  # part, step, rank
    parts = parts[:, ~np.isnan(parts).all(axis=(0, 2))]
    if not parts.size:
        return None
    seconds, backward, exposed = parts
    waited, last = _stragglers(seconds, exposed)
    codec, wire, sent_bytes = (table[:, -_TOTALS:] / steps).T
    return Window(
        first,
        steps,
        seconds=_by_rank(_mean(seconds)),
        backward=_by_rank(_mean(backward)),
        exposed=_by_rank(_mean(exposed)),
        waited=_by_rank(_mean(waited)),
        codec=_by_rank(codec),
        wire=_by_rank(wire),
        sent_bytes=_by_rank(sent_bytes, 1),
        last=_by_rank(last, 0),
    )


def _stragglers(seconds: Doubles, exposed: Doubles) -> tuple[Doubles, Doubles]:
    """Return the seconds for which each rank waited for the last one, by step, and the steps in which a rank was last.

    Before a rank waits it has worked for ``seconds - exposed`` since the last exchange, whose end all ranks see
    together. Its wait for the last rank is at most its exposed time.
    """
    worked = seconds - exposed
    complete = ~np.isnan(worked).any(axis=1)
    waited, last = np.full_like(worked, np.nan), np.full(worked.shape[1], np.nan)
    if worked.shape[1] == 1 or not complete.any():
        return waited, last
    latest = worked[complete].max(axis=1, keepdims=True)
    waits = np.minimum(latest - worked[complete], exposed[complete])
    waited[complete] = waits
    others = waits.sum(axis=1) / (worked.shape[1] - 1)
    counted = others >= _LEAST_SHARE * seconds[complete].mean(axis=1)
    last[:] = np.bincount(worked[complete].argmax(axis=1)[counted], minlength=worked.shape[1])
    return waited, last


def _mean(values: Doubles) -> Doubles:
    """Return the mean over steps by rank, NaN where no step is known."""
    known = ~np.isnan(values)
    steps = known.sum(axis=0)
    means: Doubles = np.where(
        steps > 0, np.where(known, values, 0.0).sum(axis=0) / np.maximum(steps, 1), np.nan
    )
    return means


def _by_rank(values: Doubles, digits: int = 7) -> ByRank:
    """Return the values rounded, so that a line is short; None for NaN."""
    rounded = np.round(values, digits).tolist()
    return tuple(None if np.isnan(value) else max(value, 0.0) for value in rounded)
