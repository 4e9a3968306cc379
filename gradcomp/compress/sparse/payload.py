"""Selections of elements, their payloads, their indices as they are kept in the state, and smaller selections."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import SHARED, Coded
from gradcomp.compress.messages import Bytes, Floats
from gradcomp.core.errors import StateError, WireFormatError
from gradcomp.kernels import reference_indices
from gradcomp.kernels.codec import Draw, Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import address_of
from gradcomp.kernels.devices import HOST, Device
from gradcomp.kernels.segments import FLOAT32, SEGMENT
from gradcomp.kernels.step import StepContext

Indices = npt.NDArray[np.uint32]

#: Index codings by name. ``auto`` takes, row by row, the one with the fewest bytes. ``deflate`` does not use its entry.
CODINGS = {
    "auto": None,
    "raw": reference_indices.RAW,
    "packed": reference_indices.PACKED,
    "bitmap": reference_indices.BITMAP,
    "deflate": reference_indices.RAW,
}

_DEFLATE_LEVEL = 6

#: The field that keeps the indices of a layer, which are the same on all ranks.
KEPT: Final = f"{SHARED}kept_indices"
# The field is float32, in which marks, up to 2**23, and the halves of an index, below 2**16, are exact.
_PERIODS = 1 << 23
_HALF = 1 << 16


@dataclass(eq=False)
class Selection:
    """Hold selected elements: those of row i are ``offsets[i] : offsets[i] + counts[i]`` in the two flat arrays.

    ``indices``: ascending within each row. ``values``: float32. Unless ``device`` is the host, only kernels may touch
    these two arrays.
    """

    offsets: Sizes
    counts: Sizes
    indices: Indices
    values: Floats
    device: Device = HOST

    @property
    def arrays(self) -> tuple[Sizes, Indices, Floats, Sizes]:
        """Return the last arguments of the kernels that select."""
        return self.offsets, self.indices, self.values, self.counts

    @staticmethod
    def allocate(limits: Sizes, device: Device = HOST) -> Selection:
        """Allocate memory for up to ``limits[i]`` elements of row i; ``counts`` begin as ``limits``."""
        ends, total = np.cumsum(limits), int(limits.sum())
        flat = device.array(total, np.uint32), device.array(total, np.float32)
        return Selection(ends - limits, limits.copy(), *flat, device)


class IndexFormat:
    """Encode and decode the indices of a group's rows, where both sides know how many there are.

    Rows are coded one by one (:mod:`gradcomp.kernels.reference_indices`). With DEFLATE, the differences between
    neighbours, 4 bytes each, are compressed for all rows together: no formula gives the size then.
    """

    def __init__(self, lengths: Sizes, coding: str) -> None:
        self.lengths = lengths
        self.deflated = coding == "deflate"
        self._coding = CODINGS[coding]
        self._last: tuple[bytes, npt.NDArray[np.int32], Sizes] | None = None

    def row_bytes(self, counts: Sizes) -> Sizes:
        """Return the bytes of every row; 0 with DEFLATE."""
        return np.zeros_like(counts) if self.deflated else self._coded(counts)[1]

    def most_bytes(self, limits: Sizes, fixed: bool) -> int:
        """Return a bound on the bytes of all rows, of ``limits`` elements if ``fixed``, else of up to ``limits``."""
        if self.deflated:
            size = int(4 * limits.sum())
            return len(zlib.compress(b"")) + size + size // 1000 + 64
        # Fewer indices may take more bytes: ALL takes none for k = n, and PACKED has more low bits for a smaller k.
        slack = 0 if fixed else (self.lengths + 7) // 8 + 16
        return int((self.row_bytes(limits) + slack).sum())

    def _coded(self, counts: Sizes) -> tuple[npt.NDArray[np.int32], Sizes]:
        """Return coding and bytes of every row, cached because counts are mostly those of the call before."""
        key = counts.tobytes()
        if self._last is None or self._last[0] != key:
            if self._coding is None:
                codings = reference_indices.smallest_coding(self.lengths, counts)
            else:
                codings = np.full(len(counts), self._coding, dtype=np.int32)
            self._last = key, codings, reference_indices.index_bytes(codings, self.lengths, counts)
        return self._last[1:]

    def encode(self, chosen: Selection, payload: Bytes, at: int) -> int:
        """Write the indices from byte ``at`` on; return where they end."""
        if self.deflated:
            packed = zlib.compress(_differences(chosen).tobytes(), _DEFLATE_LEVEL)
            payload[at : at + len(packed)] = np.frombuffer(packed, dtype=np.uint8)
            return at + len(packed)
        counts = chosen.counts
        codings, sizes = self._coded(counts)
        places = at + np.cumsum(sizes) - sizes
        chosen.device.kernels.encode_indices(
            codings, self.lengths, counts, chosen.offsets, chosen.indices, places, payload
        )
        return at + int(sizes.sum())

    def decode(self, payload: Bytes, into: Selection) -> None:
        """Read ``into.counts`` indices of each row. ValueError or zlib.error for impossible bytes."""
        counts = into.counts
        if self.deflated:
            _add_up(_inflate(payload, 4 * int(counts.sum())), into, self.lengths)
            return
        codings, sizes = self._coded(counts)
        if len(payload) != int(sizes.sum()):
            raise ValueError(f"{len(payload)} bytes of indices where the counts ask for {int(sizes.sum())}")
        places = np.cumsum(sizes) - sizes
        into.device.kernels.decode_indices(
            codings, self.lengths, counts, into.offsets, into.indices, places, payload
        )


@contextmanager
def sent_by(sender: int) -> Iterator[None]:
    """Turn ValueError and zlib.error of the block into a WireFormatError that names rank ``sender``."""
    try:
        yield
    except (ValueError, zlib.error) as error:
        raise WireFormatError(f"rank {sender} sent an impossible sparse payload: {error}") from error


class SparseFormat:
    """Encode and decode the payload of a group.

    ``limits``: the number of elements of each row, exact if ``fixed``, else the maximum. The payload holds the counts
    (4 bytes each, only if they vary), the coded indices row by row, and the coded values row by row. Deflated indices
    come last, and no size is fixed then. ``device``: where selections lie; always the host if indices are deflated.
    On a device, all kernels of :meth:`encode` can run as one call, and so can those of :meth:`decode`, because the host
    knows the counts before. ``draws``: true if coded values depend on the step's random numbers.
    """

    def __init__(
        self, table: Table, limits: Sizes, fixed: bool, indices: str, values: Coded, device: Device = HOST
    ) -> None:
        self._indices = IndexFormat(table["length"].astype(np.int64), indices)
        self.device = HOST if self._indices.deflated else device
        self.limits = limits
        self.fixed = fixed and not self._indices.deflated
        self._counts_travel = not fixed
        self._values = np.zeros(len(table), dtype=SEGMENT)
        self._values["layer"], self._values["dtype"] = table["layer"], FLOAT32
        self._codec = values.codec_for(self._values)
        values.fill(self._values, values.level)
        self._lossless = values.traits.exact
        self.draws = self._codec.stochastic
        self.max_bytes = int(self._without_indices(limits).sum()) + self._indices.most_bytes(limits, fixed)
        self._errors: Floats = self.device.array(int(limits.sum()), np.float32)
        self._begun: tuple[bytes, int] | None = None  # counts, and the bytes of a payload with them

    def wire_bytes(self, counts: Sizes) -> Sizes:
        """Return the bytes of every row, without indices that are deflated, for which there is no formula."""
        return self._without_indices(counts) + self._indices.row_bytes(counts)

    def _without_indices(self, counts: Sizes) -> Sizes:
        self._values["length"] = counts
        return self._codec.wire_bytes(self._values) + 4 * self._counts_travel

    def begin(self, counts: Sizes, payload: Bytes) -> int:
        """Write the counts, if they are sent, and return the payload's size in bytes. Indices must not be deflated."""
        key = counts.tobytes()
        if self._begun is None or self._begun[0] != key:  # mostly equal to those of the last step
            self._begun = key, int(self.wire_bytes(counts).sum())
        self._tell(counts, payload)
        return self._begun[1]

    def _tell(self, counts: Sizes, payload: Bytes) -> int:
        """Write the counts, if they are sent; return where they end."""
        if not self._counts_travel:
            return 0
        end = 4 * len(counts)
        payload[:end] = counts.astype("<u4").view(np.uint8)
        return end

    def told(self, payload: Bytes) -> tuple[int, bytes]:
        """Return what decides how a payload is decoded: its length and, if they are sent, its counts."""
        return len(payload), payload[: 4 * len(self.limits)].tobytes() if self._counts_travel else b""

    def encode(self, chosen: Selection, payload: Bytes, flags: Bytes, draw: Draw) -> tuple[int, Floats]:
        """Fill the payload; return the bytes used, and the coding errors: selected values minus decoded values.

        Rows whose values cannot be coded are flagged.
        """
        counts = chosen.counts
        at = self._tell(counts, payload)
        if not self._indices.deflated:
            at = self._indices.encode(chosen, payload, at)
        at = self._place_values(counts, at)
        table = self._values.copy()  # a call that is replayed keeps a reference to its table
        table["gradient"] = address_of(chosen.values) + 4 * chosen.offsets
        table["next_residual"] = 0 if self._lossless else address_of(self._errors) + 4 * chosen.offsets
        self._codec.encode(self.device, table, payload[:at], flags, draw)
        if self._indices.deflated:
            at = self._indices.encode(chosen, payload, at)
        return at, self._errors

    def _place_values(self, counts: Sizes, at: int) -> int:
        """Set where in the payload each row's values begin, from byte ``at`` on; return where the last ones end."""
        self._values["length"] = counts
        sizes = self._codec.wire_bytes(self._values)
        self._values["payload"] = at + np.cumsum(sizes) - sizes
        return at + int(sizes.sum())

    def decode(self, payload: Bytes, into: Selection, sender: int) -> None:
        """Read the payload of rank ``sender``. WireFormatError if its counts, sizes or indices are impossible."""
        with sent_by(sender):
            self._decode(payload, into)

    def _decode(self, payload: Bytes, into: Selection) -> None:
        at, counts = 0, self.limits
        if self._counts_travel:
            at = 4 * len(self.limits)
            if len(payload) < at:
                raise ValueError(
                    f"{len(payload)} bytes are too few for the counts of {len(self.limits)} rows"
                )
            counts = payload[:at].view("<u4").astype(np.int64)
            if (counts > self.limits).any():
                row = int(np.argmax(counts > self.limits))
                raise ValueError(
                    f"row {row}: {counts[row]} elements, at most {self.limits[row]} are possible"
                )
        into.counts[:] = counts
        values_at = at + int(self._indices.row_bytes(counts).sum())
        end = self._place_values(counts, values_at)
        deflated = self._indices.deflated
        if len(payload) < end or (len(payload) > end and not deflated):
            raise ValueError(f"{len(payload)} bytes where the counts ask for {end}")
        self._indices.decode(payload[end:] if deflated else payload[at:values_at], into)
        table = self._values.copy()
        table["output"] = address_of(into.values) + 4 * into.offsets
        # Flags are ignored here: a value that is not finite makes the mean not finite.
        self._codec.decode(self.device, table, payload[:end], np.zeros(len(counts), dtype=np.uint8))


