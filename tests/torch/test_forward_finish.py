"""``finish="forward"``: parameters are updated where forward uses them, and are those of ``finish="backward"``."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from batch import on_ranks
from small_torch import (
    NEAREST,
    Raises,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    net,
    same,
    shared_folder,
    small,
    train,
    wrap,
)

import gradcomp.torch as gc

#: Several exchange buckets. The fingerprints of the first steps are compared too.
SETTINGS = {"slice_elements": 16}
STEPS = 8
COMPRESSIONS = {
    "none": "none",
    "quantize": small("quantize:bits=4,bucket_size=32"),
    "feedback": NEAREST,
    "topk": small("topk:density=0.1"),
    "powersgd": small("powersgd:rank=2"),
}
OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "foreach": (torch.optim.SGD, {"momentum": 0.9, "foreach": True}),
    "Adam": (torch.optim.Adam, {"amsgrad": True}),
    "fused": (torch.optim.Adam, {"fused": True}),
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
}


def two_groups(model):
    parameters = list(model.parameters())
    return [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:]}]


def made(finish, compression="none", kind=torch.optim.SGD, options=None, model=None, **arguments):
    model = net() if model is None else model
    groups = two_groups(model)
    return model, wrap(model, compression, kind, 0.05, options, groups, finish=finish, **arguments)


def of_both(run):
    """What the function finds with each ``finish``; it is the same, and returned."""
    expected, found = run("backward"), run("forward")
    assert same(dict(enumerate(found)), dict(enumerate(expected)))
    return found


def state_of(model, optimizer):
    return dict(model.named_parameters()), optimizer.state_dict()


@contextlib.contextmanager
def held(optimizer, release_after=0.0):
    """No mean of the open step lands before the block ends, or that many seconds later."""
    optimizer._gradcomp.complete()
    listener, released = optimizer._gradcomp.listener, threading.Event()

    def bucket_complete(bucket):
        assert released.wait(30)
        type(listener).bucket_complete(listener, bucket)

    listener.bucket_complete = bucket_complete
    try:
        yield
    finally:
        timer = threading.Timer(release_after, released.set)
        timer.start()
        del listener.bucket_complete


@contextlib.contextmanager
def nothing(*_, **__):
    yield


def in_flight(finish, compression="none", steps=4, options=None, kind=torch.optim.SGD, model=None):
    """A model and its optimizer behind a ``step()`` of which no mean has landed yet, for the next fifth of a second."""
    model, optimizer = made(finish, compression, kind, options, model)
    train(model, optimizer, steps)
    optimizer.zero_grad()
    with (held if finish == "forward" else nothing)(optimizer, 0.2):
        backward(model, steps)
        optimizer.step()
    if finish == "forward":
        assert optimizer._gradcomp.is_deferred
        assert len(optimizer._gradcomp._pending) == 4
    return model, optimizer


# ------------------------------------------------------------------------------------------------- equal bits


def trained(optimizer, compression, finish):
    kind, options = OPTIMIZERS[optimizer]
    model, optimizer = made(finish, COMPRESSIONS[compression], kind, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    train(model, optimizer, STEPS, after_step=schedule.step)
    if finish == "forward" and gc.size() > 1:
        assert optimizer._gradcomp.is_deferred
    state = state_of(model, optimizer)
    return *state, optimizer.compression_state()["residuals"]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("optimizer", ["nesterov", "AdamW"])
@on_ranks(3, **SETTINGS)
def test_parameters_and_states_are_those_of_finish_backward(optimizer, compression):
    model = of_both(partial(trained, optimizer, compression))[0]
    assert_same_on_all_ranks(model.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@on_ranks(2, **SETTINGS)
def test_every_optimizer_that_is_taken_has_the_same_bits(optimizer):
    of_both(partial(trained, optimizer, "quantize"))


@on_ranks(1)
def test_a_world_of_one_trains_the_same_and_refuses_the_same():
    of_both(partial(trained, "AdamW", "quantize"))
    with pytest.raises(gc.ConfigError, match="share memory"):
        made("forward", model=aliased())
    with pytest.raises(gc.ConfigError, match="closure"):
        made("forward")[1].step(lambda: 0.0)


@pytest.mark.parametrize("compression", ["none", "feedback", "powersgd"])
@on_ranks(3, **SETTINGS)
def test_buckets_that_travel_in_another_order_give_the_same_bits(compression):
    def run(finish):
        model, optimizer = made(finish, COMPRESSIONS[compression], options={"momentum": 0.9})
        train(model, optimizer, 2)
        pipeline = optimizer._gradcomp.exchanger.pipeline
        optimizer.synchronize() if finish == "forward" else None
        assert len(pipeline.travel) > 1
        if finish == "forward":
            pipeline.travel = pipeline.travel[::-1]
        train(model, optimizer, 3, 2)
        return state_of(model, optimizer)

    of_both(run)


@on_ranks(3, **SETTINGS)
def test_all_ranks_agree_on_the_order_that_rank_0_has_measured():
    model, optimizer = made("forward")
    used = []
    for step in range(9):
        train(model, optimizer, 1, step)
        used.append(optimizer._gradcomp.exchanger.pipeline._priorities._agreed)
    optimizer.synchronize()
    pipeline = optimizer._gradcomp.exchanger.pipeline
    assert sorted(pipeline.travel) == list(range(len(pipeline.layout.buckets)))
    assert len(set(gc.allgather_object(pipeline.travel))) == 1
    _, needed, rate = pipeline._priorities._agreed
    assert needed.tolist() == [0, 1, 2, 3]
    assert rate > 0
    assert used[0] is None
    names = list(dict(model.named_parameters()))
    travelling = [pipeline.layout.buckets[number] for number in pipeline.travel]
    assert [found for found, _ in optimizer.buckets()] == [[names[i] for i in b.layers] for b in travelling]


# ----------------------------------------------------------------------------------------- what waits for means

#: What reads or replaces parameters or state in mid-step; each returns what it has found.
READS = {
    "forward": lambda model, opt: model(data(9)),
    "evaluation": lambda model, opt: torch.no_grad()(model.eval())(data(9)),
    "inference": lambda model, opt: torch.inference_mode()(model)(data(9)).clone(),
    "functional": lambda model, opt: F.linear(data(9), model[0].weight),
    "a parameter's data": lambda model, opt: model[2].weight.data.clone(),
    "a list of parameters": lambda model, opt: torch._foreach_norm(list(model.parameters())),
    "state_dict": lambda model, opt: model.state_dict(),
    "the optimizer's state_dict": lambda model, opt: opt.state_dict(),
    "deepcopy": lambda model, opt: copy.deepcopy(model).state_dict(),
    "pickle": lambda model, opt: pickle.loads(pickle.dumps(model)).state_dict(),
    "pickled optimizer": lambda model, opt: pickle.loads(pickle.dumps(opt)).state_dict(),
    "compression_state": lambda model, opt: opt.compression_state()["residuals"],
    "a clip of the weights": lambda model, opt: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
    "zeros in place": lambda model, opt: (
        opt.zero_grad(set_to_none=False) or [p.grad for p in model.parameters()]
    ),
    "functional_call": lambda model, opt: torch.func.functional_call(
        model, dict(model.named_parameters()), data(9)
    ),
    "load_state_dict": lambda model, opt: str(model.load_state_dict(net(1).state_dict())),
    "add_param_group": lambda model, opt: opt.add_param_group(
        {"params": [torch.nn.Parameter(torch.ones(3))]}
    ),
    "a class like the parameter's": lambda model, opt: type(model[0].bias)(torch.ones(2)) * 2,
}


@pytest.mark.parametrize("read", READS)
@on_ranks(2, **SETTINGS)
def test_whatever_reads_a_parameter_or_state_waits_for_its_mean(read):
    def run(finish):
        model, optimizer = in_flight(finish, NEAREST, options={"momentum": 0.9})
        found = READS[read](model, optimizer)
        found = dict(enumerate(found)) if isinstance(found, list | tuple) else {"found": found}
        train(model, optimizer, 2, 5)
        return found, *state_of(model, optimizer)

    of_both(run)


@on_ranks(2, **SETTINGS)
def test_a_step_and_zero_grad_wait_for_no_mean_and_a_use_for_its_own_only():
    model, optimizer = made("forward", options={"momentum": 0.9})
    train(model, optimizer, 3)
    optimizer.zero_grad()
    listener = optimizer._gradcomp.listener
    with held(optimizer):
        backward(model, 3)
        optimizer.step()
        given = [p.grad for p in model.parameters()]
        optimizer.zero_grad()  # neither of them would return
        assert all(p.grad is None for p in model.parameters())
        pending = optimizer._gradcomp._pending
        # Means are decoded in place before they are announced, so the values may change here, but not the tensors.
        assert [pending[layer].data_ptr() for layer in range(4)] == [
            gradient.data_ptr() for gradient in given
        ]
        assert all(pending[layer].any() for layer in range(4))
        assert all(type(p) is not torch.nn.Parameter for p in model.parameters())
        assert isinstance(model[0].weight, torch.nn.Parameter)
    listener.wait(range(4))
    model[0](data(4))
    assert [type(p) is torch.nn.Parameter for p in model.parameters()] == [True, True, False, False]
    optimizer.synchronize()
    assert all(type(p) is torch.nn.Parameter and p.grad is None for p in model.parameters())


@on_ranks(2, **SETTINGS)
def test_rates_are_those_of_the_step_and_gradients_stay_means_unless_they_are_zeroed():
    def run(finish):
        model, optimizer = in_flight(finish, options={"weight_decay": 0.1})
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 100.0, 100.0
        optimizer.synchronize() if finish == "forward" else None
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 0.01, 0.0
        for step in (5, 6):  # without zero_grad(): means are added to
            backward(model, step)
            optimizer.step()
        return gradients, *state_of(model, optimizer)

    of_both(run)


class Tied(torch.nn.Module):
    """One parameter in two modules, one used outside of its module, and one that only some ranks or steps use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.lstm = torch.nn.LSTM(8, 4)
        self.rarely = torch.nn.Linear(8, 8)

    def forward(self, x, use_rarely=True):
        x = self.b(torch.tanh(self.a(x))) + F.linear(x, self.a.weight) * self.scale
        return self.lstm(x + self.rarely(x) if use_rarely else x)[0]


