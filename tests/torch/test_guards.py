"""What would train wrongly without a word is refused, or said: on every rank, and nobody hangs."""

from __future__ import annotations

import time
import types
from collections.abc import Callable

import numpy as np
import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import in_ddp, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor

import gradcomp.torch as gc
from gradcomp.job import runtime

WITH_RESIDUALS = gc.Policy(
    "quantize:bits=4,bucket_size=32,rounding=nearest", filter=gc.Filter(min_elements=8)
)


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def hooked(compression: gc.Policy | str = "none", model: torch.nn.Module | None = None, **arguments):
    return in_ddp(model or net(), compression, **arguments)


def loss(model: torch.nn.Module, step: int = 0) -> torch.Tensor:
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + gc.rank()))
    return model(data).square().mean()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def assert_still_working() -> None:
    model = net()
    train(model, wrap(model))
    everyone = gc.allgather(weights(model)[None])
    assert torch.equal(everyone[0], everyone[1])


# ---------------------------------------------------------------------- DistributedOptimizer under DDP


def ddp_before(compiled=False):
    model = DistributedDataParallel(net())
    model = torch.compile(model, backend="eager") if compiled else model
    return model, wrap(model)


def ddp_after(compiled=False):
    model = net()
    optimizer = wrap(model)
    model = DistributedDataParallel(model)
    return torch.compile(model, backend="eager") if compiled else model, optimizer


def ddp_of_compiled():
    model = DistributedDataParallel(torch.compile(net(), backend="eager"))
    return model, wrap(model)


def accelerated():
    """As Accelerate's ``prepare(model, optimizer)`` does: the forward pass under autocast, then DDP, then compiled.

    Its optimizer calls ours through a patched ``step``.
    """
    model = net()
    optimizer = wrap(model)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model = torch.compile(DistributedDataParallel(model, gradient_as_bucket_view=True), backend="eager")
    optimizer.step = types.MethodType(type(optimizer).step, optimizer)
    return model, optimizer


IN_DDP = {
    "before": ddp_before,
    "after": ddp_after,
    "compiled before": lambda: ddp_before(compiled=True),
    "compiled after": lambda: ddp_after(compiled=True),
    "of compiled": ddp_of_compiled,
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
    ddp, _ = hooked()
    plain = net(1)
    mine, theirs = wrap(plain), torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp_without_hook = DistributedDataParallel(net(2))
    for step in range(2):
        mine.zero_grad()
        theirs.zero_grad()
        (loss(ddp, step) + loss(plain, step) + loss(ddp_without_hook, step)).backward()
        mine.step()
        theirs.step()


@on_ranks(2)
def test_of_an_optimizer_and_hooks_over_one_model_the_last_one_exchanges_and_the_others_say_so():
    model = net()
    wrapped = wrap(model, WITH_RESIDUALS)
    train(model, wrapped)

    def in_ddp():
        return hooked(WITH_RESIDUALS, model=model)[0]

    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    first = in_ddp()
    train(first, plain)
    with pytest.raises(gc.StateError, match="ddp_comm_hook that was made after"):
        train(first, wrapped)
    second = in_ddp()
    train(second, plain, 4)
    with pytest.raises(gc.StateError, match="ddp_comm_hook that was made after"):
        train(first, plain)
    everyone = gc.allgather(weights(model)[None])
    assert torch.equal(everyone[0], everyone[1])


@on_ranks(2)
def test_a_ddp_that_is_no_longer_run_is_no_reason_to_refuse():
    ddp = DistributedDataParallel(net())
    loss(ddp).backward()
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


# ---------------------------------------------------------------------- parameters that cannot be exchanged


def mesh():
    return init_device_mesh("cpu", (2,))


def sharded():
    model = net()
    fully_shard(model, mesh=mesh())
    return model


def distributed_tensors():
    model = net()
    for module in (model[0], model[2]):
        for name, parameter in list(module.named_parameters()):
            setattr(
                module, name, torch.nn.Parameter(distribute_tensor(parameter.data, mesh(), [Replicate()]))
            )
    return model


def flat(**arguments):
    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), **arguments)


def with_weight(make: Callable[[torch.Tensor], torch.Tensor]):
    model = net()
    model[0].weight = torch.nn.Parameter(make(model[0].weight.detach()))
    return model


