"""Lists the reductions under test, and computes each in NumPy: layer by layer, without fusion or slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from gradcomp import NUQSGD, Cast, Compressor, Identity, LayerSpec, OneBit, Quantize, ScaledSign
from gradcomp.core.topology import Topology
from gradcomp.exchange.layout import build_layout
from gradcomp.kernels.codec import Codec, Draw
from gradcomp.kernels.devices import HOST
from gradcomp.kernels.segments import FLOAT32, FP32, OWNER_RANK, SEGMENT
from gradcomp.reduce import Part
from gradcomp.reduce.chunks import Chunks
from gradcomp.testing.simulation import DTYPES, Simulation

Floats = np.ndarray

#: Every reduction, by its string form.
REDUCTIONS = (
    "sra", "ring", "tree", "all_to_all", "gather",
    "parameter_server", "parameter_server:servers=2", "hierarchical",
)  # fmt: skip
#: Those whose partial sums travel.
PARTIAL = ("ring", "tree", "hierarchical")


def topologies(world: int) -> list[Topology]:
    """Returns one host, two hosts in turns, hosts of different sizes, and a host for every rank."""
    hosts = [[0] * world, [r % 2 for r in range(world)], [0, 0, 0, 1, 1, 2, 3][:world], list(range(world))]
    return [Topology(tuple(numbers)) for numbers in {tuple(h): None for h in hosts}]


def servers_of(reduction: str) -> int:
    """Returns the number of servers in the string form."""
    return int(reduction.partition("servers=")[2] or 1)


def fits(reduction: str, world: int) -> bool:
    """Returns true if there are enough ranks."""
    return servers_of(reduction) <= world


quantizers = st.builds(
    Quantize,
    bits=st.integers(1, 8),
    bucket_size=st.integers(1, 70),
    scaling=st.sampled_from(["minmax", "l2", "linf"]),
    rounding=st.sampled_from(["stochastic", "nearest"]),
    feedback=st.just(False),
)
compressors = quantizers | st.sampled_from(
    [Cast("float16"), Cast("bfloat16"), Cast("float32"), Quantize(4, 33, rounding="shift")]
)
with_residuals = st.sampled_from(
    [
        Quantize(4, 33, feedback=True),
        Quantize(2, 16, "linf", "nearest"),
        Quantize(3, 50, rounding="nearest", decay=0.5),
        Cast("float16", feedback=True),
        Cast("bfloat16", feedback=True),
        NUQSGD(5, 40, "linf", feedback=True),
        OneBit(40),
        ScaledSign(24),
        ScaledSign(None),
    ]
)
layer_lists = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2, 15, 16, 17, 64, 301, 777]),
        st.sampled_from(["float32", "float16", "bfloat16"]),
    ),
    min_size=1,
    max_size=5,
).map(lambda rows: [LayerSpec(f"layer{i}", (n,), dtype) for i, (n, dtype) in enumerate(rows)])


def one_bucket(layers: Sequence[LayerSpec], plan) -> list[Part]:
    """Returns the parts of a bucket of all layers."""
    layout = build_layout(layers, plan, range(len(layers)), frozenset(), 10**9)
    (bucket,) = layout.buckets
    return [
        Part(group.compressor.codec_for(group.table), group, header_index)
        for group, header_index in zip(bucket.groups, bucket.header_index, strict=True)
    ]


def chunk_numbers(chunks: Chunks, sizes: Sequence[int]) -> list[np.ndarray]:
    """Returns the chunk of every element by layer; -1 if the bucket does not have the element."""
    numbers = [np.full(size, -1) for size in sizes]
    for segments in chunks.place():
        of_rows = np.repeat(np.arange(chunks.count), np.diff(segments.bounds))
        for layer, row, chunk in zip(segments.layers, segments.table, of_rows, strict=True):
            assert (numbers[layer][row["start"] : row["start"] + row["length"]] == -1).all()
            numbers[layer][row["start"] : row["start"] + row["length"]] = chunk
    return numbers


class Model:
    """Computes the means that all ranks apply under one reduction, and their residuals."""

    def __init__(self, reduction: str, ranks: Simulation, compressor: Compressor) -> None:
        self.name = reduction.partition(":")[0]
        self.ranks, self.layers, self.world = ranks, ranks.layers, ranks.size
        self.topology = ranks.ranks[0].settings.topology or Topology.one_host(ranks.size)
        self.compressor = compressor
        self.first = [[np.zeros(layer.size, np.float32) for layer in self.layers] for _ in range(self.world)]
        self.second = [np.zeros(layer.size, np.float32) for layer in self.layers]
        self.step_number = 0

    def step(self, gradients) -> list[np.ndarray]:
        """Returns every layer's mean, and updates the residuals."""
        means = [self._layer(i, [rank[i] for rank in gradients]) for i in range(len(self.layers))]
        self.step_number += 1
        return means

    def _layer(self, i: int, gradients) -> np.ndarray:
        self._i, keeps = i, self.compressor.traits.keeps_residual
        c = [g.astype(np.float32) for g in gradients]
        if keeps:
            decay = np.float32(self.compressor.traits.residual_decay)
            c = [g + decay * self.first[r][i] for r, g in enumerate(c)]
        value, divisor = getattr(self, "_" + self.name)(c)
        return (value / np.float32(divisor)).astype(DTYPES[self.layers[i].dtype])

    def _code(self, c: Floats, rank: int, loses: Callable[[Floats], None]) -> Floats:
        """Returns the values after encoding and decoding, and passes their error to ``loses``."""
        table = np.zeros(1, SEGMENT)
        layer = self.layers[self._i]
        table["length"], table["layer"], table["dtype"] = layer.size, layer.hash, FLOAT32
        self.compressor.fill(table, self.compressor.level)
        codec = self.compressor.codec_for(table)
        if self.name in PARTIAL and isinstance(self.compressor, Identity):
            codec = Codec(FP32)
        c, value = np.ascontiguousarray(c), np.zeros_like(c)
        table["gradient"], table["output"] = c.ctypes.data, value.ctypes.data
        payload, flags = np.zeros(int(codec.wire_bytes(table)[0]), np.uint8), np.zeros(1, np.uint8)
        codec.encode(HOST, table, payload, flags, Draw(0, self.step_number, rank))
        codec.decode(HOST, table, payload, flags)
        assert not flags.any()
        loses(c - value)
        return value

    def _own(self, c: Floats, rank: int) -> Floats:
        """Encodes and decodes as a rank, which keeps the error in its residual."""
        return self._code(c, rank, lambda lost: self.first[rank].__setitem__(self._i, lost))

    def _mean(self, values: Sequence[Floats]) -> Floats:
        """Encodes and decodes the mean as a chunk's owner, with its server-side error."""
        mean = total(values) / np.float32(self.world)
        if self.compressor.traits.keeps_residual:
            mean = mean + np.float32(self.compressor.traits.residual_decay) * self.second[self._i]
        return self._code(mean, OWNER_RANK, lambda lost: self.second.__setitem__(self._i, lost))

    def _sra(self, c):
        return self._mean([self._own(c[r], r) for r in range(self.world)]), 1

    _parameter_server = _sra

    def _all_to_all(self, c):
        return total([self._own(c[r], r) for r in range(self.world)]), self.world

    _gather = _all_to_all

    def _tree(self, c):
        def subtree(rank: int) -> Floats:
            bits = range((rank & -rank or self.world).bit_length())
            below = [rank + (1 << k) for k in bits if not rank or 1 << k < rank & -rank]
            sums = [subtree(child) for child in below if child < self.world]
            return self._own(total(sums) + c[rank] if sums else c[rank], rank)

        return subtree(0), self.world

    def _ring(self, c):
        # Elements of chunk p begin at rank p + 1 and end at rank p: each start for itself, on the whole layer.
        chunk = self._ring_chunks()[self._i]
        value = np.zeros_like(c[0])
        lost = [np.zeros_like(c[0]) for _ in c]
        for p in range(self.world):
            traveller = None
            for rank in [(p + 1 + t) % self.world for t in range(self.world)]:
                added = c[rank] if traveller is None else traveller + c[rank]
                traveller = self._own(added, rank)
                lost[rank][chunk == p] = self.first[rank][self._i][chunk == p]
            value[chunk == p] = traveller[chunk == p]
        for rank, mine in enumerate(lost):
            self.first[rank][self._i] = mine
        return value, self.world

    def _ring_chunks(self) -> list[np.ndarray]:
        merged = [np.full(layer.size, -1) for layer in self.layers]
        for program in self.ranks.pipelines[0].laid_out.programs:
            found = chunk_numbers(program.reduction._chunks, [layer.size for layer in self.layers])
            merged = [np.maximum(a, b) for a, b in zip(merged, found, strict=True)]
        return merged

    def _hierarchical(self, c):
        # The ranks of a host lead in turn, bucket by bucket: each bucket for itself, on the whole layer.
        bucket = self._buckets()
        value, second = np.zeros_like(c[0]), c[0].copy()
        first = np.zeros((self.world, *c[0].shape), np.float32)
        before = self.second[self._i]
        for number in np.unique(bucket).tolist():
            own = bucket == number
            values = []
            for leader in self.topology.leaders_in_turn(number):
                members = self.topology.members(leader)
                for member in members:
                    self.first[member][self._i] = np.zeros_like(c[0])
                values.append(self._own(total([c[member] for member in members]), leader))
            self.second[self._i] = before
            value[own] = self._mean(values)[own]
            first[:, own] = np.stack([mine[self._i] for mine in self.first])[:, own]
            second[own] = self.second[self._i][own]
        self.second[self._i] = second
        for rank, mine in enumerate(first):
            self.first[rank][self._i] = mine
        return value, 1

    def _buckets(self) -> np.ndarray:
        """Returns the number of every element's bucket."""
        numbers = np.zeros(self.layers[self._i].size, np.int64)
        for found in self.ranks.pipelines[0].layout.buckets:
            for group in found.groups:
                for row in group.table[group.layers == self._i]:
                    numbers[row["start"] : row["start"] + row["length"]] = found.number
        return numbers


def total(values: Sequence[Floats]) -> Floats:
    """Adds in order, in float32."""
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result
