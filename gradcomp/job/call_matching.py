"""Matches a rank's pending calls with those of the other ranks: by name, or else in the order of the calls."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import ConfigError, GradcompError, PlanMismatchError, WireFormatError
from gradcomp.core.strings import printable
from gradcomp.exchange.deadlock import Callers, Key
from gradcomp.exchange.request_group import Call, difference
from gradcomp.transport.base import AllGather, Bytes

T = TypeVar("T")
Array = npt.NDArray[Any]

_MOST_LIST_BYTES = 1 << 28
#: Its fields: whether the call has a problem, its number, the digest of its description.
_HEADER = struct.Struct("<qq32s")
#: The most bytes of small arrays: of one rank, and of all ranks together.
_MOST_INLINE_BYTES, _ALL_INLINE_BYTES = 1 << 12, 1 << 14


class Reply(Generic[T]):
    """Holds what a call returns or raises. It is a future with a single lock, since a small call makes several.

    ``release``: called once, as soon as a caller has the result or the error, or has dropped the reply. ``callers``: is
    told which threads wait.
    """

    def __init__(self, release: Callable[[], None] | None = None, callers: Callers | None = None) -> None:
        self._release = release
        self._callers = callers
        self._waiting = 0
        self._result: T | None = None
        self._error: BaseException | None = None
        self._ended = False
        #: The function to call at the end. Of two threads that try, the one that pops it calls it.
        self._told_of_end: deque[Callable[[], None]] | None = None
        self._pending = threading.Lock()  # held until the call has ended
        self._pending.acquire()

    @property
    def waited_for(self) -> bool:
        """Return whether a thread is inside :meth:`result`, or a graph waits (:meth:`when_ended`)."""
        return self._waiting > 0 or self.graph_waits

    @property
    def graph_waits(self) -> bool:
        """Return whether something waits without blocking a thread, so that its threads may still make other calls."""
        return self._told_of_end is not None

    def set_result(self, result: T) -> None:
        self._result = result
        self._end()

    def set_exception(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the call and return its result; TimeoutError after ``timeout`` seconds.

        Any number of threads may wait, any number of times.
        """
        self._waiting += 1
        try:
            if not self._ended:
                # A caller with a timeout may go on after it, so it does not count as blocked.
                callers = self._callers if timeout is None else None
                if callers is not None:
                    callers.begin(self)
                try:
                    if not self._pending.acquire(timeout=-1 if timeout is None else timeout):
                        raise TimeoutError
                    self._pending.release()  # for the next thread that waits
                finally:
                    if callers is not None:
                        callers.end()
            if self._error is not None:
                raise self._error
            return cast("T", self._result)
        finally:
            self._waiting -= 1
            self._let_go()

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call ``tell`` once the call has ended: on the thread that ends it, or now. Allowed once for each reply."""
        self._told_of_end = deque([tell])
        if self._ended:
            self._tell()

    def done(self) -> bool:
        """Return whether the call has ended; if it has, the caller is taken to be done with the reply."""
        if self._ended:
            self._let_go()
        return self._ended

    def _end(self) -> None:
        self._ended = True
        self._pending.release()
        if self._told_of_end is not None:
            self._tell()

    def _tell(self) -> None:
        assert self._told_of_end is not None
        try:
            tell = self._told_of_end.pop()
        except IndexError:
            return  # the other thread came first
        tell()

    def _let_go(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self._let_go()


@dataclass(frozen=True)
class Match:
    """Holds a call that all ranks have pending: its place in this rank's list, and every rank's number or an error.

    ``place`` is None where this rank has joined and stands in for a call of the others; ``zeros`` then describes it.
    """

    place: int | None
    numbers: list[int]
    error: GradcompError | None = None
    zeros: Any = None
    #: Every rank's inline arrays, if they came with the comparison.
    inline: list[Bytes] | None = None


def inline_bytes(size: int) -> int:
    """Return how many bytes of a call travel with the comparison among ``size`` ranks: 4,096, less from 5 ranks on."""
    return min(_MOST_INLINE_BYTES, _ALL_INLINE_BYTES // size // 8 * 8)


def match(
    pending: Sequence[Call], waited_for: Sequence[int], rank: int, size: int
) -> Generator[AllGather, None, list[Match]]:
    """Find the pending calls to be made next, the same on all ranks and in one order. Yields the messages to issue.

    ``pending`` has at least one call, in the order of the calls. ``waited_for`` are the places of calls for which this
    rank has waited so long that it will not call anything else meanwhile; empty if it may. If no call is on all lists
    and every rank waits like that, each rank's calls that it waits for are returned with a PlanMismatchError.

    Wire: 48 + :func:`inline_bytes` to every rank, and where digests differ 8 bytes and the lists.
    """
    first = pending[0]
    digest = hashlib.sha256("\n".join(first.lines).encode()).digest()
    rows = np.zeros((size, _HEADER.size + inline_bytes(size)), dtype=np.uint8)
    own, end = rows[rank], _HEADER.size
    _HEADER.pack_into(own, 0, first.problem is not None, first.number, digest)
    for array in first.inline.arrays if first.inline else ():
        own[end : end + len(array)] = array
        end += len(array)
    yield AllGather(rows.reshape(-1), [len(own)] * size)
    headers = [_HEADER.unpack_from(row.data) for row in rows]
    if all(not has_problem and told == digest for has_problem, _, told in headers):
        inline = [row[_HEADER.size : end] for row in rows] if first.inline else None
        return [Match(0, [number for _, number, _ in headers], inline=inline)]
    text = json.dumps(
        {
            "calls": [
                [call.key, "\n".join(call.lines), call.number, call.problem, call.zeros and call.zeros()]
                for call in pending
            ],
            "waits": list(waited_for),
            "joined": any(call.stand_in is not None for call in pending),
        }
    ).encode()
    lengths = np.zeros(size, dtype=np.int64)
    lengths[rank] = len(text)
    yield AllGather(lengths.view(np.uint8), [8] * size)
    counts = lengths.tolist()
    if not all(0 < count <= _MOST_LIST_BYTES for count in counts):
        raise WireFormatError(f"the ranks announced lists of calls of {counts} bytes")
    whole = np.zeros(sum(counts), dtype=np.uint8)
    parts = cut(whole, counts)
    parts[rank][:] = np.frombuffer(text, dtype=np.uint8)
    yield AllGather(whole, counts)
    lists = [_List.of(part.tobytes()) for part in parts]
    found = _common(pending, lists, rank)
    return found or _stuck(pending, lists, rank)


def cut(flat: Array, lengths: Sequence[int]) -> list[Array]:
    """Return views of the parts that are stored one after another in ``flat``."""
    return [flat[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class _Listed:
    description: str
    number: int
    problem: str | None
    zeros: Any


@dataclass(frozen=True)
class _List:
    """Holds the calls that a rank has pending."""

    calls: dict[Key, _Listed]
    waits: list[Key]
    joined: bool

    @staticmethod
    def of(text: bytes) -> _List:
        """Read what a rank has sent; WireFormatError for anything else."""
        try:
            data = json.loads(text)
            calls: dict[Key, _Listed] = {}
            for key, (name, description, number, problem, zeros) in zip(
                keys_of([call[0] for call in data["calls"]]), data["calls"], strict=True
            ):
                told = None if problem is None else str(problem)
                calls[key] = _Listed(str(description), int(number), told, zeros)
                if name is not None and not isinstance(name, str):
                    raise TypeError("a name is not a string")
            keys = list(calls)
            return _List(calls, [keys[int(place)] for place in data["waits"]], bool(data["joined"]))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise WireFormatError(f"a rank's list of calls is malformed: {error!r}") from error


def keys_of(names: Sequence[str | None]) -> list[Key]:
    """Return keys that tell calls with these names, in their order, from each other."""
    seen: Counter[str | None] = Counter()
    keys: list[Key] = []
    for name in names:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys


def _common(pending: Sequence[Call], lists: Sequence[_List], rank: int) -> list[Match]:
    """Return the calls on the lists of all ranks that have not joined, in the order of the first of these lists."""
    places = {key: place for place, key in enumerate(lists[rank].calls)}
    lacking = [] if all(one.joined for one in lists) else [r for r, one in enumerate(lists) if one.joined]
    deciding = [one for r, one in enumerate(lists) if r not in lacking]
    found: list[Match] = []
    for key in deciding[0].calls:
        if all(key in one.calls for one in deciding):
            listed = [one.calls[key] for one in lists if key in one.calls]
            place, zeros = places.get(key), listed[0].zeros
            name = "" if place is None else pending[place].name
            error = _wrong(name, listed, [r for r, one in enumerate(lists) if key in one.calls])
            if error is None and len(listed) < len(lists) and zeros is None:
                error = ConfigError(f"{name}: rank {lacking[0]} has joined, and only takes part in allreduce")
            found.append(Match(place, [one.number for one in listed], error, zeros))
    return found


def _wrong(name: str, listed: Sequence[_Listed], ranks: Sequence[int]) -> GradcompError | None:
    """Return the error of a call that ``ranks`` have listed, if a rank has a problem or calls otherwise."""
    for rank, one in zip(ranks, listed, strict=True):
        if one.problem is not None:
            return ConfigError(f"{name}: rank {rank}: {printable(one.problem)}")
    descriptions = [one.description for one in listed]
    if any(description != descriptions[0] for description in descriptions):
        return PlanMismatchError(f"{name}: the ranks do not call the same: {difference(descriptions, ranks)}")
    return None


def _stuck(pending: Sequence[Call], lists: Sequence[_List], rank: int) -> list[Match]:
    """Return what each rank waits for, with an error, if none will call anything else: these waits could not end."""
    if not all(one.waits for one in lists):
        return []
    wrong = _wrong("", [one.calls[one.waits[0]] for one in lists], range(len(lists))) or PlanMismatchError(
        ": the ranks wait for calls of different names"
    )
    places = {key: place for place, key in enumerate(lists[rank].calls)}
    stuck = [places[key] for key in lists[rank].waits]
    return [Match(place, [], type(wrong)(f"{pending[place].name}{wrong}")) for place in stuck]


def listing(calls: Sequence[Call], most: int = 5) -> str:
    """Return the first ``most`` pending calls as text."""
    shown = [printable(call.lines[0] if call.lines else call.name) for call in calls[:most]]
    return ", ".join(shown) + (f" and {len(calls) - most} more" if len(calls) > most else "")
