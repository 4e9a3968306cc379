"""A rank that does not step on means that others step on: an error on every rank, or a step that all skip."""

from __future__ import annotations

import math

import pytest
import small_torch
import torch
from batch import on_ranks
from small_torch import (
    FRONTENDS,
    Raises,
    assert_same_on_all_ranks,
    backward,
    bits_of,
    data,
    loss_of,
    net,
    small,
)

import gradcomp.torch as gc

STEPS = 8
SKIPPED = 3
LOSER = 1
FEEDBACK = "quantize:bits=4,feedback=true"


def wrap(model, compression="none", **arguments):
    return small_torch.wrap(model, small(compression), **arguments)


def gives_up(place: str, model, optimizer, step: int) -> None:
    """Recovery code as people write it: the batch is given up here, before or after the gradients were exchanged."""
    if place == "in backward":  # when half of the gradients are there
        with pytest.raises(torch.OutOfMemoryError):
            model[2](model[1](Raises.apply(model[0](data(step))))).square().mean().backward()
    else:
        backward(model, step)
    if place != "accumulating":
        optimizer.zero_grad()
    if place == "before step":
        optimizer.step()


@pytest.mark.parametrize(
    ("place", "compression"),
    [
        ("between", "none"),
        ("between", FEEDBACK),
        ("in backward", "powersgd"),
        ("in backward", "none"),
        ("before step", FEEDBACK),
        ("accumulating", "none"),
    ],
)
@on_ranks(3)
def test_when_one_rank_skips_a_step_all_raise_in_the_next_exchange(place: str, compression: str):
    model = net()
    optimizer = wrap(model, compression)
    with pytest.raises(gc.StateError) as caught:  # noqa: PT012
        for step in range(STEPS):
            if step == SKIPPED and gc.rank() == LOSER:
                gives_up(place, model, optimizer, step)
                continue
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    text = str(caught.value)
    assert f"after step {SKIPPED + 1} " in text
    assert f"rank 1 {'went on accumulating' if place == 'accumulating' else 'threw the means away'}" in text
    assert "rank 0, 2 applied the means" in text
    assert 'on_skip="agree"' in text
    with pytest.raises(gc.StateError, match="went different ways"):
        optimizer.step()


@pytest.mark.parametrize(("compression", "who"), [(FEEDBACK, "all"), ("topk", "one")])
@on_ranks(3)
def test_steps_that_all_ranks_skip_and_a_batch_that_one_gives_up_before_backward_are_no_error(
    compression, who
):
    model = net()
    optimizer = wrap(model, compression)
    for step in range(STEPS + (who == "one" and gc.rank() == LOSER)):
        optimizer.zero_grad()
        if step == SKIPPED and who == "one" and gc.rank() == LOSER:
            continue
        backward(model, step)
        if step != SKIPPED or who == "one":
            optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("compression", ["none", FEEDBACK])
@pytest.mark.parametrize("place", ["between", "in backward"])
@on_ranks(3)
def test_ranks_that_agree_skip_together(place: str, compression: str):
    model = net()
    optimizer = wrap(model, compression, on_skip="agree")
    for step in range(STEPS):
        before = bits_of(model.parameters())
        if step == SKIPPED and gc.rank() == LOSER:
            gives_up(place, model, optimizer, step)
        else:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        moved = bits_of(model.parameters()) != before
        assert moved == (step != SKIPPED)
    assert_same_on_all_ranks(model.parameters())
    statistics = optimizer.statistics()
    assert statistics.skipped_steps == (0 if gc.rank() == LOSER else 1)
    assert statistics.vote_seconds > 0


@on_ranks(3)
def test_three_ranks_that_agree_skip_what_a_scaler_skips():
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = wrap(model, FEEDBACK, on_skip="agree", grad_scaler=scaler)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(
            loss_of(model, step) * (math.inf if step == SKIPPED and gc.rank() == LOSER else 1.0)
        ).backward()
        scaler.step(optimizer)
        scaler.update()
    assert_same_on_all_ranks(model.parameters())
    assert scaler.get_scale() == 2.0**9


