"""Plain codes of the values that LGC codes: the same positions, the same phases, no nets.

Importing this registers ``plain_code`` on a rank. It is no part of gradcomp.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

import gradcomp as gc
from gradcomp import ConfigError
from gradcomp.compress import Gather, Sum, register
from gradcomp.compress.messages import Bytes, Exchange, Message, Reply
from gradcomp.compress.sparse.base import keep_errors
from gradcomp.compress.sparse.payload import Selection
from gradcomp.core.state import Begin
from gradcomp.kernels import indices, selection
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext

Floats = npt.NDArray[np.float32]

VALUES, BITS, PROJECTION = KINDS = ("values", "bits", "projection")
#: Values that a projection takes together, as many as one position of LGC's code stands for.
BLOCK = 16
_SCALE_BYTES = 4


def quantised_bytes(values: int, bits: int) -> int:
    """A scale, and so many bits for each value."""
    return _SCALE_BYTES + -(-values * bits // 8)


def quantise(values: Floats, bits: int) -> Bytes:
    """2**bits equal intervals between -s and s, s being the largest magnitude; 0 in no interval's middle."""
    scale = np.abs(values).max(initial=np.float32(0)).astype(np.float32)
    codes = np.zeros(len(values), np.uint8)
    if scale > 0:
        halves = 2 ** (bits - 1)
        codes[:] = np.clip(np.floor(values / scale * halves) + halves, 0, 2 * halves - 1)
    found = np.unpackbits(codes[:, None], axis=1, bitorder="little")[:, :bits]
    return np.concatenate([scale.reshape(1).astype("<f4").view(np.uint8), np.packbits(found.reshape(-1))])


def dequantise(payload: Bytes, values: int, bits: int) -> Floats:
    """The middles of the intervals."""
    scale = payload[:_SCALE_BYTES].view("<f4")[0]
    found = np.unpackbits(payload[_SCALE_BYTES:], count=values * bits).reshape(values, bits)
    codes = np.packbits(found, axis=1, bitorder="little")[:, 0].astype(np.float32)
    halves = np.float32(2 ** (bits - 1))
    middles: Floats = scale * ((codes + np.float32(0.5)) / halves - np.float32(1))
    return middles


def matrix(channels: int) -> Floats:
    """(16, channels), orthonormal columns, the same on all ranks and in all steps."""
    drawn = np.random.Generator(np.random.PCG64(16)).standard_normal((BLOCK, channels))
    return np.linalg.qr(drawn)[0].astype(np.float32)


def project(values: Floats, channels: int) -> Floats:
    """``channels`` numbers for every 16 values, padded with zeros."""
    blocks = np.zeros((max(-(-len(values) // BLOCK), 1), BLOCK), np.float32)
    blocks.reshape(-1)[: len(values)] = values
    return (blocks @ matrix(channels)).reshape(-1)


def unproject(code: Floats, values: int, channels: int) -> Floats:
    """Least squares: with orthonormal columns, the transpose."""
    return (code.reshape(-1, channels) @ matrix(channels).T).reshape(-1)[:values]


@register("plain_code")
@dataclass(frozen=True)
class PlainCode(gc.LGC):
    """LGC's phases, leaders and positions; in phase 3 a code that nobody has to learn.

    ``kind``: "values": the sum of the values, in phase 2 too: the ring without codes. "bits": ``bits`` bits a value, on
    a scale that a rank has for all. "projection": ``code_channels`` numbers for 16 values, by a fixed random matrix.

    Wire: a Broadcast of the leader's deflated indices; a Sum of 4k bytes, a Gather of 4 + k bits / 8, or a Sum of k
    ``code_channels`` / 4.
    State: a residual and u per layer.
    """

    kind: str = VALUES
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 1 <= self.bits <= 8 or not 1 <= self.code_channels <= BLOCK:
            raise ConfigError("bits must be in 1 .. 8, code_channels in 1 .. 16")

    @cached_property
    def _coded(self) -> bool:
        return self.kind != VALUES and not self.train_steps

    def shared_fields(self, seed: int) -> dict[str, tuple[int, Begin]]:
        """There are no nets."""
        return {}

    def wire_bytes(self, group: Group) -> Sizes:
        """Of values or code; indices are deflated."""
        counts = self.limits(group.table)
        total = int(counts.sum())
        if not self._coded:
            return 4 * counts
        if self.kind == BITS:
            size = quantised_bytes(total, self.bits)
        else:
            size = 4 * self.code_channels * max(-(-total // BLOCK), 1)
        found: Sizes = np.diff(np.cumsum(counts) * size // max(total, 1), prepend=0)
        return found

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """One Broadcast, then one Sum or Gather."""
        chosen, _, found = yield from self.share_indices(group, context)
        flags = found.copy()
        total = yield from self._total(group, chosen, flags, context.first)
        rows = (group.table, flags, chosen.offsets, chosen.counts, chosen.indices, total)
        indices.scatter_values(*rows, divisor=context.divisor, scale=context.unscale)
        return flags

    def _total(
        self, group: Group, chosen: Selection, flags: Bytes, first: int
    ) -> Generator[Message, Reply, Floats]:
        """The sum over ranks of what their codes stand for."""
        none, count = np.zeros_like(flags), len(chosen.values)

        def take() -> Floats:
            selection.take(group.inputs, chosen.offsets, chosen.counts, chosen.indices, chosen.values)
            own: Floats = chosen.values.copy()
            own[np.repeat(flags != 0, chosen.counts)] = 0
            return own

        def keep(own: Floats, sent: Floats) -> None:
            keep_errors(group, chosen, own - sent if self.feedback and self._coded else np.zeros_like(own))

        def write_numbers(view: Floats) -> Bytes:
            own = take()
            view[:] = project(own, self.code_channels) if self._coded else own
            keep(own, unproject(view, count, self.code_channels) if self._coded else own)
            return none

        def write_bits(view: Bytes) -> tuple[Bytes, int]:
            own = take()
            view[:] = quantise(own, self.bits)
            keep(own, dequantise(view, count, self.bits))
            return none, len(view)

        if self._coded and self.kind == BITS:
            reply = yield Gather(quantised_bytes(count, self.bits), write_bits)
            total = np.zeros(count, np.float32)
            for payload in reply.data:
                total += dequantise(payload, count, self.bits)
            return total
        length = self.code_channels * max(-(-count // BLOCK), 1) if self._coded else count
        reply = yield Sum(length, write_numbers)
        numbers: Floats = np.array(reply.data, np.float32)
        return unproject(numbers, count, self.code_channels) if self._coded else numbers
