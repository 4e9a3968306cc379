"""What ``ddp_comm_hook`` refuses, on every rank, and what it warns about."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from logs import logged
from small_torch import FRONTENDS, NEAREST, assert_same_on_all_ranks, net, small, train
from torch.nn.parallel import DistributedDataParallel

import gradcomp.torch as gc

FOUR_BITS = "quantize:bits=4"


@on_ranks(2)
def test_ranks_that_differ_and_what_cannot_be_exchanged_raise_on_both():
    first = gc.rank() == 0
    for error, says, model, compression in (
        (gc.PlanMismatchError, r"layer '(weight|bias)'", torch.nn.Linear(8, 3 + gc.rank()), FOUR_BITS),
        (gc.PlanMismatchError, "weight", net(), small(f"quantize:bits={4 + gc.rank()}")),
        (
            gc.PlanMismatchError if first else gc.ConfigError,
            "sparse gradients",
            torch.nn.Embedding(5, 4, sparse=not first),
            FOUR_BITS,
        ),
        (gc.ConfigError, r"torch\.nn\.Module", [torch.zeros(3)], FOUR_BITS),
        (gc.ConfigError, "trainable", torch.nn.Tanh(), FOUR_BITS),
    ):
        with pytest.raises(error, match=says):
            gc.ddp_comm_hook(model, compression)


@on_ranks(2)
def test_layers_unfrozen_later_are_refused_before_parameters_drift():
    model = net()
    model[2].requires_grad_(False)
    ddp, optimizer, _ = FRONTENDS["hook"](model)  # of all, as scripts do that unfreeze later
    train(ddp, optimizer, 2)
    model[2].requires_grad_(True)
    with pytest.raises(gc.StateError, match=r"frozen.*ddp_comm_hook.*2\.weight, 2\.bias.*anew"):
        train(ddp, optimizer, 1, first=2)
    assert_same_on_all_ranks(model.parameters())


def other_hook(state, bucket):
    raise AssertionError("it is never called")


def fp16(ddp):
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def other(ddp):
    ddp.register_comm_hook(None, other_hook)


def ours(ddp):
    ddp.register_comm_hook(*gc.ddp_comm_hook(ddp))


def around_a_bare_model(ddp):
    other(ddp)
    state, hook = gc.ddp_comm_hook(ddp.module)
    ddp.register_comm_hook(state, hook)


def wrapped_later(ddp):
    state, hook = gc.ddp_comm_hook(ddp.module)
    later = DistributedDataParallel(torch.compile(ddp.module, backend="eager"))
    later.register_comm_hook(state, hook)
    other(later)


def theirs_first(ddp):
    state, hook = gc.ddp_comm_hook(ddp)
    other(ddp)
    ddp.register_comm_hook(state, hook)


TWO_HOOKS = {
    "around a bare model": ([around_a_bare_model], "other_hook"),
    "wrapped later": ([wrapped_later], "other_hook"),
    "theirs first": ([theirs_first], "other_hook"),
    "ours first": ([ours, other], "other_hook"),
    "builtin second": ([ours, fp16], "FP16_COMPRESS"),
    "ours twice": ([ours, ours], "gradcomp"),
}


@pytest.mark.parametrize("case", TWO_HOOKS)
@on_ranks(2)
def test_a_second_hook_beside_ours_is_refused_by_name_in_either_order(case):
    registers, theirs = TWO_HOOKS[case]
    ddp = DistributedDataParallel(net())
    with pytest.raises(gc.ConfigError, match=rf"one communication hook.*{theirs}"):  # noqa: PT012
        for register in registers:
            register(ddp)


def resumed(kind, compression=NEAREST, *, state_too=False, **options) -> list[str]:
    """What is said to a model whose optimizer goes on from elsewhere, and its compression state too, or not."""
    ddp, optimizer, state = FRONTENDS["hook"](net(), compression, kind=kind, lr=0.01, options=options)
    train(ddp, optimizer)
    saved, compressed = copy.deepcopy(optimizer.state_dict()), state.compression_state()
    ddp, optimizer, state = FRONTENDS["hook"](net(), compression, kind=kind, lr=0.01, options=options)
    with logged(logging.WARNING) as lines:
        optimizer.load_state_dict(saved)
        if state_too:
            state.load_compression_state(compressed)
        train(ddp, optimizer)
    return [line for line in lines if "gc.load" in line]


@on_ranks(2)
def test_an_optimizer_that_goes_on_without_its_compression_state_is_warned_about_once():
    for kind, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9})):
        assert len(resumed(kind, **options)) == 1
        assert not resumed(kind, state_too=True, **options)
    assert not resumed(torch.optim.AdamW, "none"), "there is no state that could be lost"
    assert not resumed(torch.optim.SGD), "nothing tells it from a new one"
    assert not resumed(torch.optim.Adagrad, state_too=True)


@on_ranks(2)
def test_an_optimizer_that_begins_is_no_reason_to_warn():
    for kind in (torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD):
        ddp, optimizer, _ = FRONTENDS["hook"](net(), NEAREST, kind=kind, lr=0.01)
        with logged(logging.WARNING) as lines:
            train(ddp, optimizer, 2)
        assert not lines


@on_ranks(2)
def test_parameters_that_ddp_ignores_are_no_layers():
    model = net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    ddp, optimizer, state = FRONTENDS["hook"](model)
    train(ddp, optimizer)
    assert "2.bias" not in state.plan().by_layer
