"""torch keeps memory that it does not use: the exchange gets what it needs of it, or says who holds what."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from batch import HOST_KERNELS, on_two_ranks
from launching import run_ranks

import gradcomp.torch as gc

SPARE_BYTES = 64 << 20  # less than one residual of the layers below


@on_two_ranks(checksums=False)
def test_an_exchange_gets_memory_that_torch_only_keeps():
    device = "cuda:0" if gc.rank() == 0 else "cpu"  # the memory of another process cannot be had
    torch.manual_seed(0)
    model = torch.nn.Linear(4096, 4096).to(device)
    x = torch.randn(4, 4096, device=device)
    model(x).square().mean().backward()  # what torch needs for itself comes first
    if device != "cpu":
        torch.cuda.synchronize()
        torch.empty(torch.cuda.mem_get_info()[0] - SPARE_BYTES, dtype=torch.uint8, device=device)
        assert torch.cuda.mem_get_info()[0] <= SPARE_BYTES
    model.zero_grad()
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0**-4), model.named_parameters(), gc.Quantize(4)
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    mean = model.weight.detach().double().mean().cpu().reshape(1, 1)
    everyone = gc.allgather(mean.float())
    assert torch.isfinite(everyone).all()
    assert everyone[0] == pytest.approx(everyone[1])


PROGRAM = f"""
import os, sys
import torch
import gradcomp.torch as gc

gc.init(timeout_seconds=20.0, log_level="warning", checksums=False)
device = "cuda:0" if gc.rank() == 0 else "cpu"
torch.manual_seed(0)
model = torch.nn.Linear(4096, 4096).to(device)
x = torch.randn(4, 4096, device=device)
for _ in range(2):
    model(x).square().mean().backward()
if device != "cpu":
    held = torch.empty(torch.cuda.mem_get_info()[0] - {SPARE_BYTES}, dtype=torch.uint8, device=device)
try:
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=2.0**-4), model.named_parameters(), gc.Quantize(4)
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    print("NOTHING RAISED")
except Exception as error:
    print("RAISED", isinstance(error, gc.GradcompError), type(error).__name__, str(error)[:1000])
sys.stdout.flush()
os._exit(0)
"""


def test_without_memory_all_ranks_raise() -> None:
    ended = run_ranks(PROGRAM, 2, env=HOST_KERNELS, timeout=40.0)
    for one in ended:
        assert "RAISED True" in one.stdout, one.stdout + one.stderr
    assert "DeviceError" in ended[0].stdout
    assert "has no memory for" in ended[0].stdout
    assert "PyTorch's allocator holds" in ended[0].stdout
