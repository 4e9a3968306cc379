"""Proves deadlocks of ranks from the state that each rank reports of its calling threads.

A rank may go on by itself if its program is anywhere but in a call of this package, or if a live thread other than
the one that waits has made a call before: it may make the missing one. Where no rank may, every rank waits for a
collective. A collective that all its members have begun ends by itself. If each one lacks a member, that member's
only caller waits too, so nothing will ever begin, and the waits last for ever. Asynchronous calls count as begun. A
rank that has left begins nothing any more.

Ranks tell this at different moments. Two equal accounts of all ranks, with equal numbers of calls, prove that all
ranks have waited from the end of the first account to the beginning of the second, so at one moment. Anything less
is no proof, and remains a warning.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from gradcomp.core.strings import printable

#: The time between the two accounts. Tests of whole programs set a shorter one here before ``init``.
PROOF_SECONDS = 30.0
#: The first account is taken when rank 0 has waited this share of it.
FIRST_SHARE = 1 / 3

#: A user's call: its name, or None, and how many outstanding calls before it have the same name.
Key = tuple[str | None, int]

#: Modules in which Python waits for a graph or a backward pass, whose ops call us on threads of the framework.
_GRAPH_RUNNERS = ("tensorflow.python.eager", "torch.autograd")
#: The most ranks that an error names of those that wait in the same call.
_MOST_SHOWN = 8
MOST = 10**15


@dataclass(frozen=True)
class Begun:
    """Lists the collectives of a scope that a rank has begun: the first ``number``, and the outstanding calls ``keys``.

    For the user's collectives ``number`` counts the calls that have been made.
    """

    number: int
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Need:
    """Describes the collective that a thread waits for: it ends once all ``members``, ranks of the job, have begun it.

    ``number`` says which one of the scope it is, counted from 1. For a user's call, which has a ``key``, it is the
    number of others that have been made. ``where`` is its place in words.
    """

    scope: str
    members: tuple[int, ...]
    number: int
    key: Key | None = None
    where: str = ""

    def begun_by(self, snapshot: Snapshot) -> bool:
        """Return whether a rank has begun it, as an outstanding call or one that is made already."""
        begun = snapshot.begun.get(self.scope, Begun(0))
        if self.key is None:
            return begun.number >= self.number
        return begun.number > self.number or self.key in begun.keys


@dataclass(frozen=True)
class Snapshot:
    """Holds a rank's account of itself.

    ``calls`` counts its waits so far. ``need`` is what its only caller waits for; None says that the rank may go
    on. ``left`` says that it takes part in nothing any more.
    """

    calls: int
    need: Need | None
    begun: Mapping[str, Begun]
    left: bool = False

    def as_json(self) -> list[Any]:
        """Return the account as lists, numbers and strings."""
        need = self.need
        return [
            self.calls,
            None if need is None else [need.scope, need.members, need.number, need.key, need.where],
            {scope: [begun.number, begun.keys] for scope, begun in self.begun.items()},
            self.left,
        ]

    @staticmethod
    def of_json(value: Any) -> Snapshot:
        """Invert :meth:`as_json`; raise ValueError, TypeError or AttributeError for anything else."""
        calls, need, begun, left = value
        found = None
        if need is not None:
            scope, members, number, key, where = need
            ranks = tuple(whole_number(rank) for rank in members)
            found = Need(
                str(scope), ranks, whole_number(number), None if key is None else _key(key), printable(where)
            )
        told = {
            str(scope): Begun(whole_number(number), tuple(_key(key) for key in keys))
            for scope, (number, keys) in begun.items()
        }
        return Snapshot(whole_number(calls), found, told, left is True)


def whole_number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _key(value: Any) -> Key:
    name, before = value
    return None if name is None else str(name), whole_number(before)


def deadlock(snapshots: Mapping[int, Snapshot], names: Callable[[list[int]], str] = str) -> str | None:
    """Return who waits where if no rank can go on, or None if one may.

    ``snapshots`` has all ranks. ``names`` puts ranks into words.
    """
    places: dict[str, list[int]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        if snapshot.left:
            continue
        need = snapshot.need
        if need is None or not need.begun_by(snapshot):
            return None
        if all(member not in snapshots or need.begun_by(snapshots[member]) for member in need.members):
            return None
        places.setdefault(need.where, []).append(rank)
    if not places:
        return None
    waits = []
    for where, ranks in places.items():
        more = f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else ""
        waits.append(f"{names(ranks[:_MOST_SHOWN])}{more} wait{'s' * (len(ranks) == 1)} in {where}")
    return (
        f"the ranks wait for each other, and none can go on: {'; '.join(waits)}. All ranks must take the same number "
        "of steps and make the same calls"
    )


class Callers:
    """Lists the threads of this process that have made calls, and the call that each of them waits for now."""

    def __init__(self) -> None:
        #: By identity; None stands for a thread of TensorFlow or autograd, which Python did not start.
        self._threads: dict[int, threading.Thread | None] = {}
        self._waits: dict[int, tuple[float, object]] = {}
        self.calls = 0

    def came(self) -> int:
        """Record that the calling thread makes a call; return its identity."""
        identity = threading.get_ident()
        known = self._threads.get(identity)
        if known is None or not known.is_alive():  # another thread may have the number of one that has ended
            self._threads[identity] = next(
                (
                    thread
                    for thread in threading.enumerate()
                    if thread.ident == identity and not isinstance(thread, threading._DummyThread)
                ),
                None,
            )
        return identity

    def begin(self, what: object) -> None:
        """Record that the calling thread waits for ``what``, which a :class:`Wait` knows."""
        self.calls += 1
        self._waits[self.came()] = monotonic(), what

    def end(self) -> None:
        """Record that the calling thread waits no longer."""
        self._waits.pop(threading.get_ident(), None)

    @contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        """Call :meth:`begin` at the start of a block and :meth:`end` at its end."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    @property
    def waited(self) -> float:
        """Return for how many seconds a thread has waited so far: the longest wait counts."""
        return monotonic() - min((since for since, _ in list(self._waits.values())), default=monotonic())

    def only(self) -> object | None:
        """Return what is waited for, if this process can make no other call until that has ended, else None."""
        waits = dict(self._waits)
        found = {id(what): what for _, what in waits.values()}
        if len(found) != 1:
            return None
        threads = dict(self._threads)
        alive = {identity for identity, thread in threads.items() if thread is not None and thread.is_alive()}
        if None in threads.values():
            # Ops call us on threads that Python did not start. The thread that runs their graph waits with them.
            running = {identity for identity, frame in sys._current_frames().items() if _runs_a_graph(frame)}
            if waits.keys() & alive:
                alone = alive == set(waits) and not running
            else:
                alone = len(running) == 1 and alive <= running
        else:
            alone = alive == set(waits)
        return next(iter(found.values())) if alone else None


def _runs_a_graph(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_GRAPH_RUNNERS)
