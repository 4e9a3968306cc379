"""Exchange buckets: the plan groups layers and slices, in an order that follows from what all ranks have seen."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor, Identity
from gradcomp.compress.groups import Piece, by_family, group_of, pack
from gradcomp.compress.policy import assigned
from gradcomp.core.errors import ConfigError, WireFormatError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Plan
from gradcomp.core.state import Begin
from gradcomp.exchange.waiting import Waiting, collective
from gradcomp.kernels.codec import Group, Sizes
from gradcomp.kernels.devices import HOST, Device
from gradcomp.transport.base import AllGather, Transport

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Bucket:
    """Holds the layers and slices of one exchange bucket, which travel together.

    ``layers`` has the numbers of its layers, each once, in order; a layer's position is its place in the header.
    ``header_index[g][i]`` is the place of segment i of group g.
    """

    number: int
    layers: Sizes
    groups: tuple[Group, ...]
    header_index: tuple[Sizes, ...]

    @property
    def device(self) -> Device:
        """The device of the gradients."""
        return self.groups[0].device

    @property
    def elements(self) -> int:
        """Return how many elements all groups have together."""
        return sum(group.elements for group in self.groups)

    @property
    def payload_bytes(self) -> int:
        """Return the payload bytes of all groups in one direction, without headers; a limit where data decide."""
        return sum(int(group.compressor.wire_bytes(group).sum()) for group in self.groups)


@dataclass(frozen=True, eq=False)
class Layout:
    """Holds the exchange buckets of a step in the order in which they travel."""

    buckets: tuple[Bucket, ...]
    buckets_of: tuple[tuple[int, ...], ...]  # layer number -> numbers of the buckets that hold its slices

    @cached_property
    def layer_counts(self) -> list[int]:
        """Return the number of layers in each bucket."""
        return [len(bucket.layers) for bucket in self.buckets]

    @cached_property
    def bucket_of(self) -> Sizes:
        """Return each layer's bucket, or the number of buckets for a layer that is in several of them or in none."""
        several = len(self.buckets)
        found = [numbers[0] if len(numbers) == 1 else several for numbers in self.buckets_of]
        return np.array(found, dtype=np.int64)

    def residual_sizes(self, layers: Sequence[LayerSpec]) -> list[int]:
        """Return the elements of each layer's residual: its size if it travels with feedback, else 0."""
        sizes = [0] * len(layers)
        for bucket in self.buckets:
            for group in bucket.groups:
                for layer in group.layers.tolist() if group.feedback else ():
                    sizes[layer] = layers[layer].size
        return sizes


def build_layout(
    layers: Sequence[LayerSpec],
    plan: Plan,
    order: Sequence[int],
    cold: frozenset[int],
    bucket_elements: int,
    device: Device = HOST,
) -> Layout:
    """Lay out the layers numbered in ``order``, those in ``cold`` last, by :func:`gradcomp.compress.groups.pack`.

    ``device`` holds the groups' working memory. A layer missing from ``order`` does not travel (sparse gradients go
    another way).
    """
    compressors = compressors_of(layers, plan)
    buckets = pack(layers, compressors, order, cold, bucket_elements)
    if len(buckets) > 0xFFFF:
        raise ConfigError(
            f"{len(buckets)} buckets; raise slice_elements (at most 65535 buckets are possible)"
        )
    buckets_of: list[list[int]] = [[] for _ in layers]
    for number, pieces in enumerate(buckets):
        for layer in dict.fromkeys(piece.layer for piece in pieces):
            buckets_of[layer].append(number)
    return Layout(
        tuple(_bucket(n, pieces, layers, compressors, device) for n, pieces in enumerate(buckets)),
        tuple(tuple(numbers) for numbers in buckets_of),
    )


def fields_of(
    layers: Sequence[LayerSpec], compressors: Sequence[Compressor], seed: int, ranks: int
) -> list[dict[str, tuple[int, Begin]]]:
    """Return each layer's compressor state except residuals; shared state is with the first layer that has it."""
    found = [c.fields(layer, seed) for c, layer in zip(compressors, layers, strict=True)]
    placed: set[str] = set()
    for compressor, fields in zip(compressors, found, strict=True):
        shared = compressor.shared_fields(seed, ranks)
        fields.update((name, kept) for name, kept in shared.items() if name not in placed)
        placed.update(shared)
    return found


