"""Plain codes of the values that LGC codes: the same positions, the same phases, no nets.

Importing this registers ``plain_code`` on a rank. It is no part of gradcomp.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

import gradcomp as gc
from gradcomp import Compressor, ConfigError, LayerSpec
from gradcomp.compress import Broadcast, CLTk, Gather, Identity, Sum, Traits, register
from gradcomp.compress.messages import Bytes, Exchange, Message, Reply
from gradcomp.compress.sparse.base import keep_errors
from gradcomp.compress.sparse.payload import Selection, sent_by
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


def losses(samples: Floats) -> dict[str, float]:
    """The nets' loss, of plain codes: ||mean of what they stand for - mean||**2 over ||mean||**2, by row.

    ``samples``: (N, values), one row for each rank.
    """
    mean, count = samples.mean(axis=0), samples.shape[1]
    found = {}
    for bits in (8, 2):
        decoded = [dequantise(quantise(values, bits), count, bits) for values in samples]
        found[f"bits-{bits}"] = np.mean(decoded, axis=0)
    for channels in (4, 1):
        found[f"projection-{channels}"] = unproject(project(mean, channels), count, channels)
    norm = float(mean @ mean)
    return {row: float(((decoded - mean) ** 2).sum()) / norm for row, decoded in found.items()}


@register("plain_code")
@dataclass(frozen=True)
class PlainCode(CLTk):
    """LGC's phases, leaders and positions; in phase 3 a code that nobody has to learn.

    ``kind``: "values": the sum of the values, in phase 2 too: the ring without codes. "bits": ``bits`` bits a value, on
    a scale that a rank has for all. "projection": ``code_channels`` numbers for 16 values, by a fixed random matrix.

    Wire: a Broadcast of the leader's deflated indices; a Sum of 4k bytes, a Gather of 4 + k bits / 8, or a Sum of k
    ``code_channels`` / 4.
    State: a residual and u per layer.
    """

    density: float = 0.001
    momentum_factor: float = 0.9
    warmup_steps: int = 200
    train_steps: int = 300
    kind: str = VALUES
    bits: int = 8
    code_channels: int = 4
    ends: bool = True
    least_parameters: int = 50_000
    indices: str = field(default="deflate", kw_only=True)
    feedback: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in KINDS:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if not 1 <= self.bits <= 8 or not 1 <= self.code_channels <= BLOCK:
            raise ConfigError("bits must be in 1 .. 8, code_channels in 1 .. 16")

    @cached_property
    def learned(self) -> gc.LGC:
        """What it takes phases, leaders and ends from."""
        return gc.LGC(
            self.density, self.momentum_factor, self.warmup_steps, self.train_steps, self.code_channels,
            ends=self.ends, least_parameters=self.least_parameters, indices=self.indices,
        )  # fmt: skip

    @cached_property
    def traits(self) -> Traits:
        """LGC's, but it learns nothing."""
        return replace(self.learned.traits, accounts=self.feedback, learns=False)

    def at_step(self, step: int) -> Compressor:
        """Exact; then itself without ``warmup_steps``; then without ``train_steps`` too, which codes."""
        if step < self.warmup_steps:
            return self.dense(Identity())
        after = self.train_steps if step < self.warmup_steps + self.train_steps else 0
        return replace(self, warmup_steps=0, train_steps=after)

    @property
    def changes(self) -> tuple[int, ...]:
        """The ends of phases 1 and 2."""
        return self.learned.changes

    def dense(self, exact: Compressor) -> Compressor:
        """``exact``, with the same momentum."""
        return self.learned.dense(exact)

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        """LGC's ends of the model."""
        return self.learned.by_place(own, layers)

    def leader(self, context: StepContext) -> int:
        """LGC's."""
        return self.learned.leader(context)

    @cached_property
    def _coded(self) -> bool:
        return self.kind != VALUES and not self.train_steps

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
        chosen = group.scratch.once("chosen", lambda: Selection.allocate(self.limits(group.table)))
        flags = (yield from self._share(group, context, chosen)).copy()
        total = yield from self._total(group, chosen, flags)
        lists = (chosen.offsets[None], chosen.counts[None], chosen.indices, total)
        group.device.kernels.scatter_mean(
            group.table, flags, *lists, divisor=context.divisor, scale=context.unscale
        )
        return flags

    def _share(
        self, group: Group, context: StepContext, chosen: Selection
    ) -> Generator[Message, Reply, Bytes]:
        """The leader's indices, on all ranks. On every rank p is in the next residuals then."""
        form = group.scratch.once("format", lambda: self.format(group.table))
        table, leader, flags = group.inputs, self.leader(context), np.zeros(len(group.table), np.uint8)
        factors = context.factors(len(group.table))
        places = (chosen.counts, chosen.offsets, chosen.indices, chosen.values, chosen.counts)

        def write(view: Bytes) -> tuple[Bytes, int]:
            if context.draw.rank != leader:
                group.device.kernels.contribute(table, flags, factors, decay=context.decay)
                return flags, 0
            group.device.kernels.select_top(table, flags, factors, *places, decay=context.decay, zeros=True)
            return flags, form.encode(chosen, view, 0)

        reply = yield Broadcast(
            form.most_bytes(chosen.counts, fixed=True), write, leader, fixed=not form.deflated
        )
        with sent_by(leader):
            form.decode(reply.data, chosen)
        return reply.flags

    def _total(self, group: Group, chosen: Selection, flags: Bytes) -> Generator[Message, Reply, Floats]:
        """The sum over ranks of what their codes stand for."""
        none, count = np.zeros_like(flags), len(chosen.values)

        def take() -> Floats:
            group.device.kernels.take(
                group.inputs, chosen.offsets, chosen.counts, chosen.indices, chosen.values
            )
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
