"""Gather-and-sum: codes to one root, the sum back without compression."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradcomp.core.scheme import Scheme
from gradcomp.core.topology import Topology
from gradcomp.kernels.cuda.mirrors import fetch
from gradcomp.reduce.base import HOST_MEMORY, Binding, Call, Memory, Part, Reduction, Rounds, Waits
from gradcomp.reduce.chunks import encode
from gradcomp.reduce.header import BucketFlags, ByteHeader, check_covers
from gradcomp.reduce.model import Cost, Load, to_owners
from gradcomp.reduce.registry import register
from gradcomp.reduce.whole import WholeCodes, floats
from gradcomp.transport.base import Exchange

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

    def __init__(
        self, parts: Sequence[Part], layers: int, rank: int, world: int, memory: Memory = HOST_MEMORY
    ) -> None:
        self._rank, self._world = rank, world
        allocate = memory.local if rank == ROOT else memory.messages
        self._whole = WholeCodes(parts, layers, world, allocate)
        codes, dense = self._whole.codes, self._whole.dense
        self._up = ByteHeader(layers, np.full(world, codes.payload_bytes[0], dtype=np.int64))
        self._encode = codes.inputs()
        self._messages = codes.copies(memory, world if rank == ROOT else 1)
        # The sum as it travels: apart from where kernels add up, unless it can be sent from there.
        apart = allocate is not memory.messages
        self._down = floats(dense, memory.messages) if apart else self._whole.sum
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

    def run(self, call: Call, binding: Binding, bucket_flags: BucketFlags) -> Rounds:
        """Two rounds; see the class."""
        own = self._messages[0]  # the root's, too, is the first of them
        states = yield from encode(self._whole.codes.parts, self._encode, own, call, binding)
        with binding.span("encode"):
            self._up.identify(call.header_id, 0, call.ready)
            self._up.write(own, self._rank, states)
        others = range(1, self._world)
        if self._rank != ROOT:
            yield [Exchange([(ROOT, own)], [])]
            yield [Exchange([], [(ROOT, self._down)])]
        else:
            if self.rounds:
                yield [Exchange([], [(r, self._messages[r]) for r in others])]
            yield from self._add(call, binding)
            if self.rounds:
                yield [Exchange([(r, self._down) for r in others], [])]

        down = self._whole.dense.header
        down.identify(call.header_id, 1, 0)
        bucket_flags.ready, result = down.read(self._down, 0, ROOT, self._world)
        check_covers(result, states, f"rank {ROOT}")
        bucket_flags.states |= result
        return (yield from self._whole.decode(self._down, call, binding, bucket_flags))

    def _add(self, call: Call, binding: Binding) -> Waits[None]:
        """Count the votes, add the codes."""
        votes, count = np.zeros_like(call.states), 0
        for sender, message in enumerate(self._messages):
            ready, states = self._up.read(message, sender, sender)
            votes |= states
            count += ready
        yield from self._whole.add(list(self._messages), call, binding)
        with binding.span("reduce"):
            if self._down is not self._whole.sum:
                fetch(self._whole.sum, self._down)
            down = self._whole.dense.header
            down.identify(call.header_id, 1, count)
            down.write(self._down, 0, votes)
