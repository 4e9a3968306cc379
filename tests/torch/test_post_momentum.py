"""The optimizer of PowerSGD's paper, beside its formula."""

from __future__ import annotations

import pytest
import torch

import gradcomp.torch as gc
from gradcomp import ConfigError


def test_it_follows_lines_11_to_13():
    x = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    idle = torch.nn.Parameter(torch.ones(2))
    optimizer = gc.PostMomentumSGD([x, idle], lr=0.1, momentum=0.5, weight_decay=0.01)
    want, m = x.detach().clone(), torch.zeros(3)
    for step in range(4):
        gradient = torch.tensor([0.5, -1.0, 2.0]) * (step + 1)
        x.grad = gradient.clone()
        optimizer.step()
        update = gradient + 0.01 * want
        m = 0.5 * m + update
        want = want - 0.1 * (update + m)
        torch.testing.assert_close(x.detach(), want)
        assert torch.equal(x.grad, gradient)
    assert torch.equal(idle.detach(), torch.ones(2))


def test_it_saves_its_momentum_and_takes_a_closure():
    x = torch.nn.Parameter(torch.ones(3))
    first, second = (gc.PostMomentumSGD([x], lr=0.1) for _ in range(2))

    def loss():
        x.grad = None
        value = (x**2).sum()
        value.backward()
        return value

    assert first.step(loss) == 3.0
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.state[x]["momentum_buffer"], first.state[x]["momentum_buffer"])


@pytest.mark.parametrize(
    "settings", [{"lr": -1.0}, {"lr": 1.0, "momentum": 1.0}, {"lr": 1.0, "weight_decay": -1.0}]
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ConfigError, match="impossible"):
        gc.PostMomentumSGD([torch.nn.Parameter(torch.ones(1))], **settings)
