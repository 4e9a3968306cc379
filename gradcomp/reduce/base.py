"""What the pipeline and a reduction promise each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.scheme import Scheme
from gradcomp.core.state import Range
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.devices import Device
from gradcomp.kernels.pending import Pending
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load
from gradcomp.transport.base import Allocator, Exchange, Operation, host_allocator

Bytes = npt.NDArray[np.uint8]

Addresses = npt.NDArray[np.uint64]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Message:
    """Room for a header and, behind it, a payload. ``chunk``: which one of those that the header knows."""

    buffer: Bytes
    header: ByteHeader
    chunk: int


@dataclass(frozen=True, eq=False)
class Move:
    """One round of messages, as a reduction asks for it: headers are no matter of its own.

    ``sends``: what leaves by the operation. ``arrivals``: what comes by it, and from whom. ``whole``: what travels
    speaks for all ranks, and all of them get it. ``common``: all ranks get it, and it speaks for its sender.
    ``framed_in``: the round in which what comes got its headers, if it was handed on as it is.
    """

    operation: Operation
    sends: Sequence[Message] = ()
    arrivals: Sequence[tuple[int, Message]] = ()
    whole: bool = False
    framed_in: int | None = None
    common: bool = False


def exchange(
    sends: Sequence[tuple[int, Message]] = (),
    arrivals: Sequence[tuple[int, Message]] = (),
    *,
    whole: bool = False,
) -> Move:
    """Messages from rank to rank; one may go to several."""
    operation = Exchange(
        [(rank, message.buffer) for rank, message in sends],
        [(rank, message.buffer) for rank, message in arrivals],
    )
    return Move(operation, list(dict.fromkeys(message for _, message in sends)), arrivals, whole)


#: What a program waits for: a round of messages; operations without headers, all issued together, which are a round,
#: too; or a call of a device, which is none.
Step = Move | list[Operation] | Pending

#: Yields what it waits for, and is resumed when that is complete.
Waits = Generator[Step, None, T]

#: The same; returns, for every part, one flag per segment: nonzero where the mean is not finite.
Rounds = Waits[list[Bytes]]


@dataclass(frozen=True, eq=False)
class Part:
    """One group in the payload. ``header_index[i]`` is the position of segment i's layer in the bucket's header."""

    codec: Codec
    group: Group
    header_index: Sizes


def device_of(parts: Sequence[Part]) -> Device:
    """Where the gradients of a bucket are, of which these are parts: its kernels work on all messages."""
    return parts[0].group.device


@dataclass(frozen=True)
class Memory:
    """What reductions work in, beside what a binding refers to.

    ``messages``: for messages that travel, of which this program touches their headers only; of a GPU's gradients
    they are on the GPU, or in pinned memory. ``local``: for messages
    that stay on this rank; kernels of the gradients' device can be given addresses in them. The two are the same
    function where whatever lies on the device can be sent from there.
    """

    messages: Allocator = host_allocator
    local: Allocator = host_allocator


HOST_MEMORY = Memory()


class Binding(Protocol):
    """How a reduction gets at this step's memory. Each call fills address columns of a whole table."""

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Fill the columns of first-stage encodes for segments of the group, or pieces of them.

        ``offsets``: :func:`gradcomp.kernels.segments.byte_offsets` of the table, if they are known.
        """
        ...

    def owned(self, table: Table, rows: Sizes) -> None:
        """Fill residual and next residual for second-stage encodes; ``rows`` as assigned by the owner of the state."""
        ...

    def outputs(self, table: Table, layers: Sizes, offsets: Addresses | None = None) -> None:
        """Fill output; 0 for layers that no rank had. ``offsets`` as above."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record the time spent in a block."""
        ...


class Reduction(ABC):
    """A scheme prepared for one bucket: tables and buffers are made once and used in every step.

    It moves payloads. What is written before them, and read, is a matter of :mod:`gradcomp.reduce.framing`.
    ``ranges`` lists what this rank re-quantises under feedback; whoever keeps the state calls :meth:`assign` with one
    row number per range. ``rounds``: how often one execution yields, on every rank. ``bytes_sent``: bytes that it sends
    from this rank, headers included. ``sums_travel``: codes stand for sums over some of the ranks. ``by_kernels``:
    kernels alone look at what comes, so that a device can go through :meth:`run` beforehand.
    """

    sums_travel: ClassVar[bool] = False
    by_kernels: bool = False

    ranges: Sequence[Range] = ()
    rounds: int
    bytes_sent: int

    @staticmethod
    def arguments(scheme: Scheme, topology: Topology, turn: int) -> dict[str, Any]:
        """What the constructor is given beside parts, layers, rank and memory: by default, the number of ranks.

        ``turn``: which bucket it is; where there is a choice of ranks, they take turns.
        """
        return {"world": topology.world}

    @staticmethod
    @abstractmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """What one execution takes."""

    def assign(self, rows: Sequence[int]) -> None:
        """Tell the reduction which rows of the second residual its ranges are."""
        assert not rows, f"{len(rows)} rows for no ranges"

    @abstractmethod
    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Exchange once: means to the outputs, layers that turn out not to be finite to the flags."""
