"""The order of exchange buckets where forward waits for single means: urgent ones overtake, and all ranks agree."""

from __future__ import annotations

import numpy as np
import pytest

from gradcomp.compress import Policy
from gradcomp.core.errors import WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange.layout import build_layout
from gradcomp.exchange.priorities import LAST_MEASURED, Priorities
from gradcomp.transport.inprocess import World

LAYERS = [LayerSpec(f"layer{i}", (64,)) for i in range(5)]


def layout():
    """A bucket for each layer, in the order in which backward reaches them."""
    return build_layout(LAYERS, Policy("none").plan(LAYERS), [4, 3, 2, 1, 0], frozenset(), 16)


def run(*programs):
    """Run one program per rank to the end, by turns."""
    results, running = {}, dict(enumerate(programs))
    while running:
        for rank, program in list(running.items()):
            try:
                next(program)
            except StopIteration as end:
                results[rank] = end.value
                del running[rank]
    return results


def agreed(ready, seconds, uses, worlds=2, steps=LAST_MEASURED + 1):
    """What ranks make of such steps of rank 0: when each bucket is ready, and how long it travels."""
    ranks = [Priorities(5, lambda own=rank: uses if own == 0 else []) for rank in range(worlds)]
    made, transports = layout(), World(worlds).transports()
    travel = tuple(range(5))
    for step in range(steps):
        times = []
        for rank in range(worlds):
            complete, ended, free = np.array(ready, float) + 100 * step, [], 0.0
            for at in complete + 7.0 * rank:  # other ranks see other times
                free = max(free, at) + seconds
                ended.append(free)
            times.append((100.0 * step, complete + 7.0 * rank, np.array(ended)))
        done = run(
            *(p.after_step(made, travel, *t, x) for p, t, x in zip(ranks, times, transports, strict=True))
        )
        assert set(done.values()) == {step == LAST_MEASURED}
    return [each.order(made) for each in ranks]


@pytest.mark.parametrize(
    ("ready", "seconds", "expected"),
    [
        ([0, 1, 2, 3, 4], 0.5, (0, 1, 2, 3, 4)),  # nothing waits: as gradients come
        ([0, 1, 2, 3, 4], 2.0, (0, 2, 4, 3, 1)),  # whatever is needed first of those that are there
        ([0, 1, 2, 3, 4], 9.0, (0, 4, 3, 2, 1)),  # all are there when the first one has been sent
        ([3, 3, 3, 3, 3], 1.0, (4, 3, 2, 1, 0)),
    ],
)
def test_of_the_buckets_that_are_there_the_one_that_forward_needs_first_travels(ready, seconds, expected):
    assert agreed(ready, seconds, [0, 1, 2, 3, 4]) == [expected] * 2
    assert agreed(ready, seconds, [0, 1, 2, 3, 4], steps=LAST_MEASURED) == [(0, 1, 2, 3, 4)] * 2


def test_layers_that_forward_does_not_use_travel_last_and_uses_count_once():
    assert agreed([0] * 5, 1.0, [2, 4, 2, 0]) == [(2, 0, 4, 1, 3)] * 2


@pytest.mark.parametrize("bad", [np.nan, -1.0])
def test_priorities_that_are_no_numbers_from_zero_are_refused(bad):
    one, transport = Priorities(5, lambda: range(5)), World(1).transports()[0]
    one._ready, one._seconds_per_byte = [np.full(5, bad)], [1.0]
    with pytest.raises(WireFormatError, match="priorities"):
        run(one._agree(transport))
