"""A small model under PyTorch, its data, and what ranks compare of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
    param_groups: Any = None,
    **arguments: Any,
) -> Any:
    """The model's parameters under a wrapped optimizer."""
    optimizer = kind(param_groups or model.parameters(), lr=lr, **(options or {}))
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


def optimized(
    model: torch.nn.Module, compression: Any = "none", **arguments: Any
) -> tuple[torch.nn.Module, Any, Any]:
    """The same three as :func:`hooked` gives; the optimizer has the state."""
    optimizer = wrap(model, compression, **arguments)
    return model, optimizer, optimizer


def hooked(
    model: torch.nn.Module,
    compression: Any = "none",
    kind: Any = torch.optim.SGD,
    lr: float = 0.1,
    options: dict[str, Any] | None = None,
    param_groups: Any = None,
    **arguments: Any,
) -> tuple[torch.nn.Module, Any, Any]:
    """The model in DDP, a plain optimizer of its parameters, and the hook's state."""
    ddp, state = in_ddp(model, compression, **arguments)
    return ddp, kind(param_groups or model.parameters(), lr=lr, **(options or {})), state


FRONTENDS = {"optimizer": optimized, "hook": hooked}


def exchanger_of(state: Any) -> Any:
    """What exchanges for a wrapped optimizer or for a hook's state."""
    return getattr(state, "exchanger", None) or state._gradcomp.exchanger


def residuals(state: Any) -> dict[str, torch.Tensor]:
    """By layer, and those that this rank keeps as an owner; not while a step is open."""
    held = state.compression_state()
    return {**held["residuals"], "server-side": held["second_residuals"]}


def unsent(state: Any) -> dict[str, torch.Tensor]:
    """Collective: by layer, what all ranks together have not sent yet. It stays when owners of chunks change."""
    held, at = state.compression_state(), 0
    owed = {name: value.reshape(-1).clone() for name, value in held["residuals"].items()}
    for name, start, length in held["second_residual_ranges"]:
        owed[name][start : start + length] += gc.size() * held["second_residuals"][at : at + length]
        at += length
    return {name: gc.allreduce(value, op=gc.Sum) for name, value in owed.items()}


def small(compression: Any) -> gc.Policy:
    """Compresses small matrices too: these models have no others."""
    return gc.Policy(compression, filter=gc.Filter(min_elements=2))


#: Has residuals.
NEAREST = small("quantize:bits=4,bucket_size=32,rounding=nearest")


def everything(compression: Any) -> gc.Policy:
    """Compresses every layer."""
    return gc.Policy(compression, filter=gc.Filter(min_elements=0, min_dimensions=0, exclude_kinds=()))


def loss_of(model: torch.nn.Module, step: int = 0, rank: int | None = None) -> torch.Tensor:
    return model(data(step, rank)).square().mean()


def backward(model: torch.nn.Module, step: int = 0) -> None:
    loss_of(model, step).backward()


def own_gradients(model: torch.nn.Module, x: torch.Tensor | None = None, step: int = 0) -> list[torch.Tensor]:
    """This rank's gradients, which nothing exchanges."""
    loss = model(data(step) if x is None else x).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def reference_mean(gradients: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Collective: torch's own all_reduce, divided by the number of ranks."""
    result = []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)
        result.append(total / gc.size())
    return result


def assert_exact(expected: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
    """The parameters have these gradients, bit for bit."""
    assert bits_of(p.grad for p in parameters) == bits_of(expected)


def one_process(
    kind: Any = torch.optim.SGD,
    steps: int = 3,
    lr: float = 0.1,
    options: dict[str, Any] | None = None,
    scheduler: Any = None,
    has_batch: Callable[[int, int], bool] = lambda step, rank: True,
) -> list[torch.Tensor]:
    """The parameters of :func:`net` that one process gets which has all ranks' batches."""
    model = net()
    optimizer = kind(model.parameters(), lr=lr, **(options or {}))
    schedule = scheduler(optimizer) if scheduler else None
    for step in range(steps):
        optimizer.zero_grad()
        losses = [loss_of(model, step, rank) for rank in range(gc.size()) if has_batch(step, rank)]
        (sum(losses) / gc.size()).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    return list(model.parameters())


def assert_close(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor], **tolerance: Any) -> None:
    torch.testing.assert_close([t.detach() for t in found], [t.detach() for t in expected], **tolerance)


@contextmanager
def initialised(**settings: Any) -> Iterator[None]:
    """Collective: the job has other settings for a while, which costs less than another launch."""
    usual = {"timeout_seconds": 20.0, "log_level": "warning"}
    gc.shutdown()
    gc.init(**{**usual, **settings})
    yield
    gc.shutdown()
    gc.init(**usual)


def shared_folder() -> Path:
    """Collective: an empty folder, the same one on all ranks."""
    made = tempfile.mkdtemp(prefix="gradcomp-test-") if gc.rank() == 0 else None
    return Path(gc.broadcast_object(made))


def train(
    model: torch.nn.Module,
    optimizer: Any,
    steps: int = 3,
    first: int = 0,
    before_step: Callable[[], object] = lambda: None,
    after_step: Callable[[], object] = lambda: None,
) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        before_step()
        optimizer.step()
        after_step()


def scaled_step(
    model: torch.nn.Module, optimizer: Any, scaler: Any, step: int = 0, factor: float = 1.0
) -> None:
    """A step under a loss scaler; ``factor`` of infinity makes it one to be skipped."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step) * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def assert_still_working() -> None:
    """Collective: the job goes on after an error."""
    model = net()
    train(model, wrap(model), 1)
    assert_same_on_all_ranks(model.parameters())


class Raises(torch.autograd.Function):
    """Backward fails here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")


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
