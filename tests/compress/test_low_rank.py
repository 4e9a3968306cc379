"""PowerSGD (Vogels et al. 2019), and what the paper compares it with: UnbiasedRank, BestRank and SpectralAtomo."""

from __future__ import annotations

import numpy as np
import pytest

import gradcomp as gc
from gradcomp.compress.lowrank.base import clamped_rank, matrix_shape
from gradcomp.compress.lowrank.spectral import SpectralFormat, draws, probabilities
from gradcomp.kernels.codec import Draw
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import announced_payload, payload_of
from gradcomp.testing.simulation import DTYPES, Simulation, plan_for, same_bytes, true_mean

SHAPE = (12, 20)
MATRIX = gc.LayerSpec("matrix", SHAPE)
CONV = gc.LayerSpec("conv", (8, 4, 3, 3))
VECTOR = gc.LayerSpec("vector", (9,), kind="bias")
BASELINES = [gc.UnbiasedRank(2), gc.BestRank(2), gc.SpectralAtomo(2)]
SPECTRAL = BASELINES[1:]
WORLDS = [1, 2, 3, 4]
either_way = pytest.mark.parametrize("alternate", [False, True])


def of_rank(rank: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    product = generator.standard_normal((12, rank)) @ generator.standard_normal((rank, 20))
    return product.astype(np.float32).reshape(-1)


def truncated(gradient: np.ndarray, shape: tuple[int, int], rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(gradient.astype(np.float64).reshape(shape), full_matrices=False)
    return ((u[:, :rank] * s[:rank]) @ vt[:rank]).reshape(-1)


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-6) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(
    ("compressor", "steps", "tolerance", "size"),
    [
        *((c, 1, 1e-5, size) for c in SPECTRAL for size in (1e-44, 1e-38, 1e-30, 1e15, 1e37)),
        *((gc.PowerSGD(2), 4, 1e-4, size) for size in (1e-30, 1e-12, 1e15)),
    ],
)
def test_tiny_and_huge_gradients(compressor, steps: int, tolerance: float, size: float):
    ranks = Simulation([MATRIX], compressor, 2)
    gradient = (of_rank(2).astype(np.float64) * size).astype(np.float32)
    for _ in range(steps):
        mean = ranks.step([[gradient]] * 2).mean(0)
    # What is left of a subnormal number may be of any rank.
    if size > 1e-40:
        close(mean, gradient, tolerance)
    assert np.isfinite(mean).all()


# --- PowerSGD ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "matrix", "rank"),
    [((24, 40), (24, 40), 4), ((16, 3, 3, 3), (16, 27), 4), ((50,), (50, 1), 0), ((3, 100), (3, 100), 0),
     ((2, 2), (2, 2), 0), ((), (1, 1), 0), ((0, 5), (0, 5), 0)],
)  # fmt: skip
def test_how_a_layer_is_seen(shape, matrix, rank):
    assert matrix_shape(shape) == matrix
    assert clamped_rank(shape, 4) == rank


def test_a_mean_of_that_rank_comes_back_whole():
    ranks = Simulation([MATRIX, VECTOR], gc.PowerSGD(3), 3)
    one = of_rank(3)
    gradients = [[one * (r + 1), np.full(9, r, np.float32)] for r in range(3)]
    outcome = ranks.step(gradients)
    close(outcome.mean(0), 2 * one, 1e-5)
    np.testing.assert_array_equal(outcome.mean(1), np.ones(9))


@pytest.mark.parametrize("compressor", [gc.PowerSGD(2), gc.UnbiasedRank(2)])
def test_many_ranks_are_one_rank_with_the_mean(compressor):
    """Vogels et al. 2019, appendix A.3: linearity, since all ranks have the same factors."""
    many, one = (Simulation([MATRIX, CONV, VECTOR], compressor, world) for world in (4, 1))
    for _ in range(4):
        gradients = many.gradients()
        mean = [[true_mean(gradients, layer).astype(np.float32) for layer in range(3)]]
        for got, want in zip(many.step(gradients).all_means(), one.step(mean).all_means(), strict=True):
            close(got, want, 1e-5)


