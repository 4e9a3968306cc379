"""LGC's parameter-server form decodes one rank's code once for each rank (Abrahamyan et al. 2021, Algorithm 1).

The innovations of a rank are its largest values, which it sends uncoded. There is one encoder, and for each rank a
decoder that takes the leader's code and the rank's innovations. The module selects the innovations (:class:`Selecting`,
:class:`Arrived`), has the networks (:class:`Decoders`), and exchanges and trains with them (:class:`Server`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import SHARED, Traffic
from gradcomp.compress.messages import Bytes, Exchange, Gather
from gradcomp.compress.quantise.cast import Cast
from gradcomp.compress.sparse.base import elements_at, keep_errors
from gradcomp.compress.sparse.drawn import Floats
from gradcomp.compress.sparse.payload import Selection, SparseFormat
from gradcomp.contrib.lgc.autoencoder import (
    DECODER,
    DECODERS,
    ENCODER,
    Autoencoder,
    Whole,
    as_samples,
    mean_of,
    squares,
)
from gradcomp.contrib.lgc.base import Form, Lesson, Marking, Sent, Share, Weights, shares
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.step import StepContext

_WIDTH = 32  # bits of an index


class Selecting(Marking):
    """Select this rank's innovations into ``own``, in the round that shares the leader's indices.

    The leader takes the largest |p| at its indices, every other rank the largest |p| of its layers.
    """

    def __init__(self, sent: Sent, own: Selection) -> None:
        self._sent = sent
        self.own = own

    def lead(self, group: Group, chosen: Selection, flags: Bytes, view: Bytes) -> None:
        """Take the largest elements of the selection, ties by lower index."""
        own, rows = self.own, row_of(chosen.counts)
        order = np.lexsort((chosen.indices, -np.abs(chosen.values), rows))
        rank = np.arange(len(rows)) - np.repeat(np.cumsum(chosen.counts) - chosen.counts, chosen.counts)
        places = np.sort(order[rank < own.counts[rows]])
        own.indices[:], own.values[:] = chosen.indices[places], chosen.values[places]

    def follow(self, group: Group, context: StepContext, flags: Bytes) -> None:
        """Write p to the next residuals, and select its largest elements."""
        own, factors = self.own, context.factors(len(group.table))
        group.device.kernels.select_top(
            group.inputs,
            flags,
            factors,
            own.counts,
            own.offsets,
            own.indices,
            own.values,
            own.counts,
            decay=context.decay,
            zeros=True,  # their number must not depend on the values
        )

    def marks(self) -> npt.NDArray[np.bool_]:
        """Return, for each value at the leader's indices, whether it is one of this rank's innovations."""
        sent, own = self._sent, self.own
        at, inside = find(sent.chosen, row_of(own.counts), own.indices)
        marks = np.zeros(len(sent.chosen.indices), np.bool_)
        marks[at[inside]] = True
        return marks[sent.places]


@dataclass(frozen=True, eq=False)
class Arrived:
    """Hold the innovations of all ranks, divided into those inside and outside of the leader's selection S.

    ``inside``: shape (ranks, values of S), in the order of :class:`Sent`; 0 where a rank has no innovation.
    ``outside``: for each rank, its innovations outside of S.
    """

    inside: Floats
    outside: list[Selection]

    @staticmethod
    def of(sent: Sent, ranks: list[Selection]) -> Arrived:
        """Divide each rank's innovations into those inside and outside of S."""
        inside = np.zeros((len(ranks), sent.count), np.float32)
        outside = []
        for row, one in zip(inside, ranks, strict=True):
            rows = row_of(one.counts)
            at, found = find(sent.chosen, rows, one.indices)
            flat = np.zeros(len(sent.chosen.indices), np.float32)
            flat[at[found]] = one.values[found]
            row[:] = flat[sent.places]
            counts = np.bincount(rows[~found], minlength=len(one.counts))
            left = one.indices[~found], one.values[~found]
            outside.append(Selection(np.cumsum(counts) - counts, counts, *left))
        return Arrived(inside, outside)


def row_of(counts: Sizes) -> Sizes:
    """Return the row of each element, for ``counts`` elements per row."""
    return np.repeat(np.arange(len(counts)), counts)


def find(
    chosen: Selection, rows: Sizes, wanted: npt.NDArray[np.uint32]
) -> tuple[Sizes, npt.NDArray[np.bool_]]:
    """Return the index of each wanted element in ``chosen``, and whether ``chosen`` contains it.

    There must be no gaps between the rows of ``chosen``.
    """
    keys = (row_of(chosen.counts) << _WIDTH) + chosen.indices
    own = (rows << _WIDTH) + wanted
    at = np.minimum(np.searchsorted(keys, own), len(keys) - 1)
    return at, keys[at] == own


