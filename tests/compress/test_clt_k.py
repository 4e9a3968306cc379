"""CLT-k: who leads, what the others send, and leaders that lie."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gradcomp import CLTk, LayerSpec, TransportError, WireFormatError
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import payload_of
from gradcomp.testing.simulation import Simulation, true_mean

LAYERS = [LayerSpec("a", (40,)), LayerSpec("empty", (0,)), LayerSpec("b", (4, 5))]
HEADER = ByteHeader.size(len(LAYERS))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_lead_in_turns(world: int):
    ranks = Simulation(LAYERS, CLTk(0.1, feedback=False), world)
    for step in range(2 * world):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for layer, k in ((0, 4), (2, 2)):
            leader = np.abs(gradients[step % world][layer])
            sent = np.sort(np.argsort(-leader, kind="stable")[:k])
            np.testing.assert_array_equal(np.flatnonzero(means[layer]), sent)
            np.testing.assert_allclose(means[layer][sent], true_mean(gradients, layer)[sent], rtol=1e-5)


def test_of_equals_the_first_are_sent():
    ranks = Simulation([LAYERS[0]], CLTk(0.1, feedback=False))
    mean = ranks.step([[np.ones(40, np.float32)], [np.full(40, 3, np.float32)]]).mean(0)
    np.testing.assert_array_equal(mean, [2] * 4 + [0] * 36)


def test_the_leader_selects_with_its_residual():
    ranks = Simulation([LAYERS[2]], CLTk(0.05), 1)
    gradient = np.zeros(20, np.float32)
    gradient[[3, 7]] = 3.0, 2.0
    supports = [np.flatnonzero(ranks.step([[gradient]]).mean(0)).tolist() for _ in range(4)]
    assert supports == [[3], [7], [3], [7]]  # 3 before 2, then 3 before 4, then 6 before 2


def test_only_the_leader_sends_indices():
    ranks = Simulation(LAYERS, CLTk(0.1, indices="raw"), 3, record=True, reorder=False)
    for leader in range(3):
        ranks.step()
        for rank in ranks.ranks:
            (_, broadcast), (_, summed) = rank.transport.sent
            assert len(payload_of(broadcast)) == (4 * 6 if rank.pipeline.transport.rank == leader else 0)
            assert len(summed) == 4 * 6
            rank.transport.sent.clear()


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_seen_whether_its_rank_leads_or_not(rank: int, value: float):
    ranks = Simulation(LAYERS, CLTk(0.1), 3)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    gradients[rank][0][39] = value
    outcome = ranks.step(gradients)
    assert outcome.result.nonfinite.tolist() == [True, False, False]
    assert np.isnan(outcome.mean(0)).all()
    assert np.isfinite(outcome.mean(2)).all()
    assert outcome.committed == [False] * 3
    assert ranks.state() == before


def test_a_model_of_empty_layers_takes_a_step():
    ranks = Simulation([LAYERS[1]], CLTk(0.1), 2)
    assert ranks.step().mean(0).size == 0


# --- leaders that lie ---------------------------------------------------------------------------------------


def attempt(compressor: CLTk, change) -> list[Exception | None]:
    """Rank 0 leads the first step; what rank 1 gets of it is changed."""

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        return change(message) if (source, destination) == (0, 1) and len(message) > HEADER else message

    return Simulation(LAYERS, compressor, 3, tamper=tamper, reorder=False).attempt()


def with_indices(*indices: int):
    def change(message: np.ndarray) -> np.ndarray:
        message[HEADER : HEADER + 4 * len(indices)] = np.array(indices, "<u4").view(np.uint8)
        return message

    return change


# Four indices below 40, then two below 20.
@pytest.mark.parametrize(
    ("indices", "complaint"),
    [
        ((1, 2, 3, 40), "not below"),
        ((1, 2, 3, 2**32 - 1), "not below"),
        ((3, 3), "not ascending"),
        ((4, 3), "not ascending"),
        ((0, 1, 2, 3, 4, 20), "not below"),
    ],
)
def test_impossible_indices_are_an_error_on_who_gets_them(indices, complaint: str):
    errors = attempt(CLTk(0.1, indices="raw"), with_indices(*indices))
    assert isinstance(errors[1], WireFormatError)
    assert complaint in str(errors[1])
    assert "rank 0" in str(errors[1])
    assert isinstance(errors[2], TransportError)


@pytest.mark.parametrize("coding", ["packed", "bitmap"])
def test_set_bits_that_are_too_many_are_an_error(coding: str):
    def change(message: np.ndarray) -> np.ndarray:
        message[HEADER:] = 0xFF
        return message

    errors = attempt(CLTk(0.1, indices=coding), change)
    assert isinstance(errors[1], WireFormatError)


@pytest.mark.parametrize(
    "differences",
    [(1, 2, 1, 1, 1), (1, 2, 1, 1, 1, 1, 1), (0, 2, 1, 1, 1, 1), (1, 20, 1, 1, 1, 1), (1, 2, 1, 1, 1, 38)],
)
def test_deflated_indices_are_checked(differences):
    """The stream replaces the leader's; the size on its way is what it was, so some bytes are behind its end."""
    packed = zlib.compress(np.array(differences, "<u4").tobytes())

    def change(message: np.ndarray) -> np.ndarray:
        room = len(payload_of(message))
        if room > 8:  # the announcement of the size is as long as that
            message[HEADER : HEADER + room] = np.frombuffer(packed.ljust(room, b"\0")[:room], np.uint8)
        return message

    errors = attempt(CLTk(0.1, indices="deflate"), change)
    assert isinstance(errors[1], WireFormatError)
