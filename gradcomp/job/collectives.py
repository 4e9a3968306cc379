"""The user's collectives over arrays: what each is called with, checks, sends and returns.

Frontends turn their tensors into arrays, and add views and gradients. Every call costs one small round in which the
ranks compare their descriptors (56 bytes per rank), then the data move. d is the size of the data in bytes, N the
number of ranks; in a world of one nothing moves. The futures raise ConfigError if any rank has a problem and
PlanMismatchError if descriptors differ, both on every rank, and TransportError if a rank is dead or stays away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import WireFormatError
from gradcomp.job.channel import Channel, alone, channel_of
from gradcomp.job.network import Ranks
from gradcomp.job.reduce_op import Average, ReduceOp
from gradcomp.pipeline.calls import Call

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """What holds for a collective whatever its tensor.

    ``rows``: "any" where ranks may differ in their first dimension, "split" where that is divided among them, "none"
    where a tensor is taken as a whole. ``adds``: its values are added, so it has an ``op``.
    """

    rows: Literal["none", "any", "split"] = "none"
    adds: bool = False


KINDS = {
    "allreduce": Kind(adds=True),
    "allgather": Kind(rows="any"),
    "broadcast": Kind(),
    "reducescatter": Kind(rows="split", adds=True),
    "alltoall": Kind(rows="any"),
    "barrier": Kind(),
}


@dataclass(frozen=True)
class Descriptor:
    """A rank's call, in the terms on which all ranks must agree.

    ``ranks``: who takes part, and ``root``: numbers of the job. ``dtype``, ``itemsize``, ``shape``: of the user's
    tensor; a barrier has none.
    """

    kind: str
    ranks: Ranks
    name: str | None = None
    dtype: str = ""
    itemsize: int = 0
    shape: tuple[int, ...] = ()
    op: ReduceOp | None = None
    root: int | None = None

    def __str__(self) -> str:
        arguments = [] if self.root is None else [f"root_rank={self.root}"]
        arguments += [f"name={self.name!r}"] if self.dtype else []
        arguments += [] if self.op is None else [f"op={self.op.name}"]
        shape = ", ".join(map(str, self.shape))
        if KINDS[self.kind].rows == "any":
            shape = ", ".join(["*", *map(str, self.shape[1:])])
        return f"{self.kind}({', '.join(arguments)})" + (f" of {self.dtype} [{shape}]" if self.dtype else "")

    @property
    def problem(self) -> str | None:
        """Why no tensor of this dtype and shape can be given to it; None if one can."""
        if self.op is Average and "int" in self.dtype:
            return f"the average of {self.dtype} is not defined; use op=Sum, or a floating-point tensor"
        if KINDS[self.kind].rows != "none" and not self.shape:
            return "a tensor without dimensions has no rows; reshape it to [1]"
        return None

    @property
    def rows(self) -> int:
        """The first dimension, 0 without one."""
        return self.shape[0] if self.shape else 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape[1:]) * self.itemsize


def allreduce(called: Descriptor, total: Array, problem: str | None = None) -> Future[Array]:
    """The sum, or mean, over ranks, in place of ``total``: flat, of float32, float64 or int64.

    Wire: one allreduce, 2 d (N-1)/N bytes per rank.
    """

    def work(channel: Channel, _: list[int]) -> Array:
        channel.allreduce(total)
        if called.op is Average:
            np.divide(total, channel.size, out=total)
        return total

    return _submit(called, work, total, problem=problem)


def allgather(called: Descriptor, part: Bytes, problem: str | None = None) -> Future[tuple[Bytes, list[int]]]:
    """All ranks' rows in rank order, and how many each has. Wire: one all-to-all, (N-1) d bytes per rank."""

    def work(channel: Channel, numbers: list[int]) -> tuple[Bytes, list[int]]:
        rows = _row_counts(numbers)
        return channel.allgather(part, [count * called.row_bytes for count in rows]), rows

    return _submit(called, work, (part, [called.rows]), called.rows, problem)


def broadcast(called: Descriptor, buffer: Bytes, problem: str | None = None) -> Future[Bytes]:
    """The root's bytes, in place of ``buffer``. Wire: d bytes to every rank but the root, along a binomial tree."""

    def work(channel: Channel, _: list[int]) -> Bytes:
        assert called.root is not None, "a broadcast without a root has a problem"
        channel.broadcast(buffer, called.ranks.index(called.root))
        return buffer

    return _submit(called, work, buffer, problem=problem)