@on_ranks(3, **SETTINGS)
def test_tied_and_rarely_used_parameters_are_found_wherever_they_are_used():
    def run(finish):
        model = Tied()
        optimizer = wrap(model, NEAREST, torch.optim.Adam, 0.01, finish=finish)
        for step in range(STEPS):
            optimizer.zero_grad()
            # Only rank 1 has a gradient of it in odd steps, and no rank in step 4.
            rarely = (step % 2 == 0 or gc.rank() == 1) and step != 4
            model(data(step), rarely).square().mean().backward()
            optimizer.step()
        return state_of(model, optimizer)

    assert_same_on_all_ranks(of_both(run)[0].values())


@on_ranks(2, **SETTINGS)
def test_a_graph_from_before_the_step_is_refused_by_torch_as_ever():
    def run(finish):
        model, optimizer = made(finish)
        train(model, optimizer, 3)
        old = model(data(3)).square().mean()
        optimizer.zero_grad()
        with (held if finish == "forward" else nothing)(optimizer, 0.2):
            backward(model, 3)
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            old.backward()
        optimizer.zero_grad()
        train(model, optimizer, 1, 4)
        return state_of(model, optimizer)

    of_both(run)


# ------------------------------------------------------------------------------------- with everything else


@on_ranks(2, **SETTINGS)
def test_accumulation_windows_are_those_of_finish_backward():
    def run(finish):
        model, optimizer = made(finish, NEAREST, backward_passes_per_step=2)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, 3 * step)
            if step != 2:  # a short last window
                backward(model, 3 * step + 1)
            optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(model, 20 + step)
            backward(model, 30 + step)
            optimizer.step()
            if step == 1:
                backward(model, 50)  # a backward pass whose means are thrown away
        return state_of(model, optimizer)

    of_both(run)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_ranks(2, **SETTINGS)
