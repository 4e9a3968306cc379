"""What travels with every bucket's first round: a check value and the votes of the step protocol.

Two forms of the same fields. Byte messages start with a :class:`ByteHeader` per chunk; sums carry a
:class:`CountHeader`, float32 counts behind their elements. ``docs/wire-format.md`` has the layout.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import PlanMismatchError, WireFormatError
from gradcomp.kernels import crc32c

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PROTOCOL = 2
MAGIC = 0x6347

#: State of a layer on one rank in one step: bits of one byte.
PRESENT, NONFINITE, SPARSE = 1, 2, 4

#: What became of a rank's last exchange, as bits of one more byte behind the states of the layers: the optimizer
#: stepped on the means; they were thrown away; they stay in the gradients, to which more is added. 0: there was none.
APPLIED, DISCARDED, KEPT = 1, 2, 4

#: Payloads, and messages, begin at multiples of this many bytes, as loads of vectors want.
ALIGNMENT = 16

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
        ("zero", "<u2"),
        # Up to here all ranks expect the same bytes.
        ("ready", "<u2"),
        ("zero_too", "<u2"),
        ("checksum", "<u4"),
    ]
)
_COMPARED_BYTES = 24
_CHECKSUM_AT = 28


Numbers = TypeVar("Numbers", int, npt.NDArray[np.int64], npt.NDArray[np.float64])


def padded(nbytes: Numbers) -> Numbers:
    """Up to the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BucketFlags:
    """The votes on one bucket: what all ranks together know of its layers.

    ``states``: a byte per layer, and one for the outcomes of the last exchange. ``present``, ``nonfinite``: one boolean
    per layer, true if any rank said so. ``ready``: ranks that hold the next plan.
    """

    def __init__(self, layers: int) -> None:
        self.states: Bytes = np.zeros(layers + 1, dtype=np.uint8)
        self.ready = 0

    @property
    def outcomes(self) -> int:
        """What became of the last exchange: the union of all ranks' bits."""
        return int(self.states[-1])

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Layers that some rank had a dense gradient for."""
        return (self.states[:-1] & PRESENT).astype(np.bool_)

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Layers that some rank found a non-finite value in."""
        return (self.states[:-1] & NONFINITE).astype(np.bool_)


def check_covers(result: Bytes, own: Bytes, sender: object) -> None:
    """WireFormatError unless a result has all states that this rank sent: else its gradient would stay as it is."""
    if np.any(own & ~result):
        layers = np.flatnonzero(own & ~result).tolist()
        raise WireFormatError(
            f"the result from {sender} lacks states that this rank sent, of entries {layers[:5]}"
        )


@dataclass(frozen=True)
class HeaderId:
    """Where we are: equal on all ranks at the same collective, or something is badly wrong.

    ``checksums``: whether messages carry checksums; a setting on which all ranks agree.
    """

    check: int
    step: int
    bucket: int
    checksums: bool = False


