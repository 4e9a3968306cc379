"""Mistakes: each a typed error that says what is wrong, on every rank, and never a hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks

import gradcomp.torch as gc


def net(width: int = 4) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))


def wrap(model, compression="none", named=None, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters()) if named is None else named
    return gc.DistributedOptimizer(optimizer, named, compression, **arguments)


def assert_still_working() -> None:
    """The job goes on after an error of construction."""
    model = net()
    for p in model.parameters():
        torch.nn.init.ones_(p)
    optimizer = wrap(model)
    model(torch.ones(2, 4) * (1 + gc.rank())).sum().backward()
    optimizer.step()


# ---------------------------------------------------------------------------------------- the same mistake everywhere


@on_ranks(2)
def test_a_name_used_twice_is_refused():
    model = net()
    with pytest.raises(gc.ConfigError, match="more than once: x"):
        wrap(model, named=[("x", p) for p in model.parameters()])
    assert_still_working()


@on_ranks(2)
def test_a_parameter_with_two_names_is_refused():
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(gc.ConfigError, match=r"two names: '0\.weight' and 'again'"):
        wrap(model, named=[*named, ("again", named[0][1])])


@on_ranks(2)
def test_a_parameter_without_a_name_is_refused():
    model = net()
    with pytest.raises(gc.ConfigError, match=r"have no name \(shapes \(4, 4\)\)"):
        wrap(model, named=list(model.named_parameters())[1:])


@on_ranks(2)
def test_a_parameter_that_is_not_the_optimizers_is_refused():
    model = net()
    stranger = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(gc.ConfigError, match="does not have: stranger"):
        wrap(model, named=[*model.named_parameters(), ("stranger", stranger)])


@on_ranks(2)
def test_parameters_without_names_are_refused():
    model = net()
    with pytest.raises(gc.ConfigError, match="pairs"):
        wrap(model, named=list(model.parameters()))


@pytest.mark.parametrize("bits", [0, 9, -1, 2.5, True, "4"])
@on_ranks(2)
def test_bits_outside_one_to_eight_are_refused(bits):
    with pytest.raises(gc.ConfigError, match="1 to 8"):
        gc.Quantize(bits=bits)


@on_ranks(2)
def test_groups_without_tensors_are_refused():
    for groups, says in (
        ("2", "a non-negative integer or a list of lists of tensors"),
        ([3], "list of lists of tensors"),
        ([["weight"]], "must consist of tensors, got str"),
    ):
        with pytest.raises(gc.ConfigError, match=says):
            wrap(net(), groups=groups)


@on_ranks(2)
def test_a_parameter_in_two_groups_is_refused():
    model = net()
    weight = model[0].weight
    with pytest.raises(gc.ConfigError, match="only appear once"):
        wrap(model, groups=[[weight], [model[1].weight, weight]])


@on_ranks(2)
def test_wrapping_twice_is_refused():
    model = net()
    optimizer = wrap(model)
    with pytest.raises(gc.StateError, match="already"):
        gc.DistributedOptimizer(optimizer, model.named_parameters())


@on_ranks(2)
def test_something_else_than_an_optimizer_is_refused():
    with pytest.raises(gc.ConfigError, match="Optimizer, got Sequential"):
        gc.DistributedOptimizer(net())


@on_ranks(2)
def test_a_complex_parameter_is_refused_with_a_way_out():
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(gc.ConfigError, match="view_as_real"):
        gc.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("w", weight)])


@on_ranks(2)
def test_an_optimizer_without_trainable_parameters_is_refused():
    model = net().requires_grad_(False)
    with pytest.raises(gc.ConfigError, match="no trainable parameter"):
        wrap(model)


@on_ranks(2)
def test_other_settings_after_init_are_refused():
    with pytest.raises(gc.StateError, match="already initialised"):
        gc.init(seed=1)


@on_ranks(2)
def test_a_second_init_changes_nothing():
    gc.init()
    assert_still_working()


# ---------------------------------------------------------------------------------------- ranks that differ


@on_ranks(2)
def test_different_shapes_are_refused_by_all_and_the_layer_is_named():
    with pytest.raises(gc.PlanMismatchError, match=r"layer '0\.bias'.*\[4\].*rank 1 has .*\[5\]"):
        wrap(net(4 + gc.rank()))
    assert_still_working()


@on_ranks(2)
def test_different_layers_are_refused_by_all():
    model = net() if gc.rank() == 0 else torch.nn.Sequential(*net(), torch.nn.Linear(2, 2))
    with pytest.raises(gc.PlanMismatchError, match=r"2\.bias.*rank 0 has none"):
        wrap(model)


@on_ranks(2)
def test_different_orders_of_layers_are_refused_by_all():
    model = net()
    named = list(model.named_parameters())
    with pytest.raises(gc.PlanMismatchError, match="order"):
        wrap(model, named=named if gc.rank() == 0 else named[::-1])


@on_ranks(2)
def test_different_dtypes_are_refused_by_all():
    model = net() if gc.rank() == 0 else net().bfloat16()
    with pytest.raises(gc.PlanMismatchError, match="bfloat16"):
        wrap(model)


@on_ranks(2)
def test_different_memory_layouts_are_refused_by_all():
    model = torch.nn.Conv2d(3, 4, 2)
    if gc.rank() == 1:
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(gc.PlanMismatchError, match="weight"):
        wrap(model)


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
    for call in (gc.rank, gc.size, gc.barrier, lambda: wrap(model), lambda: gc.allreduce(torch.ones(1))):
        with pytest.raises(gc.StateError, match="not initialised"):
            call()
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
    with pytest.raises(gc.StateError, match="closed"):
        model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(gc.StateError, match="closed"):
        optimizer.step()
    gc.init(timeout_seconds=20.0)
    again = wrap(model)
    model(torch.ones(2, 4)).sum().backward()
    again.step()
    with pytest.raises(gc.StateError, match="made after this one"):
        optimizer.step()


@on_ranks(2, "life")
def test_ten_cycles_of_init_and_shutdown():
    for _ in range(10):
        gc.shutdown()
        gc.shutdown()
        gc.init(timeout_seconds=20.0)
        assert_still_working()


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