def test_a_value_that_is_not_finite_keeps_residuals_and_reaches_the_same_parameters(bad):
    def run(finish):
        model, optimizer = made(finish, NEAREST)
        train(model, optimizer, 3)
        optimizer.zero_grad()
        with (held if finish == "forward" else nothing)(optimizer, 0.1):
            loss = model(data(3)).square().mean()
            (loss + model[2].bias[0] * (bad if gc.rank() else 1.0)).backward()
            optimizer.step()
        skipped = optimizer.compression_state(), optimizer.statistics().skipped_steps
        assert skipped[1] == 1
        return *state_of(model, optimizer), skipped[0]["residuals"]

    assert not torch.isfinite(of_both(run)[0]["2.bias"]).all()


@on_ranks(2, **SETTINGS)
def test_controllers_and_changes_of_compression_apply_in_the_same_steps():
    def run(finish):
        controller = gc.Schedule({0: 6, 3: 3, 5: gc.PowerSGD(2)})
        model, optimizer = made(finish, COMPRESSIONS["quantize"], controller=controller)
        train(model, optimizer, 8)
        version = optimizer.plan().version
        assert version
        optimizer.set_compression(NEAREST)
        train(model, optimizer, 4, 8)
        return *state_of(model, optimizer), {"version": version}, optimizer.compression_state()["residuals"]

    of_both(run)


