"""The distributed optimizer as an optimizer: what users and libraries do with one, on real ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import pickle
import tempfile
import warnings
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from batch import on_ranks
from logs import logged
from small_torch import assert_same_on_all_ranks, backward, bits_of, data, net, train, wrap

import gradcomp.torch as gc
from gradcomp.job import runtime

PHASES = {"ready", "queue", "compress", "send", "reduce", "decompress", "feedback"}
NEAREST = gc.Policy("quantize:bits=4,rounding=nearest,bucket_size=32", filter=gc.Filter(min_elements=8))


def loss_of(model, step, rank=None):
    return model(data(step, rank)).square().mean()


def one_process(kind=torch.optim.SGD, steps=3, lr=0.1, options=None, scheduler=None) -> list[torch.Tensor]:
    """The parameters that one process gets which has all ranks' data."""
    model = net()
    optimizer = kind(model.parameters(), lr=lr, **(options or {}))
    schedule = scheduler(optimizer) if scheduler else None
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, step, rank) for rank in range(gc.size())) / gc.size()).backward()
        optimizer.step()
        if schedule:
            schedule.step()
    return list(model.parameters())


def assert_close(parameters, expected) -> None:
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), e.detach())


def residuals(optimizer) -> list[bytes]:
    state = optimizer._gradcomp.exchanger.pipeline.residuals
    first = [state.first.value(i).tobytes() for i in range(len(state.first.lengths))]
    return first + [state.second.value(i).tobytes() for i in range(len(state.ranges))]


# ---------------------------------------------------------------------------------------- still the optimizer


@pytest.mark.parametrize(
    ("kind", "option"), [("SGD", ""), ("Adam", ""), ("Adam", "fused"), ("Adam", "foreach")]
)
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


@on_ranks(2)
def test_lbfgs_evaluates_its_closure_several_times_and_ranks_agree():
    model = net()
    optimizer = wrap(model, kind=torch.optim.LBFGS, lr=0.5, options={"max_iter": 4})

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / gc.size()

    optimizer.step(closure)
    assert optimizer.statistics().steps > 1
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_the_wrapped_optimizer_is_the_same_object_of_its_class_and_its_pickle_the_plain_one():
    model = net()
    plain = torch.optim.Adam(model.parameters())
    optimizer = gc.DistributedOptimizer(plain, model.named_parameters())
    assert optimizer is plain
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    train(model, optimizer, 1)
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is torch.optim.Adam
    assert loaded.state_dict()["state"][0]["step"] == 1


@on_ranks(2)
def test_a_deep_copy_is_a_plain_optimizer_with_parameters_of_its_own():
    model = net()
    optimizer = wrap(model)
    twin, other = copy.deepcopy((model, optimizer))
    assert type(other) is torch.optim.SGD
    before = bits_of(model.parameters())
    loss_of(twin, 0).backward()
    other.step()
    assert bits_of(model.parameters()) == before
    assert bits_of(twin.parameters()) != before


@on_ranks(2)
def test_the_state_dict_loads_into_the_plain_class_and_into_the_wrapped_one():
    model = net()
    optimizer = wrap(model, "quantize:bits=4", kind=torch.optim.Adam)
    train(model, optimizer, 1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    plain = torch.optim.Adam(net().parameters())
    plain.load_state_dict(state)
    loaded, saved = (each.state[each.param_groups[0]["params"][0]] for each in (plain, optimizer))
    assert torch.equal(loaded["exp_avg"], saved["exp_avg"])
    optimizer.load_state_dict(state)
    train(model, optimizer, 1)
    assert optimizer.statistics().steps == 2
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_parameters_of_an_added_group_are_exchanged_and_residuals_are_kept():
    first, second = net(), net(1)
    optimizer = wrap(first, NEAREST)
    train(first, optimizer, 1)
    optimizer.zero_grad()
    before = [any(residual) for residual in residuals(optimizer)[:4]]
    optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.01})
    assert any(before)
    assert [any(residual) for residual in residuals(optimizer)[:4]] == before
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
def test_two_optimizers_over_parts_of_one_graph_work_as_in_a_gan():
    generator, critic = net(0), torch.nn.Linear(3, 1)
    torch.nn.init.ones_(critic.weight)
    torch.nn.init.zeros_(critic.bias)
    of_generator = wrap(generator, NEAREST)
    of_critic = gc.DistributedOptimizer(
        torch.optim.Adam(critic.parameters()), [(f"critic.{n}", p) for n, p in critic.named_parameters()]
    )
    for step in range(4):
        of_critic.zero_grad()
        (critic(generator(data(step)).detach()).mean() - critic(data(step + 1)[:, :3]).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(data(step))).mean()).backward()  # gives the critic gradients too, never stepped on
        of_generator.step()
    assert_same_on_all_ranks([*generator.parameters(), *critic.parameters()])


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
    before = [p.detach().clone() for p in model.parameters()]
    (sum(loss_of(one, 0, rank) for rank in range(gc.size())) / gc.size()).backward()
    backward(model)
    optimizer.synchronize()
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (model, one)]
    torch.testing.assert_close(*norms)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in one.parameters()])
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])
    torch.testing.assert_close(moved.norm(), torch.tensor(0.01), rtol=1e-3, atol=1e-6)


