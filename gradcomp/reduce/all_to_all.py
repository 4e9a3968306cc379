"""All-to-all broadcast of codes: the full mesh of Markov 2024 (section 2.2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Message, Move, Part, Reduction, Rounds
from gradcomp.reduce.chunks import encode
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.reduce.varying import fixed
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

    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._whole = WholeCodes(fixed(parts), layers, world, memory.local)
        codes = self._whole.codes
        self._encode = codes.inputs()
        header = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        buffers = codes.copies(memory, world)
        self._messages = [Message(buffer, header, r) for r, buffer in enumerate(buffers)]
        self._own = own = self._messages[rank]
        others = [(r, message) for r, message in enumerate(self._messages) if r != rank]
        self._gather = Move(
            AllGather(buffers.reshape(-1), [codes.sizes[0]] * world), [own], others, common=True
        )
        self.rounds = 1 if world > 1 else 0
        self.bytes_sent = (world - 1) * codes.sizes[0]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """One round, of everything to everybody."""
        world = topology.world
        (size,) = load.chunks(1)
        down = to_owners(topology, range(world), dict.fromkeys(range(world), size)).back()
        return Cost([down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """One round; see the class."""
        yield from encode(self._whole.codes.parts, self._encode, self._own.buffer, context, binding, flags)
        if self.rounds:
            yield self._gather
        yield from self._whole.add(self._messages, context, binding)
        return (yield from self._whole.decode(self._whole.sum, context, binding, flags))
