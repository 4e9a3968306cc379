"""Gather-and-sum sends codes to one root, which sends the sum back without compression."""

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

    The mean has the same bytes as that of the all-to-all broadcast. A value is encoded once; the root decodes N
    payloads.

    Wire: two rounds. In round 0 every other rank sends its whole code, d bytes, to rank 0. In round 1 rank 0 sends the
    sum, n bytes of float32, to each of them, n (N-1) bytes in all, and every rank divides by N. Each message has a
    header.
    State: a residual per layer, for groups with feedback, and no server-side error, since no mean is encoded. The root
    has buffers for N payloads, and every rank has one for the sum in float32.
    Source: Markov 2024, section 2.2.1. Its full mesh is an all-gather whose result every rank adds. In this form one
    rank adds, as servers do for sparse gradients in other frameworks; see ``docs/decisions/0013``.
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
        # Kernels add in memory of the device; the sum is copied to a message unless it can be sent from there.
        self._apart = allocate is not memory.messages
        self._sum = dense.message(floats(dense, memory.messages) if self._apart else self._whole.sum, 0)
        self._others = range(1, world)
        self.rounds = 2 if world > 1 else 0
        self.bytes_sent = (world - 1) * dense.sizes[0] if rank == ROOT else codes.sizes[0]

    @staticmethod
    def cost(load: Load, topology: Topology, scheme: Scheme) -> Cost:
        world = topology.world
        (size,) = load.chunks(1)
        up = to_owners(topology, range(world), {ROOT: size})
        down = to_owners(topology, range(world), {ROOT: load.dense_message}).back()
        return Cost([up, down] if world > 1 else [], 1, 1, world + 1)

    def run(self, context: StepContext, binding: Binding, flags: BucketFlags) -> Rounds:
        own = self._codes[0]  # on the root too, since it is rank 0
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
