"""Models of many small layers: autograd's hook is the only call of Python for a layer, and buckets begin in time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from batch import on_ranks
from small_torch import assert_exact, reference_mean, small, wrap

import gradcomp
import gradcomp.torch as gc

PACKAGE = str(Path(gradcomp.__file__).parent)

COMPRESSIONS = {"none": "none", "4 bits": "quantize:bits=4,bucket_size=64", "TopK": "topk:density=0.1"}


class Sums(torch.nn.Module):
    """Adds its layers one by one, so that their gradients come one by one, the last layer's first."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.zeros(8, 8) for _ in range(layers))

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(8, 8)
        for layer in self.layers:
            total = total + layer
        return (total * weights).sum()


def weights(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + gc.rank()))


class Calls:
    """Counts the calls of gradcomp's functions on this thread, in a ``with`` block, by function."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, _what: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            name = frame.f_code.co_qualname
            self.found[name] = self.found.get(name, 0) + 1


def calls_of_a_step(model: torch.nn.Module, optimizer: Any) -> dict[str, int]:
    """The calls in the third step, whose order of layers is known."""
    for step in range(3):
        with Calls() as calls:
            optimizer.zero_grad()
            model(weights(step)).backward()
            optimizer.step()
    return calls.found


@pytest.mark.parametrize("compression", COMPRESSIONS.values(), ids=COMPRESSIONS)
@on_ranks(2)
def test_the_hook_is_the_only_call_of_python_for_a_layer(compression):
    models = [Sums(20), Sums(200)]
    optimizers = [wrap(model, small(compression)) for model in models]
    few, many = map(calls_of_a_step, models, optimizers)
    more = {name: count - few.get(name, 0) for name, count in many.items() if count != few.get(name)}
    more.pop("Engine.alive", None)  # a wait asks for it once a second
    assert more == {"Arrived.hook.<locals>.arrived": 180}, more


@on_ranks(2, "three layers a bucket", slice_elements=48)
def test_a_bucket_is_ready_as_soon_as_its_last_layer_has_come():
    model = Sums(12)
    optimizer = wrap(model)
    arrivals = optimizer._gradcomp.exchanger.pipeline.arrivals
    ready: list[int] = []
    for layer in model.layers:
        layer.register_post_accumulate_grad_hook(
            lambda _: ready.append(sum(map(arrivals.ready, range(len(arrivals.completed)))))
        )
    for step in range(3):  # the order of the first step is not known before
        ready.clear()
        optimizer.zero_grad()
        model(weights(step)).backward()
        optimizer.step()
    assert len(arrivals.completed) == 4
    assert ready == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


@on_ranks(2)
def test_layers_that_come_in_two_passes_of_a_step_are_exchanged_together():
    model = Sums(6)
    for parameter in model.parameters():
        parameter.grad = None
    expected = reference_mean([weights(i % 2) for i in range(6)])
    optimizer = wrap(model, finish="step", lr=0.0)
    for part in range(2):
        sum((layer * weights(part)).sum() for layer in list(model.layers)[part::2]).backward()
    optimizer.step()
    assert_exact(expected, model.parameters())


@on_ranks(2)
def test_a_gradient_keeps_its_memory_while_it_is_exchanged_though_a_hook_gives_it_another_one():
    model = Sums(4)
    expected = reference_mean([weights(0) for _ in range(4)])
    optimizer = wrap(model)
    replaced: list[torch.Tensor] = []

    def replace(parameter: torch.Tensor) -> None:
        replaced.append(parameter.grad)
        parameter.grad.data = torch.full((8, 8), 7.0)

    # Its own bucket is complete with the last layer, whose hook runs after gradcomp's.
    model.layers[0].register_post_accumulate_grad_hook(replace)
    model(weights(0)).backward()
    assert_exact(expected[1:], list(model.layers)[1:])
    assert torch.equal(replaced[0], torch.full((8, 8), 7.0))
    optimizer.zero_grad()
