"""A small model under PyTorch, its data, and what ranks compare of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc


def net(seed: int = 0) -> torch.nn.Module:
    """195 parameters, the same on all ranks."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def data(step: int, rank: int | None = None, rows: int = 4) -> torch.Tensor:
    """What a rank, by default this one, sees in a step: rows of 8 values."""
    rank = gc.rank() if rank is None else rank
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def wrap(
    model: torch.nn.Module,
    compression: Any = "none",
    kind: Any = torch.optim.SGD,
    lr: float = 0.1,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """The model's parameters under a wrapped optimizer."""
    optimizer = kind(model.parameters(), lr=lr, **(options or {}))
    return gc.DistributedOptimizer(optimizer, model.named_parameters(), compression, **arguments)


def bits_of(tensors: Iterable[torch.Tensor]) -> list[bytes]:
    """The bytes of tensors, to compare bit for bit."""
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def assert_same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Collective: every rank's tensors are equal, bit for bit."""
    mine = bits_of(tensors)
    everyone: list[Any] = [None] * gc.size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        assert theirs == mine, f"rank {rank} differs from rank {gc.rank()}"


def in_ddp(model: torch.nn.Module, compression: Any = "none", **arguments: Any) -> tuple[Any, Any]:
    """The model in DistributedDataParallel with gradcomp's hook, and the hook's state."""
    state, hook = gc.ddp_comm_hook(model, compression, **arguments)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def backward(model: torch.nn.Module, step: int = 0) -> None:
    model(data(step)).square().mean().backward()


def train(model: torch.nn.Module, optimizer: Any, steps: int = 3, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal, tensors bit for bit."""
    if isinstance(a, torch.Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def fails(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error of exactly this kind that the call raises."""
    try:
        call()
    except kind as error:
        assert type(error) is kind, repr(error)  # noqa: PT017
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