@either_way
def test_a_warm_start_finds_the_best_approximation(alternate: bool):
    """Vogels et al. 2019, section 4.2. Without feedback every step compresses the same matrix."""
    gradient = np.random.default_rng(3).standard_normal(240).astype(np.float32)
    gradient += 2 * of_rank(2)
    norm = np.linalg.norm(gradient)
    best = np.linalg.norm(gradient - truncated(gradient, SHAPE, 2)) / norm

    def errors(compressor: gc.PowerSGD) -> list[float]:
        ranks = Simulation([MATRIX], compressor, 2)
        means = [ranks.step([[gradient]] * 2).mean(0) for _ in range(12)]
        return [float(np.linalg.norm(mean - gradient) / norm) for mean in means]

    warm = errors(gc.PowerSGD(2, feedback=False, alternate=alternate))
    assert warm[-1] < 1.01 * best
    assert warm[0] > warm[-1]
    cold = errors(gc.PowerSGD(2, feedback=False, warm_start=False))
    assert np.mean(cold) > 1.02 * best


def test_the_residual_is_that_of_the_local_projection():
    """Vogels et al. 2019, Algorithm 2, line 8: it lies outside of the basis that all ranks share."""
    ranks = Simulation([MATRIX], gc.PowerSGD(2), 3)
    gradients = ranks.gradients()
    mean = ranks.step(gradients).mean(0).reshape(SHAPE)
    basis = np.linalg.svd(mean, full_matrices=False)[0][:, :2]
    for rank, pipeline in enumerate(ranks.pipelines):
        gradient = gradients[rank][0].reshape(SHAPE)
        residual = pipeline.residuals.first.value(0).reshape(SHAPE)
        np.testing.assert_allclose(residual, gradient - basis @ (basis.T @ gradient), atol=2e-5)


def test_residuals_stay_bounded():
    """Residuals of the averaged form would grow without end."""
    ranks = Simulation([MATRIX], gc.PowerSGD(4), 4)
    norms = []
    for _ in range(200):
        ranks.step()
        norms.append(np.linalg.norm(ranks.pipelines[0].residuals.first.value(0)))
    assert np.mean(norms[150:]) < 1.2 * np.mean(norms[50:100])


@either_way
def test_columns_are_kept_at_a_new_rank(alternate: bool):
    ranks = Simulation([MATRIX], gc.PowerSGD(3, alternate=alternate), 2)
    for _ in range(2):
        ranks.step()
    before = ranks.pipelines[0].fields["powersgd_q"].value(0).reshape(3, 20).copy()
    for version, rank in ((1, 5), (2, 2)):
        for pipeline in ranks.pipelines:
            pipeline.propose(plan_for([MATRIX], gc.PowerSGD(rank, alternate=alternate), version))
            pipeline.fields["powersgd_q"].set(0, before.reshape(-1))
        ranks.step(commit=False)
        ranks.pipelines[0].lay_out()
        after = ranks.pipelines[0].fields["powersgd_q"].value(0).reshape(-1, 20)
        assert len(after) == rank
        kept = min(rank, 3)
        np.testing.assert_array_equal(after[:kept], before[:kept])
        assert after[kept:].any(axis=1).all()


@either_way
def test_a_layer_of_zeros_does_not_stop_it_for_ever(alternate: bool):
    ranks = Simulation([MATRIX], gc.PowerSGD(2, alternate=alternate), 2)
    for _ in range(3):
        assert not ranks.step([[np.zeros(240, np.float32)]] * 2).mean(0).any()
    gradient = of_rank(1)
    total = sum(ranks.step([[gradient]] * 2).mean(0) for _ in range(4)) / 4
    close(total, gradient, 1e-4)
    # Of rank one now, and of full rank later: the second column must still be alive.
    wide = of_rank(2, 9)
    means = sum(ranks.step([[wide]] * 2).mean(0) for _ in range(12)) / 12
    assert np.linalg.norm(means - wide) < 0.1 * np.linalg.norm(wide)