def _differences(chosen: Selection) -> npt.NDArray[np.uint32]:
    """Return each index minus the one before it in its row, or minus -1 for the first, so that none is 0."""
    places = places_of(chosen)
    picked = chosen.indices[places].astype(np.int64)
    before = np.concatenate(([-1], picked))[:-1]
    begins = np.cumsum(chosen.counts) - chosen.counts
    before[begins[chosen.counts > 0]] = -1
    return (picked - before).astype("<u4")


def places_of(chosen: Selection) -> Sizes:
    """Return the places of the selected elements in the flat arrays, row after row."""
    ends = np.cumsum(chosen.counts)
    shift = np.repeat(chosen.offsets - ends + chosen.counts, chosen.counts)
    places: Sizes = np.arange(len(shift)) + shift
    return places


def _inflate(stream: Bytes, nbytes: int) -> npt.NDArray[np.int64]:
    """Return the uint32 numbers in the stream; ValueError unless it inflates to ``nbytes`` bytes.

    At most one byte more is inflated, whatever the stream contains.
    """
    inflater = zlib.decompressobj()
    data = inflater.decompress(stream.tobytes(), nbytes + 1)  # one more, to notice a longer stream
    if len(data) != nbytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"the deflated indices do not hold {nbytes} bytes")
    return np.frombuffer(data, dtype="<u4").astype(np.int64)


