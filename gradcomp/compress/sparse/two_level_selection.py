"""TwoLevelSelection selects at two densities and sends one, as GraVAC needs it (Tyagi and Swany 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Compressor
from gradcomp.compress.checks import check_number
from gradcomp.compress.identity import Identity
from gradcomp.compress.messages import Bytes, Exchange, Floats, Gather, Sum
from gradcomp.compress.registry import register
from gradcomp.compress.sparse.base import ByDensity, Sparse, elements_at, keep_errors, scatter_payloads
from gradcomp.compress.sparse.drawn import Drawn
from gradcomp.compress.sparse.payload import Selection, SparseFormat
from gradcomp.compress.sparse.topk import TopK
from gradcomp.compress.wrappers.base import Wrapper
from gradcomp.core.errors import ConfigError
from gradcomp.core.vectors import HostVector
from gradcomp.kernels.codec import Codec, Group, Scratch, Sizes, Table
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import FLOAT32, FP32, SEGMENT
from gradcomp.kernels.step import Observations, StepContext

Addresses = npt.NDArray[np.uint64]

#: ``send`` is one of these.
CANDIDATE, MINIMUM, DENSE = "candidate", "minimum", "dense"

#: The second draw of random elements has the seed with these bits changed: with the same numbers as in the first one
#: some elements would never be in both.
_SECOND_DRAW = 0x9E3779B97F4A7C15

#: Observations of every layer: squared norms of scale g, of p, of p in the first selection and in the candidate's.
GRADIENT, TOTAL = "two_level_selection.gradient", "two_level_selection.total"
KEPT, KEPT_BY_CANDIDATE = "two_level_selection.minimum", "two_level_selection.candidate"


@register("two_level_selection")
@dataclass(frozen=True)
class TwoLevelSelection(Wrapper):
    """Select at two densities, the second among what the first selected; send one of the two, or everything.

    p = scale g + decay e;  S_min = ``inner``'s selection at its density;  S_c = the k_c = round(``candidate`` n)
    largest elements of S_min, ties to the lower index, at most as many as S_min has. Under RandomK and RandomBlock S_c
    is such a draw too: of k_c elements of S_min, with random numbers of its own. ``send="candidate"`` sends p on
    S_c and ``"minimum"`` on S_min, with e' = p outside, as ``inner`` has it; ``"dense"`` sends p, with e' = 0. The
    level is ``inner``'s density.

    A controller that watches the exchange finds the squared norms of scale g, of p, of p on S_min and of p on S_c
    (float64, per layer) as the observations :data:`GRADIENT`, :data:`TOTAL`, :data:`KEPT` and
    :data:`KEPT_BY_CANDIDATE`. Without a watcher the second selection is
    made only if it is sent, and the first only if it or the second is sent. The second selection reads the
    first one and not the layer. If the first is an exact top-k, so is the second: ``TwoLevelSelection(TopK(0.1),
    0.01)`` sends the bytes of ``TopK(0.01)``.

    Momentum and clipping are ``inner``'s. Masked momentum is reset where an element was sent: with ``"dense"``
    everywhere.

    Wire: as ``inner`` at the density that is sent; dense: one Sum of 4 bytes per element, 2 d (N-1)/N bytes per rank
    for d bytes, added by the transport's own allreduce.
    State: as ``inner``.
    Errors: ConfigError for an ``inner`` that does not select elements by density on every rank, for one that is
    ``scaled``, a candidate outside (0, 1], and any other ``send``.
    Source: Tyagi and Swany 2023, section IV-C (multi-level compression) and Algorithm 1, lines 6 to 8, 13, 18 and 23.
    """

    candidate: float = 0.001
    send: str = CANDIDATE

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.inner
        drawn, selected = isinstance(inner, Drawn), isinstance(inner, ByDensity) and isinstance(inner, Sparse)
        if not drawn and not selected:
            raise ConfigError(
                "two_level_selection takes a compressor that selects a share of each layer on every rank (topk, dgc, "
                f"redsync, sidco, random_k), got {inner.to_string()}; wrappers go around two_level_selection"
            )
        if isinstance(inner, Drawn) and inner.scaled:
            raise ConfigError(f"two_level_selection sends values as they are, got {inner.to_string()}")
        check_number("density", self.candidate, "(0, 1]")
        if self.send not in (CANDIDATE, MINIMUM, DENSE):
            raise ConfigError(f"send must be candidate, minimum or dense, got {self.send!r}")

    def dense(self, exact: Compressor) -> Compressor:
        return self.inner.dense(exact)

    def bare(self) -> Compressor:
        """Return the compressor that is applied.

        The candidate of a draw is a draw of as many elements, though not of the same ones; of any other selection it is
        a top-k.
        """
        if self.send == DENSE:
            return Identity()
        if self.send == MINIMUM:
            return self.inner.bare()
        if isinstance(self.inner, Drawn):
            return self.inner.with_level(self.candidate)
        return TopK(self.candidate, values=self._sparse.values)

    def wire_bytes(self, group: Group) -> Sizes:
        if self.send == DENSE:
            return 4 * group.table["length"].astype(np.int64)
        if isinstance(self.inner, Drawn):
            return 4 * (self.inner.limits(group.table) if self.send == MINIMUM else self.wanted(group.table))
        form = self._format(group.table)
        return form.wire_bytes(form.limits)

    def exchange(self, group: Group, context: StepContext) -> Exchange:
        """Request one Gather, or one Sum if ``send`` is ``"dense"`` or all ranks draw the same elements."""
        if self.send == DENSE:
            return self._everything(group, context)
        if isinstance(self.inner, Drawn):
            return self._summed(self.inner, group, context)
        return self._gathered(group, context)

    def _summed(self, inner: Drawn, group: Group, context: StepContext) -> Exchange:
        levels = self._levels(group)
        chosen = levels.second if self.send == CANDIDATE else levels.minimum

        def prepare() -> Bytes:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            self._select(levels, group.inputs["next_residual"], group, context, flags)
            if self.send == CANDIDATE:
                levels.candidate()
            return flags

        return (yield from inner.sum_at(group, context, chosen, prepare))

    def _gathered(self, group: Group, context: StepContext) -> Exchange:
        form = group.scratch.once("format", lambda: self._format(group.table))

        def write(view: Bytes) -> tuple[Bytes, int]:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            levels = self._levels(group)
            self._select(levels, group.inputs["next_residual"], group, context, flags)
            chosen = levels.candidate() if self.send == CANDIDATE else levels.minimum
            used, errors = form.encode(chosen, view, flags, context.draw)
            keep_errors(group, chosen, errors)
            return flags, used

        reply = yield Gather(form.max_bytes, write, form.fixed)
        return scatter_payloads(form, group, context, reply.data, reply.flags)

    def _everything(self, group: Group, context: StepContext) -> Exchange:
        lengths = group.table["length"].astype(np.int64)
        # The buffer of a Sum holds the segments in this way, one after the other.
        group.table["payload"] = 4 * (np.cumsum(lengths) - lengths)

        def write(view: Floats) -> Bytes:
            flags = np.zeros(len(group.table), dtype=np.uint8)
            # On the host p is written to the send buffer; on a device, to device memory that is copied there.
            made = HostVector(view) if group.device is HOST else group.scratch.vector("p", len(view))
            places = np.uint64(made.address) + group.table["payload"].astype(np.uint64)
            self._select(self._levels(group), places, group, context, flags)
            if group.device is not HOST:
                view[:] = made.read(0, len(view))
            view[np.repeat(flags != 0, lengths)] = np.nan
            if group.feedback:
                _clear(group, "next_residual")
            if group.compressor.traits.masks_momentum:
                _clear(group, "gradient")  # the column points to the momentum, float32
            return flags

        reply = yield Sum(group.elements, write)
        flags = np.zeros_like(reply.flags)
        payload = reply.data.view(np.uint8)
        Codec(FP32).decode(
            group.device, group.table, payload, flags, divisor=context.divisor, scale=context.unscale
        )
        return flags

    def _format(self, table: Table) -> SparseFormat:
        """Return the payload format of what is sent."""
        inner = self._sparse
        if self.send == MINIMUM:
            return inner.format(table)
        return SparseFormat(table, self.wanted(table), inner.fixed, inner.indices, inner.values)

    def wanted(self, table: Table) -> Sizes:
        """Return k_c of each row."""
        counts = elements_at(self.candidate, table["length"].astype(np.int64))
        wanted: Sizes = np.minimum(counts, table["level"]).astype(np.int64)
        return wanted

    @property
    def _sparse(self) -> Sparse:
        assert isinstance(self.inner, Sparse), "checked"
        return self.inner

    def _levels(self, group: Group) -> Levels:
        """Return the group's working memory, which is made once."""
        inner = self.inner
        assert isinstance(inner, Sparse | Drawn), "checked"
        return group.scratch.once("levels", lambda: Levels(group, inner, self.wanted(group.table)))

    def _select(
        self, levels: Levels, places: Addresses, group: Group, context: StepContext, flags: Bytes
    ) -> None:
        """Write p to ``places``, and select from it what is sent or watched."""
        levels.group.inputs[:] = group.inputs
        levels.group.inputs["next_residual"] = places
        watcher = context.observations
        if self.send == DENSE and (watcher is None or levels.everything):
            factors = context.factors(len(flags))
            group.device.kernels.contribute(levels.group.inputs, flags, factors, decay=context.decay)
            if watcher is not None:
                levels.note_everything(watcher, context.scale)
            return
        levels.select(context, flags)
        if watcher is not None or self.send == CANDIDATE:
            levels.refine(context)
        if watcher is not None:
            levels.note(watcher, context.scale)


