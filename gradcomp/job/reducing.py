"""Runs a user's reduction over a channel: by the transport's sum, by owners of parts, or in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.job.adasum import adasum
from gradcomp.job.arithmetic import added_by_transport, combine, finished, prescaled
from gradcomp.job.channel import Channel
from gradcomp.job.reduce_op import ReduceOp, ScaledOp

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def reduce_all(channel: Channel, flat: Array, how: ScaledOp, lengths: Sequence[int]) -> None:
    """Overwrite ``flat`` with its reduction over ranks, bit-identical on all. On the channel's thread.

    ``lengths`` are the element counts of the tensors that are stored one after another, which only Adasum tells apart.
    Sums of float32, float64 and int64 are the transport's own. Other values go to the owner of their part, who combines
    them in rank order and sends the result to all. Wire: 2 d (N-1)/N bytes per rank for d bytes of the dtype; Adasum d
    log2(N), for float16 and bfloat16 in float32.
    """
    if added_by_transport(flat.dtype, how.op):
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
    """Do among one rank what :func:`reduce_all` does."""
    if how.scales:
        flat[:] = combine([flat], replace(how, op=ReduceOp.SUM) if how.op is ReduceOp.ADASUM else how)


def shares(rows: int, size: int) -> list[int]:
    """Return the rows of each rank: equally many, and one more for each of the first ``rows % size`` ranks."""
    return [rows // size + (place < rows % size) for place in range(size)]
