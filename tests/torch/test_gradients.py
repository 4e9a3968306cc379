"""What gradients are after the exchange: against all_reduce, DistributedDataParallel's meaning and one process."""

from __future__ import annotations

import contextlib
import random
import time

import pytest
import torch
from batch import on_ranks
from small_torch import (
    FRONTENDS,
    assert_exact,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    initialised,
    loss_of,
    net,
    own_gradients,
    reference_mean,
    residuals,
    same,
    small,
    train,
    unsent,
    wrap,
)

import gradcomp.torch as gc

# ---------------------------------------------------------------------------------------- bit equality


def parameters_after(bits: int, steps: int, slow: int | None = None) -> list[torch.Tensor]:
    model = net()
    quantize = gc.Quantize(bits, bucket_size=64, rounding="nearest" if bits % 2 else "stochastic")
    optimizer, delay = wrap(model, small(quantize), lr=0.05), random.Random(slow)
    for step in range(steps):
        if slow is not None:
            time.sleep(delay.random() * 0.002)
        train(model, optimizer, 1, step)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("bits", "steps"), [(1, 60), *(pytest.param(b, 100, marks=pytest.mark.full) for b in range(1, 9))]
)
@on_ranks(2)
def test_parameters_stay_equal_on_all_ranks(bits, steps):
    with initialised(slice_elements=64):
        assert_same_on_all_ranks(parameters_after(bits, steps))


@on_ranks(2)
def test_neither_random_delays_nor_overlap_change_a_bit():
    outcomes = []
    for overlap, slow in ((True, None), (True, gc.rank()), (False, None)):
        with initialised(slice_elements=64, overlap=overlap):
            outcomes.append(bits_of(parameters_after(4, 20, slow=slow)))
    assert outcomes == outcomes[:1] * 3


def _train_with_unused_layers() -> list[torch.Tensor]:
    """Each rank skips layers at random, sometimes all ranks skip the same, and each is late at random."""
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(6)])
    for i, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, 0.1 * (i + 1))
        torch.nn.init.zeros_(layer.bias)
    optimizer = wrap(model, small(gc.Quantize(4, bucket_size=32)))
    chance = random.Random(gc.rank())
    for step in range(30):
        optimizer.zero_grad()
        used = [
            layer for i, layer in enumerate(model) if i == 0 or (chance.random() < 0.6 and (step + i) % 7)
        ]
        x = data(step)
        for layer in used:
            time.sleep(chance.random() * 0.001)
            x = layer(x)
        x.square().mean().backward()
        optimizer.step()
    return list(model.parameters())


@on_ranks(3, "small buckets", slice_elements=48)
def test_three_ranks_with_unused_layers_and_delays_agree_bit_for_bit():
    assert_same_on_all_ranks(_train_with_unused_layers())
    assert_same_on_all_ranks(parameters_after(3, 30, slow=gc.rank()))


@pytest.mark.full
@on_ranks(4, slice_elements=48)
def test_four_ranks_with_unused_layers_and_delays_agree_bit_for_bit():
    assert_same_on_all_ranks(_train_with_unused_layers())
    assert_same_on_all_ranks(parameters_after(5, 30, slow=gc.rank()))


# ---------------------------------------------------------------------------------------- uncompressed is exact


@pytest.mark.parametrize("factor", [1.0, 4.0, 3.0])
@on_ranks(2)
def test_uncompressed_equals_all_reduce_bit_for_bit_if_predivided_by_a_power_of_two(factor):
    model = net()
    expected = reference_mean(own_gradients(model))
    wrap(model, gradient_predivide_factor=factor)
    backward(model)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)
    if factor != 3.0:
        assert_exact(expected, model.parameters())


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [("float64", "none"), ("float64", "quantize:bits=2"), ("bfloat16", "none"), ("float16", "none")],
)
@on_ranks(2)
def test_other_dtypes_get_the_mean_and_float64_stays_exact_under_compression(dtype, compression):
    kind = getattr(torch, dtype)
    model = net().to(kind)
    x = data(0).to(kind)
    expected = reference_mean([g.double() for g in own_gradients(model, x)])
    wrap(model, small(compression))
    model(x).square().mean().backward()
    for p, mean in zip(model.parameters(), expected, strict=True):
        assert p.grad.dtype == kind
        assert torch.equal(p.grad, mean.to(kind))


