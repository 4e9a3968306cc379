"""Selections: the reference is what a sort of Python's makes, and every backend gives the bytes of the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from kernels.backends import ALL, COMPILED, REFERENCE, each_of, running
from kernels.groups import AWKWARD
from kernels.isas import NATIVE
from kernels.layers import Layer, Layers
from kernels.standin import ORDERS
from tiers import examples

from gradcomp.kernels import segments

reference = REFERENCE

DTYPES = (segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16)


class Comparison:
    """What a backend and the reference make of fresh copies of layers is the same."""

    def __init__(self, backend: Any, step: int = 1) -> None:
        self._backend = backend
        self.step = step  # of small layers, one in so many

    def __call__(
        self, kernel: str, layers: list[Layer], *arguments: Any, contributions: Any = None, **settings: Any
    ) -> Any:
        expected, result = (
            getattr(Layers(layers, contributions), kernel)(each, *arguments, **settings)
            for each in (reference, self._backend)
        )
        assert result == expected
        return expected


@contextmanager
def comparing(name: str) -> Iterator[Comparison]:
    """For a backend; CUDA's stand-in is slow."""
    with running(name) as backend:
        yield Comparison(backend, 7 if name in ORDERS else 1)


@pytest.fixture
def same(request: Any) -> Any:
    with comparing(request.param) as comparison:
        yield comparison


EACH = pytest.mark.parametrize("same", COMPILED, indirect=True)


# --- the reference against plain Python ---------------------------------------------------------------------

EXACT = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, 1e-40, 3e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)


def best(c: Any, candidates: Any, count: int) -> list[int]:
    ranked = sorted(candidates, key=lambda i: (-abs(float(c[i])), i))
    return sorted(ranked[:count])


@examples(200)
@given(hnp.arrays(np.float32, st.integers(0, 30), elements=EXACT, fill=st.nothing()), st.data())
def test_reference_selects_what_sorting_selects(c: Any, data: Any) -> None:
    count = data.draw(st.integers(0, len(c)))
    layers = Layers([Layer(c)])
    for zeros in (True, False):
        _, (top,), _, _ = layers.select_top(reference, [count], zeros=zeros)
        assert top == best(c, range(len(c)) if zeros else np.flatnonzero(c).tolist(), count)
    threshold = data.draw(st.sampled_from([*map(abs, c.tolist()), 0.0, -1.0, 0.5]))
    above = [i for i in range(len(c)) if abs(c[i]) >= threshold]
    assert layers.select_above(reference, [threshold], [count])[1] == [best(c, above, count)]
    number, total, squares, largest = (column[0] for column in layers.tail(reference, [threshold]))
    assert number == len(above)
    assert total == pytest.approx(math.fsum(abs(float(c[i])) for i in above), rel=1e-12)
    assert squares == pytest.approx(math.fsum(float(c[i]) ** 2 for i in above), rel=1e-12)
    assert largest == max((abs(float(c[i])) for i in above), default=0.0)


@examples(200)
@given(
    hnp.arrays(np.float32, st.integers(1, 40), elements=EXACT, fill=st.nothing()),
    st.integers(1, 8),
    st.integers(0, 50),
    st.data(),
)
def test_reference_thresholds_are_ranks_of_the_sample(c: Any, stride: int, phase: int, data: Any) -> None:
    count = data.draw(st.integers(1, len(c)))
    sample = [abs(x) for x in c.tolist()][phase::stride] or [abs(x) for x in c.tolist()]
    rank = max(1, round(count * len(sample) / len(c)))
    (threshold,) = Layers([Layer(c)], [c]).sample_thresholds(reference, [count], stride, phase)
    assert threshold == sorted(sample, reverse=True)[rank - 1]


