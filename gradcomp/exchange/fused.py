"""Messages of a kind, of all groups of a bucket, are fused into one collective."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Broadcast, Gather, Reply, Sum
from gradcomp.core.errors import ConfigError
from gradcomp.exchange.layout import Bucket
from gradcomp.exchange.variable_gather import VariableGather, gathered, split
from gradcomp.kernels.cuda.mirrors import fill
from gradcomp.kernels.replayed_calls import Pending, Phase
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
#: Yields rounds and returns the groups' replies.
Program = Waits[Replies]

_MOST_PART_BYTES = 0xFFFFFFFF  # the length field of a header has 32 bits


@dataclass(frozen=True)
class Round:
    """Holds the common data of the messages of one round of one bucket in one step."""

    bucket: Bucket
    number: int
    header_id: HeaderId
    ranks: int
    binding: Binding
    flags: BucketFlags

    def flags_of(self, group: int) -> Bytes:
        """Return, per segment of the group, whether any rank has met a non-finite value so far."""
        return self.flags.nonfinite[self.bucket.header_index[group]].astype(np.uint8)

    def note(self, group: int, found: Bytes) -> None:
        """Mark the layers of the group's flagged segments as non-finite."""
        self.flags.states[self.bucket.header_index[group][found != 0]] |= NONFINITE

    def bind_sources(self, group: int) -> None:
        """Set the addresses of the group's gradients and residuals."""
        members = self.bucket.groups[group]
        self.binding.sources(members.inputs, members.layers, members)

    def bind_outputs(self, group: int) -> None:
        """Set the addresses of the group's means."""
        members = self.bucket.groups[group]
        self.binding.outputs(members.table, members.layers, members)


def finished(call: Pending, binding: Binding, phase: str) -> Generator[Pending, None, None]:
    """Wait until a device call is done, then put its results where they belong."""
    if not call.done():
        yield call
    with binding.span(phase):
        call.finish()


class FusedSum:
    """Sums messages of one dtype in one buffer: the groups' elements, then, in the first round, the counts."""

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
        self._counts = self._buffer[ends[-1] :].view(np.ndarray)  # the host writes and reads them
        self._flags: dict[int, Bytes] = {}

    def write(self, messages: Mapping[int, Sum], at: Round) -> None:
        """Write this rank's summands; the flags are valid when the phase of all writers is done."""
        for g, view in self._views.items():
            at.bind_sources(g)
            self._flags[g] = messages[g].write(view)

    def run(self, messages: Mapping[int, Sum], at: Round, written: Pending) -> Program:
        """Sum over ranks, in one allreduce, what the call ``written`` has written."""
        yield from finished(written, at.binding, "compress")
        for g, view in self._views.items():
            if self._header:
                at.note(g, self._flags[g])
            elif (self._flags[g] > at.flags_of(g)).any():
                fill(view, np.nan)  # later rounds carry no flags: NaN in the sum tells the ranks
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
        """Return the groups' replies once the sums are complete."""
        for g in messages:
            at.bind_outputs(g)
        return {g: Reply(at.flags_of(g), self._views[g]) for g in messages}

    rehearse = replies


