"""Which cases the default run takes, which only ``--full`` does, and which run while other workers wait.

The default run takes cases by five rules:

1. *Worlds.* Of a parameter ``world``, the values 2 and 3. What has neither keeps its smallest world.
2. *Families.* Of a parameter that is, or names, a row of ``configurations.ROWS``, one row for each class of compressor:
   the first that the test takes.
3. *Products.* Of a product of three and more parameters, few cases in which every two values occur together
   (:func:`pairwise`). Parameters that one list names together are one, but for those that a mark ``factors`` names.
4. *Examples.* Hypothesis draws a quarter of the examples that :func:`examples` names.
5. *Launches.* A test marked ``full`` is left out. It starts processes of its own, and what it checks is checked by
   another launch of the default run in another world, under another launcher, or in one process; or it runs a whole
   program of benchmarks/ or examples/.
6. *Values.* Of a list of cases that is given to :func:`every_value`, few in which every value occurs. Cases of other
   lists are marked ``full`` where a value is of the same kind as one that stays; the list says of which.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

WORLDS = (2, 3)
"""The worlds of the default run."""

#: Whether Hypothesis draws all examples; set before test modules are imported.
all_examples = True


def examples(most: int) -> Any:
    """Hypothesis draws so many examples under ``--full``, else a quarter, but at least 8; no deadline."""
    from hypothesis import settings

    return settings(max_examples=most if all_examples else min(most, max(8, most // 4)), deadline=None)


Cases = list[pytest.Item]


def default_run(
    items: Sequence[pytest.Item], family_of: Callable[[Any], Hashable | None]
) -> set[pytest.Item]:
    """The items that the rules leave. ``family_of`` is asked about values of parameters: None is not a row."""
    tests: dict[str, Cases] = defaultdict(list)
    for item in items:
        if not item.get_closest_marker("full"):
            tests[item.nodeid.split("[")[0]].append(item)
    return {item for cases in tests.values() for item in _of_one_test(cases, family_of)}


def part_of(group: str, parts: int) -> int:
    """The part, of so many, that a group of cases is in: the same one in every process."""
    return zlib.crc32(group.encode()) % parts


def _of_one_test(cases: Cases, family_of: Callable[[Any], Hashable | None]) -> Cases:
    if not hasattr(cases[0], "callspec"):
        return cases
    cases = _few_worlds(cases)
    for parameter in _parameters(cases[0]):
        cases = _one_of_each_family(cases, parameter, family_of)
    return [cases[i] for i in pairwise([_values(case) for case in cases])]


def _parameters(case: pytest.Item) -> dict[str, Any]:
    found: dict[str, Any] = case.callspec.params  # type: ignore[attr-defined]
    return found


def _few_worlds(cases: Cases) -> Cases:
    worlds: dict[Any, set[int]] = defaultdict(set)  # by all else
    for case in cases:
        worlds[_but_world(case)].add(_parameters(case).get("world", 0))
    kept = {key: found & set(WORLDS) or {min(found)} for key, found in worlds.items()}
    return [case for case in cases if _parameters(case).get("world", 0) in kept[_but_world(case)]]


def _but_world(case: pytest.Item) -> tuple[Hashable, ...]:
    return tuple(_key(value) for name, value in _parameters(case).items() if name != "world")


def _one_of_each_family(cases: Cases, parameter: str, family_of: Callable[[Any], Hashable | None]) -> Cases:
    values = [_parameters(case).get(parameter) for case in cases]
    families = [family_of(value) for value in values]
    if None in families:
        return cases
    first: dict[Any, Any] = {}
    for family, value in zip(families, values, strict=True):
        first.setdefault(family, value)
    kept = {id(value) for value in first.values()}
    return [case for case, value in zip(cases, values, strict=True) if id(value) in kept]


def _values(case: pytest.Item) -> tuple[Hashable, ...]:
    """What each parametrisation gives a case; parameters that one list names together are one value."""
    values = _parameters(case)
    together = []
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        together.append([n.strip() for n in names.split(",")] if isinstance(names, str) else list(names))
    factors = {name for mark in case.iter_markers("factors") for name in mark.args}
    listed = {name for names in together for name in names}
    together += [[name] for name in values if name not in listed]  # of fixtures
    split = [[n] for names in together for n in names if n in factors]
    whole = [[n for n in names if n not in factors] for names in together]
    return tuple(tuple(_key(values[n]) for n in names) for names in [*whole, *split] if names)


def _key(value: object) -> Hashable:
    return repr(value) if isinstance(value, (int, float, str, bytes, type(None))) else id(value)


def pairwise(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """The places, in order, of few cases in which every two values occur together that do so in any case.

    A case holds one value for each parameter. The next one taken has the most pairs that are still missing; of equals,
    it is the first.
    """
    if len(cases[0]) < 3:
        return list(range(len(cases)))
    return _cover([set(itertools.combinations(enumerate(case), 2)) for case in cases])


def every_value(cases: Iterable[Any], values_of: Callable[[Any], Iterable[Hashable]] = tuple) -> list[Any]:
    """The cases, for ``parametrize``: all but few, in which every value of any of them occurs, are marked ``full``.

    ``values_of`` gives what a case has, in places of its own; by default the case is a tuple of values.
    """
    listed = list(cases)
    taken = _cover([set(enumerate(values_of(case))) for case in listed])
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)), marks=[] if i in taken else pytest.mark.full
        )
        for i, case in enumerate(listed)
    ]


def _cover(sets: Sequence[Set[Any]]) -> list[int]:
    """The places, in order, of few sets whose union is that of all. The next taken has most that is still missing."""
    missing = set().union(*sets)
    taken = []
    while missing:
        best = max(range(len(sets)), key=lambda i: len(missing & sets[i]))
        missing -= sets[best]
        taken.append(best)
    return sorted(taken)


# ------------------------------------------------------------------------------------------ turns of workers

_DOOR = Path(__file__)
_TURN = Path(__file__).with_name("conftest.py")


@contextlib.contextmanager
def turn(exclusive: bool) -> Iterator[None]:
    """Hold a turn: shared with other workers, or exclusive. Without workers there is nobody to wait for.

    A turn is a lock of a file of this folder. Whoever waits for an exclusive one keeps the door, through which all
    turns begin, so that no worker that goes from test to test overtakes it.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with contextlib.ExitStack() as held:
        with contextlib.ExitStack() as waiting:
            _lock(_DOOR, fcntl.LOCK_EX, waiting)
            _lock(_TURN, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, held)
        yield


def _lock(path: Path, kind: int, stack: contextlib.ExitStack) -> None:
    file = stack.enter_context(path.open("rb"))
    fcntl.flock(file, kind)
    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing does not, where a test has forked