@on_ranks(3)
def test_what_a_checkpoint_ends_counts_as_skipped_by_all():
    """A step that is not finite is over where the compression state is asked for: that rank votes as it would later."""
    model = net()
    optimizer = wrap(model, FEEDBACK, on_skip="agree")
    (loss_of(model) * (math.inf if gc.rank() == LOSER else 1.0)).backward()
    if gc.rank() != LOSER:
        optimizer.compression_state()
    optimizer.zero_grad()
    backward(model, 1)
    before = bits_of(model.parameters())
    optimizer.step()
    assert bits_of(model.parameters()) != before
    assert_same_on_all_ranks(model.parameters())


@on_ranks(3)
def test_a_rank_that_ends_without_its_step_votes_against_it():
    """The last exchange: the others must not wait for a vote that never comes."""
    model = net()
    optimizer = wrap(model, on_skip="agree")
    exchanger = optimizer._gradcomp.exchanger
    backward(model, 0)
    if gc.rank() == LOSER:
        exchanger.part()
        return
    before = bits_of(model.parameters())
    assert optimizer.step() is None
    assert bits_of(model.parameters()) == before


@on_ranks(3)
def test_what_cannot_agree_and_ranks_with_different_rules_for_skips_are_refused():
    model = net()
    with pytest.raises(gc.ConfigError, match="use DistributedOptimizer"):
        gc.ddp_comm_hook(model, on_skip="agree")
    with pytest.raises(gc.PlanMismatchError, match="on_skip"):
        wrap(model, on_skip="agree" if gc.rank() else "raise")
    optimizer = wrap(model, on_skip="agree")
    with pytest.raises(gc.StateError, match="closure"):
        optimizer.step(lambda: loss_of(model))


# ---------------------------------------------------------------------- a rank whose loss reaches no parameter


def backward_without_loser(model, step: int, loss_factor: float = 1.0) -> None:
    """One rank's batch has no targets: its loss is a constant for the model."""
    loss = torch.ones((), requires_grad=True) if gc.rank() == LOSER else loss_of(model, step)
    (loss * loss_factor).backward()


def clip_by_hand(model, most: float = 0.001) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(sum(gradient.square().sum() for gradient in gradients)) ** 0.5
    for gradient in gradients:
        gradient.mul_(min(1.0, most / (norm + 1e-9)))


def clip_into_new_tensors(model) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clamp(-1e-4, 1e-4)


RANKS_IN_ERROR = (
    r"after step 4 .*rank 1 had no gradient.*rank 0, 2 changed theirs between backward.*opt\.synchronize"
)


@pytest.mark.parametrize(
    ("compression", "clip"),
    [
        ("none", "clip_by_hand"),
        ("none", "clip_into_new_tensors"),
        (FEEDBACK, "clip_by_hand"),
        ("powersgd", "clip_into_new_tensors"),
        ("topk", "clip_by_hand"),
    ],
)
@on_ranks(3)
def test_means_that_only_ranks_with_gradients_have_changed_are_an_error_of_the_next_exchange(
    compression: str, clip: str
):
    model = net()
    optimizer = wrap(model, compression)
    with pytest.raises(gc.StateError, match=RANKS_IN_ERROR):  # noqa: PT012
        for step in range(STEPS):
            optimizer.zero_grad()
            (backward_without_loser if step == SKIPPED else backward)(model, step)
            globals()[clip](model)
            optimizer.step()
            assert step <= SKIPPED
    with pytest.raises(gc.StateError, match="had no gradient"):
        optimizer.step()


