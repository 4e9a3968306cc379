"""A script that trains on a stream of its own: the exchange reads its gradients when that stream has them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from gpu_job import on_two_ranks

import gradcomp.torch as gc

CYCLES = 20_000_000  # about a hundredth of a second


def late(gradient: Any) -> Any:
    """The stream is busy before it computes what follows."""
    torch.cuda._sleep(CYCLES)
    return gradient


def trained(compression: str, stream: Any) -> Any:
    """All parameters after some steps, one behind the other; in one step a rank leaves out a layer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128)).to(
        "cuda:0"
    )
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0**-4), model.named_parameters(), policy
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext():
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + gc.rank())).to(
                "cuda:0"
            )
            whole = step != 3 or gc.rank() == 0
            out = (model if whole else model[0])(x)
            out.register_hook(late)
            out.square().mean().backward()
            optimizer.step()
    torch.cuda.synchronize()
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("compression", ["none", "quantize:bits=4,bucket_size=64,rounding=nearest"])
@on_two_ranks()
def test_a_side_stream_trains_as_the_default_stream_does(compression):
    torch.manual_seed(0)
    expected = trained(compression, None)
    found = trained(compression, torch.cuda.Stream())
    everyone = gc.allgather(found.reshape(1, -1))
    assert everyone[0].numpy().tobytes() == everyone[1].numpy().tobytes()
    # Products may be added up in another order on another stream; a gradient that was read too soon is far off.
    assert (found - expected).norm() <= 1e-4 * expected.norm()
