"""Promises about string forms, means, and values that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gradcomp.compress import at_level, from_string
from gradcomp.core.layers import LayerSpec
from gradcomp.kernels.dispatch import BASELINE_RANKS, numpy_multiplies
from gradcomp.testing.cases import CAP, CONV, LARGE, LAYERS, ODD, WORLDS, Row, after_a_step, check, simulated
from gradcomp.testing.simulation import Mean, same_bytes, true_mean

# --- forms --------------------------------------------------------------------------------------------------


@check()
def string_form_reads_back(row: Row) -> None:
    """Parsing the string form gives an equal compressor."""
    assert from_string(row.compressor.to_string()) == row.compressor


@check()
def family_and_level_read_back(row: Row) -> None:
    """Family and level, which plans hold, give an equal compressor."""
    assert at_level(row.compressor.family_string(), row.compressor.level) == row.compressor


# --- means --------------------------------------------------------------------------------------------------


@check(world=WORLDS)
def ranks_hold_the_same_bytes(row: Row, world: int) -> None:
    """Every rank has the same finite mean, byte for byte, whatever the timing."""
    ranks = simulated(row, LAYERS, world, seed=world, shuffle=True, delay=0.3, slice_elements=CAP)
    for _ in range(3):
        for layer, mean in enumerate(ranks.step().all_means()):
            assert np.isfinite(mean).all(), LAYERS[layer].name


@check(lambda row: row.error is not None, world=WORLDS)
def error_is_bounded(row: Row, world: int) -> None:
    """The mean of a first step is within the row's bound of the true one."""
    ranks = simulated(row, LAYERS, world, slice_elements=CAP)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients)
    for layer in range(1, len(LAYERS)):
        largest = max(np.abs(g[layer]).max() for g in gradients)
        error = np.abs(outcome.mean(layer) - true_mean(gradients, layer)).max()
        assert error <= row.error * largest, LAYERS[layer].name


@check(lambda row: row.unbiased and not row.compressor.traits.keeps_residual)
def mean_of_many_steps_is_the_true_mean(row: Row) -> None:
    """The expected mean is the true one."""
    layers = [LayerSpec("vector", (61,)), LayerSpec("matrix", (8, 12))]
    ranks = simulated(row, layers, 2)
    gradients = ranks.gradients()
    steps = [ranks.step(gradients).all_means() for _ in range(200)]
    for layer in range(len(layers)):
        means = np.array([step[layer] for step in steps], dtype=np.float64)
        error = means.mean(axis=0) - true_mean(gradients, layer)
        deviation = means.std(axis=0) / np.sqrt(len(means))
        assert (np.abs(error) <= 5 * deviation + 1e-5).all()
        assert abs(error.mean()) <= 5 * np.sqrt((deviation**2).sum()) / len(error) + 1e-5


@check()
def zeros_give_zeros(row: Row) -> None:
    """The mean of zeros is zero."""
    ranks = simulated(row, LAYERS, 3, slice_elements=CAP)
    outcome = ranks.step([[np.zeros(layer.size, np.float32) for layer in LAYERS] for _ in range(3)])
    assert all((mean == 0).all() for mean in outcome.all_means())
    assert outcome.committed == [True] * 3


@check(lambda row: row.constants, value=[0.75, -3.0, 1e-30])
def equal_values_come_back_as_they_were(row: Row, value: float) -> None:
    """A layer of equal values is exchanged without loss."""
    ranks = simulated(row, LAYERS, 3, slice_elements=CAP)
    outcome = ranks.step([[np.full(layer.size, value, np.float32) for layer in LAYERS] for _ in range(3)])
    for mean in outcome.all_means():
        np.testing.assert_allclose(mean, value, rtol=max(row.error or 0, 1e-6))


@check()
def the_seed_decides_every_draw(row: Row) -> None:
    """Runs with one seed are equal; runs with two seeds differ if the compressor draws."""

    def run(seed: int) -> bytes:
        ranks = simulated(row, LAYERS, 3, slice_elements=CAP, config_seed=seed)
        return b"".join(mean.tobytes() for _ in range(2) for mean in ranks.step().all_means())

    assert run(7) == run(7)
    assert (run(8) != run(7)) == row.draws


VARIANTS: dict[str, dict[str, Any]] = {
    "sliced, without overlap": {"slice_elements": CAP, "overlap": False},
    "in small slices, at any time": {"slice_elements": 50, "shuffle": True, "delay": 0.5, "seed": 5},
}


