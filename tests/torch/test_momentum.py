"""Momentum before compression: it acts once, the optimizer's or the compression's, and loses nothing by itself."""

from __future__ import annotations

import logging
import warnings
from itertools import pairwise

import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import (
    FRONTENDS,
    assert_close,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    everything,
    loss_of,
    net,
    train,
)

import gradcomp.torch as gc
from gradcomp import DGC, LGC, MomentumCorrection, Signum, TopK, Warmup

TAKEN = DGC(0.1, momentum_factor="optimizer")


frontends = pytest.mark.parametrize("frontend", FRONTENDS)


def made(frontend, model, compression, kind=torch.optim.SGD, param_groups=None, **options):
    """The module to call and the optimizer to step with; every layer is compressed."""
    given = {"kind": kind, "lr": 0.05, "options": options, "param_groups": param_groups}
    return FRONTENDS[frontend](model, everything(compression), **given)[:2]


def trained(frontend, compression, steps=10, **options) -> list[torch.Tensor]:
    model = net()
    train(*made(frontend, model, compression, **options), steps)
    return list(model.parameters())


# ------------------------------------------------------------------------------------------ it acts twice


TWICE = {
    "heavy ball": (DGC(0.1), {"momentum": 0.9}),
    "inside a wrapper": (Warmup(DGC(0.1), steps=3), {"momentum": 0.5}),
    "correction": (MomentumCorrection(TopK(0.1)), {"momentum": 0.9, "nesterov": True}),
    "learned": (LGC(0.1, warmup_steps=1, train_steps=1, least_parameters=0), {"momentum": 0.9}),
    "signs": (Signum(bucket_size=64), {"momentum": 0.9}),
}


@frontends
@pytest.mark.parametrize("case", TWICE)
@on_ranks(2)
def test_momentum_of_both_is_an_error_before_a_parameter_changes(case, frontend):
    compression, options = TWICE[case]
    model = net()
    before = bits_of(model.parameters())
    module, optimizer = made(frontend, model, compression, **options)
    with pytest.raises(gc.ConfigError) as error:
        train(module, optimizer, 1)
    parts = ("layer '", compression.bare().name, "SGD", "cycle_momentum=False", 'momentum_factor="optimizer"')
    assert [part for part in parts if part not in str(error.value)] == []
    assert bits_of(model.parameters()) == before


@frontends
@pytest.mark.parametrize("by", ["scheduler", "one rank"])
@on_ranks(2)
def test_momentum_that_a_scheduler_sets_or_that_comes_on_one_rank_is_an_error_too(by, frontend):
    module, optimizer = made(frontend, net(), DGC(0.1), momentum=0.0)
    error, says = gc.ConfigError, r"SGD has a momentum of 0\.95.*cycle_momentum=False"
    if by == "scheduler":
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    else:
        train(module, optimizer, 2)
        optimizer.param_groups[0]["momentum"] = 0.9 * gc.rank()
        error, says = gc.ConfigError if gc.rank() else gc.TransportError, "momentum acts twice on layer"
    with pytest.raises(error, match=says):
        train(module, optimizer, 2)


@on_ranks(2)
def test_a_compression_that_brings_momentum_in_mid_run_is_an_error_when_it_begins():
    model, optimizer = made("optimizer", net(), TopK(0.1), momentum=0.9)
    train(model, optimizer, 2)
    optimizer.set_compression(everything(DGC(0.1)))
    with pytest.raises(gc.ConfigError, match="acts twice"):
        train(model, optimizer, 3)


ONCE = {
    "plain": (DGC(0.1), "SGD", {}),
    "compression has none": (DGC(0.1, momentum_factor=0.0), "SGD", {"momentum": 0.9}),
    "top k": (TopK(0.1), "Adam", {}),
}


@frontends
@pytest.mark.parametrize("case", ONCE)
@on_ranks(2)
def test_momentum_of_one_is_no_reason_to_say_anything(case, frontend):
    compression, kind, options = ONCE[case]
    with logged(logging.WARNING, only=True) as lines:
        trained(frontend, compression, 2, kind=getattr(torch.optim, kind), **options)
    assert not lines


@frontends
@on_ranks(2)
def test_an_optimizer_that_averages_behind_momentum_is_warned_about_once(frontend):
    with logged(logging.WARNING, only=True) as lines:
        trained(frontend, DGC(0.1), 2, kind=torch.optim.AdamW)
    assert len(lines) == (gc.rank() == 0)
    assert all(part in line for line in lines for part in ("dgc", "AdamW", "momentum_factor=0"))


# ------------------------------------------------------------------------------------------ it is the optimizer's


WITH_FACTOR = {
    "dgc": lambda factor: DGC(0.1, momentum_factor=factor, clip=1.0, warmup_steps=4),
    "lgc": lambda factor: LGC(
        0.1, momentum_factor=factor, warmup_steps=2, train_steps=4, least_parameters=0, train_share=1.0
    ),
    "momentum_correction": lambda factor: MomentumCorrection("quantize:bits=4,bucket_size=64", factor),
}


@frontends
@pytest.mark.parametrize("kind", WITH_FACTOR)
@on_ranks(2)
def test_the_optimizers_momentum_taken_gives_the_bits_of_that_number_and_an_optimizer_without(kind, frontend):
    model = net()
    module, optimizer = made(frontend, model, WITH_FACTOR[kind]("optimizer"), momentum=0.9)
    train(module, optimizer, 10)
    taken = bits_of(model.parameters())
    assert taken == bits_of(trained(frontend, WITH_FACTOR[kind](0.9)))
    assert_same_on_all_ranks(model.parameters())
    assert taken != bits_of(net().parameters())
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.9
    assert not any("momentum_buffer" in state for state in optimizer.state.values())


