"""Tests sparse selections and their payloads: round trips, sizes that are known before, hostile bytes, narrowing."""

from __future__ import annotations

import tracemalloc
import zlib

import numpy as np
import pytest
from compress.selecting import samples, select
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import Cast, Quantize, TopK
from gradcomp.compress.sparse.base import elements_at
from gradcomp.compress.sparse.payload import CODINGS, Selection, SparseFormat, narrow
from gradcomp.core.errors import WireFormatError
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import SEGMENT

DRAW = Draw(1, 2, 3)
VALUES = {
    "float32": Cast("float32"),
    "float16": Cast("float16"),
    "bfloat16": Cast("bfloat16"),
    "quantize 4": Quantize(4, 16),
    "quantize 8": Quantize(8, 5, "l2"),
    "nearest": Quantize(3, 16, rounding="nearest"),
}
codings = st.sampled_from(sorted(CODINGS))
codecs = st.sampled_from(sorted(VALUES))


def form_of(lengths, limits, fixed: bool, indices: str, values: str = "float32") -> SparseFormat:
    table = np.zeros(len(lengths), SEGMENT)
    table["length"], table["layer"], table["bucket_size"] = lengths, np.arange(len(lengths)), 1
    return SparseFormat(table, np.array(limits, np.int64), fixed, indices, VALUES[values])


def drawn(form: SparseFormat, counts, seed: int = 0) -> Selection:
    """Returns a selection of ``counts[i]`` elements of row i."""
    generator = np.random.default_rng(seed)
    chosen = Selection.allocate(form.limits)
    chosen.counts[:] = counts
    for length, offset, count in zip(form._indices.lengths, chosen.offsets, chosen.counts, strict=True):
        place = slice(offset, offset + count)
        chosen.indices[place] = np.sort(generator.choice(length, count, replace=False))
        chosen.values[place] = generator.standard_normal(count)
    return chosen


def encoded(form: SparseFormat, chosen: Selection) -> tuple[np.ndarray, np.ndarray]:
    payload, flags = np.full(form.max_bytes, 0xAA, np.uint8), np.zeros(len(form.limits), np.uint8)
    used, errors = form.encode(chosen, payload, flags, DRAW)
    assert not flags.any()
    return payload[:used].copy(), errors.copy()


def decoded(form: SparseFormat, payload) -> Selection:
    into = Selection.allocate(form.limits)
    form.decode(np.frombuffer(bytes(payload), np.uint8), into, 5)
    return into


@st.composite
def rows(draw, most: int = 200):
    """Draws lengths, limits and counts of a few rows: counts <= limits <= lengths."""
    lengths = draw(st.lists(st.integers(0, most), min_size=1, max_size=4))
    limits = [draw(st.integers(0, n)) for n in lengths]
    return lengths, limits, [draw(st.integers(0, k)) for k in limits]


def check_round_trip(form: SparseFormat, counts, seed: int, exact: bool) -> np.ndarray:
    chosen = drawn(form, counts, seed)
    payload, errors = encoded(form, chosen)
    got = decoded(form, payload)
    assert got.counts.tolist() == list(counts)
    for offset, count in zip(chosen.offsets, counts, strict=True):
        place = slice(offset, offset + count)
        assert np.array_equal(got.indices[place], chosen.indices[place])
        if exact:
            assert np.array_equal(got.values[place], chosen.values[place])
            assert not errors[place].any()
        assert np.array_equal(errors[place], chosen.values[place] - got.values[place])
    return payload


# --- what goes in comes out ---------------------------------------------------------------------------------


@examples(300)
@given(rows(), st.booleans(), codings, codecs, st.integers(0, 99))
def test_a_selection_comes_back_in_the_size_of_the_formula(of, fixed: bool, coding, codec, seed: int):
    lengths, limits, counts = of
    counts = limits if fixed else counts
    form = form_of(lengths, limits, fixed, coding, codec)
    payload = check_round_trip(form, counts, seed, codec == "float32")
    assert form.fixed == (fixed and coding != "deflate")
    formula = form.wire_bytes(np.array(counts)).sum()
    if coding != "deflate":
        assert len(payload) == formula
    elif fixed:
        assert formula < len(payload)
    assert len(payload) <= form.max_bytes
    assert not form.fixed or len(payload) == form.max_bytes


@examples(300)
@given(rows(most=2_000_000), codings, codecs)
def test_no_counts_take_more_than_was_announced(of, coding: str, codec: str):
    lengths, limits, counts = of
    form = form_of(lengths, limits, False, coding, codec)
    assert form.wire_bytes(np.array(counts)).sum() <= form.max_bytes


