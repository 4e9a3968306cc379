"""What gradients are after the exchange: against all_reduce, DistributedDataParallel's meaning and one process."""

from __future__ import annotations

import contextlib
import copy
import random
import time

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from small_torch import assert_same_on_all_ranks, backward, bits_of, data, train, wrap
from torch.utils.checkpoint import checkpoint

import gradcomp.torch as gc


def net(seed: int = 0, width: int = 16) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, 3),
    )


def local_gradients(model, x=None, step=0) -> list[torch.Tensor]:
    """This rank's gradients, from a copy that nothing is attached to."""
    apart = copy.deepcopy(model)
    apart.zero_grad()
    apart(data(step) if x is None else x).square().mean().backward()
    return [p.grad for p in apart.parameters()]


def reference_mean(gradients):
    """torch's own all_reduce, divided by the number of ranks."""
    result = []
    for gradient in gradients:
        total = gradient.clone()
        dist.all_reduce(total)
        result.append(total / gc.size())
    return result


# ---------------------------------------------------------------------------------------- bit equality


def parameters_after(bits: int, steps: int, slow: int | None = None) -> list[torch.Tensor]:
    model = net()
    policy = gc.Policy(
        gc.Quantize(bits, bucket_size=64, rounding="nearest" if bits % 2 else "stochastic"),
        filter=gc.Filter(min_elements=64),
    )
    optimizer, delay = wrap(model, policy, lr=0.05), random.Random(slow)
    for step in range(steps):
        if slow is not None:
            time.sleep(delay.random() * 0.002)
        train(model, optimizer, 1, step)
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("bits", "steps"), [(1, 60), *(pytest.param(b, 100, marks=pytest.mark.full) for b in range(1, 9))]
)
@on_ranks(2, "small buckets", slice_elements=64)
def test_parameters_stay_equal_on_all_ranks(bits, steps):
    assert_same_on_all_ranks(parameters_after(bits, steps))


@on_ranks(2, "small buckets", slice_elements=64)
def test_neither_random_delays_nor_overlap_change_a_bit():
    outcomes = [bits_of(parameters_after(4, 20, slow=slow)) for slow in (None, gc.rank())]
    for overlap in (False, True):
        gc.shutdown()
        gc.init(slice_elements=64, overlap=overlap, timeout_seconds=20.0)
        outcomes.append(bits_of(parameters_after(4, 20)))
    assert outcomes == outcomes[:1] * 4


def _train_with_unused_layers() -> list[torch.Tensor]:
    """Each rank skips layers at random, sometimes all ranks skip the same, and each is late at random."""
    model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(6)])
    for i, layer in enumerate(model):
        torch.nn.init.constant_(layer.weight, 0.1 * (i + 1))
        torch.nn.init.zeros_(layer.bias)
    optimizer = wrap(model, gc.Policy(gc.Quantize(4, bucket_size=32), filter=gc.Filter(min_elements=8)))
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


@pytest.mark.full
@on_ranks(4, slice_elements=48)
def test_uncompressed_is_close_to_the_mean_of_four_ranks():
    model = net()
    expected = reference_mean(local_gradients(model))
    wrap(model)
    backward(model)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


# ---------------------------------------------------------------------------------------- uncompressed is exact


def assert_exact(expected, parameters) -> None:
    assert bits_of(expected) == bits_of(p.grad for p in parameters)


@pytest.mark.parametrize("arguments", [{}, {"gradient_predivide_factor": 4.0}])
@on_ranks(2)
def test_uncompressed_equals_all_reduce_bit_for_bit_also_predivided_by_a_power_of_two(arguments):
    model = net()
    expected = reference_mean(local_gradients(model))
    wrap(model, **arguments)
    backward(model)
    assert_exact(expected, model.parameters())


@on_ranks(2)
def test_predividing_by_three_changes_the_mean_by_rounding_only():
    model = net()
    expected = reference_mean(local_gradients(model))
    wrap(model, gradient_predivide_factor=3.0)
    backward(model)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize(
    ("dtype", "compression"),
    [("float64", "none"), ("float64", "quantize:bits=2"), ("bfloat16", "none"), ("float16", "none")],
)
@on_ranks(2)
def test_other_dtypes_get_the_mean_and_float64_stays_exact_under_compression(dtype, compression):
    kind = getattr(torch, dtype)
    model = net().to(kind)
    x = data(0).to(kind)
    expected = reference_mean([g.double() for g in local_gradients(model, x)])
    wrap(model, compression)
    model(x).square().mean().backward()
    for p, mean in zip(model.parameters(), expected, strict=True):
        assert p.grad.dtype == kind
        assert torch.equal(p.grad, mean.to(kind))


