"""The codec's kernels on a GPU; :mod:`gradcomp.kernels.reference` defines what each computes.

Rows of a table refer to memory that the device reaches; payloads, flags and magnitudes may lie on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.arguments import Draw
from gradcomp.kernels.cuda.call import GROUP, THREADS, Call, Parameter, Ref, groups, places_of, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.layout import Integer, Real, Source
from gradcomp.kernels.cuda.places import overlap_any
from gradcomp.kernels.cuda.prepared import Plans, fixed_columns, place_of, source_of
from gradcomp.kernels.cuda.spans import ends, spans
from gradcomp.kernels.segments import (
    BF16,
    CODEBOOK_L2,
    CODEBOOK_LINF,
    CODEBOOKS,
    FLOAT32,
    FP16,
    FP32,
    FP64,
    L2,
    LEVELS,
    LINF,
    MINMAX,
    ONEBIT,
    SEGMENT,
    SIGN,
    STOCHASTIC,
    VOTE,
    Bytes,
    Magnitudes,
    SegmentTable,
    check_array,
    check_elements,
    check_magnitudes,
    check_table,
    is_table,
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
}
_ONE_BIT = {L2: "PureSign<L2Norm>", LINF: "PureSign<LInfNorm>"}
# What encodes one bit to nearest: it has scales of its own.
_ONE_BIT_TO_NEAREST = {MINMAX: "TwoMeans", L2: "Sign<MeanMagnitude>", LINF: "Sign<MeanMagnitude>"}

CODED = tuple(_CLASSES)
"""The codecs that encode.cu and decode.cu know: all but float64's."""

_CODEC_BYTES = 64  # of the state of a bucket between two kernels
_LARGEST_OF_TEAM = 8192  # elements of a bucket that sixteen threads read
_TEAMS = THREADS // 16
_PIECE = 2048  # elements that stand for a bucket where codecs know none
_DECODED = 4 * GROUP * THREADS  # elements that a block decodes
_BLOCKS_OF_A_ROW = 32  # at most so many look for an element that is not zero, and stop when one has found it


_WORD = 0xFFFFFFFFFFFFFFFF

Rows = npt.NDArray[np.int64]


