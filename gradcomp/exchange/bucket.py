"""Run the compressors of an exchange bucket in lock step; messages of a kind share one collective."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from gradcomp.compress.base import Coded
from gradcomp.compress.messages import Broadcast, Bytes, Exchange, Gather, Message, Reduce, Reply, Sum
from gradcomp.exchange.fused import FusedGather, FusedSum, Replies, Round, finished
from gradcomp.exchange.layout import Bucket
from gradcomp.kernels.replayed_calls import DONE, Collected, Pending, Phase
from gradcomp.kernels.step import StepContext
from gradcomp.reduce import Binding, Part, Reduction
from gradcomp.reduce.base import Framed, Waits, framed
from gradcomp.reduce.header import NONFINITE, BucketFlags, HeaderId
from gradcomp.transport.base import Allocator, Operation, host_allocator

#: Makes a bucket's reduction from its parts, its number of layers and its own number.
MakeReduction = Callable[[Sequence[Part], int, int], Reduction]

#: A fused message, and the groups' messages that it is made of.
_Fused = tuple[Any, Mapping[int, Any]]


class BucketProgram:
    """Holds the objects that a bucket uses in every step: its reduction and the buffers of its other messages.

    A compressor reduces in its first round or not at all; other messages may follow in any number of rounds. Where all
    compressors are :class:`gradcomp.compress.base.Coded`, the reduction is the whole program.
    """

    def __init__(
        self,
        bucket: Bucket,
        rank: int,
        world: int,
        context: StepContext,
        make_reduction: MakeReduction,
        allocate: Allocator = host_allocator,
    ) -> None:
        self.bucket = bucket
        self._rank, self._world = rank, world
        self._allocator = allocate
        self._sums: dict[tuple[object, ...], FusedSum] = {}
        self._gathers: dict[tuple[object, ...], FusedGather] = {}
        self._phases: list[Phase] = []  # device calls before round 0, between rounds 0 and 1, ...
        # A compressor reduces in all steps or in none, and asking for its first message has no effect: so it is
        # asked here which groups reduce.
        first = [next(group.compressor.exchange(group, context)) for group in bucket.groups]
        self._reduced = tuple(g for g, message in enumerate(first) if isinstance(message, Reduce))
        self.reduction: Reduction | None = None
        if self._reduced:
            parts = [
                Part(message.codec, message.group, bucket.header_index[g])
                for g, message in enumerate(first)
                if isinstance(message, Reduce)
            ]
            self.reduction = make_reduction(parts, len(bucket.layers), bucket.number)
        self._is_coded = all(type(g.compressor).exchange is Coded.exchange for g in bucket.groups)

    def run(
        self, header_id: HeaderId, context: StepContext, binding: Binding, flags: BucketFlags
    ) -> Generator[Framed, None, None]:
        """Exchange the bucket once: yield an object to wait for, and continue when it is complete."""
        if self._is_coded and self.reduction is not None:
            flagged = yield from framed(self.reduction.run(context, binding, flags), header_id, flags)
            for g, found in zip(self._reduced, flagged, strict=True):
                if np.count_nonzero(found):
                    flags.states[self.bucket.header_index[g][found != 0]] |= NONFINITE
            return
        exchanges, messages = self._begin(context)
        at = Round(self.bucket, 0, header_id, self._world, binding, flags)
        call: Pending = DONE
        fused: list[_Fused] = []
        if len(self._reduced) < len(messages):
            call = collected = self._phase(0).collecting()
            with binding.span("compress"):
                fused = self._write(messages, at, collected)
                collected.start()
        while messages:
            reduction = self.reduction if at.number == 0 else None
            programs: list[Waits[Any]] = [] if reduction is None else [reduction.run(context, binding, flags)]
            for each, given in fused:
                programs.append(each.run(given, at, call))
            running = [framed(program, header_id, flags, 2 * at.number) for program in programs]
            results = [(yield from running[0])] if len(running) == 1 else (yield from _lock_step(running))
            replies: Replies = {}
            if reduction is not None:
                for g, found in zip(self._reduced, results.pop(0), strict=True):
                    replies[g] = Reply(found)
                self._bind(messages, at)
            for result in results:
                replies.update(result)
            # Kernels that decode the replies and those that fill the next messages are one call of a device.
            call = collected = self._phase(at.number + 1).collecting()
            with binding.span("decompress"):
                messages, ends = _answer(exchanges, replies, collected)
                is_pending = not messages and collected.start()
            at = Round(self.bucket, at.number + 1, header_id, self._world, binding, flags)
            if messages:
                with binding.span("compress"):
                    fused = self._write(messages, at, collected)
                    is_pending = collected.start()
            if is_pending:
                yield from finished(call, binding, "compress" if messages else "decompress")
            for g, found in ends.items():
                if np.count_nonzero(found):
                    at.note(g, found)

    def rehearse(
        self, header_id: HeaderId, context: StepContext, binding: Binding, flags: BucketFlags
    ) -> None:
        """Run the bucket once on a device that rehearses: no kernel runs and nothing is sent.

        This goes on while only kernels look at results; a compressor that reads them on the host would find none.
        """
        exchanges, messages = self._begin(context)
        at = Round(self.bucket, 0, header_id, self._world, binding, flags)
        call = self._phase(0).collecting()
        if self.reduction is not None and self.reduction.by_kernels:
            for _ in self.reduction.run(context, binding, flags):
                pass
        while messages and all(map(_by_kernels, messages.values())):
            fused = self._write(messages, at, call)
            call.start()
            call.finish()
            replies: Replies = {g: Reply(at.flags_of(g)) for g in self._reduced if g in messages}
            self._bind(messages, at)
            for each, given in fused:
                replies |= each.rehearse(given, at)
            at = Round(self.bucket, at.number + 1, header_id, self._world, binding, flags)
            call = self._phase(at.number).collecting()
            messages, _ = _answer(exchanges, replies, call)
        if not messages:
            call.start()
            call.finish()

    def _write(self, messages: Mapping[int, Message], at: Round, call: Collected) -> list[_Fused]:
        """Fill a round's messages, fused by kind in an order that all ranks share; the caller starts ``call``."""
        by_dtype: dict[str, dict[int, Sum]] = {}
        gathers: dict[int, Gather | Broadcast] = {}
        for g, message in messages.items():
            if isinstance(message, Sum):
                by_dtype.setdefault(message.dtype, {})[g] = message
            elif isinstance(message, Gather | Broadcast):
                gathers[g] = message
            else:
                assert at.number == 0, "a compressor reduces in its first round only"
        fused: list[_Fused] = [(self._fused_sum(at.number, sums), sums) for sums in by_dtype.values()]
        if gathers:
            fused.append((self._fused_gather(at.number, gathers), gathers))
        with call:
            for each, given in fused:
                each.write(given, at)
        return fused

    def _bind(self, messages: Mapping[int, Message], at: Round) -> None:
        """Set the addresses of the means that compressors write themselves."""
        for g, message in messages.items():
            if isinstance(message, Reduce) and message.rest is not None:
                at.binding.outputs(message.rest, message.group.layers, self.bucket.groups[g])

    def _begin(self, context: StepContext) -> tuple[list[Exchange], dict[int, Message]]:
        """Return the groups' exchanges and their first messages."""
        exchanges: list[Exchange] = []
        messages: dict[int, Message] = {}
        for g, group in enumerate(self.bucket.groups):
            exchanges.append(group.compressor.exchange(group, context.of(group)))
            messages[g] = next(exchanges[g])
        return exchanges, messages

    def _phase(self, number: int) -> Phase:
        """Return the device call of all groups before round ``number``."""
        while number >= len(self._phases):
            self._phases.append(Phase(self.bucket.device))
        return self._phases[number]

    # Buffers are allocated when messages of these sizes first occur.

    def _fused_sum(self, number: int, sums: Mapping[int, Sum]) -> FusedSum:
        key = (
            number,
            *((g, message.length, message.dtype, message.by_kernels) for g, message in sums.items()),
        )
        if key not in self._sums:
            self._sums[key] = FusedSum(self.bucket, number, sums, self._allocator)
        return self._sums[key]

    def _fused_gather(self, number: int, gathers: Mapping[int, Gather | Broadcast]) -> FusedGather:
        key = (
            number,
            *((g, message.max_bytes, message.fixed, message.by_kernels) for g, message in gathers.items()),
        )
        if key not in self._gathers:
            self._gathers[key] = FusedGather(
                self.bucket, number, gathers, self._rank, self._world, self._allocator
            )
        return self._gathers[key]