@on_ranks(2)
def test_channels_last_parameters_keep_their_layout_and_get_the_mean():
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(gc.rank()))
    expected = reference_mean([g.contiguous() for g in local_gradients(model, x)])
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
    expected = reference_mean(local_gradients(model))
    wrap(model)
    backward(model)
    assert_exact(expected, model.parameters())


# ---------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("by", ["backward_passes_per_step", "no_sync"])
@on_ranks(2)
def test_two_passes_exchange_their_sum_once(by):
    model = net()
    a, b = (local_gradients(model, step=step) for step in (0, 1))
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
    expected = reference_mean(local_gradients(model["a"]))
    optimizer = wrap(model)
    with optimizer.no_sync():
        backward(model["a"])
    backward(model["b"], 1)
    assert_exact(expected, model["a"].parameters())


@on_ranks(2)
def test_a_short_window_is_exchanged_by_step_and_the_next_one_has_its_full_length():
    model = net()
    start = [p.detach().clone() for p in model.parameters()]
    expected = reference_mean(local_gradients(model))
    optimizer = wrap(model, backward_passes_per_step=2, lr=1.0)
    backward(model)
    optimizer.step()
    for p, before, mean in zip(model.parameters(), start, expected, strict=True):
        assert torch.equal(p, before - mean)
    optimizer.zero_grad()
    mine = local_gradients(model, step=1)
    backward(model, 1)
    assert_exact(mine, model.parameters())


@on_ranks(2)
def test_a_second_backward_without_step_adds_its_mean_to_the_first():
    model = net()
    means = [reference_mean(local_gradients(model, step=step)) for step in (0, 1)]
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


# ---------------------------------------------------------------------------------------- reentrant checkpoints


class Recomputed(torch.nn.Module):
    """Blocks of which some are recomputed in backward, by a backward pass of their own inside the outer one."""

    def __init__(self, checkpointed: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)
        )
        self.checkpointed = checkpointed

    def forward(self, x):
        x = x.clone().requires_grad_()
        if self.checkpointed == "nested":
            return recompute(lambda y: recompute(self.blocks[2:4], recompute(self.blocks[0:2], y)), x)
        chosen = {"all": "0123", "first": "0", "last": "3", "some": "12", "none": ""}[self.checkpointed]
        for number, block in enumerate(self.blocks):
            x = recompute(block, x) if str(number) in chosen else block(x)
        return x


def recompute(function, x):
    if isinstance(function, torch.nn.ModuleList):
        function = torch.nn.Sequential(*function)
    return checkpoint(function, x, use_reentrant=True)


reentrant = pytest.mark.parametrize("checkpointed", ["all", "first", "last", "some", "nested"])


@reentrant
@on_ranks(2)
def test_a_backward_with_others_inside_leaves_means_when_the_outer_one_returns(checkpointed):
    model = Recomputed(checkpointed)
    expected = reference_mean(local_gradients(Recomputed("none")))
    optimizer = wrap(model, lr=0.0)
    for _ in range(3):  # the order of the buckets is another one from the second on
        optimizer.zero_grad()
        backward(model)
        assert_exact(expected, model.parameters())
        optimizer.step()
    assert optimizer.statistics().steps == 3


@reentrant
@on_ranks(2)
def test_windows_of_backwards_with_others_inside_are_exchanged_once(checkpointed):
    a, b = (local_gradients(Recomputed("none"), step=step) for step in (0, 1))
    expected = reference_mean([x + y for x, y in zip(a, b, strict=True)])
    windows = [
        (Recomputed(checkpointed), {"backward_passes_per_step": 2}),
        (Recomputed(checkpointed), {}),
        (Recomputed(checkpointed), {"finish": "step", "backward_passes_per_step": 2}),
    ]
    for number, (model, arguments) in enumerate(windows):
        optimizer = wrap(model, **arguments)
        with optimizer.no_sync() if number == 1 else contextlib.nullcontext():
            backward(model)
        assert bits_of(a) == bits_of(p.grad for p in model.parameters())  # nothing is exchanged yet
        backward(model, 1)
        if number == 2:
            optimizer.synchronize()
        assert_exact(expected, model.parameters())
        assert optimizer.statistics().steps == 1


