"""All-to-all broadcast of codes: the thesis's full mesh (section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.reduce.base import HOST_MEMORY, Binding, Call, Memory, Part, Reduction, Rounds
from gradcomp.reduce.header import Ballot, ByteHeader
from gradcomp.reduce.pieces import encode
from gradcomp.reduce.whole import WholeCodes
from gradcomp.transport.base import AllGather


class AllToAllBroadcast(Reduction):
    """Every rank sends its whole code to all others; each decodes the N codes and adds them in rank order in float32.

    Rounds: 1. Bytes per rank: d (N-1) for a payload of d bytes, plus as many headers. Encodes on the longest path: 1;
    a rank decodes N payloads. State: the first residual, for groups with feedback; nothing is encoded twice, so there
    is no second one. The mean is added up by every rank for itself, in one order and one arithmetic: the same bytes.
    Memory: N payloads, and the sum in float32.
    Source: thesis, section 2.2.1, "Full mesh", whose d N^2 is not per rank (readings).
    """

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        self._whole = WholeCodes(parts, layers, world, memory.local)
        codes = self._whole.codes
        self._header = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        self._encode = codes.inputs()
        self._messages = codes.copies(memory, world)
        self.rounds = 1 if world > 1 else 0
        self.bytes_sent = (world - 1) * codes.sizes[0]

    def run(self, call: Call, binding: Binding, ballot: Ballot) -> Rounds:
        """One round; see the class."""
        own, header = self._messages[self._rank], self._header
        with binding.span("encode"):
            states = encode(self._whole.codes.parts, self._encode, own, call, binding)
            header.stamp(call.stamp, 0, call.ready)
            header.write(own, self._rank, states)
        if self.rounds:
            yield [AllGather(self._messages.reshape(-1), [len(own)] * self._world)]

        for sender, message in enumerate(self._messages):
            ready, states = header.read(message, sender, sender)
            ballot.ready += ready
            ballot.states |= states
        with binding.span("reduce"):
            self._whole.add(list(self._messages), call)
        with binding.span("decode"):
            return self._whole.decode(self._whole.sum, call, binding, ballot)
