"""All-to-all broadcast of codes: the full mesh of Markov 2024 (section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.reduce.base import HOST_MEMORY, Binding, Call, Memory, Part, Reduction, Rounds
from gradcomp.reduce.chunks import encode
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.reduce.whole import WholeCodes
from gradcomp.transport.base import AllGather


@register("all_to_all")
class AllToAllBroadcast(Reduction):
    """Every rank sends its whole code to all others; each decodes the N codes and adds them in rank order in float32.

    Rounds: 1. Bytes per rank: d (N-1) for a payload of d bytes, plus as many headers. Encodes on the longest path: 1;
    a rank decodes N payloads. State: the first residual, for groups with feedback; nothing is encoded twice, so there
    is no second one. The mean is added up by every rank for itself, in one order and one arithmetic: the same bytes.
    Memory: N payloads, and the sum in float32.
    Source: Markov 2024, section 2.2.1, "Full mesh", whose d N^2 counts all ranks.
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

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """One round, of everything to everybody."""
        world = topology.world
        (size,) = load.chunks(1)
        down = to_owners(topology, range(world), dict.fromkeys(range(world), size)).back()
        return Cost([down] if world > 1 else [], 1, 1, world + 1)

    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """One round; see the class."""
        own, header = self._messages[self._rank], self._header
        states = yield from encode(self._whole.codes.parts, self._encode, own, call, binding)
        with binding.span("encode"):
            header.identify(call.header_id, 0, call.ready)
            header.write(own, self._rank, states)
        if self.rounds:
            yield [AllGather(self._messages.reshape(-1), [len(own)] * self._world)]

        for sender, message in enumerate(self._messages):
            ready, states = header.read(message, sender, sender)
            bucket_flags.ready += ready
            bucket_flags.states |= states
        yield from self._whole.add(list(self._messages), call, binding)
        return (yield from self._whole.decode(self._whole.sum, call, binding, bucket_flags))
