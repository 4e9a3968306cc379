"""Writes down the calls of the codec's kernels, and maps codecs to the classes of encode.cu and decode.cu.

A run's arrays are a table, a payload, flags of rows that are not finite, magnitudes, and others; its numbers are
those of :mod:`.codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import GROUP, THREADS, Call, groups, places_of, tiles, to_read, to_write
from gradcomp.kernels.cuda.layout import Integer, Parameter, Real, Ref, Source
from gradcomp.kernels.cuda.prepared import source_of
from gradcomp.kernels.segments import (
    ALLOCATED,
    BF16,
    CODEBOOK_L2,
    CODEBOOK_LINF,
    CODEBOOK_MINMAX,
    E2M1,
    E4M3,
    E5M2,
    FLOAT32,
    FP16,
    FP32,
    FP64,
    L2,
    LEVELS,
    LINF,
    MINMAX,
    MINMAX_SHIFT,
    NVFP4,
    ONEBIT,
    SIGN,
    UNIT_BYTES,
    VOTE,
    Bytes,
    SegmentTable,
    check_table,
    wire_bytes_table,
)

# Codes of one bit need another class where a sign and a magnitude share the bits of a code.
_CLASSES = {
    MINMAX: "MinMax",
    L2: "SignMagnitude<L2Norm>",
    LINF: "SignMagnitude<LInfNorm>",
    FP32: "Float32",
    FP16: "ScaledHalf",
    BF16: "Bfloat16",
    SIGN: "Sign<MeanMagnitude>",
    VOTE: "Sign<Presence>",
    ONEBIT: "OneBit",
    CODEBOOK_L2: "Codebook<L2Norm,LargeTable>",
    CODEBOOK_LINF: "Codebook<LInfNorm,LargeTable>",
    CODEBOOK_MINMAX: "MinMaxCodebook<LargeTable>",
    E2M1: "BlockFloat<E2M1>",
    E4M3: "BlockFloat<E4M3>",
    E5M2: "BlockFloat<E5M2>",
    NVFP4: "BlockFloatInUnits<E2M1>",
    MINMAX_SHIFT: "MinMax",
}
_ONE_BIT = {L2: "PureSign<L2Norm>", LINF: "PureSign<LInfNorm>"}
# The classes that encode one bit to nearest, which has scales of its own.
_ONE_BIT_TO_NEAREST = {MINMAX: "TwoMeans", L2: "Sign<MeanMagnitude>", LINF: "Sign<MeanMagnitude>"}

_SHIFTED = "ShiftedMinMax"  # the class that encodes with a shift

CODED = tuple(_CLASSES)
"""The codecs of encode.cu and decode.cu: all but float64's."""

_KEPT_BYTES = 64  # size of the state of a bucket, or of a part of one, between two kernels
_LARGEST_OF_TEAM = 8192  # the most elements of a bucket that sixteen threads read
_PART = 16 * 4096  # elements of a part that a block reads, of larger buckets
_TEAMS = THREADS // 16
_PIECE = 2048  # elements that are treated as a bucket for codecs without buckets
_DECODED = 4 * GROUP * THREADS  # elements that a block decodes
_READ_FOR_UNIT = 8 * GROUP * THREADS  # elements that a block reads for the unit of a row's scales
_BLOCKS_OF_A_ROW = 32  # the most blocks that search a row for a nonzero element; all stop when one finds it

Rows = npt.NDArray[np.int64]
TABLE, PAYLOAD, BAD, MAGNITUDES, OTHERS = range(5)

DRAWS = (Integer(0), Integer(1), Integer(2))
FACTORS = (Real(3), Real(4), Real(5))

Arrays = tuple[Any, ...]


