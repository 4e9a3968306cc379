"""The in-process transport connects N ranks inside one process, for tests and simulations.

A collective completes on every rank once all ranks have issued it. A :class:`World` can delay completions, alter
messages, and lose a rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import TransportError
from gradcomp.transport.base import Bytes, Messages, Transport, parts_of

#: A function of (rank, collective number, polls so far); while it returns true, the collective does not complete there.
Delay = Callable[[int, int, int], bool]
#: A function of (source, destination, message) that returns the message that arrives.
Tamper = Callable[[int, int, Bytes], Bytes]


#: The kind of a collective, and a rank's arguments.
_Call = tuple[str, tuple[Any, ...]]


class World:
    """Connects N ranks of this process: it collects the parts of each collective and carries it out.

    ``delay`` holds completions back, ``tamper`` alters messages.
    """

    def __init__(self, size: int, delay: Delay | None = None, tamper: Tamper | None = None) -> None:
        self.size, self.delay, self.tamper = size, delay, tamper
        self.dead: set[int] = set()
        self._lock = threading.Lock()  # ranks may be threads
        self._calls: dict[int, dict[int, _Call]] = {}
        self._finished: set[int] = set()
        self._failed: dict[int, str] = {}

    def transports(self) -> list[InProcessTransport]:
        """Return the transports of all ranks."""
        return [InProcessTransport(self, rank) for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """Simulate the loss of a rank: every collective that it has not joined yet fails on the others."""
        self.dead.add(rank)

    def join(self, number: int, rank: int, call: _Call) -> None:
        """Register a rank's part of collective ``number``; the last part carries the collective out."""
        with self._lock:
            calls = self._calls.setdefault(number, {})
            calls[rank] = call
            if len(calls) < self.size:
                return
            del self._calls[number]
            try:
                self._carry_out([calls[r] for r in range(self.size)])
                self._finished.add(number)
            except TransportError as error:
                self._failed[number] = f"collective {number}: {error}"

    def _carry_out(self, calls: list[_Call]) -> None:
        kinds = {kind for kind, _ in calls}
        if len(kinds) != 1:
            raise TransportError(f"ranks issued different collectives: {', '.join(sorted(kinds))}")
        getattr(self, "_" + kinds.pop())([arguments for _, arguments in calls])

    def complete(self, number: int) -> bool:
        """Return true if collective ``number`` was carried out; raise TransportError if it never can be."""
        if number in self._finished:
            return True
        if number in self._failed:
            raise TransportError(self._failed[number])
        missing = self.dead - self._calls.get(number, {}).keys()
        if missing:
            raise TransportError(f"rank {min(missing)} left before collective {number}")
        return False

    def _deliver(self, source: int, destination: int, target: Bytes, message: Bytes) -> None:
        if self.tamper is not None:
            message = self.tamper(source, destination, message.copy())
        if len(target) != len(message):
            raise TransportError(
                f"rank {source} sent {len(message)} bytes, rank {destination} expects {len(target)}"
            )
        target[:] = message

    def _allreduce(self, arguments: list[tuple[npt.NDArray[Any]]]) -> None:
        shapes = {(array.dtype, array.shape) for (array,) in arguments}
        if len(shapes) != 1:
            raise TransportError(f"ranks issued an allreduce of different arrays: {sorted(map(str, shapes))}")
        total = arguments[0][0].copy()
        with np.errstate(all="ignore"):
            for (array,) in arguments[1:]:
                total += array
        for (array,) in arguments:
            array[:] = total

    def _alltoallv(self, arguments: list[tuple[Bytes, Sequence[int], Bytes, Sequence[int]]]) -> None:
        targets = [parts_of(recv, recv_counts) for _, _, recv, recv_counts in arguments]
        for source, (send, send_counts, _, _) in enumerate(arguments):
            for destination, message in enumerate(parts_of(send, send_counts)):
                self._deliver(source, destination, targets[destination][source], message)

    def _exchange(self, arguments: list[tuple[Messages, Messages]]) -> None:
        expected = [dict(recvs) for _, recvs in arguments]
        for source, (sends, _) in enumerate(arguments):
            for destination, message in sends:
                target = expected[destination].pop(source, None)
                if target is None:
                    raise TransportError(
                        f"rank {source} sent a message that rank {destination} does not expect"
                    )
                self._deliver(source, destination, target, message)
        for destination, missing in enumerate(expected):
            if missing:
                raise TransportError(
                    f"rank {min(missing)} did not send the message that rank {destination} expects"
                )

    def _allgatherv(self, arguments: list[tuple[Bytes, Sequence[int]]]) -> None:
        if len({tuple(counts) for _, counts in arguments}) != 1:
            raise TransportError("ranks issued an all-gather with different counts")
        parts = [parts_of(buffer, counts) for buffer, counts in arguments]
        for source, sent in enumerate(parts):
            for destination, received in enumerate(parts):
                if destination != source:
                    self._deliver(source, destination, received[source], sent[source])


@dataclass(eq=False)
class _Handle:
    world: World
    rank: int
    number: int
    polls: int = 0

    def poll(self) -> bool:
        self.polls += 1
        if self.world.delay is not None and self.world.delay(self.rank, self.number, self.polls):
            return False
        return self.world.complete(self.number)


class InProcessTransport(Transport):
    """Connects one rank of a :class:`World` to the others; allreduce adds in rank order."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._number = 0

    def _join(self, kind: str, *arguments: Any) -> _Handle:
        number = self._number
        self._number += 1
        self.world.join(number, self.rank, (kind, arguments))
        return _Handle(self.world, self.rank, number)

    def allreduce(self, array: npt.NDArray[Any]) -> _Handle:
        self.bytes_sent += 2 * array.nbytes * (self.size - 1) // self.size
        return self._join("allreduce", array)

    def alltoallv(
        self, send: Bytes, send_counts: Sequence[int], recv: Bytes, recv_counts: Sequence[int]
    ) -> _Handle:
        self.bytes_sent += sum(send_counts) - send_counts[self.rank]
        return self._join("alltoallv", send, send_counts, recv, recv_counts)

    def allgatherv(self, buffer: Bytes, counts: Sequence[int]) -> _Handle:
        self.bytes_sent += (self.size - 1) * counts[self.rank]
        return self._join("allgatherv", buffer, counts)

    def exchange(self, sends: Messages, recvs: Messages) -> _Handle:
        self.bytes_sent += sum(len(message) for _, message in sends)
        return self._join("exchange", sends, recvs)

    def close(self) -> None:
        """Do nothing: the world holds no resources."""
