"""Operations of collectives: their dtypes, their ``compression=``, and how a channel runs them, Adasum too.

Adasum is a sum of vectors in which the component that two of them share counts once. For two vectors a and b (Maleki et
al., "Scaling Distributed Training with Adaptive Summation", 2020, section 3):

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

Orthogonal vectors are added and equal ones averaged. N ranks, a power of two, combine along a binary tree: first
neighbouring ranks, then neighbouring pairs, and so on. A vector of zeros changes nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from gradcomp.compress import Compressor
from gradcomp.compress.identity import Identity
from gradcomp.compress.quantise.cast import Cast, Coder
from gradcomp.compress.registry import from_string
from gradcomp.core.errors import ConfigError
from gradcomp.job.call_matching import Array
from gradcomp.job.channel import Channel
from gradcomp.transport.base import Bytes

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_HALVES = ("float16", "bfloat16")


def adasum(channel: Channel, flat: Array, lengths: Sequence[int]) -> None:
    """Overwrite ``flat``, of float32 or float64, with the Adasum over ranks of each tensor in it.

    ``lengths`` are the element counts of the tensors that are stored one after another in ``flat``; each is a vector of
    its own. Both ranks of a pair compute the same result from the same operands, so all ranks end with the same bits.
    Runs on the channel's thread. Wire: log2(N) rounds, each of all d bytes.
    """
    received = np.empty_like(flat)
    distance = 1
    while distance < channel.size:
        peer = channel.rank ^ distance
        channel.exchange(flat.view(np.uint8), received.view(np.uint8), peer)
        first, second = (flat, received) if channel.rank < peer else (received, flat)
        start = 0
        for length in lengths:
            part = slice(start, start + length)
            flat[part] = _adasum_of_two(first[part], second[part])
            start += length
        distance *= 2


def _adasum_of_two(a: Array, b: Array) -> Array:
    """Return the Adasum of two vectors; dot product and norms are accumulated in float64."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    dot, norm_a, norm_b = (float(x @ y) for x, y in ((wide_a, wide_b), (wide_a, wide_a), (wide_b, wide_b)))
    return np.asarray(_weight(dot, norm_a) * wide_a + _weight(dot, norm_b) * wide_b).astype(a.dtype)


def _weight(dot: float, norm: float) -> float:
    return 1.0 - dot / (2.0 * norm) if norm > 0.0 else 1.0


class ReduceOp(enum.Enum):
    """Names the operation that combines the ranks' values."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


@dataclass(frozen=True)
class ScaledOp:
    """Computes ``postscale * op(prescale * x_0, ..., prescale * x_(N-1))`` of N ranks' values."""

    op: ReduceOp = Average
    prescale: float = 1.0
    postscale: float = 1.0
    #: Why the user's arguments are invalid, or None.
    problem: str | None = field(default=None, compare=False)

    @property
    def scales(self) -> bool:
        """Return whether a factor is not 1."""
        return self.prescale != 1.0 or self.postscale != 1.0

    def __str__(self) -> str:
        factors = {"prescale_factor": self.prescale, "postscale_factor": self.postscale}
        return ", ".join(
            [f"op={self.op.name}", *(f"{name}={value!r}" for name, value in factors.items() if value != 1.0)]
        )


def scaled_op_of(
    average: bool | None, op: Any, prescale_factor: Any = 1.0, postscale_factor: Any = 1.0
) -> ScaledOp:
    """Return the operation that a user's arguments select; ``average`` is Horovod's older spelling of ``op``."""
    problem = None
    if average is not None and op is not None:
        problem = "average and op are two spellings of the same argument; give one"
    elif op is not None and not isinstance(op, ReduceOp):
        problem = f"op must be Average or Sum, Min, Max, Product or Adasum, got {op!r}"
    factors = []
    for name, value in (("prescale_factor", prescale_factor), ("postscale_factor", postscale_factor)):
        try:
            factors.append(float(value))
        except (TypeError, ValueError):
            factors.append(math.nan)
        if not math.isfinite(factors[-1]):
            problem = problem or f"{name} must be a finite number, got {value!r}"
    if problem is not None:
        return ScaledOp(problem=problem)
    return ScaledOp(op or (Sum if average is False else Average), factors[0], factors[1])


_UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.AVERAGE: np.add,
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of that name, including bfloat16."""
    return _BFLOAT16 if name == "bfloat16" else np.dtype(name)


def wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are combined."""
    if dtype.kind in "iu":
        return dtype if dtype == np.uint64 else np.dtype(np.int64)
    return np.dtype(np.float32) if dtype in (np.float16, _BFLOAT16) else dtype


def combine(parts: Sequence[Array], how: ScaledOp) -> Array:
    """Combine ``parts``, one array from each rank, in rank order. Return a new array of their dtype."""
    dtype, ufunc = parts[0].dtype, _UFUNCS[how.op]
    with np.errstate(over="ignore", invalid="ignore"):
        total = prescaled(parts[0], how)
        for part in parts[1:]:
            ufunc(total, prescaled(part, how), out=total)
        return finished(total, how, len(parts)).astype(dtype, copy=False)


