"""What would train wrongly without a word is refused, or said: on every rank, and nobody hangs."""

from __future__ import annotations

import time
import types
from collections.abc import Callable

import pytest
import torch
from batch import on_ranks
from small_torch import (
    FRONTENDS,
    NEAREST,
    assert_same_on_all_ranks,
    assert_still_working,
    backward,
    bits_of,
    in_ddp,
    loss_of,
    net,
    own_gradients,
    scaled_step,
    train,
    wrap,
)
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc
from gradcomp.job import runtime

frontends = pytest.mark.parametrize("frontend", FRONTENDS)


# ---------------------------------------------------------------------- DistributedOptimizer under DDP


def compiled(model):
    return torch.compile(model, backend="eager")


def ddp_before(around=lambda model: model, within=lambda model: model):
    model = around(DistributedDataParallel(within(net())))
    return model, wrap(model)


def ddp_after(around=lambda model: model):
    model = net()
    optimizer = wrap(model)
    return around(DistributedDataParallel(model)), optimizer


def accelerated():
    """As Accelerate's ``prepare(model, optimizer)`` does: the forward pass under autocast, then DDP, then compiled.

    Its optimizer calls ours through a patched ``step``.
    """
    model = net()
    optimizer = wrap(model)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model = compiled(DistributedDataParallel(model, gradient_as_bucket_view=True))
    optimizer.step = types.MethodType(type(optimizer).step, optimizer)
    return model, optimizer


IN_DDP = {
    "before": ddp_before,
    "after": ddp_after,
    "compiled before": lambda: ddp_before(around=compiled),
    "compiled after": lambda: ddp_after(around=compiled),
    "of compiled": lambda: ddp_before(within=compiled),
    "accelerated": accelerated,
}


@pytest.mark.parametrize("case", IN_DDP)
@on_ranks(2)
def test_an_optimizer_of_a_model_in_ddp_is_refused_and_the_others_go_on(case):
    model, optimizer = IN_DDP[case]()
    for _ in range(2):  # a caller who goes on is told again
        with pytest.raises(gc.ConfigError, match=r"register_comm_hook\(state, hook\)"):
            train(model, optimizer)
        if case == "after":
            assert_still_working()
        optimizer.zero_grad()


@on_ranks(2)
def test_it_is_refused_too_where_ddp_only_ever_runs_without_synchronisation():
    model, optimizer = ddp_before()
    with model.no_sync(), pytest.raises(gc.ConfigError, match="ddp_comm_hook"):
        train(model, optimizer)


@on_ranks(2)
def test_one_model_in_ddp_with_the_hook_and_another_with_the_optimizer_train_together():
    models = [net(), net(1)]
    ddp, theirs, _ = FRONTENDS["hook"](models[0])
    plain, mine, _ = FRONTENDS["optimizer"](models[1])
    ddp_without_hook = DistributedDataParallel(net(2))
    for step in range(2):
        mine.zero_grad()
        theirs.zero_grad()
        (loss_of(ddp, step) + loss_of(plain, step) + loss_of(ddp_without_hook, step)).backward()
        mine.step()
        theirs.step()
    assert_same_on_all_ranks(p for model in models for p in model.parameters())


@on_ranks(2)
def test_of_an_optimizer_and_hooks_over_one_model_the_last_one_exchanges_and_the_others_say_so():
    model = net()
    wrapped = wrap(model, NEAREST)
    train(model, wrapped)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    first, _ = in_ddp(model, NEAREST)
    train(first, plain)
    with pytest.raises(gc.StateError, match="ddp_comm_hook that was made after"):
        train(first, wrapped)
    second, _ = in_ddp(model, NEAREST)
    train(second, plain, 4)
    with pytest.raises(gc.StateError, match="ddp_comm_hook that was made after"):
        train(first, plain)
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_a_ddp_that_is_no_longer_run_is_no_reason_to_refuse():
    ddp = DistributedDataParallel(net())
    backward(ddp)
    ddp.zero_grad()
    train(ddp.module, wrap(ddp.module))


