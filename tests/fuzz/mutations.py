"""How a message is changed on its way: by bytes, whatever they mean."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

Bytes = np.ndarray

#: Numbers that are at the edge of something, as 4 bytes: whole numbers and floats.
_EDGES = [
    np.array([value], "<u4").view(np.uint8)
    for value in (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
] + [
    np.array([value], "<f4").view(np.uint8)
    for value in (np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -0.0, 65504.0)
]  # fmt: skip


def flip(r: random.Random, message: Bytes) -> Bytes:
    """One to eight bits."""
    for _ in range(r.randint(1, 8)):
        message[r.randrange(len(message))] ^= 1 << r.randrange(8)
    return message


def overwrite(r: random.Random, message: Bytes) -> Bytes:
    """A run of random bytes."""
    at = r.randrange(len(message))
    noise = np.frombuffer(r.randbytes(r.randint(1, 40)), np.uint8)[: len(message) - at]
    message[at : at + len(noise)] = noise
    return message


def edge(r: random.Random, message: Bytes) -> Bytes:
    """A number at the edge of something, at a multiple of four or anywhere."""
    at = r.randrange(len(message))
    at -= at % 4 if r.random() < 0.7 else 0
    value = r.choice(_EDGES)[: len(message) - at]
    message[at : at + len(value)] = value
    return message


def fill(r: random.Random, message: Bytes) -> Bytes:
    """All bytes equal, or all random."""
    if r.random() < 0.5:
        message[:] = r.choice((0x00, 0xFF, 0x7F, 0x80))
    else:
        message[:] = np.frombuffer(r.randbytes(len(message)), np.uint8)
    return message


def move(r: random.Random, message: Bytes) -> Bytes:
    """A run of bytes to another place."""
    length = r.randint(1, len(message))
    start, to = r.randint(0, len(message) - length), r.randint(0, len(message) - length)
    message[to : to + length] = message[start : start + length].copy()
    return message


def shorten(r: random.Random, message: Bytes) -> Bytes:
    """Cut off its end."""
    return message[: r.randrange(len(message))]


def lengthen(r: random.Random, message: Bytes) -> Bytes:
    """More bytes behind it."""
    return np.concatenate([message, np.frombuffer(r.randbytes(r.randint(1, 64)), np.uint8)])


#: Those that keep the length, and those that do not.
SAME_LENGTH: Sequence[Callable[[random.Random, Bytes], Bytes]] = (flip, overwrite, edge, fill, move)
ANY_LENGTH = (*SAME_LENGTH, shorten, lengthen)


def mutate(r: random.Random, message: Bytes, *, same_length: bool = False) -> Bytes:
    """The message after one to three changes; an empty one stays as it is, or grows."""
    message = message.copy()
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        change = r.choice(SAME_LENGTH if same_length else ANY_LENGTH)
        if len(message) or change is lengthen:
            message = change(r, message)
    return message
