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
from gradcomp.kernels.codec import Codec, Draw, Group, Sizes, Table
from gradcomp.kernels.pending import Pending
from gradcomp.reduce.header import BucketFlags, HeaderId
from gradcomp.reduce.model import Cost, Load
from gradcomp.transport.base import Allocator, Operation, host_allocator

Bytes = npt.NDArray[np.uint8]

Addresses = npt.NDArray[np.uint64]

T = TypeVar("T")

#: What a reduction waits for: the operations of a round, all issued together; or a call of a device, which is no round.
Step = list[Operation] | Pending

#: Yields what it waits for, and is resumed when that is complete. Returns, for every part, one flag per segment:
#: nonzero where the mean is not finite.
Rounds = Generator[Step, None, list[Bytes]]

#: The same for a stretch without rounds.
Waits = Generator[Step, None, T]


@dataclass(frozen=True, eq=False)
class Part:
    """One group in the payload. ``header_index[i]`` is the position of segment i's layer in the bucket's header."""

    codec: Codec
    group: Group
    header_index: Sizes


@dataclass(frozen=True)
class Memory:
    """What reductions work in, beside what a binding refers to.

    ``messages``: for messages that travel, of which this program touches their headers only. ``local``: for messages
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


@dataclass(frozen=True)
class Call:
    """One execution of a reduction: where we are, this rank's votes, and the factors around the codec.

    ``rate_ratio``: the last learning rate over this one, for residuals that follow it.
    """

    header_id: HeaderId
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
    from this rank, headers included. ``sums_travel``: codes stand for sums over some of the ranks.
    """

    sums_travel: ClassVar[bool] = False

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
    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """Exchange once: means to the outputs, votes to the flags."""
