"""Sparse gradients: rows of embeddings, which travel as rows or as dense tensors."""

from __future__ import annotations

import pytest
import torch
from batch import on_ranks
from small_torch import assert_same_on_all_ranks, data, small, wrap

import gradcomp.torch as gc


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
    optimizer = wrap(module, small(compression), torch.optim.SparseAdam, sparse_as_dense=as_dense)
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