@on_ranks(2)
def test_parameters_that_ddp_ignores_may_be_the_optimizers():
    model = net()
    ignored = [name for name, _ in model[2].named_parameters(prefix="2")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    optimizer = gc.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.1), model[2].named_parameters()
    )
    train(ddp, optimizer)


@on_ranks(2)
def test_nothing_is_left_of_the_check_after_the_first_exchange():
    ddp = DistributedDataParallel(net())
    before = dict(ddp._forward_pre_hooks)  # of optimizers that are still without a first exchange
    optimizer = wrap(ddp.module)
    assert dict(ddp._forward_pre_hooks) != before
    train(ddp.module, optimizer, 1)
    assert dict(ddp._forward_pre_hooks) == before


# ---------------------------------------------------------------------- updates inside backward


def for_each(model: torch.nn.Module, act: Callable[[torch.nn.Parameter, int], object]) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: act(p, number))


def plain_ones(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]


def a_wrapped_one_for_each_layer(model: torch.nn.Module):
    return model, [
        gc.DistributedOptimizer(optimizer, [named])
        for optimizer, named in zip(plain_ones(model), model.named_parameters(), strict=True)
    ]


def a_plain_one_for_each_layer(model: torch.nn.Module, frontend: str):
    trained, model.beside, _ = FRONTENDS[frontend](model)
    return trained, plain_ones(model)


#: The module to call, and by layer the optimizer that steps when its gradient is there.
STEPS_INSIDE = {
    "the wrapped one": lambda model: (model, [wrap(model)] * 4),
    "a plain one for each layer": lambda model: a_plain_one_for_each_layer(model, "optimizer"),
    "a wrapped one for each layer": a_wrapped_one_for_each_layer,
    "one for each layer in DDP": lambda model: a_plain_one_for_each_layer(model, "hook"),
}


@pytest.mark.parametrize(
    ("case", "hooks_first"), [*((case, False) for case in STEPS_INSIDE), ("the wrapped one", True)]
)
@on_ranks(2)
def test_an_optimizer_that_steps_inside_backward_is_refused_before_its_first_step(case, hooks_first):
    model, optimizers = net(), []

    def step(_: torch.nn.Parameter, number: int) -> None:
        optimizers[number].step()
        optimizers[number].zero_grad()

    if hooks_first:
        for_each(model, step)
    trained, made = STEPS_INSIDE[case](model)
    optimizers += made
    if not hooks_first:
        for_each(model, step)
    before = bits_of(model.parameters())
    with pytest.raises(
        gc.StateError, match=r"an optimizer steps inside backward.*call step\(\) after backward"
    ):
        backward(trained)
    assert bits_of(model.parameters()) == before


@pytest.mark.parametrize("wrapped_first", [False, True])
@on_ranks(2)
def test_an_update_by_hand_inside_backward_is_an_error_of_that_backward(wrapped_first):
    def update(parameter: torch.nn.Parameter, _: int) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    model = net()
    optimizer = wrap(model) if wrapped_first else None
    for_each(model, update)
    optimizer = optimizer or wrap(model)
    with pytest.raises(
        gc.GradcompError, match=r"was set to None inside backward.*call step\(\) after backward"
    ):
        backward(model)
    with pytest.raises(gc.GradcompError, match="inside backward"):
        optimizer.step()


# ---------------------------------------------------------------------- steps without an exchange


def the_bare_model_in_place_of_ddp():
    ddp, optimizer, _ = FRONTENDS["hook"](net())
    return optimizer, lambda step: backward(ddp.module, step)


def the_bare_model_after_a_while():
    ddp, optimizer, _ = FRONTENDS["hook"](net())
    train(ddp, optimizer, 3)
    with ddp.no_sync():
        train(ddp, optimizer, 3)  # the ranks are alike no more, but that was asked for
    return optimizer, lambda step: backward(ddp.module, step)


def a_hook_without_its_ddp():
    model = net()
    model.hook = gc.ddp_comm_hook(model)
    return torch.optim.SGD(model.parameters(), lr=0.1), lambda step: backward(model, step)


def copies_that_are_trained():
    """Master weights, as of mixed precision by hand: the loop trains the copy, the optimizer has the original."""
    model, copied = net(), net()
    optimizer = wrap(model)

    def backward_of_the_copy(step: int) -> None:
        copied.zero_grad()
        backward(copied, step)
        for original, copy in zip(model.parameters(), copied.parameters(), strict=True):
            original.grad = copy.grad.clone()

    return optimizer, backward_of_the_copy


