"""A header with a check value and the flags of layers and ranks goes with every payload.

It has two forms with the same fields: messages of bytes start with a :class:`ByteHeader` per chunk; sums carry a
:class:`CountHeader`, which is a run of counts after their elements. ``docs/wire-format.md`` has the layout.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import PlanMismatchError, WireFormatError
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.reference_headers import ALIGNMENT, FIXED, checksums_of
from gradcomp.transport.base import Bytes

PROTOCOL = 6
MAGIC = 0x6347

#: Bits of a layer's state byte, on one rank in one step. PRESENT: the rank has a dense gradient for the layer.
#: NONFINITE: a value of it is not finite. SPARSE: the rank has a sparse gradient.
PRESENT, NONFINITE, SPARSE = 1, 2, 4

#: Bits of the rank's state, a byte after the states of the layers. Three give the outcome of the means of the last
#: exchange: the optimizer stepped on them; they were discarded; they stay in the gradients, to which new gradients are
#: added. None of the three is set if there was no exchange.
APPLIED, DISCARDED, KEPT = 1, 2, 4

#: Bits of the same byte. WAITING, in messages of a step: the rank does not hold the next plan yet. PREEMPTED: the rank
#: was told that it will be stopped, see :mod:`gradcomp.exchange.preemption`.
WAITING, PREEMPTED = 8, 16

#: Bits of the same byte in messages of a step. LATE: on this rank ``step()`` ends the exchange, because none of its
#: gradients has. EDITED: in the last exchange another rank was late, and this one changed its means before ``step()``.
#: DIFFERENT: the fingerprints of two ranks differ.
LATE, EDITED, DIFFERENT = 32, 64, 128

#: Meanings of LATE and EDITED in messages of requests between steps that leave before the ranks have compared what
#: they run. DECLINED: this rank runs something else, so no rank may use the messages of this round. CHANGED: its inputs
#: are not those of the last run.
DECLINED, CHANGED = 32, 64

_OF_A_LAYER = PRESENT | NONFINITE | SPARSE
_OUTCOMES = APPLIED | DISCARDED | KEPT
_OF_STEPS = _OUTCOMES | WAITING | PREEMPTED | LATE | EDITED | DIFFERENT
_OF_REQUESTS = _OUTCOMES | WAITING | PREEMPTED

_NOTHING = np.zeros(0, dtype=np.uint8)


Numbers = TypeVar("Numbers", int, npt.NDArray[np.int64], npt.NDArray[np.float64])


def padded(nbytes: Numbers) -> Numbers:
    """Round up to the next multiple of :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False)
