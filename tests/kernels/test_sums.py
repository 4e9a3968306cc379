"""Sums over many elements have one order, whoever adds: chunks of 4,096, sixteen lanes in each, trees."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from kernels.backends import COMPILED, REFERENCE, each_of
from kernels.groups import CODECS, Group, Segment
from kernels.layers import Layer, Layers

from gradcomp.kernels import reference, segments
from gradcomp.kernels.reference_memory import CHUNK, ordered_sum
from gradcomp.kernels.segments import Factor

pytest.importorskip("gradcomp._native")

BIG = 2.0**54  # the next float64 is 4 more: it swallows a 1 that is added to it


BACKEND = each_of(("reference", *COMPILED))


def squares(backend: Any, gradient: Any) -> float:
    return float(np.frombuffer(Layers([Layer(gradient)]).squares(backend))[0])


@BACKEND
def test_a_chunk_begins_with_new_lanes(backend: Any) -> None:
    gradient = np.zeros(2 * CHUNK, np.float32)
    gradient[0] = np.sqrt(BIG)
    gradient[16:CHUNK:16] = 1  # swallowed, one by one
    gradient[CHUNK::16] = 1  # the same lane of the next chunk
    assert squares(backend, gradient) == BIG + CHUNK / 16


@BACKEND
def test_chunks_are_added_as_a_tree_of_neighbours(backend: Any) -> None:
    sums = (BIG, 0, 2, 1)
    gradient = np.zeros(len(sums) * CHUNK, np.float32)
    for chunk, number in enumerate(sums):
        if number == BIG:
            gradient[chunk * CHUNK] = np.sqrt(BIG)
        else:
            gradient[chunk * CHUNK :][:number] = 1
    assert squares(backend, gradient) == BIG + 4  # of 3; one by one, or across, they are lost


def plain(x: Any) -> np.float64:
    """The order in words: one row, one addition after another."""
    sums = []
    for begin in range(0, len(x), CHUNK):
        lanes = [np.float64(0)] * 16
        for i, number in enumerate(x[begin : begin + CHUNK]):
            lanes[i % 16] += number
        for width in (8, 4, 2, 1):
            lanes = [lanes[k] + lanes[k + width] for k in range(width)]
        sums.append(lanes[0])
    while len(sums) > 1:
        pairs = itertools.zip_longest(sums[::2], sums[1::2])
        sums = [left if right is None else left + right for left, right in pairs]
    return sums[0] if sums else np.float64(0)


@pytest.mark.parametrize("size", [0, 1, 15, 4095, 4096, 4097, 3 * 4096 - 5, 5 * 4096, 7 * 4096 + 1])
def test_the_reference_adds_in_the_order_that_it_states(size: int) -> None:
    x = np.random.default_rng(size).normal(size=(2, size)) ** 3
    assert ordered_sum(x).tolist() == [plain(row) for row in x]


LENGTHS = (CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 16 * CHUNK, 16 * CHUNK + 7, 35 * CHUNK + 3)


@BACKEND
@pytest.mark.parametrize("dtype", [segments.FLOAT32, segments.FLOAT16, segments.BFLOAT16, segments.FLOAT64])
def test_layers_of_many_chunks(backend: Any, dtype: int) -> None:
    rng = np.random.default_rng(1)
    layers = [
        Layer(rng.normal(size=length).astype(segments.DTYPES[dtype]), dtype=dtype) for length in LENGTHS
    ]
    assert Layers(layers).squares(backend) == Layers(layers).squares(REFERENCE)


@BACKEND
def test_tails_of_many_chunks(backend: Any) -> None:
    rng = np.random.default_rng(2)
    c = [rng.normal(size=length).astype(np.float32) for length in (*LENGTHS, 0)]
    layers = [Layer(each) for each in c]
    for threshold in (-1.0, 0.0, 1.5, 10.0):
        thresholds = [threshold] * len(c)
        expected = Layers(layers, c).tail(REFERENCE, thresholds)
        assert Layers(layers, c).tail(backend, thresholds) == expected


# What is rounded to float32 hides the order, unless all but the last bits of a sum are known.


def near_a_tie(size: int, squared: bool) -> Any:
    """Numbers whose sum, or norm, rounds up if small ones of the second chunk count, and else to 1."""
    tie = (2.0**-12, 2.0**-12, 2.0**-24) if squared else (2.0**-24,)
    gradient = np.zeros(size, np.float32)
    gradient[0] = 1
    gradient[1 : 1 + len(tie)] = tie
    gradient[CHUNK : 2 * CHUNK : 16] = 2.0**-27 if squared else 2.0**-54
    return gradient


@BACKEND
@pytest.mark.parametrize("size", [2 * CHUNK, 2 * CHUNK + 809, 32 * CHUNK])
def test_norms_of_many_chunks(backend: Any, size: int) -> None:
    gradient = np.tile(near_a_tie(size, squared=True), 2)  # the second bucket begins anywhere
    group = Group(CODECS["l2"], [Segment(gradient, next_residual=True, bits=4, bucket_size=size)], gap=0)
    encoded = group.encode(backend, stochastic=False)
    assert np.frombuffer(encoded.payload[:8], "<f4").tolist() == [1 + 2.0**-23] * 2
    assert encoded == group.encode(reference, stochastic=False)


@BACKEND
@pytest.mark.parametrize("size", [2 * CHUNK, 32 * CHUNK])
@pytest.mark.parametrize("codec", ["sign", "onebit"])
def test_means_of_many_chunks(backend: Any, codec: str, size: int) -> None:
    group = Group(CODECS[codec], [Segment(near_a_tie(size, squared=False), bits=1, bucket_size=size)], gap=0)
    payload = group.encode(backend, stochastic=False).payload
    scales = np.frombuffer(payload[: 4 if codec == "sign" else 8], "<f4")
    assert scales[-1] == (1 + 2.0**-23) / size


@BACKEND
@pytest.mark.parametrize("size", [2 * CHUNK + 13, 18 * CHUNK + 1])
def test_means_of_payloads_are_encoded_alike(backend: Any, size: int) -> None:
    gradient = np.random.default_rng(3).normal(size=size + 5000).astype(np.float32)
    group = Group(CODECS["l2"], [Segment(gradient, next_residual=True, bits=4, bucket_size=size)], gap=0)
    payloads = [group.encode(reference, stochastic=False).payload] * 2
    expected = group.reduce(reference, payloads, stochastic=False)
    assert group.reduce(backend, payloads, stochastic=False) == expected


@BACKEND
@pytest.mark.parametrize(("small", "minus"), [(1, 2), (5, 16), (17, 18)])
def test_columns_of_many_chunks(backend: Any, small: int, minus: int) -> None:
    # The large products cancel out; what the small ones leave shows in the one place where x is 0 and u is not.
    rows = (minus + 1) * CHUNK - 11
    u, x = np.zeros((2, rows), np.float32)
    u[0] = u[minus * CHUNK] = u[5] = x[0] = 1
    x[minus * CHUNK] = -1
    u[small * CHUNK :][:CHUNK:16] = x[small * CHUNK :][:CHUNK:16] = 2.0**-27
    found, expected = np.stack((u, x)), np.stack((u, x))
    for each, p in ((backend, found), (REFERENCE, expected)):
        each.orthogonalise(np.array([rows]), np.array([2]), Factor(p.reshape(-1), np.array([0])))
    assert expected[1, 5] != 0
    assert found.tobytes() == expected.tobytes()