@on_ranks(2)
def test_a_second_synchronize_sends_nothing():
    model = net()
    optimizer = wrap(model, NEAREST)
    transport = optimizer._gradcomp.exchanger.pipeline.transport
    backward(model)
    sent = transport.bytes_sent
    gradients = bits_of(p.grad for p in model.parameters())
    optimizer.synchronize()
    optimizer.synchronize()
    assert transport.bytes_sent == sent
    assert bits_of(p.grad for p in model.parameters()) == gradients


@on_ranks(2)
def test_skip_synchronize_steps_on_what_synchronize_left():
    model = net()
    optimizer = wrap(model, finish="step")
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert optimizer.statistics().steps == 3
    assert_close(model.parameters(), one_process())


@on_ranks(2)
def test_a_step_behind_synchronize_warns_unless_it_is_said_to_be_meant():
    model = net()
    optimizer = wrap(model)
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
    for step in (7, 0, 1, 2):
        optimizer.zero_grad(set_to_none=set_to_none)
        before = residuals(optimizer)
        backward(model, step)
        if step == 7:
            optimizer.zero_grad(set_to_none=set_to_none)
            assert residuals(optimizer) == before
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
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("broken")

    model = net()
    optimizer = wrap(model)
    with pytest.raises(RuntimeError, match="broken"):
        model[2](Broken.apply(model[0](data(0)))).sum().backward()
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


# ---------------------------------------------------------------------------------------- loss scaling


def scaled_step(model, optimizer, scaler, step, overflow=False, unscaled=None):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, step) * (float("inf") if overflow else 1.0)).backward()
    if unscaled is not None:
        scaler.unscale_(optimizer)
        assert_close([p.grad for p in model.parameters()], unscaled)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_leaves_the_residuals(fused):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kind, options = (torch.optim.Adam, {"fused": True}) if fused else (torch.optim.SGD, None)
    optimizer = wrap(model, NEAREST, kind, options=options, grad_scaler=scaler)
    with logged() as lines:
        for step in range(2):  # buckets are put in order after the first
            scaled_step(model, optimizer, scaler, step)
    assert not [text for text in lines if "grad_scaler" in text]  # we were told of it
    before, kept = bits_of(model.parameters()), residuals(optimizer)
    assert any(any(b) for b in kept)
    scaled_step(model, optimizer, scaler, 2, overflow=gc.rank() == 1)
    optimizer.zero_grad()
    assert bits_of(model.parameters()) == before
    assert residuals(optimizer) == kept
    assert scaler.get_scale() == 512.0
    scaled_step(model, optimizer, scaler, 3)
    assert bits_of(model.parameters()) != before
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_scaled_training_equals_unscaled_training_and_unscaling_sees_the_unscaled_mean():
    model, one = net(), net()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = wrap(model, grad_scaler=scaler)
    (sum(loss_of(one, 0, rank) for rank in range(gc.size())) / gc.size()).backward()
    for step in range(3):
        scaled_step(
            model, optimizer, scaler, step, unscaled=[p.grad for p in one.parameters()] if not step else None
        )
    assert_close(model.parameters(), one_process())


@on_ranks(2)
def test_a_change_of_scale_leaves_residuals_in_their_units():
    def run(scales):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(32, 32))
        scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
        optimizer = gc.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0),
            [("w", weight)],
            gc.Quantize(4, rounding="nearest"),
            grad_scaler=scaler,
        )
        for step, scale in enumerate(scales):
            scaler.update(scale) if step else None
            gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(10 * step + gc.rank()))
            optimizer.zero_grad()
            scaler.scale((weight * gradient).sum()).backward()
            scaler.step(optimizer)
        return weight.detach()

    same, changing = run([1024.0] * 4), run([1024.0, 512.0, 65536.0, 2.0])
    assert (same - changing).abs().max() / same.abs().max() < 1e-6


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


@on_ranks(2)
def test_batch_norm_buffers_are_equal_after_broadcast():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = wrap(model)
    train(model, optimizer, 1)
    gc.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same_on_all_ranks(model.buffers())


# ---------------------------------------------------------------------------------------- seeing it


@on_ranks(2)
def test_no_reader_communicates():
    model = net()
    optimizer = wrap(model, NEAREST)
    train(model, optimizer, 1)
    if gc.rank() == 0:
        optimizer.statistics()
        optimizer.reduced_statistics()
        optimizer.trace_spans()
        optimizer.state_dict()
        optimizer.compression_state()
        repr(optimizer)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@on_ranks(2)
