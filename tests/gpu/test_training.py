"""Two ranks that share one GPU, or of which one has none, train over Gloo to the same parameters, bit for bit."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from batch import on_two_ranks

import gradcomp.torch as gc

COMPRESSIONS = [
    "quantize:bits=4,bucket_size=64", "topk:density=0.1", "dgc:density=0.05", "powersgd:rank=2", "none",
]  # fmt: skip


def trained(compression: str, device: str, dtype=torch.float32, *, hook: bool = False) -> list[torch.Tensor]:
    """The parameters after some steps, of which one leaves out a layer on one rank, but under the hook."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128))
    model = model.to(device=device, dtype=dtype)
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    # With a power of two as its rate, an update rounds once whether or not it is contracted.
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    if hook:
        model = torch.nn.parallel.DistributedDataParallel(model)
        model.register_comm_hook(*gc.ddp_comm_hook(model, policy))
    else:
        optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), policy)
    for step in range(8):
        optimizer.zero_grad()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))
        whole = hook or step != 3 or gc.rank() == 0
        (model if whole else model[0])(x.to(device=device, dtype=dtype)).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def all_ranks_hold(parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        everyone = gc.allgather(parameter.float().reshape(1, -1))
        assert torch.isfinite(everyone).all()
        assert everyone[0].numpy().tobytes() == everyone[1].numpy().tobytes()


@pytest.mark.parametrize("hook", [False, True], ids=["optimizer", "hook"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_two_ranks()
def test_two_ranks_on_one_gpu(compression, hook):
    all_ranks_hold(trained(compression, "cuda:0", hook=hook))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@on_two_ranks()
def test_half_precision(kind):
    all_ranks_hold(trained("quantize:bits=4", "cuda:0", getattr(torch, kind)))


@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_two_ranks()
def test_a_rank_on_the_cpu_and_one_on_a_gpu(compression):
    all_ranks_hold(trained(compression, "cpu" if gc.rank() == 0 else "cuda:0"))
