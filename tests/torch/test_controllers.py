"""Controllers under real processes: plans change while training runs, and are the same on all ranks."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import bits_of, in_ddp, initialised, shared_folder

import gradcomp.torch as gc
from gradcomp.control.base import at_once
from gradcomp.core.journal import read
from gradcomp.exchange import agreement

EVERYTHING = gc.Filter(min_elements=0, min_dimensions=2, exclude_kinds=())


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    first, second, last = torch.nn.Linear(40, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 5)
    return torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.Tanh(), last)


def backward(model: torch.nn.Module, step: int, more: torch.Tensor | float = 0.0) -> None:
    draw = torch.Generator().manual_seed(1000 * step + gc.rank())
    x, y = torch.randn(16, 40, generator=draw), torch.randint(0, 5, (16,), generator=draw)
    (torch.nn.functional.cross_entropy(model(x), y) + more).backward()


def make(controller, compression=gc.Quantize(4, 64), model=None, **arguments):  # noqa: B008
    model = model or net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    policy = gc.Policy(compression, filter=EVERYTHING)
    return model, gc.DistributedOptimizer(
        optimizer, model.named_parameters(), policy, controller=controller, **arguments
    )


def train(model, optimizer, first: int, steps: int, pause: float = 0.0) -> list[str]:
    plans = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step)
        time.sleep(pause)
        optimizer.step()
        plans.append(optimizer.plan().to_json() if hasattr(optimizer, "plan") else "")
    return plans


def same_everywhere(value) -> None:
    assert gc.broadcast_object(value if gc.rank() == 0 else None, 0) == value


CONTROLLERS = {
    "lgreco": gc.LGreCo(8, alpha=3),
    "lgreco by string": "lgreco:every_steps=8,metric=squared,objective=position,alpha=3",
    "lgreco with accordion": gc.LGreCo(8, accordion=gc.Accordion(low=5, high=3, every_steps=8)),
    "hybrid": gc.LGreCo(8, levels=[2, 3, 4, 6, gc.PowerSGD(2), gc.PowerSGD(8), gc.TopK(0.1)], alpha=3),
    "accordion": gc.Accordion(low=4, high=2, every_steps=8),
    "kmeans": gc.KMeans(8, levels=[2, 3, 4], alpha=4),
    "linear": gc.Linear(8),
    "adaqs": gc.AdaQS(low=6, high=3, every_steps=8),
    "schedule": gc.Schedule({0: 6, 10: 3, 20: gc.PowerSGD(2)}),
    "fixed plan": gc.FixedPlan({"0.*": 2, "*": "quantize:bits=6"}),
}


#: What a plan is made of here: levels by measurement, several families, steps, a file. All of them: tests/control.
BRIEFLY = {"lgreco", "hybrid", "schedule", "fixed plan"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BRIEFLY else pytest.mark.full) for name in CONTROLLERS]
)
@on_ranks(2)
def test_plans_change_and_agree(name):
    model, optimizer = make(CONTROLLERS[name])
    plans = train(model, optimizer, 0, 40, pause=0.001)
    same_everywhere([sorted(set(plans))])
    levels = {a.level for a in optimizer.plan().assignments}
    assert levels != {4, None}
    if name != "fixed plan":
        assert len(set(plans)) > 1
    same_everywhere(bits_of(model.parameters()))


@pytest.mark.parametrize(
    "family", ["quantize:bits=4,rounding=nearest", "powersgd:rank=2", "topk:density=0.05"]
)
@on_ranks(3)
def test_resumed_is_uninterrupted_bit_for_bit(family):
    # Background work at once, so that plans change in the same steps.
    agreement.in_background = at_once
    directory = shared_folder()
    controller = gc.LGreCo(5, alpha=3)
    model, optimizer = make(controller, family)
    before = train(model, optimizer, 0, 9)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = copy.deepcopy(optimizer.state_dict())
    gc.save(directory, optimizer)
    expected = train(model, optimizer, 9, 12)
    again, other = make(controller, family, net(1))
    again.load_state_dict(kept)
    other.load_state_dict(momentum)
    gc.load(directory, other)
    found = train(again, other, 9, 12)
    assert found == expected
    assert len(set(before + found)) > 1
    assert bits_of(model.parameters()) == bits_of(again.parameters())
    if family.startswith("quantize"):  # the local way holds the same
        _, last = make(controller, family, net(2))
        last.load_compression_state(other.compression_state())
        assert last.plan() == other.plan()


@on_ranks(2)
def test_the_run_log_and_the_log_lines():
    path = shared_folder() / "run.jsonl"
    with initialised(run_log=str(path)), logged(only=True) as lines:
        other = make(gc.LGreCo(8, alpha=3))  # has the file of this name
        model, optimizer = make(gc.LGreCo(8, alpha=3))
        # A choice applies when the background has made it: how many steps that takes is the machine's.
        for first in range(0, 600, 30):
            train(model, optimizer, first, 30, pause=0.001)
            if optimizer.plan().version >= 2:
                break
    changes = [line for line in lines if "plan" in line and "lgreco" in line]
    if gc.rank():
        assert not changes
        return
    assert len(changes) >= 2
    assert all(part in changes[-1] for part in ("bits", "predicted", "of them under control; ", "measured"))
    assert len(other) == 2
    (of_second,) = set(path.parent.iterdir()) - {path}
    (run,) = read(of_second)
    assert run.world == 2
    assert run.controller.startswith("lgreco(")
    assert len(run.plans) >= 2
    assert run.choices
    first = run.plans[0]
    assert first.measured_bytes == pytest.approx(first.predicted_bytes, rel=0.25)  # headers, in a tiny model
    assert run.plans[-1].predicted_bytes < first.predicted_bytes


@on_ranks(2)
def test_the_hook_takes_one_too():
    model = net()
    policy = gc.Policy(gc.Quantize(4, 64), filter=EVERYTHING)
    wrapped, state = in_ddp(model, policy, controller=gc.LGreCo(6, alpha=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(wrapped, optimizer, 0, 30, pause=0.001)
    assert state.plan().version >= 1
    same_everywhere(state.plan().to_json())


@on_ranks(2)
def test_added_parameters_keep_what_was_chosen():
    model, optimizer = make(gc.LGreCo(6, alpha=3))
    train(model, optimizer, 0, 20, pause=0.001)
    before = optimizer.plan()
    extra = torch.nn.Parameter(torch.randn(32, 32))
    optimizer.add_param_group({"params": [extra], "names": ["extra"]})
    after = optimizer.plan().by_layer
    assert all(after[a.layer].level == a.level for a in before.assignments)
    assert after["extra"].level == 4
    for step in range(20, 40):
        optimizer.zero_grad()
        backward(model, step, more=(extra * (1.0 + gc.rank())).sum())
        optimizer.step()
    same_everywhere(optimizer.plan().to_json())


#: Layers that are too small, in float64, excluded by name, sparse. What is sparse shows in the first step only.
NOTHING_TO_ADJUST = {
    "small": (lambda: torch.nn.Linear(8, 3), gc.Filter()),
    "float64": (lambda: torch.nn.Linear(40, 64).double(), EVERYTHING),
    "filtered": (net, gc.Filter(exclude=("*",))),
    "sparse": (lambda: torch.nn.Embedding(500, 40, sparse=True), EVERYTHING),
}


@on_ranks(2)
def test_a_controller_with_nothing_to_adjust_says_so_and_the_run_goes_on():
    four_bits = gc.Quantize(4, 64)
    controllers = {name: (controller, four_bits) for name, controller in CONTROLLERS.items()}
    controllers |= {
        "fixed plan": (gc.FixedPlan({"*": 2}), four_bits),
        "bayes": (gc.Bayes(every_steps=8), four_bits),
        "gravac": (gc.GraVAC(), gc.TopK(0.1)),
        "auto": (gc.Auto(), four_bits),
        "uncompressed": (gc.LGreCo(8), "none"),
    }
    for case, (make_model, kept) in NOTHING_TO_ADJUST.items():
        # What is left to adjust is found by one function, and what a period does without, by each of them.
        some = controllers if case in ("small", "sparse") else ["lgreco", "auto", "uncompressed"]
        for name in some:
            controller, compression = controllers[name]
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with logged() as lines:
                optimizer = gc.DistributedOptimizer(
                    optimizer,
                    model.named_parameters(),
                    gc.Policy(compression, filter=kept),
                    controller=controller,
                )
            known = case != "sparse" or name == "uncompressed"
            said = [line for line in lines if "has nothing to adjust" in line]
            assert len(said) == (known and gc.rank() == 0), (case, name, lines)
            weight = next(model.parameters())
            for step in range(3 if known else 20):
                optimizer.zero_grad()
                draw = torch.Generator().manual_seed(100 * step + gc.rank())
                x = torch.randn((4, weight.shape[1]), generator=draw, dtype=weight.dtype)
                if case == "sparse":
                    x = torch.randint(0, len(weight), (4,), generator=draw)
                model(x).square().sum().backward()
                optimizer.step()
            assert optimizer.plan().version == 0 or not known, (case, name)
            same_everywhere(bits_of(model.parameters()))


@on_ranks(2)
def test_automatic_compression_of_a_model_that_is_too_small_is_none():
    model = torch.nn.Linear(40, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with logged() as lines:
        optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), compression="auto")
    assert any("auto has nothing to adjust" in line for line in lines) == (gc.rank() == 0)
    train(model, optimizer, 0, 20)
    same_everywhere(bits_of(model.parameters()))


@on_ranks(2)
def test_levels_that_a_compressor_lacks_and_ranks_with_different_controllers_are_refused():
    with pytest.raises(gc.ConfigError, match="levels="):
        make(gc.LGreCo(5), gc.Compression.bf16)
    with pytest.raises(gc.PlanMismatchError, match="controller"):
        make(gc.LGreCo(6 + gc.rank()))


@on_ranks(2)
def test_gradients_that_are_not_finite_do_no_harm():
    model, optimizer = make(gc.LGreCo(6, alpha=3))
    for step in range(30):
        optimizer.zero_grad()
        backward(model, step)
        if step % 7 == 3:
            optimizer.zero_grad()
            (model(torch.full((2, 40), np.inf if gc.rank() else 1.0)).sum() * 0).backward()
            optimizer.zero_grad()
            continue
        optimizer.step()
    assert optimizer.plan().version >= 1
    same_everywhere(optimizer.plan().to_json())