@dataclass(frozen=True)
class Decoders:
    """Compute one encoder E and a decoder D_k for each of K ranks; D_k reads the rank's innovations in its last layer.

        L = sum over k of ||D_k(E(s_j), i_k) - s_k||**2 + similarity sum over k, m != k of ||E(s_k) - E(s_m)||**2

    s_k: the values of rank k; i_k: its innovations among them, 0 elsewhere; j: the rank whose code is decoded. The
    second sum runs over ordered pairs, so each pair counts twice. Weights are one flat float32 array: those of E, then
    those of each D_k. All D_k have the same initial weights. That of the innovations is 1, so an untrained D_k nearly
    returns them.

    Source: Abrahamyan et al. 2021, section IV-A, equations 3 to 7, with a lambda1 of 1, which the paper leaves open.
    """

    channels: int
    ranks: int
    similarity: float = 0.5
    deconvolutions: int = 5

    @cached_property
    def pair(self) -> Autoencoder:
        """Return the autoencoder of E and one D."""
        return Autoencoder(self.channels, 1, self.deconvolutions)

    @property
    def variants(self) -> list[Decoders]:
        """Return the nets with each number of deconvolutions, the largest first."""
        return [replace(self, deconvolutions=number) for number in DECODERS]

    def of(self, weights: Floats) -> Decoders:
        """Return the nets, of any number of deconvolutions, that have as many weights as these."""
        return next(net for net in self.variants if net.size == len(weights))

    @property
    def decoder_size(self) -> int:
        return self.pair.size - self.pair.encoder_size

    @property
    def size(self) -> int:
        return self.pair.encoder_size + self.ranks * self.decoder_size

    def first_weights(self, seed: int) -> Floats:
        first = self.pair.first_weights(seed)
        end = self.pair.encoder_size
        return np.concatenate([first[:end], np.tile(first[end:], self.ranks)])

    def adapted(self, weights: Floats, seed: int) -> Floats | None:
        """Return weights for this number of ranks, from those of another number; new decoders get initial weights.

        None if the length of ``weights`` fits no number of ranks.
        """
        end = self.pair.encoder_size
        for net in self.variants:
            if len(weights) > end and (len(weights) - end) % net.decoder_size == 0:
                found = net.first_weights(seed)
                kept = min(len(found), len(weights))
                found[:kept] = weights[:kept]
                return found
        return None

    def encode(self, weights: Floats, values: Floats) -> Floats:
        return self.pair.encode(weights, values)

    def decode(self, weights: Floats, code: Floats, innovations: Floats) -> Floats:
        """Return D_k(code, row k of ``innovations``) for every k, shape (K, values). Nothing here is normalised."""
        codes, beside = code.reshape(self.channels, 1, -1), as_samples(innovations)
        found = np.empty_like(innovations)
        for k, layers in enumerate(self._decoders(weights)):
            decoded, _ = self.pair.run_decoder(layers, codes, beside[:, k : k + 1])
            found[k] = decoded.reshape(-1)[: innovations.shape[1]]
        return found

    def train(
        self, weights: Floats, samples: Floats, innovations: Floats, drawn: int, rate: float
    ) -> tuple[Floats, float]:
        """Return the weights after one step of gradient descent on L, and the mean of L's first sum before it.

        ``samples`` and ``innovations``: (K, values). ``drawn``: the rank whose code all D are given. The mean is over
        ranks. Weights stay as they were if any would not be finite.
        """
        reconstruction, _, gradient = self.gradient(weights, samples, innovations, drawn)
        with np.errstate(all="ignore"):
            changed = weights - np.float32(rate) * gradient
        return (changed if np.isfinite(changed).all() else weights), reconstruction / self.ranks

    def gradient(
        self, weights: Floats, samples: Floats, innovations: Floats, drawn: int
    ) -> tuple[float, float, Floats]:
        """Return both sums of L, the second not weighted, and the gradient of L as a flat array."""
        pair, inputs, beside = self.pair, as_samples(samples), as_samples(innovations)
        encoder = pair.rounded(weights, ENCODER)
        errors: list[Floats] = []
        upper: list[Floats] = []
        with np.errstate(all="ignore"):
            codes, encoding = pair.run_encoder(encoder, inputs)
            apart = codes - mean_of(codes)
            # The gradient of the second sum in E(s_k) is 4 K (E(s_k) - mean), because each pair counts twice.
            behind = np.float32(4 * self.similarity * self.ranks) * apart
            for k, layers in enumerate(self._decoders(weights)):
                found, decoding = pair.run_decoder(layers, codes[:, drawn : drawn + 1], beside[:, k : k + 1])
                errors.append(found - inputs[:, k : k + 1])
                below, gradients = pair.decoder_back(layers, decoding, 2 * errors[-1])
                behind[:, drawn] += below[:, 0]
                upper += gradients
            lower = pair.encoder_back(encoder, encoding, behind)
            reconstruction = squares(np.concatenate(errors))
            similarity = 2 * self.ranks * squares(apart)
        return reconstruction, similarity, np.concatenate([g.reshape(-1) for g in (*lower, *upper)])

    def _decoders(self, weights: Floats) -> list[list[Whole]]:
        parts = weights[self.pair.encoder_size :].reshape(self.ranks, -1)
        return [self.pair.rounded(part, DECODER) for part in parts]


