"""What a plan comes to on one rank, kept while plans go back and forth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress import Compressor
from gradcomp.control.candidates import sent_bytes
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Fingerprint, Plan
from gradcomp.core.role import Role
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.state import Begin, Range
from gradcomp.core.topology import Topology
from gradcomp.kernels.codec import Draw
from gradcomp.kernels.cuda.mirrors import mirror
from gradcomp.kernels.cuda.pinned import pinned
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext
from gradcomp.pipeline.bucket import BucketProgram
from gradcomp.pipeline.layout import Layout, build_layout, compressors_of, fields_of
from gradcomp.reduce import Part, Reduction, make
from gradcomp.reduce.base import Memory
from gradcomp.reduce.costs import cheapest
from gradcomp.reduce.model import Network
from gradcomp.transport.base import Transport, host_allocator

#: Arrangements that are kept, and for how many steps after they were last in force: they hold buffers.
_MOST, _STEPS = 8, 64


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Buckets, their programs, and what follows from them; the same whenever the same plan is in force.

    ``fingerprint``: of the plan but for its version. ``order``: of the layers that travel. ``sizes``: of residuals.
    ``fields``: what compressors keep, by layer. ``ranges``: second residuals. ``travels``: pairs of layers and buckets;
    ``position``: by layer, the last bucket that it travels in. ``predicted``: by layer, bytes that one rank sends in a
    step, by formula; ``sent``: by layer, those of its buckets. ``momenta``: by layer, the factor of momentum before
    compression; NaN: the optimizer's.
    """

    layout: Layout
    programs: list[BucketProgram]
    fingerprint: Fingerprint
    order: bytes
    sizes: list[int]
    fields: Sequence[Mapping[str, tuple[int, Begin]]]
    ranges: list[Range]
    dense_bytes: int
    travels: tuple[npt.NDArray[np.int64], ...]
    position: npt.NDArray[np.int64]
    predicted: npt.NDArray[np.float64]
    sent: npt.NDArray[np.float64]
    momenta: npt.NDArray[np.float64]


class Arrangements:
    """The last few arrangements, by what they are made from."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Arrangement, int]] = {}  # with the last step, the latest last

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, step: int, make: Callable[[], Arrangement]) -> Arrangement:
        """The arrangement of this key, which comes into force with ``step``."""
        kept = self._kept.pop(key, None)
        found = make() if kept is None else kept[0]
        while len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found, step
        return found

    def age(self, step: int) -> None:
        """Let go of what has not been in force for long; the latest is in force."""
        if len(self._kept) > 1:
            latest, (found, _) = self._kept.popitem()
            self._kept = {key: one for key, one in self._kept.items() if one[1] >= step - _STEPS}
            self._kept[latest] = found, step


def by_layer(
    travels: Sequence[npt.NDArray[np.int64]], values: npt.NDArray[np.float64], layers: int
) -> npt.NDArray[np.float64]:
    """The sum of ``values``, one for every bucket, over the buckets of each layer."""
    of, buckets = travels
    added: npt.NDArray[np.float64] = np.bincount(of, values[buckets], layers).astype(np.float64)
    return added


class Arranger:
    """Makes the arrangements of one rank."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        config: Config,
        device: Device,
        memory: Memory,
        rank: int,
        topology: Topology,
        network: Network | None,
    ) -> None:
        self._layers, self._config, self._device, self._memory = layers, config, device, memory
        self._topology, self._network = topology, network
        self._scheme = parse(config.reduction)
        if self._scheme.name == AUTO and network is None and len(topology.leaders) > 1:
            raise ConfigError("reduction=auto needs measured constants of the network between the hosts")
        self.role = Role(rank, self._scheme.trainers(topology.world))

    def context(self, step: int, **known: Any) -> StepContext:
        """Of a step, as this rank takes part in it. ``known``: what else is known of it."""
        draw = Draw(self._config.seed, step & 0xFFFFFFFF, self.role.number)
        return StepContext(draw, len(self.role.trainers), self.role.first, **known)

    def arrange(self, plan: Plan, order: Sequence[int], cold: frozenset[int]) -> Arrangement:
        """Buckets and their programs for a plan, the layers that travel in order, and those of them that come last."""
        layers = self._layers
        layout = build_layout(layers, plan, order, cold, self._config.slice_elements, self._device)
        context = self.context(0)
        programs = [
            BucketProgram(bucket, self.role, context, self._reduction, self._memory.messages)
            for bucket in layout.buckets
        ]
        ranges: list[Range] = []
        for program in programs:
            if program.reduction is not None:
                first = len(ranges)
                ranges += program.reduction.ranges
                program.assign(range(first, len(ranges)))
        pairs = [(layer, b) for layer, numbers in enumerate(layout.buckets_of) for b in numbers]
        travels = tuple(np.array(pairs, dtype=np.int64).reshape(-1, 2).T)
        position = np.zeros(len(layers), dtype=np.int64)
        np.maximum.at(position, *travels)
        sent, predicted = np.zeros(len(layout.buckets)), np.zeros(len(layers))
        for bucket in layout.buckets:
            for group in bucket.groups:
                of_layers = sent_bytes(group, self._scheme, self._topology)
                sent[bucket.number] += of_layers.sum()
                np.add.at(predicted, group.layers, of_layers)
        compressors = compressors_of(layers, plan)
        world = self._topology.world
        return Arrangement(
            layout,
            programs,
            Fingerprint(plan.assignments, layers),
            np.array(order, dtype="<i4").tobytes(),
            layout.residual_sizes(layers),
            fields_of(layers, compressors, self._config.seed, len(self.role.trainers)),
            ranges,
            2 * sum(layers[i].nbytes for i in order) * (world - 1) // world,
            travels,
            position,
            predicted,
            by_layer(travels, sent, len(layers)),
            np.array([_momentum(compressor) for compressor in compressors]),
        )

    def _reduction(self, parts: Sequence[Part], layers: int, bucket: int) -> Reduction:
        """The configured reduction, or the cheapest, for one bucket."""
        scheme = self._scheme
        if scheme.name == AUTO:
            scheme = cheapest(parts, layers, self._topology, self._network)
        return make(scheme, parts, layers, self.role.rank, self._topology, bucket, self._memory)


def _momentum(compressor: Compressor) -> float:
    factor = compressor.traits.momentum
    return np.nan if isinstance(factor, str) else factor


def memory_on(device: Device, transport: Transport) -> Memory:
    """Where a pipeline's buffers are: what the transport sends from, and what stays beside the device's kernels.

    A transport that sends from any memory of the host is given such as the device copies to by itself.
    """
    messages = local = transport.allocator(device)
    if device.driver is not None and messages is host_allocator:
        messages, local = partial(pinned, device.driver), partial(mirror, device.driver)
    return Memory(messages, local)
