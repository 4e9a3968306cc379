"""Requests between steps: reduce-scatters and all-gathers, each prepared once and run many times."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded, Compressor
from gradcomp.compress.groups import Piece, by_family, group_of
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.state import DoubleBuffer
from gradcomp.core.topology import Topology
from gradcomp.exchange.preemption import Preemption
from gradcomp.kernels.codec import Draw, Group, Sizes, Table
from gradcomp.kernels.cuda.mirrors import Spans
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES, byte_offsets
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.base import (
    HOST_MEMORY,
    Addresses,
    Framed,
    Memory,
    Part,
    Rounds,
    framed,
    only,
    unless_declined,
)
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.halves import AllGather, ReduceScatter
from gradcomp.reduce.header import (
    APPLIED,
    CHANGED,
    DECLINED,
    DIFFERENT,
    DISCARDED,
    KEPT,
    NONFINITE,
    PRESENT,
    WAITING,
    BucketFlags,
    HeaderId,
)
from gradcomp.reduce.host_halves import HostAllGather, HostReduceScatter
from gradcomp.reduce.sums import carried
from gradcomp.reduce.varying import fixed
from gradcomp.transport.base import Allocator, Bytes

Array = npt.NDArray[Any]
#: An array for each layer; None where a rank has nothing for a layer of a reduce-scatter.
Inputs = Sequence[Array | None]
Shape = tuple[int, ...]

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
#: An outcome of requests only, which need no WAITING bit: the optimizer stepped several times since the last run.
REPEATED = WAITING
_KINDS: dict[str, type[ReduceScatter | AllGather]] = {REDUCE_SCATTER: ReduceScatter, ALL_GATHER: AllGather}
_OF_HOSTS: dict[str, type[HostReduceScatter | HostAllGather]] = {
    REDUCE_SCATTER: HostReduceScatter,
    ALL_GATHER: HostAllGather,
}


@dataclass(frozen=True)
class Blocks:
    """Describes one array that has all layers, in a block for each rank.

    Rank j's shard of layer i begins at ``offsets[i]`` of block j. ``size`` is the number of elements of a block.
    Elements that no shard covers are neither read nor written. An array of shards is one block.
    """

    size: int
    offsets: tuple[int, ...]

    def check(self, layers: Sequence[LayerSpec], shards: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError unless the shards fit into a block, one after the other, at their offsets."""
        if len(self.offsets) != len(layers) or len({layer.dtype for layer in layers}) != 1:
            raise ConfigError("layers in blocks must have one common dtype and one offset each")
        largest = [int(np.diff(borders).max()) for borders in shards]
        ends = [offset + size for offset, size in zip(self.offsets, largest, strict=True)]
        nexts = [*self.offsets[1:], self.size]
        if self.offsets[0] < 0 or any(end > after for end, after in zip(ends, nexts, strict=True)):
            raise ConfigError(
                f"shards of {largest} elements do not fit at offsets {list(self.offsets)} of a block of {self.size}"
            )


