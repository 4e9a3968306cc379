"""Loss scalers: residuals are in unscaled units, whatever the scale becomes, and all ranks skip an overflow."""

from __future__ import annotations

import pytest
import torch
from batch import on_ranks
from logs import logged
from small_torch import (
    FRONTENDS,
    NEAREST,
    assert_same_on_all_ranks,
    assert_still_working,
    bits_of,
    exchanger_of,
    loss_of,
    net,
    residuals,
    same,
    scaled_step,
    small,
    train,
    wrap,
)

import gradcomp.torch as gc

frontends = pytest.mark.parametrize("frontend", FRONTENDS)


def scaler(**arguments) -> torch.amp.GradScaler:
    """One whose scale changes at every other step."""
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, **arguments)


def residuals_after(frontend, given, **arguments) -> dict[str, torch.Tensor]:
    model, optimizer, state = FRONTENDS[frontend](net(), NEAREST, **arguments)
    for step in range(3):
        scaled_step(model, optimizer, given, step)
    return residuals(state)


@frontends
@on_ranks(2)
def test_scaled_training_has_the_bits_of_unscaled_training_whatever_the_scale_becomes(frontend):
    runs = []
    for scales in ([1.0] * 5, [1024.0, 512.0, 65536.0, 2.0, 256.0]):
        given, seen = torch.amp.GradScaler("cpu", init_scale=scales[0]), []
        model, optimizer, state = FRONTENDS[frontend](net(), NEAREST, grad_scaler=given)
        for step, scale in enumerate(scales):
            given.update(scale) if step else None
            optimizer.zero_grad()
            given.scale(loss_of(model, step)).backward()
            if step % 2:
                given.unscale_(optimizer)
                seen += bits_of(p.grad for p in model.parameters())
            given.step(optimizer)
        assert any(residual.any() for residual in residuals(state).values())
        runs.append((seen, bits_of(model.parameters())))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("case", ["SGD", "fused", "agree"])
@on_ranks(2)
def test_an_overflow_on_one_rank_is_skipped_by_all_and_leaves_the_residuals(case):
    model, given = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    arguments = {
        "SGD": {},
        "fused": {"kind": torch.optim.Adam, "options": {"fused": True}},
        "agree": {"on_skip": "agree"},
    }[case]
    optimizer = wrap(model, NEAREST, grad_scaler=given, **arguments)
    with logged() as lines:
        for step in range(2):  # buckets are put in order after the first
            scaled_step(model, optimizer, given, step)
    assert not [text for text in lines if "grad_scaler" in text]  # we were told of it
    before, kept = bits_of(model.parameters()), residuals(optimizer)
    assert any(residual.any() for residual in kept.values())
    scaled_step(model, optimizer, given, 2, float("inf") if gc.rank() == 1 else 1.0)
    optimizer.zero_grad()
    assert bits_of(model.parameters()) == before
    assert same(residuals(optimizer), kept)
    assert given.get_scale() == 512.0
    scaled_step(model, optimizer, given, 3)
    assert bits_of(model.parameters()) != before
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same_on_all_ranks(model.parameters())


@frontends
@on_ranks(2)
def test_the_one_scaler_there_is_gives_residuals_the_units_that_a_named_one_does(frontend):
    named = scaler()
    disabled = scaler(enabled=False)  # does not count
    want = residuals_after(frontend, named, grad_scaler=named)
    del named
    with logged() as lines:
        found = residuals_after(frontend, scaler())
    assert want["0.weight"].any()
    assert same(found, want)
    said = [line for line in lines if "GradScaler" in line]
    assert len(said) == (gc.rank() == 0)
    assert all("grad_scaler=" in line for line in said)
    assert disabled.get_scale() == 1.0


@frontends
@on_ranks(2)
def test_several_scalers_are_an_error_that_names_the_argument_unless_no_state_needs_one(frontend):
    mine, other = scaler(), scaler()
    scaled_step(*FRONTENDS[frontend](net())[:2], mine)
    for _ in range(2):
        model, optimizer, _ = FRONTENDS[frontend](net(), NEAREST)
        with pytest.raises(gc.ConfigError, match=r"grad_scaler=scaler"):
            scaled_step(model, optimizer, mine)
    assert other.get_scale() == 1024.0
    residuals_after(frontend, mine, grad_scaler=mine)


@pytest.mark.parametrize("case", [*FRONTENDS, "nothing scaled"])
@on_ranks(2)
def test_a_scaler_is_left_alone_if_the_caller_says_so_or_if_it_has_scaled_nothing(case):
    other = scaler()
    if case == "nothing scaled":
        model, optimizer, state = FRONTENDS["optimizer"](net(), NEAREST)
    else:
        other.scale(torch.zeros(()))
        model, optimizer, state = FRONTENDS[case](net(), NEAREST, grad_scaler=False)
    with logged() as lines:
        train(model, optimizer, 2)
    assert exchanger_of(state).pipeline._exchange._context.unscale == 1.0
    assert case == "nothing scaled" or not [line for line in lines if "GradScaler" in line]
    assert other.get_scale() == 1024.0


@frontends
@pytest.mark.parametrize("named", [False, True])
@on_ranks(2)
def test_a_scaler_that_only_one_rank_has_or_names_is_an_error_on_every_rank(frontend, named):
    mine = scaler() if named or gc.rank() == 1 else None
    given = {"grad_scaler": mine} if named and gc.rank() == 1 else {}
    model, optimizer, _ = FRONTENDS[frontend](net(), "none" if named else NEAREST, **given)
    with pytest.raises(gc.ConfigError, match=r"rank 1 .*rank 0 .*grad_scaler="):
        scaled_step(model, optimizer, mine) if named else train(model, optimizer)
    assert mine is None or mine.get_scale()
    if not named:
        assert_still_working()


@on_ranks(2)
def test_a_scaler_is_looked_for_when_state_begins():
    mine = scaler()
    model, optimizer, state = FRONTENDS["optimizer"](net(), small(gc.Warmup(NEAREST.default, steps=2)))
    scales = []
    for step in range(4):
        scaled_step(model, optimizer, mine, step)
        scales.append(exchanger_of(state).pipeline._exchange._context.unscale)
    assert scales == [1.0, 1.0, 2048.0, 2048.0]
