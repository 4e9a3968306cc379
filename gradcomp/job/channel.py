"""Runs the user's collectives on one thread, one after another, and moves no data before all ranks agree on the call.

On Gloo a collective whose sizes differ between ranks ends the process, so every call begins with an all-gather of a
fixed size: a digest of the call, and its data if they are small. Ranks that make named calls in different orders match
them by name (:mod:`gradcomp.job.call_matching`). A wait ends at a deadline, or within a second of another rank's
failure, which the :class:`Watchdog` detects. A store that does not answer ends no call before the deadline.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, StateError, TransportError
from gradcomp.core.trace import Timeline
from gradcomp.exchange.deadlock import Begun, Need
from gradcomp.exchange.members import Roster, Watch
from gradcomp.exchange.request_group import Call
from gradcomp.exchange.thread import sleep_precisely
from gradcomp.exchange.watchdog import ABORT, LEFT, Position, Watchdog, calls_among
from gradcomp.job.call_matching import Match, Reply, keys_of, listing, match
from gradcomp.job.launch import Ranks
from gradcomp.job.membership import meet
from gradcomp.job.process_sets import Members, members
from gradcomp.job.runtime import current
from gradcomp.job.state import Runtime
from gradcomp.transport.base import BlockingHandle, Bytes, Handle, Transport

T = TypeVar("T")

_LONGEST_PAUSE_SECONDS = 200e-6  # between polls of a collective
_DRAIN_SECONDS = 10.0  # how long close() waits for the thread after its last call should have ended
_CHUNK_BYTES = 64 << 20
#: The longest pause between rounds while no call is pending on all ranks.
_FRUITLESS_PAUSE_SECONDS = 5e-3
#: A rank whose only calling thread has been blocked this long is taken to make no other call.
_STUCK_SECONDS = 1.0


class _CallWatch(Watch):
    """Watches one channel. A rank's position is the number of times that it has compared calls with the others."""

    nobody = "all ranks called it"
    name = ""  # the last call's
    calls = 0
    ends = False
    #: Calls that all members have agreed on, so the number is the same on every rank.
    made = 0

    def __init__(self, *whose: Any) -> None:
        super().__init__(*whose)
        #: The calls that are queued and not begun, in order; a dict serves as an ordered set.
        self.outstanding: dict[_Item, None] = {}
        #: Names the ranks in messages; empty where the channel is among all ranks of the job.
        self.among = ""

    @property
    def begun(self) -> Begun:
        return Begun(self.made, tuple(keys_of([item.call.key for item in list(self.outstanding)])))

    @property
    def goes_on(self) -> bool:
        """Return whether this rank may still make calls: a waiting graph may run other ops, a joined rank stands in."""
        items = list(self.outstanding)
        return any(item.reply.graph_waits or item.call.stand_in is not None for item in items)

    def need(self, what: object) -> Need | None:
        made, items = self.made, list(self.outstanding)
        for item, key in zip(items, keys_of([item.call.key for item in items]), strict=True):
            if item.reply is what:
                where = item.call.name if item.call.key is None else f"{item.call.name} {item.call.key!r}"
                return Need(self.scope, self.roster.ranks, made, key, f"{where}{self.among}")
        return None

    @property
    def position(self) -> Position:
        return self.calls, -1, 0

    @property
    def where(self) -> str:
        return f"{self.name}, call {self.calls} of its collectives"

    def look(self, waited: float) -> GradcompError | None:
        if self.ends and waited:
            return TransportError("gradcomp was shut down meanwhile")
        return super().look(waited)

    def stalled(self, waited: float) -> str:
        return f"{self.name}: {self.own_rank} waits; {self.culprits()}"

    def ended(self, waited: float, why: str) -> str:
        return f"no end after {waited:.1f} s; {why}"

    def absence(self, member: int, at: Position, waits_for: str) -> str:
        left = waits_for == LEFT
        why = (
            f": it has left, and is in {LEFT}" if left else f": it waits in {waits_for}" if waits_for else ""
        )
        return f"{self.roster.name(member)} did not call it{why}"


@dataclass(eq=False)
class _Item:
    call: Call
    work: Callable[[list[int]], Any]
    reply: Reply[Any]
    called: float  # the time of the call, by perf_counter


