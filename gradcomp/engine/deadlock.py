"""Ranks that wait for each other for ever: how that is proved, from what every rank tells of its calling thread.

A rank can go on by itself if its program is anywhere but in a call of ours, or if a thread other than the one that
waits has called anything and lives: it may call what is missing. Where no rank can, every one waits for a collective;
a collective that all its members have begun ends by itself. If each lacks a member, that member's only caller waits
too, so nothing will ever begin, and the waits last for ever. Asynchronous calls count as begun. A rank that has left
begins nothing any more.

Ranks tell this at different moments. Two accounts of all ranks that are the same, with the same number of calls, say
that all have waited from the end of the first to the beginning of the second, so at one moment. Anything less is no
proof: it stays a warning.
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

from gradcomp.core.text import printable

#: Between the two accounts. Tests of whole programs set a shorter time here before ``init``.
PROOF_SECONDS = 30.0
#: The first account is taken when rank 0 has waited this share of it.
FIRST_SHARE = 1 / 3

#: A user's call: its name, None without one, and how many outstanding ones before it have the same.
Key = tuple[str | None, int]

#: Where Python waits for a graph, or for a backward pass, whose ops call us on threads that are not Python's.
_GRAPH_RUNNERS = ("tensorflow.python.eager", "torch.autograd")
#: Of the ranks that wait in one place.
_MOST_SHOWN = 8
_MOST = 10**15


@dataclass(frozen=True)
class Begun:
    """The collectives of a scope that a rank has begun: the first ``number`` ones, and the outstanding calls ``keys``.

    Of the user's calls ``number`` are those that have been made.
    """

    number: int
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Need:
    """The collective that a thread waits for: it ends once all ``members``, ranks of the job, have begun it.

    ``number``: which of the scope it is, counted from 1. Of a user's call: how many others have been made, with its
    ``key``. ``where``: in words.
    """

    scope: str
    members: tuple[int, ...]
    number: int
    key: Key | None = None
    where: str = ""

    def begun_by(self, snapshot: Snapshot) -> bool:
        """Whether a rank has begun it. A call that the rank has made is not outstanding there any more."""
        begun = snapshot.begun.get(self.scope, Begun(0))
        if self.key is None:
            return begun.number >= self.number
        return begun.number > self.number or self.key in begun.keys


@dataclass(frozen=True)
class Snapshot:
    """A rank's account. ``calls``: waits so far. ``need``: what its only caller waits for; None: the rank may go on.

    ``left``: it takes part in nothing any more.
    """

    calls: int
    need: Need | None
    begun: Mapping[str, Begun]
    left: bool = False

    def as_json(self) -> list[Any]:
        """Lists, numbers and strings."""
        need = self.need
        return [
            self.calls,
            None if need is None else [need.scope, need.members, need.number, need.key, need.where],
            {scope: [begun.number, begun.keys] for scope, begun in self.begun.items()},
            self.left,
        ]

    @staticmethod
    def of_json(value: Any) -> Snapshot:
        """ValueError, TypeError or AttributeError for anything else."""
        calls, need, begun, left = value
        found = None
        if need is not None:
            scope, members, number, key, where = need
            ranks = tuple(_number(rank) for rank in members)
            found = Need(
                str(scope), ranks, _number(number), None if key is None else _key(key), printable(where)
            )
        told = {
            str(scope): Begun(_number(number), tuple(_key(key) for key in keys))
            for scope, (number, keys) in begun.items()
        }
        return Snapshot(_number(calls), found, told, left is True)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def _key(value: Any) -> Key:
    name, before = value
    return None if name is None else str(name), _number(before)


def deadlock(snapshots: Mapping[int, Snapshot], names: Callable[[list[int]], str] = str) -> str | None:
    """Who waits where, if no rank can go on; None if one may.

    ``snapshots``: of all ranks. ``names``: ranks in words.
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
    """The threads of this process that have called anything, and which of them wait now, for what."""

    def __init__(self) -> None:
        #: By identity. None: a thread that is not Python's, of TensorFlow's or autograd's.
        self._threads: dict[int, threading.Thread | None] = {}
        self._waits: dict[int, tuple[float, object]] = {}
        self.calls = 0

    def came(self) -> int:
        """The calling thread calls something; its identity."""
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
        """The calling thread waits for ``what``, which a :class:`Wait` knows."""
        self.calls += 1
        self._waits[self.came()] = monotonic(), what

    def end(self) -> None:
        """It waits no longer."""
        self._waits.pop(threading.get_ident(), None)

    @contextmanager
    def waiting(self, what: object) -> Iterator[None]:
        """From :meth:`begin` to :meth:`end`."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    @property
    def waited(self) -> float:
        """Seconds for which a thread has waited so far: the longest."""
        return monotonic() - min((since for since, _ in list(self._waits.values())), default=monotonic())

    def only(self) -> object | None:
        """What is waited for, if nothing in this process can call anything else until that has ended."""
        waits = dict(self._waits)
        found = {id(what): what for _, what in waits.values()}
        if len(found) != 1:
            return None
        threads = dict(self._threads)
        alive = {identity for identity, thread in threads.items() if thread is not None and thread.is_alive()}
        if None in threads.values():
            # Ops call us on threads that are not Python's. The program waits with them where it has run a graph.
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
