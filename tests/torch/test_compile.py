"""torch.compile of a whole step, with backward and step inside: it breaks the graph where gradcomp is called."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
from batch import on_ranks
from launching import run_ranks
from small_torch import FRONTENDS, NEAREST, assert_same_on_all_ranks, backward, bits_of, data, net, small

import gradcomp.torch as gc

MOMENTUM = {"momentum": 0.9}


def made(frontend: str, compression=NEAREST, **options):
    """The module to call and the optimizer to step with."""
    return FRONTENDS[frontend](net(), compression, options=options)[:2]


def trained(model, optimizer, backend: str | None, **compiling) -> list[bytes]:
    """After six steps that are compiled as a whole; with clipping, which must see means."""

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    run = step if backend is None else torch.compile(step, backend=backend, **compiling)
    for number in range(6):
        run(data(number))
    return bits_of(model.parameters())


@pytest.mark.parametrize(
    ("frontend", "autograd"), [("optimizer", "eager"), ("optimizer", "compiled"), ("hook", "eager")]
)
@on_ranks(2, reorder=False)  # gradients of a compiled graph come in an order of their own
def test_a_step_that_is_compiled_as_a_whole_has_the_bits_of_eager_and_no_warning(frontend, autograd):
    torch._dynamo.reset()
    with (
        warnings.catch_warnings(record=True) as said,
        torch._dynamo.config.patch(compiled_autograd=autograd == "compiled"),
    ):
        warnings.simplefilter("always")
        model, optimizer = made(frontend, **MOMENTUM)
        compiled = trained(model, optimizer, "aot_eager")
    assert compiled == trained(*made(frontend, **MOMENTUM), None)
    assert_same_on_all_ranks(model.parameters())
    assert not [
        text for one in said if any(word in (text := str(one.message)) for word in ("getpid", "perf_counter"))
    ]


@pytest.mark.parametrize("autograd", ["eager", "compiled"])
@on_ranks(2, reorder=False)
def test_means_are_there_when_backward_returns_to_a_compiled_step(autograd):
    """One layer is unused, so that no exchange ends before the backward pass does."""
    model, unused, seen = net(), torch.nn.Linear(8, 8), []
    named = [*model.named_parameters(), *unused.named_parameters()]
    optimizer = torch.optim.SGD([parameter for _, parameter in named], lr=0.1)
    optimizer = gc.DistributedOptimizer(optimizer, named)

    @torch.compiler.disable
    def look() -> None:
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))

    def step(x):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        look()
        optimizer.step()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=autograd == "compiled"):
        run = torch.compile(step, backend="aot_eager")
        for number in range(3):
            run(data(number))
    assert len(seen) == 3
    assert_same_on_all_ranks(seen)


@on_ranks(2, reorder=False)
def test_a_compiled_backward_that_fails_leaves_no_end_behind():
    model, optimizer = made("optimizer", "none")
    calls = []
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch._dynamo.reset()

        @torch.compiler.disable
        def fails(gradient):
            calls.append(gradient)
            raise ValueError("in a hook")

        def step(x, *, broken):
            optimizer.zero_grad()
            y = model(x)
            if broken:
                x.register_hook(fails)
            y.square().mean().backward()
            optimizer.step()

        run = torch.compile(step, backend="aot_eager")
        with pytest.raises(ValueError, match="in a hook"):
            run(data(0).requires_grad_(), broken=True)
    assert calls
    from gradcomp.torch import modules

    assert not modules._running.callbacks
    assert not modules._running.ended


@on_ranks(2, reorder=False)
def test_closures_momentum_that_is_taken_and_synchronize_are_compiled_alike():
    def run(backend):
        model, optimizer = made("optimizer", small("dgc:density=0.1,momentum_factor=optimizer"), **MOMENTUM)

        def step(x):
            def closure():
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.synchronize()
                return loss

            return optimizer.step(closure)

        call = step if backend is None else torch.compile(step, backend=backend)
        for number in range(4):
            call(data(number))
        return bits_of(model.parameters())

    torch._dynamo.reset()
    assert run("aot_eager") == run(None)


@on_ranks(2, reorder=False)
def test_compiled_autograds_python_reducer_is_refused_under_a_hook():
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        ddp, _ = made("hook")
        with pytest.raises(gc.ConfigError, match="python_reducer"):
            backward(ddp)


@pytest.mark.full
def test_under_inductor_ranks_are_equal_and_one_alone_has_the_bits_of_the_unwrapped_step():
    def program():
        import torch
        from small_torch import assert_same_on_all_ranks
        from test_compile import MOMENTUM, made, net, trained

        import gradcomp.torch as gc

        gc.init(reorder=False)
        model, optimizer = made("optimizer", **MOMENTUM)
        ours = trained(model, optimizer, "inductor")
        if gc.size() == 1:
            torch._dynamo.reset()
            plain = net()
            sgd = torch.optim.SGD(plain.parameters(), lr=0.1, **MOMENTUM)
            assert ours == trained(plain, sgd, "inductor")
        else:
            assert_same_on_all_ranks(model.parameters())

    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent)])
    for world in (1, 2):
        for finished in run_ranks(program, world, env={"PYTHONPATH": paths}, timeout=300):
            assert finished.returncode == 0, finished.stderr
            assert "getpid" not in finished.stderr
            assert "perf_counter" not in finished.stderr
