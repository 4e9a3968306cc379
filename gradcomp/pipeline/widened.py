"""Residuals that are kept in bfloat16: as float32 for kernels, while a bucket needs them.

Kernels read and write float32 residuals. Before a bucket is encoded its rows are widened, which is exact, to memory
that buckets share; kernels put next residuals in their places. When those are final they are rounded into the buffer's
next rows: r' = the bfloat16 on either side of r, with probabilities that make r the mean (:mod:`gradcomp.kernels`,
codec BF16). Draws depend on seed, step, layer and element, so a resumed run makes the same ones, and on the rank for
first residuals; for second ones they are equal on all ranks, so that it does not matter who owns what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from gradcomp.core.bfloat16_buffer import Bfloat16Buffer
from gradcomp.core.state import Residuals
from gradcomp.core.vectors import Vector, host_zeros
from gradcomp.kernels.codec import Codec, Draw, Sizes
from gradcomp.kernels.segments import BF16, OWNER_RANK, RESIDUAL_BIT
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.pieces import Pieces
from gradcomp.reduce.framing import Framed

Addresses = npt.NDArray[np.uint64]

_ROUNDED = Codec(BF16, stochastic=True)
_NOTHING = host_zeros(0)

#: Records the time that is spent in a block.
Span = Callable[[str], AbstractContextManager[None]]


class Spares:
    """float32 memory of the host that buckets under way borrow.

    Pieces are lent in turns, from the first on in every step, and grow to the largest bucket of their turn. Buckets
    begin and end in the same order in every step, so that each gets the same piece: a layer that is larger than all
    others takes one large piece, not several.
    """

    def __init__(self) -> None:
        self._vectors: list[Vector] = []
        self._free: deque[int] = deque()
        self._count = 0  # of pieces, when the step began

    @property
    def elements(self) -> int:
        """Of all pieces."""
        return sum(vector.size for vector in self._vectors)

    def begin(self) -> None:
        """A step begins: nothing is lent."""
        if len(self._vectors) > self._count:
            # With more pieces turns are others, and so are sizes.
            self._count = len(self._vectors)
            self._vectors = [_NOTHING] * self._count
        self._free = deque(range(len(self._vectors)))

    def take(self, size: int) -> tuple[int, Vector]:
        """The piece that came back first, with ``size`` elements at least, and its number."""
        if not self._free:
            self._free.append(len(self._vectors))
            self._vectors.append(_NOTHING)
        number = self._free.popleft()
        if self._vectors[number].size < size:
            self._vectors[number] = _NOTHING  # so that the two are not there at once
            self._vectors[number] = host_zeros(size)
        return number, self._vectors[number]

    def give(self, number: int) -> None:
        """For the buckets behind the next ones."""
        self._free.append(number)

    def clear(self) -> None:
        """Buckets are of other sizes from now on."""
        self._vectors.clear()
        self._free.clear()
        self._count = 0


class Copies:
    """Pieces of a buffer as float32, from the first time that their addresses are asked for until :meth:`finalise`."""

    def __init__(self, pieces: Pieces, buffer: Bfloat16Buffer, draw: Draw, spares: Spares) -> None:
        self._pieces, self._buffer, self._draw, self._spares = pieces, buffer, draw, spares
        self._number: int | None = None  # of what is borrowed
        self._bases = np.zeros(0, dtype=np.uint64)
        self._final = False

    @property
    def is_open(self) -> bool:
        """Whether there are copies."""
        return self._number is not None

    def addresses(self, rows: Sizes, starts: Sizes | int) -> tuple[Addresses, Addresses]:
        """Where element ``starts[i]`` of row ``rows[i]`` is read, and its next value is to be written: one place."""
        if self._number is None:
            self._widen()
        at = self._bases[rows] + (4 * np.asarray(starts, dtype=np.int64)).astype(np.uint64)
        return at, at

    def _widen(self) -> None:
        assert not self._final, "next residuals were final"
        pieces, buffer = self._pieces, self._buffer
        self._number, vector = self._spares.take(pieces.size)
        self._bases = pieces.bases(len(buffer.lengths), vector.address)
        table = pieces.table
        at = np.uint64(vector.address) + (4 * pieces.offsets).astype(np.uint64)
        table["gradient"], table["output"] = at, at
        table["payload"] = 2 * (buffer.places(pieces.rows)[0] + pieces.starts)
        _ROUNDED.decode(table, buffer.payload, np.zeros(len(table), dtype=np.uint8))

    def finalise(self) -> None:
        """Kernels are through: the buffer's next values are what the copies hold, rounded."""
        assert self._number is not None, "there are copies"
        table = self._pieces.table
        table["payload"] = 2 * (self._buffer.places(self._pieces.rows)[1] + self._pieces.starts)
        # A piece with a value that is not finite becomes zeros; its layer says so, and nothing is committed.
        ignored = np.zeros(len(table), dtype=np.uint8)
        _ROUNDED.encode(table, self._buffer.payload, ignored, self._draw)
        self._spares.give(self._number)
        self._number, self._final = None, True


class Widened:
    """First and second residuals of one bucket in one step."""

    def __init__(self, program: BucketProgram, residuals: Residuals, draw: Draw, spares: Spares) -> None:
        first, second = residuals.first, residuals.second
        assert isinstance(first, Bfloat16Buffer), "float32 needs no copies"
        assert isinstance(second, Bfloat16Buffer), "of the same dtype"
        own, owner = (Draw(draw.seed, draw.step, rank ^ RESIDUAL_BIT) for rank in (draw.rank, OWNER_RANK))
        self.first = Copies(program.first_pieces, first, own, spares)
        self.second = Copies(program.second_pieces, second, owner, spares)
        self._finalises = program.finalises

    def around(self, running: Generator[Framed, None, None], span: Span) -> Generator[Framed, None, None]:
        """The bucket's program, with residuals rounded as soon as they are final.

        Second residuals are final when the round behind their encode leaves, first ones where all messages of the
        bucket say so, else at the end.
        """
        for step in running:
            if isinstance(step, list):
                self._finalise(self.second, span)
                if self._finalises:
                    self._finalise(self.first, span)
            yield step
        self._finalise(self.second, span)
        self._finalise(self.first, span)

    def _finalise(self, copies: Copies, span: Span) -> None:
        if copies.is_open:
            with span("feedback"):
                copies.finalise()
