"""Scatter-reduce-allgather: what it computes, and what it makes of bad payloads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import compressors, layer_lists, one_bucket, quantizers
from tiers import examples

from gradcomp import (
    Cast,
    GradcompError,
    Identity,
    LayerSpec,
    PlanMismatchError,
    Quantize,
    TransportError,
    WireFormatError,
)
from gradcomp.exchange.layout import build_layout
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.segments import OWNER_RANK
from gradcomp.reduce import ScatterReduceAllgather
from gradcomp.reduce.header import NONFINITE, PRESENT, ByteHeader
from gradcomp.testing.simulation import DTYPES, Simulation, plan_for, same_bytes


def owners(layers, compressor, world: int) -> list[ScatterReduceAllgather]:
    """All layers in one bucket, and every rank's reduction of it."""
    parts = one_bucket(layers, plan_for(layers, compressor))
    return [ScatterReduceAllgather(parts, len(layers), rank, world) for rank in range(world)]


# --- cutting ------------------------------------------------------------------------------------------------


@examples(30)
@given(layer_lists, quantizers, st.integers(1, 7))
def test_only_groups_with_feedback_have_second_residuals(layers, compressor, world: int):
    without = owners(layers, compressor, world)
    assert all(not rank.ranges for rank in without)
    ranks = owners(layers, Quantize(4, compressor.bucket_size, feedback=True), world)
    owned = sum(r.length for rank in ranks for r in rank.ranges)
    assert owned == sum(layer.size for layer in layers)


# --- the mean -----------------------------------------------------------------------------------------------


def reference_mean(compressor, layer: LayerSpec, gradients: list[np.ndarray], step: int) -> np.ndarray:
    """Encode on every rank, decode, add in rank order, divide, encode, decode: one layer at a time, nothing cut."""
    table = plan_table(compressor, layer)
    codec = compressor.codec_for(table)
    payloads = []
    for rank, gradient in enumerate(gradients):
        table["gradient"] = gradient.ctypes.data
        payloads.append(np.zeros(int(codec.wire_bytes(table)[0]), np.uint8))
        codec.encode(table, payloads[-1], np.zeros(1, np.uint8), Draw(0, step, rank))
    mean = np.zeros_like(payloads[0])
    table["gradient"] = 0
    codec.reduce(
        table, payloads, mean, np.zeros(1, np.uint8), Draw(0, step, OWNER_RANK), float(len(payloads))
    )
    output = np.zeros(layer.size, DTYPES[layer.dtype])
    table["output"] = output.ctypes.data
    codec.decode(table, mean, np.zeros(1, np.uint8))
    return output


def plan_table(compressor, layer: LayerSpec) -> np.ndarray:
    layout = build_layout([layer], plan_for([layer], compressor), [0], frozenset(), 10**9)
    return layout.buckets[0].groups[0].table.copy()


@examples(25)
@given(layer_lists, compressors, st.integers(1, 7), st.sampled_from([40, 200, 10**6]), st.booleans())
def test_the_mean_is_the_codecs(layers, compressor, world: int, cap: int, overlap: bool):
    ranks = Simulation(layers, compressor, world, slice_elements=cap, overlap=overlap, reorder=False)
    for step in range(2):
        gradients = ranks.gradients()
        means = ranks.step(gradients).all_means()
        for i, layer in enumerate(layers):
            want = reference_mean(compressor, layer, [rank[i] for rank in gradients], step)
            assert same_bytes(means[i], want), layer


# --- payloads from elsewhere --------------------------------------------------------------------------------

LAYERS = [LayerSpec("a", (300,)), LayerSpec("b", (100,))]
HEADER = ByteHeader.size(len(LAYERS))


class Tamper:
    """Changes one message of one sender to one receiver: the ``number``-th that goes this way."""

    def __init__(self, change, source: int = 1, destination: int = 0, number: int = 0) -> None:
        self.change, self.way, self.number = change, (source, destination), number

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == self.way:
            self.number -= 1
            if self.number == -1:
                return self.change(message)
        return message


def run(change, number: int, compressor=None, world: int = 3, steps: int = 1):
    compressor = compressor or Quantize(4, 50)
    tamper = Tamper(change, number=number)
    ranks = Simulation(LAYERS, compressor, world, tamper=tamper, reorder=False)
    for _ in range(steps - 1):
        ranks.step()
    return ranks, ranks.attempt()


def overwritten(at: int, data: bytes):
    def change(message: np.ndarray) -> np.ndarray:
        room = message[at : at + len(data)]
        room[:] = np.frombuffer(data, np.uint8)[: len(room)]
        return message

    return change


#: In the all-to-all every rank has a message for every other; in the all-gather one for all.
ROUNDS = {"scatter": 0, "gather": 1}
every_round = pytest.mark.parametrize("number", ROUNDS.values(), ids=ROUNDS)


@every_round
@pytest.mark.parametrize("kept", [0, 10, HEADER - 1, HEADER, -1])
def test_a_truncated_message_is_an_error_on_every_rank(number: int, kept: int):
    for steps in (1, 2):  # in the second step buffers hold the first one's bytes
        _, errors = run(lambda message: message[:kept], number + 2 * (steps - 1), steps=steps)
        assert [type(error) for error in errors] == [TransportError] * 3