@check(lambda row: not row.by_part)
def layout_and_timing_change_no_byte_of_the_mean(row: Row) -> None:
    """Slices, overlap, delays and the order of exchange buckets change no byte of the mean."""

    def run(layers: Sequence[LayerSpec], **settings: Any) -> Iterator[dict[str, Mean]]:
        ranks = simulated(row, layers, 3, reorder=False, **settings)
        drawn = simulated(row, LAYERS, 3)
        place = [LAYERS.index(layer) for layer in layers]
        for _ in range(3):
            gradients = [[rank[i] for i in place] for rank in drawn.gradients()]
            means = ranks.step(gradients).all_means()
            yield {layer.name: mean for layer, mean in zip(layers, means, strict=True)}

    plain = list(run(LAYERS, slice_elements=10**6, overlap=False))
    runs = {name: list(run(LAYERS, **settings)) for name, settings in VARIANTS.items()}
    runs["other bucket order"] = list(run(LAYERS[::-1], slice_elements=CAP))
    # NumPy's sums depend on the alignment of a matrix.
    as_it_was = close if row.products and numpy_multiplies(BASELINE_RANKS + 1) else same_bytes
    for name, means in runs.items():
        for step, (got, want) in enumerate(zip(means, plain, strict=True)):
            for layer in want:
                assert as_it_was(got[layer], want[layer]), f"{name}, step {step}, {layer}"


def close(a: Mean, b: Mean) -> bool:
    """Returns true if values are about equal, for sums in another order."""
    return bool(np.allclose(a, b, rtol=1e-3, atol=1e-4))


@check(elements=[50, CAP, 10**6])
def cuts_fall_on_quantisation_buckets(row: Row, elements: int) -> None:
    """Slices cover each layer once, and begin where a quantisation bucket does."""
    ranks = simulated(row, LAYERS, 3, slice_elements=elements)
    parts: dict[int, list[tuple[int, int]]] = {layer: [] for layer in range(len(LAYERS))}
    for bucket in ranks.pipelines[0].layout.buckets:
        for group in bucket.groups:
            assert (group.table["start"] % group.table["bucket_size"] == 0).all()
            for layer, segment in zip(group.layers.tolist(), group.table, strict=True):
                parts[layer].append((int(segment["start"]), int(segment["length"])))
    for layer, pieces in parts.items():
        ends = np.cumsum([length for _, length in sorted(pieces)]).tolist()
        assert [start for start, _ in sorted(pieces)] == [0, *ends[:-1]], LAYERS[layer].name
        assert ends[-1] == LAYERS[layer].size


# --- values that are not finite -----------------------------------------------------------------------------


@check(lambda row: row.steady and not row.partial, layer=[ODD, LARGE], value=[np.nan, np.inf, -np.inf])
def a_non_finite_gradient_is_seen_by_all_and_poisons_nothing(row: Row, layer: int, value: float) -> None:
    """The mean is not finite on any rank, no state changes, and the next step is sound."""
    ranks, before = after_a_step(row)
    gradients = ranks.gradients()
    gradients[1][layer][3] = value
    outcome = ranks.step(gradients)
    assert not outcome.result.finite
    marked = row.marked(ranks, layer)
    assert outcome.result.nonfinite.tolist() == marked
    assert outcome.committed == [False] * 3
    mean = outcome.mean(layer)
    assert np.isnan(mean[3])
    assert layer == LARGE or np.isnan(mean).all()
    assert all(
        np.isfinite(m).all()
        for m, is_marked in zip(outcome.all_means(), marked, strict=True)
        if not is_marked
    )
    assert ranks.state() == before

    outcome = ranks.step()
    assert outcome.committed == [True] * 3
    assert all(np.isfinite(m).all() for m in outcome.all_means())


@check(lambda row: row.overflows and row.steady)
def a_sum_that_overflows_is_seen_by_all(row: Row) -> None:
    """The same holds if the sum of finite gradients is not finite."""
    ranks, before = after_a_step(row)
    gradients = ranks.gradients()
    for rank in gradients:
        # In all elements, so that a mean of magnitudes overflows too.
        rank[CONV][::2], rank[CONV][1::2] = (3e38, -3e38)
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == row.marked(ranks, CONV)
    assert outcome.committed == [False] * 3
    assert not np.isfinite(outcome.mean(CONV)).all()
    assert ranks.state() == before
