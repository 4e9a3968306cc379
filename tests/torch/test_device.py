"""Gradients of torch on a device. The stand-in's device takes the CPU's tensors for its own."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch import on_ranks
from cuda_on_cpu.driver import CpuDriver
from kernels.standin import FOLDER

import gradcomp.torch as gc
from gradcomp.kernels import bodies, devices
from gradcomp.torch import ddp, optimizer
from gradcomp.torch.devices import device_of


class _Everything(CpuDriver):
    """All memory is the device's: whatever torch allocates."""

    def reaches(self, address: int) -> bool:
        return True


@contextmanager
def on_device(here: bool) -> Iterator[Any]:
    """Optimizers that are made inside have their gradients on a device, if this rank is one of those."""
    if not here:
        yield None
        return
    driver = _Everything(FOLDER, order=2)
    device = devices.on("cuda:0", driver)
    frontends: list[Any] = [optimizer, ddp]
    before = device_of
    for frontend in frontends:
        frontend.device_of = lambda named: device
    try:
        yield driver
    finally:
        for frontend in frontends:
            frontend.device_of = before
        bodies.take_away("cuda:0")


def parameters_after(steps: int, compression: str, here: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 30))
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    with on_device(here) as driver:
        opt = gc.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters(), policy
        )
        for step in range(steps):
            opt.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))
            whole = step % 3 != gc.rank()  # else this rank has no gradient of the last layer
            (model if whole else model[0])(x).square().mean().backward()
            opt.step()
        if here:
            kinds = [kind for kind, _ in driver.events]
            assert driver.launched
            assert kinds.count("follow") >= kinds.count("mark") > steps
            # The engine's thread, and no thread of the script.
            ours = {thread.ident for thread in threading.enumerate() if thread.name == "gradcomp"}
            assert driver.current_in == ours
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("compression", ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"])
@on_ranks(2)
def test_a_rank_on_the_cpu_and_one_on_a_device_train_together(compression):
    alone = parameters_after(6, compression, here=False)
    mixed = parameters_after(6, compression, here=gc.rank() == 1)
    for mine, theirs in zip(mixed, alone, strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()


class Partly(torch.nn.Module):
    """Layers of which a step may leave out the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 40), torch.nn.Linear(40, 30)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(hidden) if whole else hidden


def parameters_under_ddp(steps: int, here: bool) -> tuple[list[torch.Tensor], list[list[bool]]]:
    """And which layers had a gradient, by step: DDP fills in zeros, which only their kernels can tell."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Partly(), find_unused_parameters=True)
    policy = gc.Policy("quantize:bits=4,bucket_size=64", filter=gc.Filter(min_elements=64))
    with on_device(here) as driver:
        state, hook = gc.ddp_comm_hook(model, policy)
        model.register_comm_hook(state, hook)
        opt = torch.optim.SGD(model.parameters(), lr=0.05)
        present = []
        for step in range(steps):
            opt.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))
            model(x, step % 3 == 0).square().mean().backward()
            opt.step()
            present.append(state.exchanger.pipeline.result.present.tolist())
        if here:
            assert driver.launched
            assert [kind for kind, _ in driver.events].count("mark") >= steps
    return [p.detach().clone() for p in model.parameters()], present


@on_ranks(2)
def test_a_hook_on_the_cpu_and_one_on_a_device_train_together():
    alone, _ = parameters_under_ddp(6, here=False)
    mixed, present = parameters_under_ddp(6, here=gc.rank() == 1)
    for mine, theirs in zip(mixed, alone, strict=True):
        assert mine.numpy().tobytes() == theirs.numpy().tobytes()
    assert sorted(map(sum, present)) == [2, 2, 2, 2, 4, 4]


@on_ranks(2)
def test_powersgd_on_two_devices_keeps_ranks_equal():
    mine = parameters_after(6, "powersgd:rank=2", here=True)
    for parameter in mine:
        everyone = gc.allgather(parameter.reshape(1, -1))
        assert everyone[0].numpy().tobytes() == everyone[1].numpy().tobytes()


@pytest.mark.parametrize(
    ("shape", "where", "complaint"),
    [
        (
            (3,),
            "meta",
            "'w' was dense and on meta when ddp_comm_hook was called; its gradient is .* on cpu now",
        ),
        (
            (4,),
            "cpu",
            "'w' had another dtype or size when ddp_comm_hook was called; its gradient has 3 elements",
        ),
    ],
)
def test_a_hook_notices_that_a_model_has_changed(shape: Any, where: str, complaint: str) -> None:
    parameter, buffer = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)
    bucket: Any = SimpleNamespace(
        buffer=lambda: buffer, parameters=lambda: [parameter], gradients=lambda: [buffer]
    )
    state: Any = SimpleNamespace(
        _numbers={id(parameter): 0},
        _named=[("w", parameter)],
        _layers=[gc.LayerSpec("w", shape)],
        _where=torch.device(where),
    )
    with pytest.raises(gc.StateError, match=complaint):
        ddp.HookState._contents(state, bucket)


def test_devices_that_cannot_be_used_are_named() -> None:
    def parameter(device: str) -> Any:
        return device, torch.nn.Parameter(torch.zeros(3, device=device))

    assert device_of([parameter("cpu")]) is devices.HOST
    assert device_of([]) is devices.HOST
    with pytest.raises(gc.ConfigError, match="gradients on meta cannot be exchanged"):
        device_of([parameter("meta")])
    with pytest.raises(gc.ConfigError, match="are on cpu, meta; one optimizer"):
        device_of([parameter("cpu"), parameter("meta")])


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed here")
def test_without_cupy_the_error_says_what_to_install() -> None:
    with pytest.raises(gc.ConfigError, match=r"cuda:1 need CuPy: pip install 'gradcomp\[cuda\]'"):
        devices.cuda(1)
