"""A rank that trains with PyTorch, under ``DistributedOptimizer`` or the hook of DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import torch
from faults.draw import STEPS
from faults.rank import Rank, full_directory
from torch import nn

import gradcomp.torch as gc


class _Fault(torch.autograd.Function):
    """The identity; in backward, the moment of that name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: Rank) -> torch.Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.rank.at("backward")
        return gradient, None


class Net(nn.Module):
    """Three linear layers and one that is used in most steps."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        hidden = 12 if rank.fails("other model") else 16
        sizes = {"first": (8, hidden), "second": (hidden, 16), "extra": (16, 16), "last": (16, 4)}
        names = list(sizes)
        if rank.fails("other order of layers"):
            names.reverse()
        for name in names:
            setattr(self, name, nn.Linear(*sizes[name]))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if not (self.rank.fails("layer unused") and self.rank.step % 3):
            x = x + self.extra(x)
        return self.last(_Fault.apply(x, self.rank))


def main() -> None:
    """Train."""
    rank = Rank()
    with rank.reporting():
        gc.init(**rank.settings)
        _train(rank)


def _train(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Net(rank)
    if rank.trial.fault != "other model":
        gc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if rank.trial.stack == "ddp":
        state, hook = gc.ddp_comm_hook(model, **rank.compression(gc))
        trained: nn.Module = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=0.001, find_unused_parameters=rank.trial.fault == "layer unused"
        )
        trained.register_comm_hook(state, hook)
    else:
        state = optimizer = gc.DistributedOptimizer(
            optimizer, model.named_parameters(), **rank.compression(gc)
        )
        trained = model
    model.second.weight.register_hook(lambda _: rank.at("hook"))
    optimizer.register_step_post_hook(lambda *_: rank.at("step"))
    steps = rank.trial.step + 1 if rank.fails("uneven end", "uneven end, metric") else STEPS
    for rank.step in range(steps):
        _step(rank, model, trained, optimizer, state)
    if rank.trial.fault == "uneven end, metric":
        gc.allreduce(torch.ones(1))
    gc.shutdown() if rank.trial.seed % 2 else None  # or it runs at exit


def _step(rank: Rank, model: nn.Module, trained: nn.Module, optimizer: Any, state: Any) -> None:
    data = torch.Generator().manual_seed(1000 * rank.step + rank.number)
    x, y = torch.randn(8, 8, generator=data), torch.randn(8, 4, generator=data)
    if rank.does("NaN"):
        x[0, 0] = torch.nan
    optimizer.zero_grad()
    if rank.does("skip before backward"):
        return
    rank.at("forward")
    for _ in range(2 if rank.does("double backward") else 1):
        (trained(x) - y).square().mean().backward()
    rank.at("gradients")
    if rank.does("skip after backward"):
        optimizer.zero_grad()
        return
    if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
        optimizer.zero_grad()  # as every rank does, for it is the mean that is not finite
        return
    optimizer.step()
    rank.applied(p.detach().numpy() for _, p in sorted(model.named_parameters()))
    if rank.trial.fault == "disk full" and rank.step == rank.trial.step:
        gc.save(full_directory(), state)