@on_ranks(2, **SETTINGS)
def test_a_checkpoint_in_mid_run_goes_on_bit_for_bit():
    def run(finish):
        folder = shared_folder()
        model, optimizer = in_flight(finish, NEAREST, kind=torch.optim.Adam)
        gc.save(folder, optimizer, model=model)
        model, optimizer = made(finish, NEAREST, torch.optim.Adam, model=net(5))
        gc.load(folder, optimizer, model=model)
        train(model, optimizer, 4, 5)
        return state_of(model, optimizer)

    uninterrupted, optimizer = made("backward", NEAREST, torch.optim.Adam)
    train(uninterrupted, optimizer, 9)
    assert bits_of(of_both(run)[0].values()) == bits_of(uninterrupted.parameters())


@on_ranks(3, **SETTINGS)
def test_process_sets_two_optimizers_and_ranks_that_have_joined():
    pair = gc.add_process_set([0, 1])

    def run(finish):
        first, second = net(1), net(2)
        optimizers = [
            wrap(first, NEAREST, finish=finish),
            wrap(second, "none", finish=finish, process_set=pair),
        ]
        for step in range(4):
            for model, optimizer in zip((first, second), optimizers, strict=True):
                optimizer.zero_grad()
                (model(data(step)).square().mean() + second(data(step)).square().mean().detach()).backward()
                optimizer.step()
        joined = net(3)
        del optimizers
        optimizer = wrap(joined, NEAREST, finish=finish)
        train(joined, optimizer, 2 if gc.rank() == 2 else 4)
        gc.join()
        found = dict(joined.named_parameters()) if gc.rank() < 2 else {}  # rank 2 has made fewer steps
        return dict(first.named_parameters()), dict(second.named_parameters()), found

    of_both(run)
    gc.remove_process_set(pair)


@on_ranks(2, **SETTINGS)
def test_the_end_of_the_job_waits_for_the_last_step():
    def run(finish):
        model, optimizer = in_flight(finish)
        if gc.rank() == 0:
            gc.shutdown()  # rank 1 still needs the exchange
        found = dict(model.named_parameters())
        del optimizer
        state = {name: parameter.detach().clone() for name, parameter in found.items()}
        gc.shutdown()
        gc.init(timeout_seconds=20.0, log_level="warning", **SETTINGS)
        return (state,)

    of_both(run)


# ----------------------------------------------------------------------------------------------------- refusals


def aliased():
    model = net()
    model.again = torch.nn.Linear(16, 8)
    model.again.weight = torch.nn.Parameter(model[0].weight.data.view(8, 16))
    return model


