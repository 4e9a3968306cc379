"""Bits by quantisation bucket: what is promised of the choice, and what a payload may say of itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels.backends import HOST, each_of
from kernels.groups import Group, Segment
from tiers import examples

from gradcomp.kernels import reference, reference_bits, segments
from gradcomp.kernels.dispatch import HOST_KERNELS

pytest.importorskip("gradcomp._native")

BYTES, ERROR = segments.MINMAX_LEAST_BYTES, segments.MINMAX_LEAST_ERROR
BACKEND = each_of(HOST)
SIZE = 64


def buckets(spread: float, count: int = 48, seed: int = 0) -> Any:
    """Buckets of normal numbers whose ranges differ by factors around 2^spread."""
    rng = np.random.default_rng(seed)
    scales = np.exp2(spread * rng.normal(size=count)).astype(np.float32)
    return (rng.normal(size=(count, SIZE)) * scales[:, None]).astype(np.float32).reshape(-1)


def group(codec: int, values: Any, bits: int = 4, size: int = SIZE, **row: Any) -> Group:
    return Group(codec, [Segment(values, bits=bits, bucket_size=size, **row)], gap=0)


def bits_of(payload: bytes, count: int) -> Any:
    return np.frombuffer(payload, np.uint8)[8 * count : 9 * count]


def error_of(values: Any, codec: int, bits: int, draws: int = 100) -> float:
    """Mean over draws of the squared error."""
    each = group(codec, values, bits)
    decoded = [
        each.values(each.encode(HOST_KERNELS, stochastic=True, step=s).payload)[0] for s in range(draws)
    ]
    return float(np.mean([np.square(d.astype(np.float64) - values).sum() for d in decoded]))


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0])
def test_the_error_is_at_most_that_of_uniform_bits(bits: int, spread: float) -> None:
    values = buckets(spread)
    uniform = error_of(values, segments.MINMAX, bits)
    assert error_of(values, BYTES, bits) <= 1.02 * uniform
    assert error_of(values, ERROR, bits) <= 1.02 * uniform


@pytest.mark.parametrize(("spread", "times"), [(1.0, 1.1), (3.0, 2.0)])
def test_uneven_ranges_save_bytes_or_error(spread: float, times: float) -> None:
    values = buckets(spread, 400)
    each = group(BYTES, values)
    used = int(bits_of(each.encode(HOST_KERNELS, stochastic=True).payload, 400).sum())
    assert used * times < 4 * 400
    assert error_of(values, ERROR, 4, 20) * times < error_of(values, segments.MINMAX, 4, 20)


@given(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=60),
    st.integers(1, 8),
    st.sampled_from([BYTES, ERROR]),
)
@examples(200)
def test_any_ranges_fit_into_the_room(ranges: list[float], level: int, codec: int) -> None:
    span = np.array(ranges, np.float32)
    groups = np.full(len(span), 2, np.int64)
    bits = reference_bits.choose_bits(codec, span, groups, level)
    assert ((bits == 0) == reference_bits.is_flat(span)).all()
    assert bits.max() <= 8
    assert bits.sum() <= level * len(span)
    wide = np.sort(span)
    assert (np.diff(reference_bits.choose_bits(codec, wide, groups, level).astype(int)) >= 0).all()
    errors = np.where(bits > 0, reference_bits.ERRORS[bits], 0) * np.square(span.astype(np.float64))
    uniform = np.where(bits > 0, reference_bits.ERRORS[level], 0) * np.square(span.astype(np.float64))
    assert errors.sum() <= uniform.sum() * (1 + 2.0**-10)


def test_draws_are_unbiased() -> None:
    values = buckets(2.0, 8)
    each = group(BYTES, values, bits=3)
    decoded = np.stack(
        [each.values(each.encode(HOST_KERNELS, stochastic=True, step=s).payload)[0] for s in range(800)]
    )
    bits = bits_of(each.encode(HOST_KERNELS).payload, 8)
    assert len(set(bits.tolist())) > 2
    unit = np.ptp(values.reshape(8, SIZE), axis=1) / ((1 << bits.astype(int)) - 1)
    spread = unit.repeat(SIZE) / 2 / np.sqrt(800)
    assert (np.abs(decoded.mean(axis=0, dtype=np.float64) - values) <= 5 * spread).all()


@BACKEND
@pytest.mark.parametrize("codec", [BYTES, ERROR])
def test_constant_buckets_take_no_bits(codec: int, backend: Any) -> None:
    values = buckets(0.0, 3)
    values[:SIZE], values[2 * SIZE :] = 0.1, -0.0
    each = group(codec, values, next_residual=True)
    encoded = each.encode(backend, stochastic=True)
    assert bits_of(encoded.payload, 3).tolist() == [0, 4 if codec == BYTES else 8, 0]
    decoded = each.values(encoded.payload)[0]
    assert decoded[:SIZE].tolist() == values[:SIZE].tolist()
    residual = np.frombuffer(encoded.arrays[0] or b"", np.float32)
    assert residual.tolist() == (values - decoded).tolist()
    alone = group(codec, np.full(5, 7, np.float32))
    assert alone.values(alone.encode(backend).payload)[0].tolist() == [7.0] * 5


def test_a_payload_by_hand() -> None:
    values = np.array([0, 1, 3, 2, 0, 0, 0, 0, 0, 8, 8, 8, 8], np.float32)
    payload = group(BYTES, values, bits=2, size=9).encode(HOST_KERNELS).payload
    assert np.frombuffer(payload[:16], "<f4").tolist() == [0, 1, 8, 0]
    assert payload[16:18] == bytes([2, 0])
    # Nine codes take two groups of eight; the room is that of two bits for both buckets.
    assert payload[18:] == bytes([0b10_11_01_00, 0, 0, 0, 0, 0])


@BACKEND
@pytest.mark.parametrize("codec", [BYTES, ERROR])
@pytest.mark.parametrize("said", [[9, 4], [255, 4], [5, 4], [8, 8]])
def test_bits_that_cannot_be_are_not_finite(codec: int, backend: Any, said: list[int]) -> None:
    each = group(codec, buckets(0.0, 2))
    payload = bytearray(each.encode(backend).payload)
    payload[16:18] = bytes(said)
    found = each.decode(backend, bytes(payload))
    assert found.flags == [1]
    assert np.isnan(np.frombuffer(found.arrays[0] or b"", np.float32)).all()
    assert each.reduce(backend, [bytes(payload), each.encode(backend).payload]).flags == [1]


@BACKEND
def test_bytes_of_a_peer_are_never_read_past_their_end(backend: Any) -> None:
    rng = np.random.default_rng(3)
    each = group(BYTES, rng.normal(size=200).astype(np.float32), bits=3, size=40)
    for _ in range(200):
        payload = bytearray(rng.integers(0, 256, each.size, dtype=np.uint8).tobytes())
        payload[40:45] = rng.integers(0, 6, 5, dtype=np.uint8).tobytes()
        found, expected = each.decode(backend, bytes(payload)), each.decode(reference, bytes(payload))
        assert found.flags == expected.flags
        assert found.arrays == expected.arrays


# --- as it travels ------------------------------------------------------------------------------------------------


def travelling(codec: int = BYTES) -> Group:
    rows = [
        Segment(buckets(1.0, 5), bits=4, bucket_size=SIZE),
        Segment(np.zeros(0, np.float32), bits=4, bucket_size=SIZE),
        Segment(buckets(3.0, 9, 1)[:-7], bits=3, bucket_size=SIZE),
    ]
    return Group(codec, rows)


@BACKEND
@pytest.mark.parametrize("codec", [BYTES, ERROR, segments.MINMAX])
def test_compact_and_restore(codec: int, backend: Any) -> None:
    each = travelling(codec)
    payload = np.frombuffer(each.encode(backend, stochastic=True).payload, np.uint8)
    out, back = np.zeros(each.size, np.uint8), np.full(each.size, 0xA5, np.uint8)
    size = backend.compact(codec, each.table, payload, out)
    used = [reference_bits.used_bytes(row, payload[int(row["payload"]) :]) for row in each.table]
    rooms = segments.wire_bytes_table(codec, each.table)
    assert size == (sum(used) if codec in segments.ALLOCATED else rooms.sum())  # type: ignore[arg-type]
    assert (size < rooms.sum()) == (codec == BYTES)
    assert backend.restore(codec, each.table, out[: size + 1], back) == size
    assert back.tolist() == payload.tolist()


@BACKEND
def test_what_cannot_be_restored(backend: Any) -> None:
    each = travelling()
    payload = np.frombuffer(each.encode(backend).payload, np.uint8)
    out, back = np.zeros(each.size, np.uint8), np.zeros(each.size, np.uint8)
    size = backend.compact(BYTES, each.table, payload, out)
    for length in range(size):
        with pytest.raises(ValueError, match="end too early"):
            backend.restore(BYTES, each.table, out[:length], back)
    for at, bits in ((40, 9), (44, 255), (41, 8)):
        wrong = out.copy()
        wrong[at : at + 4] = bits
        with pytest.raises(ValueError, match=r"bits of the buckets|end too early"):
            backend.restore(BYTES, each.table, wrong[:size], back)
    with pytest.raises(ValueError, match="out is too short"):
        backend.compact(BYTES, each.table, payload, out[: size - 1])
    hostile = payload.copy()
    hostile[int(each.table["payload"][0]) + 40] = 9
    with pytest.raises(ValueError, match="bits of the buckets"):
        backend.compact(BYTES, each.table, hostile, out)
