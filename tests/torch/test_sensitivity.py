"""``Sensitivity``: the measured change is the known one, and training does not notice the measurement."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from batch import on_ranks
from small_torch import assert_same_on_all_ranks, bits_of

import gradcomp.torch as gc

EVERYTHING = gc.Filter(min_elements=0, min_dimensions=2, exclude_kinds=())


class Quadratic(torch.nn.Module):
    """L = sum over layers of h / 2 ||w||^2, with h = 3 and 5."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64).float())
        self.b = torch.nn.Parameter(torch.randn(5, 3))

    def forward(self) -> torch.Tensor:
        return 1.5 * self.a.double().square().sum() + 2.5 * self.b.double().square().sum()


def steps_of(kind: str, parameter: torch.Tensor, state, error: torch.Tensor) -> torch.Tensor:
    """How far the optimizers below go for a part of a gradient, momentum included."""
    if kind == "adam":
        corrected = state["exp_avg_sq"] / (1 - 0.99 ** state["step"])
        return 0.01 * error / (corrected.sqrt() + 1e-8)
    return {"sgd": 0.1, "momentum": 0.1 / (1 - 0.9), "ascent": -0.1}[kind] * error


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "ascent": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99)),
}


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_change_of_a_quadratic_loss_is_that_of_its_formula(kind, double):
    model = Quadratic()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    named = list(model.named_parameters())
    sensitivity = gc.Sensitivity(model, lambda model: model(), double=double)
    sensitivity.check(named, optimizer)
    draw = torch.Generator().manual_seed(1)
    errors = [(layer, 0.1 * torch.randn(named[layer][1].numel(), generator=draw)) for layer in (1, 0, 1)]
    found = sensitivity.changes(named, optimizer, 1, [(layer, e.numpy()) for layer, e in errors])
    for (layer, error), change in zip(errors, found, strict=True):
        w, h = named[layer][1].detach(), (3.0, 5.0)[layer]
        s = steps_of(kind, w, optimizer.state[named[layer][1]], error.view_as(w))
        moved = s.double() if double else (w + s).double() - w.double()
        assert change == pytest.approx(h * float((w.double() * moved + moved.square() / 2).sum()), rel=1e-6)


def noisy() -> torch.nn.Module:
    torch.manual_seed(0)
    parts = [torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Dropout(0.3)]
    return torch.nn.Sequential(*parts, torch.nn.Linear(16, 5))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    return torch.randn(16, 12, generator=draw), torch.randint(0, 5, (16,), generator=draw)


def loss_of(model: torch.nn.Module, number: int = 10**6) -> torch.Tensor:
    x, y = batch(number)
    return torch.nn.functional.cross_entropy(model(x), y)


def rude(model: torch.nn.Module) -> torch.Tensor:
    """Draws from all generators, changes modes and buffers."""
    random.random()
    np.random.rand()  # noqa: NPY002
    model[3].eval()
    model[1].running_mean += 1
    return loss_of(model) + torch.rand(()) * 1e-3


def test_changes_that_float32_would_round_away_are_measured():
    model = noisy()
    named, optimizer = list(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=1.0)
    tiny = np.full(named[0][1].numel(), 1e-11, np.float32)
    changes = {}
    for double in (True, False):
        sensitivity = gc.Sensitivity(model, loss_of, double=double)
        sensitivity.check(named, optimizer)
        changes[double] = sensitivity.changes(named, optimizer, 1, [(0, tiny), (0, 2 * tiny)])
    assert changes[False] == [0, 0]
    assert changes[True][0] != 0
    assert changes[True][1] == pytest.approx(2 * changes[True][0], rel=1e-2)


