"""Residuals in bfloat16: half the memory, and an account that rounding alone disturbs, in no direction."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from configurations import ROWS
from reduce.schemes import REDUCTIONS

from gradcomp import CLTk, Config, Identity, LayerSpec, PowerSGD, Quantize, RandomK, Threshold, TopK
from gradcomp.compress import Policy, as_policy
from gradcomp.core.errors import ConfigError
from gradcomp.core.topology import Topology
from gradcomp.job.residuals import refusal
from gradcomp.kernels.devices import HOST
from gradcomp.pipeline.snapshot import merge, restore, snapshot
from gradcomp.pipeline.widened import Spares
from gradcomp.testing import Row, Simulation, cases, feedback
from gradcomp.testing.cases import CAP, LAYERS, simulated
from gradcomp.testing.simulation import plan_for, same_bytes, true_mean

#: Of a value, at most so much is lost in one rounding: the distance of two neighbours in bfloat16.
SPACING = 2.0**-7
#: Of sums of a few gradients, each below 5.
FLOAT32_ERROR = 2e-5
BFLOAT16 = {"residuals": "bfloat16"}
ONE = [LayerSpec("w", (64, 64))]
NEAREST = Quantize(2, 64, rounding="nearest")


def held(ranks: Simulation, layer: int) -> np.ndarray:
    """Magnitudes of what the ranks hold, as parts of the mean: what roundings took is a part of it."""
    total = np.zeros(ranks.layers[layer].size)
    for pipeline in ranks.pipelines:
        residuals = pipeline.residuals
        first = np.abs(residuals.first.value(layer), dtype=np.float64)
        if first.size:
            total += first / ranks.size
        for row, owned in enumerate(residuals.ranges):
            if owned.layer == layer:
                total[owned.start : owned.end] += np.abs(residuals.second.value(row))
    return total


def deviation(ranks: Simulation, steps: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """By layer, true minus applied means minus what is held; and the sum over steps of what is held."""
    layers = range(len(ranks.layers))
    missing = [np.zeros(ranks.layers[layer].size) for layer in layers]
    magnitudes = [np.zeros_like(each) for each in missing]
    for _ in range(steps):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer in layers:
            missing[layer] += true_mean(gradients, layer) - means[layer].astype(np.float64)
            magnitudes[layer] += held(ranks, layer)
    return [missing[layer] - ranks.owed(layer) for layer in layers], magnitudes


# ------------------------------------------------------------------------------------------------- the account


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "row",
    [row for row in ROWS.values() if row.telescopes and row.steady],
    ids=[name for name, row in ROWS.items() if row.telescopes and row.steady],
)
def test_the_account_is_off_by_roundings_at_most(row: Row, world: int) -> None:
    ranks = simulated(row, LAYERS, world, slice_elements=CAP, reorder=False, **BFLOAT16)
    off, magnitudes = deviation(ranks, 5)
    for layer, spec in enumerate(LAYERS):
        assert (np.abs(off[layer]) <= SPACING * magnitudes[layer] + FLOAT32_ERROR).all(), spec.name


@pytest.mark.parametrize("reduction", [name for name in REDUCTIONS if name != "sra"])
def test_the_account_holds_under_every_reduction(reduction: str) -> None:
    ranks = Simulation(
        LAYERS,
        Quantize(4, 16, rounding="nearest"),
        3,
        reduction=reduction,
        topology=Topology((0, 1, 0)),
        slice_elements=CAP,
        reorder=False,
        **BFLOAT16,
    )
    off, magnitudes = deviation(ranks, 5)
    for layer, spec in enumerate(LAYERS):
        assert (np.abs(off[layer]) <= SPACING * magnitudes[layer] + FLOAT32_ERROR).all(), spec.name


@pytest.mark.parametrize("compressor", [NEAREST, Quantize(5, 64, feedback=True)], ids=["nearest", "drawn"])
def test_roundings_have_no_direction(compressor) -> None:
    ranks = Simulation(ONE, compressor, 2, **BFLOAT16)
    steps = 60
    (off,), (magnitudes,) = deviation(ranks, steps)
    spread = off.std()
    assert abs(off.mean()) <= 5 * spread / np.sqrt(off.size)
    # Each rounding has a standard deviation of half the spacing at most, and no two have draws in common.
    assert 0 < spread <= SPACING / 2 * magnitudes.max() / np.sqrt(steps)


def test_what_is_smaller_than_half_the_spacing_adds_up() -> None:
    """Rounded to nearest, 1 + 2^-10 is 1 for ever."""
    ranks = Simulation(ONE, Threshold(100.0), 2, **BFLOAT16)
    ranks.step([[np.ones(4096, np.float32)]] * 2)
    for _ in range(64):
        ranks.step([[np.full(4096, 2.0**-10, np.float32)]] * 2)
    for pipeline in ranks.pipelines:
        assert pipeline.residuals.first.value(0).mean() == pytest.approx(1 + 64 / 1024, abs=3e-3)


def test_ranks_round_first_residuals_by_draws_of_their_own() -> None:
    ranks = Simulation(ONE, Threshold(100.0), 2, **BFLOAT16)
    ranks.step([[np.full(4096, 1 + 2.0**-9, np.float32)]] * 2)
    first, second = (pipeline.residuals.first.value(0) for pipeline in ranks.pipelines)
    assert not np.array_equal(first, second)


def test_who_owns_what_changes_no_bit_of_the_mean() -> None:
    results = []
    for reduction in ("sra", "parameter_server", "parameter_server:servers=2"):
        ranks = Simulation(ONE, Quantize(3, 64, rounding="nearest"), 3, reduction=reduction, **BFLOAT16)
        results.append([ranks.step().mean(0) for _ in range(4)])
    for other in results[1:]:
        assert all(same_bytes(a, b) for a, b in zip(other, results[0], strict=True))


def test_a_change_of_compression_sends_what_was_left() -> None:
    ranks = Simulation(ONE, TopK(0.1), 2, **BFLOAT16)
    ranks.step()
    owed = ranks.owed(0)
    assert owed.any()
    for pipeline in ranks.pipelines:
        pipeline.set_compression(plan_for(ONE, Identity(), 1), {})
    zeros = [[np.zeros(4096, np.float32)]] * 2
    total = sum(ranks.step(zeros).mean(0).astype(np.float64) for _ in range(3))
    assert not ranks.owed(0).any()
    np.testing.assert_allclose(total, owed, rtol=0, atol=SPACING * np.abs(owed).max())


# --------------------------------------------------------------------------------------------------- the state


@pytest.fixture
def in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every simulation of the compressors' contract keeps its residuals in bfloat16."""

    def simulation(layers, compression, world: int = 2, **options) -> Simulation:
        return Simulation(layers, compression, world, **options, **BFLOAT16)

    monkeypatch.setattr(cases, "Simulation", simulation)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_state_is_kept_and_resumed_bit_for_bit(row: Row) -> None:
    feedback.a_run_goes_on_from_its_files_bit_for_bit(row)
    if row.steady:
        feedback.a_discarded_step_leaves_no_trace_in_the_state(row)
        feedback.a_layer_absent_everywhere_is_not_written_and_keeps_its_state(row)


