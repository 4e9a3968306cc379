"""Forms the generations of an elastic job: the processes that live meet in a store that none of them serves.

A process writes a record of itself under the number of the next generation, and waits. Whoever first finds that all who
can come are there closes the generation, by one atomic write of its ranks. The ranks then confirm. If one of them dies
before all have confirmed, one atomic write gives the generation up, and the others go on to the next number. No process
leads, so any of them may die at any moment.

A member is dead if its process is gone, which is visible on its own host only, or if its heartbeat has not changed for
``DEAD_SECONDS`` in which this process has looked. One that was only stopped finds that the others have gone on, and
comes as a newcomer.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any, Protocol

from gradcomp.core.errors import StateError, TransportError
from gradcomp.job.horovodrun import HorovodDriver
from gradcomp.job.jobstore import first_line
from gradcomp.job.process_end import Process, own_process

logger = logging.getLogger("gradcomp")

#: A heartbeat that has not changed for this long is that of a dead process.
DEAD_SECONDS = 5.0
_BEAT_SECONDS = 0.25
#: Ranks look for each other at most this often, a rank and all of them together.
_POLL_SECONDS, _CALLS_PER_SECOND = 0.01, 20_000
_PREFIX = "gradcomp/elastic"


class Store(Protocol):
    """The calls of torch's TCPStore that generations need."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def wait(self, keys: list[str], timeout: Any) -> None: ...


@dataclass(frozen=True)
class Limits:
    """Bounds of an elastic job. ``window_seconds``: how long the first generation waits for another newcomer."""

    least: int = 1
    most: int = 0
    window_seconds: float = 2.0
    timeout_seconds: float = 600.0


@dataclass(frozen=True)
class Record:
    """Describes a process: a random name, its place, and the last generation in which it took part."""

    name: str
    host: str
    machine: str
    number: int
    born: int
    generation: int = 0
    rank: int = 0

    @staticmethod
    def own() -> Record:
        process = own_process()
        return Record(token_hex(8), socket.gethostname(), _machine(), process.number, process.born)

    @property
    def order(self) -> tuple[int, int]:
        """Return a key that puts survivors of later generations first, and those of one in the order of their ranks."""
        return -self.generation, self.rank


def _machine() -> str:
    """Return a name of the set of processes that this one can see by number: two containers differ in it."""
    parts = []
    with suppress(OSError):
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(Path("/proc/self/ns/pid").readlink()),
        ]
    return "/".join(parts) or token_hex(8)


@dataclass(frozen=True)
class Generation:
    """A set of processes that train together, by rank."""

    number: int
    members: tuple[Record, ...]
    rank: int