def test_reference_contribution_and_values() -> None:
    rng = np.random.default_rng(0)
    layer = Layer(
        rng.normal(size=50).astype(np.float16), rng.normal(size=50).astype(np.float32), segments.FLOAT16, 0.3
    )
    layers = Layers([layer])
    flags, (next_residual,) = layers.contribute(reference, 0.9)
    assert flags == [2]
    assert next_residual == layer.contribution(0.9).tobytes()
    counts, offsets, indices, values = layers.space([7])
    lists = counts, offsets, indices, values, counts
    reference.select_top(layers.table, layers.flags, layers.factors, *lists, decay=0.9, zeros=False)
    place = slice(offsets[0], offsets[0] + 7)
    assert (values[place] == layer.contribution(0.9)[indices[place]]).all()


# --- the backends against the reference -----------------------------------------------------------------------


def small_layers() -> list[Layer]:
    """Every length at which a vector can end, in every dtype; many ties in half of them."""
    rng = np.random.default_rng(1)
    layers = []
    for length in (*range(71), 127, 128, 129, 600, 2047, 2048, 2049, 5000):
        for dtype in DTYPES:
            gradient = rng.normal(size=length) if length % 2 else rng.integers(-3, 4, size=length)
            layers.append(
                Layer(
                    None if length % 7 == 3 else gradient.astype(segments.DTYPES[dtype]),
                    None if len(layers) % 2 else rng.normal(size=length).astype(np.float32),
                    dtype,
                    factor=(1.0, 0.3, -2.0)[len(layers) % 3],
                    length=length,
                )
            )
    return layers


SHARES = {
    "none": lambda n: 0,
    "one": lambda n: min(n, 1),
    "a third": lambda n: n // 3,
    "all but one": lambda n: max(n - 1, 0),
    "all": lambda n: n,
}


@EACH
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_small_layers(same: Any, share: Any) -> None:
    layers = small_layers()[:: same.step]
    counts = [share(layer.length) for layer in layers]
    for zeros in (True, False):
        same("select_top", layers, counts, decay=0.9, zeros=zeros)
    c = [layer.contribution() for layer in layers]
    for threshold in (-1.0, 0.0, 0.7):
        same("select_above", layers, [threshold] * len(layers), counts, contributions=c)
    for stride, phase in ((1, 0), (7, 3), (100, 99), (2**62, 2**62)):
        same("sample_thresholds", layers, counts, stride, phase, contributions=c)


@EACH
def test_small_layers_without_counts(same: Any) -> None:
    layers = small_layers()[:: same.step]
    same("contribute", layers, 0.9)
    same("squares", layers)
    c = [layer.contribution() for layer in layers]
    for threshold in (-1.0, 0.0, 0.7, 1e9):
        same("tail", layers, [threshold] * len(layers), contributions=c)


LENGTH = 70_001  # streamed, sampled, and longer than the list of candidates