@pytest.mark.parametrize("fails", [False, True])
def test_a_measurement_leaves_no_trace(fails):
    """Parameters, buffers, gradients, random states and modes are the same bits, also if the loss raises."""
    model = noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()

    def everything():
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        modes = [module.training for module in model.modules()]
        draws = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        return bits_of(tensors), modes, draws, [id(t) for t in tensors], [t._version for t in tensors]

    before, called = everything(), []

    def loss(model):
        called.append(rude(model))
        if fails and len(called) == 2:
            raise RuntimeError("a user's error")
        return called[-1]

    sensitivity = gc.Sensitivity(model, loss)
    named = list(model.named_parameters())
    sensitivity.check(named, optimizer)
    cells = [(0, np.ones(named[0][1].numel(), np.float32)), (0, np.zeros(named[0][1].numel(), np.float32))]
    if fails:
        with pytest.raises(RuntimeError, match="a user's error"):
            sensitivity.changes(named, optimizer, 1, cells)
    else:
        changes = sensitivity.changes(named, optimizer, 1, cells)
        assert changes[0] != 0
        assert changes[1] == 0, "all passes draw the same numbers"
        assert not any(value.requires_grad for value in called)
    assert everything() == before


def train(metric: str, steps: int = 40, levels=(4,)):
    model = noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    given = {"sensitivity": gc.Sensitivity(model, loss_of)} if metric == "loss" else {}
    controller = gc.LGreCo(8, levels=list(levels), metric=metric, window=8)
    optimizer = gc.DistributedOptimizer(
        optimizer, model.named_parameters(), gc.Policy(gc.Quantize(4, 16), filter=EVERYTHING), controller=controller,
        **given,
    )  # fmt: skip
    torch.manual_seed(gc.rank())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 10 * step + gc.rank()).backward()
        optimizer.step()
    return (
        model,
        optimizer,
        [*bits_of([*model.parameters(), *model.buffers()]), torch.get_rng_state().tolist()],
    )


def check_training():
    """With one level the plan cannot change, so runs with and without losses must end with the same bits."""
    assert train("norm")[2] == train("loss")[2]
    model, optimizer, _ = train("loss", levels=(2, 3, 4, 5, 6))
    if gc.size() > 1:
        assert_same_on_all_ranks(model.parameters())
        assert optimizer.plan().version > 0
        assert gc.broadcast_object(optimizer.plan().to_json(), 0) == optimizer.plan().to_json()


@on_ranks(1)
def test_training_does_not_notice_among_one():
    check_training()


@on_ranks(2)
def test_training_does_not_notice():
    check_training()


@on_ranks(3)
def test_training_does_not_notice_among_three():
    check_training()


@on_ranks(2)
def test_what_is_refused():
    model, other = noisy(), torch.nn.Linear(3, 3)
    sensitivity, lgreco = gc.Sensitivity(model, loss_of), "lgreco:metric=loss"

    def wrap(controller=lgreco, kind=torch.optim.SGD, op=gc.Average, **arguments):
        optimizer = kind(model.parameters(), lr=0.1)
        gc.DistributedOptimizer(
            optimizer, model.named_parameters(), "quantize", controller=controller, op=op, **arguments
        )

    for call, named in (
        (wrap, r"sensitivity=Sensitivity\(model, loss\)"),
        (lambda: gc.ddp_comm_hook(model, "quantize", controller=lgreco), "Communication hooks"),
        (lambda: wrap("lgreco", sensitivity=sensitivity), 'LGreCo\\(metric="loss"\\)'),
        (lambda: wrap(None, sensitivity=sensitivity), 'LGreCo\\(metric="loss"\\)'),
        (lambda: wrap(sensitivity=loss_of), "must be a gradcomp.torch.Sensitivity"),
        (lambda: wrap(sensitivity=gc.Sensitivity(other, loss_of)), "no parameter '0.weight'"),
        (lambda: wrap(None, op=gc.Adasum, sensitivity=sensitivity), "no meaning with op=Adasum"),
        (lambda: gc.Sensitivity(loss_of, loss_of), "expected a torch.nn.Module"),
        (lambda: gc.Sensitivity(model, 3), "expected a function"),
    ):
        with pytest.raises(gc.ConfigError, match=named):
            call()
    # A rank that forgot it is an error on all ranks.
    kind = gc.PlanMismatchError if gc.rank() else gc.ConfigError
    with pytest.raises(kind, match="sensitivity="):
        wrap(**({"sensitivity": sensitivity} if gc.rank() else {}))


@pytest.mark.parametrize("returned", [lambda model: 1.0, lambda model: torch.zeros(2)])
def test_a_loss_that_is_no_number(returned):
    model = noisy()
    named, optimizer = list(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gc.ConfigError, match="one number"):
        gc.Sensitivity(model, returned).changes(named, optimizer, 1, [])