UNUSABLE = {
    "fully_shard": (sharded, "DTensor.*shard"),
    "tensor parallel": (distributed_tensors, "DTensor.*shard"),
    "FSDP": (flat, "FullyShardedDataParallel"),
    "FSDP, use_orig_params": (lambda: flat(use_orig_params=True), "FullyShardedDataParallel"),
    "meta": (lambda: net().to("meta"), "meta.*to_empty"),
    "sparse": (lambda: with_weight(torch.Tensor.to_sparse), r"'0\.weight'.*sparse"),
    "nested": (lambda: with_weight(lambda w: torch.nested.nested_tensor([w, w])), r"'0\.weight'.*nested"),
    "jagged": (
        lambda: with_weight(lambda w: torch.nested.nested_tensor([w, w], layout=torch.jagged)),
        r"'0\.weight'",
    ),
    "subclass": (lambda: with_weight(lambda w: TwoTensor(w, w.clone())), r"'0\.weight'.*TwoTensor"),
    "lazy": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(4)), "forward pass"),
}


@pytest.mark.parametrize("case", UNUSABLE)
@on_ranks(2)
def test_parameters_that_cannot_be_exchanged_as_they_lie_are_refused(case):
    make, says = UNUSABLE[case]
    model = make()
    for construct in (wrap, gc.ddp_comm_hook):
        with pytest.raises(gc.ConfigError, match=says):
            construct(model)


@on_ranks(2)
def test_collectives_and_broadcasts_of_a_dtensor_are_refused():
    tensor = distribute_tensor(torch.ones(4), mesh(), [Replicate()])
    assert isinstance(tensor, DTensor)
    for call, given in (
        (gc.allreduce, tensor),
        (gc.allgather, tensor),
        (gc.broadcast_parameters, {"x": tensor}),
        (gc.broadcast_object, {"x": tensor}),
    ):
        with pytest.raises(gc.ConfigError, match="to_local"):
            call(given)


# ---------------------------------------------------------------------- gradients that are not as agreed


@pytest.mark.parametrize("case", ["bfloat16", "float64", (4, 4), (64, 8), (8, 4)])
@on_ranks(2)
def test_a_parameter_that_became_another_after_wrapping_is_refused(case):
    model, dtype = net(), torch.float32
    wrap(model, WITH_RESIDUALS)
    if isinstance(case, str):
        dtype = getattr(torch, case)
        model.to(dtype)
    else:
        model[2].weight.data = torch.ones(case)
        model = torch.nn.Sequential(Weighted(model[2].weight))
    with pytest.raises(gc.StateError, match=r"layer '.*' was .* when the optimizer was wrapped"):
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()


