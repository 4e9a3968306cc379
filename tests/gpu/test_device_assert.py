"""After a failed assert on the device every call to CUDA is an error: ranks raise, and none waits for ever."""

from __future__ import annotations

import pytest
from batch import HOST_KERNELS
from launching import run_ranks

pytest.importorskip("torch")

PROGRAM = """
import os, sys
import torch
import gradcomp.torch as gc

gc.init(timeout_seconds=20.0, log_level="warning")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 128)).to("cuda:0")
policy = gc.Policy("quantize:bits=4", filter=gc.Filter(min_elements=64))
optimizer = gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), policy)
x = torch.randn(16, 64, device="cuda:0")


def fail(gradient):
    torch.arange(4, device="cuda:0")[torch.tensor([99], device="cuda:0")]  # beyond the end, which the device finds
    return gradient


print("BEGUN")
try:
    for step in range(4):
        optimizer.zero_grad()
        out = model(x)
        if step == 2 and gc.rank() == 0:
            out.register_hook(fail)
        out.square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    print("NOTHING RAISED")
except Exception as error:
    print("RAISED", isinstance(error, gc.GradcompError), type(error).__name__, str(error)[:1000])
sys.stdout.flush()
os._exit(0)  # there is no orderly end on a device that failed
"""


def test_all_ranks_raise() -> None:
    ended = run_ranks(PROGRAM, 2, env=HOST_KERNELS, timeout=40.0)
    for one in ended:
        assert one.returncode == 0, one.stdout + one.stderr
        assert "RAISED" in one.stdout, one.stdout + one.stderr
        assert "NOTHING RAISED" not in one.stdout
    assert "RAISED True" in ended[1].stdout, ended[1].stdout  # nothing is wrong with its own device
