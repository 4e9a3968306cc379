"""What-if runs of whole programs: wrapped optimizers, hooks and sharded models, with real ranks."""

from __future__ import annotations

import tempfile

import pytest
import torch
from batch import on_ranks
from logs import logged
from sharded_models import CASES, EXACT, decoded, go_on, same_everywhere, shards
from sharded_models import train as train_sharded
from small_torch import (
    FRONTENDS,
    assert_same_on_all_ranks,
    bits_of,
    data,
    exchanger_of,
    net,
    optimized,
    shared_folder,
)
from torch.distributed.tensor import DTensor

import gradcomp.torch as gc
from gradcomp.control.what_if import FIRST_STEPS
from gradcomp.core.what_if import NOTHING
from gradcomp.torch.sharded.what_if import BLOCK_STEPS

WHAT_IF = {"batch": "what-if", "what_if": "1,4x1,2", "fingerprint_steps": 1}
#: As a program may have it: with a residual, momentum of its own, layers that stay exact, and a controller.
PROGRAM = {"compression": gc.MomentumCorrection(gc.TopK(0.1)), "controller": gc.Schedule({0: 0.2})}


def train(model, optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(data(step)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", FRONTENDS)
@on_ranks(2, **WHAT_IF)
def test_every_wrapper_runs_the_ratios_and_saves_nothing(name):
    with logged() as lines:
        model, optimizer, state = FRONTENDS[name](net(), **PROGRAM)
        pipeline = exchanger_of(state).pipeline
        seen: list[float | None] = []
        for step in range(FIRST_STEPS + 3 * BLOCK_STEPS + 1):
            train(model, optimizer, range(step, step + 1))
            seen += {assignment.level for assignment in pipeline.laid_out_plan.assignments}
            if step == 20:
                state.set_compression("none")
    assert seen[FIRST_STEPS:] == [1] * BLOCK_STEPS + [2] * BLOCK_STEPS + [NOTHING] * BLOCK_STEPS + [1]
    assert_same_on_all_ranks(model.parameters())
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    told = "\n".join(lines)
    assert ("training is worthless" in told) == ("knee: ratio" in told) == (gc.rank() == 0)
    with tempfile.TemporaryDirectory() as directory:
        for save in (lambda: gc.save(directory, state), state.compression_state):
            with pytest.raises(gc.StateError, match="GRADCOMP_WHAT_IF_SAVE"):
                save()


@on_ranks(2, **WHAT_IF)
def test_a_step_of_local_steps_is_a_round():
    with logged() as lines:
        model = net()
        optimizer = gc.SparseLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
        train(model, optimizer, range(2 * (FIRST_STEPS + 3 * BLOCK_STEPS + 1)))
    assert optimizer.statistics().steps == FIRST_STEPS + 3 * BLOCK_STEPS + 1
    assert_same_on_all_ranks(model.parameters())
    assert ("knee: ratio" in "\n".join(lines)) == (gc.rank() == 0)
    with pytest.raises(gc.StateError, match="GRADCOMP_WHAT_IF_SAVE"):
        optimizer.state_dict()


@on_ranks(2, **WHAT_IF)
def test_arguments_are_checked_as_ever():
    with pytest.raises(gc.ConfigError, match="unknown compression"):
        optimized(net(), "quantiles:bits=4")
    with pytest.raises(gc.ConfigError, match="Adasum"):
        optimized(net(), op=gc.Adasum)


@on_ranks(2, batch="plain")
def test_a_program_may_name_fake_compression_itself_beside_layers_that_stay_exact():
    policy = gc.Policy(gc.Fake(4), filter=gc.Filter(min_elements=20))
    (model, optimizer, _), (plain, exact, _) = optimized(net(), policy), optimized(net(), "none")
    for one, wrapped in ((model, optimizer), (plain, exact)):
        train(one, wrapped, range(1))
    assert torch.equal(model[0].bias.grad, plain[0].bias.grad)  # the policy excludes it
    weights = torch.cat(
        [model[i].weight.grad.reshape(-1) for i in (2, 0)]
    )  # in the order of arrival, or the other one
    assert 0 < weights.count_nonzero() <= -(-weights.numel() // 4)
    with tempfile.TemporaryDirectory() as directory, pytest.raises(gc.StateError, match="worthless"):
        gc.save(directory, optimizer)


@on_ranks(2, batch="may save", what_if="2", what_if_save=True)
def test_a_run_that_may_save_does_and_another_loads_nothing_of_its_compression():
    model, optimizer, _ = optimized(net(), **PROGRAM)
    train(model, optimizer, range(8))
    with shared_folder() as directory, logged() as lines:
        gc.save(directory, optimizer)
        gc.load(directory, optimizer)
    assert "takes no compression state over" in "\n".join(lines)
    train(model, optimizer, range(8, 10))
    assert optimizer.plan().assignments[0].compressor.startswith("fake")


# --- sharded models -------------------------------------------------------------------------------------------


SHARDED = ("by blocks", "micro-batches", "not resharded", "columns", "bfloat16")
BRIEFLY = {"micro-batches", "bfloat16"}


def check_a_ratio_of_1(name: str) -> None:
    """It is the uncompressed exchange, bit for bit."""
    exactly = train_sharded(CASES[name], compress=EXACT)
    faked = train_sharded(CASES[name], compress=(gc.Fake(1), gc.Fake(1)))
    assert bits_of(shards(faked.model)) == bits_of(shards(exactly.model))
    assert faked.losses == exactly.losses
    assert faked.state.statistics().weight_bytes == pytest.approx(
        exactly.state.statistics().weight_bytes, rel=0.2
    )


def check_parts(name: str, reuse: str | None) -> None:
    """The first values of every shard travel; all ranks compute with the same weights, of which the rest are 0."""
    exactly = train_sharded(CASES[name], compress=EXACT)
    faked = train_sharded(CASES[name], 0, (gc.Fake(8), gc.Fake(3)), reuse=reuse)
    for step in range(3):
        go_on(faked, CASES[name], range(step, step + 1))
        assert same_everywhere(decoded(faked.model))
    assert all(shard.isfinite().all() for shard in shards(faked.model))
    faked.model.unshard()
    weights = [one.detach().reshape(-1) for one in faked.model.parameters() if not isinstance(one, DTensor)]
    unit = torch.cat(weights)  # the root's, in which the embedding is first
    assert weights[0].count_nonzero() > 0
    assert unit.count_nonzero() < unit.numel() / 7  # blocks are padded to equal sizes
    faked.model.reshard()
    counts = exactly.state.statistics(), faked.state.statistics()
    assert counts[1].gradient_bytes < counts[0].gradient_bytes
    with pytest.raises(gc.StateError, match="worthless"):
        faked.state.state_dict()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in BRIEFLY else pytest.mark.full) for name in SHARDED]
)
@on_ranks(2, batch="plain")
def test_sharded_on_two_ranks(name: str):
    check_a_ratio_of_1(name)
    check_parts(name, None)