class Own(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


#: Arguments of the wrapper, or of the optimizer's class, and words of the error.
REFUSED = {
    "on_skip": ({"on_skip": "agree"}, "votes in step"),
    "sensitivity": ({"controller": "lgreco:metric=loss", "sensitivity": True}, "losses for a controller"),
    "sparse_as_dense": ({"sparse_as_dense": True}, "sparse"),
    "scaler": ({"grad_scaler": torch.amp.GradScaler("cpu")}, "loss scaler"),
    "LBFGS": ({"kind": torch.optim.LBFGS, "model": torch.nn.Linear(2, 2)}, "LBFGS is not known"),
    "own optimizer": ({"kind": Own}, "Own is not known"),
    "differentiable": ({"options": {"differentiable": True}}, "graph"),
    "shared memory": ({"model": aliased}, "share memory"),
    "a word": ({"finish": "later"}, '"backward", "step" or "forward"'),
}


@pytest.mark.parametrize("case", REFUSED)
@on_ranks(2, **SETTINGS)
def test_what_cannot_be_deferred_is_refused_on_every_rank_with_the_way_out(case):
    given, words = copy.copy(REFUSED[case][0]), REFUSED[case][1]
    model = given.pop("model", net)
    model = model if isinstance(model, torch.nn.Module) else model()
    if "sensitivity" in given:
        given["sensitivity"] = gc.Sensitivity(model, lambda model: model(data(4)).sum())
    with pytest.raises(gc.ConfigError, match=words) as error:
        wrap(model, **{"finish": "forward", **given})
    assert case == "a word" or 'use finish="backward"' in str(error.value)
    with pytest.raises(gc.ConfigError, match="no meaning with op=Adasum"):
        wrap(net(), finish="forward", op=gc.Adasum)


def clips(model, optimizer):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()


def clips_in_a_hook(model, optimizer):
    optimizer.register_step_pre_hook(
        lambda *_: torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0) and None
    )
    optimizer.step()


def replaces(model, optimizer):
    model[0].weight.grad = model[0].weight.grad.clone()
    optimizer.step()


def scales(model, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


MISUSED = {"clip": clips, "clip in a hook": clips_in_a_hook, "replace": replaces, "scaler": scales}


def misuse(case, model, optimizer):
    with held(optimizer, 0.1):
        backward(model, 3)
        MISUSED[case](model, optimizer)
    model(data(4))


@pytest.mark.parametrize("case", MISUSED)
@on_ranks(2, **SETTINGS)
def test_gradients_that_are_changed_before_they_are_means_are_an_error_on_all_ranks(case):
    model, optimizer = made("forward")
    train(model, optimizer, 3)
    optimizer.zero_grad()
    with pytest.raises(gc.ConfigError, match='use finish="backward"'):
        misuse(case, model, optimizer)
    with pytest.raises(gc.GradcompError):
        train(model, optimizer, 1)


@on_ranks(2, **SETTINGS)
def test_synchronize_makes_means_that_may_be_clipped():
    def run(finish):
        model, optimizer = made(finish)
        for step in range(5):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            with optimizer.skip_synchronize():
                optimizer.step()
        return state_of(model, optimizer)

    of_both(run)


@on_ranks(2, **SETTINGS)
def test_sparse_gradients_and_closures_are_refused():
    torch.manual_seed(0)
    sparse = torch.nn.Embedding(12, 4, sparse=True)
    optimizer = wrap(sparse, finish="forward")
    with pytest.raises(gc.ConfigError, match="sparse gradient"):
        sparse(torch.tensor([1, 2])).sum().backward()
    model, optimizer = made("forward")
    with pytest.raises(gc.ConfigError, match="closure"):
        optimizer.step(lambda: backward(model))


@on_ranks(2, **SETTINGS)
def test_a_rank_that_fails_in_mid_step_is_an_error_where_the_others_use_a_parameter():
    model, optimizer = made("forward")
    train(model, optimizer, 3)
    optimizer.zero_grad()
    if gc.rank() == 0:
        with pytest.raises(torch.OutOfMemoryError):
            model[2](Raises.apply(model[0](data(3)))).square().mean().backward()
        optimizer._gradcomp.driver.fail(RuntimeError("out of memory"))
    else:
        backward(model, 3)
        with pytest.raises(gc.GradcompError, match="out of memory"):
            optimizer.step() or model(data(4))
        assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    with pytest.raises(gc.GradcompError):
        backward(model, 4)


@on_ranks(2, "compiled")
def test_a_process_that_compiles_is_refused():
    model, optimizer = made("forward")
    compiled = torch.compile(model, backend="eager")
    # The rank that comes first raises a ConfigError, which ends the exchange of the others wherever they are.
    with pytest.raises(gc.GradcompError, match=r"torch\.compile"):
        train(compiled, optimizer, 1)
