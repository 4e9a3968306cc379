"""Batch normalisation over all ranks' batches is that of one process which has them all."""

from __future__ import annotations

import pytest
import torch
from batch import on_ranks
from small_torch import assert_same_on_all_ranks, small, wrap

import gradcomp.torch as gc

SIZES = [5, 0, 3, 1]


def whole(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = sum(SIZES[: gc.size()])
    return (100 + 3 * torch.randn(rows, *shape, generator=generator, dtype=torch.float64)).to(dtype)


def own(rows: torch.Tensor) -> torch.Tensor:
    begin = sum(SIZES[: gc.rank()])
    return rows[begin : begin + SIZES[gc.rank()]]


def same_as_one_process(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, **settings) -> None:
    def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)

    kinds = [torch.nn.BatchNorm1d, torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d]
    ours = gc.SyncBatchNorm(shape[0], dtype=torch.float64 if dtype == torch.float64 else None, **settings)
    theirs = kinds[len(shape) - 1](shape[0], **settings)
    if ours.affine:
        for layer in (ours, theirs):
            with torch.no_grad():
                layer.weight.copy_(torch.linspace(0.5, 2, shape[0]))
                layer.bias.copy_(torch.linspace(-1, 1, shape[0]))
    for step in range(3):
        everything = whole(shape, dtype) + step
        x, y = own(everything).clone().requires_grad_(), everything.clone().double().requires_grad_()
        found, wanted = ours(x), theirs.double()(y)
        assert found.dtype == dtype
        assert_close(found, own(wanted))
        weights = torch.linspace(-1, 2, everything.numel(), dtype=torch.float64).view_as(everything)
        (found * own(weights)).sum().backward()
        (wanted * weights).sum().backward()
        assert_close(x.grad, own(y.grad))
        if ours.track_running_stats:
            assert_close(ours.running_mean, theirs.running_mean)
            assert_close(ours.running_var, theirs.running_var)
            assert ours.num_batches_tracked == theirs.num_batches_tracked == step + 1
    if ours.affine:
        for mine, all_of_it in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert_close(gc.allreduce(mine.grad, op=gc.Sum), all_of_it.grad)
    ours.eval()
    theirs.eval()
    assert_close(ours(own(everything)), own(theirs(everything.double())))


@on_ranks(2)
def test_two_ranks_one_without_rows():
    same_as_one_process((4, 3, 2), torch.float32, 2e-4)
    same_as_one_process((1,), torch.float64, 1e-9, momentum=None)


@on_ranks(3)
def test_three_ranks_without_weights_or_running_statistics():
    same_as_one_process((6,), torch.float64, 1e-9, affine=False)
    same_as_one_process((3, 5), torch.float32, 2e-4, track_running_stats=False)
    same_as_one_process((3, 2, 2, 2), torch.float32, 2e-4)


@on_ranks(4)
def test_four_ranks_in_half_precision_and_sets():
    same_as_one_process((2, 3, 3), torch.float16, 2e-2)
    half = gc.ProcessSet([0, 1] if gc.rank() < 2 else [2, 3])
    layer = gc.SyncBatchNorm(2, affine=False, process_set=half)
    y = layer(torch.full((1, 2), float(gc.rank() % 2)))
    torch.testing.assert_close(y, torch.full((1, 2), (gc.rank() % 2) * 2.0 - 1), rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_what_cannot_be_normalised():
    layer = gc.SyncBatchNorm(3)
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        layer(torch.zeros(3))
    with pytest.raises(ValueError, match="expected 3 channels, got 4"):
        layer(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="1 values per channel together"):
        layer(torch.zeros(1 - gc.rank(), 3))


@on_ranks(2)
def test_a_model_trains_alike_on_all_ranks():
    torch.manual_seed(0)
    convolution, linear = torch.nn.Conv2d(1, 8, 3), torch.nn.Linear(288, 3)
    model = torch.nn.Sequential(convolution, gc.SyncBatchNorm(8), torch.nn.ReLU(), torch.nn.Flatten(), linear)
    optimizer = wrap(model, small("quantize:bits=8"))
    data = torch.Generator().manual_seed(gc.rank())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8, 8, generator=data)).square().mean().backward()
        optimizer.step()
    assert_same_on_all_ranks(value for value in model.state_dict().values() if value.is_floating_point())
