"""Implements the user's collectives over arrays: their descriptors, checks, messages and results.

Frontends turn tensors into arrays, and add views and gradients. Every call costs one small round in which the ranks
compare their descriptors (see :func:`gradcomp.job.call_matching.match`), then the data move. A call takes one tensor,
or a group of them that travel together. d is the size of the data in bytes, N the number of ranks; in a world of one
nothing moves. The replies raise ConfigError if any rank has a problem and PlanMismatchError if descriptors differ, both
on every rank, and TransportError if a rank is dead or stays away.

A call with a name is matched with the calls of that name on the other ranks, in whatever order each rank calls; calls
without a name are matched in order. A name is taken from the start of its call until the caller has the result, or
until the call has ended and its reply was dropped. A second call of the name raises ConfigError at once, on this rank
alone: the other ranks need not make one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.exchange.request_group import Call, Inline
from gradcomp.job.call_matching import Array, Reply, cut, inline_bytes
from gradcomp.job.channel import Channel, alone, channel_of
from gradcomp.job.launch import Ranks
from gradcomp.job.reduce_op import (
    ReduceOp,
    ScaledOp,
    combine,
    dtype_of,
    reduce_all,
    reduce_alone,
    reduce_parts,
    shares,
)
from gradcomp.job.runtime import current
from gradcomp.transport.base import Bytes

T = TypeVar("T")


#: Collectives in which ranks may differ in their tensor's first dimension. In a reducescatter it is divided among the
#: ranks; all others take a tensor as a whole.
_ANY_ROWS = ("allgather", "sparse_allreduce", "alltoall")
#: One call of these takes two tensors that belong together and are no group.
_PAIRS = {"sparse_allreduce"}


@dataclass(frozen=True)
class Descriptor:
    """Describes a tensor of one rank's call, in the terms on which all ranks must agree.

    ``ranks`` and ``root`` are numbered as in the job. ``dtype``, ``itemsize`` and ``shape`` are those of the user's
    tensor; a barrier has none.
    """

    kind: str
    ranks: Ranks
    name: Any = None
    dtype: str = ""
    itemsize: int = 0
    shape: tuple[int, ...] = ()
    how: ScaledOp | None = None
    root: int | None = None
    #: A further text that must be the same on all ranks; it is shown after the shape.
    note: str = ""

    def __str__(self) -> str:
        arguments = [] if self.root is None else [f"root_rank={self.root}"]
        arguments += [f"name={self.name!r}"] if self.dtype else []
        arguments += [] if self.how is None else [str(self.how)]
        shape = ", ".join(map(str, self.shape))
        if self.kind in _ANY_ROWS:
            shape = ", ".join(["*", *map(str, self.shape[1:])])
        of = f" of {self.dtype} [{shape}]{self.note}" if self.dtype else ""
        return f"{self.kind}({', '.join(arguments)}){of}"

    @property
    def problem(self) -> str | None:
        """Return why no tensor of this dtype and shape can be given to the call; None if one can."""
        if self.kind in (*_ANY_ROWS, "reducescatter") and not self.shape:
            return "a tensor without dimensions has no rows; reshape it to [1]"
        if not isinstance(self.name, str | None):
            return f"name must be a string, got {type(self.name).__name__}"
        return None if self.how is None else self._wrong_op(self.how)

    def _wrong_op(self, how: ScaledOp) -> str | None:
        if self.dtype == "bool" and how.op is ReduceOp.AVERAGE:
            return (
                'the average of bool is not defined; use op=Sum, which means "or", or a floating-point tensor'
            )
        if self.dtype == "bool" and how.scales:
            return "a tensor of bool cannot be scaled; use a floating-point tensor"
        if how.op is not ReduceOp.ADASUM:
            return None
        if "float" not in self.dtype or self.kind != "allreduce":
            return f"Adasum is an allreduce of floating-point tensors, not {self.kind} of {self.dtype}"
        if (size := len(self.ranks)) & (size - 1):
            return f"Adasum adds in pairs and needs a power of two of ranks, not {size}"
        return None

    @property
    def rows(self) -> int:
        """Return the first dimension, or 0 without one."""
        return self.shape[0] if self.shape else 0

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize


def allreduce(
    called: Sequence[Descriptor], values: Sequence[Array], problem: str | None = None
) -> Reply[None]:
    """Reduce each tensor over ranks, in place: ``values`` are flat, in the tensors' own dtypes.

    Wire: 2 d (N-1)/N bytes per rank, in one collective or two for each dtype; see
    :func:`gradcomp.job.reduce_op.reduce_all`. Tensors of together at most :func:`inline_bytes` travel with the
    comparison, without a collective of their own, and are combined in rank order; those of Adasum never do.
    """
    how = called[0].how or ScaledOp()
    little = sum(value.nbytes for value in values) <= inline_bytes(len(called[0].ranks))

    def among_one() -> None:
        for value in values:
            reduce_alone(value, how)

    return _submit(
        called,
        lambda channel, _: _reduce_values(channel, values, how),
        among_one,
        problem=problem,
        zeros=lambda: [
            how.op.name,
            how.prescale,
            how.postscale,
            [(c.dtype, math.prod(c.shape)) for c in called],
        ],
        inline=Inline([value.view(np.uint8) for value in values], partial(_combine_inline, values, how))
        if little and problem is None and how.op is not ReduceOp.ADASUM
        else None,
    )


def _combine_inline(values: Sequence[Array], how: ScaledOp, of_ranks: Sequence[Bytes]) -> None:
    """Overwrite ``values`` with their reduction; every rank's bytes hold the tensors one after another."""
    lengths = [value.nbytes for value in values]
    parts = zip(*(cut(data, lengths) for data in of_ranks), strict=True)
    for value, of_value in zip(values, parts, strict=True):
        value[:] = combine([part.view(value.dtype) for part in of_value], how)


