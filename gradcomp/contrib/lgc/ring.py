"""LGC's ring-allreduce form sums codes, and every rank decodes their mean (Abrahamyan et al. 2021, Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from gradcomp.compress.base import SHARED, Traffic
from gradcomp.compress.messages import Bytes, Exchange, Sum
from gradcomp.compress.sparse.base import keep_errors
from gradcomp.compress.sparse.clt_k import Rider
from gradcomp.compress.sparse.drawn import Floats
from gradcomp.contrib.lgc.autoencoder import Autoencoder, mean_of, squares
from gradcomp.contrib.lgc.base import Form, Lesson, Sent, Share, Weights, shares
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext


@dataclass(frozen=True)
class Ring(Form):
    """Compute mean = D((1/N) sum over ranks of E(g_k)). The loss is the squared error of this mean."""

    def network(self, ranks: int = 1) -> Autoencoder:
        return Autoencoder(self.channels, deconvolutions=self.deconvolutions)

    @property
    def field(self) -> str:
        return f"{SHARED}lgc_nets_{self.channels}"

    def code_traffic(self, table: Table, counts: Sizes) -> Traffic:
        """Return each row's share of the bytes of a code, which travels in a Sum."""
        code = shares(4 * self.network().code_length(int(counts.sum())), counts).astype(np.float64)
        return Traffic(np.zeros_like(code), np.zeros_like(code), code)

    def unit(self, lesson: Lesson) -> float:
        """Return the norm of the samples' mean."""
        with np.errstate(all="ignore"):
            return math.sqrt(squares(mean_of(lesson.samples[None])))

    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        return self.network().of(weights).train(weights, lesson.samples, rate)

    def code(
        self, group: Group, context: StepContext, sent: Sent, weights: Weights, share: Share
    ) -> Exchange:
        """Share the leader's indices, ask for the Sum of the ranks' codes, and decode their mean."""
        shared = yield from share(Rider())
        flags, network = shared.flags.copy(), self.network()
        values: list[Floats] = []

        def write(view: Floats) -> Bytes:
            own = shared.prepare()
            values.append(sent.values(group, flags | own))
            # A code that is not finite makes the sum not finite, on all ranks.
            view[:] = network.of(weights()).encode(weights(), values[0])
            return own

        reply = yield Sum(network.code_length(sent.count), write)
        flags |= reply.flags
        with np.errstate(all="ignore"):
            mean = reply.data / np.float32(context.world)
            found = network.of(weights()).decode(weights(), mean, sent.count)
            lost = values[0] - found if self.feedback else np.zeros_like(found)
        if not np.isfinite(found).all():
            flags[:] = 1
        keep_errors(group, sent.chosen, sent.in_rows(lost))
        sent.scatter(group, flags, found, 1.0, context.unscale_mean)
        return flags