def test_the_trace_is_chrome_json_with_every_kind_of_span():
    model = net()
    optimizer = wrap(model, NEAREST)
    train(model, optimizer, 1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        optimizer.write_trace(path)
        spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["name"] for e in spans} >= PHASES
    assert all(e["dur"] >= 0 and e["pid"] == gc.rank() for e in spans)


@on_ranks(2)
def test_a_timeline_records_all_phases_and_profilers_see_them():
    from torch._C._profiler import _ExperimentalConfig

    model = net()
    optimizer = wrap(model, NEAREST)

    def step() -> None:
        train(model, optimizer, 1)
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as directory:
        alone, each = Path(directory, "alone.json"), Path(directory, "{rank}.json")
        gc.start_timeline(alone)
        if gc.rank() == 0:
            with pytest.raises(gc.StateError, match="is being recorded"):
                gc.start_timeline(alone)
        step()
        gc.stop_timeline()
        gc.stop_timeline()
        step()
        assert alone.exists() == (gc.rank() == 0)
        gc.start_timeline(each, mark_cycles=True)
        later = wrap(net(), NEAREST)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as profile:
            step()
            step()
        gc.allreduce(torch.ones(3), name="loss")
        gc.allgather(torch.ones(2000))
        gc.stop_timeline()
        for path in [alone] * (gc.rank() == 0) + [Path(directory, f"{gc.rank()}.json")]:
            events = json.loads(path.read_text())["traceEvents"]
            rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
            calls = [e for e in events if rows.get(e["tid"]) == "collectives" and e["ph"] == "X"]
            called = [e["name"] for e in calls]
            assert called[-4:] == ["negotiate", "allreduce loss", "negotiate", "allgather"] or path == alone
            assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in calls)
            spans = [e for e in events if e["ph"] == "X" and e not in calls]
            assert {e["name"] for e in spans} == PHASES
            assert {e["pid"] for e in events} == {gc.rank()}
            assert (
                len({e["args"]["step"] for e in spans}) == len([e for e in events if e["ph"] == "i"])
                or path == alone
            )
    del later
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["gradcomp: wait"] == 2
    assert {f"gradcomp: {name}" for name in ("compress", "reduce", "decompress")} <= counts.keys()


@on_ranks(2, "reporting", statistics_every_steps=20, fingerprint_steps=0, fingerprint_every_steps=3)
def test_banner_periodic_line_and_verdict_appear_on_rank_0_only_and_reduced_statistics_are_equal():
    with logged() as said:
        model = net()
        optimizer = wrap(model, NEAREST)
        train(model, optimizer, 61)  # what is due after a step is said when the next one begins
    counts = [
        len([t for t in said if "compressed; exact" in t]),
        len([t for t in said if t.startswith("step ")]),
        len([t for t in said if "bfloat16" in t]),
    ]
    assert counts == ([1, 3, 1] if gc.rank() == 0 else [0, 0, 0]), said
    mine = optimizer.reduced_statistics()
    assert mine.steps == 60
    everyone = gc.allgather_object(mine.vector().tolist())
    assert everyone[0] == everyone[1]


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


@on_ranks(2, "reporting", statistics_every_steps=20, fingerprint_steps=0, fingerprint_every_steps=3)
def test_all_parameters_are_compared_every_so_many_steps():
    model = net()
    optimizer = wrap(model)
    compared = []
    optimizer._gradcomp.driver.exchanger._digests = lambda: compared.append(step) or done
    done = Future()
    done.set_result(optimizer._gradcomp.digests())
    for step in range(7):
        train(model, optimizer, 1, step)
    assert compared == [3, 6]


# ---------------------------------------------------------------------------------------- a world of one


@on_ranks(1)
def test_a_world_of_one_trains_as_the_plain_optimizer():
    model, plain = net(), net()
    optimizer = wrap(model, "quantize:bits=1", kind=torch.optim.AdamW)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(5):
        for m, o in ((model, optimizer), (plain, reference)):
            o.zero_grad()
            loss_of(m, step).backward()
            o.step()
    assert bits_of(model.parameters()) == bits_of(plain.parameters())


@on_ranks(1)
def test_a_world_of_one_says_so():
    gc.shutdown()
    with logged() as lines:
        gc.init()
    assert any("world of one" in text for text in lines)


@on_ranks(1)
def test_a_world_of_one_has_all_methods():
    model = net()
    model[0].weight.requires_grad_(False)
    optimizer = wrap(model, "quantize:bits=4")
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
    optimizer.step(lambda: loss_of(model, 1))
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    optimizer.set_compression("none")
    assert optimizer.plan() is None
    with pytest.raises(gc.ConfigError, match="nonsense"):
        optimizer.set_compression("nonsense")
