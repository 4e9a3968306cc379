"""The distributed optimizer as an optimizer: what users and libraries do with one, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from small_torch import (
    FRONTENDS,
    NEAREST,
    Raises,
    assert_close,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    exchanger_of,
    loss_of,
    net,
    one_process,
    same,
    small,
    train,
    unsent,
    wrap,
)

import gradcomp.torch as gc
from gradcomp.job import runtime

# ---------------------------------------------------------------------------------------- still the optimizer


@pytest.mark.parametrize(("kind", "option"), [("SGD", ""), ("Adam", "fused"), ("Adam", "foreach")])
@on_ranks(2)
def test_two_ranks_train_as_one_process_with_all_data(kind, option):
    kind = getattr(torch.optim, kind)
    model = net()
    train(model, wrap(model, kind=kind, lr=0.01, options={option: True} if option else None))
    assert_close(model.parameters(), one_process(kind, lr=0.01))


@on_ranks(2)
def test_horovods_arguments_are_taken_by_position_and_change_nothing():
    for groups in (None, 2, [], "first two"):
        model = net()
        parameters = list(model.parameters())
        given = [parameters[:2], parameters[3:]] if groups == "first two" else groups
        plain = torch.optim.SGD(parameters, lr=0.1)
        named = model.named_parameters()
        optimizer = gc.DistributedOptimizer(
            plain, named, gc.Compression.none, 1, gc.Average, 1.0, 0, given, False, gc.global_process_set
        )
        train(model, optimizer, 2)
        assert_close(model.parameters(), one_process(steps=2))
    with pytest.warns(DeprecationWarning, match="older spelling"):
        wrap(net(), num_groups=2)


@on_ranks(2)
def test_passes_per_step_may_change_between_steps_and_zero_grad_begins_a_window_anew():
    model = net()
    optimizer = wrap(model)
    train(model, optimizer, 1)
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(2)
    backward(model, 1)
    with pytest.raises(gc.StateError):
        optimizer.set_backward_passes_per_step(1)
    own = [p.grad.clone() for p in model.parameters()]
    backward(model, 1)
    means = [gc.allreduce(2 * gradient) for gradient in own]
    assert_close([p.grad for p in model.parameters()], means)
    optimizer.step()
    with pytest.raises(gc.ConfigError, match="backward_passes"):
        optimizer.set_backward_passes_per_step(0)
    optimizer.zero_grad()
    for step, zeroes, exchanges in ((5, True, 2), (0, False, 2), (1, False, 3)):
        backward(model, step)
        if zeroes:
            optimizer.zero_grad()
        assert optimizer.statistics().steps == exchanges


@pytest.mark.parametrize("made", ["before", "after"])
@on_ranks(2)
def test_a_scheduler_made_before_wrapping_or_after_it_works_without_warning(made):
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = scheduler(plain) if made == "before" else None
    optimizer = gc.DistributedOptimizer(plain, model.named_parameters())
    schedule = schedule or scheduler(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            train(model, optimizer, 1, step)
            schedule.step()
    assert_close(model.parameters(), one_process(scheduler=scheduler))


@on_ranks(2)
def test_a_closure_is_evaluated_on_means():
    model = net()
    optimizer = wrap(model)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
    assert_close(model.parameters(), one_process())


@pytest.mark.parametrize("frontend", FRONTENDS)
@on_ranks(2)
def test_lbfgs_evaluates_its_closure_several_times_and_ranks_agree(frontend):
    options = {"max_iter": 4}
    model, optimizer, state = FRONTENDS[frontend](net(), kind=torch.optim.LBFGS, lr=0.5, options=options)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / gc.size()

    for _ in range(3):
        optimizer.step(closure)
    assert state.statistics().steps > 3
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_the_wrapped_optimizer_is_the_same_object_and_what_is_copied_or_saved_of_it_is_the_plain_one():
    model = net()
    plain = torch.optim.Adam(model.parameters())
    optimizer = gc.DistributedOptimizer(plain, model.named_parameters(), small("quantize:bits=4"))
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    train(model, optimizer, 1)
    before = bits_of(model.parameters())
    twin, other = copy.deepcopy((model, optimizer))
    loss_of(twin).backward()
    other.step()
    assert bits_of(model.parameters()) == before
    assert bits_of(twin.parameters()) != before
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    loaded = torch.optim.Adam(net().parameters())
    loaded.load_state_dict(saved)
    for copied in (pickle.loads(pickle.dumps(optimizer)), loaded):
        assert type(copied) is type(other) is torch.optim.Adam
        assert same(copied.state_dict()["state"], optimizer.state_dict()["state"])
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)
    assert optimizer.statistics().steps == 2
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_parameters_of_an_added_group_are_exchanged_and_residuals_are_kept():
    first, second = net(), net(1)
    optimizer = wrap(first, NEAREST)
    train(first, optimizer, 1)
    optimizer.zero_grad()
    before = unsent(optimizer)
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.01})
    assert before["0.weight"].any()
    after = unsent(optimizer)
    for name, owed in before.items():
        torch.testing.assert_close(after[name], owed)
    for step in range(2):
        optimizer.zero_grad()
        (loss_of(first, step) + loss_of(second, step)).backward()
        optimizer.step()
    assert_same_on_all_ranks([*first.parameters(), *second.parameters()])


@on_ranks(2)
def test_a_group_that_cannot_be_added_leaves_the_optimizer_as_it_was():
    model = net()
    optimizer = wrap(model)
    extra = torch.nn.Parameter(torch.ones(3))
    for names, error in (
        (["0.weight"], gc.ConfigError),
        ((n for n in ["extra"]), (TypeError, gc.GradcompError)),
    ):
        with pytest.raises(error, match=r"0.weight" if error is gc.ConfigError else ""):
            optimizer.add_param_group({"params": [extra], "names": names})
        assert len(optimizer.param_groups) == 1
    train(model, optimizer, 1)
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_optimizers_whose_gradients_come_in_different_orders_do_not_wait_for_each_other():
    torch.manual_seed(0)
    heads = [torch.nn.Linear(8, 2), torch.nn.Linear(8, 2)]
    optimizers = []
    for head in heads:
        # An unused parameter, so that no exchange bucket is complete before the flush.
        named = [*head.named_parameters(), ("unused", torch.nn.Parameter(torch.ones(3)))]
        optimizers.append(gc.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named))
    for step in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(head(data(step)).square().mean() for head in heads[:: 1 - 2 * gc.rank()]).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same_on_all_ranks([p for head in heads for p in head.parameters()])


@on_ranks(2)
def test_of_two_optimizers_over_one_stage_the_last_one_exchanges_and_the_other_says_so():
    model = net()
    whole = wrap(model, NEAREST)
    stage = gc.DistributedOptimizer(
        torch.optim.SGD(model[2].parameters(), lr=0.1), model[2].named_parameters(), NEAREST
    )
    for step in range(6):
        whole.zero_grad()
        stage.zero_grad()
        backward(model, step)
        with pytest.raises(gc.StateError, match=r"'2.weight', '2.bias' are exchanged by a Dist.* made after"):
            whole.step()
        stage.step()
    assert_same_on_all_ranks(model.parameters())
    with pytest.raises(gc.StateError, match="made after"):
        whole.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    with pytest.raises(gc.StateError, match="made after"):
        gc.save("nowhere", whole)


@pytest.mark.parametrize("midway", ["between steps", "means unused", "step open"])
@on_ranks(2)
def test_a_model_can_be_wrapped_again_while_its_old_optimizer_is_still_held(midway):
    """As a notebook's cell does that is run again: until the name is bound anew, it holds the old one."""
    model = net()
    optimizer = wrap(model, NEAREST, finish="step" if midway == "step open" else "backward")
    exchanges = len(runtime.current().exchangers)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        if step < 2 or midway == "between steps":
            optimizer.step()
    apart = copy.deepcopy(model)
    held, optimizer = optimizer, wrap(model, NEAREST)
    other = wrap(apart, NEAREST)
    for step in range(4):
        for trained, one in ((model, optimizer), (apart, other)):
            one.zero_grad()
            loss_of(trained, step).backward()
            one.step()
        held.zero_grad()
    assert bits_of(model.parameters()) == bits_of(apart.parameters())
    assert_same_on_all_ranks(model.parameters())
    assert len(runtime.current().exchangers) == exchanges + 1


