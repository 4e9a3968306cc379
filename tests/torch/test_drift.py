"""Ranks that no longer train the same model in the same way: an error on all of them, within two exchanges."""

from __future__ import annotations

import pytest
import torch
from batch import on_ranks
from small_torch import FRONTENDS, backward, initialised, net, small, train, wrap

import gradcomp.torch as gc

#: Steps before the ranks part: all parameters are compared behind the first five.
TOGETHER = 7
#: One for each place in which ranks compare: numbers at the end of a sum, a header.
COMPRESSIONS = ["none", "quantize:bits=4"]

frontends = pytest.mark.parametrize("frontend", FRONTENDS)


def edit_gradient(model: torch.nn.Module) -> None:
    next(model.parameters()).grad[3] += 0.25  # a row of 16


def clip(model: torch.nn.Module) -> None:
    """By hand, as a function of ours could not see it."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


CHANGES = {"edit": edit_gradient, "clip": clip}
SETTINGS = {
    "lr": (0.01, r"learning rate 0\.01 on rank 1, 0\.1 on rank 0"),
    "weight_decay": (0.5, r"weight decay 0\.5 on rank 1, 0 on rank 0"),
}


@frontends
@pytest.mark.parametrize(("compression", "setting"), [("none", "weight_decay"), ("quantize:bits=4", "lr")])
@on_ranks(2)
def test_a_setting_of_ones_own_is_named(frontend: str, compression: str, setting: str):
    model, optimizer, _ = FRONTENDS[frontend](net(), small(compression))
    train(model, optimizer, TOGETHER)
    value, says = SETTINGS[setting]
    if gc.rank() == 1:
        optimizer.param_groups[0][setting] = value
    with pytest.raises(gc.StateError, match=says):
        train(model, optimizer, 2)


def check_change(frontend: str, change: str, compression: str) -> None:
    model, optimizer, _ = FRONTENDS[frontend](net(), small(compression))
    train(model, optimizer, TOGETHER)
    train(model, optimizer, 1, before_step=lambda: CHANGES[change](model) if gc.rank() == 1 else None)
    with pytest.raises(
        gc.StateError, match=r"parameter of layer '0\.weight' differs between rank 0 and rank 1[.;]"
    ):
        train(model, optimizer, 1)


@frontends
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@on_ranks(2)
def test_means_that_one_rank_changes_are_noticed_in_the_next_exchange(frontend, change, compression):
    check_change(frontend, change, compression)


@on_ranks(3)
def test_the_rank_that_differs_is_named_among_three():
    check_change("optimizer", "clip", "quantize:bits=4")


@on_ranks(2)
def test_a_single_element_is_noticed_within_256_exchanges():
    with initialised(fingerprint_steps=0):
        model = torch.nn.Linear(200, 300)
        optimizer = wrap(model)
        gc.broadcast_parameters(model.state_dict())
        if gc.rank() == 1:
            with torch.no_grad():
                model.weight[123, 45] += 1e-3
        with pytest.raises(gc.StateError, match="'weight' differs"):  # noqa: PT012
            for _ in range(257):
                optimizer.zero_grad()
                model.bias.square().sum().backward()
                optimizer.step()


@frontends
@on_ranks(2)
def test_ranks_that_change_alike_go_on(frontend: str):
    """Schedulers, clipping and edits on all ranks, with several groups."""
    model, optimizer, _ = FRONTENDS[frontend](net(), small("quantize:bits=4"))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    train(model, optimizer, 12, before_step=lambda: clip(model), after_step=schedule.step)


@on_ranks(2)
def test_it_can_be_switched_off():
    with initialised(fingerprint_every_steps=0):
        model = net()
        optimizer = wrap(model)
        train(model, optimizer, TOGETHER)
        train(model, optimizer, 3, before_step=lambda: clip(model) if gc.rank() == 1 else None)


@on_ranks(2, "join")
def test_ranks_in_join_have_no_say_and_join_without_a_broadcast_behind_it_is_noticed():
    model = net()
    optimizer = wrap(model, small("quantize:bits=4"))
    train(model, optimizer, TOGETHER + 4 * (gc.rank() == 0))
    gc.join()
    with pytest.raises(gc.StateError, match=r"parameter of layer '0\.weight' differs"):
        train(model, optimizer, 1)


@on_ranks(2)
def test_the_fingerprint_names_the_first_layer_that_differs():
    model = net()
    optimizer = wrap(model)
    if gc.rank() == 1:
        with torch.no_grad():
            model[0].bias[0] += 1e-3
            model[2].weight[0] += 1e-3
    train(model, optimizer, 1)
    with pytest.raises(gc.StateError, match=r"after step 1 .*0.bias.*rank 1"):
        backward(model, 1)


@on_ranks(2)
def test_all_parameters_are_compared_every_so_many_steps():
    with initialised(fingerprint_steps=0, fingerprint_every_steps=3):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 9000)
        optimizer = wrap(model)
        train(model, optimizer, 4)
        if gc.rank() == 1:
            with torch.no_grad():
                model.weight[5000, 4] += 1e-3
        with pytest.raises(gc.StateError, match=r"after step 6 .*weight.*rank 1"):
            train(model, optimizer, 4, first=4)
