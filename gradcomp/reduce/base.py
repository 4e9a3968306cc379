"""What the pipeline and a reduction promise each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from gradcomp.core.state import Range
from gradcomp.kernels.codec import Codec, Draw, Group, Sizes, Table
from gradcomp.reduce.header import Ballot, Stamp
from gradcomp.transport.base import Operation, Room, host_room

Bytes = npt.NDArray[np.uint8]

#: Yields the operations of a round, all issued together, and is resumed when they are complete. Returns, for every
#: part, one flag per segment: nonzero where the mean is not finite.
Rounds = Generator[list[Operation], None, list[Bytes]]


@dataclass(frozen=True, eq=False)
class Part:
    """One group in the payload. ``slots[i]`` is the position of segment i's layer in the bucket's header."""

    codec: Codec
    group: Group
    slots: Sizes


@dataclass(frozen=True)
class Memory:
    """What reductions work in, beside what a binding refers to.

    ``messages``: for messages that travel, of which this program touches their headers only. ``local``: for messages
    that stay on this rank; kernels of the gradients' device can be given addresses in them. The two are the same
    function where whatever lies on the device can be sent from there.
    """

    messages: Room = host_room
    local: Room = host_room


HOST_MEMORY = Memory()


class Binding(Protocol):
    """How a reduction gets at this step's memory. Each call fills address columns of a whole table."""

    def sources(self, table: Table, layers: Sizes, group: Group) -> None:
        """Fill gradient, residual and shadow for segments of the group, or pieces of them, in first-stage encodes."""
        ...

    def owned(self, table: Table, rows: Sizes) -> None:
        """Fill residual and shadow for second-stage encodes; ``rows`` as assigned by the owner of the state."""
        ...

    def outputs(self, table: Table, layers: Sizes) -> None:
        """Fill output; 0 for layers that no rank had."""
        ...

    def span(self, name: str) -> AbstractContextManager[None]:
        """Record the time spent in a block."""
        ...


@dataclass(frozen=True)
class Call:
    """One execution of a reduction: where we are, this rank's votes, and the factors around the codec.

    ``rate_ratio``: the last learning rate over this one, for residuals that follow it.
    """

    stamp: Stamp
    draw: Draw
    states: Bytes
    ready: int
    world: int
    scale: float
    unscale: float
    rate_ratio: float = 1.0


class Reduction(ABC):
    """A scheme prepared for one bucket: tables and buffers are made once and used in every step.

    ``ranges`` lists what this rank re-quantises under feedback; whoever keeps the state calls :meth:`assign` with one
    row number per range. ``rounds``: how often one execution yields, on every rank. ``bytes_sent``: bytes that it sends
    from this rank, headers included.
    """

    ranges: Sequence[Range] = ()
    rounds: int
    bytes_sent: int

    def assign(self, rows: Sequence[int]) -> None:
        """Tell the reduction which rows of the second residual its ranges are."""
        assert not rows, f"{len(rows)} rows for no ranges"

    @abstractmethod
    def run(self, call: Call, binding: Binding, ballot: Ballot) -> Rounds:
        """Exchange once: means to the outputs, votes to the ballot."""
