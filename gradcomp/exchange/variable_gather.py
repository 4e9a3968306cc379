"""All-gather payloads whose sizes depend on data: a message carries their sizes and as much data as fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradcomp.core.errors import WireFormatError
from gradcomp.reduce.base import Message, Move, Waits
from gradcomp.reduce.header import ByteHeader, HeaderId, padded
from gradcomp.transport.base import AllGather

Bytes = npt.NDArray[np.uint8]
Sizes = npt.NDArray[np.int64]

#: The bytes reserved for a rank's payloads are the most that it has sent in this many steps.
_STEPS = 16


class _Laid(NamedTuple):
    """Holds the messages of one round.

    ``sizes`` has the payload sizes as bytes, ``parts`` a view of each rank's payload.
    """

    sizes: bytes
    parts: list[Bytes]
    move: Move


class VariableGather:
    """Runs all-gathers of payloads of any sizes up to a limit, in one or two rounds a step.

    Wire: a rank's first message begins with the sizes of its groups' payloads, 8 bytes for each group whose size
    varies. The first part of the payloads follows, up to the bytes that are reserved for that rank. All ranks see all
    sizes, so all know whether some rank's payloads did not fit; if so, a second round carries the remainders. The
    reservation of a rank is its largest total of the last 16 steps, 0 at first. It follows from what was sent, so no
    rank has to ask for it.

    State: while sizes stay the same, :meth:`run` returns the same views, so that cached kernel calls stay valid.

    ``varying`` lists the groups whose sizes travel; the payloads of the others always have their largest size.
    """

    def __init__(self, layers: int, rank: int, world: int, varying: Sequence[int]) -> None:
        self._layers, self._rank, self._world = layers, rank, world
        self._varying = list(varying)
        self._told_bytes = padded(8 * len(varying))
        self._totals = np.zeros((_STEPS, world), dtype=np.int64)
        self._step = 0
        self._buffers: list[Bytes] = [np.zeros(0, dtype=np.uint8)] * 2
        self._laid_out: list[_Laid | None] = [None, None]
        self._views: tuple[list[Bytes], bytes, list[list[Bytes]]] | None = None

    def run(self, own: Sequence[Bytes], most: Sizes, header_id: HeaderId) -> Waits[list[list[Bytes]]]:
        """Return each group's payloads of all ranks, given this rank's in ``own``.

        ``most`` holds the limits in bytes, by rank and group.
        """
        room = np.minimum(self._totals.max(axis=0), most.sum(axis=1))
        told = self._told_bytes
        mine = np.concatenate(own) if len(own) > 1 else own[0]
        fits = min(len(mine), int(room[self._rank]))

        first = self._lay_out(0, told + room)
        parts = first.parts
        part = parts[self._rank]
        part[:told] = 0
        part[told + fits :] = 0
        part[: 8 * len(self._varying)].view("<i8")[:] = [len(own[g]) for g in self._varying]
        part[told : told + fits] = mine[:fits]
        yield first.move

        sizes = self._read(parts, most, header_id)
        totals = sizes.sum(axis=1)
        self._totals[self._step % _STEPS] = totals
        self._step += 1
        rests = np.maximum(totals - room, 0)
        if not rests.any():
            key = sizes.tobytes()
            if self._views is None or self._views[0] is not parts or self._views[1] != key:
                self._views = parts, key, split([part[told:] for part in parts], sizes)
            return self._views[2]
        second = self._lay_out(1, rests)
        second.parts[self._rank][:] = mine[fits:]
        yield second.move
        payloads = [part[told:] for part in parts]
        for rank in np.flatnonzero(rests).tolist():
            behind = second.parts[rank]
            payloads[rank] = np.concatenate((payloads[rank], behind)) if room[rank] else behind
        return split(payloads, sizes)

    def _lay_out(self, number: int, sizes: Sizes) -> _Laid:
        """Return the messages of a round with payloads of these sizes; equal sizes reuse the last messages."""
        laid, key = self._laid_out[number], sizes.tobytes()
        if laid is not None and laid.sizes == key:
            return laid
        header = ByteHeader(self._layers, sizes)
        total = sum(header.message_bytes)
        if self._buffers[number].nbytes < total:
            self._buffers[number] = np.zeros(total, dtype=np.uint8)
        ends = np.cumsum(header.message_bytes)
        begins = ends - header.message_bytes + header.nbytes
        buffer = self._buffers[number]
        parts = [buffer[a : a + n] for a, n in zip(begins.tolist(), sizes.tolist(), strict=True)]
        laid = self._laid_out[number] = _Laid(key, parts, gathered(self._rank, buffer, header))
        return laid

    def _read(self, parts: Sequence[Bytes], most: Sizes, header_id: HeaderId) -> Sizes:
        """Return the sizes that the ranks announced; raise WireFormatError for an impossible one."""
        sizes, columns = most.copy(), self._varying
        for sender, part in enumerate(parts):
            announced = part[: 8 * len(columns)].view("<i8")
            wrong = (announced < 0) | (announced > most[sender, columns])
            if wrong.any():
                raise WireFormatError(
                    f"step {header_id.step}, bucket {header_id.bucket}: rank {sender} announced payloads of "
                    f"{announced.tolist()} bytes where at most {most[sender, columns].tolist()} are possible"
                )
            sizes[sender, columns] = announced
        return sizes


def split(payloads: Sequence[Bytes], sizes: Sizes) -> list[list[Bytes]]:
    """Return, for every group, the payload of every rank; a rank's payloads are concatenated."""
    begins = np.cumsum(sizes, axis=1) - sizes
    return [
        [payload[a : a + n] for payload, a, n in zip(payloads, starts, lengths, strict=True)]
        for starts, lengths in zip(begins.T.tolist(), sizes.T.tolist(), strict=True)
    ]


def gathered(rank: int, buffer: Bytes, header: ByteHeader) -> Move:
    """Return the all-gather of one message per rank; ``buffer`` holds them in rank order."""
    ends = np.cumsum(header.message_bytes).tolist()
    messages = [
        Message(buffer[end - size : end], header, r)
        for r, (end, size) in enumerate(zip(ends, header.message_bytes, strict=True))
    ]
    arrivals = [(r, message) for r, message in enumerate(messages) if r != rank]
    return Move(AllGather(buffer[: ends[-1]], header.message_bytes), [messages[rank]], arrivals, common=True)
