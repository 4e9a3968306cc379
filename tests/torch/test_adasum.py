"""``DistributedOptimizer(op=Adasum)``: beside the definition, computed in NumPy by one process for all ranks."""

from __future__ import annotations

import copy
import pickle
from functools import reduce

import numpy as np
import pytest
import torch
from batch import on_ranks
from small_torch import assert_close, assert_same_on_all_ranks, backward, loss_of, net, own_gradients, wrap

import gradcomp.torch as gc

KINDS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adam": {}, "RMSprop": {}, "Adagrad": {},
}  # fmt: skip


def pairwise(deltas: list[np.ndarray]) -> np.ndarray:
    """Neighbours first, then pairs of pairs."""
    if len(deltas) == 1:
        return deltas[0]
    a, b = pairwise(deltas[: len(deltas) // 2]), pairwise(deltas[len(deltas) // 2 :])
    dot = (a * b).sum()
    one, two = ((x * x).sum() for x in (a, b))
    return (1 - dot / (2 * one) if one else 1) * a + (1 - dot / (2 * two) if two else 1) * b


def expected(kind: str, steps: int, passes: int = 1, lr: float = 0.1) -> list[torch.Tensor]:
    """The parameters after so many steps of all ranks, each of which keeps an optimizer of its own."""
    model = net()
    parameters = list(model.parameters())
    optimizers = [getattr(torch.optim, kind)(parameters, lr=lr, **KINDS[kind]) for _ in range(gc.size())]
    for step in range(steps):
        starts = [p.detach().clone() for p in parameters]
        deltas = []
        for rank, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            reduce(torch.add, [loss_of(model, step * passes + i, rank) for i in range(passes)]).backward()
            optimizer.step()
            deltas.append(
                [(p.detach() - s).double().numpy() for p, s in zip(parameters, starts, strict=True)]
            )
            with torch.no_grad():
                for p, start in zip(parameters, starts, strict=True):
                    p.copy_(start)
        with torch.no_grad():
            for p, *of_ranks in zip(parameters, *deltas, strict=True):
                p.add_(torch.from_numpy(pairwise(of_ranks)))
    return parameters


def trained(kind: str, steps: int, passes: int = 1, **arguments) -> list[torch.nn.Parameter]:
    model = net()
    optimizer = wrap(
        model, kind=getattr(torch.optim, kind), options=KINDS[kind], op=gc.Adasum,
        backward_passes_per_step=passes, **arguments,
    )  # fmt: skip
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            backward(model, step * passes + i)
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())
    return list(model.parameters())


@pytest.mark.parametrize(("kind", "passes"), [*((kind, 1) for kind in KINDS), ("SGD", 2)])
@on_ranks(2)
def test_steps_of_one_or_several_passes_are_combined_by_adasum(kind, passes):
    assert_close(trained(kind, 3, passes), expected(kind, 3, passes), rtol=1e-4, atol=1e-5)


@pytest.mark.full
@on_ranks(4)
def test_four_ranks_combine_their_steps_in_pairs():
    assert_close(trained("SGD", 3), expected("SGD", 3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@on_ranks(2)
def test_steps_may_travel_as_halves(compression):
    halves = {"fp16": gc.Compression.fp16, "bf16": gc.Compression.bf16}[compression]
    parameters = trained("SGD", 2, compression=halves)
    assert_close(parameters, expected("SGD", 2), rtol=1e-2, atol=1e-2)
    exact = trained("SGD", 2)
    assert any(not torch.equal(p, e) for p, e in zip(parameters, exact, strict=True))


@on_ranks(2)
def test_gradients_stay_a_ranks_own_and_clipping_counts():
    model = net()
    optimizer = wrap(model, op=gc.Adasum)
    backward(model)
    own = own_gradients(model)
    optimizer.synchronize()
    assert_close([p.grad for p in model.parameters()], own)
    before = [p.detach().clone() for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.0)
    optimizer.step()
    assert all(torch.equal(p, start) for p, start in zip(model.parameters(), before, strict=True))


@on_ranks(2)
def test_frozen_parameters_and_those_without_a_gradient_stay():
    model = net()
    model[0].weight.requires_grad_(False)
    start = copy.deepcopy(model)
    optimizer = wrap(model, op=gc.Adasum)
    if gc.rank() == 0:
        backward(model)
    optimizer.step()
    assert torch.equal(model[0].weight, start[0].weight)
    assert not torch.equal(model[2].weight, start[2].weight), "what one rank did counts in full"
    alone = copy.deepcopy(start)
    loss_of(alone, 0, rank=0).backward()
    torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=0.1).step()
    assert_close(model.parameters(), alone.parameters())


@on_ranks(2)
def test_a_closure_and_a_scheduler_work_as_with_the_plain_optimizer():
    model, other = net(), net()
    optimizer, plain = wrap(model, op=gc.Adasum), wrap(other, op=gc.Adasum)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    backward(other)
    plain.step()
    assert_close(model.parameters(), other.parameters())


@on_ranks(2)
def test_copies_and_pickles_are_plain_optimizers_and_there_is_no_exchange_to_be_skipped():
    model = net()
    optimizer = wrap(model, op=gc.Adasum)
    for plain in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(plain) is torch.optim.SGD
    with pytest.raises(gc.StateError, match="no meaning"):
        optimizer.skip_synchronize()
    with pytest.raises(gc.ConfigError, match="backward_passes"):
        optimizer.set_backward_passes_per_step(0)
    with pytest.raises(gc.StateError, match="already"):
        gc.DistributedOptimizer(optimizer, model.named_parameters(), op=gc.Adasum)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"compression": "quantize:bits=4"}, "fp16 or bf16 here.*weighs the ranks' steps by their angles"),
        ({"reduction": "ring"}, "reduction= has no meaning"),
        ({"on_skip": "agree"}, "on_skip= has no meaning"),
        ({"gradient_predivide_factor": 2.0}, "needs op=Average"),
        ({"backward_passes_per_step": 0}, "backward_passes"),
        ({"groups": -1}, "groups must be"),
    ],
)
@pytest.mark.parametrize("who", ["all", "last"])
@on_ranks(2)
def test_a_bad_argument_is_an_error_on_every_rank(arguments, says, who):
    wrong = who == "all" or gc.rank() == gc.size() - 1
    with pytest.raises(gc.ConfigError, match=says):
        wrap(net(), op=gc.Adasum, **(arguments if wrong else {}))


