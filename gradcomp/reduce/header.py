"""What travels before every payload: a check value, and what the sender knows of the layers and the ranks.

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

PROTOCOL = 4
MAGIC = 0x6347

#: State of a layer on one rank in one step: bits of one byte.
PRESENT, NONFINITE, SPARSE = 1, 2, 4

#: What became of a rank's last exchange, as bits of one more byte behind the states of the layers: the optimizer
#: stepped on the means; they were thrown away; they stay in the gradients, to which more is added. 0: there was none.
APPLIED, DISCARDED, KEPT = 1, 2, 4

#: Further bits of that byte, of ranks that train: this one holds the next plan; it does not.
READY, WAITING = 8, 16

#: In messages that leave before the ranks have compared what they run between steps: this rank runs something else, so
#: no rank may use the message; its inputs are not those of the last run.
DECLINED, CHANGED = 32, 64

_OF_A_LAYER = PRESENT | NONFINITE | SPARSE
_OF_RANKS = APPLIED | DISCARDED | KEPT | READY | WAITING

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
        ("zero_too", "<u4"),
        # Up to here all ranks expect the same bytes.
        ("checksum", "<u4"),
    ]
)
_COMPARED_BYTES = _CHECKSUM_AT = 28


Numbers = TypeVar("Numbers", int, npt.NDArray[np.int64], npt.NDArray[np.float64])


def padded(nbytes: Numbers) -> Numbers:
    """Up to the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class BucketFlags:
    """What a rank knows so far of a bucket on all ranks: at the end of the exchange, all know the same.

    ``states``: a byte per layer, and one for the ranks themselves; bits are only ever added. ``present``,
    ``nonfinite``: one boolean per layer, true if any rank said so. ``ready``: whether all that train hold the next
    plan.
    """

    def __init__(self, states: Bytes) -> None:
        self.states = states

    @property
    def outcomes(self) -> int:
        """What became of the last exchange: the union of all ranks' bits."""
        return int(self.states[-1]) & (APPLIED | DISCARDED | KEPT)

    @property
    def ready(self) -> bool:
        """Whether all ranks that train hold the next plan."""
        return int(self.states[-1]) & (READY | WAITING) == READY

    @property
    def declined(self) -> bool:
        """Whether some rank runs something else."""
        return bool(self.states[-1] & DECLINED)

    @property
    def changed(self) -> bool:
        """Whether some rank has other inputs than in the last run."""
        return bool(self.states[-1] & CHANGED)

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

    32 bytes, a state byte per layer and one for the ranks themselves, zeros up to a multiple of 16. The
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
        self._known = np.array([_OF_A_LAYER] * layers + [_OF_RANKS], dtype=np.uint8)
        self._fixed = np.zeros(len(payload_bytes), dtype=FIXED)
        self._fixed["magic"] = MAGIC
        self._fixed["protocol"] = PROTOCOL
        self._fixed["chunk"] = np.arange(len(payload_bytes))
        self._fixed["payload_bytes"] = payload_bytes
        self._fixed["layers"] = layers
        self._rows = self._fixed.view(np.uint8).reshape(len(self._fixed), FIXED.itemsize)

    def allow(self, bits: int) -> None:
        """Take so many further bits of the last state, and no others."""
        self._known[-1] = _OF_RANKS | bits

    def identify(self, header_id: HeaderId, round_number: int) -> None:
        """Set the fields that change with every message."""
        self._fixed["check"] = header_id.check
        self._fixed["step"] = header_id.step & 0xFFFFFFFF
        self._fixed["bucket"] = header_id.bucket
        self._fixed["round"] = round_number & 0xFF
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

    def read(self, source: Bytes, chunk: int, sender: int) -> Bytes:
        """Check the message ``chunk`` from ``sender``; return its states."""
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
        unknown = states > self._known
        if np.count_nonzero(unknown):
            raise WireFormatError(f"rank {sender} sent an unknown state {states[unknown][0]}")
        return states

    def _explain(self, source: Bytes, chunk: int, sender: int) -> None:
        got = source[: FIXED.itemsize].copy().view(FIXED)[0]
        want = self._fixed[chunk]
        names = FIXED.names or ()
        compared = names[: names.index("checksum")]
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
        self._rows = layers + 1  # the ranks themselves have one, too
        self.length = 18 + 3 * self._rows

    def write(self, target: npt.NDArray[np.floating], header_id: HeaderId, states: Bytes) -> None:
        """Fill ``target`` (``length`` elements) with this rank's counts."""
        nibbles = _nibbles(header_id)
        target[0:8] = nibbles
        target[8:16] = nibbles * nibbles
        target[16] = (states[-1] & READY) != 0
        target[17] = (states[-1] & WAITING) != 0
        counts = target[18 : self.length].reshape(3, self._rows)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            counts[row] = (states & bit) != 0

    def read(self, source: npt.NDArray[np.floating], header_id: HeaderId, world: int) -> Bytes:
        """Check the summed counts; return the states."""
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
        rows = counts[2:].reshape(3, self._rows) > 0
        states: Bytes = (
            rows[0] * np.uint8(PRESENT) | rows[1] * np.uint8(NONFINITE) | rows[2] * np.uint8(SPARSE)
        )
        states[-1] |= READY * int(counts[0] > 0) | WAITING * int(counts[1] > 0)
        return states


def _nibbles(header_id: HeaderId) -> Floats:
    text = f"{PROTOCOL},{header_id.check},{header_id.step},{header_id.bucket}"
    value = zlib.crc32(text.encode())
    return np.array([(value >> shift) & 0xF for shift in range(0, 32, 4)], dtype=np.float32)


def _checksum(message: Bytes) -> int:
    return crc32c(message[FIXED.itemsize :], crc32c(message[:_CHECKSUM_AT]))
