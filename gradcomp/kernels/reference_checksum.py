"""The checksum of messages, as NumPy defines it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.segments import Bytes, check_array

Words = npt.NDArray[np.uint32]

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first
_LANES = 256


def crc32c(data: Bytes, value: int = 0) -> int:
    """CRC-32C of the bytes whose checksum is ``value``, followed by ``data``.

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
        # Lanes are divided side by side, from state 0 but for the first; then each is carried over those behind it.
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


def _next(states: Words, data: Bytes | int) -> Words:
    following: Words = (states >> np.uint32(8)) ^ _TABLE[(states ^ data) & np.uint32(0xFF)]
    return following


def _over_zeros(count: int) -> Words:
    """What each bit of a state becomes behind ``count`` zero bytes; the state becomes the XOR of its bits' results."""
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
