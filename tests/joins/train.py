"""Trains as a trial says, on one rank, under PyTorch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from configurations import ROWS
from joins.draw import Trial
from small_torch import everything, in_ddp
from torch.distributed.algorithms.join import Join

import gradcomp.torch as gc


def build(seed: int) -> torch.nn.Module:
    """It has buffers, and dimensions that chunks cannot share evenly."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(9, 17), torch.nn.BatchNorm1d(17), torch.nn.Tanh(), torch.nn.Linear(17, 3)
    )


def run(trial: Trial) -> None:
    """Train, and assert that all ranks have the same after every epoch. Collective."""
    model = build(trial.seed)
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[trial.optimizer]
    # A momentum may act once only.
    accumulates = ROWS[trial.row].compressor.traits.momentum or trial.row.startswith("signum")
    options = {"momentum": 0.9} if trial.optimizer == "SGD" and not accumulates else {}
    optimizer: Any = kind(model.parameters(), lr=0.01, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3) if trial.scales else None
    how = {"controller": trial.controller or None, "grad_scaler": scaler or False}
    compression = everything(ROWS[trial.row].compressor)
    module: Any = model
    if trial.frontend == "optimizer":
        how |= {
            "backward_passes_per_step": trial.passes,
            "finish": trial.finish,
            "reduction": trial.reduction,
        }
        how |= {"on_skip": "agree"} if trial.agrees else {}
        optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), compression, **how)
    else:
        module, _ = in_ddp(model, compression, **how)
    schedulers = []
    if trial.schedules:
        one_cycle = torch.optim.lr_scheduler.OneCycleLR
        schedulers.append(one_cycle(optimizer, max_lr=0.02, total_steps=200, cycle_momentum=False))
    others = [*schedulers, *([scaler] if scaler is not None else [])]
    for epoch, batches in enumerate(trial.batches):
        with _joining(trial, optimizer, others, module):
            for number in range(batches[gc.rank()]):
                _train(trial, module, optimizer, schedulers, scaler, 100 * epoch + number)
                if number % 2:
                    gc.allreduce(torch.ones(3), name=f"metric {number}")
        assert_all_equal(trial, model, optimizer, others)
    for number in range(2):  # ranks compare fingerprints in the exchange after this one
        _train(trial, module, optimizer, schedulers, scaler, 1000 + number)
    if trial.finish == "forward":
        optimizer.synchronize()
    assert_all_equal(trial, model, optimizer, others, buffers=False)


def _joining(trial: Trial, optimizer: Any, others: list[Any], module: Any) -> AbstractContextManager[Any]:
    if trial.frontend in ("optimizer", "hook"):
        return gc.join(optimizer, *others, model=module, divide=trial.divide)
    context = gc.join(optimizer, *others, model=module)
    both = [context, module] if trial.frontend == "hook in Join" else [module, context]
    return Join(both, divide_by_initial_world_size=trial.divide == "all")


def _train(trial: Trial, module: Any, optimizer: Any, schedulers: list[Any], scaler: Any, step: int) -> None:
    optimizer.zero_grad()
    drawn = torch.Generator().manual_seed(10 * step + gc.rank())
    for _ in range(trial.passes if trial.frontend == "optimizer" else 1):
        loss = module(torch.randn(4, 9, generator=drawn)).square().mean()
        if scaler is not None and step % 5 == 3:
            loss = loss * float("inf")  # all ranks skip this step
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    if trial.clips:
        if trial.finish == "step":
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    for scheduler in schedulers:
        scheduler.step()


def assert_all_equal(
    trial: Trial, model: torch.nn.Module, optimizer: Any, others: list[Any], *, buffers: bool = True
) -> None:
    """Collective: parameters, buffers, optimizer state, rates and scale are equal on all ranks, bit for bit."""
    state = dict(model.state_dict()) if buffers else dict(model.named_parameters())
    mine = _plain([state, optimizer.state_dict(), *(each.state_dict() for each in others)])
    everyone: list[Any] = [None] * gc.size()
    dist.all_gather_object(everyone, mine)
    for rank, theirs in enumerate(everyone):
        for part, (a, b) in enumerate(zip(theirs, mine, strict=True)):
            assert a == b, (
                f"{trial}: rank {rank} and rank {gc.rank()} differ in part {part}: {a!r:.300} {b!r:.300}"
            )
    assert all(torch.isfinite(p).all() for p in model.parameters()), f"{trial}: not finite"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
