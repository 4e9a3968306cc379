"""Fake sends the first values of an exchange bucket and zeroes the rest, to learn how long steps of a ratio take."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from gradcomp.compress.base import Compressor, Traits
from gradcomp.compress.bounds import Distortion
from gradcomp.compress.checks import is_number
from gradcomp.compress.identity import CAST_BLOCK, Identity
from gradcomp.compress.messages import Exchange, Reduce
from gradcomp.compress.registry import register
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Level
from gradcomp.core.what_if import NOTHING
from gradcomp.kernels import replayed_calls
from gradcomp.kernels.codec import Codec, Group, Sizes, Table
from gradcomp.kernels.step import StepContext

#: The share of a segment that travels is a whole number of 2^-30; this one stands for all of it.
_ALL = int(NOTHING)
#: The bytes that :func:`spend` reads at a time: few enough for a fine clock, and enough to release Python's lock.
_WORK = bytes(1 << 16)
_EXACT = Identity()


@register("fake")
@dataclass(frozen=True)
class Fake(Compressor):
    """Send the first 1/ratio of every exchange bucket, uncompressed, and set the rest to 0: training is worthless.

        k = ceil(n / ratio);  mean[:k] = (sum of g[:k] over ranks) / N;  mean[k:] = 0

    n counts the elements of an exchange bucket's layers of one dtype, one after the other. A layer may travel whole or
    not at all, and the ranks stay equal and finite. The time of a step is the answer: how long it would take with a
    compressor of this ratio, whose codec takes ``codec_seconds``. A ratio of 1 is the uncompressed exchange,
    :class:`Identity`'s, bit for bit. The level is the ratio. Runs with this compressor refuse to save checkpoints,
    unless the setting ``what_if_save`` allows it.

    Args:
        ratio: bytes without compression over bytes that travel, in [1, 2**30]. With 2**30 one value of a bucket
            travels, so that the network costs nothing but latency.
        codec_seconds: the time of coding a gigabyte (10**9 bytes in float32) of gradients, in both directions together.
            The thread of the exchange spends it by computing, after each exchange bucket's means have arrived, except
            at a ratio of 1.

    Wire: a reduction of k float32 values, or k of bfloat16 for bfloat16 layers; as :class:`Identity` for a ratio of 1.
    State: none. There is no error feedback, and no wrapper takes this compressor.
    Errors: ConfigError for a ratio outside [1, 2**30] and for a negative or infinite ``codec_seconds``. Values that
    are not finite are found among those that travel.
    Source: Markov 2024, sections 3.3.1 and C.2, which transmit the first N / ratio elements of each buffer. Differs: a
    buffer is an exchange bucket, not a layer; what is not transmitted becomes 0, so that the ranks stay equal.
    """

    level_field = "ratio"

    ratio: float = 8.0
    codec_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 1 <= self.ratio <= NOTHING:
            raise ConfigError(f"ratio must be in [1, 2**30], got {self.ratio!r}")
        if not is_number(self.codec_seconds) or not 0 <= self.codec_seconds < float("inf"):
            raise ConfigError(f"codec_seconds must be finite and not negative, got {self.codec_seconds!r}")

    @cached_property
    def traits(self) -> Traits:
        return Traits(reduces=self.ratio != 1, exact=self.ratio == 1, fakes=True)

    def distortion(self, layer: LayerSpec) -> Distortion | None:
        """Return the bound of an exact exchange for a ratio of 1, and else None: the layer may not travel at all."""
        return _EXACT.distortion(layer) if self.ratio == 1 else None

    def fill(self, table: Table, level: Level) -> None:
        assert isinstance(level, int | float), "a ratio is no level by block"
        table["level"] = int(_ALL / level)
        table["bucket_size"] = CAST_BLOCK

    def is_summed(self, layer: LayerSpec) -> bool:
        return self.ratio == 1 and _EXACT.is_summed(layer)

    def cut_elements(self, layer: LayerSpec) -> int:
        return CAST_BLOCK

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of what travels of every segment: those of the first segments, and 0 for the last ones."""
        if _is_whole(group):
            return _EXACT.wire_bytes(group)
        prefix = Prefix.of(group)
        return prefix.codec.wire_bytes(prefix.sent.table)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        if _is_whole(group):
            return (yield from _EXACT.exchange(group, context))
        prefix = Prefix.of(group)
        reply = yield Reduce(prefix.codec, prefix.sent, prefix.rest)
        prefix.zero_the_rest()
        spend(self.codec_seconds * 4e-9 * group.elements)
        return reply.flags


class Prefix:
    """The first part of a group, which travels, and the rest, whose means are zero. It is made once for a group."""

    def __init__(self, group: Group) -> None:
        table = group.table
        self.codec: Codec = _EXACT.codec_for(table)
        lengths = table["length"].astype(np.int64)
        ends = np.cumsum(lengths)
        # In whole numbers, since a sum of many shares must not depend on rounding.
        total = -(-sum(map(int.__mul__, lengths.tolist(), table["level"].tolist())) // _ALL)
        counts = np.clip(total - (ends - lengths), 0, lengths)
        sent, rest = table.copy(), table.copy()
        sent["length"] = counts
        rest["start"] += counts
        rest["length"] -= counts
        #: The group of what travels, with a segment for each of the whole group's.
        self.sent = replace(group, table=sent)
        #: What does not travel of each segment.
        self.rest = rest
        self._device = group.device
        self._flags = np.zeros(len(table), dtype=np.uint8)
        self._nothing = np.zeros((1, len(table)), dtype=np.int64)

    @classmethod
    def of(cls, group: Group) -> Prefix:
        """Return the group's only instance, which the first call makes."""
        return group.scratch.once("prefix", lambda: cls(group))

    def zero_the_rest(self) -> None:
        """Write zeros to the outputs of what did not travel; its table has their addresses."""
        rest = self.rest
        rest["output"][rest["length"] == 0] = 0  # which may lie behind the end of an array
        no_indices, no_values = np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.float32)
        # A sparse mean of no values.
        replayed_calls.run(
            (rest["output"] != 0).tobytes(),
            (rest,),
            lambda: self._device.kernels.scatter_mean(
                *(rest, self._flags, self._nothing, self._nothing, no_indices, no_values),
                divisor=1.0,
                scale=1.0,
            ),
        )


def _is_whole(group: Group) -> bool:
    """Return whether everything travels, as with a ratio of 1."""
    return group.scratch.once("whole bucket", lambda: bool((group.table["level"] == _ALL).all()))


def spend(seconds: float, clock: Callable[[], float] = perf_counter) -> None:
    """Compute for this long, on this thread, without holding Python's lock."""
    if seconds <= 0:
        return
    end = clock() + seconds
    while clock() < end:
        zlib.crc32(_WORK)