def write_encode(call: Call, codec: int, drawn: bool, arrays: Arrays, only: Rows | None = None) -> None:
    """Writes down encode, or reduce, of all rows of a table or of some."""
    table, payload, bad, _, *payloads = arrays
    chosen = np.arange(len(table)) if only is None else only
    check_table(codec, table[chosen], *map(len, (payload, *payloads)))
    begins, sizes = table["payload"], wire_bytes_table(codec, table)
    sent = [to_read(call, each, number, begins, sizes) for number, each in enumerate(payloads, OTHERS)]
    written = to_write(call, payload, PAYLOAD, begins[chosen], sizes[chosen])
    found = call.result(bad, Source(BAD), zero=True)
    stem = "reduce" if payloads else "encode"
    for name, found_at in encoders_of(codec, table["level"][chosen], drawn):
        members = chosen[found_at]
        job = _Job.of(call, table, members)
        if codec == FP64:
            blocks, rows = job.tiled(-(-job.table["length"] // THREADS))
            parameters = (*rows, written, 0, job.bad, *addresses_of(call, sent), *FACTORS)
            call.launch("rows.cu", f"{stem}_doubles", blocks, *parameters)
        else:
            largest = call.workspace(4 * len(members), zero=True) if codec in UNIT_BYTES else 0
            common = (*addresses_of(call, sent), _magnitudes(call, arrays), largest, *DRAWS, *FACTORS)
            if codec in UNIT_BYTES:
                find_largest(call, name, stem, job.table, job.rows, common)
            _encode_class(call, codec, name, stem, rounding(drawn), job, written, common)
        part = (call.give(begins[members]), call.give(sizes[members]))
        call.launch("rows.cu", "discard", len(members), job.bad, written, *part)
        collect(call, job.bad, members, found)


def write_decode(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    """Writes down decode of the chosen rows."""
    table, payload, bad, _, flags = arrays
    chosen = np.flatnonzero(with_output)
    given = payload_of(call, codec, table[chosen], payload)
    found = call.result(bad, Source(BAD), zero=True)
    for name, found_at in classes_of(codec, table["level"][chosen]):
        members = chosen[found_at]
        job = _Job.of(call, table, members)
        skipped = call.give(flags[members], source_of(OTHERS, members, len(table)))
        if codec == FP64:
            blocks, rows = job.tiled(-(-job.table["length"] // THREADS))
            parameters = (*rows, given, skipped, job.bad, 0, 0, Real(0), 1.0, Real(1))
            call.launch("rows.cu", "decode_doubles", blocks, *parameters)
        else:
            blocks, rows = job.placed(-(-job.table["length"] // _DECODED))
            parameters = (*rows, blocks, given, skipped, job.bad, _magnitudes(call, arrays), Real(1), Real(0))
            call.launch_tiles("decode.cu", "decode", blocks, *parameters, defines={"GRADCOMP_CLASS": name})
        collect(call, job.bad, members, found)


def write_decode_add(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    """Writes down decode_add of the chosen rows."""
    table, payload, _, _ = arrays
    chosen = np.flatnonzero(with_output)
    given = payload_of(call, codec, table[chosen], payload, added=True)
    for name, found_at in classes_of(codec, table["level"][chosen]):
        job = _Job.of(call, table, chosen[found_at])
        blocks, rows = job.placed(-(-job.table["length"] // _DECODED))
        parameters = (*rows, blocks, given, 0, 0, _magnitudes(call, arrays), 1.0, Real(0))
        call.launch_tiles("decode.cu", "decode_add", blocks, *parameters, defines={"GRADCOMP_CLASS": name})


def write_nonzero(call: Call, table: SegmentTable, out: Bytes) -> None:
    """Writes down nonzero of all rows."""
    job = _Job(call, table, call.result(out, zero=True))
    blocks, rows = job.tiled(np.minimum(groups(table), _BLOCKS_OF_A_ROW))
    call.launch("rows.cu", "nonzero", blocks, *rows, job.bad)


def payload_of(
    call: Call, codec: int, table: SegmentTable, payload: Bytes, *, added: bool = False
) -> Parameter:
    """Checks the rows, and registers their payloads to be decoded, or ``added`` to outputs."""
    check_table(codec, table, len(payload))
    if added and (table["dtype"] != FLOAT32).any():
        raise ValueError("decode_add adds to float32 outputs only")
    return to_read(call, payload, PAYLOAD, table["payload"], wire_bytes_table(codec, table))


def find_largest(
    call: Call, name: str, stem: str, table: SegmentTable, rows: Parameter, common: tuple[Parameter, ...]
) -> None:
    """Launches the search for each row's largest magnitude; ``common``, the last parameters, has its place."""
    places = places_of(-(-table["length"] // _READ_FOR_UNIT))
    parameters = (rows, call.give(places), len(places), *(0,) * 6, *common)
    call.launch("ranges.cu", f"{stem}_largest", len(places), *parameters, defines={"GRADCOMP_CLASS": name})


def collect(call: Call, noted: Ref, members: Rows, found: Ref) -> None:
    """Copies the flags of some rows to those of all rows."""
    where = call.give(members.astype(np.int64))
    call.launch("rows.cu", "collect", -(-len(members) // THREADS), noted, where, len(members), found)


class _Job:
    """The rows that one launch serves, and the flags of those that are not finite."""

    def __init__(self, call: Call, table: SegmentTable, bad: Ref, source: Source | None = None) -> None:
        self._call = call
        self.rows = call.give(table, source)
        self.table = table
        self.bad = bad

    @staticmethod
    def of(call: Call, table: SegmentTable, members: Rows) -> _Job:
        """Returns the job for some rows of every run's table."""
        bad = call.workspace(len(members), zero=True)
        return _Job(call, table[members], bad, source_of(TABLE, members, len(table)))

    def tiled(self, counts: Rows) -> tuple[int, tuple[Parameter, ...]]:
        """Returns the blocks for ``counts`` tiles per row, and the first parameters of the kernels of rows.cu."""
        begins = tiles(counts)
        return int(begins[-1]), (self.rows, self._call.give(begins), len(self.table))

    def placed(self, counts: Rows) -> tuple[int, tuple[Parameter, ...]]:
        """Returns blocks and first parameters for encode.cu, ranges.cu and decode.cu, which look a block's row up."""
        places = places_of(counts)
        return len(places), (self.rows, self._call.give(places))


def _encode_class(
    call: Call,
    codec: int,
    name: str,
    stem: str,
    rounding: str,
    job: _Job,
    written: Parameter,
    common: tuple[Parameter, ...],
) -> None:
    """Launches one kernel where the buckets allow it, else kernels that first compute the buckets' scales."""
    length = job.table["length"]
    size = np.minimum(job.table["bucket_size"] if has_buckets(codec) else _PIECE, length)
    buckets = -(-length // np.maximum(size, 1))
    largest = int(size.max(initial=0))
    defines: dict[str, object] = {"GRADCOMP_CLASS": name}
    by_teams, rows = job.placed(-(-buckets // _TEAMS))
    if largest <= _LARGEST_OF_TEAM and ((size % GROUP == 0) | (buckets <= 1)).all():
        parameters = (*rows, by_teams, written, job.bad, 0, 0, 0, 0, *common)
        call.launch_tiles("encode.cu", f"{stem}_{rounding}", by_teams, *parameters, defines=defines)
        return
    first_buckets = call.give(np.cumsum(buckets) - buckets)
    kept: tuple[Parameter, ...] = (call.workspace(int(buckets.sum()) * _KEPT_BYTES), first_buckets, 0, 0)
    if largest <= _LARGEST_OF_TEAM:
        parameters = (*rows, by_teams, written, job.bad, *kept, *common)
        call.launch("ranges.cu", f"{stem}_ranges", by_teams, *parameters, defines=defines)
    else:
        parts = buckets * -(-size // _PART)
        blocks, rows_of_parts = job.placed(parts)
        kept = (*kept[:2], call.workspace(blocks * _KEPT_BYTES), call.give(np.cumsum(parts) - parts))
        parameters = (*rows_of_parts, blocks, written, job.bad, *kept, *common)
        call.launch("ranges.cu", f"{stem}_parts", blocks, *parameters, defines=defines)
        parameters = (*rows, by_teams, written, job.bad, *kept, *common)
        call.launch("ranges.cu", "join_parts", by_teams, *parameters, defines=defines)
    blocks, rows = job.placed(groups(job.table))
    parameters = (*rows, blocks, written, job.bad, *kept, *common)
    call.launch_tiles("encode.cu", f"{stem}_codes_{rounding}", blocks, *parameters, defines=defines)


def classes_of(codec: int, bits: npt.NDArray[np.int32]) -> list[tuple[str, Rows]]:
    """Returns the classes that decode a codec, each with the indices of the numbers of bits that it serves."""
    return _by_bits(codec, bits, _ONE_BIT)


def encoders_of(codec: int, bits: npt.NDArray[np.int32], drawn: bool) -> list[tuple[str, Rows]]:
    """Returns the classes that encode, with draws or to nearest, each with the indices of the bits that it serves."""
    if codec in ALLOCATED:  # losses are measured with uniform bits, whose error the allocation keeps
        codec = MINMAX
    if codec == MINMAX_SHIFT:
        if drawn:
            return [(_SHIFTED, np.arange(len(bits)))]
        codec = MINMAX
    return _by_bits(codec, bits, _ONE_BIT if drawn else _ONE_BIT_TO_NEAREST)


def _by_bits(codec: int, bits: npt.NDArray[np.int32], of_one_bit: dict[int, str]) -> list[tuple[str, Rows]]:
    one_bit = bits == 1 if codec in of_one_bit else np.zeros(len(bits), dtype=np.bool_)
    found = [
        (_CLASSES.get(codec, ""), np.flatnonzero(~one_bit)),
        (of_one_bit.get(codec, ""), np.flatnonzero(one_bit)),
    ]
    return [(name, members) for name, members in found if len(members)]


def has_buckets(codec: int) -> bool:
    """Returns whether the codec's rows have a bucket size."""
    return codec in LEVELS or codec == FP16


def rounding(drawn: bool) -> str:
    """Returns the suffix of kernels' names."""
    return "stochastic" if drawn else "nearest"


def addresses_of(call: Call, payloads: Sequence[Parameter]) -> tuple[Parameter, int]:
    """Registers the list of the payloads' addresses; returns it and its length."""
    return (call.addresses(payloads) if payloads else 0), len(payloads)


def _magnitudes(call: Call, arrays: Arrays) -> Parameter:
    given = arrays[MAGNITUDES]
    return 0 if given is None else call.give(given, Source(MAGNITUDES))
