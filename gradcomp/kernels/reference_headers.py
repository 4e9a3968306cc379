"""Headers of messages, written and checked in NumPy, which defines them; ``docs/wire-format.md`` has the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gradcomp.kernels.reference_checksum import Words, crc32c
from gradcomp.kernels.reference_memory import memory_at
from gradcomp.kernels.segments import Bytes, Sizes, check_array

FIXED = np.dtype(
    [
        ("magic", "<u2"),
        ("protocol", "u1"),
        ("round", "u1"),
        ("check", "<u4"),
        ("step", "<u4"),
        ("bucket", "<u2"),
        ("chunk", "<u2"),
        ("payload_bytes", "<u4"),
        ("layers", "<u2"),
        ("sender", "<u2"),
        # A receiver knows the values of all fields above and compares them.
        ("fingerprint", "<u4"),
        ("checksum", "<u4"),
    ]
)

#: Payloads and messages begin at multiples of this many bytes, because vector loads are fastest there.
ALIGNMENT = 16

_COMPARED_BYTES, _CHECKSUM_AT = 24, 28


def write_headers(
    fields: Bytes,
    messages: Sizes,
    lengths: Sizes,
    states: Bytes,
    payloads: Words,
    *,
    check: int,
    step: int,
    bucket: int,
    round_number: int,
    sender: int,
    fingerprint: int,
    checksums: bool,
) -> None:
    """Writes the headers of messages whose payloads are in place, and the checksums of these payloads.

    A header has ``FIXED``, the states, and zeros up to a multiple of 16 bytes. With ``checksums`` its checksum is
    crc32c(payload | header without its last four fixed bytes), where the payload ends with the message; else 0.

    Args:
        fields: ``FIXED`` for each message; the fields that are arguments here are not read.
        messages: the addresses of the messages.
        lengths: their bytes.
        states: the state bytes of the layers and of the rank.
        payloads: the checksum of each payload is written there; 0 without ``checksums``.
        check: field of all headers.
        step: field of all headers.
        bucket: field of all headers.
        round_number: field of all headers.
        sender: field of all headers.
        fingerprint: field of all headers.
        checksums: whether messages carry checksums.

    Raises:
        TypeError, ValueError: an argument is something else, or a message is shorter than its header.
    """
    check_array("states", states, np.uint8)
    check_array("payloads", payloads, np.uint32, len(messages), writable=True)
    for i, (row, message, begin) in enumerate(_messages(fields, messages, lengths, len(states))):
        row["check"], row["step"], row["bucket"], row["round"] = check, step, bucket, round_number
        row["sender"], row["fingerprint"], row["checksum"] = sender, fingerprint, 0
        message[: FIXED.itemsize] = np.frombuffer(row.tobytes(), np.uint8)
        message[FIXED.itemsize : begin] = 0
        message[FIXED.itemsize :][: len(states)] = states
        payloads[i] = 0
        if checksums:
            payloads[i], whole = checksums_of(message, begin)
            message[_CHECKSUM_AT : FIXED.itemsize] = np.array([whole], "<u4").view(np.uint8)


def read_headers(
    fields: Bytes,
    messages: Sizes,
    lengths: Sizes,
    known: Bytes,
    sent: Bytes,
    states: Bytes,
    fingerprints: Words,
    payloads: Words,
    ranks: Bytes,
    *,
    check: int,
    step: int,
    bucket: int,
    round_number: int,
    checksums: bool,
) -> int:
    """Checks the headers of messages, and adds their state bytes to ``states``.

    Returns -1, or the number of the first message that is refused: a field differs; with ``checksums`` the checksum
    does; a state has a bit that ``known`` lacks; or it lacks a bit of ``sent``. Outputs are undefined after that.

    Args:
        fields: ``FIXED`` for each message, of which ``sender`` is compared too.
        messages: the addresses of the messages.
        lengths: their bytes.
        known: the bits that states may have.
        sent: the bits that states must have; empty if there are none.
        states: the bits of all messages are added to it.
        fingerprints: the fingerprint of each message is written there.
        payloads: the checksum of each payload is written there; 0 without ``checksums``.
        ranks: the last state byte of each message is written there.
        check: the expected field of all headers.
        step: the expected field of all headers.
        bucket: the expected field of all headers.
        round_number: the expected field of all headers.
        checksums: whether messages carry checksums.

    Raises:
        TypeError, ValueError: an argument is something else, or a message is shorter than its header.
    """
    count = len(messages)
    check_array("states", states, np.uint8, writable=True)
    check_array("known", known, np.uint8, len(states))
    check_array("sent", sent, np.uint8)
    if len(sent) not in (0, len(states)):
        raise ValueError(f"sent has {len(sent)} items for {len(states)} states")
    check_array("fingerprints", fingerprints, np.uint32, count, writable=True)
    check_array("payloads", payloads, np.uint32, count, writable=True)
    check_array("ranks", ranks, np.uint8, count, writable=True)
    for i, (row, message, begin) in enumerate(_messages(fields, messages, lengths, len(states))):
        row["check"], row["step"], row["bucket"], row["round"] = check, step, bucket, round_number
        fingerprints[i], checksum = message[_COMPARED_BYTES : FIXED.itemsize].view("<u4").tolist()
        payloads[i], whole = checksums_of(message, begin) if checksums else (0, checksum)
        found = message[FIXED.itemsize :][: len(states)]
        if (
            row.tobytes()[:_COMPARED_BYTES] != message[:_COMPARED_BYTES].tobytes()
            or checksum != whole
            or np.any(found & ~known)
            or np.any(sent & ~found[: len(sent)])
        ):
            return i
        states |= found
        ranks[i] = found[-1]
    return -1


def _messages(
    fields: Bytes, messages: Sizes, lengths: Sizes, states: int
) -> Iterator[tuple[Any, Bytes, int]]:
    """Yields, by message, a copy of its fixed fields, its bytes and the begin of its payload."""
    count = len(messages)
    check_array("messages", messages, np.int64)
    check_array("lengths", lengths, np.int64, count)
    check_array("fields", fields, np.uint8, count * FIXED.itemsize)
    if states == 0:
        raise ValueError("a header has the state of its rank at least")
    begin = -(-(FIXED.itemsize + states) // ALIGNMENT) * ALIGNMENT
    if count and int(lengths.min()) < begin:
        raise ValueError(f"a message of {lengths.min()} bytes is shorter than its header of {begin}")
    rows = fields.copy().view(FIXED)
    for row, address, length in zip(rows, messages.tolist(), lengths.tolist(), strict=True):
        yield row, memory_at(address, length, np.dtype(np.uint8)), begin


def checksums_of(message: Bytes, begin: int) -> tuple[int, int]:
    """Returns the checksums of the payload, which begins at byte ``begin``, and of the whole message."""
    payload = crc32c(message[begin:])
    return payload, crc32c(message[FIXED.itemsize : begin], crc32c(message[:_CHECKSUM_AT], payload))