class BucketFlags:
    """Collects the flags of an exchange bucket from all ranks; after the exchange all ranks have the same flags.

    ``states`` has a byte per layer and one for the ranks; bits are only ever added. ``rank`` is this rank.
    ``fingerprint`` has 32 bits that should be equal on all ranks. It is 0 on a rank that has nothing to compare; that
    rank takes over and forwards the first fingerprint that it receives. ``results`` has the checksums of the payloads
    that all ranks decode.
    """

    states: Bytes
    rank: int = 0
    fingerprint: int = 0
    results: set[int] = field(default_factory=set)

    def compare(self, fingerprint: int) -> None:
        """Set DIFFERENT if another rank's fingerprint is not that of this one."""
        if not self.fingerprint:
            self.fingerprint = fingerprint
        elif fingerprint and fingerprint != self.fingerprint:
            self.states[-1] |= DIFFERENT

    @property
    def checksum(self) -> int:
        """Return a CRC-32 of the sorted ``results``; ranks with the same results have the same value."""
        return zlib.crc32(np.array(sorted(self.results), dtype="<u4").tobytes())

    @property
    def outcomes(self) -> int:
        """Return the union of all ranks' bits that say what became of the last exchange."""
        return int(self.states[-1]) & _OUTCOMES

    @property
    def notices(self) -> int:
        """Return those of LATE, EDITED, DIFFERENT and PREEMPTED that some rank has set."""
        return int(self.states[-1]) & (LATE | EDITED | DIFFERENT | PREEMPTED)

    @property
    def ready(self) -> bool:
        """Return true if all ranks hold the next plan."""
        return not int(self.states[-1]) & WAITING

    @property
    def declined(self) -> bool:
        """Return true if some rank has declined, because it runs something else."""
        return bool(self.states[-1] & DECLINED)

    @property
    def changed(self) -> bool:
        """Return true if some rank has other inputs than in the last run."""
        return bool(self.states[-1] & CHANGED)

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Return a boolean per layer: some rank had a dense gradient for it."""
        present: npt.NDArray[np.bool_] = (self.states[:-1] & PRESENT) != 0
        return present

    @property
    def nonfinite(self) -> npt.NDArray[np.bool_]:
        """Return a boolean per layer: some rank found a value in it that is not finite."""
        nonfinite: npt.NDArray[np.bool_] = (self.states[:-1] & NONFINITE) != 0
        return nonfinite


def check_covers(result: Bytes, own: Bytes, sender: object) -> None:
    """Raise WireFormatError for a result that lacks a state that this rank sent.

    Without it, this rank would take its own gradient for the mean.
    """
    if missing := np.flatnonzero(own & ~result).tolist():
        raise WireFormatError(
            f"the result from {sender} lacks states that this rank sent, those of entries {missing[:5]} of its header"
        )


class HeaderId(NamedTuple):
    """Identifies a collective: the ranks that take part in it must all have the same values.

    ``checksums`` says that messages carry checksums; it is a setting on which all ranks agree.
    """

    check: int
    step: int
    bucket: int
    checksums: bool = False


class ByteHeader:
    """Describes the headers of ``len(payload_bytes)`` messages about ``layers`` layers.

    Wire: a header has 32 bytes, a state byte per layer and one for the ranks, and zeros up to a multiple of 16. The
    payload follows, with bytes of any value up to a multiple of 16; ``message_bytes`` has the length of each message.
    The checksum is the CRC-32C of the payload, up to the message's end, followed by the header without the checksum's
    own four bytes; 0 if checksums are off. The payload comes first, so its own checksum is computed on the way, and
    does not change if a rank forwards the payload with another header.
    """

    @staticmethod
    def size(layers: int) -> int:
        """Return the length in bytes of a header about this many layers, with its padding."""
        return padded(FIXED.itemsize + layers + 1)

    def __init__(self, layers: int, payload_bytes: npt.NDArray[np.int64]) -> None:
        self.layers = layers
        self.nbytes = self.size(layers)
        self.message_bytes: list[int] = (self.nbytes + padded(payload_bytes)).tolist()
        #: The bits that the state bytes of an arriving message may have.
        self.known = np.array([_OF_A_LAYER] * layers + [_OF_STEPS], dtype=np.uint8)
        self._fixed = np.zeros(len(payload_bytes), dtype=FIXED)
        self._fixed["magic"], self._fixed["protocol"] = MAGIC, PROTOCOL
        self._fixed["chunk"] = np.arange(len(payload_bytes))
        self._fixed["payload_bytes"] = payload_bytes
        self._fixed["layers"] = layers

    def allow(self, bits: int) -> None:
        """Accept in the last state byte the bits of a request and ``bits``, instead of those of a step."""
        self.known[-1] = _OF_REQUESTS | bits

    def fields(self, chunks: Sequence[int], senders: Sequence[int]) -> npt.NDArray[np.void]:
        """Return the fixed fields of messages; those that change from round to round are 0."""
        fields: npt.NDArray[np.void] = self._fixed[list(chunks)]
        fields["sender"] = senders
        return fields


class Headers:
    """Writes or checks the headers of messages that travel in one round; one call serves all of them.

    ``messages`` has for each message its buffer, the number of its chunk, and the rank that sends it. The buffers stay
    the same from step to step.
    """

    def __init__(self, header: ByteHeader, messages: Sequence[tuple[Bytes, int, int]]) -> None:
        self._header = header
        # The header of a device mirror is in host memory.
        self._buffers = buffers = [buffer.view(np.ndarray) for buffer, _, _ in messages]
        self._chunks = [chunk for _, chunk, _ in messages]
        self.senders = [sender for _, _, sender in messages]
        self._fields = header.fields(self._chunks, self.senders)
        self._rows = self._fields.view(np.uint8)
        count = len(buffers)
        self._addresses = np.array([each.__array_interface__["data"][0] for each in buffers], dtype=np.int64)
        self._lengths = np.array([header.message_bytes[chunk] for chunk in self._chunks], dtype=np.int64)
        self._too_short = any(map(operator.lt, map(len, buffers), self._lengths.tolist()))
        self._payloads, self._fingerprints = np.zeros((2, count), dtype=np.uint32)
        self._ranks = np.zeros(count, dtype=np.uint8)

    @property
    def payloads(self) -> list[int]:
        """Return the checksums of the payloads that were written or checked last; 0 if checksums are off."""
        found: list[int] = self._payloads.tolist()
        return found

    def write(self, header_id: HeaderId, round_number: int, flags: BucketFlags) -> None:
        """Write the headers of messages that have their payloads already."""
        HOST.kernels.write_headers(
            self._rows,
            self._addresses,
            self._lengths,
            flags.states,
            self._payloads,
            check=header_id.check,
            step=header_id.step & 0xFFFFFFFF,
            bucket=header_id.bucket,
            round_number=round_number & 0xFF,
            sender=flags.rank,
            fingerprint=flags.fingerprint,
            checksums=header_id.checksums,
        )

    def read(
        self, header_id: HeaderId, round_number: int, flags: BucketFlags, sent: Bytes | None = None
    ) -> list[int]:
        """Check the headers of messages that have arrived, add their states and fingerprints to ``flags``.

        ``sent`` has the states that this rank sent, if the messages are results, which must contain them. Returns each
        message's last state byte. Raises PlanMismatchError for another protocol or check value, WireFormatError for any
        other difference.
        """
        if self._too_short:
            self._refuse_short()
        wrong = HOST.kernels.read_headers(
            self._rows,
            self._addresses,
            self._lengths,
            self._header.known,
            _NOTHING if sent is None else sent,
            flags.states,
            self._fingerprints,
            self._payloads,
            self._ranks,
            check=header_id.check,
            step=header_id.step & 0xFFFFFFFF,
            bucket=header_id.bucket,
            round_number=round_number & 0xFF,
            checksums=header_id.checksums,
        )
        if wrong >= 0:
            self._explain(wrong, header_id, round_number, sent)
        for fingerprint in self._fingerprints.tolist():
            flags.compare(fingerprint)
        ranks: list[int] = self._ranks.tolist()
        return ranks

    def _refuse_short(self) -> None:
        for sender, buffer, length in zip(self.senders, self._buffers, self._lengths.tolist(), strict=True):
            if len(buffer) < length:
                raise WireFormatError(
                    f"rank {sender} sent {len(buffer)} bytes, but its message must have {length}"
                )

    def _explain(self, row: int, header_id: HeaderId, round_number: int, sent: Bytes | None) -> NoReturn:
        """Raise the error for the message with this number, which a kernel has refused."""
        sender, message = self.senders[row], self._buffers[row]
        got, want = message[: FIXED.itemsize].copy().view(FIXED)[0], self._fields[row].copy()
        want["check"], want["step"] = header_id.check, header_id.step & 0xFFFFFFFF
        want["bucket"], want["round"] = header_id.bucket, round_number & 0xFF
        compared = [n for n in FIXED.names or () if n not in ("fingerprint", "checksum")]
        if wrong := [f"{n} {got[n]} instead of {want[n]}" for n in compared if got[n] != want[n]]:
            text = f"rank {sender} sent a header with {', '.join(wrong)}"
            if got["magic"] == MAGIC and (got["protocol"] != PROTOCOL or got["check"] != want["check"]):
                raise PlanMismatchError(text)
            raise WireFormatError(text)
        length = int(self._lengths[row])
        if header_id.checksums and got["checksum"] != checksums_of(message[:length], self._header.nbytes)[1]:
            raise WireFormatError(
                f"a message of {length} bytes from rank {sender} does not match its checksum: it was damaged on the way"
            )
        states = message[FIXED.itemsize :][: self._header.layers + 1]
        unknown = states & ~self._header.known
        if unknown.any():
            raise WireFormatError(f"rank {sender} sent an unknown state {states[unknown != 0][0]}")
        if sent is not None:
            check_covers(states, sent, f"rank {sender}")
        raise AssertionError("a kernel has refused a header that is right")


class CountHeader:
    """Writes and checks the header of a sum: counts that stay exact in a sum over up to 65,536 ranks.

    Wire: the fields of :class:`ByteHeader` except sender and checksum, as counts in the dtype of the sum.
    The check value travels as 8 nibbles and their squares: sum(v) = N v0 and sum(v^2) = N v0^2 hold together only if
    every rank's v is v0. The fingerprint travels in the same way: for the M ranks that have one,
    M sum(v^2) = sum(v)^2 holds only if all v are equal.
    """

    _OF_RANKS = (WAITING, PREEMPTED, LATE, EDITED)

    def __init__(self, layers: int) -> None:
        self._rows = layers + 1  # a row per layer and one for the ranks
        self.length = 16 + 17 + len(self._OF_RANKS) + 3 * self._rows

    def write(self, target: npt.NDArray[np.floating], header_id: HeaderId, flags: BucketFlags) -> None:
        """Fill ``target``, which has ``length`` elements, with this rank's counts."""
        for at, nibbles in ((0, _check_nibbles(header_id)), (16, _nibbles(flags.fingerprint))):
            target[at : at + 8] = nibbles
            target[at + 8 : at + 16] = nibbles * nibbles
        target[32] = flags.fingerprint != 0
        target[33:37] = [(int(flags.states[-1]) & bit) != 0 for bit in self._OF_RANKS]
        counts = target[37 : self.length].reshape(3, self._rows)
        for row, bit in enumerate((PRESENT, NONFINITE, SPARSE)):
            counts[row] = (flags.states & bit) != 0

    def read(self, source: npt.NDArray[np.floating], header_id: HeaderId, world: int) -> Bytes:
        """Check the summed counts and return the states.

        Raises PlanMismatchError if the ranks have different check values, WireFormatError for impossible counts.
        """
        where = f"step {header_id.step}, bucket {header_id.bucket}"
        nibbles = _check_nibbles(header_id)
        if not np.array_equal(source[:16], world * np.concatenate((nibbles, nibbles * nibbles))):
            raise PlanMismatchError(f"{where}: the ranks are not at the same step, bucket and plan")
        numbers = source[16 : self.length].astype(np.float64)
        sums, squares, counts = numbers[:8], numbers[8:16], numbers[16:]
        if not all(
            np.all(each >= 0) and np.all(each <= most * world)
            for each, most in ((counts, 1), (sums, 15), (squares, 225))
        ):
            raise WireFormatError(f"{where}: a sum arrived with counts that {world} ranks cannot have sent")
        if not np.array_equal(numbers, np.floor(numbers)):
            raise WireFormatError(f"{where}: a sum arrived with counts that are not whole numbers")
        rows = counts[5:].reshape(3, self._rows) > 0
        states: Bytes = (
            rows[0] * np.uint8(PRESENT) | rows[1] * np.uint8(NONFINITE) | rows[2] * np.uint8(SPARSE)
        )
        for count, bit in zip(counts[1:5].tolist(), self._OF_RANKS, strict=True):
            states[-1] |= bit * (count > 0)
        if np.any(counts[0] * squares != sums * sums):
            states[-1] |= DIFFERENT
        return states


def _check_nibbles(header_id: HeaderId) -> npt.NDArray[np.float32]:
    return _nibbles(zlib.crc32(f"{PROTOCOL},{header_id.check},{header_id.step},{header_id.bucket}".encode()))


def _nibbles(value: int) -> npt.NDArray[np.float32]:
    return np.array([(value >> shift) & 0xF for shift in range(0, 32, 4)], dtype=np.float32)
