"""An exchange has host code in every step, which a CUDA graph cannot hold: capture is refused where it begins."""

from __future__ import annotations

import contextlib

import pytest

pytest.importorskip("torch")

import torch
from batch import on_two_ranks

import gradcomp.torch as gc


@on_two_ranks()
def test_a_backward_pass_under_capture_is_refused():
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256).to("cuda:0")
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        gc.Policy("quantize:bits=4", filter=gc.Filter(min_elements=64)),
    )
    x = torch.randn(16, 64, device="cuda:0")
    for _ in range(2):  # captured or not, a step needs what the first ones make
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    refused = None
    with contextlib.suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
        # The end of a capture in which something was refused may be an error of torch's, too.
        try:
            model(x).square().mean().backward()
        except gc.GradcompError as error:
            refused = error
    assert refused is not None
    assert "captur" in str(refused)