@pytest.mark.usefixtures("in_bfloat16")
@pytest.mark.parametrize(
    "compressor", [NEAREST, TopK(0.1), PowerSGD(1), RandomK(0.2), CLTk(0.1)], ids=lambda c: c.name
)
def test_loss_scales_and_absent_gradients(compressor) -> None:
    row = Row(compressor)
    feedback.a_loss_scale_that_is_a_power_of_two_changes_no_bit(row)
    feedback.a_missing_gradient_still_sends_the_residual(row)


def test_a_value_that_is_not_finite_poisons_no_residual() -> None:
    ranks = Simulation(ONE, NEAREST, 2, **BFLOAT16)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    gradients[1][0][7] = np.nan
    assert ranks.step(gradients).committed == [False, False]
    assert ranks.state() == before


@pytest.mark.parametrize("compressor", [NEAREST, TopK(0.01), PowerSGD(2)], ids=lambda c: c.name)
def test_residuals_take_half_the_memory(compressor) -> None:
    wide, narrow = (Simulation(ONE, compressor, 2, residuals=kept) for kept in ("float32", "bfloat16"))
    for ranks in (wide, narrow):
        ranks.step()
    for a, b in zip(wide.pipelines, narrow.pipelines, strict=True):
        assert a.residuals.first.nbytes == 8 * 4096
        assert b.residuals.first.nbytes == 4 * 4096
        assert 2 * b.residuals.nbytes == a.residuals.nbytes


@pytest.mark.parametrize(
    ("compressor", "most"),
    [(TopK(0.1), 1), (RandomK(0.1), 1), (NEAREST, 1), (PowerSGD(1), 3)],
    ids=lambda value: getattr(value, "name", value),
)
def test_float32_memory_is_that_of_buckets_that_need_it(compressor, most: float) -> None:
    """Where residuals are final before the first round, one bucket at a time has them in float32."""
    layers = [LayerSpec(f"w{i}", (64, 64)) for i in range(6)]
    ranks = Simulation(layers, compressor, 2, slice_elements=4096, shuffle=True, delay=0.5, **BFLOAT16)
    for _ in range(3):
        ranks.step()
    for pipeline in ranks.pipelines:
        assert len(pipeline.layout.buckets) == 6
        assert pipeline._workplace.spares.elements == most * 4096