def test_a_rank_above_the_smaller_side_is_clamped_and_said():
    tall = gc.LayerSpec("tall", (100, 4))
    assert gc.PowerSGD(3).remark(tall) is None
    assert "100 x 4" in gc.PowerSGD(8).remark(tall)
    ranks = Simulation([tall], gc.PowerSGD(8), 2)
    gradients = ranks.gradients()
    np.testing.assert_allclose(ranks.step(gradients).mean(0), true_mean(gradients, 0), atol=1e-6)


# --- truncation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("rank", [1, 3])
def test_best_rank_is_the_mean_of_the_truncated_decompositions(world: int, rank: int):
    ranks = Simulation([MATRIX, CONV], gc.BestRank(rank), world)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients)
    for layer, shape in enumerate([SHAPE, (8, 36)]):
        want = [truncated(g[layer], shape, rank) for g in gradients]
        close(outcome.mean(layer), np.mean(want, axis=0))
        for pipeline, gradient, sent in zip(ranks.pipelines, gradients, want, strict=True):
            close(pipeline.residuals.first.value(layer), gradient[layer] - sent, 2e-6)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compressor", [gc.BestRank(3), gc.SpectralAtomo(3)])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_matrices_of_that_rank_come_back_whole(compressor, rank: int, world: int):
    ranks = Simulation([MATRIX, VECTOR], compressor, world)
    gradients = [[of_rank(rank, seed), np.full(9, seed, np.float32)] for seed in range(world)]
    outcome = ranks.step(gradients)
    close(outcome.mean(0), true_mean(gradients, 0), 2e-6)
    np.testing.assert_array_equal(outcome.mean(1), np.full(9, (world - 1) / 2, np.float32))


@pytest.mark.parametrize("compressor", SPECTRAL)
def test_layers_of_one_shape_may_have_ranks_of_their_own(compressor):
    layers = [gc.LayerSpec(f"w{i}", SHAPE) for i in range(3)]
    family = compressor.family_string()
    plan = gc.Plan(
        0, tuple(gc.Assignment(layer.name, family, r) for layer, r in zip(layers, (1, 3, 1), strict=True))
    )
    ranks = Simulation(layers, plan, 2)
    assert [len(bucket.groups) for bucket in ranks.pipelines[0].layout.buckets] == [1]
    gradients = [[of_rank(r, seed) for r in (1, 3, 1)] for seed in range(2)]
    outcome = ranks.step(gradients)
    for layer in range(3):
        close(outcome.mean(layer), true_mean(gradients, layer), 2e-6)


# --- sampling -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sigma", "rank", "want"),
    [
        ([4, 3, 2, 1], 1, [0.4, 0.3, 0.2, 0.1]),
        ([5, 1, 1, 1], 2, [1, 1 / 3, 1 / 3, 1 / 3]),
        ([100, 9, 1, 0], 2, [1, 0.9, 0.1, 0]),
        ([100, 50, 3, 1], 3, [1, 1, 0.75, 0.25]),
        ([1, 1, 1, 1], 3, [0.75] * 4),
        ([2, 1, 1], 3, [1, 1, 1]),
        ([7, 2, 0, 0], 3, [1, 1, 0, 0]),
        ([3, 0, 0], 1, [1, 0, 0]),
        ([0, 0], 2, [0, 0]),
        ([1e-40, 1e-40], 1, [0.5, 0.5]),
    ],
)
def test_probabilities_are_proportional_and_at_most_one(sigma, rank: int, want):
    np.testing.assert_allclose(probabilities(np.array([sigma], float), rank), [want], rtol=1e-14)


