"""Plans are compiled for one rank and rehearsed; compiled plans are cached, since a run may return to a plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from gradcomp.control.candidates import sent_bytes
from gradcomp.core.config import Config
from gradcomp.core.errors import ConfigError
from gradcomp.core.layers import LayerSpec
from gradcomp.core.plan import Fingerprint, Plan
from gradcomp.core.scheme import AUTO, parse
from gradcomp.core.state import Begin, Range, Residuals
from gradcomp.core.topology import Topology
from gradcomp.core.trace import Statistics, Trace
from gradcomp.exchange.arrivals import Arrivals
from gradcomp.exchange.bucket import BucketProgram
from gradcomp.exchange.layout import Layout, build_layout, compressors_of, fields_of
from gradcomp.exchange.memory import Addresses, StepMemory
from gradcomp.exchange.settings import Settings
from gradcomp.kernels.codec import Draw, Group, Table
from gradcomp.kernels.cuda.mirrors import mirror, pinned
from gradcomp.kernels.devices import Device
from gradcomp.kernels.step import StepContext
from gradcomp.reduce import Part, Reduction, make
from gradcomp.reduce.base import Memory
from gradcomp.reduce.costs import cheapest
from gradcomp.reduce.header import PRESENT, BucketFlags, HeaderId
from gradcomp.transport.base import Transport, host_allocator

#: The most compiled plans that are cached, and for how many steps after their last use, because they hold buffers.
_MOST, _STEPS = 8, 64
#: In a rehearsal all layers have the same address, of a block of _SOME_BYTES bytes, in the columns _ADDRESSES.
_SOME_BYTES = 256
_ADDRESSES = ("gradient", "residual", "next_residual", "output")


@dataclass(eq=False)
class CompiledPlan:
    """Holds a plan's buckets, their programs and the values derived from them; equal plans give equal results.

    ``fingerprint`` covers the plan except its version. ``order`` lists the layers that are exchanged, as bytes. Three
    fields are by layer: ``sizes`` has the sizes of the residuals, ``fields`` the compressors' state, and ``momenta``
    the factors of momentum before compression (NaN if the optimizer's factor is used). ``ranges`` are the ranges of
    the server-side errors. ``travels`` pairs layers with the buckets that contain them; ``position`` is each layer's
    last bucket. ``predicted`` has by layer the bytes that one rank sends in a step, by formula; ``sent`` has by layer
    the bytes of all buckets that contain the layer. ``fakes``: means are not those of the gradients.
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
    fakes: bool
    #: The last step in which the plan was in use.
    last_use: int = 0


class CompiledPlans:
    """Caches the last few compiled plans; a key contains all inputs of the compilation."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, CompiledPlan] = {}  # in the order of their last use

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def get(self, key: Hashable, step: int, make: Callable[[], CompiledPlan]) -> CompiledPlan:
        """Return the compiled plan of ``key``, which applies from ``step`` on; make it if it is not cached."""
        found = self._kept.pop(key, None) or make()
        found.last_use = step
        while len(self._kept) >= _MOST:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = found
        return found

    def age(self, step: int) -> None:
        """Drop compiled plans that have not been in use for long; the latest one is in use."""
        kept = self._kept
        next(reversed(kept.values())).last_use = step
        # This runs in every step, and a key is as long as the model, so keys are hashed only if a plan is dropped.
        if next(iter(kept.values())).last_use < step - _STEPS:
            self._kept = {key: plan for key, plan in kept.items() if plan.last_use >= step - _STEPS}


def by_layer(
    travels: Sequence[npt.NDArray[np.int64]], values: npt.NDArray[np.float64], layers: int
) -> npt.NDArray[np.float64]:
    """Sum ``values``, one for every bucket, over the buckets of each layer."""
    of, buckets = travels
    added: npt.NDArray[np.float64] = np.bincount(of, values[buckets], layers).astype(np.float64)
    return added


class PlanCompiler:
    """Compiles plans for one rank with its device, topology and reduction."""

    def __init__(
        self, layers: Sequence[LayerSpec], config: Config, transport: Transport, settings: Settings
    ) -> None:
        self._layers, self._config, self._device = layers, config, settings.device
        #: The most elements of an exchange bucket.
        self.slice_elements = config.slice_elements
        topology = settings.topology or Topology.one_host(transport.size)
        self._topology = topology = replace(topology, reduces_inside=transport.reduces_inside)
        assert topology.world == transport.size, f"{topology} is not of {transport.size} ranks"
        self._network, self._rank = settings.network, transport.rank
        self._memory = memory_on(settings.device, transport)
        self._scheme = parse(config.reduction)
        if self._scheme.name == AUTO and settings.network is None and len(topology.leaders) > 1:
            raise ConfigError("reduction=auto needs measured constants of the network between the hosts")

    def compile(self, plan: Plan, order: Sequence[int], cold: frozenset[int]) -> CompiledPlan:
        """Compile ``plan`` for the layers in ``order``, which are exchanged in this order, those in ``cold`` last."""
        layers = self._layers
        layout = build_layout(layers, plan, order, cold, self.slice_elements, self._device)
        world = self._topology.world
        context = StepContext(Draw(self._config.seed, 0, self._rank), world)
        reduction = partial(self._reduction, len(layout.buckets))
        programs = [
            BucketProgram(bucket, self._rank, world, context, reduction, self._memory.messages)
            for bucket in layout.buckets
        ]
        ranges: list[Range] = []
        for program in programs:
            if program.reduction is not None:
                first = len(ranges)
                ranges += program.reduction.ranges
                program.reduction.assign(range(first, len(ranges)))
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
        return CompiledPlan(
            layout,
            programs,
            Fingerprint(plan.assignments, layers),
            np.array(order, dtype="<i4").tobytes(),
            layout.residual_sizes(layers),
            fields_of(layers, compressors, self._config.seed, world),
            ranges,
            2 * sum(layers[i].nbytes for i in order) * (world - 1) // world,
            travels,
            position,
            predicted,
            by_layer(travels, sent, len(layers)),
            np.array([np.nan if isinstance(m := c.traits.momentum, str) else m for c in compressors]),
            any(c.traits.fakes for c in compressors),
        )

    def _reduction(self, buckets: int, parts: Sequence[Part], layers: int, bucket: int) -> Reduction:
        """Return the configured reduction for one of the step's buckets, or the cheapest with ``reduction=auto``."""
        scheme = self._scheme
        if scheme.name == AUTO:
            scheme = cheapest(parts, layers, self._topology, self._network, buckets)
        return make(scheme, parts, layers, self._rank, self._topology, bucket, self._memory)


def memory_on(device: Device, transport: Transport) -> Memory:
    """Return two allocators: of messages, which the transport sends, and of buffers that stay on this rank.

    If the gradients are on a GPU and the transport sends from any host memory, messages are in pinned memory, from and
    to which the device itself copies, and the other buffers are on the device.
    """
    messages = local = transport.allocator(device)
    if device.driver is not None and messages is host_allocator:
        messages, local = partial(pinned, device.driver), partial(mirror, device.driver)
    return Memory(messages, local)


class _Anywhere(StepMemory):
    """Represents gradients and means that do not exist yet: all slices of all layers have the same address."""

    def place(self, bases: Addresses, table: Table, offsets: Addresses | None = None) -> Addresses:
        return bases

    def _places(self, group: Group, address: int) -> Addresses:
        return np.full(len(self._arrivals.gradients), address, dtype=np.uint64)

    def _floats_at(self, bases: Addresses, table: Table) -> Addresses:
        return bases


def rehearse(
    programs: Sequence[BucketProgram],
    device: Device,
    layers: Sequence[LayerSpec],
    context: StepContext,
    residuals: Residuals,
) -> None:
    """Prepare the kernel calls of a step without running a kernel or sending a message. On the host, do nothing.

    A program is rehearsed until it depends on a result of a kernel. The calls after that point are prepared in the
    first step.
    """
    if device.driver is None or not programs:
        return
    context = replace(context, momenta=np.zeros(len(layers)))
    memory = device.driver.allocate(_SOME_BYTES)
    arrivals = Arrivals(layers, device)
    arrivals.gradients[:] = arrivals.outputs[:] = memory.address
    with device.kernels.rehearsing():
        for program in programs:
            bucket = program.bucket
            flags = BucketFlags(np.full(len(bucket.layers) + 1, PRESENT, dtype=np.uint8))
            binding = _Anywhere(
                bucket, context, flags, arrivals, residuals, lambda layer: 0, Trace(1), Statistics()
            )
            program.rehearse(HeaderId(0, 0, bucket.number, False), context, binding, flags)
            for group in bucket.groups:  # these addresses are freed now
                for table in (group.table, group.inputs):
                    for column in _ADDRESSES:
                        table[column] = 0
