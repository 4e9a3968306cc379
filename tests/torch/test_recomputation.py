"""Reentrant checkpoints: backward passes that run inside another one end no step of their own."""

from __future__ import annotations

import contextlib

import pytest
import torch
from batch import on_ranks
from small_torch import (
    assert_exact,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    loss_of,
    own_gradients,
    reference_mean,
    wrap,
)
from torch.utils.checkpoint import checkpoint

import gradcomp.torch as gc


class Recomputed(torch.nn.Module):
    """Blocks of which some are recomputed in backward, by a backward pass of their own inside the outer one."""

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)
        )
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x.clone().requires_grad_()
        if self.checkpointed == "nested":
            return recompute(lambda y: recompute(self.blocks[2:4], recompute(self.blocks[0:2], y)), x)
        chosen = {"all": "0123", "first": "0", "last": "3", "some": "12", "none": ""}[self.checkpointed]
        for number, block in enumerate(self.blocks):
            x = recompute(block, x) if str(number) in chosen else block(x)
        return x


def recompute(function, x):
    if isinstance(function, torch.nn.ModuleList):
        function = torch.nn.Sequential(*function)
    return checkpoint(function, x, use_reentrant=True)


reentrant = pytest.mark.parametrize("checkpointed", ["all", "first", "last", "some", "nested"])


@reentrant
@on_ranks(2)
def test_a_backward_with_others_inside_leaves_means_when_the_outer_one_returns(checkpointed):
    model = Recomputed(checkpointed)
    expected = reference_mean(own_gradients(Recomputed("none")))
    optimizer = wrap(model, lr=0.0)
    for _ in range(3):  # the order of the buckets is another one from the second on
        optimizer.zero_grad()
        backward(model)
        assert_exact(expected, model.parameters())
        optimizer.step()
    assert optimizer.statistics().steps == 3


@reentrant
@on_ranks(2)
def test_windows_of_backwards_with_others_inside_are_exchanged_once(checkpointed):
    a, b = (own_gradients(Recomputed("none"), step=step) for step in (0, 1))
    expected = reference_mean([x + y for x, y in zip(a, b, strict=True)])
    windows = [
        (Recomputed(checkpointed), {"backward_passes_per_step": 2}),
        (Recomputed(checkpointed), {}),
        (Recomputed(checkpointed), {"finish": "step", "backward_passes_per_step": 2}),
    ]
    for number, (model, arguments) in enumerate(windows):
        optimizer = wrap(model, **arguments)
        with optimizer.no_sync() if number == 1 else contextlib.nullcontext():
            backward(model)
        assert bits_of(a) == bits_of(p.grad for p in model.parameters())  # nothing is exchanged yet
        backward(model, 1)
        if number == 2:
            optimizer.synchronize()
        assert_exact(expected, model.parameters())
        assert optimizer.statistics().steps == 1


@pytest.mark.parametrize("checkpointed", ["all", "some", "nested"])
@on_ranks(2)
def test_two_optimizers_end_with_the_outer_backward(checkpointed):
    model = Recomputed(checkpointed)
    expected = reference_mean(own_gradients(Recomputed("none")))
    optimizers = [wrap(half, lr=0.0) for half in (model.blocks[:2], model.blocks[2:])]
    for _ in range(2):
        backward(model)
        assert_exact(expected, model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_recomputation_that_raised_leaves_the_next_window_whole():
    model = Recomputed("all")
    mine = own_gradients(Recomputed("none"))
    optimizer = wrap(model, backward_passes_per_step=2)
    loss = loss_of(model)
    broken = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)  # two blocks have their gradients
    optimizer.zero_grad()
    broken.remove()
    loss.backward()  # the same graph: its nodes remember the pass that failed
    assert bits_of(mine) == bits_of(p.grad for p in model.parameters())
    backward(model)
    assert_exact(reference_mean([2 * g for g in mine]), model.parameters())
    optimizer.step()


@on_ranks(2)
def test_a_layer_of_two_recomputed_blocks_is_refused_with_what_to_do():
    layer = torch.nn.Linear(8, 8)
    optimizer = wrap(layer)
    x = recompute(layer, recompute(layer, data(0).requires_grad_()))
    with pytest.raises(gc.StateError, match="use_reentrant=False"):
        x.sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        recompute(layer, recompute(layer, data(0).requires_grad_())).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(layer.parameters())
