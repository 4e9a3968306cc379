"""Chunks whose sizes depend on data travel with their sizes, in messages of lengths that both ends know.

The size of a chunk varies little from step to step. Sender and receiver reserve the same number of bytes for it: the
largest size of the last 16 steps and 1/32 more, 0 at first. With that margin a chunk seldom does not fit, even among
many pairs of ranks. A message has the sizes and the first part of the payload, up to the reserved bytes; the rest
follows in a second round. Kernels encode and decode chunks in buffers for the largest size; the kernel `compact` copies
the bytes in use from there to a message, and `restore` copies them back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.codec import Codec, Sizes
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import MINMAX_LEAST_BYTES, MINMAX_LEAST_ERROR
from gradcomp.reduce.base import Message, Move, Part, Waits, exchange
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.halves import Roles
from gradcomp.reduce.header import ByteHeader, padded
from gradcomp.transport.base import AllGather, AllToAll, Bytes

_STEPS = 16
_MARGIN = 32


def varies(parts: Sequence[Part]) -> bool:
    """Return true if the size of some part's codes depends on its data."""
    return any(part.codec.kind == MINMAX_LEAST_BYTES for part in parts)


def fixed(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with codecs of fixed size.

    A codec that needs the fewest bytes for an error becomes the one with the least error in the same number of bytes.
    """
    return [
        replace(part, codec=Codec(MINMAX_LEAST_ERROR, stochastic=True))
        if part.codec.kind == MINMAX_LEAST_BYTES
        else part
        for part in parts
    ]


class Compact:
    """Copies the bytes in use of chunks to payloads, and back."""

    def __init__(self, chunks: Chunks) -> None:
        self._most = chunks.payload_bytes
        self._segments = list(zip([part.codec.kind for part in chunks.parts], chunks.place(), strict=True))
        self._buffers = [np.empty(0, dtype=np.uint8)] * chunks.count

    def compact(self, message: Bytes, j: int) -> Bytes:
        """Return the bytes in use of chunk j; the next call for this chunk overwrites them."""
        if len(self._buffers[j]) < self._most[j]:
            self._buffers[j] = np.empty(self._most[j], dtype=np.uint8)
        at = 0
        for kind, segments in self._segments:
            at += HOST.kernels.compact(kind, segments.chunk(j).table, message, self._buffers[j][at:])
        return self._buffers[j][:at]

    def restore(self, payload: Bytes, message: Bytes, j: int, sender: int) -> None:
        """Copy the payload of chunk j to ``message``; raise WireFormatError if it contradicts itself."""
        at = 0
        try:
            for kind, segments in self._segments:
                at += HOST.kernels.restore(kind, segments.chunk(j).table, payload[at:], message)
        except ValueError as error:
            raise WireFormatError(f"chunk {j} from rank {sender}: {error}") from error
        if at != len(payload):
            raise WireFormatError(
                f"chunk {j} from rank {sender} has {len(payload)} bytes, but its contents say that it has {at}"
            )


class _Reserved:
    """Computes the bytes to reserve for each chunk: its largest size of the last 16 steps, and 1/32 more."""

    def __init__(self, *shape: int) -> None:
        self._sizes = np.zeros((_STEPS, *shape), dtype=np.int64)
        self._step = 0

    def now(self) -> Sizes:
        most: Sizes = self._sizes.max(axis=0)
        return most + most // _MARGIN

    def saw(self, sizes: Sizes) -> None:
        self._sizes[self._step % _STEPS] = sizes
        self._step += 1


class VaryingScatter:
    """Sends every rank's chunks to their owners, in one round or two; all ranks run the same number.

    Wire: a message to an owner begins with the sizes of all chunks of its sender, 8 bytes each. If every rank owns a
    chunk and contributes to all, every rank sees all sizes, so there is a second round only if some chunk did not fit.
    Otherwise there is always a second round, in which most messages are empty.
    """

    def __init__(self, layers: int, roles: Roles, world: int, me: int, most: Sequence[int]) -> None:
        self._layers, self._roles, self._me = layers, roles, me
        self._most = np.array(most, dtype=np.int64)
        self._full = roles.owners == world
        self._reserved = _Reserved(len(roles.ranks), roles.owners)
        self._told = padded(8 * roles.owners)
        #: The bytes that this rank sent in the last step, headers included.
        self.bytes_sent = 0

    def run(self, own: Mapping[int, Bytes]) -> Waits[dict[int, Bytes]]:
        """Return the payloads of this rank's chunk from the other ranks, by their places in ``roles.ranks``.

        ``own`` has this rank's payloads by owner; it is empty if the rank contributes nothing.
        """
        me, owners, ranks = self._me, self._roles.owners, self._roles.ranks
        sizes = np.zeros((len(ranks), owners), dtype=np.int64)
        if own:
            sizes[me] = [len(own[j]) for j in range(owners)]
        reserved = self._reserved.now()
        self.bytes_sent = 0
        told: Bytes = np.zeros(self._told, dtype=np.uint8)
        told[: 8 * owners] = sizes[me].view(np.uint8)
        sends = {j: (told, _fitted(own[j], int(reserved[me, j]))) for j in own if j != me}
        others = [i for i in range(len(ranks)) if i != me] if me < owners else []
        heard = yield from self._round(sends, {i: self._told + int(reserved[i, me]) for i in others})
        for i, message in heard.items():
            sizes[i] = _checked(message[: 8 * owners], self._most, ranks[i])
        rests = np.maximum(sizes - reserved, 0)
        found = {i: message[self._told :][: sizes[i, me]] for i, message in heard.items()}
        if not self._full or rests.any():
            left = {j: (own[j][reserved[me, j] :],) for j in own if j != me and rests[me, j]}
            more = yield from self._round(left, {i: int(rests[i, me]) for i in heard if rests[i, me]})
            for i, rest in more.items():
                found[i] = np.concatenate((found[i], rest))
        self._reserved.saw(sizes)
        return found

    def _round(
        self, sends: Mapping[int, tuple[Bytes, ...]], coming: Mapping[int, int]
    ) -> Waits[dict[int, Bytes]]:
        ranks, owners = self._roles.ranks, self._roles.owners
        lengths = np.zeros(owners, dtype=np.int64)
        for j, pieces in sends.items():
            lengths[j] = sum(map(len, pieces))
        header = ByteHeader(self._layers, lengths)
        counts = [header.message_bytes[j] if j in sends else 0 for j in range(owners)]
        send: Bytes = np.zeros(sum(counts), dtype=np.uint8)
        leaving, at = [], 0
        for j, pieces in sorted(sends.items()):
            _place(pieces, send[at + header.nbytes :])
            leaving.append((ranks[j], Message(send[at : at + counts[j]], header, j)))
            at += counts[j]
        headers = {i: ByteHeader(self._layers, np.full(owners, size)) for i, size in coming.items()}
        arriving = {i: headers[i].message_bytes[0] for i in coming}
        recv: Bytes = np.zeros(sum(arriving.values()), dtype=np.uint8)
        arrivals, payloads, at = [], {}, 0
        for i, size in sorted(arriving.items()):
            arrivals.append((ranks[i], Message(recv[at : at + size], headers[i], self._me)))
            payloads[i] = recv[at + header.nbytes :][: coming[i]]
            at += size
        self.bytes_sent += sum(counts)
        if self._full:
            operation = AllToAll(send, counts, recv, [arriving.get(i, 0) for i in range(len(ranks))])
            yield Move(operation, [message for _, message in leaving], arrivals)
        else:
            yield exchange(leaving, arrivals)
        return payloads


class VaryingGather:
    """Sends every owner's chunk to all ranks, in one round or two.

    Wire: a message begins with the size of its chunk, 8 bytes. All ranks see all sizes, so all know whether a second
    round follows.
    """

    def __init__(self, layers: int, roles: Roles, world: int, me: int, most: Sequence[int]) -> None:
        self._layers, self._roles, self._me = layers, roles, me
        self._most = np.array(most, dtype=np.int64)
        self._full = roles.owners == world
        self._reserved = _Reserved(roles.owners)
        self._told = padded(8)
        self.bytes_sent = 0

    def run(self, own: Bytes | None) -> Waits[dict[int, Bytes]]:
        """Return the payloads of the other owners' chunks, by owner; ``own`` is that of this rank, if it owns one."""
        me, owners = self._me, self._roles.owners
        reserved, sizes = self._reserved.now(), np.zeros(owners, dtype=np.int64)
        self.bytes_sent = 0
        pieces: tuple[Bytes, ...] = ()
        if own is not None:
            sizes[me] = len(own)
            told: Bytes = np.zeros(self._told, dtype=np.uint8)
            told[:8] = sizes[me : me + 1].view(np.uint8)
            pieces = told, _fitted(own, int(reserved[me]))
        heard = yield from self._round(pieces, self._told + reserved)
        for j, message in heard.items():
            sizes[j] = _checked(message[:8], self._most[j : j + 1], self._roles.ranks[j])[0]
        found = {j: message[self._told :][: sizes[j]] for j, message in heard.items()}
        rests = np.maximum(sizes - reserved, 0)
        if rests.any():
            more = yield from self._round(() if own is None else (own[reserved[me] :],), rests)
            for j, rest in more.items():
                found[j] = np.concatenate((found[j], rest))
        self._reserved.saw(sizes)
        return found

    def _round(self, pieces: tuple[Bytes, ...], lengths: Sizes) -> Waits[dict[int, Bytes]]:
        """Run one round with payloads of these lengths, by owner, and return those that arrived."""
        roles, me = self._roles, self._me
        header = ByteHeader(self._layers, lengths)
        ends = np.cumsum(header.message_bytes).tolist()
        buffer: Bytes = np.zeros(ends[-1], dtype=np.uint8)
        messages = [
            Message(buffer[end - size : end], header, j)
            for j, (end, size) in enumerate(zip(ends, header.message_bytes, strict=True))
        ]
        arrivals = [(roles.ranks[j], message) for j, message in enumerate(messages) if j != me]
        if me < roles.owners:
            _place(pieces, messages[me].buffer[header.nbytes :])
            self.bytes_sent += (len(roles.ranks) - 1) * header.message_bytes[me]
        if self._full:
            gather = AllGather(buffer, header.message_bytes)
            yield Move(gather, [messages[me]], arrivals, whole=True)
        else:
            others = [rank for i, rank in enumerate(roles.ranks) if i != me] if me < roles.owners else []
            yield exchange([(rank, messages[me]) for rank in others], arrivals, whole=True)
        return {
            j: message.buffer[header.nbytes :][: lengths[j]] for j, message in enumerate(messages) if j != me
        }


def _fitted(payload: Bytes, length: int) -> Bytes:
    """Return the first ``length`` bytes of the payload, padded with zeros if it is shorter."""
    if len(payload) >= length:
        return payload[:length]
    return np.concatenate((payload, np.zeros(length - len(payload), dtype=np.uint8)))


def _place(pieces: Sequence[Bytes], target: Bytes) -> None:
    at = 0
    for piece in pieces:
        target[at : at + len(piece)] = piece
        at += len(piece)


def _checked(told: Bytes, most: Sizes, sender: int) -> Sizes:
    """Return the sizes that a rank announced; raise WireFormatError for an impossible one."""
    sizes: Sizes = told.view("<i8")
    if ((sizes < 0) | (sizes > most)).any():
        raise WireFormatError(
            f"rank {sender} announced chunks of {sizes.tolist()} bytes where at most {most.tolist()} are possible"
        )
    return sizes
