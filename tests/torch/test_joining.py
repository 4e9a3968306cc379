"""``join``: ranks with unequal numbers of batches; the others' steps and allreduces go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import preloaded
import pytest
import torch
from batch import on_ranks
from joins.draw import draw
from joins.train import run as train_by
from launching import run_ranks
from small_torch import (
    NEAREST,
    assert_close,
    assert_same_on_all_ranks,
    assert_still_working,
    backward,
    bits_of,
    in_ddp,
    loss_of,
    net,
    one_process,
    residuals,
    scaled_step,
    small,
    train,
    unsent,
    wrap,
)
from torch.distributed.algorithms.join import Join

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


# ------------------------------------------------------------------------------------ with join(optimizer)


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def clipped_step(model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()


def alone(counts: tuple[int, ...], divide: str) -> list[torch.Tensor]:
    """The parameters of one process that has the batches of all ranks."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = scheduled(optimizer)
    for step in range(max(counts)):
        optimizer.zero_grad()
        losses = [loss_of(model, step, rank) for rank, count in enumerate(counts) if step < count]
        (sum(losses) / (len(losses) if divide == "active" else len(counts))).backward()
        clipped_step(model, optimizer, scheduler)
    return list(model.parameters())


def state_of(*stateful: Any) -> Any:
    return [each.state_dict() for each in stateful]


def assert_same_state(*stateful: Any) -> None:
    for of_rank in gc.allgather_object(state_of(*stateful)):
        assert repr(of_rank) == repr(state_of(*stateful))


@pytest.mark.parametrize("divide", ["all", "active"])
@pytest.mark.parametrize("frontend", ["optimizer", "hook", "before", "behind"])
@pytest.mark.parametrize("counts", [(2, 3, 5), (4, 0, 1), (3, 3, 3)])
@on_ranks(3)
def test_all_ranks_end_with_what_one_process_computes(counts, frontend, divide):
    model = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    module: Any = model
    if frontend == "optimizer":
        gc.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        module, _ = in_ddp(model)
    scheduler = scheduled(optimizer)
    context: Any = gc.join(optimizer, scheduler, model=module, divide=divide)
    if frontend in ("before", "behind"):
        beside = gc.join(optimizer, scheduler)
        both = [beside, module] if frontend == "before" else [module, beside]
        context = Join(both, divide_by_initial_world_size=divide == "all")
    with context:
        for step in range(counts[gc.rank()]):
            optimizer.zero_grad()
            backward(module, step)
            clipped_step(model, optimizer, scheduler)
    assert_close(model.parameters(), alone(counts, divide))
    assert scheduler.last_epoch == max(counts)
    assert_same_state(model, optimizer, scheduler)


@pytest.mark.parametrize("seed", range(1, 9))
@on_ranks(3)
def test_ranks_that_join_at_random_moments_end_with_equal_state(seed):
    """Families, reductions, controllers and frontends are drawn too; ``make joins`` draws more."""
    train_by(draw(seed, gc.size()))


@pytest.mark.parametrize(
    "compression", ["topk:density=0.1", "quantize:bits=2,bucket_size=32,rounding=nearest"]
)
@on_ranks(3)
def test_residuals_of_ranks_that_have_joined_are_sent(compression):
    """The gradient of rank r is a constant, so all that was applied, and what is owed, add up to known sums."""
    weight = torch.nn.Parameter(torch.zeros(40, 5))
    constant = torch.randn(40, 5, generator=torch.Generator().manual_seed(gc.rank()))
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], small(compression)
    )
    counts = (1, 6, 9)
    with gc.join(optimizer):
        for _ in range(counts[gc.rank()]):
            optimizer.zero_grad()
            (weight * constant).sum().backward()
            optimizer.step()
    handed_in = gc.allreduce(counts[gc.rank()] * constant, op=gc.Sum)
    applied = -gc.size() * weight.detach()
    torch.testing.assert_close(
        applied + unsent(optimizer)["weight"].view(40, 5), handed_in, rtol=1e-4, atol=1e-4
    )
    sent = counts[0] * constant - residuals(optimizer)["weight"].reshape(40, 5)
    if gc.rank() == 0 and compression.startswith("topk"):
        assert (sent != 0).float().mean() > 0.5, "most of its single gradient went out while it stood in"


@on_ranks(2)
def test_a_scaler_that_is_not_named_follows():
    """Rank 1 goes on alone, skips a step that overflows, and then grows its scale."""
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    optimizer = wrap(model, NEAREST, torch.optim.AdamW, grad_scaler=scaler)
    with gc.join(optimizer):
        for step in range(1 + 6 * gc.rank()):
            scaled_step(model, optimizer, scaler, step, float("inf") if step == 2 else 1.0)
    assert scaler.get_scale() == 8.0 * 2 / 2 * 2 * 2
    assert_same_state(model, optimizer, scaler)


