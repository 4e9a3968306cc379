"""The CRC-32C of messages and the check value of a sample of parameters, in NumPy, which defines them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.reference_memory import memory_at
from gradcomp.kernels.segments import DTYPES, SEGMENT, Bytes, SegmentTable, check_array, check_elements

Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first
_LANES = 256


def crc32c(data: Bytes, value: int = 0) -> int:
    """Returns the CRC-32C of ``data`` appended to the bytes whose checksum is ``value``.

    With ~value as the state s, each byte b gives s <- (s >> 8) ^ T[(s ^ b) & 255]; the result is ~s. T[b] is b after
    eight divisions by the polynomial 0x1EDC6F41 of Castagnoli et al. 1993. ``crc32c(b, crc32c(a)) == crc32c(a + b)``.

    Args:
        data: uint8, one-dimensional and contiguous.
        value: 0 for the beginning.

    Raises:
        TypeError, ValueError: ``data`` is something else.
    """
    check_array("data", data, np.uint8)
    rows = len(data) // _LANES
    state = ~value & 0xFFFFFFFF
    if rows:
        # Lanes are divided in parallel, all but the first from state 0; then each state passes over the later lanes.
        lanes = data[: rows * _LANES].reshape(_LANES, rows)
        states = np.zeros(_LANES, dtype=np.uint32)
        states[0] = state
        for column in range(rows):
            states = _next(states, lanes[:, column])
        operator = _over_zeros(rows)
        state = 0
        for lane in states.tolist():
            state = _carried(operator, state) ^ lane
    for byte in data[rows * _LANES :].tolist():
        state = (state >> 8) ^ int(_TABLE[(state ^ byte) & 0xFF])
    return ~state & 0xFFFFFFFF


def sample(table: SegmentTable, values: Words, *, turn: int) -> None:
    """Writes to values[row] a check value of 1/256 of the elements at ``gradient``, and of at least 256 of them.

    A row's elements are cut into blocks of ``stride`` runs, see :func:`sample_of`. Of block k it takes the run number
    (641 (turn mod stride) + floor(stride h / 2^32)) mod stride, with h = k 0x9E3779B1 mod 2^32, so that ``stride``
    turns take each element once, and the sample does not follow the columns of matrices. The value is the sum of
    mix(bits, position) modulo 2^32 over the sample: over the 32-bit words of an element, or its 16 bits. mix is one to
    one in the bits, so that a change of one element changes the sum.

    Args:
        table: ``gradient``, ``length`` and ``dtype`` are read.
        values: uint32, one for each row.
        turn: below 2^32.

    Raises:
        TypeError, ValueError: an argument is something else.
    """
    check_array("table", table, SEGMENT)
    check_array("values", values, np.uint32, len(table), writable=True)
    check_elements(table)
    for row, segment in enumerate(table):
        length, dtype = int(segment["length"]), DTYPES[segment["dtype"]]
        elements = sampled_elements(length, turn)
        values[row] = value_of_sample(memory_at(segment["gradient"], length, dtype)[elements], elements)


def sampled_elements(length: int, turn: int) -> npt.NDArray[np.int64]:
    """Returns the elements of a row that are in the sample of :func:`sample`."""
    run, stride, count = (int(each) for each in sample_of(np.int64(length)))
    blocks = np.arange(count, dtype=np.uint64)
    shift = (blocks * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) * np.uint64(stride) >> np.uint64(32)
    runs = blocks * np.uint64(stride) + (np.uint64(turn % stride * 641) + shift) % np.uint64(stride)
    elements = (runs[:, None] * np.uint64(run) + np.arange(run, dtype=np.uint64)).reshape(-1).astype(np.int64)
    found: npt.NDArray[np.int64] = elements[elements < length]
    return found


def value_of_sample(taken: npt.NDArray[Any], elements: npt.NDArray[np.int64]) -> np.uint32:
    """Returns the check value of :func:`sample` for these elements; ``taken`` are their values."""
    words = max(1, taken.itemsize // 4)
    bits = taken.view(f"<u{min(taken.itemsize, 4)}").astype(np.uint32)
    at = (elements[:, None] * words + np.arange(words)).reshape(-1).astype(np.uint32)
    return np.uint32(_mixed(bits, at).sum(dtype=np.uint32))


def sample_of(lengths: Any) -> tuple[Any, Any, Any]:
    """Returns elements of a run, runs of a block, and the number of blocks, for rows of these lengths."""
    run = np.clip(lengths // 65536, 1, 16)
    stride = np.clip(lengths // 256, 1, 256)
    return run, stride, -(-lengths // (run * stride))


def _mixed(bits: Words, positions: Words) -> Words:
    x = bits ^ positions * np.uint32(0x9E3779B1)
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    mixed: Words = x ^ x >> np.uint32(16)
    return mixed


def _next(states: Words, data: Bytes | int) -> Words:
    following: Words = (states >> np.uint32(8)) ^ _TABLE[(states ^ data) & np.uint32(0xFF)]
    return following


def _over_zeros(count: int) -> Words:
    """Returns each state bit's image after ``count`` zero bytes; a state's image is the XOR of its bits' images."""
    bits: Words = np.uint32(1) << np.arange(32, dtype=np.uint32)
    for _ in range(count):
        bits = _next(bits, 0)
    return bits


def _carried(operator: Words, state: int) -> int:
    chosen = operator[[bit for bit in range(32) if state >> bit & 1]]
    return int(np.bitwise_xor.reduce(chosen)) if len(chosen) else 0


def _make_table() -> Words:
    states: Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        states = (states >> np.uint32(1)) ^ np.where(
            states & np.uint32(1), np.uint32(_POLYNOMIAL), np.uint32(0)
        )
    return states


_TABLE = _make_table()
