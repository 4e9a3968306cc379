"""Tests how a bucket is cut into chunks, and where their messages lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reduce.schemes import chunk_numbers, compressors, layer_lists, one_bucket
from tiers import examples

from gradcomp import Assignment, Cast, LayerSpec, Plan, Quantize
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.header import ByteHeader
from gradcomp.testing.simulation import plan_for

counts = st.integers(1, 9)


@st.composite
def buckets(draw):
    """Draws a bucket of layers under one compressor, or of exact layers and quantised ones with different bits."""
    layers = draw(layer_lists)
    if draw(st.booleans()):
        plan = plan_for(layers, draw(compressors))
    else:
        family = Quantize(4, draw(st.integers(1, 70))).family_string()
        exact = Cast("float32").family_string()
        choices = st.sampled_from([(family, 2), (family, 5), (family, 8), (exact, None)])
        plan = Plan(0, tuple(Assignment(layer.name, *draw(choices)) for layer in layers))
    return layers, one_bucket(layers, plan)


@examples(100)
@given(buckets(), counts)
def test_every_element_is_in_one_chunk_and_chunks_are_in_order(bucket, count: int):
    layers, parts = bucket
    numbers = chunk_numbers(Chunks(parts, len(layers), count), [layer.size for layer in layers])
    for chunk in numbers:
        assert ((chunk >= 0) & (chunk < count)).all()
        assert (np.diff(chunk) >= 0).all()


@examples(100)
@given(buckets(), counts)
def test_every_segment_keeps_its_level_and_is_cut_at_quantisation_buckets(bucket, count: int):
    layers, parts = bucket
    for part, segments in zip(parts, Chunks(parts, len(layers), count).place(), strict=True):
        table, whole = segments.table, part.group.table[segments.cut_from]
        for column in ("level", "bucket_size", "layer", "dtype"):
            assert (table[column] == whole[column]).all()
        assert (segments.layers == part.group.layers[segments.cut_from]).all()
        assert (segments.header_index == part.header_index[segments.cut_from]).all()
        assert set(segments.cut_from.tolist()) == set(range(len(part.group.table)))  # empty ones, too
        ends, sizes = table["start"] + table["length"], np.array([layers[i].size for i in segments.layers])
        assert (table["start"] % table["bucket_size"] == 0).all()
        assert ((ends % table["bucket_size"] == 0) | (ends == sizes)).all()


@examples(100)
@given(buckets(), counts)
def test_chunks_are_balanced_by_payload_bytes(bucket, count: int):
    layers, parts = bucket
    chunks = Chunks(parts, len(layers), count)
    total = sum(int(part.codec.wire_bytes(part.group.table).sum()) for part in parts)
    # A border is off by half a quantisation bucket at most, and a cut inside a byte costs one.
    largest = 0
    for part in parts:
        rows = part.group.table.copy()
        rows["length"] = np.minimum(rows["bucket_size"], rows["length"])
        largest = max(largest, int(part.codec.wire_bytes(rows).max(initial=0)))
    assert total <= sum(chunks.payload_bytes) <= total + count - 1
    assert all(abs(nbytes - total / count) <= largest + 2 for nbytes in chunks.payload_bytes)


@examples(100)
@given(buckets(), counts, st.data())
def test_payloads_fill_their_messages_without_gap(bucket, count: int, data):
    """A message is a header and the payloads of its pieces, part by part, in any order of the messages."""
    layers, parts = bucket
    chunks = Chunks(parts, len(layers), count)
    order = data.draw(st.permutations(range(count)))
    bases, at = [0] * count, 0
    for j in order:
        bases[j], at = at, at + chunks.sizes[j]
    used = np.zeros(sum(chunks.sizes), np.int64)
    for j in range(count):
        used[bases[j] : bases[j] + ByteHeader.size(len(layers))] += 1
    for part, segments in zip(parts, chunks.place(bases), strict=True):
        sizes = part.codec.wire_bytes(segments.table)
        numbers = np.repeat(np.arange(count), np.diff(segments.bounds))
        for row, nbytes, j in zip(segments.table, sizes, numbers, strict=True):
            assert bases[j] <= row["payload"]
            assert row["payload"] + nbytes <= bases[j] + chunks.sizes[j]
            used[row["payload"] : row["payload"] + nbytes] += 1
    for base, size, payload in zip(bases, chunks.sizes, chunks.payload_bytes, strict=True):
        padding = base + ByteHeader.size(len(layers)) + payload, base + size
        assert 0 <= padding[1] - padding[0] < 16
        used[slice(*padding)] += 1
    assert (used == 1).all()


@examples(50)
@given(buckets(), counts)
def test_a_chunk_alone_is_its_part_of_all(bucket, count: int):
    layers, parts = bucket
    chunks = Chunks(parts, len(layers), count)
    for j in range(count):
        for everything, one in zip(chunks.place(), chunks.only(j), strict=True):
            assert one.table.tobytes() == everything.chunk(j).table.tobytes()
            assert (one.layers == everything.chunk(j).layers).all()
            one.table["length"] = 0  # a copy: what follows does not notice
    assert all(
        (segments.table["length"] > 0).any() == (part.group.elements > 0)
        for part, segments in zip(parts, chunks.place(), strict=True)
    )


@pytest.mark.parametrize("count", [1, 2, 7, 1024])
def test_more_chunks_than_there_is_to_cut_leave_some_empty(count: int):
    layers = [LayerSpec("w", (30,))]
    parts = one_bucket(layers, plan_for(layers, Quantize(4, 10)))
    chunks = Chunks(parts, 1, count)
    assert sum(size > 0 for size in chunks.payload_bytes) == min(count, 3)
    assert sum(chunks.payload_bytes) == 3 * 8 + 15
