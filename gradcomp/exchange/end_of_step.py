"""The end of a step: ranks agree on an order and compare digests and plans; unapplied means cause a warning."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import PlanMismatchError, WireFormatError
from gradcomp.exchange.fingerprint import Digests
from gradcomp.exchange.waiting import Waiting, collective, gather_rows
from gradcomp.transport.base import AllGather, Transport

logger = logging.getLogger("gradcomp")
#: This many discarded exchanges in a row are no accident.
LIMIT = 3


def agree_on_order(
    transport: Transport, count: int, arrived: Sequence[int]
) -> Generator[Waiting, None, list[int]]:
    """Return the order in which rank 0 reported its layers; those that it did not report follow behind."""
    order = np.zeros(count, dtype="<i4")
    if transport.rank == 0:
        order[:] = [*arrived, *sorted(set(range(count)) - set(arrived))]
    counts = [order.nbytes * (rank == 0) for rank in range(transport.size)]
    yield from collective(AllGather(order.view(np.uint8), counts), transport)
    if not np.array_equal(np.sort(order), np.arange(count)):
        raise WireFormatError("rank 0 sent an order that is not a permutation of the layers")
    agreed: list[int] = order.tolist()
    return agreed


def compare(
    transport: Transport, count: int, future: Future[Digests]
) -> Generator[Waiting, None, npt.NDArray[np.uint32]]:
    """Gather every rank's digests of its parameters; the row of a rank without any holds zeros."""
    while not future.done():
        yield Waiting.BACKGROUND
    row = np.zeros(count, dtype="<u4")
    numbers = future.result().numbers
    row[: len(numbers)] = numbers
    table = yield from gather_rows(row.view(np.uint8), transport)
    return table.view("<u4")


def check_same_plan(transport: Transport, digest: bytes, version: int) -> Generator[Waiting, None, None]:
    """Raise PlanMismatchError unless all ranks pass the same digest: message sizes follow from plans."""
    digests = yield from gather_rows(np.frombuffer(digest, dtype=np.uint8), transport)
    others = [rank for rank in range(transport.size) if digests[rank].tobytes() != digest]
    if others:
        raise PlanMismatchError(
            f"plan {version} of rank {transport.rank} differs from that of rank {', '.join(map(str, others))}; "
            "set_compression() takes the same arguments on every rank, between the same two steps"
        )


class Discards:
    """Counts finished exchanges that were discarded in a row, and warns once."""

    def __init__(self) -> None:
        #: Set to 0 when an exchange is committed.
        self.in_a_row = 0
        self._warned = False

    def count(self, *, speaks: bool) -> None:
        """Count a finite exchange with compression state that was discarded; warn if this rank ``speaks``."""
        self.in_a_row += 1
        if self.in_a_row < LIMIT or self._warned:
            return
        self._warned = True
        if speaks:
            logger.warning(
                "the means of the last %d exchanges were never applied by step(), so their residuals and momentum were "
                "not kept: without error feedback, what compression leaves out is lost. Update parameters with the "
                "optimizer's step(), not by hand, or compress without feedback",
                LIMIT,
            )
