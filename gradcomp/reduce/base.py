"""The interface of reductions: their registry, what a program may wait for, and the headers beneath them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core import scheme as schemes
from gradcomp.core.errors import WireFormatError
from gradcomp.core.scheme import Scheme
from gradcomp.core.state import Range
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.replayed_calls import Pending
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.header import BucketFlags, ByteHeader, HeaderId, Headers
from gradcomp.reduce.model import Cost, Load
from gradcomp.transport.base import Allocator, Bytes, Exchange, Operation, host_allocator

Addresses = npt.NDArray[np.uint64]

T = TypeVar("T")

#: Once headers are written, a program waits for operations that are issued together, or for a call of a device.
Framed = list[Operation] | Pending


@dataclass(frozen=True, eq=False)
class Message:
    """Describes a buffer that holds a header, followed by a payload.

    ``chunk`` is the message's number in ``header``, which describes several messages.
    """

    buffer: Bytes
    header: ByteHeader
    chunk: int


@dataclass(frozen=True, eq=False)
class Move:
    """Requests one round of messages; :mod:`gradcomp.reduce.base` writes and checks their headers.

    ``operation`` sends the messages ``sends`` and receives ``arrivals``, each with the rank that sent it. ``values``
    are operations without headers, whose values the headers of these messages describe. ``whole``
    says that the messages are results: they carry the flags of all ranks, and every rank gets every one of them.
    ``common`` says that every rank gets every message, each with its sender's flags. ``framed_in`` is the round in
    which the arriving messages got their headers, if a rank forwards them unchanged; None means this round.
    """

    operation: Operation
    sends: Sequence[Message] = ()
    arrivals: Sequence[tuple[int, Message]] = ()
    whole: bool = False
    framed_in: int | None = None
    common: bool = False
    values: Sequence[Operation] = ()

    @cached_property
    def written(self) -> Sequence[Headers]:
        """Return the headers that this rank writes; a sender's number comes from its flags."""
        return _headers([(0, message) for message in self.sends])

    @cached_property
    def read(self) -> Sequence[Headers]:
        """Return the headers that this rank checks, in the order of ``arrivals``."""
        return _headers(self.arrivals)


def _headers(messages: Sequence[tuple[int, Message]]) -> Sequence[Headers]:
    """Return the headers of messages, together for those that follow one another and have the same layout."""
    return [
        Headers(header, [(message.buffer, message.chunk, sender) for sender, message in group])
        for header, group in groupby(messages, lambda each: each[1].header)
    ]


def exchange(
    sends: Sequence[tuple[int, Message]] = (),
    arrivals: Sequence[tuple[int, Message]] = (),
    *,
    whole: bool = False,
) -> Move:
    """Return a round of point-to-point messages; the same message may go to several ranks."""
    operation = Exchange(
        [(rank, message.buffer) for rank, message in sends],
        [(rank, message.buffer) for rank, message in arrivals],
    )
    return Move(operation, list(dict.fromkeys(message for _, message in sends)), arrivals, whole)


#: A program waits for one of three things: a round of messages; a list of operations without headers, which are issued
#: together and count as a round; or a call of a device, which does not count as one.
Step = Move | list[Operation] | Pending

#: A generator that yields what it waits for. It is resumed when that is complete.
Waits = Generator[Step, None, T]

#: A program that returns, for every part, one flag per segment: nonzero where the mean is not finite.
Rounds = Waits[list[Bytes]]


@dataclass(frozen=True, eq=False)
class Part:
    """Describes one group's part of a payload.

    ``header_index[i]`` is the position of segment i's layer in the header of the exchange bucket.
    """

    codec: Codec
    group: Group
    header_index: Sizes


def device_of(parts: Sequence[Part]) -> Device:
    """Return the device of an exchange bucket's gradients; its kernels work on all messages."""
    return parts[0].group.device


@dataclass(frozen=True)
class Memory:
    """Allocates the buffers of reductions; gradients, residuals and outputs come from a :class:`Binding`.

    ``messages`` allocates messages that are sent or received. Python code touches their headers only, because for
    gradients on a GPU they lie on the GPU or in pinned memory. ``local`` allocates messages that stay on this rank;
    kernels of the gradients' device accept addresses in them. The two are the same function where the transport sends
    from the device's memory.
    """

    messages: Allocator = host_allocator
    local: Allocator = host_allocator


HOST_MEMORY: Memory = Memory()


class Binding(Protocol):
    """Gives a reduction this step's memory: each method fills address columns of a whole segment table."""

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Fill the columns that the first encode reads, for segments of the group or pieces of them.

        ``offsets`` is :func:`gradcomp.kernels.segments.byte_offsets` of the table, if the caller has it.
        """
        ...

    def owned(self, table: Table, rows: Sizes) -> None:
        """Fill the residual columns of the owner's encode with addresses of the server-side error.

        ``rows`` are the row numbers that :meth:`Reduction.assign` received.
        """
        ...

    def outputs(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Fill the output column; 0 for layers that no rank had. ``offsets`` is as in :meth:`sources`."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record the time spent in the ``with`` block under this name."""
        ...


