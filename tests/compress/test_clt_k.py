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
def test_a_value_that_is_not_finite_is_seen_whether_its_rank_leads_or_not(rank: int):
    ranks = Simulation(LAYERS, CLTk(0.1), 3)
    ranks.step()
    before = ranks.state()
    gradients = ranks.gradients()
    gradients[rank][0][39] = np.nan
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


def bytes_of(*numbers: int) -> bytes:
    return np.array(numbers, "<u4").tobytes()


# Four indices below 40, then two below 20.
LIES = {
    "above": ("raw", bytes_of(1, 2, 3, 40), "not below"),
    "largest": ("raw", bytes_of(1, 2, 3, 2**32 - 1), "not below"),
    "equal": ("raw", bytes_of(3, 3), "not ascending"),
    "descending": ("raw", bytes_of(4, 3), "not ascending"),
    "above, second layer": ("raw", bytes_of(0, 1, 2, 3, 4, 20), "not below"),
    "packed": ("packed", b"\xff" * 64, ""),
    "bitmap": ("bitmap", b"\xff" * 64, ""),
    **{
        f"deflated {each}": ("deflate", zlib.compress(bytes_of(*each)), "")
        for each in ((1, 2, 1, 1, 1), (1, 2, 1, 1, 1, 1, 1), (0, 2, 1, 1, 1, 1), (1, 20, 1, 1, 1, 1))
    },
}


@pytest.mark.parametrize(("coding", "lie", "complaint"), LIES.values(), ids=LIES)
def test_impossible_indices_are_an_error_on_who_gets_them(coding: str, lie: bytes, complaint: str):
    """The lie replaces the beginning of the leader's indices; their size on the way is what it was."""

    def change(message: np.ndarray) -> np.ndarray:
        end = len(payload_of(message))
        if coding == "deflate" and end <= 8:  # the announcement of the size is as long as that
            return message
        data = lie.ljust(end, b"\0") if coding == "deflate" else lie
        message[HEADER : HEADER + len(data[:end])] = np.frombuffer(data[:end], np.uint8)
        return message

    errors = attempt(CLTk(0.1, indices=coding), change)
    assert isinstance(errors[1], WireFormatError)
    assert complaint in str(errors[1])
    assert "rank 0" in str(errors[1])
    assert isinstance(errors[2], TransportError)