@dataclass(frozen=True, eq=False)
class Arrays:
    """Implements :class:`gradcomp.reduce.Binding` for one run.

    ``inputs`` and ``output`` have the addresses where element 0 of each layer would be, and of each owner where
    layers are in blocks. ``borders`` are those of the shards, by layer. ``begins`` are the elements of the layers
    with which their residuals begin.
    """

    inputs: Addresses
    output: Addresses
    residuals: DoubleBuffer
    borders: Sizes
    begins: Sizes

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        table["gradient"] = self._addresses(self.inputs, table, layers, offsets)
        if group.feedback:
            starts = table["start"] - self.begins[layers]
            table["residual"], table["next_residual"] = self.residuals.addresses(layers, starts)

    def owned(self, table: Table, rows: Sizes) -> None:
        raise AssertionError("means are not coded again: requests keep no server-side error")

    def outputs(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        table["output"] = self._addresses(self.output, table, layers, offsets)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def _addresses(
        self, bases: Addresses, table: Table, layers: Sizes, offsets: Addresses | None
    ) -> Addresses:
        if bases.ndim == 1:
            at = bases[layers]
        else:  # as many inner borders lie before a segment as there are ranks before its owner
            owners = (self.borders[layers, 1:-1] <= table["start"][:, None]).sum(axis=1)
            at = bases[layers, owners]
        found: Addresses = at + (byte_offsets(table) if offsets is None else offsets)
        return found if np.count_nonzero(at) == len(at) else np.where(at == 0, at, found)


class SharedMemory:
    """Allocates working memory for requests that never run at the same time: all of them share it.

    The codes of a request are gone once another one has run. A request keeps the memory that it was made with, so it
    is best to make the largest one first.
    """

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._buffers: list[Bytes] = []

    def memory(self) -> Memory:
        """Return the memory of one more request."""
        taken = count()

        def make(nbytes: int, headers: Spans) -> Bytes:
            place = next(taken)
            if place == len(self._buffers) or len(self._buffers[place]) < nbytes:
                self._buffers[place : place + 1] = [self._allocate(nbytes, headers)]
            return self._buffers[place][:nbytes]

        return Memory(make, make)


def bases_of_layers(arrays: Sequence[Array | None], begins: Sizes) -> Addresses:
    """Return, by layer, where its element 0 would be, if an array begins with element ``begins`` of its layer.

    The address wraps if it would be below 0, and adding an offset wraps it back. It is 0 for a layer without an array.
    """
    items = np.array([0 if array is None else array.itemsize for array in arrays], dtype=np.int64)
    addresses = np.array([0 if array is None else array.ctypes.data for array in arrays], dtype=np.uint64)
    return addresses - (begins * items).astype(np.uint64)


def bases_of_blocks(array: Array, blocks: Blocks, borders: Sizes, own: int | None) -> Addresses:
    """Return, by layer and owner, where its element 0 would be; with ``own`` the array is only that rank's block."""
    owners = np.arange(borders.shape[1] - 1)
    elements = np.array(blocks.offsets)[:, None] + blocks.size * (owners if own is None else owners - own)
    found: Addresses = np.uint64(array.ctypes.data) + ((elements - borders[:, :-1]) * array.itemsize).astype(
        np.uint64
    )
    return found


@dataclass(frozen=True)
class Request:
    """Describes a reduce-scatter or an all-gather by all that the ranks must agree on.

    In a ``"reduce_scatter"`` rank j gets its shard of the mean over ranks of every layer; in an ``"all_gather"``
    all ranks get every layer, of which rank j has its shard. ``compressors[i]`` codes layer i. ``borders[i]`` are N
    + 1 elements of layer i: rank j's shard begins at element j of them and ends before the next one. By default
    shards are as equal as can be, see :func:`even_borders`. ``average=False`` gives the sum instead of the mean.
    ``name`` tells requests with equal layers apart. With ``blocks`` the layers share one array, of which each rank
    has a block. With ``hosts``, the number of each rank's host, messages travel in two levels, see
    :mod:`gradcomp.reduce.host_halves`; several hosts, of which one or more have several ranks, are needed.
    """

    kind: str
    layers: tuple[LayerSpec, ...]
    compressors: tuple[Compressor, ...]
    borders: tuple[tuple[int, ...], ...] | None = None
    average: bool = True
    name: str = ""
    blocks: Blocks | None = None
    hosts: tuple[int, ...] | None = None

    @staticmethod
    def of(kind: str, layers: Sequence[LayerSpec], compressor: Compressor, **options: Any) -> Request:
        """Return a request in which one compressor codes all layers."""
        return Request(kind, tuple(layers), (compressor,) * len(layers), **options)

    def shards(self, world: int) -> tuple[tuple[int, ...], ...]:
        """Return the borders of each layer's shards among ``world`` ranks."""
        return self.borders or tuple(even_borders(layer.size, world) for layer in self.layers)

    def describe(self, world: int) -> str:
        """Return a line for the request and one for each layer, which ranks compare."""
        by = [compressor.to_string() for compressor in self.compressors] + ["none"] * len(self.layers)
        at = [*self.shards(world), *[()] * len(self.layers)]
        lines = [
            f"{layer.name!r} of {layer.dtype} {list(layer.shape)} by {text}, shards {list(borders)}"
            for layer, text, borders in zip(self.layers, by, at, strict=False)
        ]
        blocks = [] if self.blocks is None else [f"in {self.blocks}"]
        hosts = [] if self.hosts is None else [f"in two levels, by hosts {list(self.hosts)}"]
        return "\n".join([f"{self.kind} {self.name!r}, average {self.average}", *lines, *blocks, *hosts])

    def check(self, world: int) -> None:
        """Raise ConfigError unless ``world`` ranks can run the request."""
        if self.kind not in _KINDS:
            raise ConfigError(f"a request must be one of {', '.join(_KINDS)}, got {self.kind!r}")
        if not self.layers or len(self.compressors) != len(self.layers):
            raise ConfigError(
                f"{len(self.layers)} layers and {len(self.compressors)} compressors: a request needs one for each layer"
            )
        if len(self.layers) > 0xFFFF:
            raise ConfigError(f"{len(self.layers)} layers in one request; at most 65535 are possible")
        check_unique(self.layers)
        borders = self.shards(world)
        for layer, at in zip(self.layers, borders, strict=False):
            if len(at) != world + 1 or at[0] != 0 or at[-1] != layer.size or list(at) != sorted(at):
                raise ConfigError(
                    f"layer {layer.name!r}: borders must be {world + 1} ascending elements from 0 to {layer.size}, "
                    f"got {list(at)}"
                )
        if len(borders) != len(self.layers):
            raise ConfigError(
                f"{len(self.layers)} layers and borders of {len(borders)}: a request needs those of each layer"
            )
        if self.blocks is not None:
            self.blocks.check(self.layers, borders)
        if self.hosts is not None and (len(self.hosts) != world or not Topology(self.hosts).has_two_levels):
            raise ConfigError(
                f"two levels need several hosts of {world} ranks, and one with several; got {list(self.hosts)}"
            )


def even_borders(size: int, world: int) -> tuple[int, ...]:
    """Return the borders of shards that differ by at most one element, the larger ones first."""
    return tuple(j * (size // world) + min(j, size % world) for j in range(world + 1))


class PreparedRequest:
    """Holds what one rank needs to run a request: tables, messages and residuals, made once for all runs.

    :class:`ReduceScatter` and :class:`AllGather` describe rounds, bytes and arithmetic. ``bytes_sent`` is what one
    run sends, without the comparison of calls. ``draw_rank`` is the rank whose draws a reduce-scatter has, by
    default ``rank``. ``problem`` says why the request cannot be run; the runs raise it on all ranks.

    State: for compressors with feedback a residual, float32 and double-buffered: of the layers for a
    reduce-scatter, of the rank's shards for an all-gather. A run writes the next residual; :meth:`commit` accepts
    it, :meth:`discard` forgets it, and so does the next run.

    Errors: if the request keeps state, ranks that did not do the same with a run get StateError in the next one, as
    the verdict of its :class:`RequestGroup`.
    """

    def __init__(
        self,
        request: Request,
        rank: int,
        world: int,
        *,
        seed: int = 0,
        checksums: bool = False,
        memory: Memory = HOST_MEMORY,
        draw_rank: int | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.request = request
        self._preemption = preemption or Preemption()
        self.problem: str | None = None
        #: The number of runs, the same on all ranks, and the last one's outcome, which the next one's headers carry.
        self.number = 0
        self.outcome = 0
        self.result: RequestResult | None = None
        self.bytes_sent = 0
        self.sent_to: Sequence[int] = ()
        #: The number of times that the messages of a run have been exchanged.
        self.exchanged = 0
        #: The flags of the last run, as long as all of its codes are kept.
        self.codes: BucketFlags | None = None
        #: True if some layer has a residual; equal on all ranks.
        self.keeps_state = False
        self._seed, self._checksums, self._rank, self._world = seed, checksums, rank, world
        self._draw_rank = rank if draw_rank is None else draw_rank
        try:
            request.check(world)
            self._parts = fixed(_parts(request))
            if request.hosts is not None and request.kind == REDUCE_SCATTER:
                self._parts = carried(self._parts)
        except ConfigError as error:
            self.problem = str(error)
            self.text = f"a request with a problem: {error}"
            return
        self.text = request.describe(world)
        self._check = zlib.crc32(self.text.encode())
        borders = np.array(request.shards(world), dtype=np.int64)
        chunks = Chunks(
            self._parts, len(request.layers), world, [borders[part.group.layers] for part in self._parts]
        )
        if max(chunks.payload_bytes) > 0xFFFFFFFF:  # the length field of a header has 32 bits
            self.problem = f"payloads of {max(chunks.payload_bytes)} bytes; divide the request into several"
        self._chunks, self._borders = chunks, borders
        shards = borders[:, rank + 1] - borders[:, rank]
        sharded: list[Shape] = [(size,) for size in shards.tolist()]
        whole: list[Shape] = [layer.shape for layer in request.layers]
        self._names = [f"layer {layer.name!r}" for layer in request.layers]
        self._dtypes = [DTYPES[DTYPE_NUMBERS[layer.dtype]] for layer in request.layers]
        if request.blocks is not None:
            sharded, whole = [(request.blocks.size,)], [(world * request.blocks.size,)]
            self._names, self._dtypes = [request.name], self._dtypes[:1]
        scatters = request.kind == REDUCE_SCATTER
        sizes = borders[:, -1] if scatters else shards
        #: The shapes of a run's inputs and outputs: whole layers and shards for a reduce-scatter, else the reverse.
        self.input_shapes, self.output_shapes = (whole, sharded) if scatters else (sharded, whole)
        self._may_lack = scatters and request.blocks is None
        self._program = self._make(memory)
        self.bytes_sent = self._program.bytes_sent
        #: The bytes that one run sends to each rank.
        self.sent_to = self._program.sent_to
        held = np.zeros(len(request.layers), dtype=np.bool_)
        for part in self._parts:
            held[part.group.layers] = part.group.feedback
        self.keeps_state = bool(held.any())
        #: A residual for each layer, empty without feedback.
        self.residuals = DoubleBuffer((sizes * held).tolist())

    def _make(self, memory: Memory) -> ReduceScatter | AllGather | HostReduceScatter:
        """Return the rounds of the request, with tables and messages of their own."""
        kind, hosts = self.request.kind, self.request.hosts
        if hosts is not None:
            return _OF_HOSTS[kind](self._chunks, self._rank, Topology(hosts), memory)
        return _KINDS[kind](self._chunks, self._rank, self._world, memory=memory)

    def objection(self, inputs: Inputs, outputs: Sequence[Array] | None) -> str | None:
        """Return why the request cannot be run with these arrays, or None if it can."""
        if self.problem is not None:
            return self.problem
        given = ("input", inputs, self.input_shapes), ("output", outputs, self.output_shapes)
        for what, arrays, shapes in given:
            if arrays is None:
                continue
            if len(arrays) != len(shapes):
                return f"{len(arrays)} {what}s were given where {len(shapes)} are needed"
            for name, dtype, array, shape in zip(self._names, self._dtypes, arrays, shapes, strict=True):
                size = np.prod(shape, dtype=np.int64)
                if array is None and arrays is inputs and self._may_lack:
                    continue
                if array is None:
                    return (
                        f"{name}: only layers of a reduce-scatter, and not those in blocks, may lack an input"
                    )
                if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
                    return (
                        f"{name}: the {what} must be a contiguous array of {size} x {dtype}, "
                        f"got {array.size} x {array.dtype}"
                    )
        return None

    def run(
        self,
        inputs: Inputs,
        outputs: Sequence[Array] | None,
        draw: int | None = None,
        changed: bool | None = None,
        outcome: int = 0,
        fingerprint: int = 0,
    ) -> Generator[Framed, None, None]:
        """Exchange once; then ``result`` is set. Inputs must stay untouched until then.

        An input of a reduce-scatter may be None: this rank has nothing for the layer, which counts as zeros.
        ``draw`` is the number that random numbers depend on, by default that of the run. Shards in blocks may be
        gathered in place: the input is then this rank's block of the output. ``changed`` is None after a
        comparison. Without one it says whether this rank's inputs are others than in the last run; if a rank
        declines, there is no result, nothing is written to the outputs, and the run can be repeated. ``outcome`` is
        that of the exchange before, which the other ranks are told unless the request keeps state and tells its
        own. ``fingerprint`` is compared by the ranks, unless it is 0.
        """
        if self.result is not None:
            self.discard()
        self.codes = None  # the last codes are overwritten
        if outputs is None:
            outputs = [*map(np.empty, self.output_shapes, self._dtypes)]
        told = self.outcome if self.keeps_state else outcome
        flags = self._flags_of(told | CHANGED * bool(changed) | self._preemption.bits, fingerprint)
        flags.states[[i for i, array in enumerate(inputs) if array is None]] = 0
        number = self.number if draw is None else draw
        binding = self._binding(inputs, outputs)
        program = self._program.run(self._context(number), binding, flags)
        if changed is not None:
            program = unless_declined(program, flags, self._program.rounds)
        found = yield from self._framed(program, flags, binding, ahead=changed is not None)
        if flags.declined:
            return
        if self.request.kind == ALL_GATHER:  # all ranks have decoded the same codes
            for part, mine in zip(self._parts, found, strict=True):
                flags.states[part.header_index[mine != 0]] |= NONFINITE
        self._preemption.hear(flags.notices)
        self.number += 1
        self.codes = flags
        outcomes = int(flags.states[-1]) & (APPLIED | DISCARDED | KEPT | REPEATED)
        different = bool(flags.notices & DIFFERENT)
        self.result = RequestResult(
            list(outputs), flags.nonfinite, outcomes, flags.changed, different, flags.checksum, flags.present
        )

    def decline(self) -> Generator[Framed, None, None]:
        """Take part in a run that others may have begun without a comparison, with messages of its sizes, of zeros.

        They tell the others not to use the run. They have memory of their own, so that the codes of the last run
        stay.
        """
        program = only(self._make(HOST_MEMORY).moves)
        nowhere = np.zeros(0, dtype=np.uint64)
        binding = Arrays(nowhere, nowhere, self.residuals, self._borders, self._borders[:, 0])
        yield from self._framed(program, self._flags_of(DECLINED), binding, ahead=True)

    def _flags_of(self, of_rank: int, fingerprint: int = 0) -> BucketFlags:
        states = np.full(len(self.request.layers) + 1, PRESENT, dtype=np.uint8)
        states[-1] = of_rank
        return BucketFlags(states, self._rank, fingerprint)

    def _framed(
        self, program: Rounds, flags: BucketFlags, binding: Arrays, *, ahead: bool
    ) -> Generator[Framed, None, list[Bytes]]:
        """Frame the program's messages; ``ahead`` says that the ranks have not compared the run."""
        # A flag that no rank can have set means that a message is damaged.
        self._chunks.header.allow(
            (DECLINED | CHANGED) * ahead | DIFFERENT * (flags.fingerprint != 0 or flags.declined)
        )
        header_id = HeaderId(self._check, self.number, 0, self._checksums)
        found = yield from framed(program, header_id, flags)
        self.exchanged += 1
        return found

    def decode_again(self, outputs: Sequence[Array]) -> None:
        """Decode the codes of the last all-gather to ``outputs`` once more, bit for bit; nothing is sent."""
        if not isinstance(self._program, AllGather) or self.codes is None:
            raise StateError(
                f"{self.request.kind} {self.request.name!r}: there is no complete all-gather to decode again"
            )
        binding = self._binding(outputs, outputs)
        for _ in self._program.gathered.decode(self._context(0), binding, self.codes):
            raise AssertionError("kernels on the host's memory are done when they return")

    def release(self) -> None:
        """Free the working memory, with the codes of the last run. The request cannot be run again, but declined."""
        self.codes, self.result = None, None
        if self.problem is None:
            self.problem = "the request was replaced"
            del self._program

    def _context(self, number: int) -> StepContext:
        draw = Draw(self._seed, number & 0xFFFFFFFF, self._draw_rank)
        return StepContext(draw, self._world, average=self.request.average, number=self.number)

    def commit(self) -> bool:
        """Accept the last run and its next residuals; return False, on all ranks, if a value was not finite."""
        if self.result is None:
            raise StateError(f"{self.request.kind}: there is no run to commit")
        result, self.result, self.outcome = self.result, None, APPLIED
        if result.finite:
            self.residuals.commit(np.ones(len(self.request.layers), dtype=np.bool_))
        return result.finite

    def discard(self) -> None:
        """Discard the last run; residuals do not change."""
        self.result, self.outcome = None, DISCARDED

    def _binding(self, inputs: Inputs, outputs: Sequence[Array]) -> Arrays:
        borders, blocks, scatters = self._borders, self.request.blocks, self.request.kind == REDUCE_SCATTER
        # The elements of layers with which arrays begin: those of whole layers, and those of shards.
        whole, sharded = borders[:, 0], borders[:, self._rank]

        def bases(arrays: Inputs, are_whole: bool) -> Addresses:
            if blocks is None or arrays[0] is None:
                return bases_of_layers(arrays, whole if are_whole else sharded)
            return bases_of_blocks(arrays[0], blocks, borders, None if are_whole else self._rank)

        begins = whole if scatters else sharded
        return Arrays(bases(inputs, scatters), bases(outputs, not scatters), self.residuals, borders, begins)


@dataclass(frozen=True, eq=False)
class RequestResult:
    """Holds the result of a run.

    ``nonfinite`` marks layers in which a rank gave a NaN or an infinity; it is the same on all ranks. ``changed``
    says, after a run without a comparison, that some rank had new inputs. ``different`` says that ranks had
    different fingerprints. ``checksum`` covers the codes of all ranks that an all-gather has brought. ``present`` marks
    layers for which some rank had an input.
    """

    arrays: list[Array]
    nonfinite: npt.NDArray[np.bool_]
    outcomes: int
    changed: bool
    different: bool = False
    checksum: int = 0
    present: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))

    @property
    def finite(self) -> bool:
        """Return whether the run may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Return whether the run before, or the last step, had different outcomes on the ranks."""
        return self.outcomes & (self.outcomes - 1) != 0


def _parts(request: Request) -> list[Part]:
    """Return a part for the layers of each compressor and dtype."""
    for layer, compressor in zip(request.layers, request.compressors, strict=True):
        check_suits(request.kind, layer, compressor, by_hosts=request.hosts is not None)
    pieces = [Piece(i, 0, layer.size) for i, layer in enumerate(request.layers)]
    parts = []
    for members in by_family(pieces, request.layers, request.compressors):
        group = group_of(members, request.layers, request.compressors)
        bare = group.compressor.bare()
        assert isinstance(bare, Coded), "the others are refused"
        parts.append(Part(bare.codec_for(group.table), group, group.layers))
    return parts


def check_suits(kind: str, layer: LayerSpec, compressor: Compressor, *, by_hosts: bool = False) -> None:
    """Raise ConfigError unless the compressor codes values one by one, with no state but a residual.

    ``by_hosts`` says that sums over the ranks of a host are coded if gradients are reduced.
    """
    name, bare = compressor.to_string(), compressor.bare()
    if not isinstance(bare, Coded):
        raise ConfigError(
            f"{kind}: {name} has no codes that a rank could decode alone; choose a quantiser, a cast or none"
        )
    if compressor.changes or compressor.traits.preconditions or compressor.fields(layer, 0):
        raise ConfigError(
            f"{kind}: {name} has momentum, clipping, a schedule or another state, which only steps keep"
        )
    if compressor.traits.follows_rate:
        raise ConfigError(f"{kind}: {name} follows the learning rate, which only steps have")
    if by_hosts and kind == REDUCE_SCATTER and (compressor.traits.keeps_residual or not bare.traits.accounts):
        why = (
            "keeps residuals of single ranks"
            if compressor.traits.keeps_residual
            else "counts votes of single ranks"
        )
        raise ConfigError(f"{kind}: {name} {why}, and in two levels sums over the ranks of a host are coded")
    if layer.dtype == "float64" and (kind == REDUCE_SCATTER or not bare.traits.exact):
        raise ConfigError(
            f"layer {layer.name!r} is float64, which can only be all-gathered, and only uncompressed"
        )
