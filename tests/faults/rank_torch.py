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
        if rank.fails("ends at once"):
            return
        rank.tamper()
        _train(rank)


def _wrapped(rank: Rank, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any, Any]:
    """What computes the loss, what steps, and what holds the compression state."""
    if rank.trial.stack == "ddp":
        state, hook = gc.ddp_comm_hook(model, **rank.compression(gc))
        trained = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=0.001, find_unused_parameters=rank.trial.fault == "layer unused"
        )
        trained.register_comm_hook(state, hook)
        return trained, optimizer, state
    if rank.trial.stack == "fsdp":
        gradients = rank.compression(gc)["compression"]
        if not all(compressor.bare().traits.exact for compressor in gradients.compressors):
            bits = 2 if rank.fails("other compression") else 4
            gradients = gc.Policy(f"quantize:bits={bits},feedback=false", filter=gc.Filter(min_elements=1))
        return model, optimizer, gc.compress_fsdp(model, gradients=gradients)
    wrapped = gc.DistributedOptimizer(optimizer, model.named_parameters(), **rank.compression(gc))
    return model, wrapped, wrapped


def _train(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Net(rank)
    if rank.trial.fault != "other model":
        gc.broadcast_parameters(model.state_dict(), root_rank=0)
    if rank.trial.stack == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in (model.first, model.second, model):
            fully_shard(layer)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained, optimizer, state = _wrapped(rank, model, optimizer)
    model.second.weight.register_hook(lambda _: rank.at("hook"))
    optimizer.register_step_post_hook(lambda *_: rank.at("step"))
    steps = rank.trial.step + 1 if rank.fails("uneven end", "uneven end, metric") else STEPS
    for rank.step in range(steps):
        _step(rank, model, trained, optimizer, state)
        while rank.outlive_launcher():
            _step(rank, model, trained, optimizer, state)
    if rank.trial.fault == "uneven end, metric":
        gc.allreduce(torch.ones(1))
    gc.shutdown() if rank.trial.seed % 2 else None  # or it runs at exit


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    """This rank's own: of a sharded model its shards."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return [g.to_local() if hasattr(g, "to_local") else g for g in found]


def _loss(rank: Rank, trained: nn.Module) -> torch.Tensor:
    data = torch.Generator().manual_seed(1000 * rank.step + rank.number)
    x, y = torch.randn(8, 8, generator=data), torch.randn(8, 4, generator=data)
    if rank.does("NaN"):
        x[0, 0] = torch.nan
    loss = (trained(x) - y).square().mean()
    return torch.zeros((), requires_grad=True).sum() if rank.does("loss without parameters") else loss


def _step(rank: Rank, model: nn.Module, trained: nn.Module, optimizer: Any, state: Any) -> None:
    optimizer.zero_grad()
    if rank.does("skip before backward"):
        return
    rank.at("forward")
    for _ in range(2 if rank.does("double backward") else 1):
        _loss(rank, trained).backward()
    rank.at("gradients")
    if rank.does("skip after backward"):
        optimizer.zero_grad()
        return
    gradients = _gradients(model)
    if not all(torch.isfinite(g).all() for g in gradients):
        optimizer.zero_grad()  # as every rank does, for it is the mean that is not finite
        return
    _change(rank, model, optimizer)
    for _ in range(2 if rank.does("double step") else 1):
        optimizer.step()
        rank.applied(_values(rank, model))
    if rank.trial.fault == "disk full" and rank.step == rank.trial.step:
        gc.save(full_directory(), state)


def _change(rank: Rank, model: nn.Module, optimizer: Any) -> None:
    """What a script may do to gradients and to the optimizer before a step, on all ranks or on the victim alone."""
    if rank.has_begun("other rate"):
        optimizer.param_groups[0]["lr"] = 0.01
    if rank.does("gradients edited"):
        model.second.weight.grad.mul_(1.5)
    if rank.trial.fault == "loss without parameters" or rank.has_begun("clipped locally"):
        gradients = _gradients(model)  # by hand, where no function of torch's could be told
        norm = float(sum(g.square().sum() for g in gradients)) ** 0.5
        for g in gradients:
            g.mul_(min(1.0, 0.1 / (norm + 1e-6)))


@torch.no_grad()
def _values(rank: Rank, model: nn.Module) -> list[Any]:
    """What is the same on all ranks: the parameters, or what a model of which each has a part makes of one input."""
    if rank.trial.stack == "fsdp":
        return [model(torch.ones(2, 8)).numpy()]
    return [p.detach().numpy() for _, p in sorted(model.named_parameters())]