@dataclass(frozen=True)
class Server(Form):
    """Decode the leader's code once for each rank, with that rank's innovations.

    r_k = D_k(E(g_j), i_k at S); mean = (1/N) sum over k of (r_k at S + i_k outside of S); j: the leader, as in LGC.

    Every rank is a server: it runs all N decoders. ``innovation``: the share of a layer's selected values that are
    innovations, at least one value; 0: none. ``similarity``: the weight of the second sum of :class:`Decoders`' loss.
    """

    innovation: float
    similarity: float

    @property
    def field(self) -> str:
        return f"{SHARED}lgc_server_{self.channels}"

    def network(self, ranks: int) -> Decoders:
        """Return E, and a D for every rank."""
        return Decoders(self.channels, ranks, float(self.similarity), self.deconvolutions)

    def read(self, saved: Floats) -> tuple[Floats, float]:
        """Return weights and loss of the state of another number of ranks, or of an earlier version."""
        net = self.network(1).variants[0]
        ranks, rest = divmod(len(saved) - 2 - net.pair.encoder_size, net.decoder_size)
        if ranks > 0 and rest == 0 and saved[-1] in DECODERS:
            return self.unpack(saved, ranks)
        return super().read(saved)

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
        code = shares(4 * self.network(1).pair.code_length(int(counts.sum())), counts).astype(np.float64)
        innovations = self.format(table, counts).wire_bytes(self.limits(counts)).astype(np.float64)
        return Traffic(code, innovations, np.zeros_like(code))

    def marking(self, group: Group, sent: Sent) -> Marking:
        """Return the rider that selects this rank's innovations, as in phase 3."""
        return Selecting(sent, self._own(group, sent))

    def marked(self, values: int) -> int:
        return values

    def unit(self, lesson: Lesson) -> float:
        """Return the root mean square of the ranks' norms. Divided by it, samples decoded as zeros have a loss of 1."""
        return math.sqrt(squares(lesson.samples) / len(lesson.samples))

    def train(self, weights: Floats, lesson: Lesson, rate: float) -> tuple[Floats, float]:
        """Train to decode every rank's values from the leader's code, as phase 3 does."""
        samples = lesson.samples
        innovations = np.where(lesson.innovations, samples, np.float32(0))
        network = self.network(len(samples)).of(weights)
        return network.train(weights, samples, innovations, lesson.leader, rate)

    def code(
        self, group: Group, context: StepContext, sent: Sent, weights: Weights, share: Share
    ) -> Exchange:
        """Request a Broadcast of the code, and of indices that are not kept, and a Gather of innovations, if any."""
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
            found = network.of(weights()).decode(weights(), coding.code, arrived.inside)
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
        self, group: Group, context: StepContext, sent: Sent, flags: Bytes, arrived: Arrived, found: Floats
    ) -> None:
        """Write residuals: at S p - r_k with ``feedback``, else 0; at this rank's innovations outside of S 0."""
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
        self.nbytes = 4 * network.pair.code_length(sent.count)
        self.code: Floats = np.zeros(0, np.float32)

    def lead(self, group: Group, chosen: Selection, flags: Bytes, view: Bytes) -> None:
        """Write the code. Rows that are flagged count as zeros, because a code mixes rows."""
        super().lead(group, chosen, flags, view)
        values = chosen.values[self._sent.places]
        values[flags[self._sent.rows] != 0] = 0
        with np.errstate(all="ignore"):
            code = self._network.of(self._weights()).encode(self._weights(), values)
        view[:] = code.astype("<f4").view(np.uint8)

    def read(self, data: Bytes) -> None:
        self.code = data.view("<f4").astype(np.float32)


def _scatter(
    group: Group, context: StepContext, sent: Sent, flags: Bytes, arrived: Arrived, total: Floats
) -> None:
    """Write (decoded values at S + innovations outside of S) / divisor to the outputs."""
    lists = [sent.chosen, *arrived.outside]
    begins = np.cumsum([0, *(len(one.indices) for one in lists[:-1])])
    group.device.kernels.scatter_mean(
        group.table,
        flags,
        np.stack([one.offsets + begin for one, begin in zip(lists, begins, strict=True)]),
        np.stack([one.counts for one in lists]),
        np.concatenate([one.indices for one in lists]),
        np.concatenate([sent.in_rows(total), *(one.values for one in arrived.outside)]),
        divisor=context.divisor,
        scale=context.unscale,
    )