def prescaled(values: Array, how: ScaledOp) -> Array:
    """Return a copy in the wide dtype, multiplied by the prescale factor."""
    if values.dtype.kind in "iu":
        # The product is cast to the given dtype first, as if the user had scaled it.
        values = _times(values, how.prescale)
        return values.astype(wide(values.dtype))
    return _times(values.astype(wide(values.dtype)), how.prescale)


def finished(total: Array, how: ScaledOp, size: int) -> Array:
    """Divide the combined values by the number of ranks for an average, and multiply by the postscale factor.

    Floats are changed in place.
    """
    if how.op is not ReduceOp.AVERAGE:
        return _times(total, how.postscale)
    if total.dtype.kind == "f":
        return _times(np.divide(total, size, out=total), how.postscale)
    if how.postscale != 1.0:
        return _times(total, how.postscale / size)
    # An average is truncated towards zero, but NumPy's division rounds down.
    whole, rest = np.divmod(total, size)
    return np.asarray(whole + ((rest != 0) & (total < 0)))


def _times(values: Array, factor: float) -> Array:
    """Multiply: floats in place, integers in float64, truncated towards zero."""
    if factor == 1.0:
        return values
    if values.dtype.kind == "f":
        np.multiply(values, values.dtype.type(factor), out=values)
        return values
    return np.asarray(np.trunc(values.astype(np.float64) * factor)).astype(values.dtype)


def coder_of(compression: Any, coder: Callable[[str | None], Coder]) -> tuple[Coder, str | None]:
    """Return the coder that is applied before and after a collective, and an error text for an invalid argument.

    ``compression`` is ``Compression.none``, ``.fp16`` or ``.bf16``, a string for one of them, or an object like
    Horovod's compressors: ``compress(tensor)`` returns a tensor and a context, and ``decompress(tensor, context)``
    undoes it. ``coder`` returns the framework's coder for "float16" or "bfloat16", and for None one that does nothing.
    """
    try:
        chosen = from_string(compression) if isinstance(compression, str) else compression
    except ConfigError as error:
        return coder(None), str(error)
    if isinstance(chosen, Identity):
        return coder(None), None
    if isinstance(chosen, Cast) and chosen.dtype in _HALVES:
        return coder(chosen.dtype), None
    if not isinstance(chosen, Compressor) and hasattr(chosen, "compress") and hasattr(chosen, "decompress"):
        return (chosen.compress, chosen.decompress), None
    told = chosen.to_string() if isinstance(chosen, Compressor) else repr(chosen)
    return coder(None), f"compression must be Compression.none, fp16 or bf16 here, got {told}"


def reduce_all(channel: Channel, flat: Array, how: ScaledOp, lengths: Sequence[int]) -> None:
    """Overwrite ``flat`` with its reduction over ranks, bit-identical on all. On the channel's thread.

    ``lengths`` are the element counts of the tensors that are stored one after another, which only Adasum tells apart.
    Sums of float32, float64 and int64 are the transport's own. Other values go to the owner of their part, who combines
    them in rank order and sends the result to all. Wire: 2 d (N-1)/N bytes per rank for d bytes of the dtype; Adasum d
    log2(N), for float16 and bfloat16 in float32.
    """
    if how.op in (Average, Sum) and flat.dtype in (np.float32, np.float64, np.int64):
        if how.prescale != 1.0:
            flat[:] = prescaled(flat, how)
        channel.allreduce(flat)
        if (done := finished(flat, how, channel.size)) is not flat:
            flat[:] = done
    elif how.op is ReduceOp.ADASUM:
        values = prescaled(flat, how)
        adasum(channel, values, lengths)
        flat[:] = finished(values, how, channel.size)
    else:
        counts = [count * flat.itemsize for count in shares(len(flat), channel.size)]
        data = flat.view(np.uint8)
        data[:] = channel.allgather(
            reduce_parts(channel, data, counts, flat.dtype, how).view(np.uint8), counts
        )


def reduce_parts(
    channel: Channel, data: Bytes, counts: Sequence[int], dtype: np.dtype[Any], how: ScaledOp
) -> Array:
    """Return this rank's part of the reduction; rank i's part has ``counts[i]`` bytes. On the channel's thread.

    Values are combined in rank order, so the result does not depend on the transport. Wire: one all-to-all of the
    values as they are, d (N-1)/N bytes per rank.
    """
    own = counts[channel.rank]
    received = channel.alltoall(data, counts, [own] * channel.size)
    parts = received.view(dtype).reshape(channel.size, own // dtype.itemsize)
    return combine(list(parts), how)


def reduce_alone(flat: Array, how: ScaledOp) -> None:
    """Replace ``flat`` by the result of :func:`reduce_all` in a world of one."""
    if how.scales:
        flat[:] = combine([flat], replace(how, op=ReduceOp.SUM) if how.op is ReduceOp.ADASUM else how)


def shares(rows: int, size: int) -> list[int]:
    """Return the rows of each rank: equally many, and one more for each of the first ``rows % size`` ranks."""
    return [rows // size + (place < rows % size) for place in range(size)]
