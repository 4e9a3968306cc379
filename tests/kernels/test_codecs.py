"""What the codecs promise: layout, error bounds, unbiasedness, residuals, and what becomes of awkward numbers.

These are facts about the definition, so they are asked of the backend in use; test_backends.py ties the others to it.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernels.groups import CODECS, Group, Segment, dtypes_of, levels_of, magnitudes_of, nearest_level

from gradcomp.kernels import philox, quantisers, reference_codes, segments
from gradcomp.kernels.devices import HOST

CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
ROUNDING = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])


def normal(length: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=length).astype(np.float32)


def one(codec: int, gradient: Any, residual: Any = None, **row: Any) -> Group:
    """A group of one segment, its payload at offset 0."""
    dtype = segments.FLOAT64 if codec == segments.FP64 else segments.FLOAT32
    return Group(codec, [Segment(gradient, residual, **({"dtype": dtype} | row))], gap=0)


def decoded(codec: int, gradient: Any, stochastic: bool = False, **row: Any) -> Any:
    """The values of a payload."""
    group = one(codec, gradient, **row)
    return group.values(group.encode(HOST.kernels, stochastic=stochastic).payload)[0]


# --- wire bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "length", "bits", "bucket_size", "size"),
    [
        (segments.MINMAX, 1000, 4, 512, 2 * 8 + 500),
        (segments.MINMAX, 1001, 3, 100, 11 * 8 + 376),
        (segments.L2, 1, 1, 512, 4 + 1),
        (segments.LINF, 512, 8, 512, 4 + 512),
        (segments.FP32, 7, 0, 1, 28),
        (segments.FP16, 513, 0, 512, 2 * 4 + 1026),
        (segments.BF16, 7, 0, 1, 14),
        (segments.FP64, 7, 0, 1, 56),
        (segments.MINMAX, 0, 4, 512, 0),
        (segments.SIGN, 1000, 1, 512, 2 * 4 + 125),
        (segments.VOTE, 9, 1, 2**31 - 1, 4 + 2),
        (segments.ONEBIT, 9, 1, 8, 2 * 8 + 2),
        (segments.CODEBOOK_L2, 10, 3, 4, 3 * 4 + 4),
        (segments.CODEBOOK_LINF, 512, 8, 512, 4 + 512),
        (segments.CODEBOOK_MINMAX, 9, 7, 4, 3 * 8 + 8),
        (segments.E4M3, 65, 8, 32, 3 + 65),
        (segments.E2M1, 65, 4, 32, 3 + 33),
        (segments.NVFP4, 65, 4, 16, 4 + 5 + 33),
        (segments.NVFP4, 0, 4, 16, 0),
    ],
)
def test_wire_bytes(codec: int, length: int, bits: int, bucket_size: int, size: int) -> None:
    assert segments.wire_bytes(codec, length, bits, bucket_size) == size
    table = np.zeros(1, segments.SEGMENT)
    table["length"], table["level"], table["bucket_size"] = length, bits, bucket_size
    assert segments.wire_bytes_table(codec, table).tolist() == [size]


# --- layout -------------------------------------------------------------------------------------------------------


BY_HAND = {
    # Lo and unit of each bucket; the second is flat.
    "minmax": (2, 4, [0, 1, 2, 3, 10], [0, 1, 10, 0], [0b11_10_01_00, 0b00]),
    "linf": (4, 4, [-7, 3, 0, -0.0], [7], [0x3F, 0x00]),
    "sign": (1, 8, [1, -2, 0, -0.0, 7, -1, 1, 4, -3], [2, 3], [0b0010_0010, 0b1]),
    "vote": (1, 4, [1e-40, -2, 0, 9, 0, -0.0, 0, 0], [1, 0], [0b0000_0010]),
    "onebit": (1, 4, [-1, -3, 0, 3, 6, -0.0, 1, 1, -5], [-2, 1.5, 0, 2, -5, 0], [0b0000_0011, 0b1]),
    # -1 lies half way between 0 and -2: the lower magnitude.
    "codebook-linf": (
        3,
        6,
        [-8, 2, 0, -0.0, 5, -1],
        [8],
        [*(0b000_010_000_000_001_111).to_bytes(3, "little")],
    ),
    # 2 lies half way between 0 and 4: the lower level. -4 is below, and 12 above all levels.
    "codebook-minmax": (2, 5, [-4, 2, 5, 9, 12], [-4, 16], [0b10_01_00_00, 0b11]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_payloads_by_hand(name: str) -> None:
    bits, bucket_size, gradient, scales, codes = BY_HAND[name]
    group = one(CODECS[name], np.array(gradient, np.float32), bits=bits, bucket_size=bucket_size)
    if name == "codebook-linf":
        group.magnitudes[3, :4] = 0, 0.25, 0.5, 1
    if name == "codebook-minmax":
        group.magnitudes[2, :4] = 0.25, 0.5, 0.75, 0.875
    payload = group.encode(HOST.kernels).payload
    assert np.frombuffer(payload[: 4 * len(scales)], "<f4").tolist() == scales
    assert payload[4 * len(scales) :] == bytes(codes)
    if name == "codebook-linf":
        assert group.values(payload)[0].tolist() == [-8, 2, 0, 0, 4, 0]
    if name == "codebook-minmax":
        assert group.values(payload)[0].tolist() == [0, 0, 4, 8, 10]


@pytest.mark.parametrize("bits", range(1, 9))
def test_bit_stream(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, 45).astype(np.uint8)
    stream = reference_codes.pack_bits(codes, bits)
    as_one_integer = sum(int(code) << (i * bits) for i, code in enumerate(codes))
    assert stream.tobytes() == as_one_integer.to_bytes(-(-45 * bits // 8), "little")
    np.testing.assert_array_equal(reference_codes.unpack_bits(stream, bits, 45), codes)


@CODEC
def test_segments_do_not_depend_on_their_neighbours(codec: int) -> None:
    dtype = dtypes_of(codec)[0]
    rows = [
        Segment(normal(n, n).astype(segments.DTYPES[dtype]), bits=max(levels_of(codec)), layer=n, dtype=dtype)
        for n in (5, 700, 64)
    ]
    group = Group(codec, rows)
    together = group.encode(HOST.kernels, stochastic=True).payload
    for row, place in zip(rows, group.table, strict=True):
        alone = Group(codec, [row], gap=0).encode(HOST.kernels, stochastic=True).payload
        assert together[place["payload"] : place["payload"] + len(alone)] == alone


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "bits", "stochastic"),
    [
        (segments.MINMAX, 1, False),  # one bit of the others is a sign
        (segments.MINMAX, 1, True),
        *itertools.product((segments.MINMAX, segments.L2, segments.LINF), range(2, 9), (False, True)),
    ],
)
def test_errors_are_within_a_step(codec: int, bits: int, stochastic: bool) -> None:
    gradient = normal(5000)
    value = decoded(codec, gradient, stochastic, bits=bits)
    for first in range(0, 5000, 512):
        g, v = gradient[first : first + 512].astype(np.float64), value[first : first + 512]
        step = np.ptp(g) / (2**bits - 1)
        if codec != segments.MINMAX:
            step = np.linalg.norm(g, 2 if codec == segments.L2 else np.inf) / (2 ** (bits - 1) - 1)
        assert np.abs(g - v).max() <= step * (1 if stochastic else 0.5) * (1 + 1e-4)


@ROUNDING
@pytest.mark.parametrize("codec", segments.SIGNED_CODEBOOKS, ids=["l2", "linf"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_codebook_value_is_a_neighbour(codec: int, bits: int, stochastic: bool) -> None:
    gradient = normal(512)
    group = one(codec, gradient, bits=bits)
    value = decoded(codec, gradient, stochastic, bits=bits)
    g = np.abs(gradient.astype(np.float64))
    norm = np.linalg.norm(g, 2 if codec == segments.CODEBOOK_L2 else np.inf)
    table = norm * np.unique(group.magnitudes[bits, : 1 << (bits - 1)])
    above = np.clip(np.searchsorted(table, g), 1, len(table) - 1)
    neighbours = np.stack((table[above - 1], table[above]))
    distances = np.abs(neighbours - g)
    bound = distances.max(axis=0) if stochastic else distances.min(axis=0)
    assert (np.abs(gradient - value) <= bound + 1e-6 * norm).all()
    assert (np.abs(neighbours - np.abs(value)).min(axis=0) <= 1e-6 * norm).all()


@ROUNDING
@pytest.mark.parametrize("bits", range(1, 8))
@pytest.mark.parametrize("ends", [(0, 1), (0.125, 0.75)], ids=["pinned", "free"])
def test_a_value_between_extremes_gets_a_level_beside_it(
    ends: tuple[float, float], bits: int, stochastic: bool
) -> None:
    gradient = normal(512)
    group = one(segments.CODEBOOK_MINMAX, gradient, bits=bits)
    row = group.magnitudes[bits, : 1 << bits]
    row[:] = ends[0] + (ends[1] - ends[0]) * row
    value = group.values(group.encode(HOST.kernels, stochastic=stochastic).payload)[0]
    g, span = gradient.astype(np.float64), np.ptp(gradient)
    levels = gradient.min() + span * np.unique(row).astype(np.float64)
    inside = np.clip(g, levels[0], levels[-1])
    above = np.clip(np.searchsorted(levels, inside), 1, len(levels) - 1)
    neighbours = np.stack((levels[above - 1], levels[above]))
    distances = np.abs(neighbours - inside)
    bound = distances.max(axis=0) if stochastic else distances.min(axis=0)
    assert (np.abs(inside - value) <= bound + 1e-6 * span).all()
    assert (np.abs(neighbours - value).min(axis=0) <= 1e-6 * span).all()


@pytest.mark.parametrize(
    "codec", [segments.SIGN, segments.ONEBIT, segments.MINMAX], ids=["sign", "onebit", "minmax"]
)
def test_values_of_one_bit_are_means(codec: int) -> None:
    """The mean magnitude, or the means of both signs; these also of min-max rounding to nearest."""
    gradient = normal(1300)
    value = decoded(codec, gradient, bits=1)
    for first in range(0, 1300, 512):
        g, v = gradient[first : first + 512].astype(np.float64), value[first : first + 512]
        for side in (g < 0, g >= 0):
            mean = np.abs(g if codec == segments.SIGN else g[side]).mean()
            np.testing.assert_allclose(v[side], mean * (-1 if g[side][0] < 0 else 1), rtol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_reduced_votes_are_the_majority(ranks: int) -> None:
    gradients = [normal(700, seed) for seed in range(ranks)]
    for gradient in gradients:
        gradient[600:] = 0  # a bucket that is zero everywhere stays zero
    groups = [one(segments.VOTE, gradient, bits=1, bucket_size=100) for gradient in gradients]
    reduced = groups[0].reduce(HOST.kernels, [group.encode(HOST.kernels).payload for group in groups])
    (majority,) = groups[0].values(reduced.payload)
    votes = sum(np.sign(gradient[:600]) for gradient in gradients)
    # Without draws, ties are positive.
    np.testing.assert_array_equal(majority[:600], np.where(votes < 0, -1, 1))
    assert not majority[600:].any()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ties_and_zeros_vote_either_way(ranks: int) -> None:
    gradients = [normal(4000, seed) for seed in range(ranks)]
    for gradient in gradients:
        gradient[2000:] = 0
        gradient[2000] = 1  # without it the bucket would not vote
    groups = [one(segments.VOTE, gradient, bits=1, bucket_size=2000) for gradient in gradients]
    total = np.zeros(4000)
    for step in range(16):
        payloads = [
            group.encode(HOST.kernels, stochastic=True, step=step, rank=r).payload
            for r, group in enumerate(groups)
        ]
        reduced = groups[0].reduce(HOST.kernels, payloads, stochastic=True, step=step).payload
        (majority,) = groups[0].values(reduced)
        assert set(np.unique(majority)) == {-1, 1}
        total += majority
    votes = sum(np.sign(gradient) for gradient in gradients)[:2000]
    np.testing.assert_array_equal(total[:2000][votes != 0], 16 * np.sign(votes[votes != 0]))
    for drawn in (total[:2000][votes == 0], total[2001:]):  # nobody's, if the number of ranks is odd
        assert abs(drawn.sum()) <= 5 * np.sqrt(16 * max(len(drawn), 1))


def test_a_bucket_of_zeros_does_not_vote() -> None:
    group = one(segments.VOTE, np.zeros(100, np.float32), bits=1)
    encoded = group.encode(HOST.kernels, stochastic=True)
    assert not any(encoded.payload[3:-3])
    (value,) = group.values(encoded.payload)
    assert value.tobytes() == bytes(400)


@pytest.mark.parametrize("codec", [segments.L2, segments.LINF], ids=["l2", "linf"])
def test_one_bit_to_nearest_of_a_norm_is_a_scaled_sign(codec: int) -> None:
    gradient = normal(1300)
    sign = one(segments.SIGN, gradient, bits=1).encode(HOST.kernels).payload
    assert one(codec, gradient, bits=1).encode(HOST.kernels).payload == sign


@pytest.mark.parametrize("probability", [2.0**-17, 2.0**-19, 2.0**-22])
def test_small_probabilities_come_true_over_the_steps(probability: float) -> None:
    # One value of magnitude 1, all others so small that a lane of 16 bits could not tell them from zero.
    c = np.full((1, 1 << 16), probability, np.float32)
    c[0, 0] = 1
    level = quantisers.Level(2)
    steps = 512
    lanes = np.arange(1 << 16)
    up = 0
    for step in range(steps):
        u = ((lanes + np.float32(philox.offset(step))) * np.float32(2.0**-16)).astype(np.float32)
        _, codes = quantisers.QUANTISER[segments.LINF].quantise(c, u[None], level)
        up += np.count_nonzero(codes[0, 1:])
    assert up == pytest.approx(steps * probability * (1 << 16), rel=0.3)


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        (codec, bits)
        for codec in segments.STOCHASTIC
        if codec not in (segments.VOTE, segments.MINMAX_SHIFT)  # of the latter, one draw serves all
        for bits in levels_of(codec)
    ],
)
def test_stochastic_rounding_is_unbiased(codec: int, bits: int) -> None:
    gradient = np.tile(normal(32), 4)
    group = one(codec, gradient, bits=bits, bucket_size=128)
    draws = 400
    values = np.array(
        [
            group.values(group.encode(HOST.kernels, stochastic=True, step=step).payload)[0]
            for step in range(draws)
        ],
        np.float64,
    )
    # Equal elements differ in their draws only: 4 * draws samples of each.
    samples = values.reshape(draws * 4, 32)
    standard_error = samples.std(axis=0) / np.sqrt(len(samples))
    # An element next to a level leaves it so rarely that it may not happen in all of the draws.
    assert (np.abs(samples.mean(axis=0) - gradient[:32]) <= 5 * standard_error + 1e-4).all()


def test_bfloat16_of_every_draw_has_the_value_for_its_mean() -> None:
    lanes = np.arange(1 << 16)
    draws = ((lanes + np.float32(philox.offset(7))) * np.float32(2.0**-16)).astype(np.float32)
    for value in (1.0, 1 + 2.0**-23, -1.7, 2.0 - 2.0**-23, 1e-40, -3.3e38, 0.0):
        c = np.full(1 << 16, value, np.float32)
        rounded = reference_codes._draw_bfloat16(c, draws).astype(np.float64)
        assert rounded.mean() == c[0].astype(np.float64)
        assert len(np.unique(rounded)) <= 2


@pytest.mark.parametrize("value", [1.0078125, -0.0, 2.0**-133, 3.3895314e38])
def test_drawing_keeps_what_bfloat16_has(value: float) -> None:
    gradient = np.full(1000, value, np.float32)
    kept = decoded(segments.BF16, gradient, True)
    assert kept.tobytes() == gradient.tobytes()


def test_drawing_bfloat16_does_not_overflow() -> None:
    gradient = np.full(1000, 3.395e38, np.float32)  # rounds to the largest bfloat16
    encoded = (group := one(segments.BF16, gradient)).encode(HOST.kernels, stochastic=True)
    assert encoded.flags == [0]
    assert np.unique(group.values(encoded.payload)[0]).tolist() == [np.float32(3.3895314e38)]


@pytest.mark.parametrize("exponent", [-140, -126, -60, 0, 60, 127])
def test_fp16_scales_with_the_block(exponent: int) -> None:
    gradient = np.ldexp(np.array([1.0, -1.9990234375, 0.5], np.float32), exponent)
    value = decoded(segments.FP16, gradient)
    np.testing.assert_array_equal(value, gradient)


@pytest.mark.parametrize(("codec", "relative"), [(segments.FP16, 2.0**-11), (segments.BF16, 2.0**-8)])
def test_half_precision_error(codec: int, relative: float) -> None:
    gradient = normal(3000)
    value = decoded(codec, gradient)
    # Below the normal range of its block, fp16 keeps an absolute error.
    np.testing.assert_allclose(value, gradient, rtol=relative, atol=2.0**-22)


@pytest.mark.parametrize("codec", [segments.FP32, segments.FP64])
def test_copies_are_exact(codec: int) -> None:
    dtype = np.float64 if codec == segments.FP64 else np.float32
    gradient = np.array([1.1, -0.0, 1e-40, 3e38, 2.0**-149], dtype)
    value = decoded(codec, gradient)
    assert value.tobytes() == gradient.tobytes()


# --- residuals ----------------------------------------------------------------------------------------------------


@CODEC
@ROUNDING
def test_next_residual_is_what_was_not_sent(codec: int, stochastic: bool) -> None:
    dtype = segments.DTYPES[dtypes_of(codec)[0]]
    gradient, residual = normal(1500, 1).astype(dtype), normal(1500, 2)
    group = one(codec, gradient, residual, bits=nearest_level(codec, 3), next_residual=True)
    encoded = group.encode(HOST.kernels, stochastic=stochastic, scale=0.25, decay=0.5)
    (value,) = group.values(encoded.payload)
    contribution = dtype.type(0.25) * gradient + dtype.type(0.5) * residual.astype(dtype)
    expected = (contribution - value).astype(np.float32)
    assert np.frombuffer(encoded.arrays[0] or b"", np.float32).tolist() == expected.tolist()


@pytest.mark.parametrize("codec", [*segments.QUANTISERS, segments.FP16])
def test_residual_may_be_overwritten_by_the_next_one(codec: int) -> None:
    gradient, residual = normal(5000, 1), normal(5000, 2)
    for bucket_size in (100, 512, 5000):
        bits = nearest_level(codec, 4)
        group = one(codec, gradient, residual, bits=bits, bucket_size=bucket_size, next_residual=True)
        expected = group.encode(HOST.kernels)
        in_place = residual.copy()
        table = group.table.copy()
        table["residual"] = table["next_residual"] = in_place.ctypes.data
        payload = np.zeros(group.size, np.uint8)
        HOST.kernels.encode(
            codec, table, payload, np.zeros(1, np.uint8),
            draw=None, scale=1.0, decay=1.0, magnitudes=magnitudes_of(codec),
        )  # fmt: skip
        assert (payload.tobytes(), in_place.tobytes()) == (expected.payload, expected.arrays[0])


@CODEC
def test_absent_gradient_sends_the_residual(codec: int) -> None:
    dtype = dtypes_of(codec)[0]
    residual = normal(100)
    bits = max(levels_of(codec))
    absent = Group(codec, [Segment(None, residual, bits=bits, length=100, dtype=dtype)]).encode(HOST.kernels)
    zeros = np.zeros(100, segments.DTYPES[dtype])
    assert absent == Group(codec, [Segment(zeros, residual, bits=bits, dtype=dtype)]).encode(HOST.kernels)


@CODEC
def test_reduce_is_the_mean_of_the_values_encoded_again(codec: int) -> None:
    dtype = segments.DTYPES[dtypes_of(codec)[0]]
    bits = nearest_level(codec, 5)
    groups = [one(codec, normal(1000, seed).astype(dtype), bits=bits) for seed in range(3)]
    payloads = [group.encode(HOST.kernels).payload for group in groups]
    values = [group.values(payload)[0] for group, payload in zip(groups, payloads, strict=True)]
    mean = (values[0] + values[1] + values[2]) / dtype.type(3)
    for rank in (segments.OWNER_RANK, 3):
        again = one(codec, mean, bits=bits).encode(HOST.kernels, stochastic=True, rank=rank)
        assert groups[0].reduce(HOST.kernels, payloads, stochastic=True, rank=rank).payload == again.payload
    owner = groups[0].reduce(HOST.kernels, payloads, stochastic=True, rank=segments.OWNER_RANK)
    assert groups[0].reduce(HOST.kernels, payloads, stochastic=True) == owner


# --- awkward numbers ----------------------------------------------------------------------------------------------


@CODEC
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 511, 512, 699])
def test_non_finite_contribution_is_flagged_and_sends_zeros(codec: int, bad: float, position: int) -> None:
    dtype = dtypes_of(codec)[0]
    bits = nearest_level(codec, 4)
    good = Segment(normal(700).astype(segments.DTYPES[dtype]), bits=bits, dtype=dtype)
    spoilt = Segment(good.gradient.copy(), bits=bits, dtype=dtype, next_residual=True)
    spoilt.gradient[position] = bad
    group = Group(codec, [good, spoilt, good])
    encoded = group.encode(HOST.kernels)
    assert encoded.flags == [0, 1, 0]
    size = segments.wire_bytes(codec, 700, bits, 512)
    offset = group.table["payload"][1]
    assert encoded.payload[offset : offset + size] == bytes(size)
    decoded = group.decode(HOST.kernels, encoded.payload, encoded.flags)
    values = [np.frombuffer(data or b"", segments.DTYPES[dtype]) for data in decoded.arrays]
    assert [bool(np.isnan(value).all()) for value in values] == [False, True, False]
    assert np.isfinite(values[0]).all()
    assert np.isfinite(values[2]).all()


@pytest.mark.parametrize(
    ("codec", "gradient"),
    [
        (segments.MINMAX, [3e38, -3e38]),  # the range overflows
        (segments.MINMAX_LEAST_BYTES, [3e38, -3e38]),
        (segments.CODEBOOK_MINMAX, [3e38, -3e38]),
        (segments.L2, [3e38, 3e38]),  # the norm overflows
        (segments.CODEBOOK_L2, [3e38, 3e38]),
        (segments.BF16, [3.4e38, 0]),  # rounds to infinity
    ],
)
def test_overflow_of_a_scale_is_flagged(codec: int, gradient: list[float]) -> None:
    encoded = one(codec, np.array(gradient, np.float32), bits=2).encode(HOST.kernels)
    assert encoded.flags == [1]
    assert not any(encoded.payload)


@pytest.mark.parametrize("dtype", [segments.FLOAT16, segments.BFLOAT16])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "codec",
    [segments.MINMAX, segments.LINF, segments.FP32, segments.SIGN, segments.ONEBIT, segments.CODEBOOK_LINF],
    ids=["minmax", "linf", "fp32", "sign", "onebit", "codebook"],
)
def test_overflow_of_the_output_is_flagged(codec: int, dtype: int, sign: int) -> None:
    limit = sign * (65504.0 if dtype == segments.FLOAT16 else 3.3895314e38)
    bits = nearest_level(codec, 4)
    payload = (
        one(codec, np.array([limit, 0], np.float32), bits=bits, bucket_size=1).encode(HOST.kernels).payload
    )
    group = Group(codec, [Segment(None, length=2, dtype=dtype, bits=bits, bucket_size=1)], gap=0)
    assert group.decode(HOST.kernels, payload).flags == [0]
    assert group.decode(HOST.kernels, payload, scale=1.01).flags == [1]
    assert group.decode(HOST.kernels, payload, scale=1.01, divisor=2.0).flags == [0]


@pytest.mark.parametrize("codec", [codec for codec in segments.QUANTISERS if codec != segments.VOTE])
@ROUNDING
@pytest.mark.parametrize("number", [0.0, -0.0, 1e-45, 1e-39])
def test_vanishing_scales_decode_to_something_small(codec: int, stochastic: bool, number: float) -> None:
    gradient = np.full(40, number, np.float32)
    gradient[::2] *= -1
    for bits in levels_of(codec):
        group = one(codec, gradient, bits=bits, next_residual=True)
        encoded = group.encode(HOST.kernels, stochastic=stochastic)
        (value,) = group.values(encoded.payload)
        assert encoded.flags == [0]
        assert np.isfinite(value).all()
        assert np.abs(value).max() <= np.sqrt(40) * np.abs(gradient).max()


@pytest.mark.parametrize("number", [0.0, -0.0, 2.5, -1e-3])
def test_equal_numbers_survive_minmax(number: float) -> None:
    gradient = np.full(40, number, np.float32)
    value = decoded(segments.MINMAX, gradient)
    np.testing.assert_array_equal(value, gradient)
    assert not np.signbit(value).any() or number < 0


def test_l2_norm_adds_in_a_fixed_order() -> None:
    # In lane 0 the large square comes first and swallows the small ones; alone in lane 1 they would count.
    c = np.zeros((1, 16 * 40), np.float32)
    c[0, 0] = 2.0**27
    c[0, 16::16] = 1.0
    assert quantisers.l2_norm(c).tolist() == [2.0**27]
    lanes = np.float64(2.0**54) + np.float64(39)
    c = np.roll(c, 1)
    assert quantisers.l2_norm(c).tolist() == [np.float32(np.sqrt(np.float64(2.0**54)))]
    assert np.sqrt(lanes) >= 2.0**27


def test_mean_magnitude_adds_in_the_same_order() -> None:
    # The large number swallows what follows in its lane, and nothing of the other lanes.
    gradient = np.zeros(16 * 40, np.float32)
    gradient[0] = 2.0**54
    gradient[16::16] = -1.0
    gradient[1::16] = 2.0
    payload = one(segments.SIGN, gradient, bits=1, bucket_size=640).encode(HOST.kernels).payload
    assert np.frombuffer(payload[:4], "<f4").tolist() == [np.float32((2.0**54 + 80) / 640)]