class Channel:
    """Holds one process group's queue of calls and the thread that makes them.

    ``aborts``: keys of the control channel that end every call, in addition to the channel's own. ``timeline``: returns
    the timeline that records calls now, or None.
    """

    def __init__(
        self,
        group: Transport,
        watchdog: Watchdog,
        config: Config,
        name: str,
        roster: Roster | None = None,
        aborts: Sequence[str] = (),
        timeline: Callable[[], Timeline | None] = lambda: None,
    ) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group
        roster = roster or Roster.of_size(group.size)
        self._watch = _CallWatch(watchdog, config, calls_among(name), group.rank, roster, aborts)
        watchdog.add(self._watch)
        self._timeline = timeline
        self._watch.among = "" if name == "all" else f" of ranks {list(roster.ranks)}"
        self._row = f"collectives{self._watch.among}"
        self._timeout_seconds = config.timeout_seconds
        self._stall_seconds = config.stall_warning_seconds
        self._process = os.getpid()
        self._failure: GradcompError | None = None
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._pending: list[_Item] = []
        self._closing = False
        self._left = False  # the thread takes no more items
        #: The number of comparisons of the ranks' calls. :func:`gradcomp.job.joining.join` ranks its callers by it.
        self.rounds = 0
        self._callers: set[int | None] = set()  # threads that have called anything
        self._fruitless_since: float | None = None
        self._thread = threading.Thread(target=self._serve, name="gradcomp-user", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> GradcompError | None:
        """Return the error that made the group unusable, if there is one."""
        return self._failure

    def submit(
        self, call: Call, work: Callable[[list[int]], T], release: Callable[[], None] | None = None
    ) -> Reply[T]:
        """Queue a call: the thread agrees on it with the other ranks, then calls ``work(every rank's number)``.

        The reply raises ConfigError if any rank has a problem and PlanMismatchError if the calls differ, both on every
        rank; the channel can be used further after these. It raises TransportError if a rank fails or stays away.
        ``release`` is called once, when the caller has the result or has dropped the reply.
        """
        if os.getpid() != self._process:
            raise StateError(
                f"{call.name}: a forked child is not a rank; call it in the process that called init()"
            )
        if not self._thread.is_alive():
            raise StateError(f"{call.name}: gradcomp was shut down")
        callers = self._watch.watchdog.callers
        reply: Reply[T] = Reply(release, callers)
        self._callers.add(callers.came())
        item = _Item(call, work, reply, perf_counter())
        self._watch.outstanding[item] = None
        self._queue.put(item)
        if self._left:  # the thread may have looked for the last time before this item was queued
            self._refuse_rest()
        return reply

    def close(self, reason: str | None = None) -> None:
        """End the thread after the queued calls; with a ``reason``, abort these on all ranks."""
        self._queue.put(None)
        if reason is not None:
            self._watch.ends = True
            if self._failure is None:
                self._watch.publish_abort(reason)
        # The thread ends by itself: its wait ends at the deadline, or at once after a failure or an abort.
        at_once = self._watch.ends or self._failure is not None
        self._thread.join(_DRAIN_SECONDS if at_once else self._timeout_seconds + _DRAIN_SECONDS)
        if reason is None and self._failure is None:
            self._watch.depart()

    # ------------------------------------------------------------------ called by ``work``, on the thread

    def allreduce(self, array: npt.NDArray[Any]) -> None:
        """Sum a flat array of float32, float64 or int64 in place. Wire: 2 d (N-1)/N bytes per rank for d bytes."""
        self._wait(lambda: self._group.allreduce(array))

    def broadcast(self, array: Bytes, root: int) -> None:
        """Overwrite ``array`` with the root's bytes. Wire: d bytes to each rank but the root, along a binomial tree."""
        place = (self.rank - root) % self.size
        for distance in (1 << i for i in range((self.size - 1).bit_length())):
            sends: list[tuple[int, Bytes]] = []
            recvs: list[tuple[int, Bytes]] = []
            if place < distance and place + distance < self.size:
                sends = [((self.rank + distance) % self.size, array)]
            elif distance <= place < 2 * distance:
                recvs = [((self.rank - distance) % self.size, array)]
            self._wait(lambda: self._group.exchange(sends, recvs))  # noqa: B023 - issued before the next round

    def allgather(self, part: Bytes, counts: Sequence[int]) -> Bytes:
        """Return all ranks' bytes in rank order, ``counts[i]`` of rank i. Wire: N-1 times the own part per rank."""
        whole = np.empty(sum(counts), dtype=np.uint8)
        start = sum(counts[: self.rank])
        whole[start : start + len(part)] = part
        self._wait(lambda: self._group.allgatherv(whole, counts))
        return whole

    def alltoall(self, send: Bytes, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Bytes:
        """Send each rank its part of ``send``; return what all sent, in rank order. Wire: the parts for other ranks."""
        recv = np.empty(sum(recv_counts), dtype=np.uint8)
        self._wait(lambda: self._group.alltoallv(send, send_counts, recv, recv_counts))
        return recv

    def exchange(self, send: Bytes, recv: Bytes, peer: int) -> None:
        """Send all of ``send`` to one rank and fill ``recv`` from it; every rank must have a peer. Wire: d bytes."""
        self._wait(lambda: self._group.exchange([(peer, send)], [(peer, recv)]))

    # ------------------------------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        sleep_precisely()
        while self._take():
            self._round()
        self._left = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Raise StateError in the replies of items that were queued too late."""
        with suppress(queue.Empty):
            while True:
                item = self._queue.get_nowait()
                if item is not None:
                    self._watch.outstanding.pop(item, None)
                    item.reply.set_exception(StateError(f"{item.call.name}: gradcomp was shut down"))

    def _take(self) -> bool:
        """Move queued calls to the pending ones; block while there are none. Return False if the thread is to end."""
        pause = 0.0
        if self._fruitless_since is not None:
            waited = monotonic() - self._fruitless_since
            pause = min(_LONGEST_PAUSE_SECONDS + waited / 8, _FRUITLESS_PAUSE_SECONDS)
        while self._pending or not self._closing:
            try:
                if self._pending and pause == 0.0:
                    item = self._queue.get_nowait()
                else:
                    item = self._queue.get(timeout=pause if self._pending else None)
            except queue.Empty:
                return True
            pause = 0.0
            if item is None:
                self._closing = True
            else:
                self._pending.append(item)
        return False

    def _round(self) -> None:
        """Find the pending calls that all ranks have, and make them."""
        try:
            if self._failure is not None:
                raise self._failure
            self._watch.name = self._pending[0].call.name
            self._watch.calls += 1
            self._watch.endless = all(item.call.stand_in is not None for item in self._pending)
            matches = self._match()
            self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - the callers and the other ranks must hear of it
            items, self._pending = self._pending, []
            for item in items:
                del self._watch.outstanding[item]
                item.reply.set_exception(self._fail(error))
            return
        before, taken = self._pending, {found.place for found in matches}
        self._pending = [item for place, item in enumerate(before) if place not in taken]
        for found in matches:
            self._watch.made += bool(found.numbers)
            if found.place is not None:
                self._make(before[found.place], found)
            elif found.error is None and self._failure is None:
                self._stand_in(found.zeros)

    def _stand_in(self, zeros: Any) -> None:
        """Take part in a call that the others make, since this rank has joined."""
        try:
            for item in self._pending:
                if item.call.stand_in is not None:
                    item.call.stand_in(zeros)
        except BaseException as error:  # noqa: BLE001 - join() and the other ranks must hear of it
            self._fail(error)

    def _match(self) -> list[Match]:
        """Return the calls to make next; none if no call is pending on all ranks yet."""
        rounds = match([item.call for item in self._pending], self._waited_for(), self.rank, self.size)
        matches: list[Match] | None = None
        while matches is None:
            try:
                operation = next(rounds)
            except StopIteration as end:
                matches = end.value
            else:
                self._wait(partial(operation.issue, self._group))
        if matches:
            self._fruitless_since = None
        elif self._fruitless_since is None:
            self._fruitless_since = monotonic()
        elif (waited := monotonic() - self._fruitless_since) > self._timeout_seconds:
            pending = listing([item.call for item in self._pending])
            raise TransportError(f"not called on all ranks for {waited:.1f} s: {pending}")
        return matches

    def _waited_for(self) -> list[int]:
        """Return the places of pending calls for which the program blocks, if it will make no other call meanwhile."""
        if self._fruitless_since is None:
            return []
        if self._closing:
            return list(range(len(self._pending)))
        self._callers &= {thread.ident for thread in threading.enumerate()}
        alone = len(self._callers) <= 1 and not any(item.reply.graph_waits for item in self._pending)
        patience = _STUCK_SECONDS if alone else self._stall_seconds
        if monotonic() - self._fruitless_since < patience:
            return []
        waited_for = [place for place, item in enumerate(self._pending) if item.reply.waited_for]
        # A thread that has made calls before and is not blocked may make the missing one.
        return waited_for if alone or len(waited_for) == len(self._pending) else []

    def _make(self, item: _Item, found: Match) -> None:
        self._watch.name = item.call.name
        del self._watch.outstanding[item]
        timeline, began = self._timeline(), perf_counter()
        try:
            if self._failure is not None:
                raise self._failure
            if found.error is not None:
                raise found.error
            result = None
            if found.inline is not None and item.call.inline is not None:
                item.call.inline.finish(found.inline)
            else:
                result = item.work(found.numbers)
            if timeline is not None:
                name = item.call.name if item.call.key is None else f"{item.call.name} {item.call.key}"
                timeline.add_call(self._row, name, item.called, began, perf_counter())
            item.reply.set_result(result)
        except (ConfigError, PlanMismatchError) as error:
            item.reply.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the caller and the other ranks must hear of it
            item.reply.set_exception(self._fail(error))

    def _wait(self, issue: Callable[[], Handle]) -> None:
        """Issue a collective, and wait until it is done or the watchdog ends the wait."""
        handle = issue()
        block = handle.block if isinstance(handle, BlockingHandle) else None
        self._watch.hold(handle.poll, _LONGEST_PAUSE_SECONDS, block)

    def _fail(self, error: BaseException) -> GradcompError:
        """Make the channel unusable, tell the other ranks, and return the error. Never raises."""
        watch = self._watch
        if self._failure is None and watch.told and isinstance(error, GradcompError):
            self._failure = error
        if self._failure is None:
            message = f"{watch.name}: {watch.own_rank}: {type(error).__name__}"
            with suppress(BaseException):  # str() of a foreign error may raise
                message = f"{watch.name}: {watch.own_rank}: {error}"
            if isinstance(error, GradcompError):
                self._failure = type(error)(message)
            else:
                self._failure = TransportError(message)
                self._failure.__cause__ = error
            with suppress(BaseException):
                watch.publish_abort(message)
        return self._failure


def current_channel(process_set: Members = None) -> Channel | None:
    """Return the channel of a process set, or None if this rank is its only member. StateError before ``init``."""
    return channel_of(members(process_set))


def channel_of(ranks: Ranks) -> Channel | None:
    """Return the channel among ``ranks`` of the current job, or None for one rank. The first call is collective."""
    if len(ranks) == 1:
        return None
    state = current()
    if ranks not in state.channels:
        with state.channel_locks.setdefault(ranks, threading.Lock()):
            if ranks not in state.channels:
                _make_channel(state, ranks)
    return state.channels[ranks]


def _make_channel(state: Runtime, ranks: Ranks) -> None:
    """Make the channel of a set of ranks. If that failed before, raise the same error, as a failed channel does."""
    if (before := state.channel_errors.get(ranks)) is not None:
        raise before
    try:
        if ranks != state.everyone:  # all ranks have met in init()
            meet(state, ranks, "call a collective", f"has called none of ranks {list(ranks)}")
        group = state.group(ranks)
    except GradcompError as error:
        state.channel_errors[ranks] = error
        raise
    state.channels[ranks] = Channel(
        group,
        state.watchdog,
        state.config,
        state.key(ranks),
        state.roster(ranks),
        (ABORT,) if ranks == state.everyone else (),
        lambda: state.timeline,
    )


def alone(call: Call) -> Reply[None]:
    """Return the reply of a call in a world of one, where nothing is sent. ConfigError if the call has a problem."""
    if call.problem is not None:
        raise ConfigError(f"{call.name}: {call.problem}")
    reply: Reply[None] = Reply()
    reply.set_result(None)
    return reply


def chunks(items: Iterable[T], size_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield lists of items that travel together in one broadcast: up to 64 MiB, or one item that is larger."""
    chunk: list[T] = []
    held_bytes = 0
    for item in items:
        if chunk and held_bytes + size_bytes(item) > _CHUNK_BYTES:
            yield chunk
            chunk, held_bytes = [], 0
        chunk.append(item)
        held_bytes += size_bytes(item)
    if chunk:
        yield chunk
