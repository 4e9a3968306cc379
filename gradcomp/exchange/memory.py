"""Kernel tables get the addresses of this step's gradients, residuals and outputs, as a reduction needs them."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import MOMENTUM
from gradcomp.core.state import Residuals
from gradcomp.core.trace import Statistics, Trace, profiler
from gradcomp.exchange.arrivals import Arrivals
from gradcomp.exchange.layout import Bucket
from gradcomp.kernels.codec import Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.devices import Device
from gradcomp.kernels.segments import byte_offsets
from gradcomp.kernels.step import Floats, StepContext
from gradcomp.reduce.header import BucketFlags

Addresses = npt.NDArray[np.uint64]

#: Allocates the mean of a layer of which this rank has no gradient, and returns its address.
Allocate = Callable[[int], int]


class StepMemory:
    """Implements :class:`gradcomp.reduce.Binding` for one bucket in one step."""

    def __init__(
        self,
        bucket: Bucket,
        context: StepContext,
        flags: BucketFlags,
        arrivals: Arrivals,
        residuals: Residuals,
        allocate: Allocate,
        trace: Trace,
        statistics: Statistics,
    ) -> None:
        self._bucket = bucket
        self._context = context
        self._flags = flags
        self._arrivals = arrivals
        self._residuals = residuals
        self._allocate = allocate
        self._trace, self._statistics = trace, statistics
        self._phase = ""  # of the span that is open
        self._outputs_ready = False
        self._prepared: dict[Group, Addresses] = {}

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Set the addresses of gradients, residuals and next residuals; 0 is an absent gradient, counted as 0."""
        bases = self._prepare(group) if group.prepared else self._arrivals.gradients
        # Tables of whole groups recur in every step, and most layers are whole: no offset needs to be added then.
        whole = table is group.inputs and group.scratch.once("whole", lambda: not table["start"].any())
        table["gradient"] = bases[layers] if whole else self.place(bases[layers], table, offsets)
        if group.feedback:
            starts = 0 if whole else table["start"]
            table["residual"], table["next_residual"] = self._residuals.first.addresses(layers, starts)
        elif group.compressor.traits.contributes:
            table["next_residual"] = self._floats_at(self._workspace(group, "contributions")[layers], table)

    def place(self, bases: Addresses, table: Table, offsets: Addresses | None = None) -> Addresses:
        """Return the addresses of the segments' first elements in arrays that start at ``bases``; 0 stays 0."""
        if offsets is None:
            if not table["start"].any():
                return bases
            offsets = byte_offsets(table)
        if np.count_nonzero(bases) == len(bases):
            return bases + offsets
        return np.where(bases == 0, bases, bases + offsets)

    def gradients(self, table: Table, layers: Sizes) -> None:
        """Set the addresses of the submitted gradients; 0 for a layer without one."""
        table["gradient"] = self.place(self._arrivals.gradients[layers], table)

    def residuals(self, table: Table, group: Group) -> None:
        """Set the addresses of what feedback adds to the group's gradients; they stay 0 without feedback."""
        if group.feedback:
            table["residual"], _ = self._residuals.first.addresses(group.layers, table["start"])

    def _prepare(self, group: Group) -> Addresses:
        """Compute the values that the group's compressor reads instead of gradients; return their addresses by layer.

        The values are u = momentum u + clip scale g, where, per layer, clip = min(1, clip_norm / (sqrt(N) ||s||))
        for the rank's share s = scale g / divisor of the result; N is the number of ranks in the result.
        """
        if group in self._prepared:
            return self._prepared[group]
        compressor, table, layers = group.compressor, _segments(group).copy(), group.layers
        table["gradient"] = self.place(self._arrivals.gradients[layers], table)
        table["output"] = 0  # the outputs of the last step may be freed
        factors = self._context.factors(len(table))
        if compressor.traits.clip_norm is not None:
            squares = np.zeros(len(table))
            group.device.kernels.squares(table, squares)
            of_layers = np.bincount(layers, squares)[layers]  # summed over a layer's segments
            norms = np.sqrt(of_layers) * (self._context.scale / self._context.divisor)
            limit = compressor.traits.clip_norm / np.sqrt(self._context.active or self._context.world)
            with np.errstate(all="ignore"):
                factors *= np.where(norms > limit, limit / norms, 1.0).astype(np.float32)
        if compressor.traits.momentum:
            field = self._context.field(MOMENTUM)
            table["residual"], table["next_residual"] = field.addresses(layers, table["start"])
            bases = np.zeros(len(self._arrivals.gradients), dtype=np.uint64)
            _, bases[layers] = field.addresses(layers, 0)
        else:
            bases = self._workspace(group, "prepared")
            table["next_residual"] = self._floats_at(bases[layers], table)
        # A non-finite value stays non-finite, and the encoder reports it.
        ignored = np.zeros(len(table), dtype=np.uint8)
        momentum = compressor.traits.momentum
        if isinstance(momentum, str):
            self._contribute_by_layer(group.device, table, layers, factors)
        else:
            group.device.kernels.contribute(table, ignored, factors, decay=momentum)
        self._prepared[group] = bases
        return bases

    def _contribute_by_layer(self, device: Device, table: Table, layers: Sizes, factors: Floats) -> None:
        """Apply the optimizer's momentum to all layers with one value together: there are few values."""
        assert self._context.momenta is not None, "a step does not open without them"
        momenta = self._context.momenta[layers]
        for momentum in np.unique(momenta).tolist():
            rows = momenta == momentum
            ignored = np.zeros(int(rows.sum()), dtype=np.uint8)
            device.kernels.contribute(table[rows], ignored, factors[rows], decay=momentum)

    def _workspace(self, group: Group, name: str) -> Addresses:
        """Return, by layer, where its element 0 would lie in working memory that holds the group's segments."""
        return self._places(group, group.scratch.vector(name, group.elements + 16).address)

    def _places(self, group: Group, address: int) -> Addresses:
        """Return, by layer, where its element 0 would lie in float32 memory at ``address`` that holds the segments.

        A group's segments of a layer follow one another without gaps, so all of them give the same address.
        """
        table = _segments(group)
        ends = np.cumsum(table["length"])
        begins = (ends - table["length"] - table["start"]) * 4
        bases = np.zeros(len(self._arrivals.gradients), dtype=np.uint64)
        # A segment in mid-layer may give an address below the vector's: it wraps, and adding the offset wraps back.
        bases[group.layers] = np.uint64(address) + begins.astype(np.uint64)
        return bases

    def _floats_at(self, bases: Addresses, table: Table) -> Addresses:
        """Return the addresses of the table's segments in float32 arrays, none of which is absent."""
        return bases + table["start"].astype(np.uint64) * np.uint64(4)

    def owned(self, table: Table, rows: Sizes) -> None:
        """Set the addresses of the server-side errors; a range starts where its row starts."""
        table["residual"], table["next_residual"] = self._residuals.second.addresses(rows, 0)

    def outputs(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        """Set the addresses of the outputs; those of layers that no rank had are 0, and stay untouched."""
        if not self._outputs_ready:
            self._allocate_outputs()
        joined = group.joined is not None
        bases = self._places(group, address_of(group.means)) if joined else self._arrivals.outputs
        table["output"] = self.place(bases[layers], table, offsets)

    def _allocate_outputs(self) -> None:
        self._outputs_ready = True
        present = self._flags.present
        addresses = self._arrivals.outputs
        layers = self._bucket.layers
        if np.count_nonzero(present) == np.count_nonzero(addresses[layers]) == len(layers):
            return
        addresses[layers[~present]] = 0
        for layer in layers[present & (addresses[layers] == 0)].tolist():
            addresses[layer] = self._allocate(layer)

    def span(self, name: str) -> StepMemory:
        """Return the context that times codec work for the trace and the statistics, unless the block raises.

        It is this object, since a bucket's spans do not overlap.
        """
        self._phase = name
        return self

    def __enter__(self) -> None:
        self._end_range = profiler.begin(self._phase) if profiler.records() else None
        self._begin = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._end_range is not None:
            self._end_range()
        if kind is None:
            end = perf_counter()
            self._statistics.codec_seconds += end - self._begin
            self._trace.add((self._phase, self._context.number, self._bucket.number, self._begin, end))


def _segments(group: Group) -> Table:
    """Return the group's segments of layers."""
    return group.table if group.joined is None else group.joined
