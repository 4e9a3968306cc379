"""Promises about residuals and other state: error feedback, discarded steps, loss scales, checkpoints."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from gradcomp.compress import Identity, Quantize
from gradcomp.core.layers import LayerSpec
from gradcomp.exchange import checkpoint
from gradcomp.exchange.snapshot import restore, snapshot
from gradcomp.testing.cases import CAP, CONV, LARGE, LAYERS, ODD, WORLDS, Row, after_a_step, check, simulated
from gradcomp.testing.simulation import Gradients, Outcome, Simulation, plan_for, same_bytes, true_mean


class Account:
    """The sum of true means minus the sum of applied means, to compare with the ranks' residuals."""

    def __init__(self, ranks: Simulation) -> None:
        self.ranks = ranks
        self.missing = [np.zeros(layer.size) for layer in ranks.layers]
        self.largest = 1e-30

    def step(self, gradients: Gradients, scale: float = 1.0, **options: Any) -> Outcome:
        """Runs a step on gradients without loss scale; ranks get and return them multiplied by ``scale``."""
        scaled = [
            [g if g is None or scale == 1.0 else g * np.float32(scale) for g in rank] for rank in gradients
        ]
        outcome = self.ranks.step(scaled, scale=scale, **options)
        means = outcome.all_means()
        for layer, mean in enumerate(means if all(outcome.committed) else ()):
            true = true_mean(gradients, layer)
            if true is None:
                assert mean is None
                continue
            self.missing[layer] += true - mean.astype(np.float64) / scale
            self.largest = max(self.largest, float(np.abs(true).max(initial=0)))
        return outcome

    def check(self, tolerance: float = 1e-6) -> None:
        """Raises AssertionError unless the difference is what the residuals hold."""
        for layer, missing in enumerate(self.missing):
            owed = self.ranks.owed(layer)
            bound = tolerance * max(self.largest, np.abs(owed).max(initial=0))
            np.testing.assert_allclose(missing, owed, rtol=0, atol=bound, err_msg=LAYERS[layer].name)


@check(lambda row: row.telescopes, world=WORLDS)
def error_feedback_telescopes(row: Row, world: int) -> None:
    """True means minus applied means equal what the residuals hold, after every step."""
    ranks = simulated(row, LAYERS, world, slice_elements=CAP)
    account = Account(ranks)
    for _ in range(4):
        account.step(ranks.gradients())
        account.check()
    assert any(ranks.owed(layer).any() for layer in range(len(LAYERS))) != row.everything


@check(lambda row: row.telescopes and row.steady, seed=(0,))
def error_feedback_telescopes_through_everything_that_moves_state(row: Row, seed: int) -> None:
    """The sums agree through all that moves state.

    That is: re-ordered exchange buckets, absent and cold layers, skipped and discarded steps, changes of level and of
    compressor.
    """
    world, timing = 3, {"seed": seed, "shuffle": True, "delay": 0.2}
    ranks = simulated(row, LAYERS, world, slice_elements=CAP, cold_after_steps=2, **timing)
    account = Account(ranks)
    others = [Quantize(6, 32, rounding="nearest"), Identity(), Quantize(3, 20, feedback=True), row.compressor]
    if row.elsewhere is not None:
        others.insert(0, row.elsewhere)
    plans = iter([plan_for(LAYERS, c, version) for version, c in enumerate(others, 1)])
    for step in range(16):
        absent = [LARGE] if step in (4, 5, 6) else [CONV] if step in (8, 9) else []
        gradients = ranks.gradients(absent)
        if step % 3 == 1:
            gradients[step % world][ODD] = None  # absent on one rank
        if step == 7:
            gradients[1][CONV][5] = np.nan
        if step % 3 == 2 and (plan := next(plans, None)):
            for pipeline in ranks.pipelines:
                pipeline.propose(plan)
        account.step(gradients, commit=step != 11)
        account.check(3e-6)
    assert ranks.pipelines[0].plan.version == len(others)