class ByteHeader:
    """Headers of ``len(payload_bytes)`` messages about ``layers`` layers.

    32 bytes, a state byte per layer and one for the outcome of the last exchange, zeros up to a multiple of 16. The
    payload follows, and bytes without meaning up to a multiple of 16: ``message_bytes`` says how long each message is.
    The checksum is the CRC-32C of the whole message without the checksum's own four bytes, or 0 where there are none.
    """

    @staticmethod
    def size(layers: int) -> int:
        """Bytes of one header."""
        return padded(FIXED.itemsize + layers + 1)

    def __init__(self, layers: int, payload_bytes: npt.NDArray[np.int64]) -> None:
        self.nbytes = self.size(layers)
        self._states = slice(FIXED.itemsize, FIXED.itemsize + layers + 1)
        self.message_bytes: list[int] = (self.nbytes + padded(payload_bytes)).tolist()
        self._checksums = False
        self._fixed = np.zeros(len(payload_bytes), dtype=FIXED)
        self._fixed["magic"] = MAGIC
        self._fixed["protocol"] = PROTOCOL
        self._fixed["chunk"] = np.arange(len(payload_bytes))
        self._fixed["payload_bytes"] = payload_bytes
        self._fixed["layers"] = layers
        self._rows = self._fixed.view(np.uint8).reshape(len(self._fixed), FIXED.itemsize)

    def identify(self, header_id: HeaderId, round_number: int, ready: int) -> None:
        """Set the fields that change with every message."""
        self._fixed["check"] = header_id.check
        self._fixed["step"] = header_id.step & 0xFFFFFFFF
        self._fixed["bucket"] = header_id.bucket
        self._fixed["round"] = round_number & 0xFF
        self._fixed["ready"] = ready
        self._checksums = header_id.checksums

    def write(self, target: Bytes, chunk: int, states: Bytes) -> None:
        """Put the header of ``chunk`` at the start of ``target``, where its payload is already."""
        target = target.view(np.ndarray)  # of a device mirror the header is the host's
        target[: FIXED.itemsize] = self._rows[chunk]
        target[self._states] = states
        target[self._states.stop : self.nbytes] = 0
        if self._checksums:
            length = self.message_bytes[chunk]
            checksum = _checksum(target[:length])
            target[_CHECKSUM_AT : FIXED.itemsize] = np.array([checksum], dtype="<u4").view(np.uint8)

    def read(self, source: Bytes, chunk: int, sender: int, voters: int = 1) -> tuple[int, Bytes]:
        """Check the message ``chunk`` from ``sender``; return its ready votes and its states.

        ``voters``: the number of ranks that the sender speaks for, itself included.
        """
        length = self.message_bytes[chunk]
        if len(source) < length:
            raise WireFormatError(f"rank {sender} sent {len(source)} bytes, the message has {length}")
        source = source.view(np.ndarray)  # of a device mirror the header is the host's
        if source[:_COMPARED_BYTES].tobytes() != self._rows[chunk, :_COMPARED_BYTES].tobytes():
            self._explain(source, chunk, sender)
        if self._checksums:
            stated = int(source[_CHECKSUM_AT : FIXED.itemsize].copy().view("<u4")[0])
            if stated != _checksum(source[:length]):
                raise WireFormatError(
                    f"a message of {length} bytes from rank {sender} does not match its checksum: it was damaged on "
                    "its way"
                )
        states = source[self._states]
        if np.count_nonzero(states > (PRESENT | NONFINITE | SPARSE)):
            raise WireFormatError(f"rank {sender} sent an unknown layer state {int(states.max())}")
        ready = int(source[_COMPARED_BYTES]) | int(source[_COMPARED_BYTES + 1]) << 8
        if ready > voters:
            raise WireFormatError(f"rank {sender} sent {ready} votes for {voters} ranks")
        return ready, states

    def _explain(self, source: Bytes, chunk: int, sender: int) -> None:
        got = source[: FIXED.itemsize].copy().view(FIXED)[0]
        want = self._fixed[chunk]
        names = FIXED.names or ()
        compared = names[: names.index("ready")]
        wrong = [f"{n} {got[n]} instead of {want[n]}" for n in compared if got[n] != want[n]]
        text = f"rank {sender} sent a header with {', '.join(wrong)}"
        if got["magic"] == MAGIC and (got["protocol"] != PROTOCOL or got["check"] != want["check"]):
            raise PlanMismatchError(text)
        raise WireFormatError(text)


class CountHeader:
    """The same fields but the checksum, as float32 counts that survive a sum over up to 65,536 ranks.

    The check value travels as 8 nibbles and their squares: sum(v) = N v0 and sum(v^2) = N v0^2 hold together only if
    every rank's v is v0.
    """

    def __init__(self, layers: int) -> None:
        self._rows = layers + 1  # the outcome of the last exchange has one, too
        self.length = 17 + 3 * self._rows

    def write(self, target: npt.NDArray[np.floating], header_id: HeaderId, ready: int, states: Bytes) -> None:
        """Fill ``target`` (``length`` elements) with this rank's counts."""
        nibbles = _nibbles(header_id)
        target[0:8] = nibbles
        target[8:16] = nibbles * nibbles
        target[16] = ready
        counts = target[17 : self.length].reshape(3, self._rows)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            counts[row] = (states & bit) != 0

    def read(
        self, source: npt.NDArray[np.floating], header_id: HeaderId, world: int, bucket_flags: BucketFlags
    ) -> None:
        """Check the summed counts and add the votes to ``bucket_flags``."""
        nibbles = _nibbles(header_id)
        if not (
            np.array_equal(source[0:8], world * nibbles)
            and np.array_equal(source[8:16], world * nibbles * nibbles)
        ):
            raise PlanMismatchError(
                f"step {header_id.step}, bucket {header_id.bucket}: the ranks are not at the same step, bucket and plan"
            )
        counts = source[16 : self.length]
        if not (np.all(counts >= 0) and np.all(counts <= world)):
            raise WireFormatError(
                f"step {header_id.step}, bucket {header_id.bucket}: counts outside 0..{world}"
            )
        if not np.array_equal(counts, np.floor(counts)):
            raise WireFormatError(
                f"step {header_id.step}, bucket {header_id.bucket}: counts that are not whole"
            )
        bucket_flags.ready = int(counts[0])
        votes = counts[1:].reshape(3, self._rows)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            bucket_flags.states |= np.where(votes[row] > 0, np.uint8(bit), np.uint8(0))


def _nibbles(header_id: HeaderId) -> Floats:
    text = f"{PROTOCOL},{header_id.check},{header_id.step},{header_id.bucket}"
    value = zlib.crc32(text.encode())
    return np.array([(value >> shift) & 0xF for shift in range(0, 32, 4)], dtype=np.float32)


def _checksum(message: Bytes) -> int:
    return crc32c(message[FIXED.itemsize :], crc32c(message[:_CHECKSUM_AT]))
