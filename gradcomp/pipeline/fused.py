"""Messages of a kind, of all groups of a bucket, fused into one collective."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Broadcast, Gather, Reply, Sum
from gradcomp.core.errors import ConfigError
from gradcomp.core.role import Role
from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.pending import Pending
from gradcomp.kernels.routines import Phase
from gradcomp.pipeline.announced import Announced, gathered
from gradcomp.pipeline.layout import Bucket
from gradcomp.reduce.base import Binding, Waits
from gradcomp.reduce.header import (
    NONFINITE,
    BucketFlags,
    ByteHeader,
    CountHeader,
    HeaderId,
    check_covers,
    padded,
)
from gradcomp.transport.base import Allocator, AllReduce, host_allocator

Bytes = npt.NDArray[np.uint8]
Replies = dict[int, Any]
#: Returns the groups' replies.
Program = Waits[Replies]

_MOST_PART_BYTES = 0xFFFFFFFF  # what a header can announce


@dataclass(frozen=True)
class Round:
    """What all messages of one round of one bucket in one step have in common."""

    bucket: Bucket
    number: int
    header_id: HeaderId
    ranks: int
    binding: Binding
    flags: BucketFlags

    def flags_of(self, group: int) -> Bytes:
        """Per segment of the group: has any rank met a non-finite value so far?"""
        return self.flags.nonfinite[self.bucket.header_index[group]].astype(np.uint8)

    def note(self, group: int, found: Bytes) -> None:
        """Say of the group's layers whose segments are flagged that they are not finite."""
        if np.count_nonzero(found):
            self.flags.states[self.bucket.header_index[group][found != 0]] |= NONFINITE

    def bind_sources(self, group: int) -> None:
        """Addresses for the group's reading and for its residuals."""
        members = self.bucket.groups[group]
        self.binding.sources(members.inputs, members.layers, members)

    def bind_outputs(self, group: int) -> None:
        """Addresses for the group's means."""
        members = self.bucket.groups[group]
        self.binding.outputs(members.table, members.layers)


def finished(call: Pending, binding: Binding, phase: str) -> Generator[Pending, None, None]:
    """Until the device is through with a call, whose results are then where they belong."""
    if not call.done():
        yield call
    with binding.span(phase):
        call.finish()


class FusedSum:
    """Sums of one dtype in one buffer: the groups' elements, then, in the first round, the counts."""

    def __init__(
        self, bucket: Bucket, round_number: int, sums: Mapping[int, Sum], allocate: Allocator = host_allocator
    ) -> None:
        first = next(iter(sums.values()))
        self._header = CountHeader(len(bucket.layers)) if round_number == 0 else None
        ends = np.cumsum([message.length for message in sums.values()]).tolist()
        counts = self._header.length if self._header else 0
        dtype = np.dtype(first.dtype)
        begin, end = ends[-1] * dtype.itemsize, (ends[-1] + counts) * dtype.itemsize
        make = allocate if all(message.by_kernels for message in sums.values()) else host_allocator
        self._buffer = make(end, [(begin, end)]).view(dtype)
        starts = [0, *ends[:-1]]
        self._views = {g: self._buffer[a:b] for g, a, b in zip(sums, starts, ends, strict=True)}
        self._counts = self._buffer[ends[-1] :].view(np.ndarray)  # they hold on the host
        self._flags: dict[int, Bytes] = {}

    def write(self, messages: Mapping[int, Sum], at: Round) -> None:
        """This rank's summands; flags are there when the phase of all writers is done."""
        for g, view in self._views.items():
            at.bind_sources(g)
            self._flags[g] = messages[g].write(view)

    def run(self, messages: Mapping[int, Sum], at: Round, written: Pending) -> Program:
        """One allreduce of what is ``written``."""
        yield from finished(written, at.binding, "compress")
        for g, view in self._views.items():
            if self._header:
                at.note(g, self._flags[g])
            elif (self._flags[g] > at.flags_of(g)).any():
                fill(view, np.nan)  # no flags travel in later rounds: the sum itself says it
        sent = at.flags.states.copy()
        if self._header:
            self._header.write(self._counts, at.header_id, at.flags)
        yield [AllReduce(self._buffer)]
        if self._header:
            states = self._header.read(self._counts, at.header_id, at.ranks)
            check_covers(states, sent, "all ranks")
            at.flags.states |= states
        return self.replies(messages, at)

    def replies(self, messages: Mapping[int, Sum], at: Round) -> Replies:
        """The sums are there."""
        for g in messages:
            at.bind_outputs(g)
        return {g: Reply(at.flags_of(g), self._views[g]) for g in messages}

    rehearse = replies


