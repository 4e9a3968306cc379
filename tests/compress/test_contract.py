"""What every compressor promises, for every configuration in ``configurations.ROWS``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from configurations import ROWS, Row
from simulation import Simulation, payload_of, plan_for, same_bytes, true_mean

import gradcomp
from gradcomp import Identity, LayerSpec, Quantize
from gradcomp.compress import at_level, from_string
from gradcomp.compress.messages import Broadcast, Gather, Reduce, Sum
from gradcomp.compress.registry import registered
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.lowrank import BASELINE_RANKS, numpy_multiplies
from gradcomp.kernels.step import StepContext
from gradcomp.pipeline import checkpoint
from gradcomp.pipeline.snapshot import restore, snapshot
from gradcomp.reduce.header import ByteHeader, CountHeader, padded

CAP = 256
LAYERS = [
    LayerSpec("empty.weight", (0,)),
    LayerSpec("one.bias", (1,), kind="bias"),
    LayerSpec("odd.weight", (37,)),
    LayerSpec("conv.weight", (5, 3, 3, 3)),
    LayerSpec("large.weight", (29, 31)),  # beyond the slice cap
]
ODD, CONV, LARGE = 2, 3, 4
WORLDS = (1, 2, 3, 4, 7)

every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
every_world = pytest.mark.parametrize("world", WORLDS)


def rows_where(condition) -> pytest.MarkDecorator:
    chosen = {name: row for name, row in ROWS.items() if condition(row)}
    assert chosen
    return pytest.mark.parametrize("row", chosen.values(), ids=chosen)


steady_rows = rows_where(lambda row: row.steady)
that_telescope = rows_where(lambda row: row.telescopes)


class Account:
    """Sum of true means minus sum of applied means, to compare with what the ranks say they owe."""

    def __init__(self, ranks: Simulation) -> None:
        self.ranks = ranks
        self.missing = [np.zeros(layer.size) for layer in ranks.layers]
        self.largest = 1e-30

    def step(self, gradients, scale: float = 1.0, **options):
        """A step on gradients without loss scale; with it, that is what the ranks get and give."""
        scaled = [
            [g if g is None or scale == 1.0 else g * np.float32(scale) for g in rank] for rank in gradients
        ]
        outcome = self.ranks.step(scaled, scale=scale, **options)
        means = outcome.all_means()
        if all(outcome.committed):
            for layer, mean in enumerate(means):
                true = true_mean(gradients, layer)
                if true is None:
                    assert mean is None
                    continue
                self.missing[layer] += true - mean.astype(np.float64) / scale
                self.largest = max(self.largest, float(np.abs(true).max(initial=0)))
        return outcome

    def check(self, tolerance: float = 1e-6) -> None:
        for layer, missing in enumerate(self.missing):
            owed = self.ranks.owed(layer)
            bound = tolerance * max(self.largest, np.abs(owed).max(initial=0))
            np.testing.assert_allclose(missing, owed, rtol=0, atol=bound, err_msg=LAYERS[layer].name)


# --- forms --------------------------------------------------------------------------------------------------


def test_every_registered_compressor_has_a_row():
    assert {type(row.compressor) for row in ROWS.values()} >= set(registered().values())


@every_row
def test_repr_evaluates_to_the_configuration(row: Row):
    assert eval(repr(row.compressor), vars(gradcomp)) == row.compressor


@every_row
def test_string_form_reads_back(row: Row):
    assert from_string(row.compressor.to_string()) == row.compressor


@every_row
def test_family_and_level_read_back(row: Row):
    assert at_level(row.compressor.family_string(), row.compressor.level) == row.compressor


# --- means --------------------------------------------------------------------------------------------------


@every_world
@every_row
def test_ranks_hold_the_same_bytes(row: Row, world: int):
    ranks = Simulation(LAYERS, row.compressor, world, seed=world, shuffle=True, delay=0.3, slice_elements=CAP)
    for _ in range(3):
        for layer, mean in enumerate(ranks.step().all_means()):
            assert np.isfinite(mean).all(), LAYERS[layer].name


@every_world
@rows_where(lambda row: row.error is not None)
def test_error_is_bounded(row: Row, world: int):
    ranks = Simulation(LAYERS, row.compressor, world, slice_elements=CAP)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients)
    for layer in range(1, len(LAYERS)):
        largest = max(np.abs(g[layer]).max() for g in gradients)
        error = np.abs(outcome.mean(layer) - true_mean(gradients, layer)).max()
        assert error <= row.error * largest, LAYERS[layer].name


@rows_where(lambda row: row.unbiased and not row.compressor.traits.keeps_residual)
def test_mean_of_many_steps_is_the_true_mean(row: Row):
    layers = [LayerSpec("vector", (61,)), LayerSpec("matrix", (8, 12))]
    ranks = Simulation(layers, row.compressor, 2)
    gradients = ranks.gradients()
    steps = [ranks.step(gradients).all_means() for _ in range(200)]
    for layer in range(len(layers)):
        means = np.array([step[layer] for step in steps], dtype=np.float64)
        error = means.mean(axis=0) - true_mean(gradients, layer)
        deviation = means.std(axis=0) / np.sqrt(len(means))
        assert (np.abs(error) <= 5 * deviation + 1e-5).all()
        assert abs(error.mean()) <= 5 * np.sqrt((deviation**2).sum()) / len(error) + 1e-5


@every_row
def test_zeros_give_zeros(row: Row):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP)
    outcome = ranks.step([[np.zeros(layer.size, np.float32) for layer in LAYERS] for _ in range(3)])
    assert all((mean == 0).all() for mean in outcome.all_means())
    assert outcome.committed == [True] * 3


@rows_where(lambda row: row.constants)
@pytest.mark.parametrize("value", [0.75, -3.0, 1e-30])
def test_equal_values_come_back_as_they_were(row: Row, value: float):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP)
    outcome = ranks.step([[np.full(layer.size, value, np.float32) for layer in LAYERS] for _ in range(3)])
    for mean in outcome.all_means():
        np.testing.assert_allclose(mean, value, rtol=max(row.error or 0, 1e-6))


@every_row
def test_the_seed_decides_every_draw(row: Row):
    def run(seed: int) -> bytes:
        config = {"slice_elements": CAP, "config_seed": seed}
        ranks = Simulation(LAYERS, row.compressor, 3, **config)
        return b"".join(mean.tobytes() for _ in range(2) for mean in ranks.step().all_means())

    assert run(7) == run(7)
    assert (run(8) != run(7)) == row.draws


VARIANTS = {
    "sliced, without overlap": {"slice_elements": CAP, "overlap": False},
    "in small slices, at any time": {"slice_elements": 50, "shuffle": True, "delay": 0.5, "seed": 5},
}


@every_row
def test_layout_and_timing_change_no_byte_of_the_mean(row: Row):
    def run(layers, **settings) -> Iterator[dict[str, np.ndarray | None]]:
        ranks = Simulation(layers, row.compressor, 3, reorder=False, **settings)
        drawn = Simulation(LAYERS, row.compressor, 3)
        place = [LAYERS.index(layer) for layer in layers]
        for _ in range(3):
            gradients = [[rank[i] for i in place] for rank in drawn.gradients()]
            means = ranks.step(gradients).all_means()
            yield {layer.name: mean for layer, mean in zip(layers, means, strict=True)}

    plain = list(run(LAYERS, slice_elements=10**6, overlap=False))
    runs = {name: list(run(LAYERS, **settings)) for name, settings in VARIANTS.items()}
    runs["other bucket order"] = list(run(LAYERS[::-1], slice_elements=CAP))
    # NumPy's sums depend on where a matrix lies.
    as_it_was = close if row.products and numpy_multiplies(BASELINE_RANKS + 1) else same_bytes
    for name, means in runs.items():
        for step, (got, want) in enumerate(zip(means, plain, strict=True)):
            for layer in want:
                assert as_it_was(got[layer], want[layer]), f"{name}, step {step}, {layer}"


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return np.allclose(a, b, rtol=1e-3, atol=1e-4)


@every_row
@pytest.mark.parametrize("elements", [50, CAP, 10**6])
def test_cuts_fall_on_quantisation_buckets(row: Row, elements: int):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=elements)
    parts = {layer: [] for layer in range(len(LAYERS))}
    for bucket in ranks.pipelines[0].layout.buckets:
        for group in bucket.groups:
            assert (group.table["start"] % group.table["bucket_size"] == 0).all()
            for layer, segment in zip(group.layers.tolist(), group.table, strict=True):
                parts[layer].append((int(segment["start"]), int(segment["length"])))
    for layer, pieces in parts.items():
        ends = np.cumsum([length for _, length in sorted(pieces)]).tolist()
        assert [start for start, _ in sorted(pieces)] == [0, *ends[:-1]], LAYERS[layer].name
        assert ends[-1] == LAYERS[layer].size


@every_world
@pytest.mark.parametrize("scale", [1.0, 1024.0, 1000.0])
def test_identity_is_the_allreduce_divided_by_n(world: int, scale: float):
    layers = [*LAYERS, LayerSpec("double", (50,), "float64")]
    ranks = Simulation(layers, Identity(), world, slice_elements=CAP)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients, scale=scale)
    for layer in range(len(layers)):
        total = gradients[0][layer].copy()
        for rank in gradients[1:]:
            total += rank[layer]
        assert same_bytes(outcome.mean(layer), total / total.dtype.type(world))


# --- bytes --------------------------------------------------------------------------------------------------


@every_world
@every_row
def test_every_byte_that_is_sent_is_counted(row: Row, world: int):
    ranks = Simulation(LAYERS, row.compressor, world, slice_elements=CAP, reorder=False, record=True)
    ranks.step()
    for rank in ranks.ranks:
        sent = sum(_bytes_to_others(kind, len(data), world) for kind, data in rank.transport.sent)
        assert sent == rank.pipeline.transport.bytes_sent == rank.pipeline.statistics.wire_bytes


def _bytes_to_others(kind: str, nbytes: int, world: int) -> int:
    if kind == "allreduce":
        return 2 * nbytes * (world - 1) // world
    return nbytes * (world - 1) if kind == "allgatherv" else nbytes


@every_world
@rows_where(lambda row: row.sized and row.steady)
def test_bytes_sent_follow_the_formula(row: Row, world: int):
    """Of all ranks together: sums and reductions 2 d (N - 1), what is gathered N d (N - 1), headers included."""
    ranks = Simulation(LAYERS, row.compressor, world, slice_elements=CAP, reorder=False, record=True)
    ranks.step()
    low, slack = 0, 0
    for bucket in ranks.pipelines[0].layout.buckets:
        (group,) = bucket.groups
        payload = int(group.compressor.wire_bytes(group).sum())
        header = ByteHeader.size(len(bucket.layers))
        counts = 4 * CountHeader(len(bucket.layers)).length
        message = next(group.compressor.exchange(group, StepContext(Draw(0, 0, 0), world)))
        if isinstance(message, Sum):
            low += 2 * (world - 1) * (payload + counts)
        elif isinstance(message, Reduce):
            low += 2 * (world - 1) * (payload + world * header)
            slack += 2 * (world - 1) * world * 15  # padding of each chunk
            if (group.table["level"] * group.table["bucket_size"] % 8).any():
                slack += 2 * (world - 1) ** 2  # each cut may fall inside a byte, and then takes one more
        elif isinstance(message, Gather):
            low += world * (world - 1) * (padded(payload) + header)
            if not message.fixed:
                low += world * (world - 1) * (padded(8) + header)  # sizes first
        else:
            assert isinstance(message, Broadcast)
            indices, values = message.max_bytes, payload - message.max_bytes
            low += (world - 1) * (padded(indices) + world * header + 2 * values)
    sums = sum(kind == "allreduce" for rank in ranks.ranks for kind, _ in rank.transport.sent)
    sent = sum(p.transport.bytes_sent for p in ranks.pipelines)
    assert low - sums <= sent <= low + slack  # of a sum each rank's share is rounded down


@rows_where(lambda row: row.sized)
def test_wire_bytes_is_what_travels(row: Row):
    """What a rank puts in, headers aside: its chunks of two rounds, its sums, its part of what is gathered."""
    layers = [LayerSpec("w", (30, 10))]
    ranks = Simulation(layers, row.compressor, 2, record=True, reorder=False)
    for _ in range(4):
        ranks.step()
        payload = sum(
            int(group.compressor.wire_bytes(group).sum())
            for bucket in ranks.pipelines[0].layout.buckets
            for group in bucket.groups
        )
        sent = [dict(enumerate(rank.transport.sent)) for rank in ranks.ranks]
        for rank in ranks.ranks:
            rank.transport.sent.clear()
        if any(p.plan.version for p in ranks.pipelines):
            break  # a schedule has come to what it leads to: the next step is of another kind
        kinds = [kind for kind, _ in sent[0].values()]
        if kinds[0] == "alltoallv":
            assert kinds == ["alltoallv", "allgatherv"]
            travelled = sum(len(payload_of(messages[1][1])) for messages in sent)
            assert 0 <= travelled - payload <= 1  # a cut may fall inside a byte, and then takes one more
        else:
            counts = 4 * CountHeader(1).length  # behind the first sum, where nothing was gathered before
            group = ranks.pipelines[0].layout.buckets[0].groups[0]
            message = next(group.compressor.exchange(group, StepContext(Draw(0, 0, 0), 2)))
            sizes = padded(8) if isinstance(message, Gather) and not message.fixed else 0
            travelled = max(
                sum(
                    len(payload_of(data)) if kind == "allgatherv" else len(data) - (counts if at == 0 else 0)
                    for at, (kind, data) in messages.items()
                )
                for messages in sent
            )
            assert travelled == payload + sizes


# --- error feedback -----------------------------------------------------------------------------------------


@every_world
@that_telescope
def test_error_feedback_telescopes(row: Row, world: int):
    ranks = Simulation(LAYERS, row.compressor, world, slice_elements=CAP)
    account = Account(ranks)
    for _ in range(4):
        account.step(ranks.gradients())
        account.check()
    assert any(ranks.owed(layer).any() for layer in range(len(LAYERS))) != row.everything


@rows_where(lambda row: row.telescopes and row.steady)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
def test_error_feedback_telescopes_through_everything_that_moves_state(row: Row, seed: int):
    """Re-ordered buckets, absent and cold layers, skipped and discarded steps, changes of level and compressor."""
    world = 3
    ranks = Simulation(
        LAYERS,
        row.compressor,
        world,
        seed=seed,
        shuffle=True,
        delay=0.2,
        slice_elements=CAP,
        cold_after_steps=2,
    )
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


@rows_where(
    lambda row: row.compressor.traits.keeps_residual and row.steady and not row.waits and not row.everything
)
def test_a_missing_gradient_still_sends_the_residual(row: Row):
    layers = [LayerSpec("w", (8, 8))]
    ranks = Simulation(layers, row.compressor, 2)
    ranks.step()
    assert ranks.pipelines[1].residuals.first.value(0).any()
    ranks.pipelines[0].residuals.first.set(0, np.full_like(ranks.pipelines[0].residuals.first.value(0), 0))
    for row_number in range(len(ranks.pipelines[0].residuals.ranges)):
        ranks.pipelines[0].residuals.second.set(
            row_number, np.full_like(ranks.pipelines[0].residuals.second.value(row_number), 0)
        )
    for row_number in range(len(ranks.pipelines[1].residuals.ranges)):
        ranks.pipelines[1].residuals.second.set(
            row_number, np.full_like(ranks.pipelines[1].residuals.second.value(row_number), 0)
        )
    mean = ranks.step([[np.zeros(64, np.float32)], [None]]).mean(0)
    assert mean.any()


@steady_rows
def test_a_layer_absent_everywhere_is_not_written_and_keeps_its_state(row: Row):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP, reorder=False)
    ranks.step()
    before = ranks.state()
    outcome = ranks.step(ranks.gradients(absent=[LARGE]))
    assert outcome.committed == [True] * 3
    assert [means[LARGE] for means in outcome.means] == [None] * 3
    assert not outcome.result.present[LARGE]
    for (first, second), (first_before, second_before) in zip(ranks.state(), before, strict=True):
        assert first[LARGE] == first_before[LARGE]
        assert {r: v for r, v in second.items() if r.layer == LARGE} == {
            r: v for r, v in second_before.items() if r.layer == LARGE
        }


@steady_rows
def test_a_discarded_step_leaves_no_trace_in_the_state(row: Row):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP, reorder=False)
    ranks.step()
    before = ranks.state()
    ranks.step(commit=False)
    assert ranks.state() == before


@that_telescope
@pytest.mark.parametrize("scales", [(1.0, 2.0**16, 2.0**15, 2.0**-3), (1000.0, 500.0, 3.0)])
def test_residuals_do_not_depend_on_the_loss_scale(row: Row, scales: tuple[float, ...]):
    """Means come back in scaled units; an exact account in unscaled ones shows that residuals are kept without."""
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP)
    account = Account(ranks)
    for scale in scales:
        account.step(ranks.gradients(), scale)
        account.check()


@every_row
def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit(row: Row):
    plain, scaled = (Simulation(LAYERS, row.compressor, 3, slice_elements=CAP) for _ in range(2))
    for scale in (2.0**16, 2.0**15, 2.0**-3):
        want = plain.step().all_means()
        factor = np.float32(scale)
        got = scaled.step(
            [[g * factor for g in rank] for rank in scaled.gradients()], scale=scale
        ).all_means()
        assert all(same_bytes(a, b * factor) for a, b in zip(got, want, strict=True))


# --- checkpoints --------------------------------------------------------------------------------------------


@every_row
def test_a_run_goes_on_from_its_files_bit_for_bit(row: Row, tmp_path: Path):
    moved = row.elsewhere is not None  # there is another level
    settings = {"slice_elements": CAP, "cold_after_steps": 2}
    straight = Simulation(LAYERS, row.compressor, 2, **settings)
    for step in range(4):
        if moved and step == 1:
            for pipeline in straight.pipelines:
                pipeline.propose(plan_for(LAYERS, row.elsewhere, pipeline.plan.version + 1))
        straight.step(straight.gradients(absent=[LARGE] if step == 2 else []))

    states = [snapshot(pipeline) for pipeline in straight.pipelines]
    files = tuple(checkpoint.write_rank(tmp_path, state) for state in states)
    manifest = checkpoint.Manifest.from_text(checkpoint.Manifest(states[0].shared, files).to_text())
    resumed = Simulation(LAYERS, row.compressor, 2, **settings)
    resumed.drawn = straight.drawn
    for rank, pipeline in enumerate(resumed.pipelines):
        restore(pipeline, checkpoint.read_rank(tmp_path, manifest, rank))
    assert resumed.state() == straight.state()
    for _ in range(3):
        want, got = straight.step().all_means(), resumed.step().all_means()
        assert all(same_bytes(a, b) for a, b in zip(got, want, strict=True))
    assert resumed.state() == straight.state()


# --- values that are not finite -----------------------------------------------------------------------------


@steady_rows
@pytest.mark.parametrize("layer", [ODD, LARGE])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_gradient_is_seen_by_all_and_poisons_nothing(row: Row, layer: int, value: float):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP, reorder=False)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    gradients[1][layer][3] = value
    outcome = ranks.step(gradients)
    assert not outcome.result.finite
    assert outcome.result.nonfinite.tolist() == [i == layer for i in range(len(LAYERS))]
    assert outcome.committed == [False] * 3
    mean = outcome.mean(layer)
    assert np.isnan(mean[3])
    assert layer == LARGE or np.isnan(mean).all()
    assert all(np.isfinite(m).all() for i, m in enumerate(outcome.all_means()) if i != layer)
    assert ranks.state() == before

    outcome = ranks.step()
    assert outcome.committed == [True] * 3
    assert all(np.isfinite(m).all() for m in outcome.all_means())


@rows_where(lambda row: row.overflows and row.steady)
def test_a_sum_that_overflows_is_seen_by_all(row: Row):
    ranks = Simulation(LAYERS, row.compressor, 3, slice_elements=CAP, reorder=False)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    for rank in gradients:
        rank[CONV][::2], rank[CONV][1::2] = 3e38, -3e38  # everywhere: a mean of magnitudes is large, too
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [i == CONV for i in range(len(LAYERS))]
    assert outcome.committed == [False] * 3
    assert not np.isfinite(outcome.mean(CONV)).all()
    assert ranks.state() == before