class Reduction(ABC):
    """Sums the gradients of one exchange bucket over ranks; its tables and buffers are made once for all steps.

    A reduction moves payloads; :mod:`gradcomp.reduce.base` writes and checks the headers before them.
    ``ranges`` lists the parts of layers that this rank encodes a second time with error feedback; the owner of the
    state calls :meth:`assign` with one row number of the server-side error per range. ``rounds`` is the number of
    rounds of one execution, the same on every rank. ``bytes_sent`` is the number of bytes that this rank sends in one
    execution, headers included. ``sums_travel`` says that messages hold codes of sums over some of the ranks.
    ``by_kernels`` says that nothing but kernels reads the payloads that arrive, so that the kernel calls of :meth:`run`
    can be recorded in advance.
    """

    sums_travel: ClassVar[bool] = False
    by_kernels: bool = False

    ranges: Sequence[Range] = ()
    rounds: int
    bytes_sent: int

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        """Return the constructor's arguments except parts, layers, rank and memory: by default, the number of ranks.

        ``turn`` is the number of the exchange bucket: ranks that can do the same work take turns, bucket by bucket.
        """
        return {"world": topology.world}

    @staticmethod
    @abstractmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Return the messages and the coding work of one execution."""

    def assign(self, rows: Sequence[int]) -> None:
        """Set the row of the server-side error for each of ``ranges``."""
        assert not rows, f"{len(rows)} rows for no ranges"

    @abstractmethod
    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Write the means to the outputs; mark layers in which a value is not finite in ``flags``."""


_classes: dict[str, type[Reduction]] = {}

Class = TypeVar("Class", bound=type[Reduction])


def register(name: str) -> Callable[[Class], Class]:
    """Return a decorator that registers a reduction under ``name``; ConfigError if the name is taken."""

    def add(reduction: Class) -> Class:
        schemes.register(name)
        _classes[name] = reduction
        return reduction

    return add


def class_of(scheme: Scheme) -> type[Reduction]:
    """Return the class of a reduction; ``auto`` has none."""
    return _classes[scheme.name]


def make(
    scheme: Scheme | str,
    parts: Sequence[Part],
    layers: int,
    rank: int,
    topology: Topology,
    turn: int = 0,
    memory: Memory = HOST_MEMORY,
) -> Reduction:
    """Make a reduction for one exchange bucket of ``layers`` layers, on one of the topology's ranks.

    ``auto`` is not accepted: :func:`gradcomp.reduce.costs.cheapest` finds the reduction that it stands for.

    Args:
        scheme: The reduction, as a name with options or parsed.
        parts: The groups of the bucket, with their codecs.
        layers: The number of layers in the bucket's header.
        rank: This rank.
        topology: The ranks, and the hosts that they are on.
        turn: The number of the bucket; ranks that can do the same work take turns, bucket by bucket.
        memory: The memory for messages, if the gradients are not on the host.

    Raises:
        ConfigError: The name is unknown, there are more servers than ranks, or the reduction cannot add a codec.
    """
    if isinstance(scheme, str):
        scheme = schemes.parse(scheme)
    reduction: Any = class_of(scheme)  # constructors differ in the arguments that arguments() returns
    made: Reduction = reduction(
        parts, layers, rank, memory=memory, **reduction.arguments(scheme, topology, turn)
    )
    return made


def framed(
    program: Waits[T], header_id: HeaderId, flags: BucketFlags, first: int = 0
) -> Generator[Framed, None, T]:
    """Run a program's rounds with headers; the first round has the number ``first``.

    Before a round, the flags that this rank knows are written into all messages that it sends. After the round, the
    messages that arrived are checked and their flags added. Flags are never cleared, so a flag may arrive twice.
    """
    frames = _Frames(header_id, flags, first)
    while True:
        try:
            step = next(program)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(step, Move):
            frames.close(step)
            yield [step.operation, *step.values]
            frames.open(step)
        else:
            yield step


def unless_declined(program: Rounds, flags: BucketFlags, rounds: int) -> Rounds:
    """Run the program of this many rounds, and stop after the last one if some rank has declined.

    It does not stop before, because other ranks may learn of it only in a later round.
    """
    while rounds or not flags.declined:
        try:
            step = next(program)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        rounds -= isinstance(step, Move)
        yield step
    return []


def only(moves: Sequence[Move]) -> Rounds:
    """Return a program that consists of these rounds."""
    yield from moves
    return []


class _Frames:
    """Writes and checks the headers of one program in one step."""

    def __init__(self, header_id: HeaderId, flags: BucketFlags, first: int) -> None:
        self._header_id, self._flags, self._round = header_id, flags, first
        self._sent: Bytes | None = None
        self._of_ranks: int | None = None  # the last state byte of the results, which is about the ranks

    def close(self, move: Move) -> None:
        """Write the headers of a round's messages, whose payloads are written already."""
        flags = self._flags
        for headers in move.written:
            headers.write(self._header_id, self._round, flags)
            if move.common or move.whole:
                flags.results.update(headers.payloads)
        if move.sends and self._sent is None:
            self._sent = flags.states.copy()
        if move.sends and move.whole:
            self._of_ranks = int(flags.states[-1])

    def open(self, move: Move) -> None:
        """Check the headers of the messages that arrived in a round, and count the round.

        A result must have this rank's flags, and must not contradict another result.
        """
        flags, number = self._flags, self._round if move.framed_in is None else move.framed_in
        for headers in move.read:
            ranks = headers.read(self._header_id, number, flags, self._sent if move.whole else None)
            if move.common or move.whole:
                flags.results.update(headers.payloads)
            if move.whole:
                self._compare(headers.senders, ranks)
        self._round += 1

    def _compare(self, senders: Sequence[int], ranks: Sequence[int]) -> None:
        for sender, state in zip(senders, ranks, strict=True):
            if self._of_ranks is None:
                self._of_ranks = state
            elif self._of_ranks != state:
                raise WireFormatError(
                    f"the results of rank {sender} and of another rank differ in their last state byte: they disagree "
                    "on which ranks are ready for the next plan, or on what became of the last means"
                )