def test_one_large_layer_takes_one_large_piece_of_memory() -> None:
    layers = [LayerSpec("large", (128, 64))]
    for i in range(6):
        layers += [LayerSpec(f"w{i}", (64, 64)), LayerSpec(f"b{i}", (64,))]
    ranks = Simulation(layers, PowerSGD(1), 2, slice_elements=512, **BFLOAT16)
    for step in range(6):
        ranks.step()
        for pipeline in ranks.pipelines:
            assert step < 2 or pipeline._workplace.spares.elements <= (2 + 1 + 1) * 4096


def test_spare_memory_is_lent_in_turns_and_grows() -> None:
    spares = Spares()
    for step in range(3):
        spares.begin()
        assert spares.elements == (400 if step == 2 else 0)
        assert [spares.take(size)[0] for size in (100, 200)] == [0, 1]
        spares.give(0)
        assert spares.take(50)[0] == 0
        spares.give(1)
        spares.give(0)
        assert spares.take(300)[0] == 1
        assert spares.elements == 100 + 300
    spares.clear()
    assert spares.elements == 0


# ----------------------------------------------------------------------------------------------- other states


def test_a_float32_state_is_rounded_and_said_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    wide = Simulation(ONE, NEAREST, 2)
    wide.step()
    narrow = Simulation(ONE, NEAREST, 2, **BFLOAT16)
    with caplog.at_level(logging.WARNING, "gradcomp"):
        for a, b in zip(wide.pipelines, narrow.pipelines, strict=True):
            restore(b, snapshot(a))
    assert "residuals is bfloat16, was float32" in caplog.text
    np.testing.assert_allclose(
        narrow.owed(0), wide.owed(0), rtol=0, atol=SPACING * np.abs(wide.owed(0)).max()
    )
    narrow.drawn = wide.drawn
    narrow.step()


def test_a_bfloat16_state_goes_on_exactly_in_float32() -> None:
    narrow = Simulation(ONE, NEAREST, 2, **BFLOAT16)
    narrow.step()
    wide = Simulation(ONE, NEAREST, 2)
    for a, b in zip(narrow.pipelines, wide.pipelines, strict=True):
        restore(b, snapshot(a))
    assert wide.state() == narrow.state()


def test_another_number_of_ranks_takes_the_state_over() -> None:
    old = Simulation(ONE, NEAREST, 3, **BFLOAT16)
    old.step()
    new = Simulation(ONE, NEAREST, 2, **BFLOAT16)
    for rank, pipeline in enumerate(new.pipelines):
        restore(pipeline, merge(map(snapshot, old.pipelines), rank, 2))
    np.testing.assert_allclose(new.owed(0), old.owed(0), rtol=0, atol=SPACING * np.abs(old.owed(0)).max())
    new.step()


def test_second_residuals_that_change_hands_stay_in_the_account() -> None:
    """Rank 0's order of buckets is adopted after the first step."""
    ranks = Simulation(LAYERS, Quantize(3, 16, rounding="nearest"), 3, slice_elements=CAP, **BFLOAT16)
    off, magnitudes = deviation(ranks, 3)
    for layer in range(len(LAYERS)):
        # What moves is rounded once more.
        assert (np.abs(off[layer]) <= 2 * SPACING * magnitudes[layer] + FLOAT32_ERROR).all()


# -------------------------------------------------------------------------------------------------- refusals


class OnGpu:
    """A device, as far as the refusal looks at it."""

    driver = object()


@pytest.mark.parametrize(
    ("policy", "device", "why"),
    [
        ("topk", OnGpu(), "on a GPU"),
        ("ef21[topk]", HOST, "estimates"),
        ("warmup[ef21[topk]]:steps=5", HOST, "estimates"),
        (Policy(TopK(0.1), overrides={"head": "local_clip[ef21[topk]]"}), HOST, "estimates"),
    ],
)
def test_what_does_not_work_is_refused(policy, device, why: str) -> None:
    found = refusal(Config(**BFLOAT16), as_policy(policy), device)
    assert isinstance(found, ConfigError)
    assert why in str(found)
    assert refusal(Config(), as_policy(policy), device) is None


def test_what_keeps_residuals_is_not_refused() -> None:
    for text in ("none", "topk", "quantize:bits=4,rounding=nearest", "signum", "warmup[dgc]:steps=5"):
        assert refusal(Config(**BFLOAT16), as_policy(text)) is None