def sampled_places(length: int) -> Any:
    """The elements that the compiled select_top samples: a vector in each of equal parts (select.hpp)."""
    vectors = min(length // 256, 4096)
    part = length // vectors
    j = np.arange(vectors, dtype=np.uint64)
    fraction = (j * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    begin = j * np.uint64(part) + ((fraction * np.uint64(part - 16)) >> np.uint64(32))
    return (begin[:, None] + np.arange(16, dtype=np.uint64)).reshape(-1).astype(np.int64)


def long_gradients() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    normal = rng.normal(size=LENGTH).astype(np.float32)
    sampled = np.zeros(LENGTH, bool)
    sampled[sampled_places(LENGTH)] = True
    rising = np.arange(LENGTH, dtype=np.float32)
    embedding = np.zeros(LENGTH, np.float32)
    embedding[300:900] = embedding[50_000:50_300] = 1
    return {
        "normal": normal,
        "equal": np.full(LENGTH, -0.7, np.float32),
        "zero": np.zeros(LENGTH, np.float32),
        "minus zero": np.where(normal > 0, np.float32(0), np.float32(-0.0)),
        "90% zero": np.where(np.abs(normal) > 1.645, normal, np.float32(0)),
        "embedding": embedding * normal,
        "few values": np.round(normal),
        "subnormal": np.round(normal * 1000) * np.float32(1e-45),
        "rising": rising,
        "falling": rising[::-1].copy(),
        # The sample misleads: its floor excludes nearly everything, or nothing.
        "sample sees large": np.where(sampled, 1000 + rising, rising / LENGTH).astype(np.float32),
        "sample sees small": np.where(sampled, 0, 1 + rising).astype(np.float32),
        # The rare ones, which are next to the others, still count when the list of candidates has been cut.
        "one ulp apart": np.where(sampled, 0, np.where(rising % 1000 == 999, 2, 1))
        .astype(np.uint32)
        .view("<f4"),
    }


LONG = pytest.mark.parametrize("gradient", long_gradients().values(), ids=long_gradients())


@EACH
@LONG
def test_long_layers(same: Any, gradient: Any) -> None:
    layers = [Layer(gradient)]
    c = [gradient]
    for count in (1, 70, 700, 7000, 30_000, LENGTH - 1, LENGTH):
        for zeros in (True, False):
            same("select_top", layers, [count], zeros=zeros)
        (threshold,) = same("sample_thresholds", layers, [count], 10, 3, contributions=c)
        for limit in (count, 2 * count):
            same("select_above", layers, [threshold], [limit], contributions=c)
        same("tail", layers, [threshold], contributions=c)
    same("squares", layers)


@EACH
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_layers_at_any_alignment(same: Any, dtype: int) -> None:
    rng = np.random.default_rng(3)
    gradient = rng.normal(size=LENGTH).astype(segments.DTYPES[dtype])
    residual = rng.normal(size=LENGTH).astype(np.float32)
    for offset in (0, 1, 5, 15):
        layers = [
            Layer(gradient[offset:], residual[offset:], dtype),
            Layer(gradient[: LENGTH - offset], None, dtype),
        ]
        same("select_top", layers, [700, 700])
        same("contribute", layers)
        same("squares", layers)


def test_next_residuals_at_any_alignment() -> None:
    gradient = np.random.default_rng(4).normal(size=LENGTH).astype(np.float32)
    for offset in range(17):
        memory = np.full(LENGTH + 17, np.nan, np.float32)
        layers = Layers([Layer(gradient)])
        layers.table["next_residual"] = memory.ctypes.data + 4 * offset
        layers.select_top(NATIVE, [700])
        assert (memory[offset : offset + LENGTH] == gradient).all()
        assert np.isnan(memory[:offset]).all()
        assert np.isnan(memory[offset + LENGTH :]).all()


@EACH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 40_000, LENGTH - 1])
def test_non_finite_layers(same: Any, value: float, place: int) -> None:
    gradient = np.random.default_rng(5).normal(size=LENGTH).astype(np.float32)
    poisoned = gradient.copy()
    poisoned[place] = value
    short = poisoned[:18] if place < 18 else np.array([value], np.float32)
    layers = [Layer(gradient), Layer(poisoned), Layer(short), Layer(gradient[:5], poisoned[-5:])]
    last = place == LENGTH - 1
    for counts in ([70, 70, 1, 3], [0] * 4):
        for zeros in (True, False):
            flags, selections, _, _ = same("select_top", layers, counts, zeros=zeros)
            assert flags == [2, 3, 3, 3 if last else 2]
            assert selections[1] == list(range(counts[1] if zeros else 0))
    assert same("contribute", layers)[0] == flags
    same("squares", layers)


@EACH
def test_nothing_selects_nan(same: Any) -> None:
    c = np.array([np.nan, np.inf, -1, -np.nan, -np.inf, 0] * 7, np.float32)
    layers = [Layer(c)]
    for threshold in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1.0, 2.0):
        for limit in (0, 1, 10, 30, 42):
            found, _, _ = same("select_above", layers, [threshold], [limit], contributions=[c])
            eligible = 0 if math.isnan(threshold) else sum(abs(x) >= threshold for x in c.tolist())
            assert found == [min(limit, eligible)]
        same("tail", layers, [threshold], contributions=[c])
    assert same("sample_thresholds", layers, [1], 3, 0, contributions=[c]) == [math.inf]
    assert same("sample_thresholds", layers, [0], 3, 0, contributions=[c]) == [math.inf]