def _by_kernels(message: Message) -> bool:
    """Return whether the next device call depends on nothing that the host has to read, such as counts."""
    if isinstance(message, Gather):
        return message.select is not None or (message.by_kernels and message.fixed)
    return isinstance(message, Reduce) or (isinstance(message, Sum) and message.by_kernels)


def _answer(
    exchanges: Sequence[Exchange], replies: Replies, call: Collected
) -> tuple[dict[int, Message], dict[int, Bytes]]:
    """Send compressors their replies; return the next messages of some, and the flags of those that end.

    The flags are valid once ``call`` is finished.
    """
    messages: dict[int, Message] = {}
    ends: dict[int, Bytes] = {}
    with call:
        for g in sorted(replies):
            try:
                messages[g] = exchanges[g].send(replies[g])
            except StopIteration as end:
                ends[g] = end.value
    return messages, ends


def _lock_step(programs: Sequence[Generator[Framed, None, Any]]) -> Generator[Framed, None, list[Any]]:
    """Run programs side by side and issue the operations of a round of all of them together; return their results.

    Device calls are waited for before that: they are not rounds, which all ranks have in common.
    """
    results: list[Any] = [None] * len(programs)
    running = dict(enumerate(programs))
    while running:
        rounds: dict[int, list[Operation]] = {}
        behind = list(running)
        while behind:
            calls: dict[int, Pending] = {}
            for n in behind:
                try:
                    step = next(running[n])
                except StopIteration as end:
                    results[n] = end.value
                    del running[n]
                    continue
                if isinstance(step, list):
                    rounds[n] = step
                else:
                    calls[n] = step
            yield from calls.values()
            behind = list(calls)
        operations = [operation for n in running for operation in rounds[n]]
        if operations:
            yield operations
    return results
