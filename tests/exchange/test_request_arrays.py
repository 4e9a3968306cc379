"""Requests whose layers share one array; memory that requests share; codes that are decoded again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import pytest
from exchange.test_requests import Ranked, as_bytes, every_kind, numbers
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from gradcomp import ConfigError, LayerSpec, PlanMismatchError, Quantize
from gradcomp.exchange.request_group import Run
from gradcomp.exchange.requests import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Blocks,
    PreparedRequest,
    Request,
    SharedMemory,
    even_borders,
)
from gradcomp.testing.simulation import DTYPES
from gradcomp.transport.base import host_allocator

CODEC = Quantize(4, 16)


def in_blocks(
    kind: str, sizes: Sequence[int], gaps: Sequence[int], world: int, dtype: str = "float32"
) -> Request:
    """Shards as ``fully_shard`` lays them out, and further gaps between them."""
    layers = [LayerSpec(f"layer{i}", (n,), dtype) for i, n in enumerate(sizes)]
    ends = [0, *accumulate(-(-n // world) + gap for n, gap in zip(sizes, gaps, strict=True))]
    borders = tuple(tuple(min(j * -(-n // world), n) for j in range(world + 1)) for n in sizes)
    return Request.of(kind, layers, CODEC, borders=borders, blocks=Blocks(ends[-1], tuple(ends[:-1])))


def packed(request: Request, arrays: Sequence[np.ndarray], world: int, rank: int | None) -> np.ndarray:
    """Arrays by layer, as one array: a block of shards, or all blocks; elsewhere NaN."""
    blocks = request.blocks
    flat = np.full((world if rank is None else 1) * blocks.size, np.nan, arrays[0].dtype)
    for array, at, offset in zip(arrays, request.borders, blocks.offsets, strict=True):
        for j in range(world) if rank is None else [rank]:
            shard = array.reshape(-1)[at[j] : at[j + 1]] if rank is None else array
            begin = offset + (j * blocks.size if rank is None else 0)
            flat[begin : begin + len(shard)] = shard
    return flat


@examples(60)
@given(
    st.sampled_from([REDUCE_SCATTER, ALL_GATHER]),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 5)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4, 7]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(0, 2**31),
)
def test_blocks_give_the_bits_of_arrays_by_layer_and_touch_nothing_else(kind, shapes, world, dtype, seed):
    sizes, gaps = zip(*shapes, strict=True)
    request = in_blocks(kind, sizes, gaps, world, dtype)
    plain = Request(kind, request.layers, request.compressors, request.borders)
    by_layer = Ranked(plain, world)
    inputs = numbers(by_layer.prepared, seed)
    outputs = by_layer.run(inputs)
    ranked = Ranked(request, world)
    scatters = kind == REDUCE_SCATTER
    flat = [[packed(request, own, world, None if scatters else rank)] for rank, own in enumerate(inputs)]
    (shape,) = ranked.prepared[0].output_shapes
    written = [[np.full(shape, np.nan, DTYPES[dtype])] for _ in range(world)]
    found = ranked.attempt(flat, lambda rank: [Run(ranked.prepared[rank], flat[rank], written[rank])])
    for rank, ((got,),) in enumerate(found):
        wanted = packed(request, outputs[rank], world, rank if scatters else None)
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_input_that_a_rank_lacks_counts_as_zeros(world: int):
    """Of layer i every rank but rank i has an input; the last layer has none at all."""
    layers = [LayerSpec(f"layer{i}", (37,), "bfloat16" if i == 1 else "float32") for i in range(world + 1)]
    request = Request.of(REDUCE_SCATTER, layers, Quantize(4, 16))
    given = numbers(Ranked(request, world).prepared, 1)
    lacks = [[i in (rank, world) for i in range(world + 1)] for rank in range(world)]

    def run(absent: Callable[[np.ndarray], np.ndarray | None]) -> tuple[list, list]:
        ranked = Ranked(request, world)
        inputs = [
            [absent(array) if no else array for array, no in zip(*pair, strict=True)]
            for pair in zip(given, lacks, strict=True)
        ]
        found = ranked.run(inputs, commit=False)
        return found, [one.result.present.tolist() for one in ranked.prepared]

    zeros, nothing = run(np.zeros_like), run(lambda _: None)
    assert [[a.tobytes() for a in rank] for rank in nothing[0]] == [
        [a.tobytes() for a in rank] for rank in zeros[0]
    ]
    assert nothing[1] == [[world > 1] * world + [False]] * world
    assert zeros[1] == [[True] * (world + 1)] * world


@every_kind
@pytest.mark.parametrize("in_blocks_", [False, True])
def test_only_layers_of_a_reduce_scatter_may_lack_an_input(kind: str, in_blocks_: bool):
    request = (
        in_blocks(kind, [40], [0], 2) if in_blocks_ else Request.of(kind, [LayerSpec("x", (40,))], CODEC)
    )
    prepared = PreparedRequest(request, 0, 2)
    objection = prepared.objection([None], None)
    assert (objection is None) == (kind == REDUCE_SCATTER and not in_blocks_)


def test_shards_are_gathered_in_place():
    request = in_blocks(ALL_GATHER, [50, 7], [0, 0], 3)
    ranked = Ranked(request, 3)
    apart = Ranked(request, 3)
    inputs = [
        [np.random.default_rng(rank).standard_normal(request.blocks.size).astype(np.float32)]
        for rank in range(3)
    ]
    wanted = apart.run(inputs)
    whole = [np.zeros(3 * request.blocks.size, np.float32) for _ in range(3)]
    runs = []
    for rank, array in enumerate(whole):
        own = array.reshape(3, -1)[rank]
        own[:] = inputs[rank][0]
        runs.append([Run(ranked.prepared[rank], [own], [array])])
    ranked.attempt(inputs, lambda rank: runs[rank])
    for array, (want,) in zip(whole, wanted, strict=True):
        covered = ~np.isnan(packed(request, [np.zeros(50, np.float32), np.zeros(7, np.float32)], 3, None))
        assert array[covered].tobytes() == want[covered].tobytes()


@pytest.mark.parametrize(
    "blocks",
    [Blocks(10, (0, 4)), Blocks(30, (0,)), Blocks(30, (4, 0)), Blocks(30, (-1, 20)), Blocks(18, (0, 10))],
)
def test_blocks_that_shards_do_not_fit_into_are_refused(blocks: Blocks):
    layers = [LayerSpec("a", (20,)), LayerSpec("b", (19,))]
    request = Request.of(ALL_GATHER, layers, CODEC, borders=((0, 10, 20), (0, 10, 19)), blocks=blocks)
    with pytest.raises(ConfigError, match=r"offset|do not fit"):
        request.check(2)


def test_ranks_that_place_layers_otherwise_do_not_begin():
    requests = [in_blocks(ALL_GATHER, [40, 30], [0, gap], 2) for gap in (0, 1)]
    ranked = Ranked(requests, 2)
    inputs = [[np.zeros(own.input_shapes[0], np.float32)] for own in ranked.prepared]
    errors = ranked.attempt(inputs)
    assert [type(error) for error in errors] == [PlanMismatchError] * 2
    assert "Blocks" in str(errors[0])


@every_kind
def test_a_draw_has_the_number_that_it_is_given(kind: str):
    ranked = Ranked(Request.of(kind, [LayerSpec("a", (300,))], CODEC), 2)
    inputs = numbers(ranked.prepared)

    def bits(draw: int | None) -> bytes:
        found = ranked.attempt(inputs, lambda rank: [Run(ranked.prepared[rank], inputs[rank], draw=draw)])
        return found[0][0][0].tobytes()

    first = bits(None)
    assert bits(7) == bits(7) != first
    assert bits(0) == first


def test_what_was_gathered_is_decoded_again_and_travels_only_if_some_rank_has_changed():
    request = Request.of(ALL_GATHER, [LayerSpec("a", (300,)), LayerSpec("b", (31,), "float16")], CODEC)
    ranked = Ranked(request, 3)
    inputs = numbers(ranked.prepared)
    first = ranked.run(inputs)

    def again(changed: int | None) -> list[list[np.ndarray]]:
        outputs = [[np.zeros_like(array) for array in arrays] for arrays in first]
        runs = [
            Run(ranked.prepared[rank], inputs[rank], outputs[rank], 9, unchanged=rank != changed)
            for rank in range(3)
        ]
        found = ranked.attempt(inputs, lambda rank: [runs[rank]])
        assert not any(isinstance(one, Exception) for one in found), found
        return outputs

    sent = [transport.bytes_sent for transport in ranked.transports]
    for rank, arrays in enumerate(again(None)):
        assert as_bytes(arrays) == as_bytes(first[rank])
        assert ranked.transports[rank].bytes_sent == sent[rank] + 2 * 56
    other = again(1)
    assert other[0][0].tobytes() == other[2][0].tobytes() != first[0][0].tobytes()
    alone = [np.zeros_like(array) for array in first[0]]
    ranked.prepared[0].decode_again(alone)
    assert as_bytes(alone) == as_bytes(other[0])


@every_kind
def test_requests_that_share_memory_give_the_same_bits(kind: str):
    """They run in turns, small and large, over the memory of one rank."""
    shared = [SharedMemory(host_allocator) for _ in range(2)]
    for number, sizes in enumerate(2 * [(30, 200), (700,), (5,), (64, 64, 64)]):
        layers = [LayerSpec(f"l{i}", (n,)) for i, n in enumerate(sizes)]
        request = Request.of(kind, layers, CODEC, borders=tuple(even_borders(n, 2) for n in sizes))
        apart, together = Ranked(request, 2), Ranked(request, 2)
        together.prepared = [
            PreparedRequest(request, rank, 2, seed=0, memory=shared[rank].memory()) for rank in range(2)
        ]
        inputs = numbers(apart.prepared, number)
        for a, b in zip(apart.run(inputs), together.run(inputs), strict=True):
            assert as_bytes(a) == as_bytes(b)