@every_round
def test_a_message_that_is_too_long_is_an_error_on_every_rank(number: int):
    _, errors = run(lambda message: np.append(message, np.uint8(0)), number)
    assert [type(error) for error in errors] == [TransportError] * 3


@every_round
@pytest.mark.parametrize(
    ("at", "error"),
    [
        (0, WireFormatError),
        (2, PlanMismatchError),
        (4, PlanMismatchError),
        (8, WireFormatError),
        (12, WireFormatError),
    ],
)
def test_a_wrong_header_is_an_error_where_it_arrives_and_nobody_hangs(number: int, at: int, error: type):
    _, errors = run(overwritten(at, b"\xee"), number)
    assert type(errors[0]) is error
    assert all(isinstance(other, TransportError) for other in errors[1:] if other is not None)


@every_round
def test_a_message_from_the_last_step_is_refused(number: int):
    kept = []

    def replay(source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) == (1, 0):
            kept.append(message)
            if len(kept) == 3 + number:
                return kept[number]
        return message

    ranks = Simulation(LAYERS, Quantize(4, 50), 2, tamper=replay, reorder=False)
    ranks.step()
    with pytest.raises(WireFormatError, match="step 0 instead of 1"):
        ranks.step()


@pytest.mark.parametrize(
    ("compressor", "dtype"),
    [
        (Quantize(4, 50), "float32"),
        (Quantize(4, 50, "l2"), "float32"),
        (Cast("float32"), "float32"),
        (Cast("float16"), "float32"),  # of the block's scale
        (Cast("bfloat16"), "bfloat16"),
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_scale_or_value_that_is_not_finite_is_flagged_on_every_rank(compressor, dtype: str, bad: float):
    """The owner decodes it, so all ranks see its mean."""
    # Two blocks of float16 leave rank 0 without a chunk.
    first_owner = 1 if compressor == Cast("float16") else 0
    change = overwritten(HEADER, np.full(4, bad, DTYPES[dtype]).tobytes())
    tamper = Tamper(change, source=2, destination=first_owner)
    ranks = Simulation(LAYERS, compressor, 3, tamper=tamper, reorder=False)
    errors = ranks.attempt()
    assert errors == [None] * 3
    assert all(not p.result.finite for p in ranks.pipelines)
    assert not any(p.commit() for p in ranks.pipelines)


@pytest.mark.parametrize("layer", range(len(LAYERS)))
def test_a_vote_that_reached_one_owner_only_reaches_all(layer: int):
    ranks, errors = run(overwritten(32 + layer, bytes([PRESENT | NONFINITE])), 0)
    assert errors == [None] * 3
    for pipeline in ranks.pipelines:
        assert pipeline.result.nonfinite.tolist() == [i == layer for i in range(len(LAYERS))]
    assert all(np.isnan(rank.outputs[layer]).all() for rank in ranks.ranks)


@examples(60)
@given(
    st.data(), st.sampled_from([Quantize(4, 50), Quantize(2, 50, "linf"), Cast("float16"), Cast("float32")])
)
def test_random_bytes_are_a_typed_error_or_one_mean_for_all(data, compressor):
    """Whatever arrives in the first round: no crash, and either a typed error or the same mean and verdict."""
    at = data.draw(st.integers(0, HEADER + 60))
    noise = data.draw(st.binary(min_size=1, max_size=40))
    ranks, errors = run(overwritten(at, noise), 0, compressor)
    assert all(error is None or isinstance(error, GradcompError) for error in errors)
    if errors == [None] * 3:
        means = [[rank.outputs[i] for i in range(len(LAYERS))] for rank in ranks.ranks]
        assert all(same_bytes(a, b) for other in means for a, b in zip(other, means[0], strict=True))
        verdicts = [p.result.nonfinite.tolist() for p in ranks.pipelines]
        assert verdicts == [verdicts[0]] * 3
        for layer, bad in enumerate(verdicts[0]):
            assert bad or np.isfinite(means[0][layer]).all()


@examples(30)
@given(st.integers(0, HEADER + 60), st.binary(min_size=1, max_size=40))
def test_random_bytes_in_the_mean_do_not_crash(at: int, noise: bytes):
    ranks, errors = run(overwritten(at, noise), 1)
    assert all(error is None or isinstance(error, GradcompError) for error in errors)
    if errors[0] is None:
        mean, verdict = ranks.ranks[0].outputs, ranks.pipelines[0].result.nonfinite
        assert all(verdict[i] or np.isfinite(mean[i]).all() for i in range(len(LAYERS)))


def test_a_count_that_is_off_is_refused():
    """An allreduce has no single sender; its header is checked in the sum."""
    ranks = Simulation(LAYERS, Identity(), 3, reorder=False)

    def spoil() -> None:
        sums = [s for p in ranks.pipelines for program in p._programs for s in program._sums.values()]
        for fused in sums:
            fused._counts[3] += 1

    errors = ranks.attempt(during=spoil)
    assert any(isinstance(error, PlanMismatchError) for error in errors)
    assert all(error is not None for error in errors)
