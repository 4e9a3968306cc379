"""Input that no caller should give: clear errors before any memory is touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kernels.groups import magnitudes_of

from gradcomp import kernels
from gradcomp.kernels import dispatch, reference, segments

pytest.importorskip("gradcomp._native")
native = dispatch.named("native")
BACKEND = pytest.mark.parametrize("backend", [reference, native], ids=["reference", "native"])


OUTPUT = np.zeros(100, np.float64)


def table(**columns: Any) -> Any:
    row = np.zeros(1, segments.SEGMENT)
    for name, value in ({"length": 8, "level": 4, "bucket_size": 8} | columns).items():
        row[name] = value
    return row


def calls(backend: Any, codec: int, rows: Any, payload: Any, flags: Any) -> dict[str, Callable[[], None]]:
    magnitudes = magnitudes_of(codec)
    nearest: dict[str, Any] = {"draw": None, "magnitudes": magnitudes}
    outputs = rows.copy()
    outputs["output"] = OUTPUT.ctypes.data
    other = np.zeros(1000, np.uint8)
    return {
        "encode": lambda: backend.encode(codec, rows, payload, flags, **nearest, scale=1.0, decay=1.0),
        "decode": lambda: backend.decode(
            codec, outputs, payload, flags, divisor=1.0, scale=1.0, magnitudes=magnitudes
        ),
        "decode_add": lambda: backend.decode_add(codec, outputs, payload, scale=1.0, magnitudes=magnitudes),
        "reduce out": lambda: backend.reduce(
            codec, rows, [other], payload, flags, **nearest, divisor=1.0, decay=1.0
        ),
        "reduce in": lambda: backend.reduce(
            codec, rows, [other, payload], other.copy(), flags, **nearest, divisor=1.0, decay=1.0
        ),
    }


MALFORMED = {
    "payload too short": (segments.MINMAX, {"length": 9}),
    "payload too short by a scale": (segments.L2, {"bucket_size": 1, "length": 4}),
    "offset beyond the end": (segments.MINMAX, {"payload": 1}),
    "offset negative": (segments.MINMAX, {"payload": -1}),
    "offset wraps": (segments.MINMAX, {"payload": 2**63 - 1}),
    "bits 0": (segments.LINF, {"level": 0}),
    "bits 9": (segments.LINF, {"level": 9}),
    "bits 9 of a shift": (segments.MINMAX_SHIFT, {"level": 9}),
    "bits 0 of a sign": (segments.SIGN, {"level": 0}),
    "bits 2 of a sign": (segments.VOTE, {"level": 2}),
    "bits 1 of a codebook": (segments.CODEBOOK_L2, {"level": 1}),
    "bits 9 of a codebook": (segments.CODEBOOK_LINF, {"level": 9}),
    "payload too short for two means": (segments.ONEBIT, {"level": 1, "length": 64, "bucket_size": 64}),
    "bits negative": (segments.MINMAX, {"level": -(2**31)}),
    "bucket of none": (segments.MINMAX, {"bucket_size": 0}),
    "bucket negative": (segments.FP16, {"bucket_size": -1}),
    "length negative": (segments.MINMAX, {"length": -1}),
    "length huge": (segments.FP64, {"length": 2**62, "dtype": segments.FLOAT64}),
    "start negative": (segments.MINMAX, {"start": -1}),
    "start beyond the counter": (segments.MINMAX, {"start": segments.MAX_ELEMENTS}),
    "dtype unknown": (segments.FP32, {"dtype": 4, "length": 1}),
    "dtype negative": (segments.FP32, {"dtype": -1, "length": 1}),
    "float64 with a float32 codec": (segments.FP32, {"dtype": segments.FLOAT64, "length": 1}),
    "float32 with FP64": (segments.FP64, {"length": 1}),
    "codec unknown": (12, {}),
    "codec negative": (-1, {}),
}


@BACKEND
@pytest.mark.parametrize(("codec", "columns"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_row(backend: Any, codec: int, columns: dict[str, int]) -> None:
    payload = np.full(12, 0xA5, np.uint8)
    for name, call in calls(backend, codec, table(**columns), payload, np.zeros(1, np.uint8)).items():
        with pytest.raises(ValueError, match=r"segment|codec|bits|bucket_size|dtype|elements|payload"):
            call()
        assert (payload == 0xA5).all(), name


def bad_magnitudes(*row: float) -> Any:
    magnitudes = magnitudes_of(segments.CODEBOOK_L2)
    magnitudes[3, :4] = row
    return magnitudes


BAD_MAGNITUDES = {
    "missing": (None, ValueError),
    "not from 0": (bad_magnitudes(0.1, 0.2, 0.5, 1), ValueError),
    "not to 1": (bad_magnitudes(0, 0.2, 0.5, 0.9), ValueError),
    "beyond 1": (bad_magnitudes(0, 0.2, 0.5, 1.5), ValueError),
    "not ascending": (bad_magnitudes(0, 0.5, 0.2, 1), ValueError),
    "not a number": (bad_magnitudes(0, 0.5, np.nan, 1), ValueError),
    "another shape": (np.zeros((8, 128), np.float32), ValueError),
    "float64": (magnitudes_of(segments.CODEBOOK_L2).astype(np.float64), TypeError),
    "one dimension": (magnitudes_of(segments.CODEBOOK_L2).reshape(-1), TypeError),
    "strided": (np.asfortranarray(magnitudes_of(segments.CODEBOOK_L2)), TypeError),
    "a list": ([0.0, 1.0], TypeError),
}


@BACKEND
@pytest.mark.parametrize(("wrong", "error"), BAD_MAGNITUDES.values(), ids=BAD_MAGNITUDES)
def test_wrong_magnitudes(backend: Any, wrong: Any, error: type[Exception]) -> None:
    rows, payload, flags = table(level=3), np.full(100, 0xA5, np.uint8), np.zeros(1, np.uint8)
    outputs = table(level=3, output=OUTPUT.ctypes.data)
    nearest = {"draw": None, "decay": 1.0, "magnitudes": wrong}
    codec = segments.CODEBOOK_L2
    with pytest.raises(error):
        backend.encode(codec, rows, payload, flags, **nearest, scale=1.0)
    with pytest.raises(error):
        backend.reduce(codec, rows, [payload.copy()], payload, flags, **nearest, divisor=1.0)
    with pytest.raises(error):
        backend.decode(codec, outputs, payload, flags, divisor=1.0, scale=1.0, magnitudes=wrong)
    with pytest.raises(error):
        backend.decode_add(codec, outputs, payload, scale=1.0, magnitudes=wrong)
    assert (payload == 0xA5).all()


@BACKEND
def test_only_the_magnitudes_in_use_matter(backend: Any) -> None:
    rows, payload, flags = (
        table(level=4, output=OUTPUT.ctypes.data),
        np.zeros(100, np.uint8),
        np.zeros(1, np.uint8),
    )
    wrong_for_three = bad_magnitudes(0, 0.5, 0.2, 1)
    backend.decode(
        segments.CODEBOOK_L2, rows, payload, flags, divisor=1.0, scale=1.0, magnitudes=wrong_for_three
    )
    with pytest.raises(ValueError, match="nothing else"):
        backend.decode(segments.L2, rows, payload, flags, divisor=1.0, scale=1.0, magnitudes=wrong_for_three)


@BACKEND
def test_rows_without_output_are_not_checked(backend: Any) -> None:
    rows = table(payload=10**6)
    backend.decode(
        segments.MINMAX, rows, np.zeros(0, np.uint8), np.zeros(1, np.uint8), divisor=1.0, scale=1.0
    )
    backend.decode_add(segments.MINMAX, rows, np.zeros(0, np.uint8), scale=1.0)


WRONG_ARRAYS = {
    "float32": np.zeros(100, np.float32),
    "int8": np.zeros(100, np.int8),
    "two dimensions": np.zeros((10, 10), np.uint8),
    "strided": np.zeros(200, np.uint8)[::2],
    "a list": [0] * 100,
    "None": None,
}


@BACKEND
@pytest.mark.parametrize("wrong", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_payload(backend: Any, wrong: Any) -> None:
    for call in calls(backend, segments.MINMAX, table(), wrong, np.zeros(1, np.uint8)).values():
        with pytest.raises(TypeError):
            call()


@BACKEND
@pytest.mark.parametrize("wrong", WRONG_ARRAYS.values(), ids=WRONG_ARRAYS)
def test_wrong_flags(backend: Any, wrong: Any) -> None:
    every_call = calls(backend, segments.MINMAX, table(), np.zeros(100, np.uint8), wrong)
    for name in ("encode", "decode", "reduce out"):
        with pytest.raises(TypeError):
            every_call[name]()


@BACKEND
def test_read_only_target(backend: Any) -> None:
    payload = np.zeros(100, np.uint8)
    payload.flags.writeable = False
    every_call = calls(backend, segments.MINMAX, table(), payload, np.zeros(1, np.uint8))
    for name in ("encode", "reduce out"):
        with pytest.raises(TypeError):
            every_call[name]()


@BACKEND
@pytest.mark.parametrize(
    "wrong",
    [np.zeros(1, np.uint8), np.zeros((1, 1), segments.SEGMENT), np.zeros(4, segments.SEGMENT)[::2], None],
    ids=["bytes", "two dimensions", "strided", "None"],
)
def test_wrong_table(backend: Any, wrong: Any) -> None:
    with pytest.raises(TypeError):
        backend.nonzero(wrong, np.zeros(1, np.uint8))


@BACKEND
def test_flags_of_another_length(backend: Any) -> None:
    every_call = calls(backend, segments.MINMAX, table(), np.zeros(100, np.uint8), np.zeros(2, np.uint8))
    for name in ("encode", "decode", "reduce out"):
        with pytest.raises(ValueError, match="2 items for 1 segments"):
            every_call[name]()


@BACKEND
def test_reduce_of_nothing_or_onto_itself(backend: Any) -> None:
    options = {"draw": None, "divisor": 1.0, "decay": 1.0}
    out, flags = np.zeros(100, np.uint8), np.zeros(1, np.uint8)
    with pytest.raises(ValueError, match="at least one"):
        backend.reduce(segments.MINMAX, table(), [], out, flags, **options)
    with pytest.raises(ValueError, match="overlaps"):
        backend.reduce(segments.MINMAX, table(), [out], out, flags, **options)


@BACKEND
def test_decode_add_to_half_precision(backend: Any) -> None:
    rows = table(output=OUTPUT.ctypes.data, dtype=segments.FLOAT16)
    with pytest.raises(ValueError, match="float32"):
        backend.decode_add(segments.MINMAX, rows, np.zeros(100, np.uint8), scale=1.0)


@BACKEND
def test_nonzero_of_malformed_rows(backend: Any) -> None:
    for columns in ({"length": -1}, {"dtype": 9}, {"start": -5}):
        with pytest.raises(ValueError, match=r"elements|dtype"):
            backend.nonzero(table(**columns), np.zeros(1, np.uint8))


@pytest.mark.parametrize(
    "arguments",
    [(12, 1, 1, 1), (0, -1, 1, 1), (0, 1, 0, 1), (0, 1, 9, 1), (7, 1, 2, 1), (10, 1, 1, 1), (0, 1, 1, 0)],
)
def test_wire_bytes_of_nonsense(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"codec|length|bits|bucket_size"):
        segments.wire_bytes(*arguments)


def test_selecting_a_backend() -> None:
    before = kernels.backend()
    with kernels.use("reference"):
        assert kernels.backend() == "reference"
    assert kernels.backend() == before
    with pytest.raises(ValueError, match="not installed"):
        kernels.use("abacus")  # type: ignore[arg-type]


def test_selecting_an_instruction_set() -> None:
    extension = pytest.importorskip("gradcomp._native")
    assert extension.isa() in extension.available_isas()
    with pytest.raises(ValueError, match="sse9"):
        extension.set_isa("sse9")
