"""Momentum before compression: who is warned, and that nothing is lost where nothing is held back."""

from __future__ import annotations

import logging

import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import data, net

import gradcomp.torch as gc
from gradcomp import DGC, MomentumCorrection, TopK, Warmup


def wrapped(model, compression, kind=torch.optim.SGD, **options):
    everything = gc.Policy(compression, filter=gc.Filter(min_elements=0, min_dimensions=0, exclude_kinds=()))
    optimizer = kind(model.parameters(), lr=0.05, **options)
    return gc.DistributedOptimizer(optimizer, model.named_parameters(), everything)


def warnings_about(compression, kind, **options) -> list[str]:
    with logged(logging.WARNING, only=True) as lines:
        wrapped(net(), compression, kind, **options)
    return [line for line in lines if "momentum" in line]


TWICE = {
    "heavy ball": (DGC(0.1), "SGD", {"momentum": 0.9}),
    "adam": (DGC(0.1), "Adam", {}),
    "adamw": (MomentumCorrection(TopK(0.1)), "AdamW", {}),
    "inside a wrapper": (Warmup(DGC(0.1), steps=3), "SGD", {"momentum": 0.5}),
}
ONCE = {
    "plain": (DGC(0.1), "SGD", {}),
    "compression has none": (DGC(0.1, momentum_factor=0.0), "SGD", {"momentum": 0.9}),
    "top k": (TopK(0.1), "Adam", {}),
}


@pytest.mark.parametrize("case", TWICE)
@on_ranks(2)
def test_momentum_of_both_is_warned_about(case):
    compression, kind, options = TWICE[case]
    lines = warnings_about(compression, getattr(torch.optim, kind), **options)
    if gc.rank() == 0:
        assert len(lines) == 1
        assert "dgc" in lines[0] or "momentum_correction" in lines[0]
        assert kind in lines[0]
    else:
        assert not lines


@pytest.mark.parametrize("case", ONCE)
@on_ranks(2)
def test_momentum_of_one_is_not(case):
    compression, kind, options = ONCE[case]
    assert warnings_about(compression, getattr(torch.optim, kind), **options) == []


def trained(compression, **options) -> list[torch.Tensor]:
    model = net()
    optimizer = wrapped(model, compression, **options)
    for step in range(20):
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@on_ranks(2)
def test_at_density_one_momentum_before_compression_is_the_optimizers(momentum):
    """Ratio 1: what every rank adds up on its own has the mean that one optimizer adds up."""
    corrected = trained(DGC(1.0, momentum_factor=momentum, mask=False))
    heavy_ball = trained(gc.Compression.none, momentum=momentum)
    plain = trained(gc.Compression.none)
    for a, b, c in zip(corrected, heavy_ball, plain, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(a, c, rtol=1e-3, atol=1e-3), "momentum matters here"


@on_ranks(1)
def test_a_world_of_one_says_that_it_has_none_of_it():
    assert "world of one" in warnings_about(DGC(0.1), torch.optim.SGD)[0]
    assert not warnings_about(TopK(0.1), torch.optim.SGD)
