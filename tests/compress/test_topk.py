"""TopK: k elements of each layer, or as many as are not zero."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gradcomp import DGC, Cast, Compressor, LayerSpec, RedSync, TopK, TwoLevelSelection, WireFormatError
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, true_mean

SIZES = (4000, 0, 1, 600, 70)
LAYERS = [LayerSpec(f"layer{i}", (n,)) for i, n in enumerate(SIZES)]
STEPS = 4
every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def gradients(step: int, world: int) -> list[list[np.ndarray]]:
    """An embedding's, of which each rank has some rows; nothing; something; few values; what only one rank has."""
    rng = np.random.default_rng(step)

    def of(rank: int) -> list[np.ndarray]:
        embedding = rng.standard_normal((200, 20)) * (rng.random((200, 1)) < 0.04)
        few = np.round(0.5 * rng.standard_normal(600))
        last = rng.standard_normal(70) * (rank == step % world)
        rows = [embedding.reshape(-1), np.zeros(0), np.full(1, float(step % 2)), few, last]
        return [row.astype(np.float32) for row in rows]

    return [of(rank) for rank in range(world)]


def elements(ranks: Simulation) -> list[list[int]]:
    """How many of each layer every rank sent in the last step, as its counts say; rows in the order of layers."""
    (bucket,) = ranks.pipelines[0].layout.buckets
    order = bucket.groups[0].layers
    found = []
    for rank in ranks.ranks:
        counts = payload_of(rank.transport.sent[-1][1])[: 4 * len(LAYERS)].view("<u4")
        found.append([int(counts[np.flatnonzero(order == i)[0]]) for i in range(len(LAYERS))])
    return found


@every_world
@pytest.mark.parametrize(
    ("density", "values"), [(0.1, "float32"), (0.5, "float32"), (1.0, "float32"), (0.1, "bfloat16")]
)
def test_the_mean_and_the_residuals_are_those_with_zeros(world: int, density: float, values: str):
    with_zeros, without = (
        Simulation(LAYERS, TopK(density, values=Cast(values), zeros=zeros), world) for zeros in (True, False)
    )
    for step in range(STEPS):
        given = gradients(step, world)
        means = [ranks.step(given).all_means() for ranks in (with_zeros, without)]
        for expected, mean in zip(*means, strict=True):
            assert expected.tobytes() == mean.tobytes()
        for layer in range(len(LAYERS)):
            assert with_zeros.owed(layer).tobytes() == without.owed(layer).tobytes()


@every_world
@pytest.mark.parametrize(
    "compressor",
    [TopK(0.4), DGC(0.4, momentum_factor=0.0), RedSync(0.4), TwoLevelSelection(TopK(0.6), 0.4)],
    ids=Compressor.to_string,
)
def test_feedback_telescopes_over_layers_of_zeros(compressor: Compressor, world: int):
    ranks = Simulation(LAYERS, compressor, world)
    missing = [np.zeros(n) for n in SIZES]
    for step in range(STEPS):
        given = gradients(step, world)
        for layer, mean in enumerate(ranks.step(given).all_means()):
            missing[layer] += true_mean(given, layer) - mean
            np.testing.assert_allclose(missing[layer], ranks.owed(layer), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "compressor",
    [TopK(0.4, indices="raw"), DGC(0.4, momentum_factor=0.0), TwoLevelSelection(TopK(0.6), 0.4)],
    ids=Compressor.to_string,
)
def test_what_travels_is_k_elements_or_all_that_are_not_zero(compressor: Compressor):
    ranks = Simulation(LAYERS, compressor, 2, record=True, reorder=False)
    given = gradients(1, 2)
    ranks.step(given)
    expected = [
        [min(round(0.4 * len(g)) or len(g), np.count_nonzero(g)) for g in of_rank] for of_rank in given
    ]
    assert elements(ranks) == expected
    assert [row[0] for row in expected] < [0.1 * SIZES[0]] * 2  # what a layer of rows that occur is for


def test_with_zeros_there_is_no_round_of_sizes_and_no_count():
    ranks = Simulation(LAYERS, TopK(0.1, zeros=True, indices="raw"), 2, record=True, reorder=False)
    ranks.step(gradients(0, 2))
    k = 400 + 0 + 1 + 60 + 7
    for rank in ranks.ranks:
        (message,) = [data for _, data in rank.transport.sent]
        assert len(payload_of(message)) == 8 * k


@pytest.mark.parametrize("count", [41, 2**32 - 1, 4000])
def test_a_count_above_k_is_refused(count: int):
    layers = [LayerSpec("w", (400,))]

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == (1, 0) and len(message) > ByteHeader.size(1) + 16:
            struct.pack_into("<I", message, ByteHeader.size(1), count)
        return message

    ranks = Simulation(layers, TopK(0.1), 2, tamper=tamper, reorder=False)
    error = ranks.attempt()[0]
    assert isinstance(error, WireFormatError)
    assert f"{count} elements, at most 40 are possible" in str(error)