@on_ranks(3)
def test_changes_on_all_ranks_after_synchronize_and_changes_that_change_nothing_are_fine():
    model = net()
    optimizer = wrap(model, FEEDBACK)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward_without_loser(model, step)
        if step % 2:
            optimizer.synchronize()
            clip_by_hand(model)
        else:
            clip_by_hand(model, most=1e9)
        optimizer.step()
    for _ in range(3):  # a window that is short on all ranks: each clips its own sum
        optimizer.set_backward_passes_per_step(3)
        optimizer.zero_grad()
        backward(model, 0)
        clip_by_hand(model)
        optimizer.step()
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("case", ["two passes", "no_sync", "two optimizers", "finish"])
@on_ranks(3)
def test_windows_and_several_optimizers_do_not_differ_in_silence(case: str):
    model = net()
    layers = [model[0], model[2]] if case == "two optimizers" else [model]
    arguments = {"two passes": {"backward_passes_per_step": 2}, "finish": {"finish": "step"}}.get(case, {})
    optimizers = [wrap(part, **arguments) for part in layers]

    def train() -> None:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            if case == "two passes":
                backward(model, step)
            if case == "no_sync":
                with optimizers[0].no_sync():
                    backward(model, step)
            if case == "two optimizers" and gc.rank() == LOSER:
                model[2](torch.tanh(model[0](data(step))).detach()).square().mean().backward()
            else:
                backward_without_loser(model, step)
            if case == "finish":
                optimizers[0].synchronize()
            for part in layers:
                clip_by_hand(part)
            for optimizer in optimizers:
                optimizer.step()

    if case == "finish":
        train()
        assert_same_on_all_ranks(model.parameters())
    else:
        with pytest.raises(gc.StateError, match=r"after step 1 .*rank 1 had no gradient"):
            train()


@pytest.mark.parametrize("find_unused", [False, True])
@on_ranks(3)
def test_under_ddp_a_loss_that_reaches_no_parameter_only_shifts_a_ranks_data(find_unused: bool):
    """No exchange begins on that rank: the others wait until its next batch has gradients."""
    model = torch.nn.parallel.DistributedDataParallel(net(), find_unused_parameters=find_unused)
    model.register_comm_hook(*gc.ddp_comm_hook(model, small("quantize:bits=4")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS + (gc.rank() == LOSER)):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        (torch.ones((), requires_grad=True) if step == SKIPPED and gc.rank() == LOSER else loss).backward()
        clip_by_hand(model)
        optimizer.step()
    assert_same_on_all_ranks(model.parameters())


@pytest.mark.parametrize("kind", ["SGD", "fused Adam"])
@pytest.mark.parametrize("known", [False, True])
@on_ranks(3)
def test_a_scaler_meets_the_means_on_a_rank_without_gradients_too(kind: str, known: bool):
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plain = {"kind": torch.optim.Adam, "lr": 0.01, "options": {"fused": True}} if kind != "SGD" else {}
    optimizer = wrap(model, "quantize:bits=4", grad_scaler=scaler if known else None, **plain)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))  # a scaler has no scale before it has scaled something
        overflow = math.inf if step == SKIPPED and gc.rank() == 2 else 1.0
        backward_without_loser(model, step, scaler.get_scale() * overflow)
        if step % 2 and kind == "SGD":
            scaler.unscale_(optimizer)
            clip_by_hand(model)
        scaler.step(optimizer)
        scaler.update()
    assert_same_on_all_ranks(model.parameters())
    assert scaler.get_scale() == 2.0**9
    assert optimizer.statistics().steps == STEPS


@pytest.mark.parametrize("steps_by_hand", [False, True])
@on_ranks(3)
def test_ddp_ranks_that_do_not_all_step_raise(steps_by_hand: bool):
    model, optimizer, _ = FRONTENDS["hook"](net(), small("quantize:bits=4"))
    if steps_by_hand:  # no optimizer steps anywhere: nothing is known, and nothing is wrong
        for step in range(STEPS):
            backward(model, step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
        assert_same_on_all_ranks(model.parameters())
        return
    with pytest.raises(gc.StateError, match="rank 1 threw the means away"):  # noqa: PT012
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, step)
            if step != SKIPPED or gc.rank() != LOSER:
                optimizer.step()
