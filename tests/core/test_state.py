"""Residuals: double buffers, and second residuals that change hands."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp.core.state import DoubleBuffer, Fields, Range, Residuals


def at(address: int, length: int) -> np.ndarray:
    """The float32 values at an address."""
    return np.frombuffer((ctypes.c_char * (4 * length)).from_address(int(address)), np.float32)


def write_next(buffer: DoubleBuffer, row: int, value: float) -> None:
    _, (address,) = buffer.addresses(np.array([row]), 0)
    at(address, int(buffer.lengths[row]))[:] = value


LENGTHS = [3, 0, 5]


class TestDoubleBuffer:
    def test_what_is_written_shows_after_the_commit_of_its_row_only(self):
        buffer = DoubleBuffer(LENGTHS)
        write_next(buffer, 0, 1.0)
        write_next(buffer, 2, 2.0)
        assert not buffer.value(0).any()
        buffer.commit(np.array([True, True, False]))
        assert buffer.value(0).tolist() == [1.0] * 3
        assert not buffer.value(2).any()

    def test_reading_and_writing_never_meet(self):
        buffer, rows = DoubleBuffer(LENGTHS), np.array([0, 2])
        for _ in range(3):
            buffer.commit(np.array([True, False, True]))
            read, write = buffer.addresses(rows, 0)
            assert (read != write).all()
            assert read.tolist() == [buffer.value(row).ctypes.data for row in rows]

    def test_rows_start_at_cache_lines_and_addresses_count_in_elements(self):
        buffer, rows = DoubleBuffer(LENGTHS), np.arange(len(LENGTHS))
        for begins, later in zip(buffer.addresses(rows, 0), buffer.addresses(rows, 3), strict=True):
            assert not (begins % 64).any()
            assert (later - begins == 12).all()

    def test_memory_is_eight_bytes_an_element_in_whole_cache_lines(self):
        assert DoubleBuffer(LENGTHS).nbytes == 8 * sum(16 * -(-length // 16) for length in LENGTHS)

    def test_no_rows_are_fine(self):
        buffer = DoubleBuffer(())
        buffer.commit(np.zeros(0, dtype=bool))
        assert not buffer.nbytes


# --- ownership ----------------------------------------------------------------------------------------------

SIZES = [40, 0, 25]


@st.composite
def ownerships(draw, world: int):
    """Who owns what: each layer cut anywhere, each piece given to a rank, or to nobody."""
    owned = [[] for _ in range(world)]
    for layer, size in enumerate(SIZES):
        cuts = sorted(draw(st.sets(st.integers(1, size - 1), max_size=4))) if size > 1 else []
        for start, end in zip([0, *cuts], [*cuts, size], strict=True):
            owner = draw(st.integers(-1, world - 1))
            if owner >= 0:
                owned[owner].append(Range(layer, start, end - start))
    return [draw(st.permutations(ranges)) for ranges in owned]


sequences = st.integers(1, 5).flatmap(lambda world: st.lists(ownerships(world), min_size=2, max_size=4))


def total(ranks: list[Residuals], layer: int) -> np.ndarray:
    """N times the second residuals plus the first ones, over ranks."""
    result = np.zeros(SIZES[layer])
    for rank in ranks:
        result += rank.first.value(layer)
        for row, owned in enumerate(rank.ranges):
            if owned.layer == layer:
                result[owned.start : owned.end] += len(ranks) * rank.second.value(row).astype(np.float64)
    return result


@examples(60)
@given(sequences, st.integers(0, 2**32 - 1))
def test_nothing_is_lost_when_ranges_change_hands(sequence, seed: int):
    world = len(sequence[0])
    generator = np.random.default_rng(seed)
    ranks = [Residuals(SIZES) for _ in range(world)]
    for rank in ranks:
        for layer in range(len(SIZES)):
            rank.first.set(layer, generator.integers(-99, 99, SIZES[layer]))  # exact in float32
    for ownership in sequence:
        before = [total(ranks, layer) for layer in range(len(SIZES))]
        for rank, ranges in zip(ranks, ownership, strict=True):
            rank.own(ranges, world)
        for layer in range(len(SIZES)):
            assert np.array_equal(total(ranks, layer), before[layer])
        for rank in ranks:
            for row in range(len(rank.ranges)):
                rank.second.set(row, generator.integers(-99, 99, rank.ranges[row].length))


def test_what_stays_with_its_owner_stays_a_second_residual():
    residuals = Residuals([10])
    residuals.own([Range(0, 2, 6)], world=3)
    residuals.second.set(0, np.array([1, 2, 3, 4, 5, 6], np.float32))
    residuals.own([Range(0, 0, 4), Range(0, 6, 4)], world=3)
    assert residuals.second.value(0).tolist() == [0, 0, 1, 2]
    assert residuals.second.value(1).tolist() == [5, 6, 0, 0]
    assert residuals.first.value(0).tolist() == [0, 0, 0, 0, 9, 12, 0, 0, 0, 0]


def test_growing_keeps_what_exists_and_nothing_shrinks():
    residuals = Residuals([4, 0])
    residuals.first.set(0, np.full_like(residuals.first.value(0), 7))
    for sizes in ([4, 6], [0, 0]):
        residuals.grow(sizes)
        assert residuals.first.value(0).tolist() == [7.0] * 4
        assert residuals.first.value(1).tolist() == [0.0] * 6


def test_a_commit_takes_both_residuals_of_a_layer():
    residuals = Residuals([4, 4])
    residuals.own([Range(1, 0, 2), Range(0, 1, 3)], world=2)
    for row in range(2):
        write_next(residuals.first, row, 1.0)
        write_next(residuals.second, row, 2.0)
    residuals.commit(np.array([False, True]))
    assert [residuals.first.value(row)[0] for row in range(2)] == [0.0, 1.0]
    assert [residuals.second.value(row)[0] for row in range(2)] == [2.0, 0.0]


def test_memory_counts_both_residuals():
    residuals = Residuals([10])
    residuals.own([Range(0, 0, 4)], world=2)
    assert residuals.nbytes == 8 * (16 + 16)  # in whole cache lines


# --- many rows at once --------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.data())
def test_what_is_stored_is_loaded_after_the_commit(lengths: list[int], data):
    buffer = DoubleBuffer(lengths)
    for row, length in enumerate(lengths):
        buffer.set(row, 100 * row + np.arange(length))
    rows = np.array(data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True)), dtype=np.int64)
    before = [buffer.value(row).copy() for row in range(len(lengths))]
    expected = np.concatenate([np.zeros(0, np.float32), *(before[row] for row in rows)])
    assert np.array_equal(buffer.load(rows), expected)
    for _ in range(2):  # into either arena
        buffer.store(rows, -expected)
        assert np.array_equal(buffer.load(rows), expected)
        buffer.commit(np.isin(np.arange(len(lengths)), rows))
        expected = -expected
        assert np.array_equal(buffer.load(rows), expected)
    for row in set(range(len(lengths))) - set(rows.tolist()):
        assert np.array_equal(buffer.value(row), before[row])


def test_what_is_loaded_is_a_copy():
    buffer = DoubleBuffer(LENGTHS)
    buffer.load(np.array([0, 2]))[:] = 5
    assert not buffer.value(0).any()


# --- fields -------------------------------------------------------------------------------------------------


def begin(value: float, seen: list[list[float]] | None = None, size: int = 3):
    """A beginning that is filled with ``value`` behind what was there before."""

    def make(old: np.ndarray) -> np.ndarray:
        if seen is not None:
            seen.append(old.tolist())
        fresh = np.full(size, value, np.float32)
        fresh[: min(old.size, size)] = old[:size]
        return fresh

    return make


def never(old: np.ndarray) -> np.ndarray:
    raise AssertionError("the layer has the field already")


def fields_of_two() -> Fields:
    fields = Fields(2)
    fields.arrange([{"q": (3, begin(1.0))}, {}])
    return fields


class TestFields:
    def test_a_new_field_begins_as_its_owner_says(self):
        seen: list[list[float]] = []
        fields = Fields(3)
        fields.arrange([{}, {"q": (3, begin(2.0, seen))}, {"m": (1, begin(4.0, size=1))}])
        assert set(fields.names) == {"q", "m"}
        assert fields["q"].value(1).tolist() == [2.0] * 3
        assert fields["m"].value(2).tolist() == [4.0]
        assert fields["q"].lengths.tolist() == [0, 3, 0]
        assert seen == [[]]
        assert fields.nbytes == 2 * 8 * 16  # in whole cache lines

    def test_a_field_that_stays_keeps_its_value_while_others_come(self):
        fields = fields_of_two()
        fields["q"].set(0, np.full_like(fields["q"].value(0), 7))
        fields.arrange([{"q": (3, never)}, {"q": (3, begin(2.0))}])
        assert fields["q"].value(0).tolist() == [7.0] * 3
        assert fields["q"].value(1).tolist() == [2.0] * 3

    def test_another_size_is_made_from_the_old_value(self):
        seen: list[list[float]] = []
        fields = fields_of_two()
        fields["q"].set(0, np.array([7, 8, 9], np.float32))
        fields.arrange([{"q": (5, begin(0.5, seen, 5))}, {}])
        assert seen == [[7.0, 8.0, 9.0]]
        assert fields["q"].value(0).tolist() == [7.0, 8.0, 9.0, 0.5, 0.5]
        fields.arrange([{"q": (2, begin(0.5, seen, 2))}, {}])
        assert fields["q"].value(0).tolist() == [7.0, 8.0]

    def test_a_committed_value_moves_along(self):
        fields = fields_of_two()
        fields["q"].store(np.array([0]), np.full(3, 6.0, np.float32))
        fields.commit(np.array([True, True]))
        fields.arrange([{"q": (3, never)}, {"q": (3, begin(1.0))}])
        assert fields["q"].value(0).tolist() == [6.0] * 3

    def test_a_field_that_the_plan_dropped_waits_for_the_day_it_is_used_again(self):
        fields = fields_of_two()
        fields["q"].set(0, np.full_like(fields["q"].value(0), 7))
        fields.arrange([{}, {}])
        fields["q"].store(np.array([0]), np.full(3, 6.0, np.float32))
        fields.commit(np.array([True, True]))  # nobody wrote a next value
        assert fields["q"].value(0).tolist() == [7.0] * 3
        fields.arrange([{"q": (3, never)}, {}])
        assert fields["q"].value(0).tolist() == [7.0] * 3
        fields["q"].store(np.array([0]), np.full(3, 6.0, np.float32))
        fields.commit(np.array([True, True]))
        assert fields["q"].value(0).tolist() == [6.0] * 3

    def test_a_commit_takes_the_layers_of_the_mask(self):
        fields = Fields(2)
        fields.arrange([{"q": (1, begin(1.0, size=1))}] * 2)
        fields["q"].store(np.array([0, 1]), np.array([5, 6], np.float32))
        fields.commit(np.array([False, True]))
        assert fields["q"].load(np.array([0, 1])).tolist() == [1.0, 6.0]

    def test_what_is_put_is_used_when_the_plan_asks_for_it(self):
        fields = fields_of_two()
        fields.put("q", {1: np.array([3, 4], np.float32)})
        assert fields["q"].lengths.tolist() == [0, 2]
        fields.commit(np.array([True, True]))  # not in use yet
        assert fields["q"].value(1).tolist() == [3.0, 4.0]
        fields.arrange([{}, {"q": (2, never)}])
        fields["q"].store(np.array([1]), np.array([5, 6], np.float32))
        fields.commit(np.array([True, True]))
        assert fields["q"].value(1).tolist() == [5.0, 6.0]
