"""Threshold: what is large enough, how much of it, and payloads that lie about it."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np
import pytest

from gradcomp import ConfigError, LayerSpec, Threshold, TransportError, WireFormatError
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.recording import announced_payload
from gradcomp.testing.simulation import Simulation, plan_for

LAYERS = [LayerSpec("a", (8,)), LayerSpec("b", (5,))]
HEADER = ByteHeader.size(len(LAYERS))


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_what_reaches_the_threshold_is_sent():
    ranks = Simulation([LAYERS[0]], Threshold(0.5, feedback=False), 1)
    got = ranks.step([[vector(0.5, -0.5, 0.49999997, 0, -7, 0.1, 1, -0.4)]]).mean(0)
    np.testing.assert_array_equal(got, vector(0.5, -0.5, 0, 0, -7, 0, 1, 0))


def test_small_elements_wait_until_they_add_up():
    ranks = Simulation([LAYERS[1]], Threshold(1.0), 1)
    sent = [ranks.step([[vector(0.4, 0, 0.5, 2, -0.25)]]).mean(0) for _ in range(4)]
    np.testing.assert_allclose(
        sent, [[0, 0, 0, 2, 0], [0, 0, 1, 2, 0], [1.2, 0, 0, 2, 0], [0, 0, 1, 2, -1]], rtol=1e-6
    )


def test_capacity_keeps_the_largest_and_of_equals_the_first():
    ranks = Simulation([LAYERS[0]], Threshold(0.5, capacity=0.5, feedback=False), 1)
    got = ranks.step([[vector(1, -2, 1, 3, -1, 1, 0.6, 4)]]).mean(0)
    np.testing.assert_array_equal(got, vector(1, -2, 0, 3, 0, 0, 0, 4))


def test_payloads_are_as_long_as_what_is_sent():
    compressor = Threshold(0.5, indices="raw", feedback=False)
    ranks = Simulation([LAYERS[0]], compressor, 2, record=True, reorder=False)
    sent = ranks.ranks[0].transport.sent
    for row, count in ((vector(*[0.0] * 8), 0), (vector(1, *[0.0] * 7), 1), (vector(*[1.0] * 8), 8)):
        sent.clear()
        ranks.step([[row], [row]])
        assert len(announced_payload(sent)) == 4 + 8 * count


def test_layers_have_thresholds_of_their_own():
    plan = plan_for(LAYERS, Threshold(0.5, feedback=False))
    other = dataclasses.replace(
        plan, assignments=(plan.assignments[0], dataclasses.replace(plan.assignments[1], level=2.0))
    )
    got = Simulation(LAYERS, other, 1).step([[np.ones(8, np.float32), vector(1, 2, 3, 1, -2)]]).all_means()
    np.testing.assert_array_equal(got[0], 1)
    np.testing.assert_array_equal(got[1], vector(0, 2, 3, 0, -2))


@pytest.mark.parametrize("threshold", [0, -1, float("nan"), float("inf"), 1e-60, 1e39, True, "high", None])
def test_a_threshold_that_no_element_can_be_compared_with_is_refused(threshold):
    with pytest.raises(ConfigError, match="threshold"):
        Threshold(threshold)


@pytest.mark.parametrize("capacity", [0, 1.5, float("nan"), True, None])
def test_a_capacity_outside_of_its_range_is_refused(capacity):
    with pytest.raises(ConfigError, match="density"):
        Threshold(0.5, capacity=capacity)


# --- payloads from elsewhere --------------------------------------------------------------------------------


def attempt(change, message_number: int) -> list[Exception | None]:
    """Rank 1 sends rank 0 a changed message; it selects all 8 elements of layer a, then 0, 1, 2 of layer b."""
    passed = [0]

    def tamper(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == (1, 0):
            passed[0] += 1
            if passed[0] == message_number + 1:
                change(message)
        return message

    ranks = Simulation(LAYERS, Threshold(0.5, indices="raw"), 3, tamper=tamper, reorder=False)
    row = [vector(*[1.0] * 8), vector(1, 1, 1, 0, 0)]
    return ranks.attempt([row] * 3)


def write(at: int, form: str, *values: int):
    def change(message: np.ndarray) -> None:
        data = struct.pack(form, *values)
        message[at : at + len(data)] = np.frombuffer(data, np.uint8)

    return change


COUNTS, INDICES = HEADER, HEADER + 8  # of a, then of b


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (write(COUNTS, "<II", 8, 6), "row 1: 6 elements, at most 5"),
        (write(COUNTS, "<I", 2**32 - 1), "row 0: 4294967295 elements, at most 8"),
        (write(COUNTS, "<I", 2), "the counts ask for"),
        (write(COUNTS, "<II", 8, 4), "the counts ask for"),
        (write(INDICES, "<I", 1), "not ascending"),
        (write(INDICES, "<III", 2, 1, 0), "not ascending"),
        (write(INDICES + 7 * 4, "<I", 8), "not below"),
        (write(INDICES + 10 * 4, "<I", 2**32 - 1), "not below"),
    ],
)
def test_a_payload_that_cannot_be_is_an_error_on_who_gets_it(change, complaint: str):
    errors = attempt(change, message_number=1)
    assert isinstance(errors[0], WireFormatError)
    assert complaint in str(errors[0])
    assert "rank 1" in str(errors[0])


@pytest.mark.parametrize("nbytes", [-1, 2**62])
def test_an_announced_size_that_cannot_be_is_an_error(nbytes: int):
    errors = attempt(write(HEADER, "<q", nbytes), message_number=0)
    assert isinstance(errors[0], WireFormatError)
    assert all(isinstance(error, TransportError) for error in errors[1:])
