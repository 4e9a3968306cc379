"""Averages row-sparse gradients: gathers rows, and adds them on every rank in rank order."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import StateError, WireFormatError
from gradcomp.engine import Exchanger

Array = npt.NDArray[Any]

#: Row numbers, int64, ascending and distinct, and the values of these rows.
Rows = tuple[npt.NDArray[np.int64], Array]


def mean_of_rows(
    exchanger: Exchanger,
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    rows: tuple[Array, Array] | None,
    divisor: float,
) -> Rows | None:
    """Return the sum over ranks of a row-sparse gradient, divided by ``divisor``; None if no rank has one.

    ``shape`` and ``dtype`` are those of the whole layer. ``rows`` has this rank's row numbers, in any order and with
    repetitions, and their values; None without a gradient.

    Repeated rows are added up on each rank first. The ranks send their rows, or the whole layer if that is less. Values
    travel and are added in float32, those of float64 layers in float64. Collective, blocking. Rounds: 2 of a few bytes
    (the numbers of rows), then 2 for rows or 1 for the whole layer. Wire per rank: (N-1) (8 + 4 row elements) bytes per
    row, or 2 d (N-1)/N.
    """
    wire = np.dtype("<f8" if dtype == np.float64 else "<f4")
    own = None if rows is None else _coalesce(name, shape, rows, wire)
    report = json.dumps([0 if own is None else len(own[0]), own is not None])
    counts = [_count(part) for part in exchanger.allgather_bytes(report.encode())]
    if not any(has for _, has in counts):
        return None
    row_elements = math.prod(shape[1:])
    gathered_bytes = sum(n for n, _ in counts) * (8 + wire.itemsize * row_elements)
    add = _dense if gathered_bytes > 2 * wire.itemsize * math.prod(shape) else _gathered
    index, total = add(exchanger, shape, own, wire)
    return index, (total / wire.type(divisor)).astype(dtype, copy=False)


def _coalesce(name: str, shape: tuple[int, ...], rows: tuple[Array, Array], wire: np.dtype[Any]) -> Rows:
    index = np.asarray(rows[0]).astype(np.int64).reshape(-1)
    values = np.asarray(rows[1]).astype(wire).reshape(len(index), *shape[1:])
    if len(index) and (index.min() < 0 or index.max() >= shape[0]):
        raise StateError(f"layer {name!r} has a sparse gradient with row numbers outside of the layer")
    order = np.argsort(index, kind="stable")
    unique, begins = np.unique(index[order], return_index=True)
    if len(unique) == len(index):
        return unique, values[order]
    return unique, np.add.reduceat(values[order], begins, axis=0)


def _count(part: bytes) -> tuple[int, bool]:
    try:
        rows, has = json.loads(part)
        return int(rows), bool(has)
    except (ValueError, TypeError) as error:
        raise WireFormatError(f"a count of sparse rows is malformed: {error}") from error


def _dense(exchanger: Exchanger, shape: tuple[int, ...], own: Rows | None, wire: np.dtype[Any]) -> Rows:
    total = np.zeros(shape, dtype=wire)
    if own is not None:
        total[own[0]] = own[1]
    exchanger.allreduce(total.reshape(-1))
    index = np.flatnonzero(total.any(axis=tuple(range(1, total.ndim))))
    return index, total[index]


def _gathered(exchanger: Exchanger, shape: tuple[int, ...], own: Rows | None, wire: np.dtype[Any]) -> Rows:
    payload = b"" if own is None else own[0].astype("<i8").tobytes() + own[1].tobytes()
    row_bytes = wire.itemsize * math.prod(shape[1:])
    parts: list[Rows] = []
    for rank, part in enumerate(exchanger.allgather_bytes(payload)):
        count, rest = divmod(len(part), 8 + row_bytes)
        index = np.frombuffer(part, dtype="<i8", count=count).astype(np.int64)
        if rest or (count and (index[0] < 0 or index[-1] >= shape[0] or (np.diff(index) <= 0).any())):
            raise WireFormatError(f"rank {rank} sent sparse rows outside the layer, or out of order")
        values = np.frombuffer(part, dtype=wire, offset=8 * count).reshape(count, *shape[1:])
        parts.append((index, values))
    union = np.unique(np.concatenate([index for index, _ in parts]))
    total = np.zeros((len(union), *shape[1:]), dtype=wire)
    for index, values in parts:  # rank order gives every rank the same bits
        total[np.searchsorted(union, index)] += values
    return union, total
