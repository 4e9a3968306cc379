"""One checkpoint for residuals, model, optimizer and what the user adds; never parts of two moments."""

from __future__ import annotations

from launching import run_ranks

#: What every program below begins with.
COMMON = '''
import os, signal, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
import gradcomp.torch as gc

def make(seed=0, kind=torch.optim.SGD, **arguments):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 5))
    compression = gc.Policy(gc.Quantize(4, 32, rounding="nearest"), filter=gc.Filter(min_elements=100))
    optimizer = kind(model.parameters(), **(arguments or {"lr": 0.05, "momentum": 0.9}))
    return model, gc.DistributedOptimizer(optimizer, model.named_parameters(), compression)

def train(model, opt, first, steps):
    for step in range(first, first + steps):
        data = torch.Generator().manual_seed(1000 * step + gc.rank())
        x, y = torch.randn(8, 12, generator=data), torch.randint(0, 5, (8,), generator=data)
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()

def fails(kind, call):
    try:
        call()
    except kind as error:
        assert type(error) is kind, repr(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")

folder = Path(sys.argv[1])
gc.init(timeout_seconds=30, log_level="warning")
'''

KILLED_BETWEEN = (
    COMMON
    + """
model, opt = make()
for end in (2, 4):
    train(model, opt, end - 2, 2)
    gc.save(folder / "compression", opt)
    gc.barrier()
    if end == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if gc.rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
"""
)

RESUMED_APART = (
    COMMON
    + """
from torch.nn.parallel import DistributedDataParallel

weights = torch.load(folder / "model.pt", weights_only=True)

# Before the state is loaded, and after it.
for before in (True, False):
    model, opt = make(seed=9)
    if before:
        model.load_state_dict(weights)
    gc.load(folder / "compression", opt)
    if not before:
        model.load_state_dict(weights)
    started = {name: value.clone() for name, value in model.named_parameters()}
    for _ in range(2):
        text = fails(gc.StateError, lambda: train(model, opt, 4, 1))
        assert "parameter '0.weight'" in text and "step 4" in text, text
    assert all(torch.equal(value, started[name]) for name, value in model.named_parameters())
    opt.zero_grad()
"""
)


def test_residuals_of_another_step_than_the_model_are_refused(tmp_path):
    """A job that is killed between ``gc.save`` and ``torch.save`` has a model of step 2 and residuals of step 4."""
    killed = run_ranks(KILLED_BETWEEN, 2, arguments=(str(tmp_path),))
    assert [one.returncode for one in killed] == [-9, -9], killed
    resumed = run_ranks(RESUMED_APART, 2, arguments=(str(tmp_path),))
    assert [one.returncode for one in resumed] == [0, 0], resumed
