"""One bucket's way through its compressors: groups in lock step, messages of a kind fused into one collective."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.messages import Context, Message, Reduce, Sum
from gradcomp.core.header import NONFINITE, Ballot, CountHeader
from gradcomp.pipeline.layout import Bucket
from gradcomp.reduce import Binding, Part, Reduction, ScatterReduceAllgather
from gradcomp.reduce.base import Call
from gradcomp.transport.base import AllReduce, Operation

Replies = dict[int, Any]
Program = Generator[list[Operation], None, Replies]


@dataclass(frozen=True)
class _FusedSum:
    """Sums of one dtype that share a buffer: the groups' elements, then the counts."""

    buffer: npt.NDArray[Any]
    groups: tuple[int, ...]
    views: tuple[npt.NDArray[Any], ...]
    counts: npt.NDArray[Any]


class BucketProgram:
    """A bucket with what it needs in every step: its reduction and the buffers of its sums.

    A compressor reduces in its first round or not at all; sums may follow in any number of rounds.
    """

    def __init__(self, bucket: Bucket, rank: int, world: int, context: Context) -> None:
        self.bucket = bucket
        self._header = CountHeader(len(bucket.layers))
        self._sums: dict[tuple[int, str], _FusedSum] = {}
        # A generator's first message is the same in every step, and asking for it has no effect.
        first = [next(group.compressor.exchange(group, context)) for group in bucket.groups]
        self._reduced = tuple(g for g, message in enumerate(first) if isinstance(message, Reduce))
        self.reduction: Reduction | None = None
        if self._reduced:
            parts = [
                Part(message.codec, message.group, bucket.slots[g])
                for g, message in enumerate(first)
                if isinstance(message, Reduce)
            ]
            self.reduction = ScatterReduceAllgather(parts, len(bucket.layers), rank, world)

    def run(
        self, call: Call, context: Context, binding: Binding, ballot: Ballot
    ) -> Generator[list[Operation], None, None]:
        """Exchange the bucket once. Yields the operations of a round; resumed when they are complete."""
        exchanges = [group.compressor.exchange(group, context) for group in self.bucket.groups]
        messages: dict[int, Message] = {g: next(exchange) for g, exchange in enumerate(exchanges)}
        round_number = 0
        while messages:
            programs = self._programs(messages, round_number, call, binding, ballot)
            replies = yield from _lock_step(programs)
            messages = {}
            for g, reply in replies.items():
                try:
                    messages[g] = exchanges[g].send(reply)
                except StopIteration as end:
                    slots = self.bucket.slots[g][end.value != 0]
                    ballot.states[slots] |= NONFINITE
            round_number += 1

    def _programs(
        self, messages: dict[int, Message], round_number: int, call: Call, binding: Binding, ballot: Ballot
    ) -> list[Program]:
        programs: list[Program] = []
        if any(isinstance(message, Reduce) for message in messages.values()):
            assert round_number == 0, "a compressor reduces in its first round only"
            assert self.reduction is not None, "the first messages were the same when the program was made"
            programs.append(self._reduce(self.reduction, call, binding, ballot))
        by_dtype: dict[str, dict[int, Sum]] = {}
        for g, message in messages.items():
            if isinstance(message, Sum):
                by_dtype.setdefault(message.dtype, {})[g] = message
        for dtype, sums in by_dtype.items():
            fused = self._fused(round_number, dtype, sums)
            programs.append(self._sum(fused, sums, round_number, call, binding, ballot))
        return programs

    def _reduce(self, reduction: Reduction, call: Call, binding: Binding, ballot: Ballot) -> Program:
        flags = yield from reduction.run(call, binding, ballot)
        return dict(zip(self._reduced, flags, strict=True))

    def _sum(
        self,
        fused: _FusedSum,
        sums: dict[int, Sum],
        round_number: int,
        call: Call,
        binding: Binding,
        ballot: Ballot,
    ) -> Program:
        states = call.states.copy()
        with binding.span("encode"):
            for g, view in zip(fused.groups, fused.views, strict=True):
                group = self.bucket.groups[g]
                binding.sources(group.table, group.layers, group.feedback)
                flags = sums[g].write(view)
                states[self.bucket.slots[g][flags != 0]] |= NONFINITE
            if round_number == 0:
                self._header.write(fused.counts, call.stamp, call.ready, states)
        yield [AllReduce(fused.buffer)]
        if round_number == 0:
            self._header.read(fused.counts, call.stamp, call.world, ballot)
        for g in fused.groups:
            group = self.bucket.groups[g]
            binding.outputs(group.table, group.layers)
        return dict(zip(fused.groups, fused.views, strict=True))

    def _fused(self, round_number: int, dtype: str, sums: dict[int, Sum]) -> _FusedSum:
        known = self._sums.get((round_number, dtype))
        if known is not None:
            return known
        ends = np.cumsum([message.length for message in sums.values()]).tolist()
        counts = self._header.length if round_number == 0 else 0
        buffer = np.zeros(ends[-1] + counts, dtype=dtype)
        starts = [0, *ends[:-1]]
        views = tuple(buffer[a:b] for a, b in zip(starts, ends, strict=True))
        made = _FusedSum(buffer, tuple(sums), views, buffer[ends[-1] :])
        self._sums[round_number, dtype] = made
        return made


def _lock_step(programs: Sequence[Program]) -> Program:
    """Run programs side by side: the operations of a round of all of them are issued together."""
    replies: Replies = {}
    running = list(programs)
    while running:
        operations: list[Operation] = []
        still = []
        for program in running:
            try:
                operations += next(program)
                still.append(program)
            except StopIteration as end:
                replies.update(end.value)
        running = still
        if operations:
            yield operations
    return replies
