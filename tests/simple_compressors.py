"""Defines the simplest compressors that gather, broadcast and sum, for tests of what carries their messages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.messages import Broadcast, Gather, Sum
from gradcomp.kernels.codec import Codec
from gradcomp.kernels.segments import FP32

EXACT = Codec(FP32)


@dataclass(frozen=True)
class Plain(Compressor):
    """Is the base class: it sends float32 values and never cuts a layer."""

    varying: bool = False

    def fill(self, table, level):
        table["bucket_size"] = 1

    def cut_elements(self, layer):
        return max(layer.size, 1)

    def wire_bytes(self, group):
        return EXACT.wire_bytes(group.table)

    def write(self, group, context, view):
        """Writes the values, without trailing zeros if the size may vary."""
        table, flags = group.inputs, np.zeros(len(group.table), np.uint8)
        table["payload"] = self.offsets(group)
        if not len(view):  # another rank broadcasts: a flag counts, the size does not
            view = np.zeros(4 * group.elements, np.uint8)
        EXACT.encode(group.device, table, view, flags, context.draw, scale=context.scale)
        kept = np.flatnonzero(view.view("<f4"))
        return flags, (4 * (kept[-1] + 1) if len(kept) else 0) if self.varying else len(view)

    def offsets(self, group):
        ends = np.cumsum(self.wire_bytes(group))
        return np.concatenate(([0], ends[:-1]))

    def finish(self, group, context, total, flags, divisor):
        flags, group.table["payload"] = flags.copy(), self.offsets(group)
        EXACT.decode(
            group.device, group.table, total.view(np.uint8), flags, divisor=divisor, scale=context.unscale
        )
        return flags


def padded(payload: np.ndarray, size: int) -> np.ndarray:
    values = np.zeros(size, np.float32)
    got = payload[: len(payload) // 4 * 4].view("<f4")
    values[: len(got)] = got
    return values


@dataclass(frozen=True)
class Everyone(Plain):
    """Computes the mean by a gather."""

    name: ClassVar[str] = "everyone"

    def exchange(self, group, context):
        reply = yield Gather(4 * group.elements, partial(self.write, group, context), not self.varying)
        total = sum(padded(payload, group.elements) for payload in reply.data)
        return self.finish(group, context, total, reply.flags, context.divisor)


@dataclass(frozen=True)
class Selected(Plain):
    """Gathers in two parts: the size is known before the payload is written."""

    name: ClassVar[str] = "selected"

    varying: bool = True

    def exchange(self, group, context):
        kept, found = np.zeros(4 * group.elements, np.uint8), []

        def write(view):
            flags, used = found.pop()
            view[:used] = kept[:used]
            return flags, used

        def select():
            found.append(self.write(group, context, kept))

        reply = yield Gather(4 * group.elements, write, fixed=False, select=select)
        assert not found
        total = sum(padded(payload, group.elements) for payload in reply.data)
        return self.finish(group, context, total, reply.flags, context.divisor)


@dataclass(frozen=True)
class Turns(Plain):
    """Broadcasts one rank's gradient, another rank's in every step."""

    name: ClassVar[str] = "turns"

    def exchange(self, group, context):
        root = context.draw.step % context.world
        message = Broadcast(4 * group.elements, partial(self.write, group, context), root, not self.varying)
        reply = yield message
        return self.finish(group, context, padded(reply.data, group.elements), reply.flags, 1.0)


@dataclass(frozen=True)
class Rounds(Plain):
    """Computes the mean in three rounds: it gathers the largest magnitudes, sums scaled values, broadcasts a word.

    A rank whose first value is 13 raises the flag of its first layer in the second round.
    """

    name: ClassVar[str] = "rounds"

    def exchange(self, group, context):
        mine = np.zeros(group.elements, np.float32)
        flags = np.zeros(len(group.table), np.uint8)

        def largest(view):
            found, _ = self.write(group, context, mine.view(np.uint8))
            view[:] = np.abs(mine).max(initial=0, keepdims=True).view(np.uint8)
            return found, 4

        reply = yield Gather(4, largest)
        unit = max(1.0, *(float(payload.view("<f4")[0]) for payload in reply.data))

        def shares(view):
            view[:] = mine / unit
            flags[0] = bool(len(mine)) and mine[0] == 13
            return flags

        reply = yield Sum(group.elements, shares, "float64")
        total = (reply.data * unit).astype(np.float32)
        word = np.frombuffer(b"same bytes everywhere", np.uint8)

        def speak(view):
            view[: len(word)] = word[: len(view)]
            return np.zeros_like(flags), len(word)

        reply = yield Broadcast(64, speak, context.world - 1, fixed=False)
        assert reply.data.tobytes() == word.tobytes()
        return self.finish(group, context, total, reply.flags, context.divisor)
