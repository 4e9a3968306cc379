"""The all-to-all broadcast sends every rank's codes to all ranks: the full mesh of Markov 2024 (section 2.2.1)."""

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

    Each rank computes the mean itself. All use the same order and the same arithmetic, so they get the same bytes. A
    value is encoded once; a rank decodes N payloads.

    Wire: one round; a rank sends d (N-1) bytes for a payload of d bytes, and N-1 headers.
    State: a residual per layer, for groups with feedback, and no server-side error, since no mean is encoded. A rank
    has buffers for N payloads and for the sum in float32.
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
        world = topology.world
        (size,) = load.chunks(1)
        down = to_owners(topology, range(world), dict.fromkeys(range(world), size)).back()
        return Cost([down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        yield from encode(self._whole.codes.parts, self._encode, self._own.buffer, context, binding, flags)
        if self.rounds:
            yield self._gather
        yield from self._whole.add(self._messages, context, binding)
        return (yield from self._whole.decode(self._whole.sum, context, binding, flags))