@pytest.mark.parametrize("coding", sorted(set(CODINGS) - {"deflate"}))
@pytest.mark.parametrize("length", [1, 8, 129])
def test_no_count_at_all_takes_more_than_was_announced(coding: str, length: int):
    counts = np.arange(length + 1)
    needed = form_of([length] * len(counts), counts, False, coding).wire_bytes(counts)
    announced = [form_of([length], [limit], False, coding).max_bytes for limit in counts]
    assert (np.maximum.accumulate(needed) <= announced).all()


def test_a_value_that_cannot_be_coded_flags_its_row():
    form = form_of([9, 9, 9], [2, 2, 2], True, "raw", "quantize 4")
    chosen = drawn(form, [2, 2, 2])
    chosen.values[2:4] = [-3e38, 3e38]  # no float32 holds the width
    flags = np.array([0, 0, 1], np.uint8)
    form.encode(chosen, np.zeros(form.max_bytes, np.uint8), flags, DRAW)
    assert flags.tolist() == [0, 1, 1]  # a flag that is there stays


# --- hostile payloads ---------------------------------------------------------------------------------------

LENGTHS, LIMITS, COUNTS = [40, 0, 90], [10, 0, 30], [7, 0, 30]
every_form = pytest.mark.parametrize(
    "form",
    [form_of(LENGTHS, LIMITS, fixed, coding) for fixed in (True, False) for coding in sorted(CODINGS)],
    ids=[f"{kind} {coding}" for kind in ("fixed", "varying") for coding in sorted(CODINGS)],
)


def good(form: SparseFormat) -> bytearray:
    return bytearray(encoded(form, drawn(form, LIMITS if form._counts_travel is False else COUNTS))[0])


def refused(form: SparseFormat, payload, match: str = "") -> None:
    with pytest.raises(WireFormatError, match=f"rank 5 sent an impossible sparse payload: .*{match}"):
        decoded(form, payload)


@every_form
def test_every_truncation_and_every_byte_too_many_is_refused(form: SparseFormat):
    payload = good(form)
    for end in range(len(payload)):
        refused(form, payload[:end])
    refused(form, payload + b"\0")
    refused(form, payload + payload)


@pytest.mark.parametrize("coding", sorted(CODINGS))
@pytest.mark.parametrize("count", [8, 11, 41, 2**31, 2**32 - 1])
def test_another_count_is_refused(coding: str, count: int):
    form = form_of(LENGTHS, LIMITS, False, coding)
    payload = good(form)
    payload[:4] = count.to_bytes(4, "little")
    refused(form, payload, "at most 10" if count > 10 else "")


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("indices", "match"),
    [
        ((3, 40), "not below"),
        ((3, 2**32 - 1), "not below"),
        ((3, 3), "not ascending"),
        ((4, 3), "not ascending"),
    ],
)
def test_impossible_indices_are_refused(fixed: bool, indices: tuple[int, int], match: str):
    form = form_of([40], [2], fixed, "raw")
    payload = bytearray(encoded(form, drawn(form, [2]))[0])
    at = 0 if fixed else 4
    payload[at : at + 8] = np.array(indices, "<u4").tobytes()
    refused(form, payload, match)


def with_stream(stream: bytes, fixed: bool = True) -> tuple[SparseFormat, bytes]:
    """Returns a payload of two indices below 40 and one below 3, whose deflated differences are ``stream``."""
    form = form_of([40, 3], [2, 1], fixed, "deflate")
    payload = encoded(form, drawn(form, [2, 1]))[0].tobytes()
    values = 3 * 4 + (0 if fixed else 8)
    assert decoded(form, payload[:values] + deflated(1, 39, 3)).indices.tolist() == [0, 39, 2]
    return form, payload[:values] + stream


def deflated(*differences: int) -> bytes:
    return zlib.compress(np.array(differences, "<u4").tobytes())


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize(
    ("stream", "match"),
    [
        (b"", "do not hold"),
        (b"no deflate at all", ""),
        (deflated(1, 39), "do not hold 12 bytes"),
        (deflated(1, 39, 3, 1), "do not hold 12 bytes"),
        (deflated(1, 39, 3) + b"x", "do not hold"),
        (deflated(1, 39, 3)[:-1], "do not hold"),
        (deflated(1, 39, 3)[:-4] + b"\0\0\0\0", "incorrect data check"),
        (deflated(0, 39, 3), "do not ascend"),
        (deflated(1, 0, 3), "do not ascend"),
        (deflated(1, 40, 3), "out of range"),
        (deflated(1, 39, 4), "out of range"),
        (deflated(2**32 - 1, 2**32 - 1, 2**32 - 1), "out of range"),
    ],
)
def test_an_impossible_stream_is_refused(stream: bytes, match: str, fixed: bool):
    refused(*with_stream(stream, fixed), match)