class CodecKernels:
    """encode, decode, decode_add, reduce and nonzero. Checks and launches are made once for rows that stay alike."""

    def __init__(self, driver: Driver, plans: Plans) -> None:
        self._driver = driver
        self._plans = plans

    def encode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        *,
        draw: Draw | None,
        scale: float,
        decay: float,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.encode`."""
        factors = (float(scale), float(decay), 1.0)
        self._encode(codec, table, payload, flags, (), draw, factors, magnitudes)

    def reduce(
        self,
        codec: int,
        table: SegmentTable,
        payloads: Sequence[Bytes],
        out: Bytes,
        flags: Bytes,
        *,
        draw: Draw | None,
        divisor: float,
        decay: float,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.reduce`."""
        if not payloads:
            raise ValueError("reduce needs at least one payload")
        factors = (1.0, float(decay), float(divisor))
        self._encode(codec, table, out, flags, payloads, draw, factors, magnitudes)

    def _encode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        payloads: Sequence[Bytes],
        draw: Draw | None,
        factors: tuple[float, float, float],
        magnitudes: Magnitudes | None,
    ) -> None:
        """Encode gradients or, if there are any, payloads."""
        given = (table, payload, magnitudes, *payloads)
        numbers = (*_words(draw), *factors)
        if self._plans.repeats(("encode", codec, draw is None), given, numbers, flags):
            return
        if overlap_any(payload, payloads):
            raise ValueError("out overlaps a payload")
        _check_rows(codec, table, flags, magnitudes)
        drawn = draw is not None and codec in STOCHASTIC
        bad = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, payload, bad, magnitudes, *payloads)
        key = ("encode", codec, drawn, fixed_columns(table), *map(place_of, (payload, *payloads)))
        self._plans.run(
            key, lambda call: write_encode(call, codec, drawn, arrays), arrays, numbers, (flags, bad)
        )

    def decode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        *,
        divisor: float,
        scale: float,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.decode`."""
        with_output = table["output"] != 0 if is_table(table) else np.zeros(0, dtype=np.bool_)
        numbers = (float(scale), float(divisor))
        given = (table, payload, magnitudes, flags)
        if self._plans.repeats(("decode", codec, with_output.tobytes()), given, numbers, flags):
            return
        _check_rows(codec, table, flags, magnitudes, with_output)
        bad = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, payload, bad, magnitudes, flags)
        key = ("decode", codec, fixed_columns(table), with_output.tobytes(), place_of(payload))
        self._plans.run(
            key, lambda call: write_decode(call, codec, with_output, arrays), arrays, numbers, (flags, bad)
        )

    def decode_add(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        *,
        scale: float,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.decode_add`."""
        with_output = table["output"] != 0 if is_table(table) else np.zeros(0, dtype=np.bool_)
        _check_rows(codec, table, None, magnitudes, with_output)
        arrays = (table, payload, None, magnitudes)
        key = ("add", codec, fixed_columns(table), with_output.tobytes(), place_of(payload))
        self._plans.run(
            key, lambda call: _write_decode_add(call, codec, with_output, arrays), arrays, (float(scale),)
        )

    def nonzero(self, table: SegmentTable, out: Bytes) -> None:
        """See `reference.nonzero`."""
        check_array("table", table, SEGMENT)
        check_array("out", out, np.uint8, len(table), writable=True)
        check_elements(table)
        call = Call(self._driver)
        job = _Job(call, table, call.result(out, zero=True))
        blocks, rows = job.tiled(np.minimum(groups(table), _BLOCKS_OF_A_ROW))
        call.launch("rows.cu", "nonzero", blocks, *rows, job.bad)
        call.run()


# --- calls, written down: places of a run's arrays are _TABLE ... _OTHERS, of its numbers those in `numbers` above ----

_TABLE, _PAYLOAD, _BAD, _MAGNITUDES, _OTHERS = range(5)

_DRAWS = (Integer(0), Integer(1), Integer(2))
_FACTORS = (Real(3), Real(4), Real(5))

Arrays = tuple[Any, ...]


def write_encode(call: Call, codec: int, drawn: bool, arrays: Arrays, only: Rows | None = None) -> None:
    """encode or reduce, of all rows of a table or of some."""
    table, payload, bad, _, *payloads = arrays
    chosen = np.arange(len(table)) if only is None else only
    check_table(codec, table[chosen], *map(len, (payload, *payloads)))
    begins, sizes = table["payload"], wire_bytes_table(codec, table)
    sent = [_read(call, each, number, begins, sizes) for number, each in enumerate(payloads, _OTHERS)]
    written = _written(call, payload, begins[chosen], sizes[chosen])
    found = call.result(bad, Source(_BAD), zero=True)
    stem = "reduce" if payloads else "encode"
    for name, found_at in encoders_of(codec, table["bits"][chosen], drawn):
        members = chosen[found_at]
        job = _Job.of(call, table, members)
        if codec == FP64:
            blocks, rows = job.tiled(-(-job.table["length"] // THREADS))
            parameters = (*rows, written, 0, job.bad, *_addresses(call, sent), *_FACTORS)
            call.launch("rows.cu", f"{stem}_doubles", blocks, *parameters)
        else:
            common = (*_addresses(call, sent), _magnitudes(call, arrays), *_DRAWS, *_FACTORS)
            _encode_class(call, codec, name, stem, rounding(drawn), job, written, common)
        part = (call.give(begins[members]), call.give(sizes[members]))
        call.launch("rows.cu", "discard", len(members), job.bad, written, *part)
        _collect(call, job, members, found)


def write_decode(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    """decode, of the rows that are chosen."""
    table, payload, bad, _, flags = arrays
    chosen = np.flatnonzero(with_output)
    check_table(codec, table[chosen], len(payload))
    begins, sizes = table["payload"][chosen], wire_bytes_table(codec, table[chosen])
    given = _read(call, payload, _PAYLOAD, begins, sizes)
    found = call.result(bad, Source(_BAD), zero=True)
    for name, found_at in classes_of(codec, table["bits"][chosen]):
        members = chosen[found_at]
        job = _Job.of(call, table, members)
        skipped = call.give(flags[members], source_of(_OTHERS, members, len(table)))
        if codec == FP64:
            blocks, rows = job.tiled(-(-job.table["length"] // THREADS))
            parameters = (*rows, given, skipped, job.bad, 0, 0, Real(0), 1.0, Real(1))
            call.launch("rows.cu", "decode_doubles", blocks, *parameters)
        else:
            blocks, rows = job.placed(-(-job.table["length"] // _DECODED))
            parameters = (*rows, given, skipped, job.bad, _magnitudes(call, arrays), Real(1), Real(0))
            call.launch("decode.cu", "decode", blocks, *parameters, defines={"GRADCOMP_CLASS": name})
        _collect(call, job, members, found)


def _write_decode_add(call: Call, codec: int, with_output: npt.NDArray[np.bool_], arrays: Arrays) -> None:
    table, payload, _, _ = arrays
    chosen = np.flatnonzero(with_output)
    check_table(codec, table[chosen], len(payload))
    if (table["dtype"][chosen] != FLOAT32).any():
        raise ValueError("decode_add adds to float32 outputs only")
    begins, sizes = table["payload"][chosen], wire_bytes_table(codec, table[chosen])
    given = _read(call, payload, _PAYLOAD, begins, sizes)
    for name, found_at in classes_of(codec, table["bits"][chosen]):
        job = _Job.of(call, table, chosen[found_at])
        blocks, rows = job.placed(-(-job.table["length"] // _DECODED))
        parameters = (*rows, given, 0, 0, _magnitudes(call, arrays), 1.0, Real(0))
        call.launch("decode.cu", "decode_add", blocks, *parameters, defines={"GRADCOMP_CLASS": name})


def _words(draw: Draw | None) -> tuple[int, int, int]:
    return (0, 0, 0) if draw is None else (draw.seed & _WORD, draw.step & _WORD, draw.rank & _WORD)


def _collect(call: Call, job: _Job, members: Rows, found: Ref) -> None:
    """Notes of some rows, into those of all."""
    where = call.give(members.astype(np.int64))
    call.launch("rows.cu", "collect", -(-len(members) // THREADS), job.bad, where, len(members), found)


class _Job:
    """Rows that one launch serves, and where it notes which are not finite."""

    def __init__(self, call: Call, table: SegmentTable, bad: Ref, source: Source | None = None) -> None:
        self._call = call
        self._rows = call.give(table, source)
        self.table = table
        self.bad = bad

    @staticmethod
    def of(call: Call, table: SegmentTable, members: Rows) -> _Job:
        """For some rows of every run's table."""
        bad = call.workspace(len(members), zero=True)
        return _Job(call, table[members], bad, source_of(_TABLE, members, len(table)))

    def tiled(self, counts: Rows) -> tuple[int, tuple[Parameter, ...]]:
        """Blocks for so many tiles per row, and the parameters that kernels of rows.cu begin with."""
        begins = tiles(counts)
        return int(begins[-1]), (self._rows, self._call.give(begins), len(self.table))

    def placed(self, counts: Rows) -> tuple[int, tuple[Parameter, ...]]:
        """The same for encode.cu and decode.cu: blocks find their row and tile in a table."""
        places = places_of(counts)
        return len(places), (self._rows, self._call.give(places))


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
    """One kernel where buckets allow it, two where they do not."""
    length = job.table["length"]
    size = np.minimum(job.table["bucket_size"] if has_buckets(codec) else _PIECE, length)
    buckets = -(-length // np.maximum(size, 1))
    largest = int(size.max(initial=0))
    defines: dict[str, object] = {"GRADCOMP_CLASS": name}
    if largest <= _LARGEST_OF_TEAM and ((size % GROUP == 0) | (buckets <= 1)).all():
        blocks, rows = job.placed(-(-buckets // _TEAMS))
        parameters = (*rows, written, job.bad, 0, 0, *common)
        call.launch("encode.cu", f"{stem}_{rounding}", blocks, *parameters, defines=defines)
        return
    wide = largest > _LARGEST_OF_TEAM
    kept = (call.workspace(int(buckets.sum()) * _CODEC_BYTES), call.give(np.cumsum(buckets) - buckets))
    blocks, rows = job.placed(buckets if wide else -(-buckets // _TEAMS))
    parameters = (*rows, written, job.bad, *kept, *common)
    team = {"GRADCOMP_TEAM": THREADS} if wide else {}
    call.launch("encode.cu", f"{stem}_ranges", blocks, *parameters, defines=defines | team)
    blocks, rows = job.placed(groups(job.table))
    parameters = (*rows, written, job.bad, *kept, *common)
    call.launch("encode.cu", f"{stem}_codes_{rounding}", blocks, *parameters, defines=defines)


def _written(call: Call, payload: Bytes, begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Ref:
    """The payload, of which only the rows travel: other rows may be written beside them."""
    return call.write(payload, _PAYLOAD, spans(begins, sizes))


def _read(
    call: Call, payload: Bytes, number: int, begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Ref:
    """A payload that is only read: what lies between the rows."""
    return call.read(payload, number, *ends(begins, sizes))


def classes_of(codec: int, bits: npt.NDArray[np.int32]) -> list[tuple[str, Rows]]:
    """Which of these numbers of bits each class of a codec serves."""
    return _by_bits(codec, bits, _ONE_BIT)


def encoders_of(codec: int, bits: npt.NDArray[np.int32], drawn: bool) -> list[tuple[str, Rows]]:
    """The same for what encodes, with draws or to nearest."""
    return _by_bits(codec, bits, _ONE_BIT if drawn else _ONE_BIT_TO_NEAREST)


def _by_bits(codec: int, bits: npt.NDArray[np.int32], of_one_bit: dict[int, str]) -> list[tuple[str, Rows]]:
    one_bit = bits == 1 if codec in of_one_bit else np.zeros(len(bits), dtype=np.bool_)
    found = [
        (_CLASSES.get(codec, ""), np.flatnonzero(~one_bit)),
        (of_one_bit.get(codec, ""), np.flatnonzero(one_bit)),
    ]
    return [(name, members) for name, members in found if len(members)]


def has_buckets(codec: int) -> bool:
    """Whether a row says how large the buckets of this codec are."""
    return codec in LEVELS or codec == FP16


def rounding(drawn: bool) -> str:
    """How names of kernels end."""
    return "stochastic" if drawn else "nearest"


def _addresses(call: Call, payloads: Sequence[Ref]) -> tuple[Parameter, int]:
    """A list of addresses, which kernels find behind one."""
    return (call.addresses(payloads) if payloads else 0), len(payloads)


def _magnitudes(call: Call, arrays: Arrays) -> Parameter:
    given = arrays[_MAGNITUDES]
    return 0 if given is None else call.give(given, Source(_MAGNITUDES))


def _check_rows(
    codec: int,
    table: SegmentTable,
    flags: Bytes | None,
    magnitudes: Magnitudes | None,
    chosen: npt.NDArray[np.bool_] | slice = slice(None),
) -> None:
    """What has to be looked at in every run; the rest is checked when the call is written down."""
    check_array("table", table, SEGMENT)
    if flags is not None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
    if magnitudes is not None or codec in CODEBOOKS:
        check_magnitudes(codec, table[chosen], magnitudes)
