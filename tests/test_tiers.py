"""The rules of the default run, the turns of its workers, and ranks that are forks."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import tiers


class Case(SimpleNamespace):
    """One that can be in a set."""

    __hash__ = object.__hash__


def case(test: str, marks: tuple[Any, ...] = (), **parameters: Any) -> Any:
    """As much of a test's case as the rules look at."""

    def iter_markers(name: str) -> list[Any]:
        return [mark for mark in marks if mark.name == name]

    return Case(
        nodeid=f"{test}[{parameters}]",
        callspec=SimpleNamespace(params=parameters),
        iter_markers=iter_markers,
        get_closest_marker=lambda name: next(iter(iter_markers(name)), None),
    )


def kept(cases: list[Any]) -> list[dict[str, Any]]:
    """The parameters of the cases of the default run; tuples are rows, and begin with their family."""
    default = tiers.default_run(cases, lambda value: value[0] if isinstance(value, tuple) else None)
    return [one.callspec.params for one in cases if one in default]


def test_every_two_values_occur_together_in_few_cases():
    cases = list(itertools.product("abc", range(4), "xy", range(3)))
    chosen = [cases[i] for i in tiers.pairwise(cases)]
    for one, other in itertools.combinations(range(4), 2):
        assert {(c[one], c[other]) for c in chosen} == {(c[one], c[other]) for c in cases}
    assert len(chosen) < len(cases) / 3


def test_each_of_five_parts_has_about_a_fifth_of_all_groups():
    parts = [tiers.part_of(f"tests/core/test_{i}.py", 5) for i in range(500)]
    assert all(70 < parts.count(part) < 130 for part in range(5))
    assert sum(map(parts.count, range(5))) == 500


def test_pairs_that_no_case_has_are_not_asked_for():
    cases = [(a, b, c) for a, b, c in itertools.product(range(3), repeat=3) if a <= b]
    assert tiers.pairwise(cases)


def test_every_value_occurs_in_few_cases_and_the_others_are_full():
    cases = list(itertools.product("abc", range(4)))
    params = tiers.every_value(cases)
    assert [param.values for param in params] == cases
    taken = [param.values for param in params if not param.marks]
    assert len(taken) == 4
    assert [set(column) for column in zip(*taken, strict=True)] == [set("abc"), set(range(4))]
    assert {mark.name for param in params for mark in param.marks} == {"full"}


def test_worlds_are_2_and_3_or_the_smallest():
    found = kept([case("t", world=w, engine=e) for e in ("one", "two") for w in (1, 2, 3, 4)])
    assert [one["world"] for one in found] == [2, 3, 2, 3]
    assert kept([case("t", world=w, servers=4) for w in (7, 9)]) == [{"world": 7, "servers": 4}]


def test_a_row_of_each_family_is_kept_with_all_else():
    found = kept([case("t", row=row, world=w) for row in (("a", 1), ("a", 2), ("b", 1)) for w in (2, 3)])
    assert [(one["row"], one["world"]) for one in found] == [
        (("a", 1), 2), (("a", 1), 3), (("b", 1), 2), (("b", 1), 3),
    ]  # fmt: skip


def test_a_list_of_cases_is_kept_whole_unless_it_is_said_to_be_a_product():
    listed = pytest.mark.parametrize(("one", "other", "third"), []).mark
    values = list(itertools.product(range(3), repeat=3))

    def cases(*marks: Any) -> list[Any]:
        return [case("t", marks, one=a, other=b, third=c) for a, b, c in values]

    assert len(kept(cases(listed))) == 27
    assert len(kept(cases(listed, pytest.mark.factors("one", "other", "third").mark))) < 14


def test_what_is_marked_full_is_left_out():
    assert kept([case("t", (pytest.mark.full.mark,), x=1), case("t", x=2)]) == [{"x": 2}]


def test_an_exclusive_turn_waits_for_the_others(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "one")
    for name in ("_DOOR", "_TURN"):
        monkeypatch.setattr(tiers, name, tmp_path / name)
        (tmp_path / name).touch()
    seen, began = [], threading.Event()

    def turn(name: str, exclusive: bool) -> None:
        began.set()
        with tiers.turn(exclusive):
            seen.append(name)

    with tiers.turn(exclusive=False):
        with tiers.turn(exclusive=False):
            pass  # shared turns do not exclude each other
        waiting = threading.Thread(target=turn, args=("alone", True))
        waiting.start()
        began.wait()
        seen.append("shared")
    waiting.join()
    assert seen == ["shared", "alone"]