# ---------------------------------------------------------------------------------------- synchronize, clip, zero


@on_ranks(2)
def test_clipping_after_synchronize_sees_the_norm_of_the_mean_and_what_is_clipped_is_applied():
    model, one = net(), net()
    optimizer = wrap(model, lr=1.0)
    transport = exchanger_of(optimizer).pipeline.transport
    before = [p.detach().clone() for p in model.parameters()]
    (sum(loss_of(one, 0, rank) for rank in range(gc.size())) / gc.size()).backward()
    backward(model)
    optimizer.synchronize()
    sent, means = transport.bytes_sent, bits_of(p.grad for p in model.parameters())
    optimizer.synchronize()  # sends nothing
    assert transport.bytes_sent == sent
    assert bits_of(p.grad for p in model.parameters()) == means
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, one)]
    torch.testing.assert_close(*norms)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in one.parameters()])
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.01), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("finish", ["backward", "step"])
@on_ranks(2)
def test_a_step_behind_synchronize_warns_unless_it_is_said_to_be_meant(finish):
    model = net()
    optimizer = wrap(model, finish=finish)
    cases = [("", 0), ("synchronize", 1), ("", 0), ("skip_synchronize", 0)]
    for step, (case, expected) in enumerate(cases):
        optimizer.zero_grad()
        backward(model, step)
        if case:
            optimizer.synchronize()
        with (
            warnings.catch_warnings(record=True) as caught,
            optimizer.skip_synchronize() if case == "skip_synchronize" else contextlib.nullcontext(),
        ):
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == expected
        assert all("called without optimizer.skip_synchronize()" in str(one.message) for one in caught)
    assert_close(model.parameters(), one_process(steps=4))


