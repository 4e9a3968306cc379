"""Gather-and-sum: codes to one root, the sum back without compression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda.mirrors import fetch
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import HOST_MEMORY, Binding, Memory, Message, Part, Reduction, Rounds, exchange
from gradcomp.reduce.chunks import encode
from gradcomp.reduce.header import BucketFlags, ByteHeader
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.reduce.varying import fixed
from gradcomp.reduce.whole import WholeCodes, floats

ROOT = 0


@register("gather")
class GatherAndSum(Reduction):
    """The root decodes all codes, adds them in rank order in float32 and sends the sum to everyone as it is.

    Round 0: every other rank sends its whole code to rank 0. Round 1: rank 0 sends the sum; all divide by N.

    Rounds: 2. Bytes per rank: d up for a payload of d bytes, and from the root n (N-1) for n bytes of float32, plus a
    header per message. Encodes on the longest path: 1; the root decodes N payloads. State: the first residual, for
    groups with feedback; nothing is encoded twice. The mean is that of all-to-all broadcast, byte for byte.
    Memory: on the root N payloads; on all the sum in float32.
    Source: Markov 2024's full mesh (section 2.2.1) is an all-gather whose result every rank adds; this is the form in
    which one rank does, as servers do for other frameworks' sparse gradients. ``docs/decisions/0013`` has the reading.
    """

    by_kernels = True

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank = rank
        allocate = memory.local if rank == ROOT else memory.messages
        self._whole = WholeCodes(fixed(parts), layers, world, allocate)
        codes, dense = self._whole.codes, self._whole.dense
        self._encode = codes.inputs()
        up = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        senders = range(world) if rank == ROOT else [rank]
        buffers = codes.copies(memory, len(senders))
        self._codes = [Message(buffer, up, r) for r, buffer in zip(senders, buffers, strict=True)]
        # The sum as it travels: apart from where kernels add up, unless it can be sent from there.
        self._apart = allocate is not memory.messages
        self._sum = dense.message(floats(dense, memory.messages) if self._apart else self._whole.sum, 0)
        self._others = range(1, world)
        self.rounds = 2 if world > 1 else 0
        self.bytes_sent = (world - 1) * dense.sizes[0] if rank == ROOT else codes.sizes[0]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        """Codes to the root, float32 back."""
        world = topology.world
        (size,) = load.chunks(1)
        up = to_owners(topology, range(world), {ROOT: size})
        down = to_owners(topology, range(world), {ROOT: load.dense_message}).back()
        return Cost([up, down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        """Two rounds; see the class."""
        own = self._codes[0]  # the root's, too, is the first of them
        yield from encode(self._whole.codes.parts, self._encode, own.buffer, context, binding, flags)
        if self._rank != ROOT:
            yield exchange([(ROOT, own)])
            yield exchange(arrivals=[(ROOT, self._sum)], whole=True)
        else:
            if self.rounds:
                yield exchange(arrivals=[(r, self._codes[r]) for r in self._others])
            yield from self._whole.add(self._codes, context, binding)
            if self._apart:
                with binding.span("reduce"):
                    fetch(self._whole.sum, self._sum.buffer)
            if self.rounds:
                yield exchange([(r, self._sum) for r in self._others], whole=True)
        return (yield from self._whole.decode(self._sum.buffer, context, binding, flags))
