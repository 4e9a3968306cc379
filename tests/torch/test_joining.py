"""``join``: ranks with unequal numbers of batches; the others' steps and allreduces go on."""

from __future__ import annotations

import preloaded
import pytest
import torch
from batch import on_ranks
from launching import run_ranks
from small_torch import (
    assert_close,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    loss_of,
    net,
    one_process,
    small,
    train,
    wrap,
)

import gradcomp.torch as gc


def batches(rank: int) -> int:
    """Rank 0 has the fewest."""
    return 2 + 2 * rank


def check_training(metric: bool, compression: str = "none", epochs: int = 2) -> None:
    model = net()
    optimizer = wrap(model, small(compression), options={"momentum": 0.9})
    for epoch in range(epochs):
        for step in range(batches(gc.rank())):
            train(model, optimizer, 1, step)
            if metric:
                gc.allreduce(loss_of(model).detach(), name="loss")
        mine = bits_of(model.parameters())
        gradients = bits_of(p.grad for p in model.parameters())
        last = gc.join()
        assert last == gc.size() - 1
        assert mine == bits_of(model.parameters()), "a rank that has joined keeps its parameters"
        assert gradients == bits_of(p.grad for p in model.parameters())
        if compression == "none" and epoch == 0 and gc.rank() == last:
            # A rank that has joined adds zeros, and N stays N.
            expected = one_process(
                steps=batches(last), options={"momentum": 0.9}, has_batch=lambda step, r: step < batches(r)
            )
            assert_close(model.parameters(), expected)
        gc.broadcast_parameters(model.state_dict(), root_rank=last)
        gc.broadcast_optimizer_state(optimizer, last, model)
    train(model, optimizer, 2)
    assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_three_ranks_join_one_after_the_other():
    check_training(metric=True)


@pytest.mark.parametrize(
    "compression", ["none", "quantize:bits=4,bucket_size=32", "topk:density=0.2", "powersgd:rank=2"]
)
@on_ranks(2)
def test_the_others_train_on_until_all_have_joined(compression):
    check_training(metric=compression != "none", compression=compression)


@on_ranks(2)
def test_all_may_join_at_once_again_and_again():
    model = net()
    optimizer = wrap(model)
    for epoch in range(3):
        train(model, optimizer, epoch)
        assert gc.join() == 1
    assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_allreduces_go_on_with_zeros():
    rank, last = gc.rank(), gc.size() - 1
    for number in range(3 * rank):
        working = [r for r in range(3) if number < 3 * r]
        total = sum(10 * r for r in working)
        for op, wanted in (
            (gc.Sum, total),
            (gc.Average, total / 3),
            (gc.Min, 0),
            (gc.Max, 10 * max(working)),
        ):
            assert gc.allreduce(torch.tensor([10.0 * rank]), op=op, name=f"{number} {op}") == wanted
        both = gc.grouped_allreduce([torch.tensor([rank]), torch.ones(2, dtype=torch.bfloat16)], op=gc.Sum)
        assert both[0] == sum(working)
        assert (both[1] == len(working)).all()
        handles = [gc.allreduce_async(torch.tensor(rank), op=gc.Sum, name=name) for name in ("a", "b")]
        assert [int(gc.synchronize(handle)) for handle in reversed(handles)] == [sum(working)] * 2
    assert gc.join() == last
    assert gc.allreduce(torch.tensor(rank), op=gc.Sum) == 3


@on_ranks(2)
def test_what_cannot_go_on_without_a_rank_is_an_error_that_says_so():
    if gc.rank() == 1:
        for call in (
            lambda: gc.allgather(torch.ones(1), name="gathered"), lambda: gc.broadcast(torch.ones(1), 0),
            lambda: gc.alltoall(torch.ones(2)), lambda: gc.reducescatter(torch.ones(2)), gc.barrier,
            lambda: gc.broadcast_object(1), lambda: gc.broadcast_parameters(net().state_dict()),
        ):  # fmt: skip
            with pytest.raises(gc.ConfigError, match="rank 0 has joined, and only takes part in allreduce"):
                call()
        assert gc.allreduce(torch.ones(1)) == 0.5
    assert gc.join() == 1
    gc.barrier()


@on_ranks(3)
def test_the_rank_is_returned_that_joined_last():
    for order in ([2, 0, 1], [1, 2, 0], [0, 1, 2]):
        place = order.index(gc.rank())
        for number in range(place):  # the last one calls what nobody else does
            assert gc.allreduce(torch.ones(1), op=gc.Sum) == 2 - number
        assert gc.join() == order[-1]
    model = net()
    optimizer = wrap(model)
    for _ in range(2):  # the one that has stepped on stays so, whoever has called more collectives before
        if gc.rank() == 0:
            train(model, optimizer, 1)
        assert gc.join() == 0
        gc.broadcast_parameters(model.state_dict(), root_rank=0)
        gc.broadcast_optimizer_state(optimizer, 0)


@on_ranks(3)
def test_optimizers_of_two_models_and_of_some_ranks_step_in_any_order():
    first, second = net(1), net(2)
    one, two = wrap(first), wrap(second)
    pair = gc.ProcessSet([0, 2])
    third = net(3)
    three = wrap(third, process_set=pair) if pair.included() else None
    for step in range(gc.rank() + 1):
        train(second, two, 2)
        if step % 2:
            train(first, one, 1)
    if three is not None:
        train(third, three, gc.rank())
    assert gc.join() == 2
    gc.barrier()


@on_ranks(2)
def test_votes_and_sparse_gradients_go_on_too():
    table = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.ones_(table.weight)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), on_skip="agree"
    )
    for step in range(2 + 3 * gc.rank()):
        optimizer.zero_grad()
        table(torch.tensor([step])).sum().backward()
        if step != 3:  # of rank 1 alone, which skips it
            optimizer.step()
    assert gc.join() == 1
    if gc.rank() == 1:
        expected = torch.tensor([0.0, 0.0, 0.5, 1.0, 0.5])[:, None].expand(5, 2)
        assert torch.equal(table.weight.detach(), expected)


@on_ranks(2, "broken")
def test_a_step_that_the_others_throw_away_without_a_vote_is_an_error_of_all():
    model = net()
    optimizer = wrap(model)
    train(model, optimizer, 1)
    if gc.rank() == 1:
        backward(model, 1)
        optimizer.zero_grad()
    with pytest.raises(gc.StateError, match="went different ways"):
        gc.join() if gc.rank() == 0 else train(model, optimizer, 1)


def _end_without_joining() -> None:
    import sys
    import time

    import torch

    import gradcomp.torch as hvd

    hvd.init(timeout_seconds=60)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(1 + hvd.rank()):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    if hvd.rank() == 1:
        sys.exit()
    begin = time.monotonic()
    try:
        hvd.join()
    except hvd.TransportError as error:
        print(error)
    assert time.monotonic() - begin < 50, "it need not wait for the deadline"


@pytest.mark.full
def test_a_rank_that_ends_without_joining_ends_the_wait_of_those_that_have() -> None:
    first, second = run_ranks(_end_without_joining, 2, imported=preloaded.TORCH)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert "rank 1" in first.stdout
    assert "shutdown()" in first.stdout


def test_a_world_of_one_has_joined_at_once() -> None:
    gc.init()
    try:
        assert gc.join() == 0
    finally:
        gc.shutdown()