def _add_up(differences: npt.NDArray[np.int64], into: Selection, lengths: Sizes) -> None:
    """Write the indices, which are sums of the differences; ValueError unless they ascend and are in range."""
    if (differences < 1).any():
        raise ValueError("the indices do not ascend")
    counts = into.counts
    totals = np.concatenate(([0], np.cumsum(differences)))
    begins = np.cumsum(counts) - counts
    found = totals[1:] - np.repeat(totals[begins], counts) - 1
    if (found >= np.repeat(lengths, counts)).any():
        raise ValueError("an index is out of range")
    into.indices[places_of(into)] = found.astype(np.uint32)


def mark_of(period: int) -> int:
    """Return the number that marks a period in the field. It is never 0, the field's initial value."""
    return period % _PERIODS + 1


@dataclass(frozen=True, eq=False)
class KeptIndices:
    """Load and store the kept indices of a group.

    A layer's field holds a mark, the upper 16 bits of its indices, then the lower 16 bits. ``marks``, ``upper`` and
    ``lower`` are their places in the fields of the group, one after the other. For every index, ``starts`` tells if it
    is the first of its layer, and ``lengths`` is the length of that layer.
    """

    marks: Sizes
    upper: Sizes
    lower: Sizes
    starts: npt.NDArray[np.bool_]
    lengths: Sizes

    @staticmethod
    def of(group: Group, chosen: Selection) -> KeptIndices:
        """Return the places for the selection of a group."""
        counts = chosen.counts
        sizes = np.where(counts > 0, 2 * counts + 1, 0)
        begins = np.cumsum(sizes) - sizes
        upper = np.arange(counts.sum()) + np.repeat(begins + 1 - chosen.offsets, counts)
        starts = np.zeros(counts.sum(), np.bool_)
        starts[chosen.offsets[counts > 0]] = True
        lengths = np.repeat(group.table["length"].astype(np.int64), counts)
        return KeptIndices(begins[counts > 0], upper, upper + np.repeat(counts, counts), starts, lengths)

    def load(self, group: Group, context: StepContext, mark: int, into: Selection) -> bool:
        """Read the indices; return False unless all layers have this mark. StateError for impossible indices."""
        values = context.load(KEPT, group.layers)
        if not (values[self.marks] == mark).all():
            return False
        found = values[self.upper].astype(np.int64) * _HALF + values[self.lower].astype(np.int64)
        ascends = self.starts[1:] | (np.diff(found) > 0)
        if not ascends.all() or (found < 0).any() or (found >= self.lengths).any():
            raise StateError("the kept indices in the state are out of range or do not ascend")
        into.indices[:] = found
        return True

    def store(self, group: Group, context: StepContext, mark: int, chosen: Selection) -> None:
        """Store the indices and the mark. They count once the step is accepted."""
        values = np.zeros(len(self.marks) + 2 * len(self.upper), np.float32)
        values[self.marks] = mark
        values[self.upper] = chosen.indices // _HALF
        values[self.lower] = chosen.indices % _HALF
        context.store(KEPT, group.layers, values)


