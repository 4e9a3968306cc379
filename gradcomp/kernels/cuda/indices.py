"""Lists of indices on a GPU; :mod:`gradcomp.kernels.reference_indices` and `reference_draws` define the kernels.

Payloads and lists may lie on either side. The device finds faulty rows, and the error is raised after the call: the
contents of written rows are unspecified then, and nothing outside them has changed.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import THREADS, Call, check_flat, described, overlap, tiles, to_read, to_write
from gradcomp.kernels.cuda.layout import Integer, Parameter, Ref, Source
from gradcomp.kernels.cuda.prepared import Kernels, place_of
from gradcomp.kernels.philox import check_draws
from gradcomp.kernels.reference_indices import (
    ALL,
    BITMAP,
    PACKED,
    RAW,
    Codings,
    check_coding,
    low_bits,
    upper_bits,
)
from gradcomp.kernels.segments import Bytes, Indices, Sizes, check_array

_TILE_BITS = 8192  # bits of a stream's tile, as in indices.cu
_LIST_TILE = 4 * THREADS  # indices of a list's tile
_COUNTER = 4  # random words per counter
_WORD = 0xFFFFFFFFFFFFFFFF

# The bits of a row's fault, as in indices.cu.
_COMPLAINTS: Final = {
    1: "padding bits are set",
    2: "the number of bits that are set is not that of the indices",
    4: "indices are not ascending",
    8: "an index is not below the length",
}


class _Rows(NamedTuple):
    """The columns of a call: an item for each list."""

    codings: Codings
    lengths: Sizes
    counts: Sizes
    offsets: Sizes
    places: Sizes


class IndexKernels(Kernels):
    """The kernels encode_indices, decode_indices and draw_indices under the names of their definitions."""

    def encode_indices(
        self,
        codings: Codings,
        lengths: Sizes,
        counts: Sizes,
        offsets: Sizes,
        indices: Indices,
        places: Sizes,
        payload: Bytes,
    ) -> None:
        self._code(_Rows(codings, lengths, counts, offsets, places), indices, payload, encoding=True)

    def decode_indices(
        self,
        codings: Codings,
        lengths: Sizes,
        counts: Sizes,
        offsets: Sizes,
        indices: Indices,
        places: Sizes,
        payload: Bytes,
    ) -> None:
        self._code(_Rows(codings, lengths, counts, offsets, places), indices, payload, encoding=False)

    def _code(self, rows: _Rows, indices: Indices, payload: Bytes, *, encoding: bool) -> None:
        """Checks types and addresses in every run; all other checks are made once for a key."""
        count = len(rows.codings)
        check_array("codings", rows.codings, np.int32)
        for name, column in rows._asdict().items():
            if name != "codings":
                check_array(name, column, np.int64, count)
        check_flat("indices", indices, np.uint32, writable=not encoding)
        check_flat("payload", payload, np.uint8, writable=encoding)
        if overlap(indices, payload):
            raise ValueError("indices overlap the payload")
        found = np.zeros(count, dtype=np.uint32)

        def write_down(call: Call) -> None:
            lists, bytes_ = described(indices), described(payload)
            sizes = check_coding(*rows[:4], lists, rows.places, bytes_, encoding=encoding)
            write = _write_encode if encoding else _write_decode
            write(call, rows, indices, payload, sizes, call.result(found, Source(2), zero=True))

        key: tuple[Hashable, ...] = (
            *("encode_indices" if encoding else "decode_indices", *(column.tobytes() for column in rows)),
            *(place_of(indices), place_of(payload)),
        )
        self._plans.run(key, write_down, (indices, payload, found), after=lambda: _refuse(found))

    def draw_indices(
        self,
        lengths: Sizes,
        counts: Sizes,
        layers: Indices,
        offsets: Sizes,
        indices: Indices,
        *,
        seed: int,
        step: int,
        rank: int,
    ) -> None:
        check_draws(lengths, counts, layers, offsets, described(indices))

        def write_down(call: Call) -> None:
            written = to_write(call, indices, 0, offsets, counts)
            begins = tiles(-(-counts // (_COUNTER * THREADS)))
            strata = np.divmod(lengths, np.maximum(counts, 1))
            rows = call.give(np.stack((counts, offsets, layers.astype(np.int64), *strata), axis=1))
            parameters = (rows, call.give(begins), len(counts), written, *map(Integer, range(3)))
            call.launch("draws.cu", "draw_indices", int(begins[-1]), *parameters)

        key = (
            *("draw", lengths.tobytes(), counts.tobytes(), layers.tobytes(), offsets.tobytes()),
            place_of(indices),
        )
        numbers = (seed & _WORD, step & _WORD, rank & _WORD)
        self._plans.run(key, write_down, (indices,), numbers)


# --- recorded calls: a run's arrays are indices, payload, and each row's fault -----------------------------------


def _write_encode(
    call: Call, rows: _Rows, indices: Indices, payload: Bytes, sizes: Sizes, wrong: Ref
) -> None:
    given = to_read(call, indices, 0, rows.offsets, rows.counts)
    written = to_write(call, payload, 1, rows.places, sizes)
    _over_lists(call, "check_lists", _lists(rows, rows.counts > 0), given, 0, wrong)
    blocks, work = _over_streams(call, np.concatenate((_fields(rows), _positions(rows))))
    call.launch("indices.cu", "encode_streams", blocks, *work, given, written, wrong, 0)


def _write_decode(
    call: Call, rows: _Rows, indices: Indices, payload: Bytes, sizes: Sizes, wrong: Ref
) -> None:
    given = to_read(call, payload, 1, rows.places, sizes)
    written = to_write(call, indices, 0, rows.offsets, rows.counts)
    copied = (rows.codings == RAW) | (rows.codings == ALL)
    _over_lists(call, "copy_lists", _lists(rows, copied), written, given, wrong)
    streams = _positions(rows)
    blocks, work = _over_streams(call, streams)
    parameters = (*work, written, given, wrong, call.workspace(8 * blocks))
    call.launch("indices.cu", "count_positions", blocks, *parameters)
    call.launch("indices.cu", "add_counts", len(streams), *parameters)
    call.launch("indices.cu", "decode_positions", blocks, *parameters)
    _over_lists(call, "check_lists", _lists(rows, rows.codings != ALL), written, 0, wrong)


def _fields(rows: _Rows) -> Sizes:
    """Returns the streams of whole indices, or of their low bits; see Stream in indices.cu."""
    codings, lengths, counts, offsets, places = rows
    width = np.where(codings == RAW, 32, low_bits(lengths, counts))
    chosen = np.flatnonzero((counts > 0) & (width > 0) & ((codings == RAW) | (codings == PACKED)))
    none = np.zeros_like(counts)
    row = np.arange(len(counts))
    columns = (row, none, none, width, counts, lengths, offsets, places, counts * width, none, none)
    streams: Sizes = np.stack(columns, axis=1)[chosen]
    return streams


def _positions(rows: _Rows) -> Sizes:
    """Returns the streams in which the position of a set bit gives an index."""
    codings, lengths, counts, offsets, places = rows
    packed = codings == PACKED
    chosen = np.flatnonzero((counts > 0) & (packed | (codings == BITMAP)))
    width = np.where(packed, low_bits(lengths, counts), 0)
    lower = counts * width
    begins = places + -(-lower // 8)
    bits = np.where(packed, upper_bits(lengths, counts), lengths)
    row, yes = np.arange(len(counts)), np.ones_like(counts)
    columns = (row, yes, packed, width, counts, lengths, offsets, begins, bits, places, lower)
    streams: Sizes = np.stack(columns, axis=1).astype(np.int64)[chosen]
    return streams


def _lists(rows: _Rows, chosen: npt.NDArray[np.bool_]) -> Sizes:
    """Returns the lists of plain indices; see List in indices.cu."""
    codings, lengths, counts, offsets, places = rows
    begins = np.where(codings == ALL, -1, places)
    lists: Sizes = np.stack((np.arange(len(counts)), counts, lengths, offsets, begins), axis=1)[chosen]
    return lists


def _over_lists(call: Call, name: str, lists: Sizes, *parameters: Parameter) -> None:
    begins = tiles(-(-lists[:, 1] // _LIST_TILE))
    work = (call.give(lists), call.give(begins), len(lists))
    call.launch("indices.cu", name, int(begins[-1]), *work, *parameters)


def _over_streams(call: Call, streams: Sizes) -> tuple[int, tuple[Parameter, ...]]:
    begins = tiles(-(-streams[:, 8] // _TILE_BITS))
    return int(begins[-1]), (call.give(streams), call.give(begins), len(streams))


def _refuse(found: Indices) -> None:
    """Raises ValueError for the first faulty row, with its first fault."""
    if found.any():
        row = np.flatnonzero(found)[0]
        first = int(found[row]) & -int(found[row])
        raise ValueError(f"row {row}: {_COMPLAINTS[first]}")
