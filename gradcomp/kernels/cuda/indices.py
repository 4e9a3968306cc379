"""Lists of indices on a GPU: :mod:`gradcomp.kernels.reference_indices` and `reference_draws` define what is computed.

Payloads and lists may lie on either side. What is wrong with a row is found out on the device, and raised after the
call: what was written before is unspecified then, but inside the rows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.codings import (
    ALL,
    BITMAP,
    PACKED,
    RAW,
    Codings,
    Indices,
    Sizes,
    low_bits,
    upper_bits,
)
from gradcomp.kernels.cuda.call import THREADS, Call, Parameter, Ref, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.spans import described, read_span, write_span
from gradcomp.kernels.reference_draws import _check as _check_draws
from gradcomp.kernels.reference_indices import _check_coding
from gradcomp.kernels.segments import Bytes

_TILE_BITS = 8192  # of a stream, as in indices.cu
_LIST_TILE = 4 * THREADS  # indices
_COUNTER = 4  # words that a counter gives

# As in indices.cu.
_COMPLAINTS: Final = {
    1: "padding bits are set",
    2: "the number of bits that are set is not that of the indices",
    4: "indices are not ascending",
    8: "an index is not below the length",
}


class IndexKernels:
    """encode_indices, decode_indices and draw_indices."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

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
        """See `reference_indices.encode_indices`."""
        rows = (codings, lengths, counts, offsets)
        sizes = _check_coding(*rows, described(indices), places, described(payload), encoding=True)
        call = Call(self._driver)
        given = read_span(call, indices, offsets, counts)
        written = write_span(call, payload, places, sizes)
        found, wrong = _wrong(call, len(codings))
        _over_lists(call, "check_lists", _lists(*rows, places, counts > 0), given, 0, wrong)
        streams = np.concatenate((_fields(*rows, places), _positions(*rows, places)))
        blocks, work = _over_streams(call, streams)
        call.launch("indices.cu", "encode_streams", blocks, *work, given, written, wrong, 0)
        call.run()
        _refuse(found)

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
        """See `reference_indices.decode_indices`."""
        rows = (codings, lengths, counts, offsets)
        sizes = _check_coding(*rows, described(indices), places, described(payload), encoding=False)
        call = Call(self._driver)
        given = read_span(call, payload, places, sizes)
        written = write_span(call, indices, offsets, counts)
        found, wrong = _wrong(call, len(codings))
        copied = (codings == RAW) | (codings == ALL)
        _over_lists(call, "copy_lists", _lists(*rows, places, copied), written, given, wrong)
        streams = _positions(*rows, places)
        blocks, work = _over_streams(call, streams)
        parameters = (*work, written, given, wrong, call.room(8 * blocks))
        call.launch("indices.cu", "count_positions", blocks, *parameters)
        call.launch("indices.cu", "add_counts", len(streams), *parameters)
        call.launch("indices.cu", "decode_positions", blocks, *parameters)
        _over_lists(call, "check_lists", _lists(*rows, places, codings != ALL), written, 0, wrong)
        call.run()
        _refuse(found)

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
        """See `reference_draws.draw_indices`."""
        _check_draws(lengths, counts, layers, offsets, described(indices))
        call = Call(self._driver)
        written = write_span(call, indices, offsets, counts)
        begins = tiles(-(-counts // (_COUNTER * THREADS)))
        strata = np.divmod(lengths, np.maximum(counts, 1))
        rows = call.give(np.stack((counts, offsets, layers.astype(np.int64), *strata), axis=1))
        call.launch(
            "draws.cu",
            "draw_indices",
            int(begins[-1]),
            *(rows, call.give(begins), len(counts), written, seed, step, rank),
        )
        call.run()


def _fields(codings: Codings, lengths: Sizes, counts: Sizes, offsets: Sizes, places: Sizes) -> Sizes:
    """The streams of whole indices, or of their low bits; see Stream in indices.cu."""
    width = np.where(codings == RAW, 32, low_bits(lengths, counts))
    chosen = np.flatnonzero((counts > 0) & (width > 0) & ((codings == RAW) | (codings == PACKED)))
    none = np.zeros_like(counts)
    row = np.arange(len(counts))
    columns = (row, none, none, width, counts, lengths, offsets, places, counts * width, none, none)
    streams: Sizes = np.stack(columns, axis=1)[chosen]
    return streams


def _positions(codings: Codings, lengths: Sizes, counts: Sizes, offsets: Sizes, places: Sizes) -> Sizes:
    """The streams in which the place of a bit says what an index is."""
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


def _lists(
    codings: Codings,
    lengths: Sizes,
    counts: Sizes,
    offsets: Sizes,
    places: Sizes,
    chosen: npt.NDArray[np.bool_],
) -> Sizes:
    """Lists of indices as such; see List in indices.cu."""
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


def _wrong(call: Call, rows: int) -> tuple[Indices, Ref]:
    found = np.zeros(rows, dtype=np.uint32)
    return found, call.result(found, zero=True)


def _refuse(found: Indices) -> None:
    """Raise for the first row that something is wrong with, what comes first of it."""
    for row in np.flatnonzero(found)[:1]:
        first = int(found[row]) & -int(found[row])
        raise ValueError(f"row {row}: {_COMPLAINTS[first]}")