@frontends
@on_ranks(2)
def test_each_groups_momentum_is_its_own_and_follows_a_scheduler(frontend):
    """At density 1, without masking, it is the optimizer's own momentum, of each group and step."""

    def run(frontend, compression):
        model, seen = net(), []
        groups = [{"params": model[n].parameters(), "momentum": m} for n, m in ((0, 0.5), (2, 0.9))]
        module, optimizer = made(frontend, model, compression, param_groups=groups)

        def cycle():
            for number, group in enumerate(optimizer.param_groups):
                group["momentum"] = (0.6, 0.9)[number] - 0.02 * len(seen)
            seen.append(optimizer.param_groups[0]["momentum"])

        train(module, optimizer, 10, after_step=cycle)
        assert all(b < a for a, b in pairwise(seen))
        return model.parameters()

    taken = run(frontend, DGC(1.0, momentum_factor="optimizer", mask=False))
    assert_close(taken, run("optimizer", "none"), rtol=1e-5, atol=1e-5)


@frontends
@on_ranks(2)
def test_a_scheduler_that_cycles_momentum_goes_on_doing_so(frontend):
    module, optimizer = made(frontend, net(), TAKEN, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30)
    seen = []

    def advance():
        seen.append(optimizer.param_groups[0]["momentum"])
        scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(module, optimizer, 12, after_step=advance)
    assert seen[0] == 0.95
    assert min(seen) == pytest.approx(0.85)


@on_ranks(2)
def test_a_closure_steps_without_the_momentum_that_was_taken():
    def run(compression, **options):
        model, optimizer = made("optimizer", net(), compression, **options)
        for step in range(10):

            def closure(step=step):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        return bits_of(model.parameters())

    assert run(TAKEN, momentum=0.9) == run(DGC(0.1))


@frontends
@on_ranks(2)
def test_a_step_that_fails_leaves_the_users_momentum_where_it_was(frontend):
    module, optimizer = made(frontend, net(), TAKEN, momentum=0.9)
    train(module, optimizer, 2)

    def fails(*_):
        raise ValueError("in the midst of a step")

    handle = optimizer.register_step_pre_hook(fails)
    with pytest.raises(ValueError, match="midst"):
        train(module, optimizer, 1)
    handle.remove()
    optimizer.zero_grad()
    backward(module)
    assert optimizer.param_groups[0]["momentum"] == 0.9


CANNOT = {
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "nesterov=False"),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1}, "dampening=0"),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9}, "RMSprop does not add up"),
    "adam": (torch.optim.Adam, {}, "Adam does not add up"),
}


@frontends
@pytest.mark.parametrize("case", CANNOT)
@on_ranks(2)
def test_momentum_that_cannot_be_taken_is_refused(case, frontend):
    kind, options, says = CANNOT[case]
    with pytest.raises(gc.ConfigError, match=says):
        trained(frontend, TAKEN, 1, kind=kind, **options)


@on_ranks(2)
def test_a_layer_that_would_be_left_without_momentum_is_refused_unless_it_has_a_group_of_its_own():
    policy = gc.Policy(
        TAKEN, {"2.*": "quantize:bits=8"}, gc.Filter(min_elements=0, min_dimensions=0, exclude_kinds=())
    )
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = gc.DistributedOptimizer(optimizer, model.named_parameters(), policy)
    with pytest.raises(gc.ConfigError, match=r"layer '2\.weight' would lose its momentum"):
        train(model, optimizer, 1)
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    train(model, gc.DistributedOptimizer(optimizer, model.named_parameters(), policy), 3)
    assert set(optimizer.state) == set(model[2].parameters())


@on_ranks(2)
def test_a_group_added_in_mid_run_brings_its_own_momentum():
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9)
    model[2].requires_grad_(False)
    optimizer = gc.DistributedOptimizer(optimizer, model[0].named_parameters(prefix="0"), everything(TAKEN))
    train(model, optimizer, 2)
    model[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters()), "momentum": 0.5})
    train(model, optimizer, 3)
    assert_same_on_all_ranks(model.parameters())
    assert not optimizer.state


# ------------------------------------------------------------------------------------------ what it comes to


@pytest.mark.parametrize("momentum", [0.5, 0.9])
@on_ranks(2)
def test_at_density_one_momentum_before_compression_is_the_optimizers(momentum):
    """Ratio 1: what every rank adds up on its own has the mean that one optimizer adds up."""
    corrected = trained("optimizer", DGC(1.0, momentum_factor=momentum, mask=False))
    assert_close(corrected, trained("optimizer", "none", momentum=momentum), rtol=1e-5, atol=1e-5)
    for a, b in zip(corrected, trained("optimizer", "none"), strict=True):
        assert not torch.allclose(a, b, rtol=1e-3, atol=1e-3), "momentum matters here"


@on_ranks(1)
def test_a_world_of_one_has_none_of_it_and_leaves_the_optimizers_momentum_alone():
    def warnings_about(compression, **options) -> list[str]:
        with logged(logging.WARNING, only=True) as lines:
            trained("optimizer", compression, 3, **options)
        return lines

    assert "world of one" in warnings_about(DGC(0.1))[0]
    assert not warnings_about(TopK(0.1))
    plain = net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), 3)
    assert bits_of(trained("optimizer", TAKEN, 3, momentum=0.9)) == bits_of(plain.parameters())