@on_ranks(2)
def test_channels_last_parameters_keep_their_layout_and_get_the_mean():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(gc.rank()))
    expected = reference_mean([g.contiguous() for g in own_gradients(model, x)])
    wrap(model)
    model(x).square().mean().backward()
    for p, mean in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p.grad, mean)
        assert p.grad.stride() == p.stride()


@on_ranks(2)
def test_a_channels_last_gradient_of_a_contiguous_parameter_gets_the_mean():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(4, 3, 2, 2))
    gradient = torch.arange(48.0).reshape(4, 3, 2, 2).to(memory_format=torch.channels_last) * (gc.rank() + 1)
    gc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])
    (weight * gradient).sum().backward()
    assert torch.equal(weight.grad, 1.5 * torch.arange(48.0).reshape(4, 3, 2, 2))


@on_ranks(2)
def test_empty_and_scalar_parameters_travel_along():
    shapes = {"empty": (0, 4), "scalar": (), "full": (3,)}
    named = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = gc.DistributedOptimizer(torch.optim.SGD(named.values(), lr=1.0), named.items())
    for _ in range(2):
        optimizer.zero_grad()
        sum((p * (gc.rank() + 1)).sum() for p in named.values()).backward()
        assert all(torch.equal(named[name].grad, torch.full(shape, 1.5)) for name, shape in shapes.items())
        optimizer.step()


@on_ranks(2)
def test_a_parameter_used_twice_is_exchanged_once_with_both_gradients():
    layer = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.eye_(layer.weight)
    model = torch.nn.Sequential(layer, layer)
    expected = reference_mean(own_gradients(model))
    wrap(model)
    backward(model)
    assert_exact(expected, model.parameters())


# ---------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("by", ["backward_passes_per_step", "no_sync"])
@on_ranks(2)
def test_two_passes_exchange_their_sum_once(by):
    model = net()
    a, b = (own_gradients(model, step=step) for step in (0, 1))
    expected = reference_mean([x + y for x, y in zip(a, b, strict=True)])
    optimizer = wrap(model, backward_passes_per_step=1 if by == "no_sync" else 2)
    with optimizer.no_sync() if by == "no_sync" else contextlib.nullcontext():
        backward(model)
    assert bits_of(a) == bits_of(p.grad for p in model.parameters())  # nothing is exchanged yet
    assert optimizer.statistics().steps == 0
    backward(model, 1)
    assert_exact(expected, model.parameters())
    assert optimizer.statistics().steps == 1


@on_ranks(2)
def test_a_layer_touched_only_under_no_sync_is_exchanged_too():
    model = two_heads()
    expected = reference_mean(own_gradients(model["a"]))
    optimizer = wrap(model)
    with optimizer.no_sync():
        backward(model["a"])
    backward(model["b"], 1)
    assert_exact(expected, model["a"].parameters())


@on_ranks(2)
def test_a_short_window_is_exchanged_by_step_and_the_next_one_has_its_full_length():
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    expected = reference_mean(own_gradients(model))
    optimizer = wrap(model, backward_passes_per_step=2, lr=1.0)
    backward(model)
    optimizer.step()
    for p, before, mean in zip(model.parameters(), start, expected, strict=True):
        assert torch.equal(p, before - mean)
    optimizer.zero_grad()
    mine = own_gradients(model, step=1)
    backward(model, 1)
    assert_exact(mine, model.parameters())


@on_ranks(2)
def test_a_second_backward_without_step_adds_its_mean_to_the_first():
    model = net()
    means = [reference_mean(own_gradients(model, step=step)) for step in (0, 1)]
    wrap(model)
    for step in (0, 1):
        backward(model, step)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [a + b for a, b in zip(*means, strict=True)]
    )


@on_ranks(2)
def test_a_second_backward_without_step_keeps_the_mean_of_a_layer_that_this_rank_left_out():
    model = two_heads()
    optimizer = wrap(model)
    for names in ("ab", "ab" if gc.rank() == 0 else "a"):
        sum(model[name](torch.ones(1, 8)).sum() for name in names).backward()  # every gradient is 1
    assert model["a"].weight.grad.unique().tolist() == [2.0]
    assert model["b"].weight.grad.unique().tolist() == [1.5]
    assert optimizer.statistics().steps == 2


# ---------------------------------------------------------------------------------------- finish="step"


def two_heads() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(8, 2), "b": torch.nn.Linear(8, 2)})


def both(model, step: int = 0) -> None:
    """One backward pass over both heads."""
    (model["a"](data(step)) + model["b"](data(step))).square().mean().backward()