@on_ranks(3)
def test_several_optimizers_join_together():
    first, second = net(1), net(2)
    one, two = wrap(first), wrap(second)
    with gc.join(one, two, model=first) as joined:
        for step in range((5, 1, 3)[gc.rank()]):
            train(first, one, 1, step)
            if step % 2:
                train(second, two, 1, step)
    assert joined.last == 0
    for model, optimizer in ((first, one), (second, two)):
        assert_same_on_all_ranks(model.parameters())
        train(model, optimizer, 2)
        assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_some_ranks_join_among_themselves():
    pair, model = gc.ProcessSet([0, 2]), net()
    optimizer = wrap(model, process_set=pair)
    with gc.join(optimizer, divide="active"):
        for step in range(1 + gc.rank()):
            train(model, optimizer, 1, step)
            if pair.included():
                gc.allreduce(torch.ones(1), process_set=pair, name=str(step))
    if pair.included():
        assert gc.join(optimizer).__enter__().__exit__(None, None, None) is None
        assert len(set(map(repr, gc.allgather_object(bits_of(model.parameters()), process_set=pair)))) == 1
    gc.barrier()


@on_ranks(2)
def test_means_over_active_ranks_of_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True)
    torch.nn.init.ones_(table.weight)
    optimizer = gc.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
    with gc.join(optimizer, divide="active"):
        for step in range(2 + 2 * gc.rank()):
            optimizer.zero_grad()
            table(torch.tensor([step])).sum().backward()
            optimizer.step()
    assert torch.equal(table.weight.detach()[:, 0], torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]))


@on_ranks(2)
def test_an_error_in_the_block_is_raised_at_once_and_the_next_block_works():
    model = net()
    optimizer = wrap(model)
    train(model, optimizer, 1)
    with pytest.raises(ZeroDivisionError), gc.join(optimizer, divide="active"):
        raise ZeroDivisionError
    assert optimizer._gradcomp.exchanger.pipeline.trains is None
    with gc.join(optimizer):
        train(model, optimizer, 1 + gc.rank())
    assert_same_on_all_ranks(model.parameters())


class _Unsendable:
    def state_dict(self) -> dict[str, Any]:
        return {"function": print}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


@on_ranks(2)
def test_what_cannot_join_is_refused_on_all_ranks_at_the_beginning():
    model = net()
    optimizer = wrap(model)
    ddp, _ = in_ddp(net())
    follows = small("error_feedback[topk:density=0.1]:follow_rate=true")
    zero = gc.ZeroOptimizer(net().named_parameters(), torch.optim.SGD, lr=0.1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: gc.join(optimizer, divide="most"), 'divide must be "all" or "active"'),
        (lambda: gc.join(optimizer, _Unsendable()), "the state of _Unsendable"),
        (lambda: gc.join(optimizer, object()), "no state_dict"),
        (lambda: gc.join(model), "the first argument is the optimizer"),
        (lambda: gc.join(optimizer, model=3), "model must be a torch.nn.Module"),
        (lambda: gc.join(torch.optim.SGD(net().parameters(), lr=1.0)), "none of the optimizers is a Distributed"),
        (lambda: gc.join(zero), "none of the optimizers"),
        (lambda: gc.join(wrap(net(), op=gc.Adasum)), "op=Adasum"),
        (lambda: gc.join(wrap(net(), op=gc.Sum), divide="active"), "is for means"),
        (lambda: gc.join(wrap(net(), follows)), "follows the learning rate"),
        (lambda: gc.join(optimizer, model=ddp), "not for torch's Join"),
        (lambda: Join([gc.join(optimizer)]), "not for torch's Join"),
    ]  # fmt: skip
    for make, text in cases:
        with pytest.raises(gc.ConfigError, match=text):
            make().__enter__()
    with pytest.raises(gc.PlanMismatchError):
        gc.join(optimizer, divide=["all", "active"][gc.rank()]).__enter__()
    if gc.rank() == 1:  # an argument that is wrong on one rank is an error on both
        optimizer_of_rank: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    else:
        optimizer_of_rank = optimizer
    with pytest.raises(gc.ConfigError, match="rank 1: none of the optimizers"):
        gc.join(optimizer_of_rank).__enter__()
    assert_still_working()


@on_ranks(2, "strangers")
def test_a_hook_may_exist_beside_a_context_and_not_be_used_in_it():
    ddp, _ = in_ddp(net(1))
    hooked_optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, hooked_optimizer, 2)
    model = net()
    optimizer = wrap(model)
    with gc.join(optimizer):
        train(model, optimizer, 1 + gc.rank())
    assert_same_on_all_ranks(model.parameters())
    with pytest.raises(gc.ConfigError, match="with join"):
        gc.join()
    with pytest.raises(gc.ConfigError, match="with join"), gc.join(optimizer):
        train(ddp, hooked_optimizer, 1)


@on_ranks(2)
def test_sharded_models_are_refused():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    gc.compress_fsdp(model)
    with pytest.raises(gc.ConfigError, match="none of the optimizers is a DistributedOptimizer"):
        gc.join(torch.optim.AdamW(model.parameters())).__enter__()


def test_a_world_of_one_joins_nobody() -> None:
    gc.init()
    try:
        model = net()
        optimizer = wrap(model)
        with gc.join(optimizer, model=model, divide="active") as joined:
            train(model, optimizer, 2)
        assert joined.last == 0
    finally:
        gc.shutdown()