def stand_in(channel: Channel, zeros: Any) -> None:
    """Take part in the other ranks' allreduce with zeros, on the channel's thread. WireFormatError for other calls."""
    try:
        op, prescale, postscale, forms = zeros
        how = ScaledOp(ReduceOp[op], float(prescale), float(postscale))
        values = [np.zeros(count, dtype_of(dtype)) for dtype, count in forms]
    except (ValueError, TypeError, KeyError) as error:
        raise WireFormatError(f"an allreduce was called with {zeros!r:.80}") from error
    _reduce_values(channel, values, how)


def _reduce_values(channel: Channel, values: Sequence[Array], how: ScaledOp) -> None:
    for places in _by_dtype(values):
        lengths = [len(values[place]) for place in places]
        if len(places) == 1:
            reduce_all(channel, values[places[0]], how, lengths)
            continue
        flat = np.concatenate([values[place] for place in places])
        reduce_all(channel, flat, how, lengths)
        for place, part in zip(places, cut(flat, lengths), strict=True):
            values[place][:] = part


def allgather(
    called: Sequence[Descriptor], parts: Sequence[Bytes], problem: str | None = None
) -> Reply[list[tuple[Bytes, list[int]]]]:
    """Return for each tensor all ranks' rows in rank order, and how many rows each rank has.

    Wire: one all-to-all, (N-1) d bytes per rank; for k > 1 tensors another of 8 k (N-1) bytes comes first.
    """
    own_rows = [each.rows for each in called]

    def work(channel: Channel, numbers: list[int]) -> list[tuple[Bytes, list[int]]]:
        if len(called) == 1:
            rows = _row_counts(numbers)
            return [(channel.allgather(parts[0], [count * called[0].row_bytes for count in rows]), rows)]
        told = channel.allgather(
            np.asarray(own_rows, np.int64).view(np.uint8), [8 * len(called)] * channel.size
        )
        table = told.view(np.int64).reshape(channel.size, len(called))
        _row_counts(table.reshape(-1).tolist())
        sizes = table * np.asarray([each.row_bytes for each in called])
        whole = channel.allgather(np.concatenate(parts), sizes.sum(axis=1).tolist())
        pieces = cut(whole, sizes.reshape(-1).tolist())
        return [
            (np.concatenate(pieces[place :: len(called)]), table[:, place].tolist())
            for place in range(len(called))
        ]

    def among_one() -> list[tuple[Bytes, list[int]]]:
        return [(part, [rows]) for part, rows in zip(parts, own_rows, strict=True)]

    return _submit(called, work, among_one, own_rows[0], problem)


def broadcast(called: Descriptor, buffer: Bytes, problem: str | None = None) -> Reply[None]:
    """Overwrite ``buffer`` with the root's bytes. Wire: d bytes to every rank but the root, along a binomial tree."""

    def work(channel: Channel, _: list[int]) -> None:
        assert called.root is not None, "a broadcast without a root has a problem"
        channel.broadcast(buffer, called.ranks.index(called.root))

    return _submit([called], work, lambda: None, problem=problem)


