"""Side streams, numbers that stay on the device, and gradients of a GPU without kernels: two ranks on one GPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from batch import on_two_ranks

import gradcomp.torch as gc
from gradcomp.torch import ddp, distributed_state
from gradcomp.torch.devices import device_of, staged

COMPRESSIONS = ["quantize:bits=4,bucket_size=64", "topk:density=0.1", "none"]
ELEMENTS = 1 << 22


def through_host(_: Any) -> Any:
    return staged(torch.device("cuda:0"))


def trained(
    compression: str, where: Any = device_of, *, side: bool = False, hook: bool = False
) -> list[bytes]:
    """The parameters after some steps, of which one leaves out a layer on one rank."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.Tanh(), torch.nn.Linear(4096, 128))
    model = model.to("cuda:0")
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=64))
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(stream):
        for frontend in (distributed_state, ddp):
            patch.setattr(frontend, "device_of", where)
        opt: Any = torch.optim.SGD(model.parameters(), lr=2.0**-4)
        if hook:
            model = torch.nn.parallel.DistributedDataParallel(model)
            model.register_comm_hook(*gc.ddp_comm_hook(model, policy))
        else:
            opt = gc.DistributedOptimizer(opt, model.named_parameters(), policy)
        for step in range(8):
            opt.zero_grad()
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + gc.rank()))
            whole = hook or step != 3 or gc.rank() == 0
            torch.cuda._sleep(20_000_000)  # so that this program is ahead of the device
            (model if whole else model[0])(x.to("cuda:0")).square().mean().backward()
            opt.step()
        return [parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("hook", [False, True], ids=["optimizer", "hook"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_two_ranks()
def test_on_a_side_stream_training_comes_to_the_same(compression, hook):
    assert trained(compression, side=True, hook=hook) == trained(compression, hook=hook)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("hook", [False, True], ids=["optimizer", "hook"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_two_ranks()
def test_through_pinned_memory_training_comes_to_the_same(compression, hook, side):
    assert trained(compression, through_host, side=side, hook=hook) == trained(compression, hook=hook)


@pytest.mark.parametrize("where", [device_of, through_host], ids=["in place", "through the host"])
@on_two_ranks("no digests", fingerprint_steps=0, fingerprint_every_steps=0)
def test_backward_waits_for_no_number_of_the_device(where):
    weight = torch.nn.Parameter(torch.zeros(ELEMENTS, device="cuda:0"))
    rate = torch.tensor(0.5, device="cuda:0")
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_state, "device_of", where)
        opt = gc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=rate),
            [("w", weight)],
            gc.ErrorFeedback(gc.Quantize(4, rounding="nearest"), follow_rate=True),
            grad_scaler=scaler,
        )
        for step in range(4):
            opt.zero_grad()
            loss = scaler.scale((weight * (step + gc.rank())).sum())
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step allocates
            try:
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            scaler.step(opt)
            scaler.update()
    assert torch.isfinite(weight).all()
    assert opt._gradcomp.exchanger.pipeline._exchange._context.unscale == 1024.0
