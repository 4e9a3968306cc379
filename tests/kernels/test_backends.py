"""Every backend of the kernels gives the bytes of the reference, guard bytes and gaps included."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.backends import COMPILED, running
from kernels.groups import AWKWARD, CODECS, Group, Result, Segment, dtypes_of, levels_of, nearest_level
from kernels.isas import NATIVE, available_isas
from tiers import examples

from gradcomp.kernels import reference, segments


class Compiled:
    """The compiled backend that a test runs with: of one instruction set, or for a GPU, in one order of threads."""

    kernels: Any = NATIVE

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)


native = Compiled()

BUCKET_SIZES = (1, 3, 8, 100, 128, 512, 1024, 3000)
ROUNDING = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@pytest.fixture(autouse=True, params=COMPILED)
def isa(request: Any) -> Any:
    """Run a test once per instruction set, and per order of threads of a GPU."""
    with running(request.param) as native.kernels:
        yield request.param


def lengths_around(bucket_size: int) -> set[int]:
    """Lengths at which a loop can go wrong."""
    return {0, 1, 7, 8, 17, 135, bucket_size - 1, bucket_size, bucket_size + 1, 3 * bucket_size + 5}


@functools.cache
def sweep(codec: int) -> Group:
    """One segment for every combination of level, dtype, bucket size and length; each third has no residual."""
    rng = np.random.default_rng(codec)
    rows: list[Segment] = []
    for bucket_size in BUCKET_SIZES:
        for length in sorted(lengths_around(bucket_size)):
            for bits in levels_of(codec):
                dtype = dtypes_of(codec)[len(rows) % len(dtypes_of(codec))]
                count = len(rows)
                rows.append(
                    Segment(
                        rng.normal(scale=10.0 ** rng.integers(-3, 3), size=length).astype(
                            segments.DTYPES[dtype]
                        ),
                        None if count % 3 == 0 else rng.normal(size=length).astype(np.float32),
                        bits=bits,
                        bucket_size=bucket_size,
                        start=count if count % 5 else segments.MAX_ELEMENTS - length,
                        layer=count * 2654435761 % 2**32,
                        next_residual=count % 4 != 0,
                        dtype=dtype,
                    )
                )
    return Group(codec, rows)


@functools.cache
def expected(codec: int, kernel: str, *given: Any, **settings: Any) -> Result:
    """What the reference makes of the sweep; several backends are compared with it."""
    result: Result = getattr(sweep(codec), kernel)(reference, *given, **settings)
    return result


def check(codec: int, kernel: str, *given: Any, **settings: Any) -> None:
    found = getattr(sweep(codec), kernel)(native, *given, **settings)
    assert found == expected(codec, kernel, *given, **settings)
    assert not any(found.flags)


def payload_of(codec: int, stochastic: bool = False, scale: float = 1.0, decay: float = 1.0) -> bytes:
    return expected(codec, "encode", stochastic=stochastic, scale=scale, decay=decay).payload


@CODEC
@ROUNDING
@pytest.mark.parametrize(("scale", "decay"), [(1.0, 1.0), (0.3, 0.9)])
def test_encode(codec: int, stochastic: bool, scale: float, decay: float) -> None:
    check(codec, "encode", stochastic=stochastic, scale=scale, decay=decay)


@CODEC
@pytest.mark.parametrize(("divisor", "scale"), [(1.0, 1.0), (3.0, 1.0), (4.0, 0.7)])
def test_decode(codec: int, divisor: float, scale: float) -> None:
    check(codec, "decode", payload_of(codec), divisor=divisor, scale=scale)


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c != segments.FP64])
def test_decode_add(codec: int) -> None:
    check(codec, "decode_add", payload_of(codec), scale=0.3)


@CODEC
@ROUNDING
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_reduce(codec: int, stochastic: bool, ranks: int) -> None:
    variants = [(False, 1.0, 1.0), (True, 1.0, 1.0), (False, 0.3, 0.9), (True, 0.3, 0.9)]
    payloads = tuple(payload_of(codec, *variants[rank % 4]) for rank in range(ranks))
    check(codec, "reduce", payloads, stochastic=stochastic)


@pytest.mark.parametrize("codec", [c for c in CODECS.values() if c != segments.FP64])
@ROUNDING
def test_long_segments_stream(codec: int, stochastic: bool) -> None:
    # Long enough for stores that pass the cache by, at every alignment of a float32 in a cache line.
    length = (1 << 16) + 100
    rng = np.random.default_rng(0)
    gradient = rng.normal(size=length).astype(np.float32)
    residual = rng.normal(size=length).astype(np.float32)
    for offset in range(0, 16, 3):
        bits = nearest_level(codec, 4)
        rows = [Segment(gradient[offset:], residual[offset:], next_residual=True, bits=bits, bucket_size=512)]
        group = Group(codec, rows)
        encoded = group.encode(reference, stochastic=stochastic)
        assert group.encode(native, stochastic=stochastic) == encoded
        assert group.decode(native, encoded.payload) == group.decode(reference, encoded.payload)


@pytest.mark.parametrize("codec", [*segments.QUANTISERS, segments.FP16])
@ROUNDING
def test_many_small_buckets(codec: int, stochastic: bool) -> None:
    """Several are looked at together, but for what is left at the end, and all draw from one place on."""
    rng = np.random.default_rng(0)
    bits = nearest_level(codec, 4)
    rows = [
        Segment(
            rng.normal(size=1575).astype(np.float32),
            rng.normal(size=1575).astype(np.float32) if residual else None,
            next_residual=residual,
            bits=bits,
            bucket_size=size,
            start=5 * size,
        )
        for size in (16, 33, 48, 256)
        for residual in (False, True)
    ]
    rows.append(Segment(np.full(1024, np.inf, np.float32), bits=bits, bucket_size=32))
    group = Group(codec, rows)
    encoded = group.encode(reference, stochastic=stochastic)
    assert group.encode(native, stochastic=stochastic) == encoded
    assert encoded.flags == [0] * 8 + [1]
    payloads = [encoded.payload] * 3
    assert group.reduce(native, payloads, stochastic=stochastic) == group.reduce(
        reference, payloads, stochastic=stochastic
    )


@st.composite
def awkward_segments(draw: Any, codec: int) -> Segment:
    dtype = draw(st.sampled_from(dtypes_of(codec)))
    length = draw(st.integers(0, 40))
    common = draw(st.sampled_from([*AWKWARD, None]))
    elements = st.one_of(
        st.sampled_from(AWKWARD) if common is None else st.just(common), st.floats(width=32, allow_nan=True)
    )
    array = hnp.arrays(np.float32, length, elements=elements, fill=st.nothing())
    with np.errstate(all="ignore"):
        gradient = draw(st.none() | array.map(lambda x: x.astype(segments.DTYPES[dtype])))
    return Segment(
        gradient,
        draw(st.none() | array),
        bits=draw(st.sampled_from(levels_of(codec))),
        bucket_size=draw(st.sampled_from([1, 3, 8, 17, 2**31 - 1])),
        start=draw(st.integers(0, 100)),
        layer=draw(st.integers(0, 2**32 - 1)),
        next_residual=draw(st.booleans()),
        dtype=dtype,
        length=length,
    )


@CODEC
@examples(60)
@given(data=st.data())
def test_any_numbers(codec: int, data: Any) -> None:
    rows = data.draw(st.lists(awkward_segments(codec), min_size=1, max_size=3))
    group = Group(codec, rows)
    options = {
        "stochastic": data.draw(st.booleans()),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
        "step": data.draw(st.integers(0, 2**32 - 1)),
    }
    scale, decay = data.draw(st.sampled_from([(1.0, 1.0), (0.1, 0.5), (1e30, 1.0), (2.0**-140, 1.0)]))
    encoded = group.encode(reference, rank=5, scale=scale, decay=decay, **options)
    assert group.encode(native, rank=5, scale=scale, decay=decay, **options) == encoded
    divisor = data.draw(st.sampled_from([1.0, 3.0, 0.0]))
    for flags in (encoded.flags, None):
        decoded = group.decode(reference, encoded.payload, flags, divisor=divisor, scale=scale)
        assert group.decode(native, encoded.payload, flags, divisor=divisor, scale=scale) == decoded
    mean = group.reduce(reference, [encoded.payload] * 2, decay=decay, **options)
    assert group.reduce(native, [encoded.payload] * 2, decay=decay, **options) == mean


@CODEC
@pytest.mark.parametrize("pair", [b"\xff\xff", b"\xff\x7f"], ids=["ones", "largest"])
def test_not_a_number_with_most_bits(codec: int, pair: bytes) -> None:
    """In every place of a payload: whoever rounds it to fewer bits must not overflow."""
    rows = [
        Segment(None, bits=levels_of(codec)[-1], bucket_size=64, length=50, dtype=dtype)
        for dtype in dtypes_of(codec)
    ]
    group = Group(codec, rows)
    payload = (pair * group.size)[: group.size]
    assert group.decode(native, payload) == group.decode(reference, payload)


@CODEC
@examples(60)
@given(data=st.data())
def test_any_bytes(codec: int, data: Any) -> None:
    rows = [
        Segment(
            None,
            bits=data.draw(st.sampled_from(levels_of(codec))),
            bucket_size=data.draw(st.sampled_from([1, 5, 64])),
            length=data.draw(st.integers(0, 50)),
            dtype=data.draw(st.sampled_from(dtypes_of(codec))),
            next_residual=True,
        )
    ]
    group = Group(codec, rows)
    payload = data.draw(st.binary(min_size=group.size, max_size=group.size))
    decoded = group.decode(reference, payload)
    assert group.decode(native, payload) == decoded
    for stochastic in (False, True):
        mean = group.reduce(reference, [payload, payload], stochastic=stochastic, rank=5)
        assert group.reduce(native, [payload, payload], stochastic=stochastic, rank=5) == mean
    if codec != segments.FP64:
        assert group.decode_add(native, payload) == group.decode_add(reference, payload)


@pytest.mark.parametrize("dtype", [segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16, segments.FLOAT64])
@pytest.mark.parametrize("length", [0, 1, 3, 4097])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("nan")])
def test_nonzero(dtype: int, length: int, value: float) -> None:
    gradient = np.zeros(length, segments.DTYPES[dtype])
    gradient[-1:] = value
    codec = segments.FP64 if dtype == segments.FLOAT64 else segments.FP32
    group = Group(codec, [Segment(gradient, dtype=dtype), Segment(None, length=5, dtype=dtype)])
    for backend in (reference, native):
        out = np.full(2, 7, np.uint8)
        backend.nonzero(group.table, out)
        assert out.tolist() == [length > 0 and value != 0, False]


@pytest.mark.parametrize("isa", available_isas(), indirect=True)
def test_flush_to_zero_of_the_caller_does_not_matter() -> None:
    torch = pytest.importorskip("torch")
    gradient = np.array([1e-40, 0.0, 3e-41], np.float32)
    group = Group(segments.FP32, [Segment(gradient)])
    assert torch.set_flush_denormal(True)
    try:
        encoded = group.encode(native, scale=0.5)
    finally:
        torch.set_flush_denormal(False)
    assert encoded == group.encode(reference, scale=0.5)
