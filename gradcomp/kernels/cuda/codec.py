"""The codec's kernels on a GPU; :mod:`gradcomp.kernels.reference` defines what each computes.

Rows of a table refer to memory that the device reaches; payloads, flags and magnitudes may lie on either side.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gradcomp.kernels.cuda.bits import write_decode_add_bits, write_decode_bits, write_encode_bits
from gradcomp.kernels.cuda.call import Call, overlap_any
from gradcomp.kernels.cuda.codes import write_decode, write_decode_add, write_encode, write_nonzero
from gradcomp.kernels.cuda.prepared import Kernels, fixed_columns, place_of
from gradcomp.kernels.segments import (
    ALLOCATED,
    CODEBOOKS,
    SEGMENT,
    STOCHASTIC,
    Bytes,
    Draw,
    Magnitudes,
    SegmentTable,
    check_array,
    check_elements,
    check_magnitudes,
    is_table,
)

_WORD = 0xFFFFFFFFFFFFFFFF


class CodecKernels(Kernels):
    """The kernels of `reference` under the same names; checked and recorded once while rows do not change."""

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
        """Encodes gradients or, if there are any, payloads."""
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
        write = write_encode_bits if codec in ALLOCATED else write_encode
        self._plans.run(key, lambda call: write(call, codec, drawn, arrays), arrays, numbers, (flags, bad))

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
        with_output = table["output"] != 0 if is_table(table) else np.zeros(0, dtype=np.bool_)
        numbers = (float(scale), float(divisor))
        given = (table, payload, magnitudes, flags)
        if self._plans.repeats(("decode", codec, with_output.tobytes()), given, numbers, flags):
            return
        _check_rows(codec, table, flags, magnitudes, with_output)
        bad = np.zeros(len(table), dtype=np.uint8)
        arrays = (table, payload, bad, magnitudes, flags)
        key = ("decode", codec, fixed_columns(table), with_output.tobytes(), place_of(payload))
        write = write_decode_bits if codec in ALLOCATED else write_decode
        self._plans.run(
            key, lambda call: write(call, codec, with_output, arrays), arrays, numbers, (flags, bad)
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
        with_output = table["output"] != 0 if is_table(table) else np.zeros(0, dtype=np.bool_)
        _check_rows(codec, table, None, magnitudes, with_output)
        arrays = (table, payload, None, magnitudes)
        key = ("add", codec, fixed_columns(table), with_output.tobytes(), place_of(payload))
        write = write_decode_add_bits if codec in ALLOCATED else write_decode_add
        self._plans.run(key, lambda call: write(call, codec, with_output, arrays), arrays, (float(scale),))

    def nonzero(self, table: SegmentTable, out: Bytes) -> None:
        check_array("table", table, SEGMENT)
        check_array("out", out, np.uint8, len(table), writable=True)
        check_elements(table)
        call = Call(self._plans.driver)
        write_nonzero(call, table, out)
        call.run()


def _words(draw: Draw | None) -> tuple[int, int, int]:
    return (0, 0, 0) if draw is None else (draw.seed & _WORD, draw.step & _WORD, draw.rank & _WORD)


def _check_rows(
    codec: int,
    table: SegmentTable,
    flags: Bytes | None,
    magnitudes: Magnitudes | None,
    chosen: npt.NDArray[np.bool_] | slice = slice(None),
) -> None:
    """Makes the checks that every run needs; the others are made when the call is recorded."""
    check_array("table", table, SEGMENT)
    if flags is not None:
        check_array("flags", flags, np.uint8, len(table), writable=True)
    if magnitudes is not None or codec in CODEBOOKS:
        check_magnitudes(codec, table[chosen], magnitudes)
