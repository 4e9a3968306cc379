"""Reduce-scatters and all-gathers of arrays between steps: what is asked for, and what one rank keeps for it."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradcomp.compress.base import Coded, Compressor
from gradcomp.compress.groups import Piece, by_family, group_of
from gradcomp.core.errors import ConfigError, StateError
from gradcomp.core.layers import LayerSpec, check_unique
from gradcomp.core.state import DoubleBuffer
from gradcomp.kernels.codec import Codec, Draw, Group, Sizes, Table
from gradcomp.kernels.segments import DTYPE_NUMBERS, DTYPES, byte_offsets
from gradcomp.kernels.step import StepContext
from gradcomp.reduce.all_gather import AllGather
from gradcomp.reduce.base import HOST_MEMORY, Addresses, Memory, Part
from gradcomp.reduce.chunks import Chunks
from gradcomp.reduce.framing import Framed, framed
from gradcomp.reduce.header import APPLIED, DISCARDED, NONFINITE, PRESENT, BucketFlags, HeaderId
from gradcomp.reduce.reduce_scatter import ReduceScatter
from gradcomp.reduce.varying import fixed

Array = npt.NDArray[Any]

REDUCE_SCATTER, ALL_GATHER = "reduce_scatter", "all_gather"
_KINDS: dict[str, type[ReduceScatter | AllGather]] = {REDUCE_SCATTER: ReduceScatter, ALL_GATHER: AllGather}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A reduce-scatter or an all-gather, in the terms on which all ranks must agree.

    ``kind``: ``"reduce_scatter"``: rank j gets its shard of the mean over ranks of every layer. ``"all_gather"``: all
    ranks get every layer, of which rank j has its shard. ``compressors[i]`` codes layer i. ``borders[i]``: N + 1
    elements of layer i; rank j's shard begins at element j of them and ends before the next one. By default shards are
    as equal as can be, see :func:`even_borders`. ``average=False``: the sum in place of the mean. ``name`` tells
    requests with equal layers apart.
    """

    kind: str
    layers: tuple[LayerSpec, ...]
    compressors: tuple[Compressor, ...]
    borders: tuple[tuple[int, ...], ...] | None = None
    average: bool = True
    name: str = ""

    @staticmethod
    def of(kind: str, layers: Sequence[LayerSpec], compressor: Compressor, **options: Any) -> Request:
        """All layers by one compressor."""
        return Request(kind, tuple(layers), (compressor,) * len(layers), **options)

    def shards(self, world: int) -> tuple[tuple[int, ...], ...]:
        """The borders among so many ranks."""
        return self.borders or tuple(even_borders(layer.size, world) for layer in self.layers)

    def describe(self, world: int) -> str:
        """A line for the request and one for each layer."""
        by = [compressor.to_string() for compressor in self.compressors] + ["none"] * len(self.layers)
        at = [*self.shards(world), *[()] * len(self.layers)]
        lines = [
            f"{layer.name!r} of {layer.dtype} {list(layer.shape)} by {text}, shards {list(borders)}"
            for layer, text, borders in zip(self.layers, by, at, strict=False)
        ]
        return "\n".join([f"{self.kind} {self.name!r}, average {self.average}", *lines])

    def check(self, world: int) -> None:
        """ConfigError unless it can be done among so many ranks."""
        if self.kind not in _KINDS:
            raise ConfigError(f"a request is one of {', '.join(_KINDS)}, got {self.kind!r}")
        if not self.layers or len(self.compressors) != len(self.layers):
            raise ConfigError(f"{len(self.layers)} layers and {len(self.compressors)} compressors")
        if len(self.layers) > 0xFFFF:
            raise ConfigError(f"{len(self.layers)} layers in one request; at most 65535 are possible")
        check_unique(self.layers)
        borders = self.shards(world)
        for layer, at in zip(self.layers, borders, strict=False):
            if len(at) != world + 1 or at[0] != 0 or at[-1] != layer.size or list(at) != sorted(at):
                raise ConfigError(
                    f"layer {layer.name!r}: borders are {world + 1} ascending elements from 0 to {layer.size}, "
                    f"got {list(at)}"
                )
        if len(borders) != len(self.layers):
            raise ConfigError(f"{len(self.layers)} layers and borders of {len(borders)}")