def narrow(chosen: Selection, counts: Sizes) -> Selection:
    """Return a selection of the ``counts[i]`` largest of the selected elements of row i, ties to the lower index.

    If ``chosen`` has the largest elements at one density, the result is exactly the selection at a lower one. TopK
    without ``zeros`` may have selected fewer elements than its density asks for; ``counts`` must not be larger. The
    layer's other elements are not read, and ``chosen`` stays as it is.

    Args:
        chosen: a selection in host memory, with finite values.
        counts: int64, one per row, in 0..chosen.counts[i]; ``elements_at(density, lengths)`` for a density.

    Raises:
        ValueError: a count is negative or more than were selected.

    Source: Tyagi and Swany 2023, section IV-C (multi-level compression), which compresses to theta_min and then
    further.
    """
    if ((counts < 0) | (counts > chosen.counts)).any():
        raise ValueError(f"counts {counts} are not in 0..{chosen.counts}")
    narrowed = Selection.allocate(counts)
    unused = np.empty(len(chosen.values), dtype=np.float32)
    table = np.zeros(len(counts), dtype=SEGMENT)
    table["length"], table["dtype"] = chosen.counts, FLOAT32
    table["gradient"] = chosen.values.ctypes.data + 4 * chosen.offsets
    table["next_residual"] = unused.ctypes.data + 4 * chosen.offsets
    flags, factors = np.zeros(len(table), dtype=np.uint8), np.ones(len(table), dtype=np.float32)
    HOST.kernels.select_top(table, flags, factors, narrowed.counts, *narrowed.arrays, decay=1.0, zeros=True)
    # The kernel's indices are positions among the selected elements of a row.
    narrowed.indices[:] = chosen.indices[narrowed.indices + np.repeat(chosen.offsets, counts)]
    return narrowed