@pytest.mark.parametrize("checkpointed", ["all", "some", "nested"])
@on_ranks(2)
def test_two_optimizers_end_with_the_outer_backward(checkpointed):
    model = Recomputed(checkpointed)
    expected = reference_mean(local_gradients(Recomputed("none")))
    optimizers = [wrap(half, lr=0.0) for half in (model.blocks[:2], model.blocks[2:])]
    for _ in range(2):
        backward(model)
        assert_exact(expected, model.parameters())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_a_recomputation_that_raised_leaves_the_next_window_whole():
    model = Recomputed("all")
    mine = local_gradients(Recomputed("none"))
    optimizer = wrap(model, backward_passes_per_step=2)
    loss = model(data(0)).square().mean()
    broken = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)  # two blocks have their gradients
    optimizer.zero_grad()
    broken.remove()
    loss.backward()  # the same graph: its nodes remember the pass that failed
    assert bits_of(mine) == bits_of(p.grad for p in model.parameters())
    backward(model)
    assert_exact(reference_mean([2 * g for g in mine]), model.parameters())
    optimizer.step()


@on_ranks(2)
def test_a_layer_of_two_recomputed_blocks_is_refused_with_what_to_do():
    layer = torch.nn.Linear(8, 8)
    optimizer = wrap(layer)
    x = recompute(layer, recompute(layer, data(0).requires_grad_()))
    with pytest.raises(gc.StateError, match="use_reentrant=False"):
        x.sum().backward()
    optimizer.zero_grad()
    with optimizer.no_sync():
        recompute(layer, recompute(layer, data(0).requires_grad_())).sum().backward()
    optimizer.step()
    assert_same_on_all_ranks(layer.parameters())


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
    expected = reference_mean([passes * g for head in model.values() for g in local_gradients(head)])
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
    train(model["a"], wrap(model, "quantize:bits=4", kind=torch.optim.AdamW), 5)
    assert model["b"].weight.grad is None
    assert torch.equal(model["b"].weight, before)


@on_ranks(2)
def test_a_rank_that_did_not_use_a_layer_counts_as_zero():
    model = two_heads()
    mine = local_gradients(model["b"])
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
    expected = reference_mean(local_gradients(model["b"], step=7))
    sum(head(data(7)).square().mean() for head in model.values()).backward()
    assert_exact(expected, model["b"].parameters())


# ---------------------------------------------------------------------------------------- sparse


def embedding(sparse: bool = True) -> torch.nn.Embedding:
    torch.manual_seed(0)
    return torch.nn.Embedding(12, 4, sparse=sparse)


def rows_of(rank: int) -> torch.Tensor:
    return torch.tensor([[0, 1, 1, 3], [1, 3, 3, 11]][rank])  # duplicates within and between ranks


def embedding_gradient(module) -> None:
    (module(rows_of(gc.rank())) * (torch.arange(16.0).reshape(4, 4) + gc.rank())).sum().backward()


def assert_equal_gradients(sparse, dense) -> None:
    assert sparse.weight.grad.is_sparse
    assert torch.equal(sparse.weight.grad.to_dense(), dense.weight.grad)


@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks(2)
def test_sparse_gradients_equal_dense_ones_and_a_second_backward_adds_to_them(as_dense):
    dense, sparse = embedding(False), embedding()
    wrap(dense)
    wrap(sparse, sparse_as_dense=as_dense)
    for passes in (1, 2):
        for module in (dense, sparse):
            embedding_gradient(module)
        if passes == 1:
            assert_equal_gradients(sparse, dense)
            assert as_dense or sparse.weight.grad.is_coalesced()
            assert as_dense or sparse.weight.grad.indices()[0].tolist() == [0, 1, 3, 11]  # no duplicates
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


