"""Mistakes: each a typed error that says what is wrong, on every rank, and never a hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from small_torch import assert_still_working, backward, net

import gradcomp.torch as gc


def wrap(model, compression="none", named=None, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters()) if named is None else named
    return gc.DistributedOptimizer(optimizer, named, compression, **arguments)


# ---------------------------------------------------------------------------------------- the same mistake everywhere


def named(model) -> list:
    return list(model.named_parameters())


def complex_parameter() -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return model


#: By name: a model, what else is given, and the text of the ConfigError.
BAD = {
    "a name twice": (net, lambda m: {"named": [("x", p) for p in m.parameters()]}, "more than once: x"),
    "two names": (
        net,
        lambda m: {"named": [*named(m), ("again", m[0].weight)]},
        r"two names: '0\.weight' and 'again'",
    ),
    "no name": (net, lambda m: {"named": named(m)[1:]}, r"have no name \(shapes \(16, 8\)\)"),
    "a stranger": (
        net,
        lambda m: {"named": [*named(m), ("stranger", torch.nn.Parameter(torch.ones(2)))]},
        "does not have: stranger",
    ),
    "no pairs": (net, lambda m: {"named": list(m.parameters())}, "pairs"),
    "groups of numbers": (net, lambda _: {"groups": [3]}, "list of lists of tensors"),
    "groups of names": (net, lambda _: {"groups": [["weight"]]}, "must consist of tensors, got str"),
    "in two groups": (
        net,
        lambda m: {"groups": [[m[0].weight], [m[2].weight, m[0].weight]]},
        "only appear once",
    ),
    "complex": (complex_parameter, lambda _: {}, "view_as_real"),
    "frozen": (lambda: net().requires_grad_(False), lambda _: {}, "no trainable parameter"),
}


@pytest.mark.parametrize("case", BAD)
@on_ranks(2)
def test_a_bad_argument_is_refused_by_name_and_the_job_goes_on(case):
    make, arguments, says = BAD[case]
    model = make()
    with pytest.raises(gc.ConfigError, match=says):
        wrap(model, **arguments(model))
    assert_still_working()


@on_ranks(2)
def test_something_else_than_a_plain_optimizer_is_refused():
    model = net()
    optimizer = wrap(model)
    with pytest.raises(gc.StateError, match="already"):
        gc.DistributedOptimizer(optimizer, model.named_parameters())
    with pytest.raises(gc.ConfigError, match="Optimizer, got Sequential"):
        gc.DistributedOptimizer(model)


@on_ranks(2)
def test_a_second_init_changes_nothing_and_with_other_settings_it_is_refused():
    gc.init()
    with pytest.raises(gc.StateError, match="already initialised"):
        gc.init(seed=1)
    assert_still_working()


# ---------------------------------------------------------------------------------------- ranks that differ


#: By name: a rank's model, and the text of the error of all.
DIFFERENT = {
    "shape": (lambda rank: torch.nn.Linear(2, 4 + rank), r"layer 'bias'.*\[4\].*rank 1 has .*\[5\]"),
    "layers": (lambda rank: net()[: 3 - rank], r"2\.bias.*rank 1 has none"),
    "dtype": (lambda rank: net().bfloat16() if rank else net(), "bfloat16"),
    "memory layout": (
        lambda rank: torch.nn.Conv2d(3, 4, 2).to(
            memory_format=torch.channels_last if rank else torch.contiguous_format
        ),
        "weight",
    ),
    "order": (lambda rank: net(), "order"),
}


@pytest.mark.parametrize("case", DIFFERENT)
@on_ranks(2)
def test_layers_that_differ_are_refused_by_all_and_named_and_the_job_goes_on(case):
    make, says = DIFFERENT[case]
    model = make(gc.rank())
    arguments = {"named": named(model)[::-1]} if case == "order" and gc.rank() else {}
    with pytest.raises(gc.PlanMismatchError, match=says):
        wrap(model, **arguments)
    assert_still_working()


@on_ranks(2)
def test_different_versions_are_refused_by_all():
    from gradcomp.exchange import agreement

    before = agreement.__version__
    if gc.rank() == 1:
        agreement.__version__ = "9.9"
    try:
        with pytest.raises(gc.PlanMismatchError, match=r"version.*9\.9"):
            wrap(net())
    finally:
        agreement.__version__ = before


@on_ranks(2)
def test_an_untyped_error_on_one_rank_is_told_to_all():
    def broken():
        raise RuntimeError("the generator broke")
        yield

    model = net()
    if gc.rank() == 1:
        with pytest.raises(RuntimeError, match="the generator broke"):
            gc.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), broken())
    else:
        with pytest.raises(gc.PlanMismatchError, match="rank 1 failed: RuntimeError: the generator broke"):
            wrap(model)
    assert_still_working()


@on_ranks(2)
def test_wrapping_twice_on_one_rank_is_told_to_all():
    model = net()
    optimizer = wrap(model)
    if gc.rank() == 1:
        with pytest.raises(gc.StateError, match="already"):
            gc.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        other = net()
        with pytest.raises(gc.PlanMismatchError, match=r"rank 1 failed: StateError.*already"):
            wrap(other)


@on_ranks(2)
def test_a_wrong_number_of_names_for_a_new_group_is_told_to_all():
    optimizer = wrap(net())
    names = ["a", "b"] if gc.rank() == 1 else ["a"]
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "names": names}
    with pytest.raises(gc.GradcompError, match="2 names for 1 parameters"):
        optimizer.add_param_group(group)


@on_ranks(2, "life")
def test_different_settings_are_refused_by_all_and_named():
    rank = gc.rank()
    gc.shutdown()
    gc.init(seed=rank, timeout_seconds=20.0)
    with pytest.raises(gc.PlanMismatchError, match="settings of 'seed': rank 0 has 0, rank 1 has 1"):
        wrap(net())
    gc.shutdown()
    gc.init(timeout_seconds=20.0 + rank)  # need not agree
    assert_still_working()


# ---------------------------------------------------------------------------------------- before and after


@on_ranks(2, "life")
def test_nothing_works_before_init():
    gc.shutdown()
    model = net()
    for call, *given in (
        (gc.rank,),
        (gc.size,),
        (gc.barrier,),
        (wrap, model),
        (gc.allreduce, torch.ones(1)),
        (gc.allgather, torch.ones(1)),
        (gc.broadcast_object, 1),
        (gc.broadcast_parameters, {}),
        (gc.join,),
    ):
        with pytest.raises(gc.StateError, match="not initialised"):
            call(*given)
    twice = [*model.named_parameters(), ("0.weight", torch.nn.Parameter(torch.ones(1)))]
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for arguments, told in (
        (("no optimizer",), "expected a torch.optim.Optimizer"),
        ((sgd, iter(twice)), "names must be unique; used more than once: 0.weight"),
        ((sgd, model.named_parameters(), "nonsense"), "unknown compression 'nonsense'"),
    ):
        with pytest.raises(gc.ConfigError, match=told):
            gc.DistributedOptimizer(*arguments)
    gc.init(timeout_seconds=20.0)


@on_ranks(2, "life")
def test_an_optimizer_does_not_step_after_shutdown_and_its_model_can_be_wrapped_again():
    model = net()
    optimizer = wrap(model)
    gc.shutdown()
    gc.shutdown()
    with pytest.raises(gc.StateError, match="closed"):
        model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(gc.StateError, match="closed"):
        optimizer.step()
    gc.init(timeout_seconds=20.0)
    again = wrap(model)
    backward(model)
    again.step()
    with pytest.raises(gc.StateError, match="made after this one"):
        optimizer.step()


@on_ranks(2, "life")
def test_an_existing_group_is_used_and_left():
    rank = gc.rank()
    gc.shutdown()
    meeting = f"/tmp/gradcomp-test-{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    gc.init(timeout_seconds=20.0)
    assert_still_working()
    gc.shutdown()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.destroy_process_group()
    Path(meeting).unlink(missing_ok=True)
    gc.init(timeout_seconds=20.0)


@on_ranks(2, "life")
def test_a_forked_child_says_what_it_cannot_do_and_ends():
    model = net()
    optimizer = wrap(model)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            optimizer.synchronize()
        except gc.StateError as error:
            code = 0 if "forked" in str(error) else 2
        gc.shutdown()  # as the exit handler would
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_still_working()
