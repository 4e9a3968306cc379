"""Scatter-reduce-allgather: who keeps residuals, and what it makes of bad payloads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import layer_lists, one_bucket, quantizers
from tiers import examples

from gradcomp import Cast, Identity, LayerSpec, PlanMismatchError, Quantize
from gradcomp.reduce import ScatterReduceAllgather
from gradcomp.reduce.header import NONFINITE, PRESENT, ByteHeader
from gradcomp.testing.simulation import DTYPES, Simulation, plan_for


def owners(layers, compressor, world: int) -> list[ScatterReduceAllgather]:
    """All layers in one bucket, and every rank's reduction of it."""
    parts = one_bucket(layers, plan_for(layers, compressor))
    return [ScatterReduceAllgather(parts, len(layers), rank, world) for rank in range(world)]


@examples(30)
@given(layer_lists, quantizers, st.integers(1, 7))
def test_only_groups_with_feedback_have_second_residuals(layers, compressor, world: int):
    without = owners(layers, compressor, world)
    assert all(not rank.ranges for rank in without)
    ranks = owners(layers, Quantize(4, compressor.bucket_size, feedback=True), world)
    owned = sum(r.length for rank in ranks for r in rank.ranges)
    assert owned == sum(layer.size for layer in layers)


# --- payloads from elsewhere --------------------------------------------------------------------------------

LAYERS = [LayerSpec("a", (300,)), LayerSpec("b", (100,))]
HEADER = ByteHeader.size(len(LAYERS))


class Tamper:
    """Changes the first message of one sender to one receiver."""

    def __init__(self, change, source: int = 1, destination: int = 0) -> None:
        self.change, self.way = change, (source, destination)

    def __call__(self, source: int, destination: int, message: np.ndarray) -> np.ndarray:
        if (source, destination) != self.way:
            return message
        self.way = (-1, -1)
        return self.change(message)


def overwritten(at: int, data: bytes):
    def change(message: np.ndarray) -> np.ndarray:
        message[at : at + len(data)] = np.frombuffer(data, np.uint8)
        return message

    return change


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
    tamper = Tamper(overwritten(32 + layer, bytes([PRESENT | NONFINITE])))
    ranks = Simulation(LAYERS, Quantize(4, 50), 3, tamper=tamper, reorder=False)
    assert ranks.attempt() == [None] * 3
    for pipeline in ranks.pipelines:
        assert pipeline.result.nonfinite.tolist() == [i == layer for i in range(len(LAYERS))]
    assert all(np.isnan(rank.outputs[layer]).all() for rank in ranks.ranks)


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
