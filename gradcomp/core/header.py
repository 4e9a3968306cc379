"""What travels with every bucket's first round: a check value and the votes of the step protocol.

Two forms of the same fields. Byte messages start with a :class:`ByteHeader` per chunk; sums carry a
:class:`CountHeader`, float32 counts behind their elements. ``docs/wire-format.md`` has the layout.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import PlanMismatchError, WireFormatError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PROTOCOL = 1
MAGIC = 0x6347

#: State of a layer on one rank in one step: bits of one byte.
PRESENT, NONFINITE, SPARSE = 1, 2, 4

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
        (
            "ready",
            "<u2",
        ),  # the only field that may differ between ranks; last, so that the rest compares as one
    ]
)
_COMPARED_BYTES = FIXED.itemsize - 2


class Ballot:
    """The votes on one bucket: what all ranks together know of its layers.

    ``present``, ``nonfinite``, ``sparse``: one boolean per layer, true if any rank said so. ``ready``: ranks that hold
    the next plan.
    """

    def __init__(self, layers: int) -> None:
        self.states: Bytes = np.zeros(layers, dtype=np.uint8)
        self.ready = 0

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Layers that some rank had a dense gradient for."""
        return (self.states & PRESENT).astype(np.bool_)

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Layers that some rank found a non-finite value in."""
        return (self.states & NONFINITE).astype(np.bool_)


@dataclass(frozen=True)
class Stamp:
    """Where we are: equal on all ranks at the same collective, or something is badly wrong."""

    check: int
    step: int
    bucket: int


class ByteHeader:
    """Headers of ``len(payload_bytes)`` chunks over ``layers`` layers: 24 bytes and one state byte per layer."""

    @staticmethod
    def size(layers: int) -> int:
        """Bytes of one header."""
        return FIXED.itemsize + layers

    def __init__(self, layers: int, payload_bytes: npt.NDArray[np.int64]) -> None:
        self.nbytes = self.size(layers)
        self._fixed = np.zeros(len(payload_bytes), dtype=FIXED)
        self._fixed["magic"] = MAGIC
        self._fixed["protocol"] = PROTOCOL
        self._fixed["chunk"] = np.arange(len(payload_bytes))
        self._fixed["payload_bytes"] = payload_bytes
        self._fixed["layers"] = layers

    def stamp(self, stamp: Stamp, round_number: int, ready: int) -> None:
        """Set the fields that change with every message."""
        self._fixed["check"] = stamp.check
        self._fixed["step"] = stamp.step & 0xFFFFFFFF
        self._fixed["bucket"] = stamp.bucket
        self._fixed["round"] = round_number & 0xFF
        self._fixed["ready"] = ready

    def write(self, target: Bytes, chunk: int, states: Bytes) -> None:
        """Put the header of ``chunk`` at the start of ``target``."""
        target[: FIXED.itemsize] = self._fixed[chunk : chunk + 1].view(np.uint8)
        target[FIXED.itemsize : self.nbytes] = states

    def read(self, source: Bytes, chunk: int, sender: int, voters: int = 1) -> tuple[int, Bytes]:
        """Check the header of ``chunk`` from ``sender``; return its ready votes and its layer states.

        ``voters``: the number of ranks that the sender speaks for, itself included.
        """
        if len(source) < self.nbytes:
            raise WireFormatError(f"rank {sender} sent {len(source)} bytes, a header has {self.nbytes}")
        expected = self._fixed[chunk : chunk + 1].view(np.uint8)[:_COMPARED_BYTES]
        if not np.array_equal(source[:_COMPARED_BYTES], expected):
            self._explain(source, chunk, sender)
        states = source[FIXED.itemsize : self.nbytes]
        if states.size and int(states.max()) > (PRESENT | NONFINITE | SPARSE):
            raise WireFormatError(f"rank {sender} sent an unknown layer state {int(states.max())}")
        ready = int(source[_COMPARED_BYTES]) | int(source[_COMPARED_BYTES + 1]) << 8
        if ready > voters:
            raise WireFormatError(f"rank {sender} sent {ready} votes for {voters} ranks")
        return ready, states

    def _explain(self, source: Bytes, chunk: int, sender: int) -> None:
        got = source[: FIXED.itemsize].copy().view(FIXED)[0]
        want = self._fixed[chunk]
        names = FIXED.names or ()
        wrong = [f"{n} {got[n]} instead of {want[n]}" for n in names if n != "ready" and got[n] != want[n]]
        text = f"rank {sender} sent a header with {', '.join(wrong)}"
        if got["magic"] == MAGIC and (got["protocol"] != PROTOCOL or got["check"] != want["check"]):
            raise PlanMismatchError(text)
        raise WireFormatError(text)


class CountHeader:
    """The same fields as float32 counts that survive a sum over up to 65,536 ranks.

    The check value travels as 8 nibbles and their squares: sum(v) = N v0 and sum(v^2) = N v0^2 hold together only if
    every rank's v is v0.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.length = 17 + 3 * layers

    def write(self, target: npt.NDArray[np.floating], stamp: Stamp, ready: int, states: Bytes) -> None:
        """Fill ``target`` (``length`` elements) with this rank's counts."""
        nibbles = _nibbles(stamp)
        target[0:8] = nibbles
        target[8:16] = nibbles * nibbles
        target[16] = ready
        counts = target[17 : self.length].reshape(3, self.layers)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            counts[row] = (states & bit) != 0

    def read(self, source: npt.NDArray[np.floating], stamp: Stamp, world: int, ballot: Ballot) -> None:
        """Check the summed counts and add the votes to ``ballot``."""
        nibbles = _nibbles(stamp)
        if not (
            np.array_equal(source[0:8], world * nibbles)
            and np.array_equal(source[8:16], world * nibbles * nibbles)
        ):
            raise PlanMismatchError(
                f"step {stamp.step}, bucket {stamp.bucket}: the ranks are not at the same step, bucket and plan"
            )
        counts = source[16 : self.length]
        if not (np.all(counts >= 0) and np.all(counts <= world)):
            raise WireFormatError(f"step {stamp.step}, bucket {stamp.bucket}: counts outside 0..{world}")
        if not np.array_equal(counts, np.floor(counts)):
            raise WireFormatError(f"step {stamp.step}, bucket {stamp.bucket}: counts that are not whole")
        ballot.ready = int(counts[0])
        votes = counts[1:].reshape(3, self.layers)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            ballot.states |= np.where(votes[row] > 0, np.uint8(bit), np.uint8(0))


def _nibbles(stamp: Stamp) -> Floats:
    text = f"{PROTOCOL},{stamp.check},{stamp.step},{stamp.bucket}"
    value = zlib.crc32(text.encode())
    return np.array([(value >> shift) & 0xF for shift in range(0, 32, 4)], dtype=np.float32)