class Weighted(torch.nn.Module):
    """Its weight has a gradient whatever its shape."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.sum() * x.sum()


REPLACED = {
    "dtype": torch.Tensor.bfloat16,
    "subclass": lambda w: TwoTensor(w, w.clone()),
    "DTensor": lambda w: distribute_tensor(w, mesh(), [Replicate()]),
}


@pytest.mark.parametrize("case", REPLACED)
@on_ranks(2)
def test_a_gradient_that_a_hook_put_there_is_refused_if_it_does_not_fit(case):
    model = net()
    weight = model[0].weight
    weight.grad_dtype = None  # torch allows gradients of any dtype then

    def replace(parameter: torch.nn.Parameter) -> None:
        parameter.grad = REPLACED[case](parameter.detach())

    weight.register_post_accumulate_grad_hook(replace)
    optimizer = wrap(model, WITH_RESIDUALS)
    with pytest.raises(
        gc.StateError, match=r"layer '0\.weight' was float32.* when the optimizer was wrapped"
    ):
        train(model, optimizer)
    assert_still_working()


@pytest.mark.parametrize("has_gradient", [True, False])
@on_ranks(2)
def test_a_gradient_or_a_mean_that_does_not_fit_on_one_rank_is_told_to_the_others(has_gradient):
    model = net()
    optimizer = wrap(model)
    if gc.rank() == 1:
        if has_gradient:
            trained, x = model.bfloat16(), torch.ones(2, 8, dtype=torch.bfloat16)
        else:  # the mean of a layer that only rank 0 has
            model[2].bfloat16()
            trained, x = model[0], torch.ones(2, 8)
        with pytest.raises(gc.StateError, match=r"layer '2\.(bias|weight)' was float32"):
            trained(x).sum().backward()
    else:
        told = "rank 1: StateError: layer '2\\.bias'" if has_gradient else "layer '2\\.(weight|bias)'"
        with pytest.raises(gc.TransportError, match=told + " was float32"):
            train(model, optimizer)
    assert_still_working()


@on_ranks(2)
def test_a_gradient_with_gaps_in_memory_is_exchanged_by_its_values():
    model = torch.nn.Linear(4, 2, bias=False)
    model.weight = torch.nn.Parameter(torch.ones(2, 8)[:, ::2])

    def spread(parameter: torch.nn.Parameter) -> None:
        memory = torch.full((2, 8), 100.0)
        memory[:, ::2] = parameter.grad
        parameter.grad = memory[:, ::2]

    model.weight.register_post_accumulate_grad_hook(spread)
    optimizer = wrap(model)
    model(torch.full((1, 4), 1.0 + gc.rank())).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 4), 1.5))
    optimizer.step()


# ---------------------------------------------------------------------- loss scalers


def residual(exchanger, name: str) -> np.ndarray:
    names = [layer.name for layer in exchanger.pipeline.layers]
    return exchanger.pipeline.residuals.first.value(names.index(name)).copy()


def optimized(compression, **arguments):
    model = net()
    optimizer = wrap(model, compression, **arguments)
    return model, optimizer, lambda: optimizer._gradcomp.exchanger


def under_ddp(compression, **arguments):
    ddp, state = hooked(compression, **arguments)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), lambda: state.exchanger


MAKERS = {"optimizer": optimized, "hook": under_ddp}
FRONTENDS = pytest.mark.parametrize("frontend", MAKERS)


def scaled_step(model, optimizer, scaler, step: int = 0) -> None:
    optimizer.zero_grad()
    scaler.scale(loss(model, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def residual_after(frontend, scaler, steps: int = 3, **arguments) -> np.ndarray:
    model, optimizer, exchanger = MAKERS[frontend](WITH_RESIDUALS, **arguments)
    for step in range(steps):
        scaled_step(model, optimizer, scaler, step)
    if frontend == "hook":
        scaled_step(model, optimizer, scaler, steps)  # whose first bucket accepts the step before
    return residual(exchanger(), "0.weight")


def scaler(**arguments) -> torch.amp.GradScaler:
    """One whose scale changes at every other step."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, **arguments)


@FRONTENDS
@on_ranks(2)
def test_the_one_scaler_there_is_gives_residuals_the_units_that_a_named_one_does(frontend):
    named = scaler()
    want = residual_after(frontend, named, grad_scaler=named)
    del named
    with logged() as lines:
        found = residual_after(frontend, scaler())
    assert want.any()
    np.testing.assert_array_equal(found, want)
    said = [line for line in lines if "GradScaler" in line]
    assert len(said) == (gc.rank() == 0)
    assert all("grad_scaler=" in line for line in said)


@FRONTENDS
@on_ranks(2)
def test_several_scalers_are_an_error_that_names_the_argument_unless_no_state_needs_one(frontend):
    mine, other = scaler(), scaler()
    scaled_step(*MAKERS[frontend]("none")[:2], mine)
    for _ in range(2):
        model, optimizer, _ = MAKERS[frontend](WITH_RESIDUALS)
        with pytest.raises(gc.ConfigError, match=r"grad_scaler=scaler"):
            scaled_step(model, optimizer, mine)
    assert other.get_scale() == 1024.0
    residual_after(frontend, mine, grad_scaler=mine)


@FRONTENDS
@on_ranks(2)
def test_a_disabled_scaler_beside_one_that_is_enabled_does_not_count(frontend):
    mine, other = scaler(), scaler(enabled=False)
    want = residual_after(frontend, scaler(), grad_scaler=mine)
    assert other.get_scale() == 1.0
    assert want.any()


@pytest.mark.parametrize("case", ["optimizer", "hook", "nothing scaled"])
@on_ranks(2)
def test_a_scaler_is_left_alone_if_the_caller_says_so_or_if_it_has_scaled_nothing(case):
    other = scaler()
    if case == "nothing scaled":
        model, optimizer, exchanger = optimized(WITH_RESIDUALS)
    else:
        other.scale(torch.zeros(()))
        model, optimizer, exchanger = MAKERS[case](WITH_RESIDUALS, grad_scaler=False)
    with logged() as lines:
        train(model, optimizer, 2)
    assert exchanger().pipeline._exchange.scale == 1.0
    assert case == "nothing scaled" or not [line for line in lines if "GradScaler" in line]
    assert other.get_scale() == 1024.0