class Member:
    """This process in an elastic job. ``connect`` opens a connection to the store.

    Two connections are kept: a thread of its own beats on one of them, and looks for dead members and for newcomers.
    """

    def __init__(
        self, connect: Callable[[], Store], limits: Limits, where: str, driver: HorovodDriver | None = None
    ) -> None:
        self.limits = limits
        #: What started this process, if it can start others.
        self.driver = driver
        self.record = Record.own()
        self.generation: Generation | None = None
        self._where = where
        self._store = connect()
        self._beats = connect()
        #: A process's last heartbeat, for how many seconds it has been the same, and when it was last looked at.
        self._seen: dict[str, tuple[bytes, float, float]] = {}
        self._waiting = 0
        self._broken = False
        #: Those that have said that they leave.
        self._left: set[str] = set()
        self._watched: tuple[Record, ...] = ()
        self._stopping = threading.Event()
        self._beat(0)
        self._thread = threading.Thread(target=self._serve, name="gradcomp-member", daemon=True)
        self._thread.start()

    # -- what others learn of this process -------------------------------------------------------------------------

    def leave(self) -> None:
        """Publish that this process takes no further part, and end the thread."""
        self._stopping.set()
        self._thread.join(DEAD_SECONDS)
        with suppress(RuntimeError):
            self._store.set(f"{_PREFIX}/left/{self.record.name}", "left")

    def give_up(self) -> None:
        """Publish that the generation has failed, so that its other members need not find that out themselves."""
        if self.generation is not None:
            with suppress(RuntimeError):
                self._store.set(f"{_PREFIX}/generation/{self.generation.number}/broken", "broken")

    def finish(self) -> None:
        """Publish that the job's work is done, so that no process that comes later begins it again."""
        with suppress(RuntimeError):
            self._store.set(f"{_PREFIX}/finished", "finished")

    @property
    def members(self) -> tuple[Record, ...]:
        """Return the members of this process's generation, by rank."""
        return () if self.generation is None else self.generation.members

    @property
    def newcomers(self) -> int:
        """Return how many processes wait for the next generation, as of the last look."""
        return self._waiting

    @property
    def broken(self) -> str:
        """Return why the generation cannot go on, as far as this process has seen; empty if nothing is known."""
        if dead := [rank for rank, one in enumerate(self.members) if not self._alive(one)]:
            return f"rank {', '.join(map(str, dead))} of {len(self.members)} is dead"
        return "other ranks have given this generation up" if self._broken else ""

    # -- forming ---------------------------------------------------------------------------------------------------

    def join(self) -> Generation:
        """Take part in the next generation, which becomes this member's. Blocks until it is formed.

        TransportError if fewer than the least number of ranks come in time or if the store is gone, StateError if the
        job's work is done.
        """
        deadline = monotonic() + self.limits.timeout_seconds
        try:
            number = max(int(self._read("newest") or 1), self.record.generation + 1)
            while (formed := self._form(number, deadline)) is None:
                number += 1
                newest = self._read("newest") or b""
                while int(newest or 0) < number:
                    newest = self._store.compare_set(f"{_PREFIX}/newest", newest.decode(), str(number))
        except RuntimeError as error:
            if isinstance(error, TransportError | StateError):
                raise
            raise TransportError(f"the job's store at {self._where} is gone: {first_line(error)}") from error
        self.generation = formed
        self.record = replace(self.record, generation=formed.number, rank=formed.rank)
        self._waiting, self._broken = 0, False
        return formed

    def _form(self, number: int, deadline: float) -> Generation | None:
        """Return generation ``number`` with this process in it; None if it was closed without it, or given up."""
        key = f"generation/{number}"
        if self._read(f"{key}/closed") is not None:
            return None
        place = self._store.add(f"{_PREFIX}/{key}/count", 1)
        self._store.set(f"{_PREFIX}/{key}/member/{place}", json.dumps(asdict(self.record)))
        quorum = _Quorum(self.limits, deadline)
        while (closed := self._read(f"{key}/closed")) is None:
            if self._read("finished") is not None:
                raise StateError(
                    f"the work of the job at {self._where} is done: start another store for another job"
                )
            came, (last, before) = self._came(key), self._formed()
            self._watched = (*came, *before)
            if (ranks := quorum.ranks(came, self._alive, last, before)) is not None:
                text = json.dumps([asdict(one) for one in ranks])
                self._store.compare_set(f"{_PREFIX}/{key}/closed", "", text)
            elif monotonic() > deadline:
                raise TransportError(
                    f"{len(came)} ranks came to generation {number} of the job at {self._where} within "
                    f"{self.limits.timeout_seconds:g} s, at least {self.limits.least} are needed"
                )
            else:
                sleep(_pause(len(came)))
        return self._confirm(key, _generation(number, closed, self.record.name))

    def _confirm(self, key: str, generation: Generation | None) -> Generation | None:
        """Return the generation once all of its ranks have confirmed; None if one of them died before."""
        if generation is None:
            return None
        self._watched = generation.members
        self._store.set(f"{_PREFIX}/{key}/here/{generation.rank}", "here")
        here = [f"{_PREFIX}/{key}/here/{rank}" for rank in range(len(generation.members))]
        outcome = b""
        while not outcome:
            outcome = self._read(f"{key}/outcome") or b""
            if self._store.check(here):
                outcome = self._store.compare_set(f"{_PREFIX}/{key}/outcome", "", "formed")
            elif not all(map(self._alive, generation.members)):
                outcome = self._store.compare_set(f"{_PREFIX}/{key}/outcome", "", "given up")
            else:
                sleep(_pause(len(here)))
        if outcome != b"formed":
            return None
        if int(self._read("formed") or 0) < generation.number:
            self._store.set(f"{_PREFIX}/formed", str(generation.number))
        return generation

    def _came(self, key: str) -> list[Record]:
        """Return the living processes that have registered, in their order."""
        count = int(self._store.add(f"{_PREFIX}/{key}/count", 0))
        records = [self._read(f"{key}/member/{place}") for place in range(1, count + 1)]
        found = [Record(**json.loads(text)) for text in records if text is not None]
        return sorted(filter(self._alive, found), key=lambda one: one.order)

    def _formed(self) -> tuple[int, tuple[Record, ...]]:
        """Return the number of the last generation that was formed, and its members; 0 without one."""
        number = int(self._read("formed") or 0)
        closed = self._read(f"generation/{number}/closed") if number else None
        if closed is None:
            return 0, ()
        return number, _records(closed)

    def _read(self, key: str) -> bytes | None:
        key = f"{_PREFIX}/{key}"
        return self._store.get(key) if self._store.check([key]) else None

    # -- who lives -------------------------------------------------------------------------------------------------

    def _alive(self, one: Record) -> bool:
        if one.name == self.record.name:
            return True
        if one.name in self._left:
            return False
        if one.machine == self.record.machine and not Process(one.number, one.born).lives:
            return False
        _, silent, _ = self._seen.get(one.name, (b"", 0.0, 0.0))
        return silent < DEAD_SECONDS

    def _beat(self, count: int) -> None:
        self._beats.set(f"{_PREFIX}/beat/{self.record.name}", str(count))

    def _serve(self) -> None:
        count, looked = 0, 0.0
        while not self._stopping.wait(_BEAT_SECONDS):
            count += 1
            try:
                self._beat(count)
                if monotonic() - looked >= _pause(len(self._watched)):
                    looked = monotonic()
                    self._look()
            except RuntimeError as error:
                logger.error("the job's store at %s is gone: %s", self._where, first_line(error))
                return

    def _look(self) -> None:
        """Note whose heartbeat has changed, who is dead, and how many wait for the next generation."""
        generation = self.generation
        others = {one.name: one for one in (*self._watched, *(generation.members if generation else ()))}
        others.pop(self.record.name, None)
        for name in others:
            key, left = f"{_PREFIX}/beat/{name}", f"{_PREFIX}/left/{name}"
            beat, now = self._beats.get(key) if self._beats.check([key]) else b"", monotonic()
            before, silent, looked = self._seen.get(name, (None, 0.0, now))
            # This process may have been stopped between the two looks, and all others with it.
            silent += min(now - looked, 2 * _BEAT_SECONDS + _pause(len(others)))
            self._seen[name] = beat, silent if beat == before else 0.0, now
            if self._beats.check([left]):
                self._left.add(name)
        if generation is not None:
            self._broken = (
                self._beats.check([f"{_PREFIX}/generation/{generation.number}/broken"])
                or int(self._beats.get(f"{_PREFIX}/formed")) > generation.number
            )
            waiting = f"{_PREFIX}/generation/{generation.number + 1}/count"
            self._waiting = int(self._beats.add(waiting, 0))