class Levels:
    """Hold both selections of a group, and what is needed to make the second from the first."""

    def __init__(self, group: Group, inner: Sparse | Drawn, wanted: Sizes) -> None:
        self.group = replace(group, compressor=inner, table=group.table.copy(), scratch=Scratch(group.device))
        limits = inner.limits(group.table)
        self.minimum = Selection.allocate(limits)
        self.everything = bool((wanted == group.table["length"]).all())
        self._inner, self._wanted = inner, wanted
        self._top = Selection.allocate(wanted)  # its indices count within the first selection
        #: The second selection, with indices that count within layers, once :meth:`candidate` has written them.
        self.second = replace(self._top, indices=np.zeros_like(self._top.indices))
        rows = len(group.table)
        self._ones = np.ones(rows, dtype=np.float32)
        self._values = np.zeros(rows, dtype=SEGMENT)
        self._values["dtype"] = FLOAT32
        # A second draw, in which the elements of the first are the layer.
        self._within = group.table.copy()
        self._within["length"], self._within["level"] = limits, wanted

    def select(self, context: StepContext, flags: Bytes) -> None:
        """Write p, and make the first selection."""
        first, inner, table = self.minimum, self._inner, self.group.inputs
        if isinstance(inner, Sparse):
            inner.select(self.group, context, first, flags)
            return
        factors = context.factors(len(table))
        self.group.device.kernels.contribute(table, flags, factors, decay=context.decay)
        first.indices[:] = inner.draw(table, context.draw)
        self.group.device.kernels.take(table, first.offsets, first.counts, first.indices, first.values)

    def refine(self, context: StepContext) -> None:
        """Select the largest of the selected values in one call, or draw among them."""
        first, top, table = self.minimum, self._top, self._values
        if isinstance(self._inner, Drawn):
            own = replace(context.draw, seed=context.draw.seed ^ _SECOND_DRAW)
            top.indices[:] = self._inner.draw(self._within, own)
            top.values[:] = first.values[np.repeat(first.offsets, top.counts) + top.indices]
            return
        np.minimum(self._wanted, first.counts, out=top.counts)
        _point_to(table, "gradient", first.values, first)
        table["next_residual"] = table["gradient"]  # the kernel writes the values back in place
        finite = np.zeros(len(table), dtype=np.uint8)
        # Zeros among the selected elements may be selected again.
        HOST.kernels.select_top(table, finite, self._ones, top.counts, *top.arrays, decay=1.0, zeros=True)

    def candidate(self) -> Selection:
        """Return the second selection, with indices that count within layers."""
        first, top, table = self.minimum, self._top, self._values
        _point_to(table, "next_residual", first.indices, first)
        # The kernel that gathers 4-byte values gathers indices just as well.
        gathered = self.second.indices.view(np.float32)
        HOST.kernels.take(table, top.offsets, top.counts, top.indices, gathered)
        return self.second

    def note(self, watcher: Observations, scale: float) -> None:
        """Record the squared norms of scale g, of p and of both selections."""
        layers = self.group.layers
        self._note_layers(watcher, scale)
        squares = np.zeros(len(layers))
        for name, chosen in ((KEPT, self.minimum), (KEPT_BY_CANDIDATE, self._top)):
            _point_to(self._values, "gradient", chosen.values, chosen)
            HOST.kernels.squares(self._values, squares)
            watcher.add(name, layers, squares)

    def note_everything(self, watcher: Observations, scale: float) -> None:
        """Record these norms for layers that both selections select as a whole."""
        squares = self._note_layers(watcher, scale)
        for name in (KEPT, KEPT_BY_CANDIDATE):
            watcher.add(name, self.group.layers, squares)

    def _note_layers(self, watcher: Observations, scale: float) -> npt.NDArray[np.float64]:
        """Record the squared norms of scale g and p; return those of p."""
        table = self.group.inputs.copy()
        of_gradient, of_p = np.zeros(len(table)), np.zeros(len(table))
        self.group.device.kernels.squares(table, of_gradient)
        table["gradient"], table["dtype"] = table["next_residual"], FLOAT32
        self.group.device.kernels.squares(table, of_p)
        watcher.add(GRADIENT, self.group.layers, scale**2 * of_gradient)
        watcher.add(TOTAL, self.group.layers, of_p)
        return of_p


def _point_to(table: Table, column: str, flat: Floats, chosen: Selection) -> None:
    """Write the addresses and lengths of the selections in a flat array of 4-byte items into a table."""
    table[column] = flat.ctypes.data + 4 * chosen.offsets
    table["length"] = chosen.counts


def _clear(group: Group, column: str) -> None:
    """Write zeros where the addresses in the column point to."""
    zeros = group.inputs.copy()
    zeros["next_residual"] = zeros[column]
    zeros["gradient"] = zeros["residual"] = 0
    rows = len(zeros)
    group.device.kernels.contribute(zeros, np.zeros(rows, np.uint8), np.ones(rows, np.float32), decay=1.0)


def select_twice(compressor: Compressor, density: float, candidate: float, send: str) -> Compressor:
    """Return the compressor with its selection in a :class:`TwoLevelSelection`, inside of its wrappers.

    ConfigError if it selects nothing.
    """
    if isinstance(compressor, TwoLevelSelection):
        compressor = compressor.inner
    if isinstance(compressor, Wrapper):
        return compressor.around(select_twice(compressor.inner, density, candidate, send))
    return TwoLevelSelection(compressor, candidate, send).with_level(density)