@on_ranks(3, batch="plain")
def test_sharded_on_three_ranks():
    check_a_ratio_of_1("by blocks")
    check_parts("by blocks", "codes")


@on_ranks(2, batch="plain")
def test_sharded_models_fake_whole_units_only():
    policy = gc.Policy(gc.Fake(2), overrides={"head.*": "none"})
    with pytest.raises(gc.ConfigError, match="overrides"):
        train_sharded(CASES["by blocks"], 0, (policy, "none"))


@on_ranks(2, **WHAT_IF)
def test_a_sharded_model_runs_the_grid_and_logs_it():
    trained = train_sharded(CASES["by blocks"], 0, ("quantize:bits=4", "none"))
    grid = trained.state._settings.grid
    assert grid.pairs == [(1, 1), (1, 2), (4, 1), (4, 2), (NOTHING, NOTHING)]
    seen = []
    with logged() as lines:
        for step in range(grid.steps):
            go_on(trained, CASES["by blocks"], range(step, step + 1))
            weights, gradients = grid.fakes
            seen.append((weights.ratio, gradients.ratio))
    blocks = [pair for pair in grid.pairs for _ in range(BLOCK_STEPS)]
    assert seen[FIRST_STEPS:] == [*blocks, grid.pairs[0]]
    assert all(len(point.seconds) == grid.rounds.counted for point in grid.points)
    sent = [point.sent_bytes for point in grid.points]
    assert sent == sorted(sent, reverse=True)
    table = [line for line in lines if "ratio of gradients" in line]
    assert len(table) == (gc.rank() == 0)
    if table:
        rows = [line.split() for line in table[0].splitlines()]
        assert rows[2] == ["1", "2"]
        assert [row[0] for row in rows[3:5]] == ["1", "4"]
        assert rows[3][1:] == [f"{1e3 * point.median:.1f}" for point in grid.points[:2]]
    assert all(shard.isfinite().all() for shard in shards(trained.model))