@st.composite
def awkward_layers(draw: Any) -> Layer:
    dtype = draw(st.sampled_from(DTYPES))
    length = draw(st.integers(0, 60))
    elements = st.sampled_from(AWKWARD if draw(st.booleans()) else AWKWARD[:4]) | st.floats(width=32)
    array = hnp.arrays(np.float32, length, elements=elements, fill=elements)
    with np.errstate(all="ignore"):
        gradient = draw(st.none() | array.map(lambda x: x.astype(segments.DTYPES[dtype])))
    factor = draw(st.sampled_from([1.0, 0.1, -3.0, 1e30, 2.0**-140]))
    return Layer(gradient, draw(st.none() | array), dtype, factor, length)


@pytest.mark.parametrize("name", COMPILED)
@examples(80)
@given(st.lists(awkward_layers(), min_size=1, max_size=4), st.data())
def test_any_numbers(name: str, layers: list[Layer], data: Any) -> None:
    with comparing(name) as same:
        check_any_numbers(same, layers, data)


def check_any_numbers(same: Comparison, layers: list[Layer], data: Any) -> None:
    counts = [data.draw(st.integers(0, layer.length)) for layer in layers]
    decay, zeros = data.draw(st.sampled_from([1.0, 0.5, 1e30])), data.draw(st.booleans())
    same("select_top", layers, counts, decay, zeros=zeros)
    same("squares", layers)
    with np.errstate(all="ignore"):
        c = [layer.contribution() for layer in layers]
    thresholds = [data.draw(st.sampled_from([*AWKWARD, *map(float, x)])) for x in c]
    same("select_above", layers, thresholds, counts, contributions=c)
    same("tail", layers, thresholds, contributions=c)
    stride, phase = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 70))
    same("sample_thresholds", layers, counts, stride, phase, contributions=c)


@EACH
def test_squares_of_doubles(same: Any) -> None:
    rng = np.random.default_rng(6)
    layers = [Layer(rng.normal(size=n), dtype=segments.FLOAT64) for n in (0, 1, 15, 16, 17, 5000)]
    layers.append(Layer(None, dtype=segments.FLOAT64, length=9))
    found = np.frombuffer(same("squares", layers))
    np.testing.assert_allclose(found[:-1], [np.dot(x.gradient, x.gradient) for x in layers[:-1]])
    assert found[-1] == 0


@each_of(ALL)
def test_put_then_take(backend: Any) -> None:
    layers = Layers([Layer(None, length=9), Layer(None, length=0), Layer(None, length=4)])
    for next_residual in layers.next_residuals:
        next_residual.array[:] = 0
    counts, offsets, indices, values = layers.space([5, 0, 2])
    indices[offsets[0] : offsets[0] + 5] = [8, 0, 3, 3, 0]
    indices[offsets[2] : offsets[2] + 2] = [1, 3]
    values[offsets[0] : offsets[0] + 5] = [1, 2, 3, 4, 5]
    values[offsets[2] : offsets[2] + 2] = [6, np.nan]
    backend.put(layers.table, offsets, counts, indices, values)
    # Of a repeated index the last value stays.
    assert layers.next_residuals[0].array.tolist() == [5, 0, 0, 4, 0, 0, 0, 0, 1]
    assert layers.next_residuals[2].array[:3].tolist() == [0, 6, 0]
    assert np.isnan(layers.next_residuals[2].array[3])
    taken = np.full_like(values, 7)
    backend.take(layers.table, offsets, counts, indices, taken)
    assert taken[offsets[0] : offsets[0] + 5].tolist() == [1, 5, 4, 4, 5]
    assert (taken[:3] == 7).all()
    assert (taken[-3:] == 7).all()
    layers.next_residual_bytes()