@on_ranks(2)
def test_another_model_on_one_rank_names_the_layer():
    model = torch.nn.Linear(2 + gc.rank(), 1)
    with pytest.raises(gc.PlanMismatchError, match=r"weight.*\[1, 2\].*\[1, 3\]"):
        wrap(model, op=gc.Adasum)


@on_ranks(3)
def test_three_ranks_are_no_power_of_two_but_a_set_of_two_is_one():
    with pytest.raises(gc.ConfigError, match="power of two of ranks, not 3"):
        wrap(net(), op=gc.Adasum)
    pair = gc.ProcessSet([0, 2])
    if pair.included():
        model = net()
        optimizer = wrap(model, op=gc.Adasum, process_set=pair)
        backward(model)
        optimizer.step()
        got = gc.allgather(
            torch.cat([p.detach().flatten() for p in model.parameters()])[None], process_set=pair
        )
        assert torch.equal(got[0], got[1])


def test_a_world_of_one_steps_as_the_plain_optimizer():
    gc.init()
    try:
        model, other = net(), net()
        optimizer, plain = wrap(model, op=gc.Adasum), torch.optim.SGD(other.parameters(), lr=0.1)
        for each, stepper in ((model, optimizer), (other, plain)):
            loss_of(each, 0, rank=0).backward()
            stepper.step()
        assert_close(model.parameters(), other.parameters())
    finally:
        gc.shutdown()