def reducescatter(
    called: Descriptor, rows: Bytes, widen: Callable[[Bytes], Array], problem: str | None = None
) -> Future[Array]:
    """This rank's rows of the sum, or mean, over ranks, flat and in the dtype to which ``widen`` takes a rank's bytes.

    Rows are split as :func:`shares` says. Values are added in rank order, so the result does not depend on the
    transport. Wire: one all-to-all of the rows as they are, d (N-1)/N bytes per rank.
    """

    def work(channel: Channel, _: list[int]) -> Array:
        sends = [count * called.row_bytes for count in shares(called.rows, channel.size)]
        own = sends[channel.rank]
        received = channel.alltoall(rows, sends, [own] * channel.size).reshape(channel.size, own)
        total = widen(received[0])
        for each in received[1:]:
            total += widen(each)
        if called.op is Average:
            total /= channel.size
        return total

    alone_result = widen(rows) if problem is None and len(called.ranks) == 1 else np.empty(0)
    return _submit(called, work, alone_result, problem=problem)


def alltoall(
    called: Descriptor, rows: Bytes, splits: Sequence[int], problem: str | None = None
) -> Future[tuple[Bytes, list[int]]]:
    """To each rank its number of rows, of ``splits``; the rows that came, in rank order, and how many from each.

    Wire: two all-to-alls, of 8 (N-1) bytes and of the rows for other ranks.
    """

    def work(channel: Channel, _: list[int]) -> tuple[Bytes, list[int]]:
        eight = [8] * channel.size
        told = channel.alltoall(np.asarray(splits, np.int64).view(np.uint8), eight, eight)
        counts = _row_counts(told.view(np.int64).tolist())
        sends, recvs = ([count * called.row_bytes for count in each] for each in (splits, counts))
        return channel.alltoall(rows, sends, recvs), counts

    return _submit(called, work, (rows, list(splits)), problem=problem)


def barrier(ranks: Ranks) -> Future[None]:
    """Done once every rank has called it. Wire: the round in which calls are compared, nothing else."""
    return _submit(Descriptor("barrier", ranks), lambda *_: None, None)


def refuse(kind: str, ranks: Ranks, problem: str) -> None:
    """Meet the other ranks with a problem that is known before there are arrays: ConfigError on all of them.

    ``kind``: any call's name, also of one that is made of several collectives.
    """
    call, channel = Call(kind, [], problem=problem), channel_of(ranks)
    (alone(call) if channel is None else channel.submit(call, lambda _: None)).result()


def shares(rows: int, size: int) -> list[int]:
    """How many rows each rank gets: as many, or one fewer than the ranks before it."""
    return [rows // size + (place < rows % size) for place in range(size)]


def splits_of(called: Descriptor, given: Array | None) -> tuple[list[int], str | None]:
    """The rows for each rank in an all-to-all, and what is wrong with them. Without ``given``: equally many."""
    rows, size = called.rows, len(called.ranks)
    if given is None:
        wrong = f"the first dimension is {rows}, which {size} ranks cannot share equally; give splits"
        return [rows // size] * size, wrong if rows % size else None
    splits = [int(count) for count in given.reshape(-1)]
    if given.shape != (size,) or min(splits) < 0 or sum(splits) != rows:
        return splits, f"splits must be {size} numbers that add up to {rows} rows, got {given.tolist()}"
    return splits, None


def _submit(
    called: Descriptor,
    work: Callable[[Channel, list[int]], T],
    alone_result: T,
    number: int = 0,
    problem: str | None = None,
) -> Future[T]:
    """``work`` on the channel's thread, with every rank's ``number``; among one rank ``alone_result``."""
    call = Call(called.kind, [str(called)], number, problem or called.problem)
    channel = channel_of(called.ranks)
    if channel is not None:
        return channel.submit(call, lambda numbers: work(channel, numbers))
    alone(call).result()
    future: Future[T] = Future()
    future.set_result(alone_result)
    return future


def _row_counts(numbers: list[int]) -> list[int]:
    if min(numbers) < 0:
        raise WireFormatError(f"first dimensions {numbers}")
    return numbers
