"""Many layers in one exchange bucket: they are submitted together, and the engine calls nothing for each of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gradcomp import Compressor, Identity, LayerSpec, Quantize, StateError, TopK
from gradcomp.exchange.arrivals import Arrivals, Submission
from gradcomp.exchange.layout import build_layout
from gradcomp.testing.simulation import Simulation, plan_for

COMPRESSORS = {"none": Identity(), "4 bits": Quantize(4), "TopK": TopK(0.01)}


def layers_of(count: int) -> list[LayerSpec]:
    return [LayerSpec(f"layer{i}", (25, 40)) for i in range(count)]


class Calls:
    """Counts calls of Python's and of C functions in what it wraps."""

    def __init__(self) -> None:
        self.count = 0

    def counted(self, function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            gc.disable()  # Hypothesis calls functions of its own when garbage is collected
            sys.setprofile(self._note)
            try:
                return function()
            finally:
                sys.setprofile(None)
                gc.enable()

        return call

    def _note(self, _frame: Any, event: str, _what: Any) -> None:
        self.count += event in ("call", "c_call")


def calls_of_a_step(compressor: Compressor, layers: int) -> int:
    """Calls inside of ``Pipeline.poll``, which is all that the engine's thread does for a step, in the third step."""
    ranks = Simulation(layers_of(layers), compressor)
    ranks.step()
    ranks.step()
    assert [len(pipeline.layout.buckets) for pipeline in ranks.pipelines] == [1, 1]
    calls = Calls()
    for pipeline in ranks.pipelines:
        pipeline.poll = calls.counted(pipeline.poll)  # type: ignore[method-assign]
    ranks.step()
    return calls.count


@pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)
def test_the_engine_makes_as_many_calls_for_200_layers_as_for_20(compressor: Compressor):
    few = calls_of_a_step(compressor, 20)
    assert few > 50
    assert calls_of_a_step(compressor, 200) == few


# --- layers that are submitted together ---------------------------------------------------------------------

SLICED = [LayerSpec("large", (300,)), *(LayerSpec(f"small{i}", (40,)) for i in range(8))]


def opened() -> Arrivals:
    """Arrivals of a step whose first layer travels in several buckets."""
    layout = build_layout(SLICED, plan_for(SLICED, Quantize(4, 32)), range(len(SLICED)), frozenset(), 100)
    assert len(layout.buckets_of[0]) > 1
    arrivals = Arrivals(SLICED)
    arrivals.open(layout)
    return arrivals


def seen(arrivals: Arrivals) -> list[Any]:
    """All that the engine's thread and the order of layers take from arrivals."""
    buckets = range(len(arrivals.completed))
    return [
        arrivals.gradients.tolist(),
        arrivals.outputs.tolist(),
        arrivals.states.tolist(),
        arrivals.events,
        arrivals.order,
        [(arrivals.ready(bucket), arrivals.completed[bucket] > 0) for bucket in buckets],
    ]


@pytest.mark.parametrize("groups", [[[3, 0, 1], [2, 8, 7], [4, 5, 6]], [[5], [0], [1, 2, 3, 4, 6, 7]], [[]]])
@pytest.mark.parametrize("event", [None, "event"])
def test_layers_that_are_submitted_together_arrive_as_one_by_one(groups: list[list[int]], event: object):
    together, single = opened(), opened()
    woken: list[int] = []
    together.bucket_complete = lambda: woken.append(sum(map(together.ready, range(len(together.completed)))))
    for group in groups:
        ready = seen(together)[-1]
        addresses = np.array([1000 * (layer + 1) for layer in group], dtype=np.uint64)
        together.submit_all(group, addresses, "kept", event)
        for layer, address in zip(group, addresses.tolist(), strict=True):
            single.submit(Submission(layer, address, address, "kept", event))
        assert seen(together) == seen(single)
        assert (seen(together)[-1] != ready) == bool(woken), "the engine wakes for a bucket that is complete"
        assert woken[1:] == []
        woken.clear()


@pytest.mark.parametrize(("before", "group"), [([], [1, 2, 1]), ([2], [1, 2]), ([1, 0], [4, 0])])
def test_a_layer_that_is_submitted_twice_together_is_refused_by_name(before: list[int], group: list[int]):
    arrivals = opened()
    for layer in before:
        arrivals.submit(Submission(layer, 8, 8))
    twice = next(layer for layer in group if layer in before or group.count(layer) > 1)
    with pytest.raises(StateError, match=f"layer '{SLICED[twice].name}' was submitted twice in one step"):
        arrivals.submit_all(group, np.full(len(group), 8, dtype=np.uint64), None)


def test_layers_that_come_together_after_their_step_closed_are_refused():
    arrivals = opened()
    arrivals.flush()
    with pytest.raises(StateError, match="'small2' has a gradient after its step closed"):
        arrivals.submit_all([3, 5], np.full(2, 8, dtype=np.uint64), None)