class _Quorum:
    """Decides when a generation is complete, as one process sees it."""

    def __init__(self, limits: Limits, deadline: float) -> None:
        self._limits = limits
        self._deadline = deadline
        self._came: set[str] = set()
        self._since = monotonic()

    def ranks(
        self, came: Sequence[Record], alive: Callable[[Record], bool], number: int, before: Sequence[Record]
    ) -> list[Record] | None:
        """Return the ranks of the generation, or None while others may come. Number ``number`` was the last formed.

        It waits for the living members of the last generation: those that came until the deadline, newcomers alone for
        ever, because there would be two jobs. The first generation waits until no process has come for
        ``window_seconds``.
        """
        names = {one.name for one in came}
        if names != self._came:
            self._came, self._since = names, monotonic()
        limits = self._limits
        if limits.most and len(came) >= limits.most:
            return list(came[: limits.most])
        if len(came) < limits.least:
            return None
        missing = any(one.name not in names and alive(one) for one in before)
        first = not any(one.generation == number for one in came if number)
        if missing and (first or monotonic() < self._deadline):
            return None
        return None if first and monotonic() - self._since < limits.window_seconds else list(came)


def _pause(members: int) -> float:
    """Return the seconds between two looks at all members, of all of which each looks at all."""
    return max(_POLL_SECONDS, members**2 / _CALLS_PER_SECOND)


def _generation(number: int, closed: bytes, name: str) -> Generation | None:
    members = _records(closed)
    rank = next((rank for rank, one in enumerate(members) if one.name == name), None)
    return None if rank is None else Generation(number, members, rank)


def _records(closed: bytes) -> tuple[Record, ...]:
    return tuple(Record(**one) for one in json.loads(closed))