def test_a_deflate_bomb_is_not_unpacked():
    form, payload = with_stream(zlib.compress(bytes(1 << 26), 9))
    tracemalloc.start()
    refused(form, payload, "do not hold 12 bytes")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@examples(300)
@given(st.data(), st.booleans(), codings, codecs)
def test_any_bytes_are_a_selection_or_refused(data, fixed: bool, coding: str, codec: str):
    form = form_of(LENGTHS, LIMITS, fixed, coding, codec)
    payload = good(form)
    if data.draw(st.booleans()):
        payload = data.draw(st.binary(min_size=len(payload), max_size=len(payload)))
    else:
        for at in data.draw(st.lists(st.integers(0, len(payload) - 1), min_size=1, max_size=3)):
            payload[at] = data.draw(st.integers(0, 255))
    try:
        got = decoded(form, payload)
    except WireFormatError:
        return
    assert (got.counts <= form.limits).all()
    for length, offset, count in zip(LENGTHS, got.offsets, got.counts, strict=True):
        indices = got.indices[offset : offset + count].astype(np.int64)
        assert (np.diff(indices) > 0).all()
        assert (indices < length).all()


# --- narrowing: selecting once and narrowing is selecting at the lower density ---------------------------------

DENSITIES = [1.0, 0.4, 0.1, 0.01, 0.001]
SIZES = [0, 1, 2, 57, 1000, 0]


def layers_of(name: str) -> list[np.ndarray]:
    return [samples(max(n, 1), seed=n)[name][:n] for n in SIZES]


def of_rows(selection: Selection) -> list[tuple[list[int], list[float]]]:
    rows = [slice(o, o + n) for o, n in zip(selection.offsets, selection.counts, strict=True)]
    return [(selection.indices[row].tolist(), selection.values[row].tolist()) for row in rows]


@pytest.mark.parametrize("name", samples(1))
@pytest.mark.parametrize("at", range(len(DENSITIES)))
def test_narrowed_is_what_the_lower_density_selects(name: str, at: int):
    whole = layers_of(name)
    wide = select(TopK(DENSITIES[at], zeros=True), *whole).selection
    for density in DENSITIES[at:]:
        narrowed = narrow(wide, elements_at(density, np.array(SIZES)))
        assert of_rows(narrowed) == of_rows(select(TopK(density, zeros=True), *whole).selection)


@examples(200)
@given(
    st.lists(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38]), max_size=12), max_size=4),
    st.data(),
)
def test_ties_go_to_the_lower_index(rows: list[list[float]], data):
    whole = [np.array(row, np.float32) for row in rows]
    wide = select(TopK(1.0, zeros=True), *whole).selection
    counts = np.array([data.draw(st.integers(0, len(row))) for row in rows], np.int64)
    for (indices, values), row, count in zip(of_rows(narrow(wide, counts)), whole, counts, strict=True):
        best = sorted(range(len(row)), key=lambda i, row=row: (-abs(row[i]), i))[:count]
        assert indices == sorted(best)
        assert values == row[indices].tolist()


def test_the_same_counts_are_the_identity_and_nothing_is_written_over():
    wide = select(TopK(0.1), *layers_of("normal")).selection
    before = of_rows(wide)
    assert of_rows(narrow(wide, wide.counts.copy())) == before
    narrow(wide, wide.counts // 2)
    assert of_rows(wide) == before


def test_selections_may_lie_apart():
    wide = Selection(
        np.array([5, 0], np.int64),
        np.array([3, 2], np.int64),
        np.array([7, 9, 0, 0, 0, 11, 20, 21, 0], np.uint32),
        np.array([1, -2, 0, 0, 0, 3, -3, 1, 0], np.float32),
    )
    assert of_rows(narrow(wide, np.array([1, 1], np.int64))) == [([11], [3.0]), ([9], [-2.0])]


@pytest.mark.parametrize("counts", [[2], [-1]])
def test_counts_that_were_not_selected_are_refused(counts: list[int]):
    wide = select(TopK(0.01), np.ones(100, np.float32)).selection
    with pytest.raises(ValueError, match=r"counts \[(2|-1)\] are not in 0..\[1\]"):
        narrow(wide, np.array(counts, np.int64))
