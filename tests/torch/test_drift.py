"""Ranks that no longer train the same model in the same way: an error on all of them, within two exchanges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from batch import on_ranks
from small_torch import in_ddp, wrap

import gradcomp.torch as gc

#: Steps before the ranks part: all parameters are compared behind the first five.
TOGETHER = 7


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))


def optimizer_of(model: torch.nn.Module, compression: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return model, wrap(model, compression)


def hook_of(model: torch.nn.Module, compression: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    ddp, _ = in_ddp(model, compression)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


FRONTENDS = {"optimizer": optimizer_of, "hook": hook_of}
COMPRESSIONS = ["none", "quantize:bits=4", "topk:density=0.1", "powersgd:rank=2"]

Change = Callable[[torch.nn.Module, torch.optim.Optimizer], object]


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    behind_backward: Change = lambda *_: None,
    behind_step: Change = lambda *_: None,
) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        data = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + gc.rank()))
        model(data).square().mean().backward()
        behind_backward(model, optimizer)
        optimizer.step()
        behind_step(model, optimizer)


def only_rank_1(change: Change) -> Change:
    return lambda model, optimizer: change(model, optimizer) if gc.rank() == 1 else None


def edit_gradient(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    next(model.parameters()).grad[3] += 0.25  # a row of 64


def clip(model: torch.nn.Module, _: torch.optim.Optimizer) -> None:
    """By hand, as a function of ours could not see it."""
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


CHANGES = {"edit": edit_gradient, "clip": clip}
SETTINGS = {
    "lr": (0.01, r"learning rate 0\.01 on rank 1, 0\.1 on rank 0"),
    "weight_decay": (0.5, r"weight decay 0\.5 on rank 1, 0 on rank 0"),
}


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    ("compression", "setting"), [*((each, "lr") for each in COMPRESSIONS), ("none", "weight_decay")]
)
@on_ranks(2)
def test_a_setting_of_ones_own_is_named(frontend: str, compression: str, setting: str):
    model, optimizer = FRONTENDS[frontend](net(), compression)
    train(model, optimizer, TOGETHER)
    value, says = SETTINGS[setting]
    if gc.rank() == 1:
        optimizer.param_groups[0][setting] = value
    with pytest.raises(gc.StateError, match=says):
        train(model, optimizer, 2)


def check_change(frontend: str, change: str, compression: str) -> None:
    model, optimizer = FRONTENDS[frontend](net(), compression)
    train(model, optimizer, TOGETHER)
    train(model, optimizer, 1, behind_backward=only_rank_1(CHANGES[change]))
    with pytest.raises(
        gc.StateError, match=r"parameter of layer '0\.weight' differs between rank 0 and rank 1[.;]"
    ):
        train(model, optimizer, 1)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compression", COMPRESSIONS[:2])
@on_ranks(2)
def test_means_that_one_rank_changes_are_noticed_in_the_next_exchange(frontend, change, compression):
    check_change(frontend, change, compression)


@on_ranks(3)
def test_the_rank_that_differs_is_named_among_three():
    check_change("optimizer", "clip", "quantize:bits=4")


@on_ranks(2, "sample alone", fingerprint_steps=0)
def test_a_single_element_is_noticed_within_256_exchanges():
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


@pytest.mark.parametrize("frontend", FRONTENDS)
@on_ranks(2)
def test_ranks_that_change_alike_go_on(frontend: str):
    """Schedulers, clipping and edits on all ranks, with several groups."""
    model, optimizer = FRONTENDS[frontend](net(), "quantize:bits=4")
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)
    train(model, optimizer, 12, behind_backward=clip, behind_step=lambda *_: schedule.step())


@on_ranks(2, "off", fingerprint_every_steps=0)
def test_it_can_be_switched_off():
    model, optimizer = optimizer_of(net(), "none")
    train(model, optimizer, TOGETHER)
    train(model, optimizer, 3, behind_backward=only_rank_1(clip))


@on_ranks(2, "join")
def test_ranks_in_join_have_no_say_and_join_without_a_broadcast_behind_it_is_noticed():
    model, optimizer = optimizer_of(net(), "quantize:bits=4")
    train(model, optimizer, TOGETHER + 4 * (gc.rank() == 0))
    gc.join()
    with pytest.raises(gc.StateError, match=r"parameter of layer '0\.weight' differs"):
        train(model, optimizer, 1)
