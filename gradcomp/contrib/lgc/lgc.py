"""LGC encodes the values at one rank's top-k indices with an autoencoder that it trains in the first steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from gradcomp.compress.base import SHARED, Compressor, Traffic, Traits, check_momentum_factor, zeros
from gradcomp.compress.checks import check_flag, check_number, check_whole, check_word, is_number
from gradcomp.compress.identity import Identity
from gradcomp.compress.messages import Bytes, Exchange, Gather
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import keep_errors
from gradcomp.compress.sparse.clt_k import CLTk
from gradcomp.compress.sparse.drawn import Floats
from gradcomp.compress.sparse.payload import sent_by
from gradcomp.compress.wrappers.momentum import MomentumCorrection
from gradcomp.compress.wrappers.schedule import Warmup
from gradcomp.contrib.lgc.autoencoder import DECODERS
from gradcomp.contrib.lgc.base import AUTO, PART, Form, Lesson, Sent, Stopwatch, every, is_share, shares
from gradcomp.contrib.lgc.ring import Ring
from gradcomp.contrib.lgc.server import Server
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.state import Begin
from gradcomp.kernels import philox
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.step import StepContext

# The weight of a step's loss in the moving average of losses.
_LATEST = 0.05
# A loss above this means that the nets are hardly better than an output of zeros, whose loss is 1.
_LITTLE = 0.9
_MOST_LOSS = 1e6
# The field of m, when the nets are trained on every m-th sample.
_EVERY = f"{SHARED}trained_every"

logger = logging.getLogger("gradcomp")
# The draw of the leader has this number in the place of a layer's hash in its random counter.
_LEADERS = 0x4C474332
_MOST_CHANNELS = 64
_MOST_SIMILARITY = 1e6


@register("lgc")
@dataclass(frozen=True)
class LGC(CLTk):
    """Send a learned code of the values at one rank's top-k indices; ``form`` selects whose values are sent.

    u_t = m u_{t-1} + g_t;  p_t = u_t + e_t;  S: the k = round(density n) largest |p| of each layer, at least one, on
    the step's leader j, which the shared seed draws;  g: the values of p at S, of all layers in the order of the model;
    e_{t+1} = p_t outside of what is sent and 0 inside;  u_t = 0 inside. There are three phases, by the
    number of the step:

    1. the first ``warmup_steps``: exact means of u;
    2. the next ``train_steps``: mean = (1/N) sum over ranks of g. Every rank also makes the same step of gradient
       descent from the same weights; the loss is L, with g divided by a scale;
    3. all later steps, which send codes:

        ring    mean = D((1/N) sum over ranks of E(g_k));  L = ||D((1/N) sum E(g_k)) - (1/N) sum g_k||**2
        server  mean = (1/N) sum over ranks of (r_k at S + i_k outside of S);  r_k = D_k(E(g_j), i_k at S)
                L = sum ||r_k - g_k||**2 + ``similarity`` sum over k, m != k of ||E(g_k) - E(g_m)||**2

    i_k: the innovations of rank k, the round(``innovation`` k) largest |p| of each of its layers, at least one; none if
    ``innovation`` is 0.
    E and D are those of :class:`Autoencoder` and :class:`Decoders`, with ``code_channels`` floats for 16 values: with
    4 the code has a quarter of the size of g, with 1 a sixteenth. The scale is the norm of the mean in a ring, and the
    root mean square of the norms on a server. ``learning_rate`` is the learning rate of their training.
    ``deconvolutions``: 5, or 4 as in earlier versions; a resumed run goes on with the nets of its checkpoint.

    ``ends``: treat the ends of the model as the paper does. The first layer of two or more dimensions is sent exactly.
    The last such layer uses :class:`CLTk`, which sends its values at S exactly. ``least_parameters``: the least number
    of parameters in the layers between them. ``feedback``: in phase 3 keep the error of the code, e = p - mean inside
    of S, or p - r_k on a server, and send it later. Without ``feedback`` this error is lost, as in the paper. The
    initial weights are drawn from the seed.

    ``momentum_factor``: m; ``"optimizer"``: the momentum of the layer's group in the optimizer, as in
    :class:`MomentumCorrection`. If m is a number and the optimizer also has momentum, the step raises ConfigError.
    ``train_share``: 1/m trains on every m-th sample. ``"auto"`` trains on all samples until every rank has measured 10
    steps. Then all ranks set it once, to the largest 1/m at which training takes, on average, at most 5% of the rest of
    a step on the slowest rank.

    Wire: phase 1 sends gradients uncompressed. Phases 2 and 3 send a Broadcast of the leader's deflated indices. Phase
    2 adds a Gather of 4k bytes, (N - 1) 4k per rank, with 4 more bytes if the share is measured and k / 8 more on a
    server. In phase 3 a ring adds a Sum of c = k ``code_channels`` / 4 bytes, with k padded to a multiple of 16. A
    server adds c bytes to the Broadcast, and a Gather of 4i bytes and i deflated indices, for i innovations. The paper
    counts every payload once: c, indices and innovations for the leader, innovations for the others. Here every rank is
    a server: all payloads are sent (N - 1) times, and nothing is sent back. Weights are not sent. All layers are
    exchanged together, once the last gradient has arrived. With ``refresh`` = s the indices are sent in every s-th
    step.
    State: a residual and u per layer, 16 bytes per element; one set of weights, 8 bytes per weight; one m of
    ``train_share``; the indices that ``refresh`` keeps. A server has a D for each rank. When the number of ranks
    changes, the D of ranks that still exist are kept, and the D of new ranks have initial weights.
    Errors: ConfigError for invalid settings, and for a model with fewer than ``least_parameters`` between its first and
    its last layer; WireFormatError for indices that are out of range or not ascending, or that inflate to a wrong size;
    StateError for weights of no number of ranks or deconvolutions.
    Source: Abrahamyan et al. 2021, sections IV to V and VI-A, Algorithms 1 (server) and 2 (ring). Differs: S is the
    leader's on all ranks, as in section V-A for the ring (the algorithms select locally); weights are trained on all
    ranks instead of sent by one; the scale, channels, strides and kernel sizes, which the paper does not give; the last
    layer's leader is that of :class:`CLTk`; see docs/decisions/0040, 0042 and 0057.
    """

    density: float = 0.001
    momentum_factor: float | str = 0.9
    warmup_steps: int = 200
    train_steps: int = 300
    code_channels: int = 4
    learning_rate: float = 0.001
    ends: bool = True
    least_parameters: int = 50_000
    form: str = field(default="ring", kw_only=True)
    innovation: float = field(default=0.1, kw_only=True)
    similarity: float = field(default=0.5, kw_only=True)
    indices: str = field(default="deflate", kw_only=True)
    feedback: bool = field(default=False, kw_only=True)
    train_share: float | str = field(default=AUTO, kw_only=True)
    deconvolutions: int = field(default=5, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum_factor(self.momentum_factor, "momentum_factor")
        check_number("learning_rate", self.learning_rate, "[0, 1)")
        for name in ("warmup_steps", "train_steps", "least_parameters"):
            check_whole(name, getattr(self, name), 0)
        check_whole("code_channels", self.code_channels, 1, _MOST_CHANNELS)
        check_whole("deconvolutions", self.deconvolutions, min(DECODERS), max(DECODERS))
        if not is_share(self.train_share):
            raise ConfigError(
                f"train_share must be {AUTO!r}, or 1/m of a whole number m, got {self.train_share!r}"
            )
        check_flag("ends", self.ends)
        check_word("form", self.form, ("ring", "server"))
        check_number("innovation", self.innovation, "[0, 1]")
        if not is_number(self.similarity) or not 0.0 <= self.similarity <= _MOST_SIMILARITY:
            raise ConfigError(f"similarity must be in [0, {_MOST_SIMILARITY:g}], got {self.similarity!r}")

    @cached_property
    def traits(self) -> Traits:
        """Return the traits: a residual, and momentum that is reset at the indices that were sent.

        The error of the code is kept only with ``feedback``.
        """
        return Traits(
            keeps_residual=True,
            accounts=self.feedback,
            momentum=self.momentum_factor,
            masks_momentum=bool(self.momentum_factor),
            contributes=True,
            whole_model=True,
            learns=True,
            by_times=self.train_share == AUTO and self.train_steps > 0,
        )

    # -- phases and places --------------------------------------------------------------------------------------

    def at_step(self, step: int) -> Compressor:
        """Return the compressor of a step: exact in phase 1, then LGC in phase 2 (training) or phase 3 (codes)."""
        if step < self.warmup_steps:
            return self.dense(Identity())
        if step < self.warmup_steps + self.train_steps:
            return replace(self, warmup_steps=0)
        return replace(self, warmup_steps=0, train_steps=0)

    @property
    def changes(self) -> tuple[int, ...]:
        """Return the ends of phases 1 and 2."""
        return tuple(sorted({self.warmup_steps, self.warmup_steps + self.train_steps} - {0}))

    def dense(self, exact: Compressor) -> Compressor:
        return MomentumCorrection(exact, self.momentum_factor) if self.momentum_factor else exact

    def by_place(self, own: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> Mapping[str, Compressor]:
        """Return the compressors of the first and last layer. ConfigError if too few parameters are between them."""
        ends = [layer for layer in layers if len(layer.shape) > 1] if self.ends else []
        found: dict[str, Compressor] = {}
        if ends:
            values = self.dense(CLTk(self.density, indices=self.indices, refresh=self.refresh))
            found[ends[-1].name] = Warmup(values, self.warmup_steps) if self.warmup_steps else values
            found[ends[0].name] = self.dense(Identity())
        between = sum(layer.size for layer in own if layer.name not in found)
        if between < self.least_parameters:
            raise ConfigError(
                f"lgc: {between} parameters between the first and the last layer, {self.least_parameters} are the "
                f"least: {self.nets.network(2).size} weights would be trained for {round(between * self.density)} "
                "values. Use gc.DGC(), or least_parameters=0"
            )
        names = {layer.name for layer in own}
        return {name: compressor for name, compressor in found.items() if name in names}

    def shared_fields(self, seed: int, ranks: int) -> dict[str, tuple[int, Begin]]:
        """Return a field of the nets' weights and the mean loss of about the last 20 steps, which begins at 1.

        If the share is measured, another field has the m that the ranks agreed on, or 0 until they have.
        """
        form = self.nets

        def begin(saved: Floats) -> Floats:
            return form.begin(saved, seed, ranks)

        measured = {_EVERY: (1, zeros(1))} if self.traits.by_times else {}
        return {form.field: (form.length(ranks), begin), **measured}

    @cached_property
    def nets(self) -> Form:
        """Return the ring or server form, which trains and applies the nets."""
        if self.form == "ring":
            return Ring(self.code_channels, self.indices, self.feedback, self.deconvolutions)
        shared = self.code_channels, self.indices, self.feedback, self.deconvolutions
        return Server(*shared, self.innovation, self.similarity)

    # -- a step -------------------------------------------------------------------------------------------------

    def wire_bytes(self, group: Group) -> Sizes:
        """Return the bytes of each layer: 4k for values in phase 2, or its share of the code in phase 3.

        Indices are added, but count 0 bytes if they are deflated, because no formula gives their size.
        """
        values = self._values(group)
        indices = self.format(group.table).row_bytes(self.limits(group.table))
        return indices + (values.led + values.gathered + values.summed).astype(np.int64)

    def traffic(self, group: Group) -> Traffic:
        """Return the mean bytes of a step: the indices, divided by ``refresh``, and the values or codes."""
        values = self._values(group)
        indices = self.format(group.table).row_bytes(self.limits(group.table)) / self.refresh
        return replace(values, led=indices + values.led)

    def _values(self, group: Group) -> Traffic:
        counts = self.limits(group.table)
        if not self.train_steps:
            return self.nets.code_traffic(group.table, counts)
        marks = shares((self.nets.marked(int(counts.sum())) + 7) // 8, counts)
        gathered = (4 * counts + marks).astype(np.float64)
        gathered[:1] += 4 * self.traits.by_times
        none = np.zeros_like(gathered)
        return Traffic(none, gathered, none)

    def leader(self, context: StepContext) -> int:
        """Return the rank that leads the current period of ``refresh`` steps, drawn from the seed."""
        draw = context.draw
        counter = np.array([0, _LEADERS, draw.step - draw.step % self.refresh, 0], np.uint32)
        word = philox.philox4x32(counter, (draw.seed & 0xFFFFFFFF, draw.seed >> 32))[0]
        return int(word) % context.world

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request a Broadcast, then the Gather or Sum of the phase, if anything is left to send."""
        sent = group.scratch.once("sent", lambda: Sent.of(group, self.selection_of(group)))
        return (yield from (self._train if self.train_steps else self._code)(group, context, sent))

    def _train(self, group: Group, context: StepContext, sent: Sent) -> Exchange:
        """Gather the values of all ranks, add them up, and train the nets on them.

        If training is measured, each rank sends its relative time after the values.
        """
        marking, watch = self.nets.marking(group, sent), group.scratch.once("watch", Stopwatch)
        shared = yield from self.share_indices(group, context, marking)
        flags, values = shared.flags.copy(), 4 * sent.count
        end = values + 4 * self.traits.by_times

        def write(view: Bytes) -> tuple[Bytes, int]:
            own = shared.prepare()
            view[:values] = sent.values(group, flags | own).astype("<f4").view(np.uint8)
            view[values:end].view("<f4")[:] = watch.part
            view[end:] = np.packbits(marking.marks())
            keep_errors(group, sent.chosen, np.zeros_like(sent.chosen.values))
            return own, len(view)

        reply = yield Gather(end + (self.nets.marked(sent.count) + 7) // 8, write)
        flags |= reply.flags
        samples = np.zeros((len(reply.data), sent.count), np.float32)
        marks = np.zeros(samples.shape, np.bool_)
        parts = []
        for rank, payload in enumerate(reply.data):
            with sent_by(rank):
                samples[rank] = payload[:values].view("<f4")
                parts += payload[values:end].view("<f4").tolist()
                marks[rank] = np.unpackbits(payload[end:], count=sent.count)
        total = samples[0].copy()
        with np.errstate(all="ignore"):
            for other in samples[1:]:
                total += other
        sent.scatter(group, flags, total, context.divisor, context.unscale)
        lesson = Lesson(samples, marks, self.leader(context))
        holder, weights, kept = self._kept(context)
        if holder in group.layers:
            number = self._every(group, context, holder, parts)
            if context.draw.step % max(number, 1) == 0:
                weights, kept = watch.time(lambda: self._learn(weights, kept, lesson))
            self._keep(context, holder, weights, kept)
        return flags

    def _every(self, group: Group, context: StepContext, holder: int, parts: Sequence[float]) -> int:
        """Return m, for training on every m-th sample; 0 if it is not known yet, and all samples are used."""
        if not self.traits.by_times:
            return round(1 / float(self.train_share))
        number = int(context.field(_EVERY).value(holder)[0])
        if not number:
            number = every(parts)
            if number and context.draw.rank == 0:
                logger.info(
                    "step %d: LGC trains on %s from now on, so that steps take at most %d%% longer; one training took "
                    "%.1f%% of the rest of a step",
                    context.number,
                    "every sample" if number == 1 else f"one of {number} samples",
                    round(100 * PART),
                    100 * max(parts),
                )
        context.store(_EVERY, np.array([holder]), np.array([number], np.float32))
        return number

    def _learn(self, weights: Floats, kept: float, lesson: Lesson) -> tuple[Floats, float]:
        """Return weights and loss after one step of gradient descent."""
        unit = self.nets.unit(lesson)
        if 0.0 < unit < math.inf and np.isfinite(lesson.samples).all():
            lesson = replace(lesson, samples=(lesson.samples / unit).astype(np.float32))
            weights, loss = self.nets.train(weights, lesson, float(self.learning_rate))
            if math.isfinite(loss):
                kept += _LATEST * (min(loss, _MOST_LOSS) - kept)
        return weights, kept

    def _kept(self, context: StepContext) -> tuple[int, Floats, float]:
        """Return the layer whose state holds the nets, their weights and their loss."""
        assert context.fields is not None, "state is there when a step runs"
        holder = context.fields.holder(self.nets.field)
        return holder, *self.nets.unpack(context.field(self.nets.field).value(holder), context.world)

    def _keep(self, context: StepContext, holder: int, weights: Floats, loss: float) -> None:
        context.store(self.nets.field, np.array([holder]), self.nets.pack(weights, loss, context.world))

    def _say(self, context: StepContext, loss: float) -> bool:
        """Log how the training ended, on one rank."""
        if context.draw.rank == 0 and context.number:
            little = loss > _LITTLE
            logger.log(
                logging.WARNING if little else logging.INFO,
                "step %d: LGC sends codes; the loss of its training was %.3f, that of zeros is 1%s",
                context.number,
                loss,
                ". Feedback around such a code diverges" if little and self.feedback else "",
            )
        return True

    def _code(self, group: Group, context: StepContext, sent: Sent) -> Exchange:
        """Run a step of phase 3 by the form, and log once how training ended."""
        share = partial(self.share_indices, group, context)
        flags = yield from self.nets.code(group, context, sent, lambda: self._kept(context)[1], share)
        holder, weights, loss = self._kept(context)
        group.scratch.once("said", lambda: self._say(context, loss))
        if holder in group.layers:  # a commit swaps the buffers, so both need the weights
            self._keep(context, holder, weights, loss)
        return flags
