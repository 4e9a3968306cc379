"""LGC's parameter-server form decodes one rank's code with all innovations (Abrahamyan et al. 2021, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradcomp.compress.base import SHARED, Traffic
from gradcomp.compress.learned.decoders import Decoders
from gradcomp.compress.learned.form import Form, Lesson, Marking, Share, Weights
from gradcomp.compress.learned.innovations import Arrived, Selecting
from gradcomp.compress.learned.sent import Sent, shares
from gradcomp.compress.messages import Bytes, Exchange, Gather
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.sparse.base import elements_at, keep_errors
from gradcomp.compress.sparse.payload import Selection, SparseFormat
from gradcomp.compress.sparse.summed import Floats
from gradcomp.kernels import indices as kernel
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext


@dataclass(frozen=True)
class Server(Form):
    """Decode one rank's code with the innovations of each rank.

    rec_k = D_k(E(g of the leader), innovations of rank k in S); mean = (1/N) sum over k of (rec_k + those not in S).

    Every rank is a server: it has all N decoders, and decodes for all. ``innovation``: of a layer's k values, the share
    that is innovations, at least one; 0: none. ``similarity``: the weight of that part of the loss.
    """

    innovation: float
    similarity: float

    @property
    def field(self) -> str:
        return f"{SHARED}lgc_server_{self.channels}"

    def network(self, ranks: int) -> Decoders:
        """Return E, and a D for every rank."""
        return Decoders(self.channels, ranks, float(self.similarity))

    def size(self, ranks: int) -> int:
        return self.network(ranks).size

    def first_weights(self, seed: int, ranks: int) -> Floats:
        return self.network(ranks).first_weights(seed)

    def adapted(self, weights: Floats, seed: int, ranks: int) -> Floats:
        found = self.network(ranks).adapted(weights, seed)
        return super().adapted(weights, seed, ranks) if found is None else found

    def limits(self, counts: Sizes) -> Sizes:
        """Return the number of innovations of each row; ``counts``: values of each row."""
        return elements_at(float(self.innovation), counts) if self.innovation else np.zeros_like(counts)

    def format(self, table: Table, counts: Sizes) -> SparseFormat:
        """Return the payload format of a rank's innovations."""
        return SparseFormat(table, self.limits(counts), True, self.indices, Cast("float32"))

    def code_traffic(self, table: Table, counts: Sizes) -> Traffic:
        """Return the bytes of one rank's code, and of all ranks' innovations."""
        code = shares(4 * self.network(1).code_length(int(counts.sum())), counts).astype(np.float64)
        innovations = self.format(table, counts).wire_bytes(self.limits(counts)).astype(np.float64)
        return Traffic(code, innovations, np.zeros_like(code))

    def marking(self, group: Group, sent: Sent) -> Marking:
        """Select innovations, as in phase 3."""
        return Selecting(sent, self._own(group, sent))

    def marked(self, values: int) -> int:
        return values

    def unit(self, lesson: Lesson) -> float:
        """Return the root of the mean over ranks of the squared norm: zeros then have a loss of 1."""
        squares = (lesson.samples.astype(np.float64) ** 2).ravel().tolist()
        # The sum is exactly rounded, whatever the order.
        return math.sqrt(math.fsum(squares) / len(lesson.samples))

    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        """Train on all ranks' values, from the leader's code, as in phase 3."""
        samples = lesson.samples
        innovations = np.where(lesson.innovations, samples, np.float32(0))
        return self.network(len(samples)).train(weights, samples, innovations, lesson.leader, rate)

    def code(
        self, group: Group, context: StepContext, sent: Sent, weights: Weights, share: Share
    ) -> Exchange:
        """Ask for one Broadcast of a code and indices, and for one Gather of innovations, if there are any."""
        network = self.network(context.world)
        coding = _Coding(sent, self._own(group, sent), network, weights)
        shared = yield from share(coding)
        flags, own = shared.flags.copy(), coding.own
        ranks = [own] * context.world
        if len(own.indices):
            form = group.scratch.once("innovations", lambda: self.format(group.table, sent.chosen.counts))

            def write(view: Bytes) -> tuple[Bytes, int]:
                none = np.zeros_like(flags)
                used, _ = form.encode(own, view, none, context.draw)
                return none, used

            reply = yield Gather(form.max_bytes, write, form.fixed)
            ranks = [Selection.allocate(own.counts) for _ in reply.data]
            for rank, (payload, into) in enumerate(zip(reply.data, ranks, strict=True)):
                form.decode(payload, into, rank)
        arrived = Arrived.of(sent, ranks)
        with np.errstate(all="ignore"):
            found = network.decode(weights(), coding.code, arrived.inside)
            total = found[0].copy()
            for other in found[1:]:
                total += other
        if not np.isfinite(total).all():
            flags[:] = 1
        self._keep(group, context, sent, flags, arrived, found)
        _scatter(group, context, sent, flags, arrived, total)
        return flags

    def _own(self, group: Group, sent: Sent) -> Selection:
        return group.scratch.once("own", lambda: Selection.allocate(self.limits(sent.chosen.counts)))

    def _keep(
        self,
        group: Group,
        context: StepContext,
        sent: Sent,
        flags: Bytes,
        arrived: Arrived,
        found: Floats,
    ) -> None:
        """Keep, with feedback, what this rank contributed and nobody can decode."""
        rank = context.draw.rank
        with np.errstate(all="ignore"):
            lost = sent.values(group, flags) - found[rank]
        keep_errors(group, sent.chosen, sent.in_rows(lost if self.feedback else np.zeros_like(lost)))
        outside = arrived.outside[rank]
        keep_errors(group, outside, np.zeros_like(outside.values))


class _Coding(Selecting):
    """Select innovations, and send the leader's code in front of its indices."""

    def __init__(self, sent: Sent, own: Selection, network: Decoders, weights: Weights) -> None:
        super().__init__(sent, own)
        self._network, self._weights = network, weights
        self.nbytes = 4 * network.code_length(sent.count)
        self.code: Floats = np.zeros(0, np.float32)

    def lead(self, group: Group, chosen: Selection, flags: Bytes, view: Bytes) -> None:
        """Write the code. Rows that are flagged hold zeros, because a code mixes rows."""
        super().lead(group, chosen, flags, view)
        with np.errstate(all="ignore"):
            code = self._network.encode(self._weights(), chosen.values[self._sent.places])
        view[:] = code.astype("<f4").view(np.uint8)

    def read(self, data: Bytes) -> None:
        self.code = data.view("<f4").astype(np.float32)


def _scatter(
    group: Group, context: StepContext, sent: Sent, flags: Bytes, arrived: Arrived, total: Floats
) -> None:
    """Write the sum of decoded values and of innovations elsewhere, over the divisor, to the outputs."""
    lists = [sent.chosen, *arrived.outside]
    begins = np.cumsum([0, *(len(one.indices) for one in lists[:-1])])
    kernel.scatter_mean(
        group.table,
        flags,
        np.stack([one.offsets + begin for one, begin in zip(lists, begins, strict=True)]),
        np.stack([one.counts for one in lists]),
        np.concatenate([one.indices for one in lists]),
        np.concatenate([sent.in_rows(total), *(one.values for one in arrived.outside)]),
        divisor=context.divisor,
        scale=context.unscale,
    )