@FRONTENDS
@pytest.mark.parametrize("named", [False, True])
@on_ranks(2)
def test_a_scaler_that_only_one_rank_has_or_names_is_an_error_on_every_rank(frontend, named):
    mine = scaler() if named or gc.rank() == 1 else None
    given = {"grad_scaler": mine} if named and gc.rank() == 1 else {}
    model, optimizer, _ = MAKERS[frontend]("none" if named else WITH_RESIDUALS, **given)
    with pytest.raises(gc.ConfigError, match=r"rank 1 .*rank 0 .*grad_scaler="):
        scaled_step(model, optimizer, mine) if named else train(model, optimizer)
    assert mine is None or mine.get_scale()
    assert named or assert_still_working() is None


@on_ranks(2)
def test_a_scaler_is_looked_for_when_state_begins():
    mine = scaler()
    policy = gc.Policy(gc.Warmup(WITH_RESIDUALS.default, steps=2), filter=gc.Filter(min_elements=8))
    model, optimizer, exchanger = optimized(policy)
    scales = []
    for step in range(4):
        scaled_step(model, optimizer, mine, step)
        scales.append(exchanger().pipeline._exchange.scale)
    assert scales == [1.0, 1.0, 2048.0, 2048.0]


# ---------------------------------------------------------------------- updates inside backward


def steps(optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def for_each(model: torch.nn.Module, act: Callable[[torch.nn.Parameter, int], object]) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda p, number=number: act(p, number))


def the_wrapped_one(hooks_first: bool):
    model = net()
    optimizer = None if hooks_first else wrap(model)
    for_each(model, lambda *_: steps(optimizer))
    optimizer = optimizer or wrap(model)
    return model


def a_plain_one_for_each_layer():
    model = net()
    model.wrapped = wrap(model)
    plain = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for_each(model, lambda _, number: steps(plain[number]))
    return model


def a_wrapped_one_for_each_layer():
    model = net()
    wrapped = [
        gc.DistributedOptimizer(torch.optim.SGD([p], lr=0.1), [(name, p)])
        for name, p in model.named_parameters()
    ]
    for_each(model, lambda _, number: steps(wrapped[number]))
    return model


def one_for_each_layer_in_ddp():
    model, _ = hooked()
    plain = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for_each(model, lambda _, number: steps(plain[number]))
    return model


STEPS_INSIDE = {
    "hooks, then the wrapped one": lambda: the_wrapped_one(True),
    "the wrapped one, then hooks": lambda: the_wrapped_one(False),
    "a plain one for each layer": a_plain_one_for_each_layer,
    "a wrapped one for each layer": a_wrapped_one_for_each_layer,
    "one for each layer in DDP": one_for_each_layer_in_ddp,
}


@pytest.mark.parametrize("case", STEPS_INSIDE)
@on_ranks(2)
def test_an_optimizer_that_steps_inside_backward_is_refused_before_its_first_step(case):
    model = STEPS_INSIDE[case]()
    before = weights(model)
    with pytest.raises(
        gc.StateError, match=r"an optimizer steps inside backward.*call step\(\) after backward"
    ):
        loss(model).backward()
    assert torch.equal(weights(model), before)


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
        loss(model).backward()
    with pytest.raises(gc.GradcompError, match="inside backward"):
        optimizer.step()


# ---------------------------------------------------------------------- steps without an exchange


def the_bare_model_in_place_of_ddp():
    ddp, _ = hooked()
    return torch.optim.SGD(ddp.parameters(), lr=0.1), lambda step: loss(ddp.module, step).backward()


def the_bare_model_after_a_while():
    ddp, _ = hooked()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    train(ddp, optimizer, 3)
    with ddp.no_sync():
        train(ddp, optimizer, 3)  # the ranks are alike no more, but that was asked for
    return optimizer, lambda step: loss(ddp.module, step).backward()


def a_hook_without_its_ddp():
    model = net()
    model.hook = gc.ddp_comm_hook(model)
    return torch.optim.SGD(model.parameters(), lr=0.1), lambda step: loss(model, step).backward()


def copies_that_are_trained():
    """Master weights, as of mixed precision by hand: the loop trains the copy, the optimizer has the original."""
    model, copied = net(), net()
    optimizer = wrap(model)

    def backward(step: int) -> None:
        copied.zero_grad()
        loss(copied, step).backward()
        for original, copy in zip(model.parameters(), copied.parameters(), strict=True):
            original.grad = copy.grad.clone()

    return optimizer, backward