@on_ranks(2)
def test_many_sparse_rows_travel_as_a_dense_sum_and_float64_stays_exact():
    rows = torch.arange(12).repeat(3)
    for dtype, factor in ((torch.float32, gc.rank() + 1), (torch.float64, 1 / 3 + gc.rank() * 1e-12)):
        module, dense = embedding().to(dtype), embedding(False).to(dtype)
        for m in (dense, module):
            wrap(m)
            (m(rows if dtype == torch.float32 else rows_of(gc.rank())) * factor).sum().backward()
        assert_equal_gradients(module, dense)


@pytest.mark.parametrize("as_dense", [False, True])
@on_ranks(2)
def test_a_rank_without_sparse_gradient_gets_the_mean_too(as_dense):
    module, other = embedding(), torch.nn.Linear(8, 2)
    model = torch.nn.ModuleDict({"e": module, "o": other})
    optimizer = wrap(model, sparse_as_dense=as_dense)
    for _ in range(2):
        optimizer.zero_grad()
        loss = other(data(0)).sum()
        if gc.rank() == 0:
            loss = loss + module(torch.tensor([5])).sum()
        loss.backward()
        assert module.weight.grad.is_sparse
        assert module.weight.grad.to_dense()[5].tolist() == [0.5] * 4
        optimizer.step()


@pytest.mark.parametrize(
    ("as_dense", "compression"),
    [
        (False, "none"),
        (False, "quantize:bits=4,bucket_size=16"),
        (True, "none"),
        (True, "fp16"),
        (True, "quantize:bits=4,bucket_size=16"),
        (True, "topk:density=0.5"),
        (True, "powersgd:rank=2"),
    ],
)
@on_ranks(2)
def test_sparse_adam_trains_alike_on_all_ranks(as_dense, compression):
    """In a last step rank 1 has no gradient of its own, and SparseAdam takes no dense one."""
    module = embedding()
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=8))
    optimizer = wrap(module, policy, torch.optim.SparseAdam, sparse_as_dense=as_dense)
    before = module.weight.detach().clone()
    for step in range(5):
        optimizer.zero_grad()
        if step < 4 or gc.rank() == 0:
            embedding_gradient(module)
        optimizer.step()
    assert_same_on_all_ranks([module.weight])
    moved = (module.weight != before).any(1).nonzero()[:, 0].tolist()
    assert set(moved) >= {1, 3, 11}
    if compression in ("none", "fp16"):
        assert moved == [0, 1, 3, 11]


@on_ranks(2)
def test_a_layer_that_is_sparse_on_one_rank_is_sparse_on_all_where_it_travels_as_dense():
    module, dense = embedding(sparse=gc.rank() == 0), embedding(False)
    optimizer = wrap(module, sparse_as_dense=True)
    wrap(dense)
    for _ in range(2):
        optimizer.zero_grad()
        dense.zero_grad()
        embedding_gradient(module)
        embedding_gradient(dense)
        assert_equal_gradients(module, dense)


@on_ranks(2)
def test_a_layer_that_is_sparse_on_one_rank_and_dense_on_another_is_an_error_on_both():
    module = embedding(sparse=gc.rank() == 0)
    wrap(module)
    with pytest.raises(gc.StateError, match="weight"):
        embedding_gradient(module)


# ---------------------------------------------------------------------------------------- non-finite


@on_ranks(2)
def test_a_nan_on_one_rank_reaches_the_same_layer_on_all_ranks_no_other_and_no_later_step():
    model = two_heads()
    optimizer = wrap(model, gc.Policy("quantize:bits=4,rounding=nearest", filter=gc.Filter(min_elements=8)))
    for step, scale in enumerate([1.0, float("nan") if gc.rank() else 1.0, 1.0]):
        optimizer.zero_grad()
        one, other = (head(data(step)).square().mean() for head in model.values())
        (one + scale * other).backward()
        if step == 1:
            assert model["b"].weight.grad.isnan().all()
            assert model["a"].weight.grad.isfinite().all()
        else:
            optimizer.step()
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
    residuals = optimizer._gradcomp.exchanger.pipeline.residuals
    kept = torch.from_numpy(residuals.first.value(0).copy()).double() / gc.size()
    for row, owned in enumerate(residuals.ranges):
        kept[owned.start : owned.end] += torch.from_numpy(residuals.second.value(row).copy())
    dist.all_reduce(kept)
    torch.testing.assert_close(kept.reshape(40, 40), owed, atol=1e-4, rtol=1e-4)