def reducescatter(
    called: Sequence[Descriptor], values: Sequence[Array], problem: str | None = None
) -> Reply[list[Array]]:
    """Return this rank's rows of each tensor's reduction over ranks, flat; ``values`` are flat and are not changed.

    Rows are split as :func:`shares` says. Values are combined in rank order, so the result does not depend on the
    transport. Wire: for each dtype one all-to-all of the rows as they are, d (N-1)/N bytes per rank.
    """
    how = called[0].how or ScaledOp()

    def work(channel: Channel, _: list[int]) -> list[Array]:
        results: list[Array] = [np.empty(0)] * len(values)
        for places in _by_dtype(values):
            # A row of this table has one tensor's bytes for each rank.
            table = [
                [count * called[place].row_bytes for count in shares(called[place].rows, channel.size)]
                for place in places
            ]
            data = values[places[0]].view(np.uint8)
            if len(places) > 1:
                pieces = [
                    cut(values[place].view(np.uint8), sizes)
                    for place, sizes in zip(places, table, strict=True)
                ]
                data = np.concatenate(
                    [of_tensor[rank] for rank in range(channel.size) for of_tensor in pieces]
                )
            counts = [sum(sizes[rank] for sizes in table) for rank in range(channel.size)]
            dtype = values[places[0]].dtype
            part = reduce_parts(channel, data, counts, dtype, how)
            lengths = [sizes[channel.rank] // dtype.itemsize for sizes in table]
            for place, result in zip(places, cut(part, lengths), strict=True):
                results[place] = result
        return results

    def among_one() -> list[Array]:
        copies = [value.copy() for value in values]
        for copy in copies:
            reduce_alone(copy, how)
        return copies

    return _submit(called, work, among_one, problem=problem)


def alltoall(
    called: Descriptor, rows: Bytes, splits: Sequence[int], problem: str | None = None
) -> Reply[tuple[Bytes, list[int]]]:
    """Send ``splits[i]`` rows to rank i. Return the rows received, in rank order, and how many each rank sent.

    Wire: two all-to-alls, of 8 (N-1) bytes and of the rows for other ranks.
    """

    def work(channel: Channel, _: list[int]) -> tuple[Bytes, list[int]]:
        eight = [8] * channel.size
        told = channel.alltoall(np.asarray(splits, np.int64).view(np.uint8), eight, eight)
        counts = _row_counts(told.view(np.int64).tolist())
        sends, recvs = ([count * called.row_bytes for count in each] for each in (splits, counts))
        return channel.alltoall(rows, sends, recvs), counts

    return _submit([called], work, lambda: (rows, list(splits)), problem=problem)


def barrier(ranks: Ranks) -> Reply[None]:
    """Return a reply that ends once every rank has called this. Wire: only the round in which calls are compared."""
    return _submit([Descriptor("barrier", ranks)], lambda *_: None, lambda: None)


def refuse(kind: str, ranks: Ranks, problem: str, name: str | None = None) -> None:
    """Raise ConfigError on all ranks for a problem of one that is known before there are arrays.

    ``kind``: any call's name, also of one that is made of several collectives. ``name``: the user's.
    """
    call, channel = Call(kind, [], problem=problem, key=name), channel_of(ranks)
    (alone(call) if channel is None else channel.submit(call, lambda _: None)).result()


def check_free(kind: str, ranks: Ranks, name: Any) -> None:
    """Raise ConfigError if a call of that name is pending on this rank, before anything is copied for a second one."""
    state = current()
    if isinstance(name, str) and (ranks, name) in state.in_flight:
        raise ConfigError(
            f"{kind}: rank {state.rank}: an operation named {name!r} is pending; synchronize it first, or give "
            "another name"
        )


def splits_of(called: Descriptor, given: Array | None) -> tuple[list[int], str | None]:
    """Return the rows for each rank in an all-to-all, without ``given`` equally many, and what is wrong with them."""
    rows, size = called.rows, len(called.ranks)
    if given is None:
        wrong = f"the first dimension is {rows}, which {size} ranks cannot share equally; give splits"
        return [rows // size] * size, wrong if rows % size else None
    splits = [int(count) for count in given.reshape(-1)]
    if given.shape != (size,) or min(splits) < 0 or sum(splits) != rows:
        return splits, f"splits must be {size} numbers that add up to {rows} rows, got {given.tolist()}"
    return splits, None


def _submit(
    called: Sequence[Descriptor],
    work: Callable[[Channel, list[int]], T],
    among_one: Callable[[], T],
    number: int = 0,
    problem: str | None = None,
    zeros: Callable[[], Any] | None = None,
    inline: Inline | None = None,
) -> Reply[T]:
    """Run ``work`` on the channel's thread with every rank's ``number``; in a world of one run ``among_one``."""
    first = called[0]
    name = first.kind if len(called) == 1 or first.kind in _PAIRS else f"grouped_{first.kind}"
    problem = next((each.problem for each in called if each.problem), problem) if problem is None else problem
    key, release = first.name if isinstance(first.name, str) else None, None
    channel = channel_of(first.ranks)
    if key is not None:
        check_free(name, first.ranks, key)
        in_flight, mine = current().in_flight, (first.ranks, key)
        in_flight.add(mine)
        release = partial(in_flight.discard, mine)
    lines = [str(each) for each in called]
    call = Call(
        name,
        lines if len(called) == 1 else [f"{name} of {len(called)} tensors", *lines],
        number,
        problem,
        key,
        zeros,
        inline=inline,
    )
    if channel is not None:
        return channel.submit(call, lambda numbers: work(channel, numbers), release)
    reply: Reply[T] = Reply(release)
    alone(call)
    reply.set_result(among_one())
    return reply


def _by_dtype(values: Sequence[Array]) -> Iterator[list[int]]:
    """Yield for each dtype the places of its values."""
    places: dict[Any, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value.dtype, []).append(place)
    yield from places.values()


def _row_counts(numbers: list[int]) -> list[int]:
    if min(numbers) < 0:
        raise WireFormatError(f"the ranks sent negative first dimensions: {numbers}")
    return numbers