@on_ranks(2)
def test_parameters_have_the_names_that_horovods_users_look_up():
    first, second = net(), torch.nn.Linear(3, 3)
    second.bias.requires_grad_(False)
    groups = [{"params": first.parameters()}, {"params": second.parameters()}]
    for op in (gc.Average, gc.Adasum):
        optimizer = gc.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), op=op)
        names = optimizer._parameter_names
        assert names.keys() == {*first.parameters(), *second.parameters()}
        assert len(set(names.values())) == len(names)
        assert all(one == set(names.values()) for one in gc.allgather_object(set(names.values())))
        groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
    model = net()
    assert wrap(model)._parameter_names == {p: name for name, p in model.named_parameters()}


@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_zero_grad_without_step_forgets_the_exchange(set_to_none):
    model = net()
    optimizer = wrap(model, NEAREST)
    for step in (7, 0, 1, 7, 2):  # buckets are put in order after the first that is applied
        optimizer.zero_grad(set_to_none=set_to_none)
        before = optimizer.compression_state()["residuals"]
        backward(model, step)
        if step == 7:
            optimizer.zero_grad(set_to_none=set_to_none)
            assert same(optimizer.compression_state()["residuals"], before)
            assert all(p.grad is None if set_to_none else not p.grad.any() for p in model.parameters())
        else:
            optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_zero_grad_in_mid_step_drains():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 2), "b": torch.nn.Linear(8, 2)})
    optimizer = wrap(model, finish="step")
    backward(model["a"])  # only one of the two backward passes of this step
    optimizer.zero_grad()
    before = bits_of(model.parameters())
    for head in model.values():
        backward(head, 1)
    optimizer.step()
    assert bits_of(model.parameters()) != before
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_a_backward_that_raised_can_be_repeated_after_zero_grad():
    model = net()
    optimizer = wrap(model)
    with pytest.raises(torch.OutOfMemoryError):
        model[2](Raises.apply(model[0](data(0)))).sum().backward()
    optimizer.zero_grad()
    train(model, optimizer)
    assert_close(model.parameters(), one_process())


# ---------------------------------------------------------------------------------------- without a learning rate


class Relative(torch.optim.SGD):
    """As Adafactor with relative steps: it finds its learning rate by itself, and has None where others have it."""

    def __init__(self, parameters, lr=None):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["lr"] = lr

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-0.1)


@on_ranks(2)
def test_an_optimizer_without_a_learning_rate_trains():
    for compression in ("none", NEAREST):
        model = net()
        optimizer = wrap(model, compression, kind=Relative, lr=None)
        train(model, optimizer)
        assert_same_on_all_ranks(model.parameters())
        if compression == "none":
            assert_close(model.parameters(), one_process())


@on_ranks(2)
def test_without_a_learning_rate_nothing_can_follow_it():
    following = "error_feedback[topk:density=0.1]:follow_rate=true"
    with pytest.raises(gc.ConfigError, match=r"follows the learning rate.*Relative"):
        wrap(net(), following, kind=Relative, lr=None)
    optimizer = wrap(net(), kind=Relative, lr=None)
    with pytest.raises(gc.ConfigError, match=r"follows the learning rate.*Relative"):
        optimizer.set_compression(following)


# ---------------------------------------------------------------------------------------- frozen, buffers, the user's


@on_ranks(2)
def test_frozen_parameters_stay_as_they_are_and_unfreezing_is_an_error_that_names_the_layer():
    model = net()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    optimizer = wrap(model)
    train(model, optimizer, 1)
    assert torch.equal(model[0].weight, frozen)
    assert_same_on_all_ranks(model.parameters())
    model[0].weight.requires_grad_(True)
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(gc.StateError, match=r"0.weight"):
        optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_the_users_collectives_on_the_default_group_do_not_interfere():
    model = net()
    optimizer = wrap(model, NEAREST)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        total = torch.tensor([gc.rank() + step], dtype=torch.float32)
        work = dist.all_reduce(total, async_op=True)
        optimizer.step()
        work.wait()
        assert total.item() == 1 + 2 * step
    assert_same_on_all_ranks(model.parameters())


# ---------------------------------------------------------------------------------------- a world of one


@on_ranks(1)
def test_a_world_of_one_trains_as_the_plain_optimizer():
    model, plain = net(), net()
    optimizer = wrap(model, small("quantize:bits=1"), kind=torch.optim.AdamW)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(5):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
    assert bits_of(model.parameters()) == bits_of(plain.parameters())


@on_ranks(1)
def test_a_world_of_one_has_all_methods():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model, small("quantize:bits=4"))
    model[0].weight.requires_grad_(True)  # no error here
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with optimizer.no_sync():
            backward(model)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.statistics().wire_bytes == 0
    assert optimizer.reduced_statistics() is None
    assert optimizer.trace_spans() == ()
    metrics = optimizer.compression_metrics()
    assert metrics.pop("gradcomp/ratio") == 1
    assert not any(metrics.values())
    optimizer.step(lambda: loss_of(model, 1))
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.set_compression("none")
    assert optimizer.plan() is None
    with pytest.raises(gc.ConfigError, match="nonsense"):
        optimizer.set_compression("nonsense")