def a_plain_optimizer_beside_the_wrapped_one():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.beside = wrap(model, backward_passes_per_step=100)
    return optimizer, lambda step: loss(model, step).backward()


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
    optimizer, backward = BYPASSED[case]()
    backward(10)
    optimizer.step()
    optimizer.zero_grad()
    backward(11)
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
            loss(model, 4 * window + part).backward()
    loss(model, 4 * window + 3).backward()
    optimizer.step()


@pytest.mark.parametrize("frontend", ["optimizer", "hook"])
@on_ranks(2)
def test_steps_that_need_no_exchange_are_no_error(frontend):
    """What healthy programs do between exchanges; each several times."""
    if frontend == "optimizer":
        model = net()
        optimizer, plain = wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
        no_sync = optimizer.no_sync
    else:
        model, _ = hooked()
        optimizer = plain = torch.optim.SGD(model.parameters(), lr=0.1)
        no_sync = model.no_sync
    head = torch.nn.Linear(4, 1)
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
            loss(model, step).backward()
            if step % 2:
                plain.step()
        if not step % 2:
            plain.step()
    for step in range(3):  # averaged by hand
        optimizer.zero_grad()
        bare = model if frontend == "optimizer" else model.module
        gradients = torch.autograd.grad(loss(bare, step), list(bare.parameters()))
        for parameter, gradient in zip(bare.parameters(), gradients, strict=True):
            parameter.grad = gc.allreduce(gradient)
        with no_sync():
            plain.step()


@pytest.mark.parametrize("frontend", ["optimizer", "hook"])
@on_ranks(2)
def test_alternating_optimizers_closures_and_scalers_are_no_bypass(frontend):
    def trained(model: torch.nn.Module, kind=torch.optim.SGD):
        if frontend == "optimizer":
            return model, wrap(model, kind=kind)
        ddp, _ = hooked(model=model)
        return ddp, kind(ddp.parameters(), lr=0.1)

    (maker, of_maker), (judge, of_judge) = trained(torch.nn.Linear(8, 8)), trained(net())
    for step in range(6):
        for _ in range(3):
            of_judge.zero_grad()
            with torch.no_grad():
                made = maker(torch.randn(2, 8))
            judge(made).square().mean().backward()
            of_judge.step()
        if step % 2:
            of_maker.zero_grad()
            judge(maker(torch.randn(2, 8))).square().mean().backward()
            of_maker.step()
    model, lbfgs = trained(net(1), torch.optim.LBFGS)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        value = loss(model)
        value.backward()
        return value

    for _ in range(3):
        lbfgs.step(closure)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
    model, optimizer = trained(net(2))
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(loss(model, step) * (float("inf") if step in (1, 2, 4) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()


# ---------------------------------------------------------------------- feedback that is never committed


def by_hand(model: torch.nn.Module) -> None:
    """A step that does not call ``optimizer.step()``."""
    for parameter in model.parameters():
        parameter.data.add_(parameter.grad, alpha=-0.1)


def told(lines: list[str]) -> int:
    return len([line for line in lines if "never applied" in line])


@pytest.mark.parametrize("zero", ["optimizer", "model"])
@on_ranks(2)
def test_three_exchanges_that_no_step_accepts_are_warned_about_once(zero):
    model = net()
    optimizer = wrap(model, WITH_RESIDUALS)
    counts = []
    with logged() as lines:
        for step in range(8):
            (optimizer if zero == "optimizer" else model).zero_grad()
            loss(model, step).backward()
            by_hand(model)
            counts.append(told(lines))
    assert counts == [0, 0, 0, *[int(gc.rank() == 0)] * 5]


@pytest.mark.parametrize("case", ["without state", "not finite", "two between steps"])
@on_ranks(2)
def test_discarded_exchanges_are_no_reason_to_warn(case):
    model = net()
    optimizer = wrap(model, "none" if case == "without state" else WITH_RESIDUALS)
    with logged() as lines:
        for step in range(9):
            optimizer.zero_grad()
            (loss(model, step) * (float("inf") if case == "not finite" else 1.0)).backward()
            if case == "without state":
                by_hand(model)
            if case == "two between steps" and step % 3 == 2:
                optimizer.step()
    assert not told(lines)