def compressors_of(layers: Sequence[LayerSpec], plan: Plan) -> list[Compressor]:
    """Return each layer's compressor; ConfigError for other layers, an unknown one or an unsuitable dtype or level."""
    plan.check_covers(layers)
    compressors = [assigned(plan.by_layer[layer.name]) for layer in layers]
    for layer, compressor in zip(layers, compressors, strict=True):
        if layer.dtype == "float64" and not isinstance(compressor, Identity):
            raise ConfigError(f"layer {layer.name!r} is float64, which only travels uncompressed")
    return compressors


def _bucket(
    number: int,
    pieces: Sequence[Piece],
    layers: Sequence[LayerSpec],
    compressors: Sequence[Compressor],
    device: Device,
) -> Bucket:
    if len(pieces) > 0xFFFF:
        raise ConfigError(
            f"{len(pieces)} layers in one bucket; lower slice_elements (at most 65535 are possible)"
        )
    header_index = {layer: place for place, layer in enumerate(dict.fromkeys(p.layer for p in pieces))}
    groups = [
        group_of(members, layers, compressors, device) for members in by_family(pieces, layers, compressors)
    ]
    return Bucket(
        number,
        np.array(list(header_index), dtype=np.int64),
        tuple(groups),
        tuple(
            np.array([header_index[layer] for layer in group.layers.tolist()], dtype=np.int64)
            for group in groups
        ),
    )


class Ordering:
    """Keeps the layers' order, by number.

    ``order`` has all layers. The layers in ``cold``, which no rank used for some steps, travel last. Those in
    ``sparse`` have sparse gradients and go another way. ``streak`` counts, by layer, steps present (> 0) or absent
    (< 0) in a row.
    """

    def __init__(self, layers: int, cold_after_steps: int) -> None:
        self._limit = cold_after_steps
        self.order: list[int] = list(range(layers))
        self.cold: frozenset[int] = frozenset()
        self.sparse: frozenset[int] = frozenset()
        self.streak = np.zeros(layers, dtype=np.int64)

    @property
    def travelling(self) -> tuple[int, ...]:
        """Return the layers that travel, in order."""
        return tuple(layer for layer in self.order if layer not in self.sparse)

    def restore(
        self, order: Sequence[int], cold: frozenset[int], sparse: frozenset[int], streak: Sequence[int] | None
    ) -> None:
        """Go on from a saved state; without saved streaks they begin anew."""
        self.order, self.cold, self.sparse = list(order), cold, sparse
        self.streak[:] = 0 if streak is None else streak

    def agree(self, transport: Transport, arrived: Sequence[int]) -> Generator[Waiting, None, bool]:
        """Adopt rank 0's order of arrival, with all other layers at the end; return whether the order changes."""
        order = np.zeros(len(self.order), dtype="<i4")
        if transport.rank == 0:
            order[:] = [*arrived, *sorted(set(self.order) - set(arrived))]
        counts = [order.nbytes * (rank == 0) for rank in range(transport.size)]
        yield from collective(AllGather(order.view(np.uint8), counts), transport)
        if not np.array_equal(np.sort(order), np.arange(len(order))):
            raise WireFormatError("rank 0 sent an order that is not a permutation of the layers")
        before, self.order = self.order, order.tolist()
        return self.order != before

    def seen(self, present: Mask, sparse: Mask) -> bool:
        """Record which layers were present in a step, or sparse; return whether that changes the layout.

        A layer that was absent everywhere for some steps moves to the end, so that no other layer waits for it; it
        moves back after the same number of steps in which it was present.
        """
        streak, limit, before = self.streak, self._limit, (self.cold, self.sparse)
        streak[:] = np.where(present, np.maximum(streak, 0) + 1, np.minimum(streak, 0) - 1)
        cold = np.flatnonzero(streak <= -limit).tolist()
        if self.cold:
            cold += [i for i in self.cold if streak[i] < limit]
        self.cold = frozenset(cold)
        self.sparse |= frozenset(np.flatnonzero(sparse).tolist())
        return (self.cold, self.sparse) != before