def even_borders(size: int, world: int) -> tuple[int, ...]:
    """Shards of ``size`` elements: as many, or one fewer than those before."""
    return tuple(j * (size // world) + min(j, size % world) for j in range(world + 1))


class PreparedRequest:
    """A request on one rank: tables, messages and residuals, made once for all runs.

    Round, bytes and arithmetic: :class:`ReduceScatter`, :class:`AllGather`. ``bytes_sent``: by one run, without the
    comparison of calls. State: for compressors with feedback a residual, float32 and double-buffered: of the layers for
    a reduce-scatter, of the rank's shards for an all-gather. A run writes the next residual; :meth:`commit` accepts it,
    :meth:`discard` forgets it, and so does the next run. Ranks that did not do the same raise StateError in that run.
    ``problem``: why the request cannot be run; the runs raise it on all ranks.
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
    ) -> None:
        self.request = request
        self.problem: str | None = None
        #: Runs so far, the same on all ranks; and what became of the last one, for the next to tell the others.
        self.number = 0
        self.outcome = 0
        self.result: RequestResult | None = None
        self.bytes_sent = 0
        self._seed, self._checksums, self._rank, self._world = seed, checksums, rank, world
        try:
            request.check(world)
            self._parts = fixed(_parts(request))
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
        if max(chunks.payload_bytes) > 0xFFFFFFFF:  # what a header can announce
            self.problem = f"payloads of {max(chunks.payload_bytes)} bytes; divide the request into several"
        self._begins, ends = borders[:, rank], borders[:, rank + 1]
        self._sharded: list[Shape] = [
            (int(end - begin),) for begin, end in zip(self._begins, ends, strict=True)
        ]
        self._whole: list[Shape] = [layer.shape for layer in request.layers]
        self._program = _KINDS[request.kind](chunks, rank, world, memory=memory)
        self.bytes_sent = self._program.bytes_sent
        held = np.zeros(len(request.layers), dtype=np.bool_)
        for part in self._parts:
            held[part.group.layers] = part.group.feedback
        sizes = np.array([np.prod(shape, dtype=np.int64) for shape in self.input_shapes])
        #: By layer; of a layer without feedback it is empty.
        self.residuals = DoubleBuffer((sizes * held).tolist())

    @property
    def call(self) -> str:
        """What the ranks compare before a run."""
        return f"{self.text}\nrun {self.number}"

    @property
    def input_shapes(self) -> list[Shape]:
        """Of the arrays that a run is given: whole layers for a reduce-scatter, shards for an all-gather."""
        return self._whole if self.request.kind == REDUCE_SCATTER else self._sharded

    @property
    def output_shapes(self) -> list[Shape]:
        """Of the arrays that it gives."""
        return self._sharded if self.request.kind == REDUCE_SCATTER else self._whole

    @property
    def keeps_state(self) -> bool:
        """Whether some layer has a residual; the same on all ranks."""
        return any(part.group.feedback for part in self._parts)

    def objection(self, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> str | None:
        """Why it cannot be run with these arrays."""
        if self.problem is not None:
            return self.problem
        wrong = self._objection("input", inputs, self.input_shapes)
        return wrong or (None if outputs is None else self._objection("output", outputs, self.output_shapes))

    def _objection(self, what: str, arrays: Sequence[Array], shapes: Sequence[Shape]) -> str | None:
        if len(arrays) != len(shapes):
            return f"{len(arrays)} {what}s for {len(shapes)} layers"
        for layer, array, shape in zip(self.request.layers, arrays, shapes, strict=True):
            dtype, size = DTYPES[DTYPE_NUMBERS[layer.dtype]], np.prod(shape, dtype=np.int64)
            if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
                return (
                    f"layer {layer.name!r}: the {what} is a contiguous array of {size} x {dtype}, "
                    f"got {array.size} x {array.dtype}"
                )
        return None

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> Generator[Framed, None, None]:
        """Exchange once; then ``result`` is there. Inputs stay untouched until then."""
        if self.result is not None:
            self.discard()
        if outputs is None:
            dtypes = [DTYPES[DTYPE_NUMBERS[layer.dtype]] for layer in self.request.layers]
            outputs = [
                np.empty(shape, dtype) for shape, dtype in zip(self.output_shapes, dtypes, strict=True)
            ]
        states = np.full(len(self.request.layers) + 1, PRESENT, dtype=np.uint8)
        states[-1] = self.outcome if self.keeps_state else 0
        flags = BucketFlags(states)
        draw = Draw(self._seed, self.number & 0xFFFFFFFF, self._rank)
        context = StepContext(draw, self._world, average=self.request.average, number=self.number)
        header_id = HeaderId(self._check, self.number, 0, self._checksums)
        binding = self._binding(inputs, outputs)
        found = yield from framed(self._program.run(context, binding, flags), header_id, flags, binding)
        if self.request.kind == ALL_GATHER:  # all ranks have decoded the same codes
            for part, mine in zip(self._parts, found, strict=True):
                flags.states[part.header_index[mine != 0]] |= NONFINITE
        self.number += 1
        self.result = RequestResult(list(outputs), flags.nonfinite, flags.outcomes)

    def commit(self) -> bool:
        """Accept the last run: residuals take their next values; False, on all ranks, if a value was not finite."""
        if self.result is None:
            raise StateError(f"{self.request.kind}: there is no run to commit")
        result, self.result, self.outcome = self.result, None, APPLIED
        if result.finite:
            self.residuals.commit(np.ones(len(self.request.layers), dtype=np.bool_))
        return result.finite

    def discard(self) -> None:
        """Forget the last run: residuals stay what they were."""
        self.result, self.outcome = None, DISCARDED

    def _binding(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> _Arrays:
        begins = np.zeros_like(self._begins)
        read, write = (
            (begins, self._begins) if self.request.kind == REDUCE_SCATTER else (self._begins, begins)
        )
        return _Arrays(_bases(inputs, read), _bases(outputs, write), self.residuals, read)


@dataclass(frozen=True, eq=False)
class RequestResult:
    """What came of a run. ``nonfinite``: layers in which a rank gave a NaN or an infinity; the same on all ranks."""

    arrays: list[Array]
    nonfinite: npt.NDArray[np.bool_]
    outcomes: int

    @property
    def finite(self) -> bool:
        """Whether the run may be committed."""
        return not self.nonfinite.any()

    @property
    def parted(self) -> bool:
        """Whether some ranks committed the run before, and others discarded it."""
        return self.outcomes & (self.outcomes - 1) != 0


@dataclass(frozen=True, eq=False)
class _Arrays:
    """The :class:`gradcomp.reduce.Binding` of one run.

    By layer: where element 0 of inputs and outputs would be, and with which element residuals begin.
    """

    inputs: Addresses
    output: Addresses
    residuals: DoubleBuffer
    begins: Sizes

    def sources(self, table: Table, layers: Sizes, group: Group, offsets: Addresses | None = None) -> None:
        table["gradient"] = self.inputs[layers] + (byte_offsets(table) if offsets is None else offsets)
        if group.feedback:
            starts = table["start"] - self.begins[layers]
            table["residual"], table["next_residual"] = self.residuals.addresses(layers, starts)

    def owned(self, table: Table, rows: Sizes) -> None:
        raise AssertionError("means are not coded again")

    def outputs(self, table: Table, layers: Sizes, offsets: Addresses | None = None) -> None:
        table["output"] = self.output[layers] + (byte_offsets(table) if offsets is None else offsets)

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def _bases(arrays: Sequence[Array], begins: Sizes) -> Addresses:
    """By layer, where element 0 would be; it may be below the array, and wraps."""
    items = np.array([array.itemsize for array in arrays], dtype=np.int64)
    addresses = np.array([array.ctypes.data for array in arrays], dtype=np.uint64)
    return addresses - (begins * items).astype(np.uint64)


def _parts(request: Request) -> list[Part]:
    """The layers of one compressor and dtype together."""
    for layer, compressor in zip(request.layers, request.compressors, strict=True):
        _check_suits(request.kind, layer, compressor)
    pieces = [Piece(i, 0, layer.size) for i, layer in enumerate(request.layers)]
    groups = [
        group_of(members, request.layers, request.compressors)
        for members in by_family(pieces, request.layers, request.compressors)
    ]
    return [Part(_codec(group.compressor, group.table), group, group.layers) for group in groups]


def _codec(compressor: Compressor, table: Table) -> Codec:
    bare = compressor.bare()
    assert isinstance(bare, Coded), "the others are refused"
    return bare.codec_for(table)


def _check_suits(kind: str, layer: LayerSpec, compressor: Compressor) -> None:
    """ConfigError unless the compressor codes the layer's values one by one, without state beside a residual."""
    name, bare = compressor.to_string(), compressor.bare()
    if not isinstance(bare, Coded):
        raise ConfigError(
            f"{kind}: {name} has no codes that a rank could decode alone; a quantiser, cast or none has"
        )
    if compressor.changes or compressor.traits.preconditions or compressor.fields(layer, 0):
        raise ConfigError(
            f"{kind}: {name} has momentum, clipping, a schedule or another state; it needs steps"
        )
    if compressor.traits.follows_rate:
        raise ConfigError(f"{kind}: {name} follows the learning rate, which only steps have")
    if layer.dtype == "float64" and (kind == REDUCE_SCATTER or not bare.traits.exact):
        raise ConfigError(
            f"layer {layer.name!r} is float64, which only travels uncompressed, and is not added here"
        )
