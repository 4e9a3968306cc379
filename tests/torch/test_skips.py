"""A rank that does not step on means that others step on: an error on every rank, or a step that all skip."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from small_torch import data, net

import gradcomp.torch as gc

STEPS = 8
SKIPPED = 3
LOSER = 1


def wrap(model, compression="none", **arguments):
    policy = gc.Policy(compression, filter=gc.Filter(min_elements=8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return gc.DistributedOptimizer(optimizer, model.named_parameters(), policy, **arguments)


def backward(model, step: int) -> None:
    model(data(step)).square().mean().backward()


def equal_everywhere(model) -> bool:
    """Whether all ranks have the same parameters."""
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(gc.size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other, flat) for other in everyone)


def gives_up(place: str, model, optimizer, step: int) -> None:
    """Recovery code as people write it: the batch is given up here, before or after the gradients were exchanged."""
    if place == "between":
        backward(model, step)
        optimizer.zero_grad()
    elif place == "before step":
        backward(model, step)
        optimizer.zero_grad()
        optimizer.step()
    else:
        with pytest.raises(torch.OutOfMemoryError):
            fails_in_backward(model, step)
        optimizer.zero_grad()


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise torch.OutOfMemoryError("out of memory")


def fails_in_backward(model, step: int) -> None:
    """When half of the gradients are there."""
    model[2](model[1](OutOfMemory.apply(model[0](data(step))))).square().mean().backward()


@pytest.mark.parametrize("compression", ["none", "quantize:bits=4,feedback=true", "powersgd"])
@pytest.mark.parametrize("place", ["between", "in backward", "before step"])
@on_ranks(3)
def test_when_one_rank_skips_a_step_all_raise_in_the_next_exchange(place: str, compression: str):
    model = net()
    optimizer = wrap(model, compression)
    with pytest.raises(gc.StateError) as caught:  # noqa: PT012
        for step in range(STEPS):
            if step == SKIPPED and gc.rank() == LOSER:
                gives_up(place, model, optimizer, step)
                continue
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    text = str(caught.value)
    assert f"after step {SKIPPED + 1} " in text
    assert "rank 1 threw the means away" in text
    assert "rank 0, 2 applied the means" in text
    assert 'on_skip="agree"' in text
    with pytest.raises(gc.StateError, match="went different ways"):
        optimizer.step()


@on_ranks(3)
def test_a_rank_that_goes_on_accumulating_is_found_too():
    model = net()
    optimizer = wrap(model)
    with pytest.raises(gc.StateError, match=r"rank 1 went on accumulating"):  # noqa: PT012
        for step in range(STEPS):
            backward(model, step)
            if step == SKIPPED and gc.rank() == LOSER:
                continue
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(3)
def test_steps_that_all_ranks_skip_are_no_error():
    model = net()
    optimizer = wrap(model, "quantize:bits=4,feedback=true")
    for step in range(STEPS):
        backward(model, step)
        if step != SKIPPED:
            optimizer.step()
        optimizer.zero_grad()
    assert equal_everywhere(model)


@on_ranks(3)
def test_a_batch_given_up_before_backward_only_shifts_a_ranks_data():
    model = net()
    optimizer = wrap(model, "topk:density=0.1")
    for step in range(STEPS + (gc.rank() == LOSER)):
        optimizer.zero_grad()
        if step == SKIPPED and gc.rank() == LOSER:
            continue
        backward(model, step)
        optimizer.step()
    assert equal_everywhere(model)


@pytest.mark.parametrize("compression", ["none", "quantize:bits=4,feedback=true"])
@pytest.mark.parametrize("place", ["between", "in backward"])
@on_ranks(3)
def test_ranks_that_agree_skip_together(place: str, compression: str):
    model = net()
    optimizer = wrap(model, compression, on_skip="agree")
    before = None
    for step in range(STEPS):
        if step == SKIPPED and gc.rank() == LOSER:
            before = [p.detach().clone() for p in model.parameters()]
            gives_up(place, model, optimizer, step)
            assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            continue
        backward(model, step)
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert moved == (step != SKIPPED)
        optimizer.zero_grad()
    assert equal_everywhere(model)
    statistics = optimizer.statistics()
    assert statistics.skipped_steps == (0 if gc.rank() == LOSER else 1)
    assert statistics.vote_seconds > 0


@on_ranks(3)
def test_ranks_that_agree_skip_what_a_scaler_skips():
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, "quantize:bits=4,feedback=true", on_skip="agree", grad_scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(data(step)).square().mean()
        scaler.scale(loss * (math.inf if step == SKIPPED and gc.rank() == LOSER else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert equal_everywhere(model)
    assert scaler.get_scale() == 2.0**9


@on_ranks(3)
def test_what_a_checkpoint_ends_counts_as_skipped_by_all():
    """A step that is not finite is over where the compression state is asked for: that rank votes as it would later."""
    model = net()
    optimizer = wrap(model, "quantize:bits=4,feedback=true", on_skip="agree")
    (model(data(0)).square().mean() * (math.inf if gc.rank() == LOSER else 1.0)).backward()
    if gc.rank() != LOSER:
        optimizer.compression_state()
    optimizer.zero_grad()
    backward(model, 1)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert not all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert equal_everywhere(model)


@on_ranks(3)
def test_a_rank_that_ends_without_its_step_votes_against_it():
    """The last exchange: the others must not wait for a vote that never comes."""
    model = net()
    optimizer = wrap(model, on_skip="agree")
    exchanger = optimizer._gradcomp.exchange.exchanger
    backward(model, 0)
    if gc.rank() == LOSER:
        exchanger.part()
        return
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step() is None
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@on_ranks(3)
def test_what_cannot_agree_is_refused():
    model = net()
    with pytest.raises(gc.ConfigError, match='on_skip must be "raise" or "agree"'):
        wrap(model, on_skip="ask")
    with pytest.raises(gc.ConfigError, match="use DistributedOptimizer"):
        gc.ddp_comm_hook(model, on_skip="agree")
    optimizer = wrap(model, on_skip="agree")
    with pytest.raises(gc.StateError, match="closure"):
        optimizer.step(lambda: model(data(0)).square().mean())


@on_ranks(3)
def test_ranks_with_different_rules_for_skips_do_not_begin():
    model = net()
    with pytest.raises(gc.PlanMismatchError, match="on_skip"):
        wrap(model, on_skip="agree" if gc.rank() else "raise")


@pytest.mark.parametrize("steps_by_hand", [False, True])
@on_ranks(3)
def test_ddp_ranks_that_do_not_all_step_raise(steps_by_hand: bool):
    model = torch.nn.parallel.DistributedDataParallel(net())
    model.register_comm_hook(*gc.ddp_comm_hook(model, "quantize:bits=4"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if steps_by_hand:  # no optimizer steps anywhere: nothing is known, and nothing is wrong
        for step in range(STEPS):
            backward(model, step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        assert equal_everywhere(model)
        return
    with pytest.raises(gc.StateError, match="rank 1 threw the means away"):  # noqa: PT012
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            if step != SKIPPED or gc.rank() != LOSER:
                optimizer.step()
