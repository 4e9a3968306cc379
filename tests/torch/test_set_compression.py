"""``set_compression`` under real processes: back to exact gradients in mid-run, or a typed error on every rank."""

from __future__ import annotations

import numpy as np
import preloaded
import pytest
import torch
from batch import on_ranks
from launching import run_ranks
from small_torch import FRONTENDS, assert_same_on_all_ranks, bits_of, everything, wrap

import gradcomp.torch as gc

STEPS, SWITCH = 12, 5


class Linear(torch.nn.Module):
    """Its gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(48, 40))
        self.bias = torch.nn.Parameter(torch.randn(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T + self.bias).sum(0).mul(torch.linspace(-1, 1, 48)).sum()


def run(model, wrapped, optimizer, switching, first: int = 0, last: int = STEPS) -> list[torch.Tensor]:
    for step in range(first, last):
        if step == SWITCH:
            switching()
        optimizer.zero_grad()
        draw = torch.Generator().manual_seed(1000 * step + gc.rank())
        wrapped(torch.randn(16, 40, generator=draw)).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def distributed(compression, switch_to=None, last: int = STEPS, **arguments):
    model = Linear()
    optimizer = wrap(model, everything(compression), **arguments)
    switch = (lambda: None) if switch_to is None else (lambda: optimizer.set_compression(switch_to))
    return optimizer, run(model, model, optimizer, switch, last=last), model


def distance(found, expected) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("controller", [None, "linear:every_steps=3"])
@pytest.mark.parametrize("compression", ["quantize:bits=2,rounding=nearest", "topk:density=0.02"])
@on_ranks(2)
def test_parameters_end_where_exact_gradients_lead(compression, controller):
    expected = distributed("none")[1]
    assert distance(distributed(compression, controller=controller)[1], expected) > 0.01
    optimizer, found, _ = distributed(compression, "none", controller=controller)
    assert distance(found, expected) < 1e-4
    assert {a.compressor for a in optimizer.plan().assignments} == {"none"}
    assert_same_on_all_ranks(found)


@on_ranks(2)
def test_under_the_hook():
    expected = distributed("none")[1]
    model = Linear()
    wrapped, optimizer, state = FRONTENDS["hook"](model, everything("topk:density=0.02"))
    found = run(model, wrapped, optimizer, lambda: state.set_compression("none"))
    assert distance(found, expected) < 1e-4


@on_ranks(2)
def test_saved_on_the_way_it_goes_on():
    _, expected, _ = distributed("topk:density=0.02", "none")
    for at in (SWITCH, SWITCH + 1, SWITCH + 2):
        optimizer, _, model = distributed("topk:density=0.02", "none", last=at)
        if at == SWITCH:
            optimizer.set_compression("none")  # before a step has been made with it
        again = Linear()
        again.load_state_dict(model.state_dict())
        resumed = wrap(again, everything("none"))
        resumed.load_compression_state(optimizer.compression_state())
        found = run(again, again, resumed, lambda: None, first=at)
        assert bits_of(found) == bits_of(expected)


@on_ranks(2)
def test_added_parameters_travel_under_it():
    optimizer, _, model = distributed("topk:density=0.02", "none")
    extra = torch.nn.Parameter(torch.randn(32, 32))
    optimizer.add_param_group({"params": [extra], "names": ["extra"]})
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 40)) + (extra * gc.rank()).sum()).backward()
        optimizer.step()
    np.testing.assert_array_equal(extra.grad.numpy(), 0.5)
    assert optimizer.plan().by_layer["extra"].compressor == "none"


@on_ranks(2)
def test_what_cannot_be():
    optimizer, _, model = distributed("topk:density=0.02", last=2)
    for bad in ("nonsense", 3, "auto"):
        with pytest.raises(gc.ConfigError):
            optimizer.set_compression(bad)
    model(torch.ones(2, 40)).backward()
    with pytest.raises(gc.StateError, match="a step is open"):
        optimizer.set_compression("none")
    optimizer.step()
    assert optimizer.plan().by_layer["weight"].compressor.startswith("topk")


PROGRAM = """
import torch
import gradcomp.torch as gc

gc.init(timeout_seconds=60, log_level="error")
torch.manual_seed(0)
model = torch.nn.Linear(40, 40)
optimizer = gc.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "topk:density=0.1"
)
try:
    for step in range(40):
        if step == 5 and gc.rank() != 1:
            optimizer.set_compression("none")
        optimizer.zero_grad()
        model(torch.ones(4, 40)).square().mean().backward()
        optimizer.step()
    print("no error")
except gc.GradcompError as error:
    print(f"{type(error).__name__} after {step}: {error}", flush=True)
"""


def test_a_rank_that_does_not_call_ends_in_typed_errors_on_all():
    ends = run_ranks(PROGRAM, 3, timeout=90, imported=preloaded.TORCH)
    first, second, third = (end.stdout or end.stderr for end in ends)
    for text in (first, third):
        assert text.startswith("PlanMismatchError after 5: ")
        assert "and another rank did not: every rank has to call it" in text
    assert second.startswith("TransportError after ")
    assert "set_compression()" in second