def test_probabilities_sum_up_to_the_rank_whatever_the_values():
    generator = np.random.default_rng(0)
    sigma = -np.sort(-np.exp(4 * generator.standard_normal((200, 15))), axis=1)
    for rank in range(1, 16):
        found = probabilities(sigma, rank)
        np.testing.assert_allclose(found.sum(axis=1), rank, rtol=1e-12)
        assert found.max() <= 1 + 1e-12
        for p, s in zip(found, sigma, strict=True):
            uncertain = p < 1 - 1e-12
            ratios = p[uncertain] / s[uncertain]
            np.testing.assert_allclose(ratios, ratios[:1].repeat(len(ratios)), rtol=1e-12)
            if uncertain.any():  # a certain one is so because its fair share is more
                assert (s[~uncertain] * ratios[0] >= 1 - 1e-9).all()


def test_draws_are_uniform_and_differ_by_layer_step_and_rank():
    hashes = np.array([1, 2], dtype=np.uint32)
    found = [draws(hashes, 1001, Draw(9, step, rank)) for step, rank in ((0, 0), (1, 0), (0, 1))]
    numbers = np.concatenate(found)
    assert len(np.unique(numbers[:, :8])) == 6 * 8
    assert 0 < numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=5 / np.sqrt(12 * numbers.size))
    np.testing.assert_array_equal(found[0][1:, :7], draws(hashes[1:], 7, Draw(9, 0, 0)))


def test_ranks_draw_atoms_of_their_own_and_as_many_as_asked_for():
    ranks = Simulation([MATRIX], gc.SpectralAtomo(3), 2, record=True, reorder=False)
    gradient = ranks.gradients()[0][0]
    counts = []
    for _ in range(200):
        ranks.step([[gradient]] * 2)
        payloads = [announced_payload(rank.transport.sent) for rank in ranks.ranks]
        counts.append([int(payload[:4].view("<u4")[0]) for payload in payloads])
        assert [len(payload) for payload in payloads] == [4 + 4 * 32 * k for k in counts[-1]]
        for rank in ranks.ranks:
            rank.transport.sent.clear()
    assert np.mean(counts) == pytest.approx(3, abs=0.3)
    assert np.corrcoef(np.transpose(counts))[0, 1] < 0.3


# --- degenerate gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compressor", SPECTRAL)
def test_zeros_among_others_give_zero_bytes_and_zeros(compressor, world: int):
    ranks = Simulation([MATRIX, VECTOR], compressor, world, record=True, reorder=False)
    gradients = ranks.gradients()
    for rank in gradients:
        rank[0][:] = -0.0
        rank[1][:] = 0
    outcome = ranks.step(gradients)
    assert all(same_bytes(mean, np.zeros_like(mean)) for mean in outcome.all_means())
    size = 4 * (9 + 2 * 32) if compressor.fixed else 4 * (1 + 9)
    for rank in ranks.ranks:
        assert payload_of(rank.transport.sent[-1][1]).tobytes() == bytes(size)


def test_columns_that_a_matrix_does_not_have_are_zero_bytes():
    ranks = Simulation([MATRIX], gc.BestRank(4), 2, record=True, reorder=False)
    gradient = np.outer(np.arange(12) - 5, np.arange(20) % 7 - 3).astype(np.float32).reshape(-1)
    ranks.step([[gradient]] * 2)
    columns = payload_of(ranks.ranks[0].transport.sent[-1][1]).view("<u4")
    left, right = columns[:48].reshape(4, 12), columns[48:].reshape(4, 20)
    assert left[0].any()
    assert right[0].any()
    assert not left[1:].any()
    assert not right[1:].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("compressor", SPECTRAL)
def test_a_layer_that_is_not_finite_travels_as_zeros_and_is_nan_everywhere(compressor, value: float):
    ranks = Simulation([MATRIX, VECTOR], compressor, 3, record=True, reorder=False)
    gradients = ranks.gradients()
    gradients[1][0][17] = gradients[1][1][3] = value
    outcome = ranks.step(gradients)
    assert all(np.isnan(mean).all() for mean in outcome.all_means())
    assert not payload_of(ranks.ranks[1].transport.sent[-1][1]).any()
    assert payload_of(ranks.ranks[0].transport.sent[-1][1]).any()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("compressor", BASELINES)