def a_plain_optimizer_beside_the_wrapped_one():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.beside = wrap(model, backward_passes_per_step=100)
    return optimizer, lambda step: backward(model, step)


BYPASSES = (
    the_bare_model_in_place_of_ddp,
    the_bare_model_after_a_while,
    a_hook_without_its_ddp,
    copies_that_are_trained,
    a_plain_optimizer_beside_the_wrapped_one,
)
BYPASSED = {make.__name__: make for make in BYPASSES}


@pytest.mark.parametrize(
    ("case", "late"),
    [(case, False) for case in BYPASSED]
    + [(case, True) for case in ("the_bare_model_in_place_of_ddp", "copies_that_are_trained")],
)
@on_ranks(2)
def test_the_second_step_on_gradients_that_nobody_exchanged_is_an_error_with_both_causes(case, late):
    """Rank 0 raises it too where it is late: the other has found the error then."""
    optimizer, act = BYPASSED[case]()
    act(10)
    optimizer.step()
    optimizer.zero_grad()
    act(11)
    exchanger = runtime.current().exchangers[-1]
    while late and gc.rank() == 0 and exchanger.error is None:
        time.sleep(0.01)
    with pytest.raises(gc.GradcompError, match=r"ddp\.module\(x\).*a model that the optimizer does not hold"):
        optimizer.step()


def accumulated(model: torch.nn.Module, optimizer, window: int, no_sync: Callable[[], object]) -> None:
    """Four passes, one exchange."""
    optimizer.zero_grad()
    with no_sync():
        for part in range(3):
            backward(model, 4 * window + part)
    backward(model, 4 * window + 3)
    optimizer.step()


@frontends
@on_ranks(2)
def test_steps_that_need_no_exchange_are_no_error(frontend):
    """What healthy programs do between exchanges; each several times."""
    bare = net()
    model, optimizer, _ = FRONTENDS[frontend](bare)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1) if frontend == "optimizer" else optimizer
    no_sync = optimizer.no_sync if frontend == "optimizer" else model.no_sync
    head = torch.nn.Linear(3, 1)
    optimizer.zero_grad()
    for _ in range(3):  # no gradient anywhere
        optimizer.step()
    for window in range(3):
        accumulated(model, optimizer, window, no_sync)
        for _ in range(3):  # the last means once more: they are every rank's
            plain.step()
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        head(model(torch.ones(2, 8)).detach()).sum().backward()
        optimizer.step()  # zeros
    for step in range(4):  # steps of its own, under no_sync or behind it
        plain.zero_grad()
        with no_sync():
            backward(model, step)
            if step % 2:
                plain.step()
        if not step % 2:
            plain.step()
    for step in range(3):  # averaged by hand
        optimizer.zero_grad()
        for parameter, gradient in zip(bare.parameters(), own_gradients(bare, step=step), strict=True):
            parameter.grad = gc.allreduce(gradient)
        with no_sync():
            plain.step()


@frontends
@on_ranks(2)
def test_optimizers_that_alternate_as_in_a_gan_and_scalers_that_skip_are_no_bypass(frontend):
    models = torch.nn.Linear(8, 8), net()
    (maker, of_maker, _), (judge, of_judge, _) = (FRONTENDS[frontend](model, NEAREST) for model in models)
    for step in range(6):
        for _ in range(3):
            of_judge.zero_grad()
            with torch.no_grad():
                made = maker(torch.randn(2, 8))
            judge(made).square().mean().backward()
            of_judge.step()
        if step % 2:  # gives the judge gradients too, on which it never steps
            of_maker.zero_grad()
            judge(maker(torch.randn(2, 8))).square().mean().backward()
            of_maker.step()
    assert_same_on_all_ranks(p for model in models for p in model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    model, optimizer, _ = FRONTENDS[frontend](net(2))
    for step in range(6):
        scaled_step(model, optimizer, scaler, step, float("inf") if step in (1, 2, 4) else 1.0)
