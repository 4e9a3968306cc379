"""Which pending calls of the ranks belong together, and what travels until they have found out."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp.core.errors import ConfigError, PlanMismatchError, WireFormatError
from gradcomp.exchange.request_group import Call, Inline
from gradcomp.job import call_matching
from gradcomp.job.call_matching import Match, inline_bytes, match


def together(
    ranks: Sequence[Sequence[Call]], waits: Sequence[Sequence[int]] | None = None
) -> tuple[list[list[Match]], int]:
    """What each rank finds, and the bytes that each rank's rounds take."""
    size = len(ranks)
    rounds: list[Generator[Any, None, list[Match]]] = [
        match(calls, waits[rank] if waits else (), rank, size) for rank, calls in enumerate(ranks)
    ]
    nbytes = 0
    while True:
        issued, found = [], []
        for one in rounds:
            try:
                issued.append(next(one))
            except StopIteration as end:
                found.append(end.value)
        if found:
            assert not issued, "all ranks end in the same round"
            return found, nbytes
        assert len({tuple(each.counts) for each in issued}) == 1
        nbytes += len(issued[0].buffer)
        start = 0
        for rank, count in enumerate(issued[0].counts):
            part = issued[rank].buffer[start : start + count].copy()
            for each in issued:
                each.buffer[start : start + count] = part
            start += count


def named(name: str | None, text: str = "", number: int = 0, problem: str | None = None) -> Call:
    return Call("test", [text or f"test({name})"], number, problem, name)


def test_problems_and_differences_are_told_to_all_with_the_numbers_of_ranks_also_where_one_has_joined():
    stands_in = Call("join", ["join()"], stand_in=lambda _: None)
    for calls, kind, text in (
        ([named("a"), named("a", problem="it is odd")], ConfigError, "rank 2: it is odd"),
        ([named("a", "one"), named("a", "two")], PlanMismatchError, "rank 1 has one, rank 2 has two"),
    ):
        joined, *others = together([[stands_in], *([call] for call in calls)], waits=[[0], [0], [0]])[0]
        assert all(isinstance(one[0].error, kind) and text in str(one[0].error) for one in others)
        assert all(isinstance(one.error, kind) for one in joined)


@pytest.mark.parametrize(("world", "room"), [(2, 4096), (3, 4096), (7, 2336), (1000, 16)])
def test_calls_in_one_order_cost_a_header_and_room_for_small_arrays(world: int, room: int):
    calls = [named("a"), named("b"), named(None)]
    found, nbytes = together([calls, calls[:1], *[calls[:2]] * (world - 2)])
    assert found == [[Match(0, [0] * world)]] * world
    assert inline_bytes(world) == room
    assert nbytes == world * (48 + room)


def test_inline_arrays_of_every_rank_come_with_the_comparison():
    def call(name: str, rank: int, lengths: Sequence[int]) -> Call:
        arrays = [np.full(length, 10 * rank + place, np.uint8) for place, length in enumerate(lengths)]
        return Call("test", [name], key=name, inline=Inline(arrays, lambda _: None))

    for lengths in ((), (0,), (3, 0, 5), (inline_bytes(2) - 1, 1)):
        found, _ = together([[call("a", rank, lengths), named("b")] for rank in range(2)])
        expected = [
            b"".join(bytes([10 * rank + place]) * length for place, length in enumerate(lengths))
            for rank in range(2)
        ]
        for (one,) in found:
            assert one.inline is not None
            assert [bytes(data) for data in one.inline] == expected
    # By name, out of order, a call makes a collective of its own.
    a, b = call("a", 0, [1]), call("b", 0, [1])
    found, _ = together([[a, b], [b, a]])
    assert [each.inline for one in found for each in one] == [None] * 4


@given(st.permutations(list(range(6))), st.permutations(list(range(6))), st.integers(0, 6))
@examples(40)
def test_all_that_every_rank_has_is_made_in_one_order(first: list[int], second: list[int], held: int):
    """Rank 1 has called only some of them so far."""
    orders = [first, second[:held] or second[:1]]
    found, _ = together([[named(str(n), number=10 * r + n) for n in order] for r, order in enumerate(orders)])
    made = [[order[each.place] for each in one] for order, one in zip(orders, found, strict=True)]
    assert made[0] == made[1]
    if orders[0][0] != orders[1][0]:  # else the first alone, at no cost
        assert made[0] == [n for n in first if n in orders[1]]
    assert all(each.numbers == [n, 10 + n] for n, each in zip(made[0], found[0], strict=True))


def test_calls_without_a_name_are_matched_in_order():
    first = [named(None, "one"), named("x"), named(None, "two")]
    second = [named("x"), named(None, "one"), named(None, "two")]
    found, _ = together([first, second])
    assert [each.place for each in found[0]] == [0, 1, 2]
    assert [each.place for each in found[1]] == [1, 0, 2]


def test_a_name_that_stands_twice_is_matched_in_order():
    twice = [named("x", "first"), named("x", "second")]
    found, _ = together([[named("y"), *twice], [*twice, named("y")]])
    assert [each.place for each in found[0]] == [0, 1, 2]
    assert [each.place for each in found[1]] == [2, 0, 1]
    assert all(each.error is None for each in found[0])


def test_what_differs_is_told_to_all_and_the_rest_is_made():
    found, _ = together([[named("x", "of 3"), named("y")], [named("y"), named("x", "of 4")]])
    for one, place in zip(found, (0, 1), strict=True):
        wrong = next(each for each in one if each.place == place)
        assert isinstance(wrong.error, PlanMismatchError)
        assert "rank 0 has of 3, rank 1 has of 4" in str(wrong.error)
        assert [each.error for each in one if each is not wrong] == [None]


def test_different_calls_wait_for_each_other():
    found, _ = together([[named("x")], [named("y")]])
    assert found == [[], []]
    found, _ = together([[named("x")], [named("y")]], [[0], []])
    assert found == [[], []], "rank 1 may still call it"


def test_ranks_that_all_wait_hear_what_each_waits_for():
    found, _ = together([[named("x"), named("z")], [named("y")]], [[0], [0]])
    assert [[each.place for each in one] for one in found] == [[0], [0]]
    for one in found:
        assert isinstance(one[0].error, PlanMismatchError)
        assert "rank 0 has test(x), rank 1 has test(y)" in str(one[0].error)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"{}", b'{"calls": 3, "waits": []}', b'{"calls": [[1, "x", 0, null]], "waits": []}',
        b'{"calls": [["x", "x", "y", null]], "waits": []}', b'{"calls": [["x"]], "waits": []}',
        b'{"calls": [["x", "x", 0, null]], "waits": [1]}', b"\xff\xfe\xff",
        b'{"calls": [[[], "x", 0, null]], "waits": []}',
    ],
)  # fmt: skip
def test_what_is_no_list_is_a_wire_format_error(text: bytes):
    with pytest.raises(WireFormatError, match="malformed"):
        call_matching._List.of(text)


def test_lists_of_impossible_lengths_are_refused():
    rounds = match([named("x")], (), 0, 2)
    headers = next(rounds)
    headers.buffer[-48:] = 1
    lengths = next(rounds)
    lengths.buffer.view(np.int64)[1] = 1 << 40
    with pytest.raises(WireFormatError, match="lists of calls"):
        next(rounds)
