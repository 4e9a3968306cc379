"""A GPU gives the bytes of the reference: random tables, long rows, arrays that lie on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernels.groups import CODECS, Group, Segment, dtypes_of, levels_of, magnitudes_of, nearest_level
from kernels.layers import Layer
from kernels.layers import Layers as Selections
from kernels.lent import back, there

from gradcomp.kernels import dispatch, reference, segments
from gradcomp.kernels.reference_indices import ALL, BITMAP, PACKED, RAW, index_bytes
from gradcomp.kernels.segments import Draw, Factor, Shapes

# The compiled body is quicker, and gives the reference's bytes: tests/kernels shows it.
QUICK: Any = dispatch.named("native" if "native" in dispatch._backends else "reference")
LONG = 4_000_003 if "native" in dispatch._backends else 1_000_003
CODEC = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
ROUNDING = pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
DTYPES = (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16)


def random_group(codec: int, seed: int) -> Group:
    """Rows of any length, level, dtype and bucket size, some of numbers near zero, some without residual."""
    rng = np.random.default_rng([codec, seed])
    rows = []
    for _ in range(24):
        length = int(rng.integers(0, rng.choice([20, 600, 9000])))
        dtype = int(rng.choice(dtypes_of(codec)))
        scale = 10.0 ** rng.integers(-40, 4)
        with np.errstate(all="ignore"):
            gradient = (scale * rng.normal(size=length)).astype(segments.DTYPES[dtype])
        rows.append(
            Segment(
                None if rng.random() < 0.1 else gradient,
                None if rng.random() < 0.4 else (scale * rng.normal(size=length)).astype(np.float32),
                bits=int(rng.choice(list(levels_of(codec)))),
                bucket_size=int(rng.choice([1, 3, 8, 64, 100, 512, 3000, 2**31 - 1])),
                start=int(rng.integers(0, 1 << 33)),
                layer=int(rng.integers(0, 1 << 32)),
                next_residual=rng.random() < 0.7,
                dtype=dtype,
                length=length,
            )
        )
    return Group(codec, rows)


@CODEC
@ROUNDING
@pytest.mark.parametrize("seed", range(4))
def test_random_tables(codec: int, stochastic: bool, seed: int, body: Any) -> None:
    group = random_group(codec, seed)
    scale, decay = [(1.0, 1.0), (0.3, 0.9), (2.0**-140, 1.0), (1e30, 1.0)][seed]
    options = {"stochastic": stochastic, "seed": seed << 40, "step": seed}
    encoded = group.encode(reference, scale=scale, decay=decay, rank=5, **options)
    assert group.encode(body, scale=scale, decay=decay, rank=5, **options) == encoded
    payload = encoded.payload
    for divisor in (1.0, 3.0):
        assert group.decode(body, payload, divisor=divisor, scale=scale) == group.decode(
            reference, payload, divisor=divisor, scale=scale
        )
    for payloads in ([payload], [payload] * 2, [payload] * 7):
        mean = group.reduce(reference, payloads, decay=decay, **options)
        assert group.reduce(body, payloads, decay=decay, **options) == mean
    if codec != segments.FP64:
        assert group.decode_add(body, payload, scale=0.3) == group.decode_add(reference, payload, scale=0.3)


@CODEC
@pytest.mark.parametrize("bucket_size", [512, 100_000])
def test_long_rows(codec: int, bucket_size: int, body: Any) -> None:
    rng = np.random.default_rng(codec)
    dtype = dtypes_of(codec)[0]
    bits = nearest_level(codec, 4)
    gradient = rng.standard_normal(LONG).astype(segments.DTYPES[dtype])
    residual = rng.standard_normal(LONG, np.float32)
    common: dict[str, Any] = {"next_residual": True, "bits": bits, "bucket_size": bucket_size, "dtype": dtype}
    rows = [Segment(gradient, residual, **common), Segment(gradient[3:70_000], residual[1:69_998], **common)]
    group = Group(codec, rows)
    encoded = group.encode(QUICK, stochastic=True)
    assert group.encode(body, stochastic=True) == encoded
    assert group.decode(body, encoded.payload) == group.decode(QUICK, encoded.payload)
    mean = group.reduce(QUICK, [encoded.payload] * 3)
    assert group.reduce(body, [encoded.payload] * 3) == mean


@pytest.mark.parametrize("codec", [segments.MINMAX, segments.L2, segments.CODEBOOK_LINF])
def test_payloads_that_lie_on_the_device(codec: int, body: Any) -> None:
    gradient = np.random.default_rng(0).standard_normal(LONG // 4, np.float32)
    output = np.zeros_like(gradient)
    table = np.zeros(1, segments.SEGMENT)
    table["gradient"], table["output"] = gradient.ctypes.data, output.ctypes.data
    table["length"], table["level"], table["bucket_size"] = len(gradient), 4, 512
    flags, magnitudes = np.zeros(1, np.uint8), magnitudes_of(codec)
    payload = np.zeros(segments.wire_bytes(codec, len(gradient), 4, 512), np.uint8)
    sent = [there(payload), there(payload)]
    drawn: dict[str, Any] = {"draw": Draw(3, 4, 0), "decay": 1.0, "magnitudes": magnitudes}
    QUICK.encode(codec, table, payload, flags, scale=1.0, **drawn)
    for each in sent:
        body.encode(codec, table, each, flags, scale=1.0, **drawn)
        assert back(each).tobytes() == payload.tobytes()
    mean, mean_there = np.zeros_like(payload), there(np.zeros_like(payload))
    table["gradient"] = 0
    QUICK.reduce(codec, table, [payload] * 2, mean, flags, divisor=2.0, **drawn)
    body.reduce(codec, table, sent, mean_there, flags, divisor=2.0, **drawn)
    assert back(mean_there).tobytes() == mean.tobytes()
    body.decode(codec, table, mean_there, flags, divisor=1.0, scale=1.0, magnitudes=magnitudes)
    found = output.tobytes()
    QUICK.decode(codec, table, mean, flags, divisor=1.0, scale=1.0, magnitudes=magnitudes)
    assert found == output.tobytes()
    assert not flags.any()


# --- selections, lists -----------------------------------------------------------------------------------------


def layers_of(seed: int) -> list[Layer]:
    rng = np.random.default_rng(seed)
    lengths = [0, 1, 17, 4095, 70_001, LONG if seed == 0 else 300_000]
    return [
        Layer(
            rng.normal(scale=10.0 ** rng.integers(-3, 3), size=length).astype(
                segments.DTYPES[DTYPES[(seed + i) % 3]]
            ),
            dtype=DTYPES[(seed + i) % 3],
        )
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_selections(seed: int, body: Any) -> None:
    layers = layers_of(seed)
    lengths = [len(layer.gradient) for layer in layers]
    counts = [-(-length // 100) for length in lengths]

    def both(kernel: str, *arguments: Any, **settings: Any) -> Any:
        expected, found = (
            getattr(Selections(layers, [layer.gradient.astype(np.float32) for layer in layers]), kernel)(
                each, *arguments, **settings
            )
            for each in (QUICK, body)
        )
        assert found == expected
        return expected

    both("contribute", decay=0.9)
    both("select_top", counts)
    both("select_top", lengths)
    both("select_top", counts, zeros=False)
    both("select_top", lengths, zeros=False)
    thresholds = both("sample_thresholds", counts, stride=37, phase=5)
    both("select_above", thresholds, [2 * count for count in counts])
    both("tail", thresholds)
    both("squares")


def test_index_lists_on_the_device(body: Any) -> None:
    lengths = np.array([LONG, 300_000, 7, 1 << 31])
    counts = np.array([40_000, 150_000, 7, 20_000])
    offsets = np.cumsum(counts) - counts
    layers = np.arange(4, dtype=np.uint32)
    drawn = np.zeros(int(counts.sum()), np.uint32)
    drawn_there = there(drawn)
    draws = {"seed": 1, "step": 2, "rank": 3}
    QUICK.draw_indices(lengths, counts, layers, offsets, drawn, **draws)
    body.draw_indices(lengths, counts, layers, offsets, drawn_there, **draws)
    assert back(drawn_there).tobytes() == drawn.tobytes()
    codings = np.array([PACKED, BITMAP, ALL, RAW], np.int32)
    rows = (codings, lengths, counts, offsets)
    sizes = index_bytes(codings, lengths, counts)
    places = np.cumsum(sizes) - sizes
    payload = np.zeros(int(sizes.sum()), np.uint8)
    payload_there, decoded = there(payload), there(np.zeros_like(drawn))
    QUICK.encode_indices(*rows, drawn, places, payload)
    body.encode_indices(*rows, drawn_there, places, payload_there)
    assert back(payload_there).tobytes() == payload.tobytes()
    body.decode_indices(*rows, decoded, places, payload_there)
    assert back(decoded).tobytes() == drawn.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_scattered_from_the_device(dtype: int, body: Any) -> None:
    rng = np.random.default_rng(dtype)
    lengths, ranks = np.array([LONG // 4, 0, 5, 70_000]), 3
    counts = np.tile(-(-lengths // 50), (ranks, 1))
    offsets = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    chosen = [
        np.sort(rng.permutation(n)[:k])
        for row in counts
        for n, k in zip(lengths.tolist(), row.tolist(), strict=True)
    ]
    listed = np.concatenate(chosen).astype(np.uint32)
    values = rng.standard_normal(len(listed), np.float32)
    table = np.zeros(len(lengths), segments.SEGMENT)
    table["length"], table["dtype"] = lengths, dtype
    outputs = [np.ones(length, segments.DTYPES[dtype]) for length in lengths]
    table["output"] = [each.ctypes.data if each.size else 0 for each in outputs]
    results = []
    for each, lists in ((QUICK, (listed, values)), (body, (there(listed), there(values)))):
        flags = np.zeros(len(table), np.uint8)
        each.scatter_mean(table, flags, offsets, counts, *lists, divisor=3.0, scale=0.5)
        results.append(([output.tobytes() for output in outputs], flags.tolist()))
        for output in outputs:
            output[:] = 1
    assert results[0] == results[1]


# --- low rank, measures ----------------------------------------------------------------------------------------

MATRICES = [(768, 3072), (3072, 768), (768, 768), (1, 5000), (5000, 1), (37, 33)]


class Factors:
    """Matrices and factors of random numbers, to be used up by one body."""

    def __init__(self, dtype: int, rank: int) -> None:
        rng = np.random.default_rng(rank)
        self.rows, self.columns = np.array(MATRICES, np.int64).T.copy()
        self.ranks = np.minimum(rank, np.minimum(self.rows, self.columns))
        lengths = self.rows * self.columns
        at = np.cumsum(lengths) - lengths
        kinds = {"gradient": segments.DTYPES[dtype], "output": segments.DTYPES[dtype]}
        self.table = np.zeros(len(MATRICES), segments.SEGMENT)
        self.table["length"], self.table["dtype"] = lengths, dtype
        self.arrays = {}
        for name in ("gradient", "residual", "next_residual", "output"):
            kind = kinds.get(name, np.dtype(np.float32))
            self.arrays[name] = rng.standard_normal(int(lengths.sum()), np.float32).astype(kind)
            self.table[name] = self.arrays[name].ctypes.data + kind.itemsize * at
        self.p_at, self.q_at = (
            np.cumsum(each * self.ranks) - each * self.ranks for each in (self.rows, self.columns)
        )
        self.p = rng.standard_normal(int((self.rows * self.ranks).sum()), np.float32)
        self.q = rng.standard_normal(int((self.columns * self.ranks).sum()), np.float32)
        self.flags = np.zeros(len(MATRICES), np.uint8)
        self.shapes = Shapes(self.rows, self.columns, self.ranks)

    def bytes(self) -> list[bytes]:
        return [self.arrays["next_residual"].tobytes(), self.arrays["output"].tobytes(), self.flags.tobytes()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", [1, 4, 9])
def test_what_follows_the_last_reply_of_low_rank(dtype: int, rank: int, body: Any) -> None:
    results = []
    for each in (QUICK, body):
        work = Factors(dtype, rank)
        p, q = (there(work.p), there(work.q)) if each is body else (work.p, work.q)
        factors = Factor(p, work.p_at), Factor(q, work.q_at)
        each.orthogonalise(work.rows, work.ranks, factors[0])
        each.expand(work.table, work.flags, work.shapes, *factors, divisor=3.0, scale=0.5)
        each.subtract(work.table, work.shapes, *factors)
        results.append([(back(p) if each is body else p).tobytes(), *work.bytes()])
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_close(dtype: int, body: Any) -> None:
    results = []
    for each in (QUICK, body):
        work = Factors(dtype, 4)
        p, q = (there(work.p), there(work.q)) if each is body else (work.p, work.q)
        factors = np.ones(len(MATRICES), np.float32)
        columns = Factor(p, work.p_at), Factor(q, work.q_at)
        each.project(work.table, work.flags, factors, work.shapes, *columns[::-1], decay=0.9)
        next_residual = work.arrays["next_residual"].tobytes()
        each.back_project(work.table, work.shapes, *columns)
        results.append((*((back(p), back(q)) if each is body else (p, q)), next_residual))
    (p, q, next_residual), (p_there, q_there, next_residual_there) = results
    assert next_residual_there == next_residual
    np.testing.assert_allclose(p_there, p, rtol=1e-4, atol=1e-2)
    # Sums of some thousand products of some hundreds.
    np.testing.assert_allclose(q_there, q, rtol=1e-4, atol=20)


def test_moments(body: Any) -> None:
    arrays = [np.random.default_rng(n).standard_normal(n, np.float32) for n in (0, 1, 70_001, LONG)]
    table = np.zeros(len(arrays), segments.SEGMENT)
    table["length"] = [len(array) for array in arrays]
    table["gradient"] = [array.ctypes.data if array.size else 0 for array in arrays]
    found = body.moments(table)
    assert found[:, 0] == pytest.approx([array.sum(dtype=np.float64) for array in arrays], abs=1e-6)
    assert found[:, 1] == pytest.approx([(array.astype(np.float64) ** 2).sum() for array in arrays])


# --- launches --------------------------------------------------------------------------------------------------


def test_launches_do_not_depend_on_the_number_of_rows(
    driver: Any, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    launch = driver.launch
    monkeypatch.setattr(driver, "launch", lambda *given: (launched.append(given[0]), launch(*given)))
    numbers = []
    for rows in (10, 1000):
        gradient = np.random.default_rng(0).standard_normal(40 * rows, np.float32)
        parts = [Segment(part, next_residual=True) for part in gradient.reshape(rows, 40)]
        group = Group(segments.MINMAX, parts)
        payload = group.encode(body).payload
        group.decode(body, payload)
        Selections([Layer(part.gradient) for part in parts]).select_top(body, [4] * rows)
        numbers.append(len(launched))
        launched.clear()
    assert numbers[0] == numbers[1]