def test_layers_that_all_travel_exactly(compressor, world: int):
    layers = [VECTOR, gc.LayerSpec("narrow", (2, 30)), gc.LayerSpec("empty", (0, 4))]
    ranks = Simulation(layers, compressor, world)
    gradients = ranks.gradients()
    outcome = ranks.step(gradients)
    for layer in range(2):
        close(outcome.mean(layer), true_mean(gradients, layer))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("compressor", SPECTRAL)
def test_gradients_of_half_precision(compressor, dtype: str):
    ranks = Simulation([gc.LayerSpec("w", SHAPE, dtype)], compressor, 2)
    gradient = np.outer(np.arange(12) - 5, np.arange(20) % 7).astype(DTYPES[dtype]).reshape(-1)
    mean = ranks.step([[gradient]] * 2).mean(0)
    np.testing.assert_array_equal(mean.astype(np.float32), gradient.astype(np.float32))


# --- hostile payloads and configurations --------------------------------------------------------------------


def format_and_payload(compressor) -> tuple[SpectralFormat, np.ndarray]:
    ranks = Simulation([MATRIX, VECTOR, CONV], compressor, 2, record=True, reorder=False)
    ranks.step()
    (group,) = ranks.pipelines[0].layout.buckets[0].groups
    sent = ranks.ranks[1].transport.sent[-1][1]
    return SpectralFormat(compressor, group), payload_of(sent).copy()


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("by", [1, -1, 40, 2**31])
def test_a_count_that_is_wrong_is_refused(row: int, by: int):
    form, payload = format_and_payload(gc.SpectralAtomo(2))
    form.read(payload, 1)
    counts = payload[:8].view("<u4")
    counts[row] = (int(counts[row]) + by) % 2**32
    with pytest.raises(gc.WireFormatError, match="rank 1 sent an impossible low-rank payload"):
        form.read(payload, 1)


def test_more_atoms_than_a_matrix_has_are_refused_whatever_the_length():
    form, _ = format_and_payload(gc.SpectralAtomo(2))
    for count, allowed in ((12, True), (13, False)):
        payload = np.zeros(8 + 4 * (count * 32 + 9), np.uint8)
        payload[:4] = np.array([count], "<u4").view(np.uint8)
        if allowed:
            assert form.read(payload, 1)[0].counts.tolist() == [count, 0]
            continue
        with pytest.raises(gc.WireFormatError, match="13 atoms, at most 12"):
            form.read(payload, 1)


@pytest.mark.parametrize("compressor", SPECTRAL)
def test_every_other_length_is_refused(compressor):
    form, payload = format_and_payload(compressor)
    longer = np.concatenate([payload, np.zeros(4, np.uint8)])
    for wrong in (longer, *(payload[:n] for n in range(len(payload)))):
        with pytest.raises(gc.WireFormatError, match="rank 0 "):
            form.read(wrong, 0)


@pytest.mark.parametrize("compressor", SPECTRAL)
def test_any_numbers_are_decoded(compressor):
    form, payload = format_and_payload(compressor)
    atoms, exact = form.read(payload, 0)
    start = len(payload) - 4 * (len(atoms.p) + len(atoms.q) + len(exact))
    payload[start:] = 0xFF
    atoms, exact = form.read(payload, 0)
    assert np.isnan(np.concatenate([atoms.p, atoms.q, exact])).all()


def test_a_refused_payload_names_its_sender():
    header = ByteHeader.size(1)

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if source == 1 and len(message) > header + 16:
            message[header : header + 4] = 0xFF
        return message

    error = Simulation([MATRIX], gc.SpectralAtomo(3), 2, tamper=tamper, reorder=False).attempt()[0]
    assert isinstance(error, gc.WireFormatError)
    assert "rank 1 sent an impossible low-rank payload" in str(error)