class FusedGather:
    """Gathers payloads from all ranks, or broadcasts one rank's: one part per rank, after a header.

    A part holds the payloads in the order of the groups. Payloads are written directly to the send buffer if all
    messages are gathers of fixed sizes; otherwise they are copied to it. Where some size depends on data,
    :class:`VariableGather` runs the rounds. What a device selects is written in a call of its own, once the host knows
    how much that is.
    """

    def __init__(
        self,
        bucket: Bucket,
        round_number: int,
        messages: Mapping[int, Gather | Broadcast],
        rank: int,
        world: int,
        allocate: Allocator = host_allocator,
    ) -> None:
        self._rank, self._world = rank, world
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
        self._writing = Phase(bucket.device)  # the device call that writes what was selected
        self._announced = VariableGather(self._layers, rank, world, varying) if varying else None
        self._in_place = all(isinstance(message, Gather) and message.fixed for message in messages.values())
        if not self._in_place:
            # Pages that no payload fills are reserved but never touched, so they take no memory.
            self._space = {g: np.empty(n, dtype=np.uint8) for g, n in self._most.items()}
            return
        sizes = self._most_by_rank(messages)
        header = ByteHeader(self._layers, sizes.sum(axis=1))
        ends = np.cumsum(header.message_bytes).tolist()
        by_kernels = all(message.by_kernels for message in messages.values())
        make = allocate if by_kernels else host_allocator
        self._buffer = make(ends[-1], [(begin, begin + header.nbytes) for begin in [0, *ends[:-1]]])
        # The views are the same in every step, so that cached kernel calls stay valid.
        self._move = gathered(rank, self._buffer, header)
        self._payloads = self._views(self._buffer, sizes)

    def write(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> None:
        """Write this rank's payloads, or select their values; valid when the phase of all writers is done."""
        for column, (g, message) in enumerate(messages.items()):
            at.bind_sources(g)
            if message.select is not None:
                message.select()
            else:
                self._fill(column, g, message)

    def _fill(self, column: int, g: int, message: Gather | Broadcast) -> None:
        """Write one payload; a gather's has the same view in every step, so that cached calls stay valid."""
        if self._in_place:
            view = self._payloads[column][self._rank]
        elif isinstance(message, Gather) or self._rank == message.root:
            view = self._space[g]
        else:
            view = self._space[g][:0]
        self._flags[g], count = message.write(view)
        self._used[g] = min(count, len(view))

    def _write_selected(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> Waits[None]:
        """Write the payloads of what was selected, whose sizes the host knows by now."""
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
        """Gather what the call ``written`` has written: in one all-gather, or two where sizes depend on data."""
        yield from finished(written, at.binding, "compress")
        yield from self._write_selected(messages, at)
        for g, found in self._flags.items():
            at.note(g, found)
        if self._in_place:
            yield self._move
            return self._replies(messages, self._payloads, at)
        sizes = self._most_by_rank(messages)
        if self._announced is not None:
            own = [space[: self._used[g]] for g, space in self._space.items()]
            payloads = yield from self._announced.run(own, sizes, at.header_id)
        else:
            buffer = yield from self._exchange(sizes)
            payloads = self._views(buffer, sizes)
        return self._replies(messages, payloads, at)

    def rehearse(self, messages: Mapping[int, Gather | Broadcast], at: Round) -> Replies:
        """Return replies as if all ranks had sent what this one wrote in a rehearsal."""
        for _ in self._write_selected(messages, at):
            pass
        if self._in_place:
            return self._replies(messages, self._payloads, at)
        payloads = [[self._space[g][: self._used[g]] for _ in range(self._world)] for g in messages]
        return self._replies(messages, payloads, at)

    def _replies(
        self, messages: Mapping[int, Gather | Broadcast], payloads: list[list[Bytes]], at: Round
    ) -> Replies:
        replies: Replies = {}
        for (g, message), views in zip(messages.items(), payloads, strict=True):
            at.bind_outputs(g)
            if isinstance(message, Broadcast):
                data: Any = views[message.root]
            else:
                data = views
            replies[g] = Reply(at.flags_of(g), data)
        return replies

    def _views(self, buffer: Bytes, sizes: npt.NDArray[np.int64]) -> list[list[Bytes]]:
        """Return, for every group, views of the payloads of all ranks."""
        return split([buffer[begin:] for begin in self._bounds(sizes)[:, 0].tolist()], sizes)

    def _most_by_rank(self, messages: Mapping[int, Gather | Broadcast]) -> npt.NDArray[np.int64]:
        """The most bytes of every rank's payload of every group: none if another broadcasts."""
        most = np.tile(np.array(list(self._most.values()), dtype=np.int64), (self._world, 1))
        for column, message in enumerate(messages.values()):
            if isinstance(message, Broadcast):
                most[np.arange(len(most)) != message.root, column] = 0
        return most

    def _exchange(self, sizes: npt.NDArray[np.int64]) -> Waits[Bytes]:
        header = ByteHeader(self._layers, sizes.sum(axis=1))
        total = sum(header.message_bytes)
        if len(self._buffer) < total:
            self._buffer = np.zeros(total, dtype=np.uint8)
        mine = self._bounds(sizes)[self._rank].tolist()
        for (g, space), begin in zip(self._space.items(), mine, strict=True):
            self._buffer[begin : begin + self._used[g]] = space[: self._used[g]]
        yield gathered(self._rank, self._buffer[:total], header)
        return self._buffer

    def _bounds(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where every rank's payload of every group begins."""
        header = ByteHeader.size(self._layers)
        parts = padded(sizes.sum(axis=1)) + header
        begins = np.cumsum(parts) - parts + header
        bounds: npt.NDArray[np.int64] = begins[:, None] + np.cumsum(sizes, axis=1) - sizes
        return bounds