@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(2)
def test_finish_step_exchanges_several_backwards_over_disjoint_parameters(passes):
    model = two_heads()
    expected = reference_mean([passes * g for head in model.values() for g in own_gradients(head)])
    optimizer = wrap(model, finish="step", backward_passes_per_step=passes)
    for head in [*model.values()] * passes:
        backward(head)
    optimizer.synchronize()
    assert_exact(expected, model.parameters())
    assert optimizer.statistics().steps == 1
    if passes == 1:
        optimizer.zero_grad()
        backward(model["a"])
        with pytest.raises(gc.StateError, match="backward_passes_per_step"):
            backward(model["a"])
        optimizer.zero_grad()


@on_ranks(2)
def test_without_finish_step_a_late_layer_is_an_error_that_names_the_option_and_the_next_step_works():
    model = two_heads()
    optimizer = wrap(model)
    backward(model["a"])
    with pytest.raises(gc.StateError, match='finish="step"'):
        backward(model["b"])
    optimizer.zero_grad()
    both(model, 1)
    optimizer.step()
    assert_same_on_all_ranks(model.parameters())


# ---------------------------------------------------------------------------------------- unused


@on_ranks(2)
def test_a_layer_that_no_rank_used_has_no_gradient_and_adamw_does_not_move_it():
    model = two_heads()
    before = model["b"].weight.detach().clone()
    train(model["a"], wrap(model, small("quantize:bits=4"), kind=torch.optim.AdamW), 5)
    assert model["b"].weight.grad is None
    assert torch.equal(model["b"].weight, before)


@on_ranks(2)
def test_a_rank_that_did_not_use_a_layer_counts_as_zero():
    model = two_heads()
    mine = own_gradients(model["b"])
    expected = reference_mean([g if gc.rank() == 0 else torch.zeros_like(g) for g in mine])
    wrap(model)
    backward(model["b" if gc.rank() == 0 else "a"])
    assert_exact(expected, model["b"].parameters())


@on_ranks(2)
def test_a_layer_left_out_for_long_comes_back():
    model = two_heads()
    optimizer = wrap(model)
    train(model["a"], optimizer, 7)
    optimizer.zero_grad()
    expected = reference_mean(own_gradients(model["b"], step=7))
    sum(loss_of(head, 7) for head in model.values()).backward()
    assert_exact(expected, model["b"].parameters())


# ---------------------------------------------------------------------------------------- non-finite


class Both(torch.nn.Module):
    """Gives the losses of both heads."""

    def __init__(self, heads: torch.nn.ModuleDict) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [head(x).square().mean() for head in self.heads.values()]


@pytest.mark.parametrize("frontend", FRONTENDS)
@on_ranks(2)
def test_a_nan_on_one_rank_reaches_the_same_layer_on_all_ranks_no_other_no_residual_and_no_later_step(
    frontend,
):
    model = Both(two_heads())
    trained, optimizer, state = FRONTENDS[frontend](model, small("quantize:bits=4,rounding=nearest"))
    for step in range(5):
        optimizer.zero_grad()
        kept = residuals(state)
        one, other = trained(data(step))
        (one + (float("nan") if step == 3 and gc.rank() else 1.0) * other).backward()
        if step == 3:
            assert model.heads["b"].weight.grad.isnan().all()
            assert model.heads["a"].weight.grad.isfinite().all()
            assert same(residuals(state), kept)
            assert state.statistics().skipped_steps == 1
        else:
            optimizer.step()
    assert kept["heads.b.weight"].any()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_same_on_all_ranks(model.parameters())


# ---------------------------------------------------------------------------------------- telescoping


@on_ranks(2)
def test_sum_of_applied_means_plus_residuals_is_the_sum_of_true_means():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(40, 40))
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("w", weight)], gc.Quantize(2, rounding="nearest", bucket_size=64)
    )
    owed = torch.zeros(40, 40, dtype=torch.float64)
    for step in range(20):
        gradient = torch.randn(40, 40, generator=torch.Generator().manual_seed(10 * step + gc.rank()))
        owed += reference_mean([gradient.double()])[0]
        optimizer.zero_grad()
        (weight * gradient).sum().backward()
        owed -= weight.grad.double()
        optimizer.step()
    kept = unsent(optimizer)["w"].double() / gc.size()
    torch.testing.assert_close(kept.reshape(40, 40), owed, atol=1e-4, rtol=1e-4)
