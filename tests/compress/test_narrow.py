"""Narrowing: selecting once and narrowing is selecting at the lower density."""

from __future__ import annotations

import numpy as np
import pytest
from compress.selecting import samples, select
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import TopK
from gradcomp.compress.sparse.base import elements_at
from gradcomp.compress.sparse.payload import Selection, narrow

DENSITIES = [1.0, 0.4, 0.1, 0.01, 0.001]
LENGTHS = [0, 1, 2, 57, 1000, 0]


def layers(name: str) -> list[np.ndarray]:
    return [samples(max(n, 1), seed=n)[name][:n] for n in LENGTHS]


def of_rows(selection: Selection) -> list[tuple[list[int], list[float]]]:
    rows = [slice(o, o + n) for o, n in zip(selection.offsets, selection.counts, strict=True)]
    return [(selection.indices[row].tolist(), selection.values[row].tolist()) for row in rows]


@pytest.mark.parametrize("name", samples(1))
@pytest.mark.parametrize("at", range(len(DENSITIES)))
def test_narrowed_is_what_the_lower_density_selects(name: str, at: int):
    whole = layers(name)
    wide = select(TopK(DENSITIES[at], zeros=True), *whole).selection
    for density in DENSITIES[at:]:
        narrowed = narrow(wide, elements_at(density, np.array(LENGTHS)))
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
    wide = select(TopK(0.1), *layers("normal")).selection
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