@check(
    lambda row: row.compressor.traits.keeps_residual and row.steady and not row.waits and not row.everything
)
def a_missing_gradient_still_sends_the_residual(row: Row) -> None:
    """A rank without a gradient sends its residual."""
    layers = [LayerSpec("w", (8, 8))]
    ranks = simulated(row, layers, 2)
    ranks.step()
    assert ranks.pipelines[1].residuals.first.value(0).any()
    first = ranks.pipelines[0].residuals.first
    first.set(0, np.zeros_like(first.value(0)))
    for residuals in (pipeline.residuals for pipeline in ranks.pipelines):
        for number in range(len(residuals.ranges)):
            residuals.second.set(number, np.zeros_like(residuals.second.value(number)))
    mean = ranks.step([[np.zeros(64, np.float32)], [None]]).mean(0)
    assert mean.any()


@check(lambda row: row.steady)
def a_layer_absent_everywhere_is_not_written_and_keeps_its_state(row: Row) -> None:
    """The mean of a layer that no rank has is not written, and none of its state changes."""
    ranks, before = after_a_step(row)
    outcome = ranks.step(ranks.gradients(absent=[LARGE]))
    assert outcome.committed == [True] * 3
    assert [means[LARGE] for means in outcome.means] == [None] * 3
    assert not outcome.result.present[LARGE]
    for (first, second), (first_before, second_before) in zip(ranks.state(), before, strict=True):
        assert first[LARGE] == first_before[LARGE]
        assert {r: v for r, v in second.items() if r.layer == LARGE} == {
            r: v for r, v in second_before.items() if r.layer == LARGE
        }


@check(lambda row: row.steady)
def a_discarded_step_leaves_no_trace_in_the_state(row: Row) -> None:
    """The state after a discarded step is the state before it."""
    ranks, before = after_a_step(row)
    ranks.step(commit=False)
    assert ranks.state() == before


@check(lambda row: row.telescopes, scales=[(1.0, 2.0**16, 2.0**15, 2.0**-3), (1000.0, 500.0, 3.0)])
def residuals_do_not_depend_on_the_loss_scale(row: Row, scales: tuple[float, ...]) -> None:
    """Means have the loss scale; that unscaled sums agree shows that residuals have none."""
    ranks = simulated(row, LAYERS, 3, slice_elements=CAP)
    account = Account(ranks)
    for scale in scales:
        account.step(ranks.gradients(), scale)
        account.check()


@check()
def a_loss_scale_that_is_a_power_of_two_changes_no_bit(row: Row) -> None:
    """Means are the same except for the scale."""
    plain, scaled = (simulated(row, LAYERS, 3, slice_elements=CAP) for _ in range(2))
    for scale in (2.0**16, 2.0**15, 2.0**-3):
        want = plain.step().all_means()
        factor = np.float32(scale)
        got = scaled.step(
            [[g * factor for g in rank] for rank in scaled.gradients()], scale=scale
        ).all_means()
        assert all(same_bytes(a, b * factor) for a, b in zip(got, want, strict=True))


@check()
def a_run_goes_on_from_its_files_bit_for_bit(row: Row) -> None:
    """A run that is saved and resumed equals the uninterrupted one."""
    elsewhere = row.elsewhere
    settings: dict[str, Any] = {"slice_elements": CAP, "cold_after_steps": 2}
    straight = simulated(row, LAYERS, 2, **settings)
    for step in range(4):
        if elsewhere is not None and step == 1:
            for pipeline in straight.pipelines:
                pipeline.propose(plan_for(LAYERS, elsewhere, pipeline.plan.version + 1))
        straight.step(straight.gradients(absent=[LARGE] if step == 2 else []))

    states = [snapshot(pipeline) for pipeline in straight.pipelines]
    resumed = simulated(row, LAYERS, 2, **settings)
    resumed.drawn = straight.drawn
    with TemporaryDirectory() as name:
        directory = Path(name)
        files = tuple(checkpoint.write_rank(directory, state) for state in states)
        manifest = checkpoint.Manifest.from_text(checkpoint.Manifest(states[0].shared, files).to_text())
        for rank, pipeline in enumerate(resumed.pipelines):
            restore(pipeline, checkpoint.read_rank(directory, manifest, rank))
    assert resumed.state() == straight.state()
    for _ in range(3):
        want, got = straight.step().all_means(), resumed.step().all_means()
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
    assert resumed.state() == straight.state()