class FusedGather:
    """Payloads for everybody: gathered from all ranks, or broadcast by one; one part per rank, behind a header.

    A part holds the payloads in the order of the groups. Where sizes depend on data, :class:`Announced` has the rounds,
    and payloads are copied to where they belong; else they are written there. What a device selects is written in a
    call of its own, once the host knows how much that is. Ranks that do not train send flags only, and compressors do
    not know of them.
    """

    def __init__(
        self,
        bucket: Bucket,
        round_number: int,
        messages: Mapping[int, Gather | Broadcast],
        role: Role,
        allocate: Allocator = host_allocator,
    ) -> None:
        self._role = role
        self._most = {g: message.max_bytes for g, message in messages.items()}
        varying = [column for column, message in enumerate(messages.values()) if not message.fixed]
        self._layers = len(bucket.layers)
        if sum(self._most.values()) > _MOST_PART_BYTES:
            raise ConfigError(
                f"bucket {bucket.number}: payloads of up to {sum(self._most.values())} bytes; "
                f"at most {_MOST_PART_BYTES} are possible"
            )
        self._buffer: Bytes = np.zeros(0, dtype=np.uint8)
        self._space: dict[int, Bytes] = {}
        self._flags: dict[int, Bytes] = {}
        self._used: dict[int, int] = {}
        self._writing = Phase(bucket.device)  # of what was selected
        self._announced = Announced(self._layers, role.rank, role.world, varying) if varying else None
        fixed = all(isinstance(message, Gather) and message.fixed for message in messages.values())
        self._in_place = fixed and role.all_train
        if not self._in_place:
            # Reserved, not touched: only what a payload fills takes memory.
            self._space = {g: np.empty(n, dtype=np.uint8) for g, n in self._most.items()}
            return
        sizes = self._most_by_rank(messages)
        header = ByteHeader(self._layers, sizes.sum(axis=1))
        ends = np.cumsum(header.message_bytes).tolist()
        by_kernels = all(message.by_kernels for message in messages.values())
        make = allocate if by_kernels else host_allocator
        self._buffer = make(ends[-1], [(begin, begin + header.nbytes) for begin in [0, *ends[:-1]]])
        # The same views in every step: what kernels do with them is kept.
        self._move = gathered(role.rank, self._buffer, header)
        self._payloads = self._views(self._buffer, sizes)

    def write(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> None:
        """This rank's payloads, or what they will hold; it is there when the phase of all writers is done."""
        for column, (g, message) in enumerate(messages.items()):
            at.bind_sources(g)
            if message.select is not None:
                message.select()
            else:
                self._fill(column, g, message)

    def _fill(self, column: int, g: int, message: Gather | Broadcast) -> None:
        """One payload. A gather's has the same view in every step: what kernels do with that is kept."""
        if self._in_place:
            view = self._payloads[column][self._role.rank]
        elif isinstance(message, Gather) or self._role.rank == self._role.trainers[message.root]:
            view = self._space[g]
        else:
            view = self._space[g][:0]
        self._flags[g], count = message.write(view)
        # Whoever sends nothing encodes too: that updates the residuals.
        self._used[g] = min(count, len(view)) if self._role.trains else 0

    def _write_selected(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> Waits[None]:
        """Payloads of what was selected: the host knows how much that is."""
        selected = [
            (column, g, message)
            for column, (g, message) in enumerate(messages.items())
            if message.select is not None
        ]
        if not selected:
            return
        call = self._writing.collecting()
        with at.binding.span("compress"):
            with call:
                for each in selected:
                    self._fill(*each)
            call.start()
        yield from finished(call, at.binding, "compress")

    def run(self, messages: Mapping[int, Gather | Broadcast], at: Round, written: Pending) -> Program:
        """One all-gather, or two where sizes depend on data, of what is ``written``."""
        yield from finished(written, at.binding, "compress")
        yield from self._write_selected(messages, at)
        for g, found in self._flags.items():
            at.note(g, found)
        if self._in_place:
            yield self._move
            return self.replies(messages, at)
        sizes = self._most_by_rank(messages)
        if self._announced is not None:
            own = [space[: self._used[g]] for g, space in self._space.items()]
            payloads = yield from self._announced.run(own, sizes, at.header_id)
        else:
            buffer = yield from self._exchange(sizes)
            payloads = self._views(buffer, sizes)
        return self._replies(messages, payloads, at)

    def replies(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> Replies:
        """Payloads that are written where they travel have come."""
        assert self._in_place, "they are nowhere else"
        return self._replies(messages, self._payloads, at)

    def rehearse(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> Replies:
        """As if all ranks sent what this one wrote, in a rehearsal: as much as there may be."""
        for _ in self._write_selected(messages, at):
            pass
        if self._in_place:
            return self.replies(messages, at)
        payloads = [[self._space[g][: self._used[g]] for _ in range(self._role.world)] for g in messages]
        return self._replies(messages, payloads, at)

    def _replies(
        self, messages: Mapping[int, Gather | Broadcast], payloads: list[list[Bytes]], at: Round
    ) -> Replies:
        replies: Replies = {}
        for (g, message), views in zip(messages.items(), payloads, strict=True):
            at.bind_outputs(g)
            if isinstance(message, Broadcast):
                data: Any = views[self._role.trainers[message.root]]
            else:
                data = views[self._role.first :]
            replies[g] = Reply(at.flags_of(g), data)
        return replies

    def _views(self, buffer: Bytes, sizes: npt.NDArray[np.int64]) -> list[list[Bytes]]:
        """For every group, the payloads of all ranks."""
        bounds = self._bounds(sizes)
        return [
            [buffer[a : a + n] for a, n in zip(begins, lengths, strict=True)]
            for begins, lengths in zip(bounds.T.tolist(), sizes.T.tolist(), strict=True)
        ]

    def _most_by_rank(self, messages: Mapping[int, Gather | Broadcast]) -> npt.NDArray[np.int64]:
        """The most bytes of every rank's payload of every group: none unless it trains, or if another broadcasts."""
        most = np.tile(np.array(list(self._most.values()), dtype=np.int64), (self._role.world, 1))
        for column, message in enumerate(messages.values()):
            if isinstance(message, Broadcast):
                most[np.arange(len(most)) != self._role.trainers[message.root], column] = 0
        most[: self._role.first] = 0
        return most

    def _exchange(self, sizes: npt.NDArray[np.int64]) -> Waits[Bytes]:
        header = ByteHeader(self._layers, sizes.sum(axis=1))
        total = sum(header.message_bytes)
        if len(self._buffer) < total:
            self._buffer = np.zeros(total, dtype=np.uint8)
        mine = self._bounds(sizes)[self._role.rank].tolist()
        for (g, space), begin in zip(self._space.items(), mine, strict=True):
            self._buffer[begin : begin + self._used[g]] = space[: self._used[g]]
        yield gathered(self._role.rank, self._buffer[:total], header)
        return self._buffer

    def _bounds(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where every rank's payload of every group begins."""
        header = ByteHeader.size(self._layers)
        parts = padded(sizes.sum(axis=1)) + header
        begins = np.cumsum(parts) - parts + header
        bounds: npt.NDArray[np.int64] = begins[:, None] + np.cumsum(sizes, axis=1) - sizes
        return bounds
