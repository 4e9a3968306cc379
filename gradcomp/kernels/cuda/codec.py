"""The codec's kernels on a GPU; :mod:`gradcomp.kernels.reference` defines what each computes.

Rows of a table refer to memory that the device reaches; payloads, flags and magnitudes may lie on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.call import GROUP, THREADS, Call, Parameter, Ref, groups, tiles
from gradcomp.kernels.cuda.driver import Driver
from gradcomp.kernels.cuda.places import overlap
from gradcomp.kernels.segments import (
    BF16,
    CODEBOOK_L2,
    CODEBOOK_LINF,
    FLOAT32,
    FP16,
    FP32,
    FP64,
    L2,
    LEVELS,
    LINF,
    MINMAX,
    ONEBIT,
    OWNER_RANK,
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


Rows = npt.NDArray[np.int64]


class CodecKernels:
    """encode, decode, decode_add, reduce and nonzero."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def encode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        *,
        stochastic: bool,
        seed: int,
        step: int,
        rank: int,
        scale: float,
        decay: float,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.encode`."""
        _check(codec, table, flags, (payload,), magnitudes)
        self._encode(
            codec,
            table,
            payload,
            flags,
            (),
            stochastic,
            (seed, step, rank),
            (float(scale), float(decay), 1.0),
            magnitudes,
        )

    def reduce(
        self,
        codec: int,
        table: SegmentTable,
        payloads: Sequence[Bytes],
        out: Bytes,
        flags: Bytes,
        *,
        stochastic: bool,
        seed: int,
        step: int,
        divisor: float,
        decay: float,
        rank: int = OWNER_RANK,
        magnitudes: Magnitudes | None = None,
    ) -> None:
        """See `reference.reduce`."""
        _check(codec, table, flags, (out, *payloads), magnitudes)
        if not payloads:
            raise ValueError("reduce needs at least one payload")
        if any(overlap(out, payload) for payload in payloads):
            raise ValueError("out overlaps a payload")
        self._encode(
            codec,
            table,
            out,
            flags,
            payloads,
            stochastic,
            (seed, step, rank),
            (1.0, float(decay), float(divisor)),
            magnitudes,
        )

    def _encode(
        self,
        codec: int,
        table: SegmentTable,
        payload: Bytes,
        flags: Bytes,
        payloads: Sequence[Bytes],
        stochastic: bool,
        draws: tuple[int, int, int],
        factors: tuple[float, float, float],
        magnitudes: Magnitudes | None,
    ) -> None:
        """Encode gradients or, if there are any, payloads."""
        call = Call(self._driver)
        bad = np.zeros(len(table), dtype=np.uint8)
        sent = [call.give(each) for each in payloads]
        written, found = (
            _written(call, payload, table["payload"], wire_bytes_table(codec, table)),
            call.result(bad, zero=True),
        )
        stem = "reduce" if payloads else "encode"
        drawn = stochastic and codec in STOCHASTIC
        for name, members in encoders_of(codec, table["bits"], drawn):
            part = table[members]
            job = _Job(call, part, call.room(len(part), zero=True))
            if codec == FP64:
                self._doubles(call, f"{stem}_doubles", job, written, sent, factors)
            else:
                common = (*_addresses(call, sent), _magnitudes(call, magnitudes), *draws, *factors)
                _encode_class(call, codec, name, stem, rounding(drawn), job, written, common)
            sizes = wire_bytes_table(codec, part)
            call.launch(
                "rows.cu",
                "discard",
                len(part),
                job.bad,
                written,
                call.give(part["payload"]),
                call.give(sizes),
            )
            where = call.give(members.astype(np.int64))
            call.launch("rows.cu", "collect", -(-len(part) // THREADS), job.bad, where, len(part), found)
        call.run()
        flags |= bad

    def _doubles(
        self,
        call: Call,
        name: str,
        job: _Job,
        written: Parameter,
        sent: Sequence[Ref],
        factors: tuple[float, float, float],
    ) -> None:
        counts = -(-job.table["length"] // THREADS)
        blocks, rows = job.tiled(counts)
        call.launch("rows.cu", name, blocks, *rows, written, 0, job.bad, *_addresses(call, sent), *factors)

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
        chosen = np.flatnonzero(table["output"])
        _check(codec, table, flags, (payload,), magnitudes, chosen)
        bad = np.zeros(len(table), dtype=np.uint8)
        call = Call(self._driver)
        given, found = call.give(payload), call.result(bad, zero=True)
        for name, found_at in classes_of(codec, table["bits"][chosen]):
            members = chosen[found_at]
            job = _Job(call, table[members], call.room(len(members), zero=True))
            skipped = call.give(flags[members])
            if codec == FP64:
                blocks, rows = job.tiled(-(-job.table["length"] // THREADS))
                call.launch(
                    "rows.cu",
                    "decode_doubles",
                    blocks,
                    *rows,
                    given,
                    skipped,
                    job.bad,
                    0,
                    0,
                    float(scale),
                    1.0,
                    float(divisor),
                )
            else:
                blocks, rows = job.tiled(-(-job.table["length"] // _DECODED))
                call.launch(
                    "decode.cu",
                    "decode",
                    blocks,
                    *(
                        *rows,
                        given,
                        skipped,
                        job.bad,
                        _magnitudes(call, magnitudes),
                        float(divisor),
                        float(scale),
                    ),
                    defines={"GRADCOMP_CLASS": name},
                )
            where = call.give(members.astype(np.int64))
            call.launch(
                "rows.cu", "collect", -(-len(members) // THREADS), job.bad, where, len(members), found
            )
        call.run()
        flags |= bad

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
        table = table[table["output"] != 0]
        _check(codec, table, None, (payload,), magnitudes)
        if (table["dtype"] != FLOAT32).any():
            raise ValueError("decode_add adds to float32 outputs only")
        call = Call(self._driver)
        given = call.give(payload)
        for name, members in classes_of(codec, table["bits"]):
            job = _Job(call, table[members], call.room(0))
            blocks, rows = job.tiled(-(-job.table["length"] // _DECODED))
            call.launch(
                "decode.cu",
                "decode_add",
                blocks,
                *(*rows, given, 0, 0, _magnitudes(call, magnitudes), 1.0, float(scale)),
                defines={"GRADCOMP_CLASS": name},
            )
        call.run()

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


class _Job:
    """Rows that one launch serves, and where it notes which are not finite."""

    def __init__(self, call: Call, table: SegmentTable, bad: Ref) -> None:
        self._call = call
        self._rows = call.give(table)
        self.table = table
        self.bad = bad

    def tiled(self, counts: Rows) -> tuple[int, tuple[Parameter, ...]]:
        """Blocks for so many tiles per row, and the parameters that every kernel begins with."""
        begins = tiles(counts)
        return int(begins[-1]), (self._rows, self._call.give(begins), len(self.table))


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
        blocks, rows = job.tiled(-(-buckets // _TEAMS))
        parameters = (*rows, written, job.bad, 0, 0, *common)
        call.launch("encode.cu", f"{stem}_{rounding}", blocks, *parameters, defines=defines)
        return
    wide = largest > _LARGEST_OF_TEAM
    kept = (call.room(int(buckets.sum()) * _CODEC_BYTES), call.give(np.cumsum(buckets) - buckets))
    blocks, rows = job.tiled(buckets if wide else -(-buckets // _TEAMS))
    parameters = (*rows, written, job.bad, *kept, *common)
    team = {"GRADCOMP_TEAM": THREADS} if wide else {}
    call.launch("encode.cu", f"{stem}_ranges", blocks, *parameters, defines=defines | team)
    blocks, rows = job.tiled(groups(job.table))
    parameters = (*rows, written, job.bad, *kept, *common)
    call.launch("encode.cu", f"{stem}_codes_{rounding}", blocks, *parameters, defines=defines)


def _written(
    call: Call, payload: Bytes, begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]
) -> Parameter:
    """The payload, of which only what lies between the rows travels, and up to the device only if it has gaps."""
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    if not len(sizes):
        return 0
    first, end = int(begins.min()), int((begins + sizes).max())
    span = payload[first:end]
    return (call.result(span) if sizes.sum() == end - first else call.update(span)).part(-first)


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


def _magnitudes(call: Call, magnitudes: Magnitudes | None) -> Parameter:
    return 0 if magnitudes is None else call.give(magnitudes)


def _check(
    codec: int,
    table: SegmentTable,
    flags: Bytes | None,
    payloads: Sequence[Bytes],
    magnitudes: Magnitudes | None,
    chosen: Rows | slice = slice(None),
) -> None:
    check_array("table", table, SEGMENT)
    if flags is not None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
    check_table(codec, table[chosen], *(len(payload) for payload in payloads))
    check_magnitudes(codec, table[chosen], magnitudes)
